"""A request body as it arrives in chunks: its checksums, and its bytes if a guard may read them."""

from __future__ import annotations

from typing import Final

from extproc.apis.excerpt import Excerpt
from extproc.ext_proc.wire import BODY_BUFFERED, BODY_BUFFERED_PARTIAL, BODY_DUPLEX, BODY_STREAMED
from extproc.request.fingerprint import NO_BODY, Body

MAX_KEPT = 64 * 2**20
"""Maximum bytes of all incomplete streamed bodies. Buffered bodies arrive in one message and do not
count."""

SMALLEST_LIMIT: Final = 32_768
"""Assumed buffer limit of Envoy in bytes, if it is unknown.

It is the limit in Envoy's guide for edge proxies and in Envoy Gateway. Envoy's default is 1 MiB.
"""

# The state of a body after a chunk.
MORE: Final = 0
WHOLE: Final = 1
CUT_OFF: Final = 2

_LENGTH_DIGITS: Final = 18
_PREFIX: Final = 5
"""Bytes before a gRPC message: a compression flag, and the length in 4 bytes."""


class UploadMemory:
    """Counts the bytes of all incomplete streamed bodies."""

    def __init__(self, limit: int = MAX_KEPT) -> None:
        """Start empty, with a maximum of `limit` bytes."""
        self._limit = limit
        self.bytes = 0

    def has_room(self, size: int) -> bool:
        """Whether there is room for this number of bytes."""
        return self.bytes + size <= self._limit

    def claim(self, size: int) -> bool:
        """Claim room for this number of bytes; returns whether there was enough."""
        if not self.has_room(size):
            return False
        self.bytes += size
        return True

    def free(self, size: int) -> None:
        """Free this number of bytes."""
        self.bytes -= size


class Upload:
    """One body.

    Attributes:
        body: the checksums so far.
    """

    def __init__(  # noqa: PLR0913  # everything known before the first chunk
        self,
        kept: UploadMemory,
        mode: int,
        content_length: bytes,
        inspects: int,
        limit: int = SMALLEST_LIMIT,
        excerpt: Excerpt | None = None,
    ) -> None:
        """Start with an empty body.

        Args:
            kept: memory shared by all uploads.
            mode: Envoy's body mode; negative if unknown.
            content_length: the header; empty if missing.
            inspects: maximum length of a body to inspect, in bytes.
            limit: Envoy's buffer limit in bytes, or less.
            excerpt: makes an excerpt of a longer body; None if longer bodies are not inspected.
        """
        self._excerpt = excerpt
        self._keeps = True  # no needed byte was dropped
        self._kept = kept
        self._limit = limit
        self._mode = mode
        self._content_length = content_length
        self._inspects = inspects
        self._before = bytearray()  # a streamed body except its last chunk
        self._last: bytes | memoryview = b""
        self._start = b""  # the first bytes of it
        self.body = NO_BODY

    def add(self, chunk: bytes | memoryview, *, ended: bool) -> int:
        """Add the next chunk; returns MORE, WHOLE or CUT_OFF. `ended`: it is the last one."""
        self.body = body = self.body.plus(chunk)
        # A complete body is not marked as ended if trailers follow.
        if ended or self._mode == BODY_BUFFERED or self._is_expected(body.length):
            self._last = chunk
            return WHOLE
        # A body that ends below Envoy's buffer limit is complete, too. Waiting for trailers would
        # not tell: Envoy sends them only after the answer to the body, and also after a body that
        # was cut off.
        if (
            self._mode == BODY_BUFFERED_PARTIAL
            and not self._content_length
            and body.length <= self._limit
        ):
            self._last = chunk
            return WHOLE
        # `in` makes a new set at each call
        if self._mode != BODY_STREAMED and self._mode != BODY_DUPLEX:  # noqa: PLR1714
            return CUT_OFF
        if len(self._start) < _PREFIX:
            self._start += bytes(chunk[: _PREFIX - len(self._start)])
        self._keep(chunk)
        return MORE

    def _keep(self, chunk: bytes | memoryview) -> None:
        """Append the chunk, shorten the excerpt if needed, or drop the body."""
        if self.body.length <= self._inspects:
            self._append(chunk)
            return
        excerpt = self._excerpt
        if excerpt is None:
            self.drop()
            return
        size = max(1, self._inspects // 8)
        for place in range(0, len(chunk), size):
            piece, before = chunk[place : place + size], len(self._before)
            if self._keeps and before + len(piece) > self._inspects:
                excerpt.shorten(self._before)
                self._kept.free(before - len(self._before))
            self._append(piece)
            if excerpt.lost:
                self.drop()

    def _append(self, chunk: bytes | memoryview) -> None:
        if not (self._keeps and self._kept.claim(len(chunk))):
            self.drop()
            return
        self._before += chunk

    def follow(self, body: Body, start: bytes, pieces: list[bytes | memoryview]) -> None:
        """Continue a body, given its checksums, its first bytes and its pieces so far."""
        self.body, self._start = body, start
        excerpt, most = self._excerpt, self._inspects
        if not (most and self._kept.claim(body.length)):
            self.drop()
            return
        self._before = bytearray(b"".join(pieces))
        if excerpt is not None:
            while len(self._before) > most and not excerpt.lost:
                excerpt.shorten(self._before)
            self._kept.free(body.length - len(self._before))
        if len(self._before) > most or (excerpt is not None and excerpt.lost):
            self.drop()

    @property
    def is_framed(self) -> bool:
        """Whether the body is complete and begins like a gRPC message, as no JSON does."""
        return is_framed(
            self._start + bytes(self._last[: _PREFIX - len(self._start)]), self.body.length
        )

    def take_content(self) -> tuple[bytes | memoryview | None, Excerpt | None]:
        """Return the bytes and the excerpt, and free the memory.

        The bytes are None if they were dropped. The excerpt is None if the bytes are the whole
        body.
        """
        last, excerpt = self._last, self._excerpt
        if self._before:
            last = bytes(self._before + last)
        keeps = self._keeps
        self.drop()
        if keeps and self.body.length <= self._inspects:
            return last, None
        return (
            (last, excerpt) if keeps and excerpt is not None and not excerpt.lost else (None, None)
        )

    def _is_expected(self, length: int) -> bool:
        expected = self._content_length
        return expected.isdigit() and len(expected) <= _LENGTH_DIGITS and int(expected) == length

    def drop(self) -> None:
        """Drop the bytes: the body will not be inspected."""
        self._keeps = False
        self._kept.free(len(self._before))
        self._before = bytearray()
        self._last = b""


def is_framed(start: bytes, length: int) -> bool:
    """Whether a body with this start and length begins with a gRPC message."""
    return (
        len(start) == _PREFIX
        and start[0] in (0, 1)
        and _PREFIX + int.from_bytes(start[1:], "big") <= length
    )
