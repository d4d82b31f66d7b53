"""What `make` says where Python is older than the project needs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

OLD = """#!/bin/sh
case "$1" in --version) echo "Python 3.10.12";; -c) exit 1;; *) echo "went on: $*";; esac
"""


@pytest.mark.parametrize("python", ["old", "missing"])
def test_make_says_in_one_line_which_python_is_needed(tmp_path: Path, python: str) -> None:
    """Nothing is made with the old one, so that the next call begins anew."""
    for name in ("Makefile", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "extproc").mkdir()
    (tmp_path / "old").write_text(OLD)
    (tmp_path / "old").chmod(0o755)

    run = subprocess.run(
        ["make", "--no-print-directory", ".venv/build.stamp", f"PYTHON=./{python}"],
        cwd=tmp_path, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False,
    )  # fmt: skip

    told = {"old": "./old is Python 3.10.12", "missing": "./missing is missing"}[python]
    lines = [line for line in run.stderr.splitlines() if not line.startswith("make: ***")]
    assert lines == [f"Loopguard needs Python 3.11 or newer; {told}. Name another: make PYTHON=python3.12"]
    assert (run.returncode, run.stdout) == (2, "")
    assert not (tmp_path / ".venv").exists()
