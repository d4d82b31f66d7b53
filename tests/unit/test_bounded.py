"""Memos and LRU caches are bounded."""

from collections.abc import Sequence

from hypothesis import given, strategies as st

from extproc.bounded import LRU, Memo


@given(st.lists(st.integers(0, 20)), st.integers(1, 5))
def test_recent_answers_stay(asked: Sequence[int], most: int) -> None:
    memo: Memo[int, str] = Memo(most)
    for place, key in enumerate(asked):
        known = memo.get(key)
        if known is None:
            assert key not in asked[max(0, place - most + 1) : place]
            memo.put(key, str(key))
        else:
            assert known == str(key)

        assert len(memo) <= 2 * most


def test_size_counts_two_generations() -> None:
    memo: Memo[str, str] = Memo(4, lambda _, value: len(value))
    sizes = []
    for key, size in (("a", 3), ("b", 3), ("b", 1), ("c", 3), ("d", 5), ("e", 1)):
        memo.put(key, "x" * size)
        sizes.append(memo.size)

    assert sizes == [3, 6, 4, 7, 7, 5]
    assert [memo.get(key) for key in "abcde"] == [None, "x", "xxx", None, "x"]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9))), st.integers(1, 12))
def test_answers_are_bounded_by_size(answers: Sequence[tuple[int, int]], most: int) -> None:
    memo: Memo[int, str] = Memo(most, lambda _, value: len(value))
    for key, size in answers:
        memo.put(key, "x" * size)

        assert len(memo) <= memo.size <= 2 * most
        assert (memo.get(key) == "x" * size) or size > most


@given(st.lists(st.integers(0, 20)), st.integers(1, 5))
def test_least_recently_used_value_is_dropped(used: Sequence[int], most: int) -> None:
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
