"""Writes dynamic metadata as bytes, because filling protobuf's Struct takes ten times as long.

The field is appended to the rest of a ProcessingResponse: a message's fields may come in any order (protobuf.dev, Encoding).
"""

from __future__ import annotations

from struct import Struct
from typing import Any, Final

from extproc.bounded import Memo

NAMESPACE: Final = "loopguard"
"""The namespace of Loopguard's dynamic metadata."""

SESSIONS: Final = "sessions"
"""Key of a JSON text for the access log: the request's sessions, and the counts that include it."""

_DYNAMIC_METADATA: Final = 8
"""The number of its field in envoy.service.ext_proc.v3.ProcessingResponse."""

# Field numbers of google.protobuf.Struct and Value.
_FIELDS: Final = 1
_KEY: Final = 1
_VALUE: Final = 2
_STRING: Final = 3
_STRUCT: Final = 5
_TAGGED: Final = 0

_NULL: Final = b"\x08\x00"
_BOOLS: Final = (b"\x20\x00", b"\x20\x01")
_NUMBER: Final = Struct("<Bd")
_NUMBER_TAG: Final = 0x11

_DELIMITED: Final = 2
"""The wire type of strings and messages."""

_SEVEN_BITS: Final = 0x7F
_MORE: Final = 0x80

# Looking bytes up is faster than making them.
_TAGS: Final = [bytes([number << 3 | _DELIMITED]) for number in range(_DYNAMIC_METADATA + 1)]
_LENGTHS: Final = [bytes([length]) for length in range(_MORE)]
_CONTINUED: Final = [bytes([length | _MORE]) for length in range(_MORE)]

_LONGEST_KEY: Final = 64
_MOST_HEADS: Final = 1_024
_HEADS: Final[Memo[tuple[str, int, int], bytes]] = Memo(_MOST_HEADS)
"""What stands before a value, by the entry's key, and kind and length of the value. Long keys are not cached, because the names
of some headers are a client's choice. 1 MB at most."""

_BEFORE_ENTRIES: Final[Memo[int, bytes]] = Memo(_MOST_HEADS)
"""What stands before all entries, by their length in bytes."""

_BEFORE_SESSIONS: Final[Memo[int, bytes]] = Memo(512)
"""The bytes before a SESSIONS text that is the only metadata, by its length."""


def write_metadata(metadata: dict[str, Any]) -> bytes:
    """The ProcessingResponse field with this metadata in our namespace.

    Args:
        metadata: texts, numbers, booleans, None, and dicts of these.
    """
    return write_entries([_write_entry(key, value) for key, value in metadata.items()])


def write_sessions(calls: str) -> bytes:
    """The same field with SESSIONS only; `calls` must not be empty."""
    text = calls.encode()
    before = _BEFORE_SESSIONS.get(len(text))
    if before is None:
        before = write_metadata({SESSIONS: calls})[: -len(text)]
        _BEFORE_SESSIONS.put(len(text), before)
    return before + text


def write_text(key: str, text: str) -> bytes:
    """An entry with a text, for `write_entries`."""
    raw = text.encode()
    return write_text_head(key, len(raw)) + raw


def write_text_head(key: str, size: int) -> bytes:
    """What stands before a text of this many bytes in the entry of a key."""
    return _find_head(key, _STRING, size)


def write_entries(entries: list[bytes]) -> bytes:
    """The field that `write_metadata` writes, with entries that are written already."""
    joined = b"".join(entries)
    return write_entries_head(len(joined)) + joined


def write_entries_head(size: int) -> bytes:
    """What stands before entries of this many bytes in that field."""
    head = _BEFORE_ENTRIES.get(size)
    if head is None:
        head = _find_head(NAMESPACE, _STRUCT, size)
        head = write_head(_DYNAMIC_METADATA, len(head) + size) + head
        _BEFORE_ENTRIES.put(size, head)
    return head


def _write_entry(key: str, value: Any) -> bytes:  # noqa: ANN401  # what a Value can hold, each its own way
    """An entry of a Struct's fields."""
    kind = _TAGGED
    if isinstance(value, str):
        kind, content = _STRING, value.encode() if value.isascii() else _write_text(value)
    elif isinstance(value, bool):
        content = _BOOLS[value]
    elif isinstance(value, (int, float)):  # a union would be made for each call
        content = _NUMBER.pack(_NUMBER_TAG, value)
    elif isinstance(value, dict):
        kind, content = _STRUCT, b"".join([_write_entry(inner, field) for inner, field in value.items()])
    else:
        content = _NULL
    return _find_head(key, kind, len(content)) + content


def _find_head(key: str, kind: int, size: int) -> bytes:
    """What stands before a value in the entry of a key.

    Args:
        key: the key.
        kind: the number of the value's field in a Value; _TAGGED if the value has its tag already.
        size: the value's length, in bytes.
    """
    head = _HEADS.get((key, kind, size))
    if head is None:
        before = b"" if kind == _TAGGED else write_head(kind, size)
        size_of_value = len(before) + size
        before = write_field(_KEY, _write_text(key)) + write_head(_VALUE, size_of_value) + before
        head = write_head(_FIELDS, len(before) + size) + before
        if len(key) <= _LONGEST_KEY:
            _HEADS.put((key, kind, size), head)
    return head


def _write_text(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def write_head(number: int, length: int) -> bytes:
    """The tag and length of a string or message; the field's number is at most `_DYNAMIC_METADATA`."""
    if length <= _SEVEN_BITS:
        return _TAGS[number] + _LENGTHS[length]
    head = _TAGS[number]
    while length > _SEVEN_BITS:
        head = head + _CONTINUED[length & _SEVEN_BITS]  # compiled, `+=` of bytes takes twice as long
        length >>= 7
    return head + _LENGTHS[length]


def write_field(number: int, content: bytes) -> bytes:
    """A string or a message with its tag and length."""
    return write_head(number, len(content)) + content
