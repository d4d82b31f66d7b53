"""Recent sessions for operators: the usage, last refusal and newest calls of each.

Usage comes from the session's ledger in the store, which all replicas share. This table only
displays it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from extproc.engine.orders import ActiveOverride
from extproc.operator.session_rows import (
    COUNTED,
    MAX_AGENTS_SHOWN,
    MAX_CALLS,
    MAX_DETAILED,
    MAX_EVENTS,
    AgentRow,
    Amounts,
    CallRow,
    RunEvent,
    SessionDocument,
    SessionRefusal,
    SessionRow,
)
from extproc.operator.table import NAME_SHOWN, UNKNOWN, Table, cut_caller
from extproc.request.http import cut_text
from extproc.sessions.limits import (
    MAX_AGENTS,
    MAX_CONCURRENT,
    MAX_COST,
    MAX_DEPTH,
    MAX_SPAWNS,
    MAX_STEPS,
    MAX_TOOL_CALLS,
    PER_TOOL,
)
from extproc.sessions.rates import Usage
from extproc.store.rules.session import KILLED, LIMITS, NANO_DOLLARS, Standing
from extproc.store.rules.tree import TreeStanding

OPERATOR: Final = "operator"
"""The killer of a session that an operator killed."""

_KILLED_LIMIT: Final = LIMITS.index("killed")
_DIGITS: Final = 9

_UNKNOWN: Final = Standing()

_DEEPEST: Final = 32
"""Maximum length of a chain of sessions, each started by the next, that is followed."""

_CALL_NAME: Final = 4
"""Bytes of a call's name that are published; enough to be unique in its session."""


class RunName(NamedTuple):
    """The key of a session; `tenant` and `session` are hashes."""

    tenant: str
    policy: str
    mode: str
    session: str


class Run:
    """One session under one policy.

    Attributes:
        known: alias, labels and the like, shown with the caller's hash.
        last: time of the last request, in seconds since 1970.
        standing: the newest known standing.
        told: when `standing` was received.
        ordered: whether an operator killed the session.
        calls: the newest calls, oldest first.
        unnamed: number of requests without a session, if the row collects these.
        agents: the most recent agents, by name.
        tree: the newest known state of all agents; None if agents are not limited.
        started_by: the session that seems to have started this one as an agent; empty for none.
        limits: the limits, without grants.
        granted: the sums of all grants.
        events: the newest refusals and grants, oldest first.
    """

    def __init__(self, name: RunName, now: float) -> None:
        self.name = name
        self.caller: list[tuple[str, str]] = []
        self.known = UNKNOWN
        self.last = now
        self.standing = _UNKNOWN
        self.told = now
        self.ordered = False
        self.refusal: SessionRefusal | None = None
        self.calls: list[CallRow] = []
        self.unnamed = 0
        self.agents: dict[str, AgentRow] = {}
        self.tree: TreeStanding | None = None
        self.started_by = ""
        self.limits: Amounts = []
        self.granted: Amounts = []
        self.events: list[RunEvent] = []
        self._grants: Sequence[ActiveOverride] = ()
        self._model = ""
        self._given: Sequence[str] = ()
        self._tools: list[str] = []

    @property
    def began(self) -> float:
        """Start of the session, in seconds since 1970."""
        return self.told - self.standing.age_ms / 1000

    def update(self, standing: Standing, now: float) -> None:
        """Adopt a standing, unless it is empty."""
        if standing.steps or standing.blocks or standing.cost or standing.tool_calls:
            if standing.age_ms < self.standing.age_ms:  # a new session with the same name
                self.agents.clear()
            self.tree = standing.tree or self.tree
            self.standing = standing
            self.told = now

    def note_agent(self, name: str, parent: str, standing: Standing, now: float) -> None:
        """Note a request of an agent.

        A full table evicts the oldest refused agent, else the least recently seen one.
        """
        row = self.agents.pop(name, None)
        if row is None:
            if len(self.agents) >= MAX_AGENTS_SHOWN:
                del self.agents[
                    next(
                        (each.name for each in self.agents.values() if each.refused),
                        next(iter(self.agents)),
                    )
                ]
            row = AgentRow(name, parent, 0, now, now)
        self.agents[name] = row
        row.last, row.refused = now, LIMITS[standing.limit]
        row.requests += 1
        if standing.tree is not None:
            row.depth = standing.tree.depth or row.depth

    def refuse(self, standing: Standing, now: float, agent: str) -> None:
        """Note a refused request; one that waits for pending requests is not shown as a refusal."""
        limit, tool = LIMITS[standing.limit], _find_tool(standing)
        if not standing.waits:
            self.refusal = SessionRefusal(now, limit, standing.used, standing.allowed, tool, agent)
        newest = self.events[-1] if self.events else None
        if newest is not None and (newest.limit, newest.tool) == (limit, tool):
            newest.times, newest.used, newest.allowed = (
                newest.times + 1,
                standing.used,
                standing.allowed,
            )
        else:
            self._add_event(RunEvent(now, limit, standing.used, standing.allowed, tool))

    def grant(self, grants: Sequence[ActiveOverride], now: float) -> None:
        """Set the grants that apply to a request; new ones are noted as events."""
        if grants == self._grants:
            return
        known = {override.name for override in self._grants}
        self._grants = grants
        sums: dict[tuple[str, str], int] = {}
        for override in grants:
            given = list_granted(override)
            for limit, tool, amount in given:
                sums[limit, tool] = sums.get((limit, tool), 0) + amount
            if override.name not in known:
                self._add_event(RunEvent(now, "", grant=override.name, granted=given))
        self.granted = [(limit, tool, amount) for (limit, tool), amount in sums.items()]

    def _add_event(self, event: RunEvent) -> None:
        self.events.append(event)
        if len(self.events) > MAX_EVENTS:
            del self.events[0]

    def add_call(self, name: bytes, model: str, tools: Sequence[str], now: float) -> CallRow:
        """Add a call, evicting the oldest if full."""
        # Calls share these if unchanged, to save memory
        if model != self._model or tools != self._given or not self.calls:
            self._model, self._given = cut_text(model, NAME_SHOWN), tools
            self._tools = [cut_text(tool, NAME_SHOWN) for tool in tools]
        call = CallRow(name, now, self._model, self._tools)
        self.calls.append(call)
        if len(self.calls) > MAX_CALLS:
            del self.calls[0]
        return call

    def find_call(self, name: bytes) -> CallRow | None:
        """The call with this name, or None."""
        for call in reversed(self.calls):
            if call.name == name:
                return call
        return None


class SessionTable(Table[Run, SessionDocument]):
    """The sessions seen by this process."""

    def note(  # noqa: PLR0913  # what is known of a request
        self,
        name: tuple[str, str, str, str],
        caller: list[tuple[str, str]],
        standing: Standing,
        model: str,
        tools: Sequence[str],
        call: bytes,
        now: float,
        errors: int = 0,
        agent: str = "",
        parent: str = "",
        action: str = "",
    ) -> Run:
        """Note a request of a session.

        Args:
            name: the fields of a `RunName`.
            caller: names and values of the caller's descriptors.
            standing: the store's answer to the step.
            model: the requested model.
            tools: tools that ran before the request.
            call: the step's name.
            now: in seconds since 1970.
            errors: number of tool results that are errors.
            agent: hash of the agent's name.
            parent: hash of the name of the agent's parent.
            action: see `CallRow`.
        """
        run = self._get_or_begin(name, standing, now)
        if not run.caller and caller:
            run.caller = cut_caller(caller)
        run.last = now
        run.ordered = standing.limit == _KILLED_LIMIT and not standing.killed
        if agent:
            run.note_agent(agent, parent, standing, now)
        if standing.limit:
            run.refuse(standing, now, agent)
        else:
            added = run.add_call(call, model, tools, now)
            if errors or standing.retry:
                added.errors, added.retry = errors, standing.retry
            if action:
                added.action = action
        return run

    def link(self, name: tuple[str, str, str, str], others: Sequence[str]) -> None:
        """Note sessions that this one seems to have started. Its own ancestors are skipped."""
        before: list[str] = []
        run = self.peek(name)
        while run is not None and len(before) < _DEEPEST:
            before.append(run.name.session)
            run = self.peek((*name[:3], run.started_by)) if run.started_by else None
        for other in others:
            child = self.peek((*name[:3], other))
            if child is not None and not child.started_by and other not in before:
                child.started_by = name[3]

    def note_unnamed(self, name: RunName, caller: list[tuple[str, str]], now: float) -> None:
        """Note a request without a session; see `note`."""
        run = self._get_or_begin(name, _UNKNOWN, now)
        run.caller = run.caller or cut_caller(caller)
        run.last = now
        run.unnamed += 1

    def settle(  # noqa: PLR0913  # what is known of an answer
        self,
        name: tuple[str, str, str, str],
        standing: Standing,
        model: str,
        call: bytes,
        status: int,
        usage: Usage | None,
        now: float,
        *,
        refused: bool = False,
        model_ms: int = 0,
    ) -> None:
        """Note a request's settlement. Another replica may have let the request through.

        Args:
            name: the fields of a `RunName`.
            standing: the store's answer to the settlement.
            model: the requested model.
            call: the step's name.
            status: HTTP status of the response; 0 if there was none.
            usage: the response's tokens; None if unknown.
            now: in seconds since 1970.
            refused: whether another guard refused the request.
            model_ms: the upstream's time, in milliseconds.
        """
        run = self._get_or_begin(name, standing, now)
        found = run.find_call(call) or run.add_call(call, model, (), now)
        found.model_ms = model_ms
        found.status, found.tokens, found.settled, found.refused = status, usage, True, refused

    def make_document(self, *, shows_callers: bool) -> SessionDocument:
        """A snapshot of the table, newest first.

        Callers' values are left out unless they may be shown.
        """
        runs = sorted(self.copy(), key=lambda run: -run.last)
        rows = [
            _make_row(run, shows_callers=shows_callers, detailed=place < MAX_DETAILED)
            for place, run in enumerate(runs)
        ]
        return SessionDocument(rows)

    def _get_or_begin(self, name: tuple[str, str, str, str], standing: Standing, now: float) -> Run:
        run = self.use(name)
        if run is None:
            run = Run(RunName(*name), now)
            self.put(run.name, run)
        run.update(standing, now)
        return run


def _make_row(run: Run, *, shows_callers: bool, detailed: bool) -> SessionRow:
    standing = run.standing
    return SessionRow(
        **run.name._asdict(),
        caller=run.caller if shows_callers else [],
        began=run.began,
        last=run.last,
        told=run.told,
        ordered=run.ordered,
        tools=[(name, count) for _, name, count in standing.tools],
        refusal=run.refusal,
        calls=[replace(call, name=call.name[:_CALL_NAME]) for call in run.calls.copy()]
        if detailed
        else [],
        **{name: getattr(standing, name) for name in COUNTED},
        **run.known._asdict(),
        unnamed=run.unnamed,
        agents=list(run.agents.copy().values()) if detailed else [],
        agents_begun=run.tree.agents if run.tree is not None else 0,
        agents_refused=run.tree.refused if run.tree is not None else 0,
        started_by=run.started_by,
        limits=run.limits,
        granted=run.granted,
        events=[replace(event) for event in run.events.copy()] if detailed else [],
    )


def _find_tool(standing: Standing) -> str:
    """The name of the limit's tool, or its digest if the name is unknown."""
    for digest, name, _ in standing.tools:
        if digest == standing.tool:
            return name
    return standing.tool.hex()


def list_granted(override: ActiveOverride) -> Amounts:
    """The amounts that a grant adds, by limit."""
    grant = override.grant
    sums = (
        (MAX_STEPS, grant.steps),
        (MAX_TOOL_CALLS, grant.tool_calls),
        (MAX_COST, grant.cost),
        (MAX_DEPTH, grant.depth),
        (MAX_AGENTS, grant.agents),
        (MAX_CONCURRENT, grant.concurrent_agents),
        (MAX_SPAWNS, grant.spawns_per_minute),
    )
    tools = [(PER_TOOL, cut_text(tool, NAME_SHOWN), calls) for tool, calls in override.tools]
    return [*[(limit, "", amount) for limit, amount in sums if amount], *tools]


def name_killer(killed: int, *, ordered: bool) -> str:
    """What killed a session.

    `OPERATOR` if ordered, else an entry of `KILLED`; empty if it is not killed.
    """
    return OPERATOR if ordered else KILLED[killed]


def convert_amount(limit: str, amount: int) -> int | float:
    """Convert an amount to the limit's unit."""
    return convert_dollars(amount) if limit == MAX_COST else amount


def convert_dollars(amount: int) -> float:
    """Convert nano-dollars to dollars."""
    return round(amount / NANO_DOLLARS, _DIGITS)
