"""One HTTP request, from matching policies to the answer for Envoy.

Errors in here never reach the client: they are counted and logged, and the request continues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from functools import partial
from math import ceil, inf
from time import perf_counter, thread_time, time
from typing import Any, Final, TypeAlias

from extproc.apis.excerpt import Excerpt
from extproc.decision import Action, Decision, Outcome
from extproc.engine.counting import HERE, Asked, Counts, MaybeCounts, wait_for
from extproc.engine.engine import Engine
from extproc.engine.exchange import Exchange
from extproc.engine.guards import SessionGuard
from extproc.engine.kill_switch import Switch
from extproc.engine.orders import KILL
from extproc.engine.recording import record_body, record_head
from extproc.engine.settlements import Entry, describe_calls
from extproc.ext_proc.answers.budgets import describe_budgets, write_budgets
from extproc.ext_proc.answers.go_on import (
    LAST_HEADERS,
    WARNING,
    let_go_on,
    make_metadata,
    make_wait,
    replace_body,
    replace_headers,
)
from extproc.ext_proc.answers.metadata import SESSIONS, write_sessions
from extproc.ext_proc.answers.refuse import refuse, refuse_blocked, refuse_killed, refuse_uncountable, refuse_without_store
from extproc.ext_proc.changes.changes import NOTHING, OBSERVED, UNCHANGED, Changed, Original
from extproc.ext_proc.service import Service
from extproc.request.fingerprint import NO_BODY, Body, write_crc32
from extproc.request.http import HttpRequest
from extproc.request.patch import Pieces
from extproc.sessions.limits import UNNAMED
from extproc.store.pending import Listener
from extproc.store.rules.session import REFUSED, WITHDRAWN

HOLD_MARGIN_MS = 2_000
"""Margin of the overridden message timeout over the hold, so that a busy moment does not turn a hold into a 504."""

_now: Final = perf_counter  # compiled code reads a module's constant fastest

_SMALL: Final = 8_192
_SMALL_SECONDS: Final = 0.001
"""Bodies that take less are not timed: reading the thread's clock, a system call, takes longer than inspecting them."""

_REFUSED_STATUS: Final = 429
"""Outcome of requests that another guard refused for any reason."""


class Reply:
    """What to do with one message; never changed.

    Attributes:
        answer: the ProcessingResponse to send, in pieces if it contains an edited body; None if the message has no well-formed
            answer.
        done: end the stream with status OK after the answer.
        hold_ms: delay before the answer, in milliseconds.
        first: a ProcessingResponse to send before the delay, so that Envoy waits, too; empty for none.
        rest: ProcessingResponses to send behind the answer.
    """

    def __init__(
        self, answer: bytes | Pieces | None, *, done: bool, hold_ms: int = 0, first: bytes = b"", rest: Sequence[bytes] = ()
    ) -> None:
        self.rest = rest
        self.answer = answer
        self.done = done
        self.hold_ms = hold_ms
        self.first = first

    def join_answer(self) -> bytes:
        """The answer, which must not be None, as one piece."""
        return self.answer if isinstance(self.answer, bytes) else b"".join(self.answer or [])


MaybeLater: TypeAlias = Reply | Awaitable[Reply]

HEADERS: Final = ("request_headers", LAST_HEADERS)
_PHASES = (*HEADERS, "request_body", "request_trailers", "response_headers", "response_body", "response_trailers")

_GO_ON_BYTES: Final = {kind: let_go_on(kind) for kind in _PHASES}
GO_ON: Final = {kind: Reply(answer, done=False) for kind, answer in _GO_ON_BYTES.items()}
DONE: Final = {kind: Reply(answer, done=True) for kind, answer in _GO_ON_BYTES.items()}
"""Replies that let the request continue, by phase."""


class Later:
    """A reply that waits only for the store, so that the transport needs no task for it.

    Attributes:
        stay: adapts the reply if the stream has more to do; None if not.
    """

    def __init__(self, transaction: Transaction, kind: str, exchange: Exchange, asked: Asked, shadow_counts: Counts) -> None:
        self.stay: Callable[[Reply], Reply] | None = None
        self._transaction = transaction
        self._kind = kind
        self._evaluation = exchange
        self._asked = asked
        self._shadow_counts = shadow_counts

    def notify(self, listener: Listener) -> None:
        """Call this listener when the store has answered; it then calls `finish`."""
        self._asked.pending.notify(listener)

    def cancel(self) -> None:
        """Cancel the reply. What the store takes from budgets all the same is given back."""
        if not self._asked.pending.done:
            self._asked.abandon()

    def finish(self) -> Reply:
        """The reply, once the store has answered."""
        reply = self._transaction.finish(self._kind, self._evaluation, self._asked, self._shadow_counts)
        return reply if self.stay is None else self.stay(reply)

    async def _wait(self) -> Reply:
        try:
            await self._asked.pending.arrive()
        except asyncio.CancelledError:
            self._asked.abandon()
            raise
        return self.finish()

    def __await__(self) -> Generator[Any, None, Reply]:
        """Wait, and finish."""
        return self._wait().__await__()


class Transaction:
    """One HTTP request.

    Attributes:
        observed: Envoy does not wait for answers.
        buffered: Envoy sends the body as a whole, and accepts an edited one.
        ended: the request was refused.
        holds: its body is held here, so that it can be refused or edited.
        late: a part of its body was sent on, so that it can be neither.
        edited: the body to hand back in place of the held one; None if it is unchanged.
        started: the time at which its newest message came, by `perf_counter`.
    """

    def __init__(self, service: Service) -> None:
        self.observed = False
        self.buffered = False
        self.ended = False
        self.holds = False
        self.late = False
        self.edited: Pieces | None = None
        self.started = 0.0
        self._service = service
        self._content: bytes | memoryview | None = None  # of a request that may be edited
        self._unknown = ""  # why there is no content
        self._record: dict[str, Any] | None = None  # what is known of the request, for `--record`
        self._holding: str | None = None  # the tenant whose place this request takes
        self._held: Exchange | None = None  # a held request, until its answer is sent

    def meet(
        self, engine: Engine, request: HttpRequest, scope: str, pinned: Sequence[str], handed_over: Engine | None
    ) -> Exchange | None:
        """Match the policies in force and those that came with the route; None if none matches."""
        service = self._service
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
            self._record = record_head(request, facts, exchange.plans, plain=service.reporter.show_callers)
        return exchange

    def kill(self, request: HttpRequest, switch: Switch) -> Reply | None:
        """Refuse a request because of a kill switch; None if the switch must not act."""
        shadow = self._service.settings.shadow
        self._service.reporter.report_killed(switch, "shadow" if shadow else "enforce")
        return None if shadow else self._end(refuse_killed(request))

    def block(self, exchange: Exchange) -> Reply | None:
        """Refuse a request that an operator has blocked, as far as it is known by now; None if no block applies."""
        found = exchange.enforcing.find_block()
        if found is None:
            return None
        service, (guard, block) = self._service, found
        service.reporter.report_blocked(guard.plan.id, block)
        if block.kind == KILL and isinstance(guard, SessionGuard):
            outcome = guard.kill()
            service.reporter.report_sessions([guard])
            metadata = make_metadata(Decision(outcome, None, [outcome], warning=False))
            return self._end(refuse(outcome, metadata, exchange))
        seconds = max(1, ceil(block.ends - time()))
        return self._end(refuse_blocked(guard.plan, seconds, exchange.request, exchange.content, guard.subject))

    def _end(self, refusal: bytes) -> Reply:
        """Refuse the request before any policy has counted it."""
        self.ended = True
        self._service.metrics.decision_seconds.observe(_now() - self.started)
        return Reply(refusal, done=True)

    def judge(  # noqa: PLR0913  # everything known about a body
        self,
        kind: str,
        exchange: Exchange,
        sums: Body | None,
        reason: str = "",
        content: bytes | memoryview | None = None,
        excerpt: Excerpt | None = None,
    ) -> MaybeLater:
        """Count the request and answer, now or when the store has answered.

        Args:
            kind: the phase of the message to answer.
            exchange: the request.
            sums: the body's checksums; None if it is unknown.
            reason: why the body is unknown.
            content: the body; None if no policy may inspect it.
            excerpt: an excerpt of a body that is too long; `content` is then the bytes of the excerpt.
        """
        if exchange.steers:
            self._content, self._unknown = content if excerpt is None else None, reason
        if self._record is not None:
            record_body(self._record, sums, reason, time())
        if content and exchange.inspects:
            self._inspect(exchange, sums, reason, content, excerpt)
        else:
            exchange.read_body(sums, reason, content)
        if exchange.is_overridden and (blocked := self.block(exchange)) is not None:
            return blocked
        counting = self._service.counting
        counts = counting.count(exchange.enforcing)
        shadow_counts = counting.count(exchange.shadow) if exchange.shadow.active else ()
        if isinstance(shadow_counts, HERE):  # almost always
            if isinstance(counts, Asked):
                return Later(self, kind, exchange, counts, shadow_counts)
            if isinstance(counts, HERE):
                return self._answer(kind, exchange, counts, shadow_counts)
        return self._judge_later(kind, exchange, counts, shadow_counts)

    def sum_up(self, exchange: Exchange, body: bytes | memoryview) -> Body:
        """The checksums of a body that may be compressed. Unpacking it counts as inspection."""
        budget, tenant, watches = self._service.budget, exchange.find_tenant(), not exchange.enforcing.active
        if exchange.is_plain or not budget.allows(tenant, self.started, shadow=watches):
            return NO_BODY.plus(body)
        began = thread_time()
        sums = exchange.sum_up(body)
        budget.spend(tenant, thread_time() - began, shadow=watches)
        return sums

    def _inspect(
        self,
        exchange: Exchange,
        sums: Body | None,
        reason: str,
        content: bytes | memoryview,
        excerpt: Excerpt | None,
    ) -> None:
        """Inspect the body if the tenant has time left for it."""
        budget, tenant, watches = self._service.budget, exchange.find_tenant(), not exchange.enforcing.inspects
        if not budget.allows(tenant, self.started, shadow=watches):
            exchange.read_body(sums, reason, None, "inspect_budget")
            return
        small = len(content) <= _SMALL
        clock = perf_counter if small else thread_time  # a tenant does not pay for other processes' use of the processor
        most = _SMALL_SECONDS if small else inf
        began = clock()
        exchange.read_body(sums, reason, content, excerpt=excerpt, shadow=False)
        looked = clock()
        budget.spend(tenant, min(looked - began, most), shadow=watches)
        if not exchange.shadow.active:
            return
        exchange.read_shadow("" if budget.allows(tenant, self.started, shadow=True) else "inspect_budget")
        budget.spend(tenant, min(clock() - looked, most), shadow=True)

    async def _judge_later(self, kind: str, exchange: Exchange, counts: MaybeCounts, shadow_counts: MaybeCounts) -> Reply:
        try:
            # A list, because compiled code insists on gather's declared type, a tuple, if the arguments are separate.
            collected = await asyncio.gather(*[wait_for(counts), wait_for(shadow_counts)])
            return self._answer(kind, exchange, *collected)
        except asyncio.CancelledError:
            for group, asked in ((exchange.enforcing, counts), (exchange.shadow, shadow_counts)):
                self._service.counting.abandon(group, asked)
            raise
        except Exception as error:  # noqa: BLE001  # no error may stop the request
            return self.fail(kind, error)

    def finish(self, kind: str, exchange: Exchange, asked: Asked, shadow_counts: Counts) -> Reply:
        """Answer a request that the store has counted."""
        try:
            return self._answer(kind, exchange, asked.collect(), shadow_counts)
        except Exception as error:  # noqa: BLE001  # no error may stop the request
            return self.fail(kind, error)

    def _answer(self, kind: str, exchange: Exchange, counts: Counts, shadow_counts: Counts) -> Reply:
        """Answer a request that has been counted. Even after an error, the answer names the call for its sessions."""
        try:
            return self._decide(kind, exchange, counts, shadow_counts)
        except Exception as error:  # noqa: BLE001  # no error may stop the request
            return self.fail(kind, error, "" if self.observed else describe_calls(exchange))

    def _decide(self, kind: str, exchange: Exchange, counts: Counts, shadow_counts: Counts) -> Reply:
        service, sessions = self._service, exchange.sessions
        decision = exchange.decide(counts, shadow_counts)
        if decision.lead is not None or decision.shadow is not None:
            decision = service.reporter.weigh(exchange, decision)
            if self.late and decision.action not in (Action.ALLOW, Action.WARN):  # a part of the request has been sent on
                service.metrics.fail_open.labels("sent_on").inc()
                decision = decision.let_pass()
            if decision.lead is not None and decision.lead.action is Action.THROTTLE and not self.observed:
                decision = self._hold(decision, decision.lead)
        changed = UNCHANGED
        edits = not self.late and (len(sessions) > 0 or len(exchange.budgets) > 0)
        if decision.steer is not None or (edits and (exchange.is_narrowed or exchange.asks_usage)):
            decision, changed = self._change(kind, exchange, decision)
        service.reporter.report(exchange, decision)
        if exchange.budgets and decision.shadow is not None and decision.shadow.action is Action.REJECT:
            # before it is described: it must not be settled, too
            service.counting.give_back((), exchange.shadow.budgets, REFUSED)
        reply = None
        if (counts is None or exchange.enforcing.forbidden is not None) and not self.late:
            reply = self._refuse_uncounted(exchange, decision, counts)
        reply = reply or self._encode(kind, exchange, decision, changed)
        if self.ended:
            self._give_back(exchange, REFUSED, _REFUSED_STATUS)
        else:
            self._held = exchange if self._holding is not None else None
            service.counting.join_sessions(sessions)
        if exchange.paired:
            self._compare(exchange, decision)
        service.metrics.decision_seconds.observe(_now() - self.started)
        return reply

    def _hold(self, decision: Decision, lead: Outcome) -> Decision:
        """Claim a place among the held requests. If none is free, a throttled request is rejected."""
        if self._service.holds.claim(lead.tenant):
            self._holding = lead.tenant
            return decision
        return decision.refuse_instead(lead.change_action(Action.REJECT))

    def _change(self, kind: str, exchange: Exchange, decision: Decision) -> tuple[Decision, Changed]:
        """Edit the body of a request that continues, if Envoy accepts an edited body."""
        if decision.action is Action.REJECT:
            return decision, UNCHANGED
        content: bytes | memoryview | None = self._content
        if content is not None and exchange.document is not None:
            content = bytes(exchange.document)  # the same, and already copied
        original = Original(content, self._unknown or "inspect_limit")
        if self.observed:
            original = Original(None, OBSERVED)
        elif kind in HEADERS and not self.holds:
            original = Original(None, NOTHING)
        elif not (self.buffered or self.holds):
            original = Original(None, "body_mode")
        return self._service.changes.apply(exchange, decision, original)

    def _refuse_uncounted(self, exchange: Exchange, decision: Decision, counts: Counts) -> Reply | None:
        """Refuse a request that could not be counted, if a policy says so; else None."""
        forbidden = exchange.enforcing.forbidden
        if counts is None:
            metadata = self._describe(exchange, decision)
            refusal = refuse_without_store(metadata, exchange.request, exchange.content)
        elif forbidden is not None and decision.action is not Action.REJECT:
            self._service.reporter.report_forbidden(*forbidden)
            recorded = {} if self._record is None else {"record": self._record}
            refusal = refuse_uncountable(*forbidden, recorded, exchange.request, exchange.content)
        else:
            return None
        self.ended = True
        return Reply(refusal, done=True)

    def _encode(self, kind: str, exchange: Exchange, decision: Decision, changed: Changed) -> Reply:
        lead, sessions = decision.lead, exchange.sessions
        budgets = exchange.budgets
        reserves = len(sessions) > 0 or exchange.settles or not exchange.counts_failed
        calls = describe_calls(exchange) if reserves and not self.observed else ""
        if lead is None and decision.shadow is None and self._record is None and changed.body is None:
            if budgets:
                told = write_budgets(exchange.enforcing.budgets, calls)
                return Reply(_GO_ON_BYTES[kind] + told, done=True) if told else DONE[kind]
            return Reply(_GO_ON_BYTES[kind] + write_sessions(calls), done=True) if calls else DONE[kind]
        metadata = self._describe(exchange, decision)
        if budgets:
            metadata |= describe_budgets(exchange.enforcing.budgets, decision)
        if lead is not None and lead.action is Action.REJECT:
            self.ended = True
            return Reply(refuse(lead, metadata, exchange), done=True)
        if calls:
            metadata[SESSIONS] = calls
        warning: str = metadata.get(WARNING, "")
        if changed.body is not None and self.holds:
            self.edited = changed.body
            size = sum([len(piece) for piece in changed.body]) if "content-length" in exchange.request.headers else -1
            answer: bytes | Pieces = replace_headers(metadata, warning=warning, marks=changed.marks, size=size)
        elif changed.body is not None:
            answer = replace_body(changed.body, metadata, warning=warning, marks=changed.marks)
        else:
            answer = let_go_on(kind, metadata or None, warning=warning)
        if lead is None or self._holding is None:
            return Reply(answer, done=True)
        return Reply(answer, done=True, hold_ms=lead.delay_ms, first=make_wait(lead.delay_ms + HOLD_MARGIN_MS))

    def _describe(self, exchange: Exchange, decision: Decision) -> dict[str, Any]:
        """The dynamic metadata of the answer."""
        metadata = make_metadata(decision)
        if decision.lead is not None:
            metadata.update(self._describe_circumstances(exchange, decision.lead))
        if self._record is None:
            return metadata
        counted = exchange.enforcing.active or exchange.shadow.active
        if counted:
            first = counted[0]
            first.name_request()
            names = {"fingerprint": first.fingerprint, "tenant": first.tenant, "body_crc32": write_crc32(first.body_crc32)}
            metadata = {**names, **metadata}
        metadata["record"] = self._record
        return metadata

    def _describe_circumstances(self, exchange: Exchange, lead: Outcome) -> dict[str, Any]:
        """For traces: the kind of a loop's cause where the request shows it, and the hash of its session where it has one."""
        found: dict[str, Any] = {}
        if lead.repeat is not None:
            try:
                cause = exchange.find_cause(lead.repeat)
            except Exception as error:  # noqa: BLE001  # the decision stands without it
                self._service.reporter.report_failure("a cause could not be found", error, policy=lead.policy)
                cause = None
            if cause is not None:
                found["cause"] = cause.kind
        named = [guard.session for guard in exchange.sessions if guard.session != UNNAMED]
        if named:
            found["session"] = named[0]
        return found

    def _give_back(self, exchange: Exchange, outcome: int, status: int) -> None:
        """Give back what a request has reserved that was REFUSED or WITHDRAWN; `status` of its answer, 0 for none."""
        service, ended = self._service, Entry(status=status, refused=True)
        report = partial(service.reporter.report_settled, ended)
        service.counting.give_back(exchange.sessions, exchange.budgets, outcome, report)

    def _compare(self, exchange: Exchange, decision: Decision) -> None:
        """Compare the outcomes of canaries and their policies."""
        try:
            self._service.pairs.compare(exchange, decision, refused=self.ended)
        except Exception as error:  # noqa: BLE001  # no error may change the answer
            self._service.reporter.report_shadow_failure(error)

    def fail(self, kind: str, error: Exception, calls: str = "") -> Reply:
        """Let the request continue after an internal error and report it. `calls` says whose call it is, if it was counted."""
        self.ended, self.edited = False, None
        self._service.metrics.fail_open.labels("internal_error").inc()
        self._service.reporter.report_failure("internal error, request let through", error, phase=kind)
        return Reply(_GO_ON_BYTES[kind] + write_sessions(calls), done=True) if calls else DONE[kind]

    def end_hold(self) -> None:
        """The held answer is sent now, so the request continues, even if the client has left."""
        self._held = None

    def close(self) -> None:
        """Free what the request held. If it was held and never sent on, give back what it has reserved."""
        if self._holding is not None:
            self._service.holds.free(self._holding)
            self._holding = None
        if self._held is not None:
            self._give_back(self._held, WITHDRAWN, 0)
            self._held = None
