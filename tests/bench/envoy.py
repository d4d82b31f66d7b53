"""CPU per request of the guard behind Envoy, and of Envoy, compared with empty servers."""

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple
from urllib.request import urlopen

from tests.bench import samples
from tests.bench.envoy_config import running_envoy
from tests.bench.load import load, write_chats
from tests.bench.paced import run_paced
from tests.bench.processes import (
    NOT_COMPILED,
    SOURCES,
    apart,
    command_module,
    find_compiled,
    running,
    serve,
)
from tests.bench.report import Row, progress
from tests.bench.timing import difference, interleaved, process_cpu, ratio, spread
from tests.support.servers import free_port

TITLE = (
    "envoy: CPU per request behind the real Envoy (POST 1 KB, 16 connections, concurrency 1; "
    "servers have their own processor)"
)

_CONNECTIONS = 16
_WARM_UP = 500
_RATE = 1_000  # of requests per second whose latency is measured

# By listener; each one that can run takes part in every round.
_SERVERS = {
    "go": "null server on grpc-go (GOMAXPROCS=1)",
    "null": "null server on grpc.aio",
    "guard": "guard, compiled",
    "pure": "guard, pure Python",
    "grpcio": "guard, pure Python, on --transport grpcio",
}

_GUARDS = ("guard", "pure", "grpcio")
# A listener without a server.
_WITHOUT = "without"


class _Comparison(NamedTuple):
    """A row of the table: one server's CPU divided by another's."""

    name: str
    reference: str
    label: str
    at_most: float | None = None
    note: str = ""


_COMPARISONS = (
    _Comparison("guard", "go", "guard, compiled, vs. grpc-go", 1.0, "goal 0.9; "),
    _Comparison("guard", "null", "guard, compiled, vs. grpc.aio", 0.15),
    _Comparison("pure", "null", "guard, pure Python, vs. grpc.aio", 0.34),
    _Comparison("grpcio", "null", "guard on --transport grpcio vs. grpc.aio"),
)


class _Cost(NamedTuple):
    """Microseconds of CPU for a request, and requests per second."""

    server: float
    envoy: float
    per_second: float


class _Lab:
    """Envoy and the servers, and by listener why one is missing."""

    def __init__(
        self,
        envoy: int,
        ports: Mapping[str, int],
        pids: Mapping[str, int],
        admins: Mapping[str, int],
        missing: dict[str, str],
    ) -> None:
        self.ports = ports
        self.missing = missing
        self._envoy = envoy
        self._pids = pids
        self._admins = admins
        self._sent = Counter[str]()

    def load(self, name: str, requests: int) -> _Cost:
        before = self._clocks(name)
        chats = write_chats(self._sent[name], requests)
        seconds = asyncio.run(load(self.ports[name], _CONNECTIONS, chats, requests))
        used, envoy = (
            after - start for after, start in zip(self._clocks(name), before, strict=True)
        )
        self._sent[name] += requests
        return _Cost(used / requests * 1e6, envoy / requests * 1e6, requests / seconds)

    def pace(self, name: str, seconds: int) -> list[float]:
        """Latencies in milliseconds: p50, p99, p99.9."""
        first, count = self._sent[name], _RATE * seconds
        self._sent[name] += count
        return run_paced(self.ports[name], _RATE, seconds, first)

    def check_guards(self) -> None:
        """Check that each guard saw every body and refused nothing."""
        for name in self._pids.keys() & self._admins.keys():
            with urlopen(
                f"http://127.0.0.1:{self._admins[name]}/metrics", timeout=10
            ) as answer:  # our own server
                text = answer.read().decode()
            line = 'loopguard_requests_total{action="allow",mode="enforce",policy="policy-00000"} '
            counted = float(text.partition(line)[2].partition("\n")[0] or 0)
            if counted != self._sent[name]:
                raise RuntimeError(f"{name} counted {counted:.0f} of {self._sent[name]} requests")

    def _clocks(self, name: str) -> tuple[float, float]:
        return 0.0 if name == _WITHOUT else process_cpu(self._pids[name]), process_cpu(self._envoy)


@contextmanager
def _lab(directory: Path) -> Iterator[_Lab]:
    policy = directory / "policy.json"
    policy.write_bytes(samples.bundle([samples.policy(window_seconds=3600)]))
    servers = {name: free_port() for name in _SERVERS}
    admins = {name: free_port() for name in _GUARDS}
    commands, missing = _commands(policy, servers, admins)
    ports = {name: free_port() for name in (_WITHOUT, *commands)}
    with ExitStack() as stack:
        pids = {
            name: stack.enter_context(running(command, servers[name], directory / f"{name}.log"))
            for name, command in commands.items()
        }
        proxy = stack.enter_context(
            running_envoy(directory, ports, {name: servers[name] for name in commands})
        )
        stack.enter_context(apart(pids.values(), [proxy]))
        yield _Lab(proxy, ports, pids, admins, missing)


def _commands(
    policy: Path, ports: Mapping[str, int], admins: Mapping[str, int]
) -> tuple[dict[str, list[str]], dict[str, str]]:
    def guard(name: str, build: Path, *flags: str) -> list[str]:
        return serve(build, policy, ports[name], "--admin", f"127.0.0.1:{admins[name]}", *flags)

    commands = {
        "null": command_module("tests.bench.null_server", str(ports["null"])),
        "pure": guard("pure", SOURCES),
        "grpcio": guard("grpcio", SOURCES, "--transport", "grpcio"),
    }
    missing = {}
    program = Path("build/null-go").absolute()
    # Go's installer puts it there, often not in PATH.
    found = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/local/go/bin"
    go = shutil.which("go", path=found)
    build = [go or "", "build", "-o", str(program), "."]
    if (
        go
        and not subprocess.run(build, cwd=Path(__file__).parent / "null_go", check=False).returncode
    ):
        commands["go"] = [str(program), f"127.0.0.1:{ports['go']}"]
    else:
        missing["go"] = "go build failed" if go else "Go is not installed"
    if compiled := find_compiled():
        commands["guard"] = guard("guard", compiled)
    else:
        missing["guard"] = NOT_COMPILED
    return commands, missing


def run(*, quick: bool) -> list[Row]:
    rounds, requests, seconds = (3, 1_000, 2) if quick else (9, 3_000, 5)
    with tempfile.TemporaryDirectory() as directory, _lab(Path(directory)) as lab:
        progress("envoy: warming up", 0, rounds)
        for name in lab.ports:
            lab.load(name, _WARM_UP)
        found: dict[str, list[_Cost]] = {name: [] for name in lab.ports}
        for number in range(1, rounds + 1):
            progress("envoy: in turns", number, rounds)
            for name, costs in found.items():
                costs.append(lab.load(name, requests))
        progress("envoy: latency", 1, 1)
        guard = "guard" if "guard" in lab.ports else "pure"
        works = {name: lambda name=name: lab.pace(name, seconds) for name in (_WITHOUT, guard)}
        paced = interleaved(rounds, works)
        lab.check_guards()
    return [*_rows(found, lab.missing), *_latencies(paced, guard)]


def _latencies(paced: Mapping[str, list[list[float]]], guard: str) -> Iterator[Row]:
    for at, quantile in enumerate(("p50", "p99")):
        found = {name: [each[at] for each in latencies] for name, latencies in paced.items()}
        with_it, without = (median(found[name]) for name in (guard, _WITHOUT))
        note = f"{with_it:.2f} vs. {without:.2f} ms at the client"
        label = f"{_RATE:,} requests/s: {quantile} added by {_SERVERS[guard]}"
        yield Row(label, difference(found, guard, _WITHOUT), "ms", None, note)


def _rows(found: Mapping[str, list[_Cost]], missing: Mapping[str, str]) -> list[Row]:
    server = {name: [cost.server for cost in costs] for name, costs in found.items()}
    rows = []
    for name, reference, label, at_most, note in _COMPARISONS:
        why = missing.get(name) or missing.get(reference)
        figure = None if why else ratio(server, name, reference)
        rows.append(
            Row(label, figure, "x", at_most, why or f"{note}{spread(server, name, reference)}")
        )
    for name, label in _SERVERS.items():
        rows.append(
            Row(
                label,
                median(server[name]) if name in server else None,
                "us",
                None,
                missing.get(name, ""),
            )
        )
    for name, costs in found.items():
        per_second = median(cost.per_second for cost in costs)
        label = _SERVERS.get(name, "without the filter")
        rows.append(
            Row(
                f"Envoy itself, {label}",
                median(cost.envoy for cost in costs),
                "us",
                note=f"{per_second:,.0f} requests/s",
            )
        )
    return rows
