"""The window arithmetic against a brute-force reading of its definition; time is an argument."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.store.rules.ring import Push, Ring, push
from extproc.store.rules.windows import Count, Hit, log, tally
from tests.support.examples import examples
from tests.support.windows import (
    COOLDOWN_STEPS,
    PUSH_STEPS,
    STEPS_BACK,
    WINDOW_TYPES,
    cooldown_hits,
    make_hit,
    oracle,
    oracle_of,
    place_pushes,
    rings_of,
)


def run(hit: Hit, times: list[int]) -> list[Count]:
    state: Any = None
    answers = []
    for now in times:
        state, answer = (log if hit.window_type == "sliding_log" else tally)(state, hit, now)
        answers.append(answer)
    return answers


@settings(max_examples=examples(1_000))
@given(
    st.sampled_from(WINDOW_TYPES),
    st.integers(1, 20),
    st.integers(1, 4),
    st.sampled_from([0, 0, 5, 30]),
    st.booleans(),
    st.lists(st.integers(0, 12) | st.integers(-40, 12), max_size=30),
)
def test_every_window_does_what_its_definition_says(  # what a window is made of
    window_type: str, window: int, threshold: int, cooldown: int, count_refused: bool, gaps: list[int]
) -> None:
    hit = Hit("key", window_type, window, threshold, cooldown, count_refused, 100)
    times = [1_000 + sum(gaps[: position + 1]) for position in range(len(gaps))]

    assert run(hit, times) == oracle(hit, times)


@given(COOLDOWN_STEPS)
def test_a_loop_that_is_known_starts_a_cooldown_for_the_others(steps: list[tuple[bool, int]]) -> None:
    """A request is acted on when it is a loop itself, or comes within the cooldown of one that was not within another's."""
    state, found = None, []
    for hit, now in cooldown_hits(steps):
        state, answer = tally(state, hit, now)
        found.append(answer)

    assert found == oracle_of(cooldown_hits(steps))


@pytest.mark.parametrize("window_type", WINDOW_TYPES)
def test_the_nth_request_is_the_first_acted_on(window_type: str) -> None:
    """Refused requests count or not; after a trip the key is acted on until the cooldown ends, though its window is empty."""
    plain = run(make_hit(window_type), [0, 1, 2, 3])
    uncounted = run(make_hit(window_type, count_refused=False), [0, 1, 5_000, 9_000, 10_001])
    cooling = run(make_hit(window_type, cooldown_ms=60_000), [0, 1, 2, 30_000, 60_001, 60_002])

    assert [(answer.count, answer.looping) for answer in plain] == [(1, False), (2, False), (3, True), (4, True)]
    assert [(answer.count, answer.looping) for answer in uncounted] == [
        *[(1, False), (2, False), (3, True), (3, True), (1, False)],
    ]
    assert [answer.cooldown_ms for answer in cooling] == [0, 0, 60_000, 30_002, 1, 0]


def test_a_log_remembers_a_bounded_number() -> None:
    hit = make_hit("sliding_log", count_to=4)
    state: bytearray | None = None

    for now in range(50):
        state, answer = log(state, hit, now)

    assert state is not None
    assert array("q", bytes(state)).tolist()[:-1] == [46, 47, 48, 49]  # the last one is the cooldown's
    assert answer == Count(4, looping=True, cooldown_ms=0, span_ms=4)


@pytest.mark.parametrize(("_", "hit", "times", "expected"), STEPS_BACK, ids=[case[0] for case in STEPS_BACK])
def test_a_clock_that_is_set_back(_: str, hit: Hit, times: list[int], expected: list[tuple[int, bool, int, int]]) -> None:
    assert run(hit, times) == [Count(*answer) for answer in expected]


@given(
    st.sampled_from(WINDOW_TYPES),
    st.booleans(),
    st.sampled_from([0, 5, 30]),
    st.lists(st.integers(20, 60), min_size=1, max_size=20),
    st.integers(0, 20),
    st.integers(1, 2_000),
)
def test_a_clock_that_is_set_back_refuses_no_innocent(
    window_type: str, count_refused: bool, cooldown: int, gaps: list[int], place: int, back: int
) -> None:
    """A client that never sends two requests within one window is never refused, whenever the clock is set back."""
    hit = Hit("key", window_type, 20, 3, cooldown, count_refused, 100)
    real = [10_000 + sum(gaps[: position + 1]) for position in range(len(gaps))]

    answers = run(hit, [now if position < place else now - back for position, now in enumerate(real)])

    assert not any(answer.looping for answer in answers)


@given(
    st.sampled_from(WINDOW_TYPES),
    st.booleans(),
    st.sampled_from([0, 5, 50]),
    st.lists(st.integers(0, 30), min_size=1, max_size=20),
    st.integers(0, 2_000),
)
def test_a_sentence_ends_on_a_clock_that_was_set_back(
    window_type: str, count_refused: bool, cooldown: int, gaps: list[int], back: int
) -> None:
    """Whatever was counted before, no request is refused a window and a cooldown after the first one on the new clock."""
    hit = Hit("key", window_type, 20, 3, cooldown, count_refused, 100)
    times = [10_000 + sum(gaps[: position + 1]) for position in range(len(gaps))]
    returned = times[-1] - back

    answers = run(hit, [*times, returned, returned + 20 + cooldown])

    assert not answers[-1].looping


@given(PUSH_STEPS)
def test_a_ring_does_what_its_definition_says(steps: list[tuple[Push, int]]) -> None:
    ring: Ring | None = None
    found = []
    for pushed, now in place_pushes(steps):
        ring, entries = push(ring, pushed, now)
        found.append(entries)

    assert found == rings_of(place_pushes(steps))
