"""Sessions as replicas publish them; see `rows`.

The replicas share a session's ledger, so the newest counts are used. Calls are merged: one replica
may have seen the request and another its response.
"""
# interpreted: msgspec makes its classes

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Annotated, Any

import msgspec

from extproc.operator.rows import (
    FIRST,
    KEPT_SECONDS,
    MAX,
    MIN,
    SUM,
    Document,
    Row,
    fit,
    join,
    merge,
    newest,
)

MAX_CALLS = 64
MAX_EVENTS = 32
MAX_AGENTS_SHOWN = 64
"""Maximum calls, events (refusals and grants) and agents shown per session, newest first.

The counts include all.
"""

MAX_DETAILED = 200
"""The newest sessions, which are published with calls; more would not fit on a board."""

ACTIVE_SECONDS = 60
"""An agent is shown as active for this long after a request."""

_SKEW = 1.0
"""Tolerated clock skew in seconds.

Calls older than their session belong to an earlier one with the same name.
"""


def _find_settled(one: CallRow, other: CallRow, field: str) -> Any:  # noqa: ANN401  # a field
    return getattr(other if other.settled else one, field)


class CallRow(Row, array_like=True):
    """A request that a session's limits let through.

    Attributes:
        name: name of the step; only a prefix is published.
        at: when it was first seen, in seconds since 1970.
        tools: tools that ran before it, whose results it contains.
        status: status of the response; 0 if unknown or without a response.
        tokens: as in `Usage`; None if not reported.
        refused: whether another guard refused it.
        model_ms: the upstream's time in milliseconds; 0 if unknown.
        errors: number of tool results that are errors.
        retry: whether it repeats a step.
        action: action on it, such as `steer` for a note to the model; empty if it was forwarded
            unchanged.
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
        name: hash of the agent's name.
        parent: hash of its parent's name, according to its first request; empty if the session
            started it.
        depth: level below the session; 0 if unknown because the policy does not limit agents.
        began: when it was first seen, in seconds since 1970.
        last: time of its newest request.
        requests: number of its requests.
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
        """Whether its newest request is recent and was not refused; `now` in seconds since 1970."""
        return not self.refused and now - self.last < ACTIVE_SECONDS


class SessionRefusal(msgspec.Struct, array_like=True):
    """A refusal by a session limit.

    Attributes:
        at: time in seconds since 1970.
        limit: name of the limit.
        used: amount used.
        allowed: the limit, including grants.
        tool: the limited tool; empty for all.
        agent: hash of the agent that sent the request; empty for the session itself.
    """

    at: float
    limit: str
    used: int
    allowed: int
    tool: str
    agent: str = ""


Amounts = list[tuple[str, str, int]]
"""Limits or grants, each as (limit, tool or empty for all, amount)."""


class RunEvent(msgspec.Struct, array_like=True):
    """A series of equal refusals, or a grant.

    Attributes:
        at: when it was first noted, in seconds since 1970.
        limit: the limit that refused; empty for a grant.
        used: amount used at the last refusal.
        allowed: the limit, including grants.
        tool: the limited tool; empty for all.
        times: number of consecutive refusals.
        grant: name of the grant; empty for a refusal.
        granted: the granted amounts.
    """

    at: float
    limit: str
    used: int = 0
    allowed: int = 0
    tool: str = ""
    times: int = 1
    grant: str = ""
    granted: Amounts = []


_LATER = join(
    lambda one, other: other if one is None or (other is not None and other.at > one.at) else one
)
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
    first_input: Annotated[int, _TOLD] = 0
    newest_input: Annotated[int, _TOLD] = 0

    name = property(attrgetter("policy", "mode", "tenant", "session"))


COUNTED = (
    "killed",
    "steps",
    "tool_calls",
    "cost",
    "estimated",
    "reserved",
    "blocks",
    "consecutive_blocks",
    "consecutive_errors",
    "tokens",
    "model_ms",
    "failures",
    "first_input",
    "newest_input",
)
"""Fields that a row copies from a `Standing`."""


class SessionDocument(Document, array_like=True):
    """Sessions, the most recent first."""

    rows: Annotated[list[SessionRow], SUM]
    left_out: Annotated[int, SUM] = 0

    def pack(self) -> bytes:
        """Pack what fits on a board.

        The oldest sessions lose their details first, then their rows.
        """
        rows = self.rows
        bare = [msgspec.structs.replace(row, calls=[], agents=[], events=[]) for row in rows]

        def make(kept: int) -> SessionDocument:
            detailed = max(0, kept - len(rows))
            return SessionDocument(
                [*rows[:detailed], *bare[detailed:kept]], max(0, len(rows) - kept)
            )

        return fit(len(rows) + min(len(rows), MAX_DETAILED), make)

    def finish(self, now: float) -> None:
        """See `Document`."""
        self.rows = merge_sessions(self.rows, now - KEPT_SECONDS)


def merge_sessions(rows: Iterable[SessionRow], since: float) -> list[SessionRow]:
    """Merge rows into one per session, newest first, without sessions idle since `since`."""
    merged = merge([row for row in rows if row.last >= since])
    for row in merged:
        began = row.began - _SKEW
        calls = merge(sorted(row.calls, key=lambda call: call.at))
        row.calls = [call for call in calls if call.at >= began][-MAX_CALLS:]
        row.agents = [agent for agent in merge_agents(row.agents) if agent.last >= began]
        row.events = [event for event in merge_events(row.events) if event.at >= began][
            -MAX_EVENTS:
        ]
        if row.refusal is not None and row.refusal.at < began:
            row.refusal = None
    return sorted(merged, key=lambda row: -row.last)


def merge_events(events: Iterable[RunEvent]) -> list[RunEvent]:
    """Events without duplicates, oldest first.

    Each replica notes a grant when it first applies it.
    """
    merged: dict[object, RunEvent] = {}
    for event in sorted(events, key=lambda event: event.at):
        merged.setdefault(event.grant or (event.at, event.limit, event.tool), event)
    return list(merged.values())


def merge_agents(rows: Iterable[AgentRow]) -> list[AgentRow]:
    """Merge rows into one per agent, oldest first.

    Beyond MAX_AGENTS_SHOWN, refused agents are dropped first.
    """
    merged = merge(sorted(rows, key=lambda row: row.began))
    kept = {
        row.name
        for row in sorted(merged, key=lambda row: (not row.refused, row.last))[-MAX_AGENTS_SHOWN:]
    }
    return [row for row in merged if row.name in kept]


def order_tree(rows: Sequence[AgentRow]) -> list[tuple[int, AgentRow]]:
    """Agents with their levels, parents before children.

    Clients may claim circular parents, so each is placed once.
    """
    known = {row.name for row in rows}
    children: dict[str, list[AgentRow]] = {}
    for row in rows:
        children.setdefault(
            row.parent if row.parent in known and row.parent != row.name else "", []
        ).append(row)
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
    for row in rows:  # the oldest agent of a circle becomes its root
        place([row] if row.name not in placed else [])
    return ordered
