"""Boards in Redis or Valkey, on connections of their own: what operators ask keeps no request waiting.

A board is a list of the replicas that have published, kept by `lua/board.lua`, and a key for each document, all in one hash
slot. Each question has a deadline. What fails drops the connections, and the next question opens them anew.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from importlib.resources import files

from redis.exceptions import ResponseError

from extproc.errors import StoreError
from extproc.store.boards import MAX_REPLICAS, check_document
from extproc.store.client import Command, Reply, explain_refusal
from extproc.store.topology import Topology

_SECONDS = 2.0
"""What a question may take, that for all documents of a board included."""

_AT_ONCE = 16
"""Documents in one portion: 1 MB, which keeps the server busy for a millisecond."""

_SCRIPT = (files("extproc.store") / "lua" / "board.lua").read_text()
_MOVED = ("MOVED", "ASK")


class RemoteBoards:
    """Boards on the servers of a topology."""

    def __init__(self, topology: Topology, prefix: str) -> None:
        """Nothing is connected yet; every key starts with `prefix`."""
        self._topology = topology
        self._prefix = prefix
        self._lock = asyncio.Lock()  # a connection answers one question at a time

    async def publish(self, board: str, replica: str, document: bytes, ttl_ms: int, now: int | None) -> None:
        """Put up a document, in place of the replica's last one.

        Raises:
            StoreError: see `check_document`, or the server cannot.
        """
        check_document(replica, document)
        moment = -1 if now is None else now
        names = self._name_key(board), self._name_key(board, replica)
        await self._ask(board, [("EVAL", _SCRIPT, 2, *names, replica, document, ttl_ms, MAX_REPLICAS, moment)])

    async def collect(self, board: str, now: int | None) -> dict[str, bytes]:
        """Every document that has not expired, by its replica.

        Raises:
            StoreError: the server cannot, or answers something else.
        """
        moment = -1 if now is None else now
        [listed] = await self._ask(board, [("EVAL", _SCRIPT, 1, self._name_key(board), moment)])
        names = _read_names(listed)
        found: dict[str, bytes] = {}
        for portion in _split(names):
            documents = await self._ask(board, [("GET", self._name_key(board, replica)) for replica in portion])
            found |= {name: text for name, text in zip(portion, documents, strict=True) if isinstance(text, bytes)}
        return found

    async def drop(self) -> None:
        """Drop the connections."""
        await self._topology.drop()

    def _name_key(self, board: str, *replica: str) -> str:
        tag = self._find_tag(board)
        start = f"{self._prefix}{{{tag}}}:" if tag else self._prefix
        return start + ":".join(["board", board, *replica])

    def _find_tag(self, board: str) -> str:
        tags = self._topology.tags
        return tags[zlib.crc32(board.encode()) % len(tags)] if tags else ""

    async def _ask(self, board: str, commands: Sequence[Command]) -> list[Reply]:
        """The replies to commands that go out in one write.

        Raises:
            StoreError: there are none, or one of them is an error.
        """
        async with self._lock:
            try:
                async with asyncio.timeout(_SECONDS):
                    return await self._ask_twice(self._find_tag(board), commands)
            except TimeoutError:
                await self.drop()
                raise StoreError(f"no answer within {_SECONDS:g} s", kind="timeout") from None
            except BaseException:  # nobody knows what is still on the connections
                await self.drop()
                raise

    async def _ask_twice(self, tag: str, commands: Sequence[Command]) -> list[Reply]:
        """Ask, and where the slot has moved ask its new owner: to do any of this again does no harm."""
        replies = await self._ask_once(tag, commands)
        if any(isinstance(reply, ResponseError) and reply.status_code in _MOVED for reply in replies):
            self._topology.forget()
            replies = await self._ask_once(tag, commands)
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise explain_refusal(reply)
        return replies

    async def _ask_once(self, tag: str, commands: Sequence[Command]) -> list[Reply]:
        link = await self._topology.find(tag)
        await link.send(commands)
        return await link.receive(len(commands))


def _read_names(reply: Reply) -> list[str]:
    try:
        return [name.decode() for name in reply]  # type: ignore[union-attr]  # anything may have come
    except (AttributeError, TypeError, UnicodeDecodeError):
        raise StoreError("what the server answers is no list of replicas", kind="response") from None


def _split(names: Sequence[str]) -> list[Sequence[str]]:
    return [names[at : at + _AT_ONCE] for at in range(0, len(names), _AT_ONCE)]
