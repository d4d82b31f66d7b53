"""What was worked out of late, bounded: two generations of answers, the older of which goes when the younger one is full."""

from __future__ import annotations

from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Memo(Generic[Key, Value]):
    """Answers by what was asked; none that was asked for within the last `most` new ones is forgotten."""

    def __init__(self, most: int) -> None:
        """There are none; `most` of them make a generation."""
        self._most = most
        self._young: dict[Key, Value] = {}
        self._old: dict[Key, Value] = {}

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._young) + len(self._old)

    def get(self, key: Key) -> Value | None:
        """The answer, None where it is not known."""
        found = self._young.get(key)
        if found is None:
            found = self._old.pop(key, None)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: Key, value: Value) -> None:
        """Know one more."""
        self._young[key] = value
        if len(self._young) >= self._most:
            self._young, self._old = {}, self._young
