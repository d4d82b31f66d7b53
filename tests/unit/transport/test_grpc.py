"""gRPC without a socket: frames in, events out, frames to send."""

from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from extproc.transport import grpc, http2
from extproc.transport.grpc import Call, GrpcConnection, frame_message
from extproc.transport.headers import encode
from extproc.transport.http2 import Pool
from tests.support.grpc import SINGLE, STREAMING, Peer, body, call
from tests.support.http2 import frame


@pytest.mark.parametrize("step", [1, 3, 1_000])
def test_messages_cut_anywhere_come_out_whole(step: int) -> None:
    messages = [b"", b"one", b"x" * 300, b"two"]
    received = b"".join(map(frame_message, messages)) + frame_message(b"rest")[:-1]
    peer = Peer()

    seen = peer.receive(
        call(),
        *(body(1, received[start : start + step]) for start in range(0, len(received), step)),
    )

    assert seen == [("MessageReceived", 1, message) for message in messages]
    assert peer.receive(body(1, b"t")) == [("MessageReceived", 1, b"rest")]


@pytest.mark.parametrize(("longer", "frames"), [(0, 1), (16_384, 2)])
def test_several_messages_share_a_frame(longer: int, frames: int) -> None:
    messages: list[bytes | list[bytes | memoryview]] = [
        b"one",
        [b"tw", memoryview(b"o")],
        b"",
        b"x" * longer,
    ]
    peer = Peer()
    peer.receive(call(), body(1, frame_message(b"question")))

    peer.connection.send_all(peer.calls[1], messages, last=True)

    assert peer.content(1) == b"".join(map(frame_message, [b"one", b"two", b"", b"x" * longer]))
    assert len([kind for kind, *_ in peer.frames if kind == http2.DATA]) == frames
    assert peer.status(1) == grpc.OK
    assert not peer.connection.calls


def test_single_call_answers_only_its_first_message() -> None:
    """The others are dropped, hold no memory, and nothing follows the end of the stream."""
    pool = Pool()
    peer = Peer(pool=pool)

    seen = peer.receive(
        call(1, SINGLE),
        body(1, frame_message(b"a") + frame_message(b"b")),
        body(1, frame_message(b"c") * 1_000),
    )
    assert (seen, pool.used) == ([("MessageReceived", 1, b"a")], peer.calls[1].size)
    peer.connection.answer(peer.calls[1], b"x")

    assert peer.content(1) == frame_message(b"x")
    assert [flags & http2.END_STREAM for _, flags, number, _ in peer.frames if number == 1] == [
        0,
        0,
        http2.END_STREAM,
    ]


def test_messages_wait_while_their_call_is_paused() -> None:
    pool = Pool()
    peer = Peer(pool=pool)
    peer.receive(call(), body(1, frame_message(b"a")))
    peer.connection.pause(peer.calls[1])

    seen = peer.receive(
        body(1, frame_message(b"b") + frame_message(b"c")),
        body(1, frame_message(b"d"), http2.END_STREAM),
    )

    assert seen == []
    assert pool.used == 18 + peer.calls[1].size
    peer.connection.resume(peer.calls[1])
    assert peer.receive() == [
        *(("MessageReceived", 1, message) for message in (b"b", b"c", b"d")),
        ("HalfClosed", 1, b""),
    ]
    assert pool.used == peer.calls[1].size


def test_half_closed_call_without_messages_is_ended() -> None:
    """The owner of a call that has spoken is told."""
    peer = Peer()

    assert (
        peer.receive(call(1, flags=http2.END_STREAM), call(3), body(3, b"", http2.END_STREAM)) == []
    )
    assert peer.status(1) == peer.status(3) == grpc.OK
    seen = peer.receive(call(5), body(5, frame_message(b"a"), http2.END_STREAM))
    assert seen == [("MessageReceived", 5, b"a"), ("HalfClosed", 5, b"")]
    assert list(peer.connection.calls) == [5]


REFUSED = {
    "compressed": (b"\x01\0\0\0\x01x", grpc.UNIMPLEMENTED),
    "a giant": (b"\0" + (grpc.MAX_MESSAGE + 1).to_bytes(4, "big"), grpc.RESOURCE_EXHAUSTED),
}


@pytest.mark.parametrize("spoken", [False, True])
@pytest.mark.parametrize(("content", "status"), REFUSED.values(), ids=REFUSED.keys())
def test_compressed_and_giant_messages_end_their_call(
    content: bytes, status: int, spoken: bool
) -> None:
    peer = Peer()
    peer.receive(call(), *[body(1, frame_message(b"a"))] * spoken)

    assert peer.receive(body(1, content)) == [("CallEnded", 1, b"")] * spoken
    assert peer.status(1) == status
    assert not peer.connection.calls


def test_content_type_and_te_ignore_case() -> None:
    """RFC 9110 sections 8.3.1 and 10.1.4."""
    peer = Peer()

    seen = peer.receive(
        call(content_type=b"Application/gRPC", te=b"Trailers"), body(1, frame_message(b"m"))
    )

    assert seen == [("MessageReceived", 1, b"m")]


def test_requests_that_are_no_calls_are_refused() -> None:
    peer = Peer()

    seen = peer.receive(
        call(1, method=b"GET"), call(3, content_type=b"text/html"), call(5, b"/nobody")
    )

    assert seen == []
    assert [peer.headers(number)[0][b":status"] for number in (1, 3, 5)] == [b"415", b"415", b"200"]
    assert b"/test.Service/Ask" in peer.content(3)
    assert peer.status(5) == grpc.UNIMPLEMENTED
    assert not peer.connection.calls


def test_nothing_is_sent_on_an_ended_call() -> None:
    peer = Peer()
    peer.receive(call(1), body(1, frame_message(b"a")), call(3), body(3, frame_message(b"b")))
    peer.connection.finish(peer.calls[1], grpc.OK)

    assert peer.receive(frame(http2.RST_STREAM, 0, 3, bytes(4))) == [("CallEnded", 3, b"")]
    peer.receive()
    sent = len(peer.frames)
    for over in peer.calls.values():
        peer.connection.send(over, b"x")
        peer.connection.answer(over, b"x")
        peer.connection.send_all(over, [b"x", b"y"], last=True)
        peer.connection.finish(over, grpc.NOT_FOUND)
    peer.receive()

    assert len(peer.frames) == sent


PEERS: dict[str, Callable[[int], bytes]] = {
    "call": call,
    "single": lambda number: call(number, SINGLE),
    "message": lambda number: body(number, frame_message(b"x") * 2),
    "part": lambda number: body(number, frame_message(b"x")[:-1]),
    "end": lambda number: body(number, b"", http2.END_STREAM),
    "reset": lambda number: frame(http2.RST_STREAM, 0, number, bytes(4)),
    "bad": lambda number: body(number, b"\xff" * 9),
    "window": lambda number: frame(http2.WINDOW_UPDATE, 0, number, b"\0\0\0\x09"),
}
OWNERS: dict[str, Callable[[GrpcConnection, Call], None]] = {
    "send": lambda connection, owned: connection.send(owned, b"part of an answer"),
    "answer": lambda connection, owned: connection.answer(owned, b"answer"),
    "several": lambda connection, owned: connection.send_all(
        owned, [b"part", [b"another ", b"part"]], last=False
    ),
    "last ones": lambda connection, owned: connection.send_all(
        owned, [b"part", b"answer"], last=True
    ),
    "finish": lambda connection, owned: connection.finish(owned, grpc.NOT_FOUND),
    "pause": lambda connection, owned: connection.pause(owned),
    "resume": lambda connection, owned: connection.resume(owned),
}


def check_ends(frames: list[tuple[int, int, int, bytes]]) -> None:
    over: set[int] = set()
    for kind, flags, number, _ in frames:
        if kind in (http2.DATA, http2.HEADERS):
            assert number not in over
        if kind == http2.RST_STREAM or (
            kind in (http2.DATA, http2.HEADERS) and flags & http2.END_STREAM
        ):
            over.add(number)


@given(
    st.lists(st.tuples(st.sampled_from([*PEERS, *OWNERS]), st.integers(0, 3)), max_size=60),
    st.integers(1, 40),
    st.booleans(),
)
def test_streams_end_once_in_any_order_of_events(
    actions: list[tuple[str, int]], step: int, shut: bool
) -> None:
    pool = Pool()
    peer = Peer(pool=pool)
    peer.receive(frame(http2.SETTINGS, 0, 0, b"\0\x04\0\0\0\0" * shut))
    opened = 1
    for action, which in actions:
        number = max(1, opened - 2 * which)
        if action in ("call", "single"):
            number = opened = opened + 2
        if action in PEERS:
            peer.receive(PEERS[action](number), step=step)
        elif number in peer.calls:
            OWNERS[action](peer.connection, peer.calls[number])
    peer.receive()

    check_ends(peer.frames)
    peer.connection.close()
    assert pool.used == 0


def test_metadata_is_bounded_and_freed_with_its_call() -> None:
    """Only sixteen fields meant for Loopguard are kept."""
    pool = Pool(10_000)
    peer = Peer(pool=pool)
    large = [(b"x-loopguard-%d" % number, b"x" * 100) for number in range(20)]
    pairs = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", STREAMING),
        (b"content-type", b"application/grpc"),
    ]

    peer.receive(
        *(
            frame(http2.HEADERS, http2.END_HEADERS, number, encode([*pairs, *large]))
            for number in range(1, 20, 2)
        )
    )

    assert [peer.status(number) for number in (1, 3, 5)] == [None, None, grpc.RESOURCE_EXHAUSTED]
    assert [len(each.metadata) for each in peer.connection.calls.values()] == [
        grpc.MAX_METADATA
    ] * 2
    assert pool.used == sum(each.size for each in peer.connection.calls.values())
    peer.receive(frame(http2.RST_STREAM, 0, 1, bytes(4)), frame(http2.RST_STREAM, 0, 3, bytes(4)))
    assert pool.used == 0
