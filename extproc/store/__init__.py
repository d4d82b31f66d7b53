"""The Store protocol, and `open_store`, which chooses a store by its URL."""
# interpreted: mypyc knows no Protocols

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from typing import Any, Protocol

from extproc.errors import UsageError
from extproc.metrics import Metrics
from extproc.settings import Settings
from extproc.store.pushes import AnyPush
from extproc.store.rules.chain import Trail
from extproc.store.rules.documents import Documents
from extproc.store.rules.session import Question


class SharedDocuments(Protocol):
    """Named documents, by kind (see `documents.KINDS`) and subject.

    Subjects never come from clients.

    Requests never wait for documents. Every method raises StoreError if the store is unavailable.
    """

    async def put(  # noqa: PLR0913  # a document and its place
        self,
        kind: str,
        subject: str,
        name: str,
        document: bytes,
        seconds: float,
        now: int | None = None,
    ) -> None:
        """Store a document, replacing any of the same name; StoreError if there is no room."""

    async def drop(self, kind: str, subject: str, name: str, now: int | None = None) -> bool:
        """Remove a document; returns whether it existed."""

    async def read(
        self, kind: str, subject: str, known: str = "", now: int | None = None
    ) -> Documents | None:
        """Read all unexpired documents; None if nothing has changed since version `known`."""


class Store(Protocol):
    """Counters, rings, chains, sessions and budgets.

    Each key is read and updated in one atomic step.

    Every store follows the rules in `extproc.store.rules` exactly. The memory store answers at
    once; a remote store returns an awaitable. Keys in one call are distinct. `now`, in
    milliseconds, is for tests only; None uses the store's own clock.
    """

    def hit(
        self, hits: Sequence[Question], now: int | None = None
    ) -> list[Any] | Awaitable[list[Any]]:
        """Count every hit once. Answers are in the order of the hits.

        One call may mix questions: a hit is answered with a `Count`, a step or settlement with a
        `Standing`, a take with a `Taken`. Takes come last; those in one hash slot are all granted,
        or all refused.

        Raises:
            StoreError: at once or from the awaitable; no other error is raised.
        """

    def push(
        self, pushes: Sequence[AnyPush], now: int | None = None
    ) -> Sequence[Sequence[bytes] | Trail] | Awaitable[Sequence[Sequence[bytes] | Trail]]:
        """Push every entry once. Answers are in the order of the pushes.

        A `Push` is answered with the ring's entries, oldest first, including the new one; a
        `ChainLink` with a `Trail`; a `RootSearch` with a list of one root.

        Raises:
            StoreError: at once or from the awaitable; no other error is raised.
        """

    @property
    def documents(self) -> SharedDocuments:
        """Documents that replicas and operators share."""

    async def share_secret(self, name: str, secret: bytes) -> bytes:
        """Return the secret that all replicas share: the stored one, or else `secret`.

        In that case, `secret` is stored.

        Requests never wait for this. Raises StoreError if the store is unavailable, or has a value
        of another type there.
        """

    def health(self) -> str:
        """`ok`, or the reason why the store is unavailable, for `/readyz`."""

    async def start(self) -> None:
        """Connect, if there is a server. A failure is not an error; `health` reports it."""

    async def close(self) -> None:
        """Close connections; the store is not used again."""


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
    """Open the store at `url`; raises UsageError if the URL is invalid."""
    scheme, separator, _ = url.partition("://")
    if scheme not in _SCHEMES or not separator:
        known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        wrong = f"unknown store {redact_url(url)}" if separator else "a store is given as a URL"
        raise UsageError(f"{wrong}; known schemes: {known}")
    module, _, name = _SCHEMES[scheme].partition(":")
    opener: Callable[[str, Metrics, Settings], Store] = getattr(import_module(module), name)
    return opener(url, metrics, settings or Settings())


def redact_url(url: str) -> str:
    """A store URL without user, password and options, for logs.

    The password may contain any characters.
    """
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2].partition('?')[0]}"
