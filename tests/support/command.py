"""The `loopguard` command, run in this process."""

from __future__ import annotations

import pytest

from extproc.cli.main import main


class Run:
    """One run of the command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> None:
        """Run it; an exit by exception counts like a returned code."""
        capsys.readouterr()
        try:
            self.code: object = main(arguments)
        except SystemExit as leaving:
            self.code = leaving.code or 0
        self.out, self.err = capsys.readouterr()

    @property
    def complaint(self) -> str:
        """The one line of stderr."""
        (line,) = self.err.splitlines()
        return line
