"""A large body message, read without copying its body.

protobuf copies a body twice, into the message and out of it again, which for 1 MB is dearer than everything else that is done
with it. So the body is found by hand, in the one shape that Envoy sends, and protobuf parses only what surrounds it. Every
other shape is left to protobuf altogether: the answer is always the one that protobuf would give.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from extproc.pb.external_processor_pb2 import ProcessingRequest

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
