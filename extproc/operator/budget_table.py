"""Recent callers of budgets, for people: what is left of each budget, and what it refuses.

What is left comes from the store's answers, which all replicas share; this table only shows it.
"""

from __future__ import annotations

from typing import Final

from extproc.bounded import Memo
from extproc.budgets.guard import CIRCUIT_BREAKER, BudgetLimit, Reservation
from extproc.budgets.subject import BudgetSubject
from extproc.decision import Action, Outcome
from extproc.engine.budget_guard import BudgetGuard
from extproc.engine.orders import hash_descriptor
from extproc.engine.settlements import Settled
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
        returned: times and amounts of the newest settlements since, which are in `left`.
        estimated: the part of what this process has taken that the access log has not corrected.
        caller: names and values of the caller's descriptors.
        orderable: see `BudgetRow`.
        reason: why it refuses.
    """

    def __init__(self, name: tuple[str, str, str, str, str], limit: BudgetLimit, take: Take, now: float) -> None:
        self.name = name
        self.limit = limit
        self.take = take
        self.start = self.wait_ms = self.reset_ms = 0
        self.fits = True
        self.caller: list[tuple[str, str]] = []
        self.known: KnownAs = UNKNOWN
        self.orderable = False
        self.left = self.estimated = 0
        self.returned: list[tuple[float, int]] = []
        self.first = self.last = now
        self.told = 0.0
        self.requests = 0
        self.refused = 0
        self.asked = 0
        self.refused_at = 0.0
        self.staged_at = 0.0
        self.stage = ""
        self.reason = limit.reason

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
            left=self.left - sum([amount for _, amount in self.returned]),
            returned=self.returned.copy(),
            estimated=self.estimated,
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
_MOST_RETURNED: Final = 16


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
                if row is None or not row.requests or self.use(row.name) is not row:
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
                if each.rule.cost.measured:
                    if row.start != taken.start:
                        row.estimated = 0
                    if taken.granted and not refused:
                        row.estimated += take.amount
                row.start, row.wait_ms, row.reset_ms, row.fits = taken.start, taken.wait_ms, taken.reset_ms, taken.fits
                if row.returned:
                    row.returned = []
                row.left = taken.left + take.amount if refused and taken.granted else taken.left
                row.last = row.told = now
                row.requests += 1

    def _find_row(self, candidate: BudgetGuard, reserved: Reservation, now: float) -> CallerBudget:
        """The row of a budget whose key is not known, perhaps a new one."""
        name = _name_row(reserved, candidate.plan.id, candidate.compiled.mode)
        row = self._open_row(name, reserved.limit, reserved.take, now)
        if not row.requests:
            _describe_row(row, candidate, reserved)
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

    def settle(self, settled: Settled, take: Take, now: float, *, estimated: bool) -> None:
        """Note a settlement of what this replica or another one has taken; `estimated`: it is an estimate, too."""
        limit, row = settled.limit, self._by_key.get(take.key)
        if limit is None:
            return
        if row is None or self.peek(row.name) is not row:
            row = self._open_row((settled.tenant, settled.policy, settled.mode, settled.rule, limit.suffix), limit, take, now)
        if take.kind != BUCKET and row.start != take.start:
            if row.requests:  # of a period that has ended
                return
            row.start, row.left, row.estimated, row.returned = take.start, 0, 0, []
        if not row.requests:
            row.last = now
        row.left += take.amount
        row.returned = [*row.returned[1 - _MOST_RETURNED :], (now, take.amount)]
        row.estimated += round(((settled.used if estimated else 0) - settled.estimated) * limit.units)

    def _open_row(self, name: tuple[str, str, str, str, str], limit: BudgetLimit, take: Take, now: float) -> CallerBudget:
        """The row of a budget whose key is not known, perhaps a new one."""
        row = self.use(name)
        if row is None:
            row = CallerBudget(name, limit, take, now)
            self.put(name, row)
        self._by_key.put(take.key, row)
        return row

    def make_document(self, *, shows_callers: bool) -> BudgetDocument:
        """The table as it is now, the newest first; without callers' values unless they may be shown."""
        found = sorted(self.copy(), key=lambda row: -row.last)
        return BudgetDocument([row.make_row(shows_callers=shows_callers) for row in found])


def _name_rule(reserved: Reservation) -> str:
    return reserved.rule.name if reserved.limit.kind != BREAKER else CIRCUIT_BREAKER


def _name_row(reserved: Reservation, policy: str, mode: str) -> tuple[str, str, str, str, str]:
    return reserved.tenant, policy, mode, _name_rule(reserved), reserved.limit.suffix


def _describe_row(row: CallerBudget, candidate: BudgetGuard, reserved: Reservation) -> None:
    """Note whose budget it is."""
    row.caller = candidate.find_values(reserved.tenant)
    own = reserved.tenant == candidate.tenant
    row.orderable = own or reserved.tenant in candidate.list_other_names()
    if own:
        row.known = find_known(candidate)
    else:
        alias, parts = candidate.plan.aliases.get(reserved.tenant, ""), candidate.find_parts(reserved.tenant)
        row.known = KnownAs(alias, [], [], parts)
