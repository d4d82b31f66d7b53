"""`/sessions` and `/sessions/<id>`: what runs have used up and what they have done, as JSON for people and programs.

The names of what is counted are those of in-process SDKs' session reports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from time import time
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from extproc.operator.admin.pages import Page, is_caller, is_near, read_order, send_page, write_time
from extproc.operator.admin.sessions import CallRow, RefusalRow, SessionRow, SessionView, SharedSessions
from extproc.operator.session_table import convert_amount, convert_dollars, name_killer

VERSION = 1
"""Of the JSON: fields may be added to it, none changes its meaning."""

_SORTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "last": lambda session: session["last_seen"],
    "cost": lambda session: session["actual_cost"],
    "steps": lambda session: session["total_step_count"],
    "tool_calls": lambda session: session["total_tool_calls"],
    "blocks": lambda session: session["total_block_count"],
}
"""What is most comes first, and what was seen last."""

_MAX_SESSIONS = 1_000
_DIGITS = 9
"""Of dollars."""


class SessionSelection(NamedTuple):
    """What somebody wants to see of the sessions.

    Attributes:
        policy: only of this one, empty for all.
        caller: only of callers whose hash starts with this, or one of whose values or `NAME=VALUE` it is where those are shown.
        sort: one of `_SORTS`.
        limit: at most so many.
    """

    policy: str = ""
    caller: str = ""
    sort: str = "last"
    limit: int = _MAX_SESSIONS


def read_session_selection(query: Mapping[str, str]) -> SessionSelection:
    """The selection of a query.

    Raises:
        HTTPException: 400, where something in it is wrong; it says what would be right.
    """
    sort, limit = read_order(query, tuple(_SORTS), _MAX_SESSIONS)
    return SessionSelection(query.get("policy", ""), query.get("caller", ""), sort, limit)


class SessionPages:
    """Answers about sessions.

    Attributes:
        may_see_callers: whether who asks may see callers' values, where they are shown at all.
    """

    def __init__(self, shared: SharedSessions, shows_callers: Callable[[], bool]) -> None:
        """Answer from these tables."""
        self._shared = shared
        self._shows_callers = shows_callers
        self.may_see_callers: Callable[[Request], bool] = is_near

    def list_routes(self) -> list[Route]:
        """The routes of all pages."""
        return [Route("/sessions", self._send_all), Route("/sessions/{session}", self._send_one)]

    def report(self, request: Request, selection: SessionSelection) -> dict[str, Any]:
        """What a request is answered."""
        shown = self._shows_callers() and self.may_see_callers(request)
        return report_sessions(self._shared.view(), selection, shows_callers=shown, now=time())

    def _send_all(self, request: Request) -> Response:
        return send_page(Page(HTTPStatus.OK, self.report(request, read_session_selection(request.query_params))))

    def _send_one(self, request: Request) -> Response:
        session = request.path_params["session"]
        shown = self._shows_callers() and self.may_see_callers(request)
        view = self._shared.view()
        rows = [row for row in view.rows if row.session == session]
        if not rows:
            known = "it may have been idle for an hour, or too old for every replica to know it"
            return send_page(Page(HTTPStatus.NOT_FOUND, {"error": f"no session {session} is known here; {known}"}))
        runs = [describe_run(row, shows_callers=shown) for row in rows]
        return send_page(Page(HTTPStatus.OK, {**_describe_view(view, time()), "sessions": runs}))


def report_sessions(view: SessionView, selection: SessionSelection, *, shows_callers: bool, now: float) -> dict[str, Any]:
    """The JSON of `/sessions`."""
    every = (describe_session(row, shows_callers=shows_callers) for row in view.rows)
    found = sorted((session for session in every if _matches(session, selection)), key=_SORTS[selection.sort], reverse=True)
    counts = {"known": len(view.rows), "total": _add_up(found)}
    return {**_describe_view(view, now), **counts, "sessions": found[: selection.limit]}


def describe_session(row: SessionRow, *, shows_callers: bool) -> dict[str, Any]:
    """What a session has used up."""
    return {
        "session": row.session,
        "caller": row.tenant,
        "descriptors": dict(row.caller) if shows_callers and row.caller else None,
        "policy": row.policy,
        "mode": row.mode,
        "started": write_time(row.began),
        "last_seen": write_time(row.last),
        "total_step_count": row.steps,
        "total_tool_calls": row.tool_calls,
        "tool_call_counts": dict(row.tools),
        "actual_cost": convert_dollars(row.cost),
        "estimated_cost": convert_dollars(row.estimated),
        "reserved_cost": convert_dollars(row.reserved),
        "total_block_count": row.blocks,
        "consecutive_block_count": row.consecutive_blocks,
        "consecutive_error_count": row.consecutive_errors,
        "killed": name_killer(row.killed, ordered=row.ordered) or None,
        "refused": row.refusal and _describe_refusal(row.refusal),
    }


def describe_run(row: SessionRow, *, shows_callers: bool) -> dict[str, Any]:
    """The same, and its newest calls."""
    steps = [_describe_call(call) for call in row.calls]
    return {**describe_session(row, shows_callers=shows_callers), "steps": steps}


def _describe_view(view: SessionView, now: float) -> dict[str, Any]:
    return {
        "version": VERSION,
        "at": write_time(now),
        "replica": view.replica,
        "replicas": view.replicas,
        "problem": view.problem or None,
        "left_out": view.left_out,
    }


def _describe_refusal(refusal: RefusalRow) -> dict[str, Any]:
    return {
        "at": write_time(refusal.at),
        "limit": refusal.limit,
        "used": convert_amount(refusal.limit, refusal.used),
        "allowed": convert_amount(refusal.limit, refusal.allowed),
        "tool": refusal.tool or None,
    }


def _describe_call(call: CallRow) -> dict[str, Any]:
    words = ("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens")
    return {
        "at": write_time(call.at),
        "model": call.model or None,
        "tools": call.tools,
        **(dict.fromkeys(words) if call.tokens is None else dict(zip(words, call.tokens, strict=True))),
        "status": call.status or None,
        "settled": call.settled,
        "refused": call.refused,
    }


def _matches(session: dict[str, Any], selection: SessionSelection) -> bool:
    if selection.policy not in ("", session["policy"]):
        return False
    return is_caller(session, selection.caller)


def _add_up(sessions: list[dict[str, Any]]) -> dict[str, Any]:
    counted = ("total_step_count", "total_tool_calls", "total_block_count")
    return {
        "sessions": len(sessions),
        "callers": len({session["caller"] for session in sessions}),
        "killed": sum(session["killed"] is not None for session in sessions),
        **{name: sum(session[name] for session in sessions) for name in counted},
        **{name: _sum_dollars(session[name] for session in sessions) for name in ("actual_cost", "estimated_cost")},
    }


def _sum_dollars(amounts: Iterable[float]) -> float:
    return round(math.fsum(amounts), _DIGITS)
