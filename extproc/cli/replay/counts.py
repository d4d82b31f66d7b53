"""Counting what may be many, in bounded room: which most often, and when."""

from __future__ import annotations

from collections.abc import Callable
from heapq import nlargest
from typing import Generic, Protocol, TypeVar

_BUCKETS = 240
_FINEST_MS = 1_000


class Ranked(Protocol):
    """What is kept as long as its `count` is among the highest."""

    count: int


Key = TypeVar("Key")
Item = TypeVar("Item", bound=Ranked)


class Top(Generic[Key, Item]):
    """The items that count most. Past the limit the lesser half goes; one of those that comes back starts anew.

    Attributes:
        dropped: the highest count of an item that went: by so much at most some item's count is too low.
    """

    def __init__(self, limit: int, make: Callable[[], Item]) -> None:
        """None yet; at most `limit` items are kept at once."""
        self.dropped = 0
        self._limit = limit
        self._make = make
        self._items: dict[Key, Item] = {}

    def get_or_add(self, key: Key) -> Item:
        """The item of a key, a new one if there is none."""
        item = self._items.get(key)
        if item is None:
            if len(self._items) >= self._limit:
                self._drop()
            item = self._items[key] = self._make()
        return item

    def list_first(self, count: int) -> list[tuple[Key, Item]]:
        """The items that count most."""
        return nlargest(count, self._items.items(), key=lambda pair: pair[1].count)

    def _drop(self) -> None:
        kept = self.list_first(self._limit // 2)
        gone = self._items.keys() - dict(kept).keys()
        self.dropped = max(self.dropped, *(self._items[key].count for key in gone))
        self._items = dict(kept)


class Timeline:
    """Several counts over time, in `buckets` by their number since 1970, which grow as the time does."""

    __slots__ = ("_series", "buckets", "width_ms")

    def __init__(self, series: int) -> None:
        """Nothing yet; this many things are counted side by side."""
        self._series = series
        self.width_ms = _FINEST_MS
        self.buckets: dict[int, list[int]] = {}

    def add(self, time: int, series: int) -> None:
        """One more of a series, at a time in milliseconds since 1970."""
        counts = self.buckets.get(time // self.width_ms)
        if counts is None:
            while len(self.buckets) >= _BUCKETS:
                self._coarsen()
            counts = self.buckets.setdefault(time // self.width_ms, [0] * self._series)
        counts[series] += 1

    def _coarsen(self) -> None:
        merged: dict[int, list[int]] = {}
        for number, counts in self.buckets.items():
            there = merged.setdefault(number // 2, [0] * self._series)
            for place, count in enumerate(counts):
                there[place] += count
        self.buckets = merged
        self.width_ms *= 2

    def list_points(self) -> list[list[int]]:
        """Each bucket's begin in seconds since 1970, and its counts."""
        return [[number * self.width_ms // 1000, *counts] for number, counts in sorted(self.buckets.items())]
