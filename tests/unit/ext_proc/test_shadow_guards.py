"""Agents of every API before enforcing policies, and beside these shadow policies that fail in every way there is.

What Envoy is told is the same to the byte as without shadow policies, and so is every verdict.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import pytest

from extproc.errors import StoreError
from extproc.ext_proc.service import Service
from tests.support.documents import bare_policy
from tests.support.extent import deepen
from tests.support.memory import forget
from tests.support.random_agents import Agent
from tests.support.service import make_service
from tests.support.steady import SteadyStore, Told, ask, give_time

_MIB = 2**20


def _loop(similarity: str, threshold: int = 3, action: str = "reject", **more: Any) -> dict[str, Any]:  # noqa: ANN401  # of a detector
    loop = {"name": f"{similarity}-{action}", "enabled": True, "similarity": similarity, "window_seconds": 60, "action": action}
    return {**loop, "threshold_identical_requests": threshold, "max_delay_ms": 1, "max_inspect_bytes": 2 * _MIB, **more}


def _rule(budget: float) -> dict[str, Any]:
    stages = [{"threshold_percent": 50, "action": "warn"}, {"threshold_percent": 100, "action": "reject"}]
    config = {"budget": budget, "period": "1d", "staged_actions": stages}
    return {"name": "r", "limit_keys": ["header:x-user-id"], "algorithm": "cost_based", "algorithm_config": config}


_SPECS: list[dict[str, Any]] = [
    {"loop_detection": _loop("turns", 2, "steer", escalate={"land": 3, "reject": 5})},
    {
        "loop_detection": [
            _loop("turns", 3, "warn", escalate={"reject": 5}, max_inspect_bytes=5_000),
            _loop("exact", 2, "throttle"),
        ]
    },
    {"loop_detection": [_loop("tool_calls", 2, "steer", escalate={"reject": 4}), _loop("canonical", 2, "warn")]},
    {"loop_detection": _loop("tail", 2, cooldown_seconds=9)},
    {
        "session_limits": {
            "max_steps": 9,
            "max_tool_calls": 4,
            "max_tool_calls_mode": "finish",
            "max_calls_per_tool": {"bash": 2},
        }
    },
    {"session": {}, "loop_detection": _loop("turns"), "session_limits": {"loop_detection": {"window": 6, "threshold": 3}}},
    {"rules": [_rule(8)], "loop_detection": _loop("prompt", 2)},
    {
        "loop_detection": _loop("turns", 2, max_cycle=3, ignore_arguments=["cmd"], normalize_results=False),
        "uncountable": "reject",
    },
]
"""What policies may say, of which each test draws some that enforce and some that watch."""


async def _never() -> list[Any]:
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # none comes


def _raise(error: Exception) -> Callable[[list[Any]], Any]:
    def harm(_: list[Any]) -> Any:  # noqa: ANN401  # none
        raise error

    return harm


async def _raise_later(error: Exception) -> list[Any]:
    await asyncio.sleep(0)
    raise error


HARMS: dict[str, Callable[[list[Any]], Any] | None] = {
    "none": None,
    "away": _raise(StoreError("down", kind="connection")),
    "raises": _raise(KeyError("a bug")),
    "raises later": lambda _: _raise_later(KeyError("a bug")),
    "no answers": lambda _: [],
    "too many answers": lambda answers: [*answers, *answers],
    "texts": lambda answers: ["x" for _ in answers],
    "nothing": lambda answers: [None for _ in answers],
    "no list": lambda _: 5,
    "hangs": lambda _: _never(),
}
"""What the store does to questions of shadow policies; it answers those of enforcing ones as ever."""

STATES = [*HARMS, "guards raise", "no time left"]


def make(policies: Sequence[tuple[str, dict[str, Any]]], state: str) -> Service:
    """A service of these policies, of which those that watch are in this state."""
    made = [
        bare_policy(f"{mode}-{_SPECS.index(spec)}", mode=mode, **{"limit_keys": ["header:x-user-id"], **spec})
        for mode, spec in policies
    ]
    service = make_service(*made, store=SteadyStore(HARMS.get(state)))
    if state == "guards raise":
        for plan in service.engine.plans:
            if plan.shadow:
                plan.detectors = (None,)  # type: ignore[assignment]  # as a bug would
    return service


def send(service: Service, agent: Agent, data: bytes, state: str) -> list[Told]:
    """What Envoy is told about one request, without what is said of shadow policies."""
    give_time(service)
    if state == "no time left":
        service.budget.spend(f"x-user-id={agent.sent['x_user_id']}", 1_000.0, shadow=True)
    told = ask(service, agent, data)
    return [(*said, {key: value for key, value in metadata.items() if "shadow_" not in key}) for *said, metadata in told]  # type: ignore[misc]


def list_requests(random: Random, count: int) -> Iterator[tuple[Agent, bytes]]:
    """Requests of a few agents, one of them with a new body of 1 MB."""
    agents = [Agent(random, f"a{number}") for number in range(2)]
    large = random.randrange(count)
    for number in range(count):
        agent = random.choice(agents)
        if random.random() < 0.7:
            agent.step()
        written = agent.write()
        if number == large:
            written["metadata"] = {"user_id": f"u{number}", "pad": "x \n" * (_MIB // 4)}
        yield agent, json.dumps(written).encode()


def draw(random: Random) -> tuple[list[tuple[str, dict[str, Any]]], list[tuple[str, dict[str, Any]]]]:
    """Policies that enforce, and the same between others that watch."""
    enforcing = [("enforce", spec) for spec in random.sample(_SPECS, 3)]
    watching = [("shadow", spec) for spec in random.sample(_SPECS, 3)]
    return enforcing, [*watching[:2], *enforcing, *watching[2:]]


@pytest.mark.slow
@pytest.mark.parametrize("seed", deepen(range(12), 0, 1))
@pytest.mark.parametrize("state", STATES)
def test_shadow_guards_change_neither_bytes_nor_verdicts(state: str, seed: int) -> None:
    """Whatever they look into, spend or break."""
    random = Random(seed)
    enforcing, everything = draw(random)
    alone, beside = make(enforcing, state), make(everything, state)
    forget()

    for agent, data in list_requests(random, 24):
        assert send(beside, agent, data, state) == send(alone, agent, data, state)
