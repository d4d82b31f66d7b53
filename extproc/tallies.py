"""A histogram of plain numbers, faster than prometheus-client's; `metrics` exports it.

Only the event loop writes. The thread that answers a scrape only reads; it may see a request in one
number but not yet in another.
"""

from __future__ import annotations

from collections.abc import Sequence


class Buckets:
    """Upper bounds, a count per bucket (the last has no bound), and the sum of all values."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(map(float, bounds))
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        place = 0
        for bound in self.bounds:  # faster than bisecting: most values are among the lowest
            if value <= bound:
                break
            place += 1
        self.counts[place] += 1
        self.sum += value
