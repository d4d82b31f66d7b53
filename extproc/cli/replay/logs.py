"""Reads recorded requests from log files in order of time, and notes what was wrong with lines.

Several logs are read side by side, so logs of several Envoys, or rotated ones, may be given in any order. A heap holds requests
before which an earlier one may come. It is bounded in seconds, requests and bytes, and so are lines, so memory does not grow
with the logs. Nothing is skipped silently: unusable lines are counted, and the first places listed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple, cast

from extproc.cli.packed import DAMAGES, is_bomb, open_packed
from extproc.cli.replay.records import Recorded, UnusableError, parse_line
from extproc.errors import LoopguardError

STDIN = "-"

MAX_LINE = 32 * 2**20
"""Longest line that is read, in bytes: a body above Envoy's buffer limit does not reach any policy."""

_MAX_HELD = 50_000
_MAX_HELD_BYTES = 64 * 2**20
_OBJECT_BYTES = 1_000
"""Memory of a request beside its line, in bytes."""

_GAP_MS = 3_600_000
_PLACES = 5

PROBLEMS = {
    "no_record": "no record: no policy matched the request, or Loopguard ran without --record",
    "not_json": "not JSON: another format, or damaged",
    "truncated": "cut off: the log ends in the middle of a line, or of its compressed data",
    "damaged": "the log cannot be decompressed from here on",
    "bomb": "decompressed, more than a thousand times as large as the log: not read from here on",
    "too_long": f"longer than {MAX_LINE // 2**20} MiB",
    "version": "a record of another version",
    "invalid": "a record that cannot be used",
    "out_of_order": "more than --reorder-seconds earlier than a previous line, or the clock was set back",
    "clock_forward": "more than an hour later than the line before",
}
"""What may be wrong with a line, as text after `N lines: `."""

HARMLESS = frozenset({"no_record", "clock_forward"})
"""Problems that are normal in a log."""


class LogPlace(NamedTuple):
    """A line of a log."""

    log: str
    line: int

    def __str__(self) -> str:
        """The place in the format of compilers."""
        return f"{self.log}:{self.line}"


@dataclass
class Problem:
    """One kind of problem: count, first places, and an example's reason."""

    count: int = 0
    places: list[LogPlace] = field(default_factory=list)
    example: str = ""


class Problems:
    """Problems with lines, by kind."""

    def __init__(self) -> None:
        self.by_kind: dict[str, Problem] = {}

    def add(self, kind: str, place: LogPlace, example: str = "") -> None:
        """Note a problem with one line."""
        problem = self.by_kind.setdefault(kind, Problem())
        problem.count += 1
        if len(problem.places) < _PLACES:
            problem.places.append(place)
            problem.example = problem.example or example

    @property
    def harmful(self) -> bool:
        """Whether any problem is not normal in a log."""
        return not self.by_kind.keys() <= HARMLESS


class LogEntry(NamedTuple):
    """A request in the heap, ordered by time, then by the order of reading."""

    time: int
    number: int
    size: int
    place: LogPlace
    recorded: Recorded


class _Source:
    """One log; `newest` is the time of its latest request, in milliseconds."""

    def __init__(self, name: str, raw: BufferedReader, problems: Problems) -> None:
        """Detect compression; raises LoopguardError if the log cannot be read."""
        self.name = name
        self.newest = 0
        self.lines = 0
        self._raw = raw
        self._problems = problems
        try:
            self._text = open_packed(raw)
        except OSError as error:
            raise LoopguardError(f"cannot read {name}: {error.strerror}") from error

    def tell(self) -> int:
        """The number of bytes read from the file."""
        return self._raw.tell()

    def read(self) -> Iterator[tuple[LogPlace, Recorded, int]]:
        """The log's requests, each with its place and its size in bytes."""
        try:
            for line in self._read_lines():
                place = LogPlace(self.name, self.lines)
                try:
                    recorded = parse_line(line)
                except UnusableError as error:
                    cut_off = error.kind == "not_json" and not line.endswith(b"\n")
                    self._problems.add("truncated" if cut_off else error.kind, place, str(error))
                else:
                    yield place, recorded, len(line)
        except EOFError:
            self._problems.add("truncated", LogPlace(self.name, self.lines))
        except (OSError, *DAMAGES) as error:
            self._problems.add("damaged", LogPlace(self.name, self.lines), str(error))

    def _read_lines(self) -> Iterator[bytes]:
        """All lines except empty ones and those that are too long."""
        text = self._text
        while line := text.readline(MAX_LINE):
            self.lines += 1
            if is_bomb(text, self._raw):
                self._problems.add("bomb", LogPlace(self.name, self.lines))
                return
            if len(line) == MAX_LINE and not line.endswith(b"\n"):
                self._problems.add("too_long", LogPlace(self.name, self.lines))
                while len(line) == MAX_LINE and not line.endswith(b"\n") and not is_bomb(text, self._raw):
                    line = text.readline(MAX_LINE)
            elif not line.isspace():
                yield line


class Logs:
    """The logs of one run.

    Attributes:
        size: size of all logs, in bytes; None if standard input is one of them.
        first: time of the earliest request, in milliseconds since 1970; None until there is one.
        last: time of the request read last.
    """

    def __init__(self, names: Sequence[str], reorder_seconds: float, stack: ExitStack) -> None:
        """Open all logs (`-` is standard input), which `stack` closes; raises LoopguardError if one cannot be read."""
        self.problems = Problems()
        self.size: int | None = 0
        self.first: int | None = None
        self.last: int | None = None
        self._reorder_ms = round(reorder_seconds * 1000)
        self._sources = [_Source(name, self._open(name, stack), self.problems) for name in names]

    def _open(self, name: str, stack: ExitStack) -> BufferedReader:
        if name == STDIN:
            self.size = None
            return cast("BufferedReader", sys.stdin.buffer)
        try:
            raw = Path(name).open("rb")  # noqa: SIM115  # the stack closes it
            stack.callback(raw.close)
            size = Path(name).stat().st_size
        except OSError as error:
            raise LoopguardError(f"cannot read {name}: {error.strerror}") from error
        self.size = None if self.size is None else self.size + size
        return raw

    @property
    def lines(self) -> int:
        """The number of lines read so far."""
        return sum(source.lines for source in self._sources)

    def tell(self) -> int:
        """The number of bytes read so far; only if `size` is known."""
        return sum(source.tell() for source in self._sources)

    def read(self) -> Iterator[LogEntry]:
        """The requests of all logs, in order of time."""
        for entry in self._sort(self._merge()):
            if self.last is not None and entry.time < self.last:
                self.problems.add("out_of_order", entry.place)
            elif self.last is not None and entry.time > self.last + _GAP_MS:
                self.problems.add("clock_forward", entry.place)
            self.first = entry.time if self.first is None else min(self.first, entry.time)
            self.last = entry.time
            yield entry

    def _merge(self) -> Iterator[tuple[int, LogEntry]]:
        """The next request of the log that is furthest behind, with a time before which no further requests are expected."""
        readers = [source.read() for source in self._sources]
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
            # A log that goes back further than allowed had its clock set back, so follow it.
            newest = max(newest, recorded.time) if recorded.time >= newest - self._reorder_ms else recorded.time
            heapreplace(fronts, (newest, number))
            read += 1
            yield fronts[0][0] - self._reorder_ms, LogEntry(recorded.time, read, size + _OBJECT_BYTES, place, recorded)

    def _sort(self, entries: Iterator[tuple[int, LogEntry]]) -> Iterator[LogEntry]:
        held: list[LogEntry] = []
        size = 0
        for settled, entry in entries:
            heappush(held, entry)
            size += entry.size
            while held and (held[0].time <= settled or len(held) > _MAX_HELD or size > _MAX_HELD_BYTES):
                first = heappop(held)
                size -= first.size
                yield first
        while held:
            yield heappop(held)
