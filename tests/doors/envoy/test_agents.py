"""Agents on the real SDKs, through the real Envoy and Loopguard, against a model that loops.

The agents and the model are those of `make demo-agent`; each test says what the model asks for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest
from fake_model import Answer, Call, Script, fake_model
from tool_agents import (
    Agent,
    Job,
    Refusal,
    Turn,
    chat_agent,
    list_refusals,
    message_of,
    messages_agent,
    responses_agent,
)

from tests.support.agents import CHECK, DONE, Gate, again, fresh, same, told
from tests.support.documents import bundle, policy
from tests.support.harness import stack

APIS: dict[str, Agent] = {"chat": chat_agent, "responses": responses_agent, "anthropic": messages_agent}
SDKS = {"chat": "openai", "responses": "openai", "anthropic": "anthropic"}
MOST_TURNS = 20

TOOLS: dict[str, Any] = {
    "wait*": {"allow": True},
    "search": {"threshold": 2, "reason": "The index is built once a day."},
}


def calls(identity: str, prefix: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401  # of a policy
    """A policy that looks at tool calls below `prefix`."""
    selector = {"pathPrefix": f"{prefix}/v1"}
    return policy(identity, selector, similarity="tool_calls", limit_keys=["header:x-user-id"], **more)


POLICIES = bundle(
    calls("loops", "", tools=TOOLS),
    calls("narrow", "/narrow", window_calls=5),
    calls("shadow", "/shadow", mode="shadow"),
)


@pytest.fixture(scope="module")
def gates() -> Iterator[dict[str, Gate]]:
    """One stack for each transport, before one and the same model."""
    with ExitStack() as opened:
        model = opened.enter_context(fake_model())
        upstream = f"127.0.0.1:{model.port}"
        yield {
            transport: Gate(opened.enter_context(stack(POLICIES, "--transport", transport, upstream=upstream)), model)
            for transport in ("fast", "grpcio")
        }


@pytest.fixture(params=["fast", "grpcio"])
def gate(request: pytest.FixtureRequest, gates: dict[str, Gate]) -> Gate:
    """Each stack in turn; every agent is a user of its own."""
    return gates[request.param]


@pytest.fixture(params=APIS)
def api(request: pytest.FixtureRequest) -> str:
    """Each API in turn."""
    return str(request.param)


@dataclass
class Played:
    """What became of an agent."""

    turns: list[Turn] = field(default_factory=list)
    refusal: Refusal | None = None

    @property
    def said(self) -> str:
        """By the refusal."""
        assert self.refusal is not None
        return message_of(self.refusal)


def play(
    gate: Gate,
    api: str,
    script: Script,
    user: Mapping[str, str],
    *,
    path: str = "",
    tasks: Sequence[str] = ("Tell me when it is done.",),
    tools: Mapping[str, Callable[..., str]] | None = None,
    messages: list[Any] | None = None,
) -> Played:
    """Run an agent to its end."""
    name = user["x-user-id"]
    gate.model.scripts[name] = script
    tools = {**dict.fromkeys(("check", "first", "second", "third", "search", "wait_for_build"), same), **(tools or {})}
    url = f"http://127.0.0.1:{gate.stack.envoy.port}{path}"
    played = Played()
    try:
        for turn in islice(APIS[api](Job(url, name, tasks, tools, messages if messages is not None else [])), MOST_TURNS):
            played.turns.append(turn)
    except list_refusals() as refusal:
        played.refusal = refusal
    return played


WAIT = Call("wait_for_build", {"seconds": 5})
CYCLE = [[Call("first", {"n": 1})], [Call("second", {"n": 2})], [Call("third", {"n": 3})]]
ONE_LOOP = "Loop detected: 3 of the last 3 tool calls were check with the same arguments and the same result"

LOOPS: dict[str, tuple[str, Script, int, str]] = {  # where, what the model asks for, after how many turns, what is said
    "one tool": ("", again([CHECK]), 3, ONE_LOOP),
    "after progress": (
        "",
        lambda number: [Call("check", {"build": min(number, 4)})],
        7,
        "3 of the last 7 tool calls were check",
    ),
    "two tools in one turn": ("", again([Call("first"), CHECK]), 3, "3 of the last 6 tool calls were check"),
    "three times in one turn": ("", again([CHECK, CHECK, CHECK]), 3, ONE_LOOP),
    "with allowed calls between": ("", again([CHECK], [WAIT]), 5, ONE_LOOP),
    "allowed beside in one turn": ("", again([CHECK, WAIT]), 3, ONE_LOOP),
    "threshold of the tool": (
        "",
        again([Call("search", {"query": "x"})]),
        2,
        "search with the same arguments and the same result, so this request was refused. The index is built once a day.",
    ),
    "cycle within the window": ("", again(*CYCLE), 8, "3 of the last 8 tool calls were second"),
    "cycle beyond the window": (
        "/narrow",
        again(*CYCLE),
        9,
        "the last 9 tool calls were 3 rounds of the same 3 calls (first, second, third)",
    ),
    "cycle in one turn": (
        "/narrow",
        again([call for [call] in CYCLE]),
        3,
        "3 rounds of the same 3 calls (first, second, third)",
    ),
}


@pytest.mark.parametrize(
    ("gate", "loop"),
    [*(("fast", name) for name in LOOPS), ("grpcio", "one tool")],  # what is seen in a body is not the transport's affair
    indirect=["gate"],
)
def test_a_looping_agent_is_stopped(gate: Gate, api: str, loop: str, user: dict[str, str]) -> None:
    """At the threshold the SDK raises RateLimitError with the reason; the refused request is sent once and goes no further."""
    path, script, turns, message = LOOPS[loop]
    sent = gate.sent()

    played = play(gate, api, script, user, path=path)

    assert len(played.turns) == turns
    assert played.refusal is not None
    assert type(played.refusal) is importlib.import_module(SDKS[api]).RateLimitError
    assert played.refusal.status_code == 429
    assert message in played.said
    assert "change the approach or the arguments, or finish with the result you have so far" in played.said
    assert gate.model.asked[user["x-user-id"]] == turns
    assert gate.sent() - sent == turns + 1


EIGHT = range(8)

PROGRESS: dict[str, tuple[str, Sequence[Answer], Sequence[str], Sequence[str]]] = {  # where, the answers, to what, what moves
    "other arguments": ("", [*([Call("check", {"page": n})] for n in EIGHT), DONE], ["Read all."], []),
    "other arguments, several in a turn": (
        "",
        [*([Call("check", {"page": n}), Call("check", {"page": -1 - n})] for n in EIGHT), DONE],
        ["Read all."],
        [],
    ),
    "other results": ("", [*([CHECK] for _ in EIGHT), DONE], ["Tell me when it is done."], ["check"]),
    "a new user message": ("", [[CHECK], [CHECK], DONE] * 4, ["Is it done?", "And now?", "And now?", "And now?"], []),
    "an allowed tool": ("", [*([WAIT] for _ in EIGHT), DONE], ["Wait for it."], []),
    "a cycle with one other result": ("/narrow", [*(CYCLE * 4), DONE], ["Go round."], ["second"]),
    "below the threshold": ("", [[CHECK], [Call("first")], [CHECK], [Call("second")], DONE], ["Is it done?"], []),
}


@pytest.mark.parametrize(
    ("gate", "case"), [*(("fast", name) for name in PROGRESS), ("grpcio", "other results")], indirect=["gate"]
)
def test_an_agent_that_makes_progress_is_never_stopped(gate: Gate, api: str, case: str, user: dict[str, str]) -> None:
    """Other arguments, other results or a new user message are progress: every request reaches the model, up to the last."""
    path, answers, tasks, moving = PROGRESS[case]
    before = gate.stack.loopguard.metric("loops_detected_total")

    played = play(gate, api, told(*answers), user, path=path, tasks=tasks, tools={name: fresh() for name in moving})

    assert played.refusal is None
    assert played.turns[-1].text == answers[-1]
    assert len(played.turns) == gate.model.asked[user["x-user-id"]] == len(answers)
    assert gate.stack.loopguard.metric("loops_detected_total") == before


WATCHER = calls("watcher", "", mode="shadow")
WATCHER["spec"]["loop_detection"] = [
    {"enabled": True, "window_seconds": 60, "threshold_identical_requests": 2, "similarity": similarity}
    for similarity in ("tool_calls", "tail", "canonical", "exact")
]
WATCHER["spec"]["loop_detection"][1]["tail_messages"] = 1
