"""The HTTP/2 core without a socket; python-hyper's h2 is the peer where a real one is needed."""

import struct

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
from hypothesis import given, strategies as st

from extproc.transport import headers as hpack, http2
from extproc.transport.headers import encode
from extproc.transport.http2 import Connection, Http2Limits, Http2Stream
from tests.support.http2 import (
    HELLO,
    REQUEST,
    Seen,
    data,
    frame,
    headers,
    opened,
    receive,
    request,
    reset,
    sent,
)

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
        frame(
            http2.HEADERS,
            http2.END_HEADERS | http2.HAS_PRIORITY,
            5,
            b"\0\0\0\0\x10" + encode(REQUEST),
        ),
        frame(http2.PRIORITY, 0, 5, b"\0\0\0\x01\x10"),
        headers(5, http2.END_HEADERS | http2.END_STREAM, ((b"trailer", b"x"),)),
        headers(7),
        frame(http2.RST_STREAM, 0, 7, b"\0\0\0\x08"),
    ]
)
EVENTS = [
    request(1),
    data(1, b"one"),
    data(1, b"two", ended=True),
    request(3, ended=True),
    request(5),
    data(5, b"", ended=True),
    request(7),
    reset(7, http2.CANCEL),
]


@pytest.mark.parametrize("step", [1, 2, 7, 9, 100, 10_000])
def test_events_do_not_depend_on_how_bytes_are_cut(step: int) -> None:
    connection, events = Connection(), []
    received = CONVERSATION + headers(9)[:-1]

    for start in range(0, len(received), step):
        events += receive(connection, received[start : start + step])

    assert events == EVENTS
    assert receive(connection, headers(9)[-1:]) == [request(9)]
    assert (http2.PING, http2.ACK, 0, b"12345678") in sent(connection)


ENDED = {
    "no preface": (b"GET / HTTP/1.1\r\n\r\n", http2.PROTOCOL_ERROR),
    "no settings first": (http2.PREFACE + headers(), http2.PROTOCOL_ERROR),
    "a frame too large": (HELLO + b"\0\x40\x01" + bytes(6), http2.FRAME_SIZE_ERROR),
    "an even stream": (HELLO + headers(2), http2.PROTOCOL_ERROR),
    "a stream that goes back": (HELLO + headers(5) + headers(3), http2.STREAM_CLOSED),
    "DATA on an idle stream": (HELLO + frame(http2.DATA, 0, 1, b"x"), http2.PROTOCOL_ERROR),
    "DATA on the connection": (HELLO + frame(http2.DATA, 0, 0, b"x"), http2.PROTOCOL_ERROR),
    "more padding than payload": (
        HELLO + headers() + frame(http2.DATA, http2.PADDED, 1, b"\x04abc"),
        http2.PROTOCOL_ERROR,
    ),
    "an interrupted header block": (
        HELLO + headers(1, 0) + frame(http2.PING, 0, 0, bytes(8)),
        http2.PROTOCOL_ERROR,
    ),
    "CONTINUATION alone": (HELLO + frame(http2.CONTINUATION, 0, 1), http2.PROTOCOL_ERROR),
    "a header block that is none": (
        HELLO + frame(http2.HEADERS, http2.END_HEADERS, 1, b"\xff"),
        hpack.COMPRESSION_ERROR,
    ),
    "a table larger than allowed": (
        HELLO
        + frame(http2.SETTINGS, http2.ACK, 0)
        + frame(http2.HEADERS, http2.END_HEADERS, 1, b"\x21"),
        hpack.COMPRESSION_ERROR,
    ),
    "SETTINGS on a stream": (http2.PREFACE + frame(http2.SETTINGS, 0, 1), http2.PROTOCOL_ERROR),
    "SETTINGS of a wrong size": (
        http2.PREFACE + frame(http2.SETTINGS, 0, 0, b"x"),
        http2.FRAME_SIZE_ERROR,
    ),
    "an acknowledgement with a payload": (
        HELLO + frame(http2.SETTINGS, http2.ACK, 0, bytes(6)),
        http2.FRAME_SIZE_ERROR,
    ),
    "a window too large": (
        HELLO + frame(http2.SETTINGS, 0, 0, b"\0\x04\x80\0\0\0"),
        http2.FLOW_CONTROL_ERROR,
    ),
    "a frame size too small": (
        HELLO + frame(http2.SETTINGS, 0, 0, b"\0\x05\0\0\0\x01"),
        http2.PROTOCOL_ERROR,
    ),
    "push allowed twice": (
        HELLO + frame(http2.SETTINGS, 0, 0, b"\0\x02\0\0\0\x02"),
        http2.PROTOCOL_ERROR,
    ),
    "PUSH_PROMISE": (HELLO + frame(http2.PUSH_PROMISE, 0, 1), http2.PROTOCOL_ERROR),
    "PING of a wrong size": (HELLO + frame(http2.PING, 0, 0, b"x"), http2.FRAME_SIZE_ERROR),
    "PING on a stream": (HELLO + frame(http2.PING, 0, 1, bytes(8)), http2.PROTOCOL_ERROR),
    "GOAWAY on a stream": (HELLO + frame(http2.GOAWAY, 0, 1, bytes(8)), http2.PROTOCOL_ERROR),
    "GOAWAY of a wrong size": (HELLO + frame(http2.GOAWAY, 0, 0, b"x"), http2.FRAME_SIZE_ERROR),
    "RST_STREAM on an idle stream": (
        HELLO + frame(http2.RST_STREAM, 0, 1, bytes(4)),
        http2.PROTOCOL_ERROR,
    ),
    "RST_STREAM of a wrong size": (
        HELLO + headers() + frame(http2.RST_STREAM, 0, 1, b"x"),
        http2.FRAME_SIZE_ERROR,
    ),
    "WINDOW_UPDATE of nothing": (
        HELLO + frame(http2.WINDOW_UPDATE, 0, 0, bytes(4)),
        http2.PROTOCOL_ERROR,
    ),
    "WINDOW_UPDATE of too much": (
        HELLO + frame(http2.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"),
        http2.FLOW_CONTROL_ERROR,
    ),
    "WINDOW_UPDATE on an idle stream": (
        HELLO + frame(http2.WINDOW_UPDATE, 0, 9, b"\0\0\0\x01"),
        http2.PROTOCOL_ERROR,
    ),
    "a stream that depends on itself": (
        HELLO + frame(http2.HEADERS, http2.END_HEADERS | http2.HAS_PRIORITY, 1, b"\0\0\0\x01\x10"),
        http2.PROTOCOL_ERROR,
    ),
    "HEADERS after the end": (
        HELLO + headers(1, http2.END_HEADERS | http2.END_STREAM) + headers(1),
        http2.STREAM_CLOSED,
    ),
    "a header block without an end": (
        HELLO + headers(1, 0) + frame(http2.CONTINUATION, 0, 1, bytes(16_000)) * 17,
        hpack.ENHANCE_YOUR_CALM,
    ),
}


@pytest.mark.parametrize(("received", "code"), ENDED.values(), ids=ENDED.keys())
def test_connection_errors_end_the_connection(received: bytes, code: int) -> None:
    connection = Connection()

    receive(connection, received)

    assert connection.ended
    assert connection.error is not None
    assert connection.error.code == code
    kind, _, _, payload = sent(connection)[-1]
    assert (kind, struct.unpack(">II", payload[:8])[1]) == (http2.GOAWAY, code)
    assert receive(connection, headers(99)) == []


def _without(name: bytes) -> tuple[tuple[bytes, bytes], ...]:
    return tuple(pair for pair in REQUEST if pair[0] != name)


RESET = {
    "no method": (headers(pairs=_without(b":method")), http2.PROTOCOL_ERROR),
    "no path": (headers(pairs=_without(b":path")), http2.PROTOCOL_ERROR),
    "an upper-case name": (headers(pairs=(*REQUEST, (b"X", b"y"))), http2.PROTOCOL_ERROR),
    "an unknown pseudo-header": (headers(pairs=((b":x", b"y"), *REQUEST)), http2.PROTOCOL_ERROR),
    "a pseudo-header too late": (headers(pairs=((b"x", b"y"), *REQUEST)), http2.PROTOCOL_ERROR),
    "a pseudo-header twice": (headers(pairs=(REQUEST[0], *REQUEST)), http2.PROTOCOL_ERROR),
    "a connection header": (
        headers(pairs=(*REQUEST, (b"connection", b"close"))),
        http2.PROTOCOL_ERROR,
    ),
    "another te": (headers(pairs=(*_without(b"te"), (b"te", b"gzip"))), http2.PROTOCOL_ERROR),
    "more than content-length": (
        headers(pairs=(*REQUEST, (b"content-length", b"2"))) + frame(http2.DATA, 0, 1, b"abc"),
        http2.PROTOCOL_ERROR,
    ),
    "less than content-length": (
        headers(pairs=(*REQUEST, (b"content-length", b"2")))
        + frame(http2.DATA, http2.END_STREAM, 1, b"a"),
        http2.PROTOCOL_ERROR,
    ),
    "a content-length that is none": (
        headers(pairs=(*REQUEST, (b"content-length", b"-1"))),
        http2.PROTOCOL_ERROR,
    ),
    "trailers that do not end": (headers() + headers(pairs=((b"x", b"y"),)), http2.PROTOCOL_ERROR),
    "DATA after the end": (
        headers(1, http2.END_HEADERS | http2.END_STREAM) + frame(http2.DATA, 0, 1, b"x"),
        http2.STREAM_CLOSED,
    ),
    "a window of nothing": (
        headers() + frame(http2.WINDOW_UPDATE, 0, 1, bytes(4)),
        http2.PROTOCOL_ERROR,
    ),
    "a window too large": (
        headers() + frame(http2.WINDOW_UPDATE, 0, 1, b"\x7f\xff\xff\xff"),
        http2.FLOW_CONTROL_ERROR,
    ),
}


@pytest.mark.parametrize(("received", "code"), RESET.values(), ids=RESET.keys())
def test_stream_errors_reset_only_that_stream(received: bytes, code: int) -> None:
    connection, events, _ = opened(received, headers(3))

    assert reset(1, code) in events
    assert (http2.RST_STREAM, 0, 1, code.to_bytes(4, "big")) in sent(connection)
    assert events[-1] == request(3)


def test_stream_past_the_limit_is_refused() -> None:
    received = [
        headers(1),
        headers(3),
        headers(5),
        frame(http2.RST_STREAM, 0, 1, bytes(4)),
        headers(7),
    ]

    connection, events, _ = opened(*received, limits=Http2Limits(streams=2))

    assert reset(5, http2.REFUSED_STREAM) in events
    assert events[-1] == request(7)
    assert connection.streams == 2


def test_finished_streams_are_forgotten() -> None:
    connection, _, streams = opened(
        headers(1), headers(3, http2.END_HEADERS | http2.END_STREAM), headers(5)
    )
    for stream in streams.values():
        connection.respond(stream, encode([(b":status", b"200")]))
        connection.send(stream, b"answer", encode([(b"grpc-status", b"0")]))

    receive(
        connection, frame(http2.DATA, http2.END_STREAM, 1) + frame(http2.RST_STREAM, 0, 5, bytes(4))
    )

    assert connection.streams == 0


def test_sending_on_an_ended_stream_is_a_bug() -> None:
    """Even while its trailers wait for the peer to open a window."""
    connection, _, streams = opened(
        frame(http2.SETTINGS, 0, 0, b"\0\x04\0\0\0\0"),
        headers(1),
        headers(3, http2.END_HEADERS | http2.END_STREAM),
        headers(5),
    )
    ok = encode([(b":status", b"200")])
    for number, stream in streams.items():
        connection.respond(stream, ok, end=number != 5)
    connection.send(streams[5], b"x", b"")

    for stream in streams.values():
        with pytest.raises(AssertionError):
            connection.send(stream, b"x")
    with pytest.raises(AssertionError):
        connection.respond(streams[1], ok)


def test_answers_on_lost_streams_are_not_sent() -> None:
    connection, _, streams = opened(headers(1), headers(3))
    receive(connection, frame(http2.RST_STREAM, 0, 1, bytes(4)) + frame(http2.PING, 0, 1, bytes(8)))
    connection.data_to_send()

    for stream in streams.values():
        connection.respond(stream, encode([(b":status", b"200")]))
        connection.send(stream, b"x", b"")

    assert connection.data_to_send() == b""


@given(st.lists(st.binary(max_size=60), max_size=8), st.booleans())
def test_random_bytes_never_raise(pieces: list[bytes], hello: bool) -> None:
    connection = opened()[0] if hello else Connection()

    for piece in pieces:
        receive(connection, piece)

    assert not connection.ended or connection.streams == 0


FRAMES = st.builds(
    frame,
    st.integers(0, 10),
    st.sampled_from([0, 1, 4, 5, 8, 9, 12, 13, 0x20, 0x25]),
    st.sampled_from([0, 1, 2, 3, 5, 7, 2**31 - 1]),
    st.binary(max_size=12) | st.just(encode(REQUEST)) | st.just(b"\0\0\0\x01"),
)


@given(
    st.lists(FRAMES | st.sampled_from([headers(1), headers(3), headers(5)]), max_size=20), st.data()
)
def test_random_frames_never_raise(frames: list[bytes], choice: st.DataObject) -> None:
    connection, _, streams = opened()
    for item in frames:
        receive(connection, item, streams)
        for number in list(streams):
            if choice.draw(st.booleans()):
                stream = streams.pop(number)
                connection.respond(stream, encode([(b":status", b"200")]))
                connection.send(
                    stream,
                    b"x" * choice.draw(st.integers(0, 9)),
                    b"" if choice.draw(st.booleans()) else None,
                )
    goaways = [part for part in sent(connection) if part[0] == http2.GOAWAY]

    assert len(goaways) == connection.ended


class _Client:
    """python-hyper's h2 as the peer; it checks every frame that it gets."""

    def __init__(self, window: int, frame_size: int) -> None:
        self.server = Connection()
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.h2.initiate_connection()
        codes = h2.settings.SettingCodes
        self.h2.update_settings(
            {codes.INITIAL_WINDOW_SIZE: window, codes.MAX_FRAME_SIZE: frame_size}
        )
        self.streams: dict[int, Http2Stream] = {}
        self.bodies: dict[int, bytes] = {}
        self.ended: set[int] = set()

    def exchange(self) -> list[Seen]:
        """Carry bytes between the two until both are silent; returns what the server saw."""
        seen: list[Seen] = []
        while True:
            up, down = self.h2.data_to_send(), self.server.data_to_send()
            if not up and not down:
                return seen
            seen += receive(self.server, up, self.streams)
            for event in self.h2.receive_data(down):
                if isinstance(event, h2.events.DataReceived):
                    self.bodies[event.stream_id] = (
                        self.bodies.get(event.stream_id, b"") + event.data
                    )
                elif isinstance(event, h2.events.StreamEnded):
                    self.ended.add(event.stream_id)

    def open_windows(self, increment: int, stream: int) -> None:
        """Let the server send this much more, on the stream and in all."""
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
def test_flow_control_works_with_another_implementation(
    sizes: list[int], window: int, updates: list[int], size: int
) -> None:
    """Answers of any size arrive whole however the peer opens its windows."""
    client = _Client(window, size)
    bodies = {2 * number + 1: bytes([number]) * length for number, length in enumerate(sizes)}
    for stream in bodies:
        client.h2.send_headers(
            stream, [(name.decode(), value.decode()) for name, value in REQUEST], end_stream=True
        )
    client.exchange()
    for number, body in bodies.items():
        client.server.respond(client.streams[number], encode([(b":status", b"200")]))
        client.server.send(client.streams[number], body, encode([(b"grpc-status", b"0")]))
    client.exchange()

    for number, update in enumerate([*updates, *[400_000] * 2 * len(bodies)]):
        client.open_windows(update, 2 * (number % len(bodies)) + 1)

    assert list(client.streams) == list(bodies)
    assert client.ended == set(bodies)
    assert {stream: client.bodies.get(stream, b"") for stream in bodies} == bodies
    assert client.server.streams == 0


def test_large_bodies_keep_their_windows_open() -> None:
    connection, _, _ = opened(headers())
    opened_by = {0: 0, 1: 0}
    chunk = frame(http2.DATA, 0, 1, bytes(16_000))
    for _ in range(6_500):
        receive(connection, chunk)
        for kind, _, stream, payload in sent(connection):
            if kind == http2.WINDOW_UPDATE:
                opened_by[stream] += int.from_bytes(payload, "big")

    assert min(opened_by.values()) > 6_500 * 16_000 - 2 * 2**24


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60_000)), min_size=1, max_size=4),
    st.sampled_from([20_000, 65_535, 1_000_000]),
)
def test_long_messages_keep_order_frame_size_and_windows(
    messages: list[tuple[int, int]], window: int
) -> None:
    settings = struct.pack(">HI", 4, window)
    connection, _, streams = opened(frame(http2.SETTINGS, 0, 0, settings), headers(1))
    if window > 65_535:
        receive(connection, frame(http2.WINDOW_UPDATE, 0, 0, struct.pack(">I", window)))
    sent(connection)
    expected = b"".join(
        [b"h" * head + bytes([number]) * size for number, (head, size) in enumerate(messages)]
    )
    connection.respond(streams[1], encode([(b":status", b"200")]))
    for number, (head, size) in enumerate(messages):
        last = number == len(messages) - 1
        connection.send_long(
            streams[1], [b"h" * head, bytes([number]) * size], b"" if last else None
        )

    frames = sent(connection)
    assert sum(len(payload) for kind, *_, payload in frames if kind == http2.DATA) <= window
    for _ in range(20):
        update = struct.pack(">I", 50_000)
        receive(connection, frame(http2.WINDOW_UPDATE, 0, 0, update))
        if not streams[1].local_closed:
            receive(connection, frame(http2.WINDOW_UPDATE, 0, 1, update))
        frames += sent(connection)

    parts = [item for item in frames if item[0] == http2.DATA]
    assert b"".join([payload for *_, payload in parts]) == expected
    assert max(len(payload) for *_, payload in parts) <= 16_384
    assert [flags for _, flags, _, _ in parts] == [0] * (len(parts) - 1) + [http2.END_STREAM]
