"""Reads Claude Code.

`~/.claude/projects/<project>/<session>.jsonl`, and `<session>/subagents/agent-<id>.jsonl`.

A line is a message, or metadata of the session. An answer has a line for each of its blocks, with
one message id; results of its first calls may be in between. Older versions interleave sub-agents
with the session (`isSidechain`); the message that each answers tells them apart. Output of `claude
-p --output-format stream-json` is read as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from extproc.cli.packed import FilePlace
from extproc.cli.scan.runs import Runs, TranscriptReader
from extproc.cli.scan.transcripts import (
    BAD_JSON,
    About,
    ModelCall,
    UnknownLineError,
    count_tokens,
    cut_name,
    identify,
    name_folder,
    read_time,
)
from extproc.cli.scan.watch import Watch
from extproc.sessions.rates import Usage

_MOST_OPEN = 64
_MOST_KNOWN = 200_000
_NOT_MESSAGES: Final = frozenset(
    {
        "agent-name",
        "ai-title",
        "api-request",
        "api-request-blob",
        "api-request-shape",
        "atis-latch",
        "attachment",
        "cost-state",
        "custom-title",
        "file-history-snapshot",
        "last-prompt",
        "mode",
        "permission-mode",
        "pr-link",
        "progress",
        "queue-operation",
        "rate_limit_event",
        "result",
        "saved_hook_context",
        "started",
        "stream_event",
        "summary",
        "system",
        "tag",
        "task-summary",
        "tools-used",
        "worktree-state",
    }
)
_OF_NO_SESSION: Final = frozenset({"summary", "file-history-snapshot"})
_NO_MODEL = "<synthetic>"


class _ClaudeUsage(msgspec.Struct):  # in the order of `Usage`
    input_tokens: Any = 0
    output_tokens: Any = 0
    cache_read_input_tokens: Any = 0
    cache_creation_input_tokens: Any = 0


class _ClaudeMessage(msgspec.Struct):
    id: str | None = None
    role: str | None = None
    model: str | None = None
    content: msgspec.Raw = msgspec.Raw()
    usage: _ClaudeUsage | None = None


class _ClaudeLine(msgspec.Struct):
    type: str | None = None
    subtype: str | None = None
    message: msgspec.Raw = msgspec.Raw()
    timestamp: str | None = None
    cwd: str | None = None
    uuid: str | None = None
    request: str | None = msgspec.field(default=None, name="requestId")
    parent: str | None = msgspec.field(default=None, name="parentUuid")
    session: str | None = msgspec.field(default=None, name="sessionId")
    session_id: str | None = None
    agent: str | None = msgspec.field(default=None, name="agentId")
    agent_kind: str | None = msgspec.field(default=None, name="attributionAgent")
    about_agent: str | None = msgspec.field(default=None, name="agentType")
    side: bool | None = msgspec.field(default=None, name="isSidechain")
    error: bool | None = msgspec.field(default=None, name="isApiErrorMessage")
    called_by: str | None = msgspec.field(default=None, name="parent_tool_use_id")


_decode = msgspec.json.Decoder(_ClaudeLine).decode
_decode_message = msgspec.json.Decoder(_ClaudeMessage).decode


@dataclass
class _Answer:
    """The newest answer of a conversation, which may be incomplete."""

    identity: str
    call: ModelCall
    blocks: list[bytes] = field(default_factory=list)
    behind: list[bytes] = field(default_factory=list)


@dataclass
class _Conversation:
    run: Watch
    answer: _Answer | None = None


class ClaudeCode(TranscriptReader):
    kind = "Claude Code"

    def __init__(self, runs: Runs) -> None:
        super().__init__(runs)
        self._open: dict[tuple[str, str], _Conversation] = {}
        self._sides: dict[
            str, str
        ] = {}  # the first message of each message's side chain, if it has no agent id

    def read(self, data: bytes, place: FilePlace) -> bool:
        try:
            line = _decode(data)
        except BAD_JSON:
            return False
        session = line.session or line.session_id or ""
        if line.type is None and line.about_agent:
            return True  # metadata of a sub-agent
        if line.type is None or not (session or line.type in _OF_NO_SESSION):
            return False
        if line.type not in {"user", "assistant"}:
            if line.type not in _NOT_MESSAGES:
                raise UnknownLineError(line.type)
            if line.subtype == "compact_boundary":
                found = self._find(line, session, place)
                _flush(found)
                found.run.restart()
            return True
        try:
            message = _decode_message(line.message)
        except BAD_JSON:
            raise UnknownLineError(f"{line.type} without a message") from None
        found = self._find(line, session, place)
        if line.type == "assistant":
            _take_answer(found, line, message, place)
        elif found.answer is not None and bytes(message.content):
            found.answer.behind.append(b'{"role":"user","content":%b}' % message.content)
        return True

    def close(self) -> None:
        for found in self._open.values():
            _flush(found)
            found.run.close()

    def _find(self, line: _ClaudeLine, session: str, place: FilePlace) -> _Conversation:
        agent = line.agent or line.called_by or (self._find_side(line) if line.side else "")
        found = self._open.get((session, agent))
        if found is None:
            if len(self._open) >= _MOST_OPEN:
                oldest = self._open.pop(next(iter(self._open)))
                _flush(oldest)
                oldest.run.close()
            name = f"{session}/{agent}" if agent else session
            project = cut_name(line.cwd) or name_folder(place.file)
            kind = "claude-code sub-agent" if agent else "claude-code"
            run = self._runs.open(
                About(self.kind, cut_name(name), project, kind, cut_name(session)), "messages"
            )
            found = self._open[session, agent] = _Conversation(run)
        return found

    def _find_side(self, line: _ClaudeLine) -> str:
        """The name of a side chain: its first message."""
        uuid = line.uuid or ""
        first = self._sides.get(line.parent or "", uuid)
        if len(self._sides) < _MOST_KNOWN:
            self._sides[uuid] = first
        return first


def _take_answer(
    found: _Conversation, line: _ClaudeLine, message: _ClaudeMessage, place: FilePlace
) -> None:
    if line.error or message.model == _NO_MODEL:
        return
    answer = found.answer
    if answer is None or not message.id or message.id != answer.identity:
        _flush(found)
        if line.agent_kind:
            found.run.about = found.run.about._replace(
                agent=cut_name(f"claude-code {line.agent_kind}")
            )
        # A session that continues another has copies of its lines with a new session id, but the
        # same ids of messages and requests, and the same times.
        unique = identify(
            message.id or "", line.agent or "", line.request or line.timestamp or line.uuid or ""
        )
        call = ModelCall(place, read_time(line.timestamp), cut_name(message.model), identity=unique)
        answer = found.answer = _Answer(message.id or "", call)
    content = bytes(message.content).strip()
    if content.startswith(b"["):
        content = content[1:-1].strip()
    elif content:
        content = b'{"type":"text","text":%b}' % content
    if content:
        answer.blocks.append(content)
    if message.usage is not None:
        counts = map(count_tokens, msgspec.structs.astuple(message.usage))
        answer.call = answer.call._replace(usage=Usage(*map(max, answer.call.usage, counts)))


def _flush(found: _Conversation) -> None:
    """Record the newest answer and the messages after it, which are complete."""
    answer, found.answer = found.answer, None
    if answer is not None:
        found.run.ask(answer.call)
        found.run.add(
            [b'{"role":"assistant","content":[%b]}' % b",".join(answer.blocks), *answer.behind]
        )
