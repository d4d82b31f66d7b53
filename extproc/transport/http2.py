"""HTTP/2 (RFC 9113), the server's side, without a socket: bytes in, events out, bytes to send.

It is as much of HTTP/2 as gRPC needs, and all of what a peer could do wrong: every frame is checked, errors of a stream reset
that stream, errors of the connection end it with a GOAWAY, and nothing a peer sends makes it grow without bound (header blocks,
streams at once and the header cache have limits; what is received is handed on at once).

Header blocks: we ask for a SETTINGS_HEADER_TABLE_SIZE of 0, and once the peer's encoder has shrunk its table to that, a block
means the same wherever it stands. Envoy sends few distinct blocks, and decoding one costs more than everything else in a
request: a small cache from block to headers is exact then. All that is not in the cache goes through the stateful decoder.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from hpack import Decoder, HPACKError
from hpack.struct import HeaderTuple

from extproc.errors import ProtocolError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

# Error codes (RFC 9113 section 7).
NO_ERROR = 0x0
PROTOCOL_ERROR = 0x1
FLOW_CONTROL_ERROR = 0x3
STREAM_CLOSED = 0x5
FRAME_SIZE_ERROR = 0x6
REFUSED_STREAM = 0x7
CANCEL = 0x8
COMPRESSION_ERROR = 0x9
ENHANCE_YOUR_CALM = 0xB

# Frame types (section 6).
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

# Flags.
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

# Settings (section 6.5.2).
_HEADER_TABLE_SIZE, _ENABLE_PUSH, _MAX_STREAMS, _INITIAL_WINDOW, _MAX_FRAME, _MAX_HEADER_LIST = range(1, 7)

MAX_FRAME = 16_384
"""Largest payload we take: the protocol's own default."""

MAX_STREAMS = 65_536
"""Streams at once on one connection; each costs a few hundred bytes while it waits."""

MAX_HEADER_BLOCK = 262_144
"""Bytes of one request's encoded headers and of its decoded ones; Envoy's metadata takes about a kilobyte."""

_TABLE_SIZE_UPDATE = 0x20
"""First bits of a dynamic table size update (RFC 7541 section 6.3); its other five bits hold the size."""

_MAX_WINDOW = 2**31 - 1
_STREAM_WINDOW = 2**30
_UPDATE_AFTER = 2**24
"""Bytes received before a window is opened again: what arrives is consumed at once, so windows only have to stay open."""

_CACHED_BLOCKS = 1_024
_CACHED_BLOCK_BYTES = 4_096

_FRAME = struct.Struct(">HBBBI")  # length (16 + 8 bits), type, flags, stream
_SETTING = struct.Struct(">HI")
_CONNECTION_HEADERS = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"})
_PSEUDO = frozenset({b":method", b":scheme", b":path", b":authority"})

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]


class RequestReceived(NamedTuple):
    """A stream has begun; `ended` when nothing follows."""

    stream: int
    headers: Headers
    ended: bool


class DataReceived(NamedTuple):
    """Part of a request's body, possibly empty; `ended` when it was the last."""

    stream: int
    data: bytes
    ended: bool


class StreamReset(NamedTuple):
    """The stream is gone, reset by the peer or by us for an error of the peer's."""

    stream: int
    code: int


class ConnectionEnded(NamedTuple):
    """The peer broke the protocol: send what there is to send, then close."""

    code: int
    message: str


Event: TypeAlias = RequestReceived | DataReceived | StreamReset | ConnectionEnded


class _StreamError(Exception):
    """Ends one stream with RST_STREAM."""

    def __init__(self, stream: int, code: int) -> None:
        self.stream = stream
        self.code = code


class _Stream:
    """What is known about an open or half-closed stream."""

    __slots__ = ("blocked", "consumed", "expected", "local_closed", "received", "remote_closed", "trailers", "window")

    def __init__(self, window: int, expected: int) -> None:
        self.window = window  # what we may still send
        self.expected = expected  # content-length, -1 when not given
        self.received = 0
        self.consumed = 0  # received since the last WINDOW_UPDATE
        self.remote_closed = False
        self.local_closed = False
        self.blocked = b""  # data that waits for the peer to open a window
        self.trailers: bytes | None = None  # what ends the stream once that is out


class Connection:
    """One connection, from its preface to its end."""

    def __init__(self) -> None:
        """Our SETTINGS go first."""
        self._buffer = b""
        self._preface = False
        self._settled = False  # the peer's first SETTINGS came
        self._acknowledged = False  # it knows ours
        self._streams: dict[int, _Stream] = {}
        self._last = 0
        self._block: tuple[int, int, bytearray] | None = None  # stream, flags and what came of a block that goes on
        self._decoder = Decoder(max_header_list_size=MAX_HEADER_BLOCK)
        self._blocks: dict[bytes, tuple[Headers, int | None]] = {}
        self._window = 65_535  # what we may still send on the whole connection
        self._peer_window = 65_535
        self._peer_frame = MAX_FRAME
        self._consumed = 0
        self._events: list[Event] = []
        self.ended = False
        settings = {
            _HEADER_TABLE_SIZE: 0,
            _MAX_STREAMS: MAX_STREAMS,
            _INITIAL_WINDOW: _STREAM_WINDOW,
            _MAX_HEADER_LIST: MAX_HEADER_BLOCK,
        }
        payload = b"".join(_SETTING.pack(*item) for item in settings.items())
        self._out = [_frame(SETTINGS, 0, 0, payload), _window_update(0, _MAX_WINDOW - 65_535)]

    @property
    def streams(self) -> int:
        """Streams that are not over on both sides."""
        return len(self._streams)

    def take(self) -> bytes:
        """Everything there is to send now; it counts as sent."""
        out, self._out = b"".join(self._out), []
        return out

    def receive(self, data: bytes) -> list[Event]:
        """Take what came from the peer, cut anywhere; returns what happened, in order."""
        if self.ended:
            return []
        events = self._events = []
        try:
            self._frames(self._buffer + data if self._buffer else data)
        except ProtocolError as error:
            self._end(error.code, str(error))
        return events

    def _frames(self, data: bytes) -> None:
        position, size = 0, len(data)
        if not self._preface:
            if not PREFACE.startswith(data[: len(PREFACE)]):
                raise ProtocolError("no HTTP/2 preface", code=PROTOCOL_ERROR)
            if size < len(PREFACE):
                self._buffer = data
                return
            position, self._preface = len(PREFACE), True
        while size - position >= 9:  # noqa: PLR2004  # a frame's header
            high, low, kind, flags, stream = _FRAME.unpack_from(data, position)
            length = high << 8 | low
            if length > MAX_FRAME:
                raise ProtocolError(f"a frame of {length} bytes", code=FRAME_SIZE_ERROR)
            end = position + 9 + length
            if end > size:
                break
            try:
                self._frame(kind, flags, stream & _MAX_WINDOW, data[position + 9 : end])
            except _StreamError as error:
                self.reset(error.stream, error.code)
                self._events.append(StreamReset(error.stream, error.code))
            position = end
        self._buffer = data[position:]

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if self._block is not None and (kind != CONTINUATION or stream != self._block[0]):
            raise ProtocolError("a header block was interrupted", code=PROTOCOL_ERROR)
        if not self._settled and kind != SETTINGS:
            raise ProtocolError("the first frame is not SETTINGS", code=PROTOCOL_ERROR)
        handler = _HANDLERS.get(kind)
        if handler is not None:  # frames of unknown types are ignored (section 4.1)
            handler(self, flags, stream, payload)

    def _on_data(self, flags: int, stream: int, payload: bytes) -> None:
        size = len(payload)
        self._consumed += size
        if self._consumed >= _UPDATE_AFTER:
            self._out.append(_window_update(0, self._consumed))
            self._consumed = 0
        state = self._streams.get(stream)
        if state is None:
            raise self._not_open(stream)
        if state.remote_closed:
            raise _StreamError(stream, STREAM_CLOSED)
        if flags & PADDED:
            payload = _unpadded(payload)
        if flags & END_STREAM:
            self._remote_ends(stream, state)
        elif size:
            state.consumed += size
            if state.consumed >= _UPDATE_AFTER:
                self._out.append(_window_update(stream, state.consumed))
                state.consumed = 0
        state.received += len(payload)
        if state.expected >= 0 and (
            state.received > state.expected or (flags & END_STREAM and state.received != state.expected)
        ):
            raise _StreamError(stream, PROTOCOL_ERROR)
        if not state.local_closed:
            self._events.append(DataReceived(stream, payload, bool(flags & END_STREAM)))

    def _on_headers(self, flags: int, stream: int, payload: bytes) -> None:
        if not stream % 2:
            raise ProtocolError(f"HEADERS on stream {stream}", code=PROTOCOL_ERROR)
        if flags & PADDED:
            payload = _unpadded(payload)
        if flags & HAS_PRIORITY:
            if len(payload) < 5:  # noqa: PLR2004  # dependency and weight
                raise ProtocolError("HEADERS too short for their priority", code=FRAME_SIZE_ERROR)
            depends = int.from_bytes(payload[:4], "big") & _MAX_WINDOW
            payload = payload[5:]
            if depends == stream:
                raise ProtocolError("a stream depends on itself", code=PROTOCOL_ERROR)
        if flags & END_HEADERS:
            self._headers(stream, flags, payload)
        else:
            self._block = (stream, flags, bytearray(payload))

    def _on_continuation(self, flags: int, stream: int, payload: bytes) -> None:
        if self._block is None:
            raise ProtocolError("CONTINUATION without HEADERS", code=PROTOCOL_ERROR)
        _, first_flags, block = self._block
        block += payload
        if len(block) > MAX_HEADER_BLOCK:
            raise ProtocolError("a header block without an end", code=ENHANCE_YOUR_CALM)
        if flags & END_HEADERS:
            self._block = None
            self._headers(stream, first_flags, bytes(block))

    def _headers(self, stream: int, flags: int, block: bytes) -> None:
        """A whole header block: a request, or the trailers of one."""
        headers, expected = self._decoded(block)
        ended = bool(flags & END_STREAM)
        state = self._streams.get(stream)
        if state is not None:
            if state.remote_closed:
                raise ProtocolError("HEADERS on a stream that its sender has ended", code=STREAM_CLOSED)
            if not ended or any(name.startswith(b":") for name, _ in headers):
                raise _StreamError(stream, PROTOCOL_ERROR)
            self._remote_ends(stream, state)
            if state.expected >= 0 and state.received != state.expected:
                raise _StreamError(stream, PROTOCOL_ERROR)
            if not state.local_closed:
                self._events.append(DataReceived(stream, b"", ended=True))
            return
        if stream <= self._last:
            raise ProtocolError(f"stream {stream} is over", code=STREAM_CLOSED)
        self._last = stream
        if len(self._streams) >= MAX_STREAMS:
            raise _StreamError(stream, REFUSED_STREAM)
        if expected is None or (ended and expected > 0):
            raise _StreamError(stream, PROTOCOL_ERROR)
        state = self._streams[stream] = _Stream(self._peer_window, expected)
        state.remote_closed = ended
        self._events.append(RequestReceived(stream, headers, ended))

    def _decoded(self, block: bytes) -> tuple[Headers, int | None]:
        """The headers, and their content-length if they are a well-formed request's: see `_checked`."""
        cached = self._blocks.get(block)
        if cached is not None:
            return cached
        if self._acknowledged and block[:1] > b"\x20" and block[0] & 0xE0 == _TABLE_SIZE_UPDATE:
            raise ProtocolError("header block: a table larger than allowed", code=COMPRESSION_ERROR)
        try:
            decoded: Iterable[HeaderTuple] = self._decoder.decode(block, raw=True)
            headers: Headers = tuple((bytes(name), bytes(value)) for name, value in decoded)
        except HPACKError as error:
            raise ProtocolError(f"header block: {error}", code=COMPRESSION_ERROR) from error
        checked = headers, _checked(headers)
        if self._decoder.header_table_size == 0 and len(block) <= _CACHED_BLOCK_BYTES:
            if len(self._blocks) >= _CACHED_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[block] = checked
        return checked

    def _on_priority(self, _: int, stream: int, payload: bytes) -> None:
        if not stream:
            raise ProtocolError("PRIORITY on the connection", code=PROTOCOL_ERROR)
        if len(payload) != 5:  # noqa: PLR2004  # dependency and weight
            raise _StreamError(stream, FRAME_SIZE_ERROR)
        if int.from_bytes(payload[:4], "big") & _MAX_WINDOW == stream:
            raise _StreamError(stream, PROTOCOL_ERROR)

    def _on_reset(self, _: int, stream: int, payload: bytes) -> None:
        if len(payload) != 4:  # noqa: PLR2004  # an error code
            raise ProtocolError("RST_STREAM of a wrong size", code=FRAME_SIZE_ERROR)
        if not stream or stream > self._last:
            raise ProtocolError("RST_STREAM on an idle stream", code=PROTOCOL_ERROR)
        if self._streams.pop(stream, None) is not None:
            self._events.append(StreamReset(stream, int.from_bytes(payload, "big")))

    def _on_settings(self, flags: int, stream: int, payload: bytes) -> None:
        if stream:
            raise ProtocolError("SETTINGS on a stream", code=PROTOCOL_ERROR)
        if flags & ACK:
            if payload:
                raise ProtocolError("SETTINGS acknowledged with a payload", code=FRAME_SIZE_ERROR)
            self._acknowledged = True
            return
        if len(payload) % 6:
            raise ProtocolError("SETTINGS of a wrong size", code=FRAME_SIZE_ERROR)
        for name, value in _SETTING.iter_unpack(payload):
            self._set(name, value)
        self._settled = True
        self._out.append(_frame(SETTINGS, ACK, 0, b""))

    def _set(self, name: int, value: int) -> None:
        if name == _ENABLE_PUSH and value > 1:
            raise ProtocolError(f"ENABLE_PUSH is {value}", code=PROTOCOL_ERROR)
        if name == _MAX_FRAME:
            if not MAX_FRAME <= value < 2**24:
                raise ProtocolError(f"MAX_FRAME_SIZE is {value}", code=PROTOCOL_ERROR)
            self._peer_frame = value
        if name == _INITIAL_WINDOW:
            if value > _MAX_WINDOW:
                raise ProtocolError(f"INITIAL_WINDOW_SIZE is {value}", code=FLOW_CONTROL_ERROR)
            change, self._peer_window = value - self._peer_window, value
            for state in self._streams.values():
                state.window += change
                if state.window > _MAX_WINDOW:
                    raise ProtocolError("a window too large", code=FLOW_CONTROL_ERROR)
            self._unblock()

    def _on_push(self, *_: object) -> None:
        raise ProtocolError("PUSH_PROMISE from a client", code=PROTOCOL_ERROR)

    def _on_ping(self, flags: int, stream: int, payload: bytes) -> None:
        if stream:
            raise ProtocolError("PING on a stream", code=PROTOCOL_ERROR)
        if len(payload) != 8:  # noqa: PLR2004  # opaque data
            raise ProtocolError("PING of a wrong size", code=FRAME_SIZE_ERROR)
        if not flags & ACK:
            self._out.append(_frame(PING, ACK, 0, payload))

    def _on_goaway(self, _: int, stream: int, payload: bytes) -> None:
        if stream:
            raise ProtocolError("GOAWAY on a stream", code=PROTOCOL_ERROR)
        if len(payload) < 8:  # noqa: PLR2004  # last stream and error code
            raise ProtocolError("GOAWAY of a wrong size", code=FRAME_SIZE_ERROR)
        # The peer opens no more streams; those it has finish as they would anyway.

    def _on_window_update(self, _: int, stream: int, payload: bytes) -> None:
        if len(payload) != 4:  # noqa: PLR2004  # an increment
            raise ProtocolError("WINDOW_UPDATE of a wrong size", code=FRAME_SIZE_ERROR)
        increment = int.from_bytes(payload, "big") & _MAX_WINDOW
        if not stream:
            self._window += increment
            if not increment or self._window > _MAX_WINDOW:
                raise ProtocolError("WINDOW_UPDATE", code=FLOW_CONTROL_ERROR if increment else PROTOCOL_ERROR)
            self._unblock()
            return
        if stream > self._last:
            raise ProtocolError("WINDOW_UPDATE on an idle stream", code=PROTOCOL_ERROR)
        state = self._streams.get(stream)
        if state is None:  # it may have crossed our last frame
            return
        state.window += increment
        if not increment or state.window > _MAX_WINDOW:
            raise _StreamError(stream, FLOW_CONTROL_ERROR if increment else PROTOCOL_ERROR)
        self._flush(stream, state)

    def _not_open(self, stream: int) -> Exception:
        """What a frame deserves that only an open stream may get."""
        if not stream or stream > self._last:
            return ProtocolError(f"DATA on stream {stream}, which is idle", code=PROTOCOL_ERROR)
        return _StreamError(stream, STREAM_CLOSED)

    def _remote_ends(self, stream: int, state: _Stream) -> None:
        state.remote_closed = True
        if state.local_closed:
            del self._streams[stream]

    def respond(self, stream: int, block: bytes, *, end: bool = False) -> None:
        """Send response headers; `block` comes from `encode`. A stream that is gone is ignored, here and below."""
        state = self._streams.get(stream)
        if state is not None:
            self._out.append(_frame(HEADERS, END_HEADERS | END_STREAM if end else END_HEADERS, stream, block))
            if end:
                self._local_ends(stream, state)

    def send(self, stream: int, data: bytes, trailers: bytes | None = None) -> None:
        """Send body bytes as far as the peer's windows allow, the rest when it opens them.

        Args:
            stream: its number.
            data: what to send.
            trailers: the header block that ends the stream, empty to end it without; None keeps it open.
        """
        state = self._streams.get(stream)
        if state is None:
            return
        size = len(data)
        if not state.blocked and size <= state.window and size <= self._window and size <= self._peer_frame:
            if size:
                state.window -= size
                self._window -= size
                self._out.append(_frame(DATA, 0, stream, data))
            if trailers is not None:
                self._out.append(_last(stream, trailers))
                self._local_ends(stream, state)
            return
        state.blocked += data
        state.trailers = trailers
        self._flush(stream, state)

    def reset(self, stream: int, code: int) -> None:
        """Give a stream up."""
        self._streams.pop(stream, None)
        self._out.append(_frame(RST_STREAM, 0, stream, code.to_bytes(4, "big")))

    def goaway(self) -> None:
        """Ask the peer to open no more streams here; those that it has opened meanwhile are served."""
        self._out.append(_frame(GOAWAY, 0, 0, struct.pack(">II", _MAX_WINDOW, NO_ERROR)))

    def _flush(self, stream: int, state: _Stream) -> None:
        """Send what the windows allow of what is blocked."""
        while state.blocked:
            size = min(len(state.blocked), state.window, self._window, self._peer_frame)
            if size <= 0:
                return
            part, state.blocked = state.blocked[:size], state.blocked[size:]
            state.window -= size
            self._window -= size
            self._out.append(_frame(DATA, 0, stream, part))
        if state.trailers is not None:
            self._out.append(_last(stream, state.trailers))
            self._local_ends(stream, state)

    def _unblock(self) -> None:
        for stream, state in list(self._streams.items()):
            if state.blocked:
                self._flush(stream, state)

    def _local_ends(self, stream: int, state: _Stream) -> None:
        state.local_closed = True
        if state.remote_closed:
            del self._streams[stream]

    def _end(self, code: int, message: str) -> None:
        self.ended = True
        self._streams.clear()
        self._out.append(_frame(GOAWAY, 0, 0, struct.pack(">II", self._last, code) + message.encode()))
        self._events.append(ConnectionEnded(code, message))


_HANDLERS: dict[int, Callable[[Connection, int, int, bytes], None]] = {
    DATA: Connection._on_data,
    HEADERS: Connection._on_headers,
    PRIORITY: Connection._on_priority,
    RST_STREAM: Connection._on_reset,
    SETTINGS: Connection._on_settings,
    PUSH_PROMISE: Connection._on_push,
    PING: Connection._on_ping,
    GOAWAY: Connection._on_goaway,
    WINDOW_UPDATE: Connection._on_window_update,
    CONTINUATION: Connection._on_continuation,
}


def encode(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """A header block of literals that are never indexed (RFC 7541 section 6.2.2): it means the same everywhere."""
    return b"".join(b"\0" + _length(len(name)) + name + _length(len(value)) + value for name, value in headers)


def _length(value: int) -> bytes:
    """A string length: an integer with a prefix of 7 bits (RFC 7541 section 5.1)."""
    if value < 127:  # noqa: PLR2004  # what the prefix holds
        return bytes((value,))
    value -= 127
    made = bytearray((127,))
    while value >= 128:  # noqa: PLR2004  # 7 bits a byte
        made.append(value & 127 | 128)
        value >>= 7
    made.append(value)
    return bytes(made)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    size = len(payload)
    return _FRAME.pack(size >> 8, size & 255, kind, flags, stream) + payload


def _last(stream: int, trailers: bytes) -> bytes:
    """The frame that ends a stream: trailers, or an empty DATA frame without any."""
    return _frame(HEADERS, END_HEADERS | END_STREAM, stream, trailers) if trailers else _frame(DATA, END_STREAM, stream, b"")


def _window_update(stream: int, increment: int) -> bytes:
    return _frame(WINDOW_UPDATE, 0, stream, increment.to_bytes(4, "big"))


def _unpadded(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise ProtocolError("more padding than payload", code=PROTOCOL_ERROR)
    return payload[1 : len(payload) - payload[0]]


def _checked(headers: Headers) -> int | None:
    """The content-length of a well-formed request (section 8.3), -1 without one; None when it is malformed."""
    pseudo: dict[bytes, bytes] = {}
    expected, regular = -1, False
    for name, value in headers:
        if name.startswith(b":"):
            if regular or name not in _PSEUDO or name in pseudo:
                return None
            pseudo[name] = value
            continue
        regular = True
        if not name or name.lower() != name or name in _CONNECTION_HEADERS or (name == b"te" and value != b"trailers"):
            return None
        if name == b"content-length":
            if not value.isdigit() or (expected >= 0 and int(value) != expected):
                return None
            expected = int(value)
    if pseudo.get(b":method") == b"CONNECT":
        return expected if b":authority" in pseudo else None
    return expected if pseudo.get(b":method") and pseudo.get(b":scheme") and pseudo.get(b":path") else None
