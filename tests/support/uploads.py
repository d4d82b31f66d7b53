"""Uploads in every form of HTTP: with a length or chunked, with trailers, over HTTP/1.1 or 2."""

import contextlib
import http.client
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import h2.connection
import h2.events
import h2.settings

from tests.support.harness import PATIENCE, Answer

_FRAME = 16_384


class Upload(NamedTuple):
    """A request.

    Attributes:
        body: all of it.
        http2: with prior knowledge.
        length: the length is declared.
        trailers: it ends with trailers.
        pieces: number of pieces.
        pause: called before each piece.
    """

    path: str
    body: bytes
    http2: bool = False
    length: bool = False
    trailers: bool = False
    pieces: int = 3
    pause: Callable[[], object] = bool
    headers: Mapping[str, str] = {}

    def cut(self) -> list[bytes]:
        size = max(1, -(-len(self.body) // self.pieces))
        return [self.body[start : start + size] for start in range(0, len(self.body), size)]


def send(port: int, upload: Upload) -> Answer:
    """Send an upload to a port on a new connection. Status 0 is a reset stream."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        # Without this, each piece waits 40 ms for the one before
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _Http2(connection, upload).run() if upload.http2 else _send_http1(connection, upload)


def _send_http1(connection: socket.socket, upload: Upload) -> Answer:
    framing = (
        ("content-length", str(len(upload.body)))
        if upload.length
        else ("transfer-encoding", "chunked")
    )
    lines = [
        f"POST {upload.path} HTTP/1.1",
        "host: h",
        *(f"{name}: {value}" for name, value in (framing, *upload.headers.items())),
    ]
    head = "\r\n".join([*lines, "", ""]).encode()

    def send_all() -> None:
        with contextlib.suppress(OSError):  # refused before it was all sent
            connection.sendall(head)
            for piece in upload.cut():
                upload.pause()
                connection.sendall(
                    piece if upload.length else b"%x\r\n%b\r\n" % (len(piece), piece)
                )
            if not upload.length:
                connection.sendall(
                    b"0\r\n%b\r\n" % (b"x-trailer: 1\r\n" if upload.trailers else b"")
                )

    sending = threading.Thread(target=send_all)
    sending.start()
    response = http.client.HTTPResponse(connection, method="POST")
    try:
        response.begin()
        return Answer(
            response.status,
            {name.lower(): value for name, value in response.getheaders()},
            response.read(),
        )
    finally:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        sending.join()


class _Http2:
    def __init__(self, connection: socket.socket, upload: Upload) -> None:
        self._connection = connection
        self._upload = upload
        self._http = h2.connection.H2Connection()
        self._frames = [
            part[at : at + _FRAME] for part in upload.cut() for at in range(0, len(part), _FRAME)
        ]
        self._sent = False
        self._status, self._headers, self._body = 0, dict[str, str](), b""

    def run(self) -> Answer:
        http, upload = self._http, self._upload
        # Envoy resets a stream that is answered before its end, and what waits for a window then is
        # lost.
        http.initiate_connection()
        http.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 2**30})
        http.increment_flow_control_window(2**30)
        lines = {
            ":method": "POST",
            ":path": upload.path,
            ":authority": "h",
            ":scheme": "http",
            **upload.headers,
        }
        if upload.length:
            lines["content-length"] = str(len(upload.body))
        self._sent = not (self._frames or upload.trailers)
        http.send_headers(1, list(lines.items()), end_stream=self._sent)
        over = False
        while not over:
            self._send_on()
            self._connection.sendall(http.data_to_send())
            over = self._take(http.receive_data(self._connection.recv(1 << 20)))
        return Answer(self._status, self._headers, self._body)

    def _send_on(self) -> None:
        http, upload = self._http, self._upload
        while self._frames and http.local_flow_control_window(1) >= len(self._frames[0]):
            upload.pause()
            last = len(self._frames) == 1 and not upload.trailers
            http.send_data(1, self._frames.pop(0), end_stream=last)
            self._connection.sendall(http.data_to_send())
            self._sent = last
        if not self._frames and not self._sent:
            http.send_headers(1, [("x-trailer", "1")], end_stream=True)
            self._sent = True

    def _take(self, events: Sequence[h2.events.Event]) -> bool:
        for event in events:
            match event:
                case h2.events.ResponseReceived():
                    self._headers = {
                        name.decode(): value.decode()
                        for name, value in event.headers
                        if isinstance(name, bytes)
                    }
                    self._status = int(self._headers[":status"])
                case h2.events.DataReceived():
                    self._body += event.data
                    self._http.acknowledge_received_data(event.flow_controlled_length, 1)
                case h2.events.StreamEnded():
                    return True
                case h2.events.StreamReset() | h2.events.ConnectionTerminated():
                    self._status = 0
                    return True
        return False
