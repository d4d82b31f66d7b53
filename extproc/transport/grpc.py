"""gRPC on HTTP/2 (grpc/doc/PROTOCOL-HTTP2.md), server side, sans-IO: bytes in, events out.

A call lasts from its headers to its status. Its owner learns about it with the first message, so
calls without messages cost no more than streams. Requests that are not gRPC, or that call an
unknown method, are refused here.

A call is over when its status is sent, the peer has cancelled it, or it broke a rule. Then nothing
more is delivered, and anything that its owner sends is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias
from urllib.parse import quote

from extproc.errors import ProtocolError
from extproc.transport import http2
from extproc.transport.headers import Block, Cache, encode
from extproc.transport.http2 import DataReceived, Http2Limits, Http2Stream, Pool, RequestReceived

# Status codes.
OK: Final = 0
INVALID_ARGUMENT: Final = 3
NOT_FOUND: Final = 5
RESOURCE_EXHAUSTED: Final = 8
UNIMPLEMENTED: Final = 12
UNAVAILABLE: Final = 14

MAX_MESSAGE: Final = 64 * 2**20
"""Maximum bytes of a message: far above any reasonable buffer limit of Envoy."""

METADATA_PREFIX: Final = b"x-loopguard-"
MAX_METADATA: Final = 16
MAX_SILENT: Final = 1_000
"""Maximum number of calls without a message per connection; the oldest is dropped.

Envoy sends a message at once.
"""

_LONG: Final = 4_096
"""From this length on, copying a message costs more than writing it in pieces."""

_PREFIX: Final = 5
"""Bytes before a message: a compression flag and the length in 4 bytes."""

_MESSAGE_WORK: Final = 8
"""Cost of a message, in frames (see `Http2Limits.work`), plus one frame per 4 KiB."""

_RESPONSE: Final = encode([(b":status", b"200"), (b"content-type", b"application/grpc")])
_NOT_GRPC: Final = encode([(b":status", b"415"), (b"content-type", b"text/plain")])


Message: TypeAlias = bytes | list[bytes | memoryview]
"""A message to send; a long one may be in pieces, which are joined with the rest of the output."""


class Call:
    """One call.

    Attributes:
        number: the number of its stream.
        method: its path, such as `/grpc.health.v1.Health/Check`.
        metadata: Loopguard's part of the request's metadata.
        over: whether the call has ended; nothing more is delivered.
    """

    def __init__(
        self, stream: Http2Stream, method: bytes, metadata: list[tuple[str, str]], *, single: bool
    ) -> None:
        self.stream = stream
        self.number = stream.number
        self.method = method
        self.metadata = metadata
        self.single = single  # has one message; anything after it is dropped
        self.over = False
        self.silent = True  # no message yet
        self.started = False  # response headers are sent
        self.busy = False  # paused by its owner
        self.half_closed = False  # the peer has ended its side
        self.received = bytearray()  # undelivered and incomplete messages

    @property
    def size(self) -> int:
        """Length of its metadata, in bytes."""
        return sum(len(name) + len(value) for name, value in self.metadata)


class MessageReceived:
    """A message of a call. The first message opens the call."""

    def __init__(self, call: Call, message: bytes) -> None:
        self.call = call
        self.message = message


class HalfClosed:
    """The peer has ended its side, and all messages were delivered."""

    def __init__(self, call: Call) -> None:
        self.call = call


class CallEnded:
    """The peer cancelled the call or broke a rule."""

    def __init__(self, call: Call) -> None:
        self.call = call


Event: TypeAlias = MessageReceived | HalfClosed | CallEnded


class GrpcConnection:
    """All calls of one connection.

    Pass data to `receive`, then take events from `next_event` until there are none, then send what
    `data_to_send` returns.

    Attributes:
        calls: calls that are not over, by number.
    """

    def __init__(
        self,
        methods: Mapping[bytes, bool],
        limits: Http2Limits | None = None,
        cache: Cache | None = None,
        pool: Pool | None = None,
    ) -> None:
        """Write the first bytes.

        Args:
            methods: the paths served; True for calls of a single message.
            limits: of this connection.
            cache: shared by all connections of a server.
            pool: shared by all connections of a server.
        """
        self.calls: dict[int, Call] = {}
        self._http = http2.Connection(limits, cache, pool)
        self._methods = methods
        self._silent: dict[int, Call] = {}  # oldest first
        self._ready: deque[Call] = deque()  # calls that may have events to deliver

    @property
    def settled(self) -> bool:
        """Whether the peer has spoken HTTP/2."""
        return self._http.settled

    @property
    def ended(self) -> bool:
        """Whether the connection is over once the rest of `data_to_send` has been sent."""
        return self._http.ended

    @property
    def error(self) -> ProtocolError | None:
        """The peer's error that ended the connection, if any."""
        return self._http.error

    @property
    def unfinished(self) -> bool:
        """Whether work is left for the next turn, which `receive(b"")` starts."""
        return self._http.unfinished or (len(self._ready) > 0 and not self._http.ended)

    def receive(self, data: bytes, now: float = 0.0) -> None:
        """Start a turn; see `http2.Connection.receive`."""
        self._http.receive(data, now)

    def data_to_send(self) -> bytes:
        """Return all bytes to send now; they count as sent."""
        return self._http.data_to_send()

    def next_event(self) -> Event | None:
        """The next event; None at the end of the events or of this turn."""
        http = self._http
        while not http.ended:
            if self._ready:
                if http.turn_over:
                    return None
                event = self._read_received(self._ready[0])
                if event is not None:
                    return event
                self._ready.popleft()
                continue
            got = http.next_event()
            if got is None:
                return None
            if isinstance(got, DataReceived):
                event = self._on_data(got)
            elif isinstance(got, RequestReceived):
                event = self._on_request(got)
            else:
                event = self._on_reset(got.number)
            if event is not None:
                return event
        return None

    def send(self, call: Call, message: Message) -> None:
        """Send a message."""
        if call.over:
            return
        self._start(call)
        self._send(call, message, None)

    def answer(self, call: Call, message: Message) -> None:
        """Send the last message and the status OK."""
        if call.over:
            return
        self._start(call)
        self._send(call, message, _OK_TRAILERS)
        self._close(call)

    def send_all(self, call: Call, messages: Sequence[Message], *, last: bool) -> None:
        """Send several messages in as few frames as possible; with `last`, then the status OK."""
        if call.over:
            return
        self._start(call)
        pieces: list[bytes | memoryview] = []
        for message in messages:
            size = (
                len(message)
                if isinstance(message, bytes)
                else sum([len(piece) for piece in message])
            )
            pieces.append(size.to_bytes(_PREFIX, "big"))
            pieces += [message] if isinstance(message, bytes) else message
        self._http.send_long(call.stream, pieces, _OK_TRAILERS if last else None)
        if last:
            self._close(call)

    def _send(self, call: Call, message: Message, trailers: bytes | None) -> None:
        if isinstance(message, bytes):
            if len(message) < _LONG:
                self._http.send(call.stream, frame_message(message), trailers)
                return
            message = [message]
        size = sum([len(piece) for piece in message])
        self._http.send_long(call.stream, [size.to_bytes(_PREFIX, "big"), *message], trailers)

    def finish(self, call: Call, status: int, message: str = "") -> None:
        """End a call with a status."""
        if call.over:
            return
        if call.started:
            self._http.send(call.stream, b"", encode_trailers(status, message))
        else:
            self._http.respond(call.stream, encode_trailers(status, message, only=True), end=True)
        self._close(call)

    def charge(self, work: int) -> None:
        """Add to the cost of a message, in frames."""
        self._http.work += work

    def pause(self, call: Call) -> None:
        """Deliver no more messages of this call until `resume`."""
        call.busy = True

    def resume(self, call: Call) -> None:
        """Deliver messages again, from the next turn on."""
        call.busy = False
        if not call.over and (call.received or call.half_closed):
            self._ready.append(call)

    def shut(self) -> None:
        """Tell the peer to open no more calls."""
        self._http.goaway()

    def close(self) -> None:
        """End all calls: the connection is lost."""
        for call in self.calls.values():
            call.over = True
        self.calls.clear()
        self._silent.clear()
        self._ready.clear()
        self._http.close()

    def _on_request(self, got: RequestReceived) -> Event | None:
        path = find_method(got.headers)
        if not path:
            self._http.respond(got.stream, _NOT_GRPC)
            self._http.send(
                got.stream, b"this port speaks gRPC: %b\n" % b" ".join(self._methods), b""
            )
            return None
        single = self._methods.get(path)
        if single is None:
            self._http.respond(
                got.stream, encode_trailers(UNIMPLEMENTED, "unknown method", only=True), end=True
            )
            return None
        call = Call(got.stream, path, read_metadata(got.headers), single=single)
        self.calls[call.number] = self._silent[call.number] = call
        if call.metadata and not self._http.share.take(call.size):
            call.metadata = []
            self.finish(call, RESOURCE_EXHAUSTED, "too much metadata")
        elif got.ended:
            self.finish(call, OK)
        elif len(self._silent) > MAX_SILENT:
            self.finish(
                next(iter(self._silent.values())), RESOURCE_EXHAUSTED, "too many silent calls"
            )
        return None

    def _on_data(self, got: DataReceived) -> Event | None:
        call = self.calls.get(got.stream.number)
        if call is None:
            return None
        call.half_closed = got.ended
        data = got.data
        if call.busy or call.received or got.ended or not _is_one_message(data):
            return self._buffer(call, data)
        return self._deliver(call, data[_PREFIX:])  # exactly one message: the usual case

    def _buffer(self, call: Call, data: bytes) -> Event | None:
        if not self._http.share.take(len(data)):
            return self._refuse(
                call, ProtocolError("too much data in incomplete messages", code=RESOURCE_EXHAUSTED)
            )
        call.received += data
        if not call.busy:
            self._ready.append(call)
        return None

    def _deliver(self, call: Call, message: bytes) -> Event:
        if call.silent:
            call.silent = False
            del self._silent[call.number]
        self._http.work += _MESSAGE_WORK + (len(message) >> 12)
        self._http.patience += self._http.limits.message_earns
        return MessageReceived(call, message)

    def _read_received(self, call: Call) -> Event | None:
        """The next event from a call's received bytes, or None if they are incomplete."""
        if call.over or call.busy:
            return None
        if call.single and not call.silent:
            self._drop_received(call)
            return None
        try:
            size = read_size(call.received)
        except ProtocolError as error:
            return self._refuse(call, error)
        if 0 < size <= len(call.received):
            with memoryview(call.received) as received:
                message = bytes(received[_PREFIX:size])
            del call.received[:size]  # free at a bytearray's start
            self._http.share.give(size)
            return self._deliver(call, message)
        return self._half_close(call) if call.half_closed else None

    def _half_close(self, call: Call) -> Event | None:
        call.half_closed = False  # reported only once
        if not call.silent:
            return HalfClosed(call)
        self.finish(call, OK)
        return None

    def _refuse(self, call: Call, error: ProtocolError) -> Event | None:
        """End a call whose peer broke a rule, and tell its owner if it has one."""
        self.finish(call, error.code, str(error))
        return None if call.silent else CallEnded(call)

    def _on_reset(self, number: int) -> Event | None:
        call = self.calls.get(number)
        if call is None:
            return None
        self._close(call)
        return None if call.silent else CallEnded(call)

    def _start(self, call: Call) -> None:
        if not call.started:
            call.started = True
            self._http.respond(call.stream, _RESPONSE)

    def _close(self, call: Call) -> None:
        call.over = True
        self.calls.pop(call.number, None)
        if call.silent:
            self._silent.pop(call.number, None)
        if call.metadata and not self._http.ended:
            self._http.share.give(call.size)
        self._drop_received(call)

    def _drop_received(self, call: Call) -> None:
        if call.received and not self._http.ended:
            self._http.share.give(len(call.received))
        call.received = bytearray()


def read_metadata(headers: Block) -> list[tuple[str, str]]:
    """Loopguard's part of a request's metadata; the rest is dropped."""
    ours = [field for field in headers.fields if field.name.startswith(METADATA_PREFIX)][
        :MAX_METADATA
    ]
    return [(field.name.decode("latin-1"), field.value.decode("latin-1")) for field in ours]


def read_size(data: bytearray) -> int:
    """The length of a message with its prefix; 0 if unknown; raises ProtocolError (gRPC's code)."""
    if len(data) < _PREFIX:
        return 0
    if data[0]:
        raise ProtocolError("compressed messages are not supported", code=UNIMPLEMENTED)
    size = int.from_bytes(data[:_PREFIX], "big")
    if size > MAX_MESSAGE:
        raise ProtocolError(
            f"a message of {size} bytes; the limit is {MAX_MESSAGE}", code=RESOURCE_EXHAUSTED
        )
    return _PREFIX + size


def find_method(headers: Block) -> bytes:
    """The method that a request calls, or empty if the request is not gRPC."""
    is_call = headers.method == b"POST" and headers.content_type.lower().startswith(
        b"application/grpc"
    )
    return headers.path if is_call else b""


def frame_message(message: bytes) -> bytes:
    """A message with its prefix: compression flag 0 and the length."""
    return len(message).to_bytes(_PREFIX, "big") + message


def _is_one_message(data: bytes) -> bool:
    size = len(data) - _PREFIX
    if size < 0 or data[0]:
        return False
    return data[1] << 24 | data[2] << 16 | data[3] << 8 | data[4] == size


def encode_trailers(status: int, message: str = "", *, only: bool = False) -> bytes:
    """The header block that ends a call; `only`: a response of this block alone (Trailers-Only)."""
    start = [(b":status", b"200"), (b"content-type", b"application/grpc")] if only else []
    text = [(b"grpc-message", quote(message, safe=" ").encode())] if message else []
    return encode([*start, (b"grpc-status", str(status).encode()), *text])


_OK_TRAILERS: Final = encode_trailers(OK)
