"""Connections to Redis or Valkey for operators' questions, separate from those of requests, so that no request waits.

Each question has a deadline. A failure drops the connections, and the next question opens them again.
"""
# interpreted: waits for a network

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from itertools import count

from extproc.errors import StoreError
from extproc.store.link import Command, ErrorReply, RedisReply, explain_refusal
from extproc.store.topology import Layout, ShardServers

_SECONDS = 2.0
"""Deadline of a question, even for all documents of a board."""

_MOVED = ("MOVED", "ASK")


class _SideConnection:
    """A connection to the server of a part of the keys."""

    def __init__(self, topology: ShardServers) -> None:
        self.topology = topology
        self.lock = asyncio.Lock()  # a connection answers one question at a time


class SideConnections:
    """Connections to the servers of a layout. All keys of a subject are in one hash slot; no server delays another."""

    def __init__(self, layout: Layout, prefix: str) -> None:
        """Start without connections; every key starts with `prefix`."""
        self._layout = layout
        self._prefix = prefix
        self._connections: dict[int, _SideConnection] = {}

    def drop(self) -> None:
        """Drop the connections."""
        for connection in self._connections.values():
            connection.topology.drop()

    def find_part(self, subject: str) -> int:
        """The part of the key space with a subject's keys."""
        return zlib.crc32(subject.encode()) % len(self._layout.owners)

    def list_subjects(self, kind: str) -> list[str]:
        """A subject for each server, whose keys are there."""
        parts: dict[str, int] = {}
        for part, owner in enumerate(self._layout.owners):
            parts.setdefault(owner, part)
        return [next(name for n in count() if self.find_part(name := f"{kind}:{n}") == part) for part in parts.values()]

    def name_key(self, kind: str, subject: str, *below: str) -> str:
        """The key of a kind of state and a subject."""
        tag = self._find_tag(subject)
        start = f"{self._prefix}{{{tag}}}:" if tag else self._prefix
        return start + ":".join([kind, subject, *below])

    def _find_tag(self, subject: str) -> str:
        tags = self._layout.tags
        return tags[self.find_part(subject)] if tags else ""

    async def ask(self, subject: str, commands: Sequence[Command]) -> list[RedisReply]:
        """Send commands in one write, perhaps twice; returns their replies, or raises StoreError for an error."""
        part, tag = self.find_part(subject), self._find_tag(subject)
        connection = self._connections.get(part)
        if connection is None:
            connection = self._connections[part] = _SideConnection(self._layout.open(""))
        async with connection.lock:
            try:
                async with asyncio.timeout(_SECONDS):
                    return await _ask_twice(connection.topology, tag, commands)
            except TimeoutError:
                connection.topology.drop()
                raise StoreError(f"no answer within {_SECONDS:g} s", kind="timeout") from None
            except BaseException:  # unread replies may be left on the connections
                connection.topology.drop()
                raise


async def _ask_twice(topology: ShardServers, tag: str, commands: Sequence[Command]) -> list[RedisReply]:
    """Ask, and follow the slot to its new owner if it has moved."""
    replies = await _ask_once(topology, tag, commands)
    moved = [reply for reply in replies if isinstance(reply, ErrorReply) and reply.word in _MOVED]
    if moved:
        await topology.learn()
        replies = await _ask_once(topology, tag, commands)
    for reply in replies:
        if isinstance(reply, ErrorReply):
            raise explain_refusal(reply)
    return replies


async def _ask_once(topology: ShardServers, tag: str, commands: Sequence[Command]) -> list[RedisReply]:
    link = await topology.find(tag)
    replies: list[RedisReply] = await link.exchange(commands)
    return replies
