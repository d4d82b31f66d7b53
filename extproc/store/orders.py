"""What operators have ordered, which every replica obeys: documents by name, each until its end.

Orders outlive the replica that took them. Replicas ask again and again whether anything has changed, which costs next to
nothing while nothing has. Bounded: a document by `MAX_ORDER`, all of them by `MAX_ORDERS`, past which none is taken.
"""
# interpreted: waits for a network

from __future__ import annotations

from typing import NamedTuple

from extproc.errors import StoreError

MAX_ORDERS = 10_000
MAX_ORDER = 4_096
"""Bytes."""


class Orders(NamedTuple):
    """All that stand at a time.

    Attributes:
        version: of them; empty where nothing was ever ordered.
        documents: by name.
    """

    version: str
    documents: dict[str, bytes]


def check_order(document: bytes) -> None:
    """Refuse what no store takes.

    Raises:
        StoreError: the document is too long.
    """
    if len(document) > MAX_ORDER:
        raise StoreError(f"an override of {len(document)} bytes is too long; at most {MAX_ORDER} are allowed", kind="too_large")


def refuse_more() -> StoreError:
    """What is said where there is no room."""
    return StoreError(f"there are {MAX_ORDERS} overrides already; revoke some, or wait until they end", kind="full")


class _Book:
    """Orders that belong together."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[int, bytes]] = {}
        self.changes = 0

    def change(self, now: int) -> None:
        """Forget those that have ended, before something changes."""
        self.kept = {name: kept for name, kept in self.kept.items() if now < kept[0]}
        self.changes += 1


class MemoryOrders:
    """Orders in this process."""

    def __init__(self) -> None:
        """Nothing has been ordered."""
        self._books: dict[str, _Book] = {}

    def put(self, book: str, name: str, document: bytes, ttl_ms: int, now: int) -> None:
        """Take an order, in place of the one of that name.

        Raises:
            StoreError: it is too long, or there are too many.
        """
        check_order(document)
        orders = self._books.setdefault(book, _Book())
        orders.change(now)
        if name not in orders.kept and len(orders.kept) >= MAX_ORDERS:
            raise refuse_more()
        orders.kept[name] = now + ttl_ms, document

    def drop(self, book: str, name: str, now: int) -> bool:
        """Take an order back; whether it stood."""
        orders = self._books.setdefault(book, _Book())
        orders.change(now)
        return orders.kept.pop(name, None) is not None

    def read(self, book: str, known: str, now: int) -> Orders | None:
        """Those that have not ended, None where the version is the known one."""
        orders = self._books.get(book)
        version = str(orders.changes) if orders is not None else ""
        if version == known:
            return None
        kept = orders.kept if orders is not None else {}
        return Orders(version, {name: document for name, (ends, document) in kept.items() if now < ends})
