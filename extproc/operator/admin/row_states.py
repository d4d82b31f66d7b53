"""The current state of rows as text, the same on the page and in `loopguard top`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from extproc.budgets.subject import DOLLAR_UNIT
from extproc.engine.orders import ALLOW, BLOCK, KILL
from extproc.policy.bundle import SHADOW

_MINUTE, _HOUR, _DAY = 60, 3_600, 86_400
_NEARLY_USED = 80
"""Percentage of a budget."""

_CENT, _THOUSAND = 0.01, 1_000

_DONE = {
    "release": "released",
    "allow": "allowed",
    "block": "blocked",
    "kill": "killed",
    "grant": "granted",
}
_FIRST = (KILL, BLOCK, ALLOW)
"""Orders that apply to every request, by precedence."""


def write_now(row: Mapping[str, Any], now: float) -> str:
    """The active order with its remaining time, else the newest action, or a shadow policy's.

    `now` is in seconds since 1970. Other orders, such as grants, are shown until the next request.
    """
    orders = row["orders"]
    order = next(
        (each for kind in _FIRST for each in orders if each["kind"] == kind), None
    ) or next(
        (each for each in orders if read_time(each["since"]) >= read_time(row["last_seen"])), None
    )
    if order is not None:
        return f"{_DONE[order['kind']]} {write_age(read_time(order['ends']) - now)}"
    does = row["action"] if row["action"] != "allow" else ""
    if "sessions" in row:  # a failing tool, whose agents are told to wait
        return ("wait" if does else "shadow: wait") if row["active"] else "over"
    if not row["looping"]:
        return f"over ({does})" if does else "over"
    return does or (f"(would {row['shadow']})" if row["shadow"] else "")


def write_refusal(row: Mapping[str, Any]) -> str:
    """When a loop will be refused if it continues, such as `refused at turn 16, in about 40 s`.

    Empty if an order applies, if the loop is over, or if no policy will refuse it.
    """
    ahead = row.get("next_refusal")
    if not ahead or not row["looping"] or any(each["kind"] in _FIRST for each in row["orders"]):
        return ""
    would = "would be " if ahead["mode"] == SHADOW else ""
    at = f"{would}refused at {ahead['counts'][:-1]} {ahead['at']:,}"
    if ahead["in_seconds"] is not None:
        return f"{at}, in about {write_duration(ahead['in_seconds'])}"
    if ahead["counts"] == "turns" or row["requests"] == 1:
        return f"{at}, after {ahead['left']:,} more"
    return f"{at} within {write_duration(ahead['within_seconds'])}, not at this pace"


def list_burning(
    failing: int, explosions: int, growing: int, budgets: Mapping[str, int] | None
) -> list[str]:
    """What costs money besides loops: failing tools, runaway sessions and exhausted budgets."""
    counted = (
        (failing, "failing tool", "failing tools"),
        (explosions, "explosion of agents", "explosions of agents"),
        (growing, "growing session", "growing sessions"),
        (budgets["used_up"] if budgets else 0, "used-up budget", "used-up budgets"),
        (budgets["open_breakers"] if budgets else 0, "open breaker", "open breakers"),
    )
    return [f"{number:,} {one if number == 1 else more}" for number, one, more in counted if number]


def is_healthy(row: Mapping[str, Any]) -> bool:
    """Whether a row of `/budgets` needs no attention: nothing refused, and not nearly used up."""
    return not (row["open"] or row["refused"] or row["used_percent"] >= _NEARLY_USED)


def write_left(row: Mapping[str, Any]) -> str:
    """What is left of a budget, or how much more was used, such as `$0.04 over`."""
    if row["left"] < 0:
        return f"{_write_amount(-row['left'], row['unit'])} over"
    unit = f" {row['unit']}" if row["unit"] and row["unit"] != DOLLAR_UNIT else ""
    left, limit = (_write_amount(row[name], row["unit"]) for name in ("left", "limit"))
    return f"{left} of {limit}{unit} left"


def _write_amount(amount: float, unit: str | None) -> str:
    return write_money(amount) if unit == DOLLAR_UNIT else f"{amount:,.6g}"


def write_reset(row: Mapping[str, Any], now: float) -> str:
    """When a budget is full again, on the clock unless that is within a minute.

    `now` is in seconds since 1970.
    """
    seconds = row["reset_seconds"]
    if seconds is None:
        return "open until released"
    does = "closes" if row["open"] else "resets" if row["estimated"] is not None else "full"
    if seconds < _MINUTE:
        return f"{does} in {seconds} s" if seconds else ""
    at = datetime.fromtimestamp(now + seconds, UTC)
    return f"{does} {at:%H:%M} UTC" if seconds < _DAY else f"{does} {at:%Y-%m-%d %H:%M} UTC"


def count(number: int, noun: str) -> str:
    """A number with a noun, in the plural if needed."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def read_time(text: str) -> float:
    """Parse a time in the format of RFC 3339 to seconds since 1970."""
    return datetime.fromisoformat(text).timestamp()


def write_age(seconds: float) -> str:
    """Write a duration in at most six characters, such as `5m` or `1h07m`."""
    if seconds < _MINUTE:
        return f"{max(0, seconds):.0f}s"
    if seconds < _HOUR:
        return f"{seconds // _MINUTE:.0f}m"
    if seconds < _DAY:
        return f"{seconds // _HOUR:.0f}h{seconds % _HOUR // _MINUTE:02.0f}m"
    return f"{seconds // _DAY:.0f}d{seconds % _DAY // _HOUR:02.0f}h"


def write_duration(seconds: float) -> str:
    """A duration in words, such as `40 s` or `3 min`."""
    if seconds < 2 * _MINUTE:
        return f"{max(1, seconds):.0f} s"
    return f"{seconds / _MINUTE:.0f} min" if seconds < 2 * _HOUR else write_age(seconds)


def write_money(dollars: float | None) -> str:
    """An amount in dollars, with cents below a thousand; empty if unknown."""
    if dollars is None:
        return ""
    if 0 < dollars < _CENT:
        return "<$0.01"
    return f"${dollars:,.2f}" if dollars < _THOUSAND else f"${dollars:,.0f}"
