"""What back-to-back requests count; `tests/doors/store/rules` has the cases of the rule."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from extproc.engine.plan import BARE_REFUSED_FROM
from extproc.store.rules.back_to_back import (
    LATE_MS,
    LEFT_OUT,
    MOST,
    REFUSED,
    Begin,
    End,
    begin,
    end,
)
from tests.support.back_to_back import (
    Sent,
    count_by_definition,
    follow,
    loops,
    pauses,
    play,
    sequences,
)


class Rule:
    """The rule with one key."""

    def __init__(self) -> None:
        self.state: Any = None

    def __call__(self, asked: Begin | End, now: int) -> Any:  # noqa: ANN401  # as `Ask`
        if isinstance(asked, End):
            self.state = end(self.state, asked)
            return None
        self.state, count = begin(self.state, asked, now)
        return count


_LATES = st.lists(st.integers(0, 3_000), min_size=1, max_size=3).map(tuple)
_DURATIONS = (
    st.sampled_from([0, 90, 400, 1_000, 1_400])
    | st.integers(0, 6_000)
    | st.sampled_from([LEFT_OUT, REFUSED])
)
_GAPS = st.integers(0, 2_500) | st.sampled_from([0, 1, 90, 1_000, 1_999, 2_000, 2_001, 8_000])
_REQUESTS = st.lists(st.tuples(_GAPS, _DURATIONS, _LATES), min_size=1, max_size=MOST - 1)


def _place(steps: list[tuple[int, int, tuple[int, ...]]]) -> list[Sent]:
    start, placed = 1_000, []
    for gap, lasts, late in steps:
        start += gap + max(0, lasts) * (gap % 2)
        placed.append(Sent(start, lasts, late))
    return placed


@given(_REQUESTS)
def test_count_is_that_of_definition_once_all_ended(
    steps: list[tuple[int, int, tuple[int, ...]]],
) -> None:
    """Whatever the order of the entries, which may come several times."""
    sent = _place(steps)
    pause = sent[-1].start + max(one.end for one in sent) + 3_000
    for last in (max(one.end for one in sent) + 1_500, pause):
        rule = Rule()
        play([one._replace(late=tuple(late + 1 for late in one.late)) for one in sent], rule)
        newest = Sent(max(last, sent[-1].start + 1), 0)

        found = rule(Begin("key:00", b"\xff" * 8, 2_000, 3, 0), newest.start).count

        assert found == count_by_definition([*sent, newest])[-1]


@given(_REQUESTS)
def test_no_request_counts_much_more_than_earlier_ones(
    steps: list[tuple[int, int, tuple[int, ...]]],
) -> None:
    """While entries are missing, the count is at most one above what an earlier request counts."""
    sent = _place([(gap, max(0, lasts), late) for gap, lasts, late in steps])
    known = count_by_definition(sent)

    answers = play(sent, Rule())

    for place, answer in enumerate(answers):
        assert answer.count <= 1 + max(known[:place], default=0)


@given(st.lists(st.integers(0, 3_000), min_size=300, max_size=300))
def test_a_run_counts_on_beyond_the_intervals_kept(lates: list[int]) -> None:
    sent = [
        one._replace(late=(late,))
        for one, late in zip(follow([4_000] * 300, 10, 0), lates, strict=True)
    ]

    rule = Rule()
    answers = play(sent, rule)

    assert answers[-1].count == 300
    assert len(rule.state[2]) == MOST


@pytest.mark.parametrize(("name", "sent"), [*loops()])
def test_a_loop_counts_at_any_speed(name: str, sent: list[Sent]) -> None:
    """At most as many more as begin while an entry is late."""
    counts = [answer.count for answer in play(sent, Rule())]

    missing = sent[0].late[0] // (sent[1].start - sent[0].start) + 1
    assert counts[:2] == [1, 2], name
    assert all(count >= place - missing for place, count in enumerate(counts, 1))


@pytest.mark.parametrize("family", pauses())
def test_requests_with_pauses_or_overlaps_are_no_loop(family: str) -> None:
    variants = pauses()[family]

    assert len(variants) >= 30
    for sent in variants:
        assert max(answer.count for answer in play(sent, Rule())) <= 4  # docs/policies.md


@pytest.mark.parametrize("family", sequences())
def test_no_written_sequence_reaches_the_refusal_of_bare_bodies(family: str) -> None:
    variants = sequences()[family]

    highest = max(answer.count for sent in variants for answer in play(sent, Rule()))

    assert len(variants) >= 30
    assert highest == len(variants[0]) < BARE_REFUSED_FROM


def test_a_request_whose_entry_is_lost_delays_the_count_only_for_a_while() -> None:
    lost = [
        one._replace(late=()) if place == 5 else one
        for place, one in enumerate(follow([4_000] * 200, 10, 0))
    ]

    counts = [answer.count for answer in play(lost, Rule())]

    assert counts[:7] == [1, 2, 3, 4, 5, 6, 7]
    assert max(counts[7:30]) <= 7
    assert counts[-1] > 100


def test_entries_that_are_always_too_late_count_as_overlaps() -> None:
    sent = follow([1_000] * 40, 10, LATE_MS + 3_000)

    assert max(answer.count for answer in play(sent, Rule())) <= 3


def test_a_clock_that_is_set_back_starts_the_count_anew() -> None:
    rule = Rule()
    play(follow([4_000] * 5, 10, 0), rule)

    answer = rule(Begin("key:00", b"\xff" * 8, 2_000, 3, 0), 2_000)

    assert (answer.count, answer.span_ms) == (1, 0)
