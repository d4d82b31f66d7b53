"""What replicas tell each other: on a board each keeps one document, which everybody can read and which is soon forgotten.

Boards are for what operators ask, never for a request's answer. Bounded: a document by `MAX_DOCUMENT`, a board by
`MAX_REPLICAS`, past which the one that would expire first makes room.
"""
# interpreted: waits for a network

from __future__ import annotations

import os
import secrets
import socket

from extproc.errors import StoreError

MAX_DOCUMENT = 65_536
"""Bytes."""

MAX_REPLICAS = 100
"""With the documents that makes 6.5 MB, which a server hands out in a few portions."""

_MAX_NAME = 255


def make_replica_name() -> str:
    """A name for this process that no other one has had."""
    return f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(4)}"


def check_document(replica: str, document: bytes) -> None:
    """Refuse what no board takes.

    Raises:
        StoreError: the document is too long, or the replica's name is.
    """
    if len(document) > MAX_DOCUMENT:
        raise StoreError(f"a document of {len(document)} bytes is too long to share", kind="too_large")
    if not 0 < len(replica.encode()) <= _MAX_NAME:
        raise StoreError(f"a replica's name has 1 to {_MAX_NAME} bytes", kind="too_large")


class MemoryBoards:
    """Boards in this process."""

    def __init__(self) -> None:
        """Nothing has been published."""
        self._boards: dict[str, dict[str, tuple[int, bytes]]] = {}

    def publish(self, board: str, replica: str, document: bytes, ttl_ms: int, now: int) -> None:
        """Put up a document, in place of the replica's last one.

        Raises:
            StoreError: see `check_document`.
        """
        check_document(replica, document)
        kept = self._boards[board] = self._find_live(board, now)
        kept[replica] = (now + ttl_ms, document)
        if len(kept) > MAX_REPLICAS:
            del kept[min((name for name in kept if name != replica), key=lambda name: kept[name][0])]

    def collect(self, board: str, now: int) -> dict[str, bytes]:
        """Every document that has not expired, by its replica."""
        return {replica: document for replica, (_, document) in self._find_live(board, now).items()}

    def _find_live(self, board: str, now: int) -> dict[str, tuple[int, bytes]]:
        return {replica: kept for replica, kept in self._boards.get(board, {}).items() if now < kept[0]}
