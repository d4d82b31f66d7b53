"""What a store across a network needs beside its wire: batches, deadlines, a breaker, and certainty about refused loops.

- **Batches.** Calls that arrive while a round trip is under way go together in the next one, which under load waits a few
  milliseconds for more of them. The cost of a request falls as load rises, and an idle server adds no delay.
- **Deadlines.** No call waits longer than the timeout, whether for its own round trip or for the one before.
- **Breaker.** The first round trip that fails, or that takes longer than the timeout, opens it: calls fail at once, the caller
  counts for itself, and only a probe asks the server, until it answers.
- **Certainty.** See `certain`.

Worst case: a server that hangs costs one timeout for the requests of that moment, then nothing. A request that was sent and not
answered may have counted; it is never sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

from extproc.errors import StoreError
from extproc.ledger import Question
from extproc.logs import make_extra
from extproc.metrics import Metrics
from extproc.store.aside import Aside
from extproc.store.certain import Certain
from extproc.store.orders import Orders
from extproc.store.pending import Pending
from extproc.store.remote_boards import RemoteBoards
from extproc.store.remote_orders import RemoteOrders
from extproc.store.scripts import Call, Verdict, count_call, push_call, session_call
from extproc.windows import Count, Hit, Push

_LOG = logging.getLogger("loopguard")

MAX_BATCH = 256
"""Calls in one round trip: a script call of that size keeps the server busy for under a millisecond."""

_GATHER_SECONDS = 0.0002
_GATHER_AT_MOST = 0.004
"""From one round trip to the next for each caller that shared the last one, and in all. A round trip costs as much as twenty of
its calls, so that from some 5,000 requests a second on they gather; below that nobody waits for others."""

_SECOND_LOOK = 0.002
"""Before a deadline strikes, the event loop gets this long to read answers: it may have been busy while they came."""

_LAST_LOOK = 0.001
"""How often a store that closes looks whether what is owed has been sent."""

_PROBE_SECONDS = (0.0, 0.1, 0.25, 0.5, 1.0)
"""Pauses before probes, none before the first: a connection may be lost for no lasting reason. The last one repeats, so a
server that is back is found within two seconds."""

_PROBE_TIMEOUT = 1.0
_WELL_SECONDS = 10.0
"""A server that failed again sooner than that after it came back is probed as rarely as before."""


class Backend(Protocol):
    """The wire to a server, for one round trip at a time; what goes wrong is a StoreError and nothing else."""

    def call(self, calls: list[Call]) -> Pending:
        """Make every call once, in as few round trips as the server allows; a list of what their scripts make of the answers.

        Whoever cancels it does not want to wait any more, and drops the connections.
        """
        ...

    async def probe(self) -> None:
        """Return when the server can count."""
        ...

    async def drop(self) -> None:
        """Drop the connections: what is on them can no longer be told apart. They open again when needed."""
        ...


_Finish: TypeAlias = Callable[[list[Call], list[Any]], Any]


class _Waiting(Pending):
    """What one caller waits for.

    Attributes:
        calls: what is asked.
        finish: makes the caller's answer of the calls and theirs.
        deadline: in seconds of the event loop's clock.
    """

    __slots__ = ("calls", "deadline", "finish")

    def __init__(self, calls: list[Call], finish: _Finish, deadline: float) -> None:
        super().__init__()
        self.calls = calls
        self.finish = finish
        self.deadline = deadline


class _Flight:
    """The round trip under way."""

    __slots__ = ("batch", "deadline", "trip")

    def __init__(self, trip: Pending, batch: list[_Waiting], deadline: float) -> None:
        self.trip = trip
        self.batch = batch
        self.deadline = deadline


class RemoteStore:
    """A store behind a `Backend`; see `Store`."""

    def __init__(self, backend: Backend, aside: Aside, metrics: Metrics, timeout: float) -> None:
        """Nothing is connected yet.

        Args:
            backend: makes the round trips.
            aside: asks what no request waits for.
            metrics: is told of batches and failures.
            timeout: bounds what a request can wait, in seconds.
        """
        self._backend = backend
        self._aside = aside
        self._boards = RemoteBoards(aside)
        self._orders = RemoteOrders(aside)
        self._metrics = metrics
        self._timeout = timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queue: list[_Waiting] = []
        self._flight: _Flight | None = None
        self._departing = False
        self._departed = float("-inf")
        self._pause = 0.0  # until the next round trip, in seconds
        self._clock: asyncio.TimerHandle | None = None
        self._trouble: StoreError | None = None
        self._probing: asyncio.Task[None] | None = None
        self._pauses: Iterator[float] = iter(())
        self._well_since = float("-inf")
        self._certain = Certain(self._settle)
        self._finish: _Finish = self._learn  # a method that is looked up for each hit is made for each hit

    async def start(self) -> None:
        """Try the server once, so that a wrong address or password is told at the start and not by the first request."""
        try:
            await _try_backend(self._backend)
        except StoreError as error:
            self._fail(error)

    def hit(self, hits: Sequence[Question], now: int | None = None) -> list[Any] | Awaitable[list[Any]]:
        """Count every hit once; answers at once where that is certain.

        Raises:
            StoreError: the breaker is open.
        """
        if now is not None:
            return self._ask([self._make_call(hit, now) for hit in hits], _take_answers)
        if not self._certain.knows_any:
            return self._ask([self._make_call(hit, None) for hit in hits], self._finish)
        known = [self._certain.answer(hit) if isinstance(hit, Hit) else None for hit in hits]
        asked = [self._make_call(hit, None) for place, hit in enumerate(hits) if known[place] is None]
        if not asked:
            return known
        counts = self._ask(asked, self._finish)
        return counts if len(asked) == len(hits) else _merge(known, counts)

    def push(
        self, pushes: Sequence[Push], now: int | None = None
    ) -> Sequence[Sequence[bytes]] | Awaitable[Sequence[Sequence[bytes]]]:
        """Push every entry once.

        Raises:
            StoreError: the breaker is open.
        """
        return self._ask([push_call(pushed, now) for pushed in pushes], _take_all) if pushes else []

    async def publish(self, board: str, replica: str, document: bytes, seconds: float, now: int | None = None) -> None:
        """See `Store`."""
        self._check_open()
        await self._boards.publish(board, replica, document, int(seconds * 1000), now)

    async def collect(self, board: str, now: int | None = None) -> dict[str, bytes]:
        """See `Store`."""
        self._check_open()
        return await self._boards.collect(board, now)

    async def put_order(self, book: str, name: str, document: bytes, seconds: float, now: int | None = None) -> None:
        """See `Store`."""
        self._check_open()
        await self._orders.put(book, name, document, int(seconds * 1000), now)

    async def drop_order(self, book: str, name: str, now: int | None = None) -> bool:
        """See `Store`."""
        self._check_open()
        return await self._orders.drop(book, name, now)

    async def read_orders(self, book: str, known: str, now: int | None = None) -> Orders | None:
        """See `Store`."""
        self._check_open()
        return await self._orders.read(book, known, now)

    async def share_secret(self, name: str, secret: bytes) -> bytes:
        """See `Store`."""
        self._check_open()
        key = self._aside.name_key("secret", name)
        _, found = await self._aside.ask(name, [("SET", key, secret, "NX"), ("GET", key)])
        if not isinstance(found, bytes) or len(found) != len(secret):
            raise StoreError(f"what the server has as {key} is no secret of {len(secret)} bytes", kind="response")
        return found

    def health(self) -> str:
        """`ok`, or what is wrong."""
        return "ok" if self._trouble is None else f"unavailable: {self._trouble}"

    async def close(self) -> None:
        """Send what is owed, then drop the connections."""
        self._certain.close()
        while self._trouble is None and (self._queue or self._flight):  # noqa: ASYNC110  # for as long as a deadline at most
            await asyncio.sleep(_LAST_LOOK)
        self._trouble = self._trouble or StoreError("closed", kind="closed")
        if self._probing is not None:
            self._probing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._probing
        if self._clock is not None:
            self._clock.cancel()
        await self._backend.drop()
        await self._aside.drop()

    def _check_open(self) -> None:
        """Ask nothing of a server that is away.

        Raises:
            StoreError: the breaker is open.
        """
        if self._trouble is not None:
            raise _make_unavailable(self._trouble)

    def _ask(self, calls: list[Call], finish: _Finish) -> Pending:
        """Have calls made with the next round trip.

        Raises:
            StoreError: the breaker is open.
        """
        self._check_open()
        loop = self._loop
        if loop is None:  # to ask asyncio is a call of the system, each time
            loop = self._loop = asyncio.get_running_loop()
        waiting = _Waiting(calls, finish, loop.time() + self._timeout)
        self._queue.append(waiting)
        if self._flight is None and not self._departing:
            self._call_departure(loop)
        return waiting

    def _call_departure(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let those who wait go, after whatever else is ready just now: it may have calls as well."""
        if self._queue and self._flight is None and not self._departing:
            self._departing = True
            if self._pause:
                loop.call_at(self._departed + self._pause, self._depart)
            else:
                loop.call_soon(self._depart)

    def _settle(self, hit: Hit, times: int) -> None:
        """Send what was answered from memory."""
        if self._trouble is None:
            self._ask([count_call(hit, 0, None, times)], self._finish)

    def _make_call(self, asked: Question, now: int | None) -> Call:
        if isinstance(asked, Hit):
            return count_call(asked, 1, now, self._certain.take_owed(asked))
        return session_call(asked, now)

    def _learn(self, calls: list[Call], answers: list[Any]) -> list[Any]:
        for place, call in enumerate(calls):
            answer, subject = answers[place], call.subject
            if isinstance(answer, Verdict) and isinstance(subject, Hit):
                self._certain.learn(subject, answer.answer, answer.stands_ms, call.owed)
                answers[place] = answer.answer
        return answers

    def _depart(self) -> None:
        """Send those who wait, unless a round trip is under way."""
        self._departing = False
        while self._queue and self._flight is None:
            batch = self._board()
            if batch:
                calls = [call for waiting in batch for call in waiting.calls]
                self._metrics.store_batch_size.observe(len(calls))
                loop = asyncio.get_running_loop()
                self._departed = loop.time()
                self._pause = min(_GATHER_AT_MOST, _GATHER_SECONDS * len(batch)) if len(batch) > 1 else 0.0
                trip = self._backend.call(calls)
                flight = self._flight = _Flight(trip, batch, self._departed + self._timeout)
                if trip.done:
                    self._land(flight)
                else:
                    trip.then(partial(self._land, flight))
                    self._watch()

    def _board(self) -> list[_Waiting]:
        """Take those who go next: up to `MAX_BATCH` calls, without those who have been told that it took too long."""
        calls = 0
        for position, waiting in enumerate(self._queue):
            calls += len(waiting.calls)
            if calls > MAX_BATCH and position:
                batch, self._queue = self._queue[:position], self._queue[position:]
                break
        else:
            batch, self._queue = self._queue, []
        return [waiting for waiting in batch if not waiting.done or waiting.cancelled]

    def _land(self, flight: _Flight) -> None:
        """Tell those who waited, in one turn of the event loop, so that what they make of it leaves together."""
        self._flight = None
        if flight.trip.error is not None:
            self._fail(flight.trip.error, flight.batch)
            return
        answers, taken = flight.trip.result(), 0
        for waiting in flight.batch:
            until = taken + len(waiting.calls)
            try:
                waiting.settle(waiting.finish(waiting.calls, answers[taken:until]))
            except Exception as bug:  # noqa: BLE001  # the others' answers are good
                waiting.settle(None, blame_bug(bug))
            taken = until
        self._call_departure(asyncio.get_running_loop())

    def _watch(self) -> None:
        """Be back at the first deadline."""
        if self._clock is None:
            first = [self._flight.deadline] if self._flight is not None else []
            first += [waiting.deadline for waiting in self._list_waiting() if not waiting.done][:1]
            if first:
                loop = asyncio.get_running_loop()
                self._clock = loop.call_at(min(first) - _SECOND_LOOK, loop.call_later, _SECOND_LOOK, self._expire)

    def _expire(self) -> None:
        """Tell those whose time is up; a round trip that takes too long is a failure of the server."""
        self._clock = None
        now = asyncio.get_running_loop().time()
        error = StoreError(f"no answer within {self._timeout:g} s", kind="timeout")
        if self._flight is not None and self._flight.deadline <= now:
            self._fail(error)
            return
        for waiting in self._list_waiting():
            if waiting.deadline <= now:
                waiting.settle(None, StoreError(str(error), kind=error.kind))
        self._watch()

    def _list_waiting(self) -> Sequence[_Waiting]:
        """Everybody who waits, in the order of their deadlines."""
        return [*(self._flight.batch if self._flight is not None else ()), *self._queue]

    def _fail(self, error: StoreError, batch: Sequence[_Waiting] = ()) -> None:
        """Open the breaker: everybody who waits hears of it, and the probe starts."""
        self._metrics.store_errors.labels(error.kind).inc()
        told = (*batch, *self._list_waiting())
        flight, self._flight, self._queue = self._flight, None, []
        if flight is not None:
            flight.trip.cancel()
        if self._trouble is None:
            _LOG.error("store unavailable, each replica counts for itself", extra=make_extra(kind=error.kind, error=str(error)))
        self._trouble = error
        self._certain.forget_told()
        if self._probing is None:
            self._probing = asyncio.get_running_loop().create_task(self._probe())
        for waiting in told:
            waiting.settle(None, _make_unavailable(error))

    async def _probe(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() > self._well_since + _WELL_SECONDS:
            self._pauses = iter(_PROBE_SECONDS)
        while True:
            await self._backend.drop()
            await asyncio.sleep(next(self._pauses, _PROBE_SECONDS[-1]))
            try:
                await _try_backend(self._backend)
            except StoreError as error:
                self._metrics.store_errors.labels(error.kind).inc()
                self._trouble = error
            else:
                break
        self._well_since = loop.time()
        self._trouble = self._probing = None
        _LOG.info("store available again")


async def _try_backend(backend: Backend) -> None:
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
        raise blame_bug(bug) from bug


def blame_bug(bug: BaseException) -> StoreError:
    """What is said of an error of ours."""
    return StoreError(f"{type(bug).__name__}: {bug}", kind="internal")


def _make_unavailable(trouble: StoreError) -> StoreError:
    """What a request hears, an error of its own: one that is raised again and again would grow with every traceback."""
    return StoreError(str(trouble), kind="unavailable")


def _take_answers(_: list[Call], answers: list[Any]) -> list[Any]:
    for place, answer in enumerate(answers):
        if isinstance(answer, Verdict):
            answers[place] = answer.answer
    return answers


def _take_all(_: list[Call], answers: list[Any]) -> list[Any]:
    return answers


async def _merge(known: list[Count | None], asked: Awaitable[list[Any]]) -> list[Any]:
    """Answers that were certain, and those that had to be asked for, in the order of the hits."""
    fresh = iter(await asked)
    return [answer if answer is not None else next(fresh) for answer in known]
