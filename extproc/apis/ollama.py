"""Ollama's own API, with the messages of OpenAI's chat."""
# interpreted: little work besides json

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from extproc.apis.api import Api, Completion, Endpoint, Question, frame_json, write_error
from extproc.decision import Framed

_LINES = "application/x-ndjson"
_MEASURED = {"total_duration": 0, "load_duration": 0, "prompt_eval_count": 0, "eval_count": 0}


def complete_chat(completion: Completion, question: Question) -> Framed | None:
    """A message; see `_complete`."""
    return _complete(
        completion, question, lambda text: {"message": {"role": "assistant", "content": text}}
    )


def complete_text(completion: Completion, question: Question) -> Framed | None:
    """A text; see `_complete`."""
    return _complete(completion, question, lambda text: {"response": text})


def _complete(completion: Completion, question: Question, say: Any) -> Framed | None:  # noqa: ANN401  # a lambda
    """Answer in two lines, or in one if requested; None without a model: a path of another API."""
    if not question.has("model") or not completion.model:
        return None
    created = datetime.fromtimestamp(completion.created, UTC).isoformat().replace("+00:00", "Z")
    answer = {"model": completion.model, "created_at": created}
    end = {"done": True, "done_reason": "stop", **_MEASURED}
    if question.read("stream") is False:
        return frame_json(200, {**answer, **say(completion.text), **end})
    lines = [{**answer, **say(completion.text), "done": False}, {**answer, **say(""), **end}]
    return Framed(200, _LINES, "".join(f"{json.dumps(line)}\n" for line in lines).encode())


API = Api(
    name="ollama",
    paths={
        r"/api/chat\Z": Endpoint(write_error, complete_chat, takes_choice=False),
        r"/api/generate\Z": Endpoint(write_error, complete_text),
    },
    samples=("/api/chat", "/api/generate"),
    asked=("stream",),
    # At the top level; its streams have no events
    counts={"input": ("prompt_eval_count",), "output": ("eval_count",)},
    answered_by=("model",),
    longest_answers=("options.num_predict",),
)
