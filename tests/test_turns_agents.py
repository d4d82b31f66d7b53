"""Agents of every API, on the real SDKs, through the real Envoy and Loopguard with similarity `turns`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import boto3
import botocore
import botocore.config
import botocore.exceptions
import openai
import pytest
from google import genai
from google.genai import errors, types

from tests.documents import bundle, policy
from tests.harness import stack
from tests.test_agents import CHECK, DONE, Gate, again, fresh, same, told

sys.path.append(str(Path(__file__).parent.parent / "envoy"))

from fake_model import NAME, USER, Call, Script, fake_model
from tool_agents import REFUSALS, Job, Step, Turn, chat_agent, messages_agent, responses_agent


def _run(job: Job, name: str, given: Mapping[str, Any]) -> str:
    return job.tools[name](**given)


def gemini_agent(job: Job) -> Iterator[Turn]:
    """Google's SDK, generateContent."""
    options = types.HttpOptions(base_url=job.url, headers={USER: job.user})
    client = genai.Client(api_key="none", http_options=options)
    contents: list[Any] = [types.Content(role="user", parts=[types.Part(text=job.tasks[0])])]
    while True:
        reply = client.models.generate_content(model=NAME, contents=contents)
        assert reply.candidates
        contents.append(reply.candidates[0].content)
        calls = reply.function_calls or []
        steps = [Step(call.name or "", call.args or {}, _run(job, call.name or "", call.args or {})) for call in calls]
        yield Turn(steps, reply.text or "" if not calls else "")
        if not steps:
            return
        said = [types.Part.from_function_response(name=step.tool, response={"result": step.result}) for step in steps]
        contents.append(types.Content(role="user", parts=said))


def bedrock_agent(job: Job, signature: str | object = botocore.UNSIGNED) -> Iterator[Turn]:
    """AWS's SDK, Converse; signed by SigV4 where that is said."""
    once = botocore.config.Config(retries={"total_max_attempts": 1}, signature_version=signature)
    keys = {"aws_access_key_id": "none", "aws_secret_access_key": "none"}
    client: Any = boto3.client("bedrock-runtime", endpoint_url=job.url, region_name="us-east-1", config=once, **keys)
    client.meta.events.register("before-call", lambda params, **_: params["headers"].update({USER: job.user}))
    messages: list[Any] = [{"role": "user", "content": [{"text": job.tasks[0]}]}]
    while True:
        message = client.converse(modelId=NAME, messages=messages)["output"]["message"]
        messages.append(message)
        calls = [block["toolUse"] for block in message["content"] if "toolUse" in block]
        steps = [Step(call["name"], call["input"], _run(job, call["name"], call["input"])) for call in calls]
        yield Turn(steps, message["content"][0]["text"])
        if not steps:
            return
        said = [
            {"toolResult": {"toolUseId": call["toolUseId"], "content": [{"text": step.result}]}}
            for call, step in zip(calls, steps, strict=True)
        ]
        messages.append({"role": "user", "content": said})


def react_agent(job: Job) -> Iterator[Turn]:
    """OpenAI's SDK without a tool: actions are lines of text, and observations the user's messages."""
    client = openai.OpenAI(api_key="none", base_url=f"{job.url}/v1", default_headers={USER: job.user})
    messages: list[Any] = [{"role": "system", "content": "Thought, Action, Observation."}]
    messages.append({"role": "user", "content": job.tasks[0]})
    for number in count():
        text = client.chat.completions.create(model=NAME, messages=messages).choices[0].message.content or ""
        messages.append({"role": "assistant", "content": f"Thought: for the {number}. time\n{text}"})
        if not text.startswith("Action: "):
            yield Turn([], text)
            return
        step = Step("check", {}, job.tools["check"]())
        yield Turn([step], "")
        messages.append({"role": "user", "content": f"Observation: {step.result}\nStep {number + 1}/20"})


ACTION = "Action: check[build 17]"
TOOLS = [CHECK]
AGENTS: dict[str, tuple[Callable[[Job], Iterator[Turn]], Any]] = {
    "chat": (chat_agent, TOOLS),
    "responses": (responses_agent, TOOLS),
    "anthropic": (messages_agent, TOOLS),
    "gemini": (gemini_agent, TOOLS),
    "bedrock": (bedrock_agent, TOOLS),
    "react": (react_agent, ACTION),
}
SDK_ERRORS = (*REFUSALS, errors.ClientError, botocore.exceptions.ClientError)


@pytest.fixture(scope="module")
def gate() -> Iterator[Gate]:
    """Envoy and Loopguard before a model."""
    loops = policy("turns", {"pathPrefix": "/"}, similarity="turns", limit_keys=[f"header:{USER}"])
    with fake_model() as model, stack(bundle(loops), upstream=f"127.0.0.1:{model.port}") as made:
        yield Gate(made, model)


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
    except SDK_ERRORS as refusal:
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


def test_a_refused_body_is_not_retried_for_a_while(gate: Gate, user: dict[str, str]) -> None:
    """Waiting changes nothing about a history, and the answer does not promise that it would."""
    _, refusal = play(gate, "chat", again(TOOLS), user[USER], same)

    assert isinstance(refusal, openai.RateLimitError)
    assert refusal.response.headers["x-should-retry"] == "false"
    assert "retry-after" not in refusal.response.headers
    assert "Neither repeating it nor waiting will bring anything new." in str(refusal)
