"""Trajectories in ATIF (Agent Trajectory Interchange Format, v1.0 to v1.7) as messages of chat completions."""
# interpreted: msgspec makes its Structs of annotations

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

SOURCES: Final = {"user": "user", "system": "system", "agent": "assistant"}
"""Roles in a chat, by the source of a step."""


class _ToolCall(msgspec.Struct):
    function_name: str
    arguments: Any = msgspec.field(default_factory=dict)
    tool_call_id: str = ""


class _Result(msgspec.Struct):
    source_call_id: str | None = None
    content: Any = None


class _Observation(msgspec.Struct):
    results: list[_Result] = msgspec.field(default_factory=list)


class TrajectoryStep(msgspec.Struct):
    """A step of a trajectory."""

    source: str
    message: Any = ""
    tool_calls: list[_ToolCall] | None = None
    observation: _Observation | None = None
    timestamp: Any = None
    model_name: Any = None
    metrics: msgspec.Raw = msgspec.Raw()
    is_copied_context: Any = None


def write_step(step: TrajectoryStep) -> Iterator[dict[str, Any]]:
    """A step as messages: its own, and its results; a result without a call becomes a user's message.

    Raises:
        ValueError: its source is unknown.
    """
    if step.source not in SOURCES:
        raise ValueError(f"the source of a step must be one of {', '.join(SOURCES)}")
    message: dict[str, Any] = {"role": SOURCES[step.source], "content": read_text(step.message)}
    if step.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.tool_call_id,
                "type": "function",
                "function": {"name": call.function_name, "arguments": msgspec.json.encode(call.arguments).decode()},
            }
            for call in step.tool_calls
        ]
    yield message
    for result in step.observation.results if step.observation is not None else ():
        content = read_text(result.content)
        if result.source_call_id and step.tool_calls:
            yield {"role": "tool", "tool_call_id": result.source_call_id, "content": content}
        else:
            yield {"role": "user", "content": content}


def read_text(content: Any) -> str:  # noqa: ANN401  # JSON
    """The text of a message: the texts of its parts, and anything else as JSON."""
    if isinstance(content, list):
        return "\n".join([read_text(part.get("text", part)) if isinstance(part, dict) else str(part) for part in content])
    if content is None or isinstance(content, str):
        return content or ""
    return msgspec.json.encode(content).decode()
