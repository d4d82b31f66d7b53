"""ProcessingResponses: what Envoy is told, in bytes that are ready to be sent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from extproc.decision import Action, Decision, Outcome, Reason, loop_message
from extproc.pb.base_pb2 import HeaderValueOption
from extproc.pb.external_processor_pb2 import HeaderMutation, ProcessingResponse
from extproc.policy.bundle import DEFAULT_DETECTOR
from extproc.request import HttpRequest

NAMESPACE = "loopguard"
"""Of the dynamic metadata that answers carry."""

_WARNING = ("X-Fairvisor-Warning", "loop_warn")
_RESOURCE_EXHAUSTED = 8
_UNAVAILABLE = 14

# By name: looking an enum's value up on its message class costs microseconds.
_OVERWRITE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def go_on(kind: str, metadata: dict[str, str | int] | None = None, *, warning: bool = False) -> bytes:
    """The answer of a phase that lets the request go on.

    Args:
        kind: the phase, as the message's field is called.
        metadata: dynamic metadata that goes with it.
        warning: tell the upstream that a loop was seen.
    """
    response = ProcessingResponse()
    phase = getattr(response, kind)
    phase.SetInParent()
    if metadata is not None:
        response.dynamic_metadata.update({NAMESPACE: metadata})
    if warning and kind != "request_trailers":  # headers have gone by then
        _set_headers(phase.response.header_mutation, [_WARNING])
    return response.SerializeToString()


def wait(milliseconds: int) -> bytes:
    """Makes Envoy wait that long for the answer itself."""
    response = ProcessingResponse()
    response.override_message_timeout.FromMilliseconds(milliseconds)
    return response.SerializeToString()


def detected(decision: Decision) -> dict[str, str | int]:
    """The dynamic metadata of a decision, empty for a plain allow."""
    metadata: dict[str, str | int] = {}
    lead, shadow = decision.lead, decision.shadow
    if lead is not None:
        metadata = {
            "action": lead.action.value,
            "reason": Reason.LOOP_DETECTED.value,
            "policy": lead.policy,
            "fingerprint": lead.fingerprint,
            "count": lead.count,
        }
        if lead.detector != DEFAULT_DETECTOR:
            metadata["detector"] = lead.detector
        if decision.warning and lead.action is not Action.REJECT:
            metadata["warning"] = _WARNING[1]
    if shadow is not None:
        metadata |= {"shadow_action": shadow.action.value, "shadow_policy": shadow.policy, "shadow_count": shadow.count}
    return metadata


def _set_headers(mutation: HeaderMutation, headers: Sequence[tuple[str, str]]) -> None:
    for name, value in headers:
        option = mutation.set_headers.add(append_action=_OVERWRITE)
        option.header.key = name
        option.header.raw_value = value.encode()  # Envoy drops what stands in `value`


def refusal(lead: Outcome, metadata: dict[str, str | int], request: HttpRequest) -> bytes:
    """The immediate response of a loop: one body for every kind of client."""
    message = loop_message(lead, request.method, request.path)
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
    return _immediate(lead.reject_status, _RESOURCE_EXHAUSTED, Reason.LOOP_DETECTED, headers, body, metadata, request)


def store_unavailable(metadata: dict[str, str | int], request: HttpRequest) -> bytes:
    """The immediate response when nothing can be counted and the operator wants that refused."""
    message = "The request could not be checked because the state store is unavailable. Try again shortly."
    reason = Reason.STORE_UNAVAILABLE
    body = {"error": {"message": message, "type": reason.value, "param": None, "code": reason.value}}
    headers = [("Retry-After", "1"), ("X-Fairvisor-Reason", reason.value)]
    metadata = {"action": Action.REJECT.value, "reason": reason.value, **metadata}
    return _immediate(503, _UNAVAILABLE, reason, headers, body, metadata, request)


def _immediate(  # noqa: PLR0913  # the fields of the message
    status: int,
    grpc_status: int,
    reason: Reason,
    headers: Sequence[tuple[str, str]],
    body: dict[str, Any],
    metadata: dict[str, str | int],
    request: HttpRequest,
) -> bytes:
    if request.path.endswith("/v1/messages") or "/v1/messages/" in request.path:
        body = {"type": "error", **body}  # what Anthropic's clients look for
    response = ProcessingResponse()
    immediate = response.immediate_response
    immediate.status.code = status  # type: ignore[assignment]  # proto3 enums are open
    immediate.grpc_status.status = grpc_status
    immediate.details = reason.value
    immediate.body = json.dumps(body).encode()
    _set_headers(immediate.headers, [("content-type", "application/json"), *headers])
    response.dynamic_metadata.update({NAMESPACE: metadata})
    return response.SerializeToString()
