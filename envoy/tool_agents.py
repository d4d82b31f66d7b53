"""Four agents as people write them with the SDKs: ask, run the tools that the model asks for, append, ask again.

Nothing here knows of Loopguard: a refusal is an exception of the SDK, which the person who runs the agent sees.
"""  # noqa: INP001  # a part of the demo beside it, not of a package

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from fake_model import NAME, USER

if TYPE_CHECKING:
    import anthropic
    import openai

_ANY = {"type": "object"}
"""The schema of every tool's arguments: the model here knows them anyway."""

Tools: TypeAlias = Mapping[str, Callable[..., str]]


@dataclass(frozen=True)
class Job:
    """What an agent is to do.

    Attributes:
        url: where the API is, without its `/v1`.
        user: on whose behalf.
        tasks: what the user says, the next one when the model has answered the last.
        tools: by name; each takes its arguments by name, and gives the result.
        messages: the conversation so far, to which the agent adds.
        key: of the API.
    """

    url: str
    user: str
    tasks: Sequence[str]
    tools: Tools
    messages: list[Any] = field(default_factory=list)
    key: str = "none"

    @property
    def headers(self) -> dict[str, str]:
        """What says who asks, beside the key."""
        return {USER: self.user} if self.user else {}


@dataclass(frozen=True)
class Step:
    """One call of a tool."""

    tool: str
    arguments: Mapping[str, Any]
    result: str


@dataclass(frozen=True)
class Turn:
    """One answer of the model: the tools that were called, none in the last answer to a task, and what it said."""

    steps: Sequence[Step]
    text: str


Agent: TypeAlias = Callable[[Job], Iterator[Turn]]


def chat_agent(job: Job) -> Iterator[Turn]:
    """OpenAI's SDK, chat completions."""
    import openai

    client = openai.OpenAI(api_key=job.key, base_url=f"{job.url}/v1", default_headers=job.headers)
    functions = [{"name": name, "parameters": _ANY} for name in job.tools]
    tools: list[Any] = [{"type": "function", "function": function} for function in functions]
    for task in job.tasks:
        job.messages.append({"role": "user", "content": task})
        while True:
            reply = client.chat.completions.create(model=NAME, messages=job.messages, tools=tools)
            message = reply.choices[0].message
            job.messages.append(message)
            steps = []
            for call in message.tool_calls or ():
                if call.type == "function":
                    steps.append(_run(job, call.function.name, json.loads(call.function.arguments)))
                    job.messages.append({"role": "tool", "tool_call_id": call.id, "content": steps[-1].result})
            yield Turn(steps, message.content or "")
            if not steps:
                break


def responses_agent(job: Job) -> Iterator[Turn]:
    """OpenAI's SDK, Responses; the history goes with every request, so that a loop in it can be seen on the way."""
    import openai

    client = openai.OpenAI(api_key=job.key, base_url=f"{job.url}/v1", default_headers=job.headers)
    tools: list[Any] = [{"type": "function", "name": name, "parameters": _ANY} for name in job.tools]
    for task in job.tasks:
        job.messages.append({"role": "user", "content": task})
        while True:
            reply = client.responses.create(model=NAME, input=job.messages, tools=tools, store=False)
            job.messages.extend(reply.output)
            steps = []
            for item in reply.output:
                if item.type == "function_call":
                    steps.append(_run(job, item.name, json.loads(item.arguments)))
                    output = {"type": "function_call_output", "call_id": item.call_id, "output": steps[-1].result}
                    job.messages.append(output)
            yield Turn(steps, reply.output_text)
            if not steps:
                break


def stored_agent(job: Job) -> Iterator[Turn]:
    """OpenAI's SDK, Responses; the server keeps the history, so that a header has to name the session."""
    import openai

    named = {USER: job.user, "x-session-id": f"session-of-{job.user}"}
    client = openai.OpenAI(api_key="none", base_url=f"{job.url}/v1", default_headers=named)
    tools: list[Any] = [{"type": "function", "name": name, "parameters": _ANY} for name in job.tools]
    last: str | None = None
    for task in job.tasks:
        said: list[Any] = [{"role": "user", "content": task}]
        while said:
            reply = client.responses.create(model=NAME, input=said, tools=tools, previous_response_id=last)
            steps, said, last = [], [], reply.id
            for item in reply.output:
                if item.type == "function_call":
                    steps.append(_run(job, item.name, json.loads(item.arguments)))
                    said.append({"type": "function_call_output", "call_id": item.call_id, "output": steps[-1].result})
            yield Turn(steps, reply.output_text)


def messages_agent(job: Job) -> Iterator[Turn]:
    """Anthropic's SDK, messages."""
    import anthropic

    client = anthropic.Anthropic(api_key=job.key, base_url=job.url, default_headers=job.headers)
    tools: list[Any] = [{"name": name, "input_schema": _ANY} for name in job.tools]
    for task in job.tasks:
        job.messages.append({"role": "user", "content": task})
        while True:
            reply = client.messages.create(model=NAME, max_tokens=1024, messages=job.messages, tools=tools)
            job.messages.append({"role": "assistant", "content": reply.content})
            steps, results = [], []
            for block in reply.content:
                if block.type == "tool_use":
                    steps.append(_run(job, block.name, block.input))
                    results.append({"type": "tool_result", "tool_use_id": block.id, "content": steps[-1].result})
            yield Turn(steps, "".join(block.text for block in reply.content if block.type == "text"))
            if not steps:
                break
            job.messages.append({"role": "user", "content": results})


def _run(job: Job, tool: str, arguments: Mapping[str, Any]) -> Step:
    return Step(tool, arguments, job.tools[tool](**arguments))


Refusal: TypeAlias = "openai.RateLimitError | anthropic.RateLimitError"


def list_refusals() -> tuple[type[Refusal], ...]:
    """The exceptions that the SDKs raise for a refusal."""
    import anthropic
    import openai

    return openai.RateLimitError, anthropic.RateLimitError


def message_of(refusal: Refusal) -> str:
    """What a refusal says: OpenAI's SDK hands out the `error` of the body, Anthropic's all of it."""
    body: Any = refusal.body
    return str(body.get("error", body)["message"])
