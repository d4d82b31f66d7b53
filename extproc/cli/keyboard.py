"""Single keys typed at a terminal, without a library such as curses."""

from __future__ import annotations

import os
import re
import select
import time
from typing import Any, Self, TextIO

_MOST = 64
_SPECIAL = re.compile(r"\x1b(?:[\[O][0-9;]*[A-Za-z~]?)?")
QUIT = "q"


class Keyboard:
    """While it is entered, keys are read at once and not echoed, if the stream is a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._fd = stream.fileno() if stream.isatty() else None
        self._saved: list[Any] = []

    def __enter__(self) -> Self:
        if self._fd is not None:
            import termios  # noqa: PLC0415  # missing on Windows
            import tty  # noqa: PLC0415  # as above

            self._saved = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            import termios  # noqa: PLC0415  # as above

            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._saved)

    def wait(self, seconds: float) -> str:
        """The keys typed within this time; returns at the first. Keys such as arrows are ignored.

        The end of the input is QUIT.
        """
        if self._fd is None:
            time.sleep(seconds)
            return ""
        if not select.select([self._fd], [], [], seconds)[0]:
            return ""
        typed = os.read(self._fd, _MOST).decode(errors="ignore")
        return _SPECIAL.sub("", typed) if typed else QUIT
