"""The admin endpoints: /metrics, /healthz, /readyz, /policies.

They run in threads of their own, so that a scrape never holds up a request, and a stalled event loop can still be told.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, NamedTuple

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from extproc.errors import LoopguardError, UsageError
from extproc.metrics import Metrics
from extproc.settings import Address

_CLIENT_SECONDS = 10
"""A client that says nothing for that long is dropped."""


class Page(NamedTuple):
    """One answer.

    Attributes:
        status: of HTTP.
        body: sent as JSON.
    """

    status: HTTPStatus
    body: dict[str, Any]


class Admin:
    """An HTTP server in threads of its own."""

    def __init__(self, metrics: Metrics, pages: dict[str, Callable[[], Page]]) -> None:
        """Serve `/metrics` from `metrics` and every path of `pages`."""
        self._metrics = metrics
        self._pages = pages
        self._server: ThreadingHTTPServer | None = None

    def start(self, address: Address) -> str:
        """Listen and serve.

        Returns:
            `host:port`, with the real port where 0 was asked for.

        Raises:
            UsageError: the address is no TCP address.
            LoopguardError: the address cannot be listened on.
        """
        if address.is_unix:
            raise UsageError(f"--admin must be HOST:PORT, not {address.text!r}")
        server = _server_class(address.host)
        try:
            self._server = server((address.host, address.port), self._handler())
        except OSError as error:
            reason = error.strerror or str(error)
            raise LoopguardError(f"cannot listen on {address.text}: {reason}; choose another with --admin") from None
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="admin", daemon=True).start()
        return f"{address.text.rpartition(':')[0]}:{self._server.server_address[1]}"

    def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        metrics, pages = self._metrics, self._pages

        class Handler(BaseHTTPRequestHandler):
            timeout = _CLIENT_SECONDS
            server_version = "loopguard"
            sys_version = ""

            def do_GET(self) -> None:  # the base class's name
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._send(HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(metrics.registry))
                elif path in pages:
                    page = _page(pages[path])
                    self._send(page.status, "application/json", json.dumps(page.body, indent=2).encode() + b"\n")
                else:
                    known = ", ".join(["/metrics", *pages])
                    self._send(HTTPStatus.NOT_FOUND, "text/plain", f"not found; there are {known}\n".encode())

            do_HEAD = do_GET  # noqa: N815  # the base class's name

            def _send(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-type", content_type)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
                """Scrapes and probes are not worth a line each."""

        return Handler


def _page(make: Callable[[], Page]) -> Page:
    try:
        return make()
    except Exception as error:  # noqa: BLE001  # an answer that says so helps more than a connection that closes
        return Page(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": str(error)})


def _server_class(host: str) -> type[ThreadingHTTPServer]:
    class Server(ThreadingHTTPServer):
        daemon_threads = True
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def server_bind(self) -> None:
            """Without the base class's look-up of its own name, which takes seconds where DNS is down."""
            TCPServer.server_bind(self)

        def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
            """A client that hangs up halfway is no error of ours."""

    return Server
