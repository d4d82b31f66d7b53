"""The guard in two builds: the sources, and the compiled wheel in its own environment."""

import sys
from pathlib import Path

_RUNNING = Path(sys.executable).parent

# Programs of the virtual environment that runs the sources.
SOURCES = _RUNNING.parents[1] / "bin" if _RUNNING.parent.name == "compiled" else _RUNNING

_COMPILED = SOURCES.parent / "compiled" / "bin"

NOT_COMPILED = f"there is no {_COMPILED}: `make bench` makes it"


def find_compiled() -> Path | None:
    return _COMPILED if (_COMPILED / "loopguard").exists() else None


def serve(build: Path, policy: Path, port: int, *flags: str) -> list[str]:
    listen = f"127.0.0.1:{port}"
    return [
        str(build / "loopguard"),
        "serve",
        "--policy",
        str(policy),
        "--listen",
        listen,
        "--drain-delay",
        "0",
        *flags,
    ]
