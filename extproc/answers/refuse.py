"""Refusals: one body for every kind of client but those of a protocol of its own, in bytes that are ready to be sent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from extproc.answers.go_on import NAMESPACE, set_headers
from extproc.decision import CHOSEN_BY_CLIENTS, Action, Framed, Outcome, Reason
from extproc.pb.external_processor_pb2 import ProcessingResponse
from extproc.request import HttpRequest

_INVALID_ARGUMENT = 3
_RESOURCE_EXHAUSTED = 8
_UNAVAILABLE = 14


def refuse_loop(lead: Outcome, metadata: dict[str, str | int], request: HttpRequest) -> bytes:
    """The immediate response of a loop: in the shape of the request's own protocol, else one body for every kind of client."""
    message = lead.subject.tell(lead, request.method, request.path)
    body: dict[str, Any] = {
        "error": {
            "message": message,
            "type": Reason.LOOP_DETECTED.value,
            "param": None,
            "code": "recursive_loop_detected",
        },
        "detail": {"error": "recursive_loop_detected", "message": message, "cooldown_seconds": lead.retry_after},
    }
    headers = [
        # Together these stop SDKs that would sleep and retry, and still tell everybody else when to come back.
        ("x-should-retry", "false"),
        ("X-Fairvisor-Reason", Reason.LOOP_DETECTED.value),
        ("x-loopguard-policy", lead.policy),
        ("x-loopguard-fingerprint", lead.fingerprint),
        ("x-loopguard-count", str(lead.count)),
    ]
    if lead.retry_after is not None:
        headers.insert(0, ("Retry-After", str(lead.retry_after)))
    framed = lead.subject.frame(message, request.read_header("accept")) or _frame(lead.reject_status, body, request)
    return _make_immediate(framed, _RESOURCE_EXHAUSTED, Reason.LOOP_DETECTED, headers, metadata)


def refuse_uncountable(policy: str, why: str, request: HttpRequest) -> bytes:
    """The immediate response to a request that a policy cannot count and does not let pass uncounted."""
    status, words = CHOSEN_BY_CLIENTS[why]
    message = f"The request was refused because {words}, and policy {policy} lets nothing pass that it cannot count ({why})."
    reason = Reason.UNCOUNTABLE
    body = {"error": {"message": message, "type": reason.value, "param": None, "code": why}}
    headers = [("x-should-retry", "false"), ("X-Fairvisor-Reason", reason.value), ("x-loopguard-policy", policy)]
    metadata: dict[str, str | int] = {"action": Action.REJECT.value, "reason": reason.value, "policy": policy}
    return _make_immediate(_frame(status, body, request), _INVALID_ARGUMENT, reason, headers, metadata)


def refuse_without_store(metadata: dict[str, str | int], request: HttpRequest) -> bytes:
    """The immediate response when nothing can be counted and the operator wants that refused."""
    message = "The request could not be checked because the state store is unavailable. Try again shortly."
    reason = Reason.STORE_UNAVAILABLE
    body = {"error": {"message": message, "type": reason.value, "param": None, "code": reason.value}}
    headers = [("Retry-After", "1"), ("X-Fairvisor-Reason", reason.value)]
    metadata = {"action": Action.REJECT.value, "reason": reason.value, **metadata}
    return _make_immediate(_frame(503, body, request), _UNAVAILABLE, reason, headers, metadata)


def _frame(status: int, body: dict[str, Any], request: HttpRequest) -> Framed:
    """The one body for every kind of client."""
    if request.path.endswith("/v1/messages") or "/v1/messages/" in request.path:
        body = {"type": "error", **body}  # what Anthropic's clients look for
    return Framed(status, "application/json", json.dumps(body).encode())


def _make_immediate(
    framed: Framed,
    grpc_status: int,
    reason: Reason,
    headers: Sequence[tuple[str, str]],
    metadata: dict[str, str | int],
) -> bytes:
    response = ProcessingResponse()
    immediate = response.immediate_response
    immediate.status.code = framed.status  # type: ignore[assignment]  # proto3 enums are open
    immediate.grpc_status.status = grpc_status
    immediate.details = reason.value
    immediate.body = framed.body
    set_headers(immediate.headers, [("content-type", framed.content_type), *headers])
    response.dynamic_metadata.update({NAMESPACE: metadata})
    return response.SerializeToString()
