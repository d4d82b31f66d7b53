"""`loopguard tune`: recommends a policy's window and threshold, according to recorded traffic."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from extproc.cli.commands import load_policies
from extproc.cli.replay.command import add_log_flags, compile_policies, open_logs, print_lines, write_file
from extproc.detectors.turns import MAX_THRESHOLD as MAX_OF_TURNS
from extproc.errors import BundleErrors, UsageError
from extproc.logs import escape_controls
from extproc.objects import MAX_SECONDS, MAX_THRESHOLD
from extproc.request.hash_key import read_hash_key

if TYPE_CHECKING:
    from extproc.cli.replay.tune import WindowPair
    from extproc.engine.engine import Engine
    from extproc.engine.plan import Detector

HELP = "find a window and a threshold for a policy from recorded traffic"
EXAMPLES = """examples:
  loopguard tune --policy candidate.json access.log
  loopguard tune --policy policies/ --id chat --windows 30,60,300 --thresholds 3,5,8 access.log --output tuned.json

Tries every pair of a window and a threshold in one pass over the logs; `turns` has thresholds only. `loopguard replay` reads
the same logs.

exit code: 0 there is a recommendation, 1 there is none, or a log cannot be read; 2 usage"""

_WINDOWS = "15,30,60,120,300,600"
_THRESHOLDS = "3,4,5,7,10,15"
_THRESHOLDS_OF_TURNS = "2,3,4,5,6,7,8"
_MAX_VALUES = 12
_PERCENT = 1.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_log_flags(parser)
    parser.add_argument("--id", metavar="POLICY", help="the policy; required if there are several")
    parser.add_argument("--detector", metavar="NAME", help="its detector; required if several can be tuned")
    parser.add_argument("--windows", default=_WINDOWS, metavar="SECONDS,...", help=f"default {_WINDOWS}")
    parser.add_argument(
        "--thresholds", default=_THRESHOLDS, metavar="N,...", help=f"default {_THRESHOLDS}; for turns {_THRESHOLDS_OF_TURNS}"
    )
    parser.add_argument(
        "--max-touched", type=float, default=_PERCENT, metavar="PERCENT", help="maximum share of callers affected (default 1)"
    )
    parser.add_argument("--output", metavar="FILE", help="write the policy with the recommended pair to FILE")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON document")


def run(options: argparse.Namespace) -> int:
    from extproc.cli.replay.tune import Sweep, TurnSweep, recommend, write_policy  # noqa: PLC0415  # as in `replay`

    policies = load_policies(options.policy)
    engine = compile_policies(policies)
    detector = _find_detector(engine, options.id, options.detector)
    if not 0 <= options.max_touched <= 100:  # noqa: PLR2004  # percent
        raise UsageError("--max-touched must be a share between 0 and 100")
    key = read_hash_key(options.hash_key_file)
    source = next(policy for source in policies.sources for policy in source.policies if policy.id == detector.policy)
    sweep: Sweep | TurnSweep
    if detector.stateless:
        windows = [0]
        given = options.thresholds if options.thresholds != _THRESHOLDS else _THRESHOLDS_OF_TURNS
        thresholds = _read_numbers("--thresholds", given, MAX_OF_TURNS, detector.threshold, 2)
        sweep = TurnSweep(source, detector.name, thresholds, options.max_entries, key)
    else:
        windows = _read_numbers("--windows", options.windows, MAX_SECONDS, detector.window_seconds, 1)
        thresholds = _read_numbers("--thresholds", options.thresholds, MAX_THRESHOLD, detector.threshold, 2)
        sweep = Sweep(engine, (detector.policy, detector.name), windows, thresholds, options.max_entries, key)
    with open_logs(options) as (logs, entries):
        for entry in entries:
            sweep.add(entry.recorded)
            logs.add_problems(entry.place, sweep.take_problems())
    pairs, tenants = sweep.list_pairs(), sweep.tenants.count()
    advice = recommend(pairs, sweep.requests, tenants, options.max_touched)
    ready = None if advice.pair is None else write_policy(source, detector.name, advice.pair)
    problems = _find_problems(ready)
    if options.output is not None and ready is not None:
        write_file(options.output, json.dumps(ready, indent=2) + "\n")
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
        "problems": problems,
    }
    if options.json:
        print(json.dumps(document))
    else:
        _print_tables(document, pairs, windows, thresholds, advice.pair)
    print_lines(logs, sweep.evictions)
    for problem in problems:
        print(escape_controls(f"warning: the policy needs another change as well: {problem}"), file=sys.stderr)
    return 1 if ready is None or (options.strict and logs.problems.harmful) else 0


def _find_detector(engine: Engine, policy: str | None, name: str | None) -> Detector:
    """The detector to tune; raises UsageError if there is none, or more than one."""
    plans = [plan for plan in engine.plans if policy in (None, plan.id)]
    if len(plans) != 1:
        known = ", ".join(plan.id for plan in engine.plans[:_MAX_VALUES])
        if policy is None and engine.plans:
            raise UsageError(f"several policies act; choose one with --id: {known}")
        raise UsageError(f"--id must name one of the policies that act: {known}")
    detectors = [detector for detector in plans[0].detectors if name in (None, detector.name)]
    counting = [detector for detector in detectors if _may_tune(detector)]
    if not counting and detectors:
        kinds = ", ".join(detector.similarity_name for detector in detectors)
        raise UsageError(f"{plans[0].id} cannot be tuned by a log: {kinds} finds loops in bodies; see `precision --vary`")
    if len(counting) != 1:
        known = ", ".join(detector.name for detector in plans[0].detectors if _may_tune(detector))
        raise UsageError(f"--detector must name one of these detectors of {plans[0].id}: {known}")
    return counting[0]


def _may_tune(detector: Detector) -> bool:
    """Whether a log shows what a detector compares: it counts, or compares turns."""
    return not detector.stateless or bool(detector.similarity.shape)


def _read_numbers(flag: str, text: str, highest: int, own: int, lowest: int) -> list[int]:
    """The numbers of a flag and the policy's own, ascending; raises UsageError for one out of range, or for too many."""
    parts = text.split(",")
    if not all(part.isdecimal() and lowest <= int(part) <= highest for part in parts) or len(parts) > _MAX_VALUES:
        raise UsageError(
            f"{flag} must be up to {_MAX_VALUES} numbers between {lowest} and {highest}, such as 30,60, not {text!r}"
        )
    return sorted({own, *map(int, parts)})


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
    table = make_table("#threshold", *(f"#{window} s" if window else "#acts on" for window in windows))
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
