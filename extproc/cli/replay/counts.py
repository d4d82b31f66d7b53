"""Counters with bounded memory: the most frequent of many items, and counts over time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import nlargest
from typing import Generic, Protocol, TypeVar

_BUCKETS = 240
_FINEST_MS = 1_000


class Ranked(Protocol):
    """An item that is kept while its `count` is among the highest."""

    count: int


Key = TypeVar("Key")
Item = TypeVar("Item", bound=Ranked)


class Top(Generic[Key, Item]):
    """The items with the highest counts. At the limit, the lower half is dropped; a dropped item that returns starts at 0.

    Attributes:
        dropped: the highest count of a dropped item, which is the most by which a count may be too low.
    """

    def __init__(self, limit: int, make: Callable[[], Item]) -> None:
        """Start empty, with room for `limit` items."""
        self.dropped = 0
        self._limit = limit
        self._make = make
        self._items: dict[Key, Item] = {}

    def get_or_add(self, key: Key) -> Item:
        """The item of a key; a new one if there is none."""
        item = self._items.get(key)
        if item is None:
            if len(self._items) >= self._limit:
                self._drop()
            item = self._items[key] = self._make()
        return item

    def list_first(self, count: int) -> list[tuple[Key, Item]]:
        """The items with the highest counts."""
        return nlargest(count, self._items.items(), key=lambda pair: pair[1].count)

    def _drop(self) -> None:
        kept = self.list_first(self._limit // 2)
        gone = self._items.keys() - dict(kept).keys()
        self.dropped = max(self.dropped, *(self._items[key].count for key in gone))
        self._items = dict(kept)


class Timeline:
    """Counts of several series over time, in `buckets` numbered from 1970 on, which widen as time goes by."""

    __slots__ = ("_series", "buckets", "width_ms")

    def __init__(self, series: int) -> None:
        """Start empty, with this many series."""
        self._series = series
        self.width_ms = _FINEST_MS
        self.buckets: dict[int, list[int]] = {}

    def add(self, time: int, series: int) -> None:
        """Count one in a series, at a time in milliseconds since 1970."""
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
        """Each bucket's start in seconds since 1970, and its counts."""
        return [[number * self.width_ms // 1000, *counts] for number, counts in sorted(self.buckets.items())]
