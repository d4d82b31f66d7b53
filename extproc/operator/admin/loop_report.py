"""`/loops`: the replicas' tables of loops, as JSON for people and programs, by row or by conversation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from time import time
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route

from extproc.operator.admin.conversation_report import GROUP_SORTS, LOOPING_SECONDS, Known, group_loops, sum_known
from extproc.operator.admin.pages import Page, send_page
from extproc.operator.admin.reports import (
    OLDEST_FIRST,
    Selection,
    TablePages,
    describe_known,
    describe_view,
    read_selection,
    select,
    write_time,
)
from extproc.operator.after_notes import ARMS, count_open, describe_after
from extproc.operator.board import Board, View
from extproc.operator.conversation_rows import ConversationDocument
from extproc.operator.incident_rows import WINDOW_SECONDS as INCIDENT_SECONDS
from extproc.operator.incident_rows import IncidentDocument, IncidentRow
from extproc.operator.loop_rows import Loop, LoopDocument
from extproc.operator.session_rows import SessionDocument, SessionRow
from extproc.operator.standing_orders import OrderIndex
from extproc.sessions.limits import UNNAMED
from extproc.sessions.prices import Prices
from extproc.sessions.rates import BYTES_PER_TOKEN, estimate_tokens

ENDED_SECONDS = 300
"""A conversation has ended if its loop was not acted on for this long."""

ACTIONS = {"warn": "warned", "steer": "steered", "throttle": "throttled", "land": "landed", "reject": "refused"}

SORTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "cost": lambda loop: (loop["cost_usd"] or 0, loop["input_tokens"], loop["requests"]),
    "requests": lambda loop: loop["requests"],
    "count": lambda loop: loop["count"],
    "last": lambda loop: loop["last_seen"],
    "first": lambda loop: loop["first_seen"],
}
"""Sort keys. The largest or latest comes first; with `first`, the oldest."""

_ESTIMATE = f"input tokens are estimated: one per {BYTES_PER_TOKEN} bytes of a request's body"

_RATE = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")


CONVERSATION = "conversation"
"""The value of `group` for one row per conversation."""


class LoopPages(TablePages[LoopDocument]):
    """The pages about loops."""

    def __init__(  # noqa: PLR0913  # what they are about
        self,
        board: Board[LoopDocument],
        prices: Prices,
        shows_callers: Callable[[], bool],
        incidents: Board[IncidentDocument],
        sessions: Board[SessionDocument] | None = None,
        conversations: Board[ConversationDocument] | None = None,
    ) -> None:
        super().__init__(board, shows_callers)
        self._conversations = conversations
        self._sessions = sessions
        self._prices = prices
        self._incidents = incidents

    def list_routes(self) -> list[Route]:
        """The routes of all pages."""
        return [Route("/loops", lambda request: send_page(Page(HTTPStatus.OK, self.report(request))))]

    def report(self, request: Request) -> dict[str, Any]:
        """The JSON of `/loops`; raises HTTPException (400), saying what would be right, if the query is invalid."""
        query = request.query_params
        group = query.get("group", "")
        if group:
            if group != CONVERSATION:
                raise HTTPException(HTTPStatus.BAD_REQUEST, f"group must be {CONVERSATION}")
            return self.report_conversations(request)
        selection, prices = read_selection(query, SORTS), self._choose_prices(query)
        shown = self._sees_callers(request)
        runs = self._sessions.view().document.rows if self._sessions is not None else []
        report = make_report(self._board.view(), selection, prices, shows_callers=shown, now=time(), runs=runs)
        return {**report, "incidents": self._list_incidents(selection), "coverage": self.summarize()}

    def report_conversations(self, request: Request) -> dict[str, Any]:
        """The JSON of `/loops?group=conversation`; raises HTTPException as `report` does."""
        query, now = request.query_params, time()
        selection, prices = read_selection(query, GROUP_SORTS), self._choose_prices(query)
        view, shown = self._board.view(), self._sees_callers(request)
        runs = self._sessions.view().document.rows if self._sessions is not None else []
        loops = _describe_all(view.document, prices, runs, shows_callers=shown, now=now)
        known = Known(
            {row.name: described for row, described in zip(view.document.rows, loops, strict=True)},
            self._incidents.view().document.rows,
            {(run.tenant, run.session) for run in runs if run.session != UNNAMED},
            OrderIndex(self.list_orders()),
            prices,
            now,
        )
        found = self._conversations.view().document if self._conversations is not None else ConversationDocument([])
        return {
            **describe_view(view, now),
            "left_out": found.left_out,
            "estimate": _ESTIMATE,
            **group_loops(found.rows, selection, known),
            **_describe_history(view.document, selection, now),
            "coverage": self.summarize(),
        }

    def _list_incidents(self, selection: Selection) -> list[dict[str, Any]]:
        """Tools that fail for many, the newest incident first; they belong to no caller."""
        rows = self._incidents.view().document.rows if not selection.caller else []
        found = [row for row in rows if selection.policy in ("", row.policy) and selection.tool in ("", row.tool)]
        return [describe_incident(row, time()) for row in found]

    def _choose_prices(self, query: Mapping[str, str]) -> Prices:
        price = query.get("price", "")
        if not price:
            return self._prices
        if not _RATE.fullmatch(price):
            raise HTTPException(HTTPStatus.BAD_REQUEST, "price must be US dollars per million input tokens, such as 2.50")
        return Prices(float(price))


def make_report(  # noqa: PLR0913  # what is known, and what is asked
    view: View[LoopDocument],
    selection: Selection,
    prices: Prices,
    *,
    shows_callers: bool,
    now: float,
    runs: Sequence[SessionRow] = (),
) -> dict[str, Any]:
    """The JSON of `/loops`."""
    every = _describe_all(view.document, prices, runs, shows_callers=shows_callers, now=now)
    # Among equals, the later one in the table comes first.
    found = select(every if selection.sort == OLDEST_FIRST else reversed(every), selection, SORTS)
    return {
        **describe_view(view, now),
        "estimate": _ESTIMATE,
        "known": len(every),
        "total": _add_up(found),
        "loops": found[: selection.limit],
        **_describe_history(view.document, selection, now),
    }


def _describe_all(
    document: LoopDocument, prices: Prices, runs: Sequence[SessionRow], *, shows_callers: bool, now: float
) -> list[dict[str, Any]]:
    """All rows, in order."""
    sessions = {(run.policy, run.mode, run.tenant, run.session): run for run in runs}
    return [
        {
            **_describe(loop, prices, shows_callers=shows_callers, now=now),
            **_describe_after_notes(loop, sessions.get((loop.policy, loop.mode, loop.tenant, loop.session)), now),
        }
        for loop in document.rows
    ]


def _describe_history(document: LoopDocument, selection: Selection, now: float) -> dict[str, Any]:
    """What came after notes, and the last hour, by policy."""
    return {
        "after_notes": [each for each in _sum_after_notes(document, now) if selection.policy in ("", each["policy"])],
        "curves": [
            {"policy": line.policy, "mode": line.mode, "action": line.action, "minutes": line.counts}
            for line in document.lines
            if selection.policy in ("", line.policy)
        ],
    }


def _describe_after_notes(loop: Loop, run: SessionRow | None, now: float) -> dict[str, Any]:
    """What came after the notes of a loop, and the tokens of its session before and since, if all of them are known."""
    arms = {arm: _read_arm(loop, arm) for arm in ARMS}
    began, calls = loop.first, run.calls if run is not None else []
    sides = [call.tokens for call in calls if call.at < began], [call.tokens for call in calls if call.at >= began]
    known = run is not None and bool(loop.after) and len(calls) == run.steps
    before, since = [_add_tokens(side) if known else None for side in sides]
    return {
        "cause": loop.cause or None,
        "after_notes": {
            arm: describe_after(counts, count_open(counts) if _is_open(loop, now) else 0)
            for arm, counts in arms.items()
            if counts
        },
        "tokens_before_note": before,
        "tokens_after_note": since,
    }


def _read_arm(loop: Loop, arm: str) -> dict[str, int]:
    return {name.removeprefix(f"{arm} "): count for name, count in loop.after.items() if name.startswith(f"{arm} ")}


def _is_open(loop: Loop, now: float) -> bool:
    return now - loop.last < ENDED_SECONDS


def _add_tokens(calls: Iterable[tuple[int, ...] | None]) -> int | None:
    """Input and output tokens of these calls; None if those of one are unknown."""
    every = list(calls)
    return sum([sum(tokens[:2]) for tokens in every if tokens]) if None not in every else None


def _sum_after_notes(document: LoopDocument, now: float) -> list[dict[str, Any]]:
    """What came after notes, by policy, detector, mode, cause and whether there were notes."""
    groups: dict[tuple[str, ...], dict[str, int]] = {}
    for (*labels, after), count in sorted(document.after):
        groups.setdefault(tuple(labels), {})[after] = count
    active: Counter[tuple[str, ...]] = Counter()
    for loop in document.rows:
        for arm in ARMS if loop.after and _is_open(loop, now) else ():
            active[loop.policy, loop.detector, loop.mode, loop.cause, arm] += count_open(_read_arm(loop, arm))
    names = ("policy", "detector", "mode", "cause", "arm")
    return [{**dict(zip(names, key, strict=True)), **describe_after(counts, active[key])} for key, counts in groups.items()]


def describe_incident(row: IncidentRow, now: float) -> dict[str, Any]:
    """An incident as JSON."""
    return {
        "tool": row.tool,
        "policy": row.policy,
        "first_seen": write_time(row.began),
        "last_seen": write_time(row.last),
        "active": now - row.last < INCIDENT_SECONDS,
        "callers": row.count_callers(),
        "sessions": row.count_sessions(),
        "requests": row.requests,
        "not_refused": row.spared,
    }


def _describe(loop: Loop, prices: Prices, *, shows_callers: bool, now: float) -> dict[str, Any]:
    shadow = loop.mode == "shadow"
    tokens, not_sent = estimate_tokens(loop.size), estimate_tokens(loop.stopped_size)
    return {
        "caller": loop.tenant,
        **describe_known(loop),
        "descriptors": dict(loop.caller) if shows_callers and loop.caller else None,
        "session": loop.session or None,
        "policy": loop.policy,
        "detector": loop.detector,
        "mode": loop.mode,
        "method": loop.method,
        "route": loop.route or None,
        "path": loop.path,
        "tools": loop.tools,
        "model": loop.model or None,
        "fingerprint": loop.fingerprint,
        "first_seen": write_time(loop.first),
        "last_seen": write_time(loop.last),
        "looping": now - loop.last < LOOPING_SECONDS,
        "count": loop.count,
        "strength": loop.strength or None,
        "requests": loop.total,
        **{word: 0 if shadow else loop.requests.get(action, 0) for action, word in ACTIONS.items()},
        "shadow": dict(loop.requests) if shadow else None,
        "input_tokens": tokens,
        "cost_usd": _round(prices.estimate(loop.model, tokens)),
        "requests_not_sent_on": loop.stopped,
        "input_tokens_not_sent_on": not_sent,
        "cost_not_sent_on_usd": _round(prices.estimate(loop.model, not_sent)),
    }


def _add_up(loops: list[dict[str, Any]]) -> dict[str, Any]:
    counted = ("requests", *ACTIONS.values(), "requests_not_sent_on", "input_tokens", "input_tokens_not_sent_on")
    money = ("cost_usd", "cost_not_sent_on_usd")
    return {
        "loops": len(loops),
        "looping": sum(loop["looping"] for loop in loops),
        "callers": len({loop["caller"] for loop in loops}),
        **{name: sum(loop[name] for loop in loops) for name in counted},
        **{name: sum_known(loop[name] for loop in loops) for name in money},
    }


def _round(cost: float | None) -> float | None:
    return None if cost is None else round(cost, 4)
