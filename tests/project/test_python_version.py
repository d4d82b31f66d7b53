"""`make` on an old Python, and where Envoy has no wheel."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT

OLD = """#!/bin/sh
case "$1" in --version) echo "Python 3.10.12";; -c) exit 1;; *) echo "went on: $*";; esac
"""


def copy_makefile(folder: Path) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    (folder / "extproc").mkdir()


@pytest.mark.parametrize("python", ["old", "missing"])
def test_make_names_required_python(tmp_path: Path, python: str) -> None:
    copy_makefile(tmp_path)
    (tmp_path / "old").write_text(OLD)
    (tmp_path / "old").chmod(0o755)

    run = subprocess.run(
        ["make", "--no-print-directory", ".venv/uv.stamp", f"PYTHON=./{python}"],
        cwd=tmp_path, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False,
    )  # fmt: skip

    told = {"old": "./old is Python 3.10.12", "missing": "./missing is missing"}[python]
    lines = [line for line in run.stderr.splitlines() if not line.startswith("make: ***")]
    assert lines == [
        f"Loopguard needs Python 3.11 or newer; {told}. Name another: make PYTHON=python3.12"
    ]
    assert (run.returncode, run.stdout) == (2, "")
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(
    ("machine", "programs", "runs"),
    [
        ("Linux x86_64", {"getconf": "glibc 2.31"}, True),
        ("Linux aarch64", {"getconf": "glibc 2.41"}, True),
        ("Darwin arm64", {"sw_vers": "15.0"}, True),
        ("Linux x86_64", {"getconf": "glibc 2.28"}, False),
        ("Linux x86_64", {"getconf": ""}, False),  # musl
        ("Linux riscv64", {"getconf": "glibc 2.41"}, False),
        ("Darwin arm64", {"sw_vers": "14.7.1"}, False),
        ("Darwin x86_64", {"sw_vers": "15.0"}, False),
    ],
)
@pytest.mark.parametrize("target", ["run", "demo-agent"])
def test_make_refuses_platforms_without_envoy(
    tmp_path: Path, target: str, machine: str, programs: dict[str, str], *, runs: bool
) -> None:
    copy_makefile(tmp_path)
    for name, says in {"uname": machine, **programs}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho {says}\n")
        (tmp_path / name).chmod(0o755)

    run = subprocess.run(
        ["make", "--no-print-directory", target, "PYTHON=./missing"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )

    first = run.stderr.splitlines()[0]
    assert first.startswith(
        "Loopguard needs Python 3.11" if runs else f"PyPI has no Envoy for this machine ({machine})"
    )
    assert runs or "'loopguard scan' work without Envoy" in first
