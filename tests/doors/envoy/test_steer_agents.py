"""Agents of every API and framework that are stuck: told by a note on the way, those that listen finish their task."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
from fake_model import NAME, USER, Call, Script
from tool_agents import Job, Step, Turn

from extproc.request.notes import OPENING
from tests.support.agents import ACTION, AGENTS, CHECK, DONE, Gate, again, bedrock_agent, same, sdk_errors, told
from tests.support.documents import bundle, policy
from tests.support.extent import deepen
from tests.support.frameworks import FRAMEWORKS, Errand

ELSEWHERE = Call("ask_colleague")
STEERING = policy(
    "steer",
    {"pathPrefix": "/"},
    similarity="turns",
    limit_keys=[f"header:{USER}"],
    action="steer",
    escalate={"land": 5, "reject": 7},
    reject_status="auto",  # after 429 Vercel's SDK asks twice more
)
STEERING["spec"]["session"] = {"keys": [f"header:{USER}"]}  # Anthropic's tool runner leaves its history with the server
POLICIES = bundle(STEERING)


def streaming_agent(job: Job) -> Iterator[Turn]:
    """OpenAI's SDK, chat completions, with answers in pieces."""
    import openai

    client = openai.OpenAI(api_key="none", base_url=f"{job.url}/v1", default_headers={USER: job.user})
    messages: list[Any] = [{"role": "user", "content": job.tasks[0]}]
    while True:
        with client.chat.completions.stream(model=NAME, messages=messages) as events:
            message = events.get_final_completion().choices[0].message
        messages.append(message)
        calls: Sequence[Any] = message.tool_calls or ()
        steps = []
        for call in calls:
            steps.append(Step(call.function.name, {}, job.tools[call.function.name]()))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": steps[-1].result})
        yield Turn(steps, message.content or "")
        if not steps:
            return


SHALLOW = ("langchain", "openai-agents, responses", "anthropic tool runner", "node, vercel")
"""A framework for each API, and one that retries."""

SDKS: dict[str, tuple[Callable[[Job], Iterator[Turn]], Any]] = AGENTS | {"chat, streamed": (streaming_agent, [CHECK])}


def play(gate: Gate, name: str, user: str, script: Script, detour: Script | None) -> tuple[list[Turn], Exception | None]:
    """Run an agent to its end; a model that listens takes the detour where it finds a note."""
    gate.model.scripts[user] = script
    if detour is not None:
        gate.model.detours[user] = detour
    turns: list[Turn] = []
    job = Job(f"http://127.0.0.1:{gate.stack.envoy.port}", user, ["Tell me when it is done."], _tools())
    try:
        for turn in islice(SDKS[name][0](job), 20):
            turns.append(turn)  # noqa: PERF402  # what came before a refusal is kept
    except sdk_errors() as refusal:
        return turns, refusal
    return turns, None


def _tools() -> dict[str, Callable[..., str]]:
    return {"check": same, "ask_colleague": lambda **_: "It is done."}


@pytest.mark.parametrize("name", SDKS)
def test_an_agent_that_is_told_finishes_its_task(gate: Gate, name: str, user: dict[str, str]) -> None:
    """After three equal turns the model finds the note, takes another way, and the agent ends its run in peace."""
    detour = told(ACTION if name == "react" else [ELSEWHERE], DONE) if name != "react" else told(DONE)

    turns, refusal = play(gate, name, user[USER], again(SDKS[name][1]), detour)

    assert refusal is None
    assert turns[-1].text == DONE
    assert len(turns) == (4 if name == "react" else 5)
    assert gate.model.asked[user[USER]] == len(turns)


@pytest.mark.parametrize("name", SDKS)
def test_an_agent_that_is_asked_for_a_last_answer_ends_in_peace(gate: Gate, name: str, user: dict[str, str]) -> None:
    """Its model follows no note, but has no tools any more: the run ends with a text, and without an error."""
    gate.model.landings[user[USER]] = DONE

    turns, refusal = play(gate, name, user[USER], again(SDKS[name][1]), None)

    assert refusal is None
    assert turns[-1].text == DONE
    assert len(turns) == gate.model.asked[user[USER]] == 6


@pytest.mark.parametrize("name", SDKS)
def test_an_agent_that_does_not_listen_is_refused(gate: Gate, name: str, user: dict[str, str]) -> None:
    """It is told twice, asked twice for a final answer, and refused at the threshold of that, with one request."""
    before = gate.stack.envoy.stat("http.ingress.downstream_rq_total")

    turns, refusal = play(gate, name, user[USER], again(SDKS[name][1]), None)

    assert refusal is not None
    assert len(turns) == gate.model.asked[user[USER]] == 7
    assert OPENING in json.dumps(json.loads(gate.model.bodies[user[USER]]))
    assert gate.stack.envoy.stat("http.ingress.downstream_rq_total") - before == 8


def test_an_agent_that_signs_its_requests_is_not_told(gate: Gate, user: dict[str, str]) -> None:
    """AWS's SDK signs the body by SigV4: its model gets what was signed, and the loop is refused where it always is."""
    gate.model.scripts[user[USER]] = again([CHECK])
    job = Job(f"http://127.0.0.1:{gate.stack.envoy.port}", user[USER], ["Tell me when it is done."], _tools())
    before = gate.stack.loopguard.metric("unsteered_total", policy="steer", reason="signed_body")

    with pytest.raises(sdk_errors(), match="recursive_loop_detected"):
        list(islice(bedrock_agent(job, "v4"), 20))

    assert gate.model.asked[user[USER]] == 7
    assert OPENING not in json.dumps(json.loads(gate.model.bodies[user[USER]]))
    assert gate.stack.loopguard.metric("unsteered_total", policy="steer", reason="signed_body") - before == 4


def errand(gate: Gate, user: str) -> Errand:
    """One errand for a framework's agent."""
    return Errand(f"http://127.0.0.1:{gate.stack.envoy.port}", user, same, lambda: "It is done.")


@pytest.mark.parametrize("name", deepen(FRAMEWORKS, *SHALLOW))
def test_a_framework_whose_agent_is_told_finishes_its_task(gate: Gate, name: str, user: dict[str, str]) -> None:
    """In a framework as well, which sends what it keeps of the history itself."""
    gate.model.scripts[user[USER]] = again([Call("check")])
    gate.model.detours[user[USER]] = told([ELSEWHERE], DONE)

    said = FRAMEWORKS[name](errand(gate, user[USER]))

    assert said == DONE
    assert gate.model.asked[user[USER]] == 5


@pytest.mark.parametrize("name", deepen(FRAMEWORKS, *SHALLOW))
def test_a_framework_whose_agent_lands_returns_its_last_answer(gate: Gate, name: str, user: dict[str, str]) -> None:
    """The program that runs it gets a text, as at the end of any run."""
    gate.model.scripts[user[USER]] = again([Call("check")])
    gate.model.landings[user[USER]] = DONE

    said = FRAMEWORKS[name](errand(gate, user[USER]))

    assert said == DONE
    assert gate.model.asked[user[USER]] == 6


@pytest.mark.parametrize("name", deepen(FRAMEWORKS, *SHALLOW))
def test_a_framework_whose_agent_does_not_listen_is_refused(gate: Gate, name: str, user: dict[str, str]) -> None:
    """Its run ends with an exception, and nothing is asked again."""
    gate.model.scripts[user[USER]] = again([Call("check")])
    before = gate.stack.envoy.stat("http.ingress.downstream_rq_total")

    with pytest.raises(Exception, match="Loop detected"):
        FRAMEWORKS[name](errand(gate, user[USER]))

    assert gate.model.asked[user[USER]] == 7
    assert gate.stack.envoy.stat("http.ingress.downstream_rq_total") - before == 8
