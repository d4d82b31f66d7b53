"""Overrides: operators' orders about callers, sessions, loops and tools, each until its end.

They are indexed in memory: a request takes one look-up for each combination of fields that overrides name, whatever their
number. Time is an argument, in seconds since 1970.
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
"""Longest duration of an order."""


class Target(NamedTuple):
    """The requests that an override is about: all fields must match. Clients' names and values are hashes, 16 hex digits.

    Attributes:
        caller: its name, as in logs, or the name of one of its values, or its alias; empty for any. See `CallerNames`.
        descriptors: (name, hash of that descriptor alone), sorted; the caller may have others, too.
        session: hash of its name; empty for any.
        fingerprint: 8 hex digits; empty for any.
        tool: the tool that is called; empty for any.
    """

    caller: str = ""
    descriptors: tuple[tuple[str, str], ...] = ()
    session: str = ""
    fingerprint: str = ""
    tool: str = ""


class Grant(NamedTuple):
    """What a session may use beyond its limits.

    Attributes:
        steps: requests that are let through.
        tool_calls: calls in its histories.
        cost: in nano-dollars.
        depth: levels of agents.
        agents: agents that may start.
        concurrent_agents: agents that may be active at a time.
        spawns_per_minute: agents that may start within a minute.
    """

    steps: int = 0
    tool_calls: int = 0
    cost: int = 0
    depth: int = 0
    agents: int = 0
    concurrent_agents: int = 0
    spawns_per_minute: int = 0


MAX_GRANT: Final = Grant(MAX_COUNT, MAX_TOOL_CALLS, int(MAX_COST) * NANO_DOLLARS, *[MAX_AGENTS] * 4)
"""Largest grant, and largest sum of a session's grants: added to its limits, these still fit every counter."""


class ActiveOverride(NamedTuple):
    """One order; times in seconds since 1970.

    Attributes:
        name: the same for overrides that differ only in times and words; each grant has a name of its own.
        kind: one of `KINDS`; others come from another version and have no effect here.
        target: the requests that it is about.
        policy: a policy's id; empty for all.
        since: when it was given.
        ends: when it ends.
        reason: for people.
        who: the operator.
        grant: what it grants.
        tools: how many calls of single tools it grants, by name, sorted.
        budget: name of the rule whose budget it has added to, once, when it was given, or whose limit it raises; else empty.
        amount: what it has added or adds, in the rule's unit.
        raises: it raises the limit of the budget until it ends.
        meets: ids of the policies that it applied to when it was given, as far as that was known.
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
        """Part of all keys after a release; no earlier key has it, so counts start again."""
        return f"{int(self.since * 1000):x}"


class _Shape:
    """Overrides that name the same fields, by the values of these.

    Attributes:
        names: of the descriptors among the fields.
        of_head: a request's headers are enough to find them.
    """

    def __init__(self, target: Target) -> None:
        """Start empty; every target has the same fields as this one."""
        self._filed: dict[str, list[ActiveOverride]] = {}
        self._caller = bool(target.caller)
        self._session = bool(target.session)
        self._fingerprint = bool(target.fingerprint)
        self._tool = bool(target.tool)
        self.names = tuple([name for name, _ in target.descriptors])
        self.of_head = not (self._session or self._fingerprint or self._tool)

    def file(self, override: ActiveOverride) -> None:
        """Add an override; all fields but the first and the last have a fixed length, so joining them is unambiguous."""
        target = override.target
        hashes = "".join([value for _, value in target.descriptors])
        key = f"{target.caller}\n{hashes}{target.session}{target.fingerprint}{target.tool}"
        self._filed.setdefault(key, []).append(override)

    def find(self, caller: Caller, session: str, fingerprint: str, tools: Sequence[str]) -> list[ActiveOverride]:
        """The overrides that match a request; fields that are not known yet are empty."""
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
    """The names by which orders may refer to the caller of a request.

    Attributes:
        names: of its values, of all of them together, and aliases.
        descriptors: name and value of each; those in a `first_of` by both names.
    """

    def __init__(self, names: list[str], descriptors: list[tuple[str, str]]) -> None:
        self.names = names
        self.descriptors = descriptors


class KnownCaller:
    """A caller of a policy, and all overrides about it alone, of any policy, ended ones included.

    Attributes:
        caller: how orders may refer to it.
        filed: the overrides.
        aliases: by which it was looked up.
        named_by: the same.
    """

    def __init__(self, caller: Caller, filed: Sequence[ActiveOverride], aliases: dict[str, str], named_by: CallerNames) -> None:
        self.caller = caller
        self.filed = filed
        self.aliases = aliases
        self.named_by = named_by


_NOTHING: Final[list[ActiveOverride]] = []
_ANY: Final = [""]
"""In place of the values of a field that a shape does not name."""


_MOST_CALLERS: Final = 2_048
"""Callers whose orders are kept, in each generation. Without them, the benchmark's row "1,000 overrides: extra cost" doubles if
its callers come again."""


class Overrides:
    """The overrides in force.

    Attributes:
        blocks_heads: some may block requests before their bodies arrive.
        callers: that were looked up recently, by policy, descriptors, and whether these are all.
        name_sessions: some name a session.
    """

    def __init__(self, overrides: Iterable[ActiveOverride] = ()) -> None:
        shapes: dict[tuple[bool, tuple[str, ...], bool, bool, bool], _Shape] = {}
        self.blocks_heads = self.name_sessions = False
        self.callers: Memo[tuple[str, str, bool], KnownCaller] = Memo(_MOST_CALLERS)
        for override in overrides:
            target = override.target
            names = tuple([name for name, _ in target.descriptors])
            fields = bool(target.caller), names, bool(target.session), bool(target.fingerprint), bool(target.tool)
            shape = shapes.get(fields)
            if shape is None:
                shape = shapes[fields] = _Shape(target)
            shape.file(override)
            self.name_sessions = self.name_sessions or bool(target.session)
            self.blocks_heads = self.blocks_heads or (override.kind == BLOCK and shape.of_head)
        self._of_head = [shape for shape in shapes.values() if shape.of_head]
        self._of_body = [shape for shape in shapes.values() if not shape.of_head]

    def __len__(self) -> int:
        """The number of look-ups that a request costs."""
        return len(self._of_head) + len(self._of_body)

    def find_by_head(self, caller: Caller) -> Sequence[ActiveOverride]:
        """All overrides about a caller alone, as far as it is known; see `select`."""
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
        """All others that apply to a request under a policy; `session` is the hash of its name, empty for none."""
        found: Sequence[ActiveOverride] = _NOTHING
        for shape in self._of_body:
            filed = shape.find(caller, session, fingerprint, tools)
            if filed:
                found = [*found, *select(filed, policy, now)]
        return found


def select(filed: Sequence[ActiveOverride], policy: str, now: float) -> list[ActiveOverride]:
    """Those that have not ended and apply to this policy; `now` in seconds since 1970."""
    return [override for override in filed if now < override.ends and override.policy in (ALL_POLICIES, policy)]


def _hash_descriptors(names: tuple[str, ...], values: list[tuple[str, str]]) -> str:
    """The hashes of these descriptors of a request, joined; empty if it lacks one."""
    hashes, known = "", dict(values)
    for name in names:
        value = known.get(name)
        if value is None:
            return ""
        hashes += hash_descriptor(name, value)
    return hashes


def hash_descriptor(name: str, value: str) -> str:
    """The hash of one descriptor, 16 hex digits; also the name of a caller without others, unless it is a secret."""
    return hash_tenant(join_descriptors([(name, value)]))


def find_kind(overrides: Sequence[ActiveOverride], kind: str) -> ActiveOverride | None:
    """The newest override of a kind, None for none."""
    found = None
    for override in overrides:
        if override.kind == kind and (found is None or (override.since, override.name) > (found.since, found.name)):
            found = override
    return found


def find_kill(overrides: Sequence[ActiveOverride]) -> ActiveOverride | None:
    """The newest kill, None if there is none or a later release."""
    kill = find_kind(overrides, KILL)
    release = find_kind(overrides, RELEASE)
    return None if kill is None or (release is not None and release.since > kill.since) else kill


def sum_grants(overrides: Sequence[ActiveOverride]) -> tuple[int, int, int]:
    """The sum of all grants of what is used up, at most `MAX_GRANT`: steps, tool calls and nano-dollars."""
    steps = tool_calls = cost = 0
    for override in overrides:
        if override.kind == GRANT:
            steps += override.grant.steps
            tool_calls += override.grant.tool_calls
            cost += override.grant.cost
    return min(steps, MAX_GRANT.steps), min(tool_calls, MAX_GRANT.tool_calls), min(cost, MAX_GRANT.cost)


def sum_agent_grants(overrides: Sequence[ActiveOverride]) -> tuple[int, int, int, int]:
    """The sum of all grants of agents, in the order of `AGENT_LIMITS`."""
    depth = agents = concurrent = spawns = 0
    for override in overrides:
        if override.kind == GRANT:
            depth += override.grant.depth
            agents += override.grant.agents
            concurrent += override.grant.concurrent_agents
            spawns += override.grant.spawns_per_minute
    return depth, agents, concurrent, spawns


def sum_raises(overrides: Sequence[ActiveOverride], rule: str) -> float:
    """By how much orders raise the limits of a rule, in its unit."""
    return sum([override.amount for override in overrides if override.raises and override.budget == rule], 0.0)


def sum_tool_grants(overrides: Sequence[ActiveOverride]) -> dict[str, int]:
    """The sum of all grants of single tools, by name, each as large as one of all tools at most."""
    granted: dict[str, int] = {}
    for override in overrides:
        for tool, calls in override.tools if override.kind == GRANT else ():
            granted[tool] = min(granted.get(tool, 0) + calls, MAX_GRANT.tool_calls)
    return granted
