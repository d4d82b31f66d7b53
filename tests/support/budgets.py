"""Budgets: a plain model, cases for both languages, and random requests."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

from hypothesis import strategies as st

from extproc.calendar import Calendar
from extproc.store.rules.budget import (
    BREAKER,
    BUCKET,
    FOREVER,
    MARKED_MS,
    MINUTE,
    PERIOD,
    Take,
    Taken,
)
from tests.support.records import replace
from tests.support.servers import Driver

# A Thursday.
NOON: Final = int(datetime(2026, 11, 26, 12, tzinfo=UTC).timestamp() * 1000)
DECEMBER: Final = int(datetime(2026, 11, 30, 23, tzinfo=UTC).timestamp() * 1000)  # in Berlin

MONTH: Final = Calendar("month", ZoneInfo("Europe/Berlin"))
WEEK: Final = 604_800_000
# 1970-01-04, the first Sunday.
SUNDAY: Final = 259_200_000

DIGITS: Final = "7f"


def make_bucket(amount: int = 1, limit: int = 10, rate: int = 1, key: str = "bucket") -> Take:
    return Take(f"{key}:{DIGITS}", BUCKET, amount, limit, rate, 0)


def make_period(
    amount: int = 1, limit: int = 10, span: int = 300_000, key: str = "period", offset: int = 0
) -> Take:
    return Take(f"{key}:{DIGITS}", PERIOD, amount, limit, 0, span, offset)


def make_month(amount: int = 1, limit: int = 10) -> Take:
    return Take(f"month:{DIGITS}", PERIOD, amount, limit, 0, 31 * 86_400_000, calendar=MONTH)


def make_breaker(
    amount: int = 1, limit: int = 10, span: int = 300_000, key: str = "breaker"
) -> Take:
    return Take(f"{key}:{DIGITS}", BREAKER, amount, limit, 0, span)


class Asked(NamedTuple):
    takes: Sequence[Take]
    now: int


# Requests, and for each take `granted`, `fits`, `left` and `wait_ms`; nothing for a settlement.
CASES: Final[dict[str, list[tuple[Asked, list[tuple[bool, bool, int, int]]]]]] = {
    "a bucket starts full, refills, and states the wait": [
        (Asked([make_bucket(7)], NOON), [(True, True, 3, 0)]),
        (Asked([make_bucket(7)], NOON + 1), [(False, False, 4, 3)]),
        (Asked([make_bucket(7)], NOON + 3), [(False, False, 6, 1)]),
        (Asked([make_bucket(7)], NOON + 4), [(True, True, 0, 0)]),
        (Asked([make_bucket(10)], NOON + 1_000), [(True, True, 0, 0)]),
    ],
    "a cost above the capacity never fits": [
        (Asked([make_bucket(11)], NOON), [(False, False, 10, FOREVER)])
    ],
    "a period ends by the calendar": [
        (Asked([make_period(10)], NOON + 299_999), [(True, True, 0, 0)]),
        (Asked([make_period(1)], NOON + 299_999), [(False, False, 0, 1)]),
        (Asked([make_period(1)], NOON + 300_000), [(True, True, 9, 0)]),
        (Asked([make_period(11)], NOON + 300_000), [(False, False, 9, FOREVER)]),
    ],
    "a week begins on Sunday": [
        (Asked([make_period(4, span=WEEK, offset=SUNDAY)], NOON), [(True, True, 6, 0)]),
        (Asked([make_period(7, span=WEEK, offset=SUNDAY)], NOON), [(False, False, 6, 216_000_000)]),
        (
            Asked([make_period(7, span=WEEK, offset=SUNDAY)], NOON + 216_000_000),
            [(True, True, 3, 0)],
        ),
    ],
    "a month begins at midnight in its time zone": [
        (Asked([make_month(4)], NOON), [(True, True, 6, 0)]),
        (Asked([make_month(7)], NOON), [(False, False, 6, DECEMBER - NOON)]),
        (Asked([make_month(6)], DECEMBER - 1), [(True, True, 0, 0)]),
        (Asked([make_month(7)], DECEMBER), [(True, True, 3, 0)]),
        (Asked([make_month().settle(7, DECEMBER)], DECEMBER + 1), []),
        (Asked([make_month(10)], DECEMBER + 1), [(True, True, 0, 0)]),
        (Asked([make_month(1)], DECEMBER + 2), [(False, False, 0, 31 * 86_400_000 - 2)]),
    ],
    "all takes of a request are granted, or none": [
        (Asked([make_bucket(4), make_period(4)], NOON), [(True, True, 6, 0), (True, True, 6, 0)]),
        (
            Asked([make_bucket(4), make_period(7)], NOON),
            [(False, True, 6, 0), (False, False, 6, 300_000)],
        ),
        (
            Asked([make_bucket(7), make_period(4)], NOON),
            [(False, False, 6, 1), (False, True, 6, 0)],
        ),
        (Asked([make_bucket(6), make_period(6)], NOON), [(True, True, 0, 0), (True, True, 0, 0)]),
    ],
    "a breaker opens with the request that reaches its rate, and closes by itself": [
        (Asked([make_breaker(6)], NOON), [(True, True, 4, 0)]),
        (Asked([make_breaker(4)], NOON + 1), [(False, False, 0, 300_000)]),
        (Asked([make_breaker(1)], NOON + 300_000), [(False, False, 0, 1)]),
        (Asked([make_breaker(1)], NOON + 300_001), [(True, True, 9, 0)]),
    ],
    "a breaker includes a share of the previous minute": [
        (Asked([make_breaker(6)], NOON), [(True, True, 4, 0)]),
        (Asked([make_breaker(3)], NOON + 90_000), [(True, True, 4, 0)]),
        (Asked([make_breaker(4)], NOON + 90_000), [(False, False, 0, 300_000)]),
    ],
    "a breaker without a reset stays open": [
        (Asked([make_breaker(10, span=0)], NOON), [(False, False, 0, FOREVER)]),
        (Asked([make_breaker(1, span=0)], NOON + 86_400_000), [(False, False, 0, FOREVER)]),
    ],
    "a breaker that opens takes nothing from other budgets": [
        (Asked([make_bucket(10)], NOON), [(True, True, 0, 0)]),
        (
            Asked([make_bucket(1), make_breaker(10)], NOON),
            [(False, False, 0, 1), (False, False, 0, 300_000)],
        ),
        (
            Asked([make_bucket(1), make_breaker(1)], NOON + 5),
            [(False, True, 5, 0), (False, False, 0, 299_995)],
        ),
        (Asked([make_bucket(5)], NOON + 5), [(True, True, 0, 0)]),
    ],
    "a settlement corrects a bucket, also below zero": [
        (Asked([make_bucket(8, rate=1)], NOON), [(True, True, 2, 0)]),
        (Asked([make_bucket().settle(5, NOON)], NOON), []),
        (Asked([make_bucket(7)], NOON), [(True, True, 0, 0)]),
        (Asked([make_bucket().settle(-20, NOON)], NOON), []),
        (Asked([make_bucket(1)], NOON + 20), [(False, False, 0, 1)]),
        (Asked([make_bucket().settle(100, NOON)], NOON + 20), []),
        (Asked([make_bucket(1)], NOON + 20), [(True, True, 9, 0)]),
    ],
    "a settlement belongs to the period of its take": [
        (Asked([make_period(8)], NOON), [(True, True, 2, 0)]),
        (Asked([make_period().settle(5, NOON)], NOON), []),
        (Asked([make_period(1)], NOON), [(True, True, 6, 0)]),
        (Asked([make_period().settle(-20, NOON)], NOON), []),
        (Asked([make_period(1)], NOON), [(False, False, -14, 300_000)]),
        (Asked([make_period(8)], NOON + 300_000), [(True, True, 2, 0)]),
        (Asked([make_period().settle(5, NOON)], NOON + 300_000), []),
        (Asked([make_period(2)], NOON + 300_000), [(True, True, 0, 0)]),
    ],
    "a settlement before its take counts": [
        (Asked([make_period().settle(-4, NOON)], NOON), []),
        (Asked([make_period(7)], NOON), [(False, False, 6, 300_000)]),
        (Asked([make_bucket().settle(-4, NOON)], NOON), []),
        (Asked([make_bucket(7)], NOON), [(False, False, 6, 1)]),
    ],
    "a repeated settlement counts once": [
        (Asked([make_bucket(9), make_period(9, span=3_600_000)], NOON), [(True, True, 1, 0)] * 2),
        (Asked([make_bucket().settle(5, NOON, "a")], NOON), []),
        (Asked([make_bucket().settle(5, NOON, "a")], NOON), []),
        (Asked([make_period(span=3_600_000).settle(5, NOON, "b")], NOON), []),
        (Asked([make_period(span=3_600_000).settle(5, NOON, "b")], NOON - 10), []),
        (Asked([make_bucket(6), make_period(6, span=3_600_000)], NOON), [(True, True, 0, 0)] * 2),
        (Asked([make_period(span=3_600_000).settle(1, NOON, "c")], NOON), []),
        (Asked([make_period(span=3_600_000).settle(1, NOON, "b")], NOON + MARKED_MS - 1), []),
        (Asked([make_period(span=3_600_000).settle(1, NOON, "b")], NOON + MARKED_MS), []),
        (Asked([make_period(0, span=3_600_000)], NOON), [(True, True, 2, 0)]),
    ],
    "a settlement corrects a breaker": [
        (Asked([make_breaker(1)], NOON), [(True, True, 9, 0)]),
        (Asked([make_breaker().settle(-7, NOON)], NOON), []),
        (Asked([make_breaker(1)], NOON + 60_000), [(True, True, 1, 0)]),
        (Asked([make_breaker().settle(-3, NOON)], NOON + 60_000), []),
        (Asked([make_breaker(1)], NOON + 60_000), [(False, False, 0, 300_000)]),
    ],
    "a clock set back gives no budget twice": [
        (
            Asked([make_bucket(10), make_period(10), make_breaker(9)], NOON),
            [(True, True, 0, 0)] * 2 + [(True, True, 1, 0)],
        ),
        (Asked([make_bucket(1)], NOON - 5), [(False, False, 0, 1)]),
        (Asked([make_bucket(1)], NOON - 4), [(True, True, 0, 0)]),
        (Asked([make_period(1)], NOON - 1), [(False, False, 0, 300_001)]),
        (Asked([make_breaker(1)], NOON - 1), [(False, False, 0, 300_000)]),
        (Asked([make_breaker(1)], NOON - 100_000), [(False, False, 0, 300_000)]),
    ],
    "a lowered limit applies at once": [
        (Asked([make_bucket(1, limit=100)], NOON), [(True, True, 99, 0)]),
        (Asked([make_bucket(1, limit=5)], NOON), [(True, True, 4, 0)]),
    ],
    "the largest amounts are exact": [
        (
            Asked([make_bucket(1, limit=3 * 10**15, rate=7)], NOON),
            [(True, True, 3 * 10**15 - 1, 0)],
        ),
        (
            Asked([make_bucket(3 * 10**15 - 1, limit=3 * 10**15, rate=7)], NOON),
            [(True, True, 0, 0)],
        ),
        (
            Asked([make_bucket(3 * 10**15, limit=3 * 10**15, rate=7)], NOON),
            [(False, False, 0, 428_571_428_571_429)],
        ),
        (Asked([make_period(10**15 - 1, limit=10**15)], NOON), [(True, True, 1, 0)]),
        (Asked([make_period(1, limit=10**15)], NOON), [(True, True, 0, 0)]),
    ],
}


class Bucket:
    """A bucket's level at any time, computed from all that was taken."""

    def __init__(self, take: Take) -> None:
        self._level, self._time = Fraction(take.limit), 0

    def look(self, take: Take, now: int) -> tuple[bool, int, int]:
        if self._time:
            self._level = min(
                Fraction(take.limit), self._level + take.rate * max(0, now - self._time)
            )
        self._time = now
        left, fits = int(self._level), self._level >= take.amount
        wait = next(
            (ms for ms in range(100_000) if self._level + ms * take.rate >= take.amount), None
        )
        return (
            fits,
            left,
            0 if fits else FOREVER if take.amount > take.limit or wait is None else wait,
        )

    def take(self, amount: int) -> None:
        self._level -= amount

    def settle(self, take: Take, now: int) -> None:
        self.look(take, now)
        self._level = min(Fraction(take.limit), self._level + take.amount)


class Period:
    def __init__(self, _: Take) -> None:
        self._used: dict[datetime, int] = {}
        self._current = datetime.min.replace(tzinfo=UTC)

    @staticmethod
    def _find(take: Take, now: int) -> datetime:
        moment = datetime.fromtimestamp(now // 1000, UTC)
        if take.span == WEEK:
            day = moment.date() - timedelta(days=(moment.weekday() + 1) % 7)
            return datetime(day.year, day.month, day.day, tzinfo=UTC)
        midnight = moment.replace(hour=0, minute=0, second=0)
        length = timedelta(milliseconds=take.span)
        return midnight + (moment - midnight) // length * length

    def look(self, take: Take, now: int) -> tuple[bool, int, int]:
        self._current = self._find(take, now)
        left = take.limit - self._used.get(self._current, 0)
        ends = int(self._current.timestamp() * 1000) + take.span
        fits = left >= take.amount
        return fits, left, 0 if fits else FOREVER if take.amount > take.limit else ends - now

    def take(self, amount: int) -> None:
        self._used[self._current] = self._used.get(self._current, 0) + amount

    def settle(self, take: Take, now: int) -> None:  # noqa: ARG002  # as the others
        start = datetime.fromtimestamp(take.start // 1000, UTC)
        self._used[start] = max(0, self._used.get(start, 0) - take.amount)


class Breaker:
    def __init__(self, _: Take) -> None:
        self._spent: dict[int, int] = {}
        self._until = 0
        self._minute = 0

    def look(self, take: Take, now: int) -> tuple[bool, int, int]:
        if now < self._until:
            return False, 0, self._until - now
        self._minute = now // MINUTE
        before = Fraction(self._spent.get(self._minute - 1, 0)) * (MINUTE - now % MINUTE) / MINUTE
        left = take.limit - self._spent.get(self._minute, 0) - int(before)
        if left > take.amount:
            return True, left, 0
        self._spent.clear()
        self._until = now + take.span
        return False, 0, take.span

    def take(self, amount: int) -> None:
        self._spent[self._minute] = self._spent.get(self._minute, 0) + amount

    def settle(self, take: Take, now: int) -> None:
        minute = take.start // MINUTE
        if now // MINUTE - minute <= 1:
            self._spent[minute] = max(0, self._spent.get(minute, 0) - take.amount)


MODELS: Final[dict[int, type[Bucket | Period | Breaker]]] = {
    BUCKET: Bucket,
    PERIOD: Period,
    BREAKER: Breaker,
}

_BUDGETS = [
    *[
        make_bucket(0, limit, rate, f"bucket{place}")
        for place, (limit, rate) in enumerate([(10, 1), (50, 3)])
    ],
    *[make_period(0, 40, span, f"period{span}") for span in (300_000, 3_600_000, 86_400_000)],
    make_period(0, 60, WEEK, "week", SUNDAY),
    make_breaker(0, 30, 120_000),
]


class Sent(NamedTuple):
    """A random request.

    Attributes:
        gap: milliseconds since the request before.
        costs: by budget.
        late: settled after this number of requests; None for never.
        again: settled again, at another replica, after this number of requests; None for never.
        wrong: overestimate, by budget.
    """

    gap: int
    costs: list[tuple[int, int]]
    late: int | None
    again: int | None
    wrong: int


REQUESTS: Final = st.lists(
    st.builds(
        Sent,
        st.one_of(
            st.integers(0, 5),
            st.sampled_from([50, 30_000, 59_999, 60_000, 299_999, 3_600_000, 86_400_000]),
        ),
        st.lists(
            st.tuples(st.integers(0, len(_BUDGETS) - 1), st.integers(0, 20)),
            min_size=1,
            unique_by=lambda pair: pair[0],
        ),
        st.none() | st.integers(0, 6),
        st.none() | st.integers(0, 6),
        st.integers(-15, 15),
    ),
    max_size=40,
)


def list_asked(
    sent: Sequence[Sent], answers: list[list[Taken]], place: int, now: int
) -> list[Take]:
    """The settlements that are due before a request."""
    due = [
        number
        for number in range(place)
        if place - number - 1 in (sent[number].late, sent[number].again)
    ]
    return [
        _BUDGETS[budget].settle(min(sent[number].wrong, cost), taken.start, f"{number}.{budget}")
        for number in due
        for (budget, cost), taken in zip(sent[number].costs, answers[number], strict=True)
        if taken.granted and now >= 0
    ]


def make_takes(request: Sent) -> list[Take]:
    made = []
    for budget, cost in request.costs:
        one = _BUDGETS[budget]
        made.append(Take(one.key, one.kind, cost, one.limit, one.rate, one.span, one.offset))
    return made


class Model:
    def __init__(self) -> None:
        self._budgets: dict[str, Bucket | Period | Breaker] = {}
        self._settled: dict[str, int] = {}

    def _open(self, take: Take) -> Bucket | Period | Breaker:
        if take.key not in self._budgets:
            self._budgets[take.key] = MODELS[take.kind](take)
        return self._budgets[take.key]

    def ask(self, takes: Sequence[Take], now: int) -> list[tuple[bool, bool, int, int]]:
        looked = [self._open(take).look(take, now) for take in takes]
        granted = all(fits for fits, _, _ in looked)
        if granted:
            for take in takes:
                self._open(take).take(take.amount)
        return [
            (granted, fits, left - (take.amount if granted else 0), wait)
            for take, (fits, left, wait) in zip(takes, looked, strict=True)
        ]

    def settle(self, asked: Take, now: int) -> bool:
        """Settle a request.

        Returns whether it changed anything: a recent settlement is not repeated.
        """
        if now - self._settled.get(asked.marker, -MARKED_MS) < MARKED_MS:
            return False
        self._settled[asked.marker] = now
        self._open(asked).settle(asked, now)
        return True


def ask_store(store: Driver, takes: Sequence[Take], now: int | None) -> list[Taken]:
    named = [
        replace(
            take, key=store.name(take.key), marker=store.name(take.marker) if take.marker else ""
        )
        for take in takes
    ]
    return list(store.settled(lambda on: on.hit(named, now)))


def shown(taken: Taken) -> tuple[bool, bool, int, int]:
    return taken.granted, taken.fits, taken.left, taken.wait_ms
