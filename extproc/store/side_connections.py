"""Commands outside the request path, over redis-py's own connections: no request waits for them.

They have a deadline, and are sent again only if a server redirected them without running them.
"""
# interpreted: waits for a network

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from itertools import count

from redis.exceptions import AskError, RedisError

from extproc.errors import StoreError
from extproc.store.client import exchange
from extproc.store.link import Command, RedisReply, explain_refusal
from extproc.store.topology import Layout

_SECONDS = 2.0
"""Deadline of one call: long enough for all documents of a board."""


class SideConnections:
    """Connections to the servers of a layout.

    All keys of a subject are in one hash slot; no server delays another.
    """

    def __init__(self, layout: Layout, prefix: str) -> None:
        """Start without connections; every key starts with `prefix`."""
        self._layout = layout
        self._prefix = prefix

    def find_part(self, subject: str) -> int:
        """The part of the key space with a subject's keys."""
        return zlib.crc32(subject.encode()) % len(self._layout.owners)

    def list_subjects(self, kind: str) -> list[str]:
        """One subject for each server, with its keys there."""
        parts: dict[str, int] = {}
        for part, owner in enumerate(self._layout.owners):
            parts.setdefault(owner, part)
        return [
            next(name for n in count() if self.find_part(name := f"{kind}:{n}") == part)
            for part in parts.values()
        ]

    def name_key(self, kind: str, subject: str, *below: str) -> str:
        """The key of a kind of state and a subject."""
        tag = self._find_tag(subject)
        start = f"{self._prefix}{{{tag}}}:" if tag else self._prefix
        return start + ":".join([kind, subject, *below])

    def _find_tag(self, subject: str) -> str:
        tags = self._layout.tags
        return tags[self.find_part(subject)] if tags else ""

    async def ask(self, subject: str, commands: Sequence[Command]) -> list[RedisReply]:
        """Send commands in one write; raises StoreError, also for an error reply."""
        tag = self._find_tag(subject)
        try:
            async with asyncio.timeout(_SECONDS):
                replies = await exchange(
                    self._layout.open_pool(await self._layout.locate(tag)), commands
                )
                if any(isinstance(reply, AskError) for reply in replies):
                    await self._layout.learn()
                    replies = await exchange(
                        self._layout.open_pool(await self._layout.locate(tag)), commands
                    )
        except TimeoutError:
            raise StoreError(f"no answer within {_SECONDS:g} s", kind="timeout") from None
        for reply in replies:
            if isinstance(reply, RedisError):
                raise explain_refusal(reply)
        return replies
