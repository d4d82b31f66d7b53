"""`/sessions` and `/sessions/<id>`: the usage and history of sessions, as JSON or HTML.

Counts are named as in the session reports of in-process SDKs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from http import HTTPStatus
from time import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from extproc.decision import Action
from extproc.engine.orders import hash_descriptor
from extproc.operator.admin.html import prefers_html, send_html
from extproc.operator.admin.pages import Page, send_page
from extproc.operator.admin.reports import (
    Selection,
    TablePages,
    describe_caller,
    describe_view,
    list_names,
    select,
    write_time,
)
from extproc.operator.admin.row_commands import suggest_for_session
from extproc.operator.admin.run_report import (
    describe_amounts,
    describe_steps,
    describe_usage,
    explain_end,
    find_running,
    is_exploding,
    is_growing,
    measure_growth,
    order_timeline,
)
from extproc.operator.board import View
from extproc.operator.overrides import describe_override
from extproc.operator.session_rows import SessionDocument, SessionRefusal, SessionRow, order_tree
from extproc.operator.session_table import convert_amount, convert_dollars, name_killer
from extproc.operator.standing_orders import NO_ORDERS, OrderIndex, ShownRow
from extproc.policy.bundle import SHADOW
from extproc.sessions.limits import UNNAMED

SORTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "last": lambda session: session["last_seen"],
    "cost": lambda session: session["actual_cost"] + session["reserved_cost"],
    "steps": lambda session: session["total_step_count"],
    "tool_calls": lambda session: session["total_tool_calls"],
    "blocks": lambda session: session["total_block_count"],
    "agents": lambda session: (
        session["exploding"],
        session["agents"]["active"],
        session["agents"]["refused_requests"],
    ),
}
"""Sort keys. The largest or latest comes first."""

_RUNAWAYS = {
    "exploding": (is_exploding, "agents", Action.REJECT),
    "growing": (is_growing, "cost", Action.STEER),
}
"""By field: what finds such sessions, how they are sorted, and what is done about them."""

_DIGITS = 9


class SessionPages(TablePages[SessionDocument]):
    """The pages about sessions."""

    path, sorts = "/sessions", SORTS

    def list_routes(self) -> list[Route]:
        """The routes of all pages."""
        return [*super().list_routes(), Route("/sessions/{session}", self._send_one)]

    def report(self, request: Request, selection: Selection) -> dict[str, Any]:
        """The answer to a request."""
        index, shown = self._index_orders(selection), self._sees_callers(request)
        report = report_sessions(
            self._board.view(), selection, shows_callers=shown, now=time(), orders=index
        )
        return {**report, "coverage": self.summarize()}

    def _send_one(self, request: Request) -> Response:
        session, view = request.path_params["session"], self._board.view()
        rows = [row for row in view.document.rows if row.session == session]
        if not rows:
            known = "it may have been idle for an hour, or evicted by newer sessions"
            return send_page(
                Page(
                    HTTPStatus.NOT_FOUND, {"error": f"no session {session} is known here; {known}"}
                )
            )
        shown = self._sees_callers(request)
        orders = OrderIndex(self.list_orders())
        running = find_running(view.document.rows, time())
        runs = [
            {
                **describe_session(row, shows_callers=shown, orders=orders, running=running),
                **describe_steps(row),
            }
            for row in rows
        ]
        report = {**describe_view(view, time()), "sessions": runs}
        if prefers_html(request):
            for run, row in zip(runs, rows, strict=True):
                run["timeline"] = order_timeline(row)
            return send_html(request, "run.html", report["at"], session=session, report=report)
        return send_page(Page(HTTPStatus.OK, report))


def report_sessions(
    view: View[SessionDocument],
    selection: Selection,
    *,
    shows_callers: bool,
    now: float,
    orders: OrderIndex = NO_ORDERS,
) -> dict[str, Any]:
    """The JSON of `/sessions`."""
    rows = view.document.rows
    running = find_running(rows, time())
    described = (
        describe_session(row, shows_callers=shows_callers, orders=orders, running=running)
        for row in rows
    )
    found = select(described, selection, SORTS)
    counted = ("total_step_count", "total_tool_calls", "total_block_count")
    money = ("actual_cost", "estimated_cost")
    counts = {
        "known": len(rows),
        "total": {
            "sessions": len(found),
            "callers": len({session["caller"] for session in found}),
            "killed": sum(session["killed"] is not None for session in found),
            **{name: sum(session[name] for session in found) for name in counted},
            **{
                name: round(math.fsum(session[name] for session in found), _DIGITS)
                for name in money
            },
        },
    }
    return {**describe_view(view, now), **counts, "sessions": found[: selection.limit]}


def describe_session(
    row: SessionRow,
    *,
    shows_callers: bool,
    orders: OrderIndex = NO_ORDERS,
    running: Collection[tuple[str, ...]] = (),
) -> dict[str, Any]:
    """A session's usage and its orders, including those not yet applied to a request.

    `running` is the result of `find_running`.
    """
    now = time()
    ended = explain_end(
        row, now, goes_on=(row.tenant, row.policy, row.mode, row.session) in running
    )
    # Empty if callers' values are not published
    hashes = {name: hash_descriptor(name, value) for name, value in row.caller}
    orders_met = orders.find(ShownRow({row.policy}, list_names(row), hashes, {row.session}))
    described = {
        "session": row.session,
        **describe_caller(row, shows_callers=shows_callers),
        "policy": row.policy,
        "mode": row.mode,
        "unnamed_requests": row.unnamed,
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
        "started_by": row.started_by or None,
        "agents": _describe_agents(row, now),
        "exploding": ended is None and is_exploding(row, now),
        "growing": ended is None and is_growing(row, now),
        "input_growth": round(measure_growth(row), 1) if row.first_input else None,
        "ended": ended,
        "usage": describe_usage(row),
        "limits": describe_amounts(row.limits),
        "granted": describe_amounts(row.granted),
        "orders": [describe_override(order) for order in orders_met],
    }
    return {**described, "commands": suggest_for_session(described, named=row.session != UNNAMED)}


def list_runaways(  # noqa: PLR0913  # as `describe_session`, and what to list
    rows: Sequence[SessionRow],
    selection: Selection,
    what: str,
    *,
    shows_callers: bool,
    now: float,
    orders: OrderIndex,
) -> list[dict[str, Any]]:
    """Sessions that are `exploding` or `growing`, worst first, with the fields of `/loops`."""
    if selection.tool:  # sessions have no single tool
        return []
    finds, sort, action = _RUNAWAYS[what]
    running = find_running(rows, now)
    described = (
        describe_session(row, shows_callers=shows_callers, orders=orders, running=running)
        for row in rows
        if finds(row, now)
    )
    found = select(described, selection._replace(sort=sort), SORTS)
    return [
        {
            **session,
            "runaway": what,
            "policies": [session["policy"]],
            "first_seen": session["started"],
            "looping": True,
            "action": Action.ALLOW.value if session["mode"] == SHADOW else action.value,
            "shadow": action.value if session["mode"] == SHADOW else None,
            "input_tokens_sent_on": session["usage"]["input_tokens"],
            "cost_sent_on_usd": session["actual_cost"] + session["reserved_cost"],
            "estimated_cost_usd": session["estimated_cost"] + session["reserved_cost"],
            "input_tokens_not_sent_on": 0,
            "cost_not_sent_on_usd": None,
            "input_tokens_per_minute": 0,
            "cost_per_minute_usd": None,
        }
        for session in found
        if session[what]
    ]


def _describe_agents(row: SessionRow, now: float) -> dict[str, Any]:
    agents = row.agents
    return {
        "started": max(row.agents_begun, len([agent for agent in agents if not agent.refused])),
        "active": len([agent for agent in agents if agent.is_active(now)]),
        "refused_requests": row.agents_refused,
        "tree": [
            {
                "agent": agent.name,
                "parent": agent.parent or None,
                "depth": agent.depth or level,
                "level": level,
                "requests": agent.requests,
                "started": write_time(agent.began),
                "last_seen": write_time(agent.last),
                "refused": agent.refused or None,
            }
            for level, agent in order_tree(agents)
        ],
    }


def _describe_refusal(refusal: SessionRefusal) -> dict[str, Any]:
    return {
        "at": write_time(refusal.at),
        "limit": refusal.limit,
        "used": convert_amount(refusal.limit, refusal.used),
        "allowed": convert_amount(refusal.limit, refusal.allowed),
        "tool": refusal.tool or None,
        "agent": refusal.agent or None,
    }
