"""Four ordinary agents on the SDKs: call the model, run its tool calls, append the results, repeat.

They know nothing about Loopguard: a refusal is an exception of the SDK.
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
"""The schema of all tools' arguments; the fake model needs none."""

Tools: TypeAlias = Mapping[str, Callable[..., str]]


@dataclass(frozen=True)
class Job:
    """An agent's task.

    Attributes:
        url: the API's address without `/v1`.
        user: the user to name in requests.
        tasks: the user's messages; each is sent when the one before it is answered.
        tools: the tools by name, called with keyword arguments.
        messages: the conversation, to which the agent appends.
        key: the API key.
    """

    url: str
    user: str
    tasks: Sequence[str]
    tools: Tools
    messages: list[Any] = field(default_factory=list)
    key: str = "none"

    @property
    def headers(self) -> dict[str, str]:
        """The header that names the user."""
        return {USER: self.user} if self.user else {}


@dataclass(frozen=True)
class Step:
    """A tool call and its result."""

    tool: str
    arguments: Mapping[str, Any]
    result: str


@dataclass(frozen=True)
class Turn:
    """An answer of the model: its text and tool calls; the last answer to a task has no calls."""

    steps: Sequence[Step]
    text: str


Agent: TypeAlias = Callable[[Job], Iterator[Turn]]


def chat_agent(job: Job) -> Iterator[Turn]:
    """Run an agent on OpenAI's SDK with chat completions."""
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
                    job.messages.append(
                        {"role": "tool", "tool_call_id": call.id, "content": steps[-1].result}
                    )
            yield Turn(steps, message.content or "")
            if not steps:
                break


def responses_agent(job: Job) -> Iterator[Turn]:
    """Run an agent on OpenAI's SDK with Responses, and the history in each request."""
    import openai

    client = openai.OpenAI(api_key=job.key, base_url=f"{job.url}/v1", default_headers=job.headers)
    tools: list[Any] = [
        {"type": "function", "name": name, "parameters": _ANY} for name in job.tools
    ]
    for task in job.tasks:
        job.messages.append({"role": "user", "content": task})
        while True:
            reply = client.responses.create(
                model=NAME, input=job.messages, tools=tools, store=False
            )
            job.messages.extend(reply.output)
            steps = []
            for item in reply.output:
                if item.type == "function_call":
                    steps.append(_run(job, item.name, json.loads(item.arguments)))
                    output = {
                        "type": "function_call_output",
                        "call_id": item.call_id,
                        "output": steps[-1].result,
                    }
                    job.messages.append(output)
            yield Turn(steps, reply.output_text)
            if not steps:
                break


def stored_agent(job: Job) -> Iterator[Turn]:
    """Run an agent on Responses. The server has the history, so a header names the session."""
    import openai

    named = {USER: job.user, "x-session-id": f"session-of-{job.user}"}
    client = openai.OpenAI(api_key="none", base_url=f"{job.url}/v1", default_headers=named)
    tools: list[Any] = [
        {"type": "function", "name": name, "parameters": _ANY} for name in job.tools
    ]
    last: str | None = None
    for task in job.tasks:
        said: list[Any] = [{"role": "user", "content": task}]
        while said:
            reply = client.responses.create(
                model=NAME, input=said, tools=tools, previous_response_id=last
            )
            steps, said, last = [], [], reply.id
            for item in reply.output:
                if item.type == "function_call":
                    steps.append(_run(job, item.name, json.loads(item.arguments)))
                    said.append(
                        {
                            "type": "function_call_output",
                            "call_id": item.call_id,
                            "output": steps[-1].result,
                        }
                    )
            yield Turn(steps, reply.output_text)


def messages_agent(job: Job) -> Iterator[Turn]:
    """Run an agent on Anthropic's SDK with messages."""
    import anthropic

    client = anthropic.Anthropic(api_key=job.key, base_url=job.url, default_headers=job.headers)
    tools: list[Any] = [{"name": name, "input_schema": _ANY} for name in job.tools]
    for task in job.tasks:
        job.messages.append({"role": "user", "content": task})
        while True:
            reply = client.messages.create(
                model=NAME, max_tokens=1024, messages=job.messages, tools=tools
            )
            job.messages.append({"role": "assistant", "content": reply.content})
            steps, results = [], []
            for block in reply.content:
                if block.type == "tool_use":
                    steps.append(_run(job, block.name, block.input))
                    results.append(
                        {
                            "type": "tool_result",
                            "tool_use_id": block.id,
                            "content": steps[-1].result,
                        }
                    )
            yield Turn(
                steps, "".join(block.text for block in reply.content if block.type == "text")
            )
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
    """The message of a refusal: OpenAI's SDK has the body's `error`, Anthropic's the whole body."""
    body: Any = refusal.body
    return str(body.get("error", body)["message"])
