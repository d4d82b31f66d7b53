"""Thresholds of `turns` and limits of sessions that real runs suggest, each with its reason.

Runs that went on are what a setting must not touch; runs that are stuck are what it is for. See `runs`.
"""
# interpreted: works on files

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any, NamedTuple

from extproc.cli.replay.precision import make_share
from extproc.cli.replay.runs import THRESHOLDS, WEAK_THRESHOLDS, RecordedRun, find_entry
from extproc.policy.bundle import Policy
from extproc.sessions.session_limits import MAX_COUNT, MAX_TOOL_CALLS

FEWEST_RUNS = 100
"""With fewer, a recommendation comes with a warning."""

PERCENTILES = (50, 90, 95, 99, 100)

_REACTION = 2
"""Turns that an agent has between two actions, to change course."""

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
    percentiles: dict[int, int]
    value: int
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


def recommend_limits(runs: Sequence[RecordedRun], percentile: float) -> tuple[LimitsAdvice, list[LimitRow]]:
    """Each limit at a percentile of the runs that went on, and the rows that it follows from."""
    went_on, stuck = _split(runs)
    if not went_on:
        return LimitsAdvice({}, [f"none of {len(runs):,} sessions went on, so nothing says what a good one takes"]), []
    rows, reasons, keys = [], [], {}
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
    return LimitsAdvice(keys, [*reasons, *_warn(len(went_on))]), rows


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
    document["spec"]["session_limits"] = {**document["spec"].get("session_limits", {}), **keys}
    return document
