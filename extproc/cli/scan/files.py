"""Finds the files to scan: all regular files below the given paths, each once.

Links are followed if they are given as a path, or stay within their folder. A link out of the
folder is not, so that an agent or an archive cannot choose which files are read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Final, NamedTuple

from extproc.cli.packed import FilePlace, Problems
from extproc.errors import UsageError

_HOMES: Final = (
    ("CLAUDE_CONFIG_DIR", "~/.claude", ("projects",)),
    ("CODEX_HOME", "~/.codex", ("sessions", "archived_sessions")),
    ("GEMINI_CLI_HOME", "~", (".gemini/tmp",)),
)
"""Where agents write: the variable with their folder, its default, and the parts to read."""

EXAMPLE: Final = (
    "; name files or folders, or try `loopguard scan examples/transcripts` in a checkout"
)
"""A hint for empty default folders."""


class FoundFile(NamedTuple):
    path: str
    size: int


def list_usual(environ: Mapping[str, str]) -> list[str]:
    """The folders in which agents write transcripts by default."""
    homes = [((environ.get(name) or usual).rstrip("/"), parts) for name, usual, parts in _HOMES]
    return [f"{home}/{part}" for home, parts in homes for part in parts]


def choose_paths(given: Sequence[str]) -> list[str]:
    """The given paths, else the default ones that exist.

    Raises:
        UsageError: there are none, or one does not exist.
    """
    usual = list_usual(os.environ)
    paths = list(given) or [path for path in map(os.path.expanduser, usual) if Path(path).is_dir()]
    if not paths:
        raise UsageError(f"no transcripts in {' or '.join(usual)}{EXAMPLE}")
    for path in paths:
        if not path or not Path(path).exists():
            raise UsageError(
                f"{path or 'an empty path'} does not exist: name a file or a folder of transcripts"
            )
    return paths


def find_files(paths: Sequence[str], problems: Problems, since: float = 0) -> list[FoundFile]:
    """The files below these paths that changed after `since`, in seconds since 1970."""
    seen: set[tuple[int, int]] = set()
    return [file for path in paths for file in _walk(path, seen, problems, since)]


def _walk(
    path: str, seen: set[tuple[int, int]], problems: Problems, since: float
) -> Iterator[FoundFile]:
    waiting = [path]
    root = os.path.realpath(path)
    while waiting:
        path = waiting.pop()
        try:
            found = Path(path).stat()
            if (found.st_dev, found.st_ino) in seen:
                continue
            seen.add((found.st_dev, found.st_ino))
            if S_ISDIR(found.st_mode):
                entries = sorted(Path(path).iterdir(), reverse=True)
                for entry in entries:
                    if entry.is_symlink() and not Path(os.path.realpath(entry)).is_relative_to(
                        root
                    ):
                        problems.add("link", FilePlace(str(entry), 1))
                    else:
                        waiting.append(str(entry))
            elif S_ISREG(found.st_mode) and found.st_size and found.st_mtime >= since:
                yield FoundFile(path, found.st_size)
        except OSError as error:
            problems.add("unreadable", FilePlace(path, 1), error.strerror or "")
