"""A policy, compiled: everything that does not depend on the request is computed at load time.

A detector is one entry of the policy's loop_detection. What is compared (similarity), in which
window, and what is done (action) are three independent choices.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Final, NamedTuple

from extproc.budgets.guard import BudgetRules
from extproc.decision import COMPLETION, NOTED, Action, Outcome, RefusalForm, Repeat, Subject
from extproc.detectors import Similarity, make_similarity
from extproc.detectors.keys import SimilarityKeys
from extproc.detectors.loops import REPEAT, RESULT
from extproc.engine.budget_plan import BudgetPlan, PlannedRule
from extproc.engine.ramp import Ramp
from extproc.objects import INSPECT_BYTES, MAX_SECONDS, MAX_THRESHOLD, copy_text
from extproc.policy.bundle import EVERYBODY, Bypass, LoopDetection, Policy, Spec, is_below
from extproc.request.callers import compile_shown, find_hidden, find_names
from extproc.request.document import Document, NotCounted, NotJson, split_pointer
from extproc.request.fingerprint import MAX_MARKS, is_too_long
from extproc.request.hash_key import HashKey
from extproc.request.http import MAX_DESCRIPTOR, Descriptor, HttpRequest, compile_descriptors
from extproc.request.limit_keys import BODY, UNSUPPORTED_KEYS, FirstOf
from extproc.sessions.limits import SessionLimiter
from extproc.sessions.names import Rings, SessionNames
from extproc.sessions.session_limits import Session
from extproc.sessions.trees import AgentNames
from extproc.store.rules.back_to_back import BACK_TO_BACK, NAME, Begin
from extproc.store.rules.windows import Count, Hit

_NAMING: Final = {"keys", "agent_keys", "parent_keys"}
_ANY_SESSION: Final = Session()
_SIMILARITY_KEYS = set(SimilarityKeys.model_fields)

BYPASS = "bypass"
"""The reason for requests that a policy's `bypass` excludes."""

SHADOW_NAMESPACE = "shadow:"
"""Prefix of every key of a shadow policy."""

DELAY_PER_REQUEST_MS = 100
"""A throttled request is delayed by its count times this many milliseconds, as in Fairvisor."""

_ENDING = frozenset({Action.LAND, Action.REJECT})
"""Actions that end an agent's run."""

_BOUNDED = frozenset({"fixed", "sliding_log"})
"""Windows in which all requests of a loop must be."""

_NEVER: Final = (0, 0, 0)

_MILD = frozenset({Action.WARN, Action.STEER})
"""Actions that do not delay a request."""

DISPLAY_COUNT = 1_000
"""Minimum capacity of a `sliding_log`, in requests. Reports stay exact well past the threshold."""

PAUSE_SECONDS: Final = 2
"""The default window of `back_to_back`: the longest pause before the next request of a loop."""

BARE_REFUSED_FROM: Final = 256
"""The first request that `back_to_back` refuses if the body has neither tools nor a turn of the
assistant. One worker of a benchmark or a load test sends such requests, often 200 of them."""

_Descriptors = tuple[tuple[Descriptor, ...], tuple[tuple[Descriptor, list[str]], ...]]
"""Descriptors in the head, and those in the body with their pointers."""


class _BypassRule(NamedTuple):
    """Requests that are never counted; see `Bypass`."""

    header: str | None
    exact: str | None
    prefix: str | None
    methods: frozenset[str] | None


class Parts:
    """Objects that policies share.

    Thousands of policies are mostly alike, so equal objects exist once.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, object], Any] = {}

    def __len__(self) -> int:
        """The number of different objects."""
        return len(self._made)

    # Depends on the kind
    def _share(self, kind: str, keys: object, make: Callable[[], object]) -> Any:  # noqa: ANN401
        made = self._made.get((kind, keys))
        if made is None:
            made = self._made[kind, keys] = make()
        return made

    def find_similarity(self, loop: LoopDetection) -> Similarity:
        """The similarity of an entry, shared by all entries with equal keys."""
        keys = f"{loop.steers}{loop.model_dump_json(include=_SIMILARITY_KEYS)}"
        found: Similarity = self._share("similarity", keys, lambda: make_similarity(loop))
        return found

    def find_descriptors(self, limit_keys: Sequence[str | FirstOf]) -> _Descriptors:
        """The descriptors of these limit keys, with those in the body apart."""
        keys = tuple(limit_keys)
        found: _Descriptors = self._share("descriptors", keys, lambda: _compile_descriptors(keys))
        return found

    def find_agent_names(self, session: Session) -> AgentNames:
        """Finds the names of agents."""
        found: AgentNames = self._share(
            "agents", _spell_names(session), lambda: AgentNames(session)
        )
        return found

    def find_root_names(self, session: Session | None) -> SessionNames:
        """Finds the root session of agents, for a policy without session_limits."""
        named = session or _ANY_SESSION
        make = partial(_make_names, named, None, self.find_agent_names(named))
        found: SessionNames = self._share("roots", _spell_names(named), make)
        return found


def _compile_descriptors(limit_keys: Sequence[str | FirstOf]) -> _Descriptors:
    read = compile_descriptors([key for key in limit_keys if key not in UNSUPPORTED_KEYS])
    return (
        tuple(item for item in read if item.source != BODY),
        tuple((item, split_pointer(item.argument)) for item in read if item.source == BODY),
    )


def _spell_names(session: Session) -> str:
    """A text that is equal for sessions with the same keys."""
    return f"{session.has_own_keys}{session.model_dump_json(include=_NAMING)}"


def _compile_bypass(entry: Bypass) -> _BypassRule:
    methods = None if entry.methods is None else frozenset(entry.methods)
    return _BypassRule(entry.header, entry.pathExact, entry.pathPrefix, methods)


def _make_names(session: Session, rings: Rings | None, agents: AgentNames) -> SessionNames:
    """Finds a session's name for limits.

    The rings' object is reused if it looks in the same places.
    """
    keys = session.list_budget_keys()
    if rings is not None and keys == session.keys and not agents.same:
        return rings
    return SessionNames(keys, usual=not session.has_own_keys, same=agents.same)


@cache
def _make_refusal_form(status: int | str, *, completes: bool) -> RefusalForm:
    """The form of refusals, shared by all detectors with the same form."""
    return RefusalForm(status if isinstance(status, int) else None, completes)


class Detector:
    """One entry of loop_detection, compiled.

    Attributes:
        stands_in: it acts only while no access log entries arrive.
        spans: it counts requests that follow each other back to back, as intervals.
        mildest: the action for a weak loop that is still below its threshold.
        patient: the strictest action that does not end a run.
    """

    def __init__(  # noqa: PLR0913  # a policy's settings and its plan
        self,
        policy: str,
        name: str,
        loop: LoopDetection,
        similarity: Similarity,
        *,
        shadow: bool,
        namespace: str,
    ) -> None:
        """`loop` must be enabled. Every key starts with the namespace."""
        self.policy = policy
        self.name = name
        self.shadow = shadow
        self.mode = "shadow" if shadow else "enforce"
        self.similarity = similarity
        self.similarity_name = loop.similarity
        self.looks = self.similarity.looks
        self.stateless = self.similarity.stateless
        self.needs_body = loop.body == "include"
        self.max_inspect_bytes = loop.max_inspect_bytes
        steps = loop.list_steps(self.similarity.default_threshold)
        self.threshold = (
            steps[0].threshold_identical_requests or self.similarity.default_threshold or 0
        )
        self.actions = (
            Action(loop.action),
            *[Action(name) for name, _ in loop.escalate.list_steps()],
        )
        self.noted = self.actions[0] if self.actions[0] in _MILD else Action.WARN
        self.mildest = self.actions[0] if len(self.actions) > 1 else self.noted
        self.patient = next(
            (action for action in reversed(self.actions) if action not in _ENDING), Action.WARN
        )
        self.steers = not NOTED.isdisjoint(self.actions)
        self.refuses_later = self.steers and self.actions[-1] is Action.REJECT
        self.steer_note = loop.steer_note or ""
        self.steer_share = loop.steer_share if Action.STEER in self.actions else EVERYBODY
        self._later = tuple(
            [
                (step.threshold_identical_requests or self.threshold) - self.threshold
                for step in steps
            ]
        )
        self._last = self._later[-1]
        later = list(zip(self.actions, self._later, strict=True))
        self._ends = [step for step in later if step[0] in _ENDING]
        self._noted_from = next(
            (number for action, number in later if action in NOTED), MAX_THRESHOLD
        )
        self.spans = loop.window_type == BACK_TO_BACK
        self.stands_in = loop.only_without_entries
        self.window_seconds = loop.window_seconds or (PAUSE_SECONDS if self.spans else 0)
        # A stateless detector stores only its cooldown, which has a start and an end.
        self.window_type = "fixed" if self.stateless else loop.window_type
        self.max_delay_ms = loop.max_delay_ms
        self.refusal = _make_refusal_form(
            loop.reject_status, completes=loop.refuse_as == COMPLETION
        )
        self._key = f"{namespace}loop:{policy}:{name}:{self.window_type}:"
        self._window_ms = self.window_seconds * 1000
        self._cooldown_ms = loop.cooldown_seconds * 1000
        self.needs_no_caller = self.stateless and not loop.cooldown_seconds
        self.counts_failed = not loop.needs_entries
        self.counts_refused = loop.count_refused
        # Only refused requests can be excluded from the count; after any other action, the request
        # continues.
        self._count_refused = loop.count_refused or self.actions[-1] is not Action.REJECT

    @property
    def lifetime_seconds(self) -> int:
        """How long a request affects the store."""
        return max(self._window_ms, self._cooldown_ms) // 1000

    def list_thresholds(self, subject: Subject) -> list[int]:
        """The threshold of each action for this subject, lowest first."""
        first = self._find_threshold(subject)
        return [first + later for later in self._later]

    def _find_threshold(self, subject: Subject) -> int:
        """The lowest threshold: the subject's own, or the detector's."""
        return self.threshold if subject is self.similarity else subject.threshold or self.threshold

    def make_hit(
        self, scope: str, tenant: str, digest: str, subject: Subject, repeat: Repeat | None = None
    ) -> Hit | None:
        """The store's question for this request, if any. `digest` is fingerprint and check."""
        key = f"{self._key}{scope}:{tenant}:{digest}"
        if not self.stateless:
            # The store decides when the strictest action applies; only that one refuses and starts
            # the cooldown.
            threshold = self._find_threshold(subject) + self._last
            count_refused, count_to = self._count_refused, max(threshold, DISPLAY_COUNT)
            return Hit(
                key,
                self.window_type,
                self._window_ms,
                threshold,
                self._cooldown_ms,
                count_refused,
                count_to,
            )
        if not self._cooldown_ms or repeat is None:
            return None
        # The request itself shows its loop; the store only has the cooldown. A loop that reaches
        # the strictest action starts it, others only look it up.
        threshold = 1 if repeat.rank == len(self._later) + 1 else MAX_THRESHOLD
        return Hit(key, self.window_type, 0, threshold, self._cooldown_ms, False, threshold)

    def make_begin(  # noqa: PLR0913  # as `make_hit`
        self, scope: str, tenant: str, digest: str, subject: Subject, call: bytes, *, bare: bool
    ) -> Begin:
        """As `make_hit`, for a detector that `spans`.

        `call` is the request's name; `bare` is as in `LoopGuard`.
        """
        threshold = self._find_threshold(subject) + self._last
        if bare and self.actions[-1] is Action.REJECT:
            threshold = max(threshold, BARE_REFUSED_FROM)
        key = f"{self._key}{scope}:{tenant}:{digest}"
        return Begin(key, call[:NAME], self._window_ms, threshold, self._cooldown_ms)

    def _find_retry_after(self, count: Count, threshold: int, repeat: Repeat | None) -> int | None:
        """Seconds until a repetition would pass, if none comes before; None for never."""
        if repeat is not None and repeat.looping:
            return None  # its history will not change
        waits = count.cooldown_ms
        if self.stateless:
            return max(1, -(-waits // 1000))
        counted = count.count if self._count_refused else count.count - 1
        if counted + 1 >= threshold:
            over = (
                self._window_ms - count.span_ms if self.window_type == "fixed" else self._window_ms
            )
            waits = max(waits, over)
        return max(1, -(-waits // 1000))

    def foresee(self, outcome: Outcome) -> tuple[int, Action, int]:
        """A loop's notes so far, the next action that ends the run, and repetitions until then.

        The repetitions are 0 if unknown.
        """
        repeat = outcome.repeat
        if repeat is None:
            first = self._find_threshold(outcome.subject)
        elif repeat.held or repeat.rule not in {REPEAT, RESULT}:
            return 0, Action.REJECT, 0
        else:
            first = repeat.threshold - self._later[repeat.step]
        repeated = outcome.count - first
        for action, later in self._ends:
            if action is Action.LAND and repeat is not None and repeat.forced:
                continue
            if later > repeated:
                return max(repeated - self._noted_from, 0), action, later - repeated
        return max(repeated - self._noted_from, 0), Action.REJECT, 0

    def foresee_refusal(
        self, outcome: Outcome, document: Document | None, *, bare: bool
    ) -> tuple[int, int, int]:
        """When a loop that continues is refused.

        Returns:
            the count at which it is, in turns or requests; 0 for never;
            the number of turns or requests until then;
            the seconds within which requests must reach the count; 0 for turns.
        """
        repeat = outcome.repeat
        if self.actions[-1] is not Action.REJECT or outcome.action is Action.REJECT:
            return _NEVER
        within = 0
        if repeat is None:
            at = self._find_threshold(outcome.subject) + self._last
            at = max(at, BARE_REFUSED_FROM) if bare else at
            left, within = at - outcome.count, self.window_seconds
            if self.window_type not in _BOUNDED:
                within = at * (MAX_SECONDS if self.spans else within)
        elif document is None:
            return _NEVER
        else:
            at, left = self.similarity.foresee(
                document, repeat, self._last - self._later[repeat.step]
            )
        return (at, left, within) if left > 0 else _NEVER

    def find_action(self, repeat: Repeat) -> Action:
        """The action for a loop that a request shows."""
        if not repeat.held:
            action = self.actions[repeat.step]
            if action is Action.LAND and repeat.forced:
                return self.actions[repeat.step - 1] if repeat.step else self.noted
            return action
        return self.noted if repeat.notes_only else self.mildest

    def _find_due(self, repeat: Repeat | None) -> Action:
        return self.find_action(repeat) if repeat is not None and repeat.looping else Action.ALLOW

    def find_earlier_actions(self, outcome: Outcome) -> tuple[Action, Action, Action]:
        """The actions for this request and the two before it, newest first."""
        repeat = outcome.repeat
        if repeat is not None and repeat.before is not None:
            return (
                self._find_due(repeat),
                self._find_due(repeat.before.last),
                self._find_due(repeat.before.earlier),
            )
        first = (
            self._find_threshold(outcome.subject)
            if repeat is None
            else repeat.threshold - self._later[repeat.step]
        )
        thresholds, count = [first + later for later in self._later], outcome.count
        actions = (Action.ALLOW, *self.actions)
        found = [
            actions[bisect_right(thresholds, number)] for number in (count, count - 1, count - 2)
        ]
        return found[0], found[1], found[2]

    def judge(
        self,
        fingerprint: str,
        tenant: str,
        count: Count,
        subject: Subject,
        repeat: Repeat | None = None,
    ) -> Outcome:
        """The outcome of a request that has been counted."""
        number, action = count.count, Action.ALLOW
        if self.stateless:
            number = repeat.count if repeat is not None else 0
        if count.looping:
            action = self.actions[-1]
        elif self.stateless:
            action = self._find_due(repeat)
        elif len(self.actions) > 1 or self.spans:
            held = bisect_right(self.list_thresholds(subject), number)
            action = self.actions[held - 1] if held else Action.ALLOW
        return Outcome(
            self.policy,
            self.mode,
            action,
            fingerprint,
            tenant,
            number,
            count.span_ms,
            self.window_seconds,
            self._find_delay(number) if action is Action.THROTTLE else 0,
            self._find_retry_after(count, self._find_threshold(subject) + self._last, repeat),
            self.refusal,
            self.name,
            subject,
            repeat,
        )

    def _find_delay(self, number: int) -> int:
        return min(number * DELAY_PER_REQUEST_MS, self.max_delay_ms)

    def spare_bare(self, outcome: Outcome, count: Count) -> Outcome:
        """The outcome for a body with neither tools nor a turn of the assistant.

        It may be one of many samples, so it is delayed or gets a warning, and is refused only from
        BARE_REFUSED_FROM.
        """
        due = outcome.action
        if due in (Action.ALLOW, Action.WARN, Action.THROTTLE) or (
            due is Action.REJECT and count.looping
        ):
            return outcome
        if Action.THROTTLE not in self.actions or due is Action.STEER:
            return outcome.change_action(Action.WARN)
        return outcome.change_action(Action.THROTTLE, self._find_delay(outcome.count))

    def be_patient(self, outcome: Outcome, repeat: Repeat) -> Outcome:
        """The outcome for a loop that is not refused because it is part of an incident."""
        action = self.patient if outcome.action in _ENDING else outcome.action
        return Outcome(
            outcome.policy,
            outcome.mode,
            action,
            outcome.fingerprint,
            outcome.tenant,
            outcome.count,
            outcome.span_ms,
            outcome.window_seconds,
            self._find_delay(outcome.count) if action is Action.THROTTLE else 0,
            outcome.retry_after,
            outcome.refusal,
            outcome.detector,
            outcome.subject,
            repeat._replace(widespread=True),
            outcome.reason,
        )


class Plan:
    """A policy with its guards.

    Attributes:
        detectors: those that act now; see `note_entries`.
        guards_strangers: a detector counts nothing, and so acts on requests without a caller, too.
        callers: names callers.
        merges_strangers: all requests without a caller count as one caller's.
        shown: descriptors with possibly several values in a request; see `callers`.
        labels: values shown with the caller's hash, without effect on counts.
        budget: its budgets; None if it has none.
        aliases: by the name of a caller or of one of its values.
        ramp: chooses the callers that the policy acts on; None if it acts on all or none.
        watching: the same policy in shadow mode, for the other callers.
        leaves_out_notes: a detector gives notes only to a percentage of conversations.
        paired: its outcomes are compared with another policy's.
        counts_failed: requests stay counted if their upstream fails.
        reserves: something is given back if the request is not forwarded.
        spans: a detector `spans`.
        reads_ends: a detector reads an excerpt of a body that is too long to inspect.
        root_names: finds the session at the root of a request's agents.
    """

    def __init__(self, policy: Policy, parts: Parts, *, shadow: bool) -> None:
        """Keeps no reference to the policy's own objects, which take several times the memory."""
        spec = policy.spec
        self.id = copy_text(policy.id)
        self.shadow = shadow
        self.paired = False
        self.mode = "shadow" if shadow else "enforce"
        # With keep_counts, an enforcing policy uses the keys of its shadow mode, and so continues
        # its counts.
        namespace = SHADOW_NAMESPACE if shadow or spec.keep_counts else ""
        self.detectors = self._every = tuple(
            Detector(
                self.id, name, loop, parts.find_similarity(loop), shadow=shadow, namespace=namespace
            )
            for name, loop in spec.detectors()
        )
        self.spans = any(detector.spans for detector in self._every)
        self.leaves_out_notes = not shadow and any(
            detector.steer_share < EVERYBODY for detector in self.detectors
        )
        self.counts_failed = all(detector.counts_failed for detector in self.detectors)
        self._bypass = tuple(_compile_bypass(entry) for entry in spec.bypass)
        self._missing = spec.missing_descriptor
        self.refuses_uncountable = spec.uncountable == "reject"
        self._descriptors, self._body_descriptors = parts.find_descriptors(spec.all_limit_keys())
        self.shown = compile_shown(self._descriptors)
        self.tells_callers_apart = bool(self._descriptors or self._body_descriptors)
        missing = self._missing if self.tells_callers_apart else ""
        self.merges_strangers = missing == "share"
        needs_no_caller = any(detector.needs_no_caller for detector in self.detectors)
        self.guards_strangers = (
            needs_no_caller and missing == "require_one" and not self.refuses_uncountable
        )
        self.reads_body = bool(self._body_descriptors)
        self.callers = find_names(
            (*self._descriptors, *[descriptor for descriptor, _ in self._body_descriptors])
        )
        self.labels, _ = parts.find_descriptors(spec.labels)
        self.aliases: dict[str, str] = {}
        self.rings: Rings | None = None
        if any(detector.similarity.remembers for detector in self.detectors):
            self.rings = Rings(self.id, spec.session, namespace=namespace)
        self.limiter = self._make_limiter(spec, parts, namespace)
        self.root_names = (
            self.limiter.names if self.limiter is not None else parts.find_root_names(spec.session)
        )
        self.budget = self._make_budget(spec, parts, namespace) if spec.has_budgets() else None
        self.reserves = self.limiter is not None or self.budget is not None or self.spans
        self.needs_body = (
            self.reads_body
            or self.limiter is not None
            or any(detector.needs_body for detector in self.detectors)
        )
        looking = [
            detector.max_inspect_bytes
            for detector in self.detectors
            if self.reads_body or detector.looks or detector.spans or detector.refusal.completes
        ]
        steering = [
            detector.max_inspect_bytes
            for detector in self.detectors
            if detector.steers and not shadow
        ]
        if self.limiter is not None:
            looking.append(self.limiter.max_inspect_bytes)
            if (
                self.limiter.steers or self.limiter.narrows or self.limiter.asks_usage
            ) and not shadow:
                steering.append(self.limiter.max_inspect_bytes)
        if self.budget is not None:
            self._read_for_budget(self.budget, looking, steering)
        self.inspects = max(looking, default=0)
        self.reads_ends = any(detector.similarity.reads_ends for detector in self.detectors)
        self.steers = max(steering, default=0)
        self.ramp: Ramp | None = None
        self.watching: Plan | None = None
        if not shadow and spec.enforce_percent is not None and spec.enforce_percent < EVERYBODY:
            chosen_by, _ = parts.find_descriptors(spec.list_ramp_keys())
            self.ramp = Ramp(spec.enforce_percent, chosen_by, copy_text(spec.ramp_seed or self.id))
            self.watching = Plan(policy, parts, shadow=True)

    def note_entries(self, *, arrive: bool) -> None:
        """Let detectors with `only_without_entries` act only while no access log entries arrive."""
        self.detectors = tuple([each for each in self._every if not (arrive and each.stands_in)])
        if self.watching is not None:
            self.watching.note_entries(arrive=arrive)

    def name_callers(self, aliases: dict[str, str]) -> None:
        """Set the aliases, which may come from other policies."""
        self.aliases = aliases
        if self.watching is not None:
            self.watching.aliases = aliases

    def _make_budget(self, spec: Spec, parts: Parts, namespace: str) -> BudgetPlan:
        rules = spec.list_budget_rules()
        descriptors = [parts.find_descriptors(rule.limit_keys) for rule in rules]
        first = next((rule.limit_keys[:1] for rule in spec.rules if rule.limit_keys), None)
        if spec.has_breaker() and first is not None:
            descriptors.append(parts.find_descriptors(first))
        own = spec.rules, spec.fallback_limit, spec.circuit_breaker
        guard = BudgetRules(self.id, *own, shadow=self.shadow, namespace=namespace)
        return BudgetPlan(guard, spec, descriptors)

    def _read_for_budget(self, budget: BudgetPlan, looking: list[int], steering: list[int]) -> None:
        """Record what its budgets need of the body."""
        if budget.needs_body:
            self.needs_body = True
            looking.append(INSPECT_BYTES)
        if (budget.guard.steers or budget.guard.asks_usage) and not self.shadow:
            looking.append(INSPECT_BYTES)
            steering.append(INSPECT_BYTES)

    def _make_limiter(self, spec: Spec, parts: Parts, namespace: str) -> SessionLimiter | None:
        if spec.session_limits is None:
            return None
        session, most = spec.session or Session(), spec.find_session_inspect_bytes()
        agents = parts.find_agent_names(session)
        names = _make_names(session, self.rings if spec.session is not None else None, agents)
        limits = spec.session_limits, spec.unnamed_limits
        return SessionLimiter(
            self.id, *limits, session, names, agents, most, shadow=self.shadow, namespace=namespace
        )

    @property
    def chooses_status(self) -> bool:
        """Whether the status of refusals depends on the client, and on whether waiting helps."""
        forms = [detector.refusal for detector in self.detectors]
        forms += [self.limiter.refusal] if self.limiter is not None else []
        forms += (
            [rule.refusal for rule in self.budget.guard.rules] if self.budget is not None else []
        )
        return any(form.status is None for form in forms)

    @property
    def lifetime_seconds(self) -> int:
        """The longest time for which a request affects the store."""
        lifetimes = [detector.lifetime_seconds for detector in self.detectors]
        lifetimes += [self.rings.idle_seconds] if self.rings is not None else []
        lifetimes += [self.limiter.lifetime_seconds] if self.limiter is not None else []
        lifetimes += [self.budget.guard.lifetime_seconds] if self.budget is not None else []
        return max(lifetimes)

    def list_names(self) -> list[str]:
        """The names of descriptors that identify callers, and of each `first_of`'s alternatives."""
        names = [item.name for item in self._descriptors] + [
            item.name for item, _ in self._body_descriptors
        ]
        return list(dict.fromkeys([*names, *[form.name for form in self.callers.forms]]))

    def read_descriptors(
        self, request: HttpRequest, missing: list[tuple[str, str]]
    ) -> list[tuple[str, str]]:
        """The caller's descriptors by name, except those in the body.

        Args:
            request: the request to read.
            missing: collects (policy, limit key) of missing descriptors.

        Raises:
            NotCounted: the policy does not count such a request.
        """
        self.check_bypass(request)
        if len(request.target) > MAX_MARKS and is_too_long(request.target, request.query):
            raise NotCounted("target_too_long")
        values = []
        for descriptor in self._descriptors:
            value = descriptor.read(request, descriptor.argument)
            if len(value) > MAX_DESCRIPTOR:
                raise NotCounted("descriptor_too_long")
            if value:
                values.append((descriptor.name, value))
            else:
                missing.append((self.id, descriptor.key))
        if len(values) < len(self._descriptors):
            self._check_missing(values, may_follow=self.reads_body)
        return values

    def check_bypass(self, request: HttpRequest) -> None:
        """Raise NotCounted for a request that the policy never counts."""
        if self._bypass and any(_bypasses(entry, request) for entry in self._bypass):
            raise NotCounted(BYPASS)

    def list_values(self, request: HttpRequest) -> list[tuple[str, str]]:
        """The caller's descriptors in the head, by name; missing ones are skipped."""
        values = []
        for descriptor in self._descriptors:
            value = descriptor.read(request, descriptor.argument)
            if value and len(value) <= MAX_DESCRIPTOR:
                values.append((descriptor.name, value))
        return values

    def tells_apart_as(self, planned: PlannedRule, values: Sequence[tuple[str, str]]) -> bool:
        """Whether a rule has the same limit keys as the policy, and the request has all of them."""
        return (
            planned.head is self._descriptors
            and len(values) == len(planned.head)
            and len(self._body_descriptors) == 0
        )

    @property
    def judges_requests(self) -> bool:
        """Whether it has guards besides its budgets."""
        return self.limiter is not None or len(self.detectors) > 0

    def read_labels(self, request: HttpRequest) -> list[tuple[str, str]]:
        """The values of labels, by name."""
        values = []
        for label in self.labels:
            try:
                value = label.read(request, label.argument)
            except NotCounted:  # not recorded
                continue
            if value:
                values.append((label.name, value))
        return values

    def reads_like(self, other: Plan, values: Sequence[tuple[str, str]]) -> bool:
        """Whether it reads the same descriptors as another plan; canaries usually do."""
        alike = self._descriptors is other._descriptors and not self._bypass and not other._bypass
        return alike and len(values) == len(self._descriptors)

    def is_told_apart_by(self, key: str) -> bool:
        """Whether this is one of the policy's limit keys outside the body."""
        return any(descriptor.key == key for descriptor in self._descriptors)

    def list_session_keys(self, *, limited: bool) -> list[str]:
        """The limit keys of a session's name; `limited`: only those for session limits."""
        if self.limiter is not None:
            keys = self.limiter.names.list_keys()
        else:
            keys = [key for key in self.root_names.list_keys() if key.source != BODY]
        if self.rings is not None and (self.limiter is None or not limited):
            keys = [*keys, *self.rings.list_keys()]
        return [key.key for key in keys]

    def list_reads(self) -> list[tuple[str, str]]:
        """What the policy reads from the head besides its selector: parts of limit keys."""
        keys = [*self._descriptors, *(self.rings.list_keys() if self.rings is not None else ())]
        keys += (
            [*self.limiter.names.list_keys(), *self.limiter.agent_names.list_keys()]
            if self.limiter is not None
            else []
        )
        keys += self.ramp.descriptors if self.ramp is not None else ()
        keys += self.budget.list_reads() if self.budget is not None else []
        bypassing = [("header", entry.header) for entry in self._bypass if entry.header is not None]
        read = [part.key.partition(":") for key in keys for part in key.list_sources()]
        return list(
            dict.fromkeys([*[(source, argument) for source, _, argument in read], *bypassing])
        )

    def read_body_descriptors(
        self,
        document: Document,
        values: list[tuple[str, str]],
        missing: list[tuple[str, str]],
        key: HashKey,
    ) -> list[tuple[str, str]]:
        """All of the caller's descriptors, including those in the body.

        Args:
            document: the body.
            values: the result of `read_descriptors`.
            missing: as for `read_descriptors`.
            key: for hashes of secrets.

        Raises:
            NotCounted: as in `read_descriptors`.
        """
        try:
            value = document.value()
        except NotJson:
            value = None
        found = [
            (each, find_hidden(value, each, pointer, key))
            for each, pointer in self._body_descriptors
        ]
        if any(len(text) > MAX_DESCRIPTOR for _, text in found):
            raise NotCounted("descriptor_too_long")
        values = [*values, *((descriptor.name, text) for descriptor, text in found if text)]
        lacking = [(self.id, descriptor.key) for descriptor, text in found if not text]
        if lacking:
            # Several detectors read the same body
            missing += [entry for entry in lacking if entry not in missing]
            self._check_missing(values, may_follow=False)
        return values

    def _check_missing(self, values: list[tuple[str, str]], *, may_follow: bool) -> None:
        """Raise NotCounted if too many descriptors are missing.

        `may_follow`: the body may add some.
        """
        required = self._missing == "require_one" and not self.guards_strangers
        if self._missing == "skip" or (required and not values and not may_follow):
            raise NotCounted("missing_descriptor")


def _bypasses(entry: _BypassRule, request: HttpRequest) -> bool:
    """Whether a request matches all keys of a `bypass` entry; one matching path is enough."""
    if entry.header is not None and entry.header not in request.headers:
        return False
    if entry.methods is not None and request.method not in entry.methods:
        return False
    if entry.exact is None and entry.prefix is None:
        return True
    return request.path == entry.exact or (
        entry.prefix is not None and is_below(request.path, entry.prefix)
    )
