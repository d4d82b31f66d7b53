"""What back-to-back requests count in every store; time is an argument."""

from functools import partial
from typing import Any

import pytest
from hypothesis import given, strategies as st

from extproc.store import Store
from extproc.store.rules.back_to_back import LEFT_OUT, LOST_MS, REFUSED, Begin, End
from extproc.store.rules.windows import Count
from tests.support.back_to_back import (
    Ask,
    Sent,
    count_by_definition,
    follow,
    make_begin,
    make_end,
    play,
)
from tests.support.servers import Driver


def ask_of(store: Driver) -> Ask:
    def ask(asked: Begin | End, now: int) -> Any:  # noqa: ANN401  # see `Ask`
        placed = asked._replace(key=store.name(asked.key))
        return store.settled(lambda on: on.hit([placed], now))[0]

    return ask


def _hit(asked: Begin | End, on: Store) -> Any:  # noqa: ANN401  # as `Driver.later`
    return on.hit([asked])


CASES: dict[str, tuple[list[Sent], list[int]]] = {
    "one after another, however long the answers take": (
        follow([62_000, 100, 5_000, 62_000], 10, 0),
        [1, 2, 3, 4],
    ),
    "a longer pause than the window starts anew": (follow([500] * 4, 2_001, 0), [1, 1, 1, 1]),
    "the window itself does not": (follow([500] * 4, 2_000, 0), [1, 2, 3, 4]),
    "an overlap starts anew": (
        [Sent(1_000, 5_000), Sent(6_001, 9_000), Sent(7_000, 9_000), Sent(16_001, 100)],
        [1, 2, 3, 2],
    ),
    "an overlap of up to half a second is inexact": (
        [Sent(1_000, 5_000), Sent(5_500, 5_000), Sent(9_999, 100), Sent(10_700, 100)],
        [1, 2, 3, 2],
    ),
    "late entries are waited for": (follow([1_000] * 5, 10, 2_500), [1, 2, 2, 2, 3]),
    "requests at once count two": (
        [Sent(1_000 + number, 9_000) for number in range(9)],
        [1, *[2] * 8],
    ),
    "an entry that comes again changes nothing": (
        [one._replace(late=(0, 1, 4_000)) for one in follow([3_000] * 4, 10, 0)],
        [1, 2, 3, 4],
    ),
    "failed requests are left out": (
        [Sent(1_000, 500), Sent(1_600, LEFT_OUT), Sent(1_700, LEFT_OUT), Sent(1_800, 500)],
        [1, 2, 2, 2],
    ),
    "refused requests add nothing, but the run goes on": (
        [
            *follow([500] * 2, 10, 0),
            *[Sent(2_100 + number * 1_900, REFUSED) for number in range(60)],
            Sent(2_100 + 60 * 1_900, 500),
        ],
        [1, 2, *[3] * 61],
    ),
    "a request without an end is forgotten after ten minutes": (
        [Sent(1_000, 500, ()), Sent(1_001 + LOST_MS, 100), Sent(1_200 + LOST_MS, 100)],
        [1, 1, 2],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_counts_are_as_the_cases_say(store: Driver, case: str) -> None:
    sent, expected = CASES[case]

    assert [answer.count for answer in play(sent, ask_of(store))] == expected


def test_cooldown_starts_at_the_threshold_and_ends(store: Driver) -> None:
    ask = ask_of(store)
    shape = {"threshold": 2, "cooldown_ms": 9_000}

    answers = play(follow([500] * 2, 10, 0), ask, **shape)
    later = []
    for number, now in ((7, 9_000), (8, 20_000)):
        later.append(ask(make_begin(number, **shape), now))
        ask(make_end(number, REFUSED), now)

    assert [*answers, *later] == [
        Count(1, looping=False, cooldown_ms=0, span_ms=0),
        Count(2, looping=True, cooldown_ms=9_000, span_ms=510),
        Count(1, looping=True, cooldown_ms=1_510, span_ms=0),
        Count(1, looping=False, cooldown_ms=0, span_ms=0),
    ]


def test_the_end_of_an_unknown_request_is_ignored(store: Driver) -> None:
    ask = ask_of(store)

    for ended in (make_end(5, 100), make_end(0, REFUSED)):
        ask(ended, 1_000)
    ask(make_begin(1), 1_000)
    ask(make_end(2, 7_000), 1_001)
    ask(make_end(1, 100), 1_100)

    assert ask(make_begin(3), 1_200).count == 2


def test_a_store_has_a_clock_of_its_own(store: Driver) -> None:
    counts = []
    for number in range(1, 5):
        begun = make_begin(number, key=store.name("key:00"))
        counts.append(store.settled(partial(_hit, begun))[0].count)
        ended = End(begun.key, begun.name, 0)
        store.settled(partial(_hit, ended))

    assert counts == [1, 2, 3, 4]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2_500),
            st.integers(0, 3_000),
            st.lists(st.integers(0, 3_000), max_size=2),
        ),
        min_size=1,
        max_size=40,
    )
)
def test_every_store_counts_as_memory_does(
    opened: Driver, steps: list[tuple[int, int, list[int]]]
) -> None:
    start, sent = 1_000, []
    for gap, lasts, late in steps:
        start += gap
        sent.append(Sent(start, lasts, tuple(late)))
    with Driver("memory://") as memory:
        expected = play(sent, ask_of(memory.fresh()))

    assert play(sent, ask_of(opened.fresh())) == expected
    if all(late for _, _, late in steps):
        assert expected[-1].count <= 1 + max(count_by_definition(sent)[:-1], default=0)
