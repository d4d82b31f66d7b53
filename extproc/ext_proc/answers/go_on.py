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
"""A phase of our own: headers whose request continues without waiting for its body, which Envoy would buffer partially.

After a plain CONTINUE, Envoy (BUFFERED_PARTIAL) begins to buffer, and passes on what it has when the stream ends. If its router
keeps bodies for retries, it does so twice (source/extensions/filters/http/ext_proc/processor_state.cc, clearAsyncState). After
CONTINUE_AND_REPLACE without a new body, it does not begin to buffer.
"""

WARNING: Final = "warning"
"""Key of the text that a request which continues has in its headers, too; missing for none."""

_TOOLS_SHOWN = 256

_WARNING = "X-Fairvisor-Warning"

_KIND = {Reason.LOOP_DETECTED: "loop", Reason.SESSION_LIMIT_EXCEEDED: "session"}
"""The subject of a warning, if it is not a budget."""

_BUDGET: Final = "budget"

# Numbers of the fields that lead to a body and to headers (envoy/service/ext_proc/v3/external_processor.proto).
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
"""Headers with checksums of the body (RFC 1864, RFC 3230, RFC 9530), to remove from a request whose body is edited."""

_WITHOUT_DIGESTS: Final = b"".join([write_field(_REMOVE_HEADERS, name.encode()) for name in _DIGESTS])

# Constants, because looking an enum's value up on its message class costs microseconds.
_OVERWRITE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def _write_header(name: str, value: str) -> bytes:
    """A header that Envoy sets, replacing any of the same name."""
    header = write_field(_KEY, name.encode()) + write_field(_RAW_VALUE, value.encode())
    return write_field(_SET_HEADERS, write_field(_HEADER, header) + _OVERWRITTEN)


STEERED: Final = _write_header("x-loopguard-steered", "1")
NARROWED: Final = _write_header("x-loopguard-narrowed", "1")
"""Headers that tell the upstream that its body was edited, as Envoy sets them."""


def let_go_on(kind: str, metadata: dict[str, Any] | None = None, *, warning: str = "") -> bytes:
    """The answer to a phase that lets the request continue.

    Args:
        kind: the phase, named as the message's field, or LAST_HEADERS.
        metadata: dynamic metadata to add.
        warning: tells the upstream about a loop; empty for none.
    """
    number = _PHASES[kind]
    response = _REPLACES if kind == LAST_HEADERS else b""
    if warning and number < _REQUEST_TRAILERS:  # by then, the headers are sent
        response += write_field(_HEADER_MUTATION, _write_header(_WARNING, warning))
    answer = write_field(number, write_field(_RESPONSE, response) if response else b"")
    return answer if metadata is None else answer + write_metadata(metadata)


def end_headers(answer: bytes) -> bytes:
    """The answer to LAST_HEADERS, made from an answer to plain headers, because protobuf merges the two."""
    return answer + _LAST


def replace_body(body: Pieces, metadata: dict[str, Any], *, warning: str, marks: tuple[bytes, ...]) -> Pieces:
    """The answer that lets a request continue with another body, in pieces, so that the body is not copied.

    It is written from the inside out, because protobuf would copy the body four times.

    Args:
        body: replaces the request's body, which was buffered; in pieces.
        metadata: dynamic metadata to add.
        warning: tells the upstream about a loop; empty for none.
        marks: headers that tell the upstream how the body was edited: STEERED, NARROWED.
    """
    size = 0
    for piece in body:
        size += len(piece)
    inner = write_head(_BODY, size)
    head = _write_edit(marks, warning, size) + write_head(_BODY_MUTATION, len(inner) + size) + inner
    head = write_head(_RESPONSE, len(head) + size) + head
    head = write_head(_REQUEST_BODY, len(head) + size) + head
    return [head, *body, write_metadata(metadata)]


def replace_headers(metadata: dict[str, Any], *, warning: str, marks: tuple[bytes, ...], size: int) -> bytes:
    """The answer to the headers of a request whose body is handed back edited.

    Args:
        metadata: dynamic metadata to add.
        warning: tells the upstream about a loop; empty for none.
        marks: headers that tell the upstream how the body was edited: STEERED, NARROWED.
        size: the length of the edited body, in bytes; negative if the request tells no length.
    """
    common = write_field(_RESPONSE, _write_edit(marks, warning, size))
    return write_field(_REQUEST_HEADERS, common) + write_metadata(metadata)


def hand_on(pieces: Pieces, *, ended: bool) -> bytes:
    """The answer that hands pieces of a request's body back; with `ended`, they are the last."""
    size = sum([len(piece) for piece in pieces])
    return _write_part(_REQUEST_BODY, write_head(_BODY, size) if size else b"", pieces, size, _ENDED if ended else b"")


def _write_part(phase: int, head: bytes, pieces: Pieces, size: int, end: bytes) -> bytes:
    """The answer with a StreamedBodyResponse: a head, pieces of this size in all, and an end."""
    size += len(head) + len(end)
    streamed = write_head(_STREAMED, size)
    size += len(streamed)
    mutation = write_head(_BODY_MUTATION, size)
    size += len(mutation)
    response = write_head(_RESPONSE, size)
    return b"".join([write_head(phase, size + len(response)), response, mutation, streamed, head, *pieces, end])


def _write_edit(marks: tuple[bytes, ...], warning: str, size: int) -> bytes:
    """The header mutation of a request whose body has this many bytes after its edits; with a negative size, no length is told.

    Envoy compares a body with its content-length, and answers 500 if they differ. It removes the length from the answer to the
    headers unless its filter has `allow_content_length_header`.
    """
    length = [_write_header("content-length", str(size))] if size >= 0 else []
    told = [_write_header(_WARNING, warning)] if warning else []
    return write_field(_HEADER_MUTATION, b"".join([*marks, *length, *told, _WITHOUT_DIGESTS]))


def hand_back(kind: str, body: bytes | memoryview) -> bytes:
    """The answer that hands a part of a body back unchanged. If Envoy keeps no bodies, only these parts are sent on.

    Args:
        kind: `request_body` or `response_body`.
        body: an HttpBody, whose fields are those of a StreamedBodyResponse.
    """
    return _write_part(_REQUEST_BODY if kind == "request_body" else _RESPONSE_BODY, b"", [body], len(body), b"")


_LAST: Final = let_go_on(LAST_HEADERS)


def make_wait(milliseconds: int) -> bytes:
    """Make Envoy wait longer for the answer."""
    response = ProcessingResponse()
    response.override_message_timeout.FromMilliseconds(milliseconds)
    return response.SerializeToString()


def _find_warning(decision: Decision) -> str:
    """The warning for the headers of a request that continues; empty for none."""
    if decision.steer is not None:
        return f"{_KIND.get(decision.steer.reason, _BUDGET)}_{decision.steer.action.value}"
    lead = decision.lead
    if not decision.warning:
        # As in Fairvisor, a delay by a budget is told as well; that by a loop is not.
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
    """Make Envoy set headers, replacing any of the same name."""
    for name, value in headers:
        option = mutation.set_headers.add(append_action=_OVERWRITE)
        option.header.key = name
        option.header.raw_value = value.encode()  # Envoy drops `value`
