"""Requests that the real SDKs make, narrowed: by the SDKs' own types they are requests still, and the tool is gone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from fake_model import NAME, USER, Call, FakeModel, fake_model
from pydantic import TypeAdapter

from extproc.ext_proc.changes.edits import NotEdited
from extproc.ext_proc.changes.narrow import narrow
from extproc.request.http import HttpRequest
from tests.support.validators import VALIDATORS

PAID, TASK = "paid", "Pay the bill."
_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"bill": {"type": "string"}}}
_NAMES = ("pay", "read")


class Asked(NamedTuple):
    """A request to pay a bill: the address of the API and the user."""

    url: str
    user: str


def ask_chat(asked: Asked) -> None:
    """OpenAI's SDK, chat completions."""
    import openai

    client = openai.OpenAI(api_key="none", base_url=f"{asked.url}/v1", default_headers={USER: asked.user})
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": _SCHEMA}} for name in _NAMES]
    choice: Any = {"type": "function", "function": {"name": "pay"}}
    messages: list[Any] = [{"role": "user", "content": TASK}]
    message = client.chat.completions.create(model=NAME, messages=messages, tools=tools, tool_choice=choice).choices[0].message
    for call in message.tool_calls or ():
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": PAID}]
    client.chat.completions.create(model=NAME, messages=messages, tools=tools, tool_choice=choice, parallel_tool_calls=False)


def ask_responses(asked: Asked) -> None:
    """OpenAI's SDK, Responses."""
    import openai

    client = openai.OpenAI(api_key="none", base_url=f"{asked.url}/v1", default_headers={USER: asked.user})
    tools: Any = [{"type": "function", "name": name, "parameters": _SCHEMA, "strict": False} for name in _NAMES]
    allowed = [{"type": "function", "name": name} for name in _NAMES]
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    items: list[Any] = [{"role": "user", "content": TASK}]
    output = client.responses.create(model=NAME, input=items, tools=tools, tool_choice=choice).output
    items += output
    calls = [item for item in output if item.type == "function_call"]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": PAID} for call in calls]
    client.responses.create(model=NAME, input=items, tools=tools, tool_choice=choice)


def ask_anthropic(asked: Asked) -> None:
    """Anthropic's SDK."""
    import anthropic

    client = anthropic.Anthropic(api_key="none", base_url=asked.url, default_headers={USER: asked.user})
    tools: Any = [{"name": name, "input_schema": _SCHEMA} for name in _NAMES]
    choice: Any = {"type": "tool", "name": "pay", "disable_parallel_tool_use": True}
    messages: list[Any] = [{"role": "user", "content": TASK}]
    question: Any = {"model": NAME, "max_tokens": 99, "tools": tools, "tool_choice": choice}
    content = client.messages.create(messages=messages, **question).content
    calls = [block for block in content if block.type == "tool_use"]
    messages.append({"role": "assistant", "content": content})
    messages.append(
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": PAID} for call in calls]}
    )
    client.messages.create(messages=messages, **question)


def ask_gemini(asked: Asked) -> None:
    """Google's SDK."""
    from google import genai
    from google.genai import types

    options = types.HttpOptions(base_url=asked.url, headers={USER: asked.user})
    client = genai.Client(api_key="none", http_options=options)
    declared = [types.FunctionDeclaration(name=name, parameters_json_schema=_SCHEMA) for name in _NAMES]
    mode = types.FunctionCallingConfigMode.ANY
    calling = types.FunctionCallingConfig(mode=mode, allowed_function_names=["pay"])
    config = types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=declared)],
        tool_config=types.ToolConfig(function_calling_config=calling),
    )
    contents: list[Any] = [types.Content(role="user", parts=[types.Part(text=TASK)])]
    reply = client.models.generate_content(model=NAME, contents=contents, config=config)
    assert reply.candidates
    contents.append(reply.candidates[0].content)
    said = [
        types.Part.from_function_response(name=call.name or "", response={"a": PAID}) for call in reply.function_calls or ()
    ]
    contents.append(types.Content(role="user", parts=said))
    client.models.generate_content(model=NAME, contents=contents, config=config)


def ask_bedrock(asked: Asked) -> None:
    """AWS's SDK, Converse."""
    import boto3

    keys = {"aws_access_key_id": "none", "aws_secret_access_key": "none"}
    client: Any = boto3.client("bedrock-runtime", endpoint_url=asked.url, region_name="us-east-1", **keys)
    client.meta.events.register("before-call", lambda params, **_: params["headers"].update({USER: asked.user}))
    specs = [{"toolSpec": {"name": name, "inputSchema": {"json": _SCHEMA}}} for name in _NAMES]
    config = {"tools": [*specs, {"cachePoint": {"type": "default"}}], "toolChoice": {"tool": {"name": "pay"}}}
    messages: list[Any] = [{"role": "user", "content": [{"text": TASK}]}]
    message = client.converse(modelId=NAME, messages=messages, toolConfig=config)["output"]["message"]
    calls = [block["toolUse"] for block in message["content"] if "toolUse" in block]
    said = [{"toolResult": {"toolUseId": call["toolUseId"], "content": [{"text": PAID}]}} for call in calls]
    client.converse(modelId=NAME, messages=[*messages, message, {"role": "user", "content": said}], toolConfig=config)


def _adapt(kind: Any) -> Callable[[Any], Any]:  # noqa: ANN401  # any type
    adapter = TypeAdapter(kind)
    return lambda value: adapter.validate_python(value, extra="forbid")


class Sdk(NamedTuple):
    """An SDK, and what it says about tools.

    Attributes:
        ask: makes two requests, the second with a history in which `pay` was called.
        tools: validates a list of them.
        choice: validates one.
        mended: the choice when `pay` is gone.
        none: the choice when all are.
    """

    ask: Callable[[Asked], None]
    tools: Callable[[Any], Any]
    choice: Callable[[Any], Any]
    mended: object
    none: object


_READ = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "read"}]}


def _chat() -> Sdk:
    from openai.types.chat import ChatCompletionToolChoiceOptionParam, ChatCompletionToolUnionParam

    return Sdk(
        ask_chat, _adapt(list[ChatCompletionToolUnionParam]), _adapt(ChatCompletionToolChoiceOptionParam), "auto", "none"
    )


def _responses() -> Sdk:
    from openai.types.responses import ToolParam
    from openai.types.responses.response_create_params import ToolChoice

    return Sdk(ask_responses, _adapt(list[ToolParam]), _adapt(ToolChoice), _READ, "none")


def _anthropic() -> Sdk:
    from anthropic.types import ToolChoiceParam, ToolUnionParam

    mended, none = {"type": "auto", "disable_parallel_tool_use": True}, {"type": "none"}
    return Sdk(ask_anthropic, _adapt(list[ToolUnionParam]), _adapt(ToolChoiceParam), mended, none)


def _gemini() -> Sdk:
    from google.genai.types import Tool, ToolConfig

    none = {"functionCallingConfig": {"mode": "NONE"}}
    return Sdk(ask_gemini, _adapt(list[Tool]), _adapt(ToolConfig), none, none)


SDKS: dict[str, Callable[[], Sdk]] = {"chat": _chat, "responses": _responses, "anthropic": _anthropic, "gemini": _gemini}


@pytest.fixture(scope="module")
def model() -> Iterator[FakeModel]:
    """A model that asks for `pay` once."""
    with fake_model() as made:
        yield made


def ask(model: FakeModel, ask: Callable[[Asked], None], user: str) -> bytes:
    """The second request that an SDK makes, with the call and its result in it."""
    model.scripts[user] = lambda number: "Done." if number else [Call("pay", {"bill": "b"})]
    ask(Asked(f"http://127.0.0.1:{model.port}", user))
    return model.bodies[user]


def take_out(body: bytes, *names: str, path: str = "/v1/x") -> dict[str, Any]:
    """A body without these tools, without any where none is named."""
    found: dict[str, Any] = json.loads(narrow(HttpRequest("POST", path), body, names or None))
    return found


def find_names(value: object) -> list[str]:
    """What is called a name in a list of tools, schemas aside."""
    if isinstance(value, dict):
        own = [value["name"]] if "name" in value else []
        return own + [name for key, item in value.items() if key != "parameters" for name in find_names(item)]
    return [name for item in value for name in find_names(item)] if isinstance(value, list) else []


def take_choice(body: dict[str, Any]) -> object:
    """The choice among the tools, taken out of a body."""
    return body.pop("toolConfig" if "contents" in body else "tool_choice")


@pytest.mark.slow
@pytest.mark.parametrize("name", SDKS)
def test_a_request_without_a_tool_is_one_of_the_sdk(model: FakeModel, name: str) -> None:
    """The tool is not declared any more, the choice is not of it, and all the rest is as the SDK sent it."""
    sdk = SDKS[name]()
    old = json.loads(body := ask(model, sdk.ask, f"{name}-one"))

    new = take_out(body, "pay")

    VALIDATORS[name](new)
    assert sdk.choice(new.get("toolConfig", new.get("tool_choice")))
    assert take_choice(new) == sdk.mended
    take_choice(old)
    assert find_names(old.pop("tools")) == ["pay", "read"]
    assert sdk.tools(new["tools"])
    assert find_names(new.pop("tools")) == ["read"]
    assert new == old


@pytest.mark.parametrize("name", SDKS)
def test_a_request_that_may_call_nothing_is_one_of_the_sdk(model: FakeModel, name: str) -> None:
    """The choice is none, and all the rest is as the SDK sent it."""
    sdk = SDKS[name]()
    old = json.loads(body := ask(model, sdk.ask, f"{name}-all"))

    new = take_out(body)

    assert sdk.choice(new.get("toolConfig", new.get("tool_choice")))
    assert take_choice(new) == sdk.none
    take_choice(old)
    assert new == old


def test_bedrock_has_no_choice_of_none(model: FakeModel) -> None:
    """By botocore's own model a narrowed request is valid; where no tool may be called, none is offered."""
    body = ask(model, ask_bedrock, "bedrock")

    new = take_out(body, "pay")

    VALIDATORS["bedrock"](new)
    assert find_names(new["toolConfig"]["tools"]) == ["read"]
    assert new["toolConfig"]["toolChoice"] == {"auto": {}}
    with pytest.raises(NotEdited, match="no_choice"):
        take_out(body)


def test_ollama_does_without_tools(model: FakeModel) -> None:
    """It has no choice among them, and takes a history of calls without any."""
    import ollama

    client = ollama.Client(host=f"http://127.0.0.1:{model.port}", headers={USER: "ollama"})
    call: Any = {"function": {"name": "pay", "arguments": {"bill": "b"}}}
    messages: Any = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_name": "pay", "content": PAID}]
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": _SCHEMA}} for name in _NAMES]
    with pytest.raises(ollama.ResponseError):  # the refusal is not in Ollama's shape
        client.chat(model="m", messages=messages, tools=tools)

    some, none = [take_out(model.bodies["ollama"], *names, path="/api/chat") for names in (["pay"], [])]

    assert ollama._types.ChatRequest.model_validate(some)
    assert find_names(some["tools"]) == ["read"]
    assert "tools" not in none
    assert none["messages"] == some["messages"]
