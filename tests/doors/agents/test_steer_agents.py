"""Stuck agents of every API and framework get a note; those that follow it finish their task."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
from fake_model import NAME, USER, Call
from tool_agents import Job, Step, Turn

from extproc.request.notes import OPENING
from tests.support.agents import ACTION, AGENTS, DONE, MOST_TURNS, Gate, again, same, told
from tests.support.documents import bundle, policy
from tests.support.extent import deepen
from tests.support.frameworks import FRAMEWORKS, Errand, Run, run_bedrock_agent

STEERING = policy(
    "steer",
    {"pathPrefix": "/"},
    similarity="turns",
    limit_keys=[f"header:{USER}"],
    action="steer",
    escalate={"land": 5, "reject": 7},
    reject_status="auto",  # after 429 Vercel's SDK asks twice more
)
# Anthropic's tool runner leaves its history with the server
STEERING["spec"]["session"] = {"keys": [f"header:{USER}"]}
POLICIES = bundle(STEERING)


def streaming_agent(job: Job) -> Iterator[Turn]:
    """OpenAI's SDK, chat completions, with streamed responses."""
    import openai

    client = openai.OpenAI(api_key="none", base_url=f"{job.url}/v1", default_headers=job.headers)
    messages: list[Any] = [{"role": "user", "content": job.tasks[0]}]
    while True:
        with client.chat.completions.stream(model=NAME, messages=messages) as events:
            message = events.get_final_completion().choices[0].message
        messages.append(message)
        steps = []
        for call in message.tool_calls or ():
            steps.append(Step(call.function.name, {}, job.tools[call.function.name]()))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": steps[-1].result})
        yield Turn(steps, message.content or "")
        if not steps:
            return


def run_sdk(agent: Callable[[Job], Iterator[Turn]], errand: Errand) -> str:
    tools = {
        "check": lambda **_: errand.check(),
        "ask_colleague": lambda **_: errand.ask_colleague(),
    }
    *_, last = islice(
        agent(Job(errand.url, errand.user, ["Tell me when it is done."], tools)), MOST_TURNS
    )
    return last.text


SDKS: dict[str, Run] = {name: partial(run_sdk, agent) for name, (agent, _) in AGENTS.items()}
SDKS["chat, streamed"] = partial(run_sdk, streaming_agent)
RUNS = FRAMEWORKS | SDKS
# A framework for each API, and one that retries.
SHALLOW = ("langchain", "openai-agents, responses", "anthropic tool runner", "node, vercel")


def make_errand(gate: Gate, user: str) -> Errand:
    return Errand(gate.url, user, same, lambda: DONE)


@pytest.mark.parametrize(
    ("name", "end", "asked"),
    [
        *deepen(
            [(name, "told", 5) for name in RUNS], *((name, "told", 5) for name in (*SDKS, *SHALLOW))
        ),
        *deepen(
            [(name, "landed", 6) for name in RUNS],
            *((name, "landed", 6) for name in (*SDKS, *SHALLOW)),
        ),
        *((name, "refused", 7) for name in ("chat", "anthropic", "node, vercel")),
    ],
)
def test_stuck_agent_follows_note_or_landing_or_is_refused(
    gate: Gate, name: str, end: str, asked: int, user: dict[str, str]
) -> None:
    model, who, sent = gate.model, user[USER], gate.sent()
    model.scripts[who] = again(ACTION if name == "react" else [Call("check")])
    if end == "told":
        model.detours[who] = told(DONE) if name == "react" else told([Call("ask_colleague")], DONE)
    elif end == "landed":
        model.landings[who] = DONE

    if end == "refused":
        with pytest.raises(Exception, match="Loop detected"):
            RUNS[name](make_errand(gate, who))
        assert OPENING in json.dumps(json.loads(model.bodies[who]))
    else:
        assert RUNS[name](make_errand(gate, who)) == DONE

    assert model.asked[who] == asked - ((name, end) == ("react", "told"))
    assert gate.sent() - sent == model.asked[who] + (end == "refused")


def test_signed_requests_get_no_note(gate: Gate, user: dict[str, str]) -> None:
    gate.model.scripts[user[USER]] = again([Call("check")])

    with pytest.raises(Exception, match="recursive_loop_detected"):
        run_bedrock_agent(make_errand(gate, user[USER]), "v4")

    assert gate.model.asked[user[USER]] == 7
    assert OPENING not in json.dumps(json.loads(gate.model.bodies[user[USER]]))
    assert gate.stack.loopguard.metric("unsteered_total", policy="steer", reason="signed_body") == 4
