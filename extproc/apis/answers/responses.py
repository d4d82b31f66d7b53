"""OpenAI's Responses."""
# interpreted: writes refusals, which is json's time; msgspec makes its Structs of annotations

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from extproc.apis.answers.api import Api, Completion, Question, frame_events, frame_json
from extproc.apis.answers.openai import write_error
from extproc.decision import Framed

_USAGE = {
    "input_tokens": 0,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens": 0,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 0,
}


def complete(completion: Completion, question: Question) -> Framed | None:
    """A response with one message, or the events that lead to it."""
    if question.body is None or not completion.model:
        return None
    if question.read("stream") is True:
        events = enumerate(_write_events(completion))
        return frame_events(({**event, "sequence_number": number} for number, event in events), named=True)
    return frame_json(200, _make_response(completion, "completed"))


def _write_events(completion: Completion) -> Iterator[dict[str, Any]]:
    """As a model sends them (platform.openai.com, Streaming events)."""
    message = _make_message(completion, "completed")
    started = {**_make_message(completion, "in_progress"), "content": []}
    (part,) = message["content"]
    item = {"output_index": 0, "item_id": message["id"], "content_index": 0}
    for status in ("created", "in_progress"):
        yield {"type": f"response.{status}", "response": _make_response(completion, "in_progress")}
    yield {"type": "response.output_item.added", "output_index": 0, "item": started}
    yield {"type": "response.content_part.added", **item, "part": {**part, "text": ""}}
    yield {"type": "response.output_text.delta", **item, "delta": completion.text, "logprobs": []}
    yield {"type": "response.output_text.done", **item, "text": completion.text, "logprobs": []}
    yield {"type": "response.content_part.done", **item, "part": part}
    yield {"type": "response.output_item.done", "output_index": 0, "item": message}
    yield {"type": "response.completed", "response": _make_response(completion, "completed")}


def _make_response(completion: Completion, status: str) -> dict[str, Any]:
    completed = status == "completed"
    return {
        "id": f"resp_{completion.name}",
        "object": "response",
        "created_at": completion.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": completion.model,
        "output": [_make_message(completion, status)] if completed else [],
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": _USAGE if completed else None,
    }


def _make_message(completion: Completion, status: str) -> dict[str, Any]:
    text = {"type": "output_text", "text": completion.text, "annotations": [], "logprobs": []}
    return {"id": f"msg_{completion.name}", "type": "message", "status": status, "role": "assistant", "content": [text]}


RESPONSES = Api(write_error, complete)
