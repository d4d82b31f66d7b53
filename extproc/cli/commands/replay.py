"""`loopguard replay`: shows what policies would have done to recorded traffic."""

from __future__ import annotations

import argparse
import sys

from extproc.cli.commands import load_policies
from extproc.cli.replay.command import (
    COUNT,
    add_log_flags,
    compile_policies,
    open_logs,
    print_lines,
)
from extproc.cli.replay.logs import HARMLESS
from extproc.logs import escape_controls, write_json
from extproc.request.hash_key import read_hash_key

HELP = "show what policies would have done to recorded traffic"
EXAMPLES = """examples:
  loopguard replay --policy policies/ access.log
  loopguard replay --policy candidate.json access.log access.log.1.gz --json | jq .policies
  kubectl logs deploy/envoy | loopguard replay --policy policies/ -

A log is Envoy's access log in the format of `loopguard envoy-config`, written with
`serve --record`, or a file of records with bodies, one per line; see docs/replay.md.
Memory does not grow with the logs.

exit code: 0 replayed (unusable lines are listed on stderr and in the report), 1 a log cannot
be read, or has no request that can be replayed; with --strict, also if a line cannot be used"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_log_flags(parser)
    parser.add_argument(
        "--top",
        type=COUNT,
        default=10,
        metavar="N",
        help="number of worst offenders to show (default 10)",
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON document")
    parser.add_argument("--shadow", action="store_true", help="as serve --shadow")


def run(options: argparse.Namespace) -> int:
    # This and rich take 0.2 s to import; other commands need neither
    from extproc.cli.replay.judge import Judge  # noqa: PLC0415
    from extproc.cli.replay.report import ReplayReport  # noqa: PLC0415  # same
    from extproc.cli.replay.table import print_report  # noqa: PLC0415  # same

    engine = compile_policies(load_policies(options.policy), shadow=options.shadow)
    judge, report = (
        Judge(engine, options.max_entries, read_hash_key(options.hash_key_file)),
        ReplayReport(engine),
    )
    with open_logs(options) as (logs, entries):
        for entry in entries:
            report.add(entry, judge.judge(entry.recorded))
    document = report.make_document(logs, judge, options.top)
    if options.json:
        print(write_json(document))
    else:
        print_report(document)
    print_lines(logs, judge.evictions)
    for failure in document["failures"]:
        print(escape_controls(f"warning: a detector failed: {failure}"), file=sys.stderr)
    return int(options.strict and not logs.problems.by_kind.keys() <= HARMLESS)
