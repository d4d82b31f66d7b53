"""Sends batches to Redis or Valkey: the calls of a batch become one write to each server.

A batch has one command per script and, on a cluster, per hash tag, so that all keys of a command
are in one slot. A command that a server rejects without running it is sent again: as a whole script
(NOSCRIPT), or to another server (MOVED, ASK).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, Final

from redis.exceptions import AskError, MovedError, NoScriptError, RedisError, TryAgainError

from extproc.errors import StoreError
from extproc.store.client import AnyLink
from extproc.store.link import RedisReply, ServerAddress, explain_bug, explain_refusal
from extproc.store.pending import Pending
from extproc.store.rules.windows import Hit
from extproc.store.scripts import MAX_WEIGHT, Script, ScriptCall, count_call, write_word
from extproc.store.topology import ShardServers

_ASKING: Final = b"*1\r\n$6\r\nASKING\r\n"


class _ScriptBatch:
    """Calls of a round trip with one script and hash tag: one command."""

    def __init__(self, script: Script, tag: str) -> None:
        self.script = script
        self.tag = tag
        self.weight = 0
        self.calls: list[ScriptCall] = []
        self.positions: list[int] = []

    def add(self, call: ScriptCall, position: int) -> _ScriptBatch:
        self.weight += call.weight
        self.calls.append(call)
        self.positions.append(position)
        return self

    def list_keys(self) -> list[str]:
        keys = []
        for call in self.calls:
            keys.append(call.subject.key)
            if call.others:
                keys += call.others
        return keys

    def list_arguments(self) -> list[int | bytes]:
        """Arguments of all calls, or of one call if all are equal, as for hits of one policy."""
        first = self.calls[0].arguments
        for call in self.calls:
            if call.arguments is not first and call.arguments != first:
                return [argument for call in self.calls for argument in call.arguments]
        return list(first)

    def split(self) -> list[_ScriptBatch]:
        """A group for each call.

        A single call is reduced to its first key, because the others may be on another server.
        """
        calls = self.calls if len(self.calls) > 1 else [call.narrow() for call in self.calls]
        return [
            _ScriptBatch(self.script, self.tag).add(call, position)
            for call, position in zip(calls, self.positions, strict=True)
        ]


class _PendingBatch(Pending):
    """A batch under way: one concurrent exchange with each server that has some of its keys.

    Attributes:
        answers: those received so far, in the order of the calls.
        refused: commands that servers rejected without running them.
        unanswered: the number of servers that have not answered yet.
    """

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.answers: list[Any] = [None] * calls
        self.refused: list[tuple[_ScriptBatch, RedisError]] = []
        self.unanswered = 0
        self._work: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """See `Pending`."""
        super().cancel()
        if self._work is not None:
            self._work.cancel()

    def fail(self, error: Exception) -> None:
        self.settle(None, error if isinstance(error, StoreError) else explain_bug(error))

    def follow(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the rest of the work, which has to wait, in a task."""
        self._work = asyncio.get_running_loop().create_task(self._follow(work))

    async def _follow(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001  # the caller must get an answer
            self.fail(error)


class RedisBackend:
    """The connection to a shard's server, for one round trip at a time; raises only StoreError."""

    def __init__(self, topology: ShardServers, prefix: str) -> None:
        """Keep state on the servers of `topology`; every key starts with `prefix`."""
        self._topology = topology
        self._prefix = prefix

    def call(self, calls: list[ScriptCall]) -> Pending:
        """Make every call once, with one write to each server, at once if its connection is open.

        Cancelling the pending answer also drops the connections.
        """
        batch = _PendingBatch(len(calls))
        try:
            groups = self._group(calls)
            if not self._send(batch, groups):
                batch.follow(self._connect(batch, groups))
        except Exception as error:  # noqa: BLE001  # reported like later errors
            batch.fail(error)
        return batch

    async def probe(self) -> None:
        """Count once for every hash tag of the shard: a healthy server can write.

        This also looks up which keys the shard has.
        """
        keys = [f"probe:{number:02x}" for number in await self._topology.learn()]
        hits = [
            Hit(key, "sliding_ttl", 1_000, 2, 0, count_refused=True, count_to=2) for key in keys
        ]
        if hits:  # else its keys have moved
            await self.call([count_call(hit) for hit in hits])

    def drop(self) -> None:
        """Close the connections, whose pending replies can no longer be assigned.

        They open again when needed.
        """
        self._topology.drop()

    def _group(self, calls: list[ScriptCall]) -> list[_ScriptBatch]:
        full: list[_ScriptBatch] = []
        groups: dict[tuple[str, str], _ScriptBatch] = {}
        group: _ScriptBatch | None = None
        tags = self._topology.tags
        for position, call in enumerate(calls):
            script = call.script
            tag = tags[find_part(call.subject.key, len(tags))] if tags else ""
            # Usually the same group as before
            if group is None or group.script is not script or group.tag != tag:
                group = groups.get((script.sha, tag))
                if group is None:
                    group = groups[script.sha, tag] = _ScriptBatch(script, tag)
            if group.weight and group.weight + call.weight > MAX_WEIGHT:
                full.append(group)
                group = groups[script.sha, tag] = _ScriptBatch(script, tag)
            group.add(call, position)
        return [*full, *groups.values()]

    async def _connect(self, batch: _PendingBatch, groups: list[_ScriptBatch]) -> None:
        """Open missing connections, then send; raises StoreError."""
        for group in groups:
            await self._topology.find(group.tag)
        if not self._send(batch, groups):
            raise StoreError("a connection was lost while others were opened", kind="connection")

    def _send(self, batch: _PendingBatch, groups: list[_ScriptBatch]) -> bool:
        """Ask all servers at the same time, or none if a connection is not open."""
        parts: dict[AnyLink, list[_ScriptBatch]] = {}
        for group in groups:
            link = self._topology.get(group.tag)
            if link is None:
                return False
            parts.setdefault(link, []).append(group)
        batch.unanswered = len(parts)
        for link, mine in parts.items():
            replies = link.send(b"".join([self._pack(group) for group in mine]), len(mine))
            replies.then(partial(self._take, batch, mine, replies))
        return True

    def _take(self, batch: _PendingBatch, groups: list[_ScriptBatch], replies: Pending) -> None:
        if batch.done:
            return
        try:
            for group, reply in zip(groups, replies.result(), strict=True):
                if isinstance(reply, RedisError):
                    batch.refused.append((group, reply))
                else:
                    _read(group, reply, batch.answers)
        except Exception as error:  # noqa: BLE001  # a server can answer anything
            batch.fail(error)
            return
        batch.unanswered -= 1
        if batch.unanswered:
            return
        if batch.refused:
            batch.follow(self._finish(batch))
        else:
            batch.settle(batch.answers)

    async def _finish(self, batch: _PendingBatch) -> None:
        for group, error in batch.refused:
            await self._resend(group, error, batch.answers)
        batch.settle(batch.answers)

    async def _resend(self, group: _ScriptBatch, error: RedisError, answers: list[Any]) -> None:
        """Send a command again that a server rejected without running it."""
        if isinstance(error, NoScriptError):  # a new primary, or SCRIPT FLUSH
            link = await self._topology.find(group.tag)
            [reply] = await link.send(self._pack(group, whole=True), 1)
            _read(group, reply, answers)
        elif isinstance(error, MovedError):
            place = ServerAddress(error.host, error.port)
            self._topology.move(group.tag, place)
            link = await self._topology.at(place)
            [reply] = await link.send(self._pack(group, whole=True), 1)
            _read(group, reply, answers)
        elif isinstance(error, AskError) and len(group.list_keys()) == 1:  # the slot is moving
            link = await self._topology.at(ServerAddress(error.host, error.port))
            _, reply = await link.send(_ASKING + self._pack(group, whole=True), 2)
            _read(group, reply, answers)
        elif isinstance(error, AskError | TryAgainError) and len(group.list_keys()) > 1:
            # Some keys have moved, some not.
            link = await self._topology.find(group.tag)
            singles = group.split()
            replies = await link.send(
                b"".join([self._pack(single) for single in singles]), len(singles)
            )
            for single, reply in zip(singles, replies, strict=True):
                if isinstance(reply, RedisError):
                    await self._resend(single, reply, answers)
                else:
                    _read(single, reply, answers)
        else:
            raise explain_refusal(error)

    def _pack(self, group: _ScriptBatch, *, whole: bool = False) -> bytes:
        start = f"{self._prefix}{{{group.tag}}}:" if group.tag else self._prefix
        keys, arguments = group.list_keys(), group.list_arguments()
        return b"".join(
            [
                b"*%d\r\n" % (3 + len(keys) + len(arguments)),
                group.script.whole if whole else group.script.by_name,
                write_word(len(keys)),
                write_keys(start, keys),
                *[write_word(argument) for argument in arguments],
            ]
        )


def write_keys(start: str, keys: Sequence[str]) -> bytes:
    """Encode prefixed keys as words of a command, as one string, which is faster."""
    width = len(start)
    size, head, words = -1, "", []
    for key in keys:
        if len(key) != size:  # most are as long as the previous one
            size = len(key)
            head = f"${width + size}\r\n{start}"
        words.append(f"{head}{key}\r\n")
    text = "".join(words)
    # Lengths are in bytes, which equal characters only in ASCII.
    return text.encode() if text.isascii() else b"".join([write_word(start + key) for key in keys])


def _read(group: _ScriptBatch, reply: RedisReply, answers: list[Any]) -> None:
    if isinstance(reply, RedisError):
        raise explain_refusal(reply)
    for position, answer in zip(
        group.positions, group.script.read(reply, len(group.positions)), strict=True
    ):
        answers[position] = answer


def find_part(key: str, tags: int) -> int:
    """The number of a key's hash tag, from the key's last two digits; 0 without tags."""
    return int(key[-2:], 16) % tags if tags else 0
