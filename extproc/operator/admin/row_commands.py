"""Suggested commands for rows, such as stopping a loop or freeing its caller.

Pages cannot give orders, so users copy them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from extproc.budgets.commands import (
    SOME_REQUESTS,
    round_up,
    write_breaker_release,
)
from extproc.budgets.guard import BREAKER_BUDGET
from extproc.engine.orders import BLOCK, KILL
from extproc.operator.admin.row_states import is_healthy
from extproc.sessions.limits import MAX_COST, MAX_STEPS, MAX_TOOL_CALLS, write_grant

_GRANTS = {
    MAX_STEPS: ("--steps", 20),
    MAX_TOOL_CALLS: ("--tool-calls", 20),
    MAX_COST: ("--cost", 5),
}
"""Flag and default amount of a grant, by limit."""

_SHORT, _LONG = "--for 30m", "--for 2h"


def suggest_for_loop(row: Mapping[str, Any], *, limited: bool) -> dict[str, str]:
    """Commands for a looping conversation, by purpose.

    If `limited`, its session has limits, so it can be killed.
    """
    loops = row["loops"]
    session = row["session"] or ""
    fingerprints = {loop["fingerprint"] for loop in loops}
    alike = (
        fingerprints.pop()
        if len(fingerprints) == 1 and all(len(loop["tools"]) < 2 for loop in loops)  # noqa: PLR2004  # a cycle
        else ""
    )
    # Detectors without sessions know only the caller and the fingerprint.
    known = session if loops and all(loop["session"] == session for loop in loops) else ""
    stop = _write(
        "block", _SHORT, caller=row["caller"], session=session, fingerprint="" if session else alike
    )
    return {
        "stop": _write("kill", caller=row["caller"], session=session) if limited else stop,
        "free": _write(
            "allow", _LONG, caller=row["caller"], session=known, fingerprint="" if known else alike
        ),
        **_suggest_ending(row["orders"]),
    }


def suggest_for_incident(row: Mapping[str, Any]) -> dict[str, str]:
    """Commands for a tool that fails for many: block it until its server is back, or allow it."""
    return {
        "stop": _write("block", _SHORT, tool=row["tool"]),
        "free": _write("allow", _LONG, tool=row["tool"]),
        **_suggest_ending(row["orders"]),
    }


def _suggest_ending(orders: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Commands that end a row's orders.

    An `allow` does not lift a block or kill; only revoking it does.
    """
    stops = [order for order in orders if order["kind"] in (BLOCK, KILL)]
    return {"free": _revoke(stops[0])} if stops else _suggest_revoking(orders)


def suggest_for_order(order: Mapping[str, Any]) -> dict[str, str]:
    """Commands for an active order."""
    return _suggest_revoking([order])


def suggest_for_budget(row: Mapping[str, Any], *, grant: str, orderable: bool) -> dict[str, str]:
    """Commands for a caller's budget: a grant, or a release of its circuit breaker.

    `orderable` is as in `BudgetRow`.
    """
    free = ""
    if row["open"] and orderable:
        free = write_breaker_release(row["caller"], row["policy"])
    elif not row["open"] and row["budget"] != BREAKER_BUDGET and not is_healthy(row):
        free = grant
    return {**({"free": free} if free else {}), **_suggest_revoking(row["orders"])}


def suggest_for_session(row: Mapping[str, Any], *, named: bool) -> dict[str, str]:
    """Commands for a session. If not `named`, they apply to the caller."""
    session = row["session"] if named else ""
    about = {"caller": row["caller"], "session": session}
    found = {}
    if row["killed"]:
        found["free"] = _write("release", **about)
    else:
        found["stop"] = _write("kill", **about)
        if row["refused"]:
            found["free"] = _suggest_more(row, session)
    return {**found, **_suggest_revoking(row["orders"])}


def _suggest_more(row: Mapping[str, Any], session: str) -> str:
    """A grant of the exhausted limit, enough for some requests; a release if no grant helps."""
    refused = row["refused"]
    about = {"caller": row["caller"], "session": session}
    if refused["limit"] in _GRANTS:
        flag, usual = _GRANTS[refused["limit"]]
        over, most = max(0, refused["used"] - refused["allowed"]), usual
        if flag == "--cost":
            most = max(usual, SOME_REQUESTS * row["actual_cost"] / max(1, row["total_step_count"]))
        return _write(
            "grant",
            f"{flag} {round_up(over + most) if over or most > usual else usual:.9g}",
            **about,
        )
    asked = refused["limit"], refused["tool"] or "", refused["used"], refused["allowed"]
    grant = write_grant(session, row["caller"], *asked) if session else ""
    return grant or _write("release", **about)


def _suggest_revoking(orders: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    # One-time grants are final
    kept = [order for order in orders if "budget" not in order or order.get("raises")]
    return {"revoke": _revoke(kept[0])} if kept else {}


def _revoke(order: Mapping[str, Any]) -> str:
    return f"loopguard overrides --revoke {shlex.quote(order['override'])}"


def _write(kind: str, more: str = "", **about: str) -> str:
    said = [f"--{flag} {shlex.quote(value)}" for flag, value in about.items() if value]
    return " ".join(["loopguard", kind, *said, *([more] if more else [])])
