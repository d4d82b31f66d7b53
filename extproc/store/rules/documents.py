"""Documents by name, each until its end: the rule of `documents.lua`. No request waits for any of them.

There are two kinds. On a board replicas tell each other what they know: each publishes one document, which is soon forgotten.
Orders are what operators have ordered, for every replica; they outlive the replica that took them. Who reads them says which
version of all of them it knows, and is told nothing where that is still the one: to ask again and again costs next to nothing.
"""
# interpreted: no request passes through it

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from typing import Final, NamedTuple

from extproc.errors import StoreError

MAX_DOCUMENT: Final = 65_536
"""Bytes of a document on a board."""

MAX_REPLICAS: Final = 100
"""With the documents that makes 6.5 MB, which a server hands out in a few portions."""

MAX_ORDER: Final = 4_096
"""Bytes of an order."""

MAX_ORDERS: Final = 10_000

_MAX_NAME: Final = 255


class DocumentKind(NamedTuple):
    """What holds for all documents of a kind.

    Attributes:
        plural: what people call them.
        max_bytes: of a document.
        max_documents: that are kept together.
        makes_room: past that the one that would end first makes room for a new one; else no new one is taken.
        portion: how many a remote store reads at once: 1 MB at most, which keeps a server busy for a millisecond.
        version: what each begins with in a remote store, where it is packed; one that begins with something else is left out.
    """

    plural: str
    max_bytes: int
    max_documents: int
    makes_room: bool
    portion: int
    version: bytes


BOARDS: Final = "boards"
ORDERS: Final = "orders"
KINDS: Final = {
    BOARDS: DocumentKind("reports", MAX_DOCUMENT, MAX_REPLICAS, makes_room=True, portion=16, version=b"\x01"),
    ORDERS: DocumentKind("overrides", MAX_ORDER, MAX_ORDERS, makes_room=False, portion=1_000, version=b""),
}
"""By name, with which the keys in a remote store start. Orders are JSON, in which fields have names."""


class Documents(NamedTuple):
    """All that have not ended at a time, by name; their `version` is empty if there never was one."""

    version: str
    documents: dict[str, bytes]


def make_replica_name() -> str:
    """A name for this process that no other one has had."""
    return f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(4)}"


def check_document(kind: str, name: str, document: bytes) -> None:
    """Raise StoreError for a document, or a name, that is too long for every store."""
    plural, most = KINDS[kind][:2]
    if len(document) > most:
        raise StoreError(f"{len(document)} bytes are too long for {plural}; at most {most} are allowed", kind="too_large")
    if not 0 < len(name.encode()) <= _MAX_NAME:
        raise StoreError(f"the name of a document has 1 to {_MAX_NAME} bytes", kind="too_large")


def refuse_more() -> StoreError:
    """The error where there is no room for an order."""
    return StoreError(f"there are {MAX_ORDERS} overrides already; revoke some, or wait until they end", kind="full")


class _Collection:
    """Documents that belong together."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[int, bytes]] = {}
        self.changes = 0


class MemoryDocuments:
    """Documents in this process; see `SharedDocuments`."""

    def __init__(self, clock: Callable[[], int]) -> None:
        """Start empty; the clock tells the time in milliseconds."""
        self._clock = clock
        self._collections: dict[tuple[str, str], _Collection] = {}

    async def put(  # noqa: PLR0913  # a document, where it stands, and until when
        self, kind: str, subject: str, name: str, document: bytes, seconds: float, now: int | None = None
    ) -> None:
        """See `SharedDocuments`."""
        check_document(kind, name, document)
        moment = self._clock() if now is None else now
        kept = self._change(kind, subject, moment).kept
        if name not in kept and len(kept) >= KINDS[kind].max_documents:
            if not KINDS[kind].makes_room:
                raise refuse_more()
            del kept[min(kept, key=lambda other: kept[other][0])]
        kept[name] = moment + int(seconds * 1000), document

    async def drop(self, kind: str, subject: str, name: str, now: int | None = None) -> bool:
        """See `SharedDocuments`."""
        return self._change(kind, subject, self._clock() if now is None else now).kept.pop(name, None) is not None

    async def read(self, kind: str, subject: str, known: str = "", now: int | None = None) -> Documents | None:
        """See `SharedDocuments`."""
        collection = self._collections.get((kind, subject))
        version, kept = (str(collection.changes), collection.kept) if collection is not None else ("", {})
        if version == known:
            return None
        moment = self._clock() if now is None else now
        return Documents(version, {name: document for name, (ends, document) in kept.items() if moment < ends})

    def _change(self, kind: str, subject: str, now: int) -> _Collection:
        """What is about to change, without those that have ended."""
        collection = self._collections.setdefault((kind, subject), _Collection())
        collection.kept = {name: kept for name, kept in collection.kept.items() if now < kept[0]}
        collection.changes += 1
        return collection
