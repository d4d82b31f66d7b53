"""The most frequent of many items, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from heapq import nlargest
from typing import Generic, Protocol, TypeVar


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
