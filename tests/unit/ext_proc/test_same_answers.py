"""Shadow policies, and what a process knows of earlier messages, change no answer.

Agents of every API are compared before enforcing policies alone and beside shadow policies that
fail in every way, and before
processes that know nothing or much: what Envoy is told is the same to the byte.
"""

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


def _loop(
    similarity: str,
    threshold: int = 3,
    action: str = "reject",
    **more: Any,  # noqa: ANN401  # of a detector
) -> dict[str, Any]:
    loop = {
        "name": f"{similarity}-{action}",
        "enabled": True,
        "similarity": similarity,
        "window_seconds": 60,
        "action": action,
    }
    return {
        **loop,
        "threshold_identical_requests": threshold,
        "max_delay_ms": 1,
        "max_inspect_bytes": 2 * _MIB,
        **more,
    }


def _rule(budget: float) -> dict[str, Any]:
    stages = [
        {"threshold_percent": 50, "action": "warn"},
        {"threshold_percent": 100, "action": "reject"},
    ]
    config = {"budget": budget, "period": "1d", "staged_actions": stages}
    return {
        "name": "r",
        "limit_keys": ["header:x-user-id"],
        "algorithm": "cost_based",
        "algorithm_config": config,
    }


# Each test draws some that enforce and some that watch.
_SPECS: list[dict[str, Any]] = [
    {"loop_detection": _loop("turns", 2, "steer", escalate={"land": 3, "reject": 5})},
    {
        "loop_detection": [
            _loop("turns", 3, "warn", escalate={"reject": 5}, max_inspect_bytes=5_000),
            _loop("exact", 2, "throttle"),
        ]
    },
    {
        "loop_detection": [
            _loop("tool_calls", 2, "steer", escalate={"reject": 4}),
            _loop("canonical", 2, "warn"),
        ]
    },
    {"loop_detection": _loop("tail", 2, cooldown_seconds=9)},
    {
        "session_limits": {
            "max_steps": 9,
            "max_tool_calls": 4,
            "max_tool_calls_mode": "finish",
            "max_calls_per_tool": {"bash": 2},
        }
    },
    {
        "session": {},
        "loop_detection": _loop("turns"),
        "session_limits": {"loop_detection": {"window": 6, "threshold": 3}},
    },
    {"rules": [_rule(8)], "loop_detection": _loop("prompt", 2)},
    {
        "loop_detection": _loop(
            "turns", 2, max_cycle=3, ignore_arguments=["cmd"], normalize_results=False
        ),
        "uncountable": "reject",
    },
]


async def _never() -> list[Any]:
    # None comes
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


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


def make(policies: Sequence[tuple[str, dict[str, Any]]], state: str) -> Service:
    made = [
        bare_policy(
            f"{mode}-{_SPECS.index(spec)}",
            mode=mode,
            **{"limit_keys": ["header:x-user-id"], **spec},
        )
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
    return [
        (*said, {key: value for key, value in metadata.items() if "shadow_" not in key})  # type: ignore[misc]
        for *said, metadata in told
    ]


def list_requests(random: Random, count: int) -> Iterator[tuple[Agent, bytes]]:
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


def draw(
    random: Random,
) -> tuple[list[tuple[str, dict[str, Any]]], list[tuple[str, dict[str, Any]]]]:
    enforcing = [("enforce", spec) for spec in random.sample(_SPECS, 3)]
    watching = [("shadow", spec) for spec in random.sample(_SPECS, 3)]
    return enforcing, [*watching[:2], *enforcing, *watching[2:]]


@pytest.mark.slow
@pytest.mark.parametrize("seed", deepen(range(12), 0, 1))
@pytest.mark.parametrize("state", [*HARMS, "guards raise", "no time left"])
def test_shadow_guards_change_neither_bytes_nor_verdicts(state: str, seed: int) -> None:
    random = Random(seed)
    enforcing, everything = draw(random)
    alone, beside = make(enforcing, state), make(everything, state)
    forget()

    for agent, data in list_requests(random, 24):
        assert send(beside, agent, data, state) == send(alone, agent, data, state)


# ---- What a process knows


_READ_ONE_WAY: dict[str, Any] = {
    "ignore_arguments": ["why"],
    "normalize_results": False,
    "max_cycle": 3,
}
_READ_ANOTHER_WAY: dict[str, Any] = {
    "ignore_arguments": ["cmd"],
    "tools": {"read_file": {"threshold": 3}, "think": {"allow": True}},
}


def make_reading(first: dict[str, Any], second: dict[str, Any]) -> Service:
    steers = {
        "action": "steer",
        "escalate": {"land": 3, "reject": 6},
        "threshold_identical_requests": 2,
    }
    loops = [
        {
            "name": name,
            "enabled": True,
            "similarity": similarity,
            "window_seconds": 60,
            "max_inspect_bytes": 2**21,
            **keys,
        }
        for name, similarity, keys in (
            ("one", "turns", {**steers, **first}),
            ("other", "turns", {"threshold_identical_requests": 2, "action": "warn", **second}),
            ("calls", "tool_calls", {"threshold_identical_requests": 2, "action": "warn"}),
        )
    ]
    limits = {
        "max_steps": 40,
        "max_calls_per_tool": {"bash": 9},
        "loop_detection": {"window": 6, "threshold": 3},
    }
    keys: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}
    return make_service(
        bare_policy("acts", loop_detection=loops[0], session_limits=limits, **keys),
        bare_policy("warns", loop_detection=loops[2], **keys),
        bare_policy("watches", mode="shadow", loop_detection=loops[1], **keys),
        store=SteadyStore(),
    )


def vary(random: Random, written: dict[str, Any]) -> bytes:
    key = next(
        (key for key in ("messages", "input", "contents") if isinstance(written.get(key), list)), ""
    )
    messages = list(written.get(key, ()))
    place = random.randrange(len(messages)) if messages else 0
    match random.randrange(12) if messages else 11:
        case 0:
            messages = messages[place:]
        case 1:
            messages = [*messages[:place], *messages[place + 1 :]]
        case 2:
            messages[place], messages[-1] = messages[-1], messages[place]
        case 3:
            messages.insert(place, messages[-1])
        case 4:
            messages[place] = json.loads(
                json.dumps(messages[place]).replace("ls 1", "ls 0").replace("ok", "no")
            )
        case 5 if isinstance(messages[place], dict):
            messages[place] = {
                **dict(reversed(messages[place].items())),
                "cache_control": {"type": "ephemeral"},
            }
        case 6:
            messages.append({"role": "assistant", "content": "{"})
        case _:
            pass
    text = json.dumps({**written, key: messages} if key else written)
    spelled = [
        text,
        text,
        text.replace(", ", ","),
        json.dumps(json.loads(text), ensure_ascii=False, indent=1),
    ]
    spelled += [
        text.replace("assistant", "assist\\u0061nt"),
        text.replace('"role":', '"role": "user", "role":', 1),
    ]
    return random.choice(spelled).encode()


@pytest.mark.slow
@pytest.mark.parametrize("seed", deepen([*range(12), 22], 0, 22))
def test_known_messages_change_no_answer(seed: int) -> None:
    """Nothing known, earlier requests, or equal messages of tenants that are read otherwise."""
    random = Random(seed)
    agents = [Agent(random, f"a{number}") for number in range(3)]
    requests = []
    for _ in range(40):
        agent = random.choice(agents)
        if random.random() < 0.7:
            agent.step()
        written = agent.write()
        requests.append((agent, vary(random, written), vary(random, written)))
    services = [make_reading(_READ_ONE_WAY, _READ_ANOTHER_WAY) for _ in range(3)]
    others = make_reading(_READ_ANOTHER_WAY, _READ_ONE_WAY)
    found: list[list[object]] = [[], [], []]

    for agent, data, _ in requests:
        forget()
        give_time(services[0])
        found[0].append(ask(services[0], agent, data))
    for agent, data, _ in requests:
        give_time(services[1])
        found[1].append(ask(services[1], agent, data))
    forget()
    for agent, data, similar in requests:
        for each in (data, similar):
            give_time(others)
            ask(others, agent, each)
        give_time(services[2])
        found[2].append(ask(services[2], agent, data))

    for place, (_, data, _) in enumerate(requests):
        assert found[1][place] == found[0][place], data
        assert found[2][place] == found[0][place], data
