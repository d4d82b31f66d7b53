"""The guard in its two builds: the sources, and the wheel that mypyc compiled, in a virtual environment of its own."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

_RUNNING = Path(sys.executable).parent

SOURCES = _RUNNING.parents[1] / "bin" if _RUNNING.parent.name == "compiled" else _RUNNING
"""The programs of the virtual environment in which the sources run as they are."""

_COMPILED = SOURCES.parent / "compiled" / "bin"
_HOT = "extproc.ext_proc.stream"


@cache
def find_compiled() -> Path | None:
    """The programs of the virtual environment that holds the compiled guard; None where nothing is compiled."""
    python = _COMPILED / "python"
    if not python.exists():
        return None
    # -P: the sources in the working directory must not be imported in place of the wheel.
    command = [str(python), "-P", "-c", f"import {_HOT}; print({_HOT}.__file__)"]
    file = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return None if file.endswith(".py") else _COMPILED


def explain_missing() -> str:
    """Why there are no figures of the compiled guard."""
    if not _COMPILED.exists():
        return f"there is no {_COMPILED}: `make bench` makes it"
    return "the wheel is plain Python, for want of a C compiler"


def serve(build: Path, policy: Path, port: int, *flags: str) -> list[str]:
    """The command that runs one build of the guard on a port."""
    listen = f"127.0.0.1:{port}"
    return [str(build / "loopguard"), "serve", "--policy", str(policy), "--listen", listen, "--drain-delay", "0", *flags]
