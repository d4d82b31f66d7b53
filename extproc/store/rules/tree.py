"""The agents below a root session, and whether another one may begin: pure, exact, with `now` as an argument in milliseconds.

A tree belongs to a ledger: it ends with it, and is read and changed in the same step. An agent is known by a digest of its
name. One that was let in is never refused by these limits later; one that was refused is not remembered, so refusals take no
room.

An agent below the root has depth 1, any other that of its parent and 1. It is worked out when the agent begins. A parent that
the tree does not know (forged, forgotten, or the agent itself) counts as one below the root. So there are no circles, whatever
clients claim.

A tree knows its newest `MAX_AGENTS` agents. One that is forgotten and returns is counted again.
"""

from __future__ import annotations

import struct
from typing import Final, TypeAlias

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


class AgentLimits:
    """What the agents of one root session may be; -1 for no limit. Never changed.

    Attributes:
        depth: levels of agents below the root.
        agents: number of agents that may begin.
        concurrent: number of them that may be active: with a request in the last `idle_ms`.
        spawns: number of them that may begin within a minute.
        idle_ms: how long an agent is active after a request, in milliseconds.
    """

    __slots__ = ("agents", "concurrent", "depth", "idle_ms", "spawns")

    def __init__(
        self, depth: int = -1, agents: int = -1, concurrent: int = -1, spawns: int = -1, idle_ms: int = MINUTE_MS
    ) -> None:
        self.depth = depth
        self.agents = agents
        self.concurrent = concurrent
        self.spawns = spawns
        self.idle_ms = idle_ms


NO_LIMITS: Final = AgentLimits()


class TreeStep:
    """A request's place in a tree, as a part of the question about its session; never changed.

    Attributes:
        key: the key of the tree; it ends in the same two digits as that of the ledger.
        shared: the key of the tree of excess sessions, likewise.
        limits: what the agents may be.
        agent: digest of the agent's name, 8 bytes, or `ROOT`.
        parent: digest of the name of the agent that started it, or `ROOT`.
    """

    __slots__ = ("agent", "key", "limits", "parent", "shared")

    def __init__(self, key: str, shared: str, limits: AgentLimits, agent: bytes, parent: bytes) -> None:
        self.key = key
        self.shared = shared
        self.limits = limits
        self.agent = agent
        self.parent = parent


class TreeStanding:
    """The state of a tree after a request; never changed.

    Attributes:
        agents: number of agents that have begun.
        refused: number of requests that were refused because of `AGENT_LIMITS`.
        depth: the depth of the request's agent; 0 for the root, and for one that did not begin because of another limit.
        began: the agent began with this request.
    """

    __slots__ = ("agents", "began", "depth", "refused")

    def __init__(self, agents: int = 0, refused: int = 0, depth: int = 0, began: bool = False) -> None:  # noqa: FBT001, FBT002  # a field
        self.agents = agents
        self.refused = refused
        self.depth = depth
        self.began = began

    def __eq__(self, other: object) -> bool:
        """Compare all fields: stores are compared by their answers."""
        return isinstance(other, TreeStanding) and self.list_fields() == other.list_fields()

    def __hash__(self) -> int:
        """Hash the fields that equality compares."""
        return hash(self.list_fields())

    def __repr__(self) -> str:
        """All fields."""
        return f"TreeStanding{self.list_fields()}"

    def list_fields(self) -> tuple[int, int, int, bool]:
        """All fields, in the order of the arguments."""
        return self.agents, self.refused, self.depth, self.began


# In the byte order of most processors. Remote stores use network byte order, and begin with a version.
# The head: when the tree was last used, when its session began; the numbers of agents and of refused requests.
_NUMBERS: Final = struct.Struct("<II")
_NUMBER: Final = 4
_HEAD_SIZE: Final = 2 * 8 + _NUMBERS.size
_AGENT: Final = struct.Struct("<8sHqq")
"""The agent's digest and depth, when it began, and when its newest request came. The agent of the newest request is last."""

_SIZE: Final = _AGENT.size
_DIGEST: Final = 8
_TIME: Final = struct.Struct("<q")
_STAMP: Final = _TIME.size
"""Where a head has the time at which its session began."""


_STAMP_END: Final = 2 * _STAMP

Admission: TypeAlias = tuple[bytes, TreeStanding, int, int, int]
"""What a tree says to a request: the tree as it is stored now (empty if there is nothing to store), how it stands, the place in
`AGENT_LIMITS` of the limit that refuses the request (-1 for none), and the used and allowed amounts of that."""


def write_stamp(began: int) -> bytes:
    """When a session began, as its tree has it."""
    return _TIME.pack(began)


def admit(state: bytes | None, asked: TreeStep, began: bytes, now: int, *, passes: bool) -> Admission:
    """Let the agent of a request begin, or note that it goes on.

    Args:
        state: the stored tree; None for none.
        asked: the request's place.
        began: the result of `write_stamp` for the session; a tree of an earlier session is forgotten.
        now: the store's time.
        passes: no limit of the session refuses the request.
    """
    agents = refused = 0
    nodes = b""
    if state is not None and state[_STAMP:_STAMP_END] == began:
        agents, refused = _read_number(state, _STAMP_END), _read_number(state, _STAMP_END + _NUMBER)
        time = _TIME.pack(now)
        if not asked.agent:
            return time + state[_STAMP:], TreeStanding(agents, refused), -1, 0, 0
        at = _find(state, asked.agent, _HEAD_SIZE)
        if at >= 0:  # as for nearly all requests of agents
            depth = state[at + _DIGEST] + 256 * state[at + _DIGEST + 1]
            kept = b"".join([time, state[_STAMP:at], state[at + _SIZE :], state[at : at + _SIZE - _STAMP], time])
            return kept, TreeStanding(agents, refused, depth), -1, 0, 0
        nodes = state[_HEAD_SIZE:]
    agent, limit, used, allowed, depth, begins = asked.agent, -1, 0, 0, 0, False
    if agent and passes:
        depth = _find_depth(nodes, asked)
        limit, used, allowed = _find_limit(nodes, agents, depth, asked.limits, now)
        if limit >= 0:
            refused = min(refused + 1, _MAX)
        else:
            begins, agents = True, min(agents + 1, _MAX)
            nodes = nodes[-(MAX_AGENTS - 1) * _SIZE :] + _AGENT.pack(agent, depth, now, now)
    standing = TreeStanding(agents, refused, depth, begins)
    kept = b"".join([_TIME.pack(now), began, _NUMBERS.pack(agents, refused), nodes]) if agents or refused else b""
    return kept, standing, limit, used, allowed


def _read_number(state: bytes, at: int) -> int:
    """One of `_NUMBERS`, in less time than unpacking takes."""
    return state[at] + (state[at + 1] << 8) + (state[at + 2] << 16) + (state[at + 3] << 24)


def _find(joined: bytes, agent: bytes, start: int = 0) -> int:
    """The offset of an agent among those that begin at `start`; -1 if it is unknown."""
    at = joined.find(agent, start)
    while at >= 0 and (at - start) % _SIZE:
        at = joined.find(agent, at + 1)
    return at


def _find_depth(nodes: bytes, asked: TreeStep) -> int:
    if not asked.parent:
        return 1
    at = _find(nodes, asked.parent)
    return min(int.from_bytes(nodes[at + _DIGEST : at + _DIGEST + 2], "little") + 1, _MAX_DEPTH) if at >= 0 else _UNKNOWN_DEPTH


def _find_limit(nodes: bytes, agents: int, depth: int, limits: AgentLimits, now: int) -> tuple[int, int, int]:
    """The limit that refuses another agent, a place in `AGENT_LIMITS`; its used and allowed amounts."""
    if 0 <= limits.depth < depth:
        return 0, depth, limits.depth
    if 0 <= limits.agents <= agents:
        return 1, agents, limits.agents
    if limits.concurrent < 0 and limits.spawns < 0:
        return -1, 0, 0
    active = spawns = 0
    at = len(nodes) - _SIZE
    while at >= 0:  # the newest requests are last
        first: int
        last: int
        _, _, first, last = _AGENT.unpack_from(nodes, at)
        if now - last >= max(limits.idle_ms, MINUTE_MS):
            break
        active += now - last < limits.idle_ms
        spawns += now - first < MINUTE_MS
        if 0 <= limits.concurrent <= active:
            return 2, active, limits.concurrent
        at -= _SIZE
    if 0 <= limits.concurrent <= active:
        return 2, active, limits.concurrent
    return (3, spawns, limits.spawns) if 0 <= limits.spawns <= spawns else (-1, 0, 0)


_ASKED: Final = struct.Struct(">8s8siiiiQ")
_ANSWER: Final = struct.Struct(">IIHB")
ANSWER_SIZE: Final = _ANSWER.size


def weigh_tree(asked: TreeStep | None) -> int:
    """The worst cost of a request for a store, beside that of its session."""
    return 0 if asked is None else (max(asked.limits.concurrent, asked.limits.spawns) + 63) // 64


def pack_tree(asked: TreeStep | None) -> bytes:
    """Pack a place in a tree for a remote store; empty if there is none."""
    if asked is None:
        return b""
    limits = asked.limits
    return _ASKED.pack(asked.agent, asked.parent, limits.depth, limits.agents, limits.concurrent, limits.spawns, limits.idle_ms)


def read_tree(answer: bytes, at: int) -> TreeStanding:
    """Read a remote store's answer; raises struct.error if it is too short."""
    agents, refused, depth, began = _ANSWER.unpack_from(answer, at)
    return TreeStanding(agents, refused, depth, began != 0)
