"""Whatever a process knows of messages, of other tenants, of other policies and of this conversation, answers are the same."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from extproc.ext_proc.service import Service
from tests.support.documents import bare_policy
from tests.support.extent import deepen
from tests.support.memory import forget
from tests.support.random_agents import Agent
from tests.support.service import make_service
from tests.support.steady import SteadyStore, ask, give_time

_LISTS = ("messages", "input", "contents")

_READ_ONE_WAY: dict[str, Any] = {"ignore_arguments": ["why"], "normalize_results": False, "max_cycle": 3}
_READ_ANOTHER_WAY: dict[str, Any] = {
    "ignore_arguments": ["cmd"],
    "tools": {"read_file": {"threshold": 3}, "think": {"allow": True}},
}


def make(first: dict[str, Any], second: dict[str, Any]) -> Service:
    """A service that reads conversations in these two ways, for policies that enforce, and for others that watch."""
    steers = {"action": "steer", "escalate": {"land": 3, "reject": 6}, "threshold_identical_requests": 2}
    loops = [
        {"name": name, "enabled": True, "similarity": similarity, "window_seconds": 60, "max_inspect_bytes": 2**21, **keys}
        for name, similarity, keys in (
            ("one", "turns", {**steers, **first}),
            ("other", "turns", {"threshold_identical_requests": 2, "action": "warn", **second}),
            ("calls", "tool_calls", {"threshold_identical_requests": 2, "action": "warn"}),
        )
    ]
    limits = {"max_steps": 40, "max_calls_per_tool": {"bash": 9}, "loop_detection": {"window": 6, "threshold": 3}}
    keys: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}
    return make_service(
        bare_policy("acts", loop_detection=loops[0], session_limits=limits, **keys),
        bare_policy("warns", loop_detection=loops[2], **keys),
        bare_policy("watches", mode="shadow", loop_detection=loops[1], **keys),
        store=SteadyStore(),
    )


def vary(random: Random, written: dict[str, Any]) -> bytes:
    """A body as it is, or one that is nearly the same: cut, edited in the middle, reordered, or spelled otherwise."""
    key = next((key for key in _LISTS if isinstance(written.get(key), list)), "")
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
            messages[place] = json.loads(json.dumps(messages[place]).replace("ls 1", "ls 0").replace("ok", "no"))
        case 5 if isinstance(messages[place], dict):
            messages[place] = {**dict(reversed(messages[place].items())), "cache_control": {"type": "ephemeral"}}
        case 6:
            messages.append({"role": "assistant", "content": "{"})
        case _:
            pass
    text = json.dumps({**written, key: messages} if key else written)
    spelled = [text, text, text.replace(", ", ","), json.dumps(json.loads(text), ensure_ascii=False, indent=1)]
    spelled += [text.replace("assistant", "assist\\u0061nt"), text.replace('"role":', '"role": "user", "role":', 1)]
    return random.choice(spelled).encode()


@pytest.mark.slow
@pytest.mark.parametrize("seed", deepen([*range(12), 22], 0, 22))
def test_what_is_known_changes_no_answer(seed: int) -> None:
    """Nothing is known, or what was sent before, or also equal and similar messages of other tenants, read in other ways."""
    random = Random(seed)
    agents = [Agent(random, f"a{number}") for number in range(3)]
    requests = []
    for _ in range(40):
        agent = random.choice(agents)
        if random.random() < 0.7:
            agent.step()
        written = agent.write()
        requests.append((agent, vary(random, written), vary(random, written)))
    services = [make(_READ_ONE_WAY, _READ_ANOTHER_WAY) for _ in range(3)]
    others = make(_READ_ANOTHER_WAY, _READ_ONE_WAY)
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
