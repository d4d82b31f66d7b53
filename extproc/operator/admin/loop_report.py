"""`/loops`: the looping conversations of all replicas, as JSON."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from time import time
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from extproc.decision import DONE
from extproc.operator.admin.conversation_report import (
    GROUP_SORTS,
    LOOPING_SECONDS,
    Known,
    group_loops,
)
from extproc.operator.admin.reports import (
    Selection,
    TablePages,
    describe_caller,
    describe_view,
    write_time,
)
from extproc.operator.admin.session_report import list_runaways
from extproc.operator.after_notes import ARMS, count_open, describe_after
from extproc.operator.board import Board
from extproc.operator.loop_rows import IncidentDocument, Loop, LoopDocument
from extproc.operator.session_rows import SessionDocument, SessionRow
from extproc.sessions.limits import UNNAMED
from extproc.sessions.rates import BYTES_PER_TOKEN, Prices, estimate_tokens

ENDED_SECONDS = 300
"""A conversation has ended if its loop was not acted on for this long."""

ACTIONS = {action.value: word for action, word in DONE.items()}

_ESTIMATE = (
    "input tokens that the access log does not report are estimated: one per "
    f"{BYTES_PER_TOKEN} bytes of a request's body"
)

_RATE = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")


class LoopPages(TablePages[LoopDocument]):
    """The pages about loops."""

    path, sorts = "/loops", GROUP_SORTS

    def __init__(
        self,
        board: Board[LoopDocument],
        prices: Prices,
        shows_callers: Callable[[], bool],
        incidents: Board[IncidentDocument],
        sessions: Board[SessionDocument],
    ) -> None:
        super().__init__(board, shows_callers)
        self._sessions = sessions
        self._prices = prices
        self._incidents = incidents

    def report(self, request: Request, selection: Selection) -> dict[str, Any]:
        """The JSON of `/loops`; raises HTTPException (400) if the query is invalid."""
        now, prices = time(), self._choose_prices(request.query_params)
        view, shown = self._board.view(), self._sees_callers(request)
        runs = self._sessions.view().document.rows
        loops = view.document.loops
        described = describe_loops(loops, prices, runs, shows_callers=shown, now=now)
        known = Known(
            {id(loop): each for loop, each in zip(loops, described, strict=True)},
            self._incidents.view().document.rows,
            {(run.tenant, run.session) for run in runs if run.session != UNNAMED},
            self._index_orders(selection),
            prices,
            now,
            shows_results=self.may_see_callers(request),
        )
        explosions, growing = [
            list_runaways(runs, selection, what, shows_callers=shown, now=now, orders=known.orders)
            for what in ("exploding", "growing")
        ]
        return {
            **describe_view(view, now),
            "estimate": _ESTIMATE,
            **group_loops(view.document.rows, selection, known),
            "explosions": explosions[: selection.limit],
            "growing": growing[: selection.limit],
            **describe_history(view.document, selection, now),
            "coverage": self.summarize(),
        }

    def _choose_prices(self, query: Mapping[str, str]) -> Prices:
        price = query.get("price", "")
        if not price:
            return self._prices
        if not _RATE.fullmatch(price):
            raise HTTPException(
                HTTPStatus.BAD_REQUEST,
                "price must be US dollars per million input tokens, such as 2.50",
            )
        return Prices(float(price))


def describe_loops(
    loops: Sequence[Loop],
    prices: Prices,
    runs: Sequence[SessionRow],
    *,
    shows_callers: bool,
    now: float,
) -> list[dict[str, Any]]:
    """Describe loops, in order."""
    sessions = {(run.policy, run.mode, run.tenant, run.session): run for run in runs}
    return [
        {
            **_describe(loop, prices, shows_callers=shows_callers, now=now),
            **_describe_after_notes(
                loop, sessions.get((loop.policy, loop.mode, loop.tenant, loop.session)), now
            ),
        }
        for loop in loops
    ]


def describe_history(document: LoopDocument, selection: Selection, now: float) -> dict[str, Any]:
    """The changes after notes and the curves of the last hour, by policy."""
    return {
        "after_notes": [
            each
            for each in _sum_after_notes(document, now)
            if selection.policy in ("", each["policy"])
        ],
        "curves": [
            {
                "policy": line.policy,
                "mode": line.mode,
                "action": line.action,
                "minutes": line.counts,
            }
            for line in document.lines
            if selection.policy in ("", line.policy)
        ],
    }


def _describe_after_notes(loop: Loop, run: SessionRow | None, now: float) -> dict[str, Any]:
    """The changes after a loop's notes; with all calls known, also its tokens before and after."""
    arms = {arm: _read_arm(loop, arm) for arm in ARMS}
    began, calls = loop.first, run.calls if run is not None else []
    sides = (
        [call.tokens for call in calls if call.at < began],
        [call.tokens for call in calls if call.at >= began],
    )
    known = run is not None and bool(loop.after) and len(calls) == run.steps
    before, since = [
        sum([sum(tokens[:2]) for tokens in side if tokens]) if known and None not in side else None
        for side in sides
    ]
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
    return {
        name.removeprefix(f"{arm} "): count
        for name, count in loop.after.items()
        if name.startswith(f"{arm} ")
    }


def _is_open(loop: Loop, now: float) -> bool:
    return now - loop.last < ENDED_SECONDS


def _sum_after_notes(document: LoopDocument, now: float) -> list[dict[str, Any]]:
    groups: dict[tuple[str, ...], dict[str, int]] = {}
    for (*labels, after), count in sorted(document.after):
        groups.setdefault(tuple(labels), {})[after] = count
    active: Counter[tuple[str, ...]] = Counter()
    for loop in document.loops:
        for arm in ARMS if loop.after and _is_open(loop, now) else ():
            active[loop.policy, loop.detector, loop.mode, loop.cause, arm] += count_open(
                _read_arm(loop, arm)
            )
    names = ("policy", "detector", "mode", "cause", "arm")
    return [
        {**dict(zip(names, key, strict=True)), **describe_after(counts, active[key])}
        for key, counts in groups.items()
    ]


def _describe(loop: Loop, prices: Prices, *, shows_callers: bool, now: float) -> dict[str, Any]:
    shadow = loop.mode == "shadow"
    tokens, not_sent = estimate_tokens(loop.size), estimate_tokens(loop.stopped_size)
    return {
        **describe_caller(loop, shows_callers=shows_callers),
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


def _round(cost: float | None) -> float | None:
    return None if cost is None else round(cost, 4)
