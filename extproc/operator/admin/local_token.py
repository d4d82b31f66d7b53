"""The token that a server on loopback shares with its own user's commands.

Only this user can read or replace its file.

A server writes a new token at startup, so a file left behind by a crash is useless. The file is
named after the port.
"""
# interpreted: reads and writes one file

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

_BYTES = 32
_FOLDER, _FILE = 0o700, 0o600
_OTHERS = 0o077


def name_token_file(port: int) -> Path:
    """The token file of an admin port, in the user's runtime folder, else in a temporary one."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    with suppress(OSError):  # it may not exist, and after `su` it may be another user's
        if runtime and Path(runtime).stat().st_uid == os.getuid():
            return Path(runtime, "loopguard", f"{port}.token")
    return Path(tempfile.gettempdir(), f"loopguard-{os.getuid()}", f"{port}.token")


def write_token(port: int) -> Path:
    """Write a new token; returns its file, raises OSError if other users can access the folder."""
    path = name_token_file(port)
    path.parent.mkdir(mode=_FOLDER, exist_ok=True)
    _check(path.parent, path.parent.lstat(), _FOLDER)
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(
        os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _FILE),
        "w",
        encoding="ascii",
    ) as file:
        file.write(f"{secrets.token_urlsafe(_BYTES)}\n")
    new.replace(path)
    return path


def read_token(port: int) -> str:
    """The token for an admin port; empty if there is no file.

    Raises OSError if the file cannot be read, or if other users can access it or its folder.
    """
    path = name_token_file(port)
    try:
        _check(path.parent, path.parent.lstat(), _FOLDER)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return ""
    with os.fdopen(descriptor, encoding="ascii") as file:
        _check(path, os.fstat(descriptor), _FILE)
        return file.read(_BYTES * 2).strip()


def _check(path: Path, found: os.stat_result, mode: int) -> None:
    right = stat.S_ISDIR if mode == _FOLDER else stat.S_ISREG
    if not right(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & _OTHERS:
        kind = "folder" if mode == _FOLDER else "file"
        raise PermissionError(f"{path} must be a {kind} of this user alone, with mode {mode:o}")
