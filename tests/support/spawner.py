"""Starts Loopguards by fork, because imports take nine tenths of a start.

A spawner is a fresh interpreter without threads or open files, so nothing but the imports is
shared. tests/doors/cli starts the command itself.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import cycle
from pathlib import Path


class Spawner:
    def __init__(self) -> None:
        command = [sys.executable, "-P", "-m", __name__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lock = threading.Lock()

    def ask(self, question: object) -> int | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            answer: int | None = json.loads(self._process.stdout.readline())
            return answer


@cache
def _start_spawners() -> Iterator[Spawner]:
    """Two that take turns, with different hash seeds, so that replicas differ in order of sets."""
    return cycle([Spawner(), Spawner()])


class Spawned:
    def __init__(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.args = arguments
        self.returncode: int | None = None
        self._spawner = next(_start_spawners())
        log.touch()  # it may be read before the process has opened it
        pid = self._spawner.ask([arguments, str(log), dict(environment), str(Path.cwd())])
        assert pid is not None
        self.pid = pid

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._spawner.ask(self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def main() -> None:
    """Answer lines on stdin: a start with a process id, a process id with its exit code."""
    gc.disable()
    # Ctrl-C is for the tests, which then close the input
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from extproc.cli.commands.serve import silence_grpc

    silence_grpc()
    import uvloop  # noqa: F401  # that the command imports later

    import extproc.server  # noqa: F401
    from extproc.cli.main import main as run

    gc.freeze()
    for line in sys.stdin.buffer:
        question = json.loads(line)
        if isinstance(question, int):
            pid, status = os.waitpid(question, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                break
        os.write(1, json.dumps(answer).encode() + b"\n")
    else:
        return
    arguments, log, environment, folder = question
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for mine, standard in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(mine, standard)
    os.close(output)
    os.close(nothing)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(run(arguments))


if __name__ == "__main__":
    main()
