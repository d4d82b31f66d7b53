"""HTTP/2 (RFC 9113), server side, without a socket: bytes in, events out, bytes to send.

It implements the part of HTTP/2 that gRPC needs, and checks every frame. Errors of a stream reset
that stream; errors of the connection end it with GOAWAY.

No peer can cause unbounded work or memory:

- A frame takes time in proportion to its size. No operation visits all streams: a stream's window
  is stored relative to the peer's initial window, and streams that wait for a window are listed.
- A turn handles a bounded number of frames (`Http2Limits.work`). The rest waits for the next turn,
  so that the transport can serve other connections in between.
- Frames cost patience, and messages earn it (`Http2Limits.patience`). A peer that sends too many
  useless frames is disconnected with ENHANCE_YOUR_CALM.
- Buffered bytes (answers for a closed window, an incomplete header block) are taken from a `Pool`
  that all connections share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from extproc.errors import ProtocolError
from extproc.transport.headers import ENHANCE_YOUR_CALM, MAX_BLOCK, Block, Cache, Decoder

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

# Error codes (RFC 9113 section 7); the others are in `headers`.
NO_ERROR: Final = 0x0
PROTOCOL_ERROR: Final = 0x1
FLOW_CONTROL_ERROR: Final = 0x3
STREAM_CLOSED: Final = 0x5
FRAME_SIZE_ERROR: Final = 0x6
REFUSED_STREAM: Final = 0x7
CANCEL: Final = 0x8

# Frame types (section 6).
DATA: Final = 0x0
HEADERS: Final = 0x1
PRIORITY: Final = 0x2
RST_STREAM: Final = 0x3
SETTINGS: Final = 0x4
PUSH_PROMISE: Final = 0x5
PING: Final = 0x6
GOAWAY: Final = 0x7
WINDOW_UPDATE: Final = 0x8
CONTINUATION: Final = 0x9

# Flags.
END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20

# Settings (section 6.5.2).
_HEADER_TABLE_SIZE: Final = 1
_ENABLE_PUSH: Final = 2
_MAX_STREAMS: Final = 3
_INITIAL_WINDOW: Final = 4
_MAX_FRAME: Final = 5
_MAX_HEADER_LIST: Final = 6

MAX_FRAME: Final = 16_384
"""Maximum payload to accept: the protocol's own default."""

_FRAME_HEADER: Final = 9
_PRIORITY_BYTES: Final = 5
_SETTING_BYTES: Final = 6
_DEFAULT_WINDOW: Final = 65_535
_MAX_WINDOW: Final = 2**31 - 1
_STREAM_WINDOW: Final = 2**30
_UPDATE_AFTER: Final = 2**24
"""Bytes to receive before a WINDOW_UPDATE.

Data is consumed at once, so windows only have to stay open.
"""

_CONNECTION: Final = bytes(4)
"""The stream number of frames for the whole connection."""

_STREAM_ERROR_COST: Final = 20
_NEWS_WORK: Final = 2
"""Cost of a new header field, in frames; see `Http2Limits.work`."""


@dataclass(frozen=True, kw_only=True)
class Http2Limits:
    """Limits of one connection; the defaults are far above what an Envoy needs.

    Attributes:
        streams: maximum number of open streams.
        work: maximum number of frames in one turn; large ones count as several.
        patience: maximum number of frames without effect before the connection is ended.
        patience_per_second: how fast patience recovers.
        message_earns: patience that each message earns. Envoy sends up to 10 WINDOW_UPDATEs for
            each DATA frame.
        lingering: maximum number of streams that are answered but not ended by the peer.
        shut: maximum number of streams whose answers wait for their own window.
    """

    streams: int = 16_384
    work: int = 512
    patience: int = 10_000
    patience_per_second: int = 1_000
    message_earns: int = 10
    lingering: int = 1_000
    shut: int = 1_000


class Pool:
    """The bytes that all connections together may buffer."""

    def __init__(self, limit: int = 2**28) -> None:
        self.limit = limit
        self.used = 0


class Share:
    """One connection's part of the pool: at most as much as the pool has left.

    This is how switches share buffers (Choudhury and Hahne, "Dynamic queue length thresholds",
        1998): one greedy connection
    gets half of the pool, several get equal parts, and some is always left for the next one.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.used = 0

    def take(self, size: int) -> bool:
        """Reserve bytes; returns False if that is too much."""
        if size and self.used + size > self._pool.limit - self._pool.used - size:
            return False
        self.used += size
        self._pool.used += size
        return True

    def give(self, size: int) -> None:
        """Return bytes to the pool."""
        self.used -= size
        self._pool.used -= size

    def give_all(self) -> None:
        """Return all bytes to the pool."""
        self.give(self.used)


class Http2Stream:
    """A request and its answer, until both are over.

    Attributes:
        number: the stream's number, chosen by the peer.
        name: the number in four bytes, as in frames.
        lost: whether the stream was reset, or the connection has ended. Anything sent on it is
            dropped.
        local_closed: whether this side has ended it.
    """

    def __init__(self, number: int, expected: int, *, remote_closed: bool) -> None:
        """Begin a request; `expected` is its content-length."""
        self.number = number
        self.name = number.to_bytes(4, "big")
        self.expected = expected
        self.remote_closed = remote_closed
        self.local_closed = False
        self.lost = False
        self.received = 0
        self.consumed = 0  # received since the last WINDOW_UPDATE
        self.spent = (
            0  # sent minus WINDOW_UPDATEs; the open window is the peer's initial window minus this
        )
        self.blocked: bytearray | None = None  # bytes that wait for an open window
        self.trailers: bytes | None = None  # to send after these bytes


class RequestReceived:
    """A stream has begun; `ended` if it has no body."""

    def __init__(self, stream: Http2Stream, headers: Block, *, ended: bool) -> None:
        self.stream = stream
        self.headers = headers
        self.ended = ended


class DataReceived:
    """Part of a request's body, possibly empty; `ended` for the last part."""

    def __init__(self, stream: Http2Stream, data: bytes, *, ended: bool) -> None:
        self.stream = stream
        self.data = data
        self.ended = ended


class StreamReset:
    """The stream was reset, by the peer or for its error; possibly before RequestReceived."""

    def __init__(self, number: int, code: int) -> None:
        self.number = number
        self.code = code


Event: TypeAlias = RequestReceived | DataReceived | StreamReset


class _StreamError(Exception):
    """Ends one stream with RST_STREAM."""

    def __init__(self, number: int, code: int) -> None:
        super().__init__(number, code)
        self.number = number
        self.code = code


class Connection:
    """One connection, from its preface to its end.

    Pass data to `receive`, then take events from `next_event` until there are none, then send what
    `data_to_send` returns.

    Attributes:
        settled: whether the peer has sent its preface and SETTINGS.
        ended: whether the connection is over; only the bytes that `data_to_send` still returns
            remain to be sent.
        error: the peer's error that ended the connection, with HTTP/2's code.
        work: frames handled in this turn; callers add the cost of their own work.
        patience: number of frames without effect that the peer may still send; callers add to it
            for each message.
        share: this connection's part of the pool.
    """

    def __init__(
        self,
        limits: Http2Limits | None = None,
        cache: Cache | None = None,
        pool: Pool | None = None,
    ) -> None:
        """Write SETTINGS. All connections of a server share the cache and the pool."""
        self.limits = limits or Http2Limits()
        self.share = Share(pool or Pool())
        self.settled = False
        self.ended = False
        self.error: ProtocolError | None = None
        self.work = 0
        self.patience = self._most_patience = float(self.limits.patience)
        self._turn = self.limits.work
        self._now = 0.0
        self._data = b""
        self._position = 0
        self._more = False  # frames are left for the next turn
        self._preface = False
        self._streams: dict[int, Http2Stream] = {}
        self._lingering: dict[int, None] = {}  # answered, but not ended by the peer; oldest first
        self._last = 0
        self._block = bytearray()  # the start of an incomplete header block
        self._block_stream = 0  # 0 if there is none
        self._block_flags = 0
        self._decoder = Decoder(cache or Cache())
        self._window = _DEFAULT_WINDOW  # the peer's window for the whole connection
        self._waiting: dict[
            int, Http2Stream
        ] = {}  # streams with bytes to send that wait for that window
        self._shut: dict[int, Http2Stream] = {}  # streams that wait for their own window
        self._peer_window = _DEFAULT_WINDOW
        self._peer_frame = MAX_FRAME
        self._consumed = 0
        settings = b"".join(
            name.to_bytes(2, "big") + value.to_bytes(4, "big")
            for name, value in (
                (_HEADER_TABLE_SIZE, 0),
                (_MAX_STREAMS, self.limits.streams),
                (_INITIAL_WINDOW, _STREAM_WINDOW),
                (_MAX_HEADER_LIST, MAX_BLOCK),
            )
        )
        self._out: list[bytes | memoryview] = []
        self._write(SETTINGS, 0, _CONNECTION, settings)
        self._open_window(_CONNECTION, _MAX_WINDOW - _DEFAULT_WINDOW)

    @property
    def streams(self) -> int:
        """The number of streams that are not closed on both sides."""
        return len(self._streams)

    @property
    def turn_over(self) -> bool:
        """Whether this turn is over."""
        return self.work >= self._turn

    @property
    def unfinished(self) -> bool:
        """Whether work is left for the next turn, which `receive(b"")` starts."""
        return not self.ended and (self._more or (self._window > 0 and len(self._waiting) > 0))

    def data_to_send(self) -> bytes:
        """Return all bytes to send now; they count as sent."""
        if not self._out:
            return b""
        out, self._out = b"".join(self._out), []
        return out

    def receive(self, data: bytes, now: float = 0.0) -> None:
        """Start a turn with new data, cut anywhere, or none to continue; `now` is in seconds."""
        if data and not self.ended:
            self._data = (
                self._data[self._position :] + data if self._position < len(self._data) else data
            )
            self._position = 0
        self.work = 0
        self._more = False
        if now > self._now:
            self.patience += (now - self._now) * self.limits.patience_per_second
            self._now = now
        if self.patience > self._most_patience:  # noqa: PLR1730  # compiled, min() is slow
            self.patience = self._most_patience

    def next_event(self) -> Event | None:
        """The next event; None at the end of the data or of this turn."""
        try:
            if self.ended or not (self._preface or self._read_preface()):
                return None
            if self._waiting:
                self._send_waiting()
            return self._read_frames()
        except _StreamError as error:
            self.patience -= _STREAM_ERROR_COST
            self._reset(error.number, error.code)
            return StreamReset(error.number, error.code)
        except ProtocolError as fault:  # not `error`: in compiled code a variable has one type
            self._end(fault)
            return None

    def _read_frames(self) -> Event | None:
        """Handle frames up to an event, the end of the turn, or an incomplete frame."""
        data, position = self._data, self._position
        size = len(data)
        while size - position >= _FRAME_HEADER:
            length = data[position] << 16 | data[position + 1] << 8 | data[position + 2]
            if length > MAX_FRAME:
                raise ProtocolError(f"a frame of {length} bytes", code=FRAME_SIZE_ERROR)
            end = position + _FRAME_HEADER + length
            if end > size:
                break
            if self.work >= self._turn:
                self._more = True
                return None
            number = (
                (data[position + 5] & 0x7F) << 24
                | data[position + 6] << 16
                | data[position + 7] << 8
                | data[position + 8]
            )
            self._position = end
            self.work += 1
            event = self._handle(
                data[position + 3], data[position + 4], number, data[position + _FRAME_HEADER : end]
            )
            if event is not None:
                return event
            position = end
        self._data, self._position = data[position:], 0
        return None

    def _read_preface(self) -> bool:
        data = self._data
        if not PREFACE.startswith(data[: len(PREFACE)]):
            raise ProtocolError("no HTTP/2 preface", code=PROTOCOL_ERROR)
        self._preface = len(data) >= len(PREFACE)
        self._position = len(PREFACE) if self._preface else 0
        return self._preface

    def _handle(self, kind: int, flags: int, number: int, payload: bytes) -> Event | None:
        if self._block_stream and (kind != CONTINUATION or number != self._block_stream):
            raise ProtocolError("a header block was interrupted", code=PROTOCOL_ERROR)
        if not self.settled and kind != SETTINGS:
            raise ProtocolError("the first frame is not SETTINGS", code=PROTOCOL_ERROR)
        if kind == DATA:
            return self._on_data(flags, number, payload)
        self._spend(1)
        if kind == HEADERS:
            return self._on_headers(flags, number, payload)
        if kind == RST_STREAM:
            return self._on_reset(flags, number, payload)
        handler = _HANDLERS.get(kind)
        # Other types are ignored (section 4.1)
        return handler(self, flags, number, payload) if handler else None

    def _spend(self, frames: int) -> None:
        """Charge the peer's patience; raises ProtocolError when it is used up."""
        self.patience -= frames
        if self.patience < 0:
            raise ProtocolError("too many frames that lead to nothing", code=ENHANCE_YOUR_CALM)

    def _on_data(self, flags: int, number: int, payload: bytes) -> Event | None:
        size = len(payload)
        self.work += size >> 10
        self._consumed += size
        if self._consumed >= _UPDATE_AFTER:
            self._open_window(_CONNECTION, self._consumed)
            self._consumed = 0
        stream = self._streams.get(number)
        if stream is None:
            raise self._describe_missing(number)
        if stream.remote_closed:
            raise _StreamError(number, STREAM_CLOSED)
        if flags & PADDED:
            payload = _strip_padding(payload)
        if not payload:
            self._spend(1)
        ended = flags & END_STREAM != 0
        if ended:
            self._end_remote(stream)
        else:
            stream.consumed += size
            if stream.consumed >= _UPDATE_AFTER:
                self._open_window(stream.name, stream.consumed)
                stream.consumed = 0
        if stream.expected >= 0:
            self._check_length(stream, len(payload), ended=ended)
        return None if stream.local_closed else DataReceived(stream, payload, ended=ended)

    def _check_length(self, stream: Http2Stream, size: int, *, ended: bool) -> None:
        stream.received += size
        if stream.received > stream.expected or (ended and stream.received != stream.expected):
            raise _StreamError(stream.number, PROTOCOL_ERROR)

    def _on_headers(self, flags: int, number: int, payload: bytes) -> Event | None:
        if not number % 2:
            raise ProtocolError(f"HEADERS on stream {number}", code=PROTOCOL_ERROR)
        if flags & PADDED:
            payload = _strip_padding(payload)
        if flags & HAS_PRIORITY:
            if len(payload) < _PRIORITY_BYTES:
                raise ProtocolError("HEADERS too short for their priority", code=FRAME_SIZE_ERROR)
            depends = int.from_bytes(payload[:4], "big") & _MAX_WINDOW
            payload = payload[_PRIORITY_BYTES:]
            if depends == number:
                raise ProtocolError("a stream depends on itself", code=PROTOCOL_ERROR)
        if flags & END_HEADERS:
            return self._on_block(number, flags, payload)
        self._block_stream, self._block_flags = number, flags
        self._extend_block(payload)
        return None

    def _on_continuation(self, flags: int, number: int, payload: bytes) -> Event | None:
        if not self._block_stream:
            raise ProtocolError("CONTINUATION without HEADERS", code=PROTOCOL_ERROR)
        self._extend_block(payload)
        if not flags & END_HEADERS:
            return None
        block, self._block = bytes(self._block), bytearray()
        self._block_stream = 0
        self.share.give(len(block))
        return self._on_block(number, self._block_flags, block)

    def _extend_block(self, payload: bytes) -> None:
        if len(self._block) + len(payload) > MAX_BLOCK or not self.share.take(len(payload)):
            raise ProtocolError("a header block without an end", code=ENHANCE_YOUR_CALM)
        self._block += payload

    def _on_block(self, number: int, flags: int, encoded: bytes) -> Event | None:
        """Handle a whole header block: a request or its trailers."""
        block = self._decoder.decode(encoded)
        self.work += (len(encoded) >> 7) + _NEWS_WORK * self._decoder.news
        ended = flags & END_STREAM != 0
        stream = self._streams.get(number)
        if stream is not None:
            return self._on_trailers(stream, block, ended=ended)
        if number <= self._last:
            raise ProtocolError(f"stream {number} is over", code=STREAM_CLOSED)
        self._last = number
        if len(self._streams) >= self.limits.streams:
            raise _StreamError(number, REFUSED_STREAM)
        if block.malformed or (ended and block.content_length > 0):
            raise _StreamError(number, PROTOCOL_ERROR)
        stream = self._streams[number] = Http2Stream(
            number, block.content_length, remote_closed=ended
        )
        return RequestReceived(stream, block, ended=ended)

    def _on_trailers(self, stream: Http2Stream, block: Block, *, ended: bool) -> Event | None:
        if stream.remote_closed:
            raise ProtocolError("HEADERS on a stream that its sender has ended", code=STREAM_CLOSED)
        if not ended or any(field.name.startswith(b":") for field in block.fields):
            raise _StreamError(stream.number, PROTOCOL_ERROR)
        self._end_remote(stream)
        if stream.expected >= 0:
            self._check_length(stream, 0, ended=True)
        return None if stream.local_closed else DataReceived(stream, b"", ended=True)

    def _on_priority(self, _: int, number: int, payload: bytes) -> Event | None:
        if not number:
            raise ProtocolError("PRIORITY on the connection", code=PROTOCOL_ERROR)
        if len(payload) != _PRIORITY_BYTES:
            raise _StreamError(number, FRAME_SIZE_ERROR)
        if int.from_bytes(payload[:4], "big") & _MAX_WINDOW == number:
            raise _StreamError(number, PROTOCOL_ERROR)
        return None

    def _on_reset(self, _: int, number: int, payload: bytes) -> Event | None:
        if len(payload) != 4:  # noqa: PLR2004  # an error code
            raise ProtocolError("RST_STREAM of a wrong size", code=FRAME_SIZE_ERROR)
        if not number or number > self._last:
            raise ProtocolError("RST_STREAM on an idle stream", code=PROTOCOL_ERROR)
        stream = self._streams.get(number)
        if stream is None:
            return None
        self._drop_stream(stream)
        return None if stream.local_closed else StreamReset(number, int.from_bytes(payload, "big"))

    def _on_settings(self, flags: int, number: int, payload: bytes) -> Event | None:
        if number:
            raise ProtocolError("SETTINGS on a stream", code=PROTOCOL_ERROR)
        if flags & ACK:
            if payload:
                raise ProtocolError("SETTINGS acknowledged with a payload", code=FRAME_SIZE_ERROR)
            self._decoder.forbid_table()
            return None
        if len(payload) % _SETTING_BYTES:
            raise ProtocolError("SETTINGS of a wrong size", code=FRAME_SIZE_ERROR)
        self.work += len(payload) >> 5
        before = self._peer_window
        for start in range(0, len(payload), _SETTING_BYTES):
            name, value = payload[start : start + 2], payload[start + 2 : start + _SETTING_BYTES]
            self._apply_setting(int.from_bytes(name, "big"), int.from_bytes(value, "big"))
        self.settled = True
        self._write(SETTINGS, ACK, _CONNECTION, b"")
        if self._peer_window > before and self._shut:
            self._spend(len(self._shut))  # no other frame affects more than one stream
            self._waiting.update(self._shut)
            self._shut.clear()
        return None

    def _apply_setting(self, name: int, value: int) -> None:
        if name == _ENABLE_PUSH and value > 1:
            raise ProtocolError(f"ENABLE_PUSH is {value}", code=PROTOCOL_ERROR)
        if name == _MAX_FRAME:
            if not MAX_FRAME <= value < 2**24:
                raise ProtocolError(f"MAX_FRAME_SIZE is {value}", code=PROTOCOL_ERROR)
            self._peer_frame = value
        if name == _INITIAL_WINDOW:
            if value > _MAX_WINDOW:
                raise ProtocolError(f"INITIAL_WINDOW_SIZE is {value}", code=FLOW_CONTROL_ERROR)
            self._peer_window = value

    def _on_push(self, *_: object) -> Event | None:
        raise ProtocolError("PUSH_PROMISE from a client", code=PROTOCOL_ERROR)

    def _on_ping(self, flags: int, number: int, payload: bytes) -> Event | None:
        if number:
            raise ProtocolError("PING on a stream", code=PROTOCOL_ERROR)
        if len(payload) != 8:  # noqa: PLR2004  # opaque data
            raise ProtocolError("PING of a wrong size", code=FRAME_SIZE_ERROR)
        if not flags & ACK:
            self._write(PING, ACK, _CONNECTION, payload)
        return None

    def _on_goaway(self, _: int, number: int, payload: bytes) -> Event | None:
        if number:
            raise ProtocolError("GOAWAY on a stream", code=PROTOCOL_ERROR)
        if len(payload) < 8:  # noqa: PLR2004  # last stream and error code
            raise ProtocolError("GOAWAY of a wrong size", code=FRAME_SIZE_ERROR)
        return None  # the peer opens no more streams; existing ones finish as usual

    def _on_window_update(self, _: int, number: int, payload: bytes) -> Event | None:
        if len(payload) != 4:  # noqa: PLR2004  # an increment
            raise ProtocolError("WINDOW_UPDATE of a wrong size", code=FRAME_SIZE_ERROR)
        increment = int.from_bytes(payload, "big") & _MAX_WINDOW
        if not number:
            self._window += increment
            if not increment or self._window > _MAX_WINDOW:
                raise ProtocolError(
                    "WINDOW_UPDATE", code=FLOW_CONTROL_ERROR if increment else PROTOCOL_ERROR
                )
            return None  # waiting bytes are sent before the next frame is read
        if number > self._last:
            raise ProtocolError("WINDOW_UPDATE on an idle stream", code=PROTOCOL_ERROR)
        stream = self._streams.get(number)
        if stream is None:  # closed meanwhile
            return None
        stream.spent -= increment
        if not increment or self._peer_window - stream.spent > _MAX_WINDOW:
            raise _StreamError(number, FLOW_CONTROL_ERROR if increment else PROTOCOL_ERROR)
        if self._shut.pop(number, None) is not None:
            self._send_blocked(stream)
        return None

    def _describe_missing(self, number: int) -> Exception:
        """The error for a frame that only an open stream may receive."""
        if not number or number > self._last:
            return ProtocolError(f"DATA on stream {number}, which is idle", code=PROTOCOL_ERROR)
        return _StreamError(number, STREAM_CLOSED)

    def respond(self, stream: Http2Stream, block: bytes, *, end: bool = False) -> None:
        """Send response headers, made by `encode`; does nothing on a lost stream, like `send`."""
        if stream.lost:
            return
        # A bug of the caller
        assert not stream.local_closed, "the stream is answered"  # noqa: S101
        self._write(HEADERS, END_HEADERS | END_STREAM if end else END_HEADERS, stream.name, block)
        if end:
            self._end_local(stream)

    def send(self, stream: Http2Stream, data: bytes, trailers: bytes | None = None) -> None:
        """Send body bytes within the peer's windows, and the rest when the peer opens them.

        Args:
            stream: the stream to send on.
            data: the bytes to send.
            trailers: the header block that ends the stream; empty to end it without one; None keeps
                it open.
        """
        if stream.lost:
            return
        # A bug of the caller
        assert not stream.local_closed, "the stream is answered"  # noqa: S101
        assert stream.trailers is None, "the stream is answered"  # noqa: S101  # as above
        size = len(data)
        if (
            stream.blocked is not None
            or size > self._window
            or size > self._peer_window - stream.spent
            or size > self._peer_frame
        ):
            self._buffer_output(stream, data, trailers)
            return
        if size:
            stream.spent += size
            self._window -= size
            self._write(DATA, 0, stream.name, data)
        if trailers is not None:
            self._write_last(stream, trailers)

    def send_long(
        self, stream: Http2Stream, pieces: list[bytes | memoryview], trailers: bytes | None = None
    ) -> None:
        """Send many bytes like `send`, without joining the pieces."""
        size = sum([len(piece) for piece in pieces])
        blocked = (
            stream.lost
            or stream.blocked is not None
            or size > self._window
            or size > self._peer_window - stream.spent
        )
        if blocked or size <= self._peer_frame:
            self.send(stream, b"".join(pieces), trailers)
            return
        self.work += size >> 10
        stream.spent += size
        self._window -= size
        left, room = size, 0  # bytes not yet in a frame, and bytes left in the newest frame
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                if not room:
                    # In compiled code, min() is slow.
                    room = left if left < self._peer_frame else self._peer_frame  # noqa: FURB136
                    left -= room
                    self._out.append(make_head(room, DATA, 0) + stream.name)
                part, rest = rest[:room], rest[room:]
                room -= len(part)
                self._out.append(part)  # copied only once, with all that is sent
        if trailers is not None:
            self._write_last(stream, trailers)

    def goaway(self) -> None:
        """Tell the peer to open no more streams; those that it opens meanwhile are served."""
        if self.ended:
            return
        self._write(
            GOAWAY, 0, _CONNECTION, _MAX_WINDOW.to_bytes(4, "big") + NO_ERROR.to_bytes(4, "big")
        )

    def close(self) -> None:
        """Free all buffers and streams: the connection is lost."""
        self.ended = True
        self.share.give_all()
        for stream in self._streams.values():
            stream.lost = True
        self._streams.clear()
        self._lingering.clear()
        self._waiting.clear()
        self._shut.clear()
        self._block = bytearray()
        self._data, self._position = b"", 0

    def _buffer_output(self, stream: Http2Stream, data: bytes, trailers: bytes | None) -> None:
        if not self.share.take(len(data)):
            self._end(
                ProtocolError("too much data that the peer does not read", code=ENHANCE_YOUR_CALM)
            )
            return
        stream.trailers = trailers
        if stream.blocked is not None:
            stream.blocked += data
            return
        stream.blocked = bytearray(data)
        self._send_blocked(stream)

    def _send_waiting(self) -> None:
        """Send bytes that wait for the connection's window, stream by stream."""
        while self._waiting and self._window > 0 and not self.turn_over:
            number = next(iter(self._waiting))
            self._send_blocked(self._waiting.pop(number))

    def _send_blocked(self, stream: Http2Stream) -> None:
        """Send blocked bytes within the windows and this turn."""
        blocked = stream.blocked
        while blocked:
            size = min(
                len(blocked), self._peer_window - stream.spent, self._window, self._peer_frame
            )
            if size <= 0 or self.turn_over:
                self._await_window(stream)
                return
            self.work += 1 + (size >> 10)
            self._write(DATA, 0, stream.name, bytes(blocked[:size]))
            del blocked[:size]  # free at a bytearray's start
            self.share.give(size)
            stream.spent += size
            self._window -= size
        stream.blocked = None
        if stream.trailers is not None:
            self._write_last(stream, stream.trailers)

    def _await_window(self, stream: Http2Stream) -> None:
        if self._peer_window > stream.spent:
            self._waiting[stream.number] = stream
            return
        self._shut[stream.number] = stream
        if len(self._shut) > self.limits.shut:
            self._end(
                ProtocolError("too many streams whose windows stay shut", code=ENHANCE_YOUR_CALM)
            )

    def _write(self, kind: int, flags: int, name: bytes, payload: bytes) -> None:
        # One copy when compiled
        self._out.append(b"%b%b%b" % (make_head(len(payload), kind, flags), name, payload))

    def _write_last(self, stream: Http2Stream, trailers: bytes) -> None:
        """Write the frame that ends a stream: trailers, or an empty DATA frame."""
        if trailers:
            self._write(HEADERS, END_HEADERS | END_STREAM, stream.name, trailers)
        else:
            self._write(DATA, END_STREAM, stream.name, b"")
        self._end_local(stream)

    def _open_window(self, name: bytes, increment: int) -> None:
        self._write(WINDOW_UPDATE, 0, name, increment.to_bytes(4, "big"))

    def _end_local(self, stream: Http2Stream) -> None:
        stream.local_closed = True
        if stream.remote_closed:
            del self._streams[stream.number]
            return
        self._lingering[stream.number] = None
        if len(self._lingering) > self.limits.lingering:
            # Section 8.1: the rest of its request is not needed
            self._reset(next(iter(self._lingering)), NO_ERROR)

    def _end_remote(self, stream: Http2Stream) -> None:
        stream.remote_closed = True
        if stream.local_closed:
            del self._streams[stream.number]
            self._lingering.pop(stream.number, None)

    def _reset(self, number: int, code: int) -> None:
        self._write(RST_STREAM, 0, number.to_bytes(4, "big"), code.to_bytes(4, "big"))
        stream = self._streams.get(number)
        if stream is not None:
            self._drop_stream(stream)

    def _drop_stream(self, stream: Http2Stream) -> None:
        stream.lost = True
        del self._streams[stream.number]
        self._lingering.pop(stream.number, None)
        if stream.blocked is not None:
            self._waiting.pop(stream.number, None)
            self._shut.pop(stream.number, None)
            self.share.give(len(stream.blocked))

    def _end(self, error: ProtocolError) -> None:
        goodbye = (
            self._last.to_bytes(4, "big") + error.code.to_bytes(4, "big") + str(error).encode()
        )
        self._write(GOAWAY, 0, _CONNECTION, goodbye)
        self.error = error
        self.close()


_HANDLERS: Final[dict[int, Callable[[Connection, int, int, bytes], Event | None]]] = {
    PRIORITY: Connection._on_priority,
    SETTINGS: Connection._on_settings,
    PUSH_PROMISE: Connection._on_push,
    PING: Connection._on_ping,
    GOAWAY: Connection._on_goaway,
    WINDOW_UPDATE: Connection._on_window_update,
    CONTINUATION: Connection._on_continuation,
}


def make_head(size: int, kind: int, flags: int) -> bytes:
    """A frame's header without the stream's number."""
    return (size << 16 | kind << 8 | flags).to_bytes(5, "big")


def _strip_padding(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise ProtocolError("more padding than payload", code=PROTOCOL_ERROR)
    return payload[1 : len(payload) - payload[0]]
