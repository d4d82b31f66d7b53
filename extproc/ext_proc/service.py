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
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from math import ceil, inf
from time import perf_counter, thread_time, time
from typing import Any, Final, TypeAlias

from google.protobuf.message import DecodeError

from extproc.decision import Action, Decision, Outcome
from extproc.engine.candidates import SessionCandidate
from extproc.engine.counting import HERE, Asked, Counting, Counts, MaybeCounts, settle
from extproc.engine.engine import Engine
from extproc.engine.evaluation import Evaluation
from extproc.engine.handover import POLICY_ATTRIBUTE, POLICY_METADATA, HandedOver, RefusedPolicy, parse_names
from extproc.engine.orders import KILL, Overrides
from extproc.engine.recording import record_body, record_head
from extproc.engine.settlements import Entry, list_settlements
from extproc.errors import ProtocolError, StoreError
from extproc.ext_proc.access_log import AccessLog
from extproc.ext_proc.answers.go_on import (
    LAST_HEADERS,
    end_headers,
    find_warning,
    hand_back,
    let_go_on,
    make_metadata,
    make_wait,
    replace_body,
)
from extproc.ext_proc.answers.metadata import SESSIONS, write_sessions
from extproc.ext_proc.answers.refuse import refuse, refuse_blocked, refuse_killed, refuse_uncountable, refuse_without_store
from extproc.ext_proc.budget import InspectionBudget
from extproc.ext_proc.changes.changes import NOTHING, OBSERVED, UNCHANGED, Changed, Changes, Original
from extproc.ext_proc.duplex import Duplex, is_duplex
from extproc.ext_proc.throttle import Holds
from extproc.ext_proc.upload import CUT_OFF, MORE, SMALLEST_LIMIT, Upload, UploadMemory
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
from extproc.metrics import Metrics
from extproc.operator.canary.pairs import Pairs
from extproc.operator.reporting import Reporter
from extproc.request.fingerprint import NO_BODY, Body, write_crc32
from extproc.request.hash_key import PROCESS_KEY, HashKey
from extproc.request.http import RESPONSES_WEBSOCKET, HttpRequest, explain_unknowable_body, is_grpc
from extproc.settings import Settings, is_scope
from extproc.store import Store
from extproc.store.memory import MemoryStore
from extproc.store.pending import Listener
from extproc.store.rules.session import REFUSED, WITHDRAWN

SCOPE_METADATA = "x-loopguard-scope"
"""Names the attachment for one stream, in place of `--scope`."""

BUFFER_LIMIT_METADATA: Final = "x-loopguard-buffer-limit"
"""How many bytes Envoy collects of a body at least, which tells one that was cut off from one that ends in trailers."""

HOLD_MARGIN_MS = 2_000
"""What the overridden message timeout exceeds the hold by, so that a busy moment does not turn a hold into a 504."""

_SMALL: Final = 8_192
_SMALL_SECONDS: Final = 0.001
"""A body of so many bytes takes no longer to look into; the clock of a thread, which is a system call, would."""

_LIMIT_DIGITS: Final = 18
_INVALID_ARGUMENT = 3
_REFUSED_STATUS: Final = 429
"""Of requests that another guard has refused, whatever it says exactly."""

_REFUSED_BODIES: Final = {b"408": "aborted", b"413": "too_large"}
"""What Envoy answers to a body that does not come in time, and to one above its buffer limit."""

_DECIDED_BEFORE: Final = "decided_before"
"""Why shadow policies do not know the body of a request that ended, or was held, on its headers."""


class Reply:
    """What to do with one message; never changed.

    Attributes:
        answer: the ProcessingResponse to send; None when the message has no well-formed answer.
        done: end the stream with status OK once the answer is out.
        hold_ms: wait that long before the answer, in milliseconds.
        first: a ProcessingResponse to send before the wait, which makes Envoy wait as well.
    """

    __slots__ = ("answer", "done", "first", "hold_ms")

    def __init__(self, answer: bytes | None, *, done: bool, hold_ms: int = 0, first: bytes = b"") -> None:
        """Keep them as given."""
        self.answer = answer
        self.done = done
        self.hold_ms = hold_ms
        self.first = first


MaybeLater: TypeAlias = Reply | Awaitable[Reply]

_PHASES = (
    "request_headers",
    LAST_HEADERS,
    "request_body",
    "request_trailers",
    "response_headers",
    "response_body",
    "response_trailers",
)
_HEADERS: Final = ("request_headers", LAST_HEADERS)
_GO_ON: Final = {kind: Reply(let_go_on(kind), done=False) for kind in _PHASES}
_DONE: Final = {kind: Reply(reply.answer, done=True) for kind, reply in _GO_ON.items()}
_GO_ON_BYTES: Final = {kind: let_go_on(kind) for kind in _PHASES}
_NO_ANSWER: Final = Reply(None, done=True)


class Later:
    """A reply that waits for the store and nothing else, which whoever owns the socket can do without a task."""

    __slots__ = ("_asked", "_evaluation", "_kind", "_shadow_counts", "_stream")

    def __init__(self, stream: Stream, kind: str, evaluation: Evaluation, asked: Asked, shadow_counts: Counts) -> None:
        """See `Stream.settle`."""
        self._stream = stream
        self._kind = kind
        self._evaluation = evaluation
        self._asked = asked
        self._shadow_counts = shadow_counts

    def tell(self, listener: Listener) -> None:
        """Tell this one as soon as the store has answered, for it to `settle`."""
        self._asked.pending.tell(listener)

    def cancel(self) -> None:
        """Want no reply any more."""
        self._asked.pending.cancel()

    def settle(self) -> Reply:
        """The reply, once the store has answered."""
        return self._stream.settle(self._kind, self._evaluation, self._asked, self._shadow_counts)

    async def _wait(self) -> Reply:
        with suppress(StoreError):  # `settle` sorts it out
            await self._asked.pending
        return self.settle()

    def __await__(self) -> Generator[Any, None, Reply]:
        """The same for others: wait, and settle."""
        return self._wait().__await__()


class Service:
    """Everything that streams share.

    Attributes:
        engine: the policies in force; see `follow`.
        key: of keyed hashes.
        counting: asks the store.
        metrics: is told everything.
        reporter: tells it, and the log.
        settings: of the process.
        holds: of throttled requests.
        released: `release` was called.
        kept: bytes of bodies under way.
        budget: time for looking into them.
        changes: of them.
        pairs: what shadow policies would do in place of enforcing ones.
        overrides: what operators have ordered; None where that is nothing. Assign to change it between two requests.
        access_log: is told what became of requests.
        handed_over: policies that come with routes.
        streams: open now.
        waiting: of these, the ones that wait for a body, the oldest first.
        given_up: of these, the ones that decide nothing any more: they only have to close, or to hand bodies back.
    """

    def __init__(  # noqa: PLR0913  # all that streams share
        self,
        engine: Engine,
        store: Store,
        local: MemoryStore,
        metrics: Metrics,
        settings: Settings,
        key: HashKey = PROCESS_KEY,
    ) -> None:
        """Put the parts together.

        Args:
            engine: the policies in force.
            store: counts.
            local: counts while `store` cannot.
            metrics: is told everything.
            settings: of the process.
            key: of keyed hashes.
        """
        self.engine = engine
        self.key = key
        self.counting = Counting(store, local, metrics, reject=settings.on_store_error == "reject")
        self.metrics = metrics
        self.reporter = Reporter(metrics, show_callers=settings.show_callers)
        self.settings = settings
        self.holds = Holds(settings.max_throttled)
        self.released = False
        self.kept = UploadMemory()
        self.budget = InspectionBudget(perf_counter())
        self.changes = Changes(self.reporter, self.budget)
        self.pairs = Pairs(settings.shadow_samples, sample_bodies=settings.shadow_sample_bodies)
        self.pairs.follow(engine.pairings, time())
        self.pairs.show(metrics)
        self.overrides: Overrides | None = None
        self.access_log = AccessLog(self.settle_entry, metrics)
        self.streams = 0
        self.waiting: OrderedDict[Stream, None] = OrderedDict()
        self.given_up = 0
        self.handed_over = HandedOver(shadow=settings.shadow, allow_unenforced=settings.allow_unenforced)
        metrics.throttled_in_flight.set_function(lambda: self.holds.held)
        metrics.streams_in_flight.set_function(lambda: self.streams)

    def follow(self, engine: Engine) -> None:
        """Take other policies between two requests; those under way go on with what was in force when they came."""
        self.engine = engine
        self.pairs.follow(engine.pairings, time())

    def open(self, metadata: Iterable[tuple[str, str | bytes]] = ()) -> Stream:
        """A new stream; the caller must `close` it, whatever happens.

        Args:
            metadata: the stream's gRPC initial metadata, which Envoy's `grpc_service.initial_metadata` sets.
        """
        scope, limit = self.settings.scope, SMALLEST_LIMIT
        pinned: list[str] = []
        for name, value in metadata:
            if name == SCOPE_METADATA and isinstance(value, str) and is_scope(value):
                scope = value
            elif name == POLICY_METADATA and isinstance(value, str):
                pinned += parse_names(value)
            elif name == BUFFER_LIMIT_METADATA and isinstance(value, str) and value.isascii() and value.isdigit():
                limit = int(value[:_LIMIT_DIGITS])
        overloaded = self.streams - self.given_up >= self.settings.max_streams
        if overloaded and self.waiting:
            # Whoever uploads may stall for as long as he likes; that must not switch the guard off for everybody else.
            self.metrics.overload.inc()
            next(iter(self.waiting)).give_up("overload")
            overloaded = False
        return Stream(self, scope, list(dict.fromkeys(pinned)) if pinned else pinned, limit, overloaded=overloaded)

    def settle_entry(self, entry: Entry) -> None:
        """Take what became of a request."""
        settled = list_settlements(self.engine, entry)
        if len(settled) < len(entry.sessions):
            self.reporter.report_unknown_calls(len(entry.sessions) - len(settled))
        take = partial(self.reporter.report_settled, settled, entry)
        self.counting.settle([each.settlement for each in settled], take)

    def release(self) -> None:
        """End every hold and every wait for a body, now and from now on: the server is about to stop."""
        self.released = True
        self.holds.release()
        for stream in list(self.waiting):
            stream.give_up("shutdown")

    def compile_handed_over(self, policy_json: str) -> Engine | None:
        """The policies that came with a route; None when they cannot be used, which is counted, and logged once."""
        now = datetime.now(UTC)
        found = self.handed_over.recall(policy_json, now)
        if found is None:
            found = self.handed_over.compile(policy_json, now)
            if isinstance(found, RefusedPolicy):
                self.reporter.report_refused_policy(found)
        if isinstance(found, Engine):
            return found
        self.metrics.handover_errors.labels(found.reason).inc()
        return None


class Stream:
    """One ext_proc stream, that is, one HTTP request.

    Attributes:
        given_up: nobody waits for its body any more.
        on_given_up: for whoever owns the socket to set; called, from within a call of another stream, when this one need not go
            on: end it with status OK. A stream that goes on all the same has its next message answered, and is over then.
    """

    __slots__ = (
        "_aside",
        "_body_mode",
        "_content",
        "_duplex",
        "_ended",
        "_engine",
        "_evaluation",
        "_held",
        "_holding",
        "_limit",
        "_observed",
        "_overloaded",
        "_pinned",
        "_record",
        "_scope",
        "_service",
        "_started",
        "_unknown",
        "_upload",
        "given_up",
        "on_given_up",
    )

    def __init__(self, service: Service, scope: str, pinned: Sequence[str], limit: int, *, overloaded: bool) -> None:
        """Take part in the service's counts until `close`; an overloaded stream lets its request through at once."""
        self._service = service
        self._engine = service.engine  # one request sees one set of policies, whatever is reloaded meanwhile
        self._scope = scope
        self._pinned = pinned
        self._limit = limit
        self._overloaded = overloaded
        self._evaluation: Evaluation | None = None  # what waits for the body
        self._upload: Upload | None = None
        self._body_mode = BODY_UNTOLD
        self._content: bytes | memoryview | None = None  # of a request that a note may be put into
        self._unknown = ""  # why there is none
        self._record: dict[str, Any] | None = None  # of a request that is to be recorded, as far as it is known
        self.given_up = False
        self._duplex: Duplex | None = None  # what has to be handed back
        self._aside = False  # nothing more is decided here
        self._holding: str | None = None
        self._held: Sequence[SessionCandidate] = ()  # sessions of a request that is held, until its answer leaves
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
            message = parse_message(data)
        except DecodeError as error:
            raise ProtocolError("not a ProcessingRequest", code=_INVALID_ARGUMENT) from error
        kind = message.kind
        if not kind:
            return _NO_ANSWER  # a phase that does not exist yet; Envoy goes on when the stream ends with OK
        if kind == "request_headers" and message.body_mode == BODY_BUFFERED_PARTIAL and not message.ended:
            kind = LAST_HEADERS
        if self._duplex is None and is_duplex(message):
            self._duplex = Duplex(message)
        if self._duplex is not None and self._duplex.follow(message):
            return Reply(hand_back(kind, cut_body(data, kind)), done=self._duplex.over)
        if self._overloaded:
            self._overloaded = False
            self._service.metrics.overload.inc()
            return self._stay(_DONE[kind])
        try:
            reply = self._handle(message, kind)
        except Exception as error:  # noqa: BLE001  # whatever it is, the request goes on
            reply = self._fail(kind, error)
        return self._stay(reply) if isinstance(reply, Reply) else reply

    def _stay(self, reply: Reply) -> Reply:
        """The same, but for the end of a stream that has bodies to hand back."""
        if self._duplex is None or not reply.done or self._ended or reply.answer is None:
            return reply
        self._step_aside()
        return reply if self._duplex.over else Reply(reply.answer, done=False, hold_ms=reply.hold_ms, first=reply.first)

    def _step_aside(self) -> None:
        """Take no place any more among those that decide."""
        if not self._aside:
            self._aside = True
            self._service.given_up += 1

    def _handle(self, message: EnvoyMessage, kind: str) -> MaybeLater:
        # Not by a table: a method out of a dict is called as interpreted code calls it.
        if kind in _HEADERS:
            return self._on_request_headers(message, kind)
        if message.kind == "request_body":
            return self._on_request_body(message)
        if message.kind == "request_trailers":
            return self._on_request_trailers()
        return self._on_response(message)

    def close(self) -> None:
        """The stream has ended, in whatever way: free what it held."""
        self._service.streams -= 1
        self._service.given_up -= self._aside
        # Where Envoy did not say whether it sends bodies, nobody knows which of the two it was.
        self._leave_uncounted("no_body_phase" if self._body_mode < 0 else "aborted")
        if self._holding is not None:
            self._service.holds.free(self._holding)
            self._holding = None
        if self._held:
            self._take_back(self._held, WITHDRAWN, 0)
            self._held = ()

    @property
    def carries(self) -> bool:
        """A body is under way that Envoy does not keep: it would be cut off if the stream ended with OK."""
        return self._duplex is not None and self._duplex.carries

    def end_hold(self) -> None:
        """The answer that was held leaves now, so that the request goes on, whoever still waits for it."""
        self._held = ()

    def give_up(self, reason: str) -> None:
        """Wait for the body no longer: the request goes on, uncounted."""
        self._leave_uncounted(reason)
        self.given_up = True
        self._step_aside()
        if self.on_given_up is not None:
            self.on_given_up()

    def _on_request_headers(self, message: EnvoyMessage, last: str) -> MaybeLater:
        """Meet the policies; `last` is the phase, should nobody wait for a body."""
        if self._evaluation is not None or self.given_up:
            return _DONE[last]
        self._observed = message.observed
        service = self._service
        request = read_request(message, allow_unverified_jwt=service.settings.allow_unverified_jwt)
        policy_json = message.read_attribute(POLICY_ATTRIBUTE)
        handed_over = service.compile_handed_over(policy_json) if policy_json is not None else None
        if self._is_killed(request, handed_over):
            return self._kill(request)
        return self._meet(self._prepare(request, handed_over), message, last)

    def _meet(self, evaluation: Evaluation | None, message: EnvoyMessage, last: str) -> MaybeLater:
        """Go on with the policies that the request meets, if there are any."""
        if evaluation is None:
            self._service.metrics.unmatched.inc()
            return _DONE[last]
        standing = self._service.overrides
        if standing is not None:
            evaluation.obey(standing, time())
            if standing.blocks_heads and (blocked := self._block(evaluation)) is not None:
                return blocked
        websocket = evaluation.request.opens_responses
        if message.ended and not websocket:
            return self._judge(last, evaluation, NO_BODY, content=b"")
        if websocket or not evaluation.needs_body:
            return self._judge(last, evaluation, None, RESPONSES_WEBSOCKET if websocket else "")
        self._body_mode = message.body_mode
        reason = explain_unknowable_body(evaluation.request) or _explain_no_body(self._body_mode)
        if not reason and self._service.released:
            reason = "shutdown"
        if reason:
            return self._judge(last, evaluation, None, reason)
        return self._go_on_to_body(evaluation)

    def _go_on_to_body(self, evaluation: Evaluation) -> MaybeLater:
        """Wait for the body, which only shadow policies may need."""
        if not evaluation.only_shadow_needs_body:
            return self._wait_for_body(evaluation, _GO_ON["request_headers"])
        # What shadow policies wait for must not keep the others: those are answered now.
        watching = evaluation.split()
        reply = self._judge("request_headers", evaluation, None, _DECIDED_BEFORE)
        if isinstance(reply, Reply):
            return self._wait_for_body(watching, reply)
        return self._watch_later(reply, watching)

    async def _watch_later(self, reply: Awaitable[Reply], watching: Evaluation) -> Reply:
        return self._stay(self._wait_for_body(watching, await reply))

    def _wait_for_body(self, evaluation: Evaluation, reply: Reply) -> Reply:
        """Answer the headers and wait for the body, unless the request does not go on to have one."""
        if self._ended or reply.hold_ms:
            evaluation.give_up(_DECIDED_BEFORE)
            self._service.reporter.report_uncounted(evaluation)
            if reply.answer is not None and not self._ended and self._body_mode == BODY_BUFFERED_PARTIAL:
                return Reply(end_headers(reply.answer), done=True, hold_ms=reply.hold_ms, first=reply.first)
            return reply
        self._evaluation = evaluation
        self._service.waiting[self] = None
        return Reply(reply.answer, done=False, hold_ms=reply.hold_ms, first=reply.first) if reply.done else reply

    def _is_killed(self, request: HttpRequest, handed_over: Engine | None) -> bool:
        """Whether a kill switch holds for the request, and may act."""
        switch = self._engine.find_switch(request, time(), handed_over)
        if switch is None:
            return False
        shadow = self._service.settings.shadow
        self._service.reporter.report_killed(switch, "shadow" if shadow else "enforce")
        return not shadow

    def _kill(self, request: HttpRequest) -> Reply:
        self._ended = True
        reply = Reply(refuse_killed(request), done=True)
        self._service.metrics.decision_seconds.observe(perf_counter() - self._started)
        return reply

    def _block(self, evaluation: Evaluation) -> Reply | None:
        """The refusal of a request that an operator has blocked, as far as it is known."""
        found = evaluation.enforcing.find_block()
        if found is None:
            return None
        service, (candidate, block) = self._service, found
        self._ended = True
        service.reporter.report_blocked(candidate.plan.id, block)
        if block.kind == KILL and isinstance(candidate, SessionCandidate):
            outcome = candidate.kill()
            service.reporter.report_sessions([candidate])
            metadata = make_metadata(Decision(outcome, None, [outcome], warning=False))
            refusal = refuse(outcome, metadata, evaluation.request, evaluation.content)
        else:
            seconds = max(1, ceil(block.ends - time()))
            refusal = refuse_blocked(candidate.plan.id, seconds, evaluation.request, evaluation.content, candidate.subject)
        service.metrics.decision_seconds.observe(perf_counter() - self._started)
        return Reply(refusal, done=True)

    def _prepare(self, request: HttpRequest, handed_over: Engine | None) -> Evaluation | None:
        """What the policies of the request, and of its route, want to count."""
        engine = self._engine
        if self._pinned and (unknown := engine.list_unknown(self._pinned)):
            self._service.reporter.report_unknown_policies(unknown)
        facts = request.facts
        evaluation = engine.prepare(request, self._scope, self._pinned, handed_over, self._service.key)
        if evaluation is not None and self._service.settings.record:
            self._record = record_head(request, facts, evaluation.plans, plain=self._service.reporter.show_callers)
        return evaluation

    def _on_request_body(self, message: EnvoyMessage) -> MaybeLater:
        evaluation = self._evaluation
        if evaluation is None:
            return _DONE["request_body"]
        return self._take_chunk("request_body", evaluation, message.body, ended=message.ended)

    def _on_request_trailers(self) -> MaybeLater:
        evaluation = self._evaluation
        if evaluation is None:
            return _DONE["request_trailers"]
        return self._take_chunk("request_trailers", evaluation, b"", ended=True)  # a streamed body ends

    def _take_chunk(self, kind: str, evaluation: Evaluation, chunk: bytes | memoryview, *, ended: bool) -> MaybeLater:
        """Go on with the body, and judge the request once it is all there, or known to be cut off."""
        upload = self._upload
        if upload is None:
            upload = self._upload = self._start_upload(evaluation)
        state = upload.add(chunk, ended=ended)
        if state == MORE:
            return _GO_ON[kind]
        self._stop_waiting()
        if state == CUT_OFF:
            return self._judge(kind, evaluation, None, "body_truncated")
        if is_grpc(evaluation.request) and upload.is_framed:
            return self._judge(kind, evaluation, None, "grpc")
        return self._judge(kind, evaluation, upload.body, content=upload.take_content())

    def _start_upload(self, evaluation: Evaluation) -> Upload:
        if self._observed and self._body_mode < 0:
            self._body_mode = BODY_STREAMED  # the only way to observe bodies; Envoy sends observers no protocol_config
        length = evaluation.request.headers.get("content-length", b"")
        keeps = max(evaluation.inspects, evaluation.steers) if self._body_mode == BODY_BUFFERED else evaluation.inspects
        return Upload(self._service.kept, self._body_mode, length, keeps, self._limit)

    def _on_response(self, message: EnvoyMessage) -> MaybeLater:
        """The request was answered before its body was here: Envoy refused it, or sends no bodies."""
        self._leave_uncounted(_REFUSED_BODIES.get(message.read_status(), "no_body_phase"))
        return _DONE[message.kind]

    def _stop_waiting(self) -> Evaluation | None:
        """What waited for the body until now, if anything did."""
        evaluation, self._evaluation = self._evaluation, None
        if evaluation is not None:
            del self._service.waiting[self]
        return evaluation

    def _leave_uncounted(self, reason: str) -> None:
        """A body that was waited for never came: nothing is counted."""
        if self._upload is not None:
            self._upload.drop()
        evaluation = self._stop_waiting()
        if evaluation is not None:
            evaluation.give_up(reason)
            self._service.reporter.report_uncounted(evaluation)

    def _judge(
        self,
        kind: str,
        evaluation: Evaluation,
        body: Body | None,
        reason: str = "",
        content: bytes | memoryview | None = None,
    ) -> MaybeLater:
        """Count the request and answer, now or when the store has answered."""
        if evaluation.steers:
            self._content, self._unknown = content, reason
        if self._record is not None:
            self._record = record_body(self._record, body, reason, time())
        self._seal(evaluation, body, reason, content)
        if evaluation.obeys and (blocked := self._block(evaluation)) is not None:
            return blocked
        counting = self._service.counting
        counts = counting.count(evaluation.enforcing)
        shadow_counts = counting.count(evaluation.shadow)
        if isinstance(shadow_counts, HERE):  # as nearly always
            if isinstance(counts, Asked):
                return Later(self, kind, evaluation, counts, shadow_counts)
            if isinstance(counts, HERE):
                return self._answer(kind, evaluation, counts, shadow_counts)
        return self._judge_later(kind, evaluation, counts, shadow_counts)

    def _seal(self, evaluation: Evaluation, body: Body | None, reason: str, content: bytes | memoryview | None) -> None:
        """Work out the fingerprints, and look into the body while its tenant's time for that lasts."""
        if not content or not evaluation.inspects:
            evaluation.seal(body, reason, content)
            return
        budget, tenant, watches = self._service.budget, evaluation.find_tenant(), not evaluation.enforcing.inspects
        if not budget.allows(tenant, self._started, shadow=watches):
            evaluation.seal(body, reason, None, "inspect_budget")
            return
        small = len(content) <= _SMALL
        clock = perf_counter if small else thread_time  # what other processes take of the processor is no tenant's fault
        most = _SMALL_SECONDS if small else inf
        began = clock()
        evaluation.learn(body, reason, content)
        evaluation.seal_lane(evaluation.enforcing)
        looked = clock()
        budget.spend(tenant, min(looked - began, most), shadow=watches)
        if not evaluation.shadow.candidates:
            return
        if not budget.allows(tenant, self._started, shadow=True):
            evaluation.withhold("inspect_budget")
        evaluation.seal_lane(evaluation.shadow)
        budget.spend(tenant, min(clock() - looked, most), shadow=True)

    async def _judge_later(self, kind: str, evaluation: Evaluation, counts: MaybeCounts, shadow_counts: MaybeCounts) -> Reply:
        try:
            # Of a list: else its type says that it gives a tuple, and compiled code insists on that.
            settled = await asyncio.gather(*[settle(counts), settle(shadow_counts)])
            return self._stay(self._answer(kind, evaluation, *settled))
        except Exception as error:  # noqa: BLE001  # whatever it is, the request goes on
            return self._stay(self._fail(kind, error))

    def settle(self, kind: str, evaluation: Evaluation, asked: Asked, shadow_counts: Counts) -> Reply:
        """Answer a request that the store has counted."""
        try:
            return self._stay(self._answer(kind, evaluation, asked.take(), shadow_counts))
        except Exception as error:  # noqa: BLE001  # whatever it is, the request goes on
            return self._stay(self._fail(kind, error))

    def _answer(self, kind: str, evaluation: Evaluation, counts: Counts, shadow_counts: Counts) -> Reply:
        """Answer a request that has been counted: whatever goes wrong from here on, sessions learn whose call it is."""
        try:
            return self._decide(kind, evaluation, counts, shadow_counts)
        except Exception as error:  # noqa: BLE001  # whatever it is, the request goes on
            return self._fail(kind, error, self._describe_calls(evaluation))

    def _decide(self, kind: str, evaluation: Evaluation, counts: Counts, shadow_counts: Counts) -> Reply:
        service = self._service
        decision = evaluation.decide(counts, shadow_counts)
        if decision.lead is not None and decision.lead.action is Action.THROTTLE and not self._observed:
            decision = self._hold(decision, decision.lead)
        changed = UNCHANGED
        if decision.action is not Action.REJECT and (decision.steer is not None or evaluation.is_narrowed):
            decision, changed = service.changes.apply(evaluation, decision, self._find_original(kind))
        service.reporter.report(evaluation, decision)
        reply = self._refuse(evaluation, decision, counts) or self._encode(kind, evaluation, decision, changed)
        if self._ended and evaluation.sessions:
            self._take_back(evaluation.sessions, REFUSED, _REFUSED_STATUS)
        elif self._holding is not None:
            self._held = evaluation.sessions
        if evaluation.paired:
            self._compare(evaluation, decision)
        service.metrics.decision_seconds.observe(perf_counter() - self._started)
        return reply

    def _take_back(self, sessions: Sequence[SessionCandidate], outcome: int, status: int) -> None:
        """Tell ledgers that a request which they have let through goes no further."""
        service = self._service
        let_through = [session for session in sessions if session.is_let_through]
        settlements = [session.take_back(outcome) for session in let_through]
        service.counting.settle(settlements, partial(service.reporter.report_taken_back, status, let_through))

    def _compare(self, evaluation: Evaluation, decision: Decision) -> None:
        """Count for canaries what this request says about them."""
        try:
            self._service.pairs.compare(evaluation, decision, refused=self._ended)
        except Exception as error:  # noqa: BLE001  # whatever it is, the answer stands
            self._service.reporter.report_shadow_failure(error)

    def _refuse(self, evaluation: Evaluation, decision: Decision, counts: Counts) -> Reply | None:
        """A refusal for another reason than a loop, if there is one."""
        request, forbidden = evaluation.request, evaluation.enforcing.forbidden
        if counts is None:
            self._ended = True
            return Reply(refuse_without_store(self._describe(evaluation, decision), request, evaluation.content), done=True)
        if forbidden is None or decision.action is Action.REJECT:
            return None
        self._ended = True
        self._service.reporter.report_forbidden(*forbidden)
        recorded = {} if self._record is None else {"record": self._record}
        return Reply(refuse_uncountable(*forbidden, recorded, request, evaluation.content), done=True)

    def _find_original(self, kind: str) -> Original:
        """The body that can be changed, where there is one, and Envoy would take another in its place."""
        if self._observed:
            return Original(None, OBSERVED)
        if kind in _HEADERS:
            return Original(None, NOTHING)
        if self._body_mode != BODY_BUFFERED:
            return Original(None, "body_mode")
        return Original(self._content, self._unknown or "inspect_limit")

    def _hold(self, decision: Decision, lead: Outcome) -> Decision:
        """Claim a place among the held requests; past the bound a throttled request is rejected."""
        if self._service.holds.take(lead.tenant):
            self._holding = lead.tenant
            return decision
        return decision.refuse_instead(lead.change_action(Action.REJECT))

    def _encode(self, kind: str, evaluation: Evaluation, decision: Decision, changed: Changed) -> Reply:
        lead = decision.lead
        if lead is None and decision.shadow is None and self._record is None and changed.body is None:
            calls = self._describe_calls(evaluation)
            return Reply(_GO_ON_BYTES[kind] + write_sessions(calls), done=True) if calls else _DONE[kind]
        metadata = self._describe(evaluation, decision)
        if lead is not None and lead.action is Action.REJECT:
            self._ended = True
            return Reply(refuse(lead, metadata, evaluation.request, evaluation.content), done=True)
        if calls := self._describe_calls(evaluation):
            metadata[SESSIONS] = calls
        if changed.body is not None:
            answer = replace_body(changed.body, metadata, warning=find_warning(decision), marks=changed.marks)
        else:
            answer = let_go_on(kind, metadata or None, warning=find_warning(decision))
        if lead is None or self._holding is None:
            return Reply(answer, done=True)
        return Reply(answer, done=True, hold_ms=lead.delay_ms, first=make_wait(lead.delay_ms + HOLD_MARGIN_MS))

    def _describe_calls(self, evaluation: Evaluation) -> str:
        """What an entry of the access log has to say whose call it is about; empty for nothing."""
        sessions = evaluation.sessions
        if not sessions or self._observed:
            return ""
        calls = ""
        for session in sessions:
            if session.is_let_through:
                calls = f"{calls},{session.describe_call()}" if calls else session.describe_call()
        return f"[{calls}]" if calls else ""

    def _describe(self, evaluation: Evaluation, decision: Decision) -> dict[str, Any]:
        """The dynamic metadata of the answer."""
        metadata = make_metadata(decision)
        if self._record is None:
            return metadata
        counted = evaluation.enforcing.candidates or evaluation.shadow.candidates
        if counted:
            first = counted[0]
            first.name_request()
            names = {"fingerprint": first.fingerprint, "tenant": first.tenant, "body_crc32": write_crc32(first.body_crc32)}
            metadata = {**names, **metadata}
        return {**metadata, "record": self._record}

    def _fail(self, kind: str, error: Exception, calls: str = "") -> Reply:
        """An internal error: the request goes on, loudly; `calls` says whose call it is, where it has been counted."""
        self._stop_waiting()
        self._ended = False
        self._service.metrics.fail_open.labels("internal_error").inc()
        self._service.reporter.report_failure("internal error, request let through", error, phase=kind)
        return Reply(_GO_ON_BYTES[kind] + write_sessions(calls), done=True) if calls else _DONE[kind]


def _explain_no_body(body_mode: int) -> str:
    """Why Envoy will not hand over any body as a whole, empty when it will."""
    if body_mode == BODY_NONE:
        return "no_body_phase"
    if body_mode in (BODY_DUPLEX, BODY_GRPC):
        return "body_mode"
    return ""
