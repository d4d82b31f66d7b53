"""The report of a run: why it ended, how long models and tools took, and its steps.

Totals come from the session's ledger, which all replicas share. Steps, refusals and grants come
from the replicas' tables, which have only the newest. So no request waits for the report, and
ledgers stay small.

Responses are never read. A run therefore counts as done if its last request was answered and no
other has followed.

A run ends with its last agent. A refusal by an agent limit ends only the refused agent. A refusal
by a limit of the whole session ends each agent with its next request. A refusal in shadow mode ends
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import itemgetter
from typing import Any

from extproc.operator.admin.reports import write_time
from extproc.operator.session_rows import ACTIVE_SECONDS, Amounts, CallRow, RunEvent, SessionRow
from extproc.operator.session_table import convert_amount
from extproc.policy.bundle import SHADOW
from extproc.sessions.limits import LEAST_INPUT, MAX_INPUT_GROWTH, MAX_STEPS, PER_TOOL
from extproc.store.rules.tree import AGENT_LIMITS

_MANY_AGENTS = 32
"""Without agent limits, an explosion: more active agents than orchestrators start on purpose."""

_QUIET_SECONDS = 60
"""A run counts as done this long after its last response.

It may also be waiting for a person or a slow tool.
"""

_OPEN_SECONDS = 600
"""After this time without an access log entry, the outcome of a request is unknown."""

_ERROR = 400
_WORDS = ("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens")


def find_running(rows: Iterable[SessionRow], now: float) -> set[tuple[str, ...]]:
    """The names of sessions whose agents seem to have started a session that is still active."""
    known = {(row.tenant, row.policy, row.mode, row.session): row for row in rows}
    running: set[tuple[str, ...]] = set()
    for row in known.values():
        if (
            not row.started_by
            or now - row.last >= ACTIVE_SECONDS
            or explain_end(row, now) is not None
        ):
            continue
        above: SessionRow | None = row
        while above is not None and above.started_by:
            name = row.tenant, row.policy, row.mode, above.started_by
            above = known.get(name) if name not in running else None
            running.add(name)
    return running


def explain_end(row: SessionRow, now: float, *, goes_on: bool = False) -> str | None:  # noqa: PLR0911  # a reason each
    """Why a run ended: killed, steps, refused, error, done or unknown; None while it is active.

    `now` is in seconds since 1970; `goes_on` is whether a session started by one of its agents is
    active.
    """
    last, shadow = row.calls[-1] if row.calls else None, row.mode == SHADOW
    if row.ordered or (row.killed and not shadow):
        return "killed"
    if goes_on or (shadow and now - row.last < ACTIVE_SECONDS) or _has_agents(row, now):
        return None
    if row.killed:
        return "killed"
    if row.refusal is not None and (last is None or row.refusal.at >= last.at):
        return "steps" if row.refusal.limit == MAX_STEPS else "refused"
    if last is None:
        return None
    if not last.settled:
        return None if now - last.at < _OPEN_SECONDS else "unknown"
    if last.refused:
        return "refused"
    if not last.status or last.status >= _ERROR:
        return "error"
    return "done" if now - _find_end(last) >= _QUIET_SECONDS else None


def is_exploding(row: SessionRow, now: float) -> bool:
    """Whether a session starts more agents than its policy allows or, without limits, very many."""
    limited = any(limit in AGENT_LIMITS for limit, _, _ in row.limits)
    if not limited and sum(agent.is_active(now) for agent in row.agents) >= _MANY_AGENTS:
        return True
    last = [agent.last for agent in row.agents if agent.refused in AGENT_LIMITS]
    if row.refusal is not None and row.refusal.limit in AGENT_LIMITS:
        last.append(row.refusal.at)
    return bool(last) and now - max(last) < ACTIVE_SECONDS


def is_growing(row: SessionRow, now: float) -> bool:
    """Whether a session is active, and its input has reached `max_input_growth`."""
    limits = {limit: amount for limit, _, amount in row.limits}
    reached = measure_growth(row) >= limits.get(MAX_INPUT_GROWTH, math.inf)
    return reached and now - row.last < ACTIVE_SECONDS


def measure_growth(row: SessionRow) -> float:
    """The newest input of a session, as a multiple of its first."""
    return row.newest_input / max(row.first_input, LEAST_INPUT)


def _has_agents(row: SessionRow, now: float) -> bool:
    """Whether an agent is active, or the session itself if only another agent was refused."""
    if not row.agents and row.agents_begun:  # the agents did not fit on the board
        return now - row.last < ACTIVE_SECONDS
    if any(agent.is_active(now) for agent in row.agents):
        return True
    other = row.refusal is not None and row.refusal.limit in AGENT_LIMITS and row.calls
    return bool(other) and now - row.calls[-1].at < ACTIVE_SECONDS


def describe_usage(row: SessionRow) -> dict[str, Any]:
    """A run's tokens by kind, and times."""
    last = row.calls[-1] if row.calls else None
    ended = max([row.last, *[_find_end(call) for call in row.calls]])
    until = last.at - row.began if last is not None else 0.0
    before = row.model_ms - (last.model_ms if last is not None else 0)
    return {
        **dict(zip(_WORDS, row.tokens, strict=True)),
        "failed_answers": row.failures,
        "total_seconds": round(ended - row.began, 3),
        "model_seconds": row.model_ms / 1000,
        "tool_seconds": round(max(0.0, until - before / 1000), 3),
    }


def describe_steps(row: SessionRow) -> dict[str, Any]:
    """The newest calls of a run, the number of older steps, and refusals and grants in order."""
    return {
        "earlier_steps": max(
            0, row.steps - len([call for call in row.calls if not (call.retry or call.refused)])
        ),
        "steps": _describe_calls(row),
        "events": [_describe_event(event) for event in row.events],
    }


def order_timeline(row: SessionRow) -> list[dict[str, Any]]:
    """The newest calls, refusals and grants of a run, oldest first; only calls have a `status`."""
    calls = zip([call.at for call in row.calls], _describe_calls(row), strict=True)
    events = zip([event.at for event in row.events], map(_describe_event, row.events), strict=True)
    return [each for _, each in sorted([*calls, *events], key=itemgetter(0))]


def _describe_calls(row: SessionRow) -> list[dict[str, Any]]:
    ends = [_find_end(call) for call in row.calls]
    gaps = [None, *[call.at - max(ends[: place + 1]) for place, call in enumerate(row.calls[1:])]]
    return [
        {
            "at": write_time(call.at),
            "model": call.model or None,
            "tools": call.tools,
            "tool_errors": call.errors,
            "tool_seconds": round(gap, 3)
            if gap is not None and gap >= 0
            else None,  # negative if sent before the response
            **(
                dict.fromkeys(_WORDS)
                if call.tokens is None
                else dict(zip(_WORDS, call.tokens, strict=True))
            ),
            "model_seconds": call.model_ms / 1000 if call.settled else None,
            "status": call.status or None,
            "settled": call.settled,
            "refused": call.refused,
            "retry": call.retry,
            "action": call.action or None,
        }
        for call, gap in zip(row.calls, gaps, strict=False)
    ]


def describe_amounts(amounts: Amounts) -> dict[str, Any]:
    """Limits or grants by name; those per tool by tool."""
    found: dict[str, Any] = {}
    for limit, tool, amount in amounts:
        if limit == PER_TOOL:
            found.setdefault(limit, {})[tool] = amount
        else:
            found[limit] = convert_amount(limit, amount)
    return found


def _find_end(call: CallRow) -> float:
    return call.at + call.model_ms / 1000


def _describe_event(event: RunEvent) -> dict[str, Any]:
    if event.grant:
        return {"at": write_time(event.at), "granted": describe_amounts(event.granted)}
    return {
        "at": write_time(event.at),
        "refused": event.limit,
        "used": convert_amount(event.limit, event.used),
        "allowed": convert_amount(event.limit, event.allowed),
        "tool": event.tool or None,
        "times": event.times,
    }
