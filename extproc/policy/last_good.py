"""Chooses for each file between its version on disk and its last good version.

- A file with errors keeps its last good version; other files change independently.
- If two files contradict each other, the changed one is refused: a policy id stays with the file
  that has it in force.
- If another file removes the policy that `canary_of` names, that is no error. The canary stays in
  force without a comparison.
- Each version is checked once. Later loads reuse the result and only compare files with each other.
"""
# interpreted: runs at reload

from __future__ import annotations

import zlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import MappingProxyType
from typing import NamedTuple

from extproc.errors import BundleError
from extproc.policy.loader import (
    ParsedFile,
    PolicySet,
    find_duplicates,
    find_unpaired,
    join,
    parse_file,
    refuse_unenforced,
)
from extproc.policy.namespaces import Namespace

_LEVEL = 1
"""zlib's level: similar policies shrink to a tenth, at 100 MB/s."""


class KeptFile(NamedTuple):
    """A file in force.

    Attributes:
        data: its bytes, compressed.
        sha256: their hash.
        checked: the time for which it was checked.
        judged: the result, without objects that only parsing needed.
    """

    data: bytes
    sha256: str
    checked: datetime
    judged: ParsedFile

    def open(self) -> bytes:
        """Decompress the file."""
        return zlib.decompress(self.data)


class Verdict(NamedTuple):
    """The result for a file that is not in force.

    Attributes:
        sha256: hash of the file's bytes.
        checked: the time for which it was checked; its errors do not expire.
        errors: empty if the file is valid on its own.
        judged: None for a file with errors.
    """

    sha256: str
    checked: datetime
    errors: list[BundleError]
    judged: ParsedFile | None


class Choice(NamedTuple):
    """The result of a load.

    Attributes:
        kept: the files in force, in order.
        refused: the errors of each file whose version on disk is not in force.
        verdicts: results for files with errors of their own.
    """

    policies: PolicySet
    kept: dict[str, KeptFile]
    refused: dict[str, list[BundleError]]
    verdicts: dict[str, Verdict]


@dataclass(frozen=True, slots=True)
class Found:
    """A file on disk and its hash; without data, it is currently unreadable."""

    data: bytes | None = None
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class FileRules:
    """Settings of the process for checking files."""

    namespaces: Sequence[Namespace] = ()
    allow_unenforced: bool = False


def judge(file: str, found: Found, now: datetime, rules: FileRules) -> Verdict:
    """Check a file on its own."""
    parsed = parse_file(file, found.data or b"", found.sha256, now, namespaces=rules.namespaces)
    errors = [
        *parsed.errors,
        *(() if rules.allow_unenforced else refuse_unenforced(parsed.unenforced)),
    ]
    return Verdict(found.sha256, now, errors, parsed)


@dataclass
class _Chooser:
    """The versions chosen so far, and whether each is the one in force."""

    standing: Mapping[str, KeptFile]
    known: Mapping[str, Verdict]
    compiled: Container[str]
    now: datetime
    rules: FileRules
    chosen: dict[str, tuple[ParsedFile, bool]] = field(default_factory=dict)
    checked: dict[str, datetime] = field(default_factory=dict)
    refused: dict[str, list[BundleError]] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    scrap: list[object] = field(default_factory=list)

    def consider(self, file: str, found: Found) -> None:
        """Choose the version on disk if it is valid on its own."""
        verdict = self.known.get(file)
        if verdict is None or verdict.sha256 != found.sha256:
            verdict = judge(file, found, self.now, self.rules)
        self.checked[file] = verdict.checked
        if verdict.judged is not None:
            self.chosen[file] = verdict.judged, False
        if verdict.errors:
            self.verdicts[file] = verdict._replace(judged=None)
            self.refuse(file, verdict.errors)

    def refuse(self, file: str, errors: list[BundleError]) -> None:
        """Return to the version in force, if there is one."""
        self.refused[file] = errors
        parsed, stood = self.chosen.pop(file, (None, False))
        known = self.known.get(file)  # from an earlier load, and may be needed again
        if parsed is not None and (known is None or parsed is not known.judged):
            self.scrap += [
                *parsed.shed(),
                *(parsed.source.policies if parsed.source is not None else ()),
            ]
        if not stood:
            self.restore(file)

    def restore(self, file: str) -> None:
        """Choose the version in force, if there is one.

        Parse it again if its policies are not compiled.
        """
        kept = self.standing.get(file)
        if kept is None:
            return
        judged = kept.judged
        if file not in self.compiled:
            judged = parse_file(
                file, kept.open(), kept.sha256, kept.checked, namespaces=self.rules.namespaces
            )
        self.chosen[file] = judged, True

    def stands(self, file: str) -> bool:
        """Whether the chosen version is the one in force."""
        return self.chosen[file][1]

    def keep(self, judged: ParsedFile, found: Found) -> KeptFile:
        """The chosen version, to return to later."""
        if self.stands(judged.file):
            return self.standing[judged.file]
        return KeptFile(
            zlib.compress(found.data or b"", _LEVEL),
            found.sha256,
            self.checked[judged.file],
            judged,
        )


def choose(  # noqa: PLR0913  # everything that decides the result
    files: Mapping[str, Found],
    standing: Mapping[str, KeptFile],
    now: datetime,
    rules: FileRules,
    *,
    afresh: bool = False,
    known: Mapping[str, Verdict] = MappingProxyType({}),
    compiled: Container[str] = (),
) -> Choice:
    """Choose a version of each file; files missing from `files` have been deleted.

    Args:
        files: the files on disk.
        standing: the files in force.
        now: for expiries of policies and switches.
        rules: settings for checking files.
        afresh: check unchanged files again.
        known: the results for files that are not in force.
        compiled: the files in force whose compiled policies can be reused.
    """
    chooser = _Chooser(standing, known, compiled, now, rules)
    for file, found in files.items():
        if file in standing and (
            found.data is None or (found.sha256 == standing[file].sha256 and not afresh)
        ):
            chooser.restore(file)
        elif found.data is not None:
            chooser.consider(file, found)
    owners: dict[str, str] = {}

    def find_owner(identity: str) -> str:
        if not owners:  # only needed for duplicates
            owners.update(
                {
                    name: file
                    for file in files
                    if file in standing
                    for name in standing[file].judged.list_names()
                }
            )
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
    kept = {file.file: chooser.keep(file, files[file.file]) for file in parsed}
    return Choice(policies, kept, chooser.refused, chooser.verdicts)
