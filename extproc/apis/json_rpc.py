"""JSON-RPC 2.0: tool calls over HTTP (MCP), and messages between agents (A2A).

An HTTP error would end an MCP session, and no model would read it. So a refused call is answered in
the protocol, under its own id; see `frame_answer`. Other requests are refused with a JSON-RPC
error.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from extproc.apis.api import EVENTS, JSON, Api, Endpoint, Question, Refusal
from extproc.decision import Framed
from extproc.request.document import (
    ABSENT,
    Document,
    Json,
    NotCounted,
    check_members,
    decode_json,
    open_value,
    walk,
    write_canonical,
)

MAX_ID: Final = 512
"""Maximum length of an id that a refusal repeats, in bytes of JSON; a UUID has 38."""

_ERROR_CODE: Final = -32000
"""One of the codes that JSON-RPC reserves for servers (section 5.1); A2A's start at -32001."""

_TOOL_CALL: Final = "tools/call"  # MCP, since its first revision
_MESSAGES: Final = frozenset(
    # A2A 0.2 and later, A2A 1.0
    {"message/send", "message/stream", "SendMessage", "SendStreamingMessage"}
)

_ANSWERS: Final = ("inputResponses", "requestState")
"""Keys of a call that is repeated because the server asked the user something (MCP 2026-07-28). The
user's answer is new."""

_TAKES_JSON: Final = (JSON, "application/*", "*/*")

_SEPARATOR: Final = b"\xff"  # never in UTF-8

_decode_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_batch: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode

_CHECKED_SINCE: Final = "2026-07-28"
"""The first version of MCP whose servers must refuse a request if these headers contradict the
body."""

_VERSION: Final = re.compile(r"\d{4}-\d\d-\d\d")
_ENCODED: Final = re.compile(r"=\?base64\?(.*)\?=", re.IGNORECASE)

Fields = dict[str, msgspec.Raw]


class McpHeaders(NamedTuple):
    """The call in a body, according to the headers `Mcp-Method` and `Mcp-Name` (MCP 2026-07-28).

    Attributes:
        method: the JSON-RPC method.
        name: the name of the tool, prompt or resource; may be empty.
        checked: the client speaks a version whose servers refuse a request if headers and body
            disagree.
    """

    method: str
    name: str
    checked: bool

    @property
    def is_call(self) -> bool:
        """Whether it calls a tool or sends a message to another agent."""
        return self.method == _TOOL_CALL or self.method in _MESSAGES


def read_claim(headers: Mapping[str, bytes]) -> McpHeaders | None:
    """What the headers claim; None if they are missing."""
    method = headers.get("mcp-method")
    if method is None:
        return None
    version = headers.get("mcp-protocol-version", b"").decode("latin-1")
    name = _read_name(headers.get("mcp-name", b"").decode("utf-8", "replace"))
    return McpHeaders(
        method.decode("latin-1"),
        name,
        bool(_VERSION.fullmatch(version)) and version >= _CHECKED_SINCE,
    )


def _read_name(text: str) -> str:
    """A name; clients encode it in base64 if a header cannot contain it."""
    encoded = _ENCODED.fullmatch(text)
    if encoded is None:
        return text
    try:
        return b64decode(encoded[1], validate=True).decode()
    except ValueError:
        return text


def contradicts(claim: McpHeaders, document: Document) -> bool:
    """Whether a body contradicts the headers.

    A body that is not a single request contradicts nothing, because no server accepts it.
    """
    try:
        request = _read_fields(document.data()) if len(document) else {}
        method = open_value(request.get("method", ABSENT))
        if not isinstance(method, str):
            return False
        if method != claim.method or method != _TOOL_CALL:
            return method != claim.method
        return bool(
            open_value(_read_fields(request.get("params", ABSENT)).get("name", ABSENT))
            != claim.name
        )
    except NotCounted:
        return False


def read_call(document: Document) -> tuple[str, Fields, msgspec.Raw]:
    """Read the call in a request.

    Returns:
        the name of the tool (empty for a message), the parameters, and the request's id; see
        `read_id`.

    Raises:
        NotCounted: it is neither a tool call nor a message (but a handshake, list, notification,
            ping, answer or stream), is invalid for servers, or is one of several.
    """
    if not len(document):
        raise NotCounted("not_a_call")  # a stream is opened, or a session closed
    data = document.data()
    if data.lstrip()[:1] == b"[":
        raise NotCounted("batch" if _holds_call(data) else "not_a_call")
    request = _read_fields(data)
    tool, params = _read_params(request)
    return tool, params, request.get("id", ABSENT)


def read_id(request_id: msgspec.Raw) -> bytes | None:
    """A request's id as sent; None for a notification, or if an answer cannot repeat it.

    Raises:
        NotCounted: it is not JSON.
    """
    sent = bytes(request_id)
    if not sent or len(sent) > MAX_ID:
        return None
    return None if isinstance(decode_json(sent), (bool, dict, list)) else sent


def spell_call(tool: str, params: Fields) -> bytes:
    """The canonical form: a tool and its arguments, or a separator and the parts of a message.

    Values that identify one request (`id`, `params._meta`, a message's ids) are omitted.

    Raises:
        NotCounted: it is unreadable or too large.
    """
    return tool.encode() + _SEPARATOR + (_spell_arguments(params) if tool else _spell_parts(params))


def show_call(spelled: bytes) -> str:
    """Format the result of `spell_call` for people."""
    kind = "message" if spelled.startswith(_SEPARATOR) else ""
    return f"{kind}{spelled.replace(_SEPARATOR, b' | ').decode()}"


def frame_answer(identity: bytes, tool: str, message: str, accept: str) -> Framed:
    """Answer as a tool's result, which the model reads, or with an error for a message.

    Args:
        identity: the request's id as sent.
        tool: the called tool; empty for a message.
        message: for the model.
        accept: the media types that the client accepts.
    """
    field: tuple[str, Json] = ("error", {"code": _ERROR_CODE, "message": message})
    if tool:
        content = [{"type": "text", "text": message}]
        field = ("result", {"resultType": "complete", "content": content, "isError": True})
    name, value = field
    answer, accept = _write(identity, name, value), accept.lower()
    if EVENTS in accept and not any(media in accept for media in _TAKES_JSON):
        return Framed(200, EVENTS, b"event: message\ndata: " + answer + b"\n\n")
    return Framed(200, JSON, answer)


def _write_error(refusal: Refusal, question: Question) -> Framed:
    """Write an error with the request's id, or null if it has no valid one (JSON-RPC 2.0, 5)."""
    try:
        identity = read_id(question.find("id"))
    except NotCounted:
        identity = None
    data = {"type": refusal.reason, "code": refusal.code, **refusal.detail}
    error = {"code": _ERROR_CODE, "message": refusal.message, "data": data}
    return Framed(refusal.status, JSON, _write(identity or b"null", "error", error))


def _write(identity: bytes, name: str, value: Json) -> bytes:
    return b'{"jsonrpc": "2.0", "id": %s, "%s": %s}' % (
        identity,
        name.encode(),
        json.dumps(value).encode(),
    )


def _read_fields(value: bytes | msgspec.Raw) -> Fields:
    """The fields of an object.

    Raises:
        NotCounted: the value is not an object.
    """
    if value is ABSENT:
        raise NotCounted("not_a_call")
    try:
        fields: Fields = decode_json(value, _decode_fields)
    except msgspec.ValidationError:
        raise NotCounted("not_a_call") from None
    return fields


def _holds_call(data: bytes) -> bool:
    """Whether any request of a batch is a call."""
    batch = decode_json(data, _decode_batch)
    walk(len(batch))
    return any(_is_call(entry) for entry in batch)


def _is_call(entry: msgspec.Raw) -> bool:
    try:
        _read_params(_read_fields(entry))
    except NotCounted:
        return False
    return True


def _read_params(request: Fields) -> tuple[str, Fields]:
    """The name of the called tool (empty for a message), and the parameters.

    Raises:
        NotCounted: it is neither, or is invalid for servers.
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


def _spell_arguments(params: Fields) -> bytes:
    """Arguments and user's answers in canonical form; null and no arguments equal empty ones."""
    arguments = _open_bounded(params.get("arguments", ABSENT))
    spelled = write_canonical({} if arguments is None else arguments)
    answers = {name: _open_bounded(params[name]) for name in _ANSWERS if name in params}
    return spelled + _SEPARATOR + write_canonical(answers) if answers else spelled


def _spell_parts(params: Fields) -> bytes:
    """The parts of a message in canonical form, without their metadata."""
    parts = _open_bounded(_read_fields(params.get("message", ABSENT)).get("parts", ABSENT))
    if not isinstance(parts, list):
        raise NotCounted("not_a_call")
    walk(len(parts))
    return write_canonical([_without_metadata(part) for part in parts])


def _without_metadata(part: Json) -> Json:
    if not isinstance(part, dict):
        return part
    return {name: value for name, value in part.items() if name != "metadata"}


def _open_bounded(value: msgspec.Raw) -> Json:
    check_members(bytes(value))
    return open_value(value)


_REQUEST: Final = Endpoint(_write_error)

API: Final = Api(
    headers={"mcp-protocol-version": _REQUEST}, keys={("jsonrpc",): _REQUEST}, asked=("id",)
)
