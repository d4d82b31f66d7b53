"""Builds the server in null_go/ if Go is installed."""

import os
import shutil
import subprocess
from pathlib import Path

_SOURCES = Path(__file__).parent / "null_go"
_PROGRAM = Path("build/null-go").absolute()
# Go's installer puts it here, often not in PATH.
_INSTALLED = "/usr/local/go/bin"


class NoGoError(Exception):
    pass


def build() -> Path:
    """The program. Raises NoGoError if Go is missing or fails."""
    go = shutil.which("go", path=f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{_INSTALLED}")
    if go is None:
        raise NoGoError("Go is not installed")
    command = [go, "build", "-o", str(_PROGRAM), "."]
    done = subprocess.run(command, cwd=_SOURCES, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoGoError(f"go build failed: {done.stderr.strip().rpartition(chr(10))[2]}")
    return _PROGRAM
