"""HPACK header blocks; python-hyper's hpack is the other side, and the oracle."""

import re

import pytest
from hpack import Decoder as Reference, Encoder, HPACKError
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hypothesis import example, given, strategies as st

from extproc.errors import ProtocolError
from extproc.transport import headers as hpack
from extproc.transport.headers import Cache, Decoder, decode_huffman, encode

Pairs = list[tuple[bytes, bytes]]

REQUEST: Pairs = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"),
    (b":authority", b"loopguard"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
    (b"x-loopguard-scope", b"gateway"),
]
NAMES = st.sampled_from([name for name, _ in REQUEST]) | st.binary(max_size=12)
PAIRS = st.lists(st.tuples(NAMES, st.binary(max_size=40)), max_size=8)


def pairs(decoder: Decoder, block: bytes) -> Pairs:
    return [(field.name, field.value) for field in decoder.decode(block).fields]


def without_table(cache: Cache | None = None) -> Decoder:
    """The decoder of a connection whose peer has set its table's size to 0."""
    decoder = Decoder(cache or Cache())
    decoder.forbid_table()
    decoder.decode(b"\x20")
    return decoder


def huffman(text: bytes) -> bytes:
    return bytes(HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode(text))


_EMPTY = (b"", b"")
_SCHEME = (b":scheme", b"")
_OVERLAP = [
    [_SCHEME, _EMPTY],
    [_EMPTY, (b":method", b""), _EMPTY, _EMPTY, _SCHEME],
    [_EMPTY, _EMPTY, _SCHEME],
]


@given(st.lists(PAIRS, max_size=5), st.booleans(), st.sampled_from([0, 100, 4_096]))
@example(
    blocks=_OVERLAP, coded=False, table=0
)  # start and end of the model match in the same bytes
def test_blocks_of_another_encoder_are_decoded(
    blocks: list[Pairs], coded: bool, table: int
) -> None:
    encoder, decoder = Encoder(), Decoder(Cache())
    encoder.header_table_size = table

    for block in blocks:
        assert pairs(decoder, encoder.encode(block, huffman=coded)) == block


@given(
    st.lists(
        st.binary(max_size=30) | st.sampled_from([b"\x20", b"\x82", b"\xbe", b"\x40\x01a\x01b"]),
        max_size=6,
    )
)
@example([b"\x20" * 3])
@example([b"\x20\x20\x82"])
def test_any_bytes_are_read_as_by_another_decoder(blocks: list[bytes]) -> None:
    ours, theirs = Decoder(Cache()), Reference()
    for block in blocks:
        try:
            expected = [(bytes(pair[0]), bytes(pair[1])) for pair in theirs.decode(block, raw=True)]
        except (HPACKError, IndexError):
            expected = None
        if expected is None or THREE_UPDATES.match(block):
            with pytest.raises(ProtocolError):
                ours.decode(block)
            return
        assert pairs(ours, block) == expected


THREE_UPDATES = re.compile(rb"(?:[\x20-\x3e]|\x3f[\x80-\xff]*[\x00-\x7f]){3}", re.DOTALL)


@pytest.mark.parametrize(
    "coded",
    [b"\xff", huffman(b"a") + b"\xff", b"\x18", b"\xff\xff\xff\xff", huffman(b"\x16")[:-1]],
    ids=[
        "padding alone",
        "a byte of padding",
        "padding of zeros",
        "end of string",
        "half a symbol",
    ],
)
def test_invalid_huffman_code_is_refused(coded: bytes) -> None:
    with pytest.raises(ProtocolError) as refusal:
        decode_huffman(coded)

    assert refusal.value.code == hpack.COMPRESSION_ERROR


def test_huffman_symbols_are_those_of_rfc_7541() -> None:
    for symbol, (code, length) in enumerate(zip(REQUEST_CODES, REQUEST_CODES_LENGTH, strict=True)):
        fill = -length % 8
        coded = (code << fill | (1 << fill) - 1).to_bytes((length + fill) // 8, "big")
        if symbol < 256:
            assert decode_huffman(coded) == bytes((symbol,))


BROKEN = {
    "index 0": b"\x80",
    "an index too far": b"\xbe",
    "a name too far": b"\x7f\x00\x00",
    "no name": b"\x00",
    "half a name": b"\x00\x02a",
    "no value": b"\x00\x01a",
    "half a value": b"\x00\x01a\x02b",
    "a giant": b"\xff\xff\xff\xff\xff\xff\x01",
    "an update behind a field": b"\x82\x20",
}


@pytest.mark.parametrize("block", BROKEN.values(), ids=BROKEN.keys())
def test_broken_block_is_a_compression_error(block: bytes) -> None:
    with pytest.raises(ProtocolError) as refusal:
        without_table().decode(block)

    assert refusal.value.code == hpack.COMPRESSION_ERROR


def test_table_of_size_0_cannot_be_enlarged() -> None:
    cache = Cache()
    block = b"\x3f\xe1\x1f\x20\x82"  # 4096, then 0
    before = Decoder(cache)
    for _ in range(3):
        before.decode(block)

    with pytest.raises(ProtocolError):
        without_table(cache).decode(block)


TOO_MUCH = {
    "many fields": b"\x82" * (hpack.MAX_FIELDS + 1),
    "a large field": encode([(b"x", b"y" * hpack.MAX_BLOCK)]),
    "a bomb": b"\x40\x01a\x7f\xa1\x1e" + b"b" * 4_000 + b"\xbe" * 20,
}


@pytest.mark.parametrize("block", TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_fields_are_bounded_in_number_and_bytes(block: bytes) -> None:
    with pytest.raises(ProtocolError) as refusal:
        Decoder(Cache()).decode(block)

    assert refusal.value.code == hpack.ENHANCE_YOUR_CALM


def test_cache_has_no_blocks_that_use_a_table() -> None:
    cache, indexing = Cache(), Encoder()
    first, second = indexing.encode(REQUEST, huffman=False), indexing.encode(REQUEST, huffman=False)
    decoder = Decoder(cache)

    assert first != second
    assert [pairs(decoder, block) for block in (first, second, second)] == [REQUEST] * 3
    assert not cache.blocks
    with pytest.raises(ProtocolError):
        without_table(cache).decode(second)


def read_or_refuse(decoder: Decoder, block: bytes) -> tuple[object, ...] | int:
    """All that a block says, or the code of its error."""
    try:
        found = decoder.decode(block)
    except ProtocolError as error:
        return error.code
    said = found.method, found.path, found.content_type, found.content_length, found.malformed
    return [(field.name, field.value) for field in found.fields], found.size, *said


JUNK = st.binary(max_size=6) | st.sampled_from(
    [b"\x00\x01a\x01b", b"\x82", b"\x20", b"\x0f\x0d\x03abc", b"\x00\x01a\x81\x1f"]
)


@given(
    PAIRS,
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 9), JUNK), min_size=1, max_size=4),
)
def test_earlier_blocks_change_the_meaning_of_none(
    more: Pairs, coded: bool, changes: list[tuple[int, int, bytes]]
) -> None:
    encoder, cache = Encoder(), Cache()
    encoder.header_table_size = 0
    whole = encoder.encode(REQUEST + more, huffman=coded).removeprefix(b"\x20")
    decoder = without_table(cache)
    blocks = [whole, *(whole[:at] + junk + whole[at + gone :] for at, gone, junk in changes)]

    for block in [*blocks, *blocks]:
        assert read_or_refuse(decoder, block) == read_or_refuse(without_table(), block)


@pytest.mark.parametrize(
    "middle",
    [
        b"",
        b"\x20\x01a\x01b",
        b"\x80\x01a\x01b",
        b"\x0f\xff\xff\xff\xff\xff\x01",
        b"\x00\x01a\x81\x18",
        b"\x7e\x01b",
        encode([(b"x-trace", b"x" * hpack.MAX_BLOCK)]),
        encode([(b"x-trace", b"1"), (b"x-trace", b"2")]),
        encode([(b"content-type", b"text/plain")]),
        encode([(b"content-length", b"7")]),
        encode([(b"X-Trace", b"1")]),
        encode([(b":path", b"/again")]),
    ],
    ids=lambda middle: middle[:12].hex(),
)
def test_block_like_the_last_is_read_as_alone(middle: bytes) -> None:
    decoder = without_table()
    for number in range(2):
        decoder.decode(encode([*REQUEST[:4], (b"x-trace", b"%d" % number), *REQUEST[4:]]))
    block = encode(REQUEST[:4]) + middle + encode(REQUEST[4:])

    assert read_or_refuse(decoder, block) == read_or_refuse(without_table(), block)


@pytest.mark.parametrize("name", [b"content-type", b"content-length", b":path", b"X-Trace"])
def test_changing_field_about_the_request_is_read_each_time(name: bytes) -> None:
    decoder, rest = without_table(), [field for field in REQUEST if field[0] != name]
    for number in (b"1", b"2", b"3", b"4"):
        block = encode([*rest[:2], (name, number), *rest[2:]])

        assert read_or_refuse(decoder, block) == read_or_refuse(without_table(), block)


def test_block_with_a_table_reference_is_no_model() -> None:
    cache = Cache()
    indexing = Decoder(cache)
    indexing.decode(b"\x40\x01a\x01b")

    assert pairs(indexing, b"\xbe" + encode([(b"c", b"1")])) == [(b"a", b"b"), (b"c", b"1")]
    with pytest.raises(ProtocolError):
        without_table(cache).decode(b"\xbe" + encode([(b"c", b"2")]))


def test_cache_is_bounded_in_bytes() -> None:
    cache = Cache(limit=100_000)
    decoder = without_table(cache)

    for number in range(300):
        block = encode([(b"%d" % number, b"x" * 2_000)] * 10)
        for _ in range(3):
            decoder.decode(block)
        for part in (cache.names, cache.fields, cache.blocks):
            assert part.size <= 100_000

    assert cache.fields
    assert cache.blocks


@pytest.mark.parametrize(
    ("fields", "malformed"),
    [
        (REQUEST, False),
        ([*REQUEST, (b"content-length", b"1"), (b"content-length", b"1")], False),
        ([*REQUEST, (b"content-length", b"1"), (b"content-length", b"2")], True),
        ([*REQUEST, (b"content-length", b"9" * 5_000)], True),
        ([*REQUEST, (b"content-length", b"")], True),
        ([*REQUEST, (b"content-length", "²".encode())], True),
        ([*REQUEST, (b"x", b"a\nb")], True),
        ([*REQUEST, (b"x", b"a\0b")], True),
        ([*REQUEST, (b"", b"x")], True),
        ([(b":method", b"CONNECT"), (b":authority", b"h")], False),
        ([(b":method", b"CONNECT")], True),
        ([(b":method", b""), *REQUEST[1:]], True),
        ([], True),
    ],
)
def test_malformed_requests_are_found(fields: Pairs, malformed: bool) -> None:
    assert Decoder(Cache()).decode(encode(fields)).malformed is malformed
