"""Recent results are remembered, and their number is bounded."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from extproc.bounded import LRU, Memo


@given(st.lists(st.integers(0, 20)), st.integers(1, 5))
def test_what_is_asked_for_again_and_again_stays(asked: Sequence[int], most: int) -> None:
    """Whatever was asked for among the last few is known; no more than two generations are, and no answer is another's."""
    memo: Memo[int, str] = Memo(most)
    for place, key in enumerate(asked):
        known = memo.get(key)
        if known is None:
            assert key not in asked[max(0, place - most + 1) : place]
            memo.put(key, str(key))
        else:
            assert known == str(key)

        assert len(memo) <= 2 * most


def test_what_is_not_asked_for_is_forgotten() -> None:
    """As many others as two generations hold take its place."""
    memo: Memo[int, int] = Memo(3)
    for key in range(7):
        memo.put(key, key)

    assert memo.get(0) is None
    assert memo.get(6) == 6


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9))), st.integers(1, 12))
def test_answers_are_bounded_by_their_size(answers: Sequence[tuple[int, int]], most: int) -> None:
    """Two generations are the most that is kept, and an answer larger than a generation is not."""
    memo: Memo[int, str] = Memo(most, lambda _, value: len(value))
    for key, size in answers:
        memo.put(key, "x" * size)

        assert sum(map(len, (memo._young | memo._old).values())) <= memo.size <= 2 * most
        assert (memo.get(key) == "x" * size) or size > most


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))), st.integers(1, 12))
def test_an_answer_takes_the_place_of_the_one_before(answers: Sequence[tuple[int, int]], most: int) -> None:
    """What it replaces takes up nothing any more."""
    memo: Memo[int, str] = Memo(most, lambda _, value: len(value))
    for key, size in answers:
        memo.put(key, "x" * size)

        assert memo.size == sum(map(len, [*memo._young.values(), *memo._old.values()]))


@given(st.lists(st.integers(0, 20)), st.integers(1, 5))
def test_the_least_recently_used_value_makes_room(used: Sequence[int], most: int) -> None:
    """As a list says that is put in order at each use."""
    cache: LRU[int, str] = LRU(most)
    order: list[int] = []
    for key in used:
        if key in order:
            order.remove(key)
            assert cache.use(key) == str(key)
        else:
            dropped = cache.put(key, str(key))
            assert dropped == (order.pop(0) if len(order) == most else None)
        order.append(key)

        assert cache.items() == [(key, str(key)) for key in order]
        assert cache.find_oldest() == order[0]
