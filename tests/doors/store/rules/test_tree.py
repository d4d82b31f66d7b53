"""Trees of agents, and their roots, in every store; time is an argument."""

from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from extproc.metrics import Metrics
from extproc.store.memory import MemoryStore
from extproc.store.rules.root import RootSearch
from extproc.store.rules.session import Step
from extproc.store.rules.tree import MAX_AGENTS, AgentLimits, weigh_tree
from tests.support.examples import examples
from tests.support.ledger import limit, make_step, settle_step
from tests.support.servers import Driver
from tests.support.trees import (
    AGENT_LIMITS_OF_ALL_KINDS,
    TREE_MOVES,
    PlainTree,
    Told,
    ask_in_tree,
    play_tree,
    tell_tree,
)

CASES = {
    "no limits": (AgentLimits(), [(0, agent, agent - 1, "") for agent in range(1, 40)]),
    "agents": (
        AgentLimits(agents=2),
        [
            (0, 1, 0, ""),
            (1, 2, 0, ""),
            (2, 3, 0, "max_agents 2/2"),
            (99_000, 1, 0, ""),
            (99_001, 4, 1, "max_agents 2/2"),
        ],
    ),
    "none": (AgentLimits(agents=0), [(0, 0, 0, ""), (1, 1, 0, "max_agents 0/0"), (2, 0, 0, "")]),
    "depth": (
        AgentLimits(depth=2),
        [(0, 1, 0, ""), (1, 2, 1, ""), (2, 3, 2, "max_depth 3/2"), (3, 4, 1, "")],
    ),
    "an unknown parent": (
        AgentLimits(depth=1),
        [(0, 1, 9, "max_depth 2/1"), (1, 1, 1, "max_depth 2/1"), (2, 1, 0, "")],
    ),
    "a cycle": (
        AgentLimits(depth=3),
        [(0, 1, 2, ""), (1, 2, 1, ""), (2, 1, 2, ""), (3, 3, 2, "max_depth 4/3")],
    ),
    "active": (
        AgentLimits(concurrent=2, idle_ms=1_000),
        [
            *((0, 1, 0, ""), (1, 2, 0, ""), (999, 3, 0, "max_concurrent_agents 2/2")),
            *((1_000, 3, 0, ""), (1_001, 1, 0, ""), (1_999, 4, 0, "max_concurrent_agents 2/2")),
        ],
    ),
    "spawns in a minute": (
        AgentLimits(spawns=2),
        [
            *((0, 1, 0, ""), (1_000, 2, 0, ""), (59_999, 3, 0, "max_spawns_per_minute 2/2")),
            *((60_000, 3, 0, ""), (60_001, 4, 0, "max_spawns_per_minute 2/2")),
        ],
    ),
    "spawns in a minute, of active agents": (
        AgentLimits(spawns=1),
        [
            (0, 1, 0, ""),
            (59_000, 1, 0, ""),
            (59_999, 2, 0, "max_spawns_per_minute 1/1"),
            (60_000, 2, 0, ""),
        ],
    ),
    "spawns in a minute, of idle agents": (
        AgentLimits(spawns=2, concurrent=5, idle_ms=1_000),
        [(0, 1, 0, ""), (2_000, 2, 0, ""), (4_000, 3, 0, "max_spawns_per_minute 2/2")],
    ),
    "active for more than a minute": (
        AgentLimits(concurrent=2, spawns=9, idle_ms=120_000),
        [
            (0, 1, 0, ""),
            (1, 2, 0, ""),
            (90_000, 3, 0, "max_concurrent_agents 2/2"),
            (120_000, 3, 0, ""),
        ],
    ),
}
"""Limits; and when which agent asks, whose parent is which, and what it is told."""


@pytest.mark.parametrize("case", CASES)
def test_tree_cases_hold_in_every_store(store: Driver, case: str) -> None:
    limits, moves = CASES[case]
    session = limit(idle_ms=3_600_000)
    told = []
    for number, (now, agent, parent, _) in enumerate(moves):
        (standing,) = store.account([ask_in_tree(number, agent, limits, parent, session)], now)
        found = tell_tree(standing)
        told.append(f"{found.limit} {found.used}/{found.allowed}" if found.limit else "")

    assert told == [expected for *_, expected in moves]


@settings(max_examples=examples(60))
@given(
    moves=TREE_MOVES,
    limits=st.lists(AGENT_LIMITS_OF_ALL_KINDS, min_size=1, max_size=2),
    steps=st.sampled_from([-1, -1, 3, 8]),
)
def test_trees_equal_a_plain_model(
    opened: Driver, moves: list[tuple[int, int, str, int]], limits: list[AgentLimits], steps: int
) -> None:
    store, session = opened.fresh(), limit(steps=steps)

    found = play_tree(
        moves, session, limits, lambda asked, now: tell_tree(store.account([asked], now)[0])
    )

    assert found == play_tree(moves, session, limits, PlainTree().ask)


LARGE = [
    AgentLimits(),
    AgentLimits(depth=9, concurrent=900),
    AgentLimits(spawns=900),
    AgentLimits(agents=3_000),
]


def test_large_trees_equal_a_plain_model(store: Driver) -> None:
    """First more agents than memory keeps unpacked, then more than are known at all.

    Most requests are of recent agents.
    """
    random, session, plain = Random(30), limit(idle_ms=86_400_000), PlainTree()
    now, begun = 1_000_000, 1
    found: list[Told] = []
    expected: list[Told] = []
    for _ in range(60):
        now += random.choice([0, 100, 3_000])
        asked: list[Step] = []
        for limits in LARGE * 15:
            begun += random.random() < 0.4
            agent, parent = (
                max(0, begun - int(random.expovariate(1 / 100))),
                random.randrange(begun),
            )
            asked.append(ask_in_tree(len(found) + len(asked), agent, limits, parent, session))
        found += [tell_tree(standing) for standing in store.account(asked, now)]
        expected += [plain.ask(one, now) for one in asked]

    assert found == expected
    assert found[-1].tree[0] > MAX_AGENTS


def search(store: Driver, agent: int, parent: int) -> tuple[RootSearch, Step]:
    key, above = (f"root:{one:016x}:7f" for one in (agent, parent))
    asked = RootSearch(key, above, parent.to_bytes(8), 60_000)
    step = ask_in_tree(
        agent,
        agent,
        AgentLimits(depth=5),
        0,
        limit(),
        key=f"session:p::{parent:016x}:7f",
        search=asked,
    )
    assert step.tree is not None
    step.tree = step.tree._replace(key=f"tree:p::{parent:016x}:7f")
    return asked._replace(key=store.name(key), parent_key=store.name(above)), step


def test_step_is_counted_at_the_root(store: Driver) -> None:
    """It is counted in the root's session, below the parent that it names.

    The agents are a child, its child and grandchild, another child, one in a circle with it, one
    that is its own parent, and the first child again, whose retry claims another parent.
    """
    pairs = [(2, 1), (3, 2), (4, 3), (5, 1), (6, 5), (7, 7), (2, 9), (1, 4)]
    told = []
    for agent, parent in pairs:
        (standing,) = store.account([search(store, agent, parent)[1]], 1_000)
        told.append(
            (
                int.from_bytes(standing.root),
                standing.steps,
                standing.tree.depth if standing.tree else None,
            )
        )
    roots = [
        int.from_bytes(store.push([search(store, agent, parent)[0]])[0][0])
        for agent, parent in pairs
    ]

    assert told == [
        (1, 1, 1),
        (1, 2, 2),
        (1, 3, 3),
        (1, 4, 1),
        (1, 5, 2),
        (7, 1, 1),
        (1, 5, 1),
        (1, 6, 0),
    ]
    assert roots == [root for root, _, _ in told]


def test_one_call_mixes_steps_and_settlements(store: Driver) -> None:
    steps = [search(store, agent, parent)[1] for agent, parent in [(2, 1), (3, 2), (4, 3)]]
    steps[1].tree = None
    plain = make_step(9, limit(), key="session:p::0000000000000001:7f")
    other = make_step(9, limit(steps=0), key="session:p::other:7f")
    settled = settle_step(plain, cost=7)

    standings = store.account([steps[0], plain, other, settled, *steps[1:]], 1_000)

    assert [
        (
            int.from_bytes(standing.root),
            standing.steps,
            standing.cost,
            standing.tree.agents if standing.tree else None,
        )
        for standing in standings
    ] == [
        (1, 1, 0, 1),
        (0, 2, 0, None),
        (0, 0, 0, None),
        (0, 2, 7, None),
        (1, 3, 7, None),
        (1, 4, 7, 2),
    ]


def test_refused_agents_kill_no_session(store: Driver) -> None:
    """Its refusals are counted, but not as refusals in a row."""
    session, limits = limit(blocks=2), AgentLimits(agents=0)
    for number in range(1, 6):
        store.account([ask_in_tree(number, number, limits, 0, session)], number)
    told = tell_tree(store.account([ask_in_tree(9, 0, limits, 0, session)], 9)[0])

    assert (told.limit, told.blocks, told.row, told.tree) == ("", 5, 0, (0, 5, 0, False))


A, B, C, D = (f"{number:016x}" for number in range(10, 14))


@pytest.mark.parametrize(
    ("pairs", "roots"),
    [
        ([(B, A), (C, B), (D, C), (A, D), (D, B), (B, D)], [A] * 6),
        ([(B, A), (D, C), (B, D)], [A, C, A]),
        ([(B, A), (D, C), (C, B)], [A, C, A]),
    ],
    ids=["a chain and a circle", "another tree", "the parent of a known one"],
)
def test_root_is_found_through_each_parent(
    store: Driver, pairs: list[tuple[str, str]], roots: list[str]
) -> None:
    """The first parent decides; searches go one by one or together, as replicas send them."""
    assert [store.find_root(*asked).hex() for asked in pairs] == roots

    store.fresh()
    batch = [
        RootSearch(
            store.name(f"root:{agent}:7f"),
            store.name(f"root:{parent}:7f"),
            bytes.fromhex(parent),
            60_000,
        )
        for agent, parent in pairs[:3]
    ]
    assert [root.hex() for (root,) in store.push(batch)] == roots[:3]


def test_requests_of_the_root_keep_its_tree() -> None:
    """What is swept away is what was not used, and a root's request uses the tree."""
    store, session, limits = MemoryStore(Metrics(), 1_024), limit(idle_ms=1_000), AgentLimits()
    store.hit([ask_in_tree(1, 1, limits, 0, session)], 0)
    store.hit([ask_in_tree(2, 0, limits, 0, session)], 900)
    for number in range(64):
        store.hit([make_step(number, session, key=f"session:p::other{number}:7f")], 1_800)
    (standing,) = store.hit([ask_in_tree(3, 1, limits, 0, session)], 1_850)

    assert tell_tree(standing).tree == (1, 0, 1, False)


@pytest.mark.parametrize(
    ("limits", "weight"),
    [((-1, -1), 0), ((1, -1), 1), ((-1, 64), 1), ((65, 1), 2), ((1_000, 9), 16)],
)
def test_weight_of_a_tree_follows_its_limits(limits: tuple[int, int], weight: int) -> None:
    """Batches are bounded by that, because one script delays all other clients of a server."""
    concurrent, spawns = limits
    asked = ask_in_tree(1, 1, AgentLimits(concurrent=concurrent, spawns=spawns)).tree

    assert (weigh_tree(asked), weigh_tree(None)) == (weight, 0)


def test_root_expires() -> None:
    found = {}
    for gap in (999, 1_000):
        store = MemoryStore(Metrics())
        for agent, parent, now in ((B, A, 0), (C, B, gap)):
            asked = RootSearch(f"{agent}:7f", f"{parent}:7f", bytes.fromhex(parent), 1_000)
            (found[gap],) = store.push([asked], now)

    assert found == {999: [bytes.fromhex(A)], 1_000: [bytes.fromhex(B)]}
