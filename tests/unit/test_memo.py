"""What was worked out of late is known, and bounded."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from extproc.memo import Memo


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


def test_what_nobody_asks_for_is_forgotten() -> None:
    """As many others as two generations hold take its place."""
    memo: Memo[int, int] = Memo(3)
    for key in range(7):
        memo.put(key, key)

    assert memo.get(0) is None
    assert memo.get(6) == 6
