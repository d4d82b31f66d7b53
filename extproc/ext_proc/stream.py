"""One ext_proc stream: ProcessingRequest in, ProcessingResponse out.

Only this file knows ext_proc's phases.

Sans-IO: `Stream.receive` takes a message's bytes and returns a `Reply` with the answer's bytes, or
an awaitable of one if the store is asked over a network. The owner of the socket sends, delays and
closes as the reply says.

Every message gets exactly one well-formed answer of its own phase: Envoy treats additional ones as
an attack. The stream ends as soon as there is nothing more to decide. Otherwise, with a buffered
body, it would stay open until the upstream's answer and use up Envoy's `max_requests`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from time import perf_counter, time
from typing import Final

from google.protobuf.message import DecodeError

from extproc.apis import LIST_PATHS
from extproc.apis.excerpt import Excerpt
from extproc.engine.exchange import BUFFERED, HELD, OBSERVED, SENT_ON, Exchange
from extproc.engine.handover import POLICY_ATTRIBUTE, POLICY_METADATA, parse_names
from extproc.errors import ProtocolError
from extproc.ext_proc.answers.let_pass import (
    LAST_HEADERS,
    end_headers,
    hand_back,
    hand_on,
    let_pass,
)
from extproc.ext_proc.duplex import HELD_BYTES, Duplex, write_parts
from extproc.ext_proc.held import HeldBody
from extproc.ext_proc.judging import (
    DONE,
    HEADERS,
    PASS,
    Later,
    MaybeLater,
    Reply,
    block,
    close,
    fail,
    judge,
    kill,
    match,
    sum_up,
)
from extproc.ext_proc.service import Service, Waiting
from extproc.ext_proc.upload import CUT_OFF, MORE, SMALLEST_LIMIT, Upload, is_framed
from extproc.ext_proc.wire import (
    BODY_BUFFERED,
    BODY_BUFFERED_PARTIAL,
    BODY_DUPLEX,
    BODY_GRPC,
    BODY_NONE,
    BODY_STREAMED,
    BODY_UNTOLD,
    EnvoyMessage,
    cut_body,
    parse_message,
    read_request,
)
from extproc.objects import INSPECT_BYTES
from extproc.request.fingerprint import NO_BODY, Body
from extproc.request.http import RESPONSES_WEBSOCKET, explain_unknowable_body, is_grpc
from extproc.settings import is_scope

SCOPE_METADATA = "x-loopguard-scope"
"""gRPC metadata with a stream's attachment name, instead of `--scope`."""

BUFFER_LIMIT_METADATA: Final = "x-loopguard-buffer-limit"
"""gRPC metadata with Envoy's buffer limit. It distinguishes a body that was cut off from one with
trailers."""

_now: Final = perf_counter  # compiled code reads a module's constant fastest

_LIMIT_DIGITS: Final = 18
_INVALID_ARGUMENT = 3

_REFUSED_BODIES: Final = {b"408": "aborted", b"413": "too_large"}
"""Envoy's answers to a body that does not arrive in time and to one above its buffer limit, and our
reasons."""

_NOT_WHOLE: Final = {BODY_NONE: "no_body_phase", BODY_GRPC: "body_mode"}
"""Body modes without a complete body, and the reason why such requests are not counted."""

_DECIDED_BEFORE: Final = "decided_before"
"""The reason of shadow policies that lack the body of a request that was refused or delayed at its
headers."""

_NO_ANSWER: Final = Reply(None, done=True)
_HELD: Final = Reply(None, done=False)
_HEADERS: Final = let_pass("request_headers")
_TRAILERS: Final = let_pass("request_trailers")


class Stream(Waiting):
    """One ext_proc stream, that is, one HTTP request. Its owner must always `close` it.

    Attributes:
        given_up: it no longer waits for its body.
        on_given_up: set by the transport. Called, during a call of another stream, when this one
            can end or forward its body. The transport then sends the result of `take_handed_on`
            and, unless the stream `carries` a body, ends it with status OK. If it does not, the
            stream answers its next message with all of this.
    """

    def __init__(self, service: Service, metadata: Iterable[tuple[str, str | bytes]] = ()) -> None:
        """Take a place among the service's streams until `close`.

        If none is free, the request is let through at once.

        Args:
            service: the state that all streams share.
            metadata: the stream's gRPC initial metadata, set by Envoy's
                `grpc_service.initial_metadata`.
        """
        self._service = service
        self._engine = service.engine  # a reload does not affect open requests
        self._scope = service.settings.scope
        self._pinned: list[str] = []
        self._limit = SMALLEST_LIMIT
        for name, value in metadata:
            self._read_metadata(name, value)
        overloaded = service.streams - service.given_up >= service.settings.max_streams
        self._overloaded = overloaded and not service.make_room()
        self._started = 0.0  # when the newest message came, by `perf_counter`
        self._exchange: Exchange | None = None
        self._waiting: Exchange | None = (
            None  # the exchange or its shadow part, while it waits for the body
        )
        self._upload: Upload | None = None
        self._body_mode = BODY_UNTOLD
        self._duplex: Duplex | None = None  # bodies to hand back
        self._decides = True  # it may still decide something
        self.given_up = False
        self.on_given_up: Callable[[], object] | None = None
        service.streams += 1

    def _read_metadata(self, name: str, value: str | bytes) -> None:
        if not isinstance(value, str):
            return
        if name == SCOPE_METADATA and is_scope(value):
            self._scope = value
        elif name == POLICY_METADATA:
            self._pinned = list(dict.fromkeys([*self._pinned, *parse_names(value)]))
        elif name == BUFFER_LIMIT_METADATA and value.isascii() and value.isdigit():
            self._limit = int(value[:_LIMIT_DIGITS])

    def receive(self, data: bytes) -> MaybeLater:
        """Answer one serialized ProcessingRequest.

        Raises:
            ProtocolError: the bytes are not a ProcessingRequest.
        """
        self._started = _now()
        if self._waiting is not None:
            self._waiting.started = self._started
        try:
            message = parse_message(data)
        except DecodeError as error:
            raise ProtocolError("not a ProcessingRequest", code=_INVALID_ARGUMENT) from error
        kind = message.kind
        if not kind:
            return _NO_ANSWER  # an unknown phase; Envoy continues when the stream ends with OK
        if (
            kind == "request_headers"
            and message.body_mode == BODY_BUFFERED_PARTIAL
            and not message.ended
        ):
            kind = LAST_HEADERS
        duplex = self._duplex
        if duplex is None and BODY_DUPLEX in (message.body_mode, message.response_mode):
            duplex = self._duplex = Duplex(message)
        if (
            duplex is not None
            and duplex.follow(message)
            and not (duplex.holds and kind == "request_body")
        ):
            duplex.part = hand_back(kind, cut_body(data, kind))
            if self._waiting is None or kind != "request_body":
                return self._stay(Reply(b"", done=duplex.over))
        try:
            reply = self._handle(message, kind)
        except Exception as error:  # noqa: BLE001  # no error may stop the request
            self._stop_waiting()
            reply = fail(self._service, self._let_held_go(message, kind), error)
        return reply if duplex is None else self._stay_open(reply)

    def _handle(self, message: EnvoyMessage, kind: str) -> MaybeLater:
        # Not a table: compiled code calls methods from a dict as slowly as interpreted code.
        if self._overloaded:
            self._overloaded = False
            self._service.metrics.overload.inc()
            return DONE[kind]
        if kind in HEADERS:
            return self._on_request_headers(message, kind)
        # `in` makes a new set at each call
        if kind == "request_body" or kind == "request_trailers":  # noqa: PLR1714
            return self._on_request_body(message, kind)
        # If it holds the body, the answer is Envoy's own, and the request ends
        if self._duplex is None or not self._duplex.holds:
            # The request was answered before its body arrived, or Envoy sends no bodies.
            self._leave_uncounted(_REFUSED_BODIES.get(message.read_status(), "no_body_phase"))
        return DONE[message.kind]

    def _stay_open(self, reply: MaybeLater) -> MaybeLater:
        """Apply `_stay` to the reply, now or later."""
        if isinstance(reply, Reply):
            return self._stay(reply)
        if isinstance(reply, Later):
            reply.stay = self._stay
            return reply
        return self._stay_later(reply)

    async def _stay_later(self, reply: Awaitable[Reply]) -> Reply:
        return self._stay(await reply)

    def _stay(self, reply: Reply) -> Reply:
        """Add what is handed back to the reply, and keep the stream open while more remains."""
        duplex = self._duplex
        if duplex is None or reply.refuses or reply.answer is None:
            return reply
        if reply.done:
            self._stop_deciding()
        answers = [*duplex.before, duplex.part + reply.join_answer()]
        if duplex.whole is not None:
            answers += duplex.write_whole(reply.edited, _TRAILERS)
        duplex.before, duplex.part = [], b""
        first = b"" if duplex.untimed else reply.first
        return Reply(
            answers[0],
            done=reply.done and duplex.over,
            hold_ms=reply.hold_ms,
            first=first,
            rest=answers[1:],
        )

    def _stop_deciding(self) -> None:
        """Free the place among deciding streams."""
        if self._decides:
            self._decides = False
            self._service.given_up += 1

    def close(self) -> None:
        """Free the stream's resources; called once, however it ended."""
        self._service.streams -= 1
        if not self._decides:
            self._service.given_up -= 1
        if self._waiting is not None or self._upload is not None:
            # Without a body mode, Envoy may have sent no bodies.
            self._leave_uncounted("no_body_phase" if self._body_mode < 0 else "aborted")
        if self._exchange is not None:
            close(self._service, self._exchange)
            self._exchange = None

    @property
    def carries(self) -> bool:
        """Whether ending the stream with OK would cut off a body."""
        return self._duplex is not None and self._duplex.carries

    @property
    def held(self) -> int:
        """See `Waiting`."""
        return (
            self._duplex.held.size
            if self._duplex is not None and self._duplex.held is not None
            else 0
        )

    def take_handed_on(self) -> Sequence[bytes]:
        """Messages to send now, without waiting for Envoy's next message."""
        duplex = self._duplex
        if duplex is None:
            return ()
        messages, duplex.before = duplex.before, []
        return messages

    def end_hold(self) -> None:
        """The delayed answer has been sent. The request continues, even if the client has left."""
        if self._exchange is not None:
            self._exchange.waits = False

    def give_up(self, reason: str) -> None:
        """See `Waiting`."""
        self._send_on(inspects=False)
        self._leave_uncounted(reason)
        self.given_up = True
        self._stop_deciding()
        if self.on_given_up is not None:
            self.on_given_up()

    def _on_request_headers(self, message: EnvoyMessage, last: str) -> MaybeLater:
        """Match the policies. `last` is the phase to answer if no body follows."""
        if self._waiting is not None or self.given_up:
            return DONE[last]
        service = self._service
        request = read_request(message, allow_unverified_jwt=service.settings.allow_unverified_jwt)
        policy_json = message.read_attribute(POLICY_ATTRIBUTE)
        handed_over = service.compile_handed_over(policy_json) if policy_json is not None else None
        if self._engine.has_switches or handed_over is not None:
            switch = self._engine.find_switch(request, time(), handed_over)
            if (
                switch is not None
                and (killed := kill(service, request, switch, self._started)) is not None
            ):
                return killed
        exchange = match(service, self._engine, request, self._scope, self._pinned, handed_over)
        if exchange is None:
            return DONE[last]
        exchange.started = self._started
        if message.observed:
            exchange.state = OBSERVED
        self._exchange = exchange
        return self._on_policies(exchange, message, last)

    def _on_policies(self, exchange: Exchange, message: EnvoyMessage, last: str) -> MaybeLater:
        """Judge the request, now or once its body is complete."""
        service, standing = self._service, self._service.overrides
        if standing is not None:
            exchange.apply_overrides(standing, time())
            if standing.blocks_heads and (blocked := block(service, exchange)) is not None:
                return blocked
        websocket = exchange.request.opens_responses
        if message.ended and not websocket:
            return judge(service, last, exchange, NO_BODY, content=b"")
        enforcing, shadow = exchange.enforcing, exchange.shadow
        if websocket or not (enforcing.needs_body or shadow.needs_body):
            return judge(service, last, exchange, None, RESPONSES_WEBSOCKET if websocket else "")
        self._body_mode = message.body_mode
        reason = explain_unknowable_body(exchange.request) or _NOT_WHOLE.get(self._body_mode, "")
        if not reason and service.released:
            reason = "shutdown"
        if reason:
            return judge(service, last, exchange, None, reason)
        if self._body_mode == BODY_BUFFERED and not message.observed:
            exchange.state = BUFFERED
        if enforcing.active and not enforcing.needs_body:
            return self._answer_before_body(exchange)
        duplex, reply = self._duplex, PASS["request_headers"]
        # The headers are held with the body
        if duplex is not None and self._body_mode == BODY_DUPLEX:
            duplex.holds, exchange.state = True, HELD
            reply = _HELD
        return self._wait_for_body(exchange, reply)

    def _answer_before_body(self, exchange: Exchange) -> MaybeLater:
        """Answer for the enforcing policies at once, even if shadow policies wait for the body."""
        watching = exchange.split()
        reply = judge(self._service, "request_headers", exchange, None, _DECIDED_BEFORE)
        if isinstance(reply, Reply):
            return self._wait_for_body(watching, reply)
        return self._watch_later(reply, watching)

    async def _watch_later(self, reply: Awaitable[Reply], watching: Exchange) -> Reply:
        return self._wait_for_body(watching, await reply)

    def _wait_for_body(self, exchange: Exchange, reply: Reply) -> Reply:
        """Answer the headers and wait for the body, unless the answer ends the request."""
        if reply.refuses or reply.hold_ms:
            exchange.give_up(_DECIDED_BEFORE)
            self._service.reporter.report_uncounted(exchange)
            if (
                reply.answer is not None
                and not reply.refuses
                and self._body_mode == BODY_BUFFERED_PARTIAL
            ):
                return Reply(
                    end_headers(reply.join_answer()),
                    done=True,
                    hold_ms=reply.hold_ms,
                    first=reply.first,
                )
            return reply
        self._waiting = exchange
        self._service.waiting[self] = None
        if self._body_mode == BODY_DUPLEX and exchange.state != HELD:
            exchange.state = SENT_ON
        return (
            Reply(reply.answer, done=False, hold_ms=reply.hold_ms, first=reply.first)
            if reply.done
            else reply
        )

    def _on_request_body(self, message: EnvoyMessage, kind: str) -> MaybeLater:
        """Judge the request when its body has ended, usually in one message, or was cut off."""
        exchange = self._waiting
        if exchange is None:
            return DONE[kind]
        chunk = message.body
        ended = message.ended or kind == "request_trailers"  # a streamed body can end with trailers
        duplex = self._duplex
        if duplex is not None and duplex.holds:
            return self._on_held(kind, duplex, exchange, message)
        if (
            self._upload is not None
            or not (ended or exchange.state == BUFFERED)
            or is_grpc(exchange.request)
        ):
            return self._on_chunk(kind, exchange, chunk, ended=ended)
        self._stop_waiting()
        keeps = (
            max(exchange.inspects, exchange.steers)
            if exchange.state == BUFFERED
            else exchange.inspects
        )
        content = (
            chunk if len(chunk) <= keeps or (exchange.reads_ends and exchange.is_plain) else None
        )
        encoded = "content-encoding" in exchange.request.headers
        if encoded:
            sums = sum_up(self._service, exchange, chunk)
        elif content is None:
            sums = NO_BODY.plus(chunk)
        else:  # guards read it, and may need no checksums
            sums = Body(len(chunk), 0, 1, chunk)
        return judge(self._service, kind, exchange, sums, content=content)

    def _on_held(
        self, kind: str, duplex: Duplex, exchange: Exchange, message: EnvoyMessage
    ) -> MaybeLater:
        """Hold another chunk of a body, or judge the request at the body's end."""
        held = duplex.held
        if held is None:
            longest = max(exchange.inspects, exchange.steers, HELD_BYTES)
            held = duplex.held = HeldBody(self._service.kept, longest)
        chunk, size, ended = message.body, len(message.body), message.ended
        too_long = held.sums.length + size > held.longest
        if too_long or not (ended or self._service.make_memory(size, held.size + size)):
            self._send_on(inspects=too_long)
            duplex.part = hand_on([chunk], ended=ended)
            return self._on_chunk(kind, exchange, chunk, ended=ended)
        held.add(chunk, ended=ended)
        if not ended:
            return _HELD
        self._stop_waiting()
        sums, framed = (
            held.sums,
            is_grpc(exchange.request) and is_framed(held.read_start(), held.sums.length),
        )
        pieces = duplex.whole = held.take()
        duplex.has_trailers = kind == "request_trailers"
        if framed:
            return judge(self._service, "request_headers", exchange, None, "grpc")
        encoded = "content-encoding" in exchange.request.headers
        content: bytes | memoryview | None = None
        reads = sums.length <= max(exchange.inspects, exchange.steers) or (
            exchange.reads_ends and exchange.is_plain
        )
        if reads or encoded:
            content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if encoded and content is not None:
            sums = sum_up(self._service, exchange, content)
            content = content if reads else None
        return judge(self._service, "request_headers", exchange, sums, content=content)

    def hand_on(self) -> None:
        """See `Waiting`."""
        self._send_on(inspects=False)
        if self.on_given_up is not None:
            self.on_given_up()

    def _send_on(self, *, inspects: bool) -> None:
        """Forward the held body, and the rest as it arrives; guards may read it (`inspects`)."""
        duplex, exchange = self._duplex, self._waiting
        if duplex is None or not duplex.holds:
            return
        duplex.holds = False
        duplex.before = [_HEADERS]
        held = duplex.held
        if exchange is not None:
            exchange.state = SENT_ON
        if held is not None and exchange is not None:
            start, pieces = held.read_start(), held.take()
            duplex.before += write_parts(pieces, ended=False)
            most = exchange.inspects if inspects else 0
            excerpt = self._open_excerpt(exchange, most) if inspects else None
            self._upload = Upload(self._service.kept, self._body_mode, b"", most, excerpt=excerpt)
            self._upload.follow(held.sums, start, pieces)

    def _let_held_go(self, message: EnvoyMessage, kind: str) -> str:
        """The phase to answer after an error.

        If a whole body is held, its headers are still unanswered.
        """
        duplex = self._duplex
        if duplex is None or not duplex.holds or kind in HEADERS:
            return kind
        if duplex.whole is not None:
            return "request_headers"
        duplex.before = [_HEADERS]
        if duplex.held is not None:
            duplex.before += write_parts(duplex.held.take(), ended=False)
        if kind == "request_body":
            duplex.part = hand_on([message.body], ended=message.ended)
        duplex.holds = False
        return kind

    def _on_chunk(
        self, kind: str, exchange: Exchange, chunk: bytes | memoryview, *, ended: bool
    ) -> MaybeLater:
        upload = self._upload
        if upload is None:
            upload = self._upload = self._start_upload(exchange)
        state = upload.add(chunk, ended=ended)
        if state == MORE:
            return PASS[kind]
        self._stop_waiting()
        if state == CUT_OFF:
            return judge(self._service, kind, exchange, None, "body_truncated")
        if is_grpc(exchange.request) and upload.is_framed:
            return judge(self._service, kind, exchange, None, "grpc")
        content, excerpt = upload.take_content()
        sums = upload.body
        if content is not None and not exchange.is_plain:
            sums = sum_up(self._service, exchange, content)
        return judge(self._service, kind, exchange, sums, content=content, excerpt=excerpt)

    def _start_upload(self, exchange: Exchange) -> Upload:
        if exchange.state == OBSERVED and self._body_mode < 0:
            self._body_mode = (
                BODY_STREAMED  # the only mode for observers, to whom Envoy sends no protocol_config
            )
        length = exchange.request.headers.get("content-length", b"")
        if self._body_mode == BODY_DUPLEX:
            length = b""  # every part must be handed back, so only Envoy tells the end
        keeps = (
            max(exchange.inspects, exchange.steers)
            if exchange.state == BUFFERED
            else exchange.inspects
        )
        if not exchange.is_plain:
            keeps = max(keeps, INSPECT_BYTES)  # to decompress it
        return Upload(
            self._service.kept,
            self._body_mode,
            length,
            keeps,
            self._limit,
            self._open_excerpt(exchange, keeps),
        )

    def _open_excerpt(self, exchange: Exchange, most: int) -> Excerpt | None:
        """Makes an excerpt of a body that may be too long; None if those are not inspected."""
        return Excerpt(LIST_PATHS, most) if exchange.reads_ends and exchange.is_plain else None

    def _stop_waiting(self) -> Exchange | None:
        """Remove and return the exchange that waits for the body, if any."""
        exchange, self._waiting = self._waiting, None
        if exchange is not None:
            del self._service.waiting[self]
        return exchange

    def _leave_uncounted(self, reason: str) -> None:
        """Leave the request uncounted, because its body will not arrive."""
        if self._upload is not None:
            self._upload.drop()
        if self._duplex is not None and self._duplex.held is not None:
            self._duplex.held.take()
        exchange = self._stop_waiting()
        if exchange is not None:
            exchange.give_up(reason)
            self._service.reporter.report_uncounted(exchange)
