"""`loopguard scan` on transcripts: time for a gigabyte on two processors, and memory.

It runs in a process of its own (`python -m tests.bench.scan MEGABYTES`), so that no other section's
memory hides the growth.
"""

import json
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path
from random import Random
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from time import perf_counter

from extproc.cli.packed import Problems
from extproc.cli.scan.files import find_files
from extproc.cli.scan.report import ScanReport
from extproc.cli.scan.work import ScanTask, scan_files
from tests.bench.processes import run_module
from tests.bench.report import Row, progress
from tests.support.transcripts import (
    AgentSession,
    write_claude_code,
    write_codex,
    write_lines,
    write_requests,
)
from tests.support.turn_writers import Did

TITLE = (
    "scan: transcripts of Claude Code and Codex, and logged requests, one agent in ten in a loop"
)

_MEGABYTES = 400
_LIMIT_CPU = 120
_LIMIT_MB = 600
_GIGABYTE = 1e9
_PROCESSES = 2


def run(*, quick: bool) -> list[Row]:
    size = _MEGABYTES // 10 if quick else _MEGABYTES
    progress(f"scan: {size:,} MB", 1, 1)
    found = run_module("tests.bench.scan", str(size))
    note = f"{found['mb']:.0f} MB, {found['calls']:,.0f} model calls"
    return [
        Row(
            "scan: CPU for 1 GB",
            found["cpu"],
            "s",
            _LIMIT_CPU,
            note="two processors have 120 s in a minute",
        ),
        Row("scan: rate of one process", 1_000 / found["cpu"], "MB/s", note=note),
        Row(
            "scan: time for 1 GB, two processes",
            found["seconds"],
            "s",
            note="on a machine that may be busy",
        ),
        Row("scan: memory of all processes", found["memory"], "MB", _LIMIT_MB),
    ]


def write_set(folder: Path, size: int) -> None:
    random = Random(1)
    words = [
        f"{word}{number}"
        for number in range(500)
        for word in ("src/", "def ", "return ", "error ", "value ")
    ]

    def write_text(length: int) -> str:
        return " ".join(random.choices(words, k=length // 9))  # not for secrets

    written = number = 0
    while written < size:
        number += 1
        logged = number % 4 == 0
        turns = [
            Did(
                (
                    (
                        random.choice(["Read", "Edit", "Bash"]),
                        {"path": f"/{n}.py", "text": write_text(300)},
                    ),
                ),  # same
                (write_text(random.choice([200, 2_000, 9_000])),),  # same
                thought=write_text(150),
            )
            for n in range(30 if logged else random.randrange(40, 300))  # same
        ]
        turns += [turns[-1]] * (20 if number % 10 == 0 else 0)
        session = AgentSession(turns, name=f"s{number}", seconds=number)
        lines = (
            write_requests(session, "chat")
            if logged
            else write_codex(session)
            if number % 2
            else write_claude_code(session)
        )
        written += write_lines(folder / f"p{number % 9}" / f"{number}.jsonl", lines).stat().st_size


def scan(folder: Path) -> dict[str, float]:
    """Scan a folder. Raises RuntimeError if something was not read, or no loop was found."""
    unread = Problems()
    files = find_files([str(folder)], unread)
    report = ScanReport(len(files), sum(file.size for file in files), unread, 10)
    before, started = getrusage(RUSAGE_CHILDREN), perf_counter()
    for batch in scan_files(files, ScanTask(show=False), _PROCESSES, lambda _: None):
        report.add(batch)
    seconds = perf_counter() - started
    document = report.make_document()
    if document["problems"] or not document["loops"]:
        raise RuntimeError(f"{document['loops']} loops, and problems: {document['problems']}")
    children, own = getrusage(RUSAGE_CHILDREN), getrusage(RUSAGE_SELF)
    size = document["bytes"]
    return {
        "seconds": seconds / size * _GIGABYTE,
        "cpu": (children.ru_utime + children.ru_stime - before.ru_utime - before.ru_stime)
        / size
        * _GIGABYTE,
        "memory": (_PROCESSES * children.ru_maxrss + own.ru_maxrss) / 1024,
        "calls": document["spent"]["calls"],
        "mb": size / 1e6,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        writer = get_context("fork").Process(
            target=write_set, args=(Path(made), int(sys.argv[1]) * 1_000_000)
        )
        writer.start()  # what writes the set takes memory of its own
        writer.join()
        print(json.dumps(scan(Path(made))))
