"""What every store must do, and what only the memory store promises; time is an argument."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import UsageError
from extproc.metrics import Metrics
from extproc.store import Store, open_store
from extproc.store.memory import MemoryStore
from extproc.windows import Count, Hit
from tests.test_windows import WINDOW_TYPES, make_hit, oracle

STORES: dict[str, Callable[[], Store]] = {"memory": lambda: open_store("memory://", Metrics())}
"""Every store by name: one body of tests drives them all."""


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Store:
    """Each store, empty."""
    return STORES[request.param]()


def count(store: Store, hits: Sequence[Hit], now: int) -> list[Count]:
    """Count, whether the store answers at once or later."""
    answer = store.hit(hits, now)

    async def settled() -> Sequence[Count]:
        return await answer if inspect.isawaitable(answer) else answer

    return list(asyncio.run(settled()))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(WINDOW_TYPES),
            st.sampled_from([(3, 0, True), (2, 7_000, True), (3, 30_000, False), (2, 0, False)]),
            st.integers(0, 4_000),
        ),
        max_size=40,
    )
)
def test_a_store_answers_as_the_windows_do(steps: list[tuple[str, tuple[int, int, bool], int]]) -> None:
    """Interleaved keys of every window type get the answers that each would get alone."""
    for make in STORES.values():
        store = make()
        now = 1_000
        history: dict[Hit, list[int]] = {}
        answers: dict[Hit, list[Count]] = {}
        for window_type, (threshold, cooldown, refused), gap in steps:
            now += gap
            hit = make_hit(window_type, threshold=threshold, cooldown_ms=cooldown, count_refused=refused)
            hit = hit._replace(key=f"{window_type}:{threshold}:{cooldown}:{refused}")
            history.setdefault(hit, []).append(now)
            answers.setdefault(hit, []).extend(count(store, [hit], now))

        assert {hit: oracle(hit, times) for hit, times in history.items()} == answers


def test_hits_of_one_request_are_counted_in_one_go(store: Store) -> None:
    """Answers come in the order of the hits, each key counted for itself."""
    hits = [make_hit(kind, key=kind) for kind in WINDOW_TYPES]
    count(store, hits[:1], 0)

    answers = count(store, hits, 1)

    assert [answer.count for answer in answers] == [2, 1, 1]


def test_requests_at_the_same_time_count_once_each(store: Store) -> None:
    """A thousand concurrent requests take the numbers 1 to 1000."""

    async def one() -> int:
        answer = store.hit([make_hit()], 5)
        counts: Sequence[Count] = await answer if inspect.isawaitable(answer) else answer
        return counts[0].count

    async def all_at_once() -> list[int]:
        return await asyncio.gather(*(one() for _ in range(1_000)))

    assert sorted(asyncio.run(all_at_once())) == list(range(1, 1_001))


def _memory(max_entries: int) -> tuple[MemoryStore, Metrics]:
    metrics = Metrics()
    return MemoryStore(metrics, max_entries), metrics


def _counts(store: MemoryStore, now: int, **keys: Hit) -> dict[str, int]:
    return {key: store.hit([hit._replace(key=key)], now)[0].count for key, hit in keys.items()}


def test_the_least_recently_used_goes_first() -> None:
    """Past max_entries the entry that was used longest ago is dropped and counted as an eviction."""
    store, metrics = _memory(3)
    hit = make_hit()
    _counts(store, 0, a=hit)
    _counts(store, 1, b=hit, c=hit)
    _counts(store, 2, a=hit)

    _counts(store, 3, d=hit)

    assert len(store) == 3
    assert metrics.store_evictions._value.get() == 1
    assert _counts(store, 4, a=hit, c=hit, d=hit) == {"a": 3, "c": 2, "d": 2}


def test_the_expired_go_before_the_least_recently_used() -> None:
    """An entry whose short window is over makes room, although one with a long window was used before it."""
    store, metrics = _memory(2)
    long, short = make_hit(window_ms=60_000), make_hit(window_ms=1_000)
    _counts(store, 0, long=long)
    _counts(store, 10, short=short)

    _counts(store, 2_000, fresh=long)

    assert metrics.store_evictions._value.get() == 0
    assert _counts(store, 2_001, long=long) == {"long": 2}


def test_a_running_cooldown_is_not_expired() -> None:
    """A tripped entry stays until its cooldown is over, however short its window."""
    store, _ = _memory(2)
    tripping, other = make_hit(window_ms=100, cooldown_ms=50_000), make_hit(window_ms=100)
    for now in range(3):
        store.hit([tripping], now)
    for now in range(1_000, 10_000, 200):
        store.hit([other._replace(key=f"other-{now}")], now)

    assert store.hit([tripping], 10_000)[0].looping


@pytest.mark.parametrize("max_entries", [10, 5_000])
def test_memory_is_bounded_and_expired_entries_are_swept(max_entries: int) -> None:
    """Ten times more keys than there is room never exceed the bound; once they expire, new traffic sweeps them out."""
    store, _ = _memory(max_entries)
    hit = make_hit()
    for number in range(10 * max_entries):
        store.hit([hit._replace(key=f"key-{number}")], number // 10)
        assert len(store) <= max_entries

    for number in range(2 * max_entries):
        store.hit([hit._replace(key=f"late-{number % 3}", window_ms=1)], 1_000_000 + number * 2)
    assert len(store) < max_entries


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("etcd://x", "unknown store 'etcd://x'; known are: memory://"),
        ("memory", "unknown store 'memory'; known are: memory://"),
        ("memory://?max_entries=0", "cannot use store 'memory://?max_entries=0': max_entries must be a positive integer"),
        ("memory://host", "cannot use store 'memory://host': it takes the form memory://?max_entries=1000000"),
        ("memory://?size=3", "cannot use store 'memory://?size=3': it takes the form memory://?max_entries=1000000"),
    ],
)
def test_a_bad_store_url_says_what_would_be_right(url: str, message: str) -> None:
    """An unknown scheme or option is a usage error that names the forms there are."""
    with pytest.raises(UsageError) as error:
        open_store(url, Metrics())

    assert str(error.value) == message


def test_max_entries_comes_from_the_url() -> None:
    """`?max_entries=` bounds the store."""
    store = open_store("memory://?max_entries=2", Metrics())
    for key in "abc":
        count(store, [make_hit(key=key)], 0)

    assert isinstance(store, MemoryStore)
    assert len(store) == 2
