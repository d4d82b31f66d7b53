"""Two bounded caches: `Memo` for answers that can be computed again, `LRU` for other values.

A pure function of small arguments needs neither; use `functools.lru_cache`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Memo(Generic[Key, Value]):
    """A cache in two generations: when the younger is full, the older is dropped.

    Answers in use move to the younger.

    A lookup needs no bookkeeping, which is why the hot path uses it.
    """

    def __init__(self, most: int, measure: Callable[[Key, Value], int] | None = None) -> None:
        """Start empty.

        Args:
            most: the size of each generation.
            measure: returns the size of an answer, such as its bytes; None counts each as 1.
                Answers larger than `most` are not kept.
        """
        self._most = most
        self._measure = measure
        self._young: dict[Key, Value] = {}
        self._old: dict[Key, Value] = {}
        self._young_size = 0
        self._old_size = 0

    def __len__(self) -> int:
        """The number of answers."""
        return len(self._young) + len(self._old)

    @property
    def size(self) -> int:
        """The size of all answers, at most twice that of a generation."""
        return self._young_size + self._old_size

    def get(self, key: Key) -> Value | None:
        """The answer, or None."""
        found = self._young.get(key)
        if found is None:
            found = self._old.get(key)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: Key, value: Value) -> None:
        """Keep an answer."""
        size = 1 if self._measure is None else self._measure(key, value)
        if size > self._most:
            return
        if self._young_size + size > self._most:
            self._old, self._old_size = self._young, self._young_size
            self._young, self._young_size = {}, 0
        else:
            replaced = self._young.get(key)
            if replaced is not None:
                self._young_size -= 1 if self._measure is None else self._measure(key, replaced)
        self._young[key] = value
        self._young_size += size

    def clear(self) -> None:
        """Forget all answers."""
        self._young, self._old = {}, {}
        self._young_size = self._old_size = 0


class _LRUEntry(Generic[Value]):
    def __init__(self, value: Value, used: int) -> None:
        self.value = value
        self.used = used


class LRU(Generic[Key, Value]):
    """A cache of a fixed number of values that drops the least recently used one.

    Using a value only stores a number. Values are sorted only when one has to be dropped. Later
    evictions take the next value of that order and skip those used since.

    Attributes:
        uses: the number of times that a value was used or added.
    """

    def __init__(self, most: int) -> None:
        """Start empty, with room for `most` values."""
        self.uses = 0
        self._most = most
        self._entries: dict[Key, _LRUEntry[Value]] = {}
        self._order: list[Key] = []  # the least recently used is last
        self._ordered = 0  # the highest `used` when it was sorted

    def __len__(self) -> int:
        """The number of values."""
        return len(self._entries)

    def use(self, key: Key) -> Value | None:
        """The value, or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self.uses += 1
        entry.used = self.uses
        return entry.value

    def peek(self, key: Key) -> Value | None:
        """The value, or None, without using it."""
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def put(self, key: Key, value: Value) -> Key | None:
        """Keep a value as the most recently used; returns the key dropped to make room, or None."""
        self.uses += 1
        return self._add(key, _LRUEntry(value, self.uses))

    def share(self, key: Key, source: LRU[Key, Value]) -> Key | None:
        """Share a value of `source`: using it there counts as using it here; returns as `put`."""
        return self._add(key, source._entries[key])

    def _add(self, key: Key, entry: _LRUEntry[Value]) -> Key | None:
        self._entries[key] = entry
        if len(self._entries) <= self._most:
            return None
        oldest = self.find_oldest()
        del self._entries[oldest]
        return oldest

    def drop(self, key: Key) -> Value | None:
        """Forget a value; returns it, or None."""
        entry = self._entries.pop(key, None)
        return None if entry is None else entry.value

    def find_oldest(self) -> Key:
        """The key of the least recently used value; the cache must not be empty."""
        entries = self._entries
        while True:
            while self._order:
                entry = entries.get(self._order[-1])
                if entry is not None and entry.used <= self._ordered:
                    return self._order[-1]
                self._order.pop()
            self._order = sorted(entries, key=lambda key: -entries[key].used)
            self._ordered = entries[self._order[0]].used

    def items(self) -> list[tuple[Key, Value]]:
        """Keys and values as of now, least recently used first."""
        entries = sorted(self._entries.items(), key=lambda item: item[1].used)
        return [(key, entry.value) for key, entry in entries]
