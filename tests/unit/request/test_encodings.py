"""Bodies as clients may send them: compressed, or in another Unicode encoding."""

import gzip
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress

import brotli
import pytest
from hypothesis import given, strategies as st

from extproc.request.encodings import UnreadableError, read_text

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

TEXT = '{"messages": [{"role": "user", "content": "Grüße, 世界 \U0001f600"}]}'
DATA = TEXT.encode()
MEGABYTE = 2**20


def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)  # the same at every run


def _deflate_raw(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


PACKERS: dict[str, tuple[bytes, Callable[[bytes], bytes]]] = {
    "gzip": (b"gzip", _gzip),
    "x-gzip": (b"X-GZIP", _gzip),
    "deflate": (b"deflate", zlib.compress),
    "raw deflate": (b"deflate", _deflate_raw),
    "br": (b"br", lambda data: brotli.compress(data, quality=4)),
    "zstd": (b"zstd", zstd.compress),
}


@pytest.mark.parametrize("name", PACKERS)
def test_each_content_encoding_is_read(name: str) -> None:
    encoding, pack = PACKERS[name]

    assert read_text(pack(DATA), encoding, MEGABYTE) == DATA
    assert read_text(memoryview(pack(DATA)), encoding, MEGABYTE) == DATA


def test_zstd_body_may_have_a_few_frames() -> None:
    frame = zstd.compress(DATA)
    empty = zstd.compress(b"")

    assert read_text(frame * 3, b"zstd", MEGABYTE) == DATA * 3
    assert read_text(b"", b"zstd", MEGABYTE) == b""
    for body in (empty * 100, frame[:-3], frame + b"more"):
        with pytest.raises(UnreadableError, match="content_encoding"):
            read_text(body, b"zstd", MEGABYTE)


def test_at_most_two_encodings_are_undone_in_turn() -> None:
    """The last one named was applied last; `identity` is none."""
    twice = brotli.compress(_gzip(DATA))

    assert read_text(twice, b"gzip, identity , br", MEGABYTE) == DATA
    with pytest.raises(UnreadableError):
        read_text(brotli.compress(twice), b"gzip, br, br", MEGABYTE)


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (DATA, b"gzip"),
        (DATA, b"deflate"),
        (DATA, b"br"),
        (DATA, b"zstd"),
        (_gzip(DATA)[:-1], b"gzip"),
        (_gzip(DATA) + _gzip(DATA), b"gzip"),  # servers read on, or do not
        (brotli.compress(DATA)[:-1], b"br"),
        (DATA, b"compress"),
        (b"", b"gzip"),
    ],
)
def test_broken_or_unknown_encoding_is_unreadable(body: bytes, encoding: bytes) -> None:
    with pytest.raises(UnreadableError) as error:
        read_text(body, encoding, MEGABYTE)

    assert error.value.reason == "content_encoding"


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKERS)
def test_body_is_unpacked_up_to_the_limit(name: str) -> None:
    encoding, pack = PACKERS[name]

    for size in (4 * MEGABYTE, MEGABYTE + 1):
        with pytest.raises(UnreadableError) as error:
            read_text(pack(bytes(size)), encoding, MEGABYTE)
        assert error.value.reason == "inspect_limit"
    assert len(read_text(pack(b"x" * MEGABYTE), encoding, MEGABYTE)) == MEGABYTE


@pytest.mark.parametrize(
    "encoding",
    ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"],
)
def test_each_unicode_encoding_is_read(encoding: str) -> None:
    assert bytes(read_text(TEXT.encode(encoding), b"", MEGABYTE)) == DATA


@given(
    st.binary(max_size=40), st.sampled_from([b"", b"gzip", b"deflate", b"br", b"zstd", b"gzip,br"])
)
def test_any_bytes_are_read_or_unreadable(body: bytes, encoding: bytes) -> None:
    with suppress(UnreadableError):
        read_text(body, encoding, 100)
