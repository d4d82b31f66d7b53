"""One connection to a Redis or Valkey server: commands go out in one write, replies come back in their order.

Nothing is ever repeated here. A command that was sent may have counted, so what happens when no reply comes is for the store to
decide, not for a client library that means well. That, and one write for a whole batch, is why this is not redis-py.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import hiredis

from extproc.errors import StoreError

Command: TypeAlias = tuple[str | int, ...]
Reply: TypeAlias = "int | bytes | list[Any] | hiredis.ReplyError | None"

_pack: Callable[[Command], bytes] = hiredis.pack_command  # type: ignore[assignment]  # its stub takes one-tuples alone
_NOT_YET = object()

_KINDS = {
    "NOAUTH": ("auth", False),
    "WRONGPASS": ("auth", False),
    "NOPERM": ("auth", False),
    "READONLY": ("read_only", True),
    "MASTERDOWN": ("read_only", True),
    "OOM": ("oom", True),
    "LOADING": ("loading", True),
    "BUSY": ("busy", True),
    "CLUSTERDOWN": ("cluster", True),
    "TRYAGAIN": ("cluster", True),
    "MOVED": ("cluster", True),
    "ASK": ("cluster", True),
}
"""The first word of an error reply: its kind for metrics, and whether waiting may help."""


def refusal(reply: hiredis.ReplyError) -> StoreError:
    """What an error reply means."""
    text = str(reply)
    if "unauthenticated" in text:  # a script is longer than what strangers may say, and that is heard first
        text = "NOAUTH Authentication required."
    words = [text.partition(" ")[0], *(word for word in _KINDS if f"-{word} " in text)]  # Redis 6 quotes it behind its own
    kind, transient = next((_KINDS[word] for word in words if word in _KINDS), ("response", True))
    return StoreError(text, kind=kind, transient=transient)


class Connection(asyncio.Protocol):
    """An open connection; `alive` until either side ends it."""

    def __init__(self, name: str) -> None:
        """Wait for `connection_made`; `name` is for error messages."""
        self.name = name
        self.alive = False
        self._transport: asyncio.Transport | None = None
        self._reader = hiredis.Reader(notEnoughData=_NOT_YET)
        self._pending: deque[tuple[int, list[Reply], asyncio.Future[list[Reply]]]] = deque()

    def send(self, commands: Sequence[Command]) -> asyncio.Future[list[Reply]]:
        """Send commands in one write; the answer has one reply for each, error replies among them.

        Raises:
            StoreError: from the future; the connection ended first.
        """
        answered: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()
        if self._transport is None or not self.alive:
            answered.set_exception(self._lost(None))
        else:
            self._pending.append((len(commands), [], answered))
            self._transport.write(b"".join(map(_pack, commands)))
        return answered

    def drop(self) -> None:
        """End the connection at once; whoever still waits is cancelled."""
        self.alive = False
        for _, _, answered in self._pending:
            answered.cancel()
        self._pending.clear()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self._transport = cast("asyncio.Transport", transport)
        self.alive = True

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not _NOT_YET and self._pending:
                expected, replies, answered = self._pending[0]
                replies.append(reply)
                if len(replies) == expected:
                    self._pending.popleft()
                    if not answered.done():
                        answered.set_result(replies)
        except hiredis.ProtocolError as error:
            self.connection_lost(error)
            self.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self.alive = False
        for _, _, answered in self._pending:
            if not answered.done():
                answered.set_exception(self._lost(exc))
        self._pending.clear()

    def _lost(self, exc: Exception | None) -> StoreError:
        return StoreError(f"{self.name}: {exc or 'connection closed by the server'}", kind="connection")


@dataclass(frozen=True, slots=True)
class Access:
    """How to get into a server.

    Attributes:
        secret: user and password, asked at every connect; either may be empty.
        tls: None for a connection in the clear.
        database: to select.
    """

    secret: Callable[[], tuple[str, str]] = lambda: ("", "")
    tls: ssl.SSLContext | None = None
    database: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server listens: host and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        """As a person would write it."""
        return self.path or (f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}")


async def connect(place: Place, access: Access) -> Connection:
    """Connect and log in.

    Raises:
        StoreError: no server, or it will not have us.
    """
    loop = asyncio.get_running_loop()
    connection = Connection(str(place))
    try:
        if place.path:
            await loop.create_unix_connection(lambda: connection, place.path, ssl=access.tls, server_hostname=_name(access))
        else:
            transport, _ = await loop.create_connection(lambda: connection, place.host, place.port, ssl=access.tls)
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        await _log_in(connection, access)
    except OSError as error:
        connection.drop()
        kind = "tls" if isinstance(error, ssl.SSLError) else "connection"
        raise StoreError(f"{place}: {error.strerror or error}", kind=kind) from None
    except BaseException:
        connection.drop()
        raise
    return connection


def _name(access: Access) -> str | None:
    return "localhost" if access.tls else None


async def _log_in(connection: Connection, access: Access) -> None:
    try:
        user, password = access.secret()
    except OSError as error:
        raise StoreError(f"password file: {error.strerror}", kind="auth", transient=False) from None
    commands: list[Command] = []
    if password:
        commands.append(("AUTH", user, password) if user else ("AUTH", password))
    if access.database:
        commands.append(("SELECT", access.database))
    if not commands:
        return
    for command, reply in zip(commands, await connection.send(commands), strict=True):
        if isinstance(reply, hiredis.ReplyError):
            refused = refusal(reply)
            if command[0] == "AUTH" and refused.kind == "response":
                # What the server says may quote what it was sent.
                raise StoreError("the server takes no password, or not this one", kind="auth", transient=False)
            raise refused
