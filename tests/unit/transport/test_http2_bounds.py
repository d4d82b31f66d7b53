"""What one peer can make the HTTP/2 core do: work is bounded in every turn, memory always, and floods end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from extproc.transport import grpc, http2
from extproc.transport.grpc import GrpcConnection as Calls
from extproc.transport.grpc import MessageReceived, frame_message
from extproc.transport.headers import ENHANCE_YOUR_CALM, MAX_BLOCK, encode
from extproc.transport.http2 import Connection, Http2Limits, Http2Stream, Pool, RequestReceived, Share
from tests.support.grpc import SINGLE, Peer, body, call
from tests.support.http2 import HELLO, REQUEST, frame, headers, opened, receive, sent

OK = encode([(b":status", b"200")])
SHUT = frame(http2.SETTINGS, 0, 0, b"\0\x04\0\0\0\0")


def initial_window(*sizes: int) -> bytes:
    """A SETTINGS frame that changes all streams' windows, several times."""
    return frame(http2.SETTINGS, 0, 0, b"".join(b"\0\x04" + size.to_bytes(4, "big") for size in sizes))


def window_update(stream: int, increment: int) -> bytes:
    """A WINDOW_UPDATE frame."""
    return frame(http2.WINDOW_UPDATE, 0, stream, increment.to_bytes(4, "big"))


def count_steps(work: Callable[[], object]) -> int:
    """Lines of the transport's code that were run."""
    steps = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:  # noqa: ANN401  # a trace function is one
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
    """A connection with that many streams open, and a hundred answers that wait for windows of their own."""
    numbers = range(1, 2 * streams, 2)
    connection, _, requests = opened(SHUT, *(headers(number) for number in numbers), limits=Http2Limits(patience=10**9))
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


@pytest.mark.skipif(not http2.__file__.endswith(".py"), reason="compiled code has no lines to count")
@pytest.mark.parametrize("received", FRAMES_FOR_ALL.values(), ids=FRAMES_FOR_ALL.keys())
def test_no_frame_costs_more_for_the_streams_that_are_open(received: bytes) -> None:
    """The same frames take the same steps beside 300 streams as beside 6,000."""
    few, many = (count_steps(lambda made=made: receive(made, received)) for made in (waiting(300), waiting(6_000)))  # type: ignore[misc]

    assert few > 500
    assert many == few


@pytest.mark.skipif(not http2.__file__.endswith(".py"), reason="compiled code has no lines to count")
def test_answers_into_a_shut_window_cost_the_same_each() -> None:
    """The ten-thousandth answer that waits on a stream takes as many steps as the first."""
    connection, _, streams = opened(SHUT, headers())
    connection.respond(streams[1], OK)

    steps = [count_steps(lambda: connection.send(streams[1], b"an answer")) for _ in range(10_000)]

    assert steps[1] == steps[-1] < 50


def test_windows_that_open_again_carry_what_waited() -> None:
    """However windows change, each stream gets its bytes once and in order, and the pool is empty in the end."""
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
    "we reset, by a window too large": lambda n: call(2 * n + 3) + window_update(2 * n + 3, 2**31 - 1),
    "we reset, by DATA after the end": lambda n: call(2 * n + 3, flags=http2.END_STREAM) + body(2 * n + 3, b"x"),
    "we reset, by a priority of a wrong size": lambda n: call(2 * n + 3) + frame(http2.PRIORITY, 0, 2 * n + 3, b"x"),
}


@pytest.mark.parametrize("make", FLOODS.values(), ids=FLOODS.keys())
def test_floods_end(make: Callable[[int], bytes]) -> None:
    """Whatever leads to nothing, sent without end: the connection is ended with ENHANCE_YOUR_CALM, soon after the limit."""
    peer = Peer(Http2Limits(patience=300))
    peer.receive(call())

    for number in range(400):
        assert not peer.receive(make(number))

    assert peer.connection.error is not None
    assert peer.connection.error.code == ENHANCE_YOUR_CALM


@pytest.mark.parametrize("answer", [b"b", None], ids=["answered", "given up before"])
def test_patience_comes_back_with_messages(answer: bytes | None) -> None:
    """A peer that makes calls is never ended for the frames that belong to them, even if its own clients always hang up."""
    peer = Peer(Http2Limits(patience=50))

    for number in range(1, 2_000, 2):
        asked = peer.receive(call(number, SINGLE), body(number, frame_message(b"a")), window_update(0, 1), answer=answer)
        assert len(asked) == 1
        peer.receive(frame(http2.RST_STREAM, 0, number, bytes(4)), frame(http2.PING, 0, 0, bytes(8)))

    assert not peer.connection.ended


def test_patience_comes_back_with_time() -> None:
    """A peer that is idle for years and looks whether we are there, every second, is no flood."""
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


def test_a_turn_is_bounded() -> None:
    """In one turn no more frames are looked at, and no more messages delivered, than the limit allows; nothing is lost."""
    limits = Http2Limits(work=64, patience=10**6)
    received = HELLO + call() + frame(http2.PING, 0, 0, bytes(8)) * 1_000 + body(1, frame_message(b"a") * 1_000)
    connection = Calls({b"/test.Service/Stream": False}, limits)
    connection.receive(received)

    turns = count_messages(connection)

    assert sum(turns) == 1_000
    assert max(turns) <= 8
    assert len(turns) >= (1_000 + 8 * 1_000) / 64
    assert connection.data_to_send().count(frame(http2.PING, http2.ACK, 0, bytes(8))) == 1_000


def test_large_messages_have_a_turn_each() -> None:
    """Messages of megabytes that become whole by one read are delivered in as many turns."""
    limits = Http2Limits(patience=10**6)
    large = frame_message(bytes(2**21))
    start = [large[place : place + http2.MAX_FRAME] for place in range(0, len(large) - 1, http2.MAX_FRAME)]
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


def test_answers_that_are_let_go_take_turns() -> None:
    """A window that opens at once for megabytes is used bit by bit, turn by turn."""
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


def test_answered_streams_that_the_peer_leaves_open_are_closed_for_it() -> None:
    """Past the limit the oldest is reset without an error, and late frames for it do no harm."""
    connection, _, streams = opened(*map(headers, range(1, 40, 2)), limits=Http2Limits(lingering=5))
    for stream in streams.values():
        connection.respond(stream, OK, end=True)

    resets = [(number, payload) for kind, _, number, payload in sent(connection) if kind == http2.RST_STREAM]
    assert resets == [(number, bytes(4)) for number in range(1, 30, 2)]
    assert connection.streams == 5
    receive(connection, frame(http2.DATA, http2.END_STREAM, 1, b"late") + frame(http2.DATA, http2.END_STREAM, 39, b"late"))
    assert not connection.ended
    assert connection.streams == 4


def test_streams_whose_window_stays_shut_are_bounded() -> None:
    """A peer that asks and asks without opening a window is told to calm down, and nothing is kept for it."""
    pool = Pool()
    connection, _, streams = opened(SHUT, *map(headers, range(1, 40, 2)), limits=Http2Limits(shut=10), pool=pool)

    for stream in streams.values():
        connection.respond(stream, OK)
        connection.send(stream, b"answer", b"")

    assert connection.error is not None
    assert connection.error.code == ENHANCE_YOUR_CALM
    assert pool.used == connection.streams == 0


def test_answers_that_are_not_read_are_bounded_in_bytes() -> None:
    """A peer whose window stays shut holds no more of the pool than its share, then the connection is ended."""
    pool = Pool(10_000)
    connection, _, streams = opened(SHUT, headers(), pool=pool)
    connection.respond(streams[1], OK)

    while not connection.ended:
        assert pool.used <= 5_000
        connection.send(streams[1], bytes(100))

    assert pool.used == 0


def test_a_header_block_without_an_end_is_held_within_the_share() -> None:
    """What came of it counts until it is whole, and is given back when it is, or when the connection ends."""
    pool = Pool(40_000)
    whole, _, _ = opened(headers(1, 0), pool=pool)
    assert pool.used == len(encode(REQUEST))
    assert receive(whole, frame(http2.CONTINUATION, http2.END_HEADERS, 1))
    assert pool.used == 0

    endless, _, _ = opened(headers(1, 0), frame(http2.CONTINUATION, 0, 1, bytes(16_000)) * 2, pool=pool)

    assert endless.error is not None
    assert endless.error.code == ENHANCE_YOUR_CALM
    assert pool.used == 0


def test_a_header_block_is_bounded_however_small_its_parts_are() -> None:
    """Block after block of CONTINUATION ends the connection at the block's limit."""
    connection, _, _ = opened(headers(1, 0), limits=Http2Limits(patience=10**9))
    parts = 0
    while not connection.ended:
        receive(connection, frame(http2.CONTINUATION, 0, 1, bytes(100)))
        parts += 1

    assert parts <= MAX_BLOCK // 100 + 1


def test_calls_that_say_nothing_make_room() -> None:
    """Past the limit the oldest silent call is ended, so that a peer cannot keep more of them than that."""
    peer = Peer()

    peer.receive(*(call(number) for number in range(1, 2 * grpc.MAX_SILENT + 20, 2)))

    assert len(peer.connection.calls) == grpc.MAX_SILENT
    assert peer.status(1) == grpc.RESOURCE_EXHAUSTED
    assert peer.receive(body(2 * grpc.MAX_SILENT + 19, frame_message(b"a"))) != []


def test_shares_leave_something_for_the_next() -> None:
    """One holder gets half of the pool, ten get equal parts, and there is as much left as each of them has."""
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
STEPS_OF_A_TURN = 3_000
"""Lines that a turn may run: every frame some dozens, and the longest header block."""

SIZES = st.sampled_from([0, 1, 500, 70_000, 2**31 - 1])
STREAM_NUMBERS = st.integers(0, 20).map(lambda number: 2 * number + 1)


class HostilePeers(RuleBasedStateMachine):
    """Two peers send anything, their owner answers anything, and a well-behaved third one shares their pool."""

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

    @rule(which=st.integers(0, 1), flags=st.sampled_from([0, 1, 4, 5]), number=STREAM_NUMBERS | st.none())
    def headers(self, which: int, flags: int, number: int | None) -> None:
        """A request, trailers, or a header block that continues."""
        if number is None:
            number = self.last[which] = self.last[which] + 2
        self._receive(which, headers(number, flags))

    @rule(which=st.integers(0, 1), end=st.booleans(), number=STREAM_NUMBERS, size=st.integers(0, 4_000))
    def go_on(self, which: int, end: bool, number: int, size: int) -> None:
        """More of a header block."""
        self._receive(which, frame(http2.CONTINUATION, http2.END_HEADERS * end, number, bytes(size)))

    @rule(which=st.integers(0, 1), number=STREAM_NUMBERS, size=st.integers(0, 100), end=st.booleans())
    def data(self, which: int, number: int, size: int, end: bool) -> None:
        """Part of a body."""
        self._receive(which, frame(http2.DATA, http2.END_STREAM * end, number, bytes(size)))

    @rule(which=st.integers(0, 1), number=STREAM_NUMBERS | st.just(0), increment=SIZES)
    def window(self, which: int, number: int, increment: int) -> None:
        """A window is opened."""
        self._receive(which, window_update(number, increment))

    @rule(which=st.integers(0, 1), sizes=st.lists(SIZES, max_size=5))
    def settings(self, which: int, sizes: list[int]) -> None:
        """All windows change."""
        self._receive(which, initial_window(*sizes))

    @rule(which=st.integers(0, 1), number=STREAM_NUMBERS)
    def reset(self, which: int, number: int) -> None:
        """A stream is given up."""
        self._receive(which, frame(http2.RST_STREAM, 0, number, bytes(4)))

    @rule(which=st.integers(0, 1), times=st.integers(1, 200))
    def ping(self, which: int, times: int) -> None:
        """A peer sends pings."""
        self._receive(which, frame(http2.PING, 0, 0, bytes(8)) * times)

    @rule(which=st.integers(0, 1), size=st.integers(0, 3_000), end=st.booleans(), headers_alone=st.booleans(), data=st.data())
    def answer(self, which: int, size: int, end: bool, headers_alone: bool, data: st.DataObject) -> None:
        """The owner answers one of its streams."""
        open_ones = [stream for stream in self.streams[which].values() if not stream.local_closed and stream.trailers is None]
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
        """A peer is gone, and another one comes."""
        self.connections[which].close()
        self.streams[which], self.last[which] = {}, -1
        self.connections[which] = Connection(LIMITS, pool=self.pool)
        self._receive(which, HELLO)

    @invariant()
    def the_innocent_is_served(self) -> None:
        """Whatever the others have done, there is memory for a message that comes in two parts, and an answer."""
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
        """What each peer holds is within its limits, and counted in the pool; something is always left for the other."""
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
        """Nothing is held for peers that are gone."""
        for connection in self.connections:
            connection.close()
        assert self.pool.used == 0


TestHostilePeers = pytest.mark.deep(HostilePeers.TestCase)


def test_fields_that_were_never_seen_are_work() -> None:
    """Of blocks full of new fields a turn looks at a few, of blocks that are known at many."""
    limits = Http2Limits(work=100)
    new = [
        headers(number, pairs=(*REQUEST, *((b"x-%d" % (number * 50 + each), b"") for each in range(50))))
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
