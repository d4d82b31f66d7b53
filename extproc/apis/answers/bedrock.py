"""Amazon Bedrock's runtime: Converse, and models as they are."""
# interpreted: writes refusals, which is json's time; msgspec makes its Structs of annotations

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping
from typing import Any
from zlib import crc32

from extproc.apis.answers import anthropic
from extproc.apis.answers.api import JSON, Api, Completion, Question, Refusal, frame_json, make_error
from extproc.decision import Framed

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
"""The errors that its operations know, by status (Bedrock's API reference, Converse)."""

_MEASURED = {"usage": {"inputTokens": 0, "outputTokens": 0, "totalTokens": 0}, "metrics": {"latencyMs": 0}}

_AROUND = 16
"""Bytes of an event's two lengths and two checksums."""

_STRING = 7
"""The type of a header whose value is text."""


def write_error(refusal: Refusal, _: Question) -> Framed:
    """`message` in the body, and what kind of error it is in a header (smithy.io, AWS restJson1, operation errors)."""
    kind = _TYPES.get(refusal.status) or _TYPES[400 if refusal.status < 500 else 500]  # noqa: PLR2004  # HTTP's
    return frame_json(refusal.status, {"message": refusal.message, **make_error(refusal)}, ("x-amzn-errortype", kind))


def complete(completion: Completion, _: Question) -> Framed:
    """What Converse answers."""
    message = {"role": "assistant", "content": [{"text": completion.text}]}
    return frame_json(200, {"output": {"message": message}, "stopReason": "end_turn", **_MEASURED})


def complete_in_pieces(completion: Completion, _: Question) -> Framed:
    """What ConverseStream answers."""
    events: list[tuple[str, Mapping[str, Any]]] = [
        ("messageStart", {"role": "assistant"}),
        ("contentBlockDelta", {"contentBlockIndex": 0, "delta": {"text": completion.text}}),
        ("contentBlockStop", {"contentBlockIndex": 0}),
        ("messageStop", {"stopReason": "end_turn"}),
        ("metadata", _MEASURED),
    ]
    return _frame_event_stream(events)


def complete_as_model(completion: Completion, question: Question) -> Framed | None:
    """What InvokeModel answers for Anthropic's models; others have languages of their own."""
    return frame_json(200, anthropic.make_message(completion)) if question.has("anthropic_version") else None


def complete_as_model_in_pieces(completion: Completion, question: Question) -> Framed | None:
    """What InvokeModelWithResponseStream answers for them."""
    if not question.has("anthropic_version"):
        return None
    pieces = [b64encode(json.dumps(event).encode()).decode() for event in anthropic.write_events(completion)]
    return _frame_event_stream([("chunk", {"bytes": piece}) for piece in pieces])


def _frame_event_stream(events: Iterable[tuple[str, Mapping[str, Any]]]) -> Framed:
    """Named events in the encoding of AWS (smithy.io, application/vnd.amazon.eventstream)."""
    return Framed(200, "application/vnd.amazon.eventstream", b"".join(_encode(name, event) for name, event in events))


def _encode(name: str, event: Mapping[str, Any]) -> bytes:
    """Lengths, their checksum, headers, the event, and the checksum of all that."""
    pairs = ((":event-type", name), (":content-type", JSON), (":message-type", "event"))
    headers = b"".join(_encode_header(*pair) for pair in pairs)
    payload = json.dumps(event).encode()
    lengths = _write_number(_AROUND + len(headers) + len(payload)) + _write_number(len(headers))
    message = lengths + _write_number(crc32(lengths)) + headers + payload
    return message + _write_number(crc32(message))


def _encode_header(name: str, value: str) -> bytes:
    return bytes([len(name)]) + name.encode() + bytes([_STRING]) + len(value).to_bytes(2, "big") + value.encode()


def _write_number(number: int) -> bytes:
    return number.to_bytes(4, "big")


CONVERSE = Api(write_error, complete)
CONVERSE_STREAM = Api(write_error, complete_in_pieces)
INVOKE = Api(write_error, complete_as_model)
INVOKE_STREAM = Api(write_error, complete_as_model_in_pieces)
OTHERS = Api(write_error)
