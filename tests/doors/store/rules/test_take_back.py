"""What is taken back in every store; time is an argument."""

import pytest

from extproc.store.rules.chain import MAX_RETRIES
from extproc.store.rules.take_back import CHAIN, LOG, TALLY, TakeBack
from extproc.store.rules.windows import Hit
from tests.support.chains import Sent, ask_store, make_link
from tests.support.servers import Driver
from tests.support.windows import make_hit

KINDS = {"sliding_ttl": TALLY, "fixed": TALLY, "sliding_log": LOG}


def take_back(store: Driver, key: str, kind: str) -> None:
    store.settled(lambda on: on.hit([TakeBack(key, kind)]))


@pytest.mark.parametrize("window_type", KINDS)
def test_request_is_taken_back_from_its_window(store: Driver, window_type: str) -> None:
    """One for each time; an emptied window is as new, and so is a missing key."""
    hit: Hit = make_hit(window_type, key="k")

    def count(now: int) -> int:
        return store.count([hit], now)[0].count

    def forget(times: int) -> None:
        for _ in range(times):
            take_back(store, store.key(hit), KINDS[window_type])

    forget(1)
    assert [count(now) for now in (1_000, 1_001, 1_002)] == [1, 2, 3]
    forget(2)
    assert [count(now) for now in (1_003, 1_004)] == [2, 3]
    forget(9)
    assert count(1_005) == 1


@pytest.mark.parametrize("window_type", KINDS)
def test_take_back_keeps_the_cooldown(store: Driver, window_type: str) -> None:
    hit = make_hit(window_type, key="k", threshold=2, cooldown_ms=5_000)
    store.count([hit], 1_000)
    assert store.count([hit], 1_001)[0].looping

    for _ in range(5):
        take_back(store, store.key(hit), KINDS[window_type])

    assert store.count([hit], 1_002)[0].looping


def test_retry_is_taken_back_from_its_conversation(store: Driver) -> None:
    """However often a request fails, it is no turn; from then on it has its three retries."""
    link = make_link(Sent("u", ("a",), "x"))
    ask_store(store, make_link(Sent("u", (), "")), 0)

    def repeat(now: int) -> int:
        return len(ask_store(store, link, now).entries)

    assert repeat(1) == 1
    for now in range(2, 12):
        assert repeat(now) == 1
        take_back(store, store.name(link.key), CHAIN)
    assert [repeat(20 + number) for number in range(MAX_RETRIES + 1)] == [1] * MAX_RETRIES + [2]
