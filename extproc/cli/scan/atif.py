"""Trajectories in ATIF (Agent Trajectory Interchange Format), as Harbor and others write them: one JSON document each."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from extproc.cli.scan.trajectories import TrajectoryStep, write_step
from extproc.cli.scan.transcripts import (
    BAD_JSON,
    About,
    ModelCall,
    Runs,
    ScannedPlace,
    UnknownLineError,
    count_tokens,
    cut_name,
    name_folder,
    read_time,
)
from extproc.sessions.rates import Usage

_NAME: Final = "ATIF"
_AGENT: Final = "agent"
_MOST_NESTED = 8
_MOST_DOLLARS = 1_000_000  # of one call; more is no price


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


class Atif:
    """Reads trajectories; see `TranscriptReader`."""

    kind = _NAME

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def read(self, data: bytes, place: ScannedPlace) -> bool:
        """See `TranscriptReader`."""
        return self._read(data, place, _MOST_NESTED, "")

    def close(self) -> None:
        """See `TranscriptReader`."""

    def _read(self, data: bytes, place: ScannedPlace, deeper: int, root: str) -> bool:
        try:
            found = _decode(data)
            if not bytes(found.steps) or not (bytes(found.agent) or (found.schema_version or "").startswith(_NAME)):
                return False
            agent = _decode_agent(found.agent) if bytes(found.agent).startswith(b"{") else _AtifAgent()
        except BAD_JSON:
            return False
        try:
            steps = _decode_steps(found.steps)
        except BAD_JSON as error:
            raise UnknownLineError(f"steps: {error}") from None
        session = cut_name(found.trajectory_id or found.session_id)
        root = root or session
        self._follow(steps, About(self.kind, session, name_folder(place.file), cut_name(agent.name), root), agent, place)
        for inner in found.subagent_trajectories or () if deeper else ():
            self._read(bytes(inner), place, deeper - 1, root)
        return True

    def _follow(self, steps: list[TrajectoryStep], about: About, agent: _AtifAgent, place: ScannedPlace) -> None:
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


def _make_call(step: TrajectoryStep, agent: _AtifAgent, place: ScannedPlace) -> ModelCall:
    try:
        metrics = _decode_metrics(step.metrics) if bytes(step.metrics).startswith(b"{") else _Metrics()
    except BAD_JSON:
        metrics = _Metrics()
    extra = metrics.extra if isinstance(metrics.extra, dict) else {}
    read, written = count_tokens(metrics.cached_tokens), count_tokens(extra.get("cache_creation_input_tokens"))
    fresh = max(0, count_tokens(metrics.prompt_tokens) - read - written)
    usage = Usage(fresh, count_tokens(metrics.completion_tokens), read, written)
    cost = metrics.cost_usd
    dollars = (
        float(cost) if isinstance(cost, int | float) and not isinstance(cost, bool) and 0 <= cost < _MOST_DOLLARS else None
    )
    return ModelCall(place, read_time(step.timestamp), cut_name(step.model_name or agent.model_name), usage, dollars=dollars)
