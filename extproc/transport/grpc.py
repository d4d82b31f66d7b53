"""gRPC on HTTP/2 (grpc/doc/PROTOCOL-HTTP2.md), the server's side, without a socket: bytes in, events out, bytes to send.

This is the life of a call, from its headers to its status. Its owner learns of a call with its first message, so a peer that
opens calls without messages costs no more than streams. Requests that are not gRPC, or call an unknown method, are refused
here.

A call is over when its status is sent, the peer has cancelled it, or it broke a rule. Then nothing more is delivered, and
anything that its owner sends is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import lru_cache
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
"""Largest message taken, in bytes: far above any buffer limit that an Envoy should have."""

METADATA_PREFIX: Final = b"x-loopguard-"
MAX_METADATA: Final = 16
MAX_SILENT: Final = 1_000
"""Most calls of a connection without a message; the oldest is dropped. Envoy sends the first message at once."""

_PREFIX: Final = 5
"""Bytes before a message: a compression flag and a length of 4 bytes."""

_MESSAGE_WORK: Final = 8
"""Cost of a message in frames, because its receiver has more to do than HTTP/2; see `Limits.work`. A large one costs as many as
it has pages."""

_RESPONSE: Final = encode([(b":status", b"200"), (b"content-type", b"application/grpc")])
_NOT_GRPC: Final = encode([(b":status", b"415"), (b"content-type", b"text/plain")])


class Call:
    """One call.

    Attributes:
        number: of its stream.
        method: its path, such as `/grpc.health.v1.Health/Check`.
        metadata: of its request, as far as it is meant for us.
        over: nothing more is delivered.
    """

    __slots__ = (
        "busy",
        "half_closed",
        "metadata",
        "method",
        "number",
        "over",
        "received",
        "silent",
        "single",
        "started",
        "stream",
    )

    def __init__(self, stream: Http2Stream, method: bytes, metadata: list[tuple[str, str]], *, single: bool) -> None:
        self.stream = stream
        self.number = stream.number
        self.method = method
        self.metadata = metadata
        self.single = single  # it has one message; what follows that is dropped
        self.over = False
        self.silent = True  # no message yet
        self.started = False  # response headers are out
        self.busy = False  # its owner takes no more messages for now
        self.half_closed = False  # the peer has said all it had to say
        self.received = bytearray()  # messages that are not delivered, or not whole

    @property
    def size(self) -> int:
        """Bytes of metadata that are held for it."""
        return sum(len(name) + len(value) for name, value in self.metadata)


class MessageReceived:
    """A message of a call; its first one opens it."""

    __slots__ = ("call", "message")

    def __init__(self, call: Call, message: bytes) -> None:
        self.call = call
        self.message = message


class HalfClosed:
    """The peer has ended its side, and every message was delivered."""

    __slots__ = ("call",)

    def __init__(self, call: Call) -> None:
        self.call = call


class CallEnded:
    """The call is over, but not by its owner: the peer cancelled it or broke a rule."""

    __slots__ = ("call",)

    def __init__(self, call: Call) -> None:
        self.call = call


Event: TypeAlias = MessageReceived | HalfClosed | CallEnded


class GrpcConnection:
    """All calls of one connection.

    Hand over what came with `receive`, then take events with `next_event` until there are none, then send what `take` returns.

    Attributes:
        calls: that are not over, by their number.
    """

    def __init__(
        self,
        methods: Mapping[bytes, bool],
        limits: Http2Limits | None = None,
        cache: Cache | None = None,
        pool: Pool | None = None,
    ) -> None:
        """Speak first; `methods` are the paths served, True for those whose calls consist of a single message.

        `cache` and `pool` are for all connections of a server.
        """
        self.calls: dict[int, Call] = {}
        self._http = http2.Connection(limits, cache, pool)
        self._methods = methods
        self._silent: dict[int, Call] = {}  # the oldest first
        self._ready: deque[Call] = deque()  # calls that may have something to deliver

    @property
    def settled(self) -> bool:
        """The peer has spoken HTTP/2."""
        return self._http.settled

    @property
    def ended(self) -> bool:
        """Nothing is received or sent any more, but for what `take` still returns."""
        return self._http.ended

    @property
    def error(self) -> ProtocolError | None:
        """What the peer did wrong, where that has ended the connection."""
        return self._http.error

    @property
    def unfinished(self) -> bool:
        """There is more to do than fitted into the turn; `receive(b"")` starts the next one."""
        return self._http.unfinished or (len(self._ready) > 0 and not self._http.ended)

    def receive(self, data: bytes, now: float = 0.0) -> None:
        """Start a turn: see `http2.Connection.receive`."""
        self._http.receive(data, now)

    def data_to_send(self) -> bytes:
        """Everything there is to send now; it counts as sent."""
        return self._http.data_to_send()

    def next_event(self) -> Event | None:
        """What happened next; None when everything is delivered, or this turn is over."""
        http = self._http
        while not http.ended:
            if self._ready:
                if http.turn_over:
                    return None
                event = self._deliver(self._ready[0])
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

    def send(self, call: Call, message: bytes) -> None:
        """Send a message."""
        if call.over:
            return
        self._start(call)
        self._http.send(call.stream, frame_message(message))

    def answer(self, call: Call, message: bytes) -> None:
        """Send the last message, and the status OK."""
        if call.over:
            return
        self._start(call)
        self._http.send(call.stream, frame_message(message), _OK_TRAILERS)
        self._close(call)

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
        """Cost of a message, in frames, beyond the cost of all messages."""
        self._http.work += work

    def pause(self, call: Call) -> None:
        """Deliver nothing more of this call until it is resumed."""
        call.busy = True

    def resume(self, call: Call) -> None:
        """Deliver what has come meanwhile, from the next turn on."""
        call.busy = False
        if not call.over and (call.received or call.half_closed):
            self._ready.append(call)

    def shut(self) -> None:
        """Ask the peer to open no more calls here."""
        self._http.goaway()

    def close(self) -> None:
        """The connection is lost, and all its calls are over."""
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
            self._http.send(got.stream, b"this port speaks gRPC: %b\n" % b" ".join(self._methods), b"")
            return None
        single = self._methods.get(path)
        if single is None:
            self._http.respond(got.stream, encode_trailers(UNIMPLEMENTED, "unknown method", only=True), end=True)
            return None
        call = Call(got.stream, path, read_metadata(got.headers), single=single)
        self.calls[call.number] = self._silent[call.number] = call
        if call.metadata and not self._http.share.take(call.size):
            call.metadata = []
            self.finish(call, RESOURCE_EXHAUSTED, "too much metadata")
        elif got.ended:
            self.finish(call, OK)
        elif len(self._silent) > MAX_SILENT:
            self.finish(next(iter(self._silent.values())), RESOURCE_EXHAUSTED, "too many silent calls")
        return None

    def _on_data(self, got: DataReceived) -> Event | None:
        call = self.calls.get(got.stream.number)
        if call is None:
            return None
        call.half_closed = got.ended
        data = got.data
        if call.busy or call.received or got.ended or not _is_message(data):
            return self._keep(call, data)
        return self._open(call, data[_PREFIX:])  # one whole message, which is what nearly always comes

    def _keep(self, call: Call, data: bytes) -> Event | None:
        if not self._http.share.take(len(data)):
            return self._refuse(call, ProtocolError("too much data in incomplete messages", code=RESOURCE_EXHAUSTED))
        call.received += data
        if not call.busy:
            self._ready.append(call)
        return None

    def _open(self, call: Call, message: bytes) -> Event:
        """Deliver a message."""
        if call.silent:
            call.silent = False
            del self._silent[call.number]
        self._http.work += _MESSAGE_WORK + (len(message) >> 12)
        self._http.patience += self._http.limits.message_earns
        return MessageReceived(call, message)

    def _deliver(self, call: Call) -> Event | None:
        """The next event from what a call has received, if it is complete."""
        if call.over or call.busy:
            return None
        if call.single and not call.silent:
            self._drop(call)
            return None
        try:
            size = read_size(call.received)
        except ProtocolError as error:
            return self._refuse(call, error)
        if 0 < size <= len(call.received):
            with memoryview(call.received) as received:
                message = bytes(received[_PREFIX:size])
            del call.received[:size]  # which costs nothing at a bytearray's start
            self._http.share.give(size)
            return self._open(call, message)
        return self._half_close(call) if call.half_closed else None

    def _half_close(self, call: Call) -> Event | None:
        call.half_closed = False  # it is said once
        if not call.silent:
            return HalfClosed(call)
        self.finish(call, OK)
        return None

    def _refuse(self, call: Call, error: ProtocolError) -> Event | None:
        """The peer broke a rule; the owner of the call must hear of it, if there is one."""
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
        self._drop(call)

    def _drop(self, call: Call) -> None:
        """Forget what a call has received and no longer needs."""
        if call.received and not self._http.ended:
            self._http.share.give(len(call.received))
        call.received = bytearray()


def read_metadata(headers: Block) -> list[tuple[str, str]]:
    """A request's metadata, as far as it is meant for us; nothing else is kept while a call lasts."""
    ours = [field for field in headers.fields if field.name.startswith(METADATA_PREFIX)][:MAX_METADATA]
    return [(field.name.decode("latin-1"), field.value.decode("latin-1")) for field in ours]


def read_size(data: bytearray) -> int:
    """The length of a message with its prefix, 0 while it is unknown; raises ProtocolError, with gRPC's code, if too large."""
    if len(data) < _PREFIX:
        return 0
    if data[0]:
        raise ProtocolError("compressed messages are not supported", code=UNIMPLEMENTED)
    size = int.from_bytes(data[:_PREFIX], "big")
    if size > MAX_MESSAGE:
        raise ProtocolError(f"a message of {size} bytes; the limit is {MAX_MESSAGE}", code=RESOURCE_EXHAUSTED)
    return _PREFIX + size


def find_method(headers: Block) -> bytes:
    """The method that a request calls, empty when it is no gRPC."""
    is_call = headers.method == b"POST" and headers.content_type.lower().startswith(b"application/grpc")
    return headers.path if is_call else b""


def frame_message(message: bytes) -> bytes:
    """A message with its prefix: the compression flag, which is 0, and its length."""
    return len(message).to_bytes(_PREFIX, "big") + message


def _is_message(data: bytes) -> bool:
    """Whether this is exactly one message, and not a compressed one."""
    size = len(data) - _PREFIX
    if size < 0 or data[0]:
        return False
    return data[1] << 24 | data[2] << 16 | data[3] << 8 | data[4] == size


@lru_cache(maxsize=64)
def encode_trailers(status: int, message: str = "", *, only: bool = False) -> bytes:
    """The header block that ends a call; `only` for a response that has nothing before it (Trailers-Only)."""
    start = [(b":status", b"200"), (b"content-type", b"application/grpc")] if only else []
    text = [(b"grpc-message", quote(message, safe=" ").encode())] if message else []
    return encode([*start, (b"grpc-status", str(status).encode()), *text])


_OK_TRAILERS: Final = encode_trailers(OK)
