"""A plain model of trees of agents, and moves to try it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from extproc.store.rules.session import LIMITS, Limits, Standing, Step
from extproc.store.rules.tree import MAX_AGENTS, AgentLimits, TreeStep
from tests.support.ledger import limit, make_step

NO_STEP_LIMIT = limit()


def name(agent: int) -> bytes:
    """The digest of an agent by its number; 0 is the root."""
    return agent.to_bytes(8) if agent else b""


def ask_in_tree(
    number: int,
    agent: int,
    limits: AgentLimits,
    parent: int = 0,
    session: Limits = NO_STEP_LIMIT,
    **changes: Any,  # noqa: ANN401  # Step's own fields
) -> Step:
    """A request of an agent, by its number and its parent's."""
    tree = TreeStep("tree:p::s1:7f", limits, name(agent), name(parent))
    return make_step(number, session, tree=tree, **changes)


class Told(NamedTuple):
    limit: str
    used: int
    allowed: int
    steps: int
    blocks: int
    row: int
    tree: tuple[int, int, int, bool]


def tell_tree(standing: Standing) -> Told:
    tree = standing.tree
    assert tree is not None
    refused = LIMITS[standing.limit], standing.used, standing.allowed
    return Told(*refused, standing.steps, standing.blocks, standing.consecutive_blocks, tree)


class PlainTree:
    def __init__(self) -> None:
        self._began = self._last = -(10**9)
        self._forget()

    def _forget(self) -> None:
        self._steps = self._blocks = self._row = self._begun = self._refused = 0
        self._seen: dict[bytes, int] = {}
        self._agents: dict[bytes, tuple[int, int, int]] = {}  # depth, first, last

    def ask(self, asked: Step, now: int) -> Told:
        if abs(now - self._last) >= asked.limits.idle_ms:
            self._began = self._last = now
            self._forget()
        tree = asked.tree
        assert tree is not None
        again = self._seen.get(asked.identity, 3) < 3
        over = 0 <= asked.limits.steps <= self._steps and not again
        verdict: tuple[str, int, int] = (
            ("max_steps", self._steps, asked.limits.steps) if over else ("", 0, 0)
        )
        depth, begins = self._meet(tree, now), False
        if tree.agent and not depth and not over:
            parent = self._agents.get(tree.parent)
            depth = 1 if not tree.parent else 2 if parent is None else parent[0] + 1
            verdict = self._judge(tree.limits, depth, now)
            begins = not verdict[0]
            self._refused += not begins
            if begins:
                self._begun += 1
                self._agents[tree.agent] = depth, now, now
                self._agents = dict(list(self._agents.items())[-MAX_AGENTS:])
        if verdict[0]:
            self._blocks += 1
            self._row += over
        else:
            self._pass(asked.identity, again, now)
        return Told(
            *verdict,
            self._steps,
            self._blocks,
            self._row,
            (self._begun, self._refused, depth, begins),
        )

    def _meet(self, tree: TreeStep, now: int) -> int:
        known = self._agents.pop(tree.agent, None)
        if known is None:
            return 0
        self._agents[tree.agent] = known[0], known[1], now
        return known[0]

    def _judge(self, limits: AgentLimits, depth: int, now: int) -> tuple[str, int, int]:
        active = len([1 for _, _, last in self._agents.values() if now - last < limits.idle_ms])
        fresh = len([1 for _, first, _ in self._agents.values() if now - first < 60_000])
        if 0 <= limits.depth < depth:
            return "max_depth", depth, limits.depth
        if 0 <= limits.agents <= self._begun:
            return "max_agents", self._begun, limits.agents
        if 0 <= limits.concurrent <= active:
            return "max_concurrent_agents", limits.concurrent, limits.concurrent
        if 0 <= limits.spawns <= fresh:
            return "max_spawns_per_minute", fresh, limits.spawns
        return "", 0, 0

    def _pass(self, identity: bytes, again: bool, now: int) -> None:
        self._steps += not again
        times = self._seen[identity] + 1 if again else 0
        if not again:
            self._seen.pop(identity, None)
        self._seen[identity] = times
        self._seen = dict(list(self._seen.items())[-16:])
        self._row, self._last = 0, now


AGENT_LIMITS_OF_ALL_KINDS = st.builds(
    AgentLimits,
    depth=st.sampled_from([-1, -1, 0, 1, 2, 3]),
    agents=st.sampled_from([-1, 0, 1, 3, 6]),
    concurrent=st.sampled_from([-1, 1, 2, 4]),
    spawns=st.sampled_from([-1, 1, 3]),
    idle_ms=st.sampled_from([1_000, 60_000, 120_000]),
)

_GAPS = st.integers(0, 4_000) | st.sampled_from([29_000, 59_999, 60_000, 61_000])

# Agent (0 is the root), parent, move, milliseconds. Ten agents claim anything: that they are their
# own parents, or have an unknown one.
TREE_MOVES = st.lists(
    st.tuples(
        st.integers(0, 9),
        st.integers(0, 10),
        st.sampled_from(["step", "step", "step", "retry"]),
        _GAPS,
    ),
    max_size=60,
)


def play_tree(
    moves: Sequence[tuple[int, int, str, int]],
    session: Limits,
    limits: Sequence[AgentLimits],
    ask: Callable[[Step, int], Told],
) -> list[Told]:
    """Answers to requests. Limits alternate, as grants come and go."""
    told, now, newest = [], 1_000_000, dict.fromkeys(range(10), 0)
    for number, (agent, parent, move, gap) in enumerate(moves, 1):
        now += gap
        if move == "step" or not newest[agent]:
            newest[agent] = number
        allowed = limits[number % len(limits)]
        told.append(
            ask(
                ask_in_tree(
                    newest[agent], agent, allowed, parent, session, call=number.to_bytes(16)
                ),
                now,
            )
        )
    return told
