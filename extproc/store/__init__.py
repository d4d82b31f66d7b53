"""The Store protocol, and `open_store`, which chooses a store by its URL."""
# interpreted: mypyc knows no Protocols

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from typing import Any, Protocol

from extproc.errors import UsageError
from extproc.metrics import Metrics
from extproc.settings import Settings
from extproc.store.rules.chain import ChainLink, Trail
from extproc.store.rules.documents import Documents
from extproc.store.rules.ring import Push
from extproc.store.rules.session import Question


class Store(Protocol):
    """Shared state of several kinds. Each key of a call is read, judged and written in one atomic step.

    Every store answers exactly as the rules in `extproc.store.rules` do: the one in this process at once, a remote one with an
    awaitable. Keys in one call are distinct. `now`, in milliseconds, is for tests only; None uses the store's own clock.
    """

    def hit(self, hits: Sequence[Question], now: int | None = None) -> list[Any] | Awaitable[list[Any]]:
        """Count every hit once, and decide whether to act on it; answers come in the order of the hits.

        Questions of sessions go in the same call: a hit is answered with a `Count`, a step or settlement with a `Standing`.

        Raises:
            StoreError: at once or from the awaitable; nothing else ever.
        """
        ...

    def push(
        self, pushes: Sequence[Push | ChainLink], now: int | None = None
    ) -> Sequence[Sequence[bytes] | Trail] | Awaitable[Sequence[Sequence[bytes] | Trail]]:
        """Push every entry once; answers come in the order of the pushes.

        A push is answered with the ring's entries, oldest first and the new one included, a link with a `Trail`.

        Raises:
            StoreError: at once or from the awaitable; nothing else ever.
        """
        ...

    async def publish(self, board: str, replica: str, document: bytes, seconds: float, now: int | None = None) -> None:
        """Publish a document for the other replicas, which replaces this one's last; no request waits for this.

        Args:
            board: its subject, a fixed word.
            replica: from `documents.make_replica_name`.
            document: up to `documents.MAX_DOCUMENT` bytes.
            seconds: after which it is forgotten.
            now: as above.

        Raises:
            StoreError: the store is unavailable, or the document does not fit; this does not affect requests.
        """
        ...

    async def collect(self, board: str, now: int | None = None) -> dict[str, bytes]:
        """The documents that replicas have published, this one's included, by their names.

        Raises:
            StoreError: as for `publish`.
        """
        ...

    async def put_order(self, book: str, name: str, document: bytes, seconds: float, now: int | None = None) -> None:
        """Keep an operator's order for all replicas, replacing any of the same name; no request waits for this.

        Args:
            book: the subject of such orders, a fixed word.
            name: of the order.
            document: up to `documents.MAX_ORDER` bytes.
            seconds: after which it ends.
            now: as above.

        Raises:
            StoreError: the store is unavailable (orders in force are not lost), or there is no room for the order.
        """
        ...

    async def drop_order(self, book: str, name: str, now: int | None = None) -> bool:
        """Remove an order; returns whether it was in force.

        Raises:
            StoreError: as for `put_order`.
        """
        ...

    async def read_orders(self, book: str, known: str, now: int | None = None) -> Documents | None:
        """Every order in force; None if nothing has changed since the `known` version (empty for none).

        Raises:
            StoreError: as for `put_order`.
        """
        ...

    async def share_secret(self, name: str, secret: bytes) -> bytes:
        """Agree with the other replicas on random bytes; no request waits for this.

        Args:
            name: what they are for, a fixed word.
            secret: proposal, which the store keeps if it has none of that name.

        Returns:
            the store's bytes, as many as were proposed.

        Raises:
            StoreError: the store is unavailable, or has something else under this name.
        """
        ...

    def health(self) -> str:
        """`ok`, or what is wrong in a few words, for `/readyz`."""
        ...

    async def start(self) -> None:
        """Connect, if necessary; a failure raises nothing, and shows in `health`."""
        ...

    async def close(self) -> None:
        """Close all connections; the store must not be used again."""
        ...


_REDIS = "extproc.store.redis:open_redis"
_SCHEMES = {
    "memory": "extproc.store.memory:open_memory",
    "redis": _REDIS,
    "rediss": _REDIS,
    "unix": _REDIS,
    "redis+sentinel": _REDIS,
    "rediss+sentinel": _REDIS,
    "redis+cluster": _REDIS,
    "rediss+cluster": _REDIS,
}


def open_store(url: str, metrics: Metrics, settings: Settings | None = None) -> Store:
    """The store that `url` names; `settings` has timeout and password.

    Raises:
        UsageError: the scheme is unknown or the URL has something wrong.
    """
    scheme, separator, _ = url.partition("://")
    if scheme not in _SCHEMES or not separator:
        known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        wrong = f"unknown store {redact_url(url)}" if separator else "a store is named by a URL"
        raise UsageError(f"{wrong}; known are: {known}")
    module, _, name = _SCHEMES[scheme].partition(":")
    opener: Callable[[str, Metrics, Settings], Store] = getattr(import_module(module), name)
    return opener(url, metrics, settings or Settings())


def redact_url(url: str) -> str:
    """A store URL without user, password and options, for logs; works for any characters in a password."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2].partition('?')[0]}"
