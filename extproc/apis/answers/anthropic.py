"""Anthropic's messages, of its own API and of Vertex AI."""
# interpreted: writes refusals, which is json's time; msgspec makes its Structs of annotations

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from extproc.apis.answers.api import Api, Completion, Question, Refusal, frame_events, frame_json, make_error
from extproc.decision import Framed

_ENDED = {"stop_reason": "end_turn", "stop_sequence": None}


def write_error(refusal: Refusal, _: Question) -> Framed:
    """`type` beside `error` (docs.anthropic.com, Errors); clients with a schema take nothing for an error without it."""
    return frame_json(refusal.status, {"type": "error", **make_error(refusal)})


def complete(completion: Completion, question: Question) -> Framed | None:
    """A message, or the events that lead to it."""
    if question.body is None or not completion.model:
        return None
    if question.read("stream") is True:
        return frame_events(write_events(completion), named=True)
    return frame_json(200, make_message(completion))


def make_message(completion: Completion) -> dict[str, Any]:
    """The whole message."""
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
    """The same in pieces (docs.anthropic.com, Streaming messages)."""
    started = {**make_message(completion), "content": [], "stop_reason": None}
    yield {"type": "message_start", "message": started}
    yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": completion.text}}
    yield {"type": "content_block_stop", "index": 0}
    yield {"type": "message_delta", "delta": _ENDED, "usage": {"output_tokens": 0}}
    yield {"type": "message_stop"}


MESSAGES = Api(write_error, complete)
OTHERS = Api(write_error)
