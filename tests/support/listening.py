"""HTTP servers on loopback."""

import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import trustme

CA = trustme.CA()


class Handler(BaseHTTPRequestHandler):
    disable_nagle_algorithm = True

    # The base class's name
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def serve(self) -> None:
        raise NotImplementedError

    def _serve(self) -> None:
        self.serve()

    # The base class's names
    do_GET = do_POST = do_PUT = do_HEAD = do_OPTIONS = do_DELETE = _serve  # noqa: N815

    def read_body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length") or 0))


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, handler: type[Handler], *, tls: bool | ssl.SSLContext = False) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.address = f"127.0.0.1:{self.server_address[1]}"
        if tls is True:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            CA.issue_cert("127.0.0.1").configure_cert(tls)
        if tls:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients hang up as they please

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
