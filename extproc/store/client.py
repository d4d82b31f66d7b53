"""redis-py's connections, used in a way that repeats nothing.

redis-py knows the wire, TLS and how to log in. What it would do beyond that is off. A command that was sent may have counted,
so it retries nothing. The store's deadlines end whatever takes too long, so it has no timeouts and no health checks. A user may
lack the right to CLIENT SETINFO, and an old server does not know HELLO, so it sends neither.
"""
# interpreted: waits for a network

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any

import hiredis
from redis._parsers import _AsyncHiredisParser
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import (
    ConnectionError,  # noqa: A004  # not an OSError
)

from extproc.errors import StoreError
from extproc.store.link import Address, Bounds, Link, explain

_READ_BYTES = 65_536


class _WaryParser(_AsyncHiredisParser):
    """redis-py's parser, with an end; what comes after the login is read by `Link`."""

    def __init__(self, socket_read_size: int) -> None:
        """See redis-py."""
        super().__init__(socket_read_size)
        self.bounds = Bounds()

    async def read_response(self, disable_decoding: bool = False, push_request: bool = False) -> Any:  # noqa: ANN401, FBT001, FBT002  # as redis-py has it
        """See redis-py."""
        self.bounds.begin()
        return await super().read_response(disable_decoding, push_request)

    async def read_from_socket(self) -> bool:
        """See redis-py.

        Raises:
            InvalidResponse: it is too much.
        """
        data = await self._stream.read(self._read_size)  # type: ignore[union-attr]  # there while connected
        if not data:
            raise ConnectionError("connection closed by the server")
        self.bounds.check(data)
        self.reader.feed(data)
        return True

    @property
    def reader(self) -> hiredis.Reader:
        """Where the bytes go, while connected."""
        return self._reader  # type: ignore[return-value]  # redis-py's word for one that is not connected


@dataclass(frozen=True, slots=True)
class Access:
    """How to get into a server.

    Attributes:
        credentials: asked at every connect; None where the server wants none.
        tls: None for a connection in the clear.
        database: to select.
    """

    credentials: CredentialProvider | None = None
    tls: ssl.SSLContext | None = None
    database: int = 0


async def connect(place: Address, access: Access) -> Link:
    """Connect and log in.

    Raises:
        StoreError: no server, or it will not have us.
    """
    parser = _WaryParser(_READ_BYTES)
    connection = _make_connection(place, access, parser)
    try:
        await connection.connect()  # type: ignore[no-untyped-call]  # redis-py's own types say little
        if await connection.can_read():
            raise StoreError(f"{place}: more answers than questions, or the end", kind="response")  # noqa: TRY301  # handled alike
    except BaseException as error:
        await connection.disconnect(nowait=True)
        if not isinstance(error, Exception):
            raise
        refused = explain(error, place)
        if access.credentials is not None and refused.kind == "response":
            # What the server says may quote what it was sent.
            refused = StoreError(f"{place}: the server does not take this login, or has no such database", kind="auth")
        raise refused from None
    return Link(place, connection, parser.reader, parser.bounds)


def _make_connection(place: Address, access: Access, parser: _WaryParser) -> AbstractConnection:
    more: dict[str, Any] = {
        "db": access.database,
        "credential_provider": access.credentials,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "parser_class": lambda socket_read_size: parser,  # noqa: ARG005  # as redis-py calls it
        "driver_info": None,
        "socket_timeout": None,
        "socket_connect_timeout": None,
        "health_check_interval": 0,
    }
    if place.path:  # redis-py logs in while it opens a socket, and a second time where nothing else is to be done then
        return UnixDomainSocketConnection(path=place.path, redis_connect_func=lambda _: None, **more)
    if access.tls is None:
        return Connection(host=place.host, port=place.port, **more)
    made = SSLConnection(host=place.host, port=place.port, **more)
    made.ssl_context.context = access.tls  # its own would trust the system's authorities beside the one that was named
    return made
