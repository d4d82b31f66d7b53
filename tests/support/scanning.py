"""Results of `loopguard scan` on files."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from extproc.cli.packed import LONGEST, Problem, Problems
from extproc.cli.scan.formats import ScannedFile
from extproc.cli.scan.watch import Judging, RunReport

JUDGING = Judging(show=True)


class Scanned(NamedTuple):
    runs: list[RunReport]
    problems: Mapping[str, Problem]
    read: int

    @property
    def loops(self) -> list[tuple[str, int, int, int, int]]:
        """Rule, first call, call with a note, refused call and last call of each loop."""
        return [
            (loop.rule, loop.begins, loop.noted, loop.stopped, loop.ends)
            for run in self.runs
            for loop in run.loops
        ]

    def count(self, kind: str) -> int:
        return self.problems[kind].count if kind in self.problems else 0


def scan_file(file: Path, longest: int = LONGEST) -> Scanned:
    unread, runs, read = Problems(), list[RunReport](), [0]

    def advance(count: int) -> None:
        read[0] += count

    ScannedFile(JUDGING, unread, runs.append).scan(str(file), advance, longest)
    return Scanned(runs, unread.by_kind, read[0])


def scan_values(folder: Path, values: Iterable[Any]) -> Scanned:
    """Scan a file with these lines; bytes are written as they are."""
    file = folder / "lines.jsonl"
    file.write_bytes(
        b"".join(
            [
                value if isinstance(value, bytes) else json.dumps(value).encode() + b"\n"
                for value in values
            ]
        )
    )
    return scan_file(file)
