"""Counts in every store answer as `windows.py` says; time is an argument."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from extproc.metrics import Metrics
from extproc.store import open_store
from extproc.store.rules.windows import Count, Hit, log, tally
from tests.support.servers import Driver
from tests.support.windows import (
    COOLDOWN_STEPS,
    COUNTS,
    WINDOW_TYPES,
    cooldown_hits,
    make_hit,
    oracle,
    oracle_of,
)

_CONFIGURATIONS = st.tuples(
    st.sampled_from(WINDOW_TYPES),
    st.sampled_from(
        [
            (3, 0, True),
            (2, 7_000, True),
            (3, 30_000, False),
            (2, 0, False),
            (1, 0, True),
            (1, 7_000, True),
        ]
    ),
    st.sampled_from([4, 100]),
)

_GAPS = st.integers(0, 1_000) | st.sampled_from([9_999, 10_000]) | st.integers(-12_000, 12_000)


@given(
    # Two keys at a time, so that each is hit often enough for its windows to end, and long gaps
    # beside short ones.
    steps=st.lists(_CONFIGURATIONS, min_size=2, max_size=2).flatmap(
        lambda keys: st.lists(
            st.tuples(
                st.sampled_from(keys),
                st.integers(0, 1_000)
                | st.sampled_from([9_999, 10_000])
                | st.integers(-12_000, 12_000),
            ),
            min_size=10,
            max_size=40,
        )
    )
)
def test_windows_equal_a_plain_model(
    opened: Driver, steps: list[tuple[tuple[str, tuple[int, int, bool], int], int]]
) -> None:
    store, memory = opened.fresh(), open_store("memory://", Metrics())
    now = 1_000_000
    hits: dict[str, Hit] = {}
    history: dict[str, list[int]] = {}
    answers: dict[str, list[Count]] = {}
    for (window_type, (threshold, cooldown, refused), count_to), gap in steps:
        now += gap
        key = f"{window_type}:{threshold}:{cooldown}:{refused}:{count_to}"
        shape: dict[str, Any] = {
            "threshold": threshold,
            "cooldown_ms": cooldown,
            "count_refused": refused,
        }
        hit = hits.setdefault(key, make_hit(window_type, key=key, count_to=count_to, **shape))
        history.setdefault(key, []).append(now)
        found = store.count([hit], now)
        answers.setdefault(key, []).extend(found)
        assert memory.hit([hit], now) == found

    # The definition knows no bound.
    roomy = [key for key, hit in hits.items() if hit.count_to == 100]
    assert {key: oracle(hits[key], history[key]) for key in roomy} == {
        key: answers[key] for key in roomy
    }


@given(steps=COOLDOWN_STEPS)
def test_cooldowns_equal_a_plain_model(opened: Driver, steps: list[tuple[bool, int]]) -> None:
    store = opened.fresh()

    answers = [store.count([hit], now)[0] for hit, now in cooldown_hits(steps)]

    assert answers == oracle_of(cooldown_hits(steps))


@pytest.mark.parametrize("case", COUNTS)
def test_window_cases_hold_in_every_store(store: Driver, case: str) -> None:
    hit, times, expected = COUNTS[case]

    assert [store.count([hit], now)[0] for now in times] == [Count(*answer) for answer in expected]


def test_long_log_drops_old_times(store: Driver) -> None:
    """A part of it at once, and all of it after a while; also on a clock that was set back."""
    hit = make_hit("sliding_log", threshold=1_000, count_to=1_000)
    times = [*range(10_000, 13_000, 3), 21_500, 21_501, 18_000, 40_000]

    answers = [store.count([hit], now)[0] for now in times]

    assert answers == oracle(hit, times)
    assert [answer.count for answer in answers[-5:]] == [1_000, 500, 501, 502, 1]


@pytest.mark.parametrize("window_type", WINDOW_TYPES)
def test_windows_use_the_clock_of_the_store(store: Driver, window_type: str) -> None:
    hit = make_hit(window_type, window_ms=60_000)

    answers = [store.run(store.ask([hit], None))[0] for _ in range(5)]

    assert [(answer.count, answer.looping) for answer in answers] == [
        (1, False),
        (2, False),
        (3, True),
        (4, True),
        (5, True),
    ]


# --- the rules alone, on any clock


def run(hit: Hit, times: list[int]) -> list[Count]:
    state: Any = None
    answers = []
    for now in times:
        state, answer = (log if hit.window_type == "sliding_log" else tally)(state, hit, now)
        answers.append(answer)
    return answers


@given(
    st.sampled_from(WINDOW_TYPES),
    st.booleans(),
    st.sampled_from([0, 5, 30]),
    st.lists(st.integers(20, 60), min_size=1, max_size=20),
    st.integers(0, 20),
    st.integers(1, 2_000),
)
def test_clock_set_back_refuses_no_rare_requests(
    window_type: str, count_refused: bool, cooldown: int, gaps: list[int], place: int, back: int
) -> None:
    """A client that never sends two requests within a window is never refused."""
    hit = Hit("key", window_type, 20, 3, cooldown, count_refused, 100)
    real = [10_000 + sum(gaps[: position + 1]) for position in range(len(gaps))]

    answers = run(
        hit, [now if position < place else now - back for position, now in enumerate(real)]
    )

    assert not any(answer.looping for answer in answers)


@given(
    st.sampled_from(WINDOW_TYPES),
    st.booleans(),
    st.sampled_from([0, 5, 50]),
    st.lists(st.integers(0, 30), min_size=1, max_size=20),
    st.integers(0, 2_000),
)
def test_refusals_end_after_the_clock_was_set_back(
    window_type: str, count_refused: bool, cooldown: int, gaps: list[int], back: int
) -> None:
    """No request is refused a window and a cooldown after the first one on the new clock."""
    hit = Hit("key", window_type, 20, 3, cooldown, count_refused, 100)
    times = [10_000 + sum(gaps[: position + 1]) for position in range(len(gaps))]
    returned = times[-1] - back

    answers = run(hit, [*times, returned, returned + 20 + cooldown])

    assert not answers[-1].looping
