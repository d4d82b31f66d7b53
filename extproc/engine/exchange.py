"""One request on its way from its headers to its answer.

1. `Engine.prepare` creates an exchange from the head; `admit` makes guards of each policy that
   matches.
2. `apply_overrides` looks up operators' orders. 3. `read_body` opens the body, and every guard
reads it and prepares its questions to the store. 4. The store is asked for each group of guards:
first `list_pushes`, whose answers go to `recall`,
   then `list_hits`.
5. `decide` takes the answers to the hits: each guard judges, and the strictest outcome wins.

Pure: no clock, no asyncio, no store; the caller runs the steps. Enforcing and shadow guards are in
separate groups. Only enforcing guards decide, so a shadow policy never affects the answer. If a
guard raises, its group removes that guard and keeps the others' verdicts.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from extproc.apis import LIST_PATHS, hash_first_words, open_conversation, read_path
from extproc.apis.excerpt import Excerpt
from extproc.budgets.guard import BUDGET
from extproc.decision import (
    CHOSEN_BY_CLIENTS,
    MISSING,
    UNREADABLE,
    Action,
    Decision,
    Outcome,
    Repeat,
    ToolFailure,
    decide,
)
from extproc.detectors.causes import Cause, find_cause
from extproc.detectors.own_answers import leave_out_answers
from extproc.engine.budget_guard import BudgetGuard
from extproc.engine.budget_plan import BudgetPlan
from extproc.engine.guards import (
    NO_LABELS,
    Answer,
    Guard,
    Kept,
    LoopGuard,
    SessionGuard,
)
from extproc.engine.orders import ActiveOverride, Overrides
from extproc.engine.plan import BYPASS, Plan
from extproc.engine.ramp import Ramp
from extproc.engine.reading import NOT_CHANGING, Reading, make_excerpt
from extproc.objects import INSPECT_BYTES
from extproc.policy.bundle import EVERYBODY
from extproc.request.callers import Values, list_others
from extproc.request.document import Document, NotCounted
from extproc.request.encodings import UnreadableError, list_encodings, read_text, unpack
from extproc.request.fingerprint import NO_BODY, Body, join_descriptors
from extproc.request.hash_key import PROCESS_KEY, HashKey
from extproc.request.http import RESPONSES_WEBSOCKET, HttpRequest
from extproc.request.notes import RARE, Marks, cut_notes, frame_answer
from extproc.store.pushes import AnyPush
from extproc.store.rules.budget import Taken
from extproc.store.rules.session import Question
from extproc.store.rules.windows import UNCOUNTED

_NO_SESSIONS: Final[list[SessionGuard]] = []
_NO_BUDGETS: Final[list[BudgetGuard]] = []

_MANY_OBJECTS: Final = 32_768
"""From this length in bytes, a body may contain enough objects to make garbage collection slow."""

_SHARE: Final = b"steer_share"
_SHARE_BYTES: Final = 8


# What Loopguard can do with a request's body.
PASSING: Final = 0  # not held, or missing: the request can be refused, but not edited
BUFFERED: Final = 1  # Envoy holds it, and accepts an edited one
HELD: Final = 2  # held here, and handed back, possibly edited
SENT_ON: Final = 3  # partly forwarded: a warning is the only action left
OBSERVED: Final = 4  # Envoy sends a copy, and does not wait for answers


class Guards:
    """The enforcing guards of a request, or its shadow guards.

    Attributes:
        shadow: the guards are in shadow mode.
        active: the guards that may judge the request.
        needs_body: a guard cannot count the request without its body.
        left_out: (policy, detector, reason) of guards that matched but do not count this request;
            an empty detector means all.
        forbidden: (policy, reason) of the first of these whose policy refuses uncounted requests,
            if any.
        missing: (policy, limit key) of descriptors that the request lacks.
        failures: (policy, error) of guards that failed with an internal error.
        remembers: a guard has pushes that have not been sent to the store.
        sessions: the guards of session limits, including those left out.
        budgets: the guards of budgets, including those left out.
        contradicted: policies with a detector for which headers contradict the body.
        several: some guards are for other callers, because the request has several credentials.
        changing: (policy, limit key) of session names just found to change with every request.
        spared: outcomes that an operator's `allow` has overridden.
    """

    def __init__(self, *, shadow: bool) -> None:
        self.shadow = shadow
        self.several = False
        self.needs_body = False
        self.active: list[Guard] = []
        self.left_out: list[tuple[str, str, str]] = []
        self.failures: list[tuple[str, Exception]] = []
        self.missing: list[tuple[str, str]] = []
        self.forbidden: tuple[str, str] | None = None
        self.remembers = False
        self.changing = NOT_CHANGING
        self.sessions = _NO_SESSIONS
        self.budgets = _NO_BUDGETS
        self.spared: list[Outcome] = []
        self.contradicted: list[str] = []

    @property
    def inspects(self) -> bool:
        """Whether a guard's policy inspects bodies."""
        return any(guard.plan.inspects > 0 for guard in self.active)

    def acts_on(self, plan: Plan, ramp: Ramp, request: HttpRequest) -> bool:
        """Whether a plan with a ramp acts on the request's caller; false if in doubt."""
        try:
            place = ramp.find_place(request)
        except Exception as error:  # noqa: BLE001  # an error affects only this policy
            self.failures.append((plan.id, error))
            return False
        if not place:
            self.missing += [(plan.id, key) for key in ramp.keys if not plan.is_told_apart_by(key)]
        return ramp.covers(place)

    def admit(self, plan: Plan, request: HttpRequest, last: Guard | None = None) -> bool:
        """Create the plan's guards, or record why not; returns whether there are any.

        Values that the last guard of either group has read are reused.
        """
        try:
            if last is not None and plan.reads_like(last.plan, last.values):
                values, joined = last.values, last.caller
            else:
                values = plan.read_descriptors(request, self.missing)
                joined = join_descriptors(values)
            caller = None if plan.reads_body else joined
            session = plan.rings.read(request, caller) if plan.rings is not None else ()
            labels = plan.read_labels(request) if plan.labels else NO_LABELS
            own = len(self.active)
            for detector in plan.detectors:
                guard = LoopGuard(plan, detector, values, joined, session)
                guard.labels = labels
                if detector.similarity.reads_headers and not self._read_headers(guard, request):
                    continue
                self.active.append(guard)
                self.needs_body = self.needs_body or guard.needs_body
            # Requests that call no model are not steps.
            if (
                plan.limiter is not None
                and request.method != "HEAD"
                and read_path(request.path).asks_model
            ):
                names = plan.limiter.names
                named: Sequence[str] = (
                    session if names is plan.rings else names.read(request, caller)
                )
                limited = SessionGuard(plan, plan.limiter, values, joined, named)
                limited.labels = labels
                if key := names.tell_key(named):
                    limited.agent = plan.limiter.agent_names.read(request, key, named[-1])
                self.active.append(limited)
                self.sessions = [*self.sessions, limited]
                self.needs_body = True
            if plan.shown and (others := list_others(plan.shown, request, values)):
                self._admit_others(others, self.active[own:])
        except NotCounted as why:
            hidden = request.opens_responses and why.reason != BYPASS  # for every caller
            self._leave_out(plan, "", RESPONSES_WEBSOCKET if hidden else why.reason)
            return False
        except Exception as error:  # noqa: BLE001  # an error affects only this policy
            self.failures.append((plan.id, error))
            return False
        return True

    def _admit_others(self, others: list[Values], first: list[Guard]) -> None:
        """Add guards for the other callers of a request, given those for its first caller."""
        for place, values in enumerate(others):
            joined = join_descriptors(values)
            for guard in first:
                other = guard.follow(values, joined, place)
                if isinstance(other, BudgetGuard):
                    if not other.is_needed:
                        continue
                    self.budgets = [*self.budgets, other]
                elif isinstance(other, SessionGuard):
                    self.sessions = [*self.sessions, other]
                self.active.append(other)
                self.several = True

    def admit_budget(
        self, plan: Plan, budget: BudgetPlan, request: HttpRequest, last: Guard | None
    ) -> None:
        """Create the guard of the plan's budgets, or record why not; `last` is as for `admit`."""
        try:
            if last is None or last.plan is not plan:  # otherwise already checked
                plan.check_bypass(request)
            if last is not None and plan.reads_like(last.plan, last.values):
                values, joined = last.values, last.caller
            else:
                values = plan.list_values(request)
                joined = join_descriptors(values)
            guard = BudgetGuard(plan, budget, values, joined, request)
            if not guard.choose(self.missing):
                self.note_unpaid(guard)
                return
            guard.labels = plan.read_labels(request) if plan.labels else NO_LABELS
        except NotCounted as why:
            if not plan.judges_requests or why.reason != BYPASS:
                self._leave_out(plan, BUDGET, why.reason)
        except Exception as error:  # noqa: BLE001  # an error affects only this policy
            self.failures.append((plan.id, error))
        else:
            self.active.append(guard)
            self.needs_body = self.needs_body or guard.needs_body
            self.budgets = [*self.budgets, guard] if self.budgets else [guard]
            if plan.shown and (others := list_others(plan.shown, request, values)):
                self._admit_others(others, [guard])

    def _read_headers(self, guard: LoopGuard, request: HttpRequest) -> bool:
        """Record what the headers claim about the body; whether the guard can still count."""
        try:
            guard.claim = guard.detector.similarity.read_headers(request.headers)
        except NotCounted as why:
            self._drop(guard, why.reason)
            return False
        return True

    def apply_overrides(self, standing: Overrides, now: float, request: HttpRequest) -> None:
        """Look up operators' orders that apply by the request's head."""
        for guard in self.active:
            try:
                guard.apply_overrides(standing, now, request)
            except Exception as error:  # noqa: BLE001  # an error affects only this guard
                self.failures.append((guard.plan.id, error))

    def find_block(self) -> tuple[Guard, ActiveOverride] | None:
        """The first guard that an operator's order refuses, if any."""
        for guard in self.active:
            if guard.overrides and (stop := guard.find_stop()) is not None:
                return guard, stop
        return None

    def read(self, exchange: Reading) -> None:
        """Let every guard read the body; those that cannot are removed."""
        if exchange.plain is None or len(exchange.plain) < _MANY_OBJECTS or not gc.isenabled():
            self._read_each(exchange)
        else:
            gc.disable()  # repeated collections would take longer than decoding
            try:
                self._read_each(exchange)
            finally:
                gc.enable()
        if exchange.changing:
            self.changing, exchange.changing = exchange.changing, NOT_CHANGING
        for budget in self.budgets:
            self.note_unpaid(budget)

    def _read_each(self, exchange: Reading) -> None:
        able: list[Guard] = []
        for guard in self.active:
            if guard.first is not None and guard.first not in able:
                continue  # its first caller's guard was removed
            try:
                guard.read(exchange, self.missing)
                second = guard.count_start() if isinstance(guard, SessionGuard) else None
            except NotCounted as why:
                self._drop(guard, why.reason)
            except Exception as error:  # noqa: BLE001  # an error affects only this guard
                self._fail_to_read(guard, error)
            else:
                able.append(guard)
                self.remembers = self.remembers or len(guard.pushes) > 0
                if self.sessions and isinstance(guard, SessionGuard) and guard.unreadable:
                    self._drop(guard, guard.unreadable)  # its calls cannot be counted
                if second is not None:
                    able.append(second)
                    self.sessions = [*self.sessions, second]
            if isinstance(guard, LoopGuard) and guard.contradicted:
                self.contradicted.append(guard.plan.id)
        self.active = able

    def note_unpaid(self, budget: BudgetGuard) -> None:
        """Record that a rule does not count the request, because its caller is unknown."""
        if budget.lacks_caller:
            self._leave_out(budget.plan, BUDGET, MISSING, allowed=budget.is_allowed)

    def list_pushes(self) -> list[AnyPush]:
        """The entries to store before anything is counted."""
        return [push for guard in self.active for push in guard.pushes]

    @property
    def waits(self) -> bool:
        """Whether a verdict depends on the answers to pushes."""
        return any(guard.waits for guard in self.active)

    @property
    def needs_store(self) -> bool:
        """Like `waits`, for requests that name their session; others contain their history."""
        return any(guard.waits and guard.session != "" for guard in self.active)

    def recall(self, answers: Sequence[Kept]) -> None:
        """Process the answers to the pushes, in their order; guards that cannot are removed."""
        taken = 0
        recalled = []
        for guard in self.active:
            try:
                if guard.pushes:
                    first, taken = taken, taken + len(guard.pushes)
                    guard.recall(answers[first:taken])
            except NotCounted as why:
                self._drop(guard, why.reason)
            except Exception as error:  # noqa: BLE001  # an error affects only this guard
                self._fail_to_read(guard, error)
            else:
                recalled.append(guard)
        self.active = recalled

    def list_hits(self) -> list[Question]:
        """The questions that count the request, with those of budgets last."""
        hits: list[Question] = [guard.hit for guard in self.active if guard.hit is not None]
        for guard in self.budgets:
            for each in guard.reserved:
                hits.append(each.take)  # noqa: PERF401  # compiled, as fast
        return hits

    def _hand_out(self, counts: Sequence[Answer]) -> None:
        """Give the guards of budgets their answers, which are last."""
        place = len(counts)
        for guard in reversed(self.budgets):
            for each in reversed(guard.reserved):
                place -= 1
                answer = counts[place]
                if isinstance(answer, Taken):
                    each.answer(answer)

    def judge(self, counts: Sequence[Answer] | None) -> list[Outcome]:
        """The guards' outcomes.

        Args:
            counts: answers to the hits, in their order; None if there are none, and no outcomes
                either.
        """
        if counts is None:
            return []
        if self.budgets and counts:
            self._hand_out(counts)
        place = 0
        trace = []
        for guard in self.active:
            count: Answer = UNCOUNTED
            if guard.hit is not None:
                count = counts[place]
                place += 1
            try:
                outcome = guard.judge(count)
            except Exception as error:  # noqa: BLE001  # an error affects only this guard
                self.failures.append((guard.plan.id, error))
            else:
                trace.append(
                    self._spare(outcome) if guard.overrides and guard.is_allowed else outcome
                )
        return join_callers(trace) if self.several else trace

    def find(self, outcome: Outcome) -> Guard | None:
        """The guard of an outcome; None if it was removed."""
        found: Guard | None = None
        for guard in self.active:
            if guard.plan.id == outcome.policy and guard.compiled.name == outcome.detector:
                if not self.several or guard.is_about(outcome.tenant):
                    return guard
                found = found or guard
        return found

    def _spare(self, outcome: Outcome) -> Outcome:
        if outcome.action is Action.ALLOW:
            return outcome
        self.spared.append(outcome)
        return outcome.change_action(Action.ALLOW)

    def fail(self, error: Exception) -> None:
        """Record that none of these guards can be counted."""
        self.failures.append((self.active[0].plan.id, error))
        self.active = []

    def take_body_readers(self) -> list[Guard]:
        """Remove and return the guards that need the body."""
        taken = [guard for guard in self.active if guard.needs_body]
        self.active = [guard for guard in self.active if not guard.needs_body]
        self.needs_body = False
        return taken

    def drop_body_readers(self, reason: str) -> None:
        """Remove guards that need the body, or all if the request opens a WebSocket."""
        if not self.active:
            return
        kept = []
        for guard in self.active:
            if reason != RESPONSES_WEBSOCKET and (
                not guard.needs_body or guard.counts_without_body()
            ):
                kept.append(guard)
            else:
                self._drop(guard, reason)
        self.active = kept

    def give_up(self, reason: str) -> None:
        """Leave the request uncounted."""
        for guard in self.active:
            self._drop(guard, reason)

    def _fail_to_read(self, guard: Guard, error: Exception) -> None:
        """Record an internal error.

        A client may have caused it, so the request is also uncounted, as `uncountable` rules.
        """
        self.failures.append((guard.plan.id, error))
        self._drop(guard, UNREADABLE)

    def _drop(self, guard: Guard, reason: str) -> None:
        self._leave_out(guard.plan, guard.compiled.name, reason, allowed=guard.is_allowed)

    def _leave_out(self, plan: Plan, detector: str, reason: str, *, allowed: bool = False) -> None:
        if (
            plan.id,
            detector,
            reason,
        ) not in self.left_out:  # otherwise left out for another caller
            self.left_out.append((plan.id, detector, reason))
        refuses = (
            reason in CHOSEN_BY_CLIENTS
            if plan.refuses_uncountable
            else reason == RESPONSES_WEBSOCKET
        )
        if refuses and not allowed and self.forbidden is None:
            self.forbidden = plan.id, reason


class Exchange(Reading):
    """One request being processed.

    Attributes:
        state: what Loopguard can do with the body; see `PASSING`.
        started: when its newest message arrived, by `perf_counter`.
        record: its record for `--record`; None without that.
        raw: the body as received, if it may be edited.
        unknown: why the body is unknown.
        delayed: it has one of the places for delayed requests.
        tenant: the caller who has that place.
        waits: its answer is delayed and not sent yet; if it never is, its reservations are given
            back.
        content: its body, if a policy may inspect it.
        document: the parsed body, if a policy may have read it; None if it differs from the bytes
            received.
        enforcing: the guards whose verdict is the answer.
        shadow: the guards whose verdict has no effect.
        groups: both.
        reserves: some guards limit sessions or budgets.
        settles: some reservation is settled after the response.
        inspects: maximum length of a body to hold for inspection, in bytes; 0 for none.
        steers: maximum length of a body to hold for editing, in bytes; 0 for none.
        reads_ends: bodies longer than `inspects` may be inspected as an excerpt.
        plans: the policies that matched.
        leaves_out_notes: a detector gives notes only to a percentage of conversations.
        paired: an outcome is compared with another policy's.
        trace: each policy's outcome, after such a comparison.
        after_notes: the effects of earlier notes that it shows, once reported.
        is_overridden: operators' orders may apply to it.
        counts_failed: it stays counted if its upstream fails.
        failure: the failing tool of its conversation, if it has been looked for and found.
        fails_for_many: that tool fails in this way for many sessions.
        conversation_key: its row among looping conversations; empty if it is not reported there.
        is_priced: that report includes the estimated cost.
    """

    def __init__(self, request: HttpRequest, scope: str = "", key: HashKey = PROCESS_KEY) -> None:
        super().__init__(request, scope)
        self.state = PASSING
        self.started = 0.0
        self.record: dict[str, Any] | None = None
        self.raw: bytes | memoryview | None = None
        self.unknown = ""
        self.delayed = self.waits = False
        self.tenant = ""
        self.content: bytes | memoryview | None = None
        self.document: Document | None = None
        self.reserves = self.settles = False
        self.enforcing = Guards(shadow=False)
        self.shadow = Guards(shadow=True)
        self.groups = [self.enforcing, self.shadow]
        self.inspects = 0
        self._shown = 0  # the same for enforcing policies
        self.steers = 0
        self.reads_ends = False
        self.paired = False
        self.leaves_out_notes = False
        self.counts_failed = True
        self.trace: list[Outcome] = []
        self.after_notes: list[Any] = []
        self.failure: ToolFailure | None = None
        self.fails_for_many = False
        self.conversation_key: tuple[str, ...] = ()
        self.is_priced = False
        self.plans: Sequence[Plan] = ()
        self._key = key
        self._earlier: Exchange | None = None  # the part that was decided without the body
        self._rest: Exchange | None = None  # the part that waits for it
        self._last: Guard | None = None
        self.is_overridden = False
        self._cause: tuple[Repeat, Cause | None] | None = None

    @property
    def sessions(self) -> list[SessionGuard]:
        """The guards of session limits, of both groups."""
        return (
            [*self.enforcing.sessions, *self.shadow.sessions]
            if self.shadow.sessions
            else self.enforcing.sessions
        )

    @property
    def budgets(self) -> list[BudgetGuard]:
        """The guards of budgets, of both groups."""
        return (
            [*self.enforcing.budgets, *self.shadow.budgets]
            if self.shadow.budgets
            else self.enforcing.budgets
        )

    @property
    def earlier(self) -> list[Outcome]:
        """The trace of the part that was decided without the body."""
        return self._earlier.trace if self._earlier is not None else []

    def find_conversation_key(self) -> tuple[str, ...]:
        """Its `conversation_key`, or that of the part that was decided without the body."""
        if self.conversation_key or self._earlier is None:
            return self.conversation_key
        return self._earlier.conversation_key

    @property
    def shown(self) -> bytes | memoryview | None:
        """The content, for refusals.

        They must not depend on bodies that only shadow policies inspect.
        """
        content = self.content
        return content if content is not None and len(content) <= self._shown else None

    @property
    def may_be_edited(self) -> bool:
        """Whether an enforcing policy may have to change its body, loops aside."""
        return self.asks_usage or any(
            session.narrowing is not None for session in self.enforcing.sessions
        )

    @property
    def asks_usage(self) -> bool:
        """Whether a policy makes streams report their usage, and the request's API can."""
        return len(self.list_asking()) > 0 and read_path(self.request.path).ask_usage is not None

    def list_asking(self) -> list[Plan]:
        """The policies that make streams report their usage."""
        asking = [session.plan for session in self.enforcing.sessions if session.limiter.asks_usage]
        return asking + [
            each.plan for each in self.enforcing.budgets if each.budget.asks_usage and each.reserved
        ]

    @property
    def needs_body(self) -> bool:
        """Whether a fingerprint includes the body, or a descriptor is in it."""
        return self.enforcing.needs_body or self.shadow.needs_body

    def admit(self, plan: Plan) -> None:
        """Create the plan's guards, or record why they do not count this request."""
        self.paired = self.paired or plan.paired
        if (
            plan.ramp is not None
            and plan.watching is not None
            and not self.enforcing.acts_on(plan, plan.ramp, self.request)
        ):
            plan = plan.watching
        group = self.shadow if plan.shadow else self.enforcing
        if plan.budget is not None and not plan.judges_requests:
            self._admit_budget(plan, plan.budget, group)
            self.reserves = True
            return
        own = len(group.active)
        admitted = group.admit(plan, self.request, self._last)
        if admitted:
            self._last = group.active[own] if len(group.active) > own else self._last
            self.counts_failed = self.counts_failed and plan.counts_failed
            self.leaves_out_notes = self.leaves_out_notes or plan.leaves_out_notes
            if plan.inspects or plan.steers:
                self._look_at(plan)
                self.reads_ends = self.reads_ends or plan.reads_ends
        if plan.budget is not None:
            self._admit_budget(plan, plan.budget, group)
        self.reserves = self.reserves or plan.reserves

    def _admit_budget(self, plan: Plan, budget: BudgetPlan, group: Guards) -> None:
        group.admit_budget(plan, budget, self.request, self._last)
        if group.budgets:
            self.settles = self.settles or budget.guard.needs_body
        if budget.needs_body or budget.guard.steers or budget.guard.asks_usage:
            self._look_at(plan)

    def _look_at(self, plan: Plan) -> None:
        """Hold bodies up to the length that the plan needs."""
        self.inspects, self.steers = (
            max(self.inspects, plan.inspects),
            max(self.steers, plan.steers),
        )
        if not plan.shadow:
            self._shown = max(self._shown, plan.inspects)

    def apply_overrides(self, standing: Overrides, now: float) -> None:
        """Apply operators' orders, before the body is read; `now` in seconds since 1970."""
        self.is_overridden = True
        for group in self.groups:
            group.apply_overrides(standing, now, self.request)

    def split(self) -> Exchange:
        """Move the shadow policies that need the body to a new exchange."""
        watching = Exchange(self.request, self.scope, self._key)
        watching.shadow.active = self.shadow.take_body_readers()
        watching.shadow.sessions, self.shadow.sessions = self.shadow.sessions, _NO_SESSIONS
        if self.shadow.budgets:
            watching.shadow.budgets = [each for each in self.shadow.budgets if each.needs_body]
            self.shadow.budgets = [each for each in self.shadow.budgets if not each.needs_body]
        watching.inspects, watching.reads_ends = self.inspects, self.reads_ends
        watching.reserves, watching.settles = self.reserves, self.settles
        watching.paired, watching.counts_failed = self.paired, self.counts_failed
        watching.plans = self.plans
        watching.state, watching.record = self.state, self.record
        watching._earlier, self._rest = self, watching
        return watching

    def read_body(  # noqa: PLR0913  # everything known about a body
        self,
        sums: Body | None,
        reason: str = "",
        content: bytes | memoryview | None = None,
        withheld: str = "inspect_limit",
        *,
        excerpt: Excerpt | None = None,
        shadow: bool = True,
    ) -> None:
        """Let the guards read the body, once it is complete or cannot become known.

        Args:
            sums: the body's checksums. None if it is unknown: guards that need it do not count the
                request.
            reason: why the body is unknown, for the metric `uncounted`.
            content: the body's bytes; None if no policy may inspect them.
            withheld: why not.
            excerpt: makes an excerpt of a body that is too long; `content` is then the excerpt's
                bytes.
            shadow: include the shadow policies; otherwise `read_shadow` does that later.
        """
        if sums is None:
            for group in self.groups:
                group.drop_body_readers(reason)
            sums = NO_BODY
        self.sums, self.unreadable = sums, withheld
        if self.inspects and content is not None:
            if (
                len(content) > self.inspects
                and excerpt is None
                and self.reads_ends
                and self.is_plain
            ):
                excerpt = Excerpt(LIST_PATHS, self.inspects)
            try:
                if excerpt is None:
                    self._open_document(content)
                else:
                    self._open_excerpt(excerpt, content)
            except Exception as error:  # noqa: BLE001  # some guards need no document
                self.unreadable = UNREADABLE
                group = self.enforcing if self.enforcing.active else self.shadow
                group.failures += [(guard.plan.id, error) for guard in group.active[:1]]
        if self.enforcing.active:  # otherwise, reading the query might take too long
            self.enforcing.read(self)
        if shadow and self.shadow.active:
            self.shadow.read(self)

    @property
    def is_plain(self) -> bool:
        """Whether the body is not compressed."""
        return not list_encodings(self.request.headers.get("content-encoding", b""))

    def sum_up(self, body: bytes | memoryview) -> Body:
        """The checksums of the decompressed body, so that compression makes no difference.

        If the body is too long or does not match its encoding, they are those of the body as sent.
        """
        try:
            encoding = self.request.headers.get("content-encoding", b"")
            body = unpack(body, encoding, max(self.inspects, INSPECT_BYTES))
        except UnreadableError:
            pass
        return NO_BODY.plus(body)

    def _open_excerpt(self, excerpt: Excerpt, content: bytes | memoryview) -> None:
        """Open an excerpt of the body, without searching it for notes."""
        shortened = make_excerpt(excerpt, content)
        if shortened is not None:
            self.content, self.plain = bytes(shortened), shortened

    def _open_document(self, content: bytes | memoryview) -> None:
        """Open the body and remove notes, or record why it is unreadable."""
        try:
            text = read_text(
                content, self.request.headers.get("content-encoding", b""), self.inspects
            )
        except UnreadableError as error:
            self.unreadable = error.reason
            return
        self.content = text
        data = text if isinstance(text, bytes) else text.tobytes()
        document = Document(data)
        plain = data
        if RARE in data:  # hardly any body has notes
            plain = cut_notes(data, partial(self._find_marks, document), leave_out_answers)
        if plain is not data:
            document = Document(plain)
        elif text is content:
            self.document = document
        document.prefills = read_path(self.request.path).prefills
        self.plain = document

    def find_cause(self, repeat: Repeat | None, newer: int = 0) -> Cause | None:
        """See `causes.find_cause`.

        The result for the request's own loop is shared by the note and the report.
        """
        if repeat is None or self.plain is None:
            return None
        if newer:
            return find_cause(self.plain, repeat, newer)
        if self._cause is None or self._cause[0] is not repeat:
            self._cause = repeat, find_cause(self.plain, repeat)
        return self._cause[1]

    def make_marks(self, guard: Guard, data: bytes) -> Marks:
        """The marks of notes for a guard's caller, in the request's conversation.

        Args:
            guard: a guard that steers.
            data: the body, used if it has not been parsed.

        Raises:
            NotCounted: it contains no conversation, or is unreadable.
        """
        return self._open_marks(
            self.document if self.document is not None else Document(data), guard
        )

    def frame_answer(self, outcome: Outcome, text: str) -> str:
        """Mark a text that answers in the model's place, so that it is recognized later.

        It stays unmarked if that is impossible.
        """
        data = self.shown
        if data is None or (self.plain is not None and self.plain.shortened):
            return text
        try:
            return frame_answer(text, self.make_marks(self.find_guard(outcome), bytes(data)))
        except NotCounted:
            return text

    def _open_marks(self, document: Document, guard: Guard | None = None) -> Marks:
        """The marks to recognize notes with or without a guard.

        Marks depend on the caller as identified by the head alone, because notes are removed before
        any policy reads the body. If a policy enforces, shadow policies do not influence what is
        removed.
        """
        guards = self.enforcing.active or self.shadow.active
        callers = [
            each.caller_in_head for each in ([guard, *guards] if guard is not None else guards)
        ]
        return Marks(self._key, list(dict.fromkeys(callers)), hash_first_words(document))

    def _find_marks(self, document: Document) -> Marks | None:
        """The marks of notes, for a body that may contain some; None if there are none."""
        group = self.enforcing if self.enforcing.active else self.shadow
        if not group.active:
            return None
        try:
            return self._open_marks(document)
        except NotCounted:
            return None
        except Exception as error:  # noqa: BLE001  # possible notes then count as content
            group.failures.append((group.active[0].plan.id, error))
            return None

    def read_shadow(self, withheld: str = "") -> None:
        """Let the shadow policies read the body.

        The stack is as deep as in `read_body`, so both fail for the same nesting.

        Args:
            withheld: why they may not inspect the body; empty if they may.
        """
        self.withheld = withheld
        if self.shadow.active:
            self.shadow.read(self)

    def find_tenant(self) -> str:
        """The caller as the first policy identifies it by the head; empty without guards."""
        for group in self.groups:
            for guard in group.active:
                return guard.caller
        return ""

    def decide(
        self, counts: Sequence[Answer] | None, shadow_counts: Sequence[Answer] | None = ()
    ) -> Decision:
        """Decide about a counted request; the arguments are as for `Guards.judge`."""
        trace = self.enforcing.judge(counts)
        if self.leaves_out_notes:
            for place, outcome in enumerate(trace):
                if outcome.action is Action.STEER and not self.gets_notes(outcome):
                    trace[place] = outcome.change_action(Action.WARN)
        watched: list[Outcome] = []
        if self.shadow.active:
            try:
                watched = self.shadow.judge(shadow_counts)
            except Exception as error:  # noqa: BLE001  # no error of a shadow policy may change the answer
                self.shadow.fail(error)
        return decide(trace, watched)

    def gets_notes(self, outcome: Outcome) -> bool:
        """Whether the conversation is in its detector's `steer_share`.

        The same for every replica, policy and request of a conversation.
        """
        guard = self.find_guard(outcome)
        if (
            not isinstance(guard, LoopGuard)
            or guard.detector.steer_share >= EVERYBODY
            or self.plain is None
        ):
            return True
        try:
            said = open_conversation(self.plain).read_first_words()
        except NotCounted:
            return True
        place = self._key.start(_SHARE, _SHARE_BYTES)
        place.update(
            f"{len(guard.caller_in_head)} {guard.caller_in_head}{said}".encode(
                "utf-8", "surrogatepass"
            )
        )
        return int.from_bytes(place.digest(), "big") % EVERYBODY < guard.detector.steer_share

    def find_guard(self, outcome: Outcome) -> Guard:
        """The enforcing guard of an outcome."""
        found = self.enforcing.find(outcome)
        if found is None:
            raise LookupError(f"{outcome.policy} has no guard {outcome.detector}")
        return found

    def give_up(self, reason: str) -> None:
        """Leave the request uncounted."""
        for group in self.groups:
            group.give_up(reason)

    def let_go(self) -> None:
        """Drop references at the stream's end, so that no garbage collection is needed."""
        for session in self.sessions:
            session.let_go()
        for budget in self.budgets:
            budget.let_go()
        rest, self._rest = self._rest, None
        if rest is not None:
            rest.let_go()

    def list_left_out(self) -> list[tuple[str, str, str]]:
        """(policy, detector, reason) of guards that matched but do not count this request."""
        return [*self.enforcing.left_out, *self.shadow.left_out]

    def list_uncounted(self) -> list[tuple[str, str]]:
        """Policies with a detector that does not count this request: (policy, reason), once."""
        left_out = self.list_left_out()
        return list(dict.fromkeys((policy, reason) for policy, _, reason in left_out))

    def list_compared_exactly(self) -> list[str]:
        """Policies that compared the body byte by byte, because their similarity does not apply."""
        found: list[str] = []
        for group in self.groups:
            for guard in group.active:
                if guard.compared_exactly and guard.plan.id not in found:
                    found.append(guard.plan.id)
        return found


def join_callers(trace: list[Outcome]) -> list[Outcome]:
    """The strictest outcome of each guard, over all callers of a request."""
    joined: dict[tuple[str, str], Outcome] = {}
    for outcome in trace:
        name = (outcome.policy, outcome.detector)
        known = joined.get(name)
        if known is None or outcome.strictness() > known.strictness():
            joined[name] = outcome
    return list(joined.values())


def group_by_policy(trace: list[Outcome]) -> list[Outcome]:
    """The strictest outcome of each policy. Its detectors are adjacent in the trace."""
    size = len(trace)
    # The usual case
    if size < 2 or (size == 2 and trace[0].policy != trace[1].policy):  # noqa: PLR2004
        return trace
    grouped = [trace[0]]
    for place in range(1, size):
        outcome, last = trace[place], grouped[-1]
        if outcome.policy != last.policy or outcome.mode != last.mode:
            grouped.append(outcome)
        elif (
            outcome.retry_after or outcome.action is not Action.ALLOW
        ) and outcome.strictness() > last.strictness():
            grouped[-1] = outcome
    return grouped
