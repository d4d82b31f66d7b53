"""The guard behind the real Envoy, beside a server that does nothing: CPU time per request, of the server and of Envoy."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from sys import executable
from typing import NamedTuple
from urllib.request import urlopen
from zlib import adler32, crc32

from tests.bench import samples
from tests.bench.envoy_config import bootstrap
from tests.bench.processes import apart, free_port, run_module, running
from tests.bench.report import Row, progress
from tests.bench.timing import cpu_us, process_cpu, ratio

TITLE = (
    "envoy: CPU per request behind the real Envoy (POST, 16 connections, concurrency 1; the server has a processor of its own)"
)

_CONNECTIONS = 16
_SMALL, _LARGE = 1024, 1_000_000
_LIMIT_SMALL = 1.25
_LIMIT_LARGE = 1.2
_WARM_UP = 200


class Target(NamedTuple):
    """One listener of Envoy's, and the server behind its filter; no process where there is no filter."""

    port: int
    pid: int | None


class Cost(NamedTuple):
    """Of one request, in microseconds of CPU."""

    server: float
    envoy: float
    per_second: float


class _Lab:
    """Envoy and the servers, running."""

    def __init__(self, envoy: int, targets: Mapping[str, Target], admin: int) -> None:
        self.targets = targets
        self._envoy = envoy
        self._admin = admin
        self._sent = 0
        self._guarded = 0

    def load(self, name: str, requests: int, length: int) -> Cost:
        """Send requests that were never sent before to one target, and see what they cost."""
        target = self.targets[name]
        before = self._clocks(target)
        found = run_module("tests.bench.load", *map(str, (target.port, _CONNECTIONS, requests, length, self._sent)))
        server, envoy = (after - start for after, start in zip(self._clocks(target), before, strict=True))
        if found["statuses"] != {"200": requests}:
            raise RuntimeError(f"{name}: {requests} requests were answered {found['statuses']}")
        self._sent += requests
        self._guarded += requests * (name == "guard")
        return Cost(server / requests * 1e6, envoy / requests * 1e6, requests / found["seconds"])

    def check_guard(self) -> None:
        """Had the guard not seen every body, or refused anything, the figures would be of something else."""
        with urlopen(f"http://127.0.0.1:{self._admin}/metrics", timeout=10) as answer:  # our own server
            text = answer.read().decode()
        line = 'loopguard_requests_total{action="allow",mode="enforce",policy="policy-00000"} '
        counted = float(text.partition(line)[2].partition("\n")[0] or 0)
        if counted != self._guarded:
            raise RuntimeError(f"the guard counted {counted:.0f} of {self._guarded} requests")

    def _clocks(self, target: Target) -> tuple[float, float]:
        return process_cpu(target.pid) if target.pid else 0.0, process_cpu(self._envoy)


@contextmanager
def _lab(directory: Path) -> Iterator[_Lab]:
    """Start everything; stop everything."""
    policy = directory / "policy.json"
    policy.write_bytes(samples.bundle([samples.policy(window_seconds=3600)]))
    servers = {name: free_port() for name in ("null", "guard", "grpcio")}
    ports = {name: free_port() for name in ("without", *servers)}
    admin = free_port()
    config = directory / "envoy.json"
    config.write_text(json.dumps(bootstrap(ports, servers)), encoding="utf-8")
    serve = [executable, "-m", "extproc.cli", "serve", "--policy", str(policy), "--drain-delay", "0"]
    commands = {
        "null": [executable, "-m", "tests.bench.null_server", str(servers["null"])],
        "guard": [*serve, "--listen", f"127.0.0.1:{servers['guard']}", "--admin", f"127.0.0.1:{admin}"],
        "grpcio": [*serve, "--transport", "grpcio", "--listen", f"127.0.0.1:{servers['grpcio']}", "--admin", "127.0.0.1:0"],
    }
    envoy = [str(Path(executable).parent / "envoy"), "-c", str(config), "--concurrency", "1", "--log-level", "warn"]
    with ExitStack() as stack:
        pids = {
            name: stack.enter_context(running(command, servers[name], directory / f"{name}.log"))
            for name, command in commands.items()
        }
        proxy = stack.enter_context(running([*envoy, "--disable-hot-restart"], ports["guard"], directory / "envoy.log"))
        stack.enter_context(apart(pids.values(), [proxy]))
        yield _Lab(proxy, {name: Target(port, pids.get(name)) for name, port in ports.items()}, admin)


def run(*, quick: bool) -> list[Row]:
    """Small bodies first, then large ones; the servers take turns."""
    rounds = 3 if quick else 11
    with tempfile.TemporaryDirectory() as directory, _lab(Path(directory)) as lab:
        progress("envoy: warming up", 0, 1)
        for name in lab.targets:
            lab.load(name, _WARM_UP, _SMALL)
        small = _rounds(lab, ("without", "null", "guard", "grpcio"), rounds, 1000 if quick else 3000, _SMALL)
        large = _rounds(lab, ("null", "guard"), rounds, 100 if quick else 300, _LARGE)
        checksums = _checksums_us()
        lab.check_guard()
    return [*_small_rows(small), *_large_rows(large, checksums)]


def _rounds(lab: _Lab, names: Sequence[str], rounds: int, requests: int, length: int) -> dict[str, list[Cost]]:
    """What each target cost in every round."""
    found: dict[str, list[Cost]] = {name: [] for name in names}
    for number in range(1, rounds + 1):
        progress(f"envoy: bodies of {length:,} bytes", number, rounds)
        for name in names:
            found[name].append(lab.load(name, requests, length))
    return found


def _checksums_us() -> float:
    """What the guard's two checksums of a large body cost on this machine."""
    body = samples.chat_body(1, _LARGE)
    return median(cpu_us(lambda: (crc32(body), adler32(body)), 1) for _ in range(50))


def _server(found: Mapping[str, list[Cost]]) -> dict[str, list[float]]:
    return {name: [cost.server for cost in costs] for name, costs in found.items()}


def _small_rows(found: Mapping[str, list[Cost]]) -> list[Row]:
    server = _server(found)
    rows = [Row("1 KB: guard against null server", ratio(server, "guard", "null"), "x", _LIMIT_SMALL)]
    rows.append(Row("1 KB: guard on the grpcio transport, against null server", ratio(server, "grpcio", "null"), "x"))
    for name, label in (("null", "null server"), ("guard", "guard"), ("grpcio", "guard on the grpcio transport")):
        rows.append(Row(f"1 KB: {label}", median(server[name]), "us"))
    for name, label in (("without", "without the filter"), ("null", "with the null server"), ("guard", "with the guard")):
        per_second = median(cost.per_second for cost in found[name])
        envoy = median(cost.envoy for cost in found[name])
        rows.append(Row(f"1 KB: Envoy itself, {label}", envoy, "us", note=f"{per_second:,.0f} requests/s"))
    return rows


def _large_rows(found: Mapping[str, list[Cost]], checksums: float) -> list[Row]:
    server = _server(found)
    excess = median((guard - checksums) / null for guard, null in zip(server["guard"], server["null"], strict=True))
    return [
        Row("1 MB: guard less its checksums, against null server", excess, "x", _LIMIT_LARGE),
        Row("1 MB: null server", median(server["null"]), "us"),
        Row("1 MB: guard", median(server["guard"]), "us"),
        Row("1 MB: CRC32 and Adler-32 of the body alone", checksums, "us"),
    ]
