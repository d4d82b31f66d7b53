"""Messages read by hand say what protobuf says."""

import tracemalloc
from typing import NamedTuple

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import example, given, strategies as st

from extproc.ext_proc import wire
from extproc.ext_proc.wire import BODY_NONE, BODY_UNTOLD, LARGE, parse_message
from extproc.pb.external_processor_pb2 import HttpHeaders, ProcessingRequest
from tests.support.messages import ATTRIBUTES, body, headers
from tests.support.protobuf import field


def lengthy(
    numbers: st.SearchStrategy[int], contents: st.SearchStrategy[bytes]
) -> st.SearchStrategy[bytes]:
    return st.builds(field, numbers, contents, st.sampled_from([0, 0, 0, 1, 3, 9]))


JUNK = st.one_of(
    st.binary(max_size=3),
    st.sampled_from(
        [
            b"\x10\x00",
            b"\x10\x01",
            b"\x18\x02",
            b"\x78\x07",
            b"\x0b\x0c",
            b"\x0b",
            b"\x0c",
            b"\xa2\x00",
        ]
    ),
    lengthy(st.integers(1, 15), st.binary(max_size=4)),
)


def fields(*kinds: st.SearchStrategy[bytes], size: int = 3) -> st.SearchStrategy[bytes]:
    return st.lists(st.one_of(*kinds), max_size=size).map(b"".join)


def usual(*parts: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.tuples(*parts).map(b"".join)


def plain(number: int, contents: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return contents.map(lambda inside: field(number, inside))


# What Envoy sends.
NAME = st.sampled_from([b"a", b"b", b":path", "\xe4".encode(), b"n" * 300])
VALUE = st.sampled_from([b"", b"1", b"2", b"\xff", b"v" * 300])
HEADER = plain(1, usual(plain(1, NAME), plain(3, VALUE) | st.just(b"")))
HEADERS_END = st.sampled_from([b"", b"\x18\x01"])
HEADERS = plain(2, usual(plain(1, fields(HEADER, size=6)), HEADERS_END))
BODY = plain(1, st.one_of(st.binary(max_size=300), st.just(b"b" * LARGE)))
BODY_END = st.sampled_from([b"", b"\x10\x01"])
BODIES = plain(4, usual(BODY, BODY_END))
FACTS = headers(attributes={"xds.route_name": "r"}, mode=None)
FACTS.metadata_context.filter_metadata["m"].update({"claim": 7})
FACTS.ClearField("request_headers")
BESIDE = st.sampled_from([b"", b"\x42\x00", FACTS.SerializeToString()])
OBSERVED = st.sampled_from([b"", b"\x50\x01"])
CONFIG = st.sampled_from(
    [b"", b"\x5a\x02\x08\x02", b"\x5a\x02\x10\x04", b"\x5a\x04\x08\x04\x10\x04"]
)
USUAL = usual(HEADERS | BODIES, BESIDE, OBSERVED, CONFIG)

# And what Envoy never sends.
WILD_HEADER = lengthy(
    st.just(1), fields(lengthy(st.sampled_from([1, 2, 3]), NAME | st.just(b"\xed\xa0\x80")), JUNK)
)
WILD_HEADERS = lengthy(
    st.sampled_from([2, 2, 3]),
    fields(lengthy(st.just(1), fields(HEADER, WILD_HEADER)), HEADERS_END, JUNK),
)
WILD_BODY = lengthy(
    st.sampled_from([4, 4, 5, 6]),
    fields(BODY, lengthy(st.just(1), st.binary(max_size=9)), BODY_END, JUNK),
)
WILD_BESIDE = st.one_of(
    st.sampled_from(
        [
            b"\x50\x00",
            b"\x50\x80\x01",
            b"\x5a\x00",
            b"\x5a\x02\x08\x00",
            b"\x5a\x04\x08\x02\x18\x01",
            b"\x5a\x03\x08\x02\x10",
        ]
    ),
    st.sampled_from(
        [b"\x5a\x02\x08\x05", b"\x5a\x03\x08\x82\x01", b"\xc2\x01\x01x", b"\x49", b"\x62\x01x"]
    ),
    lengthy(st.sampled_from([8, 9, 11, 12]), st.binary(max_size=3)),
)
WILD = st.one_of(HEADERS, BODIES, WILD_HEADERS, WILD_BODY, BESIDE, WILD_BESIDE, JUNK)


class Reading(NamedTuple):
    """What a message says; a response mode that is not told counts as NONE."""

    kind: str
    headers: dict[str, bytes]
    body: bytes
    ended: bool
    observed: bool
    modes: tuple[int, int]
    route: str | None
    beside: list[Message]


def read_by_protobuf(data: bytes) -> Reading | None:
    try:
        message = ProcessingRequest.FromString(data)
    except DecodeError:
        return None
    kind, modes = message.WhichOneof("request") or "", message.protocol_config
    said = getattr(message, kind) if kind else None
    found: dict[str, bytes] = {}
    for header in message.request_headers.headers.headers:
        found.setdefault(header.key, header.raw_value)
    attributes = message.attributes[ATTRIBUTES].fields if ATTRIBUTES in message.attributes else {}
    return Reading(
        kind,
        found,
        message.request_body.body,
        kind.endswith("_trailers") or getattr(said, "end_of_stream", False),
        message.observability_mode,
        (
            modes.request_body_mode if message.HasField("protocol_config") else BODY_UNTOLD,
            modes.response_body_mode,
        ),
        attributes["xds.route_name"].string_value if "xds.route_name" in attributes else None,
        list_beside(message),
    )


def read_by_hand(data: bytes) -> Reading | None:
    """What our parser reads; fields beside headers and body may be refused when read."""
    try:
        message = parse_message(data)
        route, beside = (
            message.read_attribute("xds.route_name"),
            list_beside(message.parse_beside()),
        )
    except DecodeError:
        return None
    said = message.kind, message.headers, bytes(message.body), message.ended, message.observed
    return Reading(*said, (message.body_mode, max(message.response_mode, BODY_NONE)), route, beside)


def list_beside(message: ProcessingRequest) -> list[Message]:
    facts = ProcessingRequest(attributes=dict(message.attributes))
    return [message.metadata_context, facts]


@given(st.one_of(USUAL, usual(USUAL, WILD), usual(WILD, USUAL), fields(WILD)))
@example(field(4, field(1, b"xyz") + b"\x10\x01") + field(4, field(1, b"")))
@example(field(4, field(1, b"xyz") + field(1, b"\0")))
@example(field(4, field(1, b"xyz")) + field(2, b"") + field(4, b""))
@example(field(2, field(1, field(1, field(1, b"a") + field(3, b"1")) + field(1, field(1, b"a")))))
@example(field(4, b"") + b"\x5a\x03\x08\x02\x10\x42\x42\x00")
@example(field(4, b""))
@example(b"")
def test_any_message_is_read_as_by_protobuf(data: bytes) -> None:
    assert read_by_hand(data) == read_by_protobuf(data)


# A message of each kind, with what Envoy sends beside it.
WHOLE = [
    field(
        2,
        field(1, field(1, field(1, b"a") + field(3, b"1")) + field(1, field(1, b"b")))
        + b"\x18\x01",
    )
    + b"\x42\x00"
    + field(9, field(1, b"a"))
    + b"\x50\x01\x5a\x02\x08\x02",
    field(4, field(1, b"abc") + b"\x10\x01") + b"\x42\x00",
]


@pytest.mark.parametrize("whole", WHOLE, ids=["headers", "body"])
def test_damaged_message_is_read_as_by_protobuf(whole: bytes) -> None:
    """Cut off behind any byte, and with any value of any single byte."""
    for place in range(len(whole) + 1):
        damaged = [
            whole[:place],
            *(whole[:place] + bytes([value]) + whole[place + 1 :] for value in range(256)),
        ]
        assert [read_by_hand(data) for data in damaged] == [
            read_by_protobuf(data) for data in damaged
        ]


@pytest.mark.sources  # what compiled code refers to stays as it is
@pytest.mark.parametrize("whole", WHOLE, ids=["headers", "body"])
def test_usual_messages_are_not_parsed_by_protobuf(
    whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "ProcessingRequest", None)

    assert parse_message(whole).read_attribute("never.asked.for") is None


@pytest.mark.parametrize(
    "beside", [b"", *[field(number, field(1, b"o" * 1_000)) for number in (8, 9)]]
)
def test_large_bodies_are_not_copied(beside: bytes) -> None:
    data = body(b"x" * 1_000_000).SerializeToString() + beside

    message = parse_message(data)

    assert isinstance(message.body, memoryview)
    assert message.body.obj is data
    assert message.body == b"x" * 1_000_000
    assert message.ended


def parse_headers(**values: bytes) -> dict[str, bytes]:
    message = ProcessingRequest(request_headers=HttpHeaders())
    for name, value in values.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value)
    return parse_message(message.SerializeToString()).headers


@pytest.mark.parametrize(
    "second",
    [
        {"a": b"1", "cookie": b"other", "c": b"other"},
        {"a": b"1", "cookie": b"", "c": b""},
        {"a": b"1", "c": b"3", "cookie": b"2"},
        {"a": b"1", "cookie": b"2", "d": b"3"},
        {"a": b"1", "cookie": b"2"},
        {"a": b"1", "cookie": b"2", "c": b"3", "d": b"4"},
    ],
)
def test_headers_do_not_depend_on_earlier_requests(second: dict[str, bytes]) -> None:
    parse_headers(a=b"1", cookie=b"2", c=b"3")

    assert parse_headers(**second) == second
    assert parse_headers(a=b"1", cookie=b"2", c=b"3") == {"a": b"1", "cookie": b"2", "c": b"3"}


def measure_known(prefix: str, **more: bytes) -> int:
    """Memory that many shapes of headers take for good, each with these headers beside others."""
    tracemalloc.start()
    for number in range(200):
        parse_headers(**{f"{prefix}-{place}": b"v" for place in range(number)}, **more)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken


@pytest.mark.slow
def test_cache_of_headers_is_bounded_and_keeps_no_secrets() -> None:
    more: dict[str, dict[str, bytes]] = {
        "first": {},
        "second": {},
        "plain": {"ab": b"v"},
        "kept": {"ab": b"v" * 200},
        "long": {"ab": b"v" * 2_000},
        "secret": {"authorization": b"v" * 200},
        "query": {":path": b"/?" + b"v" * 200},
    }
    taken = {name: measure_known("xy"[place % 2], **more[name]) for place, name in enumerate(more)}

    assert taken["plain"] < 1_000_000
    assert taken["kept"] - taken["plain"] > 64 * 200
    assert max(taken["long"], taken["secret"], taken["query"]) - taken["plain"] < 64 * 100
