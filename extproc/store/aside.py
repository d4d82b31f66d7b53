"""Questions to Redis or Valkey beside those of requests, on connections of their own: what operators ask keeps nobody waiting.

Each question has a deadline. What fails drops the connections, and the next question opens them anew.
"""
# interpreted: waits for a network

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence

from redis.exceptions import ResponseError

from extproc.errors import StoreError
from extproc.store.link import Command, Reply, explain_refusal
from extproc.store.topology import Layout, Topology

_SECONDS = 2.0
"""What a question may take, that for all documents of a board included."""

_MOVED = ("MOVED", "ASK")


class _Line:
    """A way to the keys of a part."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.lock = asyncio.Lock()  # a connection answers one question at a time


class Aside:
    """The servers of a layout; all keys of one subject are in one hash slot, and a server that hangs holds up no other's."""

    def __init__(self, layout: Layout, prefix: str) -> None:
        """Nothing is connected yet; every key starts with `prefix`."""
        self._layout = layout
        self._prefix = prefix
        self._lines: dict[int, _Line] = {}

    async def drop(self) -> None:
        """Drop the connections."""
        for line in self._lines.values():
            await line.topology.drop()

    def find_part(self, subject: str) -> int:
        """The part of the keys that a subject's belong to."""
        return zlib.crc32(subject.encode()) % len(self._layout.owners)

    def name_key(self, kind: str, subject: str, *below: str) -> str:
        """A whole key, of a kind of state and its subject."""
        tag = self._find_tag(subject)
        start = f"{self._prefix}{{{tag}}}:" if tag else self._prefix
        return start + ":".join([kind, subject, *below])

    def _find_tag(self, subject: str) -> str:
        tags = self._layout.tags
        return tags[self.find_part(subject)] if tags else ""

    async def run(
        self, subject: str, script: str, keys: Sequence[str], *arguments: str | bytes | int, now: int | None
    ) -> Reply:
        """The reply of a script, whose last argument is the time in milliseconds, -1 for the server's own clock.

        Raises:
            StoreError: as `ask`.
        """
        moment = -1 if now is None else now
        [reply] = await self.ask(subject, [("EVAL", script, len(keys), *keys, *arguments, moment)])
        return reply

    async def ask(self, subject: str, commands: Sequence[Command]) -> list[Reply]:
        """The replies to commands that go out in one write; they may be sent twice, so that has to do no harm.

        Raises:
            StoreError: there are none, or one of them is an error.
        """
        part, tag = self.find_part(subject), self._find_tag(subject)
        line = self._lines.get(part)
        if line is None:
            line = self._lines[part] = _Line(self._layout.open(""))
        async with line.lock:
            try:
                async with asyncio.timeout(_SECONDS):
                    return await _ask_twice(line.topology, tag, commands)
            except TimeoutError:
                await line.topology.drop()
                raise StoreError(f"no answer within {_SECONDS:g} s", kind="timeout") from None
            except BaseException:  # it is not known what is still on the connections
                await line.topology.drop()
                raise


async def _ask_twice(topology: Topology, tag: str, commands: Sequence[Command]) -> list[Reply]:
    """Ask, and where the slot has moved ask its new owner."""
    replies = await _ask_once(topology, tag, commands)
    moved = [reply for reply in replies if isinstance(reply, ResponseError) and reply.status_code in _MOVED]
    if moved:
        await topology.learn()
        replies = await _ask_once(topology, tag, commands)
    for reply in replies:
        if isinstance(reply, ResponseError):
            raise explain_refusal(reply)
    return replies


async def _ask_once(topology: Topology, tag: str, commands: Sequence[Command]) -> list[Reply]:
    link = await topology.find(tag)
    replies: list[Reply] = await link.exchange(commands)
    return replies
