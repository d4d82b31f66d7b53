"""Fields of protobuf messages, as they stand on the wire."""

from __future__ import annotations


def field(number: int, contents: bytes, padding: int = 0) -> bytes:
    """A field with a length on the wire; the length is spelled with more bytes than it needs."""
    length, rest = bytearray(), len(contents)
    while rest or not length:
        length.append(rest & 0x7F | 0x80)
        rest >>= 7
    length += b"\x80" * padding
    length[-1] &= 0x7F
    return bytes([number << 3 | 2]) + length + contents
