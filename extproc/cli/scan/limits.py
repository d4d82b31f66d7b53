"""Usage of sessions, and `session_limits` that nearly all of them would stay below."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil, inf
from typing import Any, Final

import msgspec

from extproc.sessions.session_limits import MAX_AGENTS, MAX_TOOL_CALLS

PERCENTS: Final = (50, 90, 99, 100)
_ENOUGH_FOR = 99
_MOST_TOOLS = 10
_LONGEST_TOOL = 256


class Total(msgspec.Struct):
    """The usage of a session and its sub-agents.

    Attributes:
        looped: whether it had a loop.
        nanos: cost in nano-dollars; None if some tokens have no known price.
        agents: number of sub-agents; None if the format does not show them.
        tools: number of calls by tool.
    """

    looped: bool = False
    steps: int = 0
    tokens: int = 0
    nanos: int | None = 0
    agents: int | None = None
    tools: Counter[str] = msgspec.field(default_factory=Counter)


def find_percentile(values: Sequence[int], percent: int) -> int:
    """A percentile by nearest rank: the smallest value that covers this share of the values."""
    return sorted(values)[max(1, ceil(len(values) * percent / 100)) - 1]


def recommend_limits(totals: Sequence[Total]) -> dict[str, Any]:
    """Percentiles of the usage, and limits.

    Each limit would have stopped at most 1 % of the sessions without a loop.

    Percentiles of a tool count the sessions that called it; those of agents, the sessions that
    started any.
    """
    going = [total for total in totals if not total.looped]
    limits: dict[str, Any] = {}
    for name, highest in (("steps", None), ("tool_calls", MAX_TOOL_CALLS), ("agents", MAX_AGENTS)):
        values = [value for total in going if (value := _list_values(total).get(name))]
        if values:
            limits[f"max_{name}"] = min(
                find_percentile(values, _ENOUGH_FOR), highest or max(values)
            )
    calls = sum((total.tools for total in totals), Counter[str]())
    tools = [
        name for name, _ in sorted(calls.items(), key=lambda item: (-item[1], item[0])) if name
    ][:_MOST_TOOLS]
    per_tool = {
        name: min(find_percentile(values, _ENOUGH_FOR), MAX_TOOL_CALLS)
        for name in tools
        if len(name) <= _LONGEST_TOOL
        and (values := [total.tools[name] for total in going if total.tools[name]])
    }
    if per_tool:
        limits["max_calls_per_tool"] = per_tool
    costs = [total.nanos for total in going if total.nanos]
    if costs:
        # Cents, rounded up
        limits["max_cost_per_session"] = ceil(find_percentile(costs, _ENOUGH_FOR) / 1e7) / 100
    rows = {
        name: _describe([_list_values(total).get(name) for total in totals])
        for name in ("steps", "tool_calls")
    }
    rows |= {
        f"calls of {name}": _describe([total.tools[name] or None for total in totals])
        for name in tools
    }
    rows["tokens"] = _describe([total.tokens for total in totals])
    rows["dollars"] = {
        key: round(value / 1e9, 6) if key.endswith("%") else value
        for key, value in _describe([total.nanos or None for total in totals]).items()
    }
    rows["agents"] = _describe([total.agents or None for total in totals])
    return {
        "sessions": len(totals),
        "without_loop": len(going),
        "took": {name: row for name, row in rows.items() if row},
        "session_limits": limits,
        "stopped": sum(_exceeds(total, limits) for total in going),
    }


def _list_values(total: Total) -> dict[str, int | None]:
    return {"steps": total.steps, "tool_calls": total.tools.total(), "agents": total.agents}


def _describe(values: Sequence[int | None]) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    return (
        {
            "of": len(known),
            **{f"{percent}%": find_percentile(known, percent) for percent in PERCENTS},
        }
        if known
        else {}
    )


def _exceeds(total: Total, limits: Mapping[str, Any]) -> bool:
    used: dict[str, float] = {
        f"max_{name}": value or 0 for name, value in _list_values(total).items()
    }
    used["max_cost_per_session"] = (total.nanos or 0) / 1e9
    per_tool = limits.get("max_calls_per_tool", {})
    return any(used[name] > limits.get(name, inf) for name in used) or any(
        total.tools[name] > per_tool[name] for name in per_tool
    )
