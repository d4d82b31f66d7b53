"""Metrics and rate-limited log lines about requests."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter, time
from typing import Final

from extproc.bounded import LRU
from extproc.budgets.subject import BudgetSubject
from extproc.decision import NOTED, Action, Decision, Outcome, Reason
from extproc.engine.budget_guard import BudgetGuard
from extproc.engine.exchange import Exchange, Guards, group_by_policy
from extproc.engine.guards import Answer, SessionGuard
from extproc.engine.handover import POLICY_METADATA, RefusedPolicy
from extproc.engine.kill_switch import Switch
from extproc.engine.orders import ALLOW, ActiveOverride
from extproc.engine.settlements import Entry, Settled
from extproc.logs import RateLimit, Reminder, make_extra
from extproc.metrics import Metrics
from extproc.operator.after_notes import NoteFollower
from extproc.operator.budget_table import BudgetTable
from extproc.operator.coverage import Coverage
from extproc.operator.coverage_rows import ABSURD, DROPPED, EVICTED, UNLOGGED
from extproc.operator.incident_table import IncidentTable
from extproc.operator.loop_rows import Loop
from extproc.operator.loop_table import LoopTable
from extproc.operator.probes import Probes
from extproc.operator.session_table import RunName, SessionTable
from extproc.operator.spawn_links import SpawnLinks
from extproc.operator.table import UNKNOWN, find_known
from extproc.request.document import Document
from extproc.sessions.limits import NARROW, UNNAMED, SessionSubject
from extproc.store.rules.budget import Take, Taken
from extproc.store.rules.session import Settlement, Standing
from extproc.store.rules.tree import AGENT_LIMITS

_LOG = logging.getLogger("loopguard")

_LINES_PER_SECOND = 20
_DETECTIONS_PER_SECOND = 100
_DETECTIONS_PER_TENANT = 5
"""Lines per second. The limit per tenant keeps one tenant's loops from hiding another's."""

_TENANTS = 1_000
_PROBLEMS_SHOWN = 20
_NAME_SHOWN = 128

_ALLOWED: Final = Action.ALLOW.value
_NO_POLICIES: Final[list[str]] = []
_time: Final = time  # a Final global is the fastest lookup in compiled code

_REMIND_SECONDS = 60
_MOST_REMINDERS = 10_000

_ADVICE = {
    "jwt": ": is jwt_authn attached to their route, or --allow-unverified-jwt wanted?",
    "header": ": do clients send it, and does every proxy on the way pass it on?",
    "ip": ": does the filter's request_attributes ask for source.address?",
}
"""Advice in the warning about a missing descriptor, by its source."""


class Reporter:
    """Reports decided requests to metrics, logs and tables.

    `show_callers` adds callers' values to their hashes. It may change at any time. `show_results`
    is the number of characters of repeated results to show.
    """

    def __init__(self, metrics: Metrics, *, show_callers: bool, show_results: int = 0) -> None:
        self.loops = LoopTable(show_results)
        self.sessions = SessionTable()
        self.incidents = IncidentTable()
        self.probes = Probes()
        self.budgets = BudgetTable()
        self._spawns = SpawnLinks()
        self.show_callers = show_callers
        self._metrics = metrics
        # Saves attribute lookups per request
        self._decisions, self._loops = metrics.decisions, metrics.loops
        self.coverage = Coverage(metrics.decisions, time(), self._count_lost)
        self._detections = RateLimit(_DETECTIONS_PER_SECOND)
        self._tenants: LRU[str, RateLimit] = LRU(_TENANTS)
        self._failures = RateLimit(_LINES_PER_SECOND)
        self._missing = RateLimit(_LINES_PER_SECOND)
        self._follower = NoteFollower()
        self._stopped: dict[str, Reminder] = {}  # by place in a policy file, or by override
        self._reminders: dict[
            tuple[str, str], Reminder
        ] = {}  # by policy and limit key, which no client chooses

    def _count_lost(self) -> dict[str, int]:
        """Counts of entries dropped at capacity, and of implausible usage."""
        metrics = self._metrics
        counters = {
            DROPPED: metrics.chains_dropped,
            EVICTED: metrics.store_evictions,
            ABSURD: metrics.absurd_usage,
            UNLOGGED: metrics.access_log_entries.labels("missing"),
        }
        return {reason: int(counter._value.get()) for reason, counter in counters.items()}  # noqa: SLF001  # as fast as a number

    def report(self, exchange: Exchange, decision: Decision) -> None:
        """Report a decided request."""
        if budgets := exchange.budgets:
            self._note_budgets(budgets, decision)
        if decision.lead is not None or decision.shadow is not None:
            self._report_acts(exchange, decision)
        if exchange.enforcing.spared or exchange.shadow.spared:
            self._report_loops(exchange, decision, ())
        for outcome in decision.trace:
            if outcome.repeat is not None or outcome.action is not Action.ALLOW:
                self._report_after_notes(exchange, decision)
                break
        decisions = self._decisions
        for outcome in (
            decision.trace if len(decision.trace) == 1 else group_by_policy(decision.trace)
        ):
            allowed = outcome.action is Action.ALLOW
            labels = outcome.policy, outcome.mode, _ALLOWED if allowed else outcome.action.value
            decisions[labels] = decisions.get(labels, 0) + 1
            if not allowed and outcome.reason is Reason.LOOP_DETECTED:
                self._loops[labels] = self._loops.get(labels, 0) + 1
        if sessions := exchange.sessions:
            self.report_sessions(sessions, decision.steer or decision.lead)
        for policy in exchange.list_compared_exactly() if exchange.inspects else _NO_POLICIES:
            self._metrics.compared_exactly.labels(policy).inc()
        self.report_uncounted(exchange)

    def weigh(self, exchange: Exchange, decision: Decision) -> Decision:
        """The decision, milder if the request is part of an incident."""
        try:
            return self.incidents.weigh(exchange, decision, time())
        except Exception as error:  # noqa: BLE001  # whatever it is, the verdict stands
            self.report_failure("incidents could not be checked", error)
            return decision

    def report_uncounted(self, exchange: Exchange) -> None:
        """Report policies that did not count a request, and those that failed."""
        if exchange.plans:  # otherwise the second part of a request that was counted with its first
            self.coverage.requests += 1
        if self.probes.open:
            self.probes.note(exchange)
        if exchange.enforcing.left_out or exchange.shadow.left_out:
            for policy, reason in exchange.list_uncounted():
                self._metrics.uncounted.labels(policy, reason).inc()
        # any() would take 0.2 us
        if [
            group for group in exchange.groups if group.left_out or group.missing or group.failures
        ]:
            self.coverage.note(exchange)
        for group in exchange.groups:
            if (
                group.missing
                or group.changing
                or group.failures
                or group.contradicted
                or group.spared
            ):
                self._report_group(group)

    def _report_group(self, group: Guards) -> None:
        if group.missing:
            self._report_missing(group)
        if group.changing:
            self._report_changing(group)
        if group.failures:
            self._report_failures(group)
        for policy in group.contradicted:
            self._metrics.header_mismatch.labels(policy).inc()
        for spared in group.spared:
            self._metrics.overridden.labels(spared.policy, spared.mode, ALLOW).inc()

    def report_unsteered(self, decision: Decision, reason: str) -> None:
        """Report a request that no note could be added to, once per policy that asked for one."""
        steering = [
            outcome.policy
            for outcome in decision.trace
            if outcome.action in NOTED and outcome.mode == "enforce"
        ]
        policies = list(dict.fromkeys(steering))
        self.coverage.note_unsteered(policies, reason)
        for policy in policies:
            self._metrics.unsteered.labels(policy, reason).inc()

    def report_unnarrowed(self, policies: Sequence[str], reason: str) -> None:
        """Report a request whose tools cannot be removed."""
        for policy in policies:
            self._metrics.unnarrowed.labels(policy, reason).inc()

    def _report_acts(self, exchange: Exchange, decision: Decision) -> None:
        metrics = self._metrics
        acted: list[Outcome] = []
        for outcome in decision.trace:
            if outcome.action is Action.ALLOW:
                continue
            if isinstance(outcome.subject, SessionSubject):
                labels = outcome.policy, outcome.mode, outcome.subject.limit, outcome.action.value
                metrics.session_limits.labels(*labels).inc()
                self._report_limit(exchange, outcome, outcome.subject)
            elif isinstance(outcome.subject, BudgetSubject):
                self._report_budget(exchange, outcome, outcome.subject)
            elif outcome.reason is Reason.LOOP_DETECTED:
                name = (
                    outcome.policy,
                    outcome.detector,
                    outcome.mode,
                    outcome.action.value,
                    outcome.strength,
                )
                metrics.detections[name] = metrics.detections.get(name, 0) + 1
                acted.append(outcome)
        if acted:
            self._report_loops(exchange, decision, acted)

    def _report_loops(
        self, exchange: Exchange, decision: Decision, acted: Sequence[Outcome]
    ) -> None:
        """Report a request of a looping conversation.

        If `acted` is empty, an override allowed the request.
        """
        try:
            if not acted:
                self.loops.note_allowed(exchange, decision)
                return
            for outcome, loop in self.loops.note(exchange, decision, acted):
                total = loop.total
                if not total & (total - 1):  # the first, the second, the fourth, ...
                    self._warn_of_loop(outcome, loop)
        except Exception as error:  # noqa: BLE001  # whatever it is, the verdict stands
            self.report_failure("a loop could not be reported", error)

    def _report_after_notes(self, exchange: Exchange, decision: Decision) -> None:
        try:
            exchange.after_notes = self._follower.follow(exchange, decision)
            for change in exchange.after_notes:
                self._metrics.after_notes.labels(*change.labels).inc()
                self.loops.note_after(
                    exchange,
                    decision,
                    change.outcome,
                    change.repeats,
                    change.fingerprint,
                    change.labels,
                )
        except Exception as error:  # noqa: BLE001  # whatever it is, the verdict stands
            self.report_failure("a change after a note could not be reported", error)

    def report_sessions(self, candidates: list[SessionGuard], lead: Outcome | None = None) -> None:
        """Report a request's sessions; `lead` is the deciding outcome, None if it is unchanged."""
        metrics, now = self._metrics, time()
        action = lead.action.value if lead is not None else ""
        for candidate in candidates:
            standing, policy, mode = candidate.standing, candidate.plan.id, candidate.compiled.mode
            if candidate.session == UNNAMED and not candidate.is_second:
                self._report_unnamed(candidate, now)
            if standing is None:
                continue
            if candidate.narrowing is not None and candidate.narrowing.removes:
                limit = "max_tool_calls" if candidate.narrowing.every else "max_calls_per_tool"
                metrics.session_limits.labels(policy, mode, limit, NARROW).inc()
            if standing.crowded:
                metrics.session_overflow.labels(policy).inc()
                self.coverage.note_crowded(policy, mode)
            if candidate.has_grown:
                self.coverage.note_grown(policy, mode)
            name = (candidate.tenant, policy, mode, candidate.session)
            run = self.sessions.note(
                name,
                candidate.values,
                standing,
                candidate.model,
                candidate.list_newest_tools(),
                candidate.call,
                now,
                candidate.calls.failed,
                candidate.agent_name,
                candidate.parent_name,
                action,
            )
            run.limits = candidate.limiter.list_limits(candidate.session)
            run.grant(candidate.list_grants() if candidate.overrides else (), now)
            if standing.tree is not None and standing.tree.began:
                metrics.session_agents.labels(policy, mode).inc()
            if candidate.nameless is not None:
                self._link_sessions(candidate, candidate.nameless, name)
            if run.known is UNKNOWN:
                run.known = find_known(candidate)

    def _link_sessions(
        self, candidate: SessionGuard, document: Document, name: tuple[str, str, str, str]
    ) -> None:
        try:
            started = self._spawns.note(
                name[0], candidate.session, document, begins=not candidate.waits
            )
        except Exception as error:  # noqa: BLE001  # whatever it is, the verdict stands
            self.report_failure("sessions could not be linked", error, policy=name[1])
        else:
            self.sessions.link(name, started)

    def _report_unnamed(self, candidate: SessionGuard, now: float) -> None:
        policy, mode, limited = (
            candidate.plan.id,
            candidate.compiled.mode,
            candidate.hit is not None,
        )
        self._metrics.session_unnamed.labels(policy, mode).inc()
        self.sessions.note_unnamed(
            RunName(candidate.tenant, policy, mode, UNNAMED), candidate.values, now
        )
        if requests := self._remind(f"{UNNAMED} {mode} {policy}"):
            what = (
                "they share unnamed_limits"
                if limited
                else "they pass: unnamed_limits would limit them"
            )
            _LOG.warning(
                f"nothing names the session of requests; {what}",
                extra=make_extra(policy=policy, requests=requests),
            )

    def report_settled(
        self, ended: Entry, settled: Sequence[Settled], answers: Sequence[Answer | None]
    ) -> None:
        """Report the usage of a finished request.

        Usage that the store could not record is reported, too.

        A refused request is only reported to the session table.
        """
        now, metrics = time(), self._metrics
        usage = None if ended.estimated else ended.usage
        for each, answer in zip(settled, answers, strict=True):
            asked = each.asked
            applied = (
                answer.granted
                if isinstance(answer, Taken)
                else isinstance(answer, Standing) and not answer.retry
            )
            if each.loop is not None and applied:
                self.loops.settle(each.loop, now, estimated=ended.estimated)
            if (
                isinstance(answer, Standing)
                and isinstance(asked, Settlement)
                and (ended.refused or not answer.retry)
            ):
                name, known = (
                    (each.tenant, each.policy, each.mode, each.session),
                    (each.model, asked.call, ended.status, usage),
                )
                self.sessions.settle(
                    name, answer, *known, now, refused=ended.refused, model_ms=ended.model_ms
                )
            elif isinstance(answer, Standing) or (
                each.rule and isinstance(answer, Taken) and not answer.granted
            ):
                self.report_unknown_calls(1)
            elif each.rule and isinstance(asked, Take):
                self.budgets.settle(each, asked, now, estimated=ended.estimated)
                metrics.budget_used.labels(each.policy, each.mode, each.rule).inc(each.used)
                metrics.budget_estimated.labels(each.policy, each.mode, each.rule).inc(
                    each.estimated
                )

    def report_unknown_calls(self, calls: int) -> None:
        """Report access log entries without an open call: settled before, too late, or forged."""
        self._metrics.access_log_entries.labels("unknown").inc(calls)

    def report_forbidden(self, policy: str, reason: str) -> None:
        """Report a request that is refused because it cannot be counted."""
        self._metrics.uncountable_rejected.labels(policy, reason).inc()

    def report_killed(self, switch: Switch, mode: str) -> None:
        """Report a request that matches a kill switch.

        The first is logged, then their number once a minute.
        """
        self._metrics.kill_switched.labels(switch.scope_key, mode).inc()
        if requests := self._remind(switch.place):
            shown = {"scope_key": switch.scope_key, "reason": switch.reason or None}
            _LOG.warning(
                "kill switch",
                extra=make_extra(place=switch.place, mode=mode, **shown, requests=requests),
            )

    def report_blocked(self, policy: str, block: ActiveOverride) -> None:
        """Report a request that an operator's block refuses; logged as for kill switches."""
        self._metrics.overridden.labels(policy, "enforce", block.kind).inc()
        if requests := self._remind(block.name):
            shown = {"reason": block.reason or None, "who": block.who or None}
            _LOG.warning(
                "blocked",
                extra=make_extra(override=block.name, policy=policy, **shown, requests=requests),
            )

    def _remind(self, name: str) -> int:
        """Count a request under `name`; returns the count once a minute, otherwise 0."""
        if name not in self._stopped and len(self._stopped) >= _MOST_REMINDERS:
            self._stopped.clear()
        return self._stopped.setdefault(name, Reminder(_REMIND_SECONDS)).count(perf_counter())

    def report_failure(self, message: str, error: BaseException, **more: object) -> None:
        """Log an error, rate-limited."""
        suppressed = self._failures.admit(perf_counter())
        if suppressed is not None:
            extra = make_extra(
                error=f"{type(error).__name__}: {error}", **more, suppressed=suppressed or None
            )
            _LOG.error(message, exc_info=error, extra=extra)

    def report_shadow_failure(self, error: Exception, **more: object) -> None:
        """Report an error in a shadow policy; the request is unaffected."""
        self._metrics.fail_open.labels("shadow_error").inc()
        self.report_failure("shadow policy failed", error, **more)

    def report_refused_policy(self, refused: RefusedPolicy) -> None:
        """Report an invalid policy in route metadata."""
        shown = make_extra(reason=refused.reason, problems=refused.found, first=refused.problems)
        _LOG.error("policy in route metadata refused", extra=shown)

    def report_unknown_policies(self, names: Sequence[str]) -> None:
        """Report that a route names unknown policies."""
        self._metrics.handover_errors.labels("unknown_policy").inc()
        if (suppressed := self._failures.admit(perf_counter())) is not None:
            extra = make_extra(
                policies=[name[:_NAME_SHOWN] for name in names[:_PROBLEMS_SHOWN]],
                metadata=POLICY_METADATA,
                suppressed=suppressed or None,
            )
            _LOG.error("a route names policies that are not loaded or not enabled", extra=extra)

    def _report_missing(self, group: Guards) -> None:
        for policy, key in group.missing:
            self._metrics.missing_descriptor.labels(policy, key).inc()
            requests = self._reminders.setdefault((policy, key), Reminder(_REMIND_SECONDS)).count(
                perf_counter()
            )
            if requests and (suppressed := self._missing.admit(perf_counter())) is not None:
                extra = make_extra(
                    policy=policy, key=key, requests=requests, suppressed=suppressed or None
                )
                _LOG.warning(
                    f"requests have no {key}{_ADVICE.get(key.partition(':')[0], '')}", extra=extra
                )

    def _report_changing(self, group: Guards) -> None:
        for policy, key in group.changing:
            self._metrics.session_changing.labels(policy, key).inc()
            if self._remind(f"changing {policy} {key}"):
                what = (
                    "changes with every request of a caller, so it names no session; a default "
                    "key is left out for that caller"
                )
                _LOG.warning(f"{key} {what}", extra=make_extra(policy=policy, key=key))

    def _report_failures(self, group: Guards) -> None:
        for policy, error in group.failures:
            if group.shadow:
                self.report_shadow_failure(error, policy=policy)
            else:
                self._metrics.fail_open.labels("internal_error").inc()
                self.report_failure(
                    "a detector failed, the others' verdict stands", error, policy=policy
                )

    def _warn_of_loop(self, outcome: Outcome, loop: Loop) -> None:
        self._warn(
            "loop detected",
            loop.tenant,
            policy=loop.policy,
            detector=loop.detector,
            mode=loop.mode,
            action=outcome.action.value,
            fingerprint=outcome.fingerprint,
            count=outcome.count,
            strength=outcome.strength or None,
            requests=loop.total,
            tenant=loop.tenant,
            alias=loop.alias or None,
            labels=dict(loop.labels) or None,
            descriptors=dict(loop.caller) if self.show_callers else None,
            session=loop.session or None,
            tool=" ".join(loop.tools) or None,
            route=loop.route or None,
            path=loop.path,
        )

    def _report_limit(self, exchange: Exchange, outcome: Outcome, subject: SessionSubject) -> None:
        """Log the first, second, fourth, ... of a session's consecutive refusals."""
        for candidate in exchange.sessions:
            standing = candidate.standing
            if standing is None or not standing.limit or standing.waits:
                continue
            if (candidate.plan.id, candidate.compiled.mode, candidate.tenant) != (
                outcome.policy,
                outcome.mode,
                outcome.tenant,
            ):
                continue
            agents = standing.tree is not None and subject.limit in AGENT_LIMITS
            blocks = (
                standing.tree.refused
                if agents and standing.tree is not None
                else standing.consecutive_blocks
            )
            if not blocks & (blocks - 1):
                used, allowed = subject.shown
                known = find_known(candidate)
                self._warn(
                    "session limit reached",
                    outcome.tenant,
                    policy=outcome.policy,
                    mode=outcome.mode,
                    action=outcome.action.value,
                    limit=subject.limit,
                    used=used,
                    allowed=allowed,
                    tool=subject.tool or None,
                    session=candidate.session,
                    agent=candidate.agent_name or None,
                    tenant=outcome.tenant,
                    alias=known.alias or None,
                    labels=dict(known.labels) or None,
                    descriptors=dict(candidate.values) if self.show_callers else None,
                )

    def _note_budgets(self, candidates: list[BudgetGuard], decision: Decision) -> None:
        """Update the budget table; a refused request returns what it took."""
        try:
            self.budgets.note(candidates, _time(), refused=decision.action is Action.REJECT)
        except Exception as error:  # noqa: BLE001  # whatever it is, the verdict stands
            self.report_failure("budgets could not be reported", error)

    def _report_budget(self, exchange: Exchange, outcome: Outcome, subject: BudgetSubject) -> None:
        """Count a budget's stage or refusal; log refusals once a minute per caller and rule."""
        labels = (
            outcome.policy,
            outcome.mode,
            subject.rule,
            outcome.reason.value,
            outcome.action.value,
        )
        self._metrics.budgets.labels(*labels).inc()
        found = [
            each
            for each in exchange.budgets
            if each.plan.id == outcome.policy and each.compiled.mode == outcome.mode
        ]
        found.sort(key=lambda each: not each.is_about(outcome.tenant))
        row = self.budgets.act(found[0], outcome, subject, time()) if found else None
        if outcome.action is not Action.REJECT:
            return
        requests = self._remind(
            f"budget {outcome.policy} {outcome.mode} {subject.rule} {outcome.tenant}"
        )
        if not requests:
            return
        opened = outcome.reason is Reason.CIRCUIT_BREAKER_OPEN
        self._warn(
            "circuit breaker open" if opened else "budget exceeded",
            outcome.tenant,
            policy=outcome.policy,
            mode=outcome.mode,
            rule=subject.rule,
            reason=outcome.reason.value,
            limit=subject.limit,
            left=subject.left,
            asked=subject.asked,
            retry_after=outcome.retry_after,
            requests=requests,
            tenant=outcome.tenant,
            alert=True if opened and found and found[0].budget.alerts else None,
            command=row.write_command(row.told) if row is not None and not subject.final else None,
            alias=found[0].find_alias() or None if found else None,
            labels=dict(found[0].labels) or None if found else None,
            descriptors=dict(found[0].values) if found and self.show_callers else None,
        )

    def _warn(self, message: str, whose: str, **shown: object) -> None:
        """Log a warning, rate-limited per tenant and overall, with the number suppressed before."""
        limit = self._tenants.use(whose)
        if limit is None:
            limit = RateLimit(_DETECTIONS_PER_TENANT)
            self._tenants.put(whose, limit)
        now = perf_counter()
        own = limit.admit(now)
        every = None if own is None else self._detections.admit(now)
        if own is not None and every is not None:
            _LOG.warning(message, extra=make_extra(**shown, suppressed=own + every or None))
