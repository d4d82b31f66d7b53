"""Named documents with an expiry: the rule of `documents.lua`. Requests never wait for them.

There are two kinds. On a board, each replica publishes one document for the others, which expires
soon. Orders are operators' overrides for all replicas; they outlive the replica that accepted them.
A reader sends the version of the documents that it has, and gets nothing if that is still current,
so polling is cheap.
"""
# interpreted: requests do not use it

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from typing import Final, NamedTuple

from extproc.errors import StoreError

MAX_DOCUMENT: Final = 65_536
"""Maximum length of a document on a board, in bytes."""

MAX_REPLICAS: Final = 100
"""Maximum number of documents: 6.5 MB in total, which a server returns in a few portions."""

MAX_ORDER: Final = 4_096
"""Maximum length of an order, in bytes."""

MAX_ORDERS: Final = 10_000

_MAX_NAME: Final = 255


class DocumentKind(NamedTuple):
    """Properties of all documents of a kind.

    Attributes:
        plural: word for people.
        max_bytes: maximum length of a document.
        max_documents: maximum number per subject.
        makes_room: when full, drop the document that expires first; otherwise, reject new ones.
        portion: number that a remote store reads at once: 1 MB at most, which keeps a server busy
            for a millisecond.
        version: first bytes of each packed document in a remote store; others are ignored.
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
    BOARDS: DocumentKind(
        "reports", MAX_DOCUMENT, MAX_REPLICAS, makes_room=True, portion=16, version=b"\x01"
    ),
    ORDERS: DocumentKind(
        "overrides", MAX_ORDER, MAX_ORDERS, makes_room=False, portion=1_000, version=b""
    ),
}
"""Kinds by name.

The keys in a remote store start with this name. Orders are JSON, whose fields have names.
"""


class Documents(NamedTuple):
    """All unexpired documents by name. `version` is empty if there never was a document."""

    version: str
    documents: dict[str, bytes]


def make_replica_name() -> str:
    """A unique name for this process."""
    return f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(4)}"


def check_document(kind: str, name: str, document: bytes) -> None:
    """Raise StoreError if a document or a name is too long for every store."""
    plural, most = KINDS[kind][:2]
    if len(document) > most:
        raise StoreError(
            f"{len(document)} bytes are too long for {plural}; at most {most} are allowed",
            kind="too_large",
        )
    if not 0 < len(name.encode()) <= _MAX_NAME:
        raise StoreError(f"the name of a document has 1 to {_MAX_NAME} bytes", kind="too_large")


def refuse_more() -> StoreError:
    """The error if there is no room for another order."""
    return StoreError(
        f"there are {MAX_ORDERS} overrides already; revoke some, or wait until they end",
        kind="full",
    )


class _Collection:
    """The documents of one kind and subject."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[int, bytes]] = {}
        self.changes = 0


class MemoryDocuments:
    """Documents in this process; see `SharedDocuments`."""

    def __init__(self, clock: Callable[[], int]) -> None:
        """Start empty; `clock` returns the time in milliseconds."""
        self._clock = clock
        self._collections: dict[tuple[str, str], _Collection] = {}

    async def put(  # noqa: PLR0913  # a document and its place
        self,
        kind: str,
        subject: str,
        name: str,
        document: bytes,
        seconds: float,
        now: int | None = None,
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
        return (
            self._change(kind, subject, self._clock() if now is None else now).kept.pop(name, None)
            is not None
        )

    async def read(
        self, kind: str, subject: str, known: str = "", now: int | None = None
    ) -> Documents | None:
        """See `SharedDocuments`."""
        collection = self._collections.get((kind, subject))
        version, kept = (
            (str(collection.changes), collection.kept) if collection is not None else ("", {})
        )
        if version == known:
            return None
        moment = self._clock() if now is None else now
        return Documents(
            version, {name: document for name, (ends, document) in kept.items() if moment < ends}
        )

    def _change(self, kind: str, subject: str, now: int) -> _Collection:
        """A subject's documents, to be changed, without those that have expired."""
        collection = self._collections.setdefault((kind, subject), _Collection())
        collection.kept = {name: kept for name, kept in collection.kept.items() if now < kept[0]}
        collection.changes += 1
        return collection
