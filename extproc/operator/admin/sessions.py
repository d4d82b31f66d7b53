"""The sessions of all replicas, as they tell them each other.

What a session has used up every replica knows from the ledger that they share: whoever was told last is right. Its calls come
together from those that let them through and those that heard of their answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import time
from typing import Any

import msgspec

from extproc.operator.admin.board import KEPT_SECONDS, Board, fit
from extproc.operator.session_table import MAX_CALLS, Run, SessionCall, SessionRefusal, SessionTable
from extproc.store import Store

BOARD = "sessions"

_MAX_DETAILED = 200
"""So many sessions are told with their calls, the newest; more would not fit on a board anyway."""

_CALL_NAME = 4
"""Bytes of a call's name that tell it from the others of its session."""

_SKEW = 1.0
"""Seconds by which clocks of replicas may differ: a call that is older than its session belongs to one that has ended."""


class CallRow(msgspec.Struct, array_like=True):
    """A call as replicas tell it each other; see `SessionCall`. New fields go behind the others and have a default."""

    name: bytes
    at: float
    model: str
    tools: list[str]
    status: int
    tokens: list[int] | None
    settled: bool
    refused: bool

    def absorb(self, other: CallRow) -> None:
        """Take what a replica knows of the same call that has seen it later."""
        self.model, self.tools = self.model or other.model, self.tools or other.tools
        if other.settled:
            self.status, self.tokens, self.settled, self.refused = other.status, other.tokens, True, other.refused


class RefusalRow(msgspec.Struct, array_like=True):
    """The newest refusal as replicas tell it each other; see `SessionRefusal`."""

    at: float
    limit: str
    used: int
    allowed: int
    tool: str


class SessionRow(msgspec.Struct, array_like=True):
    """A session as replicas tell it each other; see `Run`. New fields go behind the others and have a default."""

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
    refusal: RefusalRow | None
    calls: list[CallRow]

    def absorb(self, other: SessionRow) -> None:
        """Take what another replica knows of the same session."""
        if other.told > self.told:
            for field in _LEDGER:
                setattr(self, field, getattr(other, field))
        if other.last > self.last:
            self.last, self.ordered = other.last, other.ordered
        if other.refusal is not None and (self.refusal is None or other.refusal.at > self.refusal.at):
            self.refusal = other.refusal
        self.caller = self.caller or other.caller
        self.calls = merge_calls([*self.calls, *other.calls])


_LEDGER = (
    "began",
    "told",
    "killed",
    "steps",
    "tool_calls",
    "tools",
    "cost",
    "estimated",
    "reserved",
    "blocks",
    "consecutive_blocks",
    "consecutive_errors",
)
"""The fields that say what a session has used up."""


class SessionDocument(msgspec.Struct, array_like=True):
    """What one replica publishes."""

    rows: list[SessionRow]
    left_out: int = 0


class SessionView(msgspec.Struct):
    """What all replicas know.

    Attributes:
        rows: one for each session, that of the newest request first.
        replica: who was asked.
        replicas: whose tables these are.
        left_out: sessions that did not fit on the board.
        problem: why other replicas' tables are missing or old, empty where they are not.
    """

    rows: list[SessionRow]
    replica: str
    replicas: list[str]
    left_out: int
    problem: str


decode_sessions = msgspec.msgpack.Decoder(SessionDocument).decode


class SharedSessions:
    """The tables of all replicas.

    Attributes:
        board: where they are.
    """

    def __init__(self, table: SessionTable, store: Store, shows_callers: Callable[[], bool], replica: str = "") -> None:
        """Nothing is shared until the board is; callers' values leave this process only where they may be shown."""
        self._table = table
        self._shows_callers = shows_callers
        self.board = Board(BOARD, store, table, self._make, pack_sessions, decode_sessions, replica)

    def view(self) -> SessionView:
        """What all replicas know; called from any thread but the event loop's."""
        documents = self.board.collect()
        return SessionView(
            merge_sessions((row for document in documents.values() for row in document.rows), time() - KEPT_SECONDS),
            self.board.replica,
            sorted(documents),
            sum(document.left_out for document in documents.values()),
            self.board.problem,
        )

    def _make(self) -> SessionDocument:
        return list_sessions(self._table, shows_callers=self._shows_callers())


def list_sessions(table: SessionTable, *, shows_callers: bool) -> SessionDocument:
    """A table as it is now, the newest first."""
    runs = sorted(table.copy(), key=lambda run: -run.last)
    rows = [_make_row(run, shows_callers=shows_callers, detailed=place < _MAX_DETAILED) for place, run in enumerate(runs)]
    return SessionDocument(rows)


def pack_sessions(document: SessionDocument) -> bytes:
    """A document small enough for a board: where it is not, the oldest sessions lose their calls first, then their places."""
    rows = document.rows
    bare = [msgspec.structs.replace(row, calls=[]) for row in rows]

    def make(kept: int) -> SessionDocument:
        detailed = max(0, kept - len(rows))
        return SessionDocument([*rows[:detailed], *bare[detailed:kept]], max(0, len(rows) - kept))

    return fit(len(rows) + min(len(rows), _MAX_DETAILED), make)


def merge_sessions(rows: Iterable[SessionRow], since: float) -> list[SessionRow]:
    """One row for each session that had a request since then, the newest first."""
    merged: dict[tuple[Any, ...], SessionRow] = {}
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


def _make_row(run: Run, *, shows_callers: bool, detailed: bool) -> SessionRow:
    standing = run.standing
    return SessionRow(
        run.policy,
        run.mode,
        run.tenant,
        run.session,
        list(run.caller) if shows_callers else [],
        run.began,
        run.last,
        run.told,
        run.ordered,
        standing.killed,
        standing.steps,
        standing.tool_calls,
        [(name, count) for _, name, count in standing.tools],
        standing.cost,
        standing.estimated,
        standing.reserved,
        standing.blocks,
        standing.consecutive_blocks,
        standing.consecutive_errors,
        _make_refusal(run.refusal),
        [_make_call(call) for call in run.calls.copy()] if detailed else [],
    )


def _make_refusal(refusal: SessionRefusal | None) -> RefusalRow | None:
    if refusal is None:
        return None
    return RefusalRow(refusal.at, refusal.limit, refusal.used, refusal.allowed, refusal.tool)


def _make_call(call: SessionCall) -> CallRow:
    tokens, tools = None if call.usage is None else list(call.usage), [call.tool] if call.tool else []
    return CallRow(call.name[:_CALL_NAME], call.at, call.model, tools, call.status, tokens, call.settled, call.refused)
