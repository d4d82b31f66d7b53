"""`make precision`: how accurate policies are on labelled conversations.

Each line of a set is a JSON object: a conversation as its last request shows it, and a `label`.

    {"label": {"loop": true, "begins": 4, "success": false, "kind": "tests"}, "messages": [...]}

In a label, `loop` is true, false, or null if unclear; `begins` is the number of the model's first
answer in the loop, starting at 1; `success` is whether the agent reached its goal; `kind` groups
conversations for `--kinds`. The conversation is `messages`, `input` (Responses), `contents`
(Gemini), `steps` (ATIF), `requests` (a list of bodies as sent), or `file`, a path to one of these.
Other keys of the body, such as `tools`, can stand beside it.

Label a conversation by reading all of it, before anything has judged it. A loop is an agent that
repeats itself and learns nothing new, even if it recovers later; it begins with the first answer
that later ones repeat. Polling, queues, and a person who asks again are no loops. Leave unclear
ones in, as null: they count for nothing.

Each conversation is replayed as a caller of its own, one request for each answer. The policies
judge all of them, whatever their selectors, and so do the rules of other programs (`others`), which
`tests/bench/precision/others.py` explains. The table has two rows for each detector or rule, for
conversations acted on and for refused or ended ones:

- loops found: requests must show some of the loop; earlier ones are `too early`
- others: conversations without a loop
- successes: agents that reached their goal, loop or not
- turns: of the loop before the first action, the median and the most
- spared: share of the bytes of loops, from the first refusal on

`--json` also lists what is found, wrong or missed, and the requests.

exit code: 0 all lines were judged, 1 some cannot be used, or none can, 2 usage
"""

import argparse
import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from extproc.cli.commands import add_policy_flag, load_policies
from extproc.cli.packed import FilePlace
from extproc.cli.replay.command import compile_policies
from extproc.cli.replay.judge import Judge
from extproc.cli.replay.records import UnusableError
from extproc.cli.tables import make_console, print_rows
from extproc.errors import LoopguardError, UsageError
from extproc.logs import escape_controls
from extproc.operator.admin.row_states import count
from extproc.policy.presets import DEFAULT_PRESET, find_preset
from extproc.request.document import limit_integers
from tests.bench.precision.conversations import read_conversation
from tests.bench.precision.measure import (
    LEVELS,
    Precision,
    count_conversations,
    list_kinds,
    summarize,
)
from tests.bench.precision.page import fill_page

_MAX_ENTRIES = 1_000_000
_MOST_ERRORS = 20


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tests.bench.precision",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_policy_flag(parser, required=False)
    parser.add_argument(
        "set",
        nargs="+",
        type=Path,
        metavar="SET",
        help="labelled conversations, one per line, plain or .gz",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        help="time between two requests of a conversation (default 10)",
    )
    parser.add_argument("--kinds", action="store_true", help="also show each kind of conversation")
    parser.add_argument(
        "--page",
        type=Path,
        metavar="FILE",
        help="also write what is seen into this page of the documentation",
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON document")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    try:
        return run(options)
    except LoopguardError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def run(options: argparse.Namespace) -> int:
    limit_integers()
    policies = load_policies(options.policy or [find_preset(DEFAULT_PRESET)])
    engine = compile_policies(policies)
    judge = Judge(engine, _MAX_ENTRIES, pinned=[plan.id for plan in engine.plans])
    precision = Precision(judge, policies, options.seconds)
    settings = list(precision.settings.values())
    errors = [problem for path in options.set for problem in _judge_file(precision, path)]
    for problem in errors[:_MOST_ERRORS]:
        print(escape_controls(f"error: {problem}"), file=sys.stderr)
    if len(errors) > _MOST_ERRORS:
        print(f"error: {len(errors) - _MOST_ERRORS:,} more lines cannot be used", file=sys.stderr)
    counts = count_conversations(settings[0].judged)
    if not counts["conversations"]:
        raise LoopguardError("no conversation can be judged")
    document = {"precision": 1, **counts, "settings": [summarize(setting) for setting in settings]}
    if options.page:
        options.page.write_text(fill_page(options.page.read_text(), settings))
    if options.json:
        print(json.dumps(document))
    else:
        _print_tables(document, settings if options.kinds else ())
    return 1 if errors else 0


def _judge_file(precision: Precision, path: Path) -> list[str]:
    errors = []
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.isspace():
                continue
            place = FilePlace(str(path), number)
            try:
                conversation = read_conversation(line, path.parent)
            except UnusableError as error:
                errors.append(f"{place}: {error}")
            else:
                precision.add(place, conversation)
    return errors


def _print_tables(document: dict[str, Any], by_kind: Sequence[Any]) -> None:
    console = make_console()
    rows: list[Sequence[object]] = []
    for setting in document["settings"]:
        for level in LEVELS:
            found = setting[level.replace(" ", "_")]
            turns = (
                ""
                if found["turns"] is None
                else f"{found['turns']['median']:g}, up to {found['turns']['longest']}"
            )
            spared = f"{found['bytes_of_loops']:.0%}"
            name = f"{setting['policy']}/{setting['detector']}" if level == LEVELS[0] else ""
            shares = _write_share(found["loops"]), _write_share(found["others"])
            cells = (
                *shares,
                found["early"],
                _write_share(found["successes"]),
                turns,
                spared if level == LEVELS[1] else "",
            )
            rows.append((name, level, *cells))
    about = ", ".join(
        [
            count(document["loops"], "loop"),
            count(document["others"], "other"),
            f"{document['unclear']} unclear",
        ]
    )
    title = (
        f"{count(document['conversations'], 'conversation')}: {about} (shares, with 95% intervals)"
    )
    columns = ("#loops found", "#others", "#too early", "#successes", "#turns", "#spared")
    print_rows(console, title, ("setting", "", *columns), rows)
    rows = [
        (f"{setting['policy']}/{setting['detector']}", reason, requests)
        for setting in document["settings"]
        for reason, requests in setting["uncounted"].items()
    ]
    print_rows(console, "Not counted", ("setting", "reason", "#requests"), rows)
    if by_kind:
        names = [f"#{each.policy}/{each.detector}" for each in by_kind]
        rows = [
            (
                kind,
                label,
                conversations,
                *(f"{acted}, {refused} refused" for acted, refused in found),
            )
            for kind, label, conversations, found in list_kinds(by_kind)
        ]
        print_rows(
            console,
            "Acted on and refused, by kind",
            ("kind", "label", "#conversations", *names),
            rows,
        )


def _write_share(share: dict[str, Any]) -> str:
    if not share["of"]:
        return "-"
    interval = f"{100 * share['low']:.0f}-{100 * share['high']:.0f}"
    return f"{share['found'] / share['of']:.0%} ({interval})"


if __name__ == "__main__":
    sys.exit(main())
