"""Similarity `mcp`: tools that agents call over HTTP (MCP), and messages that they send to each other (A2A).

Both are JSON-RPC 2.0. What identifies one request alone (`id`, `params._meta`, the ids of a message) is never compared. What
neither calls a tool nor sends a message is not counted: handshakes, lists, notifications, pings, answers, streams.

An HTTP error ends a session, and no model reads it. So a refusal is an answer of the protocol, under the request's own id.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from extproc.apis.answers.rpc import ERROR_CODE, read_id
from extproc.decision import COMPLETION, Advice, Framed, Outcome
from extproc.detectors.actions import MAX_NAME
from extproc.detectors.base import Similarity, format_duration
from extproc.detectors.keys import SimilarityKeys, ToolsKeys
from extproc.detectors.tools import Limit, find_window_errors
from extproc.objects import JsonObject, Place
from extproc.request.document import (
    ABSENT,
    Document,
    Json,
    NotCounted,
    check_containers,
    decode_json,
    open_value,
    walk,
    write_canonical,
)
from extproc.request.quoting import quote

_TOOL_CALL = "tools/call"  # MCP, since its first revision
_MESSAGES = frozenset({"message/send", "message/stream", "SendMessage", "SendStreamingMessage"})  # A2A 0.2 and later, A2A 1.0

_ANSWERS = ("inputResponses", "requestState")
"""Of a call that is sent again because the server asked the user something (MCP 2026-07-28): what was answered is new."""

_EVENT_STREAM = "text/event-stream"
_JSON = "application/json"
_TAKES_JSON = (_JSON, "application/*", "*/*")

_SEPARATOR = b"\xff"  # never in UTF-8

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_batch = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Call:
    """A tool's call, or a message to another agent.

    Attributes:
        tool: its name, empty for a message.
        limit: what holds for that tool.
        threshold: of it.
        tools: the tool, none for a message.
    """

    __slots__ = ("_id", "limit", "threshold", "tool", "tools")

    def __init__(self, tool: str, limit: Limit, identity: bytes | None) -> None:
        """`identity` is the request's id as it was sent, None where nothing can be answered under it."""
        self.tool = tool
        self.limit = limit
        self.threshold: int | None = limit.threshold
        self.tools: tuple[str, ...] = (tool,) if tool else ()
        self._id = identity

    def tell(self, outcome: Outcome, method: str, path: str) -> str:  # the tool says more than the path
        """See `Similarity`; what the tool was called with stays out of it."""
        advice = self.advise(outcome, method, path)
        reason = f" {advice.reason}" if advice.reason else ""
        return f"Loop detected: {advice.what}, and was refused.{reason} Repeating it will be refused again. {advice.instead}"

    def advise(self, outcome: Outcome, method: str, path: str) -> Advice:  # noqa: ARG002  # as above
        """See `Similarity`."""
        if self.tool:
            what = f"{quote(self.tool)} has been called {outcome.count} times with the same arguments"
            progress = "use other arguments"
        else:
            what, progress = f"this same message has been sent {outcome.count} times", "send a different one"
        instead = f"To continue, {progress}, try another way, or finish with the result you have so far."
        return Advice(f"{what} within {format_duration(outcome.span_ms)}", self.limit.reason.strip(), instead)

    def frame(self, message: str, accept: str) -> Framed | None:
        """An answer of the protocol: as a tool's result, which the model reads, or as the error of a message."""
        if self._id is None:
            return None
        answer, accept = self._write_answer(message), accept.lower()
        if _EVENT_STREAM in accept and not any(media in accept for media in _TAKES_JSON):
            return Framed(200, _EVENT_STREAM, b"event: message\ndata: " + answer + b"\n\n")
        return Framed(200, _JSON, answer)

    def _write_answer(self, message: str) -> bytes:
        field: tuple[str, Json] = ("error", {"code": ERROR_CODE, "message": message})
        if self.tool:
            content = [{"type": "text", "text": message}]
            field = ("result", {"resultType": "complete", "content": content, "isError": True})
        name, value = field
        return b'{"jsonrpc": "2.0", "id": %s, "%s": %s}' % (self._id, name.encode(), json.dumps(value).encode())


class Mcp(Similarity):
    """A detector's `tools`, ready to look into JSON-RPC requests."""

    keys: ClassVar[type[JsonObject]] = ToolsKeys
    looks: ClassVar[bool] = True

    def __init__(self, keys: SimilarityKeys) -> None:
        """See `Similarity`."""
        self._limits = keys.make_limits(self.default_threshold)

    def compare(self, document: Document) -> tuple[bytes, None]:
        """The tool and its arguments, or the parts of a message; see `Similarity`."""
        tool, params = _read_call(_read_request(document))
        if not tool:
            return _spell_message(params), None
        if self._limits.of([tool[:MAX_NAME]]).allow:
            raise NotCounted("allowed_tool")
        return tool.encode() + _SEPARATOR + _spell_arguments(params), None

    def find_subject(self, document: Document) -> Call:
        """The call itself; see `Similarity`."""
        request = _read_request(document)
        tool, _ = _read_call(request)
        shown = tool[:MAX_NAME]
        return Call(shown, self._limits.of([shown]) if shown else self._limits.of([]), read_id(request.get("id", ABSENT)))

    def show(self, document: Document) -> list[str]:
        """See `Similarity`."""
        compared, _ = self.compare(document)
        return [f"{'message' if compared.startswith(_SEPARATOR) else ''}{compared.replace(_SEPARATOR, b' | ').decode()}"]

    @staticmethod
    def find_errors(loop: dict[str, Any], place: Place) -> Iterator[tuple[Place, str]]:
        """Keys that mean nothing here; see `Similarity`."""
        yield from find_window_errors(loop, place)
        if loop.get("refuse_as") == COMPLETION:
            yield (
                (*place, "refuse_as"),
                "refuse_as must not be completion with similarity mcp, whose refusals are answers already",
            )


def _read_request(document: Document) -> dict[str, msgspec.Raw]:
    """The fields of a request.

    Raises:
        NotCounted: there is none in the body, or there are several.
    """
    if not len(document):
        raise NotCounted("not_a_call")  # a stream is opened, or a session closed
    data = document.data()
    if data.lstrip()[:1] == b"[":
        raise NotCounted("batch" if _holds_call(data) else "not_a_call")
    return _read_fields(data)


def _read_fields(value: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    """The fields of an object.

    Raises:
        NotCounted: it is none.
    """
    if value is ABSENT:
        raise NotCounted("not_a_call")
    try:
        fields: dict[str, msgspec.Raw] = decode_json(value, _decode_fields)
    except msgspec.ValidationError:
        raise NotCounted("not_a_call") from None
    return fields


def _holds_call(data: bytes) -> bool:
    """Whether some request of a batch is a call."""
    batch = decode_json(data, _decode_batch)
    walk(len(batch))
    return any(_is_call(entry) for entry in batch)


def _is_call(entry: msgspec.Raw) -> bool:
    try:
        _read_call(_read_fields(entry))
    except NotCounted:
        return False
    return True


def _read_call(request: dict[str, msgspec.Raw]) -> tuple[str, dict[str, msgspec.Raw]]:
    """The name of the tool that is called, empty for a message, and the parameters.

    Raises:
        NotCounted: it is neither, or nothing that a server would take for one.
    """
    method = open_value(request.get("method", ABSENT))
    if method != _TOOL_CALL and not (isinstance(method, str) and method in _MESSAGES):
        raise NotCounted("not_a_call")
    params = _read_fields(request.get("params", ABSENT))
    if method != _TOOL_CALL:
        return "", params
    tool = open_value(params.get("name", ABSENT))
    if not isinstance(tool, str) or not tool:
        raise NotCounted("not_a_call")
    return tool, params


def _spell_arguments(params: dict[str, msgspec.Raw]) -> bytes:
    """In one spelling, with what the server has been answered; null and nothing are no arguments, too."""
    arguments = _open_bounded(params.get("arguments", ABSENT))
    spelled = write_canonical({} if arguments is None else arguments)
    answers = {name: _open_bounded(params[name]) for name in _ANSWERS if name in params}
    return spelled + _SEPARATOR + write_canonical(answers) if answers else spelled


def _spell_message(params: dict[str, msgspec.Raw]) -> bytes:
    """What a message says, without the metadata of its parts."""
    parts = _open_bounded(_read_fields(params.get("message", ABSENT)).get("parts", ABSENT))
    if not isinstance(parts, list):
        raise NotCounted("not_a_call")
    walk(len(parts))
    return _SEPARATOR + write_canonical([_without_metadata(part) for part in parts])


def _without_metadata(part: Json) -> Json:
    if not isinstance(part, dict):
        return part
    return {name: value for name, value in part.items() if name != "metadata"}


def _open_bounded(value: msgspec.Raw) -> Json:
    check_containers(bytes(value))
    return open_value(value)
