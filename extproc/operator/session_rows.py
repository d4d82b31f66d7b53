"""Sessions as replicas publish them; see `rows`.

The replicas share a session's ledger, so the newest counts are right. Its calls are merged from the replicas that let them
through and those that saw their responses.
"""
# interpreted: msgspec makes its classes

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Annotated, Any

import msgspec

from extproc.operator.rows import FIRST, KEPT_SECONDS, MAX, MIN, SUM, Document, Row, fit, join, merge, newest

MAX_CALLS = 64
MAX_EVENTS = 32
"""Calls, and refusals and grants, of a session that are shown, the newest; its counts include all."""

MAX_DETAILED = 200
"""Number of sessions, the newest, that are published with their calls; more would not fit on a board."""

MAX_AGENTS_SHOWN = 64
"""Agents of a session that are shown, the newest; its counts include all."""

ACTIVE_SECONDS = 60
"""An agent is shown as active for this long after a request."""

_SKEW = 1.0
"""Seconds by which clocks of replicas may differ: a call that is older than its session belongs to one that has ended."""


def _find_settled(one: CallRow, other: CallRow, field: str) -> Any:  # noqa: ANN401  # a field
    return getattr(other if other.settled else one, field)


class CallRow(Row, array_like=True):
    """One request of a session that was let through.

    Attributes:
        name: the step's; replicas tell each other the first bytes of it.
        at: when it was seen first, in seconds since 1970.
        tools: that ran before it, whose results it shows.
        status: of the answer; 0 while that is not known, or where there was none.
        tokens: as in `Usage`, None where they were not said.
        refused: another guard refused it after all.
        model_ms: time that the upstream took, in milliseconds; 0 while that is not known.
        errors: number of results that are errors.
        retry: it repeats a step.
        action: what was done to it, such as `steer` for a note to the model; empty if it was let through as it was.
    """

    name: bytes
    at: float
    model: Annotated[str, FIRST]
    tools: Annotated[list[str], FIRST]
    status: Annotated[int, _find_settled] = 0
    tokens: Annotated[tuple[int, ...] | None, _find_settled] = None
    settled: Annotated[bool, FIRST] = False
    refused: Annotated[bool, _find_settled] = False
    model_ms: Annotated[int, _find_settled] = 0
    errors: Annotated[int, FIRST] = 0
    retry: Annotated[bool, FIRST] = False
    action: Annotated[str, FIRST] = ""


class AgentRow(Row, array_like=True):
    """An agent of a session.

    Attributes:
        name: hash of its name.
        parent: the same of the agent that started it, according to its first request; empty if the session did.
        depth: levels below the session; 0 if unknown, because the policy does not limit agents.
        began: when it was seen first, in seconds since 1970.
        last: when its newest request came.
        requests: how many this replica has seen.
        refused: the limit that refused its newest request; empty for none.
    """

    name: str
    parent: str
    depth: Annotated[int, MAX]
    began: Annotated[float, MIN]
    last: Annotated[float, MAX]
    requests: Annotated[int, SUM] = 0
    refused: Annotated[str, newest("last")] = ""

    def is_active(self, now: float) -> bool:
        """Whether its newest request was let through, and recently; `now` in seconds since 1970."""
        return not self.refused and now - self.last < ACTIVE_SECONDS


class SessionRefusal(msgspec.Struct, array_like=True):
    """What a session was refused for: how much was used of a limit, and allowed by it with all grants; no tool means all.

    `agent` is the hash of the agent that sent the request; empty for the session itself.
    """

    at: float
    limit: str
    used: int
    allowed: int
    tool: str
    agent: str = ""


Amounts = list[tuple[str, str, int]]
"""Limits, or additions to them: the limit, the tool that it is about (empty for all), and how much."""


class RunEvent(msgspec.Struct, array_like=True):
    """A refusal, or a grant.

    Attributes:
        at: when it was noted first, in seconds since 1970.
        limit: that refused a request; empty for a grant.
        used: use of that limit, the last time.
        allowed: the limit, including grants.
        tool: the tool that it is about; empty for all.
        times: in a row.
        grant: name of a grant.
        granted: what it grants.
    """

    at: float
    limit: str
    used: int = 0
    allowed: int = 0
    tool: str = ""
    times: int = 1
    grant: str = ""
    granted: Amounts = []


_LATER = join(lambda one, other: other if one is None or (other is not None and other.at > one.at) else one)
_TOLD, _NEWEST = newest("told"), newest("last")


class SessionRow(Row, array_like=True):
    """A session; see `Run`."""

    policy: str
    mode: str
    tenant: str
    session: str
    caller: Annotated[list[tuple[str, str]], FIRST]
    began: Annotated[float, _TOLD]
    last: Annotated[float, MAX]
    told: Annotated[float, MAX]
    ordered: Annotated[bool, _NEWEST]
    killed: Annotated[int, _TOLD]
    steps: Annotated[int, _TOLD]
    tool_calls: Annotated[int, _TOLD]
    tools: Annotated[list[tuple[str, int]], _TOLD]
    cost: Annotated[int, _TOLD]
    estimated: Annotated[int, _TOLD]
    reserved: Annotated[int, _TOLD]
    blocks: Annotated[int, _TOLD]
    consecutive_blocks: Annotated[int, _TOLD]
    consecutive_errors: Annotated[int, _TOLD]
    refusal: Annotated[SessionRefusal | None, _LATER]
    calls: Annotated[list[CallRow], SUM]
    alias: Annotated[str, FIRST] = ""
    labels: Annotated[list[tuple[str, str]], FIRST] = []
    credentials: list[str] = []
    unnamed: Annotated[int, SUM] = 0
    tokens: Annotated[tuple[int, ...], _TOLD] = (0, 0, 0, 0)
    model_ms: Annotated[int, _TOLD] = 0
    failures: Annotated[int, _TOLD] = 0
    limits: Annotated[Amounts, _NEWEST] = []
    granted: Annotated[Amounts, _NEWEST] = []
    events: Annotated[list[RunEvent], SUM] = []
    agents: Annotated[list[AgentRow], SUM] = []
    agents_begun: Annotated[int, _TOLD] = 0
    agents_refused: Annotated[int, _TOLD] = 0
    started_by: Annotated[str, FIRST] = ""
    parts: list[str] = []

    name = property(attrgetter("policy", "mode", "tenant", "session"))


COUNTED = (
    "killed", "steps", "tool_calls", "cost", "estimated", "reserved", "blocks", "consecutive_blocks", "consecutive_errors",
    "tokens", "model_ms", "failures",
)  # fmt: skip
"""Fields that a row copies from a `Standing`."""


class SessionDocument(Document, array_like=True):
    """Sessions, the most recent first."""

    rows: Annotated[list[SessionRow], SUM]
    left_out: Annotated[int, SUM] = 0

    def pack(self) -> bytes:
        """As much as fits on a board: the oldest sessions lose their calls and agents first, then their rows."""
        rows = self.rows
        bare = [msgspec.structs.replace(row, calls=[], agents=[], events=[]) for row in rows]

        def make(kept: int) -> SessionDocument:
            detailed = max(0, kept - len(rows))
            return SessionDocument([*rows[:detailed], *bare[detailed:kept]], max(0, len(rows) - kept))

        return fit(len(rows) + min(len(rows), MAX_DETAILED), make)

    def finish(self, now: float) -> None:
        """See `Document`."""
        self.rows = merge_sessions(self.rows, now - KEPT_SECONDS)


def merge_sessions(rows: Iterable[SessionRow], since: float) -> list[SessionRow]:
    """One row for each session that had a request since then, most recent first."""
    merged = merge([row for row in rows if row.last >= since])
    for row in merged:
        began = row.began - _SKEW
        calls = merge(sorted(row.calls, key=lambda call: call.at))
        row.calls = [call for call in calls if call.at >= began][-MAX_CALLS:]
        row.agents = [agent for agent in merge_agents(row.agents) if agent.last >= began]
        row.events = [event for event in merge_events(row.events) if event.at >= began][-MAX_EVENTS:]
        if row.refusal is not None and row.refusal.at < began:
            row.refusal = None
    return sorted(merged, key=lambda row: -row.last)


def merge_events(events: Iterable[RunEvent]) -> list[RunEvent]:
    """Each event once, oldest first. Every replica notes a grant when it first applies it."""
    merged: dict[object, RunEvent] = {}
    for event in sorted(events, key=lambda event: event.at):
        merged.setdefault(event.grant or (event.at, event.limit, event.tool), event)
    return list(merged.values())


def merge_agents(rows: Iterable[AgentRow]) -> list[AgentRow]:
    """One row for each agent, oldest first; those that are refused make room for others, however many they are."""
    merged = merge(sorted(rows, key=lambda row: row.began))
    kept = {row.name for row in sorted(merged, key=lambda row: (not row.refused, row.last))[-MAX_AGENTS_SHOWN:]}
    return [row for row in merged if row.name in kept]


def order_tree(rows: Sequence[AgentRow]) -> list[tuple[int, AgentRow]]:
    """Agents with their levels below the session, each behind its parent, and once, whatever parents clients claim."""
    known = {row.name for row in rows}
    children: dict[str, list[AgentRow]] = {}
    for row in rows:
        children.setdefault(row.parent if row.parent in known and row.parent != row.name else "", []).append(row)
    ordered: list[tuple[int, AgentRow]] = []
    placed: set[str] = set()

    def place(first: Sequence[AgentRow]) -> None:
        waiting = [(1, row) for row in reversed(first)]
        while waiting:
            level, row = waiting.pop()
            if row.name not in placed:
                placed.add(row.name)
                ordered.append((level, row))
                waiting += [(level + 1, child) for child in reversed(children.get(row.name, ()))]

    place(children.get("", ()))
    for row in rows:  # of a circle, the one that came first stands for its root
        place([row] if row.name not in placed else [])
    return ordered
