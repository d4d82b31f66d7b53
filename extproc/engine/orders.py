"""Overrides: operators' orders about callers, sessions, loops and tools. Each order expires.

They are indexed in memory. A request needs one look-up for each combination of fields that orders
use, whatever the number of orders. Time is an argument, in seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from extproc.bounded import Memo
from extproc.request.callers import CallerNames
from extproc.request.fingerprint import hash_tenant, join_descriptors
from extproc.sessions.session_limits import MAX_AGENTS, MAX_COST, MAX_COUNT, MAX_TOOL_CALLS
from extproc.store.rules.session import NANO_DOLLARS

RELEASE: Final = "release"
ALLOW: Final = "allow"
BLOCK: Final = "block"
KILL: Final = "kill"
GRANT: Final = "grant"
KINDS: Final = (RELEASE, ALLOW, BLOCK, KILL, GRANT)

ALL_POLICIES: Final = ""

MAX_SECONDS: Final = 30 * 86_400
"""Maximum duration of an order."""


class Target(NamedTuple):
    """The requests that an order applies to: all fields must match.

    Names and values of clients are hashes, 16 hex digits.

    Attributes:
        caller: the caller's name as in logs, the name of one of its values, or its alias; empty for
            any. See `CallerNames`.
        descriptors: (name, hash of that descriptor alone), sorted; the caller may have others.
        session: hash of its name; empty for any.
        fingerprint: 8 hex digits; empty for any.
        tool: the called tool; empty for any.
    """

    caller: str = ""
    descriptors: tuple[tuple[str, str], ...] = ()
    session: str = ""
    fingerprint: str = ""
    tool: str = ""


class Grant(NamedTuple):
    """What a session may use beyond its limits.

    Attributes:
        steps: requests.
        tool_calls: tool calls.
        cost: nano-dollars.
        depth: levels of agents.
        agents: agents started.
        concurrent_agents: agents active at a time.
        spawns_per_minute: agents started within a minute.
    """

    steps: int = 0
    tool_calls: int = 0
    cost: int = 0
    depth: int = 0
    agents: int = 0
    concurrent_agents: int = 0
    spawns_per_minute: int = 0


MAX_GRANT: Final = Grant(MAX_COUNT, MAX_TOOL_CALLS, int(MAX_COST) * NANO_DOLLARS, *[MAX_AGENTS] * 4)
"""The largest grant, and the largest sum of a session's grants. With its limits added, it still
fits every counter."""


class ActiveOverride(NamedTuple):
    """One order; times in seconds since 1970.

    Attributes:
        name: equal for orders that differ only in times and words; each grant has its own name.
        kind: one of `KINDS`; other values come from another version and have no effect here.
        target: the requests that it applies to.
        policy: a policy's id; empty for all.
        since: when it was given.
        ends: when it ends.
        reason: the operator's words.
        who: the operator.
        grant: what it grants.
        tools: additional calls by tool name, sorted.
        budget: the rule whose budget it added to once, or whose limit it raises until it ends; else
            empty.
        amount: the amount added, in the rule's unit.
        raises: it raises the limit until it ends.
        meets: ids of policies that it was known to apply to when it was given.
    """

    name: str
    kind: str
    target: Target
    policy: str
    since: float
    ends: float
    reason: str
    who: str
    grant: Grant = Grant()
    tools: tuple[tuple[str, int], ...] = ()
    budget: str = ""
    amount: float = 0.0
    meets: tuple[str, ...] = ()
    raises: bool = False

    @property
    def epoch(self) -> str:
        """A part of all keys after a release. No earlier key has it, so counts start again."""
        return f"{int(self.since * 1000):x}"


class _Shape:
    """Orders with the same fields, by the values of these fields.

    Attributes:
        names: names of the descriptors among the fields.
        of_head: the request's head is enough to find them.
    """

    def __init__(self, target: Target) -> None:
        """All targets have the same fields as this one."""
        self._filed: dict[str, list[ActiveOverride]] = {}
        self._caller = bool(target.caller)
        self._session = bool(target.session)
        self._fingerprint = bool(target.fingerprint)
        self._tool = bool(target.tool)
        self.names = tuple([name for name, _ in target.descriptors])
        self.of_head = not (self._session or self._fingerprint or self._tool)

    def file(self, override: ActiveOverride) -> None:
        """Add an order.

        All fields except the first and last have a fixed length, so joined keys are unambiguous.
        """
        target = override.target
        hashes = "".join([value for _, value in target.descriptors])
        key = f"{target.caller}\n{hashes}{target.session}{target.fingerprint}{target.tool}"
        self._filed.setdefault(key, []).append(override)

    def find(
        self, caller: Caller, session: str, fingerprint: str, tools: Sequence[str]
    ) -> list[ActiveOverride]:
        """The orders that match a request; unknown fields are empty."""
        if (self._session and not session) or (self._fingerprint and not fingerprint):
            return _NOTHING
        rest = f"{session if self._session else ''}{fingerprint if self._fingerprint else ''}"
        hashes = _hash_descriptors(self.names, caller.descriptors)
        if self.names and not hashes:
            return _NOTHING
        found = _NOTHING
        for name in caller.names if self._caller else _ANY:
            for tool in list(dict.fromkeys(tools)) if self._tool else _ANY:
                filed = self._filed.get(f"{name}\n{hashes}{rest}{tool}")
                if filed is not None:
                    found = [*found, *filed]
        return found


class Caller:
    """The names by which orders may refer to a request's caller.

    Attributes:
        names: of its values, of all of them together, and aliases.
        descriptors: name and value of each; alternatives of a `first_of` by both names.
    """

    def __init__(self, names: list[str], descriptors: list[tuple[str, str]]) -> None:
        self.names = names
        self.descriptors = descriptors


class KnownCaller:
    """A cached caller, and all orders about it alone, of any policy, expired ones included.

    Attributes:
        caller: the caller.
        filed: the orders.
        aliases: used for the look-up; if the policy's differ, the entry is stale.
        named_by: likewise.
    """

    def __init__(
        self,
        caller: Caller,
        filed: Sequence[ActiveOverride],
        aliases: dict[str, str],
        named_by: CallerNames,
    ) -> None:
        self.caller = caller
        self.filed = filed
        self.aliases = aliases
        self.named_by = named_by


_NOTHING: Final[list[ActiveOverride]] = []
_ANY: Final = [""]
"""Replaces the values of a field that a shape does not use."""


_MOST_CALLERS: Final = 2_048
"""Cached callers, per generation. Without the cache, the benchmark's row "1,000 overrides: extra
cost" doubles for recurring callers."""


class Overrides:
    """The orders in force.

    Attributes:
        blocks_heads: some may block requests before their bodies arrive.
        callers: cached callers, by policy, descriptors, and whether these are complete.
        name_sessions: some name a session.
    """

    def __init__(self, overrides: Iterable[ActiveOverride] = ()) -> None:
        shapes: dict[tuple[bool, tuple[str, ...], bool, bool, bool], _Shape] = {}
        self.blocks_heads = self.name_sessions = False
        self.callers: Memo[tuple[str, str, bool], KnownCaller] = Memo(_MOST_CALLERS)
        for override in overrides:
            target = override.target
            names = tuple([name for name, _ in target.descriptors])
            fields = (
                bool(target.caller),
                names,
                bool(target.session),
                bool(target.fingerprint),
                bool(target.tool),
            )
            shape = shapes.get(fields)
            if shape is None:
                shape = shapes[fields] = _Shape(target)
            shape.file(override)
            self.name_sessions = self.name_sessions or bool(target.session)
            self.blocks_heads = self.blocks_heads or (override.kind == BLOCK and shape.of_head)
        self._of_head = [shape for shape in shapes.values() if shape.of_head]
        self._of_body = [shape for shape in shapes.values() if not shape.of_head]

    def __len__(self) -> int:
        """The number of look-ups per request."""
        return len(self._of_head) + len(self._of_body)

    def find_by_head(self, caller: Caller) -> Sequence[ActiveOverride]:
        """All orders about a caller alone, also expired ones and other policies'; see `select`."""
        found: Sequence[ActiveOverride] = _NOTHING
        for shape in self._of_head:
            filed = shape.find(caller, "", "", ())
            if filed:
                found = [*found, *filed]
        return found

    def find_by_body(  # noqa: PLR0913  # what is known of a request
        self,
        policy: str,
        now: float,
        caller: Caller,
        session: str,
        fingerprint: str,
        tools: Sequence[str],
    ) -> Sequence[ActiveOverride]:
        """All other orders for a request and policy; `session` is its name's hash, or empty."""
        found: Sequence[ActiveOverride] = _NOTHING
        for shape in self._of_body:
            filed = shape.find(caller, session, fingerprint, tools)
            if filed:
                found = [*found, *select(filed, policy, now)]
        return found


def select(filed: Sequence[ActiveOverride], policy: str, now: float) -> list[ActiveOverride]:
    """The orders that have not expired and apply to this policy; `now` in seconds since 1970."""
    return [
        override
        for override in filed
        if now < override.ends and override.policy in (ALL_POLICIES, policy)
    ]


def _hash_descriptors(names: tuple[str, ...], values: list[tuple[str, str]]) -> str:
    """The hashes of these descriptors of a request, joined; empty if one is missing."""
    hashes, known = "", dict(values)
    for name in names:
        value = known.get(name)
        if value is None:
            return ""
        hashes += hash_descriptor(name, value)
    return hashes


def hash_descriptor(name: str, value: str) -> str:
    """The hash of one descriptor, 16 hex digits.

    It is also the name of a caller with no other, unless it is a secret.
    """
    return hash_tenant(join_descriptors([(name, value)]))


def find_kind(overrides: Sequence[ActiveOverride], kind: str) -> ActiveOverride | None:
    """The newest order of a kind, if any."""
    found = None
    for override in overrides:
        if override.kind == kind and (
            found is None or (override.since, override.name) > (found.since, found.name)
        ):
            found = override
    return found


def find_kill(overrides: Sequence[ActiveOverride]) -> ActiveOverride | None:
    """The newest kill, unless a release is newer."""
    kill = find_kind(overrides, KILL)
    release = find_kind(overrides, RELEASE)
    return None if kill is None or (release is not None and release.since > kill.since) else kill


def sum_grants(overrides: Sequence[ActiveOverride]) -> tuple[int, int, int]:
    """The sum of all grants, at most `MAX_GRANT`: steps, tool calls and nano-dollars."""
    steps = tool_calls = cost = 0
    for override in overrides:
        if override.kind == GRANT:
            steps += override.grant.steps
            tool_calls += override.grant.tool_calls
            cost += override.grant.cost
    return (
        min(steps, MAX_GRANT.steps),
        min(tool_calls, MAX_GRANT.tool_calls),
        min(cost, MAX_GRANT.cost),
    )


def sum_agent_grants(overrides: Sequence[ActiveOverride]) -> tuple[int, int, int, int]:
    """The sum of all grants for agents, in the order of `AGENT_LIMITS`."""
    depth = agents = concurrent = spawns = 0
    for override in overrides:
        if override.kind == GRANT:
            depth += override.grant.depth
            agents += override.grant.agents
            concurrent += override.grant.concurrent_agents
            spawns += override.grant.spawns_per_minute
    return depth, agents, concurrent, spawns


def sum_raises(overrides: Sequence[ActiveOverride], rule: str) -> float:
    """The sum by which orders raise the limits of a rule, in its unit."""
    return sum(
        [override.amount for override in overrides if override.raises and override.budget == rule],
        0.0,
    )


def sum_tool_grants(overrides: Sequence[ActiveOverride]) -> dict[str, int]:
    """The sum of all grants by tool, each at most the maximum for all tools."""
    granted: dict[str, int] = {}
    for override in overrides:
        for tool, calls in override.tools if override.kind == GRANT else ():
            granted[tool] = min(granted.get(tool, 0) + calls, MAX_GRANT.tool_calls)
    return granted
