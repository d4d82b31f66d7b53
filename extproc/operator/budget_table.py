"""Recent budgets for operators: the amount left of each, and its refusals.

Amounts come from the store's answers, which all replicas share. This table only displays them.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from msgspec.structs import replace

from extproc.bounded import Memo
from extproc.budgets.guard import CIRCUIT_BREAKER, BudgetLimit, Reservation
from extproc.budgets.subject import BudgetSubject
from extproc.decision import Action, Outcome
from extproc.engine.budget_guard import BudgetGuard
from extproc.engine.orders import hash_descriptor
from extproc.engine.settlements import Settled
from extproc.operator.budget_rows import BudgetDocument, BudgetRow
from extproc.operator.table import MAX_ROWS, Table, cut_caller, find_known
from extproc.store.rules.budget import BREAKER, BUCKET, Take

_MOST_RETURNED: Final = 16

_Name: TypeAlias = tuple[str, ...]
"""See `BudgetRow.name`."""


class BudgetTable(Table[BudgetRow, BudgetDocument]):
    """The budgets seen by this process, by caller."""

    def __init__(self) -> None:
        super().__init__()
        self._names: Memo[str, _Name] = Memo(MAX_ROWS)  # by key

    def note(self, candidates: list[BudgetGuard], now: float, *, refused: bool) -> None:
        """Note what a request took; if `refused`, it is returned.

        `now` is in seconds since 1970.
        """
        for candidate in candidates:
            for each in candidate.reserved:
                take, taken = each.take, each.taken
                if taken is None:
                    continue
                name = self._names.get(take.key)
                row = self.use(name) if name is not None else None
                if row is None or not row.requests:
                    row = self._open_row(
                        _name_row(each, candidate.plan.id, candidate.compiled.mode),
                        each.limit,
                        take,
                        now,
                    )
                    if not row.requests:
                        _describe_row(row, candidate, each)
                if (
                    row.key != take.key  # a release starts a new key
                    or row.limit != take.limit
                    or row.rate != take.rate
                    or row.span != take.span
                    or row.unit != each.limit.unit
                ):
                    _set_limit(row, each.limit, take)
                if each.rule.cost.measured:
                    if row.start != taken.start:
                        row.estimated = 0
                    if taken.granted and not refused:
                        row.estimated += take.amount
                row.start, row.wait_ms, row.returned = taken.start, taken.wait_ms, []
                row.left = taken.left + take.amount if refused and taken.granted else taken.left
                row.last = row.told = now
                row.requests += 1

    def act(
        self, candidate: BudgetGuard, outcome: Outcome, subject: BudgetSubject, now: float
    ) -> BudgetRow | None:
        """Note a budget's refusal or stage; returns its row, if the request has such a budget."""
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
        """Note a settlement; `estimated` if its amount is an estimate.

        Another replica may have taken from the budget.
        """
        limit = settled.limit
        if limit is None:
            return
        name = self._names.get(take.key) or (
            settled.tenant,
            settled.policy,
            settled.mode,
            settled.rule,
            limit.suffix,
        )
        row = self._open_row(name, limit, take, now)
        if take.kind != BUCKET and row.start != take.start:
            if row.requests:  # the settled request belongs to an earlier period
                return
            row.start, row.left, row.estimated, row.returned = take.start, 0, 0, []
        if not row.requests:
            row.last = now
        returned = [*row.returned, (now, take.amount)]
        if len(returned) > _MOST_RETURNED:
            row.left += returned.pop(0)[1]
        row.returned = returned
        row.estimated += round(
            ((settled.used if estimated else 0) - settled.estimated) * limit.units
        )

    def _open_row(self, name: _Name, limit: BudgetLimit, take: Take, now: float) -> BudgetRow:
        row = self.use(name)
        if row is None:
            tenant, policy, mode, rule, budget = name
            row = BudgetRow(tenant, policy, mode, rule, budget, first=now, last=now)
            _set_limit(row, limit, take)
            self.put(name, row)
        self._names.put(take.key, name)
        return row

    def make_document(self, *, shows_callers: bool) -> BudgetDocument:
        """A snapshot of the table, newest first.

        Callers' values are left out unless they may be shown.
        """
        rows = sorted(self.copy(), key=lambda row: -row.last)
        return BudgetDocument(rows if shows_callers else [replace(row, caller=[]) for row in rows])


def _name_rule(reserved: Reservation) -> str:
    return reserved.rule.name if reserved.limit.kind != BREAKER else CIRCUIT_BREAKER


def _name_row(reserved: Reservation, policy: str, mode: str) -> _Name:
    return reserved.tenant, policy, mode, _name_rule(reserved), reserved.limit.suffix


def _set_limit(row: BudgetRow, limit: BudgetLimit, take: Take) -> None:
    row.unit, row.words, row.units, row.reason = (
        limit.unit,
        limit.words,
        limit.units,
        limit.reason.value,
    )
    row.key, row.kind, row.limit = take.key, take.kind, take.limit
    row.rate, row.span, row.offset = take.rate, take.span, take.offset


def _describe_row(row: BudgetRow, candidate: BudgetGuard, reserved: Reservation) -> None:
    values = candidate.find_values(reserved.tenant)
    row.caller, row.hashes = (
        cut_caller(values),
        [(name, hash_descriptor(name, value)) for name, value in values],
    )
    own = reserved.tenant == candidate.tenant
    row.orderable = own or reserved.tenant in candidate.list_other_names()
    if own:
        row.alias, row.labels, row.credentials, row.parts = find_known(candidate)
    else:
        row.alias, row.parts = (
            candidate.plan.aliases.get(reserved.tenant, ""),
            candidate.find_parts(reserved.tenant),
        )
