"""Counts distinct hashes in bounded memory: exactly below a size, an estimate beyond.

This is the k-minimum-values sketch: it keeps the k smallest of evenly distributed hashes, and their
density gives the estimate. (Z. Bar-Yossef et al., Counting distinct elements in a data stream,
RANDOM 2002; the estimator (k-1)/U(k) is unbiased, with a standard error of 1/sqrt(k-2).) Merging
the sketches of several replicas loses no accuracy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

SIZE = 512
"""The standard error of an estimate is 4.4 %. With eight times the size, it would be 1.6 %."""

HASH_DIGITS = 16
_SPREAD = 2.0 ** (4 * HASH_DIGITS)
_ABOVE_ALL = "g"


class Sketch:
    """A set of hashes, each 16 hex digits."""

    def __init__(self, hashes: Iterable[str] = (), size: int = SIZE) -> None:
        """Start with these hashes; fewer than `size` are counted exactly."""
        self._size = size
        self._kept: list[str] = []  # ascending
        self._bound = _ABOVE_ALL
        for name in hashes:
            self.add(name)

    def add(self, name: str) -> None:
        """Add a hash; duplicates are ignored."""
        if name > self._bound:
            return
        kept = self._kept
        place = bisect_left(kept, name)
        if place < len(kept) and kept[place] == name:
            return
        kept.insert(place, name)
        if len(kept) > self._size:
            kept.pop()
        if len(kept) == self._size:
            self._bound = kept[-1]

    def list_kept(self) -> list[str]:
        """The kept hashes, for merging."""
        return self._kept.copy()

    @property
    def exact(self) -> bool:
        """Whether all hashes were kept."""
        return len(self._kept) < self._size

    def count(self) -> int:
        """The number of distinct hashes, or an estimate."""
        if self.exact:
            return len(self._kept)
        return round((self._size - 1) / ((int(self._bound, 16) + 1) / _SPREAD))
