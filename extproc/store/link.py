"""An open connection to a server: sends commands, receives replies, explains errors.

The peer may be anything: a server of another protocol, or a broken one. Its replies are checked, and the memory that they can
make this process allocate is bounded. Nothing is ever sent twice, because a command that was sent may have counted.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import hiredis

from extproc.errors import StoreError
from extproc.sockets import keep_alive
from extproc.store.pending import Pending

Command: TypeAlias = tuple[str | int | bytes, ...]
RedisReply: TypeAlias = "int | bytes | list[Any] | ErrorReply | None"

_pack: Callable[[Command], bytes] = hiredis.pack_command  # type: ignore[assignment]  # its stub takes only one-tuples
_NOT_ENOUGH_DATA: Final = object()

_MAX_BYTES = 8 * 1024 * 1024
_MAX_ELEMENTS = 500_000
"""Longest reply. A cluster in which every slot is a separate range comes near; 256 script answers are far below."""

_LIST = re.compile(rb"\n[*%~>|]([0-9]{1,20})\r(?=\n)")
"""A place where a reply announces elements, in any version of the protocol."""

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
"""Kinds of error replies for metrics, by their first word."""

_PROBE_SECONDS: Final = 5
"""Seconds between probes of an idle connection, so that a lost server is noticed although nothing is asked."""


class ErrorReply(Exception):  # a reply like others; never raised
    """An error in place of a reply."""

    @property
    def word(self) -> str:
        """The first word, which says what kind of error it is."""
        return str(self).partition(" ")[0]


@dataclass(frozen=True)
class ServerAddress:
    """The address of a server: host and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        """The address as people write it."""
        return self.path or (f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}")


class ReplyBounds:
    """Bounds of one reply: hiredis allocates memory for all elements that a list announces, and buffers texts of any length."""

    def __init__(self) -> None:
        self._line = b"\n"  # the current line, as far as it could announce a list
        self._bytes = 0
        self._elements = 0

    def begin(self) -> None:
        """Start again with a new reply."""
        self._bytes = self._elements = 0

    def check(self, data: bytes) -> None:
        """Check data that has arrived; raises ValueError if it is too much."""
        text = self._line + data
        self._line = text[text.rfind(b"\n") :][:_LONGEST_TEXT]
        self._bytes += len(data)
        for announced in _LIST.findall(text):
            self._elements += int(announced)
        if self._bytes > _MAX_BYTES or self._elements > _MAX_ELEMENTS:
            raise ValueError("a reply without an end")


class Link(asyncio.Protocol):
    """A connection: commands are sent in one write, and replies come back in their order."""

    def __init__(self, address: ServerAddress) -> None:
        """Start without a connection; the address is for error messages."""
        self._address = address
        self._reader = hiredis.Reader(replyError=ErrorReply, notEnoughData=_NOT_ENOUGH_DATA)
        self._bounds = ReplyBounds()
        self._asked = 0
        self._replies: list[RedisReply] = []
        self._answer: Pending | None = None
        self._lost: StoreError | None = None
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        self._transport = transport
        keep_alive(transport.get_extra_info("socket"), _PROBE_SECONDS)

    def is_usable(self) -> bool:
        """Whether the connection is open and no reply is pending."""
        return self._lost is None and self._answer is None

    def send(self, packed: bytes, commands: int) -> Pending:
        """Send packed commands in one write.

        The link is unusable after a cancelled wait.

        Returns:
            a list of their replies, including error replies.

        Raises:
            StoreError: the connection has ended, at once or from the pending reply.
        """
        if self._lost is not None:
            raise self._lost
        self._asked, self._replies = commands, []
        self._answer = Pending()
        self._bounds.begin()
        self._transport.write(packed)
        return self._answer

    def exchange(self, commands: Sequence[Command]) -> Pending:
        """Send commands that are not packed yet; see `send`."""
        return self.send(b"".join(map(_pack, commands)), len(commands))

    async def ask(self, command: Command) -> RedisReply:
        """Send a command and wait for its reply; raises StoreError if the connection ends first."""
        replies: list[RedisReply] = await self.exchange([command])
        return replies[0]

    def drop(self) -> None:
        """End the connection at once."""
        self._lose(StoreError(f"{self._address}: the connection was dropped", kind="connection"))

    def data_received(self, data: bytes) -> None:
        """Data has arrived."""
        try:
            self._bounds.check(data)
            self._reader.feed(data)
            while len(self._replies) < self._asked:  # what comes beyond that answers no command
                reply = self._reader.gets()
                if reply is _NOT_ENOUGH_DATA:
                    break
                self._replies.append(reply)
        except Exception as error:  # noqa: BLE001  # see `explain`
            self._lose(explain(error, self._address))
            return
        if len(self._replies) < self._asked:
            return
        if self._reader.has_data():
            self._lose(StoreError(f"{self._address}: more replies than requests", kind="response"))
        elif self._answer is not None and not self._answer.done:
            answer, self._answer = self._answer, None
            replies, self._replies, self._asked = self._replies, [], 0
            answer.settle(replies)  # last, because the caller may ask again at once

    def eof_received(self) -> None:
        """The server closed the connection; asyncio would report this later."""
        self.connection_lost(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        closed = StoreError(f"{self._address}: connection closed by the server", kind="connection")
        self._lose(closed if exc is None else explain(exc, self._address))

    def _lose(self, error: StoreError) -> None:
        if self._lost is not None:
            return
        self._lost = error
        if self._transport is not None:
            self._transport.abort()
        if self._answer is not None:
            self._answer.settle(None, error)


def explain(error: Exception, address: ServerAddress) -> StoreError:
    """Describe a connection's error, which may be of any type, because a server can answer anything."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, OSError):
        kind = "tls" if isinstance(error, ssl.SSLError) else "connection"
        return StoreError(f"{address}: {error.strerror or error}", kind=kind)
    return StoreError(f"{address}: it does not speak the Redis protocol", kind="response")


def explain_refusal(reply: ErrorReply) -> StoreError:
    """Describe an error reply."""
    text = str(reply)[:_LONGEST_TEXT]
    if "unauthenticated" in text:  # a script exceeds the length that a server accepts before login, which it reports first
        text = "NOAUTH Authentication required."
    words = [text.partition(" ")[0], *(word for word in _KINDS if f"-{word} " in text)]  # Redis 6 quotes it behind its own word
    return StoreError(text, kind=next((_KINDS[word] for word in words if word in _KINDS), "response"))


def blame_bug(bug: BaseException) -> StoreError:
    """Describe an internal error."""
    return StoreError(f"{type(bug).__name__}: {bug}", kind="internal")
