"""The admin page at `/`: looping conversations, sessions, budgets and charts of the last hour."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from extproc.engine.orders import ActiveOverride, Grant
from extproc.operator.admin.budget_report import BudgetPages
from extproc.operator.admin.conversation_report import GROUP_SORTS
from extproc.operator.admin.html import send_html
from extproc.operator.admin.loop_report import ACTIONS, LoopPages
from extproc.operator.admin.reports import Selection, read_selection
from extproc.operator.admin.row_commands import suggest_for_order
from extproc.operator.admin.row_states import count, is_healthy, list_burning
from extproc.operator.admin.session_report import SessionPages
from extproc.operator.after_notes import AFTER
from extproc.operator.loop_rows import MINUTES
from extproc.operator.overrides import describe_override

_MAX_ROWS = 200
_MAX_RUNS = 100
_MAX_ORDERS = 100
_MAX_BUDGETS = 50
_MAX_CHARTS = 12

_BAR = 6
_HEIGHT = 60


class CurveBar(NamedTuple):
    """One action in one minute, as a rectangle."""

    action: str
    x: int
    y: float
    height: float


class PolicyChart(NamedTuple):
    """The last hour of one policy.

    Attributes:
        actions: actions and their number of requests, most severe first.
        most: number of requests in the busiest minute.
        bars: stacked bars of all actions.
    """

    policy: str
    mode: str
    actions: list[tuple[str, int]]
    most: int
    bars: list[CurveBar]


def route_page(pages: LoopPages, sessions: SessionPages, budgets: BudgetPages) -> Route:
    """The route of the page."""
    return Route("/", lambda request: _send(request, pages, sessions, budgets))


def draw_charts(curves: list[dict[str, Any]]) -> list[PolicyChart]:
    """Charts of a report's curves, one per policy and mode, busiest first."""
    name = itemgetter("policy", "mode")
    charts = [
        _draw(policy, mode, list(own))
        for (policy, mode), own in groupby(sorted(curves, key=name), name)
    ]
    return sorted(charts, key=lambda chart: -sum(total for _, total in chart.actions))


def _draw(policy: str, mode: str, curves: list[dict[str, Any]]) -> PolicyChart:
    severity = list(ACTIONS)
    curves.sort(key=lambda curve: -severity.index(curve["action"]))
    most = max(sum(curve["minutes"][minute] for curve in curves) for minute in range(MINUTES))
    bars = []
    for minute in range(MINUTES):
        top = 0.0
        for curve in curves:
            height = round(_HEIGHT * curve["minutes"][minute] / max(1, most), 1)
            if height:
                top += height
                bars.append(
                    CurveBar(curve["action"], minute * _BAR, round(_HEIGHT + 3 - top, 1), height)
                )
    return PolicyChart(
        policy, mode, [(curve["action"], sum(curve["minutes"])) for curve in curves], most, bars
    )


def _send(
    request: Request, pages: LoopPages, sessions: SessionPages, budgets: BudgetPages
) -> Response:
    selection = read_selection(request.query_params, GROUP_SORTS)
    report = pages.report(request, selection)
    runs = sessions.report(request, Selection(selection.policy, selection.caller))
    used = budgets.report(
        request, Selection(selection.policy, selection.caller, limit=_MAX_BUDGETS)
    )
    charts, orders = draw_charts(report["curves"]), list(pages.list_orders())
    exploding, growing = [
        [run for run in runs["sessions"] if run[what] and not selection.tool]
        for what in ("exploding", "growing")
    ]
    failing = sum(row["active"] for row in report["incidents"])
    looping = report["total"]["looping"]
    burning = [count(looping, "active loop")] if looping else []
    burning += list_burning(failing, len(exploding), len(growing), used["total"])
    return send_html(
        request,
        "loops.html",
        report["at"],
        report={**report, "conversations": report["conversations"][:_MAX_ROWS]},
        active=looping
        + failing
        + len(exploding)
        + len(growing)
        + used["total"]["used_up"]
        + used["total"]["open_breakers"],
        headline=", ".join(burning) or "No active loops",
        exploding=exploding[:_MAX_RUNS],
        growing=growing[:_MAX_RUNS],
        tight=[row for row in used["budgets"] if not is_healthy(row)],
        healthy=[row for row in used["budgets"] if is_healthy(row)],
        left_out=used["total"]["budgets"] - len(used["budgets"]),
        charts=charts[:_MAX_CHARTS],
        more_charts=max(0, len(charts) - _MAX_CHARTS),
        standing=[describe_order(order) for order in orders[:_MAX_ORDERS]],
        more_orders=max(0, len(orders) - _MAX_ORDERS),
        runs={**runs, "sessions": runs["sessions"][:_MAX_RUNS]},
        budgets=used if used["known"] or budgets.has_budgets() else None,
        selection=selection,
        sorts=GROUP_SORTS,
        actions=dict(reversed(ACTIONS.items())),
        after=(*AFTER, "ended", "open"),
    )


def describe_order(order: ActiveOverride) -> dict[str, Any]:
    """An order with `about`, its targets and amounts, and its commands."""
    shown = describe_override(order)
    caller = shown.get("caller", {})
    pairs = caller.items() if isinstance(caller, dict) else [("caller", caller)]
    about = [(name, shown[name]) for name in ("session", "fingerprint", "tool") if name in shown]
    more = [(f"+ {name.replace('_', ' ')}", shown[name]) for name in Grant._fields if name in shown]
    if "budget" in shown:
        more.append((f"+ {shown['budget']}", shown["amount"]))
    tools = [(f"+ calls of {tool}", calls) for tool, calls in shown.get("tools", {}).items()]
    return {**shown, "about": [*pairs, *about, *more, *tools], "commands": suggest_for_order(shown)}
