"""Reads recorded requests from log files in order of time, and counts problems with lines.

Several logs are merged, so logs of several Envoys, or rotated ones, may be given in any order. A
heap sorts requests that arrive late. It is bounded in seconds, requests and bytes, so memory does
not grow with the logs. No line is skipped silently: unusable ones are counted, and the first places
listed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from heapq import heapify, heappop, heappush, heapreplace
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple, cast

from extproc.cli.packed import DAMAGES, LONGEST, FilePlace, PackedLines, Problems
from extproc.cli.replay.records import Recorded, UnusableError, parse_line
from extproc.errors import LoopguardError

STDIN = "-"

_MAX_SORTING = 50_000
_MAX_SORTING_BYTES = 64 * 2**20
_OBJECT_BYTES = 1_000
"""Memory of a request in addition to its line, in bytes."""

_GAP_MS = 3_600_000
_PLACES = 5

PROBLEMS = {
    "no_record": "no record: no policy matched the request, or Loopguard ran without --record",
    "not_json": "not JSON: another format, or damaged",
    "truncated": "cut off: the log ends in the middle of a line, or of its compressed data",
    "damaged": "the log cannot be decompressed from here on",
    "bomb": "decompressed, more than a thousand times as large as the log: not read from here on",
    "too_long": f"longer than {LONGEST // 2**20} MiB",
    "version": "a record of another version",
    "invalid": "a record that cannot be used",
    "out_of_order": (
        "more than --reorder-seconds earlier than a previous line, or the clock was set back"
    ),
    "clock_forward": "more than an hour later than the line before",
}
"""Problems with lines, as text after `N lines: `."""

HARMLESS = frozenset({"no_record", "clock_forward"})
"""Problems that normal logs have."""


class LogEntry(NamedTuple):
    """A request in the heap, ordered by time, then by the order of reading."""

    time: int
    number: int
    size: int
    place: FilePlace
    recorded: Recorded


class Logs:
    """The logs of one run.

    Attributes:
        size: size of all logs, in bytes; None if standard input is one of them.
        first: time of the earliest request, in milliseconds since 1970; None until there is one.
        last: time of the latest request read.
    """

    def __init__(self, names: Sequence[str], reorder_seconds: float, stack: ExitStack) -> None:
        """Open all logs (`-` is standard input); `stack` closes them. Raises LoopguardError."""
        self.problems = Problems(_PLACES)
        self.size: int | None = 0
        self.first: int | None = None
        self.last: int | None = None
        self._reorder_ms = round(reorder_seconds * 1000)
        self._sources = [self._open(name, stack) for name in names]

    def _open(self, name: str, stack: ExitStack) -> PackedLines:
        try:
            if name == STDIN:
                self.size = None
                return PackedLines(name, cast("BufferedReader", sys.stdin.buffer), self.problems)
            raw = stack.enter_context(Path(name).open("rb"))  # noqa: SIM115  # the stack closes it
            size = Path(name).stat().st_size
            self.size = None if self.size is None else self.size + size
            return PackedLines(name, raw, self.problems)
        except OSError as error:
            raise LoopguardError(f"cannot read {name}: {error.strerror}") from error

    @property
    def lines(self) -> int:
        return sum(source.number for source in self._sources)

    def tell(self) -> int:
        """The number of bytes read so far; call it only if `size` is known."""
        return sum(source.tell() for source in self._sources)

    def read(self) -> Iterator[LogEntry]:
        """The requests of all logs in order of time."""
        for entry in self._sort(self._merge()):
            if self.last is not None and entry.time < self.last:
                self.problems.add("out_of_order", entry.place)
            elif self.last is not None and entry.time > self.last + _GAP_MS:
                self.problems.add("clock_forward", entry.place)
            self.first = entry.time if self.first is None else min(self.first, entry.time)
            self.last = entry.time
            yield entry

    def _parse(self, lines: PackedLines) -> Iterator[tuple[FilePlace, Recorded, int]]:
        """A log's requests, each with its place and size in bytes."""
        try:
            for line in lines.read():
                try:
                    recorded = parse_line(line)
                except UnusableError as error:
                    cut_off = error.kind == "not_json" and not line.endswith(b"\n")
                    self.problems.add(
                        "truncated" if cut_off else error.kind, lines.place, str(error)
                    )
                else:
                    yield lines.place, recorded, len(line)
        except EOFError:
            self.problems.add("truncated", lines.place)
        except (OSError, *DAMAGES) as error:
            self.problems.add("damaged", lines.place, str(error))

    def _merge(self) -> Iterator[tuple[int, LogEntry]]:
        """The next request of the log furthest behind, and a time before which none will follow."""
        readers = [self._parse(source) for source in self._sources]
        fronts = [(0, number) for number in range(len(readers))]
        heapify(fronts)
        read = 0
        while fronts:
            newest, number = fronts[0]
            found = next(readers[number], None)
            if found is None:
                heappop(fronts)
                continue
            place, recorded, size = found
            # A larger step back means that the clock was set back: follow it.
            newest = (
                max(newest, recorded.time)
                if recorded.time >= newest - self._reorder_ms
                else recorded.time
            )
            heapreplace(fronts, (newest, number))
            read += 1
            yield (
                fronts[0][0] - self._reorder_ms,
                LogEntry(recorded.time, read, size + _OBJECT_BYTES, place, recorded),
            )

    def _sort(self, entries: Iterator[tuple[int, LogEntry]]) -> Iterator[LogEntry]:
        waiting: list[LogEntry] = []
        size = 0
        for settled, entry in entries:
            heappush(waiting, entry)
            size += entry.size
            while waiting and (
                waiting[0].time <= settled
                or len(waiting) > _MAX_SORTING
                or size > _MAX_SORTING_BYTES
            ):
                first = heappop(waiting)
                size -= first.size
                yield first
        while waiting:
            yield heappop(waiting)
