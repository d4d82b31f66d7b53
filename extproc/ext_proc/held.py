"""A request body that is held here until its end, and then handed back unchanged."""

from __future__ import annotations

from typing import Final

from extproc.ext_proc.upload import UploadMemory
from extproc.ext_proc.wire import LARGE
from extproc.request.fingerprint import NO_BODY

_START: Final = 5
"""The length of the prefix of a gRPC message."""


class HeldBody:
    """One body.

    Attributes:
        longest: maximum length to hold, in bytes.
        sums: length and checksums of the body so far.
        size: number of held bytes. The last chunk does not count, because it is handed back at
            once.
    """

    def __init__(self, kept: UploadMemory, longest: int) -> None:
        """`kept` is the memory shared by all held bodies."""
        self.longest = longest
        self.sums = NO_BODY
        self.size = 0
        self._kept = kept
        self._pieces: list[bytes | memoryview] = []
        self._small: bytearray | None = None  # what follows the pieces

    def add(self, chunk: bytes | memoryview, *, ended: bool) -> None:
        """Add the next chunk; there must be room for it."""
        size = len(chunk)
        if not ended:
            self.size += size
            self._kept.bytes += size
        if not size:
            return
        self.sums = self.sums.plus(chunk)
        # Separate small chunks would take more memory than their length
        if self._pieces and size < LARGE:
            if self._small is None:
                self._small = bytearray()
            self._small += chunk
            return
        self.list_pieces().append(chunk)

    def list_pieces(self) -> list[bytes | memoryview]:
        """The pieces received so far."""
        if self._small is not None:
            self._pieces.append(bytes(self._small))
            self._small = None
        return self._pieces

    def take(self) -> list[bytes | memoryview]:
        """Return the pieces and free the memory."""
        pieces = self.list_pieces()
        self._pieces = []
        self._kept.free(self.size)
        self.size = 0
        return pieces

    def read_start(self) -> bytes:
        """The first five bytes, or all of a shorter body."""
        return b"".join([bytes(piece[:_START]) for piece in self.list_pieces()[:_START]])[:_START]
