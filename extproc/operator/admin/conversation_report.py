"""The rows of `/loops`: one per caller and conversation, and one per failing tool, with totals.

Each request is counted in one row, even if several policies see it, so the totals are correct.
Costs are those of forwarded requests; savings by refused requests are separate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from extproc.decision import SEVERITY, Action
from extproc.operator.admin.reports import OLDEST_FIRST, Selection, Sorts, matches, write_time
from extproc.operator.admin.row_commands import suggest_for_incident, suggest_for_loop
from extproc.operator.loop_rows import INCIDENT_SECONDS, SKETCHED, ConversationRow, IncidentRow
from extproc.operator.overrides import describe_override
from extproc.operator.sketch import Sketch
from extproc.operator.standing_orders import OrderIndex, ShownRow
from extproc.policy.bundle import SHADOW
from extproc.sessions.rates import Prices, estimate_tokens
from extproc.store.rules.session import NANO_DOLLARS

LOOPING_SECONDS = 60
"""A loop is active if it was acted on within this many seconds."""

GROUP_SORTS: Sorts = {
    "now": lambda row: (
        row["cost_per_minute_usd"] or 0,
        row["input_tokens_per_minute"],
        row["last_seen"],
    ),
    "cost": lambda row: (
        row["cost_sent_on_usd"] or 0,
        row["input_tokens_sent_on"],
        row["requests"],
    ),
    "spared": lambda row: (
        row["cost_not_sent_on_usd"] or 0,
        row["input_tokens_not_sent_on"],
        row["requests_not_sent_on"],
    ),
    "requests": lambda row: row["requests"],
    "count": lambda row: row["count"],
    "last": lambda row: row["last_seen"],
    "first": lambda row: row["first_seen"],
}
"""Sort keys. `now` sorts by cost per minute."""

_COUNTED = ("requests", "requests_sent_on", "requests_not_sent_on")
_TOKENS = ("input_tokens_sent_on", "input_tokens_not_sent_on", "input_tokens_per_minute")
_MONEY = ("cost_sent_on_usd", "estimated_cost_usd", "cost_not_sent_on_usd", "cost_per_minute_usd")

_RANKS = {action.value: rank for action, rank in SEVERITY.items()}


class Known(NamedTuple):
    """Data that all rows are described with.

    Attributes:
        loops: descriptions of the loops of all conversations, by the loop's `id`.
        incidents: failing tools, one row per policy.
        limited: (caller, session) of sessions with limits.
        now: in seconds since 1970.
        shows_results: the client may see results.
    """

    loops: Mapping[int, dict[str, Any]]
    incidents: Sequence[IncidentRow]
    limited: set[tuple[str, str]]
    orders: OrderIndex
    prices: Prices
    now: float
    shows_results: bool = False


def group_loops(
    rows: Iterable[ConversationRow], selection: Selection, known: Known
) -> dict[str, Any]:
    """The fields of the report that depend on the grouping."""
    failures: dict[tuple[str, str], list[IncidentRow]] = {}
    for incident in known.incidents:
        failures.setdefault((incident.tool, incident.failure), []).append(incident)
    folded: dict[tuple[str, str], list[dict[str, Any]]] = {}
    groups, number = [], 0
    for row in rows:
        if not row.requests:  # the row only has costs
            continue
        number += bool(row.tenant)
        own = failures.get((row.tool, row.failure), [])
        if is_folded(row, own):
            if not selection.caller:  # incidents have no single caller
                folded.setdefault((row.tool, row.failure), []).append(_describe(row, known))
        elif row.tenant:
            group = _describe(row, known)
            if any(
                matches(loop, selection) for loop in group["loops"] or [{**group, "policy": ""}]
            ):
                groups.append(group)
    sort = selection.sort or next(iter(GROUP_SORTS))
    groups.sort(key=GROUP_SORTS[sort], reverse=sort != OLDEST_FIRST)
    incidents = [
        _describe_incident(own, folded.get(failure, []), known) for failure, own in failures.items()
    ]
    shown = [
        each
        for each in incidents
        if not selection.caller
        and selection.policy in ("", *each["policies"])
        and selection.tool in ("", each["tool"])
    ]
    return {
        "known": number,
        "total": {
            "conversations": len(groups),
            "looping": sum(group["looping"] for group in groups),
            "callers": len({group["caller"] for group in groups}),
            **_add_up([*groups, *shown]),  # no request is in two of them
        },
        "conversations": groups[: selection.limit],
        "incidents": sorted(shown, key=lambda each: each["first_seen"], reverse=True),
    }


def is_folded(row: ConversationRow, incidents: Sequence[IncidentRow]) -> bool:
    """Whether a conversation belongs to an incident, which has a row for each policy.

    Conversations that were stuck on the tool just before the incident belong to it. Those that loop
    after it do not.
    """
    if not row.tool or not incidents:
        return False
    if not row.tenant or row.failing > row.last - INCIDENT_SECONDS:
        return True
    return any(
        incident.began - INCIDENT_SECONDS <= row.last <= incident.began for incident in incidents
    )


def _describe(row: ConversationRow, known: Known) -> dict[str, Any]:
    loops = [known.loops[id(loop)] for loop in reversed(row.loops) if loop.requests]
    newest: Mapping[str, Any] = loops[0] if loops else {}
    # In shadow mode
    stricter = {loop["policy"] for loop in loops if (loop["shadow"] or {}).get(Action.REJECT.value)}
    group = {
        "caller": row.tenant,
        "conversation": row.conversation,
        "session": row.session or None,
        "names": list(
            dict.fromkeys([row.tenant, *(name for loop in loops for name in loop["names"])])
        ),
        "alias": _find(loops, "alias"),
        "labels": _find(loops, "labels"),
        "credentials": newest.get("credentials", []),
        "descriptors": _find(loops, "descriptors"),
        "agent": row.agent or None,
        "tools": row.tools,
        "cause": _find(loops, "cause"),
        "method": newest.get("method"),
        "path": row.path,
        "route": newest.get("route"),
        "model": row.model or None,
        "policies": list(dict.fromkeys(loop.policy for loop in row.loops)),
        "count": max([loop["count"] for loop in loops], default=0),
        "first_seen": write_time(row.first),
        "last_seen": write_time(row.last),
        "looping": known.now - row.last < LOOPING_SECONDS,
        "action": row.action,
        "shadow": row.shadow or None,
        "would_be_refused_by": sorted(stricter) if row.forwarded else [],
        **_describe_costs(row, known),
        "next_refusal": _foresee(row, known.now),
        "result": next((loop.result for loop in reversed(row.loops) if loop.result), None)
        if known.shows_results
        else None,
        "orders": [
            describe_override(order) for order in known.orders.find(_make_shown_row(row, loops))
        ],
        "loops": loops,
    }
    callers = {row.tenant, *(loop.tenant for loop in row.loops)}
    limited = bool(row.session) and any(
        (caller, row.session) in known.limited for caller in callers
    )
    return {**group, "commands": suggest_for_loop(group, limited=limited) if row.tenant else {}}


def _foresee(row: ConversationRow, now: float) -> dict[str, Any] | None:
    """The first refusal by an enforcing policy, else by a shadow policy, if the loop continues."""
    foreseen = [loop for loop in row.loops if loop.refused_left]
    if not foreseen:
        return None
    first = min(foreseen, key=lambda loop: (loop.mode == SHADOW, loop.refused_left))
    interval, seconds, within = row.find_interval(), None, first.refused_within
    if interval is not None and not 0 < within < (first.refused_at - 1) * interval:
        passed = min(max(0.0, now - row.last), interval)
        seconds = round(first.refused_left * interval - passed, 1)
    return {
        "policy": first.policy,
        "mode": first.mode,
        "counts": "requests" if within else "turns",
        "at": first.refused_at,
        "left": first.refused_left,
        "within_seconds": within or None,
        "in_seconds": seconds,
    }


def _describe_costs(row: ConversationRow, known: Known) -> dict[str, Any]:
    """Costs of forwarded requests, and savings: a refused request would have cost the average.

    Policies with cost limits price their requests, and the access log corrects these prices. Other
    costs are estimated.
    """
    sent = max(0, row.prompt + estimate_tokens(row.size - row.priced))
    spared = estimate_tokens(
        row.refused_size if not row.forwarded else row.size * row.refused // row.forwarded
    )
    pace = estimate_tokens(int(row.find_pace(known.now)))
    priced = row.priced > 0 and not known.prices.is_fixed
    rest = known.prices.estimate(
        row.model, estimate_tokens(row.size - row.priced) if priced else sent
    )
    cost, estimated = rest, rest
    if priced:
        cost, estimated = (
            row.cost / NANO_DOLLARS + (rest or 0),
            row.estimated / NANO_DOLLARS + (rest or 0),
        )

    def price(tokens: int) -> float | None:
        if priced and cost is not None and sent:
            return round(cost * tokens / sent, 4)
        found = known.prices.estimate(row.model, tokens)
        return None if found is None else round(found, 4)

    return {
        "requests": row.requests,
        "requests_sent_on": row.forwarded,
        "input_tokens_sent_on": sent,
        "cost_sent_on_usd": None if cost is None else round(cost, 4),
        "estimated_cost_usd": None if estimated is None else round(estimated, 4),
        "requests_not_sent_on": row.refused,
        "input_tokens_not_sent_on": spared,
        "cost_not_sent_on_usd": price(spared),
        "input_tokens_per_minute": pace,
        "cost_per_minute_usd": price(pace),
    }


def _find(loops: Sequence[Mapping[str, Any]], name: str) -> Any:  # noqa: ANN401  # a field
    return next((loop[name] for loop in loops if loop[name]), None)


def _make_shown_row(row: ConversationRow, loops: Sequence[Mapping[str, Any]]) -> ShownRow:
    names = [name for loop in loops for name in loop["names"]]
    return ShownRow(
        {loop.policy for loop in row.loops},
        {row.tenant, *(loop.tenant for loop in row.loops), *names},
        dict(row.descriptors),
        {
            session
            for session in (row.session, row.conversation, *(loop["session"] for loop in loops))
            if session
        },
        {loop["fingerprint"] for loop in loops},
        {*row.tools, *(tool for loop in loops for tool in loop["tools"])},
    )


def _describe_incident(
    own: Sequence[IncidentRow], folded: list[dict[str, Any]], known: Known
) -> dict[str, Any]:
    tool, last = own[0].tool, max(incident.last for incident in own)
    policies = sorted({incident.policy for incident in own})
    orders = known.orders.find(ShownRow(policies, (), {}, tools=[tool]))
    described = {
        "tool": tool,
        "policies": policies,
        "first_seen": write_time(min(incident.began for incident in own)),
        "last_seen": write_time(last),
        "active": known.now - last < INCIDENT_SECONDS,
        "callers": Sketch(
            [each for incident in own for each in incident.callers], SKETCHED
        ).count(),
        "sessions": Sketch(
            [each for incident in own for each in incident.sessions], SKETCHED
        ).count(),
        "not_refused": max(incident.spared for incident in own),
        "action": max(
            [each["action"] for each in folded], key=_RANKS.__getitem__, default=Action.ALLOW.value
        ),
        **_add_up(folded),
        "orders": [describe_override(order) for order in orders],
        "conversations": [each for each in folded if each["caller"]],
    }
    return {**described, "commands": suggest_for_incident(described)}


def _add_up(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    rows = list(rows)
    return {
        **{name: sum(each[name] for each in rows) for name in (*_COUNTED, *_TOKENS)},
        **{name: sum_known(each[name] for each in rows) for name in _MONEY},
    }


def sum_known(costs: Iterable[float | None]) -> float | None:
    """The sum of these costs in US dollars, without unknown ones; None if all are unknown."""
    known = [cost for cost in costs if cost is not None]
    return round(sum(known), 4) if known else None
