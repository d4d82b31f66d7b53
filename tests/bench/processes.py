"""Processes of the benchmark, each stopped by its own id, and the two builds of the guard."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

_START_SECONDS = 20
_STOP_SECONDS = 10

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


def command_module(module: str, *arguments: str) -> list[str]:
    # -P: the sources in the working directory are not that build
    return [
        sys.executable,
        "-P",
        "-m",
        module,
        *arguments,
    ]


def run_module(module: str, *arguments: str) -> dict[str, Any]:
    """The JSON that a module of the benchmark prints in a new interpreter.

    Raises RuntimeError if it fails.
    """
    command = command_module(module, *arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextmanager
def apart(servers: Iterable[int], others: Iterable[int]) -> Iterator[None]:
    """Give the servers a processor of their own until the block ends.

    `others`, this process and its children get the rest. Without that, threads push each other
    around, and the same server costs half as much again from one round to the next.
    """
    mine = os.sched_getaffinity(0)
    last = {max(mine)}
    if mine == last:
        yield
        return
    for pid in servers:
        _pin(pid, last)
    for pid in others:
        _pin(pid, mine - last)
    os.sched_setaffinity(0, mine - last)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


def _pin(pid: int, processors: set[int]) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # it has already ended
            os.sched_setaffinity(int(thread.name), processors)


@contextmanager
def running(command: Sequence[str | Path], port: int, log: Path) -> Iterator[int]:
    """The process id of a server that listens, until the block ends.

    Raises RuntimeError with the end of its log.
    """
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output) as process,
    ):
        try:
            _wait_for(process, port, log)
            yield process.pid
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_for(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = monotonic() + _START_SECONDS
    while monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            sleep(0.05)
        else:
            return
    raise RuntimeError(
        f"{process.args!r} did not come up:\n{log.read_text(errors='replace')[-2000:]}"
    )
