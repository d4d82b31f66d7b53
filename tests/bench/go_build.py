"""Builds the server in null_go/, and envoyproxy/ratelimit, where there is a Go to build them with."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

_SOURCES = Path(__file__).parent / "null_go"
_PROGRAM = Path("build/null-go").absolute()
_RATELIMIT = "github.com/envoyproxy/ratelimit/src/service_cmd@v1.4.1-0.20260122083618-3fb702589d36"
"""It has no releases; its images are built from such commits."""

_INSTALLED = "/usr/local/go/bin"
"""Where Go's own installer puts it; it is often not in PATH."""


class NoGoError(Exception):
    """There is no server in Go; the message says why."""


def build() -> Path:
    """The program, which Go keeps once it is built; raises NoGoError if Go is missing, or could not build it."""
    _run(["build", "-o", str(_PROGRAM), "."], _SOURCES)
    return _PROGRAM


def install_ratelimit() -> Path:
    """envoyproxy/ratelimit, from the Go module proxy; raises NoGoError like `build`."""
    folder = _PROGRAM.parent / "ratelimit"
    _run(["install", _RATELIMIT], folder.parent, {"GOBIN": str(folder)})
    return folder / "service_cmd"


def _run(arguments: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
    go = shutil.which("go", path=f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{_INSTALLED}")
    if go is None:
        raise NoGoError("Go is not installed")
    folder.mkdir(exist_ok=True)
    known = os.environ | (environment or {})
    done = subprocess.run([go, *arguments], cwd=folder, env=known, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoGoError(f"go {arguments[0]} failed: {done.stderr.strip().rpartition(chr(10))[2]}")
