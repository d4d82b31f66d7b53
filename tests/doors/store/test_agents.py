"""Agents of a session on two replicas with one Valkey: the same limits, tree and overrides."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from extproc.ext_proc.service import Service
from extproc.metrics import Metrics
from extproc.settings import Settings
from extproc.store import open_store
from tests.support.conversations import judge
from tests.support.extent import deepen
from tests.support.harness import PATIENCE
from tests.support.servers import Server, server
from tests.support.service import make_service, sample
from tests.support.session_limits import limited, turns

AGENTS = 1_000


@pytest.fixture(scope="module")
def valkey() -> Iterator[Server]:
    with server() as one:
        yield one


@asynccontextmanager
async def replicas(valkey: Server, **limits: Any) -> AsyncIterator[list[Service]]:  # noqa: ANN401  # of a policy
    valkey.client().flushall()
    stores = [
        open_store(f"redis://{valkey.address}", Metrics(), Settings(store_timeout=PATIENCE))
        for _ in range(2)
    ]
    for store in stores:
        await store.start()
    try:
        yield [make_service(limited(**limits), store=store) for store in stores]
    finally:
        for store in stores:
            await store.close()


def opencode(agent: int) -> dict[str, str]:
    return {
        "x_session_id": f"agent{agent}",
        **({"x_parent_session_id": f"agent{agent - 1}"} if agent else {}),
    }


@pytest.mark.parametrize(
    "limit",
    deepen(
        ["max_agents", "max_concurrent_agents", "max_spawns_per_minute"], "max_concurrent_agents"
    ),
)
def test_thousand_concurrent_agents_meet_their_limit(valkey: Server, limit: str) -> None:
    async def main() -> tuple[list[bool], list[bool], list[bool], list[Service]]:
        async with replicas(valkey, **{limit: 8}) as services:

            async def start(number: int, team: str, root: str) -> bool:
                names = {
                    "x_claude_code_session_id": root,
                    "x_claude_code_agent_id": f"{root}-{number}",
                }
                return await judge(
                    services[number % 2], turns(1, number=str(number)), x_team=team, **names
                )

            wild, others = [], []
            for first in range(0, AGENTS, 100):
                asked = [start(number, "wild", "root") for number in range(first, first + 100)]
                others += [start(number, "other", f"root{first}") for number in range(8)]
                wild += await asyncio.gather(*asked)
            root = {"x_claude_code_session_id": "root"}
            going_on = [
                await judge(service, turns(2), x_team="wild", **root) for service in services
            ]
            return wild, list(await asyncio.gather(*others)), going_on, services

    wild, others, going_on, services = asyncio.run(main())

    assert wild.count(False) == 8
    assert not any(others)
    assert not any(going_on)
    with valkey.client() as client:
        trees = list(client.scan_iter(match="*tree:*"))
        assert max(client.strlen(tree) for tree in trees) <= 25 + 8 * 26
        assert min(client.pttl(tree) for tree in trees) > 0
    assert (
        sum(
            sample(service, "session_agents_total", policy="agents", mode="enforce")
            for service in services
        )
        == 8 + 80
    )
    assert (
        max(len(run.agents) for service in services for run in service.reporter.sessions.copy())
        <= 64
    )


def test_chain_of_agents_has_one_root(valkey: Server) -> None:
    """Each request of opencode names only a parent, and the replica may not have seen that."""
    last = 12

    async def main() -> tuple[list[bool], list[int], list[int]]:
        async with replicas(valkey, max_depth=last) as services:
            first = [
                await judge(
                    services[agent % 2], turns(1, number=str(agent)), x_team="t", **opencode(agent)
                )
                for agent in range(last + 2)
            ]
            asked = []
            for agent in range(last + 1):
                before = valkey.commands()["evalsha"]
                await judge(
                    services[agent % 2], turns(2, number=str(agent)), x_team="t", **opencode(agent)
                )
                asked.append(valkey.commands()["evalsha"] - before)
            return (
                first,
                asked,
                [
                    run.standing.steps
                    for service in services
                    for run in service.reporter.sessions.copy()
                ],
            )

    refused, asked, steps = asyncio.run(main())

    with valkey.client() as client:
        kept = list(client.scan_iter(match="loopguard:*"))
        assert {
            kind
            for kind in ("root:", "tree:", "session7:", "sessions2:")
            for key in kept
            if kind in key.decode()
        } == {"root:", "tree:", "session7:", "sessions2:"}
        assert min(client.pttl(key) for key in kept) > 0
    assert (refused, asked) == ([False] * (last + 1) + [True], [1] * (last + 1))
    assert sorted(steps) == [2 * last + 1, 2 * last + 2]


def name_agent(client: str, root: int, agent: int, parent: int) -> dict[str, str]:
    top, own, above = (
        f"root{root}",
        f"agent{root}-{agent}",
        f"agent{root}-{parent}" if parent else "",
    )
    if client == "opencode":
        return (
            {"x_session_id": own, "x_parent_session_id": above or top}
            if agent
            else {"x_session_id": top}
        )
    if client == "codex":
        return (
            {"session_id": top, "thread_id": own, "x_codex_parent_thread_id": above or top}
            if agent
            else {"session_id": top}
        )
    started = {"x_claude_code_parent_agent_id": above} if above else {}
    return {
        "x_claude_code_session_id": top,
        **({"x_claude_code_agent_id": own, **started} if agent else {}),
    }


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("client", ["claude code", "codex", "opencode"])
def test_two_replicas_answer_as_one_in_memory(valkey: Server, client: str, seed: int) -> None:
    """Random trees, with retries, and agents that later claim other parents."""
    random = Random(f"{client} {seed}")
    limits: dict[str, Any] = {
        "max_agents": 6,
        "max_depth": 2,
        "max_steps": 30,
        "max_concurrent_agents": 5,
    }
    asked: list[tuple[Any, dict[str, str], int]] = []
    for number in range(120):
        if asked and random.random() < 0.15:
            body, names, _ = random.choice(asked[-5:])
        else:
            agent = random.choice([0, *range(1, 12)])
            parent = (
                random.randrange(max(1, agent)) if random.random() < 0.9 else random.randrange(14)
            )
            names = name_agent(client, random.randrange(2), agent, parent if agent else 0)
            body = turns(2, number=str(number))
        asked.append((body, names, random.randrange(2)))

    async def main() -> tuple[list[bool], list[bool], set[Any], set[Any]]:
        async with replicas(valkey, **limits) as services:
            alone = make_service(limited(**limits))
            here = [await judge(alone, body, x_team="t", **names) for body, names, _ in asked]
            there = [
                await judge(services[replica], body, x_team="t", **names)
                for body, names, replica in asked
            ]
            known = {run.name for service in services for run in service.reporter.sessions.copy()}
            return here, there, known, {run.name for run in alone.reporter.sessions.copy()}

    here, there, known, expected = asyncio.run(main())

    assert (there, known) == (here, expected)
    assert 0 < sum(here) < len(here)
