"""What became of requests that were let through: Envoy's gRPC access log, an entry for each request when it is over.

- Envoy's own filters have read the tokens out of the answer, so no byte of it comes here, and none waits for us.
- What an answer does not say, because it was cut off, or compressed, or is in a format of its own, is estimated from its size.
- Entries come from Envoy, but what is in them may come from clients and models: all of it is bounded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct
from msgspec import MsgspecError, json

from extproc.answers.metadata import NAMESPACE
from extproc.decision import Action
from extproc.errors import ProtocolError
from extproc.logs import RateLimit, make_extra
from extproc.metrics import Metrics
from extproc.pb.accesslog_pb2 import HTTPAccessLogEntry, HTTPResponseProperties
from extproc.pb.als_pb2 import StreamAccessLogsMessage
from extproc.rates import BYTES_PER_TOKEN, Usage, estimate_tokens

_LOG = logging.getLogger("loopguard")

USAGE_NAMESPACE: Final = "loopguard.usage"
"""Where Envoy's filters put what they read in its answer."""

SESSIONS: Final = "sessions"
"""In the namespace of our own: what the guard has told Envoy about the sessions that the request belongs to."""

MAX_MESSAGE: Final = 2**18
"""Bytes. Envoy sends what it has once that is 16 KiB; an entry alone is larger only where its headers are."""

MAX_ENTRIES: Final = 1_000
"""Of one message: they take 15 ms at most."""

_MAX_SESSIONS: Final = 16
"""Policies that one request belongs to."""

_encode: Final = json.Encoder().encode
_decode: Final = json.Decoder(list[dict[str, Any]]).decode

_MAX_TOKENS: Final = 10**9
_MAX_MODEL: Final = 256
_INVALID_ARGUMENT: Final = 3
_ERROR: Final = 400
_FAILURE: Final = 500
_LINES_PER_SECOND: Final = 1

_MOST_OUTPUT: Final = 131_072
"""Tokens. No answer has more; what is larger holds pictures."""

_STREAMS: Final = ("text/event-stream", "application/x-ndjson", "application/vnd.amazon.eventstream")
_BYTES_PER_EVENT: Final = 128
"""For each token of a stream: a few letters in an event of JSON."""

_BYTES_PER_COMPRESSED_TOKEN: Final = 1
"""Text shrinks to a third or a quarter."""


class Entry(NamedTuple):
    """One request that is over.

    Attributes:
        sessions: what the guard told Envoy about them.
        status: of the answer, 0 where there was none.
        failed: the upstream's fault, or that of the way to it: 5xx, or cut off.
        request_bytes: of its body.
        response_bytes: of the answer's.
        model: that answered, as it calls itself; empty where it does not say.
        usage: its tokens.
        estimated: some of them, from the sizes of the bodies.
        refused: by Loopguard itself.
    """

    sessions: tuple[Mapping[str, Any], ...]
    status: int
    failed: bool
    request_bytes: int
    response_bytes: int
    model: str
    usage: Usage
    estimated: bool
    refused: bool


class AccessLog:
    """Takes entries from whoever has the socket, and hands them on."""

    def __init__(self, take: Callable[[Entry], None], metrics: Metrics) -> None:
        """Hand entries to `take`; what it raises ends with its own entry, counted."""
        self._take = take
        self._errors = RateLimit(_LINES_PER_SECOND)
        self._taken = metrics.access_log_entries.labels("taken")
        self._dropped = metrics.access_log_entries.labels("dropped")
        self._failed = metrics.access_log_entries.labels("error")

    def receive(self, data: bytes) -> int:
        """Take one serialized StreamAccessLogsMessage; returns how many entries were in it.

        Raises:
            ProtocolError: it is none.
        """
        if len(data) > MAX_MESSAGE:
            self._dropped.inc()
            return 0
        logged = _parse(data)
        count = len(logged)
        entries = _read_first(logged)
        taken = sum([self._hand_on(entry) for entry in entries])
        self._taken.inc(taken)
        if count > MAX_ENTRIES:
            self._dropped.inc(count - MAX_ENTRIES)
        return count

    def _hand_on(self, entry: Entry) -> bool:
        """Whether it was taken."""
        try:
            self._take(entry)
        except Exception as error:  # noqa: BLE001  # whatever it is, the others are not to suffer
            self._report(error)
            return False
        return True

    def _report(self, error: Exception) -> None:
        self._failed.inc()
        suppressed = self._errors.take(monotonic())
        if suppressed is not None:
            _LOG.error("an access log entry was lost", exc_info=error, extra=make_extra(suppressed=suppressed or None))


def read_entries(message: bytes) -> list[Entry]:
    """The requests of which a StreamAccessLogsMessage tells, but for those that belong to no session.

    Raises:
        ProtocolError: the bytes are no such message.
    """
    return _read_first(_parse(message))


def _parse(message: bytes) -> Sequence[HTTPAccessLogEntry]:
    try:
        return StreamAccessLogsMessage.FromString(message).http_logs.log_entry
    except DecodeError as error:
        raise ProtocolError("not a StreamAccessLogsMessage", code=_INVALID_ARGUMENT) from error


def _read_first(logged: Sequence[HTTPAccessLogEntry]) -> list[Entry]:
    """As many as one message may have."""
    entries = [_read_entry(entry) for entry in logged[:MAX_ENTRIES]]
    return [entry for entry in entries if entry is not None]


def _read_entry(logged: HTTPAccessLogEntry) -> Entry | None:
    """None for a request that belongs to no session, or is not over."""
    common = logged.common_properties
    metadata = common.metadata.filter_metadata
    if NAMESPACE not in metadata or common.intermediate_log_entry:
        return None
    decided = metadata[NAMESPACE].fields
    if SESSIONS not in decided:
        return None
    sessions = _read_sessions(decided[SESSIONS].string_value)
    refused = "action" in decided and decided["action"].string_value == Action.REJECT.value
    response = logged.response
    status = response.response_code.value
    told = _read_struct(metadata[USAGE_NAMESPACE]) if USAGE_NAMESPACE in metadata else {}
    usage, estimated = _find_usage(told, logged, status)
    model = told.get("model", "")
    return Entry(
        sessions,
        status,
        not refused and (status >= _FAILURE or len(common.response_flags.ListFields()) > 0),
        logged.request.request_body_bytes,
        response.response_body_bytes,
        model[:_MAX_MODEL] if isinstance(model, str) else "",
        usage,
        estimated,
        refused,
    )


def write_sessions(sessions: Sequence[Mapping[str, Any]]) -> str:
    """What the guard tells Envoy, to have it said again in an entry: one text, because a Struct takes ten times as long."""
    return _encode(sessions).decode()


def _read_sessions(text: str) -> tuple[Mapping[str, Any], ...]:
    """The same, read again; none where somebody else has written it."""
    try:
        return tuple(_decode(text)[:_MAX_SESSIONS])
    except (MsgspecError, ValueError, RecursionError):
        return ()


def _read_struct(struct: Struct) -> dict[str, Any]:
    """Text, numbers and switches; a value of another kind is None."""
    found: dict[str, Any] = {}
    fields = struct.fields
    for name in fields:  # `items` would be Python's own, at twice the time
        value = fields[name]
        kind = value.WhichOneof("kind")
        if kind == "string_value":
            found[name] = value.string_value
        elif kind == "number_value":
            found[name] = value.number_value
        else:
            found[name] = value.bool_value if kind == "bool_value" else None
    return found


def _find_usage(told: Mapping[str, Any], logged: HTTPAccessLogEntry, status: int) -> tuple[Usage, bool]:
    """The tokens, as the answer tells them, and whether some of them are estimated.

    The names are those that envoy-config gives them. `input` is all of a prompt, of which `cached` came from a cache; where an
    API counts what a cache took part in beside its `input`, that is `cache_read` and `cache_write`. `thoughts` and `tool_input`
    are not in what else is counted.
    """
    prompt, output = _read_count(told, "input"), _read_count(told, "output")
    if status >= _ERROR and prompt < 0 and output < 0:
        return Usage(0, 0), False  # errors are not billed
    cached = max(0, _read_count(told, "cached"))
    estimated = prompt < 0 or output < 0
    if prompt < 0:
        prompt = max(cached, estimate_tokens(logged.request.request_body_bytes))
    if output < 0:
        output = _estimate_output(logged.response)
    read, written = max(0, _read_count(told, "cache_read")), max(0, _read_count(told, "cache_write"))
    thoughts, tools = max(0, _read_count(told, "thoughts")), max(0, _read_count(told, "tool_input"))
    return Usage(max(0, prompt - cached) + tools, output + thoughts, cached + read, written), estimated


def _read_count(told: Mapping[str, Any], name: str) -> int:
    """So many tokens, -1 where that is not told."""
    count = told.get(name)
    return int(count) if isinstance(count, float) and 0 <= count <= _MAX_TOKENS else -1


def _estimate_output(response: HTTPResponseProperties) -> int:
    """Tokens of an answer that tells nothing, from its size."""
    headers = response.response_headers
    streams = headers["content-type"].startswith(_STREAMS) if "content-type" in headers else False
    per_token = _BYTES_PER_EVENT if streams else BYTES_PER_TOKEN
    if "content-encoding" in headers and headers["content-encoding"] != "identity":
        per_token = per_token * _BYTES_PER_COMPRESSED_TOKEN // BYTES_PER_TOKEN
    return min(response.response_body_bytes // per_token, _MOST_OUTPUT)
