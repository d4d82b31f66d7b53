"""Agents of every API, on the real SDKs, through the real Envoy and Loopguard with similarity `turns`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import pytest
from fake_model import USER, Call, Script
from tool_agents import Job, Turn

from tests.support.agents import AGENTS, DONE, TOOLS, Gate, again, fresh, same, sdk_errors, told
from tests.support.documents import bundle, policy

POLICIES = bundle(policy("turns", {"pathPrefix": "/"}, similarity="turns", limit_keys=[f"header:{USER}"]))


def play(
    gate: Gate, name: str, script: Script, user: str, check: Callable[..., str]
) -> tuple[Sequence[Turn], Exception | None]:
    """Run an agent to its end, or to its refusal."""
    gate.model.scripts[user] = script
    url = f"http://127.0.0.1:{gate.stack.envoy.port}"
    turns = []
    try:
        for turn in islice(AGENTS[name][0](Job(url, user, ["Tell me when it is done."], {"check": check, "edit": same})), 20):
            turns.append(turn)  # noqa: PERF402  # what came before a refusal is kept
    except sdk_errors() as refusal:
        return turns, refusal
    return turns, None


@pytest.mark.parametrize("name", AGENTS)
def test_a_looping_agent_is_stopped(gate: Gate, name: str, user: dict[str, str]) -> None:
    """After three equal turns the SDK raises, and says what repeats and what would be progress."""
    turns, refusal = play(gate, name, again(AGENTS[name][1]), user[USER], same)

    assert len(turns) == gate.model.asked[user[USER]] == 3
    assert refusal is not None
    assert "3 of the last 3 turns were check with the same input and the same result" in str(refusal)
    assert "Progress means another action or input, or a different result." in str(refusal)


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_that_polls_is_left_alone(gate: Gate, name: str, user: dict[str, str]) -> None:
    """The same call that brings back something new is progress."""
    action = AGENTS[name][1]

    turns, refusal = play(gate, name, told(*[action] * 8, DONE), user[USER], fresh())

    assert refusal is None
    assert len(turns) == gate.model.asked[user[USER]] == 9


@pytest.mark.parametrize("name", [name for name in AGENTS if name != "react"])
def test_an_agent_that_edits_and_checks_is_left_alone(gate: Gate, name: str, user: dict[str, str]) -> None:
    """The same check with the same result, with new edits in between, is work."""
    answers = [answer for number in range(5) for answer in ([Call("edit", {"line": number})], TOOLS)]

    turns, refusal = play(gate, name, told(*answers, DONE), user[USER], same)

    assert refusal is None
    assert len(turns) == len(answers) + 1
