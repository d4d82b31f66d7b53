"""The decision about one request, made from the outcomes of all detectors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from typing import Final, NamedTuple, Protocol


class Action(str, Enum):
    """What is done about a request, mildest first."""

    ALLOW = "allow"
    WARN = "warn"
    STEER = "steer"
    THROTTLE = "throttle"
    LAND = "land"
    REJECT = "reject"


SEVERITY = {action: rank for rank, action in enumerate(Action)}

NOTED: Final = frozenset({Action.STEER, Action.LAND})
"""Actions that put a note for the model into the request."""

DONE: Final = {
    Action.WARN: "warned",
    Action.STEER: "steered",
    Action.THROTTLE: "throttled",
    Action.LAND: "landed",
    Action.REJECT: "refused",
}
"""The past participle of each action, for reports."""

_ACTING: Final = frozenset(Action) - {Action.ALLOW}


class Reason(str, Enum):
    """Why a request was acted on, as in `X-Fairvisor-Reason` and in the dynamic metadata."""

    LOOP_DETECTED = "loop_detected"
    STORE_UNAVAILABLE = "store_unavailable"
    UNCOUNTABLE = "uncountable"
    KILL_SWITCH = "kill_switch"
    BLOCKED = "blocked"
    SESSION_LIMIT_EXCEEDED = "session_limit_exceeded"
    BUDGET_EXCEEDED = "budget_exceeded"
    TOKEN_BUCKET_EXCEEDED = "token_bucket_exceeded"  # noqa: S105  # no password
    TPM_EXCEEDED = "tpm_exceeded"
    TPD_EXCEEDED = "tpd_exceeded"
    PROMPT_TOKENS_EXCEEDED = "prompt_tokens_exceeded"
    MAX_TOKENS_PER_REQUEST_EXCEEDED = "max_tokens_per_request_exceeded"
    CIRCUIT_BREAKER_OPEN = "circuit_breaker_open"


UNREADABLE: Final = "unreadable"
"""Why a request is not counted: an error in Loopguard while it read the body."""

_SPEAKS: Final = {Reason.LOOP_DETECTED: 2, Reason.SESSION_LIMIT_EXCEEDED: 1}
"""Which reason wins between equal actions; the highest does."""

MISSING: Final = "missing_descriptor"
"""Why a request is not counted: nothing identifies its caller."""

CHOSEN_BY_CLIENTS: dict[str, tuple[int, str]] = {
    "responses_websocket": (426, "it opens a WebSocket for calls that Loopguard could not see"),
    "grpc": (415, "it claims to be gRPC"),
    "upgrade": (415, "it requests an upgrade"),
    "connect": (415, "it requests a tunnel"),
    "content_encoding": (415, "its content-encoding is unknown or wrong"),
    "body_truncated": (413, "its body is longer than the buffer limit"),
    "inspect_limit": (413, "its body is longer than the inspection limit"),
    "inspect_budget": (429, "its caller has used up its time for inspecting bodies"),
    "not_json": (400, "its body is not JSON"),
    UNREADABLE: (400, "its body cannot be read"),
    "no_messages": (400, "there is no conversation in its body"),
    "no_history": (400, "the history of its conversation is not in its body"),
    "batch": (400, "its body holds several requests"),
    MISSING: (400, "it does not identify its caller"),
    "unnamed": (400, "it does not name its session"),
    "descriptor_too_long": (400, "a value that identifies its caller is too long"),
    "target_too_long": (400, "its path and query are too long"),
}
"""Reasons not to count a request that a client can cause: status and text of the refusal."""


STRONG: Final = "strong"
WEAK: Final = "weak"
"""Strength of the evidence: stuck agents repeat errors and long results; legitimate work repeats
short results, long ones in which time moves, and talk."""


class ToolFailure(NamedTuple):
    """A tool's name and a digest of its failing result."""

    tool: str
    digest: str


class EarlierLoops(NamedTuple):
    """The loops in earlier states of a history.

    Attributes:
        last: the loop without the newest turn, or None.
        earlier: the loop without the two newest turns; None also if `last` was not looked for.
        compared: the turn that `last` repeats, as for a fingerprint.
    """

    last: Repeat | None
    earlier: Repeat | None
    compared: bytes


class Repeat(NamedTuple):
    """A loop, or the beginning of one, in a conversation's own history.

    Attributes:
        tools: the tool, or the tools of a cycle in the order in which they are called.
        count: number of equal calls, or of rounds of the cycle.
        calls: number of calls looked at.
        threshold: the count at which it is a loop.
        results: whether the results were compared and are equal, too.
        reason: the operator's words about it; empty if there are none.
        rule: which of the similarity's rules applies, if it has several.
        step: index of the detector's threshold that applies; the lowest is 0.
        strength: STRONG or WEAK; empty if unknown.
        held: whether it is weak and has not repeated often enough for more than the mildest action.
        notes_only: whether it gets at most a note or a warning, whatever actions the policy names.
        widespread: whether a tool fails in this way for many sessions.
        forced: whether the request forces a tool or a schema, so that no other answer is possible.
        before: the loops in earlier states of the history; None if these were not examined.
    """

    tools: tuple[str, ...]
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not called
    calls: int
    threshold: int
    results: bool
    reason: str = ""
    rule: str = ""
    step: int = 0
    strength: str = ""
    held: bool = False
    notes_only: bool = False
    widespread: bool = False
    forced: bool = False
    before: EarlierLoops | None = None

    @property
    def looping(self) -> bool:
        """Whether the count has reached the threshold."""
        return self.count >= self.threshold

    @property
    def rank(self) -> int:
        """How strictly it is acted on: 0 not at all, 1 if held, else 2 plus the step."""
        if not self.looping:
            return 0
        return 1 if self.held else self.step + 2


class Advice(NamedTuple):
    """What a model is told about a loop.

    Attributes:
        what: what repeated, and how often; begins a sentence.
        reason: the operator's words about it; empty if there are none.
        instead: what to do, in whole sentences.
        about: the heading.
        harmless: no refusal follows.
    """

    what: str
    reason: str
    instead: str
    about: str = "Loop detected"
    harmless: bool = False


class Framed(NamedTuple):
    """A refusal in the format of the request's protocol.

    Attributes:
        status: HTTP status.
        content_type: content type of the body.
        body: the whole body.
        headers: further headers that the protocol requires.
    """

    status: int
    content_type: str
    body: bytes
    headers: Sequence[tuple[str, str]] = ()


class Subject(Protocol):
    """What was compared: the detector's similarity, or its finding in this request.

    It writes the messages.
    """

    @property
    def threshold(self) -> int | None:
        """Overrides the detector's threshold unless None."""
        ...

    @property
    def tools(self) -> tuple[str, ...]:
        """The tools that the request calls, if the detector looks at tools."""
        ...

    def write_message(self, outcome: Outcome, method: str, path: str) -> str:
        """What repeated, how often, and what to do instead, in words that a model can act on."""
        ...

    def advise(self, outcome: Outcome, method: str, path: str) -> Advice:
        """The content of `write_message`, for the note in a request that is let through."""
        ...

    def frame(self, message: str, accept: str) -> Framed | None:
        """The refusal in the protocol of the request; None for the default format of its API.

        Args:
            message: from `write_message`.
            accept: the request's `accept` header.
        """
        ...


COMPLETION: Final = "completion"
"""Value of `refuse_as`: the refusal is an answer of the API's model."""


class RefusalForm(NamedTuple):
    """How a detector refuses: its status (None: depends on the client), or as the API's model."""

    status: int | None
    completes: bool = False


class Outcome:
    """The result of one detector of a policy for one request; immutable.

    Attributes:
        mode: `enforce` or `shadow`.
        action: ALLOW unless the policy detected something.
        fingerprint: 8 hex digits.
        tenant: 16 hex digits.
        count: identical requests, including this one.
        span_ms: time since the first of these, in milliseconds.
        window_seconds: the policy's window.
        delay_ms: how long to hold the request; 0 unless throttled.
        retry_after: seconds until a retry makes sense; None if unknown.
        detector: the name of the loop_detection entry.
        subject: what was compared; writes the messages.
        repeat: the finding in the request's own history; None for detectors that count requests.
    """

    def __init__(  # noqa: PLR0913  # a record
        self,
        policy: str,
        mode: str,
        action: Action,
        fingerprint: str,
        tenant: str,
        count: int,
        span_ms: int,
        window_seconds: int,
        delay_ms: int,
        retry_after: int | None,
        refusal: RefusalForm,
        detector: str,
        subject: Subject,
        repeat: Repeat | None = None,
        reason: Reason | None = None,
    ) -> None:
        self.reason = reason or Reason.LOOP_DETECTED
        self.policy = policy
        self.mode = mode
        self.action = action
        self.fingerprint = fingerprint
        self.tenant = tenant
        self.count = count
        self.span_ms = span_ms
        self.window_seconds = window_seconds
        self.delay_ms = delay_ms
        self.retry_after = retry_after
        self.refusal = refusal
        self.detector = detector
        self.subject = subject
        self.repeat = repeat

    @property
    def strength(self) -> str:
        """The strength of the evidence, as in `Repeat`; empty without one."""
        return self.repeat.strength if self.repeat is not None else ""

    def list_tools(self) -> list[str]:
        """The tools that are called repeatedly, each once; empty if no tool calls repeat."""
        if self.repeat is not None:
            return list(dict.fromkeys(self.repeat.tools))
        tool = getattr(self.subject, "tool", "")  # of a call over HTTP
        return [tool] if tool else []

    def strictness(self) -> tuple[int, int, int]:
        """The sort key of outcomes: reject > land > throttle > steer > warn > allow.

        Between equal actions, a loop precedes a session, and a session a budget; then the longest
        delay or Retry-After wins.
        """
        return (
            SEVERITY[self.action],
            _SPEAKS.get(self.reason, 0),
            self.delay_ms or self.retry_after or 0,
        )

    def change_action(self, action: Action, delay_ms: int = 0) -> Outcome:
        """A copy with another action and delay."""
        return Outcome(
            self.policy,
            self.mode,
            action,
            self.fingerprint,
            self.tenant,
            self.count,
            self.span_ms,
            self.window_seconds,
            delay_ms,
            self.retry_after,
            self.refusal,
            self.detector,
            self.subject,
            self.repeat,
            self.reason,
        )


class Decision:
    """What all policies together decide about one request.

    Attributes:
        lead: the strictest outcome of the enforcing policies, other than ALLOW; None lets the
            request through untouched.
        warning: whether a policy with action warn fired.
        shadow: the strictest outcome of the shadow policies; never has an effect.
        steer: the outcome that the note for the model is about; None for none.
        trace: every policy's outcome, in bundle order, enforcing ones first.
    """

    def __init__(
        self,
        lead: Outcome | None,
        shadow: Outcome | None,
        trace: list[Outcome],
        *,
        warning: bool,
        steer: Outcome | None = None,
    ) -> None:
        self.lead = lead
        self.shadow = shadow
        self.trace = trace
        self.warning = warning
        self.steer = steer

    @property
    def action(self) -> Action:
        """What is done about the request."""
        return self.lead.action if self.lead is not None else Action.ALLOW

    def refuse_instead(self, refused: Outcome) -> Decision:
        """A copy with a refusal in place of one of its outcomes."""
        place = (refused.policy, refused.mode, refused.detector)
        trace = [
            refused if (each.policy, each.mode, each.detector) == place else each
            for each in self.trace
        ]
        return Decision(refused, self.shadow, trace, warning=self.warning, steer=self.steer)

    def let_pass(self) -> Decision:
        """A copy for a request that has been forwarded in part: only a warning is left."""
        lead = self.lead.change_action(Action.WARN) if self.lead is not None else None
        return Decision(lead, self.shadow, self._warn_instead_of(_ACTING), warning=self.warning)

    def warn_instead(self) -> Decision:
        """A copy for a request that cannot be edited: actions that add a note become warnings."""
        trace = self._warn_instead_of(NOTED)
        lead = find_strictest([outcome for outcome in trace if outcome.mode == "enforce"])
        return Decision(lead, self.shadow, trace, warning=True)

    def _warn_instead_of(self, actions: Collection[Action]) -> list[Outcome]:
        return [
            outcome.change_action(Action.WARN)
            if outcome.action in actions and outcome.mode == "enforce"
            else outcome
            for outcome in self.trace
        ]


def decide(trace: list[Outcome], watching: Sequence[Outcome] = ()) -> Decision:
    """Decide from the outcomes of enforcing (`trace`) and shadow policies, both in bundle order."""
    loops = [outcome for outcome in trace if outcome.action is not Action.ALLOW]
    lead, steer, warning = None, None, False
    if loops:
        lead = find_strictest(loops)
        noted = [outcome for outcome in loops if outcome.action in NOTED]
        steer = find_strictest(noted) if noted else None
        warning = any(outcome.action is Action.WARN for outcome in loops)
    if not watching:
        return Decision(lead, None, trace, warning=warning, steer=steer)
    shadow_loops = [outcome for outcome in watching if outcome.action is not Action.ALLOW]
    shadow = find_strictest(shadow_loops) if shadow_loops else None
    return Decision(lead, shadow, [*trace, *watching], warning=warning, steer=steer)


def find_strictest(outcomes: Sequence[Outcome]) -> Outcome:
    """The strictest of one or more outcomes; the first of equal ones."""
    return max(outcomes, key=Outcome.strictness) if len(outcomes) > 1 else outcomes[0]
