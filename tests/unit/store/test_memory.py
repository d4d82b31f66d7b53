"""What only the memory store promises, and how a URL names a store; time is an argument."""

import pytest

from extproc.metrics import Metrics
from extproc.store import open_store
from extproc.store.memory import MemoryStore
from extproc.store.rules.ring import Push
from extproc.store.rules.windows import Hit
from tests.support.budgets import make_bucket
from tests.support.records import replace
from tests.support.windows import make_hit, make_push


class Memory:
    def __init__(self, max_entries: int) -> None:
        self.metrics = Metrics()
        self._store = MemoryStore(self.metrics, max_entries)
        self.hit, self.push = self._store.hit, self._store.push

    def __len__(self) -> int:
        return len(self._store)

    @property
    def evictions(self) -> float | None:
        return self.metrics.registry.get_sample_value("loopguard_store_evictions_total")

    def count(self, now: int, **keys: Hit) -> dict[str, int]:
        return {key: self.hit([replace(hit, key=key)], now)[0].count for key, hit in keys.items()}


def test_expired_entries_are_dropped_first() -> None:
    store = Memory(2)
    long, short = make_hit(window_ms=60_000), make_hit(window_ms=1_000)
    store.count(0, long=long)
    store.count(10, short=short)

    store.count(2_000, fresh=long)

    assert store.evictions == 0
    assert store.count(2_001, long=long) == {"long": 2}


def test_running_cooldown_does_not_expire() -> None:
    store = Memory(2)
    tripping, other = make_hit(window_ms=100, cooldown_ms=50_000), make_hit(window_ms=100)
    for now in range(3):
        store.hit([tripping], now)
    for now in range(1_000, 10_000, 200):
        store.hit([replace(other, key=f"other-{now}")], now)

    assert store.hit([tripping], 10_000)[0].looping


@pytest.mark.slow
@pytest.mark.parametrize("max_entries", [10, 5_000])
def test_memory_is_bounded_and_expired_entries_are_swept(max_entries: int) -> None:
    store = Memory(max_entries)
    hit = make_hit()
    for number in range(10 * max_entries):
        store.hit([replace(hit, key=f"key-{number}")], number // 10)
        assert len(store) <= max_entries

    for number in range(2 * max_entries):
        store.hit([replace(hit, key=f"late-{number % 3}", window_ms=1)], 1_000_000 + number * 2)
    assert len(store) < max_entries


def test_rings_are_bounded_together_with_counters() -> None:
    """A ring takes the place of a counter; expired entries go first, then the oldest."""
    store = Memory(3)
    ring, hit = make_push("a"), make_hit()
    store.push([ring], 0)
    store.count(1, b=hit, c=hit)
    store.push([ring], 2)

    store.count(3, d=hit)

    assert store.evictions == 1
    assert store.push([ring._replace(request=b"another.")], 4) == [[b"a", b"a"]]
    assert store.count(5, c=hit, d=hit) == {"c": 2, "d": 2}
    store.count(9_999, c=replace(hit, window_ms=20_000), d=replace(hit, window_ms=20_000))
    assert len(store) == 3


def test_budgets_of_many_callers_keep_what_was_used() -> None:
    """A few stay unpacked, the others make room after a minute; none begins anew."""
    store = Memory(200)
    takes = [make_bucket(limit=1_000_000, key=f"b{number}") for number in range(100)]
    for now in (0, 1, 61_000):
        for take in takes:
            store.hit([take], now)

    answers = [store.hit([replace(take, amount=1)], 61_000)[0] for take in takes]

    assert {answer.left for answer in answers} == {1_000_000 - 2}
    assert store.evictions == 0
    for take in takes:
        store.hit([replace(take, key=f"late-{take.key}")], 3_000_000)
    assert len(store) < 200
    for number in range(1_000):
        store.hit([replace(takes[0], key=f"more-{number}")], 3_000_000)
    assert len(store) <= 200 + 200 // 32
    assert store.evictions


@pytest.mark.slow
def test_memory_of_long_rings_is_bounded() -> None:
    store = Memory(1_000)
    for number in range(1_000):
        for request in range(32):
            pushed = Push(f"ring-{number}", bytes(64), request.to_bytes(8, "big"), 32, 10_000)
            assert len(store.push([pushed], number)[0]) == request + 1

    assert 200 < len(store) < 400
    assert len(store.push([Push("ring-999", b"", bytes(7) + b"x", 32, 10_000)], 1_000)[0]) == 32


def test_max_entries_comes_from_the_url() -> None:
    store = open_store("memory://?max_entries=2", Metrics())
    assert isinstance(store, MemoryStore)

    store.hit([make_hit(key=key) for key in "abc"], 0)

    assert len(store) == 2
