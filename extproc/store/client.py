"""Connections to servers are redis-py's: addresses, TLS, users, credential providers, Sentinel, versions of the protocol.

redis-py never tries anything again here, because a command that was sent may have counted: a failure is a StoreError, and the
breaker of its shard decides when the server is asked again. Nothing here blocks the event loop: names are resolved in threads,
and the context of TLS, which takes 40 ms, is made once at the start.
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
from redis.asyncio.connection import AbstractConnection, DefaultParser, RedisSSLContext, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool, SentinelManagedConnection, SentinelManagedSSLConnection
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig

from extproc.errors import StoreError
from extproc.store.link import Command, Link, RedisReply, ReplyBounds, ServerAddress, explain
from extproc.store.pending import Pending

LOOK_SECONDS = 0.25
"""How long a Sentinel, or a node that is asked for slots, has to connect and to answer before the next one is asked."""


class BoundedParser(DefaultParser):  # type: ignore[misc, valid-type]  # it is hiredis's
    """redis-py's parser with bounds: hiredis allocates memory for whatever a reply announces."""

    def __init__(self, socket_read_size: int) -> None:
        super().__init__(socket_read_size)
        self._bounds = ReplyBounds()

    async def read_response(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401  # see redis-py
        """See redis-py."""
        self._bounds.begin()
        return await super().read_response(*arguments, **options)

    async def read_from_socket(self) -> bool:
        """See redis-py; raises ValueError for more than a reply may have."""
        data = await self._stream.read(self._read_size)
        if not data:
            raise exceptions.ConnectionError("connection closed by the server")
        self._bounds.check(data)
        self._reader.feed(data)
        return True


class _UnixConnection(UnixDomainSocketConnection):
    async def on_connect(self) -> None:
        """See redis-py, which calls this before it logs in, and would do so twice."""


@dataclass(frozen=True)
class Access:
    """How servers are reached.

    Attributes:
        kind: redis-py's class of a connection.
        managed: the one for a primary that Sentinels name.
        arguments: of either.
        open: opens a connection for requests.
    """

    kind: type[AbstractConnection]
    managed: type[SentinelManagedConnection]
    arguments: dict[str, Any]
    open: Callable[[ConnectionPool], Awaitable[AnyLink]]

    def make_pool(self, address: ServerAddress) -> ConnectionPool:
        """Connections to a server."""
        place = {"path": address.path} if address.path else {"host": address.host, "port": address.port}
        return ConnectionPool(self.kind, **self.arguments, **place)

    def find_primary(self, sentinels: Sequence[ServerAddress], service: str) -> ConnectionPool:
        """Connections to the primary of a service that Sentinels watch over."""
        found = _Sentinels(self, sentinels)
        return SentinelConnectionPool(service, found, connection_class=self.managed, **self.arguments)  # type: ignore[no-untyped-call]

    def without(self, *left_out: str) -> Access:
        """The same without some arguments."""
        return replace(self, arguments={name: value for name, value in self.arguments.items() if name not in left_out})


def make_access(scheme: str, given: dict[str, Any], *, library: bool = False) -> Access:
    """Access with the arguments that redis-py has read from a URL of the scheme; with `library`, redis-py's for requests, too.

    Raises:
        RedisError, OSError, TypeError, ValueError: a value cannot be used; ssl.SSLError is an OSError.
    """
    tls = {name: value for name, value in given.items() if name.startswith("ssl_")}
    arguments = {
        "protocol": 2,  # an old server does not know HELLO
        **{name: value for name, value in given.items() if name not in tls},
        "driver_info": None,  # a user may lack the right to CLIENT SETINFO
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
        "parser_class": BoundedParser,
        "retry": Retry(NoBackoff(), 0),
        "socket_read_size": 262_144,  # hiredis looks at a line without an end again at each read
        "socket_timeout": None,  # callers have deadlines; in Python 3.11, redis-py's may swallow a cancellation
    }
    kind: type[AbstractConnection] = Connection
    managed = SentinelManagedConnection
    if scheme == "unix":
        kind = _UnixConnection
    elif scheme == "rediss":
        context = _make_context(tls)
        kind, managed = _share_context(SSLConnection, context), _share_context(SentinelManagedSSLConnection, context)
    kind(**arguments)
    return Access(kind, managed, arguments, open_library_link if library else open_link)


def _make_context(options: dict[str, Any]) -> RedisSSLContext:
    """The context of TLS as redis-py makes it, but the CAs that are named are trusted instead of the system's."""
    made = SSLConnection(**options).ssl_context
    context = ssl.create_default_context(cafile=made.ca_certs, capath=made.ca_path, cadata=made.ca_data)
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
    """Sentinels, whom redis-py's pool asks at every connect; another one first each time, as one may be cut off."""

    def __init__(self, access: Access, places: Sequence[ServerAddress]) -> None:
        # Some want the login of the servers, and others refuse any.
        self._ways = access.without("db", "username", "password", "credential_provider"), access.without("db")
        self._places = list(places)

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """See redis-py's `Sentinel`, which does not say why one of them cannot be asked; raises StoreError."""
        errors: dict[ServerAddress, StoreError] = {}
        for access in self._ways:
            for place in list(self._places):
                self._places.append(self._places.pop(0))
                connection: Any = access.make_pool(place).make_connection()  # type: ignore[no-untyped-call]
                try:
                    async with asyncio.timeout(LOOK_SECONDS):
                        await connection.send_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service_name)
                        host, port = await connection.read_response() or (None, 0)
                    if host is not None:
                        return host.decode(), int(port)
                    errors[place] = StoreError(f"{place} does not watch {service_name}", kind="sentinel")
                except Exception as error:  # noqa: BLE001  # a server can answer anything
                    errors[place] = explain(error, str(place))
                finally:
                    await connection.disconnect(nowait=True)
        raise StoreError(f"no Sentinel knows the primary: {'; '.join(map(str, errors.values()))}", kind="sentinel")


def name_server(pool: ConnectionPool) -> str:
    """The server's address, for messages."""
    given = pool.connection_kwargs
    host, port = getattr(pool, "master_address", None) or (given.get("host", ""), given.get("port", 0))
    return str(ServerAddress(host, port, given.get("path", "")))


async def open_link(pool: ConnectionPool) -> Link:
    """A connection for requests: redis-py connects and logs in, within the caller's deadline. Raises StoreError."""
    connection: Any = pool.make_connection()  # type: ignore[no-untyped-call]
    try:
        await connection.connect()
        if await connection.can_read():
            raise exceptions.InvalidResponse  # noqa: TRY301  # a server speaks when it is asked
    except BaseException as error:
        await connection.disconnect(nowait=True)
        if not isinstance(error, Exception):
            raise
        raise _explain_login(error, pool) from None
    # From here on, the socket is the link's. Its writer would close it if it were collected.
    writer, connection._writer, connection._reader = connection._writer, None, None  # noqa: SLF001  # there is no other way
    return Link(name_server(pool), writer)


class LibraryLink:
    """What `Link` does, over redis-py's own connections, for people who prefer the library: `?client=redis-py`."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._answer: Pending | None = None
        self._work: asyncio.Task[None] | None = None

    def is_usable(self) -> bool:
        """Whether no reply is pending; a connection that was lost is opened again."""
        return self._answer is None

    def send(self, packed: bytes, commands: int) -> Pending:
        """See `Link`."""
        answer = self._answer = Pending()
        self._work = asyncio.get_running_loop().create_task(self._exchange(packed, commands, answer))
        return answer

    async def _exchange(self, packed: bytes, commands: int, answer: Pending) -> None:
        replies: list[RedisReply] = []
        error: StoreError | None = StoreError(f"{name_server(self._pool)}: the connection was dropped", kind="connection")
        try:
            replies, error = await exchange(self._pool, packed, commands), None
        except StoreError as failed:
            error = failed
        finally:
            self._answer = None
            answer.settle(replies, error)  # last, because the caller may ask again at once

    def drop(self) -> None:
        """Give up what is under way, whose connection redis-py then closes; this link is not used again."""
        if self._work is not None:
            self._work.cancel()


async def open_library_link(pool: ConnectionPool) -> LibraryLink:
    """See `open_link`; redis-py's pool keeps what it opens."""
    await exchange(pool, b"", 0)
    return LibraryLink(pool)


AnyLink: TypeAlias = Link | LibraryLink


async def exchange(pool: ConnectionPool, commands: Sequence[Command] | bytes, number: int | None = None) -> list[RedisReply]:
    """Send commands, or a `number` of packed ones, over a connection of redis-py's, in one write; raises StoreError.

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
        return [await _read_reply(connection) for _ in range(len(commands) if number is None else number)]
    except Exception as error:  # noqa: BLE001  # as above
        await connection.disconnect(nowait=True)
        raise explain(error, name_server(pool)) from None
    finally:
        await pool.release(connection)


async def close_pool(pool: ConnectionPool) -> None:
    """Close connections, whatever their peers do: redis-py would wait for them."""
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
    if refused.kind == "response" and any(pool.connection_kwargs.get(name) for name in ("password", "credential_provider")):
        # The server's message may quote what it was sent.
        return StoreError(f"{name_server(pool)}: the server rejects this login, or has no such database", kind="auth")
    return refused
