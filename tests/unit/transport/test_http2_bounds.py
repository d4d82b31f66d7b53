"""What one peer can cost the HTTP/2 core: work and memory are bounded, floods end."""

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from extproc.transport import grpc, http2
from extproc.transport.grpc import GrpcConnection as Calls, MessageReceived, frame_message
from extproc.transport.headers import ENHANCE_YOUR_CALM, MAX_BLOCK, encode
from extproc.transport.http2 import (
    Connection,
    Http2Limits,
    Http2Stream,
    Pool,
    RequestReceived,
    Share,
)
from tests.support.grpc import SINGLE, Peer, body, call
from tests.support.http2 import HELLO, REQUEST, frame, headers, opened, receive, sent

OK = encode([(b":status", b"200")])
SHUT = frame(http2.SETTINGS, 0, 0, b"\0\x04\0\0\0\0")


def initial_window(*sizes: int) -> bytes:
    return frame(
        http2.SETTINGS, 0, 0, b"".join(b"\0\x04" + size.to_bytes(4, "big") for size in sizes)
    )


def window_update(stream: int, increment: int) -> bytes:
    return frame(http2.WINDOW_UPDATE, 0, stream, increment.to_bytes(4, "big"))


def count_steps(work: Callable[[], object]) -> int:
    """Lines of the transport's code that were run."""
    steps = 0

    # A trace function is one
    def trace(frame: FrameType, event: str, _: object) -> Any:  # noqa: ANN401
        nonlocal steps
        steps += event == "line"
        return trace if "transport" in frame.f_code.co_filename else None

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return steps


def waiting(streams: int) -> Connection:
    """A connection with this many open streams, and a hundred answers waiting for windows."""
    numbers = range(1, 2 * streams, 2)
    connection, _, requests = opened(
        SHUT, *(headers(number) for number in numbers), limits=Http2Limits(patience=10**9)
    )
    for number in numbers[:100]:
        connection.respond(requests[number], OK)
        connection.send(requests[number], b"x" * 100, b"")
    connection.data_to_send()
    return connection


FRAMES_FOR_ALL = {
    "INITIAL_WINDOW_SIZE": initial_window(*[0, 10] * 1_000, 0),
    "WINDOW_UPDATE of the connection": window_update(0, 1) * 500,
    "WINDOW_UPDATE of a stream": window_update(501, 1) * 500,
    "PING": frame(http2.PING, 0, 0, bytes(8)) * 100,
}


@pytest.mark.skipif(
    not http2.__file__.endswith(".py"), reason="compiled code has no lines to count"
)
@pytest.mark.parametrize("received", FRAMES_FOR_ALL.values(), ids=FRAMES_FOR_ALL.keys())
def test_frames_cost_the_same_beside_many_open_streams(received: bytes) -> None:
    few, many = (
        count_steps(lambda made=made: receive(made, received))  # type: ignore[misc]
        for made in (waiting(300), waiting(6_000))
    )

    assert few > 500
    assert many == few


def test_reopened_windows_carry_each_byte_once_in_order() -> None:
    pool = Pool()
    numbers = range(1, 200, 2)
    connection, _, streams = opened(SHUT, *map(headers, numbers), pool=pool)
    for number in numbers:
        connection.respond(streams[number], OK)
        connection.send(streams[number], b"first %d," % number)
        connection.send(streams[number], b"second" * 100, b"")
    assert pool.used == sum(len(b"first %d," % number) + 600 for number in numbers)
    for size in (1, 5, 3, 300, 301, 0, 10_000):
        receive(connection, initial_window(size))

    receive(connection, window_update(0, 10**6))

    bodies: dict[int, bytes] = {}
    for kind, _, number, payload in sent(connection):
        if kind == http2.DATA:
            bodies[number] = bodies.get(number, b"") + payload
    assert bodies == {number: b"first %d," % number + b"second" * 100 for number in numbers}
    assert pool.used == 0


FLOODS = {
    "PING": lambda _: frame(http2.PING, 0, 0, bytes(8)),
    "PING acknowledged": lambda _: frame(http2.PING, http2.ACK, 0, bytes(8)),
    "SETTINGS": lambda _: frame(http2.SETTINGS, 0, 0),
    "SETTINGS acknowledged": lambda _: frame(http2.SETTINGS, http2.ACK, 0),
    "PRIORITY": lambda _: frame(http2.PRIORITY, 0, 1, bytes(5)),
    "WINDOW_UPDATE": lambda _: window_update(1, 1),
    "an unknown type": lambda _: frame(0x77, 0, 0),
    "empty DATA": lambda _: frame(http2.DATA, 0, 1),
    "padded empty DATA": lambda _: frame(http2.DATA, http2.PADDED, 1, b"\3\0\0\0"),
    "empty CONTINUATION": lambda n: frame(http2.CONTINUATION, 0, 3) if n else headers(3, 0),
    "GOAWAY": lambda _: frame(http2.GOAWAY, 0, 0, bytes(8)),
    "rapid reset": lambda n: call(2 * n + 3) + frame(http2.RST_STREAM, 0, 2 * n + 3, bytes(4)),
    "resets of streams long gone": lambda _: frame(http2.RST_STREAM, 0, 1, bytes(4)),
    "refused streams": lambda n: call(2 * n + 3, b"/nobody"),
    "no gRPC": lambda n: headers(2 * n + 3, http2.END_HEADERS | http2.END_STREAM),
    "calls that say nothing": lambda n: call(2 * n + 3, flags=http2.END_STREAM),
    "malformed requests": lambda n: headers(2 * n + 3, pairs=REQUEST[1:]),
    "we reset, by a window of nothing": lambda n: call(2 * n + 3) + window_update(2 * n + 3, 0),
    "we reset, by a window too large": lambda n: (
        call(2 * n + 3) + window_update(2 * n + 3, 2**31 - 1)
    ),
    "we reset, by DATA after the end": lambda n: (
        call(2 * n + 3, flags=http2.END_STREAM) + body(2 * n + 3, b"x")
    ),
    "we reset, by a priority of a wrong size": lambda n: (
        call(2 * n + 3) + frame(http2.PRIORITY, 0, 2 * n + 3, b"x")
    ),
}


@pytest.mark.parametrize("make", FLOODS.values(), ids=FLOODS.keys())
def test_floods_end_the_connection(make: Callable[[int], bytes]) -> None:
    peer = Peer(Http2Limits(patience=300))
    peer.receive(call())

    for number in range(400):
        assert not peer.receive(make(number))

    assert peer.connection.error is not None
    assert peer.connection.error.code == ENHANCE_YOUR_CALM


@pytest.mark.parametrize("answer", [b"b", None], ids=["answered", "given up before"])
def test_patience_comes_back_with_messages(answer: bytes | None) -> None:
    """A peer that makes calls is not ended for their frames, even if its clients hang up."""
    peer = Peer(Http2Limits(patience=50))

    for number in range(1, 2_000, 2):
        asked = peer.receive(
            call(number, SINGLE),
            body(number, frame_message(b"a")),
            window_update(0, 1),
            answer=answer,
        )
        assert len(asked) == 1
        peer.receive(
            frame(http2.RST_STREAM, 0, number, bytes(4)), frame(http2.PING, 0, 0, bytes(8))
        )

    assert not peer.connection.ended


def test_patience_comes_back_with_time() -> None:
    connection = Connection(Http2Limits(patience=50, patience_per_second=1))
    for second in range(1_000):
        connection.receive(frame(http2.PING, 0, 0, bytes(8)) if second else HELLO, float(second))
        assert connection.next_event() is None

    assert not connection.ended


def count_messages(connection: Calls) -> list[int]:
    """How many messages each turn delivers, until all is looked at."""
    turns = [0]
    while True:
        while isinstance(connection.next_event(), MessageReceived):
            turns[-1] += 1
        if not connection.unfinished:
            return turns
        connection.receive(b"")
        turns.append(0)


def test_turn_is_bounded_and_loses_nothing() -> None:
    limits = Http2Limits(work=64, patience=10**6)
    received = (
        HELLO
        + call()
        + frame(http2.PING, 0, 0, bytes(8)) * 1_000
        + body(1, frame_message(b"a") * 1_000)
    )
    connection = Calls({b"/test.Service/Stream": False}, limits)
    connection.receive(received)

    turns = count_messages(connection)

    assert sum(turns) == 1_000
    assert max(turns) <= 8
    assert len(turns) >= (1_000 + 8 * 1_000) / 64
    assert connection.data_to_send().count(frame(http2.PING, http2.ACK, 0, bytes(8))) == 1_000


def test_large_messages_take_a_turn_each() -> None:
    limits = Http2Limits(patience=10**6)
    large = frame_message(bytes(2**21))
    start = [
        large[place : place + http2.MAX_FRAME]
        for place in range(0, len(large) - 1, http2.MAX_FRAME)
    ]
    start[-1] = large[(len(start) - 1) * http2.MAX_FRAME : -1]
    connection = Calls({b"/test.Service/Stream": False}, limits)
    connection.receive(HELLO)
    assert connection.next_event() is None
    for number in (1, 3, 5):
        for piece in (call(number), *(body(number, piece) for piece in start)):
            connection.receive(piece)
            assert connection.next_event() is None
    connection.receive(b"".join(body(number, large[-1:]) for number in (1, 3, 5)))

    assert [count for count in count_messages(connection) if count] == [1, 1, 1]


def test_answers_released_by_a_window_take_turns() -> None:
    connection, _, streams = opened(SHUT, headers(), limits=Http2Limits(work=64))
    connection.respond(streams[1], OK)
    connection.send(streams[1], bytes(8 * 2**20), b"")
    connection.data_to_send()
    connection.receive(initial_window(2**30) + window_update(0, 2**30))
    sizes = []
    while connection.next_event() is None:
        sizes.append(len(connection.data_to_send()))
        if not connection.unfinished:
            break
        connection.receive(b"")

    assert sum(sizes) > 8 * 2**20
    assert max(sizes) < 2**17


def test_oldest_answered_stream_left_open_is_reset() -> None:
    connection, _, streams = opened(*map(headers, range(1, 40, 2)), limits=Http2Limits(lingering=5))
    for stream in streams.values():
        connection.respond(stream, OK, end=True)

    resets = [
        (number, payload)
        for kind, _, number, payload in sent(connection)
        if kind == http2.RST_STREAM
    ]
    assert resets == [(number, bytes(4)) for number in range(1, 30, 2)]
    assert connection.streams == 5
    receive(
        connection,
        frame(http2.DATA, http2.END_STREAM, 1, b"late")
        + frame(http2.DATA, http2.END_STREAM, 39, b"late"),
    )
    assert not connection.ended
    assert connection.streams == 4


def test_too_many_shut_windows_end_the_connection() -> None:
    pool = Pool()
    connection, _, streams = opened(
        SHUT, *map(headers, range(1, 40, 2)), limits=Http2Limits(shut=10), pool=pool
    )

    for stream in streams.values():
        connection.respond(stream, OK)
        connection.send(stream, b"answer", b"")

    assert connection.error is not None
    assert connection.error.code == ENHANCE_YOUR_CALM
    assert pool.used == connection.streams == 0


def test_unread_answers_are_bounded_in_bytes() -> None:
    """Then the connection is ended."""
    pool = Pool(10_000)
    connection, _, streams = opened(SHUT, headers(), pool=pool)
    connection.respond(streams[1], OK)

    while not connection.ended:
        assert pool.used <= 5_000
        connection.send(streams[1], bytes(100))

    assert pool.used == 0


def test_endless_header_block_is_held_within_the_share() -> None:
    """Its memory is given back when it is whole, or when the connection ends."""
    pool = Pool(40_000)
    whole, _, _ = opened(headers(1, 0), pool=pool)
    assert pool.used == len(encode(REQUEST))
    assert receive(whole, frame(http2.CONTINUATION, http2.END_HEADERS, 1))
    assert pool.used == 0

    endless, _, _ = opened(
        headers(1, 0), frame(http2.CONTINUATION, 0, 1, bytes(16_000)) * 2, pool=pool
    )

    assert endless.error is not None
    assert endless.error.code == ENHANCE_YOUR_CALM
    assert pool.used == 0


def test_header_block_in_small_parts_is_bounded() -> None:
    connection, _, _ = opened(headers(1, 0), limits=Http2Limits(patience=10**9))
    parts = 0
    while not connection.ended:
        receive(connection, frame(http2.CONTINUATION, 0, 1, bytes(100)))
        parts += 1

    assert parts <= MAX_BLOCK // 100 + 1


def test_oldest_of_too_many_silent_calls_is_ended() -> None:
    peer = Peer()

    peer.receive(*(call(number) for number in range(1, 2 * grpc.MAX_SILENT + 20, 2)))

    assert len(peer.connection.calls) == grpc.MAX_SILENT
    assert peer.status(1) == grpc.RESOURCE_EXHAUSTED
    assert peer.receive(body(2 * grpc.MAX_SILENT + 19, frame_message(b"a"))) != []


def test_shares_leave_memory_for_the_next() -> None:
    """One holder gets half of the pool; ten get equal parts, and as much is left."""
    pool = Pool(1_100)
    alone = Share(pool)
    while alone.take(1):
        pass
    assert alone.used == 550
    alone.give_all()

    shares = [Share(pool) for _ in range(10)]
    while sum(share.take(1) for share in shares):
        pass

    assert {share.used for share in shares} == {100}
    assert pool.limit - pool.used == 100


LIMITS = Http2Limits(streams=12, work=40, patience=400, patience_per_second=0, lingering=4, shut=3)
STEPS_OF_A_TURN = 3_000  # lines of code: some dozens for every frame, and the longest header block

SIZES = st.sampled_from([0, 1, 500, 70_000, 2**31 - 1])
BYTES = st.integers(0, 4_000).map(bytes)
STREAM_NUMBERS = st.integers(0, 20).map(lambda number: 2 * number + 1)
FRAMES = st.one_of(
    st.builds(headers, STREAM_NUMBERS, st.sampled_from([0, 1, 4, 5])),
    st.builds(
        frame,
        st.just(http2.CONTINUATION),
        st.sampled_from([0, http2.END_HEADERS]),
        STREAM_NUMBERS,
        BYTES,
    ),
    st.builds(
        frame, st.just(http2.DATA), st.sampled_from([0, http2.END_STREAM]), STREAM_NUMBERS, BYTES
    ),
    st.builds(window_update, STREAM_NUMBERS | st.just(0), SIZES),
    st.lists(SIZES, max_size=5).map(lambda sizes: initial_window(*sizes)),
    st.builds(frame, st.just(http2.RST_STREAM), st.just(0), STREAM_NUMBERS, st.just(bytes(4))),
    st.integers(1, 200).map(lambda times: frame(http2.PING, 0, 0, bytes(8)) * times),
)


class HostilePeers(RuleBasedStateMachine):
    """Two peers send anything, the owner answers anything, a third peer behaves."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(20_000)
        self.innocent = Calls({b"/test.Service/Stream": False}, pool=self.pool)
        self.innocent.receive(HELLO)
        self.calls = 0
        self.connections: list[Connection] = []
        self.streams: list[dict[int, Http2Stream]] = [{}, {}]
        self.last = [-1, -1]

    @initialize()
    def greet(self) -> None:
        """Both have spoken HTTP/2."""
        self.connections = [Connection(LIMITS, pool=self.pool) for _ in range(2)]
        for which in range(2):
            self._receive(which, HELLO)

    def _receive(self, which: int, data: bytes) -> None:
        connection = self.connections[which]
        while True:
            steps = count_steps(partial(self._take_turn, which, data))
            # The largest single thing that a turn may end with is a whole header block.
            assert connection.work <= LIMITS.work + (MAX_BLOCK >> 7)
            assert steps < STEPS_OF_A_TURN
            if not connection.unfinished:
                return
            data = b""

    def _take_turn(self, which: int, data: bytes) -> None:
        connection = self.connections[which]
        connection.receive(data)
        while (event := connection.next_event()) is not None:
            if isinstance(event, RequestReceived):
                self.streams[which][event.stream.number] = event.stream

    @rule(which=st.integers(0, 1), flags=st.sampled_from([0, 1, 4, 5]))
    def begin(self, which: int, flags: int) -> None:
        """A peer begins another stream."""
        self.last[which] += 2
        self._receive(which, headers(self.last[which], flags))

    @rule(which=st.integers(0, 1), received=FRAMES)
    def receive(self, which: int, received: bytes) -> None:
        """A peer sends a frame on any stream."""
        self._receive(which, received)

    @rule(
        which=st.integers(0, 1),
        size=st.integers(0, 3_000),
        end=st.booleans(),
        headers_alone=st.booleans(),
        data=st.data(),
    )
    def answer(
        self, which: int, size: int, end: bool, headers_alone: bool, data: st.DataObject
    ) -> None:
        """The owner answers one of its streams."""
        open_ones = [
            stream
            for stream in self.streams[which].values()
            if not stream.local_closed and stream.trailers is None
        ]
        if not open_ones:
            return
        stream = data.draw(st.sampled_from(open_ones))
        if headers_alone:
            self.connections[which].respond(stream, OK, end=end)
        else:
            self.connections[which].send(stream, bytes(size), b"" if end else None)
        self.connections[which].patience += LIMITS.message_earns

    @rule(which=st.integers(0, 1))
    def hang_up(self, which: int) -> None:
        """A peer leaves, and another one connects."""
        self.connections[which].close()
        self.streams[which], self.last[which] = {}, -1
        self.connections[which] = Connection(LIMITS, pool=self.pool)
        self._receive(which, HELLO)

    @invariant()
    def the_innocent_is_served(self) -> None:
        """There is memory for its message in two parts, and for an answer."""
        self.calls += 1
        number, message = 2 * self.calls - 1, frame_message(b"who" * 30)
        for part in (call(number) + body(number, message[:50]), body(number, message[50:])):
            self.innocent.receive(part)
            got = self.innocent.next_event()
        assert isinstance(got, MessageReceived)
        self.innocent.answer(got.call, b"you")
        assert b"you" in self.innocent.data_to_send()
        self.innocent.receive(frame(http2.RST_STREAM, 0, number, bytes(4)))
        assert self.innocent.next_event() is None
        assert self.innocent.error is None

    @invariant()
    def memory_is_bounded_and_accounted_for(self) -> None:
        """Each peer's memory is within its limits and counted; the other has some left."""
        for connection in self.connections:
            assert connection.streams <= LIMITS.streams
            assert connection.share.used <= self.pool.limit // 2
            assert not connection.ended or not (connection.streams or connection.share.used)
        assert self.pool.used == sum(connection.share.used for connection in self.connections)

    @invariant()
    def what_is_sent_is_well_formed(self) -> None:
        """Whole frames of the peer's size come out, and there is one GOAWAY at most."""
        for connection in self.connections:
            frames = sent(connection)
            assert all(len(payload) <= http2.MAX_FRAME for _, _, _, payload in frames)
            assert sum(kind == http2.GOAWAY for kind, _, _, _ in frames) <= 1

    def teardown(self) -> None:
        """No memory is held for peers that have left."""
        for connection in self.connections:
            connection.close()
        assert self.pool.used == 0


TestHostilePeers = pytest.mark.deep(HostilePeers.TestCase)


def test_unknown_header_fields_count_as_work() -> None:
    limits = Http2Limits(work=100)
    new = [
        headers(
            number, pairs=(*REQUEST, *((b"x-%d" % (number * 50 + each), b"") for each in range(50)))
        )
        for number in range(1, 60, 2)
    ]
    known = [headers(number) for number in range(1, 60, 2)]
    turns = []
    for blocks in (new, known):
        connection = Connection(limits)
        connection.receive(HELLO + b"".join(blocks))
        turns.append(1)
        while connection.next_event() is not None or connection.unfinished:
            if connection.turn_over:
                connection.receive(b"")
                turns[-1] += 1

    assert turns[0] > 25
    assert turns[1] < 3
