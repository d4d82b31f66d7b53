"""Budgets of a caller: the rules of `budget.lua`. Amounts are integers, in any unit.

- `BUCKET`: a level that rises by `rate` each millisecond, up to `limit`; a request takes its cost
  (state: level, time).
- `PERIOD`: usage in a period of the calendar, up to `limit` (state: start of the period, used).
- `BREAKER`: spending in the last 60 seconds: that of this minute, and a share of that of the minute
  before. The request that brings it to `limit` opens the breaker for `span` (state: minute, spent,
  spent before, open until).

The takes of one request form a group: if one of them does not fit, none is taken. When the actual
cost is known, a settlement corrects the bucket or the period from which it was taken, even below
zero. The settlement of a period that is over has no effect. A settlement may arrive more than once,
and at several replicas, because Envoy sends access log entries again. Its marker, which is stored
for `MARKED_MS`, makes it count once.

A clock may be set back, or may be behind on another server after a failover. Then a bucket does not
rise for the lost time, a period that begins in the future stays the current one, and a breaker is
open no longer than `span`.
"""

from __future__ import annotations

import struct
from typing import Final, TypeAlias

from extproc.calendar import Calendar

BUCKET: Final = 0
PERIOD: Final = 1
BREAKER: Final = 2

ALONE: Final = 0
JOINED: Final = 1
MARKED: Final = 2
"""For the script: a take in its own group or in that of the one before; a marked settlement."""

SERVER_CLOCK: Final = -1
"""In place of the time: use the server's."""

MINUTE: Final = 60_000
YEAR: Final = 31_536_000_000
GARBAGE_MS: Final = 1_000
"""State expires this many milliseconds later than it could."""

FOREVER: Final = -1
"""Never: the end of a breaker that only an operator closes, or of an impossible wait."""

MARKED_MS: Final = 300_000
"""How long a settlement is remembered, in milliseconds; log entries come again within seconds."""

LOWEST: Final = -3_000_000_000_000_000
"""A level does not fall below this, so that all sums stay exact in the numbers of Lua."""

MAX_RAISED: Final = 3_000_000_000_000_000
"""No override raises a limit above this, for the same reason."""

HIGHEST: Final = 4_000_000_000_000_000
"""Usage does not rise above this, for the same reason."""

BudgetState: TypeAlias = tuple[int, int, int, int]
"""The state of all kinds; the last two are 0 except for `BREAKER`.

Times are in milliseconds since 1970.
"""

UNUSED: Final[BudgetState] = (0, -1, 0, 0)
"""The state of an unused budget.

In others, the second number is a time or an amount, so never negative.
"""


class Take:
    """The take of a request from one budget, or its settlement; changed only by `at`.

    Attributes:
        key: the budget's key; like all keys, it ends in two hex digits.
        kind: BUCKET, PERIOD or BREAKER.
        amount: the cost. In a settlement, the excess that was taken, negative if it was too little.
        limit: capacity of the bucket, maximum usage in the period, or the spending in a minute that
            opens the breaker.
        rate: by which a bucket rises each millisecond.
        span: length of the period, or how long the breaker stays open, in milliseconds; 0 if only
            an operator closes it.
        offset: when the first period began, in milliseconds since 1970.
        calendar: of periods whose lengths differ; `at` sets `span` and `offset` from it.
        start: in a settlement, the start in the answer to the take; else -1.
        marker: key of a settlement's marker, in the same hash slot; empty if it cannot come twice.
        lifetime_ms: maximum lifetime of the state, in milliseconds, unless its level is negative.
        arguments: precomputed `list_arguments` of a take that is `ALONE`; or empty.
    """

    def __init__(  # noqa: PLR0913  # a record
        self,
        key: str,
        kind: int,
        amount: int,
        limit: int,
        rate: int,
        span: int,
        offset: int = 0,
        start: int = -1,
        marker: str = "",
        lifetime_ms: int = 0,
        arguments: tuple[int, ...] = (),
        calendar: Calendar | None = None,
    ) -> None:
        """Compute the lifetime unless it is given."""
        if lifetime_ms:
            self.lifetime_ms = lifetime_ms
        elif kind == BUCKET:
            self.lifetime_ms = min(-(-limit // rate), YEAR) + GARBAGE_MS
        else:
            self.lifetime_ms = (span if kind == PERIOD else max(2 * MINUTE, span)) + GARBAGE_MS
        self.key = key
        self.kind = kind
        self.amount = amount
        self.limit = limit
        self.rate = rate
        self.span = span
        self.offset = offset
        self.start = start
        self.marker = marker
        self.arguments = arguments
        self.calendar = calendar

    @property
    def settles(self) -> bool:
        """Whether it is a settlement."""
        return self.start >= 0

    def at(self, now: int) -> Take:
        """Set the period of the calendar that contains `now`, in milliseconds; returns the take."""
        if self.calendar is not None:
            self.offset, end = self.calendar.find(now)
            self.span = end - self.offset
        return self

    def share(self, replicas: int) -> Take:
        """This take for one of several replicas without a store, with a share of the limit.

        There is always room for this request.
        """
        least = self.amount + 1 if self.kind == BREAKER else max(1, self.amount)
        limit = min(self.limit, max(self.limit // replicas, least))
        rate = max(min(1, self.rate), self.rate // replicas)
        return self._copy(self.amount, limit, rate, -1, "")

    def raise_limit(self, amount: int) -> Take:
        """This take with its limit raised by `amount`."""
        limit = min(max(self.limit, MAX_RAISED), self.limit + amount)
        return self._copy(self.amount, limit, self.rate, self.start, self.marker)

    def settle(self, amount: int, start: int, call: str = "") -> Take:
        """The settlement that gives back `amount`.

        `call` names the take; without it, there is no marker.
        """
        marker = f"settled1:{call}:{self.key[-2:]}" if call else ""
        return self._copy(amount, self.limit, self.rate, start, marker)

    def _copy(self, amount: int, limit: int, rate: int, start: int, marker: str) -> Take:
        take = Take(self.key, self.kind, amount, limit, rate, self.span, self.offset, start, marker)
        take.calendar = self.calendar
        return take


class Taken:
    """The answer to a take. For a settlement, only `granted` has a meaning.

    Attributes:
        granted: all takes of the group were granted; or the settlement is not a duplicate.
        fits: this budget had room for it.
        left: the rest of the budget, after the take if it was granted; negative if more was used.
        wait_ms: until it would fit, in milliseconds: 0 if it fits, `FOREVER` if it never does.
        start: for the settlement: the start of the period or minute, and the time for a bucket.
        reset_ms: until the budget is full again, or its next period begins, in milliseconds.
        here: the take, if this process answered it because the store was unavailable; else None.
    """

    def __init__(  # noqa: PLR0913  # a record
        self,
        granted: bool,  # noqa: FBT001  # a field
        fits: bool,  # noqa: FBT001  # a field
        left: int,
        wait_ms: int,
        start: int,
        reset_ms: int,
    ) -> None:
        self.granted = granted
        self.fits = fits
        self.left = left
        self.wait_ms = wait_ms
        self.start = start
        self.reset_ms = reset_ms
        self.here: Take | None = None

    def __eq__(self, other: object) -> bool:
        """Compare all fields but `here`: stores are compared by their answers."""
        return isinstance(other, Taken) and self._list() == other._list()

    def __hash__(self) -> int:
        """Hash the fields that equality compares."""
        return hash(self._list())

    def __repr__(self) -> str:
        """The form in which tests write it."""
        return f"Taken{self._list()}"

    def _list(self) -> tuple[bool, bool, int, int, int, int]:
        return self.granted, self.fits, self.left, self.wait_ms, self.start, self.reset_ms


def list_arguments(take: Take, group: int, now: int) -> tuple[int, ...]:
    """The arguments of `budget.lua` for a take.

    `group` is ALONE, JOINED or MARKED, `now` in milliseconds or SERVER_CLOCK.
    """
    return (
        group,
        take.kind,
        take.amount,
        take.limit,
        take.rate,
        take.span,
        take.offset,
        take.start,
        now,
    )


def advance(state: BudgetState, take: Take, now: int) -> BudgetState:
    """The state as it is now, before anything is taken."""
    if take.kind != BUCKET:
        return (
            _begin_period(state, take, now)
            if take.kind == PERIOD
            else _begin_minute(state, take, now)
        )
    level, time, _, _ = state
    if time < 0:
        return take.limit, now, 0, 0
    if now > time:
        level += (now - time) * take.rate
    return min(level, take.limit), now, 0, 0


def _begin_period(state: BudgetState, take: Take, now: int) -> BudgetState:
    start = now - (now - take.offset) % take.span
    if state[1] < 0 or start > state[0] or state[0] - start > take.span:
        return start, 0, 0, 0
    return state


def _begin_minute(state: BudgetState, take: Take, now: int) -> BudgetState:
    begun = now - now % MINUTE
    minute, spent, before, until = state
    if spent < 0:
        return begun, 0, 0, 0
    if until != FOREVER and until > now + take.span:
        until = now + take.span
    if begun == minute + MINUTE:
        return begun, 0, spent, until
    if begun > minute or minute - begun > MINUTE:
        return begun, 0, 0, until
    return minute, spent, before, until


def find_rate(state: BudgetState, now: int) -> int:
    """Spending in the last 60 seconds, rounded down; partly an estimate."""
    minute, spent, before, _ = state
    left = MINUTE - max(0, now - minute)
    return spent + before // MINUTE * left + before % MINUTE * left // MINUTE


def _check_breaker(state: BudgetState, take: Take, now: int) -> tuple[BudgetState, Taken]:
    minute, _, _, until = state
    if until == FOREVER or now < until:
        wait = FOREVER if until == FOREVER else until - now
        return state, Taken(False, False, 0, wait, minute, max(0, wait))
    left = take.limit - find_rate(state, now)
    if left > take.amount:
        return state, Taken(False, True, left, 0, minute, MINUTE)
    until = now + take.span if take.span else FOREVER
    return (minute, 0, 0, until), Taken(False, False, 0, take.span or FOREVER, minute, take.span)


def check(state: BudgetState, take: Take, now: int) -> tuple[BudgetState, Taken]:
    """Whether an advanced budget has room for a take; the state differs if a breaker opens.

    `granted` is set later.
    """
    if take.kind == BREAKER:
        return _check_breaker(state, take, now)
    if take.kind == BUCKET:
        level, start = state[0], now
        reset = -(-(take.limit - level) // take.rate)
    else:
        start = state[0]
        level, reset = take.limit - state[1], start + take.span - now
    fits, wait = level >= take.amount, 0
    if not fits:
        until = -(-(take.amount - level) // take.rate) if take.kind == BUCKET else reset
        wait = FOREVER if take.amount > take.limit else until
    return state, Taken(False, fits, level, wait, start, reset)


def apply(state: BudgetState, take: Take, taken: Taken) -> BudgetState:
    """Take from a budget that has room, and complete the answer."""
    first, second, third, fourth = state
    taken.granted = True
    taken.left -= take.amount
    if take.kind == BUCKET:
        taken.reset_ms = -(-(take.limit - taken.left) // take.rate)
        return first - take.amount, second, 0, 0
    return first, second + take.amount, third, fourth


def settle(state: BudgetState, asked: Take, now: int) -> BudgetState:
    """The state of a budget after a settlement."""
    first, second, third, fourth = advance(state, asked, now)
    if asked.kind == BUCKET:
        return min(asked.limit, max(LOWEST, first + asked.amount)), second, 0, 0
    if first == asked.start:
        second = min(HIGHEST, max(0, second - asked.amount))
    elif asked.kind == BREAKER and first == asked.start + MINUTE:
        third = min(HIGHEST, max(0, third - asked.amount))
    return first, second, third, fourth


def is_marked(marked: int, now: int) -> bool:
    """Whether a marker that was set then is still valid."""
    return abs(now - marked) < MARKED_MS


def find_lifetime(state: BudgetState, take: Take, now: int) -> int:
    """How long the state is needed, in milliseconds."""
    if take.kind == BUCKET:
        lasts = -(-(take.limit - state[0]) // take.rate)
    elif take.kind == PERIOD:
        lasts = state[0] + take.span - now
    else:
        lasts = YEAR if state[3] == FOREVER else max(2 * MINUTE, state[3] - now)
    return min(lasts, YEAR) + GARBAGE_MS


ANSWER: Final = struct.Struct(">??qqqq")
