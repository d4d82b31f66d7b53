"""What questions read of a store's state and change in it, to be written if nothing else has changed it since.

A rule is a Python function of a `State`, a question and the time; it returns the answer. A remote store reads the keys of a
question, applies the rule to them here, and writes the result if the values are still those that were read, which `change.lua`
decides in one atomic step. If not, the rule is applied to the newer values. So a rule is exact, whatever other replicas do.

What a caller takes up (an account) is only added to, as long as there is room: questions of one caller do not disturb each
other.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final

GARBAGE_MS: Final = 1_000
"""How much longer than a value counts a server keeps it: the times in values decide."""

READ: Final = -1
"""In place of the time of a question: its keys are only read."""

_VERSION: Final = 2
_USAGE: Final = struct.Struct(">BBQIQ")
_pack_usage: Final = _USAGE.pack  # compiled code calls a module's constant faster than a method
_unpack_usage: Final = _USAGE.unpack
_ROOM: Final = 2**52


class State:
    """The values of some keys, as they were read and as a rule changes them."""

    def __init__(self, values: Mapping[str, bytes]) -> None:
        """Take what was read: a value for each key, empty for none. Other keys count as missing, and are not written."""
        self._values = values
        self._seen: set[str] = set()
        self._written: dict[str, tuple[bytes, int]] = {}
        self._account = ""
        self._spent = self._life = 0
        self._room = _ROOM

    @property
    def is_changed(self) -> bool:
        """Whether there is anything to write."""
        return len(self._written) > 0

    def get(self, key: str) -> bytes | None:
        """The value of a key; None if there is none."""
        written = self._written.get(key)
        if written is not None:
            return written[0]
        self._seen.add(key)
        return self._values.get(key) or None

    def put(self, key: str, value: bytes, life: int) -> None:
        """Keep a value for this many milliseconds."""
        if key in self._values:
            self._seen.add(key)
            self._written[key] = value, life + GARBAGE_MS

    def charge(self, key: str, cost: int, most: int, life: int, now: int) -> bool:
        """Charge a caller's account; returns False if that is too much. The questions of a state have one account."""
        if key not in self._values:
            return True
        used = read_usage(self._values[key], now)[1]
        if used + self._spent + cost > most:
            return False
        self._spent += cost
        self._account, self._life, self._room = key, life, min(self._room, most - self._spent)
        return True

    def list_arguments(self, now: int) -> tuple[int | bytes, ...]:
        """What `change.lua` is given, at this time of the questions."""
        arguments: list[int | bytes] = [len(self._values), now]
        for key, value in self._values.items():
            written = self._written.get(key)
            if key == self._account:
                arguments += (self._spent, self._room, -self._life)
            elif written is not None:
                arguments += (value, written[0], written[1])
            elif key in self._seen:
                arguments += (value, b"", 0)
            else:
                arguments += (b"", b"", -1)
        return tuple(arguments)


def read_usage(value: bytes | None, now: int) -> tuple[int, int]:
    """When an account began, and what was charged since then."""
    if value is not None and len(value) == _USAGE.size and value[0] == _VERSION:
        started: int
        life: int
        used: int
        _, _, started, life, used = _unpack_usage(value)
        if abs(now - started) < life:
            return started, used
    return now, 0


def charge(value: bytes | None, cost: int, most: int, life: int, now: int) -> bytes | None:
    """Charge an account; returns what is kept of it, or None if that is too much."""
    started, used = read_usage(value, now)
    if used + cost > most:
        return None
    return _pack_usage(_VERSION, 0, started, life, used + cost)
