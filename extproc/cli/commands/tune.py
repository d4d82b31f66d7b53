"""`loopguard tune`: recommends a policy's thresholds, window, session limits or budgets, according to recorded traffic."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from extproc.cli.commands import load_policies
from extproc.cli.replay.command import add_log_flags, compile_policies, open_logs, print_lines, write_file
from extproc.errors import BundleErrors, UsageError
from extproc.logs import escape_controls
from extproc.objects import MAX_SECONDS, MAX_THRESHOLD
from extproc.request.hash_key import read_hash_key

if TYPE_CHECKING:
    from extproc.cli.replay.logs import Logs
    from extproc.cli.replay.tune import WindowPair
    from extproc.engine.engine import Engine
    from extproc.engine.plan import Detector, Plan
    from extproc.policy.bundle import Policy
    from extproc.policy.loader import PolicySet

HELP = "find thresholds, a window, session limits or budgets for a policy from recorded traffic"
EXAMPLES = """examples:
  loopguard tune --policy candidate.json access.log
  loopguard tune --policy policies/ --id chat --windows 30,60,300 --thresholds 3,5,8 access.log --output tuned.json
  loopguard tune --policy agents.json --detector turns records.ndjson
  loopguard tune --policy sessions.json --limits --percentile 99.5 records.ndjson --output tuned.json
  loopguard tune --policy budgets.json --budgets access.log

For a detector with a window, tries every pair of a window and a threshold in one pass over the logs. For `turns`, finds the
thresholds of a note, a last answer and a refusal, and the weak threshold. With --limits, finds limits of sessions: of steps,
tool calls, calls of each tool, and money. With --budgets, finds the size of each budget in `rules`. All work without bodies;
money needs the tokens of responses in the log. `loopguard replay` reads the same logs.

exit code: 0 there is a recommendation, 1 there is none, or a log cannot be read; 2 usage"""

_TURNS = "turns"
_WINDOWS = "15,30,60,120,300,600"
_THRESHOLDS = "3,4,5,7,10,15"
_MAX_VALUES = 12
_OF_TURNS = "3,4,5,6,7,8"
_PERCENT = 1.0
_PERCENTILE = 99.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_log_flags(parser)
    parser.add_argument("--id", metavar="POLICY", help="the policy; required if there are several")
    parser.add_argument(
        "--detector", metavar="NAME", help="its detector; required if several have a window, or for turns beside one"
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--limits", action="store_true", help="recommend session_limits, and no detector's settings")
    kinds.add_argument("--budgets", action="store_true", help="recommend the budgets of `rules`, and no detector's settings")
    parser.add_argument(
        "--percentile",
        type=float,
        default=_PERCENTILE,
        metavar="PERCENT",
        help="share of the runs that went on for which --limits must be enough, or of callers for --budgets (default 99)",
    )
    parser.add_argument("--windows", default=_WINDOWS, metavar="SECONDS,...", help=f"default {_WINDOWS}")
    parser.add_argument(
        "--thresholds", metavar="N,...", help=f"thresholds to try (default {_THRESHOLDS}; of a note, with turns, {_OF_TURNS})"
    )
    parser.add_argument(
        "--max-touched",
        type=float,
        default=_PERCENT,
        metavar="PERCENT",
        help="maximum share of callers affected; with turns, of runs that went on (default 1)",
    )
    parser.add_argument("--output", metavar="FILE", help="write the policy with the recommended settings to FILE")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON document")


def run(options: argparse.Namespace) -> int:
    from extproc.cli.replay.tune import Sweep, recommend, write_policy  # noqa: PLC0415  # as in `replay`

    policies = load_policies(options.policy)
    engine = compile_policies(policies)
    if not 0 <= options.max_touched <= 100:  # noqa: PLR2004  # percent
        raise UsageError("--max-touched must be a share between 0 and 100")
    if not 0 < options.percentile <= 100:  # noqa: PLR2004  # percent
        raise UsageError("--percentile must be above 0 and at most 100")
    if options.limits:
        return _tune_runs(options, policies, _find_plan(engine, options.id).id, None)
    if options.budgets:
        return _tune_budgets(options, policies, _find_plan(engine, options.id))
    detector = _find_detector(engine, options.id, options.detector)
    if detector.similarity_name == _TURNS:
        return _tune_runs(options, policies, detector.policy, detector.name)
    windows = _read_numbers("--windows", options.windows, MAX_SECONDS, detector.window_seconds, 1)
    thresholds = _read_numbers("--thresholds", options.thresholds or _THRESHOLDS, MAX_THRESHOLD, detector.threshold, 2)
    key = read_hash_key(options.hash_key_file)
    sweep = Sweep(engine, (detector.policy, detector.name), windows, thresholds, options.max_entries, key)
    with open_logs(options) as (logs, entries):
        for entry in entries:
            sweep.add(entry.recorded)
            logs.add_problems(entry.place, sweep.take_problems())
    pairs, tenants = sweep.list_pairs(), sweep.tenants.count()
    advice = recommend(pairs, sweep.requests, tenants, options.max_touched)
    source = _find_policy(policies, detector.policy)
    ready = None if advice.pair is None else write_policy(source, detector.name, advice.pair)
    document = {
        "tune": 1,
        "policy": detector.policy,
        "detector": detector.name,
        "requests": sweep.requests,
        "uncounted": sweep.uncounted,
        "tenants": tenants,
        "evicted": sweep.evictions,
        "pairs": [pair._asdict() for pair in pairs],
        "recommendation": None if advice.pair is None else advice.pair._asdict(),
        "reason": advice.reason,
        "ready": ready,
    }
    return _report(options, logs, document, lambda: _print_tables(document, pairs, windows, thresholds, advice.pair))


def _report(options: argparse.Namespace, logs: Logs, document: dict[str, Any], show: Callable[[], None]) -> int:
    """Write the ready policy, and print the document, by `show` for people; returns the exit code."""
    ready = document["ready"]
    problems = document["problems"] = _find_problems(ready)
    if options.output is not None and ready is not None:
        write_file(options.output, json.dumps(ready, indent=2) + "\n")
    if options.json:
        print(json.dumps(document))
    else:
        show()
    print_lines(logs, document["evicted"])
    for problem in problems:
        print(escape_controls(f"warning: the policy needs another change as well: {problem}"), file=sys.stderr)
    return 1 if ready is None or (options.strict and logs.problems.harmful) else 0


def _find_detector(engine: Engine, policy: str | None, name: str | None) -> Detector:
    """The detector to tune; raises UsageError if there is none, or more than one."""
    plan = _find_plan(engine, policy)
    detectors = [detector for detector in plan.detectors if name in (None, detector.name)]
    counting = [detector for detector in detectors if not detector.stateless]
    turns = [detector for detector in detectors if detector.similarity_name == _TURNS]
    found = counting or turns
    if not found and detectors:
        kinds = ", ".join(detector.similarity_name for detector in detectors)
        raise UsageError(f"{plan.id} has no window to tune: {kinds} finds loops in the request itself; see `precision --vary`")
    if len(found) != 1:
        able = [detector.name for detector in plan.detectors if not detector.stateless or detector.similarity_name == _TURNS]
        raise UsageError(f"--detector must name one of these detectors of {plan.id}: {', '.join(able)}")
    return found[0]


def _find_plan(engine: Engine, policy: str | None) -> Plan:
    """The policy to tune; raises UsageError if there is none, or more than one."""
    plans = [plan for plan in engine.plans if policy in (None, plan.id)]
    if len(plans) != 1:
        known = ", ".join(plan.id for plan in engine.plans[:_MAX_VALUES])
        if policy is None and engine.plans:
            raise UsageError(f"several policies act; choose one with --id: {known}")
        raise UsageError(f"--id must name one of the policies that act: {known}")
    return plans[0]


def _find_policy(policies: PolicySet, name: str) -> Policy:
    return next(policy for source in policies.sources for policy in source.policies if policy.id == name)


def _tune_runs(options: argparse.Namespace, policies: PolicySet, policy_id: str, detector: str | None) -> int:
    """Tune a detector of turns, or the limits of sessions if that is None; returns the exit code."""
    from extproc.cli.replay import advice  # noqa: PLC0415  # as in `replay`
    from extproc.cli.replay.runs import THRESHOLDS, RunCollector, find_turns  # noqa: PLC0415  # same

    policy, limits = _find_policy(policies, policy_id), detector is None
    thresholds = _read_numbers("--thresholds", options.thresholds or _OF_TURNS, THRESHOLDS[-1], None, THRESHOLDS[0])
    key = read_hash_key(options.hash_key_file)
    runs = RunCollector(policy, detector or find_turns(policy), options.max_entries, key, sessions=limits)
    with open_logs(options) as (logs, entries):
        for entry in entries:
            runs.add(entry.recorded)
            logs.add_problems(entry.place, runs.take_problems())
    every = runs.list_all()
    found: advice.TurnsAdvice | advice.LimitsAdvice
    if detector is None:
        own_limits = policy.spec.session_limits
        tools = list(own_limits.max_calls_per_tool) if own_limits is not None else []
        found, rows = advice.recommend_limits(every, options.percentile, tools)
        tables = {"limits": [row._asdict() for row in rows]}
        ready = advice.write_limits(policy, found.keys) if found.keys else None
    else:
        own = dict(policy.spec.detectors())[detector].weak_threshold
        found = advice.recommend_turns(every, thresholds, options.max_touched, own)
        tables = {"thresholds": [row._asdict() for row in advice.list_thresholds(every)]}
        tables["weak_thresholds"] = [row._asdict() for row in advice.list_weak_thresholds(every)]
        ready = advice.write_detector(policy, detector, found.keys) if found.keys else None
    document = {
        "tune": 1,
        "policy": policy_id,
        "detector": detector,
        "requests": runs.requests,
        "uncounted": runs.uncounted,
        "nameless": runs.nameless,
        "runs": len(every),
        "stuck": sum(run.stuck for run in every),
        "evicted": runs.evictions + runs.dropped,
        **tables,
        "recommendation": found.keys or None,
        "reason": "; ".join(found.reasons),
        "ready": ready,
    }
    return _report(options, logs, document, lambda: _print_runs(document, found.reasons, tables))


def _tune_budgets(options: argparse.Namespace, policies: PolicySet, plan: Plan) -> int:
    """Tune the budgets of a policy; returns the exit code."""
    from extproc.cli.replay.spending import SpendingCollector, list_configs, write_budgets  # noqa: PLC0415  # as in `replay`

    if plan.budget is None or not plan.budget.guard.rules:
        raise UsageError(f"{plan.id} has no `rules` to tune")
    policy = _find_policy(policies, plan.id)
    spending = SpendingCollector(policy, options.max_entries, read_hash_key(options.hash_key_file))
    with open_logs(options) as (logs, entries):
        for entry in entries:
            spending.add(entry.recorded)
            logs.add_problems(entry.place, spending.take_problems())
    found = spending.recommend(plan.budget.guard, list_configs(policy), options.percentile)
    tables = {"budgets": [row._asdict() for row in found.rows]}
    document = {
        "tune": 1,
        "policy": plan.id,
        "requests": spending.requests,
        "estimated": spending.estimated,
        "callers": spending.callers,
        "evicted": spending.dropped,
        **tables,
        "recommendation": found.keys or None,
        "reason": "; ".join(found.reasons),
        "ready": write_budgets(policy, found.keys) if found.keys else None,
    }
    counted = f"the rules of {plan.id} apply to {spending.requests:,} requests"
    callers = f"{spending.callers:,} callers"
    return _report(options, logs, document, lambda: _print_advice(document, counted, found.reasons, tables, callers))


_TITLES = {
    "thresholds": "How many of each a threshold touches, and at once (strong)",
    "weak_thresholds": "How many of each a weak threshold touches",
    "limits": "What those that went on took, and how many are beyond each limit",
    "budgets": "What callers need of each budget, and how many need more",
}


def _print_runs(document: dict[str, Any], reasons: Sequence[str], tables: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    left = f"{document['uncounted']:,} could not be counted, {document['nameless']:,} belong to no run, or show no turn yet"
    counted = f"{document['policy']} counted {document['requests']:,} requests; {left}"
    runs = f"{document['runs'] - document['stuck']:,} runs went on, {document['stuck']:,} end in a loop"
    _print_advice(document, counted, reasons, tables, runs)


def _print_advice(
    document: dict[str, Any], counted: str, reasons: Sequence[str], tables: Mapping[str, Sequence[dict[str, Any]]], title: str
) -> None:
    from extproc.cli.replay.table import add_row, make_console, make_table, print_table  # noqa: PLC0415  # as in `replay`

    console = make_console()
    print(escape_controls(counted))
    for name, rows in tables.items():
        flat = [_flatten(row) for row in rows]
        if not flat:
            continue
        table = make_table(*(f"#{column.replace('_', ' ')}" for column in flat[0]))
        for row in flat:
            add_row(table, *row.values())
        print_table(console, f"{title}. {_TITLES[name]}", table)
    print()
    for reason in reasons:
        print(escape_controls(f"- {reason}"))
    if document["ready"] is not None:
        print(f"\n{json.dumps(document['ready'], indent=2)}")


def _flatten(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a table; percentiles get a column each."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        flat |= {f"{each}%": number for each, number in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _read_numbers(flag: str, text: str, highest: int, own: int | None, lowest: int) -> list[int]:
    """The numbers of a flag and the own one, ascending; raises UsageError for one out of range, or for too many."""
    parts = text.split(",")
    if not all(part.isdecimal() and lowest <= int(part) <= highest for part in parts) or len(parts) > _MAX_VALUES:
        raise UsageError(
            f"{flag} must be up to {_MAX_VALUES} numbers between {lowest} and {highest}, such as 30,60, not {text!r}"
        )
    return sorted({*map(int, parts), *([] if own is None else [own])})


def _find_problems(ready: dict[str, Any] | None) -> list[str]:
    """Further changes that a policy needs, such as later thresholds that are no longer later."""
    if ready is None:
        return []
    from datetime import UTC, datetime  # noqa: PLC0415  # only used here

    from extproc.policy.loader import parse  # noqa: PLC0415  # same

    try:
        parse({"policy": json.dumps(ready).encode()}, datetime.now(UTC))
    except BundleErrors as errors:
        return [f"{error.pointer}: {error.message}" for error in errors.errors]
    return []


def _print_tables(
    document: dict[str, Any],
    pairs: Sequence[WindowPair],
    windows: Sequence[int],
    thresholds: Sequence[int],
    chosen: WindowPair | None,
) -> None:
    from extproc.cli.replay.table import add_row, make_console, make_table, print_table  # noqa: PLC0415  # as in `replay`

    console = make_console()
    found = {(pair.window_seconds, pair.threshold): pair for pair in pairs}
    table = make_table("#threshold", *(f"#{window} s" for window in windows))
    for threshold in thresholds:
        cells = []
        for window in windows:
            pair = found[window, threshold]
            cells.append(f"{'* ' if pair == chosen else ''}{pair.requests:,} of {pair.tenants:,}")
        add_row(table, threshold, *cells)
    about = f"{document['policy']} counted {document['requests']:,} requests; callers: {document['tenants']:,}"
    print_table(console, f"{about}. What each pair would have acted on, and of how many callers", table)
    print(f"\n{document['reason']}.")
    if document["ready"] is not None:
        print(f"\n{json.dumps(document['ready'], indent=2)}")
