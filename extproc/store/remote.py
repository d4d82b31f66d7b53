"""What a store across a network needs beside its wire: batches, deadlines, a breaker, and certainty about refused loops.

- **Batches.** Hits that arrive while a round trip is under way go together in the next one, so that the cost of a request falls
  as load rises, and an idle server adds no delay.
- **Deadlines.** No hit waits longer than the timeout, whether for its own round trip or for the one before.
- **Breaker.** The first round trip that fails, or that takes longer than the timeout, opens it: hits fail at once, the caller
  counts for itself, and only a probe asks the server, until it answers.
- **Certainty.** See `certain`.

Worst case: a server that hangs costs one timeout for the requests of that moment, then nothing. A request that was sent and not
answered may have counted; it is never sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Iterator, Sequence
from typing import NamedTuple, Protocol

from extproc.errors import StoreError
from extproc.logs import fields
from extproc.metrics import Metrics
from extproc.store.certain import Certain
from extproc.windows import Count, Hit

_LOG = logging.getLogger("loopguard")

MAX_BATCH = 256
"""Hits in one round trip: a script call of that size keeps the server busy for under a millisecond."""

_SECOND_LOOK = 0.002
"""Before a deadline strikes, the event loop gets this long to read answers: it may have been busy while they came."""

_PROBE_SECONDS = (0.0, 0.1, 0.25, 0.5, 1.0)
"""Pauses before probes, none before the first: a connection may be lost for no lasting reason. The last one repeats, so a
server that is back is found within two seconds."""

_PROBE_TIMEOUT = 1.0
_WELL_SECONDS = 10.0
"""A server that failed again sooner than that after it came back is probed as rarely as before."""


class Shot(NamedTuple):
    """What a round trip asks for one key.

    Attributes:
        hit: what to count.
        times: how many requests at once.
        now: milliseconds, for tests; 0 takes the server's clock.
    """

    hit: Hit
    times: int = 1
    now: int = 0


class Verdict(NamedTuple):
    """What the server answers for one key.

    Attributes:
        answer: as every store gives it.
        stands_ms: how long a looping verdict would stand if nothing more were counted, in milliseconds.
    """

    answer: Count
    stands_ms: int


class Backend(Protocol):
    """The wire to a server, for one round trip at a time; raises StoreError and nothing else."""

    async def count(self, shots: Sequence[Shot]) -> Sequence[Verdict]:
        """Count every shot, in as few round trips as the server allows."""
        ...

    async def probe(self) -> None:
        """Return when the server can count."""
        ...

    def drop(self) -> None:
        """Drop the connections: what is on them can no longer be told apart. They open again when needed."""
        ...


class _Waiting(NamedTuple):
    """The hits of one caller."""

    shots: Sequence[Shot]
    answers: asyncio.Future[Sequence[Count]]
    deadline: float


class _Flight(NamedTuple):
    """A round trip under way."""

    backend: Backend
    batch: Sequence[_Waiting]
    shots: Sequence[Shot]
    deadline: float


class RemoteStore:
    """A store behind a `Backend`; see `Store`."""

    def __init__(self, backends: Sequence[Backend], metrics: Metrics, timeout: float) -> None:
        """Nothing is connected yet.

        Args:
            backends: as many round trips may be under way at once; all lead to the same server.
            metrics: is told of batches and failures.
            timeout: bounds what a request can wait, in seconds.
        """
        self._backends = backends
        self._idle = list(backends)
        self._metrics = metrics
        self._timeout = timeout
        self._queue: list[_Waiting] = []
        self._flights: dict[asyncio.Task[Sequence[Verdict]], _Flight] = {}
        self._departing = False
        self._clock: asyncio.TimerHandle | None = None
        self._trouble: StoreError | None = None
        self._probing: asyncio.Task[None] | None = None
        self._pauses: Iterator[float] = iter(())
        self._well_since = float("-inf")
        self._certain = Certain(self._settle)

    async def start(self) -> None:
        """Try the server once, so that a wrong address or password is told at the start and not by the first request."""
        try:
            await _tried(self._backends[0])
        except StoreError as error:
            self._fail(error)

    def hit(self, hits: Sequence[Hit], now: int | None = None) -> Sequence[Count] | Awaitable[Sequence[Count]]:
        """Count every hit once; answers at once where that is certain.

        Raises:
            StoreError: the breaker is open.
        """
        known = [self._certain.answer(hit) for hit in hits] if now is None else [None] * len(hits)
        asked = [Shot(hit, 1, now or 0) for hit, answer in zip(hits, known, strict=True) if answer is None]
        if not asked:
            return [answer for answer in known if answer is not None]
        if self._trouble is not None:
            raise _unavailable(self._trouble)
        answers = self._ask(asked)
        return answers if len(asked) == len(hits) else _merged(known, answers)

    def health(self) -> str:
        """`ok`, or what is wrong."""
        return "ok" if self._trouble is None else f"unavailable: {self._trouble}"

    async def close(self) -> None:
        """Send what is owed, then drop the connections."""
        self._certain.close()
        while self._trouble is None and (self._queue or self._flights):  # their deadlines bound this
            if self._flights:
                await asyncio.wait(list(self._flights), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)
        self._trouble = self._trouble or StoreError("closed", kind="closed")
        if self._probing is not None:
            self._probing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._probing
        if self._clock is not None:
            self._clock.cancel()
        for backend in self._backends:
            backend.drop()

    def _ask(self, shots: Sequence[Shot]) -> asyncio.Future[Sequence[Count]]:
        loop = asyncio.get_running_loop()
        waiting = _Waiting(shots, loop.create_future(), loop.time() + self._timeout)
        self._queue.append(waiting)
        if self._idle and not self._departing:  # after whatever else is ready just now: it may have hits as well
            self._departing = True
            loop.call_soon(self._depart)
        return waiting.answers

    def _settle(self, hit: Hit, times: int) -> None:
        """Send what was answered from memory."""
        if self._trouble is None:
            self._ask([Shot(hit, times)])

    def _depart(self) -> None:
        """Send those who wait, as far as there is a connection free."""
        self._departing = False
        while self._queue and self._idle:
            batch = self._boarding()
            shots = [shot for waiting in batch for shot in waiting.shots]
            if not shots:
                continue
            self._metrics.store_batch_size.observe(len(shots))
            loop = asyncio.get_running_loop()
            backend = self._idle.pop()
            task = loop.create_task(backend.count(shots))
            self._flights[task] = _Flight(backend, batch, shots, loop.time() + self._timeout)
            task.add_done_callback(self._landed)
            self._watch()

    def _boarding(self) -> Sequence[_Waiting]:
        """Take those who go next: up to `MAX_BATCH` hits, without those who have been told that it took too long."""
        hits = 0
        for position, waiting in enumerate(self._queue):
            hits += len(waiting.shots)
            if hits > MAX_BATCH and position:
                batch, self._queue = self._queue[:position], self._queue[position:]
                break
        else:
            batch, self._queue = self._queue, []
        return [waiting for waiting in batch if not waiting.answers.done() or waiting.answers.cancelled()]

    def _landed(self, task: asyncio.Task[Sequence[Verdict]]) -> None:
        flight = self._flights.pop(task, None)
        if flight is None:  # given up
            if not task.cancelled():
                task.exception()
            return
        self._idle.append(flight.backend)
        error = _failure(task)
        if error is not None:
            self._fail(error, flight.batch)
            return
        verdicts = iter(task.result())
        for waiting in flight.batch:
            answers = [self._learn(shot, next(verdicts)) for shot in waiting.shots]
            if not waiting.answers.done():  # its client may have left
                waiting.answers.set_result(answers)
        self._depart()

    def _learn(self, shot: Shot, verdict: Verdict) -> Count:
        if not shot.now:
            self._certain.learn(shot.hit, verdict.answer, verdict.stands_ms)
        return verdict.answer

    def _watch(self) -> None:
        """Be back at the first deadline."""
        if self._clock is None:
            first = [flight.deadline for flight in self._flights.values()]
            first += [waiting.deadline for waiting in self._outstanding() if not waiting.answers.done()][:1]
            if first:
                loop = asyncio.get_running_loop()
                self._clock = loop.call_at(min(first) - _SECOND_LOOK, loop.call_later, _SECOND_LOOK, self._expire)

    def _expire(self) -> None:
        """Tell those whose time is up; a round trip that takes too long is a failure of the server."""
        self._clock = None
        now = asyncio.get_running_loop().time()
        error = StoreError(f"no answer within {self._timeout:g} s", kind="timeout")
        if any(flight.deadline <= now for flight in self._flights.values()):
            self._fail(error)
            return
        for waiting in self._outstanding():
            if waiting.deadline <= now:
                _tell(waiting, StoreError(str(error), kind=error.kind))
        self._watch()

    def _outstanding(self) -> Iterator[_Waiting]:
        """Everybody who waits, roughly in the order of their deadlines."""
        for flight in self._flights.values():
            yield from flight.batch
        yield from self._queue

    def _fail(self, error: StoreError, batch: Sequence[_Waiting] = ()) -> None:
        """Open the breaker: everybody who waits hears of it, and the probe starts."""
        self._metrics.store_errors.labels(error.kind).inc()
        for waiting in (*batch, *self._outstanding()):
            _tell(waiting, _unavailable(error))
        flights, self._flights, self._queue = self._flights, {}, []
        for task in flights:
            task.cancel()
        self._idle = list(self._backends)
        if self._trouble is None:
            _LOG.error("store unavailable, each replica counts for itself", extra=fields(kind=error.kind, error=str(error)))
        self._trouble = error
        if self._probing is None:
            self._probing = asyncio.get_running_loop().create_task(self._probe())

    async def _probe(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() > self._well_since + _WELL_SECONDS:
            self._pauses = iter(_PROBE_SECONDS)
        while True:
            for backend in self._backends:
                backend.drop()
            await asyncio.sleep(next(self._pauses, _PROBE_SECONDS[-1]))
            try:
                await _tried(self._backends[0])
            except StoreError as error:
                self._metrics.store_errors.labels(error.kind).inc()
                self._trouble = error
            else:
                break
        self._well_since = loop.time()
        self._trouble = self._probing = None
        _LOG.info("store available again")


async def _tried(backend: Backend) -> None:
    """Probe once, within bounds.

    Raises:
        StoreError: the server cannot count.
    """
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT):
            await backend.probe()
    except StoreError:
        raise
    except TimeoutError:
        raise StoreError(f"no answer within {_PROBE_TIMEOUT:g} s", kind="timeout") from None
    except Exception as bug:  # the prober must outlive it
        raise _internal(bug) from bug


def _failure(task: asyncio.Task[Sequence[Verdict]]) -> StoreError | None:
    """Why a round trip failed, None when it did not."""
    if task.cancelled():
        return StoreError("the connection was dropped", kind="connection")
    error = task.exception()
    return error if error is None or isinstance(error, StoreError) else _internal(error)


def _internal(bug: BaseException) -> StoreError:
    return StoreError(f"{type(bug).__name__}: {bug}", kind="internal")


def _unavailable(trouble: StoreError) -> StoreError:
    """What a request hears, an error of its own: one that is raised again and again would grow with every traceback."""
    return StoreError(str(trouble), kind="unavailable", transient=trouble.transient)


def _tell(waiting: _Waiting, error: StoreError) -> None:
    if not waiting.answers.done():
        waiting.answers.set_exception(error)
        waiting.answers.exception()  # nobody may be there to hear it, which is no reason for asyncio to complain


async def _merged(known: Sequence[Count | None], asked: Awaitable[Sequence[Count]]) -> Sequence[Count]:
    """Answers that were certain, and those that had to be asked for, in the order of the hits."""
    fresh = iter(await asked)
    return [answer if answer is not None else next(fresh) for answer in known]
