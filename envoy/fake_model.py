"""A scripted model: an HTTP upstream that answers in the formats of real APIs.

It has six formats: OpenAI's chat completions and Responses, Anthropic's messages, Gemini, Bedrock
and Ollama. As with real models, ids are new in each answer, and the spaces in arguments and the
words around a call vary. In a request it only reads the gateway's note, which can switch to another
script.
"""  # noqa: INP001  # a part of the demo beside it, not of a package

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, TypeAlias
from uuid import uuid4

from demo import read_body, serving

from extproc.ext_proc.changes.steer import LANDING
from extproc.request.notes import END, OPENING

NAME = "fake-model-1"
USER = "x-user-id"
"""The header with the user, which selects the script; without it, the API key does."""

_KEY = re.compile(r"(?:Bearer |.*Credential=)?([^/,]+)")


@dataclass(frozen=True)
class Call:
    """A tool call."""

    tool: str
    arguments: Mapping[str, object] = field(default_factory=dict)


_NOTE = re.compile(rf"{re.escape(OPENING)}.*?{re.escape(END)}".encode())

Answer: TypeAlias = Sequence[Call] | str
"""The answer of a turn: one or more tool calls, or text, which ends the task."""

Script: TypeAlias = Callable[[int], Answer]
"""Returns the answer to a user's request by its number, from 0."""


class FakeModel:
    """The state of the upstream.

    Attributes:
        scripts: each user's script.
        detours: each user's script after a note from the gateway, from its start.
        landings: each user's final answer, when a note requests one.
        bodies: the body of each user's newest request.
        asked: number of requests received from each user.
        port: the port to listen on.
    """

    def __init__(self) -> None:
        """Start without users."""
        self.scripts: dict[str, Script] = {}
        self.detours: dict[str, Script] = {}
        self.landings: dict[str, str] = {}
        self.bodies: dict[str, bytes] = {}
        self.asked: Counter[str] = Counter()
        self.port = 0

    def answer(self, path: str, user: str, body: bytes) -> tuple[HTTPStatus, dict[str, Any]]:
        """Answer a user's next request; returns status and body."""
        self.bodies[user] = body
        if user in self.detours and find_note(body):
            detour, left = self.detours.pop(user), self.asked[user]
            self.scripts[user] = lambda number: detour(number - left)
        shape = next(
            (shape for end, shape in SHAPES.items() if path.partition("?")[0].endswith(end)), None
        )
        if shape is None or user not in self.scripts:
            return HTTPStatus.NOT_FOUND, {
                "error": {"message": f"no {path} for {user!r}", "type": "not_found_error"}
            }
        number = self.asked[user]
        self.asked[user] += 1
        if user in self.landings and LANDING in find_note(body):
            return HTTPStatus.OK, shape(self.landings[user], number)
        return HTTPStatus.OK, shape(self.scripts[user](number), number)


def find_note(body: bytes) -> str:
    """The gateway's note in a request, or empty."""
    found = _NOTE.search(body)
    return str(json.loads(b'"%b"' % found[0])) if found else ""


def find_user(headers: Message) -> str:
    """The user of a request, by header or API key."""
    names = (USER, "authorization", "x-api-key", "x-goog-api-key")
    found = _KEY.match(next((headers[name] for name in names if headers.get(name)), ""))
    return found[1] if found else ""


@contextmanager
def fake_model() -> Iterator[FakeModel]:
    """Run a fake model on a free port."""
    model = FakeModel()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            asked = read_body(self)
            status, answer = model.answer(self.path, find_user(self.headers), asked)
            body, kind = json.dumps(answer).encode(), "application/json"
            if answer.get("object") == "chat.completion" and json.loads(asked).get("stream"):
                body, kind = stream_completion(answer), "text/event-stream"
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        # The base class's name
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Log nothing."""

    with serving(Handler) as model.port:
        yield model


def stream_completion(answer: dict[str, Any]) -> bytes:
    """A chat completion as a stream of three events: the role, the content and the end."""
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls", ()))]
    deltas: list[tuple[dict[str, Any], str | None]] = [
        ({"role": "assistant", "content": ""}, None),
        ({"content": message["content"], **({"tool_calls": calls} if calls else {})}, None),
        ({}, choice["finish_reason"]),
    ]
    head = {name: answer[name] for name in ("id", "created", "model")} | {
        "object": "chat.completion.chunk"
    }
    pieces = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": end}]}
        for delta, end in deltas
    ]
    return "".join(
        [f"data: {piece}\n\n" for piece in (*map(json.dumps, pieces), "[DONE]")]
    ).encode()


def _id(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"


def _write_arguments(call: Call, number: int) -> str:
    """A call's arguments as JSON, with alternating spaces."""
    return json.dumps(call.arguments, separators=(",", ":") if number % 2 else None)


def _remark(number: int) -> str:
    return f"Let me have a look, for the {number + 1}. time."


def _chat(answer: Answer, number: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "refusal": None, "annotations": []}
    if isinstance(answer, str):
        message["content"] = answer
    else:
        message["content"] = _remark(number)
        message["tool_calls"] = [
            {
                "id": _id("call"),
                "type": "function",
                "function": {"name": call.tool, "arguments": _write_arguments(call, number)},
            }
            for call in answer
        ]
    reason = "stop" if isinstance(answer, str) else "tool_calls"
    return {
        "id": _id("chatcmpl"),
        "object": "chat.completion",
        "created": 1_750_000_000 + number,
        "model": NAME,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18},
    }


def _response(answer: Answer, number: int) -> dict[str, Any]:
    output: list[dict[str, Any]] = [{"type": "reasoning", "id": _id("rs"), "summary": []}]
    if isinstance(answer, str):
        text = {"type": "output_text", "text": answer, "annotations": [], "logprobs": []}
        output.append(
            {
                "type": "message",
                "id": _id("msg"),
                "status": "completed",
                "role": "assistant",
                "content": [text],
            }
        )
    else:
        output += [
            {
                "type": "function_call",
                "id": _id("fc"),
                "call_id": _id("call"),
                "name": call.tool,
                "arguments": _write_arguments(call, number),
                "status": "completed",
            }
            for call in answer
        ]
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": 1_750_000_000 + number,
        "status": "completed",
        "model": NAME,
        "output": output,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "usage": {
            "input_tokens": 9,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 9,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 18,
        },
    }


def _message(answer: Answer, number: int) -> dict[str, Any]:
    text = answer if isinstance(answer, str) else _remark(number)
    content: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if not isinstance(answer, str):
        content += [
            {
                "type": "tool_use",
                "id": _id("toolu"),
                "name": call.tool,
                "input": dict(call.arguments),
            }
            for call in answer
        ]
    return {
        "id": _id("msg"),
        "type": "message",
        "role": "assistant",
        "model": NAME,
        "content": content,
        "stop_reason": "end_turn" if isinstance(answer, str) else "tool_use",
        "stop_sequence": None,
        "usage": {"input_tokens": 9, "output_tokens": 9},
    }


def _content(answer: Answer, number: int) -> dict[str, Any]:
    text = answer if isinstance(answer, str) else _remark(number)
    parts: list[dict[str, Any]] = [{"text": f"{text} {number}", "thought": True}, {"text": text}]
    if not isinstance(answer, str):
        parts += [
            {"functionCall": {"name": call.tool, "args": dict(call.arguments)}} for call in answer
        ]
    return {
        "responseId": _id("gen"),
        "modelVersion": NAME,
        "candidates": [
            {"index": 0, "content": {"role": "model", "parts": parts}, "finishReason": "STOP"}
        ],
        "usageMetadata": {"promptTokenCount": 9, "candidatesTokenCount": 9, "totalTokenCount": 18},
    }


def _converse(answer: Answer, number: int) -> dict[str, Any]:
    content: list[dict[str, Any]] = [
        {"text": answer if isinstance(answer, str) else _remark(number)}
    ]
    if not isinstance(answer, str):
        content += [
            {
                "toolUse": {
                    "toolUseId": _id("tooluse"),
                    "name": call.tool,
                    "input": dict(call.arguments),
                }
            }
            for call in answer
        ]
    return {
        "output": {"message": {"role": "assistant", "content": content}},
        "stopReason": "end_turn" if isinstance(answer, str) else "tool_use",
        "usage": {"inputTokens": 9, "outputTokens": 9, "totalTokens": 18},
        "metrics": {"latencyMs": 9},
    }


def _ollama(answer: Answer, number: int) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer if isinstance(answer, str) else _remark(number),
    }
    if not isinstance(answer, str):
        message["tool_calls"] = [
            {"function": {"name": call.tool, "arguments": dict(call.arguments)}} for call in answer
        ]
    return {
        "model": NAME,
        "created_at": "2026-01-01T00:00:00Z",
        "message": message,
        "done": True,
        "done_reason": "stop",
    }


SHAPES: Mapping[str, Callable[[Answer, int], dict[str, Any]]] = {
    "/v1/chat/completions": _chat,
    "/v1/responses": _response,
    "/v1/messages": _message,
    ":generateContent": _content,
    "/converse": _converse,
    "/api/chat": _ollama,
}
"""Makes a body from an answer and its number, by the end of the path."""
