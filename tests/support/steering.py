import json
from functools import partial
from typing import Any

from extproc.pb.external_processor_pb2 import ProcessingResponse
from extproc.request.notes import cut_notes
from tests.support.messages import make_marks

TURNS: dict[str, Any] = {"similarity": "turns", "action": "steer", "escalate": {"reject": 5}}

# Two tools, or one, in each API.
DECLARED: dict[str, dict[str, Any]] = {
    "chat": {
        "tools": [
            {"type": "function", "function": {"name": "f"}},
            {"type": "function", "function": {"name": "g"}},
        ]
    },
    "ollama": {"tools": [{"type": "function", "function": {"name": "f"}}]},
    "responses": {"tools": [{"type": "function", "name": "f"}], "tool_choice": "auto"},
    "anthropic": {"tools": [{"name": "f", "input_schema": {}}, {"name": "g", "input_schema": {}}]},
    "gemini": {"tools": [{"functionDeclarations": [{"name": "f"}, {"name": "g"}]}]},
    "bedrock": {
        "toolConfig": {"tools": [{"toolSpec": {"name": "f"}}, {"toolSpec": {"name": "g"}}]}
    },
}

# Forbids calls; the other two APIs have no such choice.
FORBIDDEN: dict[str, dict[str, Any]] = {
    "chat": {"tool_choice": "none"},
    "responses": {"tool_choice": "none"},
    "anthropic": {"tool_choice": {"type": "none"}},
    "gemini": {"toolConfig": {"functionCallingConfig": {"mode": "NONE"}}},
    "bedrock": {},
    "ollama": {},
}


def changed(answer: ProcessingResponse) -> bytes:
    """The edited body, empty if there is none."""
    data: bytes = answer.request_body.response.body_mutation.body
    return data


def steered(answer: ProcessingResponse) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(changed(answer) or b"{}")
    return found


def set_headers(answer: ProcessingResponse) -> dict[str, str]:
    options = answer.request_body.response.header_mutation.set_headers
    return {option.header.key: option.header.raw_value.decode() for option in options}


def without_notes(data: bytes, caller: str = "") -> bytes:
    """A body without the notes that this process added for a caller."""
    return cut_notes(data, partial(make_marks, data, caller))


def last_text(value: dict[str, Any]) -> str:
    text: str = value["messages"][-1]["content"]
    return text
