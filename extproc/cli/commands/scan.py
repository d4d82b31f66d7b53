"""`loopguard scan`: finds loops in agents' transcripts and logs on disk."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from extproc.cli.replay.command import COUNT, write_file
from extproc.errors import LoopguardError, UsageError
from extproc.logs import escape_controls, write_json
from extproc.options import make_type, parse_seconds

HELP = "find loops in transcripts of agents on disk"
EXAMPLES = """examples:
  loopguard scan
  loopguard scan ~/.claude/projects --since 7 --show
  loopguard scan logs/requests.jsonl traces/ --html scan.html
  loopguard scan --limits
  loopguard scan --json | jq '.worst[0]'

Reads transcripts of Claude Code, Codex and Gemini CLI, ATIF, OTLP exports of GenAI spans (JSON),
and logs of requests (JSON lines) in the form of any API that Loopguard guards, plain, gzip or
zstd. Formats are recognized by content. Without PATH, it reads what these agents leave in
~/.claude, ~/.codex and ~/.gemini, or in CLAUDE_CONFIG_DIR, CODEX_HOME and GEMINI_CLI_HOME.
It needs no Envoy and no policy, and nothing leaves this machine. The preset `agents` judges each
call as it would have judged its request: a note at the third identical turn, a stop at the seventh.

exit code: 0 scanned, whatever was found; 1 nothing can be read; 2 usage"""

_DAY = 86_400


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", nargs="*", metavar="PATH", help="file or folder (default: where agents write)"
    )
    parser.add_argument(
        "--since",
        type=make_type(parse_seconds(0, 100_000)),
        metavar="DAYS",
        help="only conversations of the last DAYS days (default: all)",
    )
    parser.add_argument(
        "--top",
        type=COUNT,
        default=10,
        metavar="N",
        help="number of worst loops to show (default 10)",
    )
    parser.add_argument(
        "--show",
        action="store_true",
        help="show the content of repeated turns, not only sizes and hashes",
    )
    parser.add_argument(
        "--limits",
        action="store_true",
        help="also show what sessions took, and `session_limits` for them",
    )
    parser.add_argument("--html", metavar="FILE", help="also write a page for a browser")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON document")
    parser.add_argument(
        "--jobs",
        type=COUNT,
        metavar="N",
        help="number of processes (default: one for each processor)",
    )


def run(options: argparse.Namespace) -> int:
    from extproc.cli.packed import Problems  # noqa: PLC0415  # same

    # This and rich take 0.2 s to import
    from extproc.cli.replay.command import show_bar  # noqa: PLC0415
    from extproc.cli.scan.files import EXAMPLE, choose_paths, find_files  # noqa: PLC0415  # same
    from extproc.cli.scan.report import ScanReport  # noqa: PLC0415  # same

    # Same
    from extproc.cli.scan.show import list_problems, print_limits, print_scan  # noqa: PLC0415
    from extproc.cli.scan.work import MOST_PROCESSES, ScanTask, count_processors, scan_files  # noqa: PLC0415  # same

    if options.html is not None and not (
        Path(options.html).parent.is_dir() and not Path(options.html).is_dir()
    ):
        raise UsageError(
            f"--html cannot be written to {options.html}: give a file in a folder that exists"
        )
    paths = choose_paths(options.path)
    if not options.path:
        print(escape_controls(f"scanning {' and '.join(paths)}"), file=sys.stderr)
    since = 0.0 if options.since is None else time.time() - options.since * _DAY
    problems = Problems()
    files = find_files(paths, problems, since)
    size = sum(file.size for file in files)
    report = ScanReport(len(files), size, problems, options.top)
    processes = min(options.jobs or count_processors(), MOST_PROCESSES)
    task = ScanTask(options.show, round(since * 1000))
    with show_bar(size) as advance:
        for batch in scan_files(files, task, processes, advance):
            report.add(batch)
    document = report.make_document()
    if options.html is not None:
        # Jinja2 takes 0.1 s to import
        from extproc.cli.scan.page import render_scan  # noqa: PLC0415

        write_file(options.html, render_scan(document))
    if options.json:
        print(write_json(document))
    elif document["conversations"]:
        print_scan(document)
        if options.limits:
            print_limits(document["limits"])
    for line in list_problems(document["problems"]):
        print(escape_controls(line), file=sys.stderr)
    if not document["conversations"]:
        why = _explain_nothing(
            document["problems"], unchanged=options.since is not None and not files
        )
        raise LoopguardError(
            f"nothing to scan in {', '.join(paths)}: {why}{'' if options.path else EXAMPLE}"
        )
    return 0


def _explain_nothing(problems: Mapping[str, object], *, unchanged: bool) -> str:
    if unchanged:
        return "no file was changed in that time"
    foreign = {"unread", "unknown"} & problems.keys()
    return "no conversation in it was understood" if foreign else "no file contains a conversation"
