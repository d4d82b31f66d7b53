"""Protocols that carry calls of any kind: JSON-RPC and gRPC."""
# interpreted: writes refusals, which is json's time; msgspec makes its Structs of annotations

from __future__ import annotations

import json

from msgspec import Raw

from extproc.apis.answers.api import JSON, Api, Question, Refusal
from extproc.decision import Framed
from extproc.request.document import NotCounted, decode_json

MAX_ID = 512
"""Longest id that a refusal repeats, in bytes of JSON: a UUID has 38."""

ERROR_CODE = -32000
"""Of the range that JSON-RPC leaves to servers (section 5.1); A2A's own start at -32001."""


def write_json_rpc_error(refusal: Refusal, question: Question) -> Framed:
    """An error under the request's own id; under none where it has none that an answer can bear (JSON-RPC 2.0, section 5)."""
    data = {"type": refusal.reason, "code": refusal.code, **refusal.detail}
    error = json.dumps({"code": ERROR_CODE, "message": refusal.message, "data": data}).encode()
    body = b'{"jsonrpc": "2.0", "id": %s, "error": %s}' % (_read_id(question) or b"null", error)
    return Framed(refusal.status, JSON, body)


def _read_id(question: Question) -> bytes | None:
    try:
        return read_id(question.body.id) if question.body is not None else None
    except NotCounted:
        return None


def read_id(request_id: Raw) -> bytes | None:
    """The id of a request as it was sent; None where there is none (a notification), or none that an answer can bear.

    Raises:
        NotCounted: it is not JSON.
    """
    sent = bytes(request_id)
    if not sent or len(sent) > MAX_ID:
        return None
    return None if isinstance(decode_json(sent), bool | dict | list) else sent


def write_grpc_error(refusal: Refusal, _: Question) -> Framed:
    """Words alone: Envoy makes the body of an answer to gRPC its `grpc-message`."""
    return Framed(refusal.status, "text/plain", refusal.message.encode())


JSON_RPC = Api(write_json_rpc_error)
GRPC = Api(write_grpc_error)
