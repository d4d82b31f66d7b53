"""Reads the outcome of requests from Envoy's gRPC access log, which has an entry for each request when it is over.

- Envoy's own filters read the token counts in responses, so no response passes through here, and none has to wait.
- Counts that a response lacks, because it was cut off, compressed or of unknown format, are estimated from its size.
- Entries come from Envoy, but their contents may come from clients and models, so everything is bounded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import Any, Final, TypeAlias

from extproc.apis import read_counts
from extproc.apis.usage import GATEWAY_MODEL, GATEWAY_NAMESPACE, MODEL, USAGE_NAMESPACE, read_gateway_counts
from extproc.decision import Action
from extproc.engine.settlements import Entry, read_calls, read_counted
from extproc.errors import ProtocolError
from extproc.ext_proc.answers.metadata import NAMESPACE, SESSIONS
from extproc.ext_proc.protobuf import DELIMITED, FIXED64, VARINT, Reader
from extproc.logs import RateLimit, make_extra
from extproc.metrics import Metrics
from extproc.pb.accesslog_pb2 import ResponseFlags
from extproc.sessions.rates import BYTES_PER_TOKEN, Usage, estimate_tokens
from extproc.store.rules.take_back import COUNTED

_LOG = logging.getLogger("loopguard")

MAX_MESSAGE: Final = 2**18
"""Bytes. Envoy sends entries once it has collected 16 KiB; only an entry with large headers is larger."""

MAX_ENTRIES: Final = 1_000
"""Entries read per message: they take 13 ms, 50 ms in pure Python."""

_FLAGS: Final = {field.name: field.number << 3 | VARINT for field in ResponseFlags.DESCRIPTOR.fields}
_LEFT: Final = frozenset(
    [
        b"downstream_connection_termination",
        b"downstream_protocol_error",
        b"downstream_remote_reset",
        b"stream_idle_timeout",
        b"duration_timeout",
    ]
)
"""Response flags for answers that were cut off by the client, or by a time limit of Envoy's that a client can exceed."""

_UPSTREAM_FLAGS: Final = frozenset([name.encode() for name in _FLAGS]) - _LEFT
"""Response flags for failures of the upstream, or of the connection to it."""

_CUT: Final = _LEFT | {b"upstream_request_timeout", b"upstream_max_stream_duration_reached"}
"""Response flags for answers that the upstream may have gone on with."""

# Names are compared as bytes, because decoding them takes longer.
_DECIDED: Final = NAMESPACE.encode()
_TOLD: Final = USAGE_NAMESPACE.encode()
_GATEWAY: Final = GATEWAY_NAMESPACE.encode()
_GATEWAY_MODEL: Final = GATEWAY_MODEL.encode()
_SESSIONS: Final = SESSIONS.encode()
_MODEL: Final = MODEL.encode()
_READ: Final = (_DECIDED, _TOLD, _GATEWAY)
_REJECT: Final = Action.REJECT.value

_MAX_SECONDS: Final = 86_400
_MAX_NANOS: Final = 10**9 - 1
_MAX_MODEL: Final = 256
_INVALID_ARGUMENT: Final = 3
_HTTP_LOGS: Final = 2 << 3 | DELIMITED
_LOG_ENTRY: Final = 1 << 3 | DELIMITED
_ERROR: Final = 400
_FAILURE: Final = 500
_LINES_PER_SECOND: Final = 1

_MOST_OUTPUT: Final = 131_072
"""Tokens. No text response has more; larger ones hold images."""

_MOST_TOLD: Final = 2**20
"""Tokens that a response may report: several times _MOST_OUTPUT, for several answers at once, or its number of bytes."""

_MOST_PROMPT: Final = 10_000_000
"""Tokens. No model's context is larger; a prompt of more bytes may have more, in a batch."""

_STREAMS: Final = ("text/event-stream", "application/x-ndjson", "application/vnd.amazon.eventstream")
_BYTES_PER_EVENT: Final = 128
"""Bytes per token of a streamed response: each event is usually JSON around a few letters, but it can be text as a whole."""

_BYTES_PER_COMPRESSED_TOKEN: Final = 1
"""Compression shrinks text to a third or a quarter."""


Found: TypeAlias = dict[bytes, Any]
"""What was read of a message and the messages in it, by the names in `Fields`; what is missing or 0 is left out."""

Fields: TypeAlias = dict[int, tuple[bytes, int, Any]]
"""The fields of a message that are read, by tag: name, one of the kinds below, and the fields of a message within."""

_NUMBER, _DOUBLE, _TEXT, _BYTES, _MESSAGE, _STRUCT, _MAP = range(7)
"""A `_STRUCT` is read if the key before it is one of _READ. Every protobuf writer puts a key before its value."""

_ANY: Final[Fields] = {
    2 << 3 | FIXED64: (b"value", _DOUBLE, None),
    3 << 3 | DELIMITED: (b"value", _TEXT, None),
    4 << 3 | VARINT: (b"value", _NUMBER, None),
}
_PAIR: Final[Fields] = {1 << 3 | DELIMITED: (b"key", _BYTES, None), 2 << 3 | DELIMITED: (b"", _MESSAGE, _ANY)}
_NAMESPACE: Final[Fields] = {
    1 << 3 | DELIMITED: (b"key", _BYTES, None),
    2 << 3 | DELIMITED: (b"", _STRUCT, {1 << 3 | DELIMITED: (b"value", _MAP, _PAIR)}),
}
_HEADER: Final[Fields] = {1 << 3 | DELIMITED: (b"key", _BYTES, None), 2 << 3 | DELIMITED: (b"value", _TEXT, None)}


def _read_duration(name: bytes) -> tuple[bytes, int, Fields]:
    return name, _MESSAGE, {1 << 3 | VARINT: (name + b"_s", _NUMBER, None), 2 << 3 | VARINT: (name + b"_ns", _NUMBER, None)}


# Named as in protos/: of an HTTPAccessLogEntry
_ENTRY: Final[Fields] = {
    1 << 3 | DELIMITED: (  # common_properties
        b"",
        _MESSAGE,
        {
            7 << 3 | DELIMITED: _read_duration(b"sent"),  # time_to_first_upstream_tx_byte
            10 << 3 | DELIMITED: _read_duration(b"received"),  # time_to_last_upstream_rx_byte
            16 << 3 | DELIMITED: (b"", _MESSAGE, {tag: (name.encode(), _NUMBER, None) for name, tag in _FLAGS.items()}),
            17 << 3 | DELIMITED: (b"", _MESSAGE, {1 << 3 | DELIMITED: (b"metadata", _MAP, _NAMESPACE)}),
            27 << 3 | VARINT: (b"unfinished", _NUMBER, None),  # intermediate_log_entry
        },
    ),
    3 << 3 | DELIMITED: (b"", _MESSAGE, {12 << 3 | VARINT: (b"request_bytes", _NUMBER, None)}),
    4 << 3 | DELIMITED: (  # response
        b"",
        _MESSAGE,
        {
            1 << 3 | DELIMITED: (b"", _MESSAGE, {1 << 3 | VARINT: (b"status", _NUMBER, None)}),  # response_code
            3 << 3 | VARINT: (b"response_bytes", _NUMBER, None),
            4 << 3 | DELIMITED: (b"headers", _MAP, _HEADER),
        },
    ),
}


class AccessLog:
    """Reads the log's messages and passes on the entries that matter."""

    def __init__(self, take: Callable[[Entry], None], metrics: Metrics) -> None:
        """Pass entries to `take`. Its exceptions are counted and affect only their own entry."""
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
        taken = sum([self._hand_on(entry) for entry in entries])
        self._taken.inc(taken)
        if count > MAX_ENTRIES:
            self._dropped.inc(count - MAX_ENTRIES)
        return count

    def _hand_on(self, entry: Entry) -> bool:
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
            _LOG.error("an access log entry was lost", exc_info=error, extra=make_extra(suppressed=suppressed or None))


def read_message(message: bytes) -> tuple[list[Entry], int]:
    """Read the entries that matter (see `_make_entry`) among the first MAX_ENTRIES, and count all.

    Raises:
        ProtocolError: the bytes are not a StreamAccessLogsMessage.
    """
    entries: list[Entry] = []
    count = 0
    reader = Reader(message)
    try:
        while tag := reader.read_tag():
            if tag != _HTTP_LOGS:
                continue
            outer = reader.enter()
            while tag := reader.read_tag():
                if tag == _LOG_ENTRY:
                    count += 1
                    if count <= MAX_ENTRIES:
                        found: Found = {}
                        _read(reader, _ENTRY, found)
                        entry = _make_entry(found)
                        entries += [] if entry is None else [entry]
            reader.leave(outer)
    except (ValueError, IndexError) as error:
        raise ProtocolError("not a StreamAccessLogsMessage", code=_INVALID_ARGUMENT) from error
    return entries, count


def _read(reader: Reader, fields: Fields, found: Found) -> None:
    """Read the message at which the reader stands. The depth of `fields` bounds that of the calls."""
    outer = reader.enter()
    while tag := reader.read_tag():
        field = fields.get(tag)
        if field is None:
            continue
        name, kind, within = field
        if kind == _NUMBER:
            if reader.value:
                found[name] = reader.value
        elif kind == _TEXT:
            found[name] = reader.read_text()
        elif kind == _BYTES:
            found[name] = reader.read_bytes()
        elif kind == _DOUBLE:
            found[name] = reader.read_double()
        elif kind == _MAP:
            pair: Found = {}
            _read(reader, within, pair)
            found.setdefault(name, {})[pair.get(b"key", b"")] = pair.get(b"value")
        elif kind == _MESSAGE or found.get(b"key") in _READ:
            found[name] = True
            _read(reader, within, found)
    reader.leave(outer)


def _make_entry(found: Found) -> Entry | None:
    """None for a request that is not over, or whose end changes no state here."""
    metadata: Found = found.get(b"metadata", {})
    decided: Found | None = metadata.get(_DECIDED)
    if decided is None or _SESSIONS not in decided or b"unfinished" in found:
        return None
    status: int = found.get(b"status", 0)
    refused = decided.get(b"action") == _REJECT
    failed = not refused and (status >= _FAILURE or not _UPSTREAM_FLAGS.isdisjoint(found))
    named = read_calls(decided[_SESSIONS])
    calls = tuple([each for each in named if COUNTED not in each])
    # Other filters may refuse a request that Loopguard has counted; answers without an upstream are no refusals.
    unsent = not (refused or failed or b"sent" in found) and (status >= _ERROR or not status)
    counted = [each for one in named if failed or unsent for each in read_counted(one.get(COUNTED))]
    if named and not calls and not counted:
        return None
    told: Found = metadata.get(_TOLD) or {}
    gateway: Found = metadata.get(_GATEWAY) or {}
    used = _FoundUsage(found, told, gateway, status)
    model = told.get(_MODEL) or gateway.get(_GATEWAY_MODEL)
    sent_ms = _find_ms(found, b"sent")
    return Entry(
        calls,
        status,
        failed,
        found.get(b"request_bytes", 0),
        found.get(b"response_bytes", 0),
        model[:_MAX_MODEL] if isinstance(model, str) else "",
        used.usage,
        used.estimated,
        refused,
        counted,
        max(0, _find_ms(found, b"received") - sent_ms) if sent_ms else 0,
        unsent,
        used.most_output,
        used.cut,
        used.absurd,
    )


def _find_ms(found: Found, name: bytes) -> int:
    """A duration, in milliseconds; 0 for none."""
    seconds, nanos = found.get(name + b"_s", 0), found.get(name + b"_ns", 0)
    return min(int(seconds), _MAX_SECONDS) * 1000 + min(int(nanos), _MAX_NANOS) // 1_000_000


class _FoundUsage:
    """What an answer has used.

    Attributes:
        usage: its tokens, as in `usage.COUNTS`.
        estimated: some of them are estimated.
        most_output: the most tokens that its bytes can be, if it is a stream whose output is estimated; else 0.
        cut: its end is not known, and neither is what it has used.
        absurd: it reports more than any model can use, so that it is not believed.
    """

    def __init__(self, found: Found, told: Found, gateway: Found, status: int) -> None:
        request_bytes: int = found.get(b"request_bytes", 0)
        response_bytes: int = found.get(b"response_bytes", 0)
        counts = read_counts(told) or read_gateway_counts(gateway)
        most_prompt, most_output = max(_MOST_PROMPT, request_bytes), max(_MOST_TOLD, response_bytes)
        most = {name: most_output if name in _WRITTEN else most_prompt for name in counts}
        self.absurd = len([name for name, count in counts.items() if count > most[name]]) > 0
        counts = {name: count for name, count in counts.items() if 0 <= count <= most[name]}
        prompt, output = int(counts.get("input", -1)), int(counts.get("output", -1))
        reached = b"sent" in found or 0 < status < _ERROR
        self.cut = reached and output < 0 and (not _CUT.isdisjoint(found) or not status)
        self.most_output = 0
        nothing = status >= _ERROR or (not response_bytes and not _UPSTREAM_FLAGS.isdisjoint(found))
        if nothing and not self.cut and prompt < 0 and output < 0:
            self.usage, self.estimated = Usage(0, 0), False  # errors are not billed, nor upstreams that fail without an answer
            return
        cached = int(counts.get("cached", 0))
        self.estimated = prompt < 0 or output < 0
        if prompt < 0:
            prompt = max(cached, estimate_tokens(request_bytes))
        if output < 0:
            output, self.most_output = _estimate_output(found.get(b"headers", {}), response_bytes)
        cached = min(cached, max(prompt, estimate_tokens(request_bytes)))  # some gateways leave it out of the input
        read, written = int(counts.get("cache_read", 0)), int(counts.get("cache_write", 0))
        thoughts, tools = int(counts.get("thoughts", 0)), int(counts.get("tool_input", 0))
        self.usage = Usage(max(0, prompt - cached) + tools, output + thoughts, cached + read, written)


_WRITTEN: Final = ("output", "thoughts")
"""The counts that are of the answer."""


def _estimate_output(headers: Found, size: int) -> tuple[int, int]:
    """Estimate the tokens of a response from its size in bytes, and for a stream the most that it can be."""
    kind, encoding = headers.get(b"content-type") or "", headers.get(b"content-encoding") or ""
    least = BYTES_PER_TOKEN if encoding.lower() in ("", "identity") else _BYTES_PER_COMPRESSED_TOKEN
    most = min(size // least, _MOST_OUTPUT)
    if not kind.lower().startswith(_STREAMS):
        return most, 0
    return min(size * BYTES_PER_TOKEN // (_BYTES_PER_EVENT * least), _MOST_OUTPUT), most
