"""The HTTP/2 core: bytes in, events out, without a socket; its peer is python-hyper's h2 where a real one is wanted."""

from __future__ import annotations

import struct

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st

from extproc.transport import http2
from extproc.transport.http2 import Connection, ConnectionEnded, DataReceived, Event, RequestReceived, StreamReset, encode

REQUEST = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/x"), (b":authority", b"h"), (b"te", b"trailers"))


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def headers(stream: int = 1, flags: int = http2.END_HEADERS, pairs: tuple[tuple[bytes, bytes], ...] = REQUEST) -> bytes:
    """A HEADERS frame."""
    return frame(http2.HEADERS, flags, stream, encode(pairs))


HELLO = http2.PREFACE + frame(http2.SETTINGS, 0, 0)


def opened(*more: bytes) -> tuple[Connection, list[Event]]:
    """A connection that has received a preface, settings and more."""
    connection = Connection()
    return connection, connection.receive(HELLO + b"".join(more))


def sent(connection: Connection) -> list[tuple[int, int, int, bytes]]:
    """The frames that the connection wants sent: type, flags, stream, payload."""
    data, frames = connection.take(), []
    while data:
        size = int.from_bytes(data[:3], "big")
        frames.append((data[3], data[4], int.from_bytes(data[5:9], "big"), data[9 : 9 + size]))
        data = data[9 + size :]
    return frames


CONVERSATION = HELLO + b"".join(
    [
        headers(1),
        frame(http2.DATA, http2.PADDED, 1, b"\x03one\0\0\0"),
        frame(http2.PING, 0, 0, b"12345678"),
        frame(0x77, 0, 1, b"an extension"),
        frame(http2.DATA, http2.END_STREAM, 1, b"two"),
        frame(http2.HEADERS, http2.END_STREAM, 3, encode(REQUEST)[:10]),
        frame(http2.CONTINUATION, 0, 3, encode(REQUEST)[10:20]),
        frame(http2.CONTINUATION, http2.END_HEADERS, 3, encode(REQUEST)[20:]),
        frame(http2.HEADERS, http2.END_HEADERS | http2.HAS_PRIORITY, 5, b"\0\0\0\0\x10" + encode(REQUEST)),
        frame(http2.PRIORITY, 0, 5, b"\0\0\0\x01\x10"),
        headers(5, http2.END_HEADERS | http2.END_STREAM, ((b"trailer", b"x"),)),
        headers(7),
        frame(http2.RST_STREAM, 0, 7, b"\0\0\0\x08"),
    ]
)
EVENTS = [
    RequestReceived(1, REQUEST, ended=False),
    DataReceived(1, b"one", ended=False),
    DataReceived(1, b"two", ended=True),
    RequestReceived(3, REQUEST, ended=True),
    RequestReceived(5, REQUEST, ended=False),
    DataReceived(5, b"", ended=True),
    RequestReceived(7, REQUEST, ended=False),
    StreamReset(7, http2.CANCEL),
]


@pytest.mark.parametrize("step", [1, 2, 7, 9, 100, 10_000])
def test_however_the_bytes_are_cut_the_events_are_the_same(step: int) -> None:
    """A conversation read whole, byte by byte or in pieces gives the same events, and trailing bytes wait for their rest."""
    connection, events = Connection(), []
    data = CONVERSATION + headers(9)[:-1]

    for start in range(0, len(data), step):
        events += connection.receive(data[start : start + step])

    assert events == EVENTS
    assert connection.receive(headers(9)[-1:]) == [RequestReceived(9, REQUEST, ended=False)]
    assert (http2.PING, http2.ACK, 0, b"12345678") in sent(connection)


ENDED = {
    "no preface": (b"GET / HTTP/1.1\r\n\r\n", http2.PROTOCOL_ERROR),
    "no settings first": (http2.PREFACE + headers(), http2.PROTOCOL_ERROR),
    "a frame too large": (HELLO + b"\0\x40\x01" + bytes(6), http2.FRAME_SIZE_ERROR),
    "an even stream": (HELLO + headers(2), http2.PROTOCOL_ERROR),
    "a stream that goes back": (HELLO + headers(5) + headers(3), http2.STREAM_CLOSED),
    "DATA on an idle stream": (HELLO + frame(http2.DATA, 0, 1, b"x"), http2.PROTOCOL_ERROR),
    "DATA on the connection": (HELLO + frame(http2.DATA, 0, 0, b"x"), http2.PROTOCOL_ERROR),
    "more padding than payload": (HELLO + headers() + frame(http2.DATA, http2.PADDED, 1, b"\x04abc"), http2.PROTOCOL_ERROR),
    "an interrupted header block": (HELLO + headers(1, 0) + frame(http2.PING, 0, 0, bytes(8)), http2.PROTOCOL_ERROR),
    "CONTINUATION alone": (HELLO + frame(http2.CONTINUATION, 0, 1), http2.PROTOCOL_ERROR),
    "a header block that is none": (HELLO + frame(http2.HEADERS, http2.END_HEADERS, 1, b"\xff"), http2.COMPRESSION_ERROR),
    "a table larger than allowed": (
        HELLO + frame(http2.SETTINGS, http2.ACK, 0) + frame(http2.HEADERS, http2.END_HEADERS, 1, b"\x21"),
        http2.COMPRESSION_ERROR,
    ),
    "SETTINGS on a stream": (http2.PREFACE + frame(http2.SETTINGS, 0, 1), http2.PROTOCOL_ERROR),
    "SETTINGS of a wrong size": (http2.PREFACE + frame(http2.SETTINGS, 0, 0, b"x"), http2.FRAME_SIZE_ERROR),
    "an acknowledgement with a payload": (HELLO + frame(http2.SETTINGS, http2.ACK, 0, bytes(6)), http2.FRAME_SIZE_ERROR),
    "a window too large": (HELLO + frame(http2.SETTINGS, 0, 0, b"\0\x04\x80\0\0\0"), http2.FLOW_CONTROL_ERROR),
    "a frame size too small": (HELLO + frame(http2.SETTINGS, 0, 0, b"\0\x05\0\0\0\x01"), http2.PROTOCOL_ERROR),
    "push allowed twice": (HELLO + frame(http2.SETTINGS, 0, 0, b"\0\x02\0\0\0\x02"), http2.PROTOCOL_ERROR),
    "PUSH_PROMISE": (HELLO + frame(http2.PUSH_PROMISE, 0, 1), http2.PROTOCOL_ERROR),
    "PING of a wrong size": (HELLO + frame(http2.PING, 0, 0, b"x"), http2.FRAME_SIZE_ERROR),
    "PING on a stream": (HELLO + frame(http2.PING, 0, 1, bytes(8)), http2.PROTOCOL_ERROR),
    "GOAWAY on a stream": (HELLO + frame(http2.GOAWAY, 0, 1, bytes(8)), http2.PROTOCOL_ERROR),
    "GOAWAY of a wrong size": (HELLO + frame(http2.GOAWAY, 0, 0, b"x"), http2.FRAME_SIZE_ERROR),
    "RST_STREAM on an idle stream": (HELLO + frame(http2.RST_STREAM, 0, 1, bytes(4)), http2.PROTOCOL_ERROR),
    "RST_STREAM of a wrong size": (HELLO + headers() + frame(http2.RST_STREAM, 0, 1, b"x"), http2.FRAME_SIZE_ERROR),
    "WINDOW_UPDATE of nothing": (HELLO + frame(http2.WINDOW_UPDATE, 0, 0, bytes(4)), http2.PROTOCOL_ERROR),
    "WINDOW_UPDATE of too much": (HELLO + frame(http2.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), http2.FLOW_CONTROL_ERROR),
    "WINDOW_UPDATE on an idle stream": (HELLO + frame(http2.WINDOW_UPDATE, 0, 9, b"\0\0\0\x01"), http2.PROTOCOL_ERROR),
    "a stream that depends on itself": (
        HELLO + frame(http2.HEADERS, http2.END_HEADERS | http2.HAS_PRIORITY, 1, b"\0\0\0\x01\x10"),
        http2.PROTOCOL_ERROR,
    ),
    "HEADERS after the end": (HELLO + headers(1, http2.END_HEADERS | http2.END_STREAM) + headers(1), http2.STREAM_CLOSED),
    "a header block without an end": (
        HELLO + headers(1, 0) + frame(http2.CONTINUATION, 0, 1, bytes(16_000)) * 17,
        http2.ENHANCE_YOUR_CALM,
    ),
}


@pytest.mark.parametrize(("data", "code"), ENDED.values(), ids=ENDED.keys())
def test_errors_of_the_connection_end_it(data: bytes, code: int) -> None:
    """The last frame is a GOAWAY with the right code, and what comes after is not even looked at."""
    connection = Connection()

    events = connection.receive(data)

    assert isinstance(events[-1], ConnectionEnded)
    assert events[-1].code == code
    kind, _, _, payload = sent(connection)[-1]
    assert (kind, struct.unpack(">II", payload[:8])[1]) == (http2.GOAWAY, code)
    assert connection.receive(headers(99)) == []


def _without(name: bytes) -> tuple[tuple[bytes, bytes], ...]:
    return tuple(pair for pair in REQUEST if pair[0] != name)


RESET = {
    "no method": (headers(pairs=_without(b":method")), http2.PROTOCOL_ERROR),
    "no path": (headers(pairs=_without(b":path")), http2.PROTOCOL_ERROR),
    "an upper-case name": (headers(pairs=(*REQUEST, (b"X", b"y"))), http2.PROTOCOL_ERROR),
    "an unknown pseudo-header": (headers(pairs=((b":x", b"y"), *REQUEST)), http2.PROTOCOL_ERROR),
    "a pseudo-header too late": (headers(pairs=((b"x", b"y"), *REQUEST)), http2.PROTOCOL_ERROR),
    "a pseudo-header twice": (headers(pairs=(REQUEST[0], *REQUEST)), http2.PROTOCOL_ERROR),
    "a connection header": (headers(pairs=(*REQUEST, (b"connection", b"close"))), http2.PROTOCOL_ERROR),
    "another te": (headers(pairs=(*_without(b"te"), (b"te", b"gzip"))), http2.PROTOCOL_ERROR),
    "more than content-length": (
        headers(pairs=(*REQUEST, (b"content-length", b"2"))) + frame(http2.DATA, 0, 1, b"abc"),
        http2.PROTOCOL_ERROR,
    ),
    "less than content-length": (
        headers(pairs=(*REQUEST, (b"content-length", b"2"))) + frame(http2.DATA, http2.END_STREAM, 1, b"a"),
        http2.PROTOCOL_ERROR,
    ),
    "a content-length that is none": (headers(pairs=(*REQUEST, (b"content-length", b"-1"))), http2.PROTOCOL_ERROR),
    "trailers that do not end": (headers() + headers(pairs=((b"x", b"y"),)), http2.PROTOCOL_ERROR),
    "DATA after the end": (
        headers(1, http2.END_HEADERS | http2.END_STREAM) + frame(http2.DATA, 0, 1, b"x"),
        http2.STREAM_CLOSED,
    ),
    "a window of nothing": (headers() + frame(http2.WINDOW_UPDATE, 0, 1, bytes(4)), http2.PROTOCOL_ERROR),
    "a window too large": (headers() + frame(http2.WINDOW_UPDATE, 0, 1, b"\x7f\xff\xff\xff"), http2.FLOW_CONTROL_ERROR),
}


@pytest.mark.parametrize(("data", "code"), RESET.values(), ids=RESET.keys())
def test_errors_of_a_stream_reset_that_stream_alone(data: bytes, code: int) -> None:
    """The stream gets a RST_STREAM with the right code, and the next request is served."""
    connection, events = opened(data, headers(3))

    assert StreamReset(1, code) in events
    assert (http2.RST_STREAM, 0, 1, code.to_bytes(4, "big")) in sent(connection)
    assert events[-1] == RequestReceived(3, REQUEST, ended=False)


def test_streams_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the limit a stream is refused, and served again once another has ended."""
    monkeypatch.setattr(http2, "MAX_STREAMS", 2)

    connection, events = opened(headers(1), headers(3), headers(5), frame(http2.RST_STREAM, 0, 1, bytes(4)), headers(7))

    assert StreamReset(5, http2.REFUSED_STREAM) in events
    assert events[-1] == RequestReceived(7, REQUEST, ended=False)
    assert connection.streams == 2


def test_finished_streams_leave_nothing_behind() -> None:
    """Whichever side ends first, and if the peer resets instead, the stream is forgotten."""
    connection, _ = opened(headers(1), headers(3, http2.END_HEADERS | http2.END_STREAM), headers(5))
    for stream in (1, 3, 5):
        connection.respond(stream, encode([(b":status", b"200")]))
        connection.send(stream, b"answer", encode([(b"grpc-status", b"0")]))

    connection.receive(frame(http2.DATA, http2.END_STREAM, 1) + frame(http2.RST_STREAM, 0, 5, bytes(4)))

    assert connection.streams == 0


def test_blocks_are_cached_only_while_they_mean_the_same_everywhere() -> None:
    """A peer that uses the dynamic table is decoded in order; one that does not may repeat a block."""
    indexing = Encoder()
    first, second = indexing.encode(REQUEST, huffman=False), indexing.encode(REQUEST, huffman=False)
    shrunk = b"\x20" + encode(REQUEST)

    def block(stream: int, data: bytes) -> bytes:
        return frame(http2.HEADERS, http2.END_HEADERS, stream, data)

    connection, events = opened(block(1, first), block(3, second), block(5, second), block(7, shrunk), block(9, shrunk))

    assert first != second
    assert [event.headers for event in events if isinstance(event, RequestReceived)] == [REQUEST] * 5
    assert list(connection._blocks) == [shrunk]
    assert isinstance(connection.receive(block(11, second))[-1], ConnectionEnded)  # the table is empty now


@given(st.lists(st.binary(max_size=60), max_size=8), st.booleans())
def test_random_bytes_never_raise(pieces: list[bytes], hello: bool) -> None:
    """Whatever comes, it ends in events or in a GOAWAY, and nothing is kept of a connection that has ended."""
    connection = opened()[0] if hello else Connection()

    for piece in pieces:
        connection.receive(piece)

    assert not connection.ended or connection.streams == 0


FRAMES = st.builds(
    frame,
    st.integers(0, 10),
    st.sampled_from([0, 1, 4, 5, 8, 9, 12, 13, 0x20, 0x25]),
    st.sampled_from([0, 1, 2, 3, 5, 7, 2**31 - 1]),
    st.binary(max_size=12) | st.just(encode(REQUEST)) | st.just(b"\0\0\0\x01"),
)


@given(st.lists(FRAMES | st.sampled_from([headers(1), headers(3), headers(5)]), max_size=20), st.data())
def test_random_frames_never_raise(frames: list[bytes], data: st.DataObject) -> None:
    """Any sequence of frames, with answers in between, leaves a connection that is well or has ended with a GOAWAY."""
    connection, _ = opened()
    for item in frames:
        for event in connection.receive(item):
            if isinstance(event, RequestReceived) and data.draw(st.booleans()):
                connection.respond(event.stream, encode([(b":status", b"200")]))
                connection.send(event.stream, b"x" * data.draw(st.integers(0, 9)), b"" if data.draw(st.booleans()) else None)
    goaways = [part for part in sent(connection) if part[0] == http2.GOAWAY]

    assert len(goaways) == connection.ended


class _Client:
    """python-hyper's h2 as the peer; it checks every frame that it gets."""

    def __init__(self, window: int, frame_size: int) -> None:
        self.server = Connection()
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.h2.initiate_connection()
        codes = h2.settings.SettingCodes
        self.h2.update_settings({codes.INITIAL_WINDOW_SIZE: window, codes.MAX_FRAME_SIZE: frame_size})
        self.bodies: dict[int, bytes] = {}
        self.ended: set[int] = set()

    def exchange(self) -> list[Event]:
        """Carry bytes between the two until both are silent; returns what the server saw."""
        seen: list[Event] = []
        while True:
            up, down = self.h2.data_to_send(), self.server.take()
            if not up and not down:
                return seen
            seen += self.server.receive(up)
            for event in self.h2.receive_data(down):
                if isinstance(event, h2.events.DataReceived):
                    self.bodies[event.stream_id] = self.bodies.get(event.stream_id, b"") + event.data
                elif isinstance(event, h2.events.StreamEnded):
                    self.ended.add(event.stream_id)

    def open_windows(self, increment: int, stream: int) -> None:
        """Let the server send that much more, on the stream and in all."""
        if stream not in self.ended:
            self.h2.increment_flow_control_window(increment, stream)
        self.h2.increment_flow_control_window(increment)
        self.exchange()


@given(
    st.lists(st.integers(0, 90_000), min_size=1, max_size=4),
    st.integers(0, 70_000),
    st.lists(st.integers(1, 30_000), max_size=12),
    st.sampled_from([16_384, 20_000]),
)
def test_flow_control_against_another_implementation(sizes: list[int], window: int, updates: list[int], size: int) -> None:
    """Answers of any size arrive whole at a peer with any window that is opened bit by bit."""
    client = _Client(window, size)
    bodies = {2 * number + 1: bytes([number]) * length for number, length in enumerate(sizes)}
    for stream in bodies:
        client.h2.send_headers(stream, [(name.decode(), value.decode()) for name, value in REQUEST], end_stream=True)
    requests = [event.stream for event in client.exchange() if isinstance(event, RequestReceived)]
    for stream, body in bodies.items():
        client.server.respond(stream, encode([(b":status", b"200")]))
        client.server.send(stream, body, encode([(b"grpc-status", b"0")]))
    client.exchange()

    for number, update in enumerate([*updates, *[400_000] * 2 * len(bodies)]):
        client.open_windows(update, 2 * (number % len(bodies)) + 1)

    assert requests == list(bodies)
    assert client.ended == set(bodies)
    assert {stream: client.bodies.get(stream, b"") for stream in bodies} == bodies
    assert client.server.streams == 0


def test_large_bodies_keep_the_windows_open() -> None:
    """A hundred megabytes on one stream never run out of window."""
    connection, _ = opened(headers())
    opened_by = {0: 0, 1: 0}
    chunk = frame(http2.DATA, 0, 1, bytes(16_000))
    for _ in range(6_500):
        connection.receive(chunk)
        for kind, _, stream, payload in sent(connection):
            if kind == http2.WINDOW_UPDATE:
                opened_by[stream] += int.from_bytes(payload, "big")

    assert min(opened_by.values()) > 6_500 * 16_000 - 2 * 2**24
