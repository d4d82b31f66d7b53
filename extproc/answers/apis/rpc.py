"""Protocols that carry calls of any kind: JSON-RPC and gRPC."""

from __future__ import annotations

import json

from extproc.answers.apis.api import JSON, Api, Question, Refusal
from extproc.decision import Framed
from extproc.similarity.document import NotCounted
from extproc.similarity.mcp import ERROR_CODE, read_id


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


def write_grpc_error(refusal: Refusal, _: Question) -> Framed:
    """Words alone: Envoy makes the body of an answer to gRPC its `grpc-message`."""
    return Framed(refusal.status, "text/plain", refusal.message.encode())


JSON_RPC = Api(write_json_rpc_error)
GRPC = Api(write_grpc_error)
