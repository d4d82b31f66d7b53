"""The JSON report about canaries, from the counts of all replicas."""
# interpreted: tells operators, not requests

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from extproc.engine.ramp import tell_share
from extproc.operator.after_notes import AFTER, ARMS, describe_after
from extproc.operator.canary.pairs import POLICIES, REFUSALS, VERDICTS, name_after
from extproc.operator.canary.states import State, merge_states
from extproc.operator.canary.verdict import Evidence, Rules, find_bounds, judge
from extproc.operator.table import write_time
from extproc.policy.pairings import Pairing

_SHOWN_AS = {"extra": "new"}
"""Names in the report that differ from those in metrics and on boards."""


def describe_canaries(states: Iterable[State], rules: Rules) -> list[dict[str, Any]]:
    """Report on each pair, in order of first appearance."""
    groups: dict[Pairing, list[State]] = {}
    for state in states:
        groups.setdefault(state.pairing, []).append(state)
    return [_describe_canary(group, rules) for group in groups.values()]


def _describe_canary(states: list[State], rules: Rules) -> dict[str, Any]:
    state = merge_states(states)
    counts, compared = state.counts, state.compared
    went_on = compared - counts["refused"]
    loops, tenants, sessions = (
        state.read_sketch(f"refused_{what}") for what in ("loops", "tenants", "sessions")
    )
    evidence = Evidence(
        counts["extra"],
        went_on,
        loops.count(),
        tenants.count(),
        sessions.count(),
        exact=loops.exact,
    )
    verdict, of_tenants = judge(evidence, rules), state.read_sketch("tenants")
    acting = state.read_sketch("acting_tenants").count()

    def rate(part: int, whole: int) -> dict[str, float | None]:
        return find_bounds(part, whole, rules.confidence)._asdict()

    return {
        "policy": state.candidate,
        "canary_of": state.live,
        "verdict": verdict.word,
        "summary": verdict.summary,
        "reasons": verdict.reasons,
        "since": write_time(state.since),
        "until": write_time(state.until),
        "replicas": len(states),
        "acts_on": _describe_share(state.percent, acting, acting + of_tenants.count())
        if state.percent
        else None,
        "requests": {
            "compared": compared,
            **{name: counts[name] for name in VERDICTS},
            "refused": counts["refused"],
            "went_on": went_on,
            "uncompared": counts["uncompared"],
        },
        "refusals": {_SHOWN_AS.get(name, name): counts[name] for name in REFUSALS},
        "rates": {
            "new_refusals": rate(counts["extra"], went_on),
            "missed_refusals": rate(counts["missed"], compared),
            "disagreement": rate(counts["only_live"] + counts["only_candidate"], compared),
        },
        "new": {
            "loops": evidence.loops,
            "tenants": evidence.tenants,
            "sessions": evidence.sessions,
            "of_tenants": of_tenants.count(),
            "exact": all(sketch.exact for sketch in (loops, tenants, sessions, of_tenants)),
        },
        "after_notes": {who: _describe_after(counts, who) for who in POLICIES},
        "disagreements": [
            msgspec.structs.asdict(entry) | {"about": _SHOWN_AS.get(entry.about, entry.about)}
            for entry in state.disagreements
        ],
    }


def _describe_share(percent: int, acting: int, callers: int) -> dict[str, Any]:
    return {
        "percent": percent,
        "callers": acting,
        "of": callers,
        "text": tell_share(percent, acting, callers),
    }


def _describe_after(counts: dict[str, int], who: str) -> dict[str, Any]:
    arms = {
        arm: describe_after({after: counts.get(name_after(who, arm, after), 0) for after in AFTER})
        for arm in ARMS
    }
    return {arm: found for arm, found in arms.items() if found["begun"]}
