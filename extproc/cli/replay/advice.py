"""Thresholds of `turns` and limits of sessions that real runs suggest, each with its reason.

Runs that went on are what a setting must not touch; runs that are stuck are what it is for. See `runs`.
"""
# interpreted: works on files

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import ceil, floor, log10
from typing import Any, NamedTuple

from extproc.cli.replay.precision import make_share
from extproc.cli.replay.runs import THRESHOLDS, WEAK_THRESHOLDS, RecordedRun, find_entry
from extproc.policy.bundle import Policy
from extproc.sessions.session_limits import MAX_COUNT, MAX_TOOL_CALLS
from extproc.store.rules.session import NANO_DOLLARS

FEWEST_RUNS = 100
"""With fewer, a recommendation comes with a warning."""

PERCENTILES = (50, 90, 95, 99, 100)

_REACTION = 2
"""Turns that an agent has between two actions, to change course."""

_MOST_TOOLS = 10
"""Tools for which limits are recommended if the policy limits none."""

_CALMER = 10
"""Landing may touch this part of the runs that a note may touch."""


class ThresholdRow(NamedTuple):
    """How many runs a threshold touches: any of their loops, and those that may be refused at once."""

    threshold: int
    went_on: int
    went_on_strong: int
    stuck: int
    stuck_strong: int


class WeakRow(NamedTuple):
    """How many runs a weak threshold touches."""

    weak_threshold: int
    went_on: int
    stuck: int


class TurnsAdvice(NamedTuple):
    """Recommended keys of a detector of turns, empty for none, and why."""

    keys: dict[str, Any]
    reasons: list[str]


class LimitRow(NamedTuple):
    """What runs that went on took, by percentile, the limit, and how many runs of both kinds are beyond it."""

    limit: str
    percentiles: dict[int, float]
    value: float
    went_on_beyond: int
    stuck_beyond: int


class LimitsAdvice(NamedTuple):
    """Recommended keys of session_limits, empty for none, and why."""

    keys: dict[str, Any]
    reasons: list[str]


def list_thresholds(runs: Sequence[RecordedRun]) -> list[ThresholdRow]:
    """A row for each threshold that can be tried."""
    went_on, stuck = _split(runs)
    return [
        ThresholdRow(
            number,
            sum(run.found >= number for run in went_on),
            sum(run.strong >= number for run in went_on),
            sum(run.found >= number for run in stuck),
            sum(run.strong >= number for run in stuck),
        )
        for number in THRESHOLDS
    ]


def list_weak_thresholds(runs: Sequence[RecordedRun]) -> list[WeakRow]:
    """A row for each weak threshold that can be tried."""
    went_on, stuck = _split(runs)
    return [
        WeakRow(number, sum(run.weak >= number for run in went_on), sum(run.weak >= number for run in stuck))
        for number in WEAK_THRESHOLDS
    ]


def _split(runs: Sequence[RecordedRun]) -> tuple[list[RecordedRun], list[RecordedRun]]:
    """Runs that went on, and runs that are stuck."""
    return [run for run in runs if not run.stuck], [run for run in runs if run.stuck]


def recommend_turns(
    runs: Sequence[RecordedRun], thresholds: Sequence[int], percent: float, weak: int | None = None
) -> TurnsAdvice:
    """A note, a last answer and a refusal, each at the lowest threshold that touches few enough runs that went on.

    A note may touch `percent` of them, a landing a tenth of that, a refusal none in these logs.

    Args:
        runs: all runs.
        thresholds: for the note.
        percent: of the runs that went on.
        weak: the weak threshold to keep if the logs have no weak loop; None for the highest.
    """
    went_on, stuck = _split(runs)
    rows = {row.threshold: row for row in list_thresholds(runs)}
    caught = [number for number in sorted(thresholds) if number in rows and rows[number].stuck]
    if not caught:
        return TurnsAdvice({}, [f"none of {len(runs):,} runs ends in a loop of turns: these logs have nothing to stop"])
    allowed = int(len(went_on) * percent / 100)
    first = next((number for number in caught if rows[number].went_on <= allowed), None)
    if first is None:
        least = rows[caught[-1]]
        told = f"each threshold touches more than {allowed:,} of {len(went_on):,} runs that went on ({percent:g}%)"
        look = "Look at them with a replay: their repetition may be intended"
        return TurnsAdvice({}, [f"{told}; {least.threshold} touches {least.went_on:,}", look])
    keys: dict[str, Any] = {"threshold_identical_requests": first, "action": "steer"}
    reasons = [
        f"steer at {first}: {_tell(rows[first].went_on, len(went_on))}, and {rows[first].stuck:,} of {len(stuck):,} stuck ones"
    ]
    ladder: dict[str, int] = {}
    last = first
    for action, most in (("land", allowed // _CALMER), ("reject", 0)):
        found = _find_step(last, lambda number, most=most: rows[number].went_on_strong <= most)  # type: ignore[misc]  # bound
        if found is None:
            reasons.append(f"no {action}: every higher threshold touches more than {most:,} of the runs that went on")
            continue
        ladder[action] = last = found
        row = rows[found]
        touched = f"{_tell(row.went_on_strong, len(went_on))}, and {row.stuck_strong:,} of {len(stuck):,} stuck ones"
        reasons.append(f"{action} at {found}: {touched}")
    keys["escalate"] = ladder
    number, reason = _choose_weak(runs, last, weak)
    return TurnsAdvice(keys | {"weak_threshold": number}, [*reasons, reason, *_warn(len(went_on))])


def _find_step(last: int, fits: Callable[[int], bool]) -> int | None:
    """The lowest threshold for the next action, far enough behind the last one if possible."""
    later = [number for number in THRESHOLDS if number >= last + _REACTION] or [n for n in THRESHOLDS if n > last]
    return next((number for number in later if fits(number)), None)


def _choose_weak(runs: Sequence[RecordedRun], last: int, own: int | None) -> tuple[int, str]:
    """The weak threshold, not below the other ones, and why."""
    rows = list_weak_thresholds(runs)
    highest = WEAK_THRESHOLDS[-1]
    if not (rows[0].went_on or rows[0].stuck):
        kept = highest if own is None else max(own, last)
        return kept, f"weak_threshold {kept}: these logs have no weak loop"
    for row in rows:
        if row.weak_threshold >= last and not row.went_on:
            told = "no run that went on repeats talk or short results so often"
            return row.weak_threshold, f"weak_threshold {row.weak_threshold}: {told}; {row.stuck:,} stuck ones do"
    touched = f"even the highest touches {rows[-1].went_on:,} runs that went on, so try it as a canary first"
    return highest, f"weak_threshold {highest}: {touched}"


def _tell(touched: int, runs: int) -> str:
    """How many runs are touched, and how many it may be in truth."""
    share = make_share(touched, runs)
    return f"it touches {touched:,} of {runs:,} runs that went on (at most {share.high:.1%}, with 95% confidence)"


def _warn(went_on: int) -> list[str]:
    if went_on >= FEWEST_RUNS:
        return []
    return [f"this is little traffic: results are more reliable from {FEWEST_RUNS} runs that went on"]


_MEASURES: tuple[tuple[str, str, Callable[[RecordedRun], int], int, int], ...] = (
    ("max_steps", "requests", lambda run: run.steps, 0, MAX_COUNT),
    (
        "max_tool_calls",
        "tool calls",
        lambda run: run.tool_calls,
        1,
        MAX_TOOL_CALLS,
    ),  # the request after the last call has to pass
)
"""Limits, their units, what a run takes of them, by how much they are higher than that, and the highest."""


def recommend_limits(
    runs: Sequence[RecordedRun], percentile: float, tools: Sequence[str] = ()
) -> tuple[LimitsAdvice, list[LimitRow]]:
    """Each limit at a percentile of the runs that went on, and the rows that it follows from.

    Args:
        runs: all runs.
        percentile: of the runs that went on.
        tools: those to limit; none: those that most runs call.
    """
    went_on, stuck = _split(runs)
    if not went_on:
        return LimitsAdvice({}, [f"none of {len(runs):,} sessions went on, so nothing says what a good one takes"]), []
    rows: list[LimitRow] = []
    reasons: list[str] = []
    keys: dict[str, Any] = {}
    for limit, unit, measure, spare, most in _MEASURES:
        taken = sorted(map(measure, went_on))
        enough = find_percentile(taken, percentile)
        if not enough:
            reasons.append(f"no {limit}: {percentile:g}% of {len(taken):,} sessions that went on have no {unit}")
            continue
        keys[limit] = value = min(enough + spare, most)
        beyond, over = sum(each > enough for each in taken), sum(measure(run) > enough for run in stuck)
        rows.append(LimitRow(limit, {each: find_percentile(taken, each) for each in PERCENTILES}, value, beyond, over))
        told = f"{percentile:g}% of {len(taken):,} sessions that went on take at most {enough:,} {unit}"
        more = f"{beyond:,} take more, up to {taken[-1]:,}, and so do {over:,} of {len(stuck):,} stuck ones"
        reasons.append(f"{limit} {value:,}: {told}; {more}")
    limited = _limit_tools(went_on, stuck, percentile, tools, rows, reasons)
    keys |= {"max_calls_per_tool": limited} if limited else {}
    keys |= _limit_cost(went_on, stuck, percentile, rows, reasons)
    return LimitsAdvice(keys, [*reasons, *_warn(len(went_on))]), rows


def _limit_tools(  # noqa: PLR0913  # as `recommend_limits`
    went_on: Sequence[RecordedRun],
    stuck: Sequence[RecordedRun],
    percentile: float,
    tools: Sequence[str],
    rows: list[LimitRow],
    reasons: list[str],
) -> dict[str, int]:
    """A limit for each tool, at a percentile of the runs that call it; adds rows and reasons."""
    callers = Counter(name for run in went_on for name in run.tools if not name.startswith("#"))
    keys: dict[str, int] = {}
    for tool in tools or [name for name, _ in callers.most_common(_MOST_TOOLS)]:
        taken = sorted(run.tools[tool] for run in went_on if tool in run.tools)
        if not taken:
            reasons.append(f"no limit for {tool}: no session that went on calls it")
            continue
        keys[tool] = value = min(find_percentile(taken, percentile), MAX_TOOL_CALLS)
        beyond, over = sum(each > value for each in taken), sum(run.tools.get(tool, 0) > value for run in stuck)
        shown: dict[int, float] = {each: find_percentile(taken, each) for each in PERCENTILES}
        rows.append(LimitRow(f"calls of {tool}", shown, value, beyond, over))
        told = f"{percentile:g}% of {len(taken):,} sessions that went on and call it need at most {value:,} calls"
        reasons.append(f"max_calls_per_tool {tool} {value:,}: {told}; {beyond:,} need more, and so do {over:,} stuck ones")
    return keys


def _limit_cost(
    went_on: Sequence[RecordedRun], stuck: Sequence[RecordedRun], percentile: float, rows: list[LimitRow], reasons: list[str]
) -> dict[str, float]:
    """A limit for money, at a percentile of the runs that went on; adds a row and a reason."""
    taken = sorted(run.cost for run in went_on if run.cost >= 0)
    if not taken:
        reasons.append("no max_cost_per_session: these records do not say what sessions cost at the policy's prices")
        return {}
    enough = find_percentile(taken, percentile)
    if not enough:
        reasons.append(f"no max_cost_per_session: {percentile:g}% of {len(taken):,} sessions that went on cost nothing")
        return {}
    value = _round_up(enough / NANO_DOLLARS)
    beyond, over = sum(each > enough for each in taken), sum(run.cost > enough for run in stuck)
    shown = {each: round(find_percentile(taken, each) / NANO_DOLLARS, 6) for each in PERCENTILES}
    rows.append(LimitRow("max_cost_per_session", shown, value, beyond, over))
    when = "" if all(run.whole for run in went_on if run.cost >= 0) else " before their last request"
    told = f"{percentile:g}% of {len(taken):,} sessions that went on had cost at most ${enough / NANO_DOLLARS:,.6g}{when};"
    more = f"{beyond:,} had cost more, up to ${taken[-1] / NANO_DOLLARS:,.6g}, and so had {over:,}"
    reasons.append(f"max_cost_per_session {value:g}: {told} {more} of {len(stuck):,} stuck ones")
    return {"max_cost_per_session": value}


def _round_up(dollars: float) -> float:
    """The next higher amount with two digits, because a session that has used exactly its limit is refused."""
    digits = 1 - floor(log10(dollars))
    return round((floor(dollars * 10.0**digits) + 1) / 10.0**digits, max(digits, 0))


def find_percentile(ascending: Sequence[int], percentile: float) -> int:
    """The smallest value that at least this percentage of values do not exceed (nearest rank)."""
    return ascending[max(1, ceil(len(ascending) * percentile / 100)) - 1]


def write_detector(policy: Policy, detector: str, keys: dict[str, Any]) -> dict[str, Any]:
    """The policy with these keys of its detector."""
    document: dict[str, Any] = policy.model_dump(mode="json", by_alias=True, exclude_unset=True)
    entry = find_entry(policy, document, detector)
    entry |= keys
    return document


def write_limits(policy: Policy, keys: dict[str, Any]) -> dict[str, Any]:
    """The policy with these limits, beside the others that it has."""
    document: dict[str, Any] = policy.model_dump(mode="json", by_alias=True, exclude_unset=True)
    own = document["spec"].get("session_limits", {})
    tools = {**own.get("max_calls_per_tool", {}), **keys.get("max_calls_per_tool", {})}
    document["spec"]["session_limits"] = {**own, **keys, **({"max_calls_per_tool": tools} if tools else {})}
    return document
