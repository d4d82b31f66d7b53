"""Recent callers of budgets, for people: what is left of each budget, and what it refuses.

What is left comes from the store's answers, which all replicas share; this table only shows it.
"""

from __future__ import annotations

from typing import Final

from extproc.bounded import Memo
from extproc.budgets.guard import CIRCUIT_BREAKER, Reservation
from extproc.budgets.subject import BudgetSubject
from extproc.decision import Action, Outcome
from extproc.engine.budget_guard import BudgetGuard
from extproc.engine.orders import hash_descriptor
from extproc.operator.budget_rows import BudgetDocument, BudgetRow
from extproc.operator.table import MAX_ROWS, UNKNOWN, KnownAs, Table, cut_caller, find_known
from extproc.store.rules.budget import BREAKER, BUCKET, Take


class CallerBudget:
    """One budget of a caller, as this process knows it; see `BudgetRow`.

    Attributes:
        name: the caller's hash, policy, mode, rule, and which of its budgets.
        limit: the limit.
        take: the question of a request, with the newest limit, but not always the newest one, as in `KeptBudget`.
        start: as in the newest `Taken`; so are `wait_ms`, `reset_ms` and `fits`.
        left: what is left, with settlements since.
        caller: names and values of the caller's descriptors.
        orderable: see `BudgetRow`.
        reason: why it refuses.
    """

    __slots__ = (
        "asked", "caller", "first", "fits", "known", "last", "left", "limit", "name", "orderable", "reason", "refused",
        "refused_at", "requests", "reset_ms", "stage", "staged_at", "start", "take", "told", "wait_ms",
    )  # fmt: skip

    def __init__(self, name: tuple[str, str, str, str, str], reserved: Reservation, now: float) -> None:
        self.name = name
        self.limit = reserved.limit
        self.take = reserved.take
        self.start = self.wait_ms = self.reset_ms = 0
        self.fits = True
        self.caller: list[tuple[str, str]] = []
        self.known: KnownAs = UNKNOWN
        self.orderable = False
        self.left = 0
        self.first = self.last = self.told = now
        self.requests = 0
        self.refused = 0
        self.asked = 0
        self.refused_at = 0.0
        self.staged_at = 0.0
        self.stage = ""
        self.reason = reserved.limit.reason

    @property
    def is_open(self) -> bool:
        """Whether it is a circuit breaker that refused its newest request."""
        return self.limit.kind == BREAKER and not self.fits

    def make_row(self, *, shows_callers: bool) -> BudgetRow:
        """What reports show of it."""
        limit, take = self.limit, self.take
        tenant, policy, mode, rule, budget = self.name
        return BudgetRow(
            tenant=tenant,
            policy=policy,
            mode=mode,
            rule=rule,
            budget=budget,
            caller=cut_caller(self.caller) if shows_callers else [],
            hashes=[(name, hash_descriptor(name, value)) for name, value in self.caller],
            orderable=self.orderable,
            unit=limit.unit,
            words=limit.words,
            units=limit.units,
            key=take.key,
            kind=take.kind,
            limit=take.limit,
            rate=take.rate,
            span=take.span,
            offset=take.offset,
            start=self.start,
            left=self.left,
            wait_ms=self.wait_ms if limit.kind == BREAKER else 0,
            told=self.told,
            first=self.first,
            last=self.last,
            requests=self.requests,
            refused=self.refused,
            refused_at=self.refused_at,
            stage=self.stage,
            asked=self.asked,
            alias=self.known.alias,
            labels=self.known.labels,
            credentials=self.known.credentials,
            parts=self.known.parts,
        )


_MOST_SEEN: Final = MAX_ROWS


class BudgetTable(Table[CallerBudget, BudgetDocument]):
    """The budgets of one process, by caller."""

    def __init__(self) -> None:
        super().__init__()
        self._by_key: Memo[str, CallerBudget] = Memo(_MOST_SEEN)

    def note(self, candidates: list[BudgetGuard], now: float, *, refused: bool) -> None:
        """Note what a request took; `refused`: all of it is given back. `now` is in seconds since 1970."""
        for candidate in candidates:
            for each in candidate.reserved:
                take, taken = each.take, each.taken
                if taken is None:
                    continue
                row = self._by_key.get(take.key)
                if row is None or self.use(row.name) is not row:
                    row = self._find_row(candidate, each, now)
                known = row.take
                if (
                    known.key != take.key  # a release has renewed it
                    or known.limit != take.limit
                    or known.rate != take.rate
                    or known.span != take.span
                ):
                    row.take = take
                row.limit = each.limit
                row.start, row.wait_ms, row.reset_ms, row.fits = taken.start, taken.wait_ms, taken.reset_ms, taken.fits
                row.left = taken.left + take.amount if refused and taken.granted else taken.left
                row.last = row.told = now
                row.requests += 1

    def _find_row(self, candidate: BudgetGuard, reserved: Reservation, now: float) -> CallerBudget:
        """The row of a budget whose key is not known, perhaps a new one."""
        name = _name_row(reserved, candidate.plan.id, candidate.compiled.mode)
        row = self.use(name)
        if row is None:
            row = _begin_row(candidate, name, reserved, now)
            self.put(name, row)
        self._by_key.put(reserved.take.key, row)
        return row

    def act(self, candidate: BudgetGuard, outcome: Outcome, subject: BudgetSubject, now: float) -> CallerBudget | None:
        """Note a budget's refusal, or the stage that it has reached; None if no budget of the request is meant."""
        refuses = outcome.action is Action.REJECT
        for each in candidate.reserved:
            meant = _name_rule(each) == subject.rule and each.limit.reason is subject.reason
            if not meant or each.taken is None or each.taken.fits is refuses:
                continue
            row = self.use(_name_row(each, outcome.policy, outcome.mode))
            if row is None:
                continue
            row.stage = outcome.action.value
            if refuses:
                row.refused += 1
                row.refused_at, row.asked = now, each.take.amount
            else:
                row.staged_at = now
            return row
        return None

    def settle(self, take: Take) -> None:
        """Note a settlement, if the budget is known here."""
        row = self._by_key.get(take.key)
        if row is not None and (take.kind == BUCKET or row.start == take.start):
            row.left += take.amount

    def make_document(self, *, shows_callers: bool) -> BudgetDocument:
        """The table as it is now, the newest first; without callers' values unless they may be shown."""
        found = sorted(self.copy(), key=lambda row: -row.last)
        return BudgetDocument([row.make_row(shows_callers=shows_callers) for row in found])


def _name_rule(reserved: Reservation) -> str:
    return reserved.rule.name if reserved.limit.kind != BREAKER else CIRCUIT_BREAKER


def _name_row(reserved: Reservation, policy: str, mode: str) -> tuple[str, str, str, str, str]:
    return reserved.tenant, policy, mode, _name_rule(reserved), reserved.limit.suffix


def _begin_row(candidate: BudgetGuard, name: tuple[str, str, str, str, str], reserved: Reservation, now: float) -> CallerBudget:
    """A row without any request."""
    row = CallerBudget(name, reserved, now)
    row.caller = candidate.find_values(reserved.tenant)
    own = reserved.tenant == candidate.tenant
    row.orderable = own or reserved.tenant in candidate.list_other_names()
    if own:
        row.known = find_known(candidate)
    else:
        alias, parts = candidate.plan.aliases.get(reserved.tenant, ""), candidate.find_parts(reserved.tenant)
        row.known = KnownAs(alias, [], [], parts)
    return row
