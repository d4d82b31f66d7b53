"""What only the memory store promises, and how a URL names a store; time is an argument."""

from __future__ import annotations

import pytest

from extproc.errors import UsageError
from extproc.metrics import Metrics
from extproc.store import open_store
from extproc.store.memory import MemoryStore
from extproc.store.rules.ring import Push
from extproc.store.rules.windows import Hit
from tests.support.budgets import make_bucket
from tests.support.records import replace
from tests.support.windows import (
    make_hit,
    make_push,
)


def _memory(max_entries: int) -> tuple[MemoryStore, Metrics]:
    metrics = Metrics()
    return MemoryStore(metrics, max_entries), metrics


def _counts(store: MemoryStore, now: int, **keys: Hit) -> dict[str, int]:
    return {key: store.hit([replace(hit, key=key)], now)[0].count for key, hit in keys.items()}


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
        store.hit([replace(other, key=f"other-{now}")], now)

    assert store.hit([tripping], 10_000)[0].looping


@pytest.mark.slow
@pytest.mark.parametrize("max_entries", [10, 5_000])
def test_memory_is_bounded_and_expired_entries_are_swept(max_entries: int) -> None:
    """Ten times more keys than there is room never exceed the bound; once they expire, new traffic sweeps them out."""
    store, _ = _memory(max_entries)
    hit = make_hit()
    for number in range(10 * max_entries):
        store.hit([replace(hit, key=f"key-{number}")], number // 10)
        assert len(store) <= max_entries

    for number in range(2 * max_entries):
        store.hit([replace(hit, key=f"late-{number % 3}", window_ms=1)], 1_000_000 + number * 2)
    assert len(store) < max_entries


def test_rings_are_bounded_together_with_counters() -> None:
    """A ring takes the place of a counter, the least recently used goes first, and an expired ring before it."""
    store, metrics = _memory(3)
    ring, hit = make_push("a"), make_hit()
    store.push([ring], 0)
    _counts(store, 1, b=hit, c=hit)
    store.push([ring], 2)

    _counts(store, 3, d=hit)

    assert metrics.store_evictions._value.get() == 1
    assert store.push([ring._replace(request=b"another.")], 4) == [[b"a", b"a"]]
    assert _counts(store, 5, c=hit, d=hit) == {"c": 2, "d": 2}
    _counts(store, 9_999, c=replace(hit, window_ms=20_000), d=replace(hit, window_ms=20_000))
    assert len(store) == 3


def test_budgets_of_many_callers_keep_what_was_used() -> None:
    """A few stay unpacked, the others make room for one another after a minute; none begins anew, and expired ones go."""
    store, metrics = _memory(200)
    takes = [make_bucket(limit=1_000_000, key=f"b{number}") for number in range(100)]
    for now in (0, 1, 61_000):
        for take in takes:
            store.hit([take], now)

    answers = [store.hit([replace(take, amount=1)], 61_000)[0] for take in takes]

    assert {answer.left for answer in answers} == {1_000_000 - 2}
    assert metrics.store_evictions._value.get() == 0
    for take in takes:
        store.hit([replace(take, key=f"late-{take.key}")], 3_000_000)
    assert len(store) < 200


@pytest.mark.deep
def test_a_million_callers_take_bounded_room() -> None:
    """Each uses one budget once; the store has as many entries as it may have, and the newest callers keep what they used."""
    store, metrics = _memory(10_000)

    for number in range(1_000_000):
        store.hit([make_bucket(5, limit=1_000_000, key=f"c{number}")], number // 1_000)

    assert len(store) <= 10_000 + 10_000 // 32
    assert metrics.store_evictions._value.get() >= 900_000
    (newest,) = store.hit([make_bucket(5, limit=1_000_000, key="c999999")], 1_000)
    assert newest.left == 1_000_000 - 5 + 1 - 5


def test_long_rings_leave_room_for_fewer() -> None:
    """Where entries are long, memory is bounded by what they hold rather than by their number."""
    store, _ = _memory(1_000)
    for number in range(1_000):
        for request in range(32):
            pushed = Push(f"ring-{number}", bytes(64), request.to_bytes(8, "big"), 32, 10_000)
            assert len(store.push([pushed], number)[0]) == request + 1

    assert 50 < len(store) < 150
    assert len(store.push([Push("ring-999", b"", bytes(7) + b"x", 32, 10_000)], 1_000)[0]) == 32


_KNOWN = (
    "known are: memory://, redis://, rediss://, unix://, redis+sentinel://, rediss+sentinel://, redis+cluster://, "
    "rediss+cluster://"
)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("etcd://x", f"unknown store etcd://x; {_KNOWN}"),
        ("etcd://me:secret@x/y?z", f"unknown store etcd://x/y; {_KNOWN}"),
        ("memory", f"a store is named by a URL; {_KNOWN}"),
        ("me:secret@x", f"a store is named by a URL; {_KNOWN}"),
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
        store.hit([make_hit(key=key)], 0)

    assert isinstance(store, MemoryStore)
    assert len(store) == 2
