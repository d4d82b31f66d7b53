"""Anthropic's messages, also in Vertex AI: calls, results and thoughts are blocks of a content."""
# interpreted: little work besides json and msgspec

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from extproc.apis.api import (
    Api,
    Changes,
    Completion,
    Endpoint,
    Question,
    Refusal,
    ToolList,
    ToolWords,
    frame_events,
    frame_json,
    make_error,
)
from extproc.apis.contents import Block, read_string, skip_thought
from extproc.apis.messages import CALL, RESULT, Part
from extproc.apis.places import PLAIN, TEXT_BLOCK, Place, locate_text
from extproc.decision import Framed
from extproc.request.document import ABSENT, open_value
from extproc.request.patch import Fields, Patch, Value

_TOOLSET = "mcp_toolset"
_CHOICE = "tool_choice"
_SWITCH = "disable_parallel_tool_use"


def _read_call(block: Block) -> Part:
    return Part(
        CALL,
        block.get("input", ABSENT),
        read_string(block.get("name")),
        read_string(block.get("id")),
    )


def _read_result(block: Block) -> Part:
    failed = "is_error" in block and open_value(block["is_error"]) is True
    return Part(
        RESULT,
        block.get("content", ABSENT),
        id=read_string(block.get("tool_use_id")),
        failed=failed,
    )


def _locate_result(patch: Patch, fields: Fields, block: Value) -> list[Place]:
    if "content" not in fields:
        return [Place(block, PLAIN, "content", result=True)]
    return locate_text(patch, fields["content"], TEXT_BLOCK, result=True)


def _owns(kind: str, fields: Fields) -> bool:
    """Whether a declared tool is in Anthropic's format, with the name in the tool itself."""
    return kind == _TOOLSET or ("name" in fields and "function" not in fields)


_ENDED = {"stop_reason": "end_turn", "stop_sequence": None}


def write_error(refusal: Refusal, _: Question) -> Framed:
    """Write an error with the `type` that clients expect (docs.anthropic.com, Errors)."""
    return frame_json(refusal.status, {"type": "error", **make_error(refusal)})


def complete(completion: Completion, question: Question) -> Framed | None:
    """A message, or the events of its stream."""
    if question.body is None or not completion.model:
        return None
    if question.read("stream") is True:
        return frame_events(write_events(completion), named=True)
    return frame_json(200, make_message(completion))


def make_message(completion: Completion) -> dict[str, Any]:
    """A message of the API."""
    return {
        "id": f"msg_{completion.name}",
        "type": "message",
        "role": "assistant",
        "model": completion.model,
        "content": [{"type": "text", "text": completion.text}],
        **_ENDED,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }


def write_events(completion: Completion) -> Iterator[dict[str, Any]]:
    """The events that stream a message (docs.anthropic.com, Streaming messages)."""
    started = {**make_message(completion), "content": [], "stop_reason": None}
    yield {"type": "message_start", "message": started}
    yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    yield {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "text_delta", "text": completion.text},
    }
    yield {"type": "content_block_stop", "index": 0}
    yield {"type": "message_delta", "delta": _ENDED, "usage": {"output_tokens": 0}}
    yield {"type": "message_stop"}


def _hold_calls(patch: Patch, fields: Fields, changes: Changes, _path: str) -> Changes:
    """See `ToolList.hold`. The switch is a member of the tool choice."""
    choice = fields.get(_CHOICE)
    if _CHOICE in changes or choice is None or not patch.is_object(choice):
        return {**changes, _CHOICE: b'{"type":"auto","%b":true}' % _SWITCH.encode()}
    members = patch.open_fields(choice)
    switch = members.get(_SWITCH)
    if switch is not None and bytes(patch.read_raw(switch)) != b"true":
        patch.replace(switch, b"true")
    elif switch is None and patch.read_text(members.get("type")) != "none":
        patch.change(choice, {_SWITCH: b"true"})
    return changes


_MESSAGES = Endpoint(write_error, complete, prefills=True)

API = Api(
    name="anthropic",
    paths={
        r"/v1/messages\Z": _MESSAGES,
        r"/v1/messages/count_tokens\Z": Endpoint(write_error, asks_model=False),
        r"/v1/messages/": Endpoint(write_error),
        r"/publishers/anthropic/models/[^/:]+:(?:rawPredict|streamRawPredict)\Z": _MESSAGES,
    },
    # Anthropic, gateways, Vertex AI.
    samples=(
        "/v1/messages",
        "/anthropic/v1/messages",
        "/api/v1/messages",
        "/v1/projects/x/locations/x/publishers/anthropic/models/x:rawPredict",
    ),
    headers={"anthropic-version": _MESSAGES},
    asked=("stream",),
    blocks={
        "tool_use": _read_call,
        "server_tool_use": _read_call,
        "mcp_tool_use": _read_call,
        "tool_result": _read_result,
        "mcp_tool_result": _read_result,
        "web_search_tool_result": _read_result,
        "web_fetch_tool_result": _read_result,
        "code_execution_tool_result": _read_result,
        "bash_code_execution_tool_result": _read_result,
        "text_editor_code_execution_tool_result": _read_result,
        "thinking": skip_thought,
        "redacted_thinking": skip_thought,
    },
    locators={"tool_result": _locate_result},
    tool_lists=(
        ToolList(
            "messages",
            "tools",
            _CHOICE,
            b'{"type":"none"}',
            b'{"type":"auto"}',
            owns=_owns,
            hold=_hold_calls,
        ),
    ),
    tool_words=ToolWords(
        servers=frozenset({_TOOLSET}),
        modes=frozenset({"auto", "any", "none"}),
        kept=frozenset({_SWITCH}),
        schemas=frozenset({"input_schema"}),
    ),
    counts={
        "input": ("usage.input_tokens", "message.usage.input_tokens"),
        # Not message.usage.output_tokens, which is reported before any output.
        "output": ("usage.output_tokens",),
        "cache_read": ("usage.cache_read_input_tokens", "message.usage.cache_read_input_tokens"),
        "cache_write": (
            "usage.cache_creation_input_tokens",
            "message.usage.cache_creation_input_tokens",
        ),
    },
    events=("message.usage", "usage"),
    answered_by=("model", "message.model"),
    credentials=("header:x-api-key",),
    error_marks=('"is_error":true',),
    longest_answers=("max_tokens",),
)
