"""Reads the outcome of requests from Envoy's gRPC access log: one entry for each ended request.

- Envoy's own filters read the token counts in responses, so responses do not pass through here and
  are not delayed.
- If a response lacks counts, because it was cut off, compressed or of unknown format, they are
  estimated from its size.
- Entries come from Envoy, but their contents may come from clients and models, so everything is
  bounded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import Final

from extproc.apis import read_counts
from extproc.apis.usage import (
    GATEWAY_MODEL,
    GATEWAY_NAMESPACE,
    MODEL,
    USAGE_NAMESPACE,
    read_gateway_counts,
)
from extproc.decision import Action
from extproc.engine.settlements import Entry, read_calls, read_counted
from extproc.errors import ProtocolError
from extproc.ext_proc.answers.metadata import NAMESPACE, SESSIONS
from extproc.ext_proc.protobuf import DELIMITED, FIXED64, VARINT, Reader
from extproc.logs import RateLimit, make_extra
from extproc.metrics import Metrics
from extproc.pb.accesslog_pb2 import ResponseFlags
from extproc.sessions.rates import BYTES_PER_TOKEN, Usage, estimate_tokens
from extproc.store.rules.back_to_back import LEFT_OUT
from extproc.store.rules.take_back import COUNTED

_LOG = logging.getLogger("loopguard")

MAX_MESSAGE: Final = 2**18
"""Bytes.

Envoy sends entries after collecting 16 KiB, so only large headers make a message larger.
"""

MAX_ENTRIES: Final = 1_000
"""Entries read per message. They take 13 ms, or 50 ms in pure Python."""

# Tags of the fields to read, named as in protos/. StreamAccessLogsMessage, HTTPAccessLogEntries:
_HTTP_LOGS: Final = 2 << 3 | DELIMITED
_LOG_ENTRY: Final = 1 << 3 | DELIMITED
# HTTPAccessLogEntry:
_COMMON_PROPERTIES: Final = 1 << 3 | DELIMITED
_REQUEST: Final = 3 << 3 | DELIMITED
_RESPONSE: Final = 4 << 3 | DELIMITED
# Its parts:
_ALL_HEARD: Final = 6 << 3 | DELIMITED
_FIRST_SENT: Final = 7 << 3 | DELIMITED
_LAST_RECEIVED: Final = 10 << 3 | DELIMITED
_LAST_ANSWERED: Final = 12 << 3 | DELIMITED
_RESPONSE_FLAGS: Final = 16 << 3 | DELIMITED
_METADATA: Final = 17 << 3 | DELIMITED
_DURATION: Final = 23 << 3 | DELIMITED
_INTERMEDIATE: Final = 27 << 3 | VARINT
_REQUEST_BODY_BYTES: Final = 12 << 3 | VARINT
_RESPONSE_CODE: Final = 1 << 3 | DELIMITED
_RESPONSE_BODY_BYTES: Final = 3 << 3 | VARINT
_RESPONSE_HEADERS: Final = 4 << 3 | DELIMITED
# Duration:
_SECONDS: Final = 1 << 3 | VARINT
_NANOS: Final = 2 << 3 | VARINT
# Wrapped numbers, map entries, Metadata and Struct:
_WRAPPED: Final = 1 << 3 | VARINT
_KEY: Final = 1 << 3 | DELIMITED
_VALUE: Final = 2 << 3 | DELIMITED
_FILTER_METADATA: Final = 1 << 3 | DELIMITED
_FIELDS: Final = 1 << 3 | DELIMITED
# Value:
_NUMBER_VALUE: Final = 2 << 3 | FIXED64
_STRING_VALUE: Final = 3 << 3 | DELIMITED
_BOOL_VALUE: Final = 4 << 3 | VARINT

_FLAGS: Final = {
    field.name: field.number << 3 | VARINT for field in ResponseFlags.DESCRIPTOR.fields
}
_LEFT: Final = frozenset(
    [
        _FLAGS[name]
        for name in (
            "downstream_connection_termination",
            "downstream_protocol_error",
            "downstream_remote_reset",
            "stream_idle_timeout",
            "duration_timeout",
        )
    ]
)
"""Response flags of answers cut off by the client, or by a timeout of Envoy's that a client can
cause."""

_UPSTREAM_FLAGS: Final = frozenset(_FLAGS.values()) - _LEFT
"""Response flags for failures of the upstream, or of the connection to it."""

_CUT: Final = _LEFT | {
    _FLAGS["upstream_request_timeout"],
    _FLAGS["upstream_max_stream_duration_reached"],
}
"""Response flags of answers that the upstream may have continued."""

# Names are compared as bytes; decoding them would take longer.
_DECIDED: Final = NAMESPACE.encode()
_TOLD: Final = USAGE_NAMESPACE.encode()
_GATEWAY: Final = GATEWAY_NAMESPACE.encode()
_GATEWAY_MODEL: Final = GATEWAY_MODEL.encode()
_SESSIONS: Final = SESSIONS.encode()
_MODEL: Final = MODEL.encode()
_REJECT: Final = Action.REJECT.value

_MAX_SECONDS: Final = 86_400
_MAX_NANOS: Final = 10**9 - 1
_MAX_MODEL: Final = 256
_INVALID_ARGUMENT: Final = 3
_ERROR: Final = 400
_FAILURE: Final = 500
_LINES_PER_SECOND: Final = 1

_MOST_OUTPUT: Final = 131_072
"""Tokens. No text response has more; longer ones contain images."""

_MOST_TOLD: Final = 2**20
"""The most output tokens that a response can report credibly, unless it has more bytes: several
times _MOST_OUTPUT, for requests with several answers."""

_MOST_PROMPT: Final = 10_000_000
"""Tokens. No model's context is larger, but a batch may be: up to its number of bytes."""

_STREAMS: Final = (
    "text/event-stream",
    "application/x-ndjson",
    "application/vnd.amazon.eventstream",
)
_BYTES_PER_EVENT: Final = 128
"""Estimated bytes per token of a streamed response.

An event is usually JSON around a few letters.
"""

_BYTES_PER_COMPRESSED_TOKEN: Final = 1
"""Compression shrinks text to a third or a quarter."""


class _Logged:
    """One entry of the access log.

    Attributes:
        decided: metadata of Loopguard's decision; None if missing.
        told: metadata that Envoy's filters read in the response.
        gateway: the same from Envoy AI Gateway.
        status: HTTP status of the response; 0 if there was none.
        flagged: the upstream, or the connection to it, failed.
        cut: the client left, or a timeout struck.
        unfinished: the request has not ended.
        request_bytes: length of the request's body.
        response_bytes: length of the response's body.
        headers: the response headers that Envoy logs.
        sent: some of the request reached an upstream.
        sent_ms: when the first byte was sent to the upstream, in milliseconds since the request
            began; 0 for never.
        received_ms: when the last byte was received from the upstream, likewise.
        heard_ms: when the last byte was received from the client, likewise.
        answered_ms: when the last byte was sent to the client, or the request ended, likewise.
    """

    def __init__(self) -> None:
        self.decided: dict[bytes, object] | None = None
        self.told: dict[bytes, object] = {}
        self.gateway: dict[bytes, object] = {}
        self.status = 0
        self.flagged = False
        self.cut = False
        self.unfinished = False
        self.request_bytes = 0
        self.response_bytes = 0
        self.headers: dict[bytes, str] = {}
        self.sent = False
        self.sent_ms = 0
        self.received_ms = 0
        self.heard_ms = self.answered_ms = 0


class AccessLog:
    """Reads the log's messages and passes on relevant entries."""

    def __init__(self, take: Callable[[Entry], None], metrics: Metrics) -> None:
        """`take` receives the entries.

        Its exceptions are counted and affect only their own entry.
        """
        self._take = take
        self._errors = RateLimit(_LINES_PER_SECOND)
        self._taken = metrics.access_log_entries.labels("taken")
        self._dropped = metrics.access_log_entries.labels("dropped")
        self._failed = metrics.access_log_entries.labels("error")

    def receive(self, data: bytes) -> int:
        """Read a serialized StreamAccessLogsMessage.

        Returns:
            the number of entries in it.

        Raises:
            ProtocolError: the bytes are not a StreamAccessLogsMessage.
        """
        if len(data) > MAX_MESSAGE:
            self._dropped.inc()
            return 0
        entries, count = read_message(data)
        taken = sum([self._pass_on(entry) for entry in entries])
        self._taken.inc(taken)
        if count > MAX_ENTRIES:
            self._dropped.inc(count - MAX_ENTRIES)
        return count

    def _pass_on(self, entry: Entry) -> bool:
        """Pass an entry on; returns whether that succeeded."""
        try:
            self._take(entry)
        except Exception as error:  # noqa: BLE001  # no error may affect other entries
            self._report(error)
            return False
        return True

    def _report(self, error: Exception) -> None:
        self._failed.inc()
        suppressed = self._errors.admit(monotonic())
        if suppressed is not None:
            _LOG.error(
                "an access log entry was lost",
                exc_info=error,
                extra=make_extra(suppressed=suppressed or None),
            )


def read_message(message: bytes) -> tuple[list[Entry], int]:
    """Read the relevant entries (see `_make_entry`) among the first MAX_ENTRIES, and count all.

    Raises:
        ProtocolError: the bytes are not a StreamAccessLogsMessage.
    """
    entries: list[Entry] = []
    count = 0
    reader = Reader(message)
    try:
        while tag := reader.read_tag():
            if tag == _HTTP_LOGS:
                count = _read_logs(reader, entries, count)
    except (ValueError, IndexError) as error:
        raise ProtocolError("not a StreamAccessLogsMessage", code=_INVALID_ARGUMENT) from error
    return entries, count


def _read_logs(reader: Reader, entries: list[Entry], count: int) -> int:
    """Append the relevant entries; returns the new count."""
    outer = reader.enter()
    while tag := reader.read_tag():
        if tag == _LOG_ENTRY:
            count += 1
            entry = _make_entry(_read_entry(reader)) if count <= MAX_ENTRIES else None
            if entry is not None:
                entries.append(entry)
    reader.leave(outer)
    return count


def _read_entry(reader: Reader) -> _Logged:
    """Read the entry at the reader's position. The functions below read one part of it each."""
    logged = _Logged()
    outer = reader.enter()
    while tag := reader.read_tag():
        if tag == _COMMON_PROPERTIES:
            _read_common(reader, logged)
        elif tag == _REQUEST:
            _read_request(reader, logged)
        elif tag == _RESPONSE:
            _read_response(reader, logged)
    reader.leave(outer)
    return logged


def _read_common(reader: Reader, logged: _Logged) -> None:
    outer = reader.enter()
    while tag := reader.read_tag():
        if tag == _METADATA:
            _read_metadata(reader, logged)
        elif tag == _RESPONSE_FLAGS:
            _read_flags(reader, logged)
        elif tag == _FIRST_SENT:
            logged.sent = True
            logged.sent_ms = _read_duration(reader)
        elif tag == _LAST_RECEIVED:
            logged.received_ms = _read_duration(reader)
        elif tag == _ALL_HEARD:
            logged.heard_ms = _read_duration(reader)
        elif tag in (_LAST_ANSWERED, _DURATION):
            logged.answered_ms = max(logged.answered_ms, _read_duration(reader))
        elif tag == _INTERMEDIATE:
            logged.unfinished = reader.value != 0
    reader.leave(outer)


def _read_metadata(reader: Reader, logged: _Logged) -> None:
    outer = reader.enter()
    while tag := reader.read_tag():
        if tag == _FILTER_METADATA:
            _read_namespace(reader, logged)
    reader.leave(outer)


def _read_namespace(reader: Reader, logged: _Logged) -> None:
    """Read one namespace of the metadata. Protobuf writers put a key before its value."""
    name = b""
    outer = reader.enter()
    while tag := reader.read_tag():
        if tag == _KEY:
            name = reader.read_bytes()
        elif tag == _VALUE and name == _DECIDED:
            logged.decided = _read_struct(reader)
        elif tag == _VALUE and name == _TOLD:
            logged.told = _read_struct(reader)
        elif tag == _VALUE and name == _GATEWAY:
            logged.gateway = _read_struct(reader)
    reader.leave(outer)


def _read_struct(reader: Reader) -> dict[bytes, object]:
    """Read strings, numbers and booleans; other values become None."""
    found: dict[bytes, object] = {}
    outer = reader.enter()
    while tag := reader.read_tag():
        if tag == _FIELDS:
            _read_field(reader, found)
    reader.leave(outer)
    return found


def _read_field(reader: Reader, found: dict[bytes, object]) -> None:
    name, value = b"", None
    outer = reader.enter()
    while tag := reader.read_tag():
        if tag == _KEY:
            name = reader.read_bytes()
        elif tag == _VALUE:
            value = _read_value(reader)
    reader.leave(outer)
    found[name] = value


def _read_value(reader: Reader) -> object:
    value: object = None
    outer = reader.enter()
    while tag := reader.read_tag():
        if tag == _STRING_VALUE:
            value = reader.read_text()
        elif tag == _NUMBER_VALUE:
            value = reader.read_double()
        elif tag == _BOOL_VALUE:
            value = reader.value != 0
    reader.leave(outer)
    return value


def _read_duration(reader: Reader) -> int:
    """Read a duration, in milliseconds."""
    seconds = nanos = 0
    outer = reader.enter()
    while tag := reader.read_tag():
        if tag == _SECONDS:
            seconds = reader.value
        elif tag == _NANOS:
            nanos = reader.value
    reader.leave(outer)
    return min(seconds, _MAX_SECONDS) * 1000 + min(nanos, _MAX_NANOS) // 1_000_000


def _read_flags(reader: Reader, logged: _Logged) -> None:
    outer = reader.enter()
    while tag := reader.read_tag():
        if reader.value and tag in _UPSTREAM_FLAGS:
            logged.flagged = True
        if reader.value and tag in _CUT:
            logged.cut = True
    reader.leave(outer)


def _read_request(reader: Reader, logged: _Logged) -> None:
    outer = reader.enter()
    while tag := reader.read_tag():
        if tag == _REQUEST_BODY_BYTES:
            logged.request_bytes = reader.value
    reader.leave(outer)


def _read_response(reader: Reader, logged: _Logged) -> None:
    outer = reader.enter()
    while tag := reader.read_tag():
        if tag == _RESPONSE_CODE:
            logged.status = _read_wrapped(reader)
        elif tag == _RESPONSE_BODY_BYTES:
            logged.response_bytes = reader.value
        elif tag == _RESPONSE_HEADERS:
            _read_header(reader, logged.headers)
    reader.leave(outer)


def _read_wrapped(reader: Reader) -> int:
    number = 0
    outer = reader.enter()
    while tag := reader.read_tag():
        if tag == _WRAPPED:
            number = reader.value
    reader.leave(outer)
    return number


def _read_header(reader: Reader, headers: dict[bytes, str]) -> None:
    name, value = b"", ""
    outer = reader.enter()
    while tag := reader.read_tag():
        if tag == _KEY:
            name = reader.read_bytes()
        elif tag == _VALUE:
            value = reader.read_text()
    reader.leave(outer)
    headers[name] = value


def _make_entry(logged: _Logged) -> Entry | None:
    """None for a request that has not ended, or whose end changes no state here."""
    decided = logged.decided
    if decided is None or _SESSIONS not in decided or logged.unfinished:
        return None
    refused = decided.get(b"action") == _REJECT
    failed = not refused and (logged.status >= _FAILURE or logged.flagged)
    named = read_calls(decided[_SESSIONS])
    calls = tuple([each for each in named if COUNTED not in each])
    # Another filter may refuse a counted request. Successful answers without an upstream are not
    # refusals.
    unsent = not (refused or failed or logged.sent) and (
        logged.status >= _ERROR or not logged.status
    )
    lasted = LEFT_OUT if failed or unsent else max(0, logged.answered_ms - logged.heard_ms)
    counted = [found for each in named for found in read_counted(each.get(COUNTED), lasted)]
    if named and not calls and not counted:
        return None
    found = _FoundUsage(logged)
    model = logged.told.get(_MODEL) or logged.gateway.get(_GATEWAY_MODEL)
    return Entry(
        calls,
        logged.status,
        failed,
        logged.request_bytes,
        logged.response_bytes,
        model[:_MAX_MODEL] if isinstance(model, str) else "",
        found.usage,
        found.estimated,
        refused,
        counted,
        max(0, logged.received_ms - logged.sent_ms) if logged.sent_ms else 0,
        unsent,
        found.most_output,
        found.cut,
        found.absurd,
    )


class _FoundUsage:
    """The usage of an answer.

    Attributes:
        usage: its tokens, as in `usage.COUNTS`.
        estimated: some of them are estimated.
        most_output: the most tokens that its bytes can contain, if it is a stream with estimated
            output; else 0.
        cut: its end, and therefore its usage, is unknown.
        absurd: it reports more than any model can use, and is ignored.
    """

    def __init__(self, logged: _Logged) -> None:
        told = read_counts(logged.told) or read_gateway_counts(logged.gateway)
        most_prompt, most_output = (
            max(_MOST_PROMPT, logged.request_bytes),
            max(_MOST_TOLD, logged.response_bytes),
        )
        most = {name: most_output if name in _WRITTEN else most_prompt for name in told}
        self.absurd = len([name for name, count in told.items() if count > most[name]]) > 0
        told = {name: count for name, count in told.items() if 0 <= count <= most[name]}
        prompt, output = int(told.get("input", -1)), int(told.get("output", -1))
        reached = logged.sent or 0 < logged.status < _ERROR
        self.cut = reached and output < 0 and (logged.cut or not logged.status)
        self.most_output = 0
        nothing = logged.status >= _ERROR or (logged.flagged and not logged.response_bytes)
        if nothing and not self.cut and prompt < 0 and output < 0:
            # Errors and failures without an answer are free
            self.usage, self.estimated = Usage(0, 0), False
            return
        cached = int(told.get("cached", 0))
        self.estimated = prompt < 0 or output < 0
        if prompt < 0:
            prompt = max(cached, estimate_tokens(logged.request_bytes))
        if output < 0:
            output, self.most_output = _estimate_output(logged)
        # Some gateways exclude it from the input
        cached = min(cached, max(prompt, estimate_tokens(logged.request_bytes)))
        read, written = int(told.get("cache_read", 0)), int(told.get("cache_write", 0))
        thoughts, tools = int(told.get("thoughts", 0)), int(told.get("tool_input", 0))
        self.usage = Usage(
            max(0, prompt - cached) + tools, output + thoughts, cached + read, written
        )


_WRITTEN: Final = ("output", "thoughts")
"""Counts that belong to the answer."""


def _estimate_output(logged: _Logged) -> tuple[int, int]:
    """Estimate a response's tokens by its size; for a stream, also their maximum."""
    streams = logged.headers.get(b"content-type", "").lower().startswith(_STREAMS)
    least = BYTES_PER_TOKEN
    if logged.headers.get(b"content-encoding", "").lower() not in ("", "identity"):
        least = _BYTES_PER_COMPRESSED_TOKEN
    most = min(logged.response_bytes // least, _MOST_OUTPUT)
    if not streams:
        return most, 0
    return min(
        logged.response_bytes * BYTES_PER_TOKEN // (_BYTES_PER_EVENT * least), _MOST_OUTPUT
    ), most
