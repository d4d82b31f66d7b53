"""`/loops`: what the replicas' tables say, as JSON for people and programs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from http import HTTPStatus
from time import time
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from extproc.operator.admin.loops import Line, Row, SharedLoops, View
from extproc.operator.admin.pages import Page, is_caller, is_near, read_order, send_page, write_time
from extproc.sessions.prices import Prices
from extproc.sessions.rates import BYTES_PER_TOKEN, estimate_tokens

VERSION = 1
"""Of the JSON: fields may be added to it, none changes its meaning."""

LOOPING_SECONDS = 60
"""A loop that was acted on within so many seconds goes on."""

ACTIONS = {"warn": "warned", "steer": "steered", "throttle": "throttled", "reject": "refused"}
"""What is said about requests, by the action."""

_SORTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "cost": lambda loop: (loop["cost_usd"] or 0, loop["input_tokens"], loop["requests"]),
    "requests": lambda loop: loop["requests"],
    "count": lambda loop: loop["count"],
    "last": lambda loop: loop["last_seen"],
    "first": lambda loop: loop["first_seen"],
}
"""What is most comes first, and what was seen last; by `first` the oldest."""

SORTS = tuple(_SORTS)

_MAX_LOOPS = 1_000
_RATE = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")


class Selection(NamedTuple):
    """What somebody wants to see of the loops.

    Attributes:
        policy: only of this one, empty for all.
        caller: only of callers whose hash starts with this, or one of whose values or `NAME=VALUE` it is where those are shown.
        tool: only with this one.
        sort: one of `SORTS`.
        limit: at most so many.
        price: in US dollars per million input tokens, None for the server's.
    """

    policy: str = ""
    caller: str = ""
    tool: str = ""
    sort: str = SORTS[0]
    limit: int = _MAX_LOOPS
    price: float | None = None


def read_selection(query: Mapping[str, str]) -> Selection:
    """The selection of a query.

    Raises:
        HTTPException: 400, where something in it is wrong; it says what would be right.
    """
    sort, limit = read_order(query, SORTS, _MAX_LOOPS)
    price = query.get("price", "")
    if price and not _RATE.fullmatch(price):
        raise HTTPException(HTTPStatus.BAD_REQUEST, "price must be US dollars per million input tokens, such as 2.50")
    named = {name: query.get(name, "") for name in ("policy", "caller", "tool")}
    return Selection(**named, sort=sort, limit=limit, price=float(price) if price else None)


class LoopPages:
    """Answers about loops.

    Attributes:
        may_see_callers: whether who asks may see callers' values, where they are shown at all.
    """

    def __init__(self, shared: SharedLoops, prices: Prices, shows_callers: Callable[[], bool]) -> None:
        """Answer from these tables with these prices."""
        self._shared = shared
        self._prices = prices
        self._shows_callers = shows_callers
        self.may_see_callers: Callable[[Request], bool] = is_near

    def list_routes(self) -> list[Route]:
        """The routes of all pages."""
        return [Route("/loops", self._send_loops)]

    def report(self, request: Request) -> dict[str, Any]:
        """What a request is answered.

        Raises:
            HTTPException: see `read_selection`.
        """
        selection = read_selection(request.query_params)
        prices = self._prices if selection.price is None else Prices(selection.price)
        shown = self._shows_callers() and self.may_see_callers(request)
        return make_report(self._shared.view(), selection, prices, shows_callers=shown, now=time())

    def _send_loops(self, request: Request) -> Response:
        return send_page(Page(HTTPStatus.OK, self.report(request)))


def make_report(view: View, selection: Selection, prices: Prices, *, shows_callers: bool, now: float) -> dict[str, Any]:
    """The JSON of `/loops`."""
    every = [_describe(row, prices, shows_callers=shows_callers, now=now) for row in view.rows]
    found = sorted((loop for loop in every if _matches(loop, selection)), key=_SORTS[selection.sort])
    if selection.sort != "first":
        found.reverse()
    return {
        "version": VERSION,
        "at": write_time(now),
        "replica": view.replica,
        "replicas": view.replicas,
        "problem": view.problem or None,
        "left_out": view.left_out,
        "estimate": f"input tokens are estimated: one per {BYTES_PER_TOKEN} bytes of a request's body",
        "known": len(every),
        "total": _add_up(found),
        "loops": found[: selection.limit],
        "curves": [_draw(line) for line in view.lines if selection.policy in ("", line.policy)],
    }


def _describe(row: Row, prices: Prices, *, shows_callers: bool, now: float) -> dict[str, Any]:
    shadow = row.mode == "shadow"
    tokens, not_sent = estimate_tokens(row.size), estimate_tokens(row.stopped_size)
    return {
        "caller": row.tenant,
        "descriptors": dict(row.caller) if shows_callers and row.caller else None,
        "session": row.session or None,
        "policy": row.policy,
        "detector": row.detector,
        "mode": row.mode,
        "method": row.method,
        "route": row.route or None,
        "path": row.path,
        "tools": row.tools,
        "model": row.model or None,
        "fingerprint": row.fingerprint,
        "first_seen": write_time(row.first),
        "last_seen": write_time(row.last),
        "looping": now - row.last < LOOPING_SECONDS,
        "count": row.count,
        "requests": sum(row.requests.values()),
        **{word: 0 if shadow else row.requests.get(action, 0) for action, word in ACTIONS.items()},
        "shadow": dict(row.requests) if shadow else None,
        "input_tokens": tokens,
        "cost_usd": _round(prices.estimate(row.model, tokens)),
        "requests_not_sent_on": row.stopped,
        "input_tokens_not_sent_on": not_sent,
        "cost_not_sent_on_usd": _round(prices.estimate(row.model, not_sent)),
    }


def _matches(loop: dict[str, Any], selection: Selection) -> bool:
    if selection.policy not in ("", loop["policy"]):
        return False
    if selection.tool and selection.tool not in loop["tools"]:
        return False
    return is_caller(loop, selection.caller)


def _add_up(loops: list[dict[str, Any]]) -> dict[str, Any]:
    counted = ("requests", *ACTIONS.values(), "requests_not_sent_on", "input_tokens", "input_tokens_not_sent_on")
    money = ("cost_usd", "cost_not_sent_on_usd")
    return {
        "loops": len(loops),
        "looping": sum(loop["looping"] for loop in loops),
        "callers": len({loop["caller"] for loop in loops}),
        **{name: sum(loop[name] for loop in loops) for name in counted},
        **{name: _round(_sum_known(loop[name] for loop in loops)) for name in money},
    }


def _sum_known(costs: Any) -> float | None:  # noqa: ANN401  # an iterable of what JSON holds
    known = [cost for cost in costs if cost is not None]
    return sum(known) if known else None


def _draw(line: Line) -> dict[str, Any]:
    return {"policy": line.policy, "mode": line.mode, "action": line.action, "minutes": line.counts}


def _round(cost: float | None) -> float | None:
    return None if cost is None else round(cost, 4)
