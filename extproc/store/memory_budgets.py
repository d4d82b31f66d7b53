"""Budgets in this process.

Recently used ones stay unpacked; the others are packed entries of the memory store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from extproc.bounded import LRU, Memo
from extproc.store.rules.budget import (
    BudgetState,
    Take,
    Taken,
    advance,
    apply,
    check,
    find_lifetime,
    is_marked,
    settle,
)

_RECENT_MS: Final = 60_000
"""A budget used within this time stays unpacked, as in `memory`."""

_MARKERS: Final = 16_384
"""Number of markers of settlements in each generation of the memo. They take 6 MB at most."""


class KeptBudget:
    """An unpacked budget.

    Attributes:
        state: its state at the time `today`.
        take: a take with its newest limit. It is replaced only when that changes: freeing the
            previous take is slow, because it has left the processor's cache.
        moment: when it was last used.
        today: the same, in calendar time.
        leaves: it must be packed again, because there is no room.
    """

    def __init__(self, state: BudgetState, take: Take, moment: int, today: int) -> None:
        self.state = state
        self.take = take
        self.moment = moment
        self.today = today
        self.leaves = False

    @property
    def until(self) -> int:
        """When the state expires."""
        return self.moment + find_lifetime(self.state, self.take, self.today)


class MemoryBudgets:
    """The budgets of a store.

    Times are in milliseconds: `moment` of its clock, `today` of the calendar, for the rules.
    """

    def __init__(
        self, most: int, unpack: Callable[[Take], BudgetState], pack: Callable[[KeptBudget], None]
    ) -> None:
        """Start empty; `unpack` takes a budget out of the store, `pack` puts it there."""
        self._most = most
        self._unpack = unpack
        self._pack = pack
        self._markers: Memo[str, int] = Memo(_MARKERS)
        self._unpacked: LRU[str, KeptBudget] = LRU(most)

    def __len__(self) -> int:
        """The number of unpacked budgets, some of which may have expired."""
        return len(self._unpacked)

    def ask(self, takes: list[Take], moment: int, today: int) -> list[Taken]:
        """Take all of a group or nothing; or settle, if the first is a settlement."""
        if takes[0].settles:
            return [self._settle(take, moment, today) for take in takes]
        budgets = [self._open(take, moment, today) for take in takes]
        answers = []
        granted = True
        for place, take in enumerate(takes):
            budget = budgets[place]
            budget.state, taken = check(advance(budget.state, take, today), take, today)
            granted = granted and taken.fits
            answers.append(taken)
        for place, take in enumerate(takes):
            budget = budgets[place]
            if granted:
                budget.state = apply(budget.state, take, answers[place])
            if budget.leaves:
                self._pack(budget)
        return answers

    def take_one(self, take: Take, moment: int, today: int) -> Taken:
        """Take from a single budget, which is the usual case."""
        budget = self._open(take, moment, today)
        state, taken = check(advance(budget.state, take, today), take, today)
        budget.state = apply(state, take, taken) if taken.fits else state
        if budget.leaves:
            self._pack(budget)
        return taken

    def _settle(self, asked: Take, moment: int, today: int) -> Taken:
        if asked.marker:
            marked = self._markers.get(asked.marker)
            if marked is not None and is_marked(marked, today):
                return Taken(False, False, 0, 0, 0, 0)
            self._markers.put(asked.marker, today)
        budget = self._open(asked, moment, today)
        budget.state = settle(budget.state, asked, today)
        if budget.leaves:
            self._pack(budget)
        return Taken(True, False, 0, 0, 0, 0)

    def _open(self, take: Take, moment: int, today: int) -> KeptBudget:
        budget = self._unpacked.use(take.at(today).key)
        if budget is not None:
            known = budget.take
            if known.limit != take.limit or known.rate != take.rate or known.span != take.span:
                budget.take = take
            budget.moment, budget.today = moment, today
            return budget
        budget = KeptBudget(self._unpack(take), take, moment, today)
        if len(self._unpacked) < self._most or self._make_room(moment):
            self._unpacked.put(take.key, budget)
        else:
            budget.leaves = True
        return budget

    def _make_room(self, moment: int) -> bool:
        """Pack the oldest budget, unless it was used recently; returns whether there is room."""
        if not self._unpacked:
            return False
        oldest = self._unpacked.peek(self._unpacked.find_oldest())
        if oldest is None or moment - oldest.moment < _RECENT_MS:
            return False
        self._unpacked.drop(oldest.take.key)
        if moment < oldest.until:
            self._pack(oldest)
        return True
