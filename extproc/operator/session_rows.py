"""Sessions as replicas publish them, and how the rows of several replicas are merged.

The replicas share a session's ledger, so the newest counts are right. Its calls are merged from the replicas that let them
through and those that saw their responses. New fields go behind the others and have a default.
"""
# interpreted: msgspec makes its classes

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from extproc.operator.agents import AgentRow, merge_agents
from extproc.operator.board import KEPT_SECONDS, fit

MAX_CALLS = 64
MAX_EVENTS = 32
"""Calls, and refusals and grants, of a session that are shown, the newest; its counts include all."""

MAX_DETAILED = 200
"""Number of sessions, the newest, that are published with their calls; more would not fit on a board."""

_SKEW = 1.0
"""Seconds by which clocks of replicas may differ: a call that is older than its session belongs to one that has ended."""


class CallRow(msgspec.Struct, array_like=True):
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
    model: str
    tools: list[str]
    status: int = 0
    tokens: tuple[int, ...] | None = None
    settled: bool = False
    refused: bool = False
    model_ms: int = 0
    errors: int = 0
    retry: bool = False
    action: str = ""

    def absorb(self, other: CallRow) -> None:
        """Add what another replica knows of the same call."""
        self.model, self.tools = self.model or other.model, self.tools or other.tools
        self.errors, self.retry = self.errors or other.errors, self.retry or other.retry
        self.action = self.action or other.action
        if other.settled:
            self.model_ms = other.model_ms
            self.status, self.tokens, self.settled, self.refused = other.status, other.tokens, True, other.refused


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
    granted: Amounts = []  # msgspec copies a default for each object


class SessionRow(msgspec.Struct, array_like=True):
    """A session; see `Run`."""

    policy: str
    mode: str
    tenant: str
    session: str
    caller: list[tuple[str, str]]
    began: float
    last: float
    told: float
    ordered: bool
    killed: int
    steps: int
    tool_calls: int
    tools: list[tuple[str, int]]
    cost: int
    estimated: int
    reserved: int
    blocks: int
    consecutive_blocks: int
    consecutive_errors: int
    refusal: SessionRefusal | None
    calls: list[CallRow]
    alias: str = ""
    labels: list[tuple[str, str]] = []  # msgspec copies a default for each object
    credentials: list[str] = []
    unnamed: int = 0
    tokens: tuple[int, ...] = (0, 0, 0, 0)
    model_ms: int = 0
    failures: int = 0
    limits: Amounts = []
    granted: Amounts = []
    events: list[RunEvent] = []
    agents: list[AgentRow] = []
    agents_begun: int = 0
    agents_refused: int = 0
    started_by: str = ""
    parts: list[str] = []

    def absorb(self, other: SessionRow) -> None:
        """Add what another replica knows of the same session."""
        if other.told > self.told:
            for field in _LEDGER:
                setattr(self, field, getattr(other, field))
        if other.last > self.last:
            self.last, self.ordered = other.last, other.ordered
            self.limits, self.granted = other.limits, other.granted
        if other.refusal is not None and (self.refusal is None or other.refusal.at > self.refusal.at):
            self.refusal = other.refusal
        self.caller = self.caller or other.caller
        self.alias, self.labels = self.alias or other.alias, self.labels or other.labels
        self.unnamed += other.unnamed
        self.calls = merge_calls([*self.calls, *other.calls])
        self.agents = merge_agents([*self.agents, *other.agents])
        self.started_by = self.started_by or other.started_by
        self.events = merge_events([*self.events, *other.events])


COUNTED = (
    "killed", "steps", "tool_calls", "cost", "estimated", "reserved", "blocks", "consecutive_blocks", "consecutive_errors",
    "tokens", "model_ms", "failures",
)  # fmt: skip
"""Fields that a row copies from a `Standing`."""

_LEDGER = ("began", "told", "tools", "agents_begun", "agents_refused", *COUNTED)


class SessionDocument(msgspec.Struct, array_like=True):
    """What one replica publishes, or what all replicas know: most recent sessions first, and how many did not fit."""

    rows: list[SessionRow]
    left_out: int = 0

    def pack(self) -> bytes:
        """As much as fits on a board: the oldest sessions lose their calls and agents first, then their rows."""
        rows = self.rows
        bare = [msgspec.structs.replace(row, calls=[], agents=[], events=[]) for row in rows]

        def make(kept: int) -> SessionDocument:
            detailed = max(0, kept - len(rows))
            return SessionDocument([*rows[:detailed], *bare[detailed:kept]], max(0, len(rows) - kept))

        return fit(len(rows) + min(len(rows), MAX_DETAILED), make)

    @classmethod
    def merge(cls, documents: Iterable[SessionDocument], now: float) -> SessionDocument:
        """Merge documents; `now` is in seconds since 1970."""
        every = list(documents)
        rows = merge_sessions((row for document in every for row in document.rows), now - KEPT_SECONDS)
        return cls(rows, sum(document.left_out for document in every))


def merge_sessions(rows: Iterable[SessionRow], since: float) -> list[SessionRow]:
    """One row for each session that had a request since then, most recent first."""
    merged: dict[tuple[str, ...], SessionRow] = {}
    for row in rows:
        if row.last < since:
            continue
        key = (row.policy, row.mode, row.tenant, row.session)
        if (known := merged.get(key)) is None:
            merged[key] = msgspec.structs.replace(row)
        else:
            known.absorb(row)
    for row in merged.values():
        row.calls = [call for call in row.calls if call.at >= row.began - _SKEW][-MAX_CALLS:]
        row.agents = [agent for agent in row.agents if agent.last >= row.began - _SKEW]
        row.events = [event for event in row.events if event.at >= row.began - _SKEW][-MAX_EVENTS:]
        if row.refusal is not None and row.refusal.at < row.began - _SKEW:
            row.refusal = None
    return sorted(merged.values(), key=lambda row: -row.last)


def merge_calls(calls: Iterable[CallRow]) -> list[CallRow]:
    """One row for each call, oldest first."""
    merged: dict[bytes, CallRow] = {}
    for call in sorted(calls, key=lambda call: call.at):
        if (known := merged.get(call.name)) is None:
            merged[call.name] = msgspec.structs.replace(call)
        else:
            known.absorb(call)
    return list(merged.values())


def merge_events(events: Iterable[RunEvent]) -> list[RunEvent]:
    """Each event once, oldest first. Every replica notes a grant when it first applies it."""
    merged: dict[object, RunEvent] = {}
    for event in sorted(events, key=lambda event: event.at):
        merged.setdefault(event.grant or (event.at, event.limit, event.tool), event)
    return list(merged.values())
