"""What a store across a network needs beside its wire: batches, deadlines, a breaker, and certainty about refused loops.

- **Batches.** Hits that arrive while a round trip is under way go together in the next one, so that the cost of a request falls
  as load rises, and an idle server adds no delay.
- **Deadlines.** No hit waits longer than the timeout, whether for its own round trip or for the one before.
- **Breaker.** The first failure opens it: hits fail at once, the caller counts for itself, and only a probe asks the server,
  until it answers.
- **Certainty.** A loop that is being refused stays refused as long as its window or cooldown lasts, whatever anybody else does.
  While that is certain the answer is given here; the hits are added up and sent as one, ten times a second, so that the window
  is extended, the count rises, and a hammering client does not make its key a hot one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from extproc.errors import StoreError
from extproc.logs import fields
from extproc.metrics import Metrics
from extproc.windows import Count, Hit

_LOG = logging.getLogger("loopguard")
T = TypeVar("T")

MAX_BATCH = 256
"""Hits in one round trip: a script call of that size keeps the server busy for under a millisecond."""

MAX_CERTAIN = 10_000
"""Loops that are answered from memory at once; the oldest makes room."""

_SETTLE_SECONDS = 0.1
_SETTLE_MS = 100
_PROBE_SECONDS = (0.1, 0.25, 0.5, 1.0)
"""Pauses between probes; the last one repeats, so a server that is back is found within two seconds."""

_PROBE_TIMEOUT = 1.0


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
    """The wire to a server; raises StoreError and nothing else."""

    async def count(self, shots: Sequence[Shot]) -> Sequence[Verdict]:
        """Count every shot, in as few round trips as the server allows."""
        ...

    async def probe(self) -> None:
        """Return when the server can count."""
        ...

    async def reset(self) -> None:
        """Drop the connections: what is on them can no longer be told apart."""
        ...

    async def close(self) -> None:
        """Drop the connections for good."""
        ...


class _Waiting(NamedTuple):
    """The hits of one caller, in the queue."""

    shots: Sequence[Shot]
    answers: asyncio.Future[Sequence[Count]]
    arrived: float


class RemoteStore:
    """A store behind a `Backend`; see `Store`."""

    def __init__(self, backend: Backend, metrics: Metrics, timeout: float) -> None:
        """Nothing is connected yet; `timeout` in seconds bounds what a request can wait."""
        self._backend = backend
        self._metrics = metrics
        self._timeout = timeout
        self._queue: list[_Waiting] = []
        self._flight: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None
        self._trouble: StoreError | None = None
        self._certain = _Certain(self._settle)

    async def start(self) -> None:
        """Try the server once, so that a wrong address or password is told at the start and not by the first request."""
        try:
            await self._within(self._backend.probe(), _PROBE_TIMEOUT)
        except StoreError as error:
            self._fail(error)

    def hit(self, hits: Sequence[Hit], now: int | None = None) -> Sequence[Count] | Awaitable[Sequence[Count]]:
        """Count every hit once; answers at once where that is certain.

        Raises:
            StoreError: the breaker is open.
        """
        known = [self._certain.answer(hit) for hit in hits] if now is None else [None] * len(hits)
        asked = [Shot(hit, now=now or 0) for hit, answer in zip(hits, known, strict=True) if answer is None]
        if not asked:
            return [answer for answer in known if answer is not None]
        if self._trouble is not None:
            raise StoreError(str(self._trouble), kind="unavailable", transient=self._trouble.transient)
        answers = self._ask(asked)
        return answers if len(asked) == len(hits) else _merged(known, answers)

    def health(self) -> str:
        """`ok`, or what is wrong."""
        return "ok" if self._trouble is None else f"unavailable: {self._trouble}"

    async def close(self) -> None:
        """Send what is owed, then drop the connections."""
        self._certain.close()
        if self._flight is not None:
            with contextlib.suppress(StoreError):
                await self._within(asyncio.shield(self._flight), self._timeout)
        for task in (self._flight, self._probing):
            if task is not None:
                task.cancel()
        await self._backend.close()

    def _ask(self, shots: Sequence[Shot]) -> asyncio.Future[Sequence[Count]]:
        loop = asyncio.get_running_loop()
        waiting = _Waiting(shots, loop.create_future(), loop.time())
        self._queue.append(waiting)
        if self._flight is None:
            self._flight = loop.create_task(self._fly())
        return waiting.answers

    def _settle(self, hit: Hit, times: int) -> None:
        """Send what was answered from memory."""
        if self._trouble is None:
            self._ask([Shot(hit, times)]).add_done_callback(_ignore)

    async def _fly(self) -> None:
        """Round trips, one after the other, until nobody waits."""
        batch: list[_Waiting] = []
        try:
            while self._queue:
                batch, self._queue = _first(self._queue, MAX_BATCH)
                shots = [shot for waiting in batch for shot in waiting.shots]
                self._metrics.store_batch_size.observe(len(shots))
                left = batch[0].arrived + self._timeout - asyncio.get_running_loop().time()
                verdicts = iter(await self._within(self._backend.count(shots), left))
                for waiting in batch:
                    answers = [self._learn(shot, next(verdicts)) for shot in waiting.shots]
                    if not waiting.answers.done():  # its client may have left
                        waiting.answers.set_result(answers)
        except StoreError as error:
            self._fail(error, batch)
        except Exception as bug:  # noqa: BLE001  # whoever waits must hear of it
            self._fail(StoreError(f"{type(bug).__name__}: {bug}", kind="internal"), batch)
        finally:
            self._flight = None

    def _learn(self, shot: Shot, verdict: Verdict) -> Count:
        if verdict.answer.looping and not shot.now:
            self._certain.learn(shot.hit, verdict)
        return verdict.answer

    async def _within(self, work: Awaitable[T], seconds: float) -> T:
        try:
            async with asyncio.timeout(max(seconds, 0.001)):
                return await work
        except TimeoutError:
            raise StoreError(f"no answer within {self._timeout:g} s", kind="timeout") from None

    def _fail(self, error: StoreError, batch: Sequence[_Waiting] = ()) -> None:
        """Open the breaker: everybody who waits hears the error, and the probe starts."""
        waiting, self._queue = [*batch, *self._queue], []
        for item in waiting:
            if not item.answers.done():
                item.answers.set_exception(error)
        if self._trouble is None:
            _LOG.error("store unavailable, each replica counts for itself", extra=fields(kind=error.kind, error=str(error)))
        self._trouble = error
        if self._probing is None:
            self._probing = asyncio.get_running_loop().create_task(self._probe())

    async def _probe(self) -> None:
        pauses = iter(_PROBE_SECONDS)
        pause = next(pauses)
        while True:
            await self._backend.reset()
            await asyncio.sleep(pause)
            pause = next(pauses, pause)
            try:
                await self._within(self._backend.probe(), _PROBE_TIMEOUT)
            except StoreError as error:
                self._trouble = error
                continue
            break
        self._trouble = None
        self._probing = None
        _LOG.info("store available again")


class _Refusal:
    """What is known about one loop; times in milliseconds of this process's clock."""

    __slots__ = ("cooling_until", "count", "hit", "learned", "owed", "span", "until")

    def __init__(self, hit: Hit) -> None:
        self.hit = hit
        self.owed = 0

    def learn(self, verdict: Verdict, now: int) -> None:
        answer = verdict.answer
        self.count, self.span, self.learned = answer.count, answer.span_ms, now
        self.cooling_until = now + answer.cooldown_ms
        self.until = now + verdict.stands_ms - _SETTLE_MS  # leaves time to send what is owed

    def answer(self, now: int) -> Count:
        count = self.count + self.owed
        if self.hit.window_type == "sliding_log":
            count = min(count, self.hit.count_to)
        return Count(count, looping=True, cooldown_ms=max(0, self.cooling_until - now), span_ms=self.span + now - self.learned)


class _Certain:
    """Loops whose next verdict is certain, answered here while that lasts."""

    def __init__(self, settle: Callable[[Hit, int], None]) -> None:
        """`settle` takes a hit and how often it was answered here."""
        self._settle = settle
        self._known: dict[str, _Refusal] = {}

    def learn(self, hit: Hit, verdict: Verdict) -> None:
        """Remember a looping verdict."""
        now = _now()
        known = self._known.get(hit.key)
        if known is None or known.hit != hit:
            if verdict.stands_ms <= 2 * _SETTLE_MS:
                return
            if len(self._known) >= MAX_CERTAIN:
                del self._known[next(iter(self._known))]
            known = self._known[hit.key] = _Refusal(hit)
        known.learn(verdict, now)

    def answer(self, hit: Hit) -> Count | None:
        """The verdict, if it is certain; the hit is then counted here and settled soon."""
        known = self._known.get(hit.key)
        if known is None:
            return None
        now = _now()
        if now >= known.until or known.hit != hit:  # over, or the policy has changed
            del self._known[hit.key]
            return None
        if hit.count_refused:
            known.owed += 1
            if known.owed == 1:
                asyncio.get_running_loop().call_later(_SETTLE_SECONDS, self._pay, known)
        return known.answer(now)

    def close(self) -> None:
        """Settle everything now."""
        for known in self._known.values():
            self._pay(known)
        self._known.clear()

    def _pay(self, known: _Refusal) -> None:
        owed, known.owed = known.owed, 0
        if owed:
            known.count += owed
            self._settle(known.hit, owed)


def _now() -> int:
    return time.monotonic_ns() // 1_000_000


def _first(queue: list[_Waiting], limit: int) -> tuple[list[_Waiting], list[_Waiting]]:
    """Split the queue: as many callers as fit into `limit` hits, at least one, and the rest."""
    hits = 0
    for position, waiting in enumerate(queue):
        hits += len(waiting.shots)
        if hits > limit and position:
            return queue[:position], queue[position:]
    return queue, []


async def _merged(known: Sequence[Count | None], asked: Awaitable[Sequence[Count]]) -> Sequence[Count]:
    """Answers that were certain, and those that had to be asked for, in the order of the hits."""
    fresh = iter(await asked)
    return [answer if answer is not None else next(fresh) for answer in known]


def _ignore(settled: asyncio.Future[Sequence[Count]]) -> None:
    """Nobody waits for what is settled; its failure has opened the breaker, which is told elsewhere."""
    if not settled.cancelled():
        settled.exception()
