"""Finds the files to scan: all regular files below the given paths, each once, whatever links lead there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Final, NamedTuple

from extproc.cli.scan.lines import UnreadLines
from extproc.cli.scan.transcripts import ScannedPlace
from extproc.errors import UsageError

USUAL: Final = ("~/.claude/projects", "~/.codex/sessions")
"""Where agents leave transcripts."""


class FoundFile(NamedTuple):
    """A file, with its size in bytes."""

    path: str
    size: int


def choose_paths(given: Sequence[str]) -> list[str]:
    """The given paths, or else the usual ones that exist.

    Raises:
        UsageError: there is none.
    """
    paths = list(given) or [path for path in map(os.path.expanduser, USUAL) if Path(path).is_dir()]
    if not paths:
        raise UsageError(f"no transcripts in {' or '.join(USUAL)}: name files or folders, such as `loopguard scan logs/`")
    for path in paths:
        if not path or not Path(path).exists():
            raise UsageError(f"{path or 'an empty path'} does not exist: name a file or a folder of transcripts")
    return paths


def find_files(paths: Sequence[str], unread: UnreadLines, since: float = 0) -> list[FoundFile]:
    """The files below these paths that were changed since a time, in seconds since 1970."""
    seen: set[tuple[int, int]] = set()
    return [file for path in paths for file in _walk(path, seen, unread, since)]


def _walk(path: str, seen: set[tuple[int, int]], unread: UnreadLines, since: float) -> Iterator[FoundFile]:
    waiting = [path]
    while waiting:
        path = waiting.pop()
        try:
            found = Path(path).stat()
            if (found.st_dev, found.st_ino) in seen:
                continue
            seen.add((found.st_dev, found.st_ino))
            if S_ISDIR(found.st_mode):
                waiting += sorted(map(str, Path(path).iterdir()), reverse=True)
            elif S_ISREG(found.st_mode) and found.st_size and found.st_mtime >= since:
                yield FoundFile(path, found.st_size)
        except OSError as error:
            unread.add("unreadable", ScannedPlace(path, 1), error.strerror or "")
