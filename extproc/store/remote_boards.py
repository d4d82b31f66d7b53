"""Boards in Redis or Valkey.

A board is a list of the replicas that have published, kept by `lua/board.lua`, and a key for each document, all in one hash
slot.
"""
# interpreted: waits for a network

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from extproc.errors import StoreError
from extproc.store.aside import Aside
from extproc.store.boards import MAX_REPLICAS, check_document
from extproc.store.link import Reply

_AT_ONCE = 16
"""Documents in one portion: 1 MB, which keeps the server busy for a millisecond."""

_SCRIPT = (files("extproc.store") / "lua" / "board.lua").read_text()
_KIND = "board"


class RemoteBoards:
    """Boards on a server that is asked aside."""

    def __init__(self, aside: Aside) -> None:
        """Nothing is asked yet."""
        self._aside = aside

    async def publish(self, board: str, replica: str, document: bytes, ttl_ms: int, now: int | None) -> None:
        """Put up a document, in place of the replica's last one.

        Raises:
            StoreError: see `check_document`, or the server cannot.
        """
        check_document(replica, document)
        keys = self._aside.name_key(_KIND, board), self._aside.name_key(_KIND, board, replica)
        await self._aside.run(board, _SCRIPT, keys, replica, document, ttl_ms, MAX_REPLICAS, now=now)

    async def collect(self, board: str, now: int | None) -> dict[str, bytes]:
        """Every document that has not expired, by its replica.

        Raises:
            StoreError: the server cannot, or answers something else.
        """
        name_key = self._aside.name_key
        names = _read_names(await self._aside.run(board, _SCRIPT, [name_key(_KIND, board)], now=now))
        found: dict[str, bytes] = {}
        for portion in _split(names):
            documents = await self._aside.ask(board, [("GET", name_key(_KIND, board, replica)) for replica in portion])
            found |= {name: text for name, text in zip(portion, documents, strict=True) if isinstance(text, bytes)}
        return found


def _read_names(reply: Reply) -> list[str]:
    try:
        return [name.decode() for name in reply]  # type: ignore[union-attr]  # anything may have come
    except (AttributeError, TypeError, UnicodeDecodeError):
        raise StoreError("the server did not answer with a list of replicas", kind="response") from None


def _split(names: Sequence[str]) -> list[Sequence[str]]:
    return [names[at : at + _AT_ONCE] for at in range(0, len(names), _AT_ONCE)]
