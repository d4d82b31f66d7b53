"""The admin server: Starlette on uvicorn, in a separate thread with its own event loop.

A scrape never delays a request, and a stalled data path can still be reported.
"""

from __future__ import annotations

import asyncio
import logging
import threading

from starlette.types import ASGIApp
from uvicorn import Config, Server as Uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from extproc.errors import UsageError
from extproc.settings import Address
from extproc.sockets import open_listening_socket

CLIENT_SECONDS = 30
"""Timeout for a request and its response, even if the client keeps sending or reading bytes."""

_MAX_CLIENTS = 256
"""Maximum number of connections.

Beyond it, the oldest request's connection is dropped, so that health probes succeed.
"""

_OWNER_ONLY = 0o600


class AdminServer:
    """Serves an application until it is stopped."""

    def __init__(self, app: ASGIApp) -> None:
        config = Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.ERROR,  # no line for each client error
            access_log=False,
            server_header=False,
            proxy_headers=False,  # the client's address is the peer's, not a header's
            timeout_graceful_shutdown=1,
        )
        self._server = Uvicorn(config)
        self._thread: threading.Thread | None = None

    def start(self, address: Address, socket_path: str = "") -> str:
        """Listen on TCP and, for this user only, on a Unix socket; returns the bound TCP address.

        Raises UsageError if `address` is not a TCP address, and LoopguardError if listening fails.
        """
        if address.is_unix:
            raise UsageError(f"--admin must be HOST:PORT, not {address.text!r}")
        sockets = [open_listening_socket(address, "--admin")]
        try:
            if socket_path:
                beside = Address(f"unix:{socket_path}")
                sockets.append(open_listening_socket(beside, "--admin-socket", mode=_OWNER_ONLY))
        except BaseException:
            sockets[0].close()
            raise
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve(sockets)), name="admin", daemon=True
        )
        self._thread.start()
        return f"{address.text.rpartition(':')[0]}:{sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        """Stop listening and end open requests."""
        if self._thread is not None:
            self._server.should_exit = True
            self._thread.join()


class _Protocol(H11Protocol):
    """uvicorn's protocol, with bounds for clients that are slow, silent or many."""

    # As the base class's
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._allow_time()
        others = [other for other in self.connections if isinstance(other, _Protocol)]
        if len(others) > _MAX_CLIENTS:
            min(others, key=lambda other: other.deadline.when()).transport.abort()

    def on_response_complete(self) -> None:
        self.deadline.cancel()
        self._allow_time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self.deadline.cancel()
        super().connection_lost(exc)

    def _allow_time(self) -> None:
        self.deadline = self.loop.call_later(CLIENT_SECONDS, self.transport.abort)
