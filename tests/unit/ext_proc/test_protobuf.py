"""Protobuf messages read field by field."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.ext_proc.protobuf import DELIMITED, FIXED32, FIXED64, VARINT, Reader, read_varint
from tests.support.protobuf import field

UNREADABLE = {
    "a group": b"\x0b\x0c",
    "the end of a group": b"\x0c",
    "a field without a number": b"\0\0",
    "a type that does not exist": b"\x0e\x00",
    "a varint of eleven bytes": b"\x08" + b"\xff" * 10 + b"\x01",
    "a length behind the end": b"\x0a\x05abc",
    "a length beyond all memory": b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01abc",
    "a fixed number that is cut off": b"\x09\0\0\0\0\0\0\0",
    "a varint that is cut off": b"\x08\x80",
    "a tag alone": b"\x0a",
}

NUMBERS = st.integers(0, 2**64 - 1)
FIELDS = st.lists(
    st.one_of(
        st.tuples(st.just(VARINT), st.integers(1, 2**29 - 1), NUMBERS),
        st.tuples(st.just(DELIMITED), st.integers(1, 15), st.binary(max_size=200)),
        st.tuples(st.just(FIXED64), st.integers(1, 15), st.floats(allow_nan=False)),
        st.tuples(st.just(FIXED32), st.integers(1, 15), st.just(None)),
    ),
    max_size=5,
)


def write_varint(number: int) -> bytes:
    """As protobuf does."""
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*made, number])


def write(kind: int, number: int, value: object) -> bytes:
    """One field."""
    tag = write_varint(number << 3 | kind)
    if isinstance(value, int):
        return tag + write_varint(value)
    if isinstance(value, bytes):
        return tag + write_varint(len(value)) + value
    return tag + (struct.pack("<d", value) if kind == FIXED64 else b"\1\2\3\4")


def read(reader: Reader) -> list[tuple[int, int, object]]:
    """All fields of the message that the reader is in."""
    found: list[tuple[int, int, object]] = []
    while tag := reader.read_tag():
        found.append((tag & 7, tag >> 3, read_value(reader, tag & 7)))
    return found


def read_value(reader: Reader, kind: int) -> object:
    """The value of the current field; None for a fixed 32-bit number, which is not read."""
    if kind == VARINT:
        return reader.value
    if kind == DELIMITED:
        return reader.read_bytes()
    return reader.read_double() if kind == FIXED64 else None


@given(FIELDS)
def test_fields_are_read_as_they_were_written(fields: list[tuple[int, int, object]]) -> None:
    """Numbers of any size, with or without bytes to skip."""
    message = b"".join(write(*each) for each in fields)

    assert read(Reader(message)) == fields


@given(FIELDS, FIELDS)
def test_a_message_in_a_message_is_entered_and_left(
    inside: list[tuple[int, int, object]], behind: list[tuple[int, int, object]]
) -> None:
    """Its fields end where it does, and a reader that leaves it early also continues after it."""
    message = field(1, b"".join(write(*each) for each in inside)) + b"".join(write(*each) for each in behind)

    for early in (False, True):
        reader = Reader(message)
        assert reader.read_tag() == 1 << 3 | DELIMITED
        outer = reader.enter()
        assert early or read(reader) == inside
        reader.leave(outer)
        assert read(reader) == behind


@pytest.mark.parametrize("data", UNREADABLE.values(), ids=UNREADABLE)
def test_what_is_no_field_is_refused(data: bytes) -> None:
    """Also inside a message, whose end no field goes beyond."""
    with pytest.raises((ValueError, IndexError)):
        read(Reader(data))
    reader = Reader(field(1, data) + bytes(20))
    assert reader.read_tag() == 1 << 3 | DELIMITED
    reader.enter()
    with pytest.raises((ValueError, IndexError)):
        read(reader)


def test_a_varint_has_64_bits() -> None:
    """Of more than that, the lowest count: so protobuf has it."""
    assert read_varint(b"\xff" * 9 + b"\x01", 0) == (2**64 - 1, 10)
    assert read_varint(b"\xff" * 9 + b"\x7f", 0) == (2**64 - 1, 10)
    assert read_varint(b"\0\x85\x00", 1) == (5, 3)


def test_text_that_is_no_utf_8_is_readable() -> None:
    """Text that is no UTF-8 does not make the rest of the message unreadable."""
    reader = Reader(field(1, b"gpt\xff4"))
    assert reader.read_tag() == 1 << 3 | DELIMITED

    assert reader.read_text() == "gpt�4"
