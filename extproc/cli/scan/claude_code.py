"""Transcripts of Claude Code: `~/.claude/projects/<project>/<session>.jsonl`, and `<session>/subagents/agent-<id>.jsonl`.

A line is a message, or about the session. An answer of the model is written as a line for each of its blocks, all with the
same message id, and results of its first calls may stand between them. Older versions write sub-agents into the session's file
(`isSidechain`), interleaved; they are told apart by the message that they answer. Output of `claude -p --output-format
stream-json` is read as well.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from extproc.cli.scan.transcripts import (
    BAD_JSON,
    NO_USAGE,
    About,
    ModelCall,
    Runs,
    ScannedPlace,
    UnknownLineError,
    WatchedRun,
    count_tokens,
    cut_name,
    identify,
    name_folder,
    read_time,
)
from extproc.sessions.rates import Usage

_MOST_OPEN = 64
_MOST_KNOWN = 200_000
_NOT_MESSAGES: Final = frozenset({
    "agent-name", "ai-title", "api-request", "api-request-blob", "api-request-shape", "atis-latch", "attachment",
    "cost-state", "custom-title", "file-history-snapshot", "last-prompt", "mode", "permission-mode", "pr-link", "progress",
    "queue-operation", "rate_limit_event", "result", "saved_hook_context", "started", "stream_event", "summary", "system",
    "tag", "task-summary", "tools-used", "worktree-state",
})  # fmt: skip
_OF_NO_SESSION: Final = frozenset({"summary", "file-history-snapshot"})
_NO_MODEL = "<synthetic>"


class _ClaudeUsage(msgspec.Struct):
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


class _Answer:
    """The newest answer of a conversation, as far as it was read.

    A session that goes on from another has copies of its lines, with another session id. The ids of a message and of its
    request are the same there, and so is its time.
    """

    def __init__(self, identity: str, line: _ClaudeLine, message: _ClaudeMessage, place: ScannedPlace) -> None:
        self.identity = identity
        self.unique = identify(identity, line.agent or "", line.request or line.timestamp or line.uuid or "")
        self.time = read_time(line.timestamp)
        self.model = cut_name(message.model)
        self.place = place
        self.usage = NO_USAGE
        self.blocks: list[bytes] = []
        self.behind: list[bytes] = []

    def make_call(self) -> ModelCall:
        """The call that it answers."""
        return ModelCall(self.place, self.time, self.model, self.usage, identity=self.unique)


class _Open:
    """An open conversation."""

    def __init__(self, about: About) -> None:
        self.about = about
        self.run: WatchedRun | None = None
        self.answer: _Answer | None = None


class ClaudeCode:
    """Reads the lines of a file; see `TranscriptReader`."""

    kind = "Claude Code"

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._open: dict[tuple[str, str], _Open] = {}
        self._sides: dict[str, str] = {}  # of messages in side chains without an agent's id, the first of their chain

    def read(self, data: bytes, place: ScannedPlace) -> bool:
        """See `TranscriptReader`."""
        try:
            line = _decode(data)
        except BAD_JSON:
            return False
        session = line.session or line.session_id
        if line.type is None and line.about_agent:
            return True  # a file beside that of a sub-agent
        if line.type is None or not (session or line.type in _OF_NO_SESSION):
            return False
        if line.type not in {"user", "assistant"}:
            if line.type not in _NOT_MESSAGES:
                raise UnknownLineError(line.type)
            if line.subtype == "compact_boundary":
                self._restart(line, session or "", place)
            return True
        try:
            message = _decode_message(line.message)
        except BAD_JSON:
            raise UnknownLineError(f"{line.type} without a message") from None
        found = self._find(line, session or "", place)
        if line.type == "assistant":
            self._take_answer(found, line, message, place)
        elif found.answer is not None and bytes(message.content):
            found.answer.behind.append(b'{"role":"user","content":%b}' % message.content)
        return True

    def close(self) -> None:
        """See `TranscriptReader`."""
        for found in self._open.values():
            self._end(found)
        self._open.clear()
        self._sides.clear()

    def _find(self, line: _ClaudeLine, session: str, place: ScannedPlace) -> _Open:
        agent = line.agent or line.called_by or (self._find_side(line) if line.side else "")
        found = self._open.get((session, agent))
        if found is None:
            if len(self._open) >= _MOST_OPEN:
                self._end(self._open.pop(next(iter(self._open))))
            name = f"{session}/{agent}" if agent else session
            project = cut_name(line.cwd) or name_folder(place.file)
            about = About(
                self.kind, cut_name(name), project, "claude-code sub-agent" if agent else "claude-code", cut_name(session)
            )
            found = self._open[session, agent] = _Open(about)
        return found

    def _find_side(self, line: _ClaudeLine) -> str:
        """The name of a side chain: the first message of it."""
        uuid = line.uuid or ""
        first = self._sides.get(line.parent or "", uuid)
        if len(self._sides) < _MOST_KNOWN:
            self._sides[uuid] = first
        return first

    def _take_answer(self, found: _Open, line: _ClaudeLine, message: _ClaudeMessage, place: ScannedPlace) -> None:
        if line.error or message.model == _NO_MODEL:
            return
        answer = found.answer
        if answer is None or not message.id or message.id != answer.identity:
            self._flush(found)
            if line.agent_kind:
                found.about = found.about._replace(agent=cut_name(f"claude-code {line.agent_kind}"))
            answer = found.answer = _Answer(message.id or "", line, message, place)
        content = bytes(message.content).strip()
        if content.startswith(b"["):
            content = content[1:-1].strip()
        elif content:
            content = b'{"type":"text","text":%b}' % content
        if content:
            answer.blocks.append(content)
        if message.usage is not None:
            counts = (message.usage.input_tokens, message.usage.output_tokens)
            cached = (message.usage.cache_read_input_tokens, message.usage.cache_creation_input_tokens)
            usage = [count_tokens(count) for count in (*counts, *cached)]
            answer.usage = Usage(*map(max, answer.usage, usage))

    def _flush(self, found: _Open) -> None:
        """The newest answer is complete, and so is what came after it."""
        answer, found.answer = found.answer, None
        if answer is None:
            return
        if found.run is None:
            found.run = self._runs.open(found.about, "messages")
        found.run.ask(answer.make_call())
        said = b'{"role":"assistant","content":[%b]}' % b",".join(answer.blocks)
        found.run.add([said, *answer.behind])

    def _restart(self, line: _ClaudeLine, session: str, place: ScannedPlace) -> None:
        found = self._find(line, session, place)
        self._flush(found)
        if found.run is not None:
            found.run.restart()

    def _end(self, found: _Open) -> None:
        self._flush(found)
        if found.run is not None:
            found.run.close()
