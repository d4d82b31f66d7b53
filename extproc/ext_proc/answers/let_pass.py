"""Answers that let a request continue, as serialized bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from extproc.budgets.subject import BudgetSubject
from extproc.decision import Action, Decision, Reason
from extproc.ext_proc.answers.metadata import write_field, write_head, write_metadata
from extproc.pb.base_pb2 import HeaderValueOption
from extproc.pb.external_processor_pb2 import HeaderMutation, ProcessingResponse
from extproc.policy.bundle import DEFAULT_DETECTOR
from extproc.request.patch import Pieces
from extproc.sessions.limits import SessionSubject

LAST_HEADERS: Final = "last_request_headers"
"""Our own phase: headers whose request continues without its body, in mode BUFFERED_PARTIAL.

After a plain CONTINUE, Envoy starts to buffer the body, and forwards the buffer when the stream
ends. If its router keeps bodies for retries, it does so twice
(source/extensions/filters/http/ext_proc/processor_state.cc, clearAsyncState). After
CONTINUE_AND_REPLACE without a new body, it does not buffer.
"""

WARNING: Final = "warning"
"""Metadata key of the warning in a continuing request's headers; missing if there is none."""

_TOOLS_SHOWN = 256

_WARNING = "X-Fairvisor-Warning"

_KIND = {Reason.LOOP_DETECTED: "loop", Reason.SESSION_LIMIT_EXCEEDED: "session"}
"""How a warning begins, unless it is about a budget."""

_BUDGET: Final = "budget"

# Field numbers on the way to a body and to headers
# (envoy/service/ext_proc/v3/external_processor.proto).
_REQUEST_HEADERS, _REQUEST_BODY, _RESPONSE_BODY, _REQUEST_TRAILERS = 1, 3, 4, 5
_RESPONSE, _BODY_MUTATION, _BODY, _STREAMED = 1, 3, 1, 3
_PHASES: Final = {
    "request_headers": _REQUEST_HEADERS,
    LAST_HEADERS: _REQUEST_HEADERS,
    "response_headers": 2,
    "request_body": _REQUEST_BODY,
    "response_body": _RESPONSE_BODY,
    "request_trailers": _REQUEST_TRAILERS,
    "response_trailers": 6,
}
_REPLACES: Final = b"\x08\x01"  # status of a CommonResponse: CONTINUE_AND_REPLACE
_ENDED: Final = b"\x10\x01"  # end_of_stream of a StreamedBodyResponse
_HEADER_MUTATION, _SET_HEADERS, _HEADER, _KEY, _RAW_VALUE = 2, 1, 1, 1, 3
_OVERWRITTEN: Final = b"\x18\x02"  # append_action: OVERWRITE_IF_EXISTS_OR_ADD
_REMOVE_HEADERS: Final = 2

_DIGESTS: Final = ("content-md5", "digest", "content-digest", "repr-digest")
"""Headers with the body's checksum (RFC 1864, 3230, 9530), removed if the body is edited."""

_WITHOUT_DIGESTS: Final = b"".join(
    [write_field(_REMOVE_HEADERS, name.encode()) for name in _DIGESTS]
)

# Constants: looking up an enum value on its message class takes microseconds.
_OVERWRITE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def _write_header(name: str, value: str) -> bytes:
    """A mutation that sets a header, replacing existing ones."""
    header = write_field(_KEY, name.encode()) + write_field(_RAW_VALUE, value.encode())
    return write_field(_SET_HEADERS, write_field(_HEADER, header) + _OVERWRITTEN)


STEERED: Final = _write_header("x-loopguard-steered", "1")
NARROWED: Final = _write_header("x-loopguard-narrowed", "1")
"""Mutations that tell the upstream that the body was edited."""


def let_pass(kind: str, metadata: dict[str, Any] | None = None, *, warning: str = "") -> bytes:
    """The answer to a phase that lets the request continue.

    Args:
        kind: the phase, named as the message's field, or LAST_HEADERS.
        metadata: dynamic metadata to add.
        warning: the warning for the upstream; may be empty.
    """
    number = _PHASES[kind]
    response = _REPLACES if kind == LAST_HEADERS else b""
    if warning and number < _REQUEST_TRAILERS:  # later, the headers have been sent
        response += write_field(_HEADER_MUTATION, _write_header(_WARNING, warning))
    answer = write_field(number, write_field(_RESPONSE, response) if response else b"")
    return answer if metadata is None else answer + write_metadata(metadata)


def end_headers(answer: bytes) -> bytes:
    """Turn an answer to headers into one to LAST_HEADERS. Protobuf merges the two."""
    return answer + _LAST


def replace_body(
    body: Pieces, metadata: dict[str, Any], *, warning: str, marks: tuple[bytes, ...]
) -> Pieces:
    """The answer that lets a request continue with another body.

    It is written from the inside out and in pieces, because protobuf would copy the body four
    times.

    Args:
        body: the new body, in pieces; the old one was buffered.
        metadata: dynamic metadata to add.
        warning: the warning for the upstream; may be empty.
        marks: STEERED, NARROWED, or both.
    """
    size = 0
    for piece in body:
        size += len(piece)
    inner = write_head(_BODY, size)
    head = _write_edit(marks, warning, size) + write_head(_BODY_MUTATION, len(inner) + size) + inner
    head = write_head(_RESPONSE, len(head) + size) + head
    head = write_head(_REQUEST_BODY, len(head) + size) + head
    return [head, *body, write_metadata(metadata)]


def replace_headers(
    metadata: dict[str, Any], *, warning: str, marks: tuple[bytes, ...], size: int
) -> bytes:
    """The answer to the headers of a request whose body is handed back edited.

    Args:
        metadata: dynamic metadata to add.
        warning: the warning for the upstream; may be empty.
        marks: STEERED, NARROWED, or both.
        size: the length of the edited body, in bytes; negative if the request has no
            content-length.
    """
    common = write_field(_RESPONSE, _write_edit(marks, warning, size))
    return write_field(_REQUEST_HEADERS, common) + write_metadata(metadata)


def hand_on(pieces: Pieces, *, ended: bool) -> bytes:
    """The answer that hands back pieces of a request's body; `ended`: the last ones."""
    size = sum([len(piece) for piece in pieces])
    return _write_part(
        _REQUEST_BODY,
        write_head(_BODY, size) if size else b"",
        pieces,
        size,
        _ENDED if ended else b"",
    )


def _write_part(phase: int, head: bytes, pieces: Pieces, size: int, end: bytes) -> bytes:
    """An answer with a StreamedBodyResponse: a head, pieces of this total size, and an end."""
    size += len(head) + len(end)
    streamed = write_head(_STREAMED, size)
    size += len(streamed)
    mutation = write_head(_BODY_MUTATION, size)
    size += len(mutation)
    response = write_head(_RESPONSE, size)
    return b"".join(
        [write_head(phase, size + len(response)), response, mutation, streamed, head, *pieces, end]
    )


def _write_edit(marks: tuple[bytes, ...], warning: str, size: int) -> bytes:
    """The header mutation for an edited body; a negative size sets no content-length.

    Envoy compares a body with its content-length, and answers 500 if they differ. It removes the
    content-length from the answer to the headers unless its filter has
    `allow_content_length_header`.
    """
    length = [_write_header("content-length", str(size))] if size >= 0 else []
    told = [_write_header(_WARNING, warning)] if warning else []
    return write_field(_HEADER_MUTATION, b"".join([*marks, *length, *told, _WITHOUT_DIGESTS]))


def hand_back(kind: str, body: bytes | memoryview) -> bytes:
    """The answer that hands back a part of a body unchanged.

    If Envoy keeps no bodies, it forwards only these parts.

    Args:
        kind: `request_body` or `response_body`.
        body: an HttpBody, which has the same fields as a StreamedBodyResponse.
    """
    return _write_part(
        _REQUEST_BODY if kind == "request_body" else _RESPONSE_BODY, b"", [body], len(body), b""
    )


_LAST: Final = let_pass(LAST_HEADERS)


def make_wait(milliseconds: int) -> bytes:
    """The answer that makes Envoy wait longer."""
    response = ProcessingResponse()
    response.override_message_timeout.FromMilliseconds(milliseconds)
    return response.SerializeToString()


def _find_warning(decision: Decision) -> str:
    """The warning for the headers of a request that continues; may be empty."""
    if decision.steer is not None:
        return f"{_KIND.get(decision.steer.reason, _BUDGET)}_{decision.steer.action.value}"
    lead = decision.lead
    if not decision.warning:
        # As in Fairvisor, a delay by a budget is a warning, and a delay by a loop is not.
        delayed = lead is not None and lead.action is Action.THROTTLE and lead.reason not in _KIND
        return f"{_BUDGET}_throttle" if delayed else ""
    return f"{_KIND.get(lead.reason if lead is not None else Reason.LOOP_DETECTED, _BUDGET)}_warn"


def make_metadata(decision: Decision) -> dict[str, Any]:
    """The dynamic metadata of a decision; empty for a plain allow."""
    metadata: dict[str, Any] = {}
    lead, shadow = decision.lead, decision.shadow
    if lead is not None:
        metadata = {
            "action": lead.action.value,
            "reason": lead.reason.value,
            "policy": lead.policy,
            "fingerprint": lead.fingerprint,
            "count": lead.count,
            "tenant": lead.tenant,
        }
        if tools := lead.list_tools():
            metadata["tool"] = " ".join(tools)[:_TOOLS_SHOWN]
        if lead.detector != DEFAULT_DETECTOR:
            metadata["detector"] = lead.detector
        if isinstance(lead.subject, SessionSubject):
            used, allowed = lead.subject.shown
            metadata |= {"limit": lead.subject.limit, "used": used, "allowed": allowed}
        elif isinstance(lead.subject, BudgetSubject):
            metadata["rule"] = lead.subject.rule
        if lead.action is not Action.REJECT and (warning := _find_warning(decision)):
            metadata[WARNING] = warning
    if shadow is not None:
        metadata |= {
            "shadow_action": shadow.action.value,
            "shadow_policy": shadow.policy,
            "shadow_count": shadow.count,
            "shadow_fingerprint": shadow.fingerprint,
            "shadow_tenant": shadow.tenant,
        }
    return metadata


def set_headers(mutation: HeaderMutation, headers: Sequence[tuple[str, str]]) -> None:
    """Set headers, replacing existing ones."""
    for name, value in headers:
        option = mutation.set_headers.add(append_action=_OVERWRITE)
        option.header.key = name
        option.header.raw_value = value.encode()  # Envoy drops `value`
