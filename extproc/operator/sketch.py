"""How many different callers there were, in bounded room: all of them up to a size, an estimate beyond.

The k-minimum-values sketch: of hashes that are spread evenly, the k smallest are kept, and how close together they lie says how
many there were. (Z. Bar-Yossef et al., Counting distinct elements in a data stream, RANDOM 2002; the estimator (k-1)/U(k) is
unbiased, with a standard error of 1/sqrt(k-2).) Sketches of several replicas are merged without a loss.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

SIZE = 512
"""An estimate is off by 4.4 % (one standard error), one of eight times the size by 1.6 %."""

HASH_DIGITS = 16
_SPREAD = 2.0 ** (4 * HASH_DIGITS)
_ABOVE_ALL = "g"


class Sketch:
    """A set of hashes, each 16 hex digits."""

    def __init__(self, hashes: Iterable[str] = (), size: int = SIZE) -> None:
        """Start with these; fewer than `size` are counted exactly."""
        self._size = size
        self._kept: list[str] = []  # ascending
        self._bound = _ABOVE_ALL
        for name in hashes:
            self.add(name)

    def add(self, name: str) -> None:
        """Add a hash, which may be known already."""
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
        """The hashes that are kept, to be merged elsewhere."""
        return self._kept.copy()

    @property
    def exact(self) -> bool:
        """Whether all hashes were kept."""
        return len(self._kept) < self._size

    def count(self) -> int:
        """The number of different hashes, or an estimate."""
        if self.exact:
            return len(self._kept)
        return round((self._size - 1) / ((int(self._bound, 16) + 1) / _SPREAD))
