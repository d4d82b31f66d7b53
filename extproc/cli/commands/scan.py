"""`loopguard scan`: finds loops in agents' transcripts and logs on disk."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
    # rich takes 0.2 s to import
    from extproc.cli.scan.show import print_limits, print_scan  # noqa: PLC0415

    if options.html is not None and not (
        Path(options.html).parent.is_dir() and not Path(options.html).is_dir()
    ):
        raise UsageError(
            f"--html cannot be written to {options.html}: give a file in a folder that exists"
        )
    document = scan_paths(
        options.path, since=options.since, show=options.show, top=options.top, jobs=options.jobs
    )
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
    check_scanned(document, options.path, since=options.since)
    return 0


def scan_paths(
    given: Sequence[str],
    *,
    since: float | None = None,
    show: bool = False,
    top: int = 1,
    jobs: int | None = None,
) -> dict[str, Any]:
    """The document of `scan --json`, of files and folders, or of those where agents write.

    `since` is in days, and `jobs` the number of processes. Raises UsageError for a missing path.
    """
    # This takes 0.2 s to import
    from extproc.cli.packed import Problems  # noqa: PLC0415
    from extproc.cli.replay.command import show_bar  # noqa: PLC0415  # same
    from extproc.cli.scan.files import choose_paths, find_files  # noqa: PLC0415  # same
    from extproc.cli.scan.report import ScanReport  # noqa: PLC0415  # same
    from extproc.cli.scan.work import MOST_PROCESSES, ScanTask, count_processors, scan_files  # noqa: PLC0415  # same

    paths = choose_paths(given)
    if not given:
        print(escape_controls(f"scanning {' and '.join(paths)}"), file=sys.stderr)
    start = 0.0 if since is None else time.time() - since * _DAY
    problems = Problems()
    files = find_files(paths, problems, start)
    size = sum(file.size for file in files)
    report = ScanReport(len(files), size, problems, top)
    processes = min(jobs or count_processors(), MOST_PROCESSES)
    task = ScanTask(show, round(start * 1000))
    with show_bar(size) as advance:
        for batch in scan_files(files, task, processes, advance):
            report.add(batch)
    return report.make_document()


def check_scanned(
    document: Mapping[str, Any], given: Sequence[str], *, since: float | None = None
) -> None:
    """Print the problems of a scan; raises LoopguardError if it found no conversation."""
    # As above
    from extproc.cli.scan.files import EXAMPLE, choose_paths  # noqa: PLC0415
    from extproc.cli.scan.show import list_problems  # noqa: PLC0415  # same

    for line in list_problems(document["problems"]):
        print(escape_controls(line), file=sys.stderr)
    if not document["conversations"]:
        why = _explain_nothing(
            document["problems"], unchanged=since is not None and not document["files"]
        )
        raise LoopguardError(
            f"nothing to scan in {', '.join(choose_paths(given))}: {why}{'' if given else EXAMPLE}"
        )


def _explain_nothing(problems: Mapping[str, object], *, unchanged: bool) -> str:
    if unchanged:
        return "no file was changed in that time"
    foreign = {"unread", "unknown"} & problems.keys()
    return "no conversation in it was understood" if foreign else "no file contains a conversation"
