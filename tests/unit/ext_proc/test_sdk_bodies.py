"""Edited bodies of SDKs are valid requests with an unchanged, cacheable beginning."""

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
from fake_model import Answer, Call, FakeModel, fake_model
from pydantic import TypeAdapter

from extproc.pb.external_processor_pb2 import ProcessingResponse
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.frameworks import (
    Errand,
    Run,
    run_bedrock_agent,
    run_gemini_agent,
    run_langchain,
    run_messages_agent,
    run_ollama_agent,
    run_openai_agent,
    run_openai_responses_agent,
    run_pydantic_agent,
)
from tests.support.messages import body, headers
from tests.support.model_requests import BODIES
from tests.support.service import decoded, exchange, make_service, repeat
from tests.support.session_limits import limited
from tests.support.steering import FORBIDDEN, changed
from tests.support.turn_writers import PATHS
from tests.support.validators import VALIDATORS

SDKS: dict[str, Run] = {
    "chat": run_openai_agent,
    "chat of langchain": run_langchain,
    "chat of pydantic-ai": run_pydantic_agent,
    "responses": run_openai_responses_agent,
    "anthropic": run_messages_agent,
    "gemini": run_gemini_agent,
    "bedrock": run_bedrock_agent,
    "ollama": run_ollama_agent,
}
RECORDED = (
    "chat_stuck",
    "chat_parallel_calls",
    "responses_stuck",
    "responses_parallel_calls",
    "anthropic_stuck",
    "anthropic_parallel_calls",
)
# One tool goes after three calls of it, or all are forbidden.
NARROWINGS: list[dict[str, Any]] = [
    {"max_calls_per_tool": {"check": 3}},
    {"max_tool_calls": 3, "max_tool_calls_mode": "finish"},
]


@pytest.fixture(scope="module")
def model() -> Iterator[FakeModel]:
    with fake_model() as made:
        yield made


def record(model: FakeModel, name: str) -> bytes:
    """The last request of an SDK's agent, with three calls in its history."""

    def answer(number: int) -> Answer:
        return "Done." if number % 4 == 3 else [Call("check")]

    model.scripts[name] = answer
    SDKS[name](
        Errand(f"http://127.0.0.1:{model.port}", name, lambda: "pending", lambda: "It is done.")
    )
    return model.bodies[name]


def split(data: bytes) -> dict[str, bytes]:
    return {
        key: bytes(item)
        for key, item in msgspec.json.decode(data, type=dict[str, msgspec.Raw]).items()
    }


# ---- Narrowed


class Types(NamedTuple):
    """The SDK's types of tools and of a choice; a choice of `check`, and one without it."""

    tools: Any
    choice: Any
    named: object
    mended: object


def _function(name: str) -> dict[str, str]:
    return {"type": "function", "name": name}


def _type_chat() -> Types:
    from openai.types.chat import ChatCompletionToolChoiceOptionParam, ChatCompletionToolUnionParam

    named = {"type": "function", "function": {"name": "check"}}
    return Types(
        list[ChatCompletionToolUnionParam], ChatCompletionToolChoiceOptionParam, named, "auto"
    )


def _type_responses() -> Types:
    from openai.types.responses import ToolParam
    from openai.types.responses.response_create_params import ToolChoice

    allowed = {"type": "allowed_tools", "mode": "required"}
    named = allowed | {"tools": [_function("check"), _function("ask_colleague")]}
    return Types(
        list[ToolParam], ToolChoice, named, allowed | {"tools": [_function("ask_colleague")]}
    )


def _type_anthropic() -> Types:
    from anthropic.types import ToolChoiceParam, ToolUnionParam

    held = {"disable_parallel_tool_use": True}
    return Types(
        list[ToolUnionParam],
        ToolChoiceParam,
        {"type": "tool", "name": "check", **held},
        {"type": "auto", **held},
    )


def _type_gemini() -> Types:
    from google.genai.types import Tool, ToolConfig

    named = {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["check"]}}
    return Types(list[Tool], ToolConfig, named, {"functionCallingConfig": {"mode": "NONE"}})


TYPES: dict[str, Callable[[], Types]] = {
    "chat": _type_chat,
    "responses": _type_responses,
    "anthropic": _type_anthropic,
    "gemini": _type_gemini,
}


def narrow(name: str, data: bytes) -> list[ProcessingResponse]:
    """The answers to three calls of `check`: when only these are counted, and when all are."""
    sent = headers(PATHS[name], x_team="t", x_session_id="s"), body(data)
    return [decoded(exchange(make_service(limited(**limits)), *sent)[-1]) for limits in NARROWINGS]


def list_names(tools: list[Any]) -> list[str]:
    declared = [one for tool in tools for one in tool.get("functionDeclarations", [tool])]
    return [one.get("function", one.get("toolSpec", one))["name"] for one in declared]


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_narrowed_request_is_valid_for_its_sdk(model: FakeModel, name: str) -> None:
    types, sent = TYPES[name](), record(model, name)
    ((key, none),) = FORBIDDEN[name].items()
    sent = sent.rstrip()[:-1] + f',"{key}":{json.dumps(types.named)}}}'.encode()

    fewer, nothing = [json.loads(changed(answer)) for answer in narrow(name, sent)]

    for new, choice, left in (
        (fewer, types.mended, ["ask_colleague"]),
        (nothing, none, ["check", "ask_colleague"]),
    ):
        VALIDATORS[name](new)
        TypeAdapter(types.tools).validate_python(new["tools"], extra="forbid")
        TypeAdapter(types.choice).validate_python(new[key], extra="forbid")
        assert list_names(new["tools"]) == left
        assert new == json.loads(sent) | {"tools": new["tools"], key: choice}


@pytest.mark.slow
def test_bedrock_request_is_refused_where_all_tools_go(model: FakeModel) -> None:
    sent = json.loads(record(model, "bedrock"))
    sent["toolConfig"]["toolChoice"] = {"tool": {"name": "check"}}

    fewer, refused = narrow("bedrock", json.dumps(sent).encode())

    new = json.loads(changed(fewer))
    VALIDATORS["bedrock"](new)
    assert list_names(new["toolConfig"]["tools"]) == ["ask_colleague"]
    assert new["toolConfig"]["toolChoice"] == {"auto": {}}
    assert refused.immediate_response.status.code == 429


def test_ollama_request_has_no_tools_where_all_go(model: FakeModel) -> None:
    from ollama._types import ChatRequest

    fewer, nothing = [
        json.loads(changed(answer)) for answer in narrow("ollama", record(model, "ollama"))
    ]

    assert ChatRequest.model_validate(fewer)
    assert list_names(fewer["tools"]) == ["ask_colleague"]
    assert "tools" not in nothing
    assert nothing["messages"] == fewer["messages"]


# ---- Steered and landed


def split_messages(listed: bytes) -> tuple[list[bytes], list[bytes]]:
    messages = [bytes(item) for item in msgspec.json.decode(listed, type=list[msgspec.Raw])]
    said = [json.loads(message) for message in messages]
    calls = [
        str(one.get("type")).endswith("_call") or one.get("role") in ("assistant", "model")
        for one in said
    ]
    newest = len(calls) - calls[::-1].index(True)
    return messages[:newest], messages[newest:]


def check_prefix(api: str, action: str, sent: bytes, **loop: str) -> None:
    service = make_service(policy("p", ANY, action=action, threshold_identical_requests=2, **loop))
    before, after = (
        split(sent),
        split(changed(repeat(service, headers(PATHS[api]), body(sent), times=2))),
    )
    forbidden = (
        FORBIDDEN[api] if action == "land" and before.keys() & {"tools", "toolConfig"} else {}
    )
    key = next(key for key in ("messages", "input", "contents") if key in before)

    (earlier, newest), (kept, noted) = split_messages(before[key]), split_messages(after[key])
    assert (kept, len(noted)) == (earlier, len(newest))
    assert noted != newest
    assert {name: json.loads(after[name]) for name in forbidden} == forbidden
    others = [
        (name, value) for name, value in before.items() if name != key and name not in forbidden
    ]
    assert [
        (name, value) for name, value in after.items() if name != key and name not in forbidden
    ] == others


@pytest.mark.slow
@pytest.mark.parametrize("action", ["steer", "land"])
@pytest.mark.parametrize("name", SDKS)
def test_bytes_before_newest_message_of_sdks_stay(model: FakeModel, name: str, action: str) -> None:
    check_prefix(name.partition(" ")[0], action, record(model, name), similarity="turns")


@pytest.mark.parametrize("action", ["steer", "land"])
@pytest.mark.parametrize("name", RECORDED)
def test_bytes_before_newest_recorded_message_stay(name: str, action: str) -> None:
    check_prefix(name.partition("_")[0], action, BODIES[name])
