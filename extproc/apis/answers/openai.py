"""OpenAI's chat and text completions, those who speak their language, and everybody whose API is not known."""
# interpreted: writes refusals, which is json's time; msgspec makes its Structs of annotations

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from extproc.apis.answers.api import Api, Completion, Question, Refusal, frame_events, frame_json, make_error
from extproc.decision import Framed

_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
_DONE = "[DONE]"


def write_error(refusal: Refusal, _: Question) -> Framed:
    """`error`, whose `message` the SDKs show (`openai._base_client._make_status_error_from_response`)."""
    return frame_json(refusal.status, make_error(refusal))


def complete_chat(completion: Completion, question: Question) -> Framed | None:
    """A chat completion, or its chunks."""
    if question.body is None or not completion.model:
        return None
    if question.read("stream") is True:
        return frame_events(_write_chunks(completion, _make("chat.completion.chunk", completion), _asks_usage(question)))
    message = {"role": "assistant", "content": completion.text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    return frame_json(200, {**_make("chat.completion", completion), "choices": [choice], "usage": _USAGE})


def _write_chunks(completion: Completion, chunk: dict[str, Any], usage: bool) -> Iterator[str | dict[str, Any]]:  # noqa: FBT001  # one place
    deltas: list[tuple[dict[str, str], str | None]] = [
        ({"role": "assistant", "content": ""}, None),
        ({"content": completion.text}, None),
        ({}, "stop"),
    ]
    for delta, reason in deltas:
        yield {**chunk, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]}
    if usage:
        yield {**chunk, "choices": [], "usage": _USAGE}
    yield _DONE


def complete_text(completion: Completion, question: Question) -> Framed | None:
    """A text completion, or its one piece."""
    if question.body is None or not completion.model:
        return None
    choice = {"index": 0, "text": completion.text, "logprobs": None, "finish_reason": "stop"}
    answer = {**_make("text_completion", completion), "choices": [choice]}
    if question.read("stream") is not True:
        return frame_json(200, {**answer, "usage": _USAGE})
    usage = [{**answer, "choices": [], "usage": _USAGE}] if _asks_usage(question) else []
    return frame_events([answer, *usage, _DONE])


def _make(kind: str, completion: Completion) -> dict[str, Any]:
    """What stands in each piece of an answer."""
    identity = f"{'cmpl' if kind == 'text_completion' else 'chatcmpl'}-{completion.name}"
    return {"id": identity, "object": kind, "created": completion.created, "model": completion.model}


def _asks_usage(question: Question) -> bool:
    options = question.read("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


PLAIN = Api(write_error)
CHAT = Api(write_error, complete_chat)
TEXT = Api(write_error, complete_text)
