"""The JSON report about canaries, from what the replicas have counted."""
# interpreted: tells operators, not requests

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from extproc.operator.after_notes import AFTER, ARMS, describe_after
from extproc.operator.canary.pairs import POLICIES, REFUSALS, VERDICTS, name_after
from extproc.operator.canary.states import State, merge_states
from extproc.operator.canary.verdict import Rules, find_bounds, judge
from extproc.operator.table import write_time
from extproc.policy.pairings import Pairing


def describe_canaries(states: Iterable[State], rules: Rules) -> list[dict[str, Any]]:
    """The report about each pair, in the order in which pairs first appear."""
    groups: dict[Pairing, list[State]] = {}
    for state in states:
        groups.setdefault(state.pairing, []).append(state)
    return [_describe_canary(group, rules) for group in groups.values()]


def _describe_canary(states: list[State], rules: Rules) -> dict[str, Any]:
    state = merge_states(states)
    counts, compared = state.counts, state.compared
    went_on = compared - counts["refused"]
    callers = {name: state.read_sketch(name) for name in ("tenants", "refused_tenants", "refused_sessions")}
    tenants, sessions = callers["refused_tenants"].count(), callers["refused_sessions"].count()
    verdict = judge(counts["extra"], went_on, tenants, sessions, rules)

    def rate(part: int, whole: int) -> dict[str, float | None]:
        return find_bounds(part, whole, rules.confidence)._asdict()

    return {
        "policy": state.candidate,
        "canary_of": state.live,
        "verdict": verdict.word,
        "reasons": verdict.reasons,
        "since": write_time(state.since),
        "until": write_time(state.until),
        "replicas": len(states),
        "requests": {
            "compared": compared,
            **{name: counts[name] for name in VERDICTS},
            "refused": counts["refused"],
            "went_on": went_on,
            "uncompared": counts["uncompared"],
        },
        "refusals": {name: counts[name] for name in REFUSALS},
        "rates": {
            "extra_refusals": rate(counts["extra"], went_on),
            "missed_refusals": rate(counts["missed"], compared),
            "disagreement": rate(counts["only_live"] + counts["only_candidate"], compared),
        },
        "newly_refused": {
            "tenants": tenants,
            "sessions": sessions,
            "of_tenants": callers["tenants"].count(),
            "exact": all(sketch.exact for sketch in callers.values()),
        },
        "after_notes": {who: _describe_after(counts, who) for who in POLICIES},
        "disagreements": [msgspec.structs.asdict(entry) for entry in state.disagreements],
    }


def _describe_after(counts: dict[str, int], who: str) -> dict[str, Any]:
    """What came after loops of one of the two policies, with and without notes."""
    arms = {arm: describe_after({after: counts.get(name_after(who, arm, after), 0) for after in AFTER}) for arm in ARMS}
    return {arm: found for arm, found in arms.items() if found["begun"]}
