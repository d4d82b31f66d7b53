"""Budgets as replicas publish them, and how the rows of several replicas are merged.

The replicas share a budget's state, so the newest answer of the store is right. New fields go behind the others and have a
default.
"""
# interpreted: msgspec makes its classes

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from extproc.operator.board import KEPT_SECONDS, fit, merge_rows
from extproc.store.rules.budget import BREAKER, BUCKET, FOREVER, PERIOD, Take

_MS = 1_000


class BudgetRow(msgspec.Struct, array_like=True):
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
    """

    tenant: str
    policy: str
    mode: str
    rule: str
    budget: str
    caller: list[tuple[str, str]]
    hashes: list[tuple[str, str]]
    orderable: bool
    unit: str
    words: str
    units: int
    key: str
    kind: int
    limit: int
    rate: int
    span: int
    offset: int
    start: int
    left: int
    wait_ms: int
    told: float
    first: float
    last: float
    requests: int
    refused: int
    refused_at: float
    stage: str = ""
    asked: int = 0
    alias: str = ""
    labels: list[tuple[str, str]] = []  # msgspec copies a default for each object
    credentials: list[str] = []
    parts: list[str] = []
    estimated: int = 0
    returned: list[tuple[float, int]] = []

    @property
    def name(self) -> tuple[str, str, str, str, str]:
        """What distinguishes it from other rows."""
        return self.tenant, self.policy, self.mode, self.rule, self.budget

    def find_left(self, now: float) -> int:
        """What is left at a later time, in seconds since 1970, if nothing was used since."""
        passed = max(0, round((now - self.told) * _MS))
        left = self.left + sum([amount for at, amount in self.returned if at > self.told])
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

    def absorb(self, other: BudgetRow) -> None:
        """Add what another replica knows of the same budget."""
        if other.start == self.start or self.kind == BUCKET:
            self.estimated += other.estimated
            self.returned = [*self.returned, *other.returned]
        elif other.start > self.start:
            self.estimated, self.returned = other.estimated, other.returned
        self.orderable = self.orderable or other.orderable
        if other.told > self.told:
            for field in _STATE:
                setattr(self, field, getattr(other, field))
        if other.refused_at > self.refused_at:
            self.refused_at, self.asked = other.refused_at, other.asked
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        self.requests += other.requests
        self.refused += other.refused
        self.caller, self.hashes = self.caller or other.caller, self.hashes or other.hashes
        self.alias, self.labels = self.alias or other.alias, self.labels or other.labels
        self.credentials, self.parts = self.credentials or other.credentials, self.parts or other.parts


_STATE = ("key", "limit", "rate", "span", "offset", "start", "left", "wait_ms", "told", "units", "stage")


class BudgetDocument(msgspec.Struct, array_like=True):
    """What one replica publishes, or what all replicas know: most recent first, and how many did not fit."""

    rows: list[BudgetRow]
    left_out: int = 0

    def pack(self) -> bytes:
        """Pack as many rows as fit on a board; the last ones are left out."""
        rows = self.rows
        return fit(len(rows), lambda kept: BudgetDocument(rows[:kept], len(rows) - kept))

    @classmethod
    def merge(cls, documents: Iterable[BudgetDocument], now: float) -> BudgetDocument:
        """Merge documents; `now` is in seconds since 1970."""
        every = list(documents)
        rows = merge_rows((row for document in every for row in document.rows), now - KEPT_SECONDS)
        return cls(sorted(rows, key=lambda row: -row.last), sum(document.left_out for document in every))
