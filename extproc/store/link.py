"""The connection on the hot path: many commands in one write, and hiredis for their replies.

This replaces redis-py's connection because every request pays for it. Over redis-py's
(`LibraryLink`, `?client=redis-py`), the same batches took three times the CPU for one request at a
time, and a quarter more for 64 at once.

redis-py connects and logs in (`client`), and then hands over the socket. `backend` builds the
batches; `shard` has the deadlines and the circuit breaker.

The peer may be a broken server, or speak another protocol. Replies are checked, and the memory that
they can make this process allocate is bounded. Nothing is ever sent twice, because a command that
was sent may have counted.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import hiredis
from redis import exceptions
from redis.asyncio.connection import DefaultParser

from extproc.errors import StoreError
from extproc.sockets import keep_alive
from extproc.store.pending import Pending

Command: TypeAlias = tuple[str | int | bytes, ...]
RedisReply: TypeAlias = "int | bytes | list[Any] | exceptions.RedisError | None"
"""Error replies are redis-py's exceptions."""

_NOT_ENOUGH_DATA: Final = object()

_MAX_BYTES = 8 * 1024 * 1024
_MAX_ELEMENTS = 500_000
"""Maximum size of a reply.

The largest valid one describes a cluster in which every slot is a separate range.
"""

_LIST = re.compile(rb"\n[*%~>|]([0-9]{1,20})\r(?=\n)")
"""The header of an array, map, set or push, with its number of elements."""

_LONGEST_TEXT = 200
_KINDS: Final = (
    (exceptions.AuthenticationError, "auth"),
    (exceptions.AuthenticationWrongNumberOfArgsError, "auth"),
    (exceptions.NoPermissionError, "auth"),
    (exceptions.ReadOnlyError, "read_only"),
    (exceptions.MasterDownError, "read_only"),  # also a ClusterDownError
    (exceptions.OutOfMemoryError, "oom"),
    (exceptions.BusyLoadingError, "loading"),
    (exceptions.ClusterError, "cluster"),
    (exceptions.TryAgainError, "cluster"),
    (exceptions.AskError, "cluster"),
)
"""Kinds of error replies for metrics."""

_NESTED = re.compile(r"(?<=-)(OOM|READONLY|MASTERDOWN|NOPERM) .*", re.DOTALL)
"""The original error in the one that Redis 6 reports for a command in a script."""

_PROBE_SECONDS: Final = 5
"""Seconds between TCP keepalive probes, which notice a lost server on an idle connection."""


@dataclass(frozen=True)
class ServerAddress:
    """The address of a server: host and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        """HOST:PORT, or the path."""
        return self.path or (
            f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        )


class ReplyBounds:
    """Bounds the size of one reply.

    hiredis allocates memory for every announced element, and buffers strings of any length.
    """

    def __init__(self) -> None:
        self._line = b"\n"  # the start of the current line, which may be the header of a list
        self._bytes = 0
        self._elements = 0

    def begin(self) -> None:
        """Begin a new reply."""
        self._bytes = self._elements = 0

    def check(self, data: bytes) -> None:
        """Count received data; raises ValueError if the reply is too large."""
        text = self._line + data
        self._line = text[text.rfind(b"\n") :][:_LONGEST_TEXT]
        self._bytes += len(data)
        for announced in _LIST.findall(text):
            self._elements += int(announced)
        if self._bytes > _MAX_BYTES or self._elements > _MAX_ELEMENTS:
            raise ValueError("the reply is too large")


class Link(asyncio.Protocol):
    """A connection: commands are sent in one write, and replies come back in their order."""

    def __init__(self, address: str, writer: asyncio.StreamWriter) -> None:
        """Take over an open connection; the address is for error messages."""
        self._address = address
        self._writer = writer  # it closes the connection when it is collected
        self._transport: Any = writer.transport
        self._reader = hiredis.Reader(
            replyError=DefaultParser.parse_error, notEnoughData=_NOT_ENOUGH_DATA
        )
        self._bounds = ReplyBounds()
        self._asked = 0
        self._replies: list[RedisReply] = []
        self._answer: Pending | None = None
        self._lost: StoreError | None = None
        keep_alive(self._transport.get_extra_info("socket"), _PROBE_SECONDS)
        self._transport.set_protocol(self)

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

    def drop(self) -> None:
        """End the connection at once."""
        self._lose(StoreError(f"{self._address}: the connection was dropped", kind="connection"))

    def data_received(self, data: bytes) -> None:
        """Data has arrived."""
        try:
            self._bounds.check(data)
            self._reader.feed(data)
            while len(self._replies) < self._asked:  # any further reply answers no command
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
        self._transport.abort()
        if self._answer is not None:
            self._answer.settle(None, error)


def explain(error: Exception, address: str) -> StoreError:
    """Convert an error of a connection.

    It may be of any type, because a server can answer anything.
    """
    causes = list(_list_causes(error))
    for cause in causes:
        if isinstance(cause, StoreError):
            return cause
        if isinstance(cause, exceptions.TimeoutError | TimeoutError):
            return StoreError(f"{address}: no answer", kind="timeout")
        if isinstance(cause, exceptions.RedisError) and (
            cause.status_code or isinstance(cause, exceptions.ResponseError)
        ):
            return explain_refusal(cause)
        if isinstance(cause, OSError):
            kind = "tls" if isinstance(cause, ssl.SSLError) else "connection"
            return StoreError(f"{address}: {cause.strerror or cause}", kind=kind)
    if isinstance(error, exceptions.ConnectionError):
        return StoreError(f"{address}: {error}", kind="connection")
    return StoreError(f"{address}: it does not speak the Redis protocol", kind="response")


def _list_causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes, which redis-py wraps in its own errors."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def explain_refusal(reply: exceptions.RedisError) -> StoreError:
    """Convert an error reply."""
    text = str(reply)[:_LONGEST_TEXT]
    if "unauthenticated" in text:  # before login, a server limits the length of commands
        return StoreError("NOAUTH Authentication required.", kind="auth")
    nested = _NESTED.search(text)
    meant = [reply] if nested is None else [reply, DefaultParser.parse_error(nested[0])]  # type: ignore[no-untyped-call]
    found = [kind for error in meant for known, kind in _KINDS if isinstance(error, known)]
    if reply.status_code not in (None, "ERR"):
        text = f"{reply.status_code} {text}"
    return StoreError(
        text, kind=found[0] if found else "busy" if text.startswith("BUSY ") else "response"
    )


def explain_bug(bug: BaseException) -> StoreError:
    """Convert an internal error."""
    return StoreError(f"{type(bug).__name__}: {bug}", kind="internal")
