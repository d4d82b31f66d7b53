"""A policy's `session_limits`, compiled: questions for the store, and outcomes from its answers.

What a session has used is in its ledger, in the store.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from decimal import Decimal
from typing import Final, NamedTuple

from extproc.decision import Action, Advice, Framed, Outcome, Reason, RefusalForm
from extproc.detectors.chain import digest_tool
from extproc.request.quoting import quote
from extproc.sessions.history import RECORD, CallHistory
from extproc.sessions.names import Chains, SessionNames
from extproc.sessions.rates import Rates, TokenPrice
from extproc.sessions.session_limits import (
    MAX_AGENTS as MOST_AGENTS,
    Notice,
    Price,
    Session,
    SessionLimits,
    UnnamedLimits,
)
from extproc.sessions.trees import AgentNames, Roots
from extproc.store.rules.root import RootSearch
from extproc.store.rules.session import LIMITS, NANO_DOLLARS, Limits, Standing, Step
from extproc.store.rules.tree import AGENT_LIMITS, NO_LIMITS, AgentLimits, TreeStep

DETECTOR: Final = "session"
"""The detector's name in outcomes."""

NARROW: Final = "narrow"
"""How reports name a request from which tools were removed, beside the actions."""

NO_CALLS: Final = CallHistory(b"", 0, 0, (), "", 0)
NO_GRANTS: Final = (0, 0, 0)

(
    KILLED,
    MAX_STEPS,
    MAX_TOOL_CALLS,
    MAX_COST,
    PER_TOOL,
    LOOP,
    MAX_DEPTH,
    MAX_AGENTS,
    MAX_CONCURRENT,
    MAX_SPAWNS,
) = LIMITS[1:]

MAX_INPUT_GROWTH: Final = "max_input_growth"
"""A limit that only adds notes, so it is not in `LIMITS`."""

LEAST_INPUT: Final = 10_000
"""The first input of a session counts as at least this many tokens.

Below, compacting saves nothing: a summary of 2,000 tokens costs as much as an input of 10,000. And
a session that begins with a short question does not grow at once.
"""

UNNAMED: Final = "unnamed"
"""Stands for the session of all requests of a caller that name none."""

_MOST_SESSIONS: Final = 2**31
_MOST_SHOWN: Final = 8
_NONE: Final = -1
# Offsets in a record.
_TOOL: Final = 6
_ACTION: Final = 10

_WORDS: Final = {
    MAX_STEPS: "steps",
    MAX_TOOL_CALLS: "tool calls",
    MAX_COST: "dollars",
    MAX_AGENTS: "agents",
}
"""Units in messages."""

_AGENT_WORDS: Final = {
    MAX_AGENTS: "agents",
    MAX_DEPTH: "levels of agents",
    MAX_CONCURRENT: "active agents",
    MAX_SPAWNS: "agents in a minute",
}
"""Units of agent limits in messages."""

_GRANTING: Final = {
    MAX_DEPTH: "--depth",
    MAX_AGENTS: "--agents",
    MAX_CONCURRENT: "--concurrent-agents",
    MAX_SPAWNS: "--spawns-per-minute",
}
"""Flags of `loopguard grant` for agent limits."""

RETRY_SECONDS: Final = 5
"""`Retry-After` while other requests are unanswered. Most models answer within seconds."""

BATCH: Final = 8
PAIR: Final = 2
"""Assumed calls of a tool in one answer: the most in one answer of the history, but at least `PAIR`
and at most `BATCH`. If a limit leaves fewer, answers may call only one tool at a time."""

_NO_TOOLS: Final[frozenset[str]] = frozenset()


class Narrowing(NamedTuple):
    """Tools to remove from a request.

    Attributes:
        every: remove all tools except `kept`.
        tools: names of tools to remove.
        kept: names of tools to leave.
        scarce: names of tools with fewer calls left than one answer may make; parallel calls are
            turned off.
    """

    every: bool
    tools: frozenset[str] = _NO_TOOLS
    kept: frozenset[str] = _NO_TOOLS
    scarce: frozenset[str] = _NO_TOOLS

    @property
    def removes(self) -> bool:
        """Whether it removes tools."""
        return self.every or bool(self.tools)


class SessionSubject:
    """A session's limit, for messages; a `Subject`.

    Attributes:
        limit: one of `session.LIMITS`.
        used: the use of that limit.
        allowed: the limit, including grants.
        tool: the tool that the limit is for; empty if it is for several.
        ordered: an operator has killed the session.
        ask_for: the command with which an operator allows what was refused, for limits of a tool or
            of agents; else empty.
    """

    def __init__(  # noqa: PLR0913  # a record
        self,
        limit: str,
        used: int,
        allowed: int,
        tool: str = "",
        *,
        ordered: bool = False,
        ask_for: str = "",
    ) -> None:
        """Money is in nano-dollars."""
        self.limit = limit
        self.ask_for = ask_for
        self.ordered = ordered
        self.used = used
        self.allowed = allowed
        self.tool = tool

    @property
    def threshold(self) -> int | None:
        """See `Subject`."""
        return None

    @property
    def tools(self) -> tuple[str, ...]:
        """See `Subject`."""
        return (self.tool,) if self.tool else ()

    @property
    def reason(self) -> Reason:
        """The reason of refusals."""
        return Reason.LOOP_DETECTED if self.limit == LOOP else Reason.SESSION_LIMIT_EXCEEDED

    @property
    def shown(self) -> tuple[int | float, int | float]:
        """Used and allowed in the limit's own unit."""
        if self.limit == MAX_COST:
            return round(self.used / NANO_DOLLARS, 6), round(self.allowed / NANO_DOLLARS, 6)
        return self.used, self.allowed

    # A Subject's signature
    def write_message(self, outcome: Outcome, method: str, path: str) -> str:  # noqa: ARG002
        """See `Subject`."""
        if self.limit in AGENT_LIMITS:
            more = (
                f" The user can ask an operator to allow it with `{self.ask_for}`."
                if self.ask_for
                else ""
            )
            return (
                f"Agent limit reached: {self._explain_agents()}. This agent was not started. Do "
                "not retry, and start no other "
                "agent in its place: do the task yourself, or finish with the results you "
                f"have.{more}"
            )
        order = f"approve it with `{self.ask_for}`" if self.ask_for else "extend the session"
        reached = "Loop detected" if self.limit == LOOP else "Session limit reached"
        return (
            f"{reached}: {self._explain()}. Further requests of this session are refused. "
            "Do not retry: report the result you have so far to the user, who can ask an "
            f"operator to {order}."
        )

    # A Subject's signature
    def advise(self, outcome: Outcome, method: str, path: str) -> Advice:  # noqa: ARG002
        """See `Subject`."""
        used, allowed = self.shown
        if self.limit == MAX_INPUT_GROWTH:
            return Advice(
                f"a turn of this session now has {used:,} input tokens; it should have fewer than "
                f"{allowed:,}",
                "",
                "Compact now if you can: continue from a summary of the task, what is done and "
                "what is left. Otherwise read only what you need, in small parts.",
                "Input growing",
                harmless=True,
            )
        if self.limit == MAX_AGENTS:
            told = f"{used} of this session's {allowed} agents have been started"
            return Advice(
                told,
                "",
                "Start no agent that you can do without: further ones will be refused.",
                "Agent limit near",
            )
        left = (
            f"{max(allowed - used, 0):.6g} of this session's {allowed:.6g} "
            f"{_WORDS[self.limit]} are left"
        )
        return Advice(
            left,
            "",
            "Finish now: give the result you have, and say what is missing.",
            "Session limit near",
        )

    # A Subject's signature
    def frame(self, message: str, accept: str) -> Framed | None:  # noqa: ARG002
        """See `Subject`."""
        return None

    def _explain_agents(self) -> str:
        used, allowed = self.shown
        if self.limit == MAX_DEPTH:
            return f"it would be {used} levels below this session, and {allowed} are allowed"
        if self.limit == MAX_CONCURRENT:
            return f"{used} of the {allowed} agents that this session may have at a time are active"
        if self.limit == MAX_SPAWNS:
            return (
                f"this session has started {used} agents within a minute, and {allowed} are allowed"
            )
        return f"this session has started {used} of its {allowed} agents"

    def _explain(self) -> str:
        used, allowed = self.shown
        tool = quote(self.tool) if self.tool else "(unnamed)"
        if self.ordered:
            return "an operator has stopped this session"
        if self.limit == KILLED:
            return (
                "this session was stopped because too many of its requests in a row were "
                "refused or failed"
            )
        if self.limit == PER_TOOL:
            needs = " without approval" if allowed == 0 else ""
            times = "once" if used == 1 else f"{used} times"
            return (
                f"the tool {tool} was called {times} in this session{needs}; the limit is {allowed}"
            )
        if self.limit == LOOP:
            return (
                f"the tool {tool} was called {used} times with the same arguments in the "
                "newest steps"
            )
        return f"this session has used {used:.6g} of its {allowed:.6g} {_WORDS[self.limit]}"


class UnnamedSubject(SessionSubject):
    """The limit of a caller's requests without a session, for messages."""

    # A Subject's signature
    def write_message(self, outcome: Outcome, method: str, path: str) -> str:  # noqa: ARG002
        """See `Subject`."""
        used, allowed = self.shown
        return (
            "Session limit reached: this caller's requests that name no session have used "
            f"{used:.6g} of their {allowed:.6g} "
            f"{_WORDS[self.limit]}. Further ones are refused. Do not retry: report the result you "
            "have so far to the user. "
            "Requests that name a session, such as with the header x-session-id, have the limits "
            "of that session."
        )


class WaitingSubject(SessionSubject):
    """A session whose open requests may use up its money, for messages."""

    # A Subject's signature
    def write_message(self, outcome: Outcome, method: str, path: str) -> str:  # noqa: ARG002
        """See `Subject`."""
        _, allowed = self.shown
        return (
            f"The open requests of this session may use up the rest of its {allowed:.6g} dollars. "
            "Send this request again when one of them has been answered."
        )


WITHIN: Final = SessionSubject("", 0, 0)
"""The subject of a session within its limits."""


class SessionLimiter:
    """A policy's session limits, compiled.

    Attributes:
        policy: the policy's id.
        name: the guard's name among the policy's detectors.
        similarity_name: the same name, for code that reports a detector's similarity.
        mode: `enforce` or `shadow`.
        shadow: the policy is in shadow mode.
        names: finds the names of sessions.
        limits: the limits for the ledger.
        asks_usage: it makes streams report their usage.
        rates: prices of models.
        looks: it reads the calls in histories.
        max_inspect_bytes: maximum length of a body that it inspects.
        gives_notice: it acts before some limit is reached.
        steers: it adds a note to requests near a limit.
        steer_note: a detector's custom note; always empty here.
        refuses_later: notices are followed by refusals.
        narrows: it may remove tools from requests.
        needs_answers: a limit depends on responses of the upstream.
        refusal: the form of refusals.
        growth: `max_input_growth`; 0 for none.
        unnamed: the ledger's limits for requests without a session; None if unlimited.
        agent_names: finds the names of agents.
        agent_limits: limits of agents; None if unlimited.
        roots: the roots of agents that name only their parents.
        chains: keys for conversations without distinct names; their entries come from
            `digest_continuation`.
    """

    def __init__(  # noqa: PLR0913  # a policy's settings for it
        self,
        policy: str,
        limits: SessionLimits,
        unnamed: UnnamedLimits | None,
        session: Session,
        names: SessionNames,
        agent_names: AgentNames,
        max_inspect_bytes: int,
        *,
        shadow: bool,
        namespace: str,
    ) -> None:
        """Every key starts with the namespace."""
        self.max_inspect_bytes = max_inspect_bytes
        self.policy = policy
        self.name = self.similarity_name = DETECTOR
        self.steer_note = ""
        self.refuses_later = True
        self.shadow = shadow
        self.mode = "shadow" if shadow else "enforce"
        self.names = names
        self.agent_names = agent_names
        self.agent_limits = _compile_agents(limits) if limits.limits_agents() else None
        self.roots = Roots(policy, session.idle_seconds, namespace=namespace)
        self._trees = f"{namespace}tree:{policy}:"
        self.limits = compile_limits(limits, session)
        self.unnamed = None if unnamed is None else _compile_unnamed(unnamed, session)
        # Above, a tool may be scarce
        self._fewest = min([limit - BATCH for _, limit in self.limits.tools], default=0)
        self._unlimited = Limits(self.limits.idle_ms, self.limits.max_sessions)
        self.needs_answers = limits.needs_answers() or (
            unnamed is not None and unnamed.needs_answers()
        )
        self.rates = make_rates(limits.prices, limits.unknown_model)
        self._tool_names = {digest_tool(name): name for name in limits.max_calls_per_tool}
        self.growth = limits.max_input_growth or 0
        self._listed = [
            *self._list_limits(self.limits),
            *([(MAX_INPUT_GROWTH, "", self.growth)] if self.growth else []),
            *_list_agent_limits(self.agent_limits or NO_LIMITS),
        ]
        self._listed_unnamed = [] if self.unnamed is None else self._list_limits(self.unnamed)
        self._begun = self._narrow_tools(Standing(), self.limits, NO_CALLS, every=False)
        self._steer = _compile_notice(limits.escalate.steer)
        self._warn = _compile_notice(limits.escalate.warn)
        self.looks = True
        self.asks_usage = limits.usage is not None and not shadow
        self.steers = bool(self._steer) or self.growth > 0
        self.gives_notice = self.steers or bool(self._warn)
        self.narrows = self.limits.narrows or self.limits.finishes or bool(self.limits.tools)
        self.refusal = RefusalForm(
            limits.reject_status if isinstance(limits.reject_status, int) else None
        )
        self._key = f"{namespace}session7:{policy}:"
        self._tenants = f"{namespace}sessions2:{policy}:"
        self.chains = Chains(policy, session.idle_seconds, namespace=namespace)

    @property
    def lifetime_seconds(self) -> int:
        """How long a request affects the store."""
        return self.limits.idle_ms // 1000

    def describe(self, session: str) -> str:
        """The limits that refuse requests of a session, or without one, in words."""
        limits = self.find_limits(session)
        shown = [(limits.steps, "steps"), (limits.tool_calls, "tool calls")]
        words = [f"{limit} {unit}" for limit, unit in shown if limit != _NONE]
        words += [f"{limits.cost / NANO_DOLLARS:g} dollars"] if limits.cost != _NONE else []
        words += [
            f"{limit} {'call' if limit == 1 else 'calls'} of {self._tool_names[digest]}"
            for digest, limit in limits.tools
        ]
        words += (
            [f"{limits.threshold} equal calls in {limits.window} steps"]
            if limits.threshold != _NONE
            else []
        )
        words += [f"{limits.blocks} refusals in a row"] if limits.blocks != _NONE else []
        agents = NO_LIMITS if session == UNNAMED else self.agent_limits or NO_LIMITS
        words += [f"{limit} {_AGENT_WORDS[name]}" for name, _, limit in _list_agent_limits(agents)]
        return ", ".join(
            [*words, f"{limits.errors} errors in a row"] if limits.errors != _NONE else words
        )

    def find_limits(self, session: str) -> Limits:
        """The limits of a session, or of requests without one."""
        return self.unnamed if session == UNNAMED and self.unnamed is not None else self.limits

    def limits_tool(self, tool: str) -> bool:
        """Whether a tool has a limit of its own."""
        return tool in self._tool_names.values()

    def extend_tools(self, granted: Mapping[str, int]) -> Limits:
        """The limits of a session with grants: additional calls by tool name."""
        limits = self.limits
        tools = [
            (digest, limit + granted.get(self._tool_names[digest], 0))
            for digest, limit in limits.tools
        ]
        return limits.with_tools(tuple(tools))

    def find_growth(self, standing: Standing) -> int:
        """The input tokens at which notes start, if the newest answer has reached them; else 0."""
        start = self.growth * max(standing.first_input, LEAST_INPUT)
        return start if standing.newest_input >= start else 0

    def owns(self, key: str) -> bool:
        """Whether a key may belong to one of its ledgers."""
        return key.startswith(self._key)

    def find_ledger(self, scope: str, tenant: str, session: str) -> str:
        """The key of a session's ledger.

        `session` is the hash of its name or, after a release, its replacement.
        """
        return f"{self._key}{scope}:{session}:{tenant}"

    def find_tree(self, scope: str, tenant: str, session: str) -> str:
        """The key of a session's tree of agents."""
        return f"{self._trees}{scope}:{session}:{tenant}"

    def make_step(  # noqa: PLR0913  # everything that a ledger needs
        self,
        scope: str,
        tenant: str,
        session: str,
        identity: bytes,
        call: bytes,
        reserve: int,
        calls: CallHistory,
        grants: tuple[int, int, int],
        limits: Limits,
        *,
        allowed: bool,
        earlier: int = 0,
        tree: TreeStep | None = None,
        search: RootSearch | None = None,
    ) -> Step:
        """The store's question about a request.

        Args:
            scope: attachment name.
            tenant: hash of the caller.
            session: as for `find_ledger`.
            identity: digest of the request, 8 bytes.
            call: the request's unique name, 16 bytes.
            reserve: estimated cost, in nano-dollars.
            calls: the calls in its history.
            grants: the result of `sum_grants`.
            limits: from `find_limits` or `extend_tools`.
            allowed: an operator's order lets it through.
            earlier: number of steps in its history, for a new ledger.
            tree: its place in the tree of agents.
            search: finds the session; `session` is then the agent's parent.
        """
        # Not one of the caller's sessions
        begun = f"{scope}:{UNNAMED}" if session.endswith(UNNAMED) else scope
        return Step(
            f"{self._key}{scope}:{session}:{tenant}",
            f"{self._tenants}{begun}:{tenant}",
            self._unlimited if allowed else limits,
            identity,
            call,
            reserve,
            calls.records,
            calls.total,
            calls.newest,
            calls.tools,
            grants,
            calls.offer,
            earlier,
            tree,
            search,
        )

    def extend_agents(self, granted: tuple[int, int, int, int]) -> AgentLimits:
        """The limits of a session's agents with grants, in the order of `AGENT_LIMITS`."""
        limits = self.agent_limits or NO_LIMITS
        given = zip(
            (limits.depth, limits.agents, limits.concurrent, limits.spawns), granted, strict=True
        )
        # Trees are exact up to MOST_AGENTS; -1 stays unlimited.
        depth, agents, concurrent, spawns = [
            limit if limit == _NONE else min(limit + more, MOST_AGENTS) for limit, more in given
        ]
        return AgentLimits(depth, agents, concurrent, spawns, limits.idle_ms)

    def judge(  # noqa: PLR0913  # all that the refusal tells
        self,
        fingerprint: str,
        tenant: str,
        standing: Standing,
        calls: CallHistory,
        grants: tuple[int, int, int],
        session: str,
        agent_limits: AgentLimits,
        *,
        own: bool = True,
    ) -> Outcome:
        """The outcome of a request, given the store's answer; `own`: no agent has sent it."""
        if standing.waits:
            waiting = WaitingSubject(MAX_COST, standing.used, standing.allowed)
            return self._make_outcome(
                Action.REJECT, fingerprint, tenant, standing.used, waiting, RETRY_SECONDS
            )
        if standing.limit:
            limit, tool = LIMITS[standing.limit], self._find_tool_name(standing.tool, calls)
            if session == UNNAMED:
                subject: SessionSubject = UnnamedSubject(limit, standing.used, standing.allowed)
            else:
                ask_for = write_grant(session, tenant, limit, tool, standing.used, standing.allowed)
                subject = SessionSubject(
                    limit, standing.used, standing.allowed, tool, ask_for=ask_for
                )
            return self._make_outcome(Action.REJECT, fingerprint, tenant, standing.used, subject)
        if self.gives_notice and session != UNNAMED:
            for action, notice in ((Action.STEER, self._steer), (Action.WARN, self._warn)):
                if met := _find_notice(notice, standing):
                    allowed = self._read_allowed(met, grants, agent_limits)
                    subject = SessionSubject(met, _read_used(standing, met), allowed)
                    return self._make_outcome(action, fingerprint, tenant, subject.used, subject)
            if own and not standing.retry and (start := self.find_growth(standing)):
                subject = SessionSubject(MAX_INPUT_GROWTH, standing.newest_input, start)
                return self._make_outcome(
                    Action.STEER, fingerprint, tenant, standing.steps, subject
                )
        return self._make_outcome(Action.ALLOW, fingerprint, tenant, standing.steps, WITHIN)

    def find_narrowing(
        self, standing: Standing, limits: Limits, grants: tuple[int, int, int], calls: CallHistory
    ) -> Narrowing | None:
        """The tools to remove from a request that is let through; None if there are none."""
        every = (
            limits.narrows or limits.finishes
        ) and standing.tool_calls >= limits.tool_calls + grants[1]
        if every and limits.finishes:
            return Narrowing(every=True)
        if not limits.tools or (standing.tool_calls <= self._fewest and not every):
            return None
        if every or limits is not self.limits:
            return self._narrow_tools(standing, limits, calls, every=every)
        for called, _, _ in standing.tools:
            if called in self._tool_names:
                return self._narrow_tools(standing, limits, calls, every=False)
        return self._begun

    def _narrow_tools(
        self, standing: Standing, limits: Limits, calls: CallHistory, *, every: bool
    ) -> Narrowing | None:
        """The part of `find_narrowing` for tools with their own limits."""
        counts = {digest: count for digest, _, count in standing.tools}
        left = {
            self._tool_names[digest]: limit - counts.get(digest, 0)
            for digest, limit in limits.tools
        }
        used_up = frozenset([tool for tool, remaining in left.items() if remaining <= 0])
        few = [digest for digest, _ in limits.tools if 0 < left[self._tool_names[digest]] < BATCH]
        batches = calls.find_batches() if few else {}
        scarce = frozenset(
            [
                self._tool_names[digest]
                for digest in few
                if left[self._tool_names[digest]] < min(max(batches.get(digest, 0), PAIR), BATCH)
            ]
        )
        kept = (
            frozenset([tool for tool, remaining in left.items() if remaining > 0])
            if every
            else _NO_TOOLS
        )
        return Narrowing(every, used_up, kept, scarce) if every or used_up or scarce else None

    def kill(self, fingerprint: str, tenant: str) -> Outcome:
        """The outcome for a session that an operator has killed."""
        return self._make_outcome(
            Action.REJECT, fingerprint, tenant, 0, SessionSubject(KILLED, 0, 0, ordered=True)
        )

    def refuse_unnarrowed(  # noqa: PLR0913  # all that the refusal tells
        self,
        fingerprint: str,
        tenant: str,
        standing: Standing,
        narrowing: Narrowing,
        limits: Limits,
        grants: tuple[int, int, int],
        session: str,
    ) -> Outcome:
        """The outcome for a request from which tools cannot be removed."""
        if narrowing.every:
            subject = SessionSubject(
                MAX_TOOL_CALLS, standing.tool_calls, limits.tool_calls + grants[1]
            )
        else:
            tool = min(narrowing.tools)
            allowed = dict(limits.tools).get(digest_tool(tool), 0)
            used = {digest: count for digest, _, count in standing.tools}.get(digest_tool(tool), 0)
            subject = SessionSubject(
                PER_TOOL,
                used,
                allowed,
                tool,
                ask_for=write_grant(session, tenant, PER_TOOL, tool, used, allowed),
            )
        return self._make_outcome(Action.REJECT, fingerprint, tenant, subject.used, subject)

    def _read_allowed(
        self, limit: str, grants: tuple[int, int, int], agent_limits: AgentLimits
    ) -> int:
        steps, tool_calls, cost = grants
        if limit == MAX_STEPS:
            return self.limits.steps + steps
        if limit == MAX_AGENTS:
            return agent_limits.agents
        return (
            self.limits.tool_calls + tool_calls
            if limit == MAX_TOOL_CALLS
            else self.limits.cost + cost
        )

    def list_newest_tools(self, calls: CallHistory) -> tuple[str, ...]:
        """The tools called in a history's newest step, each once, at most `_MOST_SHOWN`."""
        if not calls.newest:
            return ()
        if calls.newest == 1:
            return (self._find_tool_name(calls.records[-RECORD:][_TOOL:_ACTION], calls),)
        records = calls.records
        digests: list[bytes] = []
        for at in range(max(0, len(records) - calls.newest * RECORD), len(records), RECORD):
            digest = records[at + _TOOL : at + _ACTION]
            if digest not in digests and len(digests) < _MOST_SHOWN:
                digests.append(digest)
        return tuple([self._find_tool_name(digest, calls) for digest in digests])

    def list_limits(self, session: str) -> list[tuple[str, str, int]]:
        """The limits of a session, or of requests without one, as (name, tool or "", amount)."""
        return self._listed_unnamed if session == UNNAMED else self._listed

    def _list_limits(self, limits: Limits) -> list[tuple[str, str, int]]:
        counted = (
            (MAX_STEPS, limits.steps),
            (MAX_TOOL_CALLS, limits.tool_calls),
            (MAX_COST, limits.cost),
        )
        tools = [(PER_TOOL, self._tool_names[digest], limit) for digest, limit in limits.tools]
        return [*[(name, "", limit) for name, limit in counted if limit != _NONE], *tools]

    def _find_tool_name(self, digest: bytes, calls: CallHistory) -> str:
        if not digest:
            return ""
        return self._tool_names.get(digest) or next(
            (name for known, name in calls.tools if known == digest), ""
        )

    def _make_outcome(  # noqa: PLR0913  # all that an outcome tells
        self,
        action: Action,
        fingerprint: str,
        tenant: str,
        count: int,
        subject: SessionSubject,
        retry_after: int | None = None,
    ) -> Outcome:
        return Outcome(
            self.policy,
            self.mode,
            action,
            fingerprint,
            tenant,
            count,
            0,
            0,
            0,
            retry_after,
            self.refusal,
            self.name,
            subject,
            None,
            subject.reason,
        )


def compile_limits(limits: SessionLimits, session: Session) -> Limits:
    """Convert a policy's limits for the ledger."""
    breaker, recent = limits.circuit_breaker, limits.loop_detection
    cost = limits.max_cost_per_session
    return Limits(
        idle_ms=session.idle_seconds * 1000,
        max_sessions=session.max_sessions_per_tenant,
        steps=_or_none(limits.max_steps),
        tool_calls=_or_none(limits.max_tool_calls),
        narrows=limits.max_tool_calls_mode == "narrow",
        finishes=limits.max_tool_calls_mode == "finish",
        cost=_NONE if cost is None else round(cost * NANO_DOLLARS),
        tools=tuple(
            sorted((digest_tool(name), limit) for name, limit in limits.max_calls_per_tool.items())
        ),
        window=_NONE if recent is None else recent.window,
        threshold=_NONE if recent is None else recent.threshold,
        blocks=_or_none(breaker.consecutive_blocks if breaker is not None else None),
        errors=_or_none(breaker.consecutive_errors if breaker is not None else None),
    )


def _compile_agents(limits: SessionLimits) -> AgentLimits:
    return AgentLimits(
        _or_none(limits.max_depth),
        _or_none(limits.max_agents),
        _or_none(limits.max_concurrent_agents),
        _or_none(limits.max_spawns_per_minute),
        limits.agent_idle_seconds * 1000,
    )


def _list_agent_limits(limits: AgentLimits) -> list[tuple[str, str, int]]:
    given = (
        (MAX_AGENTS, limits.agents),
        (MAX_DEPTH, limits.depth),
        (MAX_CONCURRENT, limits.concurrent),
        (MAX_SPAWNS, limits.spawns),
    )
    return [(name, "", limit) for name, limit in given if limit != _NONE]


def _compile_unnamed(limits: UnnamedLimits, session: Session) -> Limits:
    cost = limits.max_cost_per_session
    return Limits(
        idle_ms=session.idle_seconds * 1000,
        max_sessions=_MOST_SESSIONS,
        steps=_or_none(limits.max_steps),
        tool_calls=_or_none(limits.max_tool_calls),
        cost=_NONE if cost is None else round(cost * NANO_DOLLARS),
        ends=True,
    )


def _or_none(limit: int | None) -> int:
    return _NONE if limit is None else limit


def _read_price(price: Price) -> TokenPrice:
    """Convert a price for `Rates`. Numbers in a file are decimal, and stay exact."""
    given = (price.input, price.output, price.cache_read, price.cache_write)
    first, second, third, fourth = [None if rate is None else Decimal(str(rate)) for rate in given]
    return TokenPrice(first or Decimal(), second or Decimal(), third, fourth)


def make_rates(prices: Mapping[str, Price], unknown: Price | None) -> Rates:
    """The rates from a policy's own prices."""
    own = {name: _read_price(price) for name, price in prices.items()}
    return Rates(own, _read_price(unknown) if unknown is not None else None)


def _compile_notice(notice: Notice) -> tuple[tuple[str, int], ...]:
    """The count at which notice starts, by limit."""
    cost = notice.max_cost_per_session
    starts = {
        MAX_STEPS: notice.max_steps,
        MAX_TOOL_CALLS: notice.max_tool_calls,
        MAX_COST: None if cost is None else round(cost * NANO_DOLLARS),
        MAX_AGENTS: notice.max_agents,
    }
    return tuple([(limit, start) for limit, start in starts.items() if start is not None])


def _find_notice(notice: tuple[tuple[str, int], ...], standing: Standing) -> str:
    """The first limit whose notice has started; empty if there is none."""
    for limit, start in notice:
        if _read_used(standing, limit) >= start:
            return limit
    return ""


def _read_used(standing: Standing, limit: str) -> int:
    if limit == MAX_STEPS:
        return standing.steps
    if limit == MAX_AGENTS:
        return standing.tree.agents if standing.tree is not None else 0
    return standing.tool_calls if limit == MAX_TOOL_CALLS else standing.cost + standing.reserved


def write_grant(session: str, tenant: str, limit: str, tool: str, used: int, allowed: int) -> str:  # noqa: PLR0913  # a refusal
    """The command with which an operator allows what a limit of a tool or of agents has refused.

    Empty for other limits. Session and caller are hashes; the numbers are those of the refusal.
    """
    if limit == PER_TOOL and tool:
        asked = f"--tool {shlex.quote(f'{tool}={max(1, used - allowed)}')}"
    elif limit in _GRANTING and allowed < MOST_AGENTS:
        asked = (
            f"{_GRANTING[limit]} "
            f"{used - allowed if limit == MAX_DEPTH else max(0, used - allowed) + 1}"
        )
    else:
        return ""
    return f"loopguard grant --session {session} --caller {tenant} {asked}"
