"""The loops of late, for people: who, since when, with which tool, and what became of their requests.

Bounded: a thousand loops, a tenth of them one tenant's, so that nobody's loops hide another's; the one that has been quiet
longest makes room. Only requests that are acted on cost anything. The event loop alone writes; `copy` is for everybody else.
"""

from __future__ import annotations

from time import time
from typing import Final

from extproc.decision import SEVERITY, Action, Decision, Outcome
from extproc.engine.candidates import Candidate
from extproc.engine.evaluation import Evaluation
from extproc.recent import Row, Table
from extproc.request.http import cut_text
from extproc.sessions.prices import read_model

MAX_LOOPS: Final = 1_000
MAX_PER_TENANT: Final = 100

MINUTES: Final = 60
"""Of the curve."""

_MAX_CURVES = 1_000
_NAME_SHOWN = 128
_PATH_SHOWN = 256
_NAMES_SHOWN = 8


class Loop(Row):
    """One loop.

    Attributes:
        repeats: what makes requests parts of it: a fingerprint, or the tools of a cycle.
        policy: its id.
        detector: the name of its loop_detection entry.
        mode: `enforce` or `shadow`.
        tenant: hash of the caller, 16 hex digits.
        caller: the names and values of its descriptors, cut to what can be shown.
        session: hash of the session's name, empty where it has none.
        fingerprint: of the newest request.
        method: of HTTP.
        path: of the request, cut to what can be shown.
        route: Envoy's name, empty where it is unknown.
        tools: that are called again and again.
        model: that is asked, empty where it is unknown.
        first: when it was first acted on, in seconds since 1970.
        last: when it was last acted on.
        count: what its detector counts.
        total: requests of it that were acted on, or would have been.
        requests: the same by action.
        size: of these, bytes of their bodies.
        stopped: of these, the ones that were not sent on for this loop's sake.
        stopped_size: bytes of their bodies.
        strictest: of its actions so far, as `SEVERITY` ranks them.
    """

    __slots__ = (
        "caller",
        "count",
        "detector",
        "fingerprint",
        "first",
        "method",
        "mode",
        "model",
        "path",
        "policy",
        "repeats",
        "requests",
        "route",
        "session",
        "size",
        "stopped",
        "stopped_size",
        "strictest",
        "tools",
        "total",
    )

    def __init__(self, evaluation: Evaluation, outcome: Outcome, repeats: str, now: float) -> None:
        """Begin; `add` takes the requests."""
        self.repeats = repeats
        request, candidate = evaluation.request, _find_candidate(evaluation, outcome)
        self.policy = outcome.policy
        self.detector = outcome.detector
        self.mode = outcome.mode
        self.tenant = outcome.tenant
        self.fingerprint = outcome.fingerprint
        values = candidate.values if candidate is not None else []
        self.caller = [(cut_text(name, _NAME_SHOWN), cut_text(value, _NAME_SHOWN)) for name, value in values[:_NAMES_SHOWN]]
        self.session = candidate.session if candidate is not None else ""
        self.method = cut_text(request.method, _NAME_SHOWN)
        self.path = cut_text(request.path, _PATH_SHOWN)
        self.route = cut_text(request.facts.route(), _NAME_SHOWN)
        self.tools = [cut_text(tool, _NAME_SHOWN) for tool in outcome.list_tools()[:_NAMES_SHOWN]]
        self.model = cut_text(read_model(request.path, evaluation.content), _NAME_SHOWN)
        self.first = self.last = now
        self.count = 0
        self.total = 0
        self.requests: dict[str, int] = {}
        self.size = 0
        self.stopped = 0
        self.stopped_size = 0
        self.strictest = 0

    def add(self, outcome: Outcome, size: int, now: float, *, stopped: bool) -> None:
        """One more request of it."""
        action = outcome.action.value
        self.total += 1
        self.requests[action] = self.requests.get(action, 0) + 1
        self.strictest = max(self.strictest, SEVERITY[outcome.action])
        self.fingerprint = outcome.fingerprint
        self.count = outcome.count
        self.last = now
        self.size += size
        if stopped:
            self.stopped += 1
            self.stopped_size += size


class Curve:
    """How many requests were acted on in each minute of the last hour.

    Attributes:
        minute: the newest one that counts anything, since 1970.
        counts: a number for each minute, that of minute m at m modulo `MINUTES`.
    """

    __slots__ = ("counts", "minute")

    def __init__(self, minute: int) -> None:
        """Nothing has happened until now."""
        self.minute = minute
        self.counts = [0] * MINUTES

    def add(self, minute: int) -> None:
        """One more request."""
        if minute != self.minute:
            self._go_on_to(minute)
        self.counts[minute % MINUTES] += 1

    def list_counts(self, minute: int) -> list[int]:
        """The hour that ends with this minute, oldest first."""
        oldest = minute - MINUTES + 1
        known = range(self.minute - MINUTES + 1, self.minute + 1)
        return [self.counts[at % MINUTES] if at in known else 0 for at in range(oldest, minute + 1)]

    def _go_on_to(self, minute: int) -> None:
        for between in range(max(self.minute + 1, minute - MINUTES + 1), minute + 1):
            self.counts[between % MINUTES] = 0
        self.minute = minute


class LoopTable(Table[Loop]):
    """The loops of one process.

    Attributes:
        curves: by policy, mode and action.
    """

    def __init__(self) -> None:
        """Nobody loops."""
        super().__init__(MAX_LOOPS, MAX_PER_TENANT)
        self.curves: dict[tuple[str, str, str], Curve] = {}

    def note(self, evaluation: Evaluation, decision: Decision, outcome: Outcome) -> Loop:
        """One detector's outcome for one request, which is not ALLOW; returns its loop."""
        now = time()
        repeats = _name_repeated(outcome)
        key = (outcome.tenant, outcome.policy, outcome.detector, outcome.mode, repeats)
        loop = self.use(key)
        if loop is None:
            loop = Loop(evaluation, outcome, repeats, now)
            self.put(key, loop)
        loop.add(outcome, evaluation.size, now, stopped=outcome is decision.lead and outcome.action is Action.REJECT)
        self._draw(outcome, int(now) // 60)
        return loop

    def _draw(self, outcome: Outcome, minute: int) -> None:
        key = (outcome.policy, outcome.mode, outcome.action.value)
        curve = self.curves.get(key)
        if curve is None:
            if len(self.curves) >= _MAX_CURVES:
                return
            curve = self.curves[key] = Curve(minute)
        curve.add(minute)


def _find_candidate(evaluation: Evaluation, outcome: Outcome) -> Candidate | None:
    group = evaluation.shadow if outcome.mode == "shadow" else evaluation.enforcing
    for candidate in group.candidates:
        if candidate.plan.id == outcome.policy and candidate.guard.name == outcome.detector:
            return candidate
    return None


def _name_repeated(outcome: Outcome) -> str:
    """What makes requests parts of one loop: the fingerprint, or in a cycle, where that changes, the tools that come round."""
    if outcome.repeat is not None and len(outcome.repeat.tools) > 1:
        return "\n".join(sorted(outcome.repeat.tools))[:_PATH_SHOWN]
    return outcome.fingerprint
