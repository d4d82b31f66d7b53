"""Versions of Loopguard from git, which run beside this one."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.harness import Loopguard, Process
from tests.support.spawner import Spawned

RELEASE_BEFORE = "e5d3dcb"
"""The version that the last release of the chart had."""


def unpack(commit: str, folder: Path, *paths: str) -> Path:
    """Put what git has of a commit into a folder; skips the test if git does not have it."""
    try:
        archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit, *paths], capture_output=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        why = error.stderr.decode().strip() if isinstance(error, subprocess.CalledProcessError) else "there is no git"
        pytest.skip(f"{commit} cannot be had from git ({why}): the version before is NOT tested")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as packed:
        packed.extractall(folder, filter="data")
    return folder


def build(commit: str, folder: Path) -> Path:
    """A package of a commit that can serve: with what its build makes of `protos/`."""
    unpack(commit, folder, "extproc", "protos", "hatch_build.py")
    command = [sys.executable, "-c", "import hatch_build; hatch_build.generate_protos()"]
    subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, check=True)
    return folder


class LoopguardBefore(Loopguard):
    """`loopguard serve` of a package in a folder, which `build` made."""

    def __init__(self, package: Path, folder: Path, *arguments: str, listen: str) -> None:
        """As `Loopguard`."""
        self._package = package
        super().__init__(folder, *arguments, listen=listen)

    def _start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes] | Spawned:
        code = (
            f"import extproc, sys; assert extproc.__file__.startswith({str(self._package)!r})\n"
            "from extproc.cli import main\nsys.exit(getattr(main, 'main', main)())"  # a module by now
        )
        command = [sys.executable, "-P", "-c", code, *arguments]
        return Process._start(self, command, {**environment, "PYTHONPATH": str(self._package)})
