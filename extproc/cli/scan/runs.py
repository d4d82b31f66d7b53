"""Where readers of all formats find the conversations of a file."""

from __future__ import annotations

from collections.abc import Callable

from extproc.cli.packed import FilePlace, Problems
from extproc.cli.scan.transcripts import About, UnknownLineError
from extproc.cli.scan.watch import Judging, RunReport, Watch


class Runs:
    """The conversations of one file, and the problems with its lines."""

    def __init__(self, judging: Judging, problems: Problems, done: Callable[[RunReport], None]) -> None:
        self._judging = judging
        self._problems = problems
        self._done = done

    def open(self, about: About, key: str, *, tools: bool = True) -> Watch:
        """Begin a conversation.

        Args:
            about: whose it is.
            key: the key of messages in a request's body.
            tools: the agent has tools.
        """
        return Watch(self._judging, about, key, self._report, tools=tools)

    def pass_over(self, kind: str, unknown: UnknownLineError, place: FilePlace) -> None:
        """Note something in a line of a format that is left out."""
        self._problems.add(unknown.kind, place, f"{kind}: {unknown.name}")

    def find_unread(self, body: bytes) -> str:
        """Why a request with this body cannot be judged; empty if it can."""
        return self._judging.find_unread(body)

    def _report(self, report: RunReport) -> None:
        for reason, count in report.unread.items():
            self._problems.add("unread", report.place, f"{report.about.kind}: {reason}", count)
        self._done(report)


class TranscriptReader:
    """Reads one format.

    Attributes:
        kind: its name.
    """

    kind: str

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def read(self, data: bytes, place: FilePlace) -> bool:
        """Read a JSON value; returns False if it is of another format.

        Raises:
            UnknownLineError: it is of this format, and of an unknown kind.
        """
        raise NotImplementedError

    def close(self) -> None:
        """The file ends."""
