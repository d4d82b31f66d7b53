"""Passes each JSON value of a file to the reader of its format, first to the previous reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from extproc.cli.packed import LONGEST, FilePlace, Problems
from extproc.cli.scan.atif import Atif
from extproc.cli.scan.claude_code import ClaudeCode
from extproc.cli.scan.codex import Codex
from extproc.cli.scan.gemini_cli import GeminiCli
from extproc.cli.scan.lines import is_json, read_values
from extproc.cli.scan.otlp import Otlp
from extproc.cli.scan.requests import Requests
from extproc.cli.scan.runs import Runs, TranscriptReader
from extproc.cli.scan.transcripts import BAD_JSON, UnknownLineError
from extproc.cli.scan.watch import Judging, RunReport

_MOST_KEYS = 6
_keys = msgspec.json.Decoder(dict[str, msgspec.Raw])


_READERS: Final = (ClaudeCode, Codex, GeminiCli, Atif, Otlp, Requests)


class ScannedFile:
    def __init__(
        self, judging: Judging, problems: Problems, done: Callable[[RunReport], None]
    ) -> None:
        self._problems = problems
        self._runs = Runs(judging, problems, done)
        self._readers: list[TranscriptReader] = [reader(self._runs) for reader in _READERS]

    def scan(self, file: str, advance: Callable[[int], object], longest: int = LONGEST) -> None:
        """Read a file; counts problems instead of raising."""
        for place, value in read_values(file, self._problems, advance, longest):
            self._read(value, place)
        for reader in self._readers:
            reader.close()

    def _read(self, value: bytes, place: FilePlace) -> None:
        for number, reader in enumerate(self._readers):
            try:
                taken = reader.read(value, place)
            except UnknownLineError as unknown:
                self._runs.pass_over(reader.kind, unknown, place)
                return
            if taken:
                if number:  # the next value probably has this format, too
                    self._readers.insert(0, self._readers.pop(number))
                return
        if not value.lstrip().startswith(b"{") or not is_json(value):
            self._problems.add("foreign" if b"\0" in value else "not_json", place)
            return
        try:
            name = ", ".join(sorted(_keys.decode(value))[:_MOST_KEYS])
        except BAD_JSON:
            name = ""
        self._problems.add(
            "unknown", place, f"an object with {name}" if name else "an empty object"
        )
