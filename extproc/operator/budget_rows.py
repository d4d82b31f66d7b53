"""Budgets as replicas publish them; see `rows`.

The replicas share a budget's state, so the newest answer of the store is right.
"""
# interpreted: msgspec makes its classes

from __future__ import annotations

from operator import attrgetter
from typing import Annotated, Any

from extproc.operator.rows import FIRST, MAX, MIN, SUM, Document, Row, newest
from extproc.store.rules.budget import BREAKER, BUCKET, FOREVER, PERIOD, Take

_MS = 1_000


def _add_period(one: BudgetRow, other: BudgetRow, field: str) -> Any:  # noqa: ANN401  # a number or a list
    """What replicas know of the same period adds up; that of an older one is over."""
    if one.start == other.start or one.kind == BUCKET:
        return SUM(one, other, field)
    return newest("start")(one, other, field)


_TOLD = newest("told")


class BudgetRow(Row, array_like=True):
    """One budget of a caller. Amounts are integers, of which `units` are 1 in the rule's own unit.

    Attributes:
        tenant: hash of the caller as the rule knows it.
        budget: which of the rule's budgets, such as `tpm`, `tpd`, `1d` or, of a circuit breaker, `rate`.
        caller: names and values of the caller's descriptors; empty if they may not be shown.
        hashes: hash of each descriptor, by name.
        orderable: orders can name the caller by `tenant`, because the request's head tells it.
        unit: what is counted; empty for costs.
        words: the time that the budget is for.
        key, kind, limit, rate, span, offset, start: as in `Take`.
        left: what was left at `told`.
        returned: times and amounts of settlements, as replicas know them; those before `told` are in `left`.
        estimated: the part of what was taken since `start` that is an estimate, as replicas know it.
        wait_ms: of a circuit breaker that is open, until when, seen from `told`; 0 if it is closed.
        told: when the store said so, in seconds since 1970.
        refused: number of requests that it has refused, or would have refused.
        refused_at: the last of them, in seconds since 1970; 0 for none.
        stage: action at the last stage that it has reached; empty for none.
        asked: what the last refused request asked for.
        alias, labels, credentials, parts: see `KnownAs`.
        reason: why it refuses.
        staged_at: when it reached its last stage, in seconds since 1970; 0 for never.
    """

    tenant: str
    policy: str
    mode: str
    rule: str
    budget: str
    caller: Annotated[list[tuple[str, str]], FIRST] = []
    hashes: Annotated[list[tuple[str, str]], FIRST] = []
    orderable: Annotated[bool, FIRST] = False
    unit: str = ""
    words: str = ""
    units: Annotated[int, _TOLD] = 1
    key: Annotated[str, _TOLD] = ""
    kind: int = BUCKET
    limit: Annotated[int, _TOLD] = 0
    rate: Annotated[int, _TOLD] = 0
    span: Annotated[int, _TOLD] = 0
    offset: Annotated[int, _TOLD] = 0
    start: Annotated[int, _TOLD] = 0
    left: Annotated[int, _TOLD] = 0
    wait_ms: Annotated[int, _TOLD] = 0
    told: Annotated[float, MAX] = 0.0
    first: Annotated[float, MIN] = 0.0
    last: Annotated[float, MAX] = 0.0
    requests: Annotated[int, SUM] = 0
    refused: Annotated[int, SUM] = 0
    refused_at: Annotated[float, MAX] = 0.0
    stage: Annotated[str, _TOLD] = ""
    asked: Annotated[int, newest("refused_at")] = 0
    alias: Annotated[str, FIRST] = ""
    labels: Annotated[list[tuple[str, str]], FIRST] = []
    credentials: Annotated[list[str], FIRST] = []
    parts: Annotated[list[str], FIRST] = []
    estimated: Annotated[int, _add_period] = 0
    returned: Annotated[list[tuple[float, int]], _add_period] = []
    reason: str = ""
    staged_at: Annotated[float, MAX] = 0.0

    name = property(attrgetter("tenant", "policy", "mode", "rule", "budget"))

    @property
    def is_open(self) -> bool:
        """Whether it is a circuit breaker that refused its newest request."""
        return self.kind == BREAKER and self.wait_ms != 0

    def find_left(self, now: float) -> int:
        """What is left at a later time, in seconds since 1970, if nothing was used since."""
        passed = max(0, round((now - self.told) * _MS))
        left = self.left + sum([amount for at, amount in self.returned if at >= self.told])
        if self.kind == BUCKET:
            return min(self.limit, left + passed * self.rate)
        if self.kind == PERIOD:
            return self.limit if self.is_over(now) else left
        return left if passed < (self.find_open_ms(now) or 60 * _MS) else self.limit

    def is_over(self, now: float) -> bool:
        """Whether its period has ended."""
        return self.kind == PERIOD and now * _MS >= self.start + self.span

    def find_open_ms(self, now: float) -> int:
        """How much longer a circuit breaker is open, in milliseconds: 0 if it is closed, `FOREVER` until it is released."""
        if self.kind != BREAKER or self.wait_ms in (0, FOREVER):
            return self.wait_ms if self.kind == BREAKER else 0
        return max(0, self.wait_ms - round((now - self.told) * _MS))

    def find_reset_ms(self, now: float) -> int:
        """Until the budget is whole again, or its next period begins, in milliseconds; `FOREVER` for an operator's release."""
        if self.kind == BUCKET:
            return -(-(self.limit - self.find_left(now)) // max(1, self.rate))
        if self.kind == PERIOD:
            return max(0, round(self.start + self.span - now * _MS))
        return self.find_open_ms(now)

    def make_credit(self, amount: int, raised: int = 0) -> Take:
        """What gives this much back to the budget in the store, up to the whole budget, `raised` by an order."""
        take = Take(self.key, self.kind, 0, self.limit, self.rate, self.span, self.offset)
        return take.raise_limit(raised).settle(amount, self.start)


class BudgetDocument(Document, array_like=True):
    """Budgets, the most recent first."""

    rows: Annotated[list[BudgetRow], SUM]
    left_out: Annotated[int, SUM] = 0

    def finish(self, now: float) -> None:
        """See `Document`."""
        super().finish(now)
        known = [row for row in self.rows if row.requests]  # of the others, only settlements are known
        self.rows = sorted(known, key=lambda row: -row.last)
