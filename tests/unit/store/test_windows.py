"""What windows promise, whatever the clock does; `tests/doors/store/rules` has their cases."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from extproc.store.rules.windows import Count, Hit, log, tally
from tests.support.windows import WINDOW_TYPES


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
