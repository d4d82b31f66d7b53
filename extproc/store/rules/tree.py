"""The agents below a root session, and whether another one may begin; `now` in milliseconds.

A tree belongs to a ledger: it is read and changed in the same step, and ends with it. An agent is
identified by a digest of its name. An admitted agent is never refused by these limits later. A
refused agent is not stored, so refusals take no memory.

An agent directly below the root has depth 1, any other one more than its parent. Its depth is
computed when it begins. An unknown parent (forged, forgotten, or the agent itself) is taken to be
directly below the root, so there are no cycles, whatever clients claim.

A tree stores its newest `MAX_AGENTS` agents. A forgotten agent that returns is counted again.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

AGENT_LIMITS: Final = ("max_depth", "max_agents", "max_concurrent_agents", "max_spawns_per_minute")
"""In the order in which they are checked."""

MAX_AGENTS: Final = 1_024
"""More than any limit allows, so limits are exact."""

MINUTE_MS: Final = 60_000
ROOT: Final = b""
"""In place of an agent or a parent: the root itself."""

_MAX: Final = 2**32 - 1
_MAX_DEPTH: Final = 2**16 - 1
_UNKNOWN_DEPTH: Final = 2


class AgentLimits(NamedTuple):
    """Limits for the agents of one root session; -1 for none. Never changed.

    Attributes:
        depth: levels of agents below the root.
        agents: number of agents that may begin.
        concurrent: number of them that may be active: with a request in the last `idle_ms`.
        spawns: number of them that may begin within a minute.
        idle_ms: how long an agent is active after a request, in milliseconds.
    """

    depth: int = -1
    agents: int = -1
    concurrent: int = -1
    spawns: int = -1
    idle_ms: int = MINUTE_MS


NO_LIMITS: Final = AgentLimits()


class TreeStep(NamedTuple):
    """A request's place in a tree, as a part of the question about its session; never changed.

    Attributes:
        key: the key of the tree; it ends in the same two digits as that of the ledger.
        limits: the limits for the agents.
        agent: digest of the agent's name, 8 bytes, or `ROOT`.
        parent: digest of the name of the agent that started it, or `ROOT`.
    """

    key: str
    limits: AgentLimits
    agent: bytes
    parent: bytes


class TreeStanding(NamedTuple):
    """The state of a tree after a request; never changed.

    Attributes:
        agents: number of agents that have begun.
        refused: number of requests that were refused because of `AGENT_LIMITS`.
        depth: the depth of the request's agent; 0 for the root, and for one that did not begin
            because of another limit.
        began: the agent began with this request.
    """

    agents: int = 0
    refused: int = 0
    depth: int = 0
    began: bool = False


# In the byte order of most processors. Remote stores use network byte order, and begin with a
# version.
_NUMBERS: Final = struct.Struct("<II")
"""The numbers of agents and of refused requests."""

_AGENT: Final = struct.Struct("<8sHqq")
"""The agent's digest and depth, when it began, and when its newest request came.

The agent of the newest request is last.
"""

_HEAD_SIZE: Final = _NUMBERS.size
_SIZE: Final = _AGENT.size
_RECENT: Final = 64
"""Number of agents that are kept unpacked."""

_LARGE: Final = 256


class _Agent:
    """An agent that has begun: its depth, when it began, and when its newest request came."""

    def __init__(self, depth: int, first: int, last: int) -> None:
        self.depth = depth
        self.first = first
        self.last = last


class Tree:
    """The unpacked tree of a session.

    Attributes:
        agents: number of agents that have begun.
        refused: number of requests that were refused because of `AGENT_LIMITS`.
        recent: the agents of the newest requests by their digests, that of the newest request last.
        older: the other agents, packed.
    """

    def __init__(self, state: bytes = b"") -> None:
        """Begin a tree, or unpack a stored one."""
        agents: int = 0
        refused: int = 0
        if state:
            agents, refused = _NUMBERS.unpack_from(state)
        self.agents = agents
        self.refused = refused
        self.older = state[_HEAD_SIZE:]
        self.recent: dict[bytes, _Agent] = {}

    def pack(self) -> bytes:
        """The tree as it is stored."""
        return b"".join(
            [
                _NUMBERS.pack(self.agents, self.refused),
                self.older,
                *self._pack_recent(len(self.recent)),
            ]
        )

    def is_large(self) -> bool:
        """Whether it has many agents."""
        return len(self.older) > _LARGE * _SIZE

    def admit(
        self, asked: TreeStep, now: int, *, passes: bool
    ) -> tuple[TreeStanding, int, int, int]:
        """Begin the agent of a request, or note the request if it has begun.

        Args:
            asked: the request's place.
            now: the store's time.
            passes: no limit of the session refuses the request.

        Returns:
            the state of the tree, the index in `AGENT_LIMITS` of the limit that refuses the request
            (-1 for none), and its used and allowed amounts.
        """
        agent = asked.agent
        if not agent:
            return TreeStanding(self.agents, self.refused), -1, 0, 0
        known = self.recent.pop(agent, None) or self._take_older(agent)
        if known is not None:  # as for nearly all requests of agents
            known.last = now
            self._keep(agent, known)
            return TreeStanding(self.agents, self.refused, known.depth), -1, 0, 0
        if not passes:
            return TreeStanding(self.agents, self.refused), -1, 0, 0
        depth = self._find_depth(asked.parent)
        limit, used, allowed = self._find_limit(depth, asked.limits, now)
        if limit >= 0:
            self.refused = min(self.refused + 1, _MAX)
            return TreeStanding(self.agents, self.refused, depth), limit, used, allowed
        self.agents = min(self.agents + 1, _MAX)
        self.older = self.older[
            max(0, len(self.older) - (MAX_AGENTS - 1 - len(self.recent)) * _SIZE) :
        ]
        self._keep(agent, _Agent(depth, now, now))
        return TreeStanding(self.agents, self.refused, depth, began=True), -1, 0, 0

    def _keep(self, name: bytes, agent: _Agent) -> None:
        self.recent[name] = agent
        if len(self.recent) > _RECENT:
            self.older = b"".join([self.older, *self._pack_recent(_RECENT // 2)])
            self.recent = dict(list(self.recent.items())[_RECENT // 2 :])

    def _pack_recent(self, number: int) -> list[bytes]:
        first = list(self.recent.items())[:number]
        return [_AGENT.pack(name, agent.depth, agent.first, agent.last) for name, agent in first]

    def _take_older(self, name: bytes) -> _Agent | None:
        at = self._find_older(name)
        if at < 0:
            return None
        depth: int
        first: int
        last: int
        _, depth, first, last = _AGENT.unpack_from(self.older, at)
        self.older = self.older[:at] + self.older[at + _SIZE :]
        return _Agent(depth, first, last)

    def _find_older(self, name: bytes) -> int:
        at = self.older.find(name)
        while at >= 0 and at % _SIZE:
            at = self.older.find(name, at + 1)
        return at

    def _find_depth(self, parent: bytes) -> int:
        if not parent:
            return 1
        depth: int = _UNKNOWN_DEPTH - 1
        known = self.recent.get(parent)
        at = self._find_older(parent) if known is None else -1
        if known is not None:
            depth = known.depth
        elif at >= 0:
            _, depth, _, _ = _AGENT.unpack_from(self.older, at)
        return min(depth + 1, _MAX_DEPTH)

    def _find_limit(self, depth: int, limits: AgentLimits, now: int) -> tuple[int, int, int]:
        """The limit that refuses another agent, or -1; its used and allowed amounts."""
        if 0 <= limits.depth < depth:
            return 0, depth, limits.depth
        if 0 <= limits.agents <= self.agents:
            return 1, self.agents, limits.agents
        if limits.concurrent < 0 and limits.spawns < 0:
            return -1, 0, 0
        active = spawns = 0
        for first, last in self._list_newest(now - max(limits.idle_ms, MINUTE_MS)):
            active += now - last < limits.idle_ms
            spawns += now - first < MINUTE_MS
            if 0 <= limits.concurrent <= active:
                break
        if 0 <= limits.concurrent <= active:
            return 2, active, limits.concurrent
        return (3, spawns, limits.spawns) if 0 <= limits.spawns <= spawns else (-1, 0, 0)

    def _list_newest(self, since: int) -> list[tuple[int, int]]:
        """When agents began and were last active, since then; the newest request first."""
        found: list[tuple[int, int]] = []
        for agent in reversed(self.recent.values()):
            if agent.last <= since:
                return found
            found.append((agent.first, agent.last))
        at = len(self.older) - _SIZE
        while at >= 0:
            first: int
            last: int
            _, _, first, last = _AGENT.unpack_from(self.older, at)
            if last <= since:
                break
            found.append((first, last))
            at -= _SIZE
        return found


_ASKED: Final = struct.Struct(">8s8siiiiQ")
_ANSWER: Final = struct.Struct(">IIHB")
ANSWER_SIZE: Final = _ANSWER.size


def weigh_tree(asked: TreeStep | None) -> int:
    """The worst-case cost of a request for a store, in addition to that of its session."""
    return 0 if asked is None else (max(asked.limits.concurrent, asked.limits.spawns) + 63) // 64


def pack_tree(asked: TreeStep | None) -> bytes:
    """Pack a place in a tree for a remote store; empty if there is none."""
    if asked is None:
        return b""
    limits = asked.limits
    return _ASKED.pack(
        asked.agent,
        asked.parent,
        limits.depth,
        limits.agents,
        limits.concurrent,
        limits.spawns,
        limits.idle_ms,
    )


def read_tree(answer: bytes, at: int) -> TreeStanding:
    """Read a remote store's answer; raises struct.error if it is too short."""
    agents, refused, depth, began = _ANSWER.unpack_from(answer, at)
    return TreeStanding(agents, refused, depth, began != 0)
