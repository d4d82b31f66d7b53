"""An open connection to a server, after redis-py has logged in: commands out, replies back, and what its errors mean.

What answers may be anything: another protocol, a server gone mad. It is believed as far as it can be checked, and what it makes
us keep or make room for has an end.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import hiredis
from redis._parsers.hiredis import NOT_ENOUGH_DATA
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,  # noqa: A004  # not an OSError
    InvalidResponse,
    RedisError,
    ResponseError,
)

from extproc.errors import StoreError
from extproc.store.pending import Pending

Command: TypeAlias = tuple[str | int | bytes, ...]
Reply: TypeAlias = "int | bytes | list[Any] | ResponseError | None"

_pack: Callable[[Command], bytes] = hiredis.pack_command  # type: ignore[assignment]  # its stub takes one-tuples alone

_MAX_BYTES = 8 * 1024 * 1024
_MAX_ELEMENTS = 500_000
"""Of one reply. A cluster whose every slot is a range of its own comes near; 256 answers of scripts are far below."""

_LIST = re.compile(rb"\n[*%~>|]([0-9]{1,20})\r(?=\n)")
"""Where a reply announces elements, in any version of the protocol."""

_LONGEST_TEXT = 200
_KINDS = {
    "NOAUTH": "auth",
    "WRONGPASS": "auth",
    "NOPERM": "auth",
    "READONLY": "read_only",
    "MASTERDOWN": "read_only",
    "OOM": "oom",
    "LOADING": "loading",
    "BUSY": "busy",
    "CLUSTERDOWN": "cluster",
    "TRYAGAIN": "cluster",
    "MOVED": "cluster",
    "ASK": "cluster",
}
"""The first word of an error reply, and its kind for metrics."""


@dataclass(frozen=True)
class Address:
    """Where a server listens: host and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        """As a person would write it."""
        return self.path or (f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}")


class Bounds:
    """What one reply may be: hiredis makes room for all that a list announces, and keeps any text until it is over."""

    def __init__(self) -> None:
        """Nothing has come."""
        self._line = b"\n"  # the one that has begun, as far as it could announce a list
        self._bytes = 0
        self._elements = 0

    def begin(self) -> None:
        """What comes now answers something new."""
        self._bytes = self._elements = 0

    def check(self, data: bytes) -> None:
        """Look at what has arrived.

        Raises:
            InvalidResponse: it is too much.
        """
        text = self._line + data
        self._line = text[text.rfind(b"\n") :][:_LONGEST_TEXT]
        self._bytes += len(data)
        for announced in _LIST.findall(text):
            self._elements += int(announced)
        if self._bytes > _MAX_BYTES or self._elements > _MAX_ELEMENTS:
            raise InvalidResponse("a reply without an end")


class Link(asyncio.Protocol):
    """An open connection: commands go out in one write, replies come back in their order.

    redis-py opens it and logs in. Then its transport is taken over, because redis-py's streams and coroutines would cost a
    round trip as much as a dozen of its hits.
    """

    def __init__(self, place: Address, connection: AbstractConnection, reader: hiredis.Reader, bounds: Bounds) -> None:
        """Take a connection over.

        Args:
            place: for error messages.
            connection: that is logged in.
            reader: of its replies.
            bounds: of these.
        """
        self._place = place
        self._connection = connection
        self._reader = reader
        self._bounds = bounds
        self._asked = 0
        self._replies: list[Reply] = []
        self._answer: Pending | None = None
        self._lost: StoreError | None = None
        self._transport: Any = connection._writer.transport  # type: ignore[union-attr]  # noqa: SLF001  # redis-py hands out none
        self._transport.set_protocol(self)

    def is_usable(self) -> bool:
        """Whether it is open, with nothing on it that somebody has not waited for."""
        return self._lost is None and self._answer is None

    def send(self, packed: bytes, commands: int) -> Pending:
        """Send so many commands in one write; a list of their replies, error replies among them.

        After a wait given up the link is not usable.

        Raises:
            StoreError: the connection has ended, at once or from what is pending.
        """
        if self._lost is not None:
            raise self._lost
        self._asked, self._replies = commands, []
        self._answer = Pending()
        self._bounds.begin()
        self._transport.write(packed)
        return self._answer

    def exchange(self, commands: Sequence[Command]) -> Pending:
        """The same for commands that are not packed yet.

        Raises:
            StoreError: as there.
        """
        return self.send(b"".join(map(_pack, commands)), len(commands))

    async def ask(self, command: Command) -> Reply:
        """Send a command; its reply.

        Raises:
            StoreError: the connection ended first.
        """
        replies: list[Reply] = await self.exchange([command])
        return replies[0]

    async def drop(self) -> None:
        """End the connection at once."""
        self._lose(StoreError(f"{self._place}: the connection was dropped", kind="connection"))
        await self._connection.disconnect(nowait=True)

    def data_received(self, data: bytes) -> None:
        """The server said something."""
        try:
            self._bounds.check(data)
            self._reader.feed(data)
            self._take_replies()
        except Exception as error:  # noqa: BLE001  # see explain
            self._lose(explain(error, self._place))
            return
        if len(self._replies) < self._asked:
            return
        if self._reader.has_data():
            self._lose(StoreError(f"{self._place}: more answers than questions", kind="response"))
        elif self._answer is not None and not self._answer.done:
            answer, self._answer = self._answer, None
            replies, self._replies, self._asked = self._replies, [], 0
            answer.settle(replies)  # last, because whoever hears it may ask again

    def _take_replies(self) -> None:
        """Take those that are all there, and no more than were asked for.

        Raises:
            RedisError: the server says that it will not go on.
        """
        while len(self._replies) < self._asked:
            reply = self._reader.gets()
            if reply is NOT_ENOUGH_DATA:
                return
            if isinstance(reply, RedisError) and not isinstance(reply, ResponseError):
                raise reply
            self._replies.append(reply)

    def eof_received(self) -> None:
        """The server has closed the connection, and asyncio says so again only once it has been around."""
        self.connection_lost(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._lose(explain(exc or ConnectionError(), self._place))

    def _lose(self, error: StoreError) -> None:
        if self._lost is not None:
            return
        self._lost = error
        self._transport.abort()
        if self._answer is not None:
            self._answer.settle(None, error)


def explain(error: BaseException, place: Address) -> StoreError:
    """What redis-py raised, or what it raised that for; any error at all, because a server can answer anything."""
    for cause in _causes(error):
        if isinstance(cause, StoreError):
            return cause
        if isinstance(cause, OSError):
            kind = "tls" if isinstance(cause, ssl.SSLError) else "connection"
            return StoreError(f"{place}: {cause.strerror or cause}", kind=kind)
        if isinstance(cause, RedisError) and cause.status_code:
            return explain_refusal(cause)
    if isinstance(error, AuthenticationError):
        return StoreError(f"{place}: {error}", kind="auth")
    if isinstance(error, ConnectionError):
        return StoreError(f"{place}: connection closed by the server", kind="connection")
    return StoreError(f"{place}: what it answers is not the protocol of Redis", kind="response")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def explain_refusal(reply: RedisError) -> StoreError:
    """What an error reply means."""
    word, text = reply.status_code or "", str(reply)  # redis-py takes the first word off where it knows it
    if "unauthenticated" in text:  # a script is longer than what strangers may say, and that is heard first
        word, text = "NOAUTH", "Authentication required."
    text = f"{word} {text}".strip()[:_LONGEST_TEXT]
    words = [text.partition(" ")[0], *(word for word in _KINDS if f"-{word} " in text)]  # Redis 6 quotes it behind its own
    return StoreError(text, kind=next((_KINDS[word] for word in words if word in _KINDS), "response"))
