from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import trustme

CA = trustme.CA()


class Receiver:
    """A webhook over TLS. It answers with these statuses in turn, and repeats the last one."""

    def __init__(self, statuses: Sequence[int]) -> None:
        self.batches: list[tuple[dict[str, str], bytes]] = []
        self.statuses = list(statuses)
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.batches.append(({name.lower(): value for name, value in self.headers.items()}, body))
                statuses = receiver.statuses
                self.send_response(statuses.pop(0) if len(statuses) > 1 else statuses[0])
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        CA.issue_cert("127.0.0.1").configure_cert(context)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"https://127.0.0.1:{self._server.server_address[1]}/hook"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def receiving(*statuses: int) -> Iterator[Receiver]:
    receiver = Receiver(statuses)
    try:
        yield receiver
    finally:
        receiver.close()
