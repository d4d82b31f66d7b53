"""What Envoy's messages say: the request that they tell of, and large bodies without copying them.

protobuf copies a body twice, into the message and out of it again, which for 1 MB is dearer than everything else that is done
with it. So the body is found by hand, in the one shape that Envoy sends, and protobuf parses only what surrounds it. Every
other shape is left to protobuf altogether: the answer is always the one that protobuf would give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Value

from extproc.pb.base_pb2 import HeaderValue
from extproc.pb.external_processor_pb2 import ProcessingRequest
from extproc.pb.processing_mode_pb2 import ProcessingMode
from extproc.request import Facts, HttpRequest, decode_claims, write_claim

MAX_HEADERS = 10_000
"""So many headers of a request are read (Envoy itself takes 100 by default); those behind them count as missing.

Reading 100,000 takes 40 ms; nothing a client sends may hold up the others for longer than 50 ms.
"""

# Body modes by name: looking an enum's value up on its message class costs microseconds.
BODY_NONE = int(ProcessingMode.NONE)
BODY_STREAMED = int(ProcessingMode.STREAMED)
BODY_BUFFERED = int(ProcessingMode.BUFFERED)
UNSUPPORTED_BODY_MODES = (int(ProcessingMode.FULL_DUPLEX_STREAMED), int(ProcessingMode.GRPC))

_ATTRIBUTES = "envoy.filters.http.ext_proc"
_JWT_NAMESPACE = "envoy.filters.http.jwt_authn"

LARGE = 4_096
"""From this many bytes on a message is worth it."""

# A key on the wire is a field's number and its kind: here fields 4 and 1, both with a length (kind 2).
_REQUEST_BODY = 4 << 3 | 2
_BODY = 1 << 3 | 2
_MAX_LENGTH_BYTES = 4
_MAX_BEHIND = 127
"""So many bytes may follow the body in its own message, a length that one byte spells; Envoy sends two."""


def parse_large(data: bytes) -> tuple[ProcessingRequest, bytes | memoryview]:
    """Parse one serialized ProcessingRequest.

    Returns:
        the message, in which `request_body.body` means nothing;
        what belongs there.

    Raises:
        DecodeError: the bytes are not a ProcessingRequest.
    """
    try:
        return _parse_around_body(data)
    except (DecodeError, IndexError):
        message = ProcessingRequest.FromString(data)
        return message, message.request_body.body


def _parse_around_body(data: bytes) -> tuple[ProcessingRequest, memoryview]:
    inside, end = _extent(data, 0, _REQUEST_BODY)
    start, stop = _extent(data, inside, _BODY)
    if not end - _MAX_BEHIND <= stop <= end <= len(data) <= end + LARGE:
        raise DecodeError("not the usual shape")
    behind, after = data[stop:end], data[end:]
    stand_in = bytes(len(data) - stop + 1)  # longer than any body that the bytes behind the first could hold
    message = ProcessingRequest()
    message.request_body.body = stand_in
    # On the wire a message may come in parts, which are merged.
    message.MergeFromString(b"%c%c%b%b" % (_REQUEST_BODY, len(behind), behind, after))
    if message.request_body.body != stand_in:
        raise DecodeError("another body, or something else, takes the place of the first")
    return message, memoryview(data)[start:stop]


def _extent(data: bytes, position: int, key: int) -> tuple[int, int]:
    """Where the contents of the field at `position` start and stop."""
    if data[position] != key:
        raise DecodeError("another field")
    length = 0
    for place in range(_MAX_LENGTH_BYTES):
        position += 1
        length |= (data[position] & 0x7F) << 7 * place
        if data[position] < 0x80:  # noqa: PLR2004  # the last byte of a varint
            return position + 1, position + 1 + length
    raise DecodeError("a length beyond all that is sent")


def read_attributes(message: ProcessingRequest) -> Mapping[str, Value]:
    """The attributes that Envoy was asked for and has; they come with a stream's first message."""
    return message.attributes[_ATTRIBUTES].fields if _ATTRIBUTES in message.attributes else {}


def read_request(message: ProcessingRequest, *, allow_unverified_jwt: bool = False) -> HttpRequest:
    """The request that a request_headers message tells of.

    Args:
        message: the first of its stream; it is kept until the request lets go of its facts.
        allow_unverified_jwt: where Envoy verified no claim, take it from the bearer token as it is.
    """
    listed: Sequence[HeaderValue] = message.request_headers.headers.headers
    if len(listed) > MAX_HEADERS:
        listed = listed[:MAX_HEADERS]
    headers = {header.key: header.raw_value for header in listed}
    if len(headers) < len(listed):  # a name repeats, and the first wins
        headers = {header.key: header.raw_value for header in reversed(listed)}
    token = headers.get("authorization", b"") if allow_unverified_jwt else b""
    return HttpRequest(
        _decode(headers.get(":method", b"")),
        _decode(headers.get(":path", b"")),
        _decode(headers.get(":authority", b"")),
        headers,
        _EnvoyFacts(message, token),
    )


class _EnvoyFacts(Facts):
    """What Envoy's message says beside the headers."""

    def __init__(self, message: ProcessingRequest, token: bytes) -> None:
        """Read nothing yet; `token` is the authorization to believe, empty for none."""
        self._message = message
        self._token = token
        self._unverified: dict[str, str] | None = None

    def route(self) -> str:
        """See `Facts`."""
        return self._attribute("xds.route_name")

    def address(self) -> str:
        """See `Facts`."""
        return _strip_port(self._attribute("source.address"))

    def claim(self, name: str) -> str:
        """The claim as Envoy verified it; an unverified one fills the gap where that is allowed."""
        metadata = self._message.metadata_context.filter_metadata
        found: Value | None = None
        if _JWT_NAMESPACE in metadata:
            # jwt_authn files each payload under a name of the operator's choice (payload_in_metadata).
            for payload in metadata[_JWT_NAMESPACE].fields.values():
                verified = payload.struct_value.fields
                if name in verified:
                    found = verified[name]
        if found is not None:
            kind = found.WhichOneof("kind")
            return write_claim(getattr(found, kind)) if kind else ""
        if self._unverified is None:
            self._unverified = decode_claims(_decode(self._token)) if self._token else {}
        return self._unverified.get(name, "")

    def _attribute(self, name: str) -> str:
        found = read_attributes(self._message)
        return found[name].string_value if name in found else ""


def _decode(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


def _strip_port(address: str) -> str:
    """`source.address` without its port: `192.0.2.1:443` or `[2001:db8::1]:443`; a Unix socket's path stays as it is."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.rpartition(":")[0] if address.count(":") == 1 else address
