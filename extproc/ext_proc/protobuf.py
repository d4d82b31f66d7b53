"""Reads a protobuf message field by field.

The protobuf library would create an object for every nested message.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

VARINT: Final = 0
FIXED64: Final = 1
DELIMITED: Final = 2
"""The wire type of strings and messages."""

FIXED32: Final = 5

_TYPE: Final = 7
_MORE: Final = 0x80
"""The bit that is set in every byte of a varint except the last; the other bits are the value."""

_BITS: Final = 0x7F
_LONGEST: Final = 63
_ALL: Final = 2**64 - 1

_read_double: Final = Struct("<d").unpack_from


class Reader:
    """Walks over the fields of a message and of nested messages (protobuf.dev, Encoding).

    It does not recurse: the caller of `enter` controls the depth.

    Attributes:
        value: the newest varint.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0
        self._start = 0
        self._end = len(data)
        self.value = 0

    def read_tag(self) -> int:
        """Go to the next field of the current message.

        Returns:
            its number and wire type, `number << 3 | type`; 0 at the end of the message.

        Raises:
            ValueError: the next bytes are not a field, or are a group, which proto3 does not have.
            IndexError: the message is cut off.
        """
        position = self._position
        if position >= self._end:
            return 0
        data = self._data
        tag = data[position]
        if tag < _MORE:  # most have one byte, and this check is faster than a call
            position += 1
        else:
            tag, position = read_varint(data, position)
        kind = tag & _TYPE
        if kind == DELIMITED:
            size = data[position]
            if size < _MORE:
                self._start = position + 1
            else:
                size, self._start = read_varint(data, position)
            position = self._start + size
        elif kind == VARINT:
            self.value, position = read_varint(data, position)
        elif kind == FIXED64:
            self._start = position
            position += 8
        elif kind == FIXED32:
            position += 4
        else:
            raise ValueError("a group, or no field")
        if position > self._end or not tag:
            raise ValueError("a field is longer than its message, or has no number")
        self._position = position
        return tag

    def enter(self) -> int:
        """Enter the nested message in the current field; returns the position for `leave`."""
        outer = self._end
        self._end = self._position
        self._position = self._start
        return outer

    def leave(self, outer: int) -> None:
        """Continue after the nested message, in the enclosing one, which ends at `outer`."""
        self._position = self._end
        self._end = outer

    def read_bytes(self) -> bytes:
        """The content of the current field."""
        return self._data[self._start : self._position]

    def read_text(self) -> str:
        """The string in the current field; invalid UTF-8 is replaced."""
        return self._data[self._start : self._position].decode("utf-8", "replace")

    def read_double(self) -> float:
        """The double in the current field."""
        number: float = _read_double(self._data, self._start)[0]
        return number


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at `position`, and the position after it.

    Raises:
        ValueError: the number is too long.
        IndexError: the number is cut off.
    """
    byte = data[position]
    number = byte & _BITS
    bits = 7
    while byte >= _MORE:
        if bits > _LONGEST:
            raise ValueError("a varint is too long")
        position += 1
        byte = data[position]
        number |= (byte & _BITS) << bits
        bits += 7
    return number if bits <= _LONGEST else number & _ALL, position + 1
