"""The admin server: Starlette on uvicorn, in a separate thread and event loop.

So a scrape never delays a request, and a stalled data path can still be reported.
"""

from __future__ import annotations

import asyncio
import logging
import threading

from starlette.types import ASGIApp
from uvicorn import Config
from uvicorn import Server as Uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from extproc.errors import UsageError
from extproc.settings import Address
from extproc.sockets import open_listening_socket

CLIENT_SECONDS = 30
"""Seconds. A client that has not completed a request and its answer by then is dropped, even if it sends or reads bytes."""

_MAX_CLIENTS = 256
"""Maximum number of connections. Above it, the one that has waited longest for an answer is dropped, so probes get through."""

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
            log_level=logging.ERROR,  # clients' errors are not worth a line each
            access_log=False,
            server_header=False,
            proxy_headers=False,  # the client is the peer, whatever a header says
            timeout_graceful_shutdown=1,
        )
        self._server = Uvicorn(config)
        self._thread: threading.Thread | None = None

    def start(self, address: Address, socket_path: str = "") -> str:
        """Listen on TCP and, if a path is given, on a Unix socket that only this user may open; returns the real TCP address.

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
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve(sockets)), name="admin", daemon=True)
        self._thread.start()
        return f"{address.text.rpartition(':')[0]}:{sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        """Stop listening, and end open requests."""
        if self._thread is not None:
            self._server.should_exit = True
            self._thread.join()


class _Protocol(H11Protocol):
    """uvicorn's protocol, with bounds for clients that are slow, silent or many."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the base class's
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
