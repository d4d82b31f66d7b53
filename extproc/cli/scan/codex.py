"""Reads Codex rollouts: `~/.codex/sessions/<year>/<month>/<day>/rollout-<time>-<thread>.jsonl`.

A line has a payload: an item of the Responses API, or metadata of the session. An answer is all
items of the model up to the first result or another party's message. Rollouts of 2025 have bare
items.

The rollout of a fork begins with its own head, the heads of the threads that it continues, and
copies of their items with new times. So a call is identified by the oldest of these threads and all
answers so far.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from extproc.cli.packed import FilePlace
from extproc.cli.scan.runs import Runs, TranscriptReader
from extproc.cli.scan.transcripts import (
    BAD_JSON,
    NO_USAGE,
    About,
    ModelCall,
    UnknownLineError,
    cut_name,
    identify,
    name_folder,
    read_time,
    read_usage,
)
from extproc.cli.scan.watch import Watch
from extproc.sessions.rates import Usage

_ABOUT: Final = frozenset(
    {"session_meta", "turn_context", "event_msg", "compacted", "world_state", "token_usage_record"}
)
_OURS: Final = ("_call", "_output")
_REASONING: Final = "reasoning"


class _RolloutUsage(msgspec.Struct):
    input_tokens: Any = 0
    cached_input_tokens: Any = 0
    cache_write_input_tokens: Any = 0
    output_tokens: Any = 0


class _Info(msgspec.Struct):
    last_token_usage: _RolloutUsage | None = None


class _Payload(msgspec.Struct):
    type: str | None = None
    role: str | None = None
    id: str | None = None
    forked_from_id: str | None = None
    cwd: str | None = None
    model: str | None = None
    parent_thread_id: str | None = None
    usage: _RolloutUsage | None = None
    info: _Info | None = None


class _RolloutLine(msgspec.Struct):
    type: str | None = None
    timestamp: str | None = None
    payload: msgspec.Raw = msgspec.Raw()
    record_type: str | None = None
    id: str | None = None
    instructions: msgspec.Raw = msgspec.Raw()
    role: str | None = None


_decode = msgspec.json.Decoder(_RolloutLine).decode
_decode_payload = msgspec.json.Decoder(_Payload).decode


class Codex(TranscriptReader):
    kind = "Codex"

    def __init__(self, runs: Runs) -> None:
        super().__init__(runs)
        self._run: Watch | None = None
        self._about = About(self.kind, "", "", "codex")
        self._model = ""
        self._answers = 0  # identifies all answers so far
        self._begin()

    def _begin(self) -> None:
        self._said: list[bytes] = []
        self._behind: list[bytes] = []
        self._usage = NO_USAGE
        self._time = 0
        self._place: FilePlace | None = None

    def read(self, data: bytes, place: FilePlace) -> bool:
        try:
            line = _decode(data)
        except BAD_JSON:
            return False
        if line.type is None or not bytes(line.payload):
            return self._take_bare(data, line, place)
        if line.type != "response_item" and line.type not in _ABOUT:
            if self._about.session:
                raise UnknownLineError(line.type)
            return False
        try:
            payload = _decode_payload(line.payload)
        except BAD_JSON:
            raise UnknownLineError(f"{line.type} with an unusual payload") from None
        if line.type == "response_item":
            self._take_item(
                bytes(line.payload), payload.type or "", payload.role, line.timestamp, place
            )
        else:
            self._take_fact(line.type, payload, place)
        return True

    def _take_bare(self, data: bytes, line: _RolloutLine, place: FilePlace) -> bool:
        """Take a line of 2025, which has no payload."""
        known = self._about.session != ""
        if line.record_type is not None:
            return known
        if line.type is None:
            head = bool(line.id and line.timestamp and bytes(line.instructions))
            if head:
                name = cut_name(line.id)
                self._about = self._about._replace(
                    session=name, project=name_folder(place.file), root=name
                )
                self._answers = identify(name)
            return head
        item = (
            line.type.endswith(_OURS)
            or line.type == _REASONING
            or (line.type == "message" and line.role is not None)
        )
        if item and known:
            self._take_item(data, line.type, line.role, line.timestamp, place)
        return item and known

    def close(self) -> None:
        self._flush()
        if self._run is not None:
            self._run.close()

    def _take_fact(self, kind: str, payload: _Payload, place: FilePlace) -> None:
        if kind == "session_meta" and not self._about.session:  # in a fork, its parent's follows
            name = cut_name(payload.id) or "?"
            project = cut_name(payload.cwd) or name_folder(place.file)
            agent = "codex sub-agent" if payload.parent_thread_id else "codex"
            self._about = About(
                self.kind, name, project, agent, cut_name(payload.parent_thread_id) or name
            )
            self._answers = identify(cut_name(payload.forked_from_id) or name)
        elif kind == "session_meta" and self._run is None and not self._said:
            self._answers = identify(cut_name(payload.id))
        elif kind == "turn_context":
            self._model = cut_name(payload.model) or self._model
        elif kind == "compacted":
            self._flush()
            if self._run is not None:
                self._run.restart()
        # Both kinds of lines have the newest answer's counts, and repeat them after a rate limit.
        elif kind == "token_usage_record" and payload.usage is not None:
            self._usage = _read_counts(payload.usage)
        elif (
            payload.type == "token_count"
            and payload.info is not None
            and payload.info.last_token_usage is not None
        ):
            self._usage = _read_counts(payload.info.last_token_usage)

    def _take_item(
        self, item: bytes, kind: str, role: str | None, timestamp: str | None, place: FilePlace
    ) -> None:
        ours = (
            role == "assistant"
            if kind == "message"
            else kind == _REASONING or kind.endswith("_call")
        )
        if not ours:
            if self._said:
                self._behind.append(item)
            return
        if self._behind:
            self._flush()
        self._place = self._place or place
        self._time = self._time or read_time(timestamp)
        self._answers = identify(self._answers.to_bytes(8, "big"), item)
        self._said.append(item)

    def _flush(self) -> None:
        if self._place is not None:
            if self._run is None:
                self._run = self._runs.open(self._about, "input")
            self._run.ask(
                ModelCall(self._place, self._time, self._model, self._usage, identity=self._answers)
            )
            self._run.add([*self._said, *self._behind])
        self._begin()


def _read_counts(usage: _RolloutUsage) -> Usage:
    cached, written = usage.cached_input_tokens, usage.cache_write_input_tokens
    return read_usage(usage.input_tokens, usage.output_tokens, cached, written)
