"""Plain numbers about every request, because a library's counters cost more than what they count; `metrics` names them.

The event loop alone counts. The thread that answers a scrape only reads, and may see a request in one number and not yet in
another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Buckets:
    """A histogram.

    Attributes:
        bounds: upper bounds of the buckets, in order; a further bucket has none.
        counts: of each bucket alone, not cumulative.
        sum: of all that was observed.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(map(float, bounds))
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Take one value."""
        place = bisect_left(self.bounds, value)
        self.counts[place] += 1
        self.sum += value
