"""Amazon Bedrock's runtime: Converse, whose blocks are named by their only key, and models' own."""
# interpreted: little work besides json and msgspec

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping
from typing import Any
from zlib import crc32

from extproc.apis import anthropic
from extproc.apis.api import (
    JSON,
    Api,
    Completion,
    Endpoint,
    Question,
    Refusal,
    ToolList,
    ToolWords,
    frame_json,
    make_error,
)
from extproc.apis.contents import Block, read_object, read_string, skip_thought
from extproc.apis.messages import CALL, RESULT, Part
from extproc.apis.places import TEXT_PART, Place, locate_text
from extproc.apis.usage import decode_name
from extproc.decision import Framed
from extproc.request.document import ABSENT
from extproc.request.patch import Fields, Patch, Value

_MODEL = "/model/"
_OPERATIONS = frozenset(
    {
        "converse",
        "converse-stream",
        "invoke",
        "invoke-with-response-stream",
        "invoke-with-bidirectional-stream",
        "count-tokens",
    }
)
"""The end of a path, after `/model/ID/`."""

_ARN = "arn:"
_GEOGRAPHY = re.compile(r"\A(?:us|eu|apac|jp|au|ca|us-gov|global)\.(?=[a-z0-9-]+\.)")
"""The prefix of a model's id that names an inference profile, which spreads calls over regions."""


def _read_call(block: Block) -> Part:
    call = read_object(block["toolUse"])
    return Part(
        CALL,
        call.get("input", ABSENT),
        read_string(call.get("name")),
        read_string(call.get("toolUseId")),
    )


def _read_result(block: Block) -> Part:
    result = read_object(block["toolResult"])
    failed = result.get("status") == "error"
    return Part(
        RESULT,
        result.get("content", ABSENT),
        id=read_string(result.get("toolUseId")),
        failed=failed,
    )


def _locate_result(patch: Patch, fields: Fields, _: Value) -> list[Place]:
    return locate_text(
        patch, patch.open_fields(fields.get("toolResult")).get("content"), TEXT_PART, result=True
    )


def _find_model(path: str) -> str:
    before, _, last = path.rpartition("/")
    if last not in _OPERATIONS:
        return ""
    # Not the last segment: an ARN has a slash, which a proxy may decode
    return decode_name(before.partition(_MODEL)[2])


def _list_models(model: str) -> list[str]:
    """Names of the model without its ARN, and without the geography of an inference profile."""
    named = model.rpartition("/")[2] if model.startswith(_ARN) else model
    return [named, _GEOGRAPHY.sub("", named)]


_TYPES = {
    400: "ValidationException",
    403: "AccessDeniedException",
    404: "ResourceNotFoundException",
    408: "ModelTimeoutException",
    424: "ModelErrorException",
    429: "ThrottlingException",
    500: "InternalServerException",
    503: "ServiceUnavailableException",
}
"""Bedrock's errors by HTTP status (Bedrock's API reference, Converse)."""

_MEASURED = {
    "usage": {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0},
    "metrics": {"latencyMs": 0},
}

_AROUND = 16
"""Length of an event's two length fields and two checksums, in bytes."""

_STRING = 7
"""The type of a header with a string value."""


def write_error(refusal: Refusal, _: Question) -> Framed:
    """Write an error with its type in a header (smithy.io, AWS restJson1, operation errors)."""
    kind = _TYPES.get(refusal.status) or _TYPES[400 if refusal.status < 500 else 500]  # noqa: PLR2004  # HTTP's
    return frame_json(
        refusal.status,
        {"message": refusal.message, **make_error(refusal)},
        ("x-amzn-errortype", kind),
    )


def complete(completion: Completion, _: Question) -> Framed:
    """A response of Converse."""
    message = {"role": "assistant", "content": [{"text": completion.text}]}
    return frame_json(200, {"output": {"message": message}, "stopReason": "end_turn", **_MEASURED})


def complete_in_pieces(completion: Completion, _: Question) -> Framed:
    """A response of ConverseStream."""
    events: list[tuple[str, Mapping[str, Any]]] = [
        ("messageStart", {"role": "assistant"}),
        ("contentBlockDelta", {"contentBlockIndex": 0, "delta": {"text": completion.text}}),
        ("contentBlockStop", {"contentBlockIndex": 0}),
        ("messageStop", {"stopReason": "end_turn"}),
        ("metadata", _MEASURED),
    ]
    return _frame_event_stream(events)


def complete_as_model(completion: Completion, question: Question) -> Framed | None:
    """A response of InvokeModel for Anthropic's models; other models have their own formats."""
    return (
        frame_json(200, anthropic.make_message(completion))
        if question.has("anthropic_version")
        else None
    )


def complete_as_model_in_pieces(completion: Completion, question: Question) -> Framed | None:
    """A response of InvokeModelWithResponseStream for Anthropic's models."""
    if not question.has("anthropic_version"):
        return None
    pieces = [
        b64encode(json.dumps(event).encode()).decode()
        for event in anthropic.write_events(completion)
    ]
    return _frame_event_stream([("chunk", {"bytes": piece}) for piece in pieces])


def _frame_event_stream(events: Iterable[tuple[str, Mapping[str, Any]]]) -> Framed:
    """Named events in AWS's encoding (smithy.io, application/vnd.amazon.eventstream)."""
    return Framed(
        200,
        "application/vnd.amazon.eventstream",
        b"".join(_encode(name, event) for name, event in events),
    )


def _encode(name: str, event: Mapping[str, Any]) -> bytes:
    """Encode lengths, their checksum, headers, the event, and the checksum of all these."""
    pairs = ((":event-type", name), (":content-type", JSON), (":message-type", "event"))
    headers = b"".join(
        bytes([len(key)])
        + key.encode()
        + bytes([_STRING])
        + len(value).to_bytes(2, "big")
        + value.encode()
        for key, value in pairs
    )
    payload = json.dumps(event).encode()
    lengths = _write_number(_AROUND + len(headers) + len(payload)) + _write_number(len(headers))
    message = lengths + _write_number(crc32(lengths)) + headers + payload
    return message + _write_number(crc32(message))


def _write_number(number: int) -> bytes:
    return number.to_bytes(4, "big")


_PATH = r"\A(?>.*?/model/).+/"

API = Api(
    name="bedrock",
    paths={
        rf"{_PATH}converse\Z": Endpoint(write_error, complete),
        rf"{_PATH}converse-stream\Z": Endpoint(write_error, complete_in_pieces),
        rf"{_PATH}invoke\Z": Endpoint(write_error, complete_as_model),
        rf"{_PATH}invoke-with-response-stream\Z": Endpoint(
            write_error, complete_as_model_in_pieces
        ),
        rf"{_PATH}count-tokens\Z": Endpoint(write_error, asks_model=False),
    },
    # AWS, gateways.
    samples=(
        "/model/x/converse",
        "/model/x/converse-stream",
        "/model/x/invoke",
        "/model/x/invoke-with-response-stream",
        "/bedrock/model/x/converse",
    ),
    asked=("anthropic_version",),
    blocks={
        "toolUse": _read_call,
        "toolResult": _read_result,
        "reasoningContent": skip_thought,
        "cachePoint": skip_thought,
    },
    locators={"toolResult": _locate_result},
    tool_lists=(
        ToolList(
            "messages",
            "tools",
            "toolChoice",
            b"",
            b'{"auto":{}}',
            call=b'"toolUse"',
            holder="toolConfig",
        ),
    ),
    tool_words=ToolWords(
        wrappers=frozenset({"toolSpec", "systemTool", "tool"}),
        others=frozenset({"cachePoint"}),
        schemas=frozenset({"inputSchema"}),
    ),
    models={_MODEL: _find_model},
    list_models=_list_models,
    counts={
        "input": ("usage.inputTokens",),
        "output": ("usage.outputTokens",),
        "cache_read": ("usage.cacheReadInputTokens",),
        "cache_write": ("usage.cacheWriteInputTokens",),
    },
    credentials=("header:authorization",),
    public_id="AWS access key id",
    gateways=("bedrock", "/model/"),
    error_marks=('"status":"error"',),
    longest_answers=("inferenceConfig.maxTokens",),
)
