"""Connecting to a server and logging in."""
# interpreted: waits for a network

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass

from redis.credentials import CredentialProvider

from extproc.errors import StoreError
from extproc.store.link import ErrorReply, Link, RedisReply, ServerAddress, explain, explain_refusal


@dataclass(frozen=True, slots=True)
class Access:
    """Access to a server: credentials, which are read at every connect, and TLS; either is None if not used."""

    credentials: CredentialProvider | None = None
    tls: ssl.SSLContext | None = None
    database: int = 0


async def connect(address: ServerAddress, access: Access) -> Link:
    """Connect and log in, within the caller's deadline; raises StoreError if that fails."""
    link, loop = Link(address), asyncio.get_running_loop()
    try:
        if address.path:
            await loop.create_unix_connection(lambda: link, address.path)
        else:
            await loop.create_connection(lambda: link, address.host, address.port, ssl=access.tls)
        await _log_in(link, access)
    except BaseException as error:
        link.drop()
        if not isinstance(error, Exception):
            raise
        refused = explain(error, address)
        if access.credentials is not None and refused.kind == "response":
            # The server's message may quote what it was sent.
            refused = StoreError(f"{address}: the server rejects this login, or has no such database", kind="auth")
        raise refused from None
    return link


async def _log_in(link: Link, access: Access) -> None:
    """Send only the login: an old server does not know HELLO, and a user may lack the right to CLIENT SETINFO."""
    credentials = await access.credentials.get_credentials_async() if access.credentials is not None else ()
    if credentials:
        reply = await link.ask(("AUTH", *credentials))
        if isinstance(reply, ErrorReply) and "wrong number of arguments" in str(reply):  # before Redis 6, there were no users
            reply = await link.ask(("AUTH", credentials[-1]))
        _check(reply)
    if access.database:
        _check(await link.ask(("SELECT", access.database)))


def _check(reply: RedisReply) -> None:
    if isinstance(reply, ErrorReply):
        raise explain_refusal(reply)
    if reply != b"OK":
        raise ValueError("neither OK nor an error")
