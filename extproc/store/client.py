"""Connects with redis-py: addresses, TLS, users, credential providers, Sentinel, protocols.

redis-py never retries here, because a command that was sent may have counted. A failure is a
StoreError, and the breaker of the shard decides when to try again. Nothing here blocks the event
loop: names are resolved in threads, and the TLS context, which takes 40 ms, is made once at the
start.
"""
# interpreted: waits for a network

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from redis import exceptions
from redis.asyncio import Connection, ConnectionPool, UnixDomainSocketConnection
from redis.asyncio.connection import (
    AbstractConnection,
    DefaultParser,
    RedisSSLContext,
    SSLConnection,
)
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig

from extproc.errors import StoreError
from extproc.store.link import Command, Link, RedisReply, ReplyBounds, ServerAddress, explain
from extproc.store.pending import Pending

LOOK_SECONDS = 0.25
"""Timeout for a Sentinel, or for a node that is asked for slots, before the next one is tried."""


class BoundedParser(DefaultParser):  # type: ignore[misc, valid-type]  # it is hiredis's
    """redis-py's parser, with `ReplyBounds`."""

    def __init__(self, socket_read_size: int) -> None:
        super().__init__(socket_read_size)
        self._bounds = ReplyBounds()

    # See redis-py
    async def read_response(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        """See redis-py."""
        self._bounds.begin()
        return await super().read_response(*arguments, **options)

    async def read_from_socket(self) -> bool:
        """See redis-py; raises ValueError if the reply is too large."""
        data = await self._stream.read(self._read_size)
        if not data:
            raise exceptions.ConnectionError("connection closed by the server")
        self._bounds.check(data)
        self._reader.feed(data)
        return True


class _UnixConnection(UnixDomainSocketConnection):
    async def on_connect(self) -> None:
        """Do nothing: redis-py would log in here, and again after connecting."""


@dataclass(frozen=True)
class Access:
    """How to connect to servers.

    Attributes:
        kind: redis-py's class of connections.
        managed: the class for a primary that Sentinels name.
        arguments: the arguments of both classes.
        open: opens a connection for requests.
    """

    kind: type[AbstractConnection]
    managed: type[SentinelManagedConnection]
    arguments: dict[str, Any]
    open: Callable[[ConnectionPool], Awaitable[AnyLink]]

    def make_pool(self, address: ServerAddress) -> ConnectionPool:
        """A pool for one server."""
        place = (
            {"path": address.path} if address.path else {"host": address.host, "port": address.port}
        )
        return ConnectionPool(self.kind, **self.arguments, **place)

    def find_primary(self, sentinels: Sequence[ServerAddress], service: str) -> ConnectionPool:
        """A pool for the primary of a Sentinel service."""
        found = _Sentinels(self, sentinels)
        return SentinelConnectionPool(
            service, found, connection_class=self.managed, **self.arguments
        )  # type: ignore[no-untyped-call]

    def without(self, *left_out: str) -> Access:
        """A copy without these arguments."""
        return replace(
            self,
            arguments={
                name: value for name, value in self.arguments.items() if name not in left_out
            },
        )


def make_access(scheme: str, given: dict[str, Any], *, library: bool = False) -> Access:
    """Access from the arguments that redis-py read from a URL.

    With `library`, requests use redis-py's connections, too.

    Raises:
        RedisError, OSError, TypeError, ValueError: a value is invalid. ssl.SSLError is an OSError.
    """
    tls = {name: value for name, value in given.items() if name.startswith("ssl_")}
    arguments = {
        "protocol": 2,  # an old server does not know HELLO
        **{name: value for name, value in given.items() if name not in tls},
        "driver_info": None,  # a user may lack the right to CLIENT SETINFO
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
        "parser_class": BoundedParser,
        "retry": Retry(NoBackoff(), 0),
        "socket_read_size": 262_144,  # hiredis rescans an unfinished line at each read
        # Callers have deadlines; in Python 3.11, redis-py's may swallow a cancellation
        "socket_timeout": None,
    }
    kind: type[AbstractConnection] = Connection
    managed = SentinelManagedConnection
    if scheme == "unix":
        kind = _UnixConnection
    elif scheme == "rediss":
        context = _make_context(tls)
        kind, managed = (
            _share_context(SSLConnection, context),
            _share_context(SentinelManagedSSLConnection, context),
        )
    kind(**arguments)
    return Access(kind, managed, arguments, open_library_link if library else open_link)


def _make_context(options: dict[str, Any]) -> RedisSSLContext:
    """redis-py's TLS context, but with only the given CAs, if any."""
    made = SSLConnection(**options).ssl_context
    context = ssl.create_default_context(
        cafile=made.ca_certs, capath=made.ca_path, cadata=made.ca_data
    )
    context.check_hostname, context.verify_mode = made.check_hostname, made.cert_reqs
    for flag in made.include_verify_flags or ():
        context.verify_flags |= flag
    for flag in made.exclude_verify_flags or ():
        context.verify_flags &= ~flag
    if made.certfile:
        context.load_cert_chain(made.certfile, made.keyfile, made.password)
    if made.min_version is not None:
        context.minimum_version = made.min_version
    if made.ciphers is not None:
        context.set_ciphers(made.ciphers)
    made.context = context
    return made


def _share_context(kind: type[Any], context: RedisSSLContext) -> type[Any]:
    class Sharing(kind):  # type: ignore[misc]  # made for a context
        def __init__(self, **arguments: Any) -> None:  # noqa: ANN401  # see redis-py
            super().__init__(**arguments)
            self.ssl_context = context

    return Sharing


class _Sentinels:
    """Sentinels for redis-py's pool, which asks at every connect.

    Each query begins with another, as one may be partitioned.
    """

    def __init__(self, access: Access, places: Sequence[ServerAddress]) -> None:
        # Some Sentinels need the credentials of the servers, and others reject any.
        self._ways = (
            access.without("db", "username", "password", "credential_provider"),
            access.without("db"),
        )
        self._places = list(places)

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """See redis-py's `Sentinel`, which hides why a Sentinel failed; raises StoreError."""
        errors: dict[ServerAddress, StoreError] = {}
        for access in self._ways:
            for place in list(self._places):
                self._places.append(self._places.pop(0))
                connection: Any = access.make_pool(place).make_connection()  # type: ignore[no-untyped-call]
                try:
                    async with asyncio.timeout(LOOK_SECONDS):
                        await connection.send_command(
                            "SENTINEL", "GET-MASTER-ADDR-BY-NAME", service_name
                        )
                        host, port = await connection.read_response() or (None, 0)
                    if host is not None:
                        return host.decode(), int(port)
                    errors[place] = StoreError(
                        f"{place} does not watch {service_name}", kind="sentinel"
                    )
                except Exception as error:  # noqa: BLE001  # a server can answer anything
                    errors[place] = explain(error, str(place))
                finally:
                    await connection.disconnect(nowait=True)
        raise StoreError(
            f"no Sentinel knows the primary: {'; '.join(map(str, errors.values()))}",
            kind="sentinel",
        )


def name_server(pool: ConnectionPool) -> str:
    """The server's address, for messages."""
    given = pool.connection_kwargs
    host, port = getattr(pool, "master_address", None) or (
        given.get("host", ""),
        given.get("port", 0),
    )
    return str(ServerAddress(host, port, given.get("path", "")))


async def open_link(pool: ConnectionPool) -> Link:
    """A connection for requests: redis-py connects and logs in, within the caller's deadline.

    Raises StoreError.
    """
    connection: Any = pool.make_connection()  # type: ignore[no-untyped-call]
    try:
        await connection.connect()
        if await connection.can_read():
            raise exceptions.InvalidResponse  # noqa: TRY301  # a server never speaks first
    except BaseException as error:
        await connection.disconnect(nowait=True)
        if not isinstance(error, Exception):
            raise
        raise _explain_login(error, pool) from None
    # The link now owns the socket, and the writer, which would close the socket when
    # garbage-collected. redis-py has no public way to do this.
    writer, connection._writer, connection._reader = connection._writer, None, None  # noqa: SLF001
    return Link(name_server(pool), writer)


class LibraryLink:
    """A `Link` over redis-py's own connections, for `?client=redis-py`."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._answer: Pending | None = None
        self._work: asyncio.Task[None] | None = None

    def is_usable(self) -> bool:
        """Whether no reply is pending; redis-py reconnects by itself."""
        return self._answer is None

    def send(self, packed: bytes, commands: int) -> Pending:
        """See `Link`."""
        answer = self._answer = Pending()
        self._work = asyncio.get_running_loop().create_task(
            self._exchange(packed, commands, answer)
        )
        return answer

    async def _exchange(self, packed: bytes, commands: int, answer: Pending) -> None:
        replies: list[RedisReply] = []
        error: StoreError | None = StoreError(
            f"{name_server(self._pool)}: the connection was dropped", kind="connection"
        )
        try:
            replies, error = await exchange(self._pool, packed, commands), None
        except StoreError as failed:
            error = failed
        finally:
            self._answer = None
            answer.settle(replies, error)  # last, because the caller may ask again at once

    def drop(self) -> None:
        """Cancel the exchange under way, and with it redis-py's connection.

        The link cannot be used again.
        """
        if self._work is not None:
            self._work.cancel()


async def open_library_link(pool: ConnectionPool) -> LibraryLink:
    """See `open_link`; the connection stays in redis-py's pool."""
    await exchange(pool, b"", 0)
    return LibraryLink(pool)


AnyLink: TypeAlias = Link | LibraryLink


async def exchange(
    pool: ConnectionPool, commands: Sequence[Command] | bytes, number: int | None = None
) -> list[RedisReply]:
    """Send commands, or `number` packed ones, in one write; raises StoreError.

    Returns:
        their replies, including error replies.
    """
    try:
        connection = await pool.get_connection()  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001  # a server can answer anything
        raise _explain_login(error, pool) from None
    try:
        packed = commands if isinstance(commands, bytes) else connection.pack_commands(commands)
        await connection.send_packed_command(packed)
        return [
            await _read_reply(connection)
            for _ in range(len(commands) if number is None else number)
        ]
    except Exception as error:  # noqa: BLE001  # as above
        await connection.disconnect(nowait=True)
        raise explain(error, name_server(pool)) from None
    finally:
        await pool.release(connection)


async def close_pool(pool: ConnectionPool) -> None:
    """Close connections, without waiting for their peers, as redis-py would."""
    with contextlib.suppress(TimeoutError, exceptions.RedisError):
        async with asyncio.timeout(LOOK_SECONDS):
            await pool.aclose()


async def _read_reply(connection: AbstractConnection) -> RedisReply:
    try:
        reply: RedisReply = await connection.read_response(disable_decoding=True)
    except exceptions.ResponseError as error:
        return error
    return reply


def _explain_login(error: Exception, pool: ConnectionPool) -> StoreError:
    refused = explain(error, name_server(pool))
    if refused.kind == "response" and any(
        pool.connection_kwargs.get(name) for name in ("password", "credential_provider")
    ):
        # The server's message may quote what it was sent.
        return StoreError(
            f"{name_server(pool)}: the server rejects this login, or has no such database",
            kind="auth",
        )
    return refused
