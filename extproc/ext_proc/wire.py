"""Parses Envoy's messages: phase, request and body, without copying bodies.

protobuf creates an object for every header and copies a body twice, which takes longer than all
other work on a message. So request messages are parsed by hand, in the one form that Envoy sends.
Messages in any other form are parsed by protobuf, so the result is always protobuf's. Attributes
and metadata are parsed only when a policy needs them.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.struct_pb2 import Value

from extproc.apis import read_path
from extproc.ext_proc.protobuf import read_varint
from extproc.pb.external_processor_pb2 import HttpBody, ProcessingRequest
from extproc.pb.processing_mode_pb2 import ProcessingMode
from extproc.request.http import (
    NO_FACTS,
    Facts,
    HttpRequest,
    decode_claims,
    opens_websocket,
    write_claim,
)
from extproc.request.secrets import is_secret

MAX_HEADERS: Final = 10_000
"""Maximum number of request headers to read; the rest are ignored (Envoy accepts 100).

Reading 100,000 takes 40 ms; no client may delay others for longer than 50 ms.
"""

# Constants: looking up an enum value on its message class takes microseconds.
BODY_NONE: Final = int(ProcessingMode.NONE)
BODY_STREAMED: Final = int(ProcessingMode.STREAMED)
BODY_BUFFERED: Final = int(ProcessingMode.BUFFERED)
BODY_BUFFERED_PARTIAL: Final = int(ProcessingMode.BUFFERED_PARTIAL)
BODY_DUPLEX: Final = int(ProcessingMode.FULL_DUPLEX_STREAMED)
BODY_GRPC: Final = int(ProcessingMode.GRPC)
"""Envoy 1.40 accepts this mode without effect: bodies pass by, whether or not they are shown."""

BODY_UNTOLD: Final = -1

_ATTRIBUTES = "envoy.filters.http.ext_proc"
_ROUTE: Final = "xds.route_name"
_ROUTE_NAME: Final = _ROUTE.encode()
_ENTRY = 160
"""Number of bytes of an attribute to keep; longer names are cut."""

_ENTRY_VALUE = 0x12  # of a map's entry, field 2
_STRING_VALUE = 0x1A  # of google.protobuf.Value, field 3
_JWT_NAMESPACE = "envoy.filters.http.jwt_authn"
_JWT_BYTES = _JWT_NAMESPACE.encode()

# A tag is a field's number and its wire type: 0 for a varint, 2 for length-delimited.
_REQUEST_HEADERS: Final = 2 << 3 | 2
_REQUEST_BODY: Final = 4 << 3 | 2
_RESPONSE_BODY: Final = 5 << 3 | 2
_METADATA_CONTEXT: Final = 8 << 3 | 2
_OBSERVABILITY_MODE: Final = 10 << 3
_PROTOCOL_CONFIG: Final = 11 << 3 | 2
_HEADER_MAP: Final = 1 << 3 | 2
_HEADERS_END: Final = 3 << 3
_HEADER: Final = 1 << 3 | 2
_NAME: Final = 1 << 3 | 2
_RAW_VALUE: Final = 3 << 3 | 2
_BODY: Final = 1 << 3 | 2
_BODY_END: Final = 2 << 3
_BODY_MODE: Final = 1 << 3
_RESPONSE_MODE: Final = 2 << 3

LARGE: Final = 4_096
"""From this size on, a view of the bytes is cheaper than a copy."""

_KIND: Final = 7
_LENGTH: Final = 2
_SIZE_BITS: Final = 35
_MORE: Final = 0x80
"""The bit that is set in every byte of a varint except the last."""

_MAX_KNOWN: Final = 64
"""Requests with more headers are not cached."""

_MAX_KNOWN_SIZE: Final = 256
_MAX_KNOWN_FACTS: Final = 1_024


class _UnusualError(Exception):
    """A message differs from the form that Envoy sends."""


class _KnownHeaders:
    """Cached headers of an earlier request."""

    def __init__(self, fields: list[bytes], headers: dict[str, bytes]) -> None:
        """Cache headers, given their bytes on the wire, except secrets."""
        self._names = list(headers)
        self._fields: list[bytes | None] = []
        self._headers: dict[str, bytes] = {}
        for field, (name, value) in zip(fields, headers.items(), strict=True):
            # No credential is cached.
            secret = is_secret(f"header:{name}") or (name == ":path" and b"?" in value)
            kept = not secret and len(field) <= _MAX_KNOWN_SIZE
            self._fields.append(field if kept else None)
            self._headers[name] = value if kept else b""

    def adapt(self, fields: list[bytes]) -> dict[str, bytes] | None:
        """Read headers with the same names; None if the names differ.

        Raises as `_read_header` does.
        """
        headers = self._headers.copy()
        for place, field in enumerate(fields):
            known = self._fields[place]
            if known is None or field != known:
                name, value = _read_header(field)
                if name != self._names[place]:
                    return None
                headers[name] = value
        return headers


_KNOWN: Final[dict[int, _KnownHeaders]] = {}
"""Cached headers, by their count. Most headers equal those of the last request from the same kind
of client."""


class _RouteAlone(Facts):
    """The route of a request whose message has been dropped."""

    def __init__(self, entry: bytes) -> None:
        self._entry = entry

    def route(self) -> str:
        """See `Facts`."""
        return _read_text_entry(self._entry)


class EnvoyMessage(Facts):
    """One ProcessingRequest, with attributes and metadata.

    Attributes:
        kind: the name of its phase; empty for an unknown one.
        headers: raw values of request_headers by lower-case name; the first of repeated headers
            wins.
        body: the body of request_body; a large one is a view of the message.
        ended: nothing more of the request follows, or of the response, if the message is about one.
        observed: Envoy does not wait for the answer.
        body_mode: how Envoy sends request bodies; BODY_UNTOLD except in a stream's first message,
            and if Envoy does not say.
        response_mode: how Envoy sends response bodies, likewise.
        token: an authorization header whose claims are trusted without verification; may be empty.
    """

    def __init__(self, kind: str, beside: bytes, parsed: ProcessingRequest | None = None) -> None:
        """Create an empty message.

        Args:
            kind: the name of its phase.
            beside: bytes that contain attributes and metadata, and possibly more.
            parsed: the same, parsed; None to parse it when needed.
        """
        self.kind = kind
        self._beside = beside
        self._parsed = parsed
        self._whole = parsed is not None
        self._unverified: dict[str, str] | None = None
        self.token = b""
        self.headers: dict[str, bytes] = {}
        self.body: bytes | memoryview = b""
        self.ended = False
        self.observed = False
        self.body_mode = BODY_UNTOLD
        self.response_mode = BODY_UNTOLD

    def read_attribute(self, name: str) -> str | None:
        """A configured attribute; None if Envoy did not send it. Raises as `parse_beside` does."""
        # The usual case; `find` is faster than `in`, which first tries a number
        if self._beside.find(name.encode()) < 0:
            return None
        attributes = self.parse_beside().attributes
        if _ATTRIBUTES not in attributes:
            return None
        found = attributes[_ATTRIBUTES].fields
        return found[name].string_value if name in found else None

    def read_status(self) -> bytes:
        """The status of a response_headers message; empty for others.

        Raises as `parse_beside` does.
        """
        headers = self.parse_beside().response_headers.headers.headers
        return next((header.raw_value for header in headers if header.key == ":status"), b"")

    def parse_beside(self) -> ProcessingRequest:
        """Parse attributes and metadata; headers and body may be missing.

        Raises:
            DecodeError: they are malformed, which cannot come from Envoy.
        """
        if self._parsed is None:
            self._parsed = ProcessingRequest.FromString(self._beside)
        return self._parsed

    def route(self) -> str:
        """See `Facts`."""
        return self.read_attribute(_ROUTE) or ""

    def address(self) -> str:
        """See `Facts`."""
        return _strip_port(self.read_attribute("source.address") or "")

    def claim(self, name: str) -> str:
        """A verified claim or, if allowed, an unverified one."""
        found: Value | None = None
        # Without these bytes, nothing was verified, and parsing is slow
        if self._beside.find(_JWT_BYTES) >= 0:
            # jwt_authn stores each payload under a configured name (payload_in_metadata).
            for payload in (
                self.parse_beside().metadata_context.filter_metadata[_JWT_NAMESPACE].fields.values()
            ):
                verified = payload.struct_value.fields
                if name in verified:
                    found = verified[name]
        if found is not None:
            kind = found.WhichOneof("kind")
            return write_claim(getattr(found, kind)) if kind else ""
        if self._unverified is None:
            self._unverified = (
                decode_claims(self.token.decode("utf-8", "surrogateescape")) if self.token else {}
            )
        return self._unverified.get(name, "")

    def identify(self) -> bytes | None:
        """See `Facts`. None if headers may be part of it, because they may contain secrets."""
        return (
            None
            if self._whole or self.token or len(self._beside) > _MAX_KNOWN_FACTS
            else self._beside
        )

    def let_go(self) -> Facts:
        """See `Facts`. The route's bytes are cut out, because parsing takes longer."""
        place = self._beside.find(_ROUTE_NAME)
        if place < 0:
            return NO_FACTS
        place += len(_ROUTE_NAME)
        return _RouteAlone(self._beside[place : place + _ENTRY])


def parse_message(data: bytes) -> EnvoyMessage:
    """Parse one serialized ProcessingRequest.

    Raises:
        DecodeError: the bytes are not a ProcessingRequest.
    """
    try:
        if data[0] == _REQUEST_HEADERS:
            return _walk_headers(data)
        if data[0] == _REQUEST_BODY:
            return _walk_body(data)
    except (_UnusualError, IndexError, ValueError):  # UnicodeDecodeError is one
        pass
    return _parse_any(data)


def _parse_any(data: bytes) -> EnvoyMessage:
    """Parse a message of any form with protobuf."""
    parsed = ProcessingRequest.FromString(data)
    message = EnvoyMessage(parsed.WhichOneof("request") or "", data, parsed)
    message.observed = parsed.observability_mode
    if parsed.HasField("protocol_config"):
        message.body_mode = parsed.protocol_config.request_body_mode
        message.response_mode = parsed.protocol_config.response_body_mode
    if message.kind == "request_headers":
        # The first of repeated headers must win, so it comes last.
        listed = reversed(parsed.request_headers.headers.headers[:MAX_HEADERS])
        message.headers = {header.key: header.raw_value for header in listed}
        message.ended = parsed.request_headers.end_of_stream
    elif message.kind == "request_body":
        message.body = parsed.request_body.body
        message.ended = parsed.request_body.end_of_stream
    elif message.kind == "response_headers":
        message.ended = parsed.response_headers.end_of_stream
    elif message.kind == "response_body":
        message.ended = parsed.response_body.end_of_stream
    else:  # trailers
        message.ended = bool(message.kind)
    return message


def cut_body(data: bytes, kind: str) -> bytes | memoryview:
    """The HttpBody in a message of kind `request_body` or `response_body`, as bytes on the wire."""
    # The form that Envoy sends
    if data[0] == (_REQUEST_BODY if kind == "request_body" else _RESPONSE_BODY):
        size, position = read_varint(data, 1)
        return memoryview(data)[position : position + size]
    part: HttpBody = getattr(ProcessingRequest.FromString(data), kind)
    return part.SerializeToString()


def _walk_headers(data: bytes) -> EnvoyMessage:
    """Parse a request_headers message.

    Raises:
        _UnusualError: it differs from the form that Envoy sends.
        IndexError: it is cut off.
        ValueError: it is malformed.
    """
    size, position = _read_size(data, 1)
    end = position + size
    message = EnvoyMessage("request_headers", data[end:])
    if data[position] != _HEADER_MAP:
        raise _UnusualError
    size, position = _read_size(data, position + 1)
    map_end = position + size
    message.headers = _read_headers(data, position, map_end)
    position = map_end
    if position != end:
        message.ended, position = _read_flag(data, position, _HEADERS_END)
    _walk_rest(data, position, end, message)
    return message


def _read_headers(data: bytes, position: int, end: int) -> dict[str, bytes]:
    """The headers between these positions.

    Most equal those of the last request with the same number.
    """
    fields: list[bytes] = []
    while position < end:
        if data[position] != _HEADER:
            raise _UnusualError
        size, start = _read_size(data, position + 1)
        position = start + size
        if len(fields) == MAX_HEADERS:
            raise _UnusualError
        fields.append(data[start:position])
    if position != end:
        raise _UnusualError
    count = len(fields)
    known = _KNOWN.get(count)
    adapted = known.adapt(fields) if known is not None else None
    if adapted is not None:
        return adapted
    headers = dict([_read_header(field) for field in fields])
    if len(headers) < count:  # a name repeats
        raise _UnusualError
    if count <= _MAX_KNOWN:
        _KNOWN[count] = _KnownHeaders(fields, headers)
    return headers


def _read_header(field: bytes) -> tuple[str, bytes]:
    """The name and value of a header."""
    if field[0] != _NAME:
        raise _UnusualError
    size, position = _read_size(field, 1)
    end = position + size
    name = field[position:end].decode()
    if end == len(field):
        return name, b""
    if field[end] != _RAW_VALUE:
        raise _UnusualError
    size, position = _read_size(field, end + 1)
    if position + size != len(field):
        raise _UnusualError
    return name, field[position:]


def _walk_body(data: bytes) -> EnvoyMessage:
    """Parse a request_body message; raises as `_walk_headers` does."""
    size, position = _read_size(data, 1)
    end = position + size
    message = EnvoyMessage("request_body", data[end:])
    if position != end and data[position] == _BODY:  # otherwise it is empty, and only marks the end
        size, position = _read_size(data, position + 1)
        stop = position + size
        message.body = data[position:stop] if size < LARGE else memoryview(data)[position:stop]
        position = stop
    if position != end:
        message.ended, position = _read_flag(data, position, _BODY_END)
    _walk_rest(data, position, end, message)
    return message


def _walk_rest(data: bytes, position: int, end: int, message: EnvoyMessage) -> None:
    """Parse the fields after the request, which should end at `position` and ends at `end`."""
    if position != end:
        raise _UnusualError
    while position < len(data):
        key = data[position]
        if key == _OBSERVABILITY_MODE:
            message.observed, position = _read_flag(data, position, key)
        elif key == _PROTOCOL_CONFIG:
            if (
                data[position + 1] == 2  # noqa: PLR2004  # bytes
                and data[position + 2] == _BODY_MODE
                and data[position + 3] < _MORE
            ):
                # Almost always the only field
                message.body_mode, position = (
                    data[position + 3],
                    position + 4,
                )
            else:
                position = _walk_config(data, position + 1, message)
        elif _METADATA_CONTEXT <= key < _MORE and key & _KIND == _LENGTH:
            size, position = _read_size(data, position + 1)
            position += size
        else:
            raise _UnusualError
    if position != len(data):
        raise _UnusualError


def _walk_config(data: bytes, position: int, message: EnvoyMessage) -> int:
    """Parse both body modes, whose size is at `position`; returns the position after them."""
    size = data[position]
    if size >= _MORE or message.body_mode != BODY_UNTOLD:
        raise _UnusualError
    message.body_mode = BODY_NONE  # the default, which is not sent
    position += 1
    end = position + size
    while position < end:
        key, mode = data[position], data[position + 1]
        if key == _BODY_MODE and mode < _MORE:
            message.body_mode = mode
        elif key == _RESPONSE_MODE and mode < _MORE:
            message.response_mode = mode
        else:
            raise _UnusualError
        position += 2
    if position != end:
        raise _UnusualError
    return position


def _read_size(data: bytes, position: int) -> tuple[int, int]:
    """The length at `position`, and the start of its content.

    Encodings longer than protobuf accepts are refused.
    """
    byte = data[position]
    position += 1
    size, bits = byte & ~_MORE, 7
    while byte >= _MORE:
        if bits == _SIZE_BITS:
            raise _UnusualError
        byte = data[position]
        position += 1
        size |= (byte & ~_MORE) << bits
        bits += 7
    return size, position


def _read_text_entry(entry: bytes) -> str:
    """The string of a Struct's entry, given the bytes after its key; empty if it is not a string.

    The bytes may be cut off.
    """
    try:
        if entry[0] != _ENTRY_VALUE:
            return ""
        _, position = read_varint(entry, 1)
        if entry[position] != _STRING_VALUE:
            return ""
        length, position = read_varint(entry, position + 1)
    except (IndexError, ValueError):
        return ""
    return entry[position : position + length].decode("utf-8", "replace")


def _read_flag(data: bytes, position: int, key: int) -> tuple[bool, int]:
    """The flag that should be at `position` with this key, and the position after it."""
    value = data[position + 1]
    if data[position] != key or value >= _MORE:
        raise _UnusualError
    return value != 0, position + 2


def read_request(message: EnvoyMessage, *, allow_unverified_jwt: bool = False) -> HttpRequest:
    """The request of a request_headers message.

    If allowed, its bearer token supplies unverified claims.
    """
    headers = message.headers
    if allow_unverified_jwt:
        message.token = headers.get("authorization", b"")
    request = HttpRequest(
        headers.get(":method", b"").decode("utf-8", "surrogateescape"),
        headers.get(":path", b"").decode("utf-8", "surrogateescape"),
        headers.get(":authority", b"").decode("utf-8", "surrogateescape"),
        headers,
        message,
    )
    if "upgrade" in headers or ":protocol" in headers:
        request.opens_responses = opens_websocket(request) and read_path(request.path).websocket
    return request


def _strip_port(address: str) -> str:
    """An address without its port: `192.0.2.1:443` or `[2001:db8::1]:443`.

    A Unix socket's path is unchanged.
    """
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.rpartition(":")[0] if address.count(":") == 1 else address
