"""Has the store count a group of guards, and counts in this process while the store is unavailable.

Two questions to the store: first pushes, which record the request in its session, in one step for
the whole group; then hits, which count it. Hits wait for the answers to pushes only if a verdict
depends on earlier requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from time import perf_counter
from types import NoneType
from typing import Any, Final, TypeAlias, cast

from extproc.engine.budget_guard import BudgetGuard
from extproc.engine.exchange import Guards
from extproc.engine.guards import Answer, Kept, SessionGuard
from extproc.engine.settlements import Settled, list_give_backs
from extproc.errors import PartlyAwayError, StoreError
from extproc.metrics import Metrics
from extproc.store import Store
from extproc.store.memory import MemoryStore
from extproc.store.pending import Pending
from extproc.store.pushes import AnyPush
from extproc.store.rules.budget import Take, Taken
from extproc.store.rules.chain import Trail
from extproc.store.rules.session import WITHDRAWN, Question

Counts: TypeAlias = list[Answer] | tuple[Answer, ...] | None
"""Answers to a group's hits; None if the store failed and `--on-store-error reject` refuses such
requests."""


Rings: TypeAlias = Sequence[Kept]
"""The answers to a group's pushes."""

Pushes: TypeAlias = Sequence[AnyPush]

Report: TypeAlias = Callable[[Sequence[Settled], Sequence[Answer | None]], None]
"""Reports the answers to settlements; None for those that were lost."""

_now: Final = perf_counter  # compiled code reads a module's constant fastest

HERE: Final = (list, tuple, NoneType)
"""Types of counts that are available at once. Checking for Awaitable, an abstract type, takes ten
times as long."""


class Asked:
    """Counts that the store has yet to send.

    Attributes:
        pending: the store's answer; call `abandon` if the counts are no longer needed.
    """

    def __init__(self, counting: Counting, group: Guards, pending: Pending) -> None:
        self.pending = pending
        self._counting = counting
        self._group = group
        self._started = _now()
        self._abandoned = False

    def collect(self) -> Counts:
        """The counts, once the store has answered."""
        return self._counting.collect(self._group, self.pending, self._started)

    async def wait(self) -> Counts:
        """Wait for the counts."""
        try:
            await self.pending.arrive()
        except asyncio.CancelledError:
            self.abandon()
            raise
        return self.collect()

    def abandon(self) -> None:
        """Stop waiting, because the client left; return to budgets what the store still takes."""
        if self._abandoned:
            return
        self._abandoned = True
        if not self._group.budgets:
            self.pending.cancel()
        elif self.pending.done:
            self._give_back()
        else:
            self.pending.then(self._give_back)

    def _give_back(self) -> None:
        self._group.judge(self.collect())
        self._counting.give_back((), self._group.budgets, WITHDRAWN)


MaybeCounts: TypeAlias = Counts | Asked | Awaitable[Counts]


class Counting:
    """The store, and its fallback: a store in this process, or a refusal (`--on-store-error`).

    Attributes:
        replicas: number of replicas last seen. If the store fails, each replica enforces its share
            of a budget.
    """

    def __init__(self, store: Store, local: MemoryStore, metrics: Metrics, *, reject: bool) -> None:
        self.store = store
        self._local = local
        self._metrics = metrics
        self._seconds = metrics.store_seconds
        self._reject = reject
        self.replicas = 1

    def count(self, group: Guards) -> MaybeCounts:
        """Count a group that has read the body.

        An internal error fails the group and is not raised.
        """
        if group.remembers:
            return self._push(group)
        hits = group.list_hits()
        if not hits:
            return ()
        try:
            counts = self.store.hit(hits)
        except Exception as error:  # noqa: BLE001  # handled by the callee
            return self._do_without_store(group, error)
        if isinstance(counts, Pending):
            return Asked(self, group, counts)
        return counts if isinstance(counts, HERE) else self._count_later(group, counts)

    def _push(self, group: Guards) -> MaybeCounts:
        """Push the entries of sessions, then count."""
        pushes = group.list_pushes()
        group.remembers = False
        try:
            rings = self.store.push(pushes)
            if isinstance(rings, HERE) or not isinstance(rings, Awaitable):
                self._recall(group, rings)
                return self.count(group)
        except Exception as error:  # noqa: BLE001  # handled by the callee
            return self._remember_without_store(group, pushes, error)
        if group.waits:
            return self._recall_later(group, pushes, rings)
        _when_done(rings, partial(self._finish, pushes))
        return self.count(group)

    def _recall(self, group: Guards, rings: Rings) -> None:
        for answer in rings:
            if isinstance(answer, Trail) and answer.dropped:
                self._metrics.chains_dropped.inc()
        group.recall(rings)

    async def _recall_later(self, group: Guards, pushes: Pushes, rings: Awaitable[Rings]) -> Counts:
        started = _now()
        try:
            self._recall(group, await rings)
        except Exception as error:  # noqa: BLE001  # handled by the callee
            counts = self._remember_without_store(group, pushes, error)
        else:
            counts = self.count(group)
        finally:
            self._seconds.observe(_now() - started)
        return await wait_for(counts)

    def _remember_without_store(
        self, group: Guards, pushes: Pushes, error: Exception
    ) -> MaybeCounts:
        if isinstance(error, StoreError):
            self._metrics.store_errors.labels(error.kind).inc()
            if group.waits:
                if self._reject and group.needs_store:
                    return None
                self._metrics.fail_open.labels("store_error").inc()
            try:
                group.recall(_complete(error, pushes, self._local.push))
            except Exception as bug:  # noqa: BLE001  # handled below, as any other bug
                error = bug
            else:
                return self.count(group)
        group.fail(error)
        return ()

    def _finish(self, pushes: Pushes, _: Rings, error: BaseException | None) -> None:
        """Handle failures of pushes that no verdict waits for.

        The store's deadline bounds their number.
        """
        if error is not None:
            self._count_error(error)
            _complete(error, pushes, self._local.push)

    def abandon(self, group: Guards, counts: MaybeCounts) -> None:
        """Give back what a group takes from budgets, because the client has left."""
        if isinstance(counts, Asked):
            counts.abandon()
        elif group.budgets and isinstance(counts, HERE):
            group.judge(counts)
            self.give_back((), group.budgets, WITHDRAWN)

    def give_back(
        self,
        sessions: Sequence[SessionGuard],
        budgets: Sequence[BudgetGuard],
        outcome: int,
        report: Report | None = None,
    ) -> None:
        """Give back, once only, all reservations of a request that was REFUSED or WITHDRAWN."""
        given, here = list_give_backs(sessions, budgets, outcome)
        if here:
            self._local.hit(here)
        self.settle(given, report)

    def join_sessions(self, sessions: Sequence[SessionGuard]) -> None:
        """Take conversations that continue out of the count of requests without a session."""
        self.settle(
            [Settled(join) for session in sessions if (join := session.join_session()) is not None]
        )

    def settle(self, settled: Sequence[Settled], report: Report | None = None) -> None:
        """Send settlements to the store in one call, without waiting; answers come later."""
        if not settled:
            return
        try:
            answers = self.store.hit([each.asked for each in settled])
        except Exception as error:  # noqa: BLE001  # handled by the callee
            self._finish_settling(settled, report, (), error)
        else:
            if isinstance(answers, HERE):
                self._finish_settling(settled, report, answers, None)
            else:
                _when_done(answers, partial(self._finish_settling, settled, report))

    def _finish_settling(
        self,
        settled: Sequence[Settled],
        report: Report | None,
        answers: Sequence[Answer | None],
        error: BaseException | None,
    ) -> None:
        """Report the answers.

        If the store failed, this process settles what it may have counted itself.

        Other reservations are lost: the budget keeps the estimate until its period ends or its
        bucket is full.
        """
        if error is not None:
            self._count_error(error)
            answers = _complete(error, [each.asked for each in settled], self._settle_here)
            self._metrics.budget_lost.inc(sum([answer is None for answer in answers]))
        if report is not None:
            try:
                report(settled, answers)
            except Exception as bug:  # noqa: BLE001  # a bug must not change the request's answer
                self._count_error(bug)

    def _settle_here(self, asked: list[Question]) -> list[Answer | None]:
        here = [one for one in asked if not isinstance(one, Take)]
        return [*self._local.hit(here), *[None] * (len(asked) - len(here))]

    def _count_error(self, error: BaseException) -> None:
        self._metrics.store_errors.labels(
            error.kind if isinstance(error, StoreError) else "internal"
        ).inc()

    def collect(self, group: Guards, pending: Pending, started: float) -> Counts:
        """The answers of the store or its fallback.

        `started` is the time of the question, by `perf_counter`.
        """
        try:
            return cast("list[Answer]", pending.result())
        except Exception as error:  # noqa: BLE001  # handled by the callee
            return self._do_without_store(group, error)
        finally:
            self._seconds.observe(_now() - started)

    async def _count_later(self, group: Guards, counts: Awaitable[Counts]) -> Counts:
        started = _now()
        try:
            return await counts
        except Exception as error:  # noqa: BLE001  # handled by the callee
            return self._do_without_store(group, error)
        finally:
            self._seconds.observe(_now() - started)

    def _do_without_store(self, group: Guards, error: Exception) -> Counts:
        if isinstance(error, StoreError):
            self._metrics.store_errors.labels(error.kind).inc()
            if self._reject:
                return None
            self._metrics.fail_open.labels("store_error").inc()
            try:
                asked = self._share(group)
                counts = _complete(error, asked, self._local.hit)
            except Exception as bug:  # noqa: BLE001  # handled below, as any other bug
                error = bug
            else:
                if group.budgets:
                    _mark_here(error, counts, asked)
                return counts
        group.fail(error)
        return ()

    def _share(self, group: Guards) -> list[Question]:
        """The group's questions for this process, with its share of each budget."""
        asked = group.list_hits()
        if self.replicas == 1 or not group.budgets:
            return asked
        return [one.share(self.replicas) if isinstance(one, Take) else one for one in asked]


def _mark_here(error: Exception, counts: Sequence[Answer], asked: Sequence[Question]) -> None:
    """Mark what was taken from budgets in this process."""
    from_store = error.answers if isinstance(error, PartlyAwayError) else [None] * len(counts)
    for place, answer in enumerate(counts):
        question = asked[place]
        if isinstance(answer, Taken) and isinstance(question, Take) and from_store[place] is None:
            answer.here = question


def _when_done(
    answers: Awaitable[Any], finish: Callable[[Any, BaseException | None], None]
) -> None:
    """Call `finish` with the store's answers, or with its error."""
    if isinstance(answers, Pending):
        answers.then(
            lambda: finish(() if answers.error is not None else answers.result(), answers.error)
        )
    else:
        asyncio.ensure_future(answers).add_done_callback(
            lambda done: finish(
                () if done.exception() is not None else done.result(), done.exception()
            )
        )


def _complete(
    error: BaseException, asked: Sequence[Any], ask_here: Callable[[list[Any]], Any]
) -> list[Any]:
    """Add this process's answers to those of the shards that answered."""
    if not isinstance(error, PartlyAwayError):
        return list(ask_here(list(asked)))
    missing = [asked[place] for place, answer in enumerate(error.answers) if answer is None]
    here = iter(ask_here(missing))
    return [next(here) if answer is None else answer for answer in error.answers]


async def wait_for(counts: MaybeCounts) -> Counts:
    """Wait for the counts if necessary."""
    if isinstance(counts, HERE):
        return counts
    return await (counts.wait() if isinstance(counts, Asked) else counts)
