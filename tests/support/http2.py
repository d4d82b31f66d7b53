"""Frames of an HTTP/2 client, and the core's events."""

from typing import TypeAlias

from extproc.transport import http2
from extproc.transport.headers import encode
from extproc.transport.http2 import (
    Connection,
    DataReceived,
    Http2Limits,
    Http2Stream,
    Pool,
    RequestReceived,
)

REQUEST = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/x"),
    (b":authority", b"h"),
    (b"te", b"trailers"),
)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload
    )


def headers(
    stream: int = 1,
    flags: int = http2.END_HEADERS,
    pairs: tuple[tuple[bytes, bytes], ...] = REQUEST,
) -> bytes:
    return frame(http2.HEADERS, flags, stream, encode(pairs))


HELLO = http2.PREFACE + frame(http2.SETTINGS, 0, 0)


Seen: TypeAlias = tuple[object, ...]


def request(
    stream: int, *, ended: bool = False, pairs: tuple[tuple[bytes, bytes], ...] = REQUEST
) -> Seen:
    return ("request", stream, pairs, ended)


def data(stream: int, content: bytes, *, ended: bool = False) -> Seen:
    return ("data", stream, content, ended)


def reset(stream: int, code: int) -> Seen:
    return ("reset", stream, code)


def receive(
    connection: Connection, received: bytes, streams: dict[int, Http2Stream] | None = None
) -> list[Seen]:
    """All events until nothing is left to do. New streams are added to `streams`."""
    seen: list[Seen] = []
    connection.receive(received)
    while True:
        event = connection.next_event()
        if isinstance(event, RequestReceived):
            pairs = tuple((field.name, field.value) for field in event.headers.fields)
            seen.append(request(event.stream.number, ended=event.ended, pairs=pairs))
            if streams is not None:
                streams[event.stream.number] = event.stream
        elif isinstance(event, DataReceived):
            seen.append(data(event.stream.number, event.data, ended=event.ended))
        elif event is not None:
            seen.append(reset(event.number, event.code))
        elif connection.unfinished:
            connection.receive(b"")
        else:
            return seen


def opened(
    *more: bytes, limits: Http2Limits | None = None, pool: Pool | None = None
) -> tuple[Connection, list[Seen], dict[int, Http2Stream]]:
    """A connection that has received a preface, settings and these bytes."""
    connection = Connection(limits, pool=pool)
    streams: dict[int, Http2Stream] = {}
    return connection, receive(connection, HELLO + b"".join(more), streams), streams


def sent(connection: Connection) -> list[tuple[int, int, int, bytes]]:
    """Frames that the connection wants to send: type, flags, stream, payload."""
    data, frames = connection.data_to_send(), []
    while data:
        size = int.from_bytes(data[:3], "big")
        frames.append((data[3], data[4], int.from_bytes(data[5:9], "big"), data[9 : 9 + size]))
        data = data[9 + size :]
    return frames
