"""The answer to one request: the outcome of each detector, and the decision of all together."""

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
"""What reports call a request on which an action was taken."""

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
"""Why a request is not counted if an error in Loopguard keeps it from reading the body."""

_SPEAKS: Final = {Reason.LOOP_DETECTED: 2, Reason.SESSION_LIMIT_EXCEEDED: 1}
"""The rank of reasons of equal actions."""

MISSING: Final = "missing_descriptor"
"""Why a request is not counted if it does not tell whose it is."""

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
"""Reasons for uncounted requests that clients can cause, with status and words for policies that forbid them."""


STRONG: Final = "strong"
WEAK: Final = "weak"
"""Strength of the evidence for a loop: stuck agents repeat errors and long results, legitimate work short answers and talk."""


class ToolFailure(NamedTuple):
    """How a tool fails: its name, and a digest of its result."""

    tool: str
    digest: str


class EarlierLoops(NamedTuple):
    """The loops that a history showed earlier.

    Attributes:
        last: without its newest turn; None for no loop.
        earlier: without its two newest turns; None for no loop, or if `last` is not in question.
        compared: the turn that `last` repeats, as for a fingerprint.
    """

    last: Repeat | None
    earlier: Repeat | None
    compared: bytes


class Repeat(NamedTuple):
    """A loop, or how near one is, as a conversation's own history shows it.

    Attributes:
        tools: the tool, or the tools of a cycle in the order in which they are called.
        count: number of equal calls, or of rounds of the cycle.
        calls: number of calls looked at.
        threshold: the count from which on it is a loop.
        results: the results were compared, too, and are equal.
        reason: the operator's words about it; empty if there are none.
        rule: the similarity's rule that applies, if it has several.
        step: index of the detector's threshold that applies, the lowest being 0.
        strength: STRONG or WEAK; empty if unknown.
        held: it is weak, and has not repeated often enough for more than the mildest action.
        notes_only: it gets a note for the model or a warning at most, whatever else the policy names.
        widespread: a tool fails in this way for many sessions.
        before: what the history showed earlier; None if nothing looked.
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
    before: EarlierLoops | None = None

    @property
    def looping(self) -> bool:
        """Whether the count has reached the threshold."""
        return self.count >= self.threshold

    @property
    def rank(self) -> int:
        """How strictly it is acted on: 0 for not at all, 1 if it is held, from 2 on by the step."""
        if not self.looping:
            return 0
        return 1 if self.held else self.step + 2


class Advice(NamedTuple):
    """What a model is told about a loop.

    Attributes:
        what: what repeated, and how often; the start of a sentence.
        reason: the operator's words about it; empty if there are none.
        instead: what to do, in whole sentences.
        about: heading of the advice.
    """

    what: str
    reason: str
    instead: str
    about: str = "Loop detected"


class Framed(NamedTuple):
    """A refusal in the format of its request's protocol.

    Attributes:
        status: HTTP status.
        content_type: content type of the body.
        body: the whole body.
        headers: the protocol's further headers.
    """

    status: int
    content_type: str
    body: bytes
    headers: Sequence[tuple[str, str]] = ()


class Subject(Protocol):
    """What a request is about: its detector's similarity, or what that found in this request."""

    @property
    def threshold(self) -> int | None:
        """Replaces the detector's threshold; None keeps it."""
        ...

    @property
    def tools(self) -> tuple[str, ...]:
        """The tools that it calls, if the detector looks at tools."""
        ...

    def write_message(self, outcome: Outcome, method: str, path: str) -> str:
        """What repeated, how often, and what to do instead, in words that a model can act on."""
        ...

    def advise(self, outcome: Outcome, method: str, path: str) -> Advice:
        """What `write_message` says, for a request that is let through."""
        ...

    def frame(self, message: str, accept: str) -> Framed | None:
        """The refusal in the format of the request's own protocol; None for the default format of its API.

        Args:
            message: from `write_message`.
            accept: the request's `accept` header.
        """
        ...


COMPLETION: Final = "completion"
"""Value of `refuse_as`: the refusal is an answer of the API's model."""


class RefusalForm(NamedTuple):
    """How a detector refuses: its HTTP status (None if it depends on the client), or with an answer of the API's model."""

    status: int | None
    completes: bool = False


class Outcome:
    """What one detector of a policy made of the request; never changed.

    Attributes:
        mode: `enforce` or `shadow`.
        action: ALLOW unless the policy saw a loop.
        fingerprint: 8 hex digits.
        tenant: 16 hex digits.
        count: identical requests, including this one.
        span_ms: time since the first of these, in milliseconds.
        window_seconds: the policy's window.
        delay_ms: how long to hold the request; 0 unless throttled.
        retry_after: seconds until a repeat makes sense; None if unknown.
        detector: the name of its loop_detection entry.
        subject: what was compared, which writes the messages.
        repeat: what the request's own history shows; None if requests are counted.
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
        """Orders outcomes: reject > land > throttle > steer > warn > allow.

        Of equal actions, a loop speaks before a session, and a session before a budget; then the longest delay or Retry-After.
        """
        return SEVERITY[self.action], _SPEAKS.get(self.reason, 0), self.delay_ms or self.retry_after or 0

    def change_action(self, action: Action) -> Outcome:
        """A copy with another action, without a delay."""
        return Outcome(
            self.policy,
            self.mode,
            action,
            self.fingerprint,
            self.tenant,
            self.count,
            self.span_ms,
            self.window_seconds,
            0,
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
        lead: the strictest outcome of the enforcing policies that saw something; None lets the request through untouched.
        warning: a policy with action warn fired.
        shadow: the strictest outcome that a shadow policy would have had; never has an effect.
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
        trace = [refused if (each.policy, each.mode, each.detector) == place else each for each in self.trace]
        return Decision(refused, self.shadow, trace, warning=self.warning, steer=self.steer)

    def let_pass(self) -> Decision:
        """A copy for a request of which a part has been sent on: it can only be warned about."""
        lead = self.lead.change_action(Action.WARN) if self.lead is not None else None
        return Decision(lead, self.shadow, self._warn_of(_ACTING), warning=self.warning)

    def warn_instead(self) -> Decision:
        """A copy for a request that cannot be edited: actions that need a note become warnings."""
        trace = self._warn_of(NOTED)
        lead = find_strictest([outcome for outcome in trace if outcome.mode == "enforce"])
        return Decision(lead, self.shadow, trace, warning=True)

    def _warn_of(self, actions: Collection[Action]) -> list[Outcome]:
        """The outcomes, with warnings in place of these actions."""
        return [
            outcome.change_action(Action.WARN) if outcome.action in actions and outcome.mode == "enforce" else outcome
            for outcome in self.trace
        ]


def decide(trace: list[Outcome], watching: Sequence[Outcome] = ()) -> Decision:
    """Decide by the outcomes of enforcing policies and of shadow policies, both in bundle order."""
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
    """The strictest of one or more outcomes, the first among equals."""
    return max(outcomes, key=Outcome.strictness) if len(outcomes) > 1 else outcomes[0]
