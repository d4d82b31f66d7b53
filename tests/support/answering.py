"""HTTP servers that give any answer, also hostile ones."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from tests.support.receivers import CA


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    write: Callable[[], Iterator[bytes]]


def reply(body: object, status: int = 200) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Answer(status, {"content-type": "application/json"}, lambda: iter([data]))


def flood() -> Iterator[bytes]:
    yield b'{"a":"'
    while True:
        yield b"x" * 2**16


@contextmanager
def answering(answer: Answer | Mapping[str, Answer], *, tls: bool = False) -> Iterator[str]:
    """A server that gives one answer to every request, or one for each path. Yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            status, headers, write = answer if isinstance(answer, Answer) else answer[self.path.partition("?")[0]]
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                for piece in write():
                    self.wfile.write(piece)
            except OSError:
                """The client has had enough."""

        do_POST = do_DELETE = do_GET  # noqa: N815  # the base class's names

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        CA.issue_cert("127.0.0.1").configure_cert(context)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
