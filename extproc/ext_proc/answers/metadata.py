"""Writes dynamic metadata as bytes; filling protobuf's Struct would take ten times as long.

The field is appended to the rest of a ProcessingResponse: a message's fields may come in any order
(protobuf.dev, Encoding).
"""

from __future__ import annotations

from struct import Struct
from typing import Any, Final

NAMESPACE: Final = "loopguard"
"""The namespace of Loopguard's dynamic metadata."""

SESSIONS: Final = "sessions"
"""Key of a JSON text for the access log: the request's reservations, and counters with it."""

_DYNAMIC_METADATA: Final = 8
"""The field's number in envoy.service.ext_proc.v3.ProcessingResponse."""

# Field numbers of google.protobuf.Struct and Value.
_FIELDS: Final = 1
_KEY: Final = 1
_VALUE: Final = 2
_STRING: Final = 3
_STRUCT: Final = 5

_NULL: Final = b"\x08\x00"
_BOOLS: Final = (b"\x20\x00", b"\x20\x01")
_NUMBER: Final = Struct("<Bd")
_NUMBER_TAG: Final = 0x11

_DELIMITED: Final = 2
"""The wire type of strings and messages."""

_SEVEN_BITS: Final = 0x7F
_MORE: Final = 0x80

# Looking up bytes is faster than creating them.
_TAGS: Final = [bytes([number << 3 | _DELIMITED]) for number in range(_DYNAMIC_METADATA + 1)]
_LENGTHS: Final = [bytes([length]) for length in range(_MORE)]
_CONTINUED: Final = [bytes([length | _MORE]) for length in range(_MORE)]


def write_metadata(metadata: dict[str, Any]) -> bytes:
    """The ProcessingResponse field with this metadata in our namespace.

    Args:
        metadata: strings, numbers, booleans, None, and dicts of these.
    """
    return write_entries([_write_entry(key, value) for key, value in metadata.items()])


def write_sessions(calls: str) -> bytes:
    """The same field with SESSIONS only; `calls` must not be empty."""
    return write_entries([_write_value(_SESSIONS_KEY, _STRING, calls.encode())])


def write_text(key: str, text: str) -> bytes:
    """An entry with a string, for `write_entries`."""
    return _write_value(_write_key(key), _STRING, _encode(text))


def write_entries(entries: list[bytes]) -> bytes:
    """The same field, made from written entries."""
    return write_field(_DYNAMIC_METADATA, _write_value(_NAMESPACE_KEY, _STRUCT, b"".join(entries)))


def _write_entry(key: str, value: Any) -> bytes:  # noqa: ANN401  # anything that a Value can hold
    if isinstance(value, str):
        return write_text(key, value)
    before = _write_key(key)
    if isinstance(value, dict):
        return _write_value(
            before,
            _STRUCT,
            b"".join([_write_entry(inner, field) for inner, field in value.items()]),
        )
    if isinstance(value, bool):
        return _write_tagged(before, _BOOLS[value])
    if isinstance(value, (int, float)):  # a union would be created for each call
        return _write_tagged(before, _NUMBER.pack(_NUMBER_TAG, value))
    return _write_tagged(before, _NULL)


def _write_key(key: str) -> bytes:
    return write_field(_KEY, _encode(key))


def _write_value(key: bytes, kind: int, content: bytes) -> bytes:
    """A map entry with a string or a message; `kind` is the number of its field in a Value."""
    return _write_tagged(key, write_head(kind, len(content)) + content)


def _write_tagged(key: bytes, value: bytes) -> bytes:
    """A map entry with a Value."""
    entry = key + write_head(_VALUE, len(value)) + value
    return write_head(_FIELDS, len(entry)) + entry


def _encode(text: str) -> bytes:
    return text.encode() if text.isascii() else text.encode("utf-8", "backslashreplace")


def write_head(number: int, length: int) -> bytes:
    """The tag and length of a string or message; `number` is at most `_DYNAMIC_METADATA`."""
    if length <= _SEVEN_BITS:
        return _TAGS[number] + _LENGTHS[length]
    head = _TAGS[number]
    while length > _SEVEN_BITS:
        # Compiled, `+=` of bytes takes twice as long
        head = head + _CONTINUED[length & _SEVEN_BITS]
        length >>= 7
    return head + _LENGTHS[length]


def write_field(number: int, content: bytes) -> bytes:
    """A string or message with its tag and length."""
    return write_head(number, len(content)) + content


_NAMESPACE_KEY: Final = _write_key(NAMESPACE)
_SESSIONS_KEY: Final = _write_key(SESSIONS)
