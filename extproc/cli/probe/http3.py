"""Sends a request over HTTP/3, on a connection of its own. `aioquic`, which knows QUIC and opens no sockets, is optional."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from aioquic.h3.connection import H3_ALPN, H3Connection
from aioquic.h3.events import HeadersReceived
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import ConnectionTerminated, HandshakeCompleted, QuicEvent, StreamReset

from extproc.transport.ask_health import NoAnswerError

_HANDSHAKE_SECONDS = 5.0
_DATAGRAM = 2**16

logging.getLogger("quic").setLevel(logging.CRITICAL)  # the table has the error


class Http3Request(NamedTuple):
    """A request.

    Attributes:
        headers: pseudo-headers first.
        ends: otherwise, its stream stays open.
    """

    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    trailers: Sequence[tuple[bytes, bytes]]
    ends: bool

    def write(self, connection: H3Connection, stream: int) -> None:
        """Put it on a stream."""
        connection.send_headers(stream, [*self.headers], end_stream=self.ends and not (self.body or self.trailers))
        if self.body:
            connection.send_data(stream, self.body, end_stream=self.ends and not self.trailers)
        if self.trailers:
            connection.send_headers(stream, [*self.trailers], end_stream=self.ends)


def exchange(address: tuple[str, int], server_name: str, request: Http3Request, seconds: float) -> dict[bytes, bytes]:
    """Send a request and wait for the headers of its answer.

    Args:
        address: host and UDP port.
        server_name: in the server's certificate.
        request: to send.
        seconds: to wait at most.

    Raises:
        NoAnswerError: the server ended the call.
        OSError: no answer came in time, or there is no way to the server.
    """
    failure = OSError(f"{address[0]} has no address")
    for family, kind, _, _, peer in socket.getaddrinfo(*address, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind) as connected:
            try:
                connected.connect(peer)
                return _exchange(connected, server_name, request, seconds)
            except OSError as error:
                failure = error
    raise failure


def _exchange(connected: socket.socket, server_name: str, request: Http3Request, seconds: float) -> dict[bytes, bytes]:
    paths = ssl.get_default_verify_paths()
    quic = QuicConnection(
        configuration=QuicConfiguration(
            alpn_protocols=H3_ALPN, server_name=server_name, cafile=paths.cafile, capath=paths.capath
        )
    )
    connection: H3Connection | None = None
    try:
        for event in _list_events(connected, quic, seconds):
            if isinstance(event, HandshakeCompleted):
                connection = H3Connection(quic)
                request.write(connection, quic.get_next_available_stream_id())
            elif isinstance(event, ConnectionTerminated):
                raise NoAnswerError(event.reason_phrase or f"QUIC error {event.error_code}")
            elif isinstance(event, StreamReset):
                raise NoAnswerError("the server ended the call")
            for told in connection.handle_event(event) if connection is not None else ():
                if isinstance(told, HeadersReceived) and not dict(told.headers)[b":status"].startswith(b"1"):
                    return dict(told.headers)
        raise TimeoutError if connection is not None else OSError("no answer over UDP")
    finally:
        quic.close()
        with contextlib.suppress(OSError):
            _flush(connected, quic)


def _list_events(connected: socket.socket, quic: QuicConnection, seconds: float) -> Iterator[QuicEvent]:
    """What happens on a new connection until it has taken too long."""
    peer = connected.getpeername()
    begun = time.monotonic()
    quic.connect(peer, begun)
    deadline = begun + min(seconds, _HANDSHAKE_SECONDS)
    while (now := time.monotonic()) < deadline:
        _flush(connected, quic)
        connected.settimeout(max(min(quic.get_timer() or deadline, deadline) - now, 0.001))
        try:
            quic.receive_datagram(connected.recv(_DATAGRAM), peer, time.monotonic())
        except TimeoutError:
            quic.handle_timer(time.monotonic())
        while (event := quic.next_event()) is not None:
            if isinstance(event, HandshakeCompleted):
                deadline = begun + seconds
            yield event


def _flush(connected: socket.socket, quic: QuicConnection) -> None:
    for datagram, _ in quic.datagrams_to_send(time.monotonic()):
        connected.send(datagram)
