"""Asks another process for its health (grpc.health.v1), on a connection of its own: one call, in blocking code.

It needs no gRPC library, which would be the largest package of an installation.
"""
# interpreted: asks once

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Sequence

from extproc.errors import LoopguardError
from extproc.pb.health_pb2 import HealthCheckResponse
from extproc.settings import Address
from extproc.transport.grpc import frame_message
from extproc.transport.headers import Cache, Decoder, encode
from extproc.transport.health import HEALTH
from extproc.transport.http2 import make_head

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _CONTINUATION = 0, 1, 3, 4, 6, 7, 9
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_PADDED, _PRIORITY = 8, 0x20
_STREAM = 1
_HEAD = 9
_MOST = 2**14
"""Largest frame that a server may send, as long as it is allowed no larger ones (RFC 9113 section 4.2)."""

Fields = Sequence[tuple[str, str]]

_STATUSES = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)


class NoAnswerError(Exception):
    """Why there is none."""


def ask_health(address: Address, timeout: float, context: ssl.SSLContext | None = None, server_name: str = "") -> str:
    """Ask within `timeout` seconds; returns the status, such as `SERVING`, or why there is no answer.

    Args:
        address: where the server listens.
        timeout: in seconds.
        context: for mutual TLS.
        server_name: in the server's certificate; default: the host.
    """
    deadline = time.monotonic() + timeout
    try:
        with _connect(address, timeout) as plain:
            if context is None:
                return _ask(plain, deadline)
            with context.wrap_socket(plain, server_hostname=server_name or address.host or "localhost") as encrypted:
                return _ask(encrypted, deadline)
    except TimeoutError:
        return f"DEADLINE_EXCEEDED: no answer within {timeout:g} s"
    except (OSError, NoAnswerError, LoopguardError) as error:
        return f"UNAVAILABLE: {error}"


def _connect(address: Address, timeout: float) -> socket.socket:
    if not address.is_unix:
        return socket.create_connection((address.host, address.port), timeout)
    made = socket.socket(socket.AF_UNIX)
    try:
        made.settimeout(timeout)
        made.connect(address.text.removeprefix("unix:"))
    except BaseException:
        made.close()
        raise
    return made


def _ask(connected: socket.socket, deadline: float) -> str:
    asked = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", f"/{HEALTH}/Check".encode()), (b":authority", b"health")]
    block = encode([*asked, (b"te", b"trailers"), (b"content-type", b"application/grpc")])
    message = frame_message(b"")
    connected.sendall(_PREFACE + _write(_SETTINGS, 0, 0, b"") + _write(_HEADERS, _END_HEADERS, _STREAM, block))
    connected.sendall(_write(_DATA, _END_STREAM, _STREAM, message))
    return _read_answer(connected, deadline)


def write_http2_request(headers: Fields, body: bytes, trailers: Fields, *, ends: bool = True) -> bytes:
    """A request on a new connection; the body is at most a frame long. Unless it `ends`, its stream stays open."""
    parts = [(_HEADERS, _END_HEADERS, _encode(headers))]
    if body:
        parts.append((_DATA, 0, body))
    if trailers:
        parts.append((_HEADERS, _END_HEADERS, _encode(trailers)))
    frames = [
        _write(kind, flags | (_END_STREAM if ends and number == len(parts) else 0), _STREAM, payload)
        for number, (kind, flags, payload) in enumerate(parts, 1)
    ]
    return _PREFACE + _write(_SETTINGS, 0, 0, b"") + b"".join(frames)


def _encode(headers: Fields) -> bytes:
    return encode([(name.encode(), value.encode("utf-8", "surrogateescape")) for name, value in headers])


def read_http2_headers(connected: socket.socket, deadline: float) -> dict[bytes, bytes]:
    """The headers of the answer; raises NoAnswerError if there is none."""
    decoder, block = Decoder(Cache()), b""
    while True:
        kind, flags, _, payload = _read_frame(connected, deadline)
        _acknowledge(connected, kind, flags, payload)
        if kind in (_HEADERS, _CONTINUATION):
            block += _strip(flags, payload) if kind == _HEADERS else payload
            if flags & _END_HEADERS:
                found = {field.name: field.value for field in decoder.decode(block).fields}
                if not found.get(b":status", b"").startswith(b"1"):
                    return found
                block = b""


def _acknowledge(connected: socket.socket, kind: int, flags: int, payload: bytes) -> None:
    """Answer a frame of the connection; raises NoAnswerError if the server has ended the call."""
    if kind in (_SETTINGS, _PING) and not flags & _ACK:
        connected.sendall(_write(kind, _ACK, 0, payload if kind == _PING else b""))
    elif kind in (_RESET, _GOAWAY):
        raise NoAnswerError("the server ended the call")


def _read_answer(connected: socket.socket, deadline: float) -> str:
    decoder = Decoder(Cache())
    data, block, ended = b"", b"", False
    told: dict[bytes, bytes] = {}
    while True:
        kind, flags, number, payload = _read_frame(connected, deadline)
        _acknowledge(connected, kind, flags, payload)
        if kind == _DATA and number == _STREAM:
            data += _strip(flags, payload)
        elif kind in (_HEADERS, _CONTINUATION):
            block += _strip(flags, payload) if kind == _HEADERS else payload
            if flags & _END_HEADERS:
                told |= {field.name: field.value for field in decoder.decode(block).fields}
                block = b""
        ended = ended or (bool(flags & _END_STREAM) and kind in (_DATA, _HEADERS))
        if b"grpc-status" in told or (ended and not block):  # not amid a block, which continues in another frame
            return _name_status(told, data)


def _name_status(told: dict[bytes, bytes], data: bytes) -> str:
    given = told.get(b"grpc-status", b"")
    if given != b"0":
        number = int(given) if given.isdigit() and len(given) <= 2 else 2  # noqa: PLR2004  # digits; UNKNOWN
        name = _STATUSES[number] if number < len(_STATUSES) else str(number)
        said = told.get(b"grpc-message", b"") or b"HTTP status " + told.get(b":status", b"missing")
        return f"{name}: {said.decode('ascii', 'replace')}"
    answer = HealthCheckResponse.FromString(data[len(frame_message(b"")) :])
    return HealthCheckResponse.ServingStatus.Name(answer.status)


def _read_frame(connected: socket.socket, deadline: float) -> tuple[int, int, int, bytes]:
    head = _read(connected, _HEAD, deadline)
    size = int.from_bytes(head[:3])
    if size > _MOST:
        raise NoAnswerError("the server does not speak HTTP/2")
    kind, flags, number = struct.unpack("!BBI", head[3:])
    return kind, flags, number, _read(connected, size, deadline)


def _read(connected: socket.socket, size: int, deadline: float) -> bytes:
    found = b""
    while len(found) < size:
        connected.settimeout(max(deadline - time.monotonic(), 0.001))
        part = connected.recv(size - len(found))
        if not part:
            raise NoAnswerError("the server closed the connection")
        found += part
    return found


def _strip(flags: int, payload: bytes) -> bytes:
    """A frame's payload without padding and priority (RFC 9113 sections 6.1 and 6.2)."""
    if flags & _PADDED:
        payload = payload[1 : len(payload) - payload[0]]
    return payload[5:] if flags & _PRIORITY else payload


def _write(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    return make_head(len(payload), kind, flags) + number.to_bytes(4) + payload
