"""The number of replicas, and what each enforces without a store; time is an argument."""

import asyncio

from hypothesis import given, strategies as st

from extproc.metrics import Metrics
from extproc.store.memory import MemoryStore
from extproc.store.replicas import KEPT_SECONDS, ReplicaCount, ReplicaWatch
from extproc.store.rules.budget import BREAKER, BUCKET, PERIOD, Take
from tests.support.budgets import NOON, make_breaker, make_bucket, make_period

MOST = 5
"""Replicas."""


def test_fewer_replicas_count_later_than_more() -> None:
    """A store without its data gets the names back one by one."""
    count, seen = ReplicaCount(), []
    for number, now in [
        (3, 100),
        (1, 102),
        (2, 104),
        (3, 106),
        (2, 108),
        (2, 116),
        (0, 117),
        (0, 126),
    ]:
        count.note(number, now)
        seen.append(count.number)

    assert seen == [3, 3, 3, 3, 3, 2, 2, 1]


def test_replicas_see_each_other_while_they_live() -> None:
    """One that dies or leaves is counted for some seconds more; without need, none is counted."""
    clock, told = [NOON], [0, 0, 0]
    store = MemoryStore(Metrics(), clock=lambda: clock[0])

    def watch(place: int, *, needed: bool = True) -> ReplicaWatch:
        return ReplicaWatch(
            store,
            f"replica-{place}",
            lambda: needed,
            lambda number: told.__setitem__(place, number),
        )

    async def live() -> list[list[int]]:
        first, second, third = watch(0), watch(1), watch(2)
        seen, both = [], [first, second]
        for now, looking in [
            (0, [*both, third, first]),
            (9, both),
            (12, both),
            (20, both),
            (22, [first]),
            (31, [first]),
        ]:
            clock[0] = NOON + now * 1_000
            for one in looking:
                await one.look(now)
            if now == 20:
                await second.leave()
            seen.append([*told])
        idle = asyncio.create_task(watch(2, needed=False).run())
        await asyncio.sleep(0)
        idle.cancel()
        await watch(2, needed=False).leave()
        return seen

    seen = asyncio.run(live())

    assert KEPT_SECONDS == 10
    assert seen == [[3, 2, 3], [3, 3, 3], [3, 3, 3], [2, 2, 3], [2, 2, 3], [1, 2, 3]]


def test_share_has_room_for_its_request() -> None:
    bucket = make_bucket(amount=1, limit=10, rate=9).share(4)
    large = make_bucket(amount=7, limit=10, rate=1).share(4)
    never = make_period(amount=11, limit=10).share(4)
    breaker = make_breaker(amount=3, limit=10).share(5)

    assert (bucket.limit, bucket.rate) == (2, 2)
    assert (large.limit, large.rate) == (7, 1)
    assert (never.limit, never.rate) == (10, 0)
    assert breaker.limit == 4
    assert make_bucket(amount=0, limit=3).share(100).limit == 1


@given(
    kind=st.sampled_from([BUCKET, PERIOD, BREAKER]),
    limit=st.integers(1, 60),
    replicas=st.integers(1, MOST),
    sent=st.lists(
        st.tuples(st.integers(0, MOST - 1), st.integers(1, 12), st.integers(0, 30)), max_size=60
    ),
)
def test_sum_of_shares_stays_within_the_limit(
    kind: int, limit: int, replicas: int, sent: list[tuple[int, int, int]]
) -> None:
    """But for one request of each replica."""
    stores = [MemoryStore(Metrics()) for _ in range(replicas)]
    granted, now, largest = 0, NOON, 0
    for place, amount, gap in sent:
        now += gap if kind == BUCKET else 0
        take = Take("k:7f", kind, amount, limit, replicas if kind == BUCKET else 0, 3_600_000)
        (taken,) = stores[place % replicas].hit([take.share(replicas)], now)
        if taken.granted:
            granted, largest = granted + amount, max(largest, amount)

    assert granted <= limit + (now - NOON) * replicas + replicas * largest
