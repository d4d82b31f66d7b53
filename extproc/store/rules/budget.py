"""Budgets of a caller: the rules of `budget.lua`. Amounts are integers, in units that the caller of the store chooses.

- `BUCKET`: a level that rises by `rate` each millisecond, up to `limit`; a request takes its cost (state: level, time).
- `PERIOD`: what was used in a period of the calendar, up to `limit` (state: start of the period, used).
- `BREAKER`: what was spent in this minute and in the one before, which counts by its part in the last 60 seconds. The request
  with which their sum reaches `limit` opens it for `span` (state: minute, spent, spent before, open until).

The takes of one request form a group: if one of them does not fit, none is taken. A request whose cost turns out to be another
is settled, also below zero, in the bucket or in the period from which it was taken. What was taken from a period that is over
is not settled: it has no effect any more. A settlement may come more than once, and to several replicas, because Envoy sends
access log entries again; its marker, a value that is kept for `MARKED_MS`, makes it count once.

A clock may be set back, or may be behind on another server after a failover. Then a bucket does not rise for the time that is
lost, a period that has not begun goes on, and a breaker is open no longer than `span`.
"""

from __future__ import annotations

import struct
from typing import Final, TypeAlias

BUCKET: Final = 0
PERIOD: Final = 1
BREAKER: Final = 2

ALONE: Final = 0
JOINED: Final = 1
MARKED: Final = 2
"""How a take belongs to the one before it, for the script: not at all, in one group; or it is a settlement with a marker."""

SERVER_CLOCK: Final = -1
"""In place of the time."""

MINUTE: Final = 60_000
YEAR: Final = 31_536_000_000
GARBAGE_MS: Final = 1_000
"""State is kept for this many milliseconds longer than it matters."""

FOREVER: Final = -1
"""A time that does not come: when a breaker closes that only an operator closes, or when a request fits that is too large."""

MARKED_MS: Final = 300_000
"""How long a settlement is remembered, in milliseconds: entries of the access log come again within seconds."""

LOWEST: Final = -3_000_000_000_000_000
"""A level does not fall below this, so that all sums stay exact in the numbers of Lua."""

MAX_RAISED: Final = 3_000_000_000_000_000
"""No order raises a limit above this, for the same reason."""

HIGHEST: Final = 4_000_000_000_000_000
"""Nor does what was used rise above this."""

BudgetState: TypeAlias = tuple[int, int, int, int]
"""The state of all kinds; the last two are 0 except for `BREAKER`. Times are in milliseconds since 1970."""

UNUSED: Final[BudgetState] = (0, -1, 0, 0)
"""The state of a budget of which nothing was used: what is second is a time or an amount, so never negative."""


class Take:
    """What a request is to take from one budget, or what it gives back; never changed.

    Attributes:
        key: the budget's key; like all keys, it ends in two hex digits.
        kind: BUCKET, PERIOD or BREAKER.
        amount: the cost. In a settlement, what was taken too much, negative if it was too little.
        limit: the most that the bucket holds, that may be used in the period, or the rate that opens the breaker.
        rate: of a bucket, each millisecond.
        span: length of the period, or how long the breaker stays open, in milliseconds; 0 for until an operator closes it.
        offset: when the first period began, in milliseconds since 1970.
        start: in a settlement, the start in the answer to the take; else -1.
        marker: key of a settlement's marker, in the same hash slot; empty if it cannot come twice.
        lifetime_ms: how long the state of such a budget matters at most, in milliseconds, unless it is below zero.
        arguments: `list_arguments` of a take that is alone, if it has some in common with others; else empty.
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
    ) -> None:
        """Without a lifetime, it is worked out."""
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

    @property
    def settles(self) -> bool:
        """Whether it is a settlement."""
        return self.start >= 0

    def share(self, replicas: int) -> Take:
        """The same for one of several replicas without a store: each has a part of the limit, but room for this request."""
        least = self.amount + 1 if self.kind == BREAKER else max(1, self.amount)
        limit = min(self.limit, max(self.limit // replicas, least))
        rate = max(min(1, self.rate), self.rate // replicas)
        return Take(self.key, self.kind, self.amount, limit, rate, self.span, self.offset)

    def raise_limit(self, amount: int) -> Take:
        """The same for a caller whose limit is higher by this amount for a while."""
        limit = min(max(self.limit, MAX_RAISED), self.limit + amount)
        return Take(self.key, self.kind, self.amount, limit, self.rate, self.span, self.offset, self.start, self.marker)

    def settle(self, amount: int, start: int, call: str = "") -> Take:
        """The settlement of a take: this much was taken too much. `call` names the take; without it, nothing is remembered."""
        marker = f"settled1:{call}:{self.key[-2:]}" if call else ""
        return Take(self.key, self.kind, amount, self.limit, self.rate, self.span, self.offset, start, marker)


class Taken:
    """The answer to a take. Of the answer to a settlement, only `granted` matters.

    Attributes:
        granted: it was taken, and so was all else in its group; or it was settled, for the first time.
        fits: this budget had room for it.
        left: what is left of the budget, after the take if it was granted; negative if more was used.
        wait_ms: until it would fit, in milliseconds: 0 if it fits, `FOREVER` if it never does.
        start: for the settlement: the start of the period or minute, and the time for a bucket.
        reset_ms: until the budget is whole again, or its next period begins, in milliseconds.
        here: the question that this process has answered itself, because the store was unavailable; else None.
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
    """The arguments of `budget.lua` for a take. `group` is ALONE, JOINED or MARKED, `now` in milliseconds or SERVER_CLOCK."""
    return group, take.kind, take.amount, take.limit, take.rate, take.span, take.offset, take.start, now


def advance(state: BudgetState, take: Take, now: int) -> BudgetState:
    """The state as it is now, before anything is taken."""
    if take.kind != BUCKET:
        return _begin_period(state, take, now) if take.kind == PERIOD else _begin_minute(state, take, now)
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
    """What was spent in the last minute, of which the part in the minute before is an estimate; rounded down."""
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
    """Whether an advanced budget has room for a take; the state differs if a breaker opens. `granted` is yet to be set."""
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
    """How long the state matters, in milliseconds."""
    if take.kind == BUCKET:
        lasts = -(-(take.limit - state[0]) // take.rate)
    elif take.kind == PERIOD:
        lasts = state[0] + take.span - now
    else:
        lasts = YEAR if state[3] == FOREVER else max(2 * MINUTE, state[3] - now)
    return min(lasts, YEAR) + GARBAGE_MS


ANSWER: Final = struct.Struct(">??qqqq")
