"""Large messages read without copying the body: always what the ordinary parser says."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from extproc import wire
from extproc.pb.external_processor_pb2 import HttpBody, HttpHeaders, ProcessingRequest
from extproc.wire import parse_large
from tests.messages import body, headers


def field(number: int, contents: bytes, padding: int = 0) -> bytes:
    """A field with a length on the wire; the length is spelled with more bytes than it needs."""
    length, rest = bytearray(), len(contents)
    while rest or not length:
        length.append(rest & 0x7F | 0x80)
        rest >>= 7
    length += b"\x80" * padding
    length[-1] &= 0x7F
    return bytes([number << 3 | 2]) + length + contents


def lengthy(numbers: st.SearchStrategy[int], contents: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Fields with a length."""
    return st.builds(field, numbers, contents, st.sampled_from([0, 0, 0, 1, 3, 9]))


JUNK = st.one_of(
    st.binary(max_size=3),
    st.sampled_from([b"\x10\x00", b"\x10\x01", b"\x50\x01", b"\x78\x07", b"\x0b\x0c", b"\x0b", b"\x0c", b"\xa2\x00"]),
    lengthy(st.integers(1, 15), st.binary(max_size=4)),
)
BODY = lengthy(st.just(1), st.one_of(st.binary(max_size=300), st.integers(0, 9).map(bytes)))
HTTP_BODY = st.lists(st.one_of(BODY, JUNK), max_size=3).map(b"".join)
KINDS = st.sampled_from([headers(), headers(attributes={"a": "b"}), body(b"abc"), ProcessingRequest(response_body=HttpBody())])
FIELD = st.one_of(lengthy(st.sampled_from([4, 4, 4, 3, 6]), HTTP_BODY), KINDS.map(ProcessingRequest.SerializeToString), JUNK)
FIELDS = st.lists(FIELD, max_size=3).map(b"".join)
STARTS_WITH_BODY = st.builds(lambda first, behind, after: field(4, first + behind) + after, BODY, HTTP_BODY, FIELDS)


def both(data: bytes) -> tuple[ProcessingRequest | None, ProcessingRequest | None]:
    """What the ordinary parser and ours make of the bytes; None for a refusal."""
    try:
        ordinary = ProcessingRequest.FromString(data)
    except DecodeError:
        ordinary = None
    try:
        ours, chunk = parse_large(data)
    except DecodeError:
        return ordinary, None
    if ours.WhichOneof("request") == "request_body":
        ours.request_body.body = bytes(chunk)
    else:
        assert not chunk
    return ordinary, ours


@given(st.one_of(STARTS_WITH_BODY, FIELDS))
@example(field(4, field(1, b"xyz") + b"\x10\x01") + field(4, field(1, b"")))
@example(field(4, field(1, b"xyz") + field(1, b"")))
@example(field(4, field(1, b"xyz") + field(1, b"\0")))
@example(field(4, field(1, b"xyz") + field(7, bytes(300))))
@example(field(4, field(1, b"xyz")) + field(2, b""))
@example(field(4, field(1, b"xyz")) + field(2, b"") + field(4, b""))
@example(field(4, b""))
def test_the_answer_is_the_ordinary_parsers(data: bytes) -> None:
    """Fields in any order, repeated, merged, unknown or malformed: nothing is read differently, nothing taken or refused."""
    ordinary, ours = both(data)

    assert ours == ordinary


@given(st.binary(max_size=300), st.binary(max_size=9))
def test_a_body_cut_anywhere_or_followed_by_anything_is_the_same(contents: bytes, more: bytes) -> None:
    """Truncated at any byte, and with any bytes behind, a body message is what the ordinary parser says."""
    whole = body(contents).SerializeToString()

    found = [both(data) for data in [*(whole[:end] for end in range(len(whole) + 1)), whole + more]]

    assert all(ours == ordinary for ordinary, ours in found)


@pytest.mark.parametrize("around", ["body", "metadata", "attributes"])
def test_what_envoy_sends_is_not_copied(around: str) -> None:
    """A buffered body, alone or with what may come with it, is a view of the message's own bytes."""
    message = body(b"x" * 1_000_000)
    if around == "metadata":
        message.metadata_context.filter_metadata["envoy.filters.http.jwt_authn"].update({"claims": {"org": "o" * 1000}})
    if around == "attributes":
        message.attributes["envoy.filters.http.ext_proc"].update({"source.address": "192.0.2.1:1"})
    data = message.SerializeToString()

    parsed, chunk = parse_large(data)

    assert isinstance(chunk, memoryview)
    assert chunk.obj is data
    assert chunk == message.request_body.body
    assert parsed.request_body.end_of_stream
    assert (parsed.metadata_context, parsed.attributes) == (message.metadata_context, message.attributes)


def test_other_large_messages_are_left_to_protobuf() -> None:
    """Large headers, and a small body in large company, are parsed as ever."""
    large = ProcessingRequest(request_headers=HttpHeaders())
    large.request_headers.headers.headers.add(key="x", raw_value=b"v" * wire.LARGE)
    company = body(b"abc")
    company.attributes["a"].update({"b": "c" * wire.LARGE})

    found = [parse_large(message.SerializeToString()) for message in (large, company)]

    assert found == [(large, b""), (company, b"abc")]
