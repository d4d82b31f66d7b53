"""Parses a log line into a recorded request. docs/replay.md has the format.

A line of an access log has a partial record in the field `loop_record`: the request may have had
values that are missing there. Any other line is itself a record, and complete.
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
from extproc.request.secrets import list_places

FIELD = "loop_record"
"""Field of the access log, as `envoy-config` writes it."""

_IN_FIELD = f'"{FIELD}"'.encode()
_LAST = 253_402_300_800
"""The year 10,000: later times are not in seconds."""

_MAX_BYTES = 2**53
_REASON = re.compile(r"[a-z][a-z_]{0,39}\Z")
_SUM = re.compile(r"[0-9a-f]{8}\Z")
_LONG_VALUE = "x" * (MAX_DESCRIPTOR + 1)
_LONG_QUERY = "&" * (MAX_MARKS + 1)

Value = TypeVar("Value")


class UnusableError(Exception):
    """A line without a usable request; `logs.PROBLEMS` describes its `kind`."""

    def __init__(self, kind: str, why: str = "") -> None:
        super().__init__(why)
        self.kind = kind


class Record(msgspec.Struct, gc=False):
    """A record; see docs/replay.md.

    Numbers are floats, because protobuf's Structs write a fraction.
    """

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
    """A recorded request.

    Attributes:
        time: in milliseconds since 1970.
        record: everything except the body.
        partial: whether missing values are unknown.
        content: the body; None if it was not recorded.
        sums: length and checksums of the body; None if they were not recorded.
    """

    time: int
    record: Record
    partial: bool
    content: bytes | None
    sums: Body | None

    @property
    def unknown(self) -> str:
        """Why the body is unknown."""
        return self.record.unknown or "no_body"

    def make_request(self) -> HttpRequest:
        """A request for the engine; reading a value that was not recorded raises NotCounted."""
        record = self.record
        headers = {name.lower(): self._read(value) for name, value in record.headers.items()}
        if self.content is not None:
            headers.setdefault("content-encoding", None)  # the body is empty or not encoded
        _mark_absent_credentials(record, headers)
        claims = {name: self._read(value) for name, value in record.claims.items()}
        encoded = {
            name: value.encode("utf-8", "surrogateescape")
            for name, value in headers.items()
            if value is not None
        }
        known = {name: value for name, value in claims.items() if value is not None}
        facts = StatedFacts(
            route=record.route,
            address=self._read(record.address) or "",
            claims=_RecordedValues(known, claims.keys()) if self.partial else known,
        )
        query = _LONG_QUERY if record.query is TOO_LONG else record.query
        return HttpRequest(
            record.method,
            f"{record.path}?{query}" if query else record.path,
            record.authority,
            _RecordedValues(encoded, headers.keys()) if self.partial else encoded,
            facts,
        )

    def _read(self, value: object) -> str | None:
        """A header, claim or address; None if the request did not have it."""
        if self.partial and value is TOO_LONG:
            return _LONG_VALUE
        return None if value is None else write_claim(value)


def _mark_absent_credentials(record: Record, headers: dict[str, str | None]) -> None:
    """Mark credential headers as absent that are known to be; see `recording`."""
    found = False
    for place in list_places(record.path):
        source, _, name = place.partition(":")
        if source != "header":
            found = found or f"{name}=" in str(record.query)
            continue
        if found:
            headers.setdefault(name, None)
        found = found or bool(headers.get(name))


class _RecordedValues(Mapping[str, Value]):
    """Values of a partial record; reading one that was not recorded raises NotCounted."""

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
    """Parse a line; raises UnusableError if it records no request."""
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
        return Recorded(
            _read_time(record.time), record, in_field, _read_body(record), _read_sums(record)
        )
    except ValueError as error:
        raise UnusableError("invalid", str(error)) from None


def _explain(line: bytes, error: Exception, *, in_field: bool) -> UnusableError:
    if not line.lstrip().startswith(b"{"):
        return UnusableError("not_json")
    try:
        version = (
            (_ENTRY_VERSION.decode(line).loop_record or _Version())
            if in_field
            else _VERSION.decode(line)
        )
    except (msgspec.ValidationError, RecursionError):
        return UnusableError("invalid" if in_field else "no_record", str(error))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return UnusableError("not_json")
    if version.record is None:
        return UnusableError("no_record")
    return UnusableError("invalid" if version.record == VERSION else "version", str(error))


def _read_time(value: float | str) -> int:
    if isinstance(value, str):
        moment = datetime.fromisoformat(value)
        if moment.tzinfo is None:
            raise ValueError("its time has no offset from UTC")
        value = moment.timestamp()
    if not 0 <= value < _LAST:
        raise ValueError("its time is not in seconds since 1970")
    return round(value * 1000)


def _read_body(record: Record) -> bytes | None:
    # The old value keeps the whole line in memory
    data, record.body = bytes(record.body), msgspec.Raw()
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
    return Body(
        int(record.body_bytes), _read_sum(record.body_crc32), _read_sum(record.body_adler32)
    )


def _read_sum(text: str) -> int:
    if not _SUM.match(text):
        raise ValueError(f"{text[:16]!r} is not a checksum of 8 hex digits")
    return int(text, 16)
