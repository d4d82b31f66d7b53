"""Reads ATIF (Agent Trajectory Interchange Format, v1.0 to v1.7), as Harbor writes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from extproc.cli.packed import FilePlace
from extproc.cli.scan.runs import TranscriptReader
from extproc.cli.scan.transcripts import (
    BAD_JSON,
    About,
    ModelCall,
    UnknownLineError,
    cut_name,
    name_folder,
    read_time,
    read_usage,
)

_NAME: Final = "ATIF"
_AGENT: Final = "agent"
_MOST_NESTED = 8
_MOST_DOLLARS = 1_000_000  # larger values are not the price of a call


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
    source: str
    message: Any = ""
    tool_calls: list[_ToolCall] | None = None
    observation: _Observation | None = None
    timestamp: Any = None
    model_name: Any = None
    metrics: msgspec.Raw = msgspec.Raw()
    is_copied_context: Any = None


def write_step(step: TrajectoryStep) -> Iterator[dict[str, Any]]:
    """A step's message, then its results; a result without a call becomes a user's message.

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
                "function": {
                    "name": call.function_name,
                    "arguments": msgspec.json.encode(call.arguments).decode(),
                },
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
    """The text of a message: its parts' texts, or anything else as JSON."""
    if isinstance(content, list):
        return "\n".join(
            [
                read_text(part.get("text", part)) if isinstance(part, dict) else str(part)
                for part in content
            ]
        )
    if content is None or isinstance(content, str):
        return content or ""
    return msgspec.json.encode(content).decode()


class _AtifAgent(msgspec.Struct):
    name: str | None = None
    model_name: str | None = None


class _Trajectory(msgspec.Struct):
    schema_version: str | None = None
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: msgspec.Raw = msgspec.Raw()
    steps: msgspec.Raw = msgspec.Raw()
    subagent_trajectories: list[msgspec.Raw] | None = None


class _Metrics(msgspec.Struct):
    prompt_tokens: Any = 0
    completion_tokens: Any = 0
    cached_tokens: Any = 0
    cost_usd: Any = None
    extra: Any = None


_decode = msgspec.json.Decoder(_Trajectory).decode
_decode_metrics = msgspec.json.Decoder(_Metrics).decode
_decode_agent = msgspec.json.Decoder(_AtifAgent).decode
_decode_steps = msgspec.json.Decoder(list[TrajectoryStep]).decode
_encode = msgspec.json.Encoder().encode


class Atif(TranscriptReader):
    kind = _NAME

    def read(self, data: bytes, place: FilePlace) -> bool:
        return self._read(data, place, _MOST_NESTED, "")

    def _read(self, data: bytes, place: FilePlace, deeper: int, root: str) -> bool:
        try:
            found = _decode(data)
            if not bytes(found.steps) or not (
                bytes(found.agent) or (found.schema_version or "").startswith(_NAME)
            ):
                return False
            agent = (
                _decode_agent(found.agent) if bytes(found.agent).startswith(b"{") else _AtifAgent()
            )
        except BAD_JSON:
            return False
        try:
            steps = _decode_steps(found.steps)
        except BAD_JSON as error:
            raise UnknownLineError(f"steps: {error}") from None
        session = cut_name(found.trajectory_id or found.session_id)
        root = root or session
        self._follow(
            steps,
            About(self.kind, session, name_folder(place.file), cut_name(agent.name), root),
            agent,
            place,
        )
        for inner in found.subagent_trajectories or () if deeper else ():
            self._read(bytes(inner), place, deeper - 1, root)
        return True

    def _follow(
        self, steps: list[TrajectoryStep], about: About, agent: _AtifAgent, place: FilePlace
    ) -> None:
        run = self._runs.open(about, "messages", tools=any(step.tool_calls for step in steps))
        behind: list[bytes] = []
        for step in steps:
            try:
                messages = [_encode(message) for message in write_step(step)]
            except ValueError as error:
                raise UnknownLineError(str(error)) from None
            if step.source != _AGENT:
                behind += messages
                continue
            run.add(behind)
            behind = messages
            if not step.is_copied_context:
                run.ask(_make_call(step, agent, place))
        run.add(behind)
        run.close()


def _make_call(step: TrajectoryStep, agent: _AtifAgent, place: FilePlace) -> ModelCall:
    try:
        metrics = (
            _decode_metrics(step.metrics) if bytes(step.metrics).startswith(b"{") else _Metrics()
        )
    except BAD_JSON:
        metrics = _Metrics()
    extra = metrics.extra if isinstance(metrics.extra, dict) else {}
    written = extra.get("cache_creation_input_tokens")
    usage = read_usage(
        metrics.prompt_tokens, metrics.completion_tokens, metrics.cached_tokens, written
    )
    cost = metrics.cost_usd
    dollars = (
        float(cost)
        if isinstance(cost, int | float)
        and not isinstance(cost, bool)
        and 0 <= cost < _MOST_DOLLARS
        else None
    )
    return ModelCall(
        place,
        read_time(step.timestamp),
        cut_name(step.model_name or agent.model_name),
        usage,
        dollars=dollars,
    )
