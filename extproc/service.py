"""One ext_proc stream: ProcessingRequest in, ProcessingResponse out. The only file that knows ext_proc's phases.

Sans-IO: a `Stream` takes a message's bytes and returns a `Reply` with the answer's bytes, or an awaitable of one when the
store has to be asked over a network. Whoever owns the socket sends, holds and closes as the reply says. Every message gets
exactly one well-formed answer of its own phase (Envoy treats extras as an attack), and the stream is over as soon as nothing
more can be decided: with a buffered body it would otherwise stay open until the upstream's answer and eat Envoy's
`max_requests`.

What goes wrong in here never reaches the client: the request goes on, and that is counted and logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from time import perf_counter
from types import NoneType
from typing import NamedTuple, TypeAlias

from google.protobuf.message import DecodeError

from extproc import answers
from extproc.decision import Action, Decision, Outcome
from extproc.engine import Check, Engine, decide, hits, per_policy
from extproc.errors import ProtocolError, StoreError
from extproc.fingerprint import NO_BODY, Body
from extproc.handover import POLICY_ATTRIBUTE, POLICY_METADATA, HandedOver, RefusedPolicyError, named
from extproc.logs import RateLimit, fields
from extproc.metrics import Metrics
from extproc.pb.external_processor_pb2 import ProcessingRequest
from extproc.pb.processing_mode_pb2 import ProcessingMode
from extproc.plan import Entry
from extproc.request import unknowable_body
from extproc.settings import Settings, valid_scope
from extproc.store import Store
from extproc.store.memory import MemoryStore
from extproc.windows import Count
from extproc.wire import LARGE, attributes, parse_large, read_request

_LOG = logging.getLogger("loopguard")

MAX_KEPT = 64 * 2**20
"""Most bytes of streamed bodies that are kept at once; buffered ones come in one message and are not kept at all."""

SCOPE_METADATA = "x-loopguard-scope"
"""Names the attachment for one stream, in place of `--scope`."""

_INVALID_ARGUMENT = 3
_HOLD_MARGIN_MS = 2_000
"""What the overridden message timeout exceeds the hold by, so that a busy moment does not turn a hold into a 504."""

_LINES_PER_SECOND = 20
_LENGTH_DIGITS = 18
_PROBLEMS_SHOWN = 20
_NAME_SHOWN = 128

# Enum values by name: looking one up on its message class costs microseconds.
_NONE = ProcessingMode.NONE
_STREAMED = ProcessingMode.STREAMED
_BUFFERED = ProcessingMode.BUFFERED
_UNSUPPORTED_MODES = (ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.GRPC)


class Reply(NamedTuple):
    """What to do with one message.

    Attributes:
        answer: the ProcessingResponse to send; None when the message has no well-formed answer.
        done: end the stream with status OK once the answer is out.
        hold_ms: wait that long before the answer, in milliseconds.
        first: a ProcessingResponse to send before the wait, which makes Envoy wait as well.
    """

    answer: bytes | None
    done: bool
    hold_ms: int = 0
    first: bytes = b""


MaybeLater: TypeAlias = Reply | Awaitable[Reply]
MaybeCounts: TypeAlias = Sequence[Count] | Awaitable[Sequence[Count] | None] | None
_PLAIN = (list, tuple, NoneType)
"""Counts that are there already; whether something is an Awaitable, an abstract type, is ten times as dear to find out."""


_PHASES = (
    "request_headers",
    "request_body",
    "request_trailers",
    "response_headers",
    "response_body",
    "response_trailers",
)
_GO_ON = {kind: Reply(answers.go_on(kind), done=False) for kind in _PHASES}
_DONE = {kind: Reply(reply.answer, done=True) for kind, reply in _GO_ON.items()}
_NO_ANSWER = Reply(None, done=True)


class Holds:
    """Throttled requests being held: bounded in all and per tenant, each freed when its stream closes."""

    def __init__(self, limit: int) -> None:
        """Hold at most `limit` requests, a tenth of them for one tenant."""
        self._limit = limit
        self._tenant_limit = max(1, limit // 10)
        self._tenants: Counter[str] = Counter()
        self.released = asyncio.Event()
        self.held = 0

    def take(self, tenant: str) -> bool:
        """Claim a place, or False when there is none."""
        if self.held >= self._limit or self._tenants[tenant] >= self._tenant_limit:
            return False
        self.held += 1
        self._tenants[tenant] += 1
        return True

    def free(self, tenant: str) -> None:
        """Give a place back."""
        self.held -= 1
        self._tenants[tenant] -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]

    async def wait(self, milliseconds: int) -> None:
        """Hold the caller, until `release` at the latest."""
        try:
            async with asyncio.timeout(milliseconds / 1000):
                await self.released.wait()
        except TimeoutError:
            pass

    def release(self) -> None:
        """End every hold at once, now and from now on."""
        self.released.set()


class Service:
    """Everything that streams share.

    Attributes:
        released: set once `release` was called.
        streams: open now.
        waiting: of these, the ones that wait for a body, the oldest first.
        given_up: of these, the ones that decide nothing any more and only have to close.
        kept: bytes of streamed bodies that are waited for, of those that are to be looked into.
    """

    def __init__(self, engine: Engine, store: Store, local: MemoryStore, metrics: Metrics, settings: Settings) -> None:
        """Put the parts together.

        Args:
            engine: the policies in force; assign `engine` to change them between two requests.
            store: counts.
            local: counts while `store` cannot.
            metrics: is told everything.
            settings: of the process.
        """
        self.engine = engine
        self.store = store
        self.metrics = metrics
        self.settings = settings
        self.holds = Holds(settings.max_throttled)
        self.released = self.holds.released
        self.streams = 0
        self.waiting: OrderedDict[Stream, None] = OrderedDict()
        self.given_up = 0
        self.kept = 0
        self._handed_over = HandedOver(shadow=settings.shadow, allow_unenforced=settings.allow_unenforced)
        self._local = local
        self._detections = RateLimit(_LINES_PER_SECOND)
        self._failures = RateLimit(_LINES_PER_SECOND)
        metrics.throttled_in_flight.set_function(lambda: self.holds.held)
        metrics.streams_in_flight.set_function(lambda: self.streams)

    def open(self, metadata: Iterable[tuple[str, str | bytes]] = ()) -> Stream:
        """A new stream; the caller must `close` it, whatever happens.

        Args:
            metadata: the stream's gRPC initial metadata, which Envoy's `grpc_service.initial_metadata` sets.
        """
        scope = self.settings.scope
        pinned: list[str] = []
        for name, value in metadata:
            if name == SCOPE_METADATA and isinstance(value, str) and valid_scope(value):
                scope = value
            elif name == POLICY_METADATA and isinstance(value, str):
                pinned += named(value)
        overloaded = self.streams - self.given_up >= self.settings.max_streams
        if overloaded and self.waiting:
            # Whoever uploads may stall for as long as he likes; that must not switch the guard off for everybody else.
            self.metrics.overload.inc()
            next(iter(self.waiting)).give_up("overload")
            overloaded = False
        return Stream(self, scope, list(dict.fromkeys(pinned)), overloaded=overloaded)

    def release(self) -> None:
        """End every hold and every wait for a body, now and from now on: the server is about to stop."""
        self.holds.release()
        for stream in list(self.waiting):
            stream.give_up("shutdown")

    def count(self, check: Check, entries: Sequence[Entry], *, shadow: bool) -> MaybeCounts:
        """Ask the store to count one lane of a request; None when the counts could not be had."""
        asked = hits(entries)
        if not asked:
            return ()
        try:
            counts = self.store.hit(asked)
        except Exception as error:  # noqa: BLE001  # sorted out by the callee
            return self._without_store(check, entries, error, shadow=shadow)
        if isinstance(counts, _PLAIN) or not isinstance(counts, Awaitable):
            return counts
        return self._count_later(check, entries, counts, shadow=shadow)

    async def _count_later(
        self, check: Check, entries: Sequence[Entry], counts: Awaitable[Sequence[Count]], *, shadow: bool
    ) -> Sequence[Count] | None:
        started = perf_counter()
        try:
            return await counts
        except Exception as error:  # noqa: BLE001  # sorted out by the callee
            return self._without_store(check, entries, error, shadow=shadow)
        finally:
            self.metrics.store_seconds.observe(perf_counter() - started)

    def _without_store(
        self, check: Check, entries: Sequence[Entry], error: Exception, *, shadow: bool
    ) -> Sequence[Count] | None:
        """The counts of a window local to this process, or none; a bug is raised, unless only shadow policies see it."""
        if isinstance(error, StoreError):
            self.metrics.store_errors.labels(error.kind).inc()
            if self.settings.on_store_error == "reject":
                return None
            self.metrics.fail_open.labels("store_error").inc()
            try:
                return self._local.hit(hits(entries))
            except Exception as bug:  # noqa: BLE001  # as any other bug, below
                error = bug
        if not shadow:
            raise error
        check.failures.append((entries[0].plan.id, error))
        return None

    def handed_over(self, policy_json: str) -> Engine | None:
        """The policies that came with a route; None when they cannot be used, which is counted, and logged once."""
        now = datetime.now(UTC)
        found = self._handed_over.known(policy_json, now)
        if found is None:
            found = self._handed_over.compile(policy_json, now)
            if isinstance(found, RefusedPolicyError):
                shown = fields(reason=found.reason, problems=len(found.problems), first=found.problems[:_PROBLEMS_SHOWN])
                _LOG.error("policy in route metadata refused", extra=shown)
        if isinstance(found, Engine):
            return found
        self.metrics.handover_errors.labels(found.reason).inc()
        return None

    def check_pinned(self, engine: Engine, pinned: Sequence[str]) -> None:
        """Say so when a route names policies that are not there."""
        unknown = engine.unknown(pinned)
        if unknown:
            self.metrics.handover_errors.labels("unknown_policy").inc()
            if (suppressed := self._failures.take(perf_counter())) is not None:
                extra = fields(
                    policies=[name[:_NAME_SHOWN] for name in unknown[:_PROBLEMS_SHOWN]],
                    metadata=POLICY_METADATA,
                    suppressed=suppressed or None,
                )
                _LOG.error("a route names policies that are not loaded or not enabled", extra=extra)

    def log_failure(self, message: str, error: BaseException, **more: object) -> None:
        """One line for something that went wrong, unless there are too many of them."""
        suppressed = self._failures.take(perf_counter())
        if suppressed is not None:
            extra = fields(error=f"{type(error).__name__}: {error}", **more, suppressed=suppressed or None)
            _LOG.error(message, exc_info=error, extra=extra)

    def record(self, check: Check, decision: Decision) -> None:
        """Metrics and log lines for one decided request."""
        metrics = self.metrics
        for outcome in decision.trace:
            if outcome.action is not Action.ALLOW:
                metrics.detections.labels(outcome.policy, outcome.detector, outcome.mode, outcome.action.value).inc()
                self._log_detection(check, outcome)
        for outcome in per_policy(decision.trace):
            loop = outcome.action is not Action.ALLOW
            metrics.count_decision(outcome.policy, outcome.mode, outcome.action.value, loop=loop)
        for policy in check.compared_exactly:
            metrics.compared_exactly.labels(policy).inc()
        self.record_uncounted(check)

    def record_uncounted(self, check: Check) -> None:
        """Metrics and log lines for policies that did not count a request."""
        for policy, reason in check.uncounted:
            self.metrics.uncounted.labels(policy, reason).inc()
        for policy, error in check.failures:
            self.metrics.fail_open.labels("shadow_error").inc()
            self.log_failure("shadow policy failed", error, policy=policy)

    def _log_detection(self, check: Check, outcome: Outcome) -> None:
        suppressed = self._detections.take(perf_counter())
        if suppressed is None:
            return
        shown = None
        if self.settings.log_descriptors:
            entries = (*check.enforcing, *check.shadow)
            shown = next(dict(entry.values) for entry in entries if entry.plan.id == outcome.policy)
        extra = fields(
            policy=outcome.policy,
            detector=outcome.detector,
            mode=outcome.mode,
            action=outcome.action.value,
            fingerprint=outcome.fingerprint,
            count=outcome.count,
            tenant=outcome.tenant,
            descriptors=shown,
            suppressed=suppressed or None,
        )
        _LOG.warning("loop detected", extra=extra)


class Stream:
    """One ext_proc stream, that is, one HTTP request.

    Attributes:
        given_up: nobody waits for its body any more.
        on_given_up: for whoever owns the socket to set; called, from within a call of another stream, when this one need not go
            on: end it with status OK. A stream that goes on all the same has its next message answered, and is over then.
    """

    __slots__ = (
        "_body",
        "_body_mode",
        "_check",
        "_chunk",
        "_ended",
        "_engine",
        "_expected",
        "_holding",
        "_kept",
        "_observed",
        "_overloaded",
        "_pinned",
        "_scope",
        "_service",
        "_started",
        "given_up",
        "on_given_up",
    )

    def __init__(self, service: Service, scope: str, pinned: Sequence[str], *, overloaded: bool) -> None:
        """Take part in the service's counts until `close`; an overloaded stream lets its request through at once."""
        self._service = service
        self._engine = service.engine  # one request sees one set of policies, whatever is reloaded meanwhile
        self._scope = scope
        self._pinned = pinned
        self._overloaded = overloaded
        self._check: Check | None = None
        self._chunk: bytes | memoryview | None = None  # of the body, where the message at hand is large
        self._body = NO_BODY
        self._kept = bytearray()  # of a streamed body, what came before
        self._body_mode = -1
        self._expected = -1
        self.given_up = False
        self._holding: str | None = None
        self._observed = False
        self._ended = False  # by a refusal
        self._started = 0.0
        self.on_given_up: Callable[[], object] | None = None
        service.streams += 1

    def receive(self, data: bytes) -> MaybeLater:
        """Take one serialized ProcessingRequest.

        Raises:
            ProtocolError: the bytes are not a ProcessingRequest.
        """
        self._started = perf_counter()
        try:
            if len(data) < LARGE:
                message, self._chunk = ProcessingRequest.FromString(data), None
            else:
                message, self._chunk = parse_large(data)
        except DecodeError as error:
            raise ProtocolError("not a ProcessingRequest", code=_INVALID_ARGUMENT) from error
        kind = message.WhichOneof("request")
        if kind is None:
            return _NO_ANSWER  # a phase that does not exist yet; Envoy goes on when the stream ends with OK
        if self._overloaded:
            self._service.metrics.overload.inc()
            return _DONE[kind]
        try:
            return _HANDLERS[kind](self, message)
        except Exception as error:  # noqa: BLE001  # whatever it is, the request goes on
            return self._failed(kind, error)

    def close(self) -> None:
        """The stream has ended, in whatever way: free what it held."""
        self._service.streams -= 1
        self._service.given_up -= self.given_up
        # Where Envoy did not say whether it sends bodies, nobody knows which of the two it was.
        self._leave_uncounted("no_body_phase" if self._body_mode < 0 else "aborted")
        self._drop_kept()
        if self._holding is not None:
            self._service.holds.free(self._holding)
            self._holding = None

    def give_up(self, reason: str) -> None:
        """Wait for the body no longer: the request goes on, uncounted."""
        self._drop_kept()
        self._leave_uncounted(reason)
        self.given_up = True
        self._service.given_up += 1
        if self.on_given_up is not None:
            self.on_given_up()

    def _request_headers(self, message: ProcessingRequest) -> MaybeLater:
        if self._check is not None or self.given_up:
            return _DONE["request_headers"]
        self._observed = message.observability_mode
        check = self._prepare(message)
        if check is None:
            self._service.metrics.unmatched.inc()
            return _DONE["request_headers"]
        if message.request_headers.end_of_stream:
            return self._judge("request_headers", check, NO_BODY, content=b"")
        if not check.needs_body:
            return self._judge("request_headers", check, None)
        if message.HasField("protocol_config"):
            self._body_mode = message.protocol_config.request_body_mode
        reason = unknowable_body(check.request) or _no_body_phase(self._body_mode)
        if not reason and self._service.released.is_set():
            reason = "shutdown"
        if reason:
            return self._judge("request_headers", check, None, reason)
        return self._go_on_to_body(check)

    def _go_on_to_body(self, check: Check) -> MaybeLater:
        """Wait for the body, which only shadow policies may need."""
        length = check.request.headers.get("content-length", b"")
        self._expected = int(length) if length.isdigit() and len(length) <= _LENGTH_DIGITS else -1
        if not check.only_shadow_needs_body:
            return self._wait_for_body(check, _GO_ON["request_headers"])
        # What shadow policies wait for must not keep the others: those are answered now.
        watching = check.split()
        reply = self._judge("request_headers", check, None)
        if isinstance(reply, Reply):
            return self._wait_for_body(watching, reply)
        return self._watch_later(reply, watching)

    async def _watch_later(self, reply: Awaitable[Reply], watching: Check) -> Reply:
        return self._wait_for_body(watching, await reply)

    def _wait_for_body(self, check: Check, reply: Reply) -> Reply:
        """Answer the headers and wait for the body, unless the request does not go on to have one."""
        if self._ended or reply.hold_ms:
            check.give_up("decided_before")
            self._service.record_uncounted(check)
            return reply
        self._check = check
        self._service.waiting[self] = None
        return reply._replace(done=False)

    def _prepare(self, message: ProcessingRequest) -> Check | None:
        """What the policies of the request, and of its route, want to count."""
        service, engine, handed_over = self._service, self._engine, None
        engines = [engine]
        if POLICY_ATTRIBUTE in (known := attributes(message)):
            handed_over = service.handed_over(known[POLICY_ATTRIBUTE].string_value)
            if handed_over is not None:
                engines.append(handed_over)
        if self._pinned:
            service.check_pinned(engine, self._pinned)
        request = read_request(message, engines, allow_unverified_jwt=service.settings.allow_unverified_jwt)
        return engine.prepare(request, self._scope, self._pinned, handed_over)

    def _request_body(self, message: ProcessingRequest) -> MaybeLater:
        check = self._check
        if check is None:
            return _DONE["request_body"]
        chunk, self._chunk = self._chunk, None
        if chunk is None:
            chunk = message.request_body.body
        if self._observed and self._body_mode < 0:
            self._body_mode = _STREAMED  # the only way to observe bodies; Envoy sends observers no protocol_config
        self._body = body = self._body.plus(chunk)
        # With trailers to come, a complete buffered body does not say that it ends the stream.
        complete = message.request_body.end_of_stream or self._body_mode == _BUFFERED or body.length == self._expected
        if not complete and self._body_mode == _STREAMED:
            self._keep(check, chunk)
            return _GO_ON["request_body"]
        self._wait_no_more()
        if not complete:
            return self._judge("request_body", check, None, "body_truncated")
        return self._judge("request_body", check, body, content=self._content(check, chunk))

    def _request_trailers(self, message: ProcessingRequest) -> MaybeLater:  # noqa: ARG002  # a handler's signature
        check = self._wait_no_more()
        if check is None:
            return _DONE["request_trailers"]
        return self._judge("request_trailers", check, self._body, content=self._content(check, b""))  # a streamed body ends

    def _keep(self, check: Check, chunk: bytes | memoryview) -> None:
        """A part of a streamed body that somebody may look into, unless that is too much of it, or of all bodies under way."""
        service = self._service
        size = self._body.length
        if size <= check.inspects and service.kept + len(chunk) <= MAX_KEPT:
            service.kept += len(chunk)
            self._kept += chunk
        else:
            self._drop_kept()

    def _content(self, check: Check, last: bytes | memoryview) -> bytes | memoryview | None:
        """The whole body, None where it was not kept."""
        length = self._body.length
        if length > check.inspects:
            return None
        if len(last) == length:
            return last
        content = bytes(self._kept + last)
        self._drop_kept()
        return content if len(content) == length else None

    def _drop_kept(self) -> None:
        self._service.kept -= len(self._kept)
        self._kept = bytearray()

    def _response(self, message: ProcessingRequest) -> MaybeLater:
        self._leave_uncounted("no_body_phase")
        return _DONE[message.WhichOneof("request") or ""]

    def _wait_no_more(self) -> Check | None:
        """What waited for the body until now, if anything did."""
        check, self._check = self._check, None
        if check is not None:
            del self._service.waiting[self]
        return check

    def _leave_uncounted(self, reason: str) -> None:
        """A body that was waited for never came: nothing is counted."""
        check = self._wait_no_more()
        if check is not None:
            check.give_up(reason)
            self._service.record_uncounted(check)

    def _judge(
        self, kind: str, check: Check, body: Body | None, reason: str = "", content: bytes | memoryview | None = None
    ) -> MaybeLater:
        """Count the request and answer, now or when the store has answered."""
        check.seal(body, reason, content)
        service = self._service
        counts = service.count(check, check.enforcing, shadow=False) if check.enforcing else ()
        shadow_counts = service.count(check, check.shadow, shadow=True) if check.shadow else ()
        if isinstance(counts, _PLAIN) and isinstance(shadow_counts, _PLAIN):
            return self._answer(kind, check, counts, shadow_counts)
        return self._judge_later(kind, check, counts, shadow_counts)

    async def _judge_later(self, kind: str, check: Check, counts: MaybeCounts, shadow_counts: MaybeCounts) -> Reply:
        try:
            settled = await asyncio.gather(_settled(counts), _settled(shadow_counts))
            return self._answer(kind, check, *settled)
        except Exception as error:  # noqa: BLE001  # whatever it is, the request goes on
            return self._failed(kind, error)

    def _answer(self, kind: str, check: Check, counts: Sequence[Count] | None, shadow_counts: Sequence[Count] | None) -> Reply:
        service = self._service
        unavailable = counts is None  # --on-store-error reject
        if unavailable:
            check.enforcing = []
        decision = decide(check, counts or (), shadow_counts)
        if decision.lead is not None and decision.lead.action is Action.THROTTLE and not self._observed:
            decision = self._hold(decision, decision.lead)
        service.record(check, decision)
        if unavailable:
            self._ended = True
            reply = Reply(answers.store_unavailable(answers.detected(decision), check.request), done=True)
        else:
            reply = self._encode(kind, check, decision)
        service.metrics.decision_seconds.observe(perf_counter() - self._started)
        return reply

    def _hold(self, decision: Decision, lead: Outcome) -> Decision:
        """Claim a place among the held requests; past the bound a throttled request is rejected."""
        if self._service.holds.take(lead.tenant):
            self._holding = lead.tenant
            return decision
        refused = lead._replace(action=Action.REJECT, delay_ms=0)
        trace = [refused if outcome is lead else outcome for outcome in decision.trace]
        return decision._replace(lead=refused, trace=trace)

    def _encode(self, kind: str, check: Check, decision: Decision) -> Reply:
        lead = decision.lead
        recorded = self._service.settings.record and (check.enforcing or check.shadow)
        if lead is None and decision.shadow is None and not recorded:
            return _DONE[kind]
        metadata = answers.detected(decision)
        if recorded:
            first = recorded[0]
            metadata |= {
                "fingerprint": first.fingerprint,
                "tenant": first.tenant,
                "body_crc32": f"{first.body_crc32:08x}",
                **metadata,
            }
        if lead is not None and lead.action is Action.REJECT:
            self._ended = True
            return Reply(answers.refusal(lead, metadata, check.request), done=True)
        answer = answers.go_on(kind, metadata, warning=decision.warning)
        if lead is None or self._holding is None:
            return Reply(answer, done=True)
        return Reply(answer, done=True, hold_ms=lead.delay_ms, first=answers.wait(lead.delay_ms + _HOLD_MARGIN_MS))

    def _failed(self, kind: str, error: Exception) -> Reply:
        """An internal error: the request goes on, loudly."""
        self._wait_no_more()
        self._service.metrics.fail_open.labels("internal_error").inc()
        self._service.log_failure("internal error, request let through", error, phase=kind)
        return _DONE[kind]


_HANDLERS: dict[str, Callable[[Stream, ProcessingRequest], MaybeLater]] = {
    "request_headers": Stream._request_headers,  # noqa: SLF001  # the table of its own methods
    "request_body": Stream._request_body,  # noqa: SLF001
    "request_trailers": Stream._request_trailers,  # noqa: SLF001
    "response_headers": Stream._response,  # noqa: SLF001
    "response_body": Stream._response,  # noqa: SLF001
    "response_trailers": Stream._response,  # noqa: SLF001
}


async def _settled(counts: MaybeCounts) -> Sequence[Count] | None:
    return await counts if isinstance(counts, Awaitable) else counts


def _no_body_phase(body_mode: int) -> str:
    """Why Envoy will not hand over any body as a whole, empty when it will."""
    if body_mode == _NONE:
        return "no_body_phase"
    if body_mode in _UNSUPPORTED_MODES:
        return "body_mode"
    return ""
