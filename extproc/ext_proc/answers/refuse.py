"""Refusals in the format of the called API, as serialized bytes."""

from __future__ import annotations

from collections.abc import Sequence
from time import time
from typing import Any, Final
from uuid import uuid4

from extproc.apis import find_endpoint
from extproc.apis.api import Completion, Question, Refusal
from extproc.budgets.subject import BudgetSubject
from extproc.decision import CHOSEN_BY_CLIENTS, Action, Framed, Outcome, Reason, Subject
from extproc.engine.exchange import Exchange
from extproc.engine.plan import Plan
from extproc.ext_proc.answers.budgets import list_refusal_headers
from extproc.ext_proc.answers.let_pass import set_headers
from extproc.ext_proc.answers.metadata import write_metadata
from extproc.ext_proc.answers.status import Content, choose_status
from extproc.pb.external_processor_pb2 import ProcessingResponse
from extproc.request.http import RESPONSES_WEBSOCKET, HttpRequest
from extproc.sessions.limits import SessionSubject

_LOOP = "recursive_loop_detected"

KILLED_STATUS: Final = 429
KILLED_SECONDS: Final = "3600"
"""`Retry-After`, as in Fairvisor: when an operator will lift the switch is unknown."""

_WAIT_STATUS = 429
"""SDKs retry after `Retry-After`."""

_PAYMENT_REQUIRED = 402
_QUOTA = "insufficient_quota"
"""Clients treat this code as final."""

_INVALID_ARGUMENT = 3
_RESOURCE_EXHAUSTED = 8
_UNAVAILABLE = 14


def refuse(lead: Outcome, metadata: dict[str, Any], exchange: Exchange) -> bytes:
    """The immediate response for the strictest outcome."""
    if isinstance(lead.subject, SessionSubject):
        return refuse_session(lead, lead.subject, metadata, exchange.request, exchange.shown)
    if isinstance(lead.subject, BudgetSubject):
        return refuse_budget(lead, lead.subject, metadata, exchange.request, exchange.shown)
    return refuse_loop(lead, metadata, exchange)


def refuse_budget(
    lead: Outcome,
    subject: BudgetSubject,
    metadata: dict[str, Any],
    request: HttpRequest,
    content: Content,
) -> bytes:
    """The immediate response for a budget that has no room for the request.

    Usually there will be room after `Retry-After`. If the request is larger than the whole budget,
    the refusal is final.
    """
    reason, final = subject.reason, lead.retry_after is None
    status = lead.refusal.status or (
        choose_status(request, content, final=True) if final else _WAIT_STATUS
    )
    message = f"{subject.write_message(lead, request.method, request.path)} ({reason.value})"
    detail = {
        "error": reason.value,
        "message": message,
        "rule": subject.rule,
        "retry_after": lead.retry_after,
    }
    framed = _frame(Refusal(status, message, reason.value, reason.value, detail), request, content)
    return _make_immediate(
        framed, _RESOURCE_EXHAUSTED, reason, list_refusal_headers(lead, subject), metadata
    )


def refuse_session(
    lead: Outcome,
    subject: SessionSubject,
    metadata: dict[str, Any],
    request: HttpRequest,
    content: Content,
) -> bytes:
    """The immediate response for a session that has used up a limit.

    It has a Retry-After only if the session may have money left once its open requests are
    answered; otherwise waiting does not help.
    """
    reason, final = subject.reason, lead.retry_after is None
    status = (
        (lead.refusal.status or choose_status(request, content, final=True))
        if final
        else _WAIT_STATUS
    )
    error = _LOOP if reason is Reason.LOOP_DETECTED else reason.value
    kind, code = (_QUOTA, _QUOTA) if status == _PAYMENT_REQUIRED else (reason.value, error)
    message = f"{subject.write_message(lead, request.method, request.path)} ({error})"
    used, allowed = subject.shown
    detail = {
        "error": error,
        "message": message,
        "limit": subject.limit,
        "used": used,
        "allowed": allowed,
    }
    framed = _frame(Refusal(status, message, kind, code, detail), request, content)
    headers = [
        ("x-should-retry", "false") if final else ("Retry-After", str(lead.retry_after)),
        ("X-Fairvisor-Reason", reason.value),
        ("x-loopguard-policy", lead.policy),
        ("x-loopguard-limit", subject.limit),
        ("x-loopguard-used", f"{used:.9g}"),
        ("x-loopguard-allowed", f"{allowed:.9g}"),
    ]
    return _make_immediate(framed, _RESOURCE_EXHAUSTED, reason, headers, metadata)


def refuse_loop(lead: Outcome, metadata: dict[str, Any], exchange: Exchange) -> bytes:
    """The immediate response for a loop."""
    request = exchange.request
    message = write_loop_message(lead, request)
    reason = Reason.LOOP_DETECTED
    detail = {"error": _LOOP, "message": message, "cooldown_seconds": lead.retry_after}
    status = lead.refusal.status or choose_status(
        request, exchange.shown, final=lead.retry_after is None
    )
    refusal = Refusal(status, message, reason.value, _LOOP, detail)
    framed = lead.subject.frame(message, request.read_header("accept"))
    if framed is None:
        answer = exchange.frame_answer(lead, message) if lead.refusal.completes else ""
        framed = _frame(refusal, request, exchange.shown, answer)
    headers = [
        # With Retry-After, this stops SDKs that would sleep and retry, and still tells other
        # clients when to retry.
        ("x-should-retry", "false"),
        ("X-Fairvisor-Reason", reason.value),
        ("x-loopguard-policy", lead.policy),
        ("x-loopguard-fingerprint", lead.fingerprint),
        ("x-loopguard-count", str(lead.count)),
    ]
    if lead.retry_after is not None:
        headers.insert(0, ("Retry-After", str(lead.retry_after)))
    return _make_immediate(framed, _RESOURCE_EXHAUSTED, reason, headers, metadata)


def write_loop_message(lead: Outcome, request: HttpRequest) -> str:
    """The message for the client and its model."""
    return f"{lead.subject.write_message(lead, request.method, request.path)} ({_LOOP})"


def refuse_uncountable(
    policy: str, why: str, metadata: dict[str, Any], request: HttpRequest, content: Content
) -> bytes:
    """The immediate response of a policy that refuses requests which it cannot count."""
    status, words = CHOSEN_BY_CLIENTS[why]
    message = (
        f"The request was refused because {words}, and policy {policy} refuses requests "
        f"that it cannot count ({why})."
    )
    reason = Reason.UNCOUNTABLE
    headers = [
        ("x-should-retry", "false"),
        ("X-Fairvisor-Reason", reason.value),
        ("x-loopguard-policy", policy),
    ]
    if why == RESPONSES_WEBSOCKET:
        message = (
            f"The WebSocket was refused because policy {policy} could not count the calls in it."
            f" Send each call to the same URL by HTTP POST instead. ({why})"
        )
        headers = [*headers, ("Upgrade", "HTTP/1.1"), ("Connection", "Upgrade")]
    framed = _frame(Refusal(status, message, reason.value, why, {}), request, content)
    metadata = {**metadata, "action": Action.REJECT.value, "reason": reason.value, "policy": policy}
    return _make_immediate(framed, _INVALID_ARGUMENT, reason, headers, metadata)


def refuse_killed(request: HttpRequest) -> bytes:
    """The immediate response for a kill switch."""
    return _refuse_stopped(Reason.KILL_SWITCH, KILLED_STATUS, KILLED_SECONDS, "", request, None)


def refuse_blocked(
    plan: Plan, seconds: int, request: HttpRequest, content: Content, subject: Subject
) -> bytes:
    """The immediate response for a request that an operator blocks for this many more seconds."""
    status = choose_status(request, content, final=True) if plan.chooses_status else KILLED_STATUS
    return _refuse_stopped(Reason.BLOCKED, status, str(seconds), plan.id, request, content, subject)


def _refuse_stopped(  # noqa: PLR0913  # the differences between the two kinds
    reason: Reason,
    status: int,
    seconds: str,
    policy: str,
    request: HttpRequest,
    content: Content,
    subject: Subject | None = None,
) -> bytes:
    """Refuse by an operator's order.

    Clients must not see the operator's reason, so it is omitted.
    """
    message = (
        "An operator has blocked requests like this one. Do not send it again: tell the user, and "
        "wait for the operator."
        f" ({reason.value})"
    )
    framed = subject.frame(message, request.read_header("accept")) if subject is not None else None
    if framed is None:
        framed = _frame(Refusal(status, message, reason.value, reason.value, {}), request, content)
    headers = [("x-should-retry", "false"), ("X-Fairvisor-Reason", reason.value)]
    if status == KILLED_STATUS:
        headers.insert(0, ("Retry-After", seconds))
    metadata: dict[str, Any] = {"action": Action.REJECT.value, "reason": reason.value}
    if policy:
        headers.append(("x-loopguard-policy", policy))
        metadata["policy"] = policy
    return _make_immediate(framed, _RESOURCE_EXHAUSTED, reason, headers, metadata)


def refuse_without_store(metadata: dict[str, Any], request: HttpRequest, content: Content) -> bytes:
    """The immediate response with `--on-store-error reject` while the store is unavailable."""
    reason = Reason.STORE_UNAVAILABLE
    words = (
        "The request could not be checked because the state store is unavailable. Try again "
        "shortly."
    )
    framed = _frame(
        Refusal(503, f"{words} ({reason.value})", reason.value, reason.value, {}), request, content
    )
    headers = [("Retry-After", "1"), ("X-Fairvisor-Reason", reason.value)]
    metadata = {"action": Action.REJECT.value, "reason": reason.value, **metadata}
    return _make_immediate(framed, _UNAVAILABLE, reason, headers, metadata)


def _frame(refusal: Refusal, request: HttpRequest, content: Content, answer: str = "") -> Framed:
    """Write a refusal in the API's format: as an error or, if possible, as the model's answer."""
    question = Question(request, content)
    endpoint, framed = find_endpoint(question), None
    if answer and endpoint.complete is not None:
        framed = endpoint.complete(
            Completion(answer, question.model, uuid4().hex, int(time())), question
        )
    return framed or endpoint.write_error(refusal, question)


def _make_immediate(
    framed: Framed,
    grpc_status: int,
    reason: Reason,
    headers: Sequence[tuple[str, str]],
    metadata: dict[str, Any],
) -> bytes:
    response = ProcessingResponse()
    immediate = response.immediate_response
    immediate.status.code = framed.status  # type: ignore[assignment]  # proto3 enums are open
    immediate.grpc_status.status = grpc_status
    immediate.details = reason.value
    immediate.body = framed.body
    set_headers(
        immediate.headers, [("content-type", framed.content_type), *framed.headers, *headers]
    )
    return response.SerializeToString() + write_metadata(metadata)
