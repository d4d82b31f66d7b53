"""Chooses, file by file, between what is on disk and what was last good there.

A file with errors keeps its last good state, and the changes of other files act. If two files contradict each other, the one
that changed is refused: a policy's id stays with the file that has it in force. A comparison (`canary_of`) whose policy another
file has taken away is no error: the policy goes on, and is not compared.
"""
# interpreted: runs at reload

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple

from extproc.errors import BundleError
from extproc.policy.loader import (
    ParsedFile,
    PolicySet,
    find_duplicates,
    find_unpaired,
    join,
    locate_raw,
    parse_file,
    refuse_unenforced,
)
from extproc.policy.namespaces import Namespace

_LEVEL = 1
"""zlib's level: similar policies shrink to a tenth, at 100 MB/s."""


class KeptFile(NamedTuple):
    """A file in force: its bytes, compressed; their hash; and the time as of which it was checked."""

    data: bytes
    sha256: str
    checked: datetime

    def open(self) -> bytes:
        """Decompress the file."""
        return zlib.decompress(self.data)


class Choice(NamedTuple):
    """What acts from now on.

    Attributes:
        kept: the files, in order.
        refused: the errors of each file whose content on disk does not act.
    """

    policies: PolicySet
    kept: dict[str, KeptFile]
    refused: dict[str, list[BundleError]]


@dataclass(frozen=True, slots=True)
class Found:
    """A file on disk and its hash; without data, one that cannot be read at present."""

    data: bytes | None = None
    sha256: str = ""


class _Chooser:
    """The versions of files that have been chosen so far: parsed, and whether each is the one in force."""

    def __init__(
        self, standing: Mapping[str, KeptFile], now: datetime, namespaces: Sequence[Namespace], *, allow_unenforced: bool
    ) -> None:
        self.standing = standing
        self.now = now
        self.namespaces = namespaces
        self.allow_unenforced = allow_unenforced
        self.chosen: dict[str, tuple[ParsedFile, bool]] = {}
        self.refused: dict[str, list[BundleError]] = {}
        self.scrap: list[object] = []

    def consider(self, file: str, found: Found) -> None:
        """Choose the file on disk, if it has no errors of its own."""
        assert found.data is not None  # noqa: S101  # else it is not considered
        parsed = parse_file(file, found.data, found.sha256, self.now, namespaces=self.namespaces)
        self.chosen[file] = parsed, False
        errors = [*parsed.errors, *(() if self.allow_unenforced else refuse_unenforced(parsed.unenforced))]
        if errors:
            self.refuse(file, errors)

    def refuse(self, file: str, errors: list[BundleError]) -> None:
        """Return to the file in force, if there is one."""
        self.refused[file] = errors
        parsed, stood = self.chosen.pop(file)
        self.scrap += [*parsed.list_scrap(), *(parsed.source.policies if parsed.source is not None else ())]
        if not stood:
            self.restore(file)

    def restore(self, file: str, text: bytes | None = None) -> None:
        """Choose the file in force, if there is one; `text` if it is open already."""
        kept = self.standing.get(file)
        if kept is not None:
            text = kept.open() if text is None else text
            self.chosen[file] = parse_file(file, text, kept.sha256, kept.checked, namespaces=self.namespaces), True

    def stands(self, file: str) -> bool:
        """Whether the version in force is chosen, not a new one."""
        return self.chosen[file][1]


def choose(  # noqa: PLR0913  # everything that decides the result
    files: Mapping[str, Found],
    standing: Mapping[str, KeptFile],
    now: datetime,
    *,
    allow_unenforced: bool,
    namespaces: Sequence[Namespace] = (),
    afresh: bool = False,
) -> Choice:
    """Choose the version of each file; a file that is not among `files` is gone."""
    chooser = _Chooser(standing, now, namespaces, allow_unenforced=allow_unenforced)
    # Opened in advance and compressed afterwards, for the same reason for which `parse` hashes in advance.
    opened = {
        file: standing[file].open()
        for file, found in files.items()
        if file in standing and (found.data is None or (found.sha256 == standing[file].sha256 and not afresh))
    }
    for file, found in files.items():
        if file in opened:
            chooser.restore(file, opened[file])
        elif found.data is not None:
            chooser.consider(file, found)
    owners: dict[str, str] = {}

    def find_owner(identity: str) -> str:
        if not owners:  # only needed for duplicates
            owners.update({name: file for file in files if file in standing for name in locate_raw(standing[file].open())})
        return owners.get(identity, "")

    warnings: list[BundleError] = []
    while True:
        parsed = [chooser.chosen[file][0] for file in files if file in chooser.chosen]
        conflicts = find_duplicates(parsed, find_owner)
        unpaired = find_unpaired(parsed)
        warnings = [error for error in unpaired if chooser.stands(error.file)]
        conflicts += [error for error in unpaired if not chooser.stands(error.file)]
        if not conflicts:
            break
        for file in dict.fromkeys(error.file for error in conflicts):
            chooser.refuse(file, [error for error in conflicts if error.file == file])
    policies = join(parsed)
    policies.scrap.extend(chooser.scrap)
    policies = replace(policies, warnings=(*policies.warnings, *warnings))
    kept = {file.file: standing[file.file] if chooser.stands(file.file) else _keep(files[file.file], now) for file in parsed}
    return Choice(policies, kept, chooser.refused)


def _keep(found: Found, now: datetime) -> KeptFile:
    return KeptFile(zlib.compress(found.data or b"", _LEVEL), found.sha256, now)
