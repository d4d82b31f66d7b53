"""The text of a body: its content-encoding undone (RFC 9110 section 8.4) and its Unicode read, within a bound.

What a client chooses to send compressed, or in UTF-16, is read as its server would read it. A bomb of any ratio costs no more
than the bound, because no more than that is ever unpacked.
"""

from __future__ import annotations

import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable
from typing import Final

import brotli
import zstandard

_MAX_ENCODINGS: Final = 2
"""Most encodings, one upon the other, that are undone; clients send fewer."""

_ENOUGH: Final = 4
"""This many bytes of a body tell its encoding."""

_MARKS: Final = 0x80
"""All byte order marks begin with more, or with 0, which also stands in UTF-16 and UTF-32 for a half or more of ASCII."""

_ZSTD_WINDOW: Final = 2**23
"""Largest window that a decoder has to support (RFC 8878 section 3.1.1.1.2), in bytes."""


class UnreadableError(Exception):
    """A body is not what its content-encoding says, or that is not known, or it has more bytes than the bound.

    Attributes:
        reason: `content_encoding` or `inspect_limit`, as `uncounted_total` shows it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def read_text(body: bytes | memoryview, content_encoding: bytes, limit: int) -> bytes | memoryview:
    """The body's text in UTF-8, without a byte order mark.

    Args:
        body: as it was sent.
        content_encoding: the header, empty when absent.
        limit: most bytes that are unpacked.

    Raises:
        UnreadableError: it cannot be had.
    """
    return _decode(_unpack_all(body, list_encodings(content_encoding), limit) if content_encoding else body)


def list_encodings(content_encoding: bytes) -> list[bytes]:
    """The encodings that the header names, but for those that leave a body as it is."""
    names = [name.strip().lower() for name in content_encoding.split(b",")]
    return [name for name in names if name not in (b"", b"identity")]


def split_mark(body: bytes) -> tuple[bytes, bytes]:
    """A body's byte order mark, which is no part of its JSON, and the rest."""
    size = len(BOM_UTF8) if body.startswith(BOM_UTF8) else 0
    return body[:size], body[size:]


def _unpack_all(body: bytes | memoryview, encodings: list[bytes], limit: int) -> bytes | memoryview:
    if len(encodings) > _MAX_ENCODINGS:
        raise UnreadableError("content_encoding")
    for name in reversed(encodings):
        unpack = _UNPACKERS.get(name)
        if unpack is None:
            raise UnreadableError("content_encoding")
        body = _unpack(unpack, body, limit)
    return body


def _unpack(unpack: Callable[[bytes | memoryview, int], bytes], body: bytes | memoryview, limit: int) -> bytes:
    try:
        unpacked = unpack(body, limit)
    except (zlib.error, brotli.error, zstandard.ZstdError, EOFError):
        raise UnreadableError("content_encoding") from None
    if len(unpacked) > limit:
        raise UnreadableError("inspect_limit")
    return unpacked


def _decode(body: bytes | memoryview) -> bytes | memoryview:
    """UTF-8, whatever of Unicode's encodings it was: Python's own JSON parser, which servers use, takes them all."""
    if len(body) >= _ENOUGH and 0 < body[0] < _MARKS and body[1]:
        return body  # as nearly always
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
        raise EOFError  # cut off, or something follows that a server may read and we do not
    return unpacked


def _unpack_gzip(body: bytes | memoryview, limit: int) -> bytes:
    return _inflate(body, limit, zlib.MAX_WBITS | 16)


def _unpack_deflate(body: bytes | memoryview, limit: int) -> bytes:
    """Zlib's format, or without it, as some clients send it and most servers take it (RFC 9110 section 8.4.1.2)."""
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
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    with decompressor.stream_reader(body, read_across_frames=True) as reader:
        return reader.read(limit + 1)


_UNPACKERS: dict[bytes, Callable[[bytes | memoryview, int], bytes]] = {
    b"gzip": _unpack_gzip,
    b"x-gzip": _unpack_gzip,
    b"deflate": _unpack_deflate,
    b"br": _unpack_brotli,
    b"zstd": _unpack_zstd,
}
