"""Reads OpenTelemetry exports (OTLP JSON): spans of model calls, by the GenAI semantic conventions.

A span has the request's messages and tokens. Messages are in `gen_ai.input.messages`, as attributes
or in an event (`gen_ai.client.inference.operation.details`), in an event for each message
(`gen_ai.user.message`), or in numbered attributes (`gen_ai.prompt.0.role`, OpenLLMetry;
`llm.input_messages.0.message.role`, OpenInference). They are converted to a chat completions body,
which is read like a logged request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from extproc.cli.packed import FilePlace
from extproc.cli.scan.atif import read_text
from extproc.cli.scan.requests import FollowedRequests
from extproc.cli.scan.runs import Runs, TranscriptReader
from extproc.cli.scan.transcripts import (
    BAD_JSON,
    About,
    ModelCall,
    UnknownLineError,
    cut_name,
    mend_value,
    name_folder,
    read_time,
    read_usage,
)
from extproc.sessions.rates import estimate_tokens

_INPUT: Final = "gen_ai.input.messages"
_MESSAGE_EVENT: Final = re.compile(r"gen_ai\.(system|user|assistant|tool)\.message")
_NUMBERED: Final = re.compile(
    r"(?:gen_ai\.prompt|llm\.input_messages)\.(\d{1,5})\.(?:message\.)?(.+)"
)
_NUMBERED_CALL: Final = re.compile(
    r"tool_calls\.(\d{1,4})\.(?:tool_call\.)?(?:function\.)?(id|name|arguments)"
)
_MODELS: Final = ("gen_ai.response.model", "gen_ai.request.model", "llm.model_name")
_CALLED: Final = (*_MODELS, "ai.model.id", "gen_ai.system", "ls_model_name")
"""Attributes of spans of model calls."""

_OTHER_SPANS: Final = ("execute_tool", "invoke_agent", "create_agent", "embeddings")
_SPEAKING: Final = re.compile(
    r"(?:^|[._])(?:(?:all_)?messages(?:_events)?|events|prompt|llm_request|chat_history|chat_ctx|inputs?[._]value)$"
)
"""Attributes in which programs write conversations in their own formats."""

_CALLING: Final = re.compile("tool|call|func", re.IGNORECASE)
_SERVER_CALLS: Final = frozenset({"server_tool_call", "server_tool_call_response"})
_AGENTS: Final = ("gen_ai.agent.name", "agent.name")
_SESSIONS: Final = ("gen_ai.conversation.id", "session.id")
_COUNTS: Final = {
    "input": ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt"),
    "output": (
        "gen_ai.usage.output_tokens",
        "gen_ai.usage.completion_tokens",
        "llm.token_count.completion",
    ),
    "read": ("gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_read_input_tokens"),
    "written": (
        "gen_ai.usage.cache_creation.input_tokens",
        "gen_ai.usage.cache_creation_input_tokens",
    ),
}
_DEEPEST = 32
_MOST_FOREIGN = 8


class _Attributed(msgspec.Struct):
    key: str = ""
    value: Any = None


class _Event(msgspec.Struct):
    name: str | None = None
    event_name: str | None = msgspec.field(default=None, name="eventName")
    time: Any = msgspec.field(default=None, name="timeUnixNano")
    trace: str | None = msgspec.field(default=None, name="traceId")
    attributes: list[_Attributed] | None = None
    body: Any = None


class _Span(msgspec.Struct):
    trace: str | None = msgspec.field(default=None, name="traceId")
    start: Any = msgspec.field(default=None, name="startTimeUnixNano")
    attributes: list[_Attributed] | None = None
    events: list[_Event] | None = None


class _Scope(msgspec.Struct):
    spans: list[_Span] | None = None
    records: list[_Event] | None = msgspec.field(default=None, name="logRecords")


class _Resource(msgspec.Struct):
    attributes: list[_Attributed] | None = None


class _Scopes(msgspec.Struct):
    resource: _Resource | None = None
    spans: list[_Scope] | None = msgspec.field(default=None, name="scopeSpans")
    logs: list[_Scope] | None = msgspec.field(default=None, name="scopeLogs")


class _Export(msgspec.Struct):
    spans: list[_Scopes] | None = msgspec.field(default=None, name="resourceSpans")
    logs: list[_Scopes] | None = msgspec.field(default=None, name="resourceLogs")
    metrics: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="resourceMetrics")


class _Call(NamedTuple):
    time: int
    attributes: Mapping[str, Any]
    events: Sequence[_Event]
    trace: str
    service: Mapping[str, Any]


_decode = msgspec.json.Decoder(_Export).decode
_any = msgspec.json.Decoder()
_encode = msgspec.json.Encoder().encode


class Otlp(TranscriptReader):
    kind = "OTLP"

    def __init__(self, runs: Runs) -> None:
        super().__init__(runs)
        self._followed = FollowedRequests(runs)
        self._read_any = False
        self._foreign: dict[str, FilePlace] = {}

    def read(self, data: bytes, place: FilePlace) -> bool:
        if not any(
            key in data[:4096] or key in data
            for key in (b'"resourceSpans"', b'"resourceLogs"', b'"resourceMetrics"')
        ):
            return False
        try:
            export = _decode(data)
        except msgspec.ValidationError as error:
            raise UnknownLineError(f"an unusual export: {error}") from None
        except BAD_JSON:
            return False
        if export.spans is None and export.logs is None:
            return bool(bytes(export.metrics))
        found: list[_Call] = []
        for scopes in [*(export.spans or ()), *(export.logs or ())]:
            service = _convert_attributes(scopes.resource.attributes if scopes.resource else None)
            found += [
                _Call(
                    read_time(span.start),
                    _convert_attributes(span.attributes),
                    span.events or (),
                    span.trace or "",
                    service,
                )
                for scope in scopes.spans or ()
                for span in scope.spans or ()
            ]
            found += [
                _Call(
                    read_time(record.time),
                    _convert_attributes(record.attributes),
                    (),
                    record.trace or "",
                    service,
                )
                for scope in scopes.logs or ()
                for record in scope.records or ()
            ]
        for call in sorted(found, key=lambda each: each.time):
            try:
                self._take(call, place)
            except UnknownLineError as unknown:
                self._runs.pass_over(self.kind, unknown, place)
        return True

    def close(self) -> None:
        if not self._read_any:  # otherwise the other spans repeat the calls
            for key, place in self._foreign.items():
                self._runs.pass_over(
                    self.kind,
                    UnknownLineError(f"spans with messages in {key} alone", "unread"),
                    place,
                )
        self._followed.close()

    def _take(self, span: _Call, place: FilePlace) -> None:
        attributes = span.attributes
        messages = _list_messages(attributes, span.events)
        if not messages:
            if (
                _find(attributes, _CALLED) is not None
                and attributes.get("gen_ai.operation.name") not in _OTHER_SPANS
            ):
                self._read_any = True
                where = ", ".join(_list_speaking(attributes))
                form = (
                    f"messages in {where}" if where else "no messages, or messages in another form"
                )
                raise UnknownLineError(f"a call of a model with {form}", "unread")
            for key in _list_speaking(attributes)[: _MOST_FOREIGN - len(self._foreign)]:
                self._foreign.setdefault(key, place)
            return  # not a model call
        self._read_any = True
        calling = "gen_ai.tool.definitions" in attributes or any(
            "tool_calls" in message for message in messages
        )
        body = _encode({"messages": messages, **({"tools": [{"name": "any"}]} if calling else {})})
        counts = {name: _number(_find(attributes, keys)) for name, keys in _COUNTS.items()}
        usage = read_usage(counts["input"], counts["output"], counts["read"], counts["written"])
        if counts["input"] is None:
            usage = usage._replace(input=estimate_tokens(len(body)))
        estimated = counts["input"] is None or counts["output"] is None
        call = ModelCall(place, span.time, cut_name(_find(attributes, _MODELS)), usage, estimated)
        project = cut_name(span.service.get("service.name")) or name_folder(place.file)
        agent = cut_name(_find(attributes, _AGENTS))
        session = cut_name(_find(attributes, _SESSIONS)) or cut_name(span.trace)
        self._followed.take(body, call, About(self.kind, session, project, agent))


def _list_speaking(attributes: Mapping[str, Any]) -> list[str]:
    """Attributes that seem to contain a conversation."""
    return [
        key
        for key, value in attributes.items()
        if _SPEAKING.search(key) and isinstance(_parse(value), list | dict)
    ]


def _find(attributes: Mapping[str, Any], names: Iterable[str]) -> Any:  # noqa: ANN401  # JSON
    return next((attributes[name] for name in names if attributes.get(name) is not None), None)


def _number(value: Any) -> Any:  # noqa: ANN401  # JSON
    """A number that may be a string, as OTLP writes integers."""
    return int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 20 else value  # noqa: PLR2004  # digits of 64 bits


def _convert_attributes(attributes: Iterable[_Attributed] | None) -> dict[str, Any]:
    return {each.key: _convert_any_value(each.value, _DEEPEST) for each in attributes or ()}


def _convert_any_value(value: Any, deeper: int) -> Any:  # noqa: ANN401  # JSON
    if not isinstance(value, dict) or not deeper:
        return value
    for kind, inner in value.items():
        if kind == "arrayValue" and isinstance(inner, dict):
            listed = inner.get("values")
            return (
                [_convert_any_value(each, deeper - 1) for each in listed]
                if isinstance(listed, list)
                else []
            )
        if kind == "kvlistValue" and isinstance(inner, dict):
            pairs = inner.get("values")
            named = (
                [pair for pair in pairs if isinstance(pair, dict)]
                if isinstance(pairs, list)
                else []
            )
            return {
                str(pair.get("key")): _convert_any_value(pair.get("value"), deeper - 1)
                for pair in named
            }
        if kind.endswith("Value"):
            return inner
    return None


def _parse(value: Any) -> Any:  # noqa: ANN401  # JSON
    """A value that may be JSON in a string, decoded."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            return _any.decode(mend_value(value.encode("utf-8", "surrogatepass")))
        except BAD_JSON:
            return value
    return value


def _list_messages(attributes: Mapping[str, Any], events: Iterable[_Event]) -> list[dict[str, Any]]:
    given = _parse(attributes.get(_INPUT))
    if isinstance(given, list):
        return [
            message for each in given if isinstance(each, dict) for message in _write_message(each)
        ]
    numbered: dict[int, dict[str, Any]] = {}
    for key, value in attributes.items():
        match = _NUMBERED.fullmatch(key)
        if match is not None:
            numbered.setdefault(int(match[1]), {})[match[2]] = value
    if numbered:
        return [
            message
            for _, fields in sorted(numbered.items())
            for message in _write_message(_join_numbered(fields))
        ]
    messages = []
    for event in events:
        named = _convert_attributes(event.attributes)
        if _INPUT in named:
            return _list_messages(named, ())
        match = _MESSAGE_EVENT.fullmatch(event.name or event.event_name or "")
        if match is not None:
            messages += _write_message({"role": match[1], **named})
    return messages


def _join_numbered(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A message without numbers in the names of its calls' attributes."""
    calls: dict[int, dict[str, Any]] = {}
    for key, value in fields.items():
        match = _NUMBERED_CALL.fullmatch(key)
        if match is not None:
            calls.setdefault(int(match[1]), {})[match[2]] = value
    whole = {key: value for key, value in fields.items() if not key.startswith("tool_calls.")}
    if calls:
        whole["tool_calls"] = [
            {"id": call.get("id"), "function": call} for _, call in sorted(calls.items())
        ]
    return whole


def _write_message(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A span's message as chat completions; several results become several messages."""
    role = message.get("role")
    role = role if isinstance(role, str) else "user"
    parts = _parse(message.get("parts"))
    if not isinstance(parts, list):
        return [_write_plain(message, role)]
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for part in parts:
        if not isinstance(part, dict):
            continue
        kind, identity = part.get("type"), part.get("id")
        if kind == "tool_call":
            calls.append(_write_call(identity, part.get("name"), part.get("arguments")))
        elif kind == "tool_call_response":
            result = part.get("response", part.get("result"))
            results.append(
                {"role": "tool", "tool_call_id": str(identity or ""), "content": read_text(result)}
            )
        elif isinstance(kind, str) and _CALLING.search(kind) and kind not in _SERVER_CALLS:
            raise UnknownLineError(f"a part of an unknown kind: {kind}", "unread")
        elif kind != "reasoning":
            texts.append(read_text(part.get("content")))
    if not (texts or calls):
        return results
    said: dict[str, Any] = {"role": "assistant" if calls else role, "content": "\n".join(texts)}
    return [{**said, "tool_calls": calls} if calls else said, *results]


def _write_plain(message: Mapping[str, Any], role: str) -> dict[str, Any]:
    """A message that has `content` and `tool_calls` already."""
    written: dict[str, Any] = {"role": role, "content": read_text(message.get("content"))}
    calls = _parse(message.get("tool_calls"))
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise UnknownLineError("tool calls in another form", "unread")
        written.setdefault("tool_calls", []).append(
            _write_call(call.get("id"), function.get("name"), function.get("arguments"))
        )
    if role == "tool":
        written["tool_call_id"] = str(message.get("tool_call_id") or message.get("id") or "")
    return written


def _write_call(identity: Any, name: Any, arguments: Any) -> dict[str, Any]:  # noqa: ANN401  # JSON
    given = (
        arguments
        if isinstance(arguments, str)
        else _encode(arguments if arguments is not None else {}).decode()
    )
    return {
        "id": str(identity or ""),
        "type": "function",
        "function": {"name": str(name or ""), "arguments": given},
    }
