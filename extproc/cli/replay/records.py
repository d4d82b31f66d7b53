"""One line of a log -> what was recorded of a request. The format is the one in docs/replay.md, and `recording` writes it.

A line of an access log has the record in a field of its own, `loop_record`: what a policy reads and it does not have was not
recorded, which is another thing than that the request did not have it. Any other line is a record itself, and complete.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterator, KeysView, Mapping
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from extproc.engine.recording import TOO_LONG, VERSION
from extproc.request.document import NotCounted
from extproc.request.fingerprint import MAX_MARKS, Body
from extproc.request.http import MAX_DESCRIPTOR, HttpRequest, StatedFacts, write_claim

FIELD = "loop_record"
"""Of the access log, as generated configuration has it."""

_IN_FIELD = f'"{FIELD}"'.encode()
_LAST = 253_402_300_800
"""The year 10,000, in seconds since 1970: what is later is milliseconds, or worse."""

_MAX_BYTES = 2**53
_REASON = re.compile(r"[a-z][a-z_]{0,39}\Z")
_SUM = re.compile(r"[0-9a-f]{8}\Z")
_LONG_VALUE = "x" * (MAX_DESCRIPTOR + 1)
_LONG_QUERY = "&" * (MAX_MARKS + 1)

Value = TypeVar("Value")


class UnusableError(Exception):
    """A line that no request can be made of; `logs.PROBLEMS` describes its `kind`."""

    def __init__(self, kind: str, why: str = "") -> None:
        super().__init__(why)
        self.kind = kind


class Record(msgspec.Struct, gc=False):
    """What is known of a request; see docs/replay.md. Numbers may have a fraction, as those of protobuf's Structs have."""

    record: float
    time: float | str
    method: str
    path: str
    authority: str = ""
    route: str = ""
    address: str | bool = ""
    query: str | bool = ""
    headers: dict[str, str | bool | None] = {}  # msgspec copies a default for each object
    claims: dict[str, Any] = {}
    body: msgspec.Raw = msgspec.Raw()
    body_base64: str | None = None
    body_bytes: float | None = None
    body_crc32: str = ""
    body_adler32: str = ""
    unknown: str = ""


class _Version(msgspec.Struct):
    record: float | None = None


class _Entry(msgspec.Struct):
    loop_record: Record | None = None


class _EntryVersion(msgspec.Struct):
    loop_record: _Version | None = None


_RECORD = msgspec.json.Decoder(Record)
_ENTRY = msgspec.json.Decoder(_Entry)
_VERSION = msgspec.json.Decoder(_Version)
_ENTRY_VERSION = msgspec.json.Decoder(_EntryVersion)
_TEXT = msgspec.json.Decoder(str)


class Recorded(msgspec.Struct, gc=False):
    """A request as it was recorded.

    Attributes:
        time: when it was counted, in milliseconds since 1970.
        record: all of it but the body.
        partial: what it does not have was not recorded.
        content: its body; None where that was not recorded.
        sums: of the body; None where they were not recorded either.
    """

    time: int
    record: Record
    partial: bool
    content: bytes | None
    sums: Body | None

    @property
    def unknown(self) -> str:
        """Why the body is not known."""
        return self.record.unknown or "no_body"

    def make_request(self) -> HttpRequest:
        """The request as the engine takes it; what was not recorded raises NotCounted when a policy reads it."""
        record = self.record
        headers = {name.lower(): self._read(value) for name, value in record.headers.items()}
        if self.content is not None:
            headers.setdefault("content-encoding", None)  # of a body that is empty, or plain
        claims = {name: self._read(value) for name, value in record.claims.items()}
        encoded = {name: value.encode("utf-8", "surrogateescape") for name, value in headers.items() if value is not None}
        known = {name: value for name, value in claims.items() if value is not None}
        facts = StatedFacts(
            route=record.route,
            address=self._read(record.address) or "",
            claims=_RecordedValues(known, claims.keys()) if self.partial else known,
        )
        return HttpRequest(
            record.method,
            _join_target(record),
            record.authority,
            _RecordedValues(encoded, headers.keys()) if self.partial else encoded,
            facts,
        )

    def _read(self, value: object) -> str | None:
        """A header, a claim or an address; None for one that the request did not have."""
        if self.partial and value is TOO_LONG:
            return _LONG_VALUE
        return None if value is None else write_claim(value)


class _RecordedValues(Mapping[str, Value]):
    """Values, some of which may not have been recorded: reading those raises NotCounted."""

    __slots__ = ("_recorded", "_values")

    def __init__(self, values: Mapping[str, Value], recorded: KeysView[str]) -> None:
        self._values = values
        self._recorded = recorded

    def __getitem__(self, name: str) -> Value:
        if name not in self._recorded:
            raise NotCounted("not_recorded")
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        if name not in self._recorded:
            raise NotCounted("not_recorded")
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def parse_line(line: bytes) -> Recorded:
    """What a line records; raises UnusableError if no request can be made of it."""
    in_field = _IN_FIELD in line
    try:
        record = _ENTRY.decode(line).loop_record if in_field else _RECORD.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _explain(line, error, in_field=in_field) from None
    if record is None:
        raise UnusableError("no_record")
    if record.record != VERSION:
        raise UnusableError("version", f"it is {record.record:g}")
    if record.unknown and not _REASON.match(record.unknown):
        raise UnusableError("invalid", "its body is unknown for a reason that is not known")
    try:
        return Recorded(_read_time(record.time), record, in_field, _read_body(record), _read_sums(record))
    except ValueError as error:
        raise UnusableError("invalid", str(error)) from None


def _explain(line: bytes, error: Exception, *, in_field: bool) -> UnusableError:
    """What is wrong with a line that could not be decoded."""
    if not line.lstrip().startswith(b"{"):
        return UnusableError("not_json")
    try:
        version = (_ENTRY_VERSION.decode(line).loop_record or _Version()) if in_field else _VERSION.decode(line)
    except (msgspec.ValidationError, RecursionError):
        return UnusableError("invalid" if in_field else "no_record", str(error))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return UnusableError("not_json")
    if version.record is None:
        return UnusableError("no_record")
    return UnusableError("invalid" if version.record == VERSION else "version", str(error))


def _read_time(value: float | str) -> int:
    """Milliseconds since 1970."""
    if isinstance(value, str):
        moment = datetime.fromisoformat(value)
        if moment.tzinfo is None:
            raise ValueError("its time has no offset from UTC")
        value = moment.timestamp()
    if not 0 <= value < _LAST:
        raise ValueError("its time is not in seconds since 1970")
    return round(value * 1000)


def _read_body(record: Record) -> bytes | None:
    """The body; None where the record has none."""
    data, record.body = bytes(record.body), msgspec.Raw()  # which would hold on to the whole line
    if data and data != b"null":
        return _TEXT.decode(data).encode() if data.startswith(b'"') else data
    if record.body_base64 is not None:
        text, record.body_base64 = record.body_base64, None
        return b64decode(text, validate=True)
    return b"" if record.body_bytes == 0 else None


def _read_sums(record: Record) -> Body | None:
    if record.body_bytes is None:
        return None
    if not 0 <= record.body_bytes < _MAX_BYTES:
        raise ValueError("its body_bytes is not a number of bytes")
    return Body(int(record.body_bytes), _read_sum(record.body_crc32), _read_sum(record.body_adler32))


def _read_sum(text: str) -> int:
    if not _SUM.match(text):
        raise ValueError(f"{text[:16]!r} is not a checksum of 8 hex digits")
    return int(text, 16)


def _join_target(record: Record) -> str:
    query = _LONG_QUERY if record.query is TOO_LONG else record.query
    return f"{record.path}?{query}" if query else record.path
