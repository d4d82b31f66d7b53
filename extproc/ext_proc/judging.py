"""Answers an exchange: its guards read, ask the store and judge; the decision goes to Envoy.

The answer waits for shadow guards only until a deadline.

Errors here never reach the client: they are counted and logged, and the request continues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from functools import partial
from math import ceil, inf
from time import perf_counter, thread_time, time
from typing import Any, Final, TypeAlias, cast

from extproc.apis.excerpt import Excerpt
from extproc.decision import Action, Decision, Outcome
from extproc.engine.counting import HERE, Asked, Counts, MaybeCounts, wait_for
from extproc.engine.engine import Engine
from extproc.engine.exchange import BUFFERED, HELD, OBSERVED, SENT_ON, Exchange
from extproc.engine.guards import SessionGuard
from extproc.engine.kill_switch import Switch
from extproc.engine.orders import KILL
from extproc.engine.recording import record_body, record_head
from extproc.engine.settlements import Entry, describe_calls, list_withdrawn
from extproc.ext_proc.answers.budgets import describe_budgets, write_budgets
from extproc.ext_proc.answers.let_pass import (
    LAST_HEADERS,
    WARNING,
    let_pass,
    make_metadata,
    make_wait,
    replace_body,
    replace_headers,
)
from extproc.ext_proc.answers.metadata import SESSIONS, write_sessions
from extproc.ext_proc.answers.refuse import (
    refuse,
    refuse_blocked,
    refuse_killed,
    refuse_uncountable,
    refuse_without_store,
)
from extproc.ext_proc.changes.changes import (
    NOTHING,
    OBSERVED as NOT_WAITED_FOR,
    UNCHANGED,
    Changed,
    Original,
)
from extproc.ext_proc.service import Service
from extproc.request.fingerprint import NO_BODY, Body, write_crc32
from extproc.request.http import HttpRequest
from extproc.request.patch import Pieces
from extproc.sessions.limits import UNNAMED
from extproc.store.pending import Listener
from extproc.store.rules.session import REFUSED, WITHDRAWN

HOLD_MARGIN_MS = 2_000
"""Margin of the message timeout over the delay, so that a busy moment does not turn a delay into a
504."""

_now: Final = perf_counter  # compiled code reads a module's constant fastest

_SMALL: Final = 8_192
_SMALL_SECONDS: Final = 0.001
"""Smaller bodies are charged by the wall clock, up to this time: the thread's clock, a system call,
takes longer than the inspection."""

SHADOW_SECONDS: Final = 0.05
"""How long an answer waits for shadow guards after the enforcing ones: its metadata includes their
outcome."""

SHADOW_DEADLINE: Final = "shadow_deadline"
"""The reason of shadow policies that missed the deadline and have not counted a request."""

_REFUSED_STATUS: Final = 429
"""Reported to guards that reserved something for a request which another guard refused."""


class Reply:
    """What to do with one message; immutable.

    Attributes:
        answer: the ProcessingResponse to send, in pieces if it contains an edited body; None if the
            message has no well-formed answer.
        done: end the stream with status OK after the answer.
        hold_ms: delay before the answer, in milliseconds.
        first: a ProcessingResponse to send before the delay, so that Envoy waits; may be empty.
        rest: ProcessingResponses to send after the answer.
        refuses: the answer ends the request.
        edited: the body to hand back instead of the held one; None if it is unchanged.
    """

    def __init__(  # noqa: PLR0913  # all that can be done
        self,
        answer: bytes | Pieces | None,
        *,
        done: bool,
        hold_ms: int = 0,
        first: bytes = b"",
        rest: Sequence[bytes] = (),
        refuses: bool = False,
        edited: Pieces | None = None,
    ) -> None:
        self.answer = answer
        self.done = done
        self.hold_ms = hold_ms
        self.first = first
        self.rest = rest
        self.refuses = refuses
        self.edited = edited

    def join_answer(self) -> bytes:
        """The answer in one piece; it must not be None."""
        return self.answer if isinstance(self.answer, bytes) else b"".join(self.answer or [])


MaybeLater: TypeAlias = Reply | Awaitable[Reply]

HEADERS: Final = ("request_headers", LAST_HEADERS)
_PHASES = (
    *HEADERS,
    "request_body",
    "request_trailers",
    "response_headers",
    "response_body",
    "response_trailers",
)

_PASS_BYTES: Final = {kind: let_pass(kind) for kind in _PHASES}
PASS: Final = {kind: Reply(answer, done=False) for kind, answer in _PASS_BYTES.items()}
DONE: Final = {kind: Reply(answer, done=True) for kind, answer in _PASS_BYTES.items()}
"""Replies that let the request continue, by phase."""


class Later:
    """A reply that waits only for the store, so that the transport needs no task for it.

    Attributes:
        stay: adapts the reply if the stream must continue; else None.
    """

    def __init__(
        self, service: Service, kind: str, exchange: Exchange, asked: Asked, shadow_counts: Counts
    ) -> None:
        self.stay: Callable[[Reply], Reply] | None = None
        self._service = service
        self._kind = kind
        self._exchange = exchange
        self._asked = asked
        self._shadow_counts = shadow_counts

    def notify(self, listener: Listener) -> None:
        """Call the listener when the store has answered; the listener then calls `finish`."""
        self._asked.pending.notify(listener)

    def cancel(self) -> None:
        """Cancel the reply, and give back what the store still takes from budgets."""
        if not self._asked.pending.done:
            self._asked.abandon()

    def finish(self) -> Reply:
        """The reply, once the store has answered."""
        try:
            reply = answer(
                self._service,
                self._kind,
                self._exchange,
                self._asked.collect(),
                self._shadow_counts,
            )
        except Exception as error:  # noqa: BLE001  # no error may stop the request
            reply = fail(self._service, self._kind, error)
        return reply if self.stay is None else self.stay(reply)

    async def _wait(self) -> Reply:
        try:
            await self._asked.pending.arrive()
        except asyncio.CancelledError:
            self._asked.abandon()
            raise
        return self.finish()

    def __await__(self) -> Generator[Any, None, Reply]:
        """Wait for the store, then finish."""
        return self._wait().__await__()


def match(  # noqa: PLR0913  # all inputs of the choice
    service: Service,
    engine: Engine,
    request: HttpRequest,
    scope: str,
    pinned: Sequence[str],
    handed_over: Engine | None,
) -> Exchange | None:
    """Match the loaded policies and those that came with the route; None if none matches."""
    if pinned and (unknown := engine.list_unknown(pinned)):
        service.reporter.report_unknown_policies(unknown)
    facts = request.facts
    exchange = engine.prepare(request, scope, pinned, handed_over, service.key)
    if service.reporter.probes.open:
        matched = [] if exchange is None else [plan.id for plan in exchange.plans]
        service.reporter.probes.note_match(request, matched)
    if exchange is None:
        service.metrics.unmatched.inc()
        service.reporter.coverage.note_unmatched(request)
    elif service.settings.record:
        exchange.record = record_head(
            request, facts, exchange.plans, plain=service.reporter.show_callers
        )
    return exchange


def kill(service: Service, request: HttpRequest, switch: Switch, started: float) -> Reply | None:
    """Refuse a request because of a kill switch; None in shadow mode."""
    shadow = service.settings.shadow
    service.reporter.report_killed(switch, "shadow" if shadow else "enforce")
    return None if shadow else _stop(service, refuse_killed(request), started)


def block(service: Service, exchange: Exchange) -> Reply | None:
    """Refuse a request that an operator has blocked; None if no block is known to apply."""
    found = exchange.enforcing.find_block()
    if found is None:
        return None
    guard, order = found
    service.reporter.report_blocked(guard.plan.id, order)
    if order.kind == KILL and isinstance(guard, SessionGuard):
        outcome = guard.kill()
        service.reporter.report_sessions([guard])
        metadata = make_metadata(Decision(outcome, None, [outcome], warning=False))
        return _stop(service, refuse(outcome, metadata, exchange), exchange.started)
    seconds = max(1, ceil(order.ends - time()))
    refusal = refuse_blocked(guard.plan, seconds, exchange.request, exchange.shown, guard.subject)
    return _stop(service, refusal, exchange.started)


def _stop(service: Service, refusal: bytes, started: float) -> Reply:
    """Refuse a request that no policy has counted."""
    service.metrics.decision_seconds.observe(_now() - started)
    return Reply(refusal, done=True, refuses=True)


def judge(  # noqa: PLR0913  # everything known about a body
    service: Service,
    kind: str,
    exchange: Exchange,
    sums: Body | None,
    reason: str = "",
    content: bytes | memoryview | None = None,
    excerpt: Excerpt | None = None,
) -> MaybeLater:
    """Count the request and answer, now or when the store has answered.

    Args:
        service: the state that all streams share.
        kind: the phase of the message to answer.
        exchange: the request.
        sums: the body's checksums; None if it is unknown.
        reason: why the body is unknown.
        content: the body; None if no policy may inspect it.
        excerpt: makes an excerpt of a body that is too long; `content` is then the excerpt's bytes.
    """
    if exchange.steers:
        exchange.raw, exchange.unknown = content if excerpt is None else None, reason
    if exchange.record is not None:
        record_body(exchange.record, sums, reason, time())
    if content and exchange.inspects:
        _inspect(service, exchange, sums, reason, content, excerpt)
    else:
        exchange.read_body(sums, reason, content)
    if exchange.is_overridden and (blocked := block(service, exchange)) is not None:
        return blocked
    counts = service.counting.count(exchange.enforcing)
    shadow_counts = service.counting.count(exchange.shadow) if exchange.shadow.active else ()
    if isinstance(shadow_counts, HERE):  # almost always
        if isinstance(counts, Asked):
            return Later(service, kind, exchange, counts, shadow_counts)
        if isinstance(counts, HERE):
            return answer(service, kind, exchange, counts, shadow_counts)
    return _judge_later(service, kind, exchange, counts, shadow_counts)


def sum_up(service: Service, exchange: Exchange, body: bytes | memoryview) -> Body:
    """The checksums of a body, decompressed if the caller has inspection time left."""
    budget, tenant, watches = service.budget, exchange.find_tenant(), not exchange.enforcing.active
    if exchange.is_plain or not budget.allows(tenant, exchange.started, shadow=watches):
        return NO_BODY.plus(body)
    began = thread_time()
    sums = exchange.sum_up(body)
    budget.spend(tenant, thread_time() - began, shadow=watches)
    return sums


def _inspect(  # noqa: PLR0913  # as `judge`
    service: Service,
    exchange: Exchange,
    sums: Body | None,
    reason: str,
    content: bytes | memoryview,
    excerpt: Excerpt | None,
) -> None:
    """Let the guards read the body, if the caller has inspection time left."""
    budget, tenant, watches = (
        service.budget,
        exchange.find_tenant(),
        not exchange.enforcing.inspects,
    )
    if not budget.allows(tenant, exchange.started, shadow=watches):
        exchange.read_body(sums, reason, None, "inspect_budget")
        return
    small = len(content) <= _SMALL
    clock = perf_counter if small else thread_time  # a caller is not charged for other processes
    most = _SMALL_SECONDS if small else inf
    began = clock()
    exchange.read_body(sums, reason, content, excerpt=excerpt, shadow=False)
    looked = clock()
    budget.spend(tenant, min(looked - began, most), shadow=watches)
    if not exchange.shadow.active:
        return
    exchange.read_shadow(
        "" if budget.allows(tenant, exchange.started, shadow=True) else "inspect_budget"
    )
    budget.spend(tenant, min(clock() - looked, most), shadow=True)


async def _judge_later(
    service: Service, kind: str, exchange: Exchange, counts: MaybeCounts, shadow_counts: MaybeCounts
) -> Reply:
    """Answer when the store has answered the live guards, and the shadow guards or timed out."""
    watched = asyncio.ensure_future(wait_for(shadow_counts))
    try:
        found = await wait_for(counts)
        await asyncio.wait([watched], timeout=SHADOW_SECONDS)
        shadow_found: Counts = ()
        if not watched.done():
            watched.cancel()
            exchange.shadow.give_up(SHADOW_DEADLINE)
            exchange.shadow.active = []
        elif (error := watched.exception()) is not None:
            exchange.shadow.fail(cast("Exception", error))
        else:
            shadow_found = watched.result()
        return answer(service, kind, exchange, found, shadow_found)
    except asyncio.CancelledError:
        watched.cancel()
        for group, asked in ((exchange.enforcing, counts), (exchange.shadow, shadow_counts)):
            service.counting.abandon(group, asked)
        raise
    except Exception as error:  # noqa: BLE001  # no error may stop the request
        return fail(service, kind, error)


def answer(
    service: Service, kind: str, exchange: Exchange, counts: Counts, shadow_counts: Counts
) -> Reply:
    """Decide about a counted request.

    Even after an error, the answer names the request's reservations.
    """
    try:
        decision = exchange.decide(counts, shadow_counts)
        if decision.lead is not None or decision.shadow is not None:
            decision = _weigh(service, exchange, decision)
        changed = UNCHANGED
        if decision.steer is not None or (
            exchange.reserves and exchange.state != SENT_ON and exchange.may_be_edited
        ):
            decision, changed = _change(service, kind, exchange, decision)
        service.reporter.report(exchange, decision)
        if (
            decision.shadow is not None
            and decision.shadow.action is Action.REJECT
            and exchange.shadow.budgets
        ):
            # before the answer describes them, or they would also be settled
            service.counting.give_back((), exchange.shadow.budgets, REFUSED)
        reply = None
        if (
            counts is None or exchange.enforcing.forbidden is not None
        ) and exchange.state != SENT_ON:
            reply = _refuse_uncounted(service, exchange, decision, counts)
        reply = reply or _write(service, kind, exchange, decision, changed)
        if exchange.reserves:
            if reply.refuses:
                give_back(service, exchange, REFUSED, _REFUSED_STATUS)
            else:
                service.counting.join_sessions(exchange.sessions)
        exchange.waits = exchange.delayed and exchange.reserves and not reply.refuses
        if exchange.paired:
            _compare(service, exchange, decision, refused=reply.refuses)
        service.metrics.decision_seconds.observe(_now() - exchange.started)
    except Exception as error:  # noqa: BLE001  # no error may stop the request
        return fail(
            service, kind, error, "" if exchange.state == OBSERVED else describe_calls(exchange)
        )
    return reply


def _weigh(service: Service, exchange: Exchange, decision: Decision) -> Decision:
    """Adjust the decision: in incidents, for a partly forwarded body, or without room to delay."""
    decision = service.reporter.weigh(exchange, decision)
    if exchange.state == SENT_ON and decision.action not in (Action.ALLOW, Action.WARN):
        service.metrics.fail_open.labels("sent_on").inc()
        decision = decision.let_pass()
    lead = decision.lead
    if lead is not None and lead.action is Action.THROTTLE and exchange.state != OBSERVED:
        exchange.delayed = service.holds.claim(lead.tenant)
        if not exchange.delayed:
            return decision.refuse_instead(lead.change_action(Action.REJECT))
        exchange.tenant = lead.tenant
    return decision


def _change(
    service: Service, kind: str, exchange: Exchange, decision: Decision
) -> tuple[Decision, Changed]:
    """Edit the body of a request that continues, if Envoy accepts an edited body."""
    if decision.action is Action.REJECT:
        return decision, UNCHANGED
    content = exchange.raw
    if content is not None and exchange.document is not None:
        content = bytes(exchange.document)  # equal, and already copied
    original = Original(content, exchange.unknown or "inspect_limit")
    if exchange.state == OBSERVED:
        original = Original(None, NOT_WAITED_FOR)
    elif kind in HEADERS and exchange.state != HELD:
        original = Original(None, NOTHING)
    elif exchange.state not in (BUFFERED, HELD):
        original = Original(None, "body_mode")
    return service.changes.apply(exchange, decision, original)


def _refuse_uncounted(
    service: Service, exchange: Exchange, decision: Decision, counts: Counts
) -> Reply | None:
    """Refuse a request that could not be counted, if required; else None."""
    forbidden = exchange.enforcing.forbidden
    if counts is None:
        metadata = _describe(service, exchange, decision)
        refusal = refuse_without_store(metadata, exchange.request, exchange.shown)
    elif forbidden is not None and decision.action is not Action.REJECT:
        service.reporter.report_forbidden(*forbidden)
        recorded = {} if exchange.record is None else {"record": exchange.record}
        refusal = refuse_uncountable(*forbidden, recorded, exchange.request, exchange.shown)
    else:
        return None
    return Reply(refusal, done=True, refuses=True)


def _write(
    service: Service, kind: str, exchange: Exchange, decision: Decision, changed: Changed
) -> Reply:
    """The reply for a decision."""
    lead, budgets = decision.lead, exchange.budgets
    reserves = len(exchange.sessions) > 0 or exchange.settles or not exchange.counts_failed
    calls = describe_calls(exchange) if reserves and exchange.state != OBSERVED else ""
    if calls and not exchange.counts_failed and (lead is None or lead.action is not Action.REJECT):
        service.note_begun(exchange.plans)
    if (
        lead is None
        and decision.shadow is None
        and exchange.record is None
        and changed.body is None
    ):
        if budgets:
            told = write_budgets(exchange.enforcing.budgets, calls)
            return Reply(_PASS_BYTES[kind] + told, done=True) if told else DONE[kind]
        return Reply(_PASS_BYTES[kind] + write_sessions(calls), done=True) if calls else DONE[kind]
    metadata = _describe(service, exchange, decision)
    if budgets:
        metadata |= describe_budgets(exchange.enforcing.budgets, decision)
    if lead is not None and lead.action is Action.REJECT:
        return Reply(refuse(lead, metadata, exchange), done=True, refuses=True)
    if calls:
        metadata[SESSIONS] = calls
    warning: str = metadata.get(WARNING, "")
    edited = changed.body if exchange.state == HELD else None
    if edited is not None:
        size = (
            sum([len(piece) for piece in edited])
            if "content-length" in exchange.request.headers
            else -1
        )
        written: bytes | Pieces = replace_headers(
            metadata, warning=warning, marks=changed.marks, size=size
        )
    elif changed.body is not None:
        written = replace_body(changed.body, metadata, warning=warning, marks=changed.marks)
    else:
        written = let_pass(kind, metadata or None, warning=warning)
    if lead is None or not exchange.delayed:
        return Reply(written, done=True, edited=edited)
    wait = make_wait(lead.delay_ms + HOLD_MARGIN_MS)
    return Reply(written, done=True, hold_ms=lead.delay_ms, first=wait, edited=edited)


def _describe(service: Service, exchange: Exchange, decision: Decision) -> dict[str, Any]:
    """The dynamic metadata of the answer."""
    metadata = make_metadata(decision)
    if decision.lead is not None:
        metadata.update(_describe_circumstances(service, exchange, decision.lead))
    if exchange.record is None:
        return metadata
    counted = exchange.enforcing.active or exchange.shadow.active
    if counted:
        first = counted[0]
        first.name_request()
        names = {
            "fingerprint": first.fingerprint,
            "tenant": first.tenant,
            "body_crc32": write_crc32(first.body_crc32),
        }
        metadata = {**names, **metadata}
    metadata["record"] = exchange.record
    return metadata


def _describe_circumstances(service: Service, exchange: Exchange, lead: Outcome) -> dict[str, Any]:
    """For traces: the kind of the loop's cause and the hash of the session, if known."""
    found: dict[str, Any] = {}
    if lead.repeat is not None:
        try:
            cause = exchange.find_cause(lead.repeat)
        except Exception as error:  # noqa: BLE001  # the decision stands without it
            service.reporter.report_failure("a cause could not be found", error, policy=lead.policy)
            cause = None
        if cause is not None:
            found["cause"] = cause.kind
    named = [guard.session for guard in exchange.sessions if guard.session != UNNAMED]
    if named:
        found["session"] = named[0]
    return found


def give_back(service: Service, exchange: Exchange, outcome: int, status: int) -> None:
    """Give back what a REFUSED or WITHDRAWN request reserved; `status` of its answer or 0."""
    report = partial(service.reporter.report_settled, Entry(status=status, refused=True))
    service.counting.give_back(exchange.sessions, exchange.budgets, outcome, report)
    service.counting.settle(list_withdrawn(exchange, outcome))


def _compare(service: Service, exchange: Exchange, decision: Decision, *, refused: bool) -> None:
    """Compare the outcomes of canaries and their policies."""
    try:
        service.pairs.compare(exchange, decision, refused=refused)
    except Exception as error:  # noqa: BLE001  # no error may change the answer
        service.reporter.report_shadow_failure(error)


def fail(service: Service, kind: str, error: Exception, calls: str = "") -> Reply:
    """Let the request continue after an internal error, and report it.

    `calls` has the reservations of a counted request.
    """
    service.metrics.fail_open.labels("internal_error").inc()
    service.reporter.report_failure("internal error, request let through", error, phase=kind)
    return Reply(_PASS_BYTES[kind] + write_sessions(calls), done=True) if calls else DONE[kind]


def close(service: Service, exchange: Exchange) -> None:
    """Free the request. If its delayed answer was never sent, give back its reservations."""
    if exchange.delayed:
        service.holds.free(exchange.tenant)
        exchange.delayed = False
    if exchange.waits:
        give_back(service, exchange, WITHDRAWN, 0)
        exchange.waits = False
    if exchange.reserves:
        exchange.let_go()
