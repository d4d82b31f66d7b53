"""Excerpts of bodies that are too long to inspect: all before the messages, and the newest ones.

Only older messages are omitted, so the rest is valid JSON of bounded length. The start of a message
is found reliably, whatever its texts contain, because quotes and brackets are tracked through the
omitted bytes. If that is impossible, there is no excerpt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

MAX_QUOTES: Final = 500_000
MAX_BRACKETS: Final = 200_000
"""Maximum number of quotes and of brackets in omitted bytes. Tracking this many takes 20 ms."""

MAX_AT_ONCE: Final = 8 * 2**20
"""Maximum number of bytes to omit at once, which takes 20 ms.

A body that arrives in chunks may be longer.
"""

MAX_DEPTH: Final = 64
"""Maximum nesting within an omitted element of the list."""

MAX_TOKENS: Final = 20_000
"""The first message of the tail must begin within this many strings and punctuation marks."""

_MAX_KEYS: Final = 32
"""Maximum number of keys to try that look like the messages' key."""

_PIECE: Final = 2**16
"""Number of bytes to omit in one step."""

_STRUCTURE: Final = b'"[]{}'
_OTHERS: Final = bytes([byte for byte in range(256) if byte not in _STRUCTURE])

_FEW_ESCAPES: Final = 1_024
"""Up to this many escapes are removed one by one, in a third of the time of two replacements."""

_ESCAPE: Final = re.compile(rb"\\.", re.DOTALL)
_START: Final = re.compile(rb"[ \t\r\n]*\{")
_STRING_END: Final = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NO_TOKEN: Final = re.compile(rb'[^"\[\]{},]*')


class Position:
    """Position in the structure of JSON, tracked through omitted bytes.

    Attributes:
        lost: the position is unknown, or the object or list in which tracking began has ended.
    """

    def __init__(self) -> None:
        """Start after the opening bracket of an object or list."""
        self.lost = False
        self._open = b""  # brackets
        self._in_string = False
        self._escaped = False  # the next byte belongs to the escape
        self._quotes = 0
        self._brackets = 0

    @property
    def is_at_top(self) -> bool:
        """Whether the position is in that object or list, not in a string or inner value."""
        return not (self.lost or self._open or self._in_string or self._escaped)

    def skip(self, data: bytes) -> None:
        """Track the position through omitted bytes."""
        if self.lost or not data:
            return
        if self._escaped:
            data, self._escaped = data[1:], False
        if b"\\" in data:
            if (len(data) - len(data.rstrip(b"\\"))) % 2:
                data, self._escaped = data[:-1], True
            if data.count(b"\\") <= _FEW_ESCAPES:
                data = _ESCAPE.sub(b"", data)
            else:
                # From left to right, as parsers do
                data = data.replace(rb"\\", b"").replace(rb"\"", b"")
        structure = data.translate(None, _OTHERS)
        quotes = structure.count(b'"')
        self._quotes += quotes
        if self._quotes > MAX_QUOTES:
            self.lost = True
            return
        brackets = b"".join(structure.split(b'"')[1 if self._in_string else 0 :: 2])
        self._in_string = self._in_string != (quotes % 2 == 1)
        self._follow(brackets)

    def _follow(self, brackets: bytes) -> None:
        """Remove pairs of brackets that open and close."""
        self._brackets += len(brackets)
        if self._brackets > MAX_BRACKETS:
            self.lost = True
            return
        left = self._open + brackets
        for _ in range(MAX_DEPTH):
            length = len(left)
            left = left.replace(b"{}", b"").replace(b"[]", b"")
            if len(left) == length:
                break
        self._open = left
        self.lost = len(left) > MAX_DEPTH or b"}" in left or b"]" in left

    def find_next(self, data: bytes) -> int:
        """The offset of the list's next element in the following bytes; negative if unknown."""
        place = 1 if self._escaped else 0
        if self.lost:
            return -1
        if self._in_string:
            place = _end_string(data, place)
        depth = len(self._open)
        for _ in range(MAX_TOKENS):
            if place < 0:
                return -1
            found = _NO_TOKEN.match(data, place)
            place = found.end() if found is not None else place
            token = data[place : place + 1]
            place += 1
            if token == b'"':
                place = _end_string(data, place)
            elif token == b",":
                if not depth:
                    return place
            elif token in (b"[", b"{"):
                depth += 1
            else:  # a closing bracket, or the end
                depth -= 1
                if depth < 0 or not token:
                    return -1
        return -1


def _end_string(data: bytes, place: int) -> int:
    """The offset after a string; negative if it does not end."""
    found = _STRING_END.match(data, place)
    return -1 if found is None else found.end()


class Excerpt:
    """An excerpt of one body.

    Attributes:
        lost: there is no excerpt of this body.
    """

    def __init__(self, keys: Iterable[Sequence[str]], most: int) -> None:
        """Start before the body arrives.

        Args:
            keys: paths of keys at which a body may have its messages.
            most: bytes of the excerpt: an eighth for everything before the messages, three quarters
                for the newest messages.
        """
        self.lost = False
        self._keys = keys
        self._head = most // 8
        self._tail = most * 3 // 4
        self._begun = False
        self._start = b""
        self._position = Position()

    def shorten(self, data: bytearray) -> None:
        """Remove messages from the middle of the bytes, so that an eighth of `most` is free."""
        end = max(self._head, len(data) - self._tail)
        self._skip(data[: self._head], data[self._head : end])
        del data[self._head : end]

    def write(self, data: bytes | memoryview) -> bytes | None:
        """The excerpt of a complete body, as left by `shorten`.

        Returns:
            JSON of at most `most` bytes; None if there is no excerpt.
        """
        end = max(self._head, len(data) - self._tail)
        self.lost = self.lost or end - self._head > MAX_AT_ONCE
        if not self.lost:
            self._skip(bytes(data[: self._head]), data[self._head : end])
        if self.lost:
            return None
        rest = bytes(data[end:])
        place = self._position.find_next(rest)
        return None if place < 0 else self._start + rest[place:]

    def _skip(self, head: bytes | bytearray, middle: bytes | bytearray | memoryview) -> None:
        if not self._begun:
            self._begun = True
            self._begin(bytes(head))
        for place in range(0, len(middle), _PIECE):
            self._position.skip(bytes(middle[place : place + _PIECE]))
        self.lost = self.lost or self._position.lost

    def _begin(self, head: bytes) -> None:
        """Find the list of messages, which must not end within the head."""
        found = _START.match(head)
        for path in self._keys if found is not None else ():
            place = found.end() if found is not None else 0
            position = _find_open(head, place, path)
            if position is not None:
                self._start, self._position = head[: position[0]], position[1]
                return
        self.lost = True


def _find_open(head: bytes, start: int, path: Sequence[str]) -> tuple[int, Position] | None:
    """Where the list at the end of a path begins, and the position at the end of the head.

    Args:
        head: the beginning of a body.
        start: offset after the opening bracket of an object.
        path: keys, starting at that object.

    Returns:
        None if the list is missing or has ended.
    """
    key, rest = path[0], path[1:]
    passed = Position()
    place = start
    found = re.finditer(
        rb'"%b"[ \t\r\n]*:[ \t\r\n]*%b' % (key.encode(), rb"\{" if rest else rb"\["), head[start:]
    )
    for number, match in enumerate(found):
        at = start + match.start()
        passed.skip(head[place:at])
        place = at
        if passed.lost or number == _MAX_KEYS:
            return None
        if not passed.is_at_top:
            continue
        inside = start + match.end()
        if rest:
            deeper = _find_open(head, inside, rest)
            if deeper is not None:
                return deeper
            continue
        position = Position()
        position.skip(head[inside:])
        if not position.lost:
            return inside, position
    return None
