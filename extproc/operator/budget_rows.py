"""Budgets as replicas publish them; see `rows`.

The replicas share a budget's state, so the store's newest answer is used.
"""
# interpreted: msgspec makes its classes

from __future__ import annotations

from operator import attrgetter
from typing import Annotated, Any

from extproc.budgets.commands import write_breaker_release, write_budget_grant
from extproc.operator.rows import FIRST, MAX, MIN, SUM, Document, Row, newest
from extproc.store.rules.budget import BREAKER, BUCKET, FOREVER, PERIOD, Take

_MS = 1_000


# A number or a list
def _add_period(one: BudgetRow, other: BudgetRow, field: str) -> Any:  # noqa: ANN401
    """Values of the same period add up; those of an older period are dropped."""
    if one.start == other.start or one.kind == BUCKET:
        return SUM(one, other, field)
    return newest("start")(one, other, field)


_TOLD = newest("told")


class BudgetRow(Row, array_like=True):
    """One budget of a caller. Amounts are integers: one of the rule's unit is `units`.

    Attributes:
        tenant: hash of the caller, as identified by the rule.
        budget: which of the rule's budgets, such as `tpm`, `tpd`, `1d` or, for a circuit breaker,
            `rate`.
        caller: names and values of the caller's descriptors; empty if they may not be shown.
        hashes: names and hashes of the descriptors.
        orderable: whether orders can name the caller by `tenant`, because the request's headers
            identify it.
        unit: what is counted; empty for costs.
        words: the budget's time span in words.
        key, kind, limit, rate, span, offset, start: as in `Take`.
        left: amount left at `told`.
        returned: (time, amount) of known settlements; those before `told` are included in `left`.
        estimated: the estimated part of the usage since `start`.
        wait_ms: for an open circuit breaker, how long it stays open after `told`; 0 if it is
            closed.
        told: time of the store's newest answer, in seconds since 1970.
        refused: number of requests that were refused, or would have been.
        refused_at: time of the last refusal, in seconds since 1970; 0 for never.
        stage: action of the last stage reached; empty for none.
        asked: amount that the last refused request asked for.
        alias, labels, credentials, parts: see `KnownAs`.
        reason: the reason of its refusals.
        staged_at: when the last stage was reached, in seconds since 1970; 0 for never.
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
        """Whether this is a circuit breaker that refused the newest request."""
        return self.kind == BREAKER and self.wait_ms != 0

    def find_left(self, now: float) -> int:
        """The amount left at `now` (seconds since 1970), assuming no further use."""
        passed = max(0, round((now - self.told) * _MS))
        left = self.left + sum([amount for at, amount in self.returned if at >= self.told])
        if self.kind == BUCKET:
            return min(self.limit, left + passed * self.rate)
        if self.kind == PERIOD:
            return self.limit if self.is_over(now) else left
        return left if passed < (self.find_open_ms(now) or 60 * _MS) else self.limit

    def write_grant(self, now: float) -> str:
        """The command that grants its caller more."""
        left = self.find_left(now)
        # What a request reserves may be far below what it costs
        average = (self.limit - left) / max(1, self.requests - self.refused)
        amounts = (self.limit, left, max(self.asked, average))
        return write_budget_grant(
            self.tenant, self.policy, self.rule, *[amount / self.units for amount in amounts]
        )

    def write_command(self, now: float) -> str | None:
        """The command that unblocks its caller; None for a breaker if no hash targets it."""
        if self.is_open:
            return write_breaker_release(self.tenant, self.policy) if self.orderable else None
        return self.write_grant(now)

    def is_over(self, now: float) -> bool:
        """Whether the period has ended."""
        return self.kind == PERIOD and now * _MS >= self.start + self.span

    def find_open_ms(self, now: float) -> int:
        """Milliseconds until a circuit breaker closes: 0 if closed, `FOREVER` until a release."""
        if self.kind != BREAKER or self.wait_ms in (0, FOREVER):
            return self.wait_ms if self.kind == BREAKER else 0
        return max(0, self.wait_ms - round((now - self.told) * _MS))

    def find_reset_ms(self, now: float) -> int:
        """Milliseconds until the budget is full or its next period begins, or `FOREVER`."""
        if self.kind == BUCKET:
            return -(-(self.limit - self.find_left(now)) // max(1, self.rate))
        if self.kind == PERIOD:
            return max(0, round(self.start + self.span - now * _MS))
        return self.find_open_ms(now)

    def make_credit(self, amount: int, raised: int = 0) -> Take:
        """A store request that credits `amount`, at most to the limit plus `raised`."""
        take = Take(self.key, self.kind, 0, self.limit, self.rate, self.span, self.offset)
        return take.raise_limit(raised).settle(amount, self.start)


class BudgetDocument(Document, array_like=True):
    """Budgets, the most recent first."""

    rows: Annotated[list[BudgetRow], SUM]
    left_out: Annotated[int, SUM] = 0

    def finish(self, now: float) -> None:
        """See `Document`."""
        super().finish(now)
        known = [row for row in self.rows if row.requests]  # the others only have settlements
        self.rows = sorted(known, key=lambda row: -row.last)
