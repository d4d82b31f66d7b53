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


class SharedDocuments(Protocol):
    """Documents by name, of a kind in `documents.KINDS` and about a subject, which is one of our own words.

    No request waits for them. Every method raises StoreError if the store is away; the requests' part of it goes on as it was.
    """

    async def put(  # noqa: PLR0913  # a document, where it stands, and until when
        self, kind: str, subject: str, name: str, document: bytes, seconds: float, now: int | None = None
    ) -> None:
        """Keep a document for that long, in place of the one of that name; raises StoreError if there is no room for it."""

    async def drop(self, kind: str, subject: str, name: str, now: int | None = None) -> bool:
        """Take a document back; whether there was one."""

    async def read(self, kind: str, subject: str, known: str = "", now: int | None = None) -> Documents | None:
        """Those that have not ended, None where nothing has changed since the version that is known (empty for none)."""


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

    def push(
        self, pushes: Sequence[Push | ChainLink], now: int | None = None
    ) -> Sequence[Sequence[bytes] | Trail] | Awaitable[Sequence[Sequence[bytes] | Trail]]:
        """Push every entry once; answers come in the order of the pushes.

        A push is answered with the ring's entries, oldest first and the new one included, a link with a `Trail`.

        Raises:
            StoreError: at once or from the awaitable; nothing else ever.
        """

    @property
    def documents(self) -> SharedDocuments:
        """What replicas and operators leave there for all of them."""

    async def share_secret(self, name: str, secret: bytes) -> bytes:
        """Agree with the other replicas on random bytes: those that the store has, else `secret`, which it keeps.

        No request waits for that. Raises StoreError if the store is away, or has something else there.
        """

    def health(self) -> str:
        """`ok`, or what is wrong in a few words, for `/readyz`."""

    async def start(self) -> None:
        """Connect, where there is something to connect to; failing is no error, and shows in `health`."""

    async def close(self) -> None:
        """Let go of connections; the store is not used again."""


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
    """The store that `url` names, with timeout and password of `settings`; raises UsageError if the URL cannot be used."""
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
