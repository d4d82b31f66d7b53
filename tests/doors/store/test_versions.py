"""A packed value of an unknown version counts as missing, so that versions can share a store."""

from typing import Any

from extproc.store.rules.chain import Trail
from extproc.store.rules.take_back import take_from_chain
from extproc.store.rules.tree import AgentLimits
from tests.support.budgets import (
    ask_store as ask_budgets,
    make_breaker,
    make_bucket,
    make_period,
    shown,
)
from tests.support.chains import Model, Sent, ask_store, make_link
from tests.support.ledger import limit, tell
from tests.support.servers import Driver, server
from tests.support.trees import ask_in_tree
from tests.support.windows import make_hit, make_push

NOW = 1_764_000_000_000
UNKNOWN = b"\xfe"
"""No format has this version."""

LINKS = [make_link(Sent("u", ("a",) * number, f"e{number}")) for number in range(3)]
KINDS = 2 + 1 + 3 + 2 + 1 + 1 + 3 + 1
"""Windows, ring, conversation, suffixes and usage, session, caller, tree, root, budgets, marker."""


def ask_all(store: Driver, number: int) -> list[Any]:
    budgets = [make_bucket(), make_period(), make_breaker()]
    [standing] = store.account(
        [ask_in_tree(number, 1, AgentLimits(), session=limit(max_sessions=1))], NOW
    )
    settled = ask_budgets(store, [make_bucket().settle(2, NOW, "a")], NOW)
    return [
        [
            (count.count, count.looping)
            for count in store.count(
                [make_hit("sliding_ttl", key="a"), make_hit("fixed", key="b")], NOW
            )
        ],
        store.push([make_push("a", str(number))], NOW),
        ask_store(store, LINKS[number], NOW),
        (tell(standing), standing.crowded, standing.tree),
        [
            store.find_root(agent * 16, parent * 16, now=NOW)
            for agent, parent in ((f"{number}", "b"), ("b", "c"))
        ],
        [shown(taken) for taken in [*ask_budgets(store, budgets, NOW), *settled]],
    ]


def test_values_of_an_unknown_version_are_missing() -> None:
    """Requests get the answers of an empty store, and count from there."""
    with server() as one, Driver(f"redis://{one.address}") as store, one.client() as client:
        first, second = [ask_all(store, number) for number in (1, 2)]
        packed = [
            key for key in client.scan_iter(f"*{store.name('')}*") if client.type(key) == b"string"
        ]
        for key in packed:
            client.setrange(key, 0, UNKNOWN)

        again = [ask_all(store, number) for number in (1, 2)]

        assert len(packed) >= KINDS
        assert [one for one, other in zip(first, second, strict=True) if one == other] == []
        assert again == [first, second]
        assert [key for key in packed if client.get(key)[:1] == UNKNOWN] == []


def test_conversations_of_an_unknown_version_are_missing_in_memory() -> None:
    model = Model()

    def ask() -> list[Trail]:
        return [model.ask(link, NOW) for link in LINKS]

    first = ask()
    model.values = {key: UNKNOWN + value[1:] for key, value in model.values.items()}

    assert {take_from_chain(value) == value for value in model.values.values()} == {True}
    assert ask() == first
