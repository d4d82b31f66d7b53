"""Agents on the real SDKs that loop or make progress, through the real Envoy and two Loopguards."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from fake_model import NAME, USER, Answer, Call, Script
from tool_agents import Job, chat_agent, stored_agent

from tests.support.agents import AGENTS, CHECK, DONE, Gate, again, fresh, play, told
from tests.support.documents import bundle, policy

TOOLS: dict[str, Any] = {
    "wait*": {"allow": True},
    "search": {"threshold": 2, "reason": "The index is built once a day."},
}
KEYS: dict[str, Any] = {"limit_keys": [f"header:{USER}"]}
REPLICAS = 2
POLICIES = bundle(
    policy("calls", {"pathPrefix": "/calls/"}, similarity="tool_calls", tools=TOOLS, **KEYS),
    policy("narrow", {"pathPrefix": "/narrow/"}, similarity="tool_calls", window_calls=5, **KEYS),
    policy("turns", {"pathPrefix": "/turns/"}, similarity="turns", **KEYS),
    policy("kept", {"pathPrefix": "/kept/"}, similarity="turns", session={}, **KEYS),
)
Agent = Callable[[Job], Iterator[object]]


def threads_agent(job: Job) -> Iterator[object]:
    """Anthropic's tool runner, whose conversation is a thread on the server."""
    import anthropic

    @anthropic.beta_tool(name=CHECK.tool)
    def run(build: int, *, verbose: bool) -> str:  # noqa: ARG001  # what CHECK is called with
        return job.tools["check"]()

    named = {**job.headers, "x-session-id": f"session-of-{job.user}"}
    client = anthropic.Anthropic(api_key="none", base_url=job.url, default_headers=named)
    messages: Any = [{"role": "user", "content": job.tasks[0]}]
    yield from client.beta.messages.tool_runner(
        model=NAME, max_tokens=99, messages=messages, tools=[run]
    )


# Their history is on the server: a request shows only the newest results.
KEPT: dict[str, Agent] = {"previous_response_id": stored_agent, "threads": threads_agent}

WAIT = Call("wait_for_build", {"seconds": 5})
CYCLE = [[Call("first", {"n": 1})], [Call("second", {"n": 2})], [Call("third", {"n": 3})]]


class Loop(NamedTuple):
    """An agent, its path, its model's answers, the turn after which it is refused, the reason."""

    agent: Agent
    path: str
    script: Script
    turns: int
    said: str


TURNS = "3 of the last 3 turns were check with the same input and the same result"
CALLS = "3 of the last 3 tool calls were check with the same arguments and the same result"
LOOPS: dict[str, Loop] = {
    **{
        f"turns, {name}": Loop(agent, "/turns", again(action), 3, TURNS)
        for name, (agent, action) in AGENTS.items()
    },
    **{
        name: Loop(
            agent, "/kept", again([CHECK]), 3, "3 of the last 3 turns returned the same result"
        )
        for name, agent in KEPT.items()
    },
    "allowed calls between": Loop(chat_agent, "/calls", again([CHECK], [WAIT]), 5, CALLS),
    "threshold of the tool": Loop(
        chat_agent,
        "/calls",
        again([Call("search", {"query": "x"})]),
        2,
        "was refused. The index is built once a day.",
    ),
    "cycle within the window": Loop(
        chat_agent, "/calls", again(*CYCLE), 8, "3 of the last 8 tool calls were second"
    ),
    "cycle beyond the window": Loop(
        chat_agent,
        "/narrow",
        again(*CYCLE),
        9,
        "the last 9 tool calls were 3 rounds of the same 3 calls (first, second, third)",
    ),
}


@pytest.mark.parametrize("case", LOOPS)
def test_looping_agent_is_refused_at_the_threshold(
    gate: Gate, case: str, user: dict[str, str]
) -> None:
    agent, path, script, turns, said = LOOPS[case]
    sent = gate.sent()

    played = play(gate, agent, user[USER], script, path=path)

    assert len(played.turns) == gate.model.asked[user[USER]] == turns
    assert gate.sent() - sent == turns + 1
    assert said in str(played.refusal)
    assert getattr(played.refusal, "status_code", 429) == 429


class Progress(NamedTuple):
    """An agent, its path, its model's answers, the user's tasks, and tools whose results change."""

    agent: Agent
    path: str
    answers: Sequence[Answer]
    tasks: Sequence[str] = ("Tell me when it is done.",)
    moving: Sequence[str] = ()


EDITS = [answer for number in range(5) for answer in ([Call("edit", {"line": number})], [CHECK])]
PROGRESS: dict[str, Progress] = {
    **{
        f"polling, {name}": Progress(agent, "/turns", [*[action] * 8, DONE], moving=["check"])
        for name, (agent, action) in AGENTS.items()
    },
    **{
        name: Progress(agent, "/kept", [*[[CHECK]] * 8, DONE], moving=["check"])
        for name, agent in KEPT.items()
    },
    "edits and checks": Progress(chat_agent, "/turns", [*EDITS, DONE]),
    "other arguments": Progress(
        chat_agent, "/calls", [*([Call("check", {"page": n})] for n in range(8)), DONE]
    ),
    "other results": Progress(chat_agent, "/calls", [*[[CHECK]] * 8, DONE], moving=["check"]),
    "a new user message": Progress(
        chat_agent, "/calls", [[CHECK], [CHECK], DONE] * 4, ["Is it done?", *["And now?"] * 3]
    ),
    "an allowed tool": Progress(chat_agent, "/calls", [*[[WAIT]] * 8, DONE]),
    "a cycle with one other result": Progress(
        chat_agent, "/narrow", [*(CYCLE * 4), DONE], moving=["second"]
    ),
}


@pytest.mark.parametrize("case", PROGRESS)
def test_agent_that_makes_progress_is_never_refused(
    gate: Gate, case: str, user: dict[str, str]
) -> None:
    agent, path, answers, tasks, moving = PROGRESS[case]
    before = gate.stack.total("loops_detected_total")

    played = play(
        gate,
        agent,
        user[USER],
        told(*answers),
        path=path,
        tasks=tasks,
        tools={name: fresh() for name in moving},
    )

    assert played.refusal is None
    assert len(played.turns) == gate.model.asked[user[USER]] == len(answers)
    assert gate.stack.total("loops_detected_total") == before
    assert all(replica.metric("requests_total") > 0 for replica in gate.stack.replicas)
