"""gRPC's own layer on HTTP/2 (grpc/doc/PROTOCOL-HTTP2.md): length-prefixed messages, and a status in the trailers."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import quote

from extproc.errors import ProtocolError
from extproc.transport.http2 import encode

# Status codes.
OK = 0
INVALID_ARGUMENT = 3
NOT_FOUND = 5
RESOURCE_EXHAUSTED = 8
UNIMPLEMENTED = 12
UNAVAILABLE = 14

MAX_MESSAGE = 64 * 2**20
"""Largest message taken, in bytes: far above any buffer limit that an Envoy should have."""

_PREFIX = 5  # a compression flag and a length of 4 bytes

RESPONSE = encode([(b":status", b"200"), (b"content-type", b"application/grpc")])
"""The headers of every gRPC response."""


class Deframer:
    """Messages out of body bytes that are cut anywhere."""

    __slots__ = ("_chunks", "_have", "_want")

    def __init__(self) -> None:
        """Nothing received."""
        self._chunks: list[bytes] = []
        self._have = 0
        self._want = _PREFIX

    def feed(self, data: bytes) -> list[bytes]:
        """Take more bytes; returns the messages that are complete now.

        Raises:
            ProtocolError: a message is compressed or too large; the code is a gRPC status.
        """
        if (
            not self._chunks
            and len(data) >= _PREFIX
            and not data[0]
            and int.from_bytes(data[1:_PREFIX], "big") + _PREFIX == len(data)
        ):
            return [data[_PREFIX:]]  # one whole message, which is what nearly always comes
        self._chunks.append(data)
        self._have += len(data)
        if self._have < self._want:  # joined once, not with every chunk
            return []
        buffer, position, messages = b"".join(self._chunks), 0, []
        self._want = _PREFIX
        while len(buffer) - position >= _PREFIX:
            size = int.from_bytes(buffer[position + 1 : position + _PREFIX], "big")
            if buffer[position]:
                raise ProtocolError("compressed messages are not supported", code=UNIMPLEMENTED)
            if size > MAX_MESSAGE:
                raise ProtocolError(f"a message of {size} bytes; the limit is {MAX_MESSAGE}", code=RESOURCE_EXHAUSTED)
            end = position + _PREFIX + size
            if end > len(buffer):
                self._want = _PREFIX + size
                break
            messages.append(buffer[position + _PREFIX : end])
            position = end
        rest = buffer[position:]
        self._chunks, self._have = ([rest] if rest else []), len(rest)
        return messages


def framed(message: bytes) -> bytes:
    """A message with its prefix."""
    return b"\0" + len(message).to_bytes(4, "big") + message


@lru_cache(maxsize=64)
def trailers(status: int, message: str = "", *, only: bool = False) -> bytes:
    """The header block that ends a call; `only` for a response that has nothing before it (Trailers-Only)."""
    start = [(b":status", b"200"), (b"content-type", b"application/grpc")] if only else []
    text = [(b"grpc-message", quote(message, safe=" ").encode())] if message else []
    return encode([*start, (b"grpc-status", str(status).encode()), *text])
