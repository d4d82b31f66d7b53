"""Recent loops, for people: their callers, times, tools, and what happened to their requests.

Only requests that are acted on cost anything.
"""

from __future__ import annotations

from time import time
from typing import Final

import msgspec

from extproc.decision import Action, Decision, Outcome, Repeat
from extproc.engine.exchange import Exchange
from extproc.engine.guards import Guard
from extproc.operator.loop_rows import MINUTES, Line, Loop, LoopDocument, NoteLabels, merge_lines
from extproc.operator.table import NAME_SHOWN, NAMES_SHOWN, UNKNOWN, Table, cut_caller, find_known
from extproc.request.clients import AGENT_HEADERS
from extproc.request.http import HttpRequest, cut_text
from extproc.sessions.rates import read_model

_MAX_CURVES: Final = 1_000
PATH_SHOWN: Final = 256


class LoopTable(Table[Loop, LoopDocument]):
    """The loops of one process, and their curves by policy, mode and action."""

    def __init__(self) -> None:
        super().__init__()
        self.curves: dict[tuple[str, str, str], Line] = {}
        self.after: dict[NoteLabels, int] = {}

    def note(self, exchange: Exchange, decision: Decision, outcome: Outcome) -> Loop:
        """Note a detector's outcome for a request, which is not ALLOW; returns its loop."""
        now, action, size = time(), outcome.action.value, exchange.size
        repeats = name_repeated(outcome.repeat, outcome.fingerprint)
        key = (outcome.tenant, outcome.policy, outcome.detector, outcome.mode, repeats)
        loop = self.use(key)
        if loop is None:
            loop = _begin_loop(exchange, outcome, repeats, now)
            self.put(key, loop)
        loop.requests[action] = loop.requests.get(action, 0) + 1
        loop.fingerprint, loop.count, loop.last = outcome.fingerprint, outcome.count, now
        loop.strength = outcome.strength
        loop.size += size
        if outcome is decision.lead and outcome.action is Action.REJECT:
            loop.stopped += 1
            loop.stopped_size += size
        self.draw(outcome)
        return loop

    def note_after(self, exchange: Exchange, outcome: Outcome, repeats: str, fingerprint: str, labels: NoteLabels) -> None:
        """Note what came after the first note of a loop, which another replica may have acted on."""
        if labels in self.after or len(self.after) < _MAX_CURVES:
            self.after[labels] = self.after.get(labels, 0) + 1
        key = (outcome.tenant, outcome.policy, outcome.detector, outcome.mode, repeats)
        loop = self.use(key)
        if loop is None:
            loop = _begin_loop(exchange, outcome, repeats, time())
            loop.fingerprint = fingerprint
            self.put(key, loop)
        *_, loop.cause, arm, after = labels
        name = f"{arm} {after}"
        loop.after[name] = loop.after.get(name, 0) + 1

    def make_document(self, *, shows_callers: bool) -> LoopDocument:
        """The table as it is now, the largest loop first; without callers' values unless they may be shown."""
        rows = sorted(self.copy(), key=lambda loop: -loop.size)
        if not shows_callers:
            rows = [msgspec.structs.replace(loop, caller=[]) for loop in rows]
        minute = int(time()) // 60
        return LoopDocument(rows, merge_lines(self.curves.copy().values(), minute), after=list(self.after.copy().items()))

    def draw(self, outcome: Outcome) -> None:
        """Count a request in the curves."""
        key, minute = (outcome.policy, outcome.mode, outcome.action.value), int(time()) // 60
        curve = self.curves.get(key)
        if curve is None:
            if len(self.curves) >= _MAX_CURVES:
                return
            curve = self.curves[key] = Line(*key, minute, [0] * MINUTES)
        curve.add(minute)


def _begin_loop(exchange: Exchange, outcome: Outcome, repeats: str, now: float) -> Loop:
    """A loop without any counted request."""
    request, candidate = exchange.request, find_guard(exchange, outcome)
    known = find_known(candidate) if candidate is not None else UNKNOWN
    return Loop(
        policy=outcome.policy,
        detector=outcome.detector,
        mode=outcome.mode,
        tenant=outcome.tenant,
        repeats=repeats,
        session=candidate.session if candidate is not None else "",
        fingerprint=outcome.fingerprint,
        method=cut_text(request.method, NAME_SHOWN),
        path=cut_text(request.path, PATH_SHOWN),
        route=cut_text(request.facts.route(), NAME_SHOWN),
        model=cut_text(read_model(request.path, exchange.content), NAME_SHOWN),
        tools=[cut_text(tool, NAME_SHOWN) for tool in outcome.list_tools()[:NAMES_SHOWN]],
        caller=cut_caller(candidate.values) if candidate is not None else [],
        first=now,
        last=now,
        count=0,
        requests={},
        size=0,
        stopped=0,
        stopped_size=0,
        **known._asdict(),
        agent=find_agent(request, candidate),
    )


def find_agent(request: HttpRequest, candidate: Guard | None) -> str:
    """The id that the agent has given itself, unless it identifies the caller, which not everyone may see."""
    agent = next((value for name in AGENT_HEADERS if (value := request.read_header(name))), "")
    hidden = [] if candidate is None else [value for _, value in candidate.values]
    return "" if agent in hidden else cut_text(agent, NAME_SHOWN)


def find_guard(exchange: Exchange, outcome: Outcome) -> Guard | None:
    """The candidate of an outcome, enforcing or not."""
    return (exchange.shadow if outcome.mode == "shadow" else exchange.enforcing).find(outcome)


def name_repeated(repeat: Repeat | None, fingerprint: str) -> str:
    """What requests of one loop share: the fingerprint or, because that changes in a cycle, the cycle's tools."""
    if repeat is not None and len(repeat.tools) > 1:
        return "\n".join(sorted(repeat.tools))[:PATH_SHOWN]
    return fingerprint
