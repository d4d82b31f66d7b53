"""One server of a remote store: batches, deadlines, a circuit breaker.

- **Batches.** Calls that arrive during a round trip go together in the next one, which under load
  waits a few milliseconds for more of them. The cost of a request falls as load rises, and an idle
  server adds no delay.
- **Deadlines.** No call waits longer than the timeout, whether for its own round trip or for the
  one before.
- **Breaker.** The first round trip that fails or exceeds the timeout opens it. Calls then fail at
  once, so the caller counts locally. Only probes reach the server until one of them succeeds.

Worst case: a server that hangs delays the requests of that moment by one timeout, and no later
ones. A request that was sent but not answered may have counted, and is never sent again. Other
shards are unaffected: each has its own queue and connections.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

from extproc.errors import StoreError
from extproc.logs import make_extra
from extproc.metrics import Metrics
from extproc.store.backend import RedisBackend
from extproc.store.link import explain_bug
from extproc.store.pending import Pending
from extproc.store.scripts import ScriptCall

_LOG = logging.getLogger("loopguard")

MAX_BATCH = 256
"""Maximum number of calls in a round trip."""

_GATHER_SECONDS = 0.0002
_GATHER_AT_MOST = 0.004
"""The pause between two round trips, in seconds, per caller and shard; and the maximum.

The callers are spread over the shards. A round trip costs as much as twenty of its calls, so
gathering pays above some 5,000 requests a second. Below that, no call waits for others.
"""

_SECOND_LOOK = 0.002
"""After a deadline, the event loop has this many seconds to read answers that have arrived."""

_LAST_LOOK = 0.001
"""A closing shard checks at this interval, in seconds, whether all calls are done."""

_PROBE_SECONDS = (0.0, 0.1, 0.25, 0.5, 1.0)
"""Pauses before probes, in seconds.

The first probe starts at once, because the failure may be brief. The last pause repeats, so a
server that is back is found within two seconds.
"""

_PROBE_TIMEOUT = 1.0
_WELL_SECONDS = 10.0
"""A server that fails within this many seconds after its recovery keeps its longer pauses."""

_UNASSIGNED = "unassigned"
"""The name of the shard for keys whose server is unknown."""


Finish: TypeAlias = Callable[[list[ScriptCall], list[Any]], Any]


class _Caller(Pending):
    """One caller, which waits until `deadline`; `finish` makes its answer."""

    def __init__(self, calls: list[ScriptCall], finish: Finish, deadline: float) -> None:
        super().__init__()
        self.calls = calls
        self.finish = finish
        self.deadline = deadline


class _RoundTrip:
    def __init__(self, replies: Pending, batch: list[_Caller], deadline: float) -> None:
        self.replies = replies
        self.batch = batch
        self.deadline = deadline


class Shard:
    """One server of a store.

    `trouble` is why it is unavailable; `sharing` is the number of shards of the store.
    """

    def __init__(  # noqa: PLR0913  # the parts of a shard
        self,
        name: str,
        backend: RedisBackend,
        metrics: Metrics,
        timeout: float,
        on_lost: Callable[[Shard], None],
        *,
        alone: bool,
    ) -> None:
        """Start without connections.

        `name` is empty for keys whose server is unknown; an opening breaker calls `on_lost`.
        """
        self.trouble: StoreError | None = None
        self.sharing = 1
        self.name = name or _UNASSIGNED
        self._what = "store" if alone or not name else "shard of the store"
        self._backend = backend
        self._metrics = metrics
        self._timeout = timeout
        self._on_lost = on_lost
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queue: list[_Caller] = []
        self._round_trip: _RoundTrip | None = None
        self._scheduled = False
        self._sent_at = float("-inf")
        self._pause = 0.0  # before the next round trip, in seconds
        self._clock: asyncio.TimerHandle | None = None
        self._probing: asyncio.Task[None] | None = None
        self._pauses: Iterator[float] = iter(())
        self._well_since = float("-inf")
        self._closed = False

    async def start(self) -> None:
        """Try the server once, so that a wrong address or password is reported now."""
        try:
            await _try_backend(self._backend)
        except StoreError as error:
            self._fail(error)

    def check_open(self) -> None:
        """Raise StoreError while the breaker is open."""
        if self.trouble is not None:
            raise _make_unavailable(self.trouble)

    def ask(self, calls: list[ScriptCall], finish: Finish) -> Pending:
        """Add calls to the next round trip, and make an answer with `finish`; raises StoreError."""
        self.check_open()
        loop = self._loop
        if loop is None:  # asyncio would make a system call each time
            loop = self._loop = asyncio.get_running_loop()
        waiting = _Caller(calls, finish, loop.time() + self._timeout)
        self._queue.append(waiting)
        if self._round_trip is None and not self._scheduled:
            self._schedule(loop)
        return waiting

    async def retire(self) -> None:
        """Close, because all keys have moved; calls under way still get their answers."""
        if self.trouble is not None:
            self._recover()
        await self.close()

    async def close(self) -> None:
        """Send waiting calls, then drop the connections."""
        self._closed = True
        # At most until a deadline
        while self.trouble is None and (self._queue or self._round_trip):  # noqa: ASYNC110
            await asyncio.sleep(_LAST_LOOK)
        self.trouble = self.trouble or StoreError("closed", kind="closed")
        if (probing := self._probing) is not None:
            while not probing.done():  # a library may swallow a cancellation
                probing.cancel()
                await asyncio.wait([probing], timeout=_PROBE_TIMEOUT)
        if self._clock is not None:
            self._clock.cancel()
        self._backend.drop()

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send waiting calls after the tasks that are ready now, because these may add calls."""
        if self._queue and self._round_trip is None and not self._scheduled:
            self._scheduled = True
            if self._pause:
                loop.call_at(self._sent_at + self._pause, self._send_batch)
            else:
                loop.call_soon(self._send_batch)

    def _send_batch(self) -> None:
        self._scheduled = False
        while self._queue and self._round_trip is None:
            batch = self._take_batch()
            if batch:
                calls = [call for waiting in batch for call in waiting.calls]
                self._metrics.store_batch_size.observe(len(calls))
                loop = asyncio.get_running_loop()
                self._sent_at = loop.time()
                self._pause = (
                    min(_GATHER_AT_MOST, _GATHER_SECONDS * len(batch) * self.sharing)
                    if len(batch) > 1
                    else 0.0
                )
                replies = self._backend.call(calls)
                round_trip = self._round_trip = _RoundTrip(
                    replies, batch, self._sent_at + self._timeout
                )
                if replies.done:
                    self._finish_batch(round_trip)
                else:
                    replies.then(partial(self._finish_batch, round_trip))
                    self._watch()

    def _take_batch(self) -> list[_Caller]:
        """Take the next callers: up to `MAX_BATCH` calls, without callers that timed out."""
        calls = 0
        for position, waiting in enumerate(self._queue):
            calls += len(waiting.calls)
            if calls > MAX_BATCH and position:
                batch, self._queue = self._queue[:position], self._queue[position:]
                break
        else:
            batch, self._queue = self._queue, []
        return [waiting for waiting in batch if not waiting.done or waiting.cancelled]

    def _finish_batch(self, round_trip: _RoundTrip) -> None:
        """Answer all callers at once, so that their answers to Envoy are sent together."""
        self._round_trip = None
        if round_trip.replies.error is not None:
            self._fail(round_trip.replies.error, round_trip.batch)
            return
        answers, taken = round_trip.replies.result(), 0
        for waiting in round_trip.batch:
            until = taken + len(waiting.calls)
            try:
                waiting.settle(waiting.finish(waiting.calls, answers[taken:until]))
            except Exception as bug:  # noqa: BLE001  # the other answers are valid
                waiting.settle(None, explain_bug(bug))
            taken = until
        self._schedule(asyncio.get_running_loop())

    def _watch(self) -> None:
        if self._clock is None:
            first = [self._round_trip.deadline] if self._round_trip is not None else []
            first += [waiting.deadline for waiting in self._list_waiting() if not waiting.done][:1]
            if first:
                loop = asyncio.get_running_loop()
                self._clock = loop.call_at(
                    min(first) - _SECOND_LOOK, loop.call_later, _SECOND_LOOK, self._expire
                )

    def _expire(self) -> None:
        """Fail callers whose deadline has passed; a slow round trip is a failure of the server."""
        self._clock = None
        now = asyncio.get_running_loop().time()
        error = StoreError(f"no answer within {self._timeout:g} s", kind="timeout")
        if self._round_trip is not None and self._round_trip.deadline <= now:
            self._fail(error)
            return
        for waiting in self._list_waiting():
            if waiting.deadline <= now:
                waiting.settle(None, StoreError(str(error), kind=error.kind))
        self._watch()

    def _list_waiting(self) -> Sequence[_Caller]:
        return [*(self._round_trip.batch if self._round_trip is not None else ()), *self._queue]

    def _fail(self, error: StoreError, batch: Sequence[_Caller] = ()) -> None:
        """Open the breaker: fail all waiting callers, and start the probe."""
        self._metrics.store_errors.labels(error.kind).inc()
        told = (*batch, *self._list_waiting())
        round_trip, self._round_trip, self._queue = self._round_trip, None, []
        if round_trip is not None:
            round_trip.replies.cancel()
        if self.trouble is None:
            extra = make_extra(shard=self.name, kind=error.kind, error=str(error))
            _LOG.error(f"{self._what} unavailable, each replica counts separately", extra=extra)
        self.trouble = error
        self._on_lost(self)
        if self._probing is None and not self._closed:
            self._probing = asyncio.get_running_loop().create_task(self._probe())
        for waiting in told:
            waiting.settle(None, _make_unavailable(error))

    async def _probe(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() > self._well_since + _WELL_SECONDS:
            self._pauses = iter(_PROBE_SECONDS)
        while True:
            self._backend.drop()
            await asyncio.sleep(next(self._pauses, _PROBE_SECONDS[-1]))
            try:
                await _try_backend(self._backend)
            except StoreError as error:
                self._metrics.store_errors.labels(error.kind).inc()
                self.trouble = error
            else:
                break
        self._well_since = loop.time()
        self._probing = None
        self._recover()

    def _recover(self) -> None:
        self.trouble = None
        _LOG.info(f"{self._what} available again", extra=make_extra(shard=self.name))


async def _try_backend(backend: RedisBackend) -> None:
    """Probe once, with a deadline; raises StoreError if the server cannot count."""
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT):
            await backend.probe()
    except StoreError:
        raise
    except TimeoutError:
        raise StoreError(f"no answer within {_PROBE_TIMEOUT:g} s", kind="timeout") from None
    except Exception as bug:  # the prober must survive
        raise explain_bug(bug) from bug


def _make_unavailable(trouble: StoreError) -> StoreError:
    """Make an error for each request: the traceback of a shared one would grow."""
    return StoreError(str(trouble), kind="unavailable")
