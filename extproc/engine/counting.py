"""Asks the store to count a lane of a request, and counts in a window local to this process while the store cannot.

What sessions keep of a request goes to the store first, in one step for the whole lane. The answer waits for that where some
verdict depends on what earlier requests have left; else nobody does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from time import perf_counter
from types import NoneType
from typing import Any, Final, TypeAlias, cast

from extproc.engine.candidates import Answer
from extproc.engine.evaluation import Lane
from extproc.errors import PartlyAwayError, StoreError
from extproc.metrics import Metrics
from extproc.store import Store
from extproc.store.memory import MemoryStore
from extproc.store.pending import Pending
from extproc.store.rules.ring import Push
from extproc.store.rules.session import Settlement

Counts: TypeAlias = list[Answer] | tuple[Answer, ...] | None
"""Of a lane's hits; None when they could not be had and `--on-store-error reject` wants that refused."""


Rings: TypeAlias = Sequence[Sequence[bytes]]
"""What sessions have kept, an answer to each of a lane's pushes."""

HERE: Final = (list, tuple, NoneType)
"""Counts that are there already; whether something is an Awaitable, an abstract type, is ten times as dear to find out."""


class Asked:
    """Counts that the store owes.

    Attributes:
        pending: of the store's; whoever cancels it wants no counts any more.
    """

    __slots__ = ("_counting", "_lane", "_started", "pending")

    def __init__(self, counting: Counting, lane: Lane, pending: Pending) -> None:
        """Start the clock."""
        self.pending = pending
        self._counting = counting
        self._lane = lane
        self._started = perf_counter()

    def take(self) -> Counts:
        """The counts, once they are there."""
        return self._counting.take(self._lane, self.pending, self._started)

    async def wait(self) -> Counts:
        """The counts."""
        with suppress(StoreError):  # `take` sorts it out
            await self.pending
        return self.take()


MaybeCounts: TypeAlias = Counts | Asked | Awaitable[Counts]


class Counting:
    """The store, and what takes its place."""

    def __init__(self, store: Store, local: MemoryStore, metrics: Metrics, *, reject: bool) -> None:
        """Put the parts together.

        Args:
            store: counts.
            local: counts while `store` cannot.
            metrics: is told of failures.
            reject: have no counts then.
        """
        self.store = store
        self._local = local
        self._metrics = metrics
        self._reject = reject

    def count(self, lane: Lane) -> MaybeCounts:
        """Count a sealed lane; an error of ours fails the lane and is not raised."""
        if not lane.remembers:
            return self._count(lane)
        pushes = lane.list_pushes()
        try:
            rings = self.store.push(pushes)
        except Exception as error:  # noqa: BLE001  # sorted out by the callee
            return self._remember_without_store(lane, pushes, error)
        if isinstance(rings, HERE) or not isinstance(rings, Awaitable):
            lane.recall(rings)
            return self._count(lane)
        if lane.waits:
            return self._recall_later(lane, pushes, rings)
        self._watch(pushes, rings)
        return self._count(lane)

    async def _recall_later(self, lane: Lane, pushes: Sequence[Push], rings: Awaitable[Rings]) -> Counts:
        started = perf_counter()
        try:
            lane.recall(await rings)
        except Exception as error:  # noqa: BLE001  # sorted out by the callee
            counts = self._remember_without_store(lane, pushes, error)
        else:
            counts = self._count(lane)
        finally:
            self._metrics.store_seconds.observe(perf_counter() - started)
        return await settle(counts)

    def _remember_without_store(self, lane: Lane, pushes: Sequence[Push], error: Exception) -> MaybeCounts:
        if isinstance(error, StoreError):
            self._metrics.store_errors.labels(error.kind).inc()
            if lane.waits:
                if self._reject:
                    return None
                self._metrics.fail_open.labels("store_error").inc()
            try:
                lane.recall(_complete(error, pushes, self._local.push))
            except Exception as bug:  # noqa: BLE001  # as any other bug, below
                error = bug
            else:
                return self._count(lane)
        lane.fail(error)
        return ()

    def _watch(self, pushes: Sequence[Push], rings: Awaitable[Rings]) -> None:
        """Nobody waits for these, but a failure is one all the same. The store's own deadline bounds how many there are."""
        if isinstance(rings, Pending):
            rings.then(lambda: self._finish(pushes, rings.error))
        else:
            asyncio.ensure_future(rings).add_done_callback(lambda done: self._finish(pushes, done.exception()))

    def _finish(self, pushes: Sequence[Push], error: BaseException | None) -> None:
        if error is not None:
            self._metrics.store_errors.labels(error.kind if isinstance(error, StoreError) else "internal").inc()
            _complete(error, pushes, self._local.push)

    def settle(self, settlements: Sequence[Settlement], take: Callable[[Sequence[Answer]], None]) -> None:
        """Tell ledgers what became of requests.

        Args:
            settlements: what became of them.
            take: is told how their sessions stand then, now or when the store has answered.
        """
        if not settlements:
            return
        try:
            answers = self.store.hit(settlements)
        except StoreError as error:
            self._settle_without_store(settlements, take, error)
        else:
            if isinstance(answers, Pending):
                answers.then(lambda: self._finish_settling(settlements, take, answers))
            elif isinstance(answers, HERE):
                take(answers)

    def _finish_settling(
        self, settlements: Sequence[Settlement], take: Callable[[Sequence[Answer]], None], pending: Pending
    ) -> None:
        if pending.error is not None:
            self._settle_without_store(settlements, take, pending.error)
        else:
            take(pending.result())

    def _settle_without_store(
        self, settlements: Sequence[Settlement], take: Callable[[Sequence[Answer]], None], error: StoreError
    ) -> None:
        """What was counted in this process is settled here as well."""
        self._metrics.store_errors.labels(error.kind).inc()
        take(_complete(error, settlements, self._local.hit))

    def _count(self, lane: Lane) -> MaybeCounts:
        hits = lane.list_hits()
        if not hits:
            return ()
        try:
            counts = self.store.hit(hits)
        except Exception as error:  # noqa: BLE001  # sorted out by the callee
            return self._do_without_store(lane, error)
        if isinstance(counts, Pending):
            return Asked(self, lane, counts)
        return counts if isinstance(counts, HERE) else self._count_later(lane, counts)

    def take(self, lane: Lane, pending: Pending, started: float) -> Counts:
        """What the store has answered, or what takes its place.

        Args:
            lane: whose counts they are.
            pending: is done.
            started: when the store was asked, by `perf_counter`.
        """
        try:
            return cast("list[Answer]", pending.result())
        except Exception as error:  # noqa: BLE001  # sorted out by the callee
            return self._do_without_store(lane, error)
        finally:
            self._metrics.store_seconds.observe(perf_counter() - started)

    async def _count_later(self, lane: Lane, counts: Awaitable[Counts]) -> Counts:
        started = perf_counter()
        try:
            return await counts
        except Exception as error:  # noqa: BLE001  # sorted out by the callee
            return self._do_without_store(lane, error)
        finally:
            self._metrics.store_seconds.observe(perf_counter() - started)

    def _do_without_store(self, lane: Lane, error: Exception) -> Counts:
        if isinstance(error, StoreError):
            self._metrics.store_errors.labels(error.kind).inc()
            if self._reject:
                return None
            self._metrics.fail_open.labels("store_error").inc()
            try:
                return _complete(error, lane.list_hits(), self._local.hit)
            except Exception as bug:  # noqa: BLE001  # as any other bug, below
                error = bug
        lane.fail(error)
        return ()


def _complete(error: BaseException, asked: Sequence[Any], ask_here: Callable[[list[Any]], Any]) -> list[Any]:
    """The answers of the shards that have counted, and for the keys of the others those of this process."""
    if not isinstance(error, PartlyAwayError):
        return list(ask_here(list(asked)))
    missing = [asked[place] for place, answer in enumerate(error.answers) if answer is None]
    here = iter(ask_here(missing))
    return [next(here) if answer is None else answer for answer in error.answers]


async def settle(counts: MaybeCounts) -> Counts:
    """The counts, once they are there."""
    if isinstance(counts, HERE):
        return counts
    return await (counts.wait() if isinstance(counts, Asked) else counts)
