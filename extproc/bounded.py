"""The package's two bounded caches: `Memo` for answers that can be worked out again, `LRU` for what cannot.

A pure function of small arguments needs neither: `functools.lru_cache` does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Memo(Generic[Key, Value]):
    """Answers in two generations: once the younger one is full, the older one goes, and what is asked for stays.

    That costs no bookkeeping when an answer is found, which is why the hot path uses it.
    """

    def __init__(self, most: int, measure: Callable[[Key, Value], int] | None = None) -> None:
        """Start empty.

        Args:
            most: the size of each generation.
            measure: the size of an answer, such as its bytes; None counts each as 1. A larger one than `most` is not kept.
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
        """Of all answers, at most twice that of a generation."""
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
        self._young[key] = value
        self._young_size += size


class LRU(Generic[Key, Value]):
    """Values by key; once there are too many, the least recently used one goes.

    Attributes:
        kept: all of them, the least recently used first.
    """

    def __init__(self, most: int) -> None:
        """Start empty, with room for `most` values."""
        self.kept: OrderedDict[Key, Value] = OrderedDict()
        self._most = most

    def use(self, key: Key) -> Value | None:
        """The value, or None."""
        value = self.kept.get(key)
        if value is not None:
            self.kept.move_to_end(key)
        return value

    def put(self, key: Key, value: Value) -> Key | None:
        """Keep a value as the most recently used one; returns the key whose value has made room, or None."""
        self.kept[key] = value
        self.kept.move_to_end(key)
        return self.kept.popitem(last=False)[0] if len(self.kept) > self._most else None
