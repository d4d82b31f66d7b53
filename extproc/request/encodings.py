"""A body's text: decompressed (RFC 9110 section 8.4), as UTF-8, within a size limit.

A compressed body, or one in UTF-16, is read as its server would read it. Decompression stops at the
limit, so a decompression bomb costs no more than that.
"""

from __future__ import annotations

import json
import sys
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable
from typing import Final

import brotli

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_MAX_ENCODINGS: Final = 2
"""Maximum number of nested encodings to decode; clients use fewer."""

_ENOUGH: Final = 4
"""Number of bytes at the start of a body that determine its Unicode encoding."""

_MARKS: Final = 0x80
"""A body is UTF-8 without a byte order mark if its first byte is between 1 and this, and its second
byte is not 0. Byte order marks begin with 0 or a larger byte, and ASCII in UTF-16 or UTF-32 has a 0
in the first two bytes."""

_ZSTD_WINDOW: Final = 23
"""The largest window that a decoder must support (RFC 8878 section 3.1.1.1.2), as a power of 2
bytes."""


_MAX_FRAMES: Final = 16
"""Maximum number of frames in a zstd body; clients send one. The rest of the body is copied for
each."""


class UnreadableError(Exception):
    """A body does not match its content-encoding, or that is unknown, or the body is too long.

    Attributes:
        reason: `content_encoding` or `inspect_limit`, as in `uncounted_total`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def read_text(body: bytes | memoryview, content_encoding: bytes, limit: int) -> bytes | memoryview:
    """The body's text in UTF-8, without a byte order mark.

    Args:
        body: the body as sent.
        content_encoding: the header; empty if missing.
        limit: maximum number of decompressed bytes.

    Raises:
        UnreadableError: it is unreadable.
    """
    return _decode(
        _unpack_all(body, list_encodings(content_encoding), limit) if content_encoding else body
    )


def unpack(body: bytes | memoryview, content_encoding: bytes, limit: int) -> bytes | memoryview:
    """The body without its content-encoding; see `read_text` for the arguments and errors."""
    return _unpack_all(body, list_encodings(content_encoding), limit)


def list_encodings(content_encoding: bytes) -> list[bytes]:
    """The encodings in the header, except `identity`."""
    names = [name.strip().lower() for name in content_encoding.split(b",")]
    return [name for name in names if name not in (b"", b"identity")]


def split_mark(body: bytes) -> tuple[bytes, bytes]:
    """Split off the byte order mark, which is not part of the JSON."""
    return (BOM_UTF8, body[len(BOM_UTF8) :]) if body.startswith(BOM_UTF8) else (b"", body)


def _unpack_all(body: bytes | memoryview, encodings: list[bytes], limit: int) -> bytes | memoryview:
    if len(encodings) > _MAX_ENCODINGS:
        raise UnreadableError("content_encoding")
    for name in reversed(encodings):
        unpack = _UNPACKERS.get(name)
        if unpack is None:
            raise UnreadableError("content_encoding")
        body = _unpack(unpack, body, limit)
    return body


def _unpack(
    unpack: Callable[[bytes | memoryview, int], bytes], body: bytes | memoryview, limit: int
) -> bytes:
    try:
        unpacked = unpack(body, limit)
    except (zlib.error, brotli.error, zstd.ZstdError, EOFError):
        raise UnreadableError("content_encoding") from None
    if len(unpacked) > limit:
        raise UnreadableError("inspect_limit")
    return unpacked


def _decode(body: bytes | memoryview) -> bytes | memoryview:
    """Convert any Unicode encoding to UTF-8.

    Servers that use Python's own JSON parser accept all of them.
    """
    if len(body) >= _ENOUGH and 0 < body[0] < _MARKS and body[1]:
        return body  # almost always
    start = bytes(body[:_ENOUGH])
    encoding = json.detect_encoding(start)
    if encoding == "utf-8":
        return body
    if encoding == "utf-8-sig":
        return body[len(BOM_UTF8) :]
    try:
        return bytes(body).decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return body


def _inflate(body: bytes | memoryview, limit: int, wbits: int) -> bytes:
    inflater = zlib.decompressobj(wbits)
    unpacked = inflater.decompress(body, limit + 1)
    if len(unpacked) <= limit and (not inflater.eof or inflater.unused_data):
        raise EOFError  # cut off, or followed by bytes that a server may read
    return unpacked


def _unpack_gzip(body: bytes | memoryview, limit: int) -> bytes:
    return _inflate(body, limit, zlib.MAX_WBITS | 16)


def _unpack_deflate(body: bytes | memoryview, limit: int) -> bytes:
    """Decompress zlib's format, or raw deflate, which some clients send (RFC 9110 8.4.1.2)."""
    try:
        return _inflate(body, limit, zlib.MAX_WBITS)
    except zlib.error:
        return _inflate(body, limit, -zlib.MAX_WBITS)


def _unpack_brotli(body: bytes | memoryview, limit: int) -> bytes:
    decompressor = brotli.Decompressor()
    unpacked: bytes = decompressor.process(bytes(body), output_buffer_limit=limit + 1)
    if len(unpacked) <= limit and not decompressor.is_finished():
        raise EOFError
    return unpacked


def _unpack_zstd(body: bytes | memoryview, limit: int) -> bytes:
    unpacked, rest = b"", bytes(body)
    for _ in range(_MAX_FRAMES):
        if not rest or len(unpacked) > limit:
            return unpacked
        decompressor = zstd.ZstdDecompressor(
            options={zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW}
        )
        unpacked += decompressor.decompress(rest, limit + 1 - len(unpacked))
        if len(unpacked) <= limit and not decompressor.eof:
            raise EOFError
        rest = decompressor.unused_data
    if rest and len(unpacked) <= limit:
        raise EOFError
    return unpacked


_UNPACKERS: dict[bytes, Callable[[bytes | memoryview, int], bytes]] = {
    b"gzip": _unpack_gzip,
    b"x-gzip": _unpack_gzip,
    b"deflate": _unpack_deflate,
    b"br": _unpack_brotli,
    b"zstd": _unpack_zstd,
}
