"""Reads Gemini CLI.

`~/.gemini/tmp/<project>/chats/session-<time>-<id>.json`, or `.jsonl` in newer versions.

The first line is about the session, each other one is a message. An answer contains its calls and
their results. It is written again when results arrive, so the newest one is complete when the next
begins. Sub-agents have files below `chats/<session>/`. Resuming a session from a document copies it
into lines with the same ids.
"""

from __future__ import annotations

from pathlib import Path
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
    read_time,
    read_usage,
)
from extproc.cli.scan.watch import Watch

_USER: Final = "user"
_ANSWER: Final = "gemini"
_NOT_MESSAGES: Final = frozenset({"info", "error", "warning"})
_RESPONSE: Final = "functionResponse"
_CHATS: Final = "chats"
_MOST_KNOWN = 200_000


class _CliTokens(msgspec.Struct):
    input: Any = 0
    output: Any = 0
    cached: Any = 0
    thoughts: Any = 0
    tool: Any = 0


class _CliCall(msgspec.Struct):
    name: str = ""
    id: str | None = None
    args: msgspec.Raw = msgspec.Raw(b"{}")
    result: Any = None
    status: str | None = None
    shown: Any = msgspec.field(default=None, name="resultDisplay")


class _CliMessage(msgspec.Struct):
    id: str
    type: str
    content: Any = None
    timestamp: str | None = None
    model: str | None = None
    tokens: _CliTokens | None = None
    calls: list[_CliCall] | None = msgspec.field(default=None, name="toolCalls")


class _CliLine(msgspec.Struct):
    session: str | None = msgspec.field(default=None, name="sessionId")
    project: str | None = msgspec.field(default=None, name="projectHash")
    kind: str | None = None
    id: str | None = None
    type: str | None = None
    messages: list[msgspec.Raw] | None = None
    changed: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="$set")
    rewound: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="$rewindTo")


_decode = msgspec.json.Decoder(_CliLine).decode
_decode_message = msgspec.json.Decoder(_CliMessage).decode
_encode = msgspec.json.Encoder().encode


class GeminiCli(TranscriptReader):
    kind = "Gemini CLI"

    def __init__(self, runs: Runs) -> None:
        super().__init__(runs)
        self._session = ""
        self._run: Watch | None = None
        self._newest: _CliMessage | None = None  # an answer that may be written again
        self._place: FilePlace | None = None
        self._known: set[str] = set()

    def read(self, data: bytes, place: FilePlace) -> bool:
        try:
            line = _decode(data)
        except BAD_JSON:
            return False
        if line.session and line.project:
            if line.session != self._session:  # the head may be repeated
                self.close()
                self._session, self._known = cut_name(line.session), set()
                self._run = self._runs.open(
                    self._describe(place, is_agent=line.kind == "subagent"), "contents"
                )
            for raw in line.messages or ():
                try:
                    self._take(bytes(raw), place)
                except UnknownLineError as unknown:
                    self._runs.pass_over(self.kind, unknown, place)
            return True
        changed, rewound = bytes(line.changed), bytes(line.rewound)
        if self._run is None or not (changed or rewound or (line.id and line.type)):
            return False
        if rewound or b'"messages"' in changed:  # the history is replaced
            self._flush()
            self._run.restart()
        elif not changed:
            self._take(data, place)
        return True

    def close(self) -> None:
        self._flush()
        if self._run is not None:
            self._run.close()

    def _take(self, data: bytes, place: FilePlace) -> None:
        try:
            message = _decode_message(data)
        except BAD_JSON as error:
            raise UnknownLineError(f"a message: {error}", "unread") from None
        if message.type in _NOT_MESSAGES:
            return
        if message.type not in {_USER, _ANSWER}:
            raise UnknownLineError(message.type)
        if self._newest is not None and message.id == self._newest.id:
            self._newest = message
            return
        if message.id in self._known:  # a copy of an older message
            return
        if len(self._known) < _MOST_KNOWN:
            self._known.add(message.id)
        self._flush()
        if message.type == _ANSWER:
            self._newest, self._place = message, place
        elif self._run is not None and self._run.is_asked:
            self._run.add([_encode({"role": "user", "parts": _list_parts(message.content)})])

    def _flush(self) -> None:
        answer, place, self._newest = self._newest, self._place, None
        if answer is None or place is None or self._run is None:
            return
        tokens, calls = answer.tokens or _CliTokens(), answer.calls or []
        usage = read_usage(tokens.input, tokens.output, tokens.cached)
        usage = usage._replace(
            input=usage.input + count_tokens(tokens.tool),
            output=usage.output + count_tokens(tokens.thoughts),
        )
        identity = identify(self.kind, answer.id)
        self._run.ask(
            ModelCall(
                place, read_time(answer.timestamp), cut_name(answer.model), usage, identity=identity
            )
        )
        said = [
            *_list_parts(answer.content),
            *[{"functionCall": _name(each, args=each.args)} for each in calls],
        ]
        messages = [{"role": "model", "parts": said}]
        results = [part for each in calls for part in _list_results(each)]
        if results:
            messages.append({"role": "user", "parts": results})
        self._run.add([_encode(message) for message in messages])

    def _describe(self, place: FilePlace, *, is_agent: bool) -> About:
        """Describe the session by its folders: project, `chats`, and an agent's parent session."""
        folder = Path(place.file).parent
        root = folder.name if is_agent and folder.parent.name == _CHATS else self._session
        while _CHATS in {folder.name, folder.parent.name}:
            folder = folder.parent
        agent = "gemini-cli sub-agent" if is_agent else "gemini-cli"
        return About(self.kind, self._session, cut_name(str(folder)), agent, cut_name(root))


def _name(call: _CliCall, **more: Any) -> dict[str, Any]:  # noqa: ANN401  # JSON
    return {"name": call.name, **({"id": call.id} if call.id else {}), **more}


def _list_parts(content: Any) -> list[Any]:  # noqa: ANN401  # JSON
    """The parts of a message, which may be a text, a part or a list of both."""
    listed = content if isinstance(content, list) else [content]
    return [
        {"text": part} if isinstance(part, str) else part
        for part in listed
        if part is not None and part != ""
    ]


def _list_results(call: _CliCall) -> list[Any]:
    parts = _list_parts(call.result)
    if any(isinstance(part, dict) and _RESPONSE in part for part in parts):
        return parts
    if not parts and call.shown is None:
        return []
    output = parts or call.shown
    return [{_RESPONSE: _name(call, response={"output": output, "status": call.status})}]
