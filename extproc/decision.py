"""The answer to one request, and the sentence that tells a model why."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Action(str, Enum):
    """What is done about a request, mildest first."""

    ALLOW = "allow"
    WARN = "warn"
    THROTTLE = "throttle"
    REJECT = "reject"


SEVERITY = {action: rank for rank, action in enumerate(Action)}


class Reason(str, Enum):
    """Why, as it stands in `X-Fairvisor-Reason` and in the dynamic metadata."""

    LOOP_DETECTED = "loop_detected"
    STORE_UNAVAILABLE = "store_unavailable"


class Repeat(NamedTuple):
    """What a conversation's own history says about the calls of its last turn.

    Attributes:
        tools: the tool, or the tools of a cycle in the order in which they are called.
        count: how often it was called, or how often the cycle came round.
        calls: among how many calls.
        threshold: how often is too often.
        results: that they brought back the same was compared as well.
        reason: the operator's words about it, empty when there are none.
    """

    tools: tuple[str, ...]
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    calls: int
    threshold: int
    results: bool
    reason: str = ""

    @property
    def looping(self) -> bool:
        """It is too often."""
        return self.count >= self.threshold


class Outcome(NamedTuple):
    """What one detector of a policy made of the request.

    Attributes:
        policy: its id.
        mode: `enforce` or `shadow`.
        action: ALLOW unless the policy saw a loop.
        fingerprint: 8 hex digits.
        tenant: 16 hex digits.
        count: identical requests, this one included.
        span_ms: the real span of those requests, in milliseconds.
        window_seconds: the policy's window.
        delay_ms: how long to hold the request; 0 unless throttled.
        retry_after: seconds until a repeat makes sense; None when unknown.
        reject_status: HTTP status of a refusal.
        detector: the name of its loop_detection entry.
        similarity: what was compared.
        repeat: what the request's own history says, None where requests are counted.
    """

    policy: str
    mode: str
    action: Action
    fingerprint: str
    tenant: str
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    span_ms: int
    window_seconds: int
    delay_ms: int
    retry_after: int | None
    reject_status: int
    detector: str = "default"
    similarity: str = "exact"
    repeat: Repeat | None = None

    def strictness(self) -> tuple[int, int]:
        """Orders outcomes: reject > throttle > warn > allow, then the longest delay or Retry-After."""
        return SEVERITY[self.action], self.delay_ms or self.retry_after or 0


class Decision(NamedTuple):
    """What all policies together make of one request.

    Attributes:
        lead: the strictest outcome of the enforcing policies that saw a loop; None lets the request through untouched.
        warning: a policy with action warn fired.
        shadow: the strictest outcome that a shadow policy would have had; never has an effect.
        trace: every policy's outcome, in bundle order, enforcing ones first.
    """

    lead: Outcome | None = None
    warning: bool = False
    shadow: Outcome | None = None
    trace: Sequence[Outcome] = ()

    @property
    def action(self) -> Action:
        """What is done about the request."""
        return self.lead.action if self.lead is not None else Action.ALLOW


def strictest(outcomes: Sequence[Outcome]) -> Outcome:
    """The strictest of one or more outcomes, the first among equals."""
    return max(outcomes, key=Outcome.strictness)


def loop_message(outcome: Outcome, method: str, path: str) -> str:
    """What repeated, how often, over what span and what to do instead, in words that a model can act on."""
    if outcome.repeat is not None:
        return _calls_message(outcome.repeat)
    shown = path if len(path) <= 200 else path[:199] + "\u2026"  # noqa: PLR2004  # enough to recognise it
    shown = shown.encode("utf-8", "backslashreplace").decode()
    what = f"this identical request ({method} {shown}) has been sent"
    if outcome.similarity == "canonical":
        what = f"this same request, but for its spelling ({method} {shown}), has been sent"
    elif outcome.similarity == "tail":
        what = f"a conversation that ends with these same messages ({method} {shown}) has been sent"
    return (
        f"Loop detected: {what} {outcome.count} times within {duration(outcome.span_ms)} and was refused. "
        "Sending it again will be refused again. "
        "Do not retry it unchanged: change the approach or the input, or stop and report the result you have so far."
    )


def _calls_message(repeat: Repeat) -> str:
    """The same about calls of tools; what they were called with and what they said stays out of it."""
    names = ", ".join(repeat.tools)
    if not repeat.looping:
        what = f"{names} was called in a loop, and this same call stays refused for a while"
    elif len(repeat.tools) == 1:
        same = "the same arguments and the same result" if repeat.results else "the same arguments"
        what = f"{repeat.count} of the last {repeat.calls} tool calls were {names} with {same}"
    else:
        what = f"the last {repeat.calls} tool calls were {repeat.count} rounds of the same {len(repeat.tools)} calls ({names})"
    reason = f" {repeat.reason.strip()}" if repeat.reason.strip() else ""
    return (
        f"Loop detected: {what}, so this request was refused.{reason} Calling again will not bring anything new: "
        "change the approach or the arguments, or finish with the result you have so far."
    )


def duration(milliseconds: int) -> str:
    """A span in the unit that a reader would use, such as `2.5 minutes`."""
    seconds = milliseconds / 1000
    if seconds < 1:
        return "less than a second"
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} seconds"
