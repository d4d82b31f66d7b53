"""Reads the policy files below some paths, or reports why a file is unreadable."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePath

from extproc.errors import BundleError

MAX_FILE = 64 * 2**20
"""Maximum size of a policy file in bytes, enough for a hundred thousand policies."""

_SUFFIX = ".json"
_PROSE = (".md", ".markdown", ".rst", ".adoc")
_LEFTOVERS = ("~", "#", ".swp", ".tmp")
"""Endings of editors' temporary files."""


def read_all(paths: Iterable[str]) -> tuple[dict[str, bytes], list[BundleError]]:
    """The bytes of the readable files below `paths`, and errors for the others; see `read_each`."""
    found = read_each(paths)
    files = {name: content for name, content in found.items() if isinstance(content, bytes)}
    return files, [content for content in found.values() if isinstance(content, BundleError)]


def read_each(paths: Iterable[str]) -> dict[str, bytes | BundleError]:
    """The bytes or the error of every policy file below `paths`, in a stable order.

    A directory stands for all `*.json` below it, except names that start with a dot, in which a
    Kubernetes ConfigMap keeps older versions. A directory without any is an error. `find_unread`
    reports other files.
    """
    found: dict[str, bytes | BundleError] = {}
    for path in paths:
        errors: dict[str, bytes | BundleError] = {}
        files = [path]
        if os.path.isdir(path):  # noqa: PTH112  # paths stay as the user wrote them
            files = [file for file in sorted(_list_files(path, errors)) if file.endswith(_SUFFIX)]
        found.update(errors)
        if not files and not errors:
            found[path] = BundleError(
                path, "", "the directory has no *.json file; add at least one policy"
            )
        for file in files:
            try:
                found[file] = _read(file)
            except OSError as error:
                why = f"cannot be read: {error.strerror}" if error.strerror else str(error)
                found[file] = BundleError(file, "", why)
    return found


def find_unread(paths: Iterable[str]) -> list[BundleError]:
    """A warning for each file below directories among `paths` that looks like an unread policy."""
    files = [
        file
        for path in paths
        if os.path.isdir(path)  # noqa: PTH112  # as in `read_each`
        for file in sorted(_list_files(path, {}))
    ]
    why = f"is not read: policies are JSON, in files whose names end in {_SUFFIX}"
    return [
        BundleError(file, "", why)
        for file in files
        if not file.endswith(_SUFFIX) and _may_be_policies(PurePath(file))
    ]


def _may_be_policies(file: PurePath) -> bool:
    """Whether it is neither documentation, such as LICENSE or README.txt, nor an editor's file."""
    document = file.suffix in _PROSE or (file.stem.isupper() and file.suffix in ("", ".txt"))
    return not document and not file.name.endswith(_LEFTOVERS)


def find_directories(
    directory: str, on_error: Callable[[str, OSError], None], above: frozenset[str] = frozenset()
) -> Iterator[str]:
    """The directory and all below it that may have policies; `on_error` gets unreadable ones."""
    real = os.path.realpath(directory)
    if real in above:  # a symbolic link that leads back up
        return
    try:
        with os.scandir(directory) as entries:
            below = [entry.path for entry in entries if _is_visible(entry) and entry.is_dir()]
    except OSError as error:
        on_error(directory, error)
        return
    yield directory
    for path in below:
        yield from find_directories(path, on_error, above | {real})


def _list_files(directory: str, errors: dict[str, bytes | BundleError]) -> Iterator[str]:
    def note(path: str, error: OSError) -> None:
        errors[path] = BundleError(path, "", f"cannot be listed: {error.strerror}")

    for below in find_directories(directory, note):
        try:
            with os.scandir(below) as entries:
                yield from [
                    entry.path for entry in entries if _is_visible(entry) and not entry.is_dir()
                ]
        except OSError as error:
            note(below, error)


def _is_visible(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(".")


def _read(file: str) -> bytes:
    """The bytes of a regular file. A FIFO would wait for a writer, and a device may never end."""
    with open(
        file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
    ) as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise OSError("is not a regular file")
        data = opened.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise OSError(f"is larger than {MAX_FILE >> 20} MiB")
    return data
