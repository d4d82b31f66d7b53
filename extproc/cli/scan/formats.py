"""Gives each JSON value of a file to the reader that knows its format, which is usually that of the value before it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from extproc.cli.scan.atif import Atif
from extproc.cli.scan.claude_code import ClaudeCode
from extproc.cli.scan.codex import Codex
from extproc.cli.scan.gemini_cli import GeminiCli
from extproc.cli.scan.lines import LONGEST, UnreadLines, is_json, read_values
from extproc.cli.scan.otlp import Otlp
from extproc.cli.scan.requests import Requests
from extproc.cli.scan.transcripts import BAD_JSON, About, ScannedPlace, TranscriptReader, UnknownLineError
from extproc.cli.scan.watch import Judging, RunReport, Watch

_MOST_KEYS = 6
_keys = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ScannedFile:
    """The conversations of one file; see `transcripts.Runs`.

    Attributes:
        calls: number of model calls that were found.
    """

    def __init__(self, judging: Judging, unread: UnreadLines, done: Callable[[RunReport], None]) -> None:
        self._judging = judging
        self._unread = unread
        self._done = done
        self._readers: list[TranscriptReader] = [
            Reader(self) for Reader in (ClaudeCode, Codex, GeminiCli, Atif, Otlp, Requests)
        ]

    def open(self, about: About, key: str, *, tools: bool = True) -> Watch:
        """See `Runs`."""
        return Watch(self._judging, about, key, self._report, tools=tools)

    def pass_over(self, kind: str, unknown: UnknownLineError, place: ScannedPlace) -> None:
        """See `Runs`."""
        self._unread.add(unknown.kind, place, f"{kind}: {unknown.name}")

    def find_unread(self, body: bytes) -> str:
        """See `Runs`."""
        return self._judging.find_unread(body)

    def _report(self, report: RunReport) -> None:
        for reason, count in report.unread.items():
            self._unread.add("unread", report.place, f"{report.about.kind}: {reason}", count)
        self._done(report)

    def scan(self, file: str, advance: Callable[[int], object], longest: int = LONGEST) -> None:
        """Read a file. Problems are counted; nothing is raised."""
        for place, value in read_values(file, self._unread, advance, longest):
            self._read(value, place)
        for reader in self._readers:
            reader.close()

    def _read(self, value: bytes, place: ScannedPlace) -> None:
        for number, reader in enumerate(self._readers):
            try:
                taken = reader.read(value, place)
            except UnknownLineError as unknown:
                self.pass_over(reader.kind, unknown, place)
                return
            if taken:
                if number:  # the next value is of this format, too
                    self._readers.insert(0, self._readers.pop(number))
                return
        if not value.lstrip().startswith(b"{") or not is_json(value):
            self._unread.add("foreign" if b"\0" in value else "not_json", place)
            return
        try:
            name = ", ".join(sorted(_keys.decode(value))[:_MOST_KEYS])
        except BAD_JSON:
            name = ""
        self._unread.add("unknown", place, f"an object with {name}" if name else "an empty object")
