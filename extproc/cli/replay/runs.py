"""What each run in recorded traffic took, and how far its loops of turns went, to set thresholds and limits by.

A run is a conversation for `turns`, and a session for limits. A policy is asked that has a detector for each threshold to try,
and limits that no run reaches, so that everything is counted as it would be live. A run is stuck if its last request is in a
loop; all others went on, and are what a threshold must not touch.
"""
# interpreted: works on files

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from extproc.apis import open_conversation
from extproc.bounded import LRU
from extproc.cli.replay.judge import Judge
from extproc.cli.replay.records import Recorded, RecordedEnd
from extproc.decision import WEAK, Action, Decision
from extproc.detectors.chain import Transcript
from extproc.detectors.digests import Digest
from extproc.detectors.keys import TurnsKeys
from extproc.detectors.turns import MAX_THRESHOLD, MAX_TOOL_THRESHOLD
from extproc.engine.candidates import RecordedBody, SessionCandidate
from extproc.engine.engine import Engine
from extproc.engine.evaluation import Evaluation
from extproc.operator.conversation_table import name_conversation
from extproc.policy.bundle import LoopDetection, Policy
from extproc.policy.loader import parse
from extproc.request.hash_key import PROCESS_KEY, HashKey
from extproc.sessions.call_digests import ShownCalls
from extproc.sessions.limits import UNNAMED
from extproc.sessions.session_limits import MAX_COUNT, MAX_TOOL_CALLS

THRESHOLDS = tuple(range(2, MAX_THRESHOLD + 1))
WEAK_THRESHOLDS = (3, 4, 6, 8, 10, 12, 14)

_KEPT_KEYS = {*TurnsKeys.model_fields, "enabled", "similarity", "max_inspect_bytes"} - {
    "weak_threshold",
    "escalate",
    "cooldown_seconds",
    "threshold_identical_requests",
    "tools",
}
DROPPED = ("canary_of", "enforce_percent", "ramp_by", "ramp_seed", "keep_counts", "session_limits", "unnamed_limits")
"""Parts of a policy that decide about whom and when it acts."""

_STRONG, _WEAK = "strong", "weak"
_NO_NAME = "#"
"""Marks a conversation that has no name; see `ConversationRow`."""


class RecordedRun:
    """One run so far.

    Attributes:
        requests: that were counted.
        found: highest threshold at which any of its loops was found; 0 for none.
        strong: the same for loops that may be refused at once.
        weak: highest weak threshold that a weak loop reached.
        stuck: its newest request is in a loop.
        steps, tool_calls: as limits count them.
        tools: number of calls of each tool by name, of up to 64 tools.
        cost: in nano-dollars; -1 if that was not recorded.
        whole: the cost includes that of the newest request.
    """

    __slots__ = ("cost", "found", "requests", "steps", "strong", "stuck", "tool_calls", "tools", "weak", "whole")

    def __init__(self) -> None:
        self.cost = -1
        self.tools: dict[str, int] = {}
        self.requests = self.found = self.strong = self.weak = self.steps = self.tool_calls = 0
        self.stuck = self.whole = False


class RequestLoops(NamedTuple):
    """What the detectors say of one request; numbers as in `RecordedRun`."""

    found: int = 0
    strong: int = 0
    weak: int = 0


class RunCollector(Judge):
    """Collects the runs of one policy.

    Attributes:
        requests: that its policy counted.
        uncounted: that it could not count, such as those without a body.
        nameless: that belong to no conversation or session, or show no turn yet.
        dropped: runs, for lack of room.
    """

    def __init__(
        self, policy: Policy, detector: str | None, max_entries: int, key: HashKey = PROCESS_KEY, *, sessions: bool
    ) -> None:
        """Start without runs.

        Args:
            policy: whose requests they are.
            detector: its detector of turns; None for one with the default keys.
            max_entries: maximum number of runs.
            key: of the live servers' hashes.
            sessions: collect sessions, as limits know them, and not conversations.
        """
        document, now = write_trial(policy, detector, sessions=sessions), datetime.now(UTC)
        super().__init__(Engine(parse({"tune": json.dumps(document).encode()}, now), now), max_entries, key, tries=True)
        self.requests = self.uncounted = self.nameless = self.dropped = 0
        self._sessions = sessions
        self._runs: LRU[tuple[str, str], RecordedRun] = LRU(max_entries)
        self._names: LRU[tuple[str, bytes], bytes] = LRU(max_entries)  # of conversations, by tenant and place

    def add(self, recorded: Recorded) -> None:
        """Count the next request."""
        found = self.judge(recorded)
        if found is None:
            return
        evaluation, decision = found
        if not decision.trace:
            self.uncounted += bool(evaluation.list_left_out())
            return
        self.requests += 1
        name = _name_session(evaluation) if self._sessions else self._name_conversation(evaluation, decision)
        if name is None:
            self.nameless += 1
            return
        run = self._runs.use(name)
        if run is None:
            run = RecordedRun()
            self.dropped += self._runs.put(name, run) is not None
        _note(run, read_loops(decision))
        for candidate in evaluation.sessions:
            if candidate.standing is not None:
                run.steps = max(run.steps, candidate.standing.steps)
                run.tool_calls = max(run.tool_calls, candidate.standing.tool_calls)
                run.tools |= {name: count for _, name, count in candidate.standing.tools}
                run.cost = _add_cost(run.cost, evaluation, candidate, recorded.end)
                run.whole = recorded.end is not None
                if recorded.end is not None and recorded.end.estimated:
                    self._problems.append(("estimated_tokens", ""))

    def _name_conversation(self, evaluation: Evaluation, decision: Decision) -> tuple[str, str] | None:
        """The conversation; None if it has no name, or no turn yet, because the first turn is part of the name."""
        tenant, conversation = name_conversation(evaluation, decision.trace)
        if evaluation.recorded is not None and conversation.startswith(_NO_NAME):
            return self._follow(tenant, evaluation.recorded)
        return None if conversation.startswith(_NO_NAME) or not _shows_turns(evaluation) else (tenant, conversation)

    def _follow(self, tenant: str, recorded: RecordedBody) -> tuple[str, str] | None:
        """The conversation of a request without its body: that of the request which it continues, by its place in the chain."""
        digests = [digest for digest in recorded.digests.values() if isinstance(digest, Digest) and digest.turns]
        place = digests[0].place if digests else None
        if place is None:
            return None
        name = (self._names.use((tenant, place.parent)) or place.node) if place.parent else place.node
        self._names.put((tenant, place.node), name)
        return tenant, name.hex()

    def list_all(self) -> list[RecordedRun]:
        """All runs."""
        return [run for _, run in self._runs.items()]


def _add_cost(cost: int, evaluation: Evaluation, candidate: SessionCandidate, end: RecordedEnd | None) -> int:
    """What a session has used up with this request, in nano-dollars, as limits see it; -1 if unknown.

    That is what its ledger said, and what the request then cost. At other prices than the ledger's, all requests are added up.
    """
    shown = evaluation.recorded.shown if evaluation.recorded is not None else None
    known = shown.ledgers.get(candidate.limiter.shape) if isinstance(shown, ShownCalls) else None
    own = candidate.settle(end.model, end.usage, 0, estimated=False).cost if end is not None else 0
    if known is not None:
        return max(cost, known.cost + known.reserved + own)
    return max(cost, 0) + own if end is not None else cost


def _note(run: RecordedRun, loops: RequestLoops) -> None:
    run.requests += 1
    run.found, run.strong, run.weak = (max(pair) for pair in zip((run.found, run.strong, run.weak), loops, strict=True))
    run.stuck = loops.found > 0


def read_loops(decision: Decision) -> RequestLoops:
    """How far the loop of a request goes, as the detectors of `write_trial` say it."""
    found = strong = weak = 0
    for outcome in decision.trace:
        kind, _, number = outcome.detector.partition("-")
        repeat = outcome.repeat
        if repeat is None or not repeat.looping or outcome.action is Action.ALLOW:
            continue
        if kind == _STRONG:
            found = max(found, int(number))
            if repeat.strength != WEAK and not repeat.notes_only:
                strong = max(strong, int(number))
        elif kind == _WEAK and repeat.strength == WEAK and not (repeat.held or repeat.notes_only):
            weak = max(weak, int(number))
    return RequestLoops(found, strong, weak)


def _shows_turns(evaluation: Evaluation) -> bool:
    """Whether there is a turn that can be in a loop, as far as that is known."""
    if evaluation.plain is None:
        return True
    shown = open_conversation(evaluation.plain).transcript
    return not isinstance(shown, Transcript) or len(shown.turns) > 0


def _name_session(evaluation: Evaluation) -> tuple[str, str] | None:
    for candidate in evaluation.sessions:
        if isinstance(candidate, SessionCandidate) and candidate.session not in {"", UNNAMED}:
            return candidate.tenant, candidate.session
    return None


def write_trial(policy: Policy, detector: str | None, *, sessions: bool) -> dict[str, Any]:
    """A policy for the same requests, with a detector for each threshold to try, and limits that count and stop nothing."""
    document: dict[str, Any] = policy.model_dump(mode="json", by_alias=True, exclude_unset=True)
    spec = {name: value for name, value in document["spec"].items() if name not in DROPPED}
    entry = {} if detector is None else find_entry(policy, document, detector)
    kept = {name: value for name, value in entry.items() if name in _KEPT_KEYS} | {"enabled": True, "similarity": "turns"}
    tools = entry.get("tools", {})
    own = entry.get("threshold_identical_requests", 3)
    strong = [
        {**kept, "name": f"{_STRONG}-{number}", "threshold_identical_requests": number, "tools": _raise(tools, number - own)}
        for number in THRESHOLDS
    ]
    weak = [
        {**kept, "name": f"{_WEAK}-{number}", "threshold_identical_requests": WEAK_THRESHOLDS[0], "weak_threshold": number}
        for number in WEAK_THRESHOLDS
    ]
    spec |= {"mode": "enforce", "loop_detection": strong[1:2] if sessions else [*strong, *weak]}
    if sessions:
        own = document["spec"].get("session_limits", {})
        priced = {name: own[name] for name in ("prices", "unknown_model", "max_inspect_bytes") if name in own}
        spec["session_limits"] = priced | {"max_steps": MAX_COUNT, "max_tool_calls": MAX_TOOL_CALLS}
    return {"id": policy.id, "spec": spec}


def _raise(tools: dict[str, Any], more: int) -> dict[str, Any]:
    """The rules of tools with thresholds of their own, which rise together with that of the detector."""
    return {
        name: tool | {"threshold": min(MAX_TOOL_THRESHOLD, max(2, tool["threshold"] + more))} if "threshold" in tool else tool
        for name, tool in tools.items()
    }


def find_entry(policy: Policy, document: dict[str, Any], detector: str) -> dict[str, Any]:
    """The entry of an enabled detector in the policy's document."""
    loops = document["spec"]["loop_detection"]
    entries: Sequence[dict[str, Any]] = (
        [entry for entry in loops if entry.get("enabled")] if isinstance(loops, list) else [loops]
    )
    return entries[[name for name, _ in policy.spec.detectors()].index(detector)]


def find_turns(policy: Policy) -> str | None:
    """The name of the policy's first detector of turns; None if it has none."""
    return next((name for name, loop in policy.spec.detectors() if _is_turns(loop)), None)


def _is_turns(loop: LoopDetection) -> bool:
    return loop.similarity == "turns"
