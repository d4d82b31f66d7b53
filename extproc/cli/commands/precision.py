"""`loopguard precision`: how accurate policies are on conversations that people have labelled."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extproc.cli.commands import add_policy_flag, count, load_policies
from extproc.cli.replay.command import compile_policies, open_lines, print_lines
from extproc.cli.replay.logs import STDIN, LogPlace
from extproc.errors import LoopguardError, UsageError
from extproc.logs import escape_controls
from extproc.options import make_type, parse_seconds
from extproc.policy.loader import PolicySet
from extproc.policy.presets import DEFAULT_PRESET, find_preset

if TYPE_CHECKING:
    from extproc.cli.replay.precision import Precision

HELP = "measure how accurate policies are on labelled conversations"
EXAMPLES = """examples:
  loopguard precision labelled.ndjson
  loopguard precision --policy policies/ --policy candidate.json labelled.ndjson --kinds
  loopguard precision --vary threshold_identical_requests=2,3,4,5 --detector turns labelled.ndjson
  loopguard precision labelled.ndjson --json | jq '.settings[0].refused.wrong'

Each line of a set is a conversation, as agents' APIs or ATIF have it, with a label; see docs/replay.md. The policies judge all
of them, whatever their selectors.

exit code: 0 all lines were judged, 1 some cannot be used, or none can"""

_SECONDS = 10.0
_MAX_ENTRIES = 1_000_000
_MOST_ERRORS = 20
_MOST_SETTINGS = 64


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_policy_flag(parser, required=False)
    parser.add_argument(
        "set", nargs="+", metavar="SET", help="labelled conversations, one per line, plain or gzip; - for stdin"
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="try these values of a key of loop_detection, or a JSON list of values; repeatable",
    )
    parser.add_argument("--detector", metavar="NAME", help="only this detector: change and show no other")
    parser.add_argument(
        "--seconds",
        type=make_type(parse_seconds(0, 86_400)),
        default=_SECONDS,
        metavar="SECONDS",
        help="time between two requests of a conversation (default 10)",
    )
    parser.add_argument("--kinds", action="store_true", help="also show each kind of conversation")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON document")


def run(options: argparse.Namespace) -> int:
    from extproc.cli.replay.judge import Judge  # noqa: PLC0415  # as in `replay`
    from extproc.cli.replay.precision import Precision, count_conversations, summarize  # noqa: PLC0415  # same

    policies = _load_settings(options)
    engine = compile_policies(policies)
    judge = Judge(engine, _MAX_ENTRIES, pinned=[plan.id for plan in engine.plans])
    precision = Precision(judge, policies, options.seconds)
    settings = [each for each in precision.settings.values() if options.detector in (None, each.detector)]
    if not settings:
        raise UsageError(f"--detector must be one of {', '.join(dict.fromkeys(name for _, name in precision.settings))}")
    if len(settings) > _MOST_SETTINGS:
        raise UsageError(f"{len(settings)} settings are too many to compare: at most {_MOST_SETTINGS}")
    with open_lines(options.set) as (logs, lines):
        errors = _judge_lines(precision, lines)
    for problem in errors[:_MOST_ERRORS]:
        print(escape_controls(f"error: {problem}"), file=sys.stderr)
    if len(errors) > _MOST_ERRORS:
        print(f"error: {len(errors) - _MOST_ERRORS:,} more lines cannot be used", file=sys.stderr)
    print_lines(logs, judge.evictions)
    counts = count_conversations(settings[0].judged)
    if not counts["conversations"]:
        raise LoopguardError("no conversation can be judged")
    document = {"precision": 1, **counts, "settings": [summarize(setting) for setting in settings]}
    if options.json:
        print(json.dumps(document))
    else:
        _print_tables(document, settings if options.kinds else ())
    return 1 if errors or logs.problems.harmful else 0


def _load_settings(options: argparse.Namespace) -> PolicySet:
    """The policies to compare; raises UsageError or BundleErrors."""
    from extproc.cli.replay.precision import read_values, vary  # noqa: PLC0415  # as in `replay`

    policies = load_policies(options.policy or [find_preset(DEFAULT_PRESET)])
    pairs = [wish.partition("=") for wish in options.vary]
    if not all(equals for _, equals, _ in pairs):
        raise UsageError("--vary must be KEY=VALUE,..., such as threshold_identical_requests=2,3,5")
    wishes = [(key, read_values(values)) for key, _, values in pairs]
    return vary(policies, wishes, options.detector) if wishes else policies


def _judge_lines(precision: Precision, lines: Iterable[tuple[LogPlace, bytes]]) -> list[str]:
    """What is wrong with lines that are no labelled conversations; all others are judged."""
    from extproc.cli.replay.conversations import read_conversation  # noqa: PLC0415  # as in `replay`
    from extproc.cli.replay.records import UnusableError  # noqa: PLC0415  # same

    errors = []
    for place, line in lines:
        folder = Path() if place.log == STDIN else Path(place.log).parent
        try:
            conversation = read_conversation(line, folder)
        except UnusableError as error:
            errors.append(f"{place}: {error}")
        else:
            precision.add(place, conversation)
    return errors


def _print_tables(document: dict[str, Any], by_kind: Sequence[Any]) -> None:
    from extproc.cli.replay.precision import LEVELS, list_kinds  # noqa: PLC0415  # as in `replay`
    from extproc.cli.replay.table import add_row, make_console, make_table, print_table  # noqa: PLC0415  # same

    console = make_console()
    columns = ("#loops found", "#others", "#too early", "#successes", "#turns", "#spared")
    table = make_table("setting", "", *columns)
    for setting in document["settings"]:
        for level in LEVELS:
            found = setting[level.replace(" ", "_")]
            turns = "" if found["turns"] is None else f"{found['turns']['median']:g}, up to {found['turns']['longest']}"
            spared = f"{found['bytes_of_loops']:.0%}"
            name = f"{setting['policy']}/{setting['detector']}" if level == LEVELS[0] else ""
            shares = _write_share(found["loops"]), _write_share(found["others"])
            cells = (*shares, found["early"], _write_share(found["successes"]), turns, spared if level == LEVELS[1] else "")
            add_row(table, name, level, *cells)
    about = ", ".join([count(document["loops"], "loop"), count(document["others"], "other"), f"{document['unclear']} unclear"])
    print_table(console, f"{count(document['conversations'], 'conversation')}: {about} (shares, with 95% intervals)", table)
    uncounted = [(setting, item) for setting in document["settings"] for item in setting["uncounted"].items()]
    if uncounted:
        table = make_table("setting", "reason", "#requests")
        for setting, (reason, requests) in uncounted:
            add_row(table, f"{setting['policy']}/{setting['detector']}", reason, requests)
        print_table(console, "Not counted", table)
    if by_kind:
        table = make_table("kind", "label", "#conversations", *(f"#{each.policy}/{each.detector}" for each in by_kind))
        for kind, label, conversations, found in list_kinds(by_kind):
            add_row(table, kind, label, conversations, *(f"{acted}, {refused} refused" for acted, refused in found))
        print_table(console, "Acted on and refused, by kind", table)


def _write_share(share: dict[str, Any]) -> str:
    if not share["of"]:
        return "-"
    interval = f"{100 * share['low']:.0f}-{100 * share['high']:.0f}"
    return f"{share['found'] / share['of']:.0%} ({interval})"
