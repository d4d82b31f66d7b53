"""The conversations of a file, and the base class of readers."""

from __future__ import annotations

from collections.abc import Callable

from extproc.cli.packed import FilePlace, Problems
from extproc.cli.scan.transcripts import About, UnknownLineError
from extproc.cli.scan.watch import Judging, RunReport, Watch


class Runs:
    """The conversations of one file, and the problems with its lines."""

    def __init__(
        self, judging: Judging, problems: Problems, done: Callable[[RunReport], None]
    ) -> None:
        self._judging = judging
        self._problems = problems
        self._done = done

    def open(self, about: About, key: str, *, tools: bool = True) -> Watch:
        """Begin a conversation.

        Args:
            about: whose conversation it is.
            key: the key of messages in a request's body.
            tools: whether the agent has tools.
        """
        return Watch(self._judging, about, key, self._report, tools=tools)

    def pass_over(self, kind: str, unknown: UnknownLineError, place: FilePlace) -> None:
        """Count a part of a line that is skipped."""
        self._problems.add(unknown.kind, place, f"{kind}: {unknown.name}")

    def find_unread(self, body: bytes) -> str:
        """Why the detector cannot judge a request with this body, or empty."""
        return self._judging.find_unread(body)

    def _report(self, report: RunReport) -> None:
        for reason, count in report.unread.items():
            self._problems.add("unread", report.place, f"{report.about.kind}: {reason}", count)
        self._done(report)


class TranscriptReader:
    """Reads one format.

    Attributes:
        kind: the format's name.
    """

    kind: str

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def read(self, data: bytes, place: FilePlace) -> bool:
        """Read a JSON value; returns False if it is of another format.

        Raises:
            UnknownLineError: it has this format, but an unknown kind.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Finish at the end of the file."""
