"""Agents on the real SDKs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count, islice
from typing import Any, NamedTuple

from fake_model import NAME, USER, Answer, Call, FakeModel, Script, fake_model
from tool_agents import (
    Job,
    Step,
    Turn,
    chat_agent,
    list_refusals,
    messages_agent,
    responses_agent,
)

from tests.support.harness import Stack
from tests.support.sdks import open_bedrock
from tests.support.stacks import open_stack


class Gate(NamedTuple):
    stack: Stack
    model: FakeModel

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.stack.envoy.port}"

    def sent(self) -> int:
        return self.stack.envoy.stat("http.ingress.downstream_rq_total")


@contextmanager
def open_gate(policies: object, *arguments: str, replicas: int = 1) -> Iterator[Gate]:
    with (
        fake_model() as model,
        open_stack(
            policies, *arguments, replicas=replicas, upstream=f"127.0.0.1:{model.port}"
        ) as made,
    ):
        yield Gate(made, model)


def same(**_: object) -> str:
    return "pending"


def fresh() -> Callable[..., str]:
    numbers = count()
    return lambda **_: f"{next(numbers)} %"


def told(*answers: Answer) -> Script:
    return lambda number: answers[number]


def again(*answers: Answer) -> Script:
    """A model that repeats these answers for ever."""
    return lambda number: answers[number % len(answers)]


MOST_TURNS = 20


class Played(NamedTuple):
    turns: list[Any]
    refusal: Exception | None = None


def play(
    gate: Gate,
    agent: Callable[[Job], Iterator[Any]],
    user: str,
    script: Script,
    *,
    path: str = "",
    tasks: Sequence[str] = ("Tell me when it is done.",),
    tools: Mapping[str, Callable[..., str]] | None = None,
) -> Played:
    """Run an agent until it ends, is refused, or has made `MOST_TURNS` turns.

    Missing tools always return the same.
    """
    gate.model.scripts[user] = script
    known = {
        **dict.fromkeys(
            ("check", "edit", "first", "second", "third", "search", "wait_for_build"), same
        ),
        **(tools or {}),
    }
    turns: list[Any] = []
    try:
        for turn in islice(agent(Job(f"{gate.url}{path}", user, tasks, known)), MOST_TURNS):
            turns.append(turn)  # noqa: PERF402  # what came before a refusal is kept
    except sdk_errors() as refusal:
        return Played(turns, refusal)
    return Played(turns)


CHECK = Call("check", {"build": 17, "verbose": False})


DONE = "It is done."


def _run(job: Job, name: str, given: Mapping[str, Any]) -> str:
    return job.tools[name](**given)


def gemini_agent(job: Job) -> Iterator[Turn]:
    from google import genai
    from google.genai import types

    options = types.HttpOptions(base_url=job.url, headers={USER: job.user})
    client = genai.Client(api_key="none", http_options=options)
    contents: list[Any] = [types.Content(role="user", parts=[types.Part(text=job.tasks[0])])]
    while True:
        reply = client.models.generate_content(model=NAME, contents=contents)
        assert reply.candidates
        contents.append(reply.candidates[0].content)
        calls = reply.function_calls or []
        steps = [
            Step(call.name or "", call.args or {}, _run(job, call.name or "", call.args or {}))
            for call in calls
        ]
        yield Turn(steps, reply.text or "" if not calls else "")
        if not steps:
            return
        said = [
            types.Part.from_function_response(name=step.tool, response={"result": step.result})
            for step in steps
        ]
        contents.append(types.Content(role="user", parts=said))


def bedrock_agent(job: Job) -> Iterator[Turn]:
    import botocore

    once = {"total_max_attempts": 1}
    client = open_bedrock(
        job.url, {USER: job.user}, retries=once, signature_version=botocore.UNSIGNED
    )
    messages: list[Any] = [{"role": "user", "content": [{"text": job.tasks[0]}]}]
    while True:
        message = client.converse(modelId=NAME, messages=messages)["output"]["message"]
        messages.append(message)
        calls = [block["toolUse"] for block in message["content"] if "toolUse" in block]
        steps = [
            Step(call["name"], call["input"], _run(job, call["name"], call["input"]))
            for call in calls
        ]
        yield Turn(steps, message["content"][0]["text"])
        if not steps:
            return
        said = [
            {"toolResult": {"toolUseId": call["toolUseId"], "content": [{"text": step.result}]}}
            for call, step in zip(calls, steps, strict=True)
        ]
        messages.append({"role": "user", "content": said})


def react_agent(job: Job) -> Iterator[Turn]:
    """OpenAI's SDK without tools: actions are lines of text, observations the user's messages."""
    import openai

    client = openai.OpenAI(
        api_key="none", base_url=f"{job.url}/v1", default_headers={USER: job.user}
    )
    messages: list[Any] = [{"role": "system", "content": "Thought, Action, Observation."}]
    messages.append({"role": "user", "content": job.tasks[0]})
    for number in count():
        text = (
            client.chat.completions.create(model=NAME, messages=messages).choices[0].message.content
            or ""
        )
        messages.append(
            {"role": "assistant", "content": f"Thought: for the {number}. time\n{text}"}
        )
        if not text.startswith("Action: "):
            yield Turn([], text)
            return
        step = Step("check", {}, job.tools["check"]())
        yield Turn([step], "")
        messages.append(
            {"role": "user", "content": f"Observation: {step.result}\nStep {number + 1}/20"}
        )


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


@cache
def sdk_errors() -> tuple[type[Exception], ...]:
    import anthropic
    import openai
    from botocore.exceptions import ClientError as BedrockError
    from google.genai.errors import ClientError as GeminiError

    return (
        *list_refusals(),
        openai.BadRequestError,
        anthropic.BadRequestError,
        GeminiError,
        BedrockError,
    )
