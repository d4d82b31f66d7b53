"""Counts in Valkey compared with counts in memory, on loopback: latency, CPU, bytes, and faults.

Two Loopguards behind one Envoy take turns.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tests.bench import samples
from tests.bench.envoy_config import running_envoy
from tests.bench.load import load, write_chats
from tests.bench.paced import Meanwhile, run_paced
from tests.bench.processes import NOT_COMPILED, SOURCES, apart, find_compiled, running, serve
from tests.bench.report import Row, progress
from tests.bench.timing import interleaved, process_cpu, ratio, spread
from tests.support.servers import Server, free_port, server

TITLE = "redis: counts in Valkey on loopback, vs. in memory (POST 1 KB, one policy)"

_RATE = 1_000
_CONNECTIONS = 64
_LIMIT_CPU = 1.3
_TIMEOUT_MS = 50
_LIMIT_FAULT_MS = _TIMEOUT_MS + 50
_QUANTILES = ("p50", "p99")


class _Lab(NamedTuple):
    valkey: Server
    ports: dict[str, int]
    pids: dict[str, int]


@contextmanager
def _lab(directory: Path) -> Iterator[_Lab]:
    policy = directory / "policy.json"
    policy.write_bytes(samples.bundle([samples.policy(window_seconds=3600)]))
    with ExitStack() as stack:
        valkey = stack.enter_context(server())
        stores = {"memory": "memory://", "redis": f"redis://{valkey.address}"}
        servers, ports = ({name: free_port() for name in stores} for _ in range(2))
        pids = {}
        for name, url in stores.items():
            flags = [
                "--admin",
                "127.0.0.1:0",
                "--store",
                url,
                "--store-timeout",
                str(_TIMEOUT_MS / 1000),
            ]
            command = serve(find_compiled() or SOURCES, policy, servers[name], *flags)
            pids[name] = stack.enter_context(
                running(command, servers[name], directory / f"{name}.log")
            )
        proxy = stack.enter_context(running_envoy(directory, ports, servers))
        stack.enter_context(apart(pids.values(), [proxy, valkey.pid]))
        yield _Lab(valkey, ports, pids)


def run(*, quick: bool) -> list[Row]:
    rounds, requests, seconds = (3, 1_000, 3) if quick else (9, 3_000, 5)
    with tempfile.TemporaryDirectory() as directory, _lab(Path(directory)) as lab:
        # Every run sends requests that were never sent before
        sent = iter(range(0, 1 << 40, 1 << 20))
        client = lab.valkey.client()

        def cpu(name: str, count: int = requests) -> float:
            before = process_cpu(lab.pids[name])
            asyncio.run(load(lab.ports[name], _CONNECTIONS, write_chats(next(sent), count), count))
            return (process_cpu(lab.pids[name]) - before) / count * 1e6

        for name in lab.ports:
            cpu(name, 500)
        progress("redis: CPU behind Envoy", 1, 2)
        used, keys, spent = (
            client.info("memory")["used_memory"],
            client.dbsize(),
            process_cpu(lab.valkey.pid),
        )
        cost = interleaved(rounds, {name: lambda name=name: cpu(name) for name in lab.ports})  # type: ignore[misc]
        served = (process_cpu(lab.valkey.pid) - spent) / (rounds * requests) * 1e6
        taken = (client.info("memory")["used_memory"] - used) / (client.dbsize() - keys)
        progress("redis: 1,000 requests/s and faults", 2, 2)

        def pace(name: str, fault: Meanwhile | None) -> list[float]:
            return run_paced(lab.ports[name], _RATE, seconds, next(sent), fault)

        found = _latencies(lab, 1 if quick else 3, pace)
    calm = found["redis"]
    rows = [
        _cpu_row(cost),
        Row("Valkey's CPU per request", served, "us"),
        Row(
            "bytes per fingerprint in Valkey",
            taken,
            "B",
            None,
            "sliding_ttl, key and value and their overhead",
        ),
    ]
    for at, quantile in enumerate(_QUANTILES):
        added = calm[at] - found["memory"][at]
        note = f"{calm[at]:.2f} vs. {found['memory'][at]:.2f} ms at the client"
        rows.append(Row(f"1,000 requests/s: {quantile} added to memory's", added, "ms", None, note))
    for name in ("hung", "killed"):
        p50, p99, p999 = found[name]
        note = f"p50 {p50:.2f}, p99 {p99:.2f} ms; without fault p99.9 {calm[2]:.2f} ms"
        rows.append(
            Row(
                f"1,000 requests/s, server {name} for 1 s: p99.9", p999, "ms", _LIMIT_FAULT_MS, note
            )
        )
    return rows


def _cpu_row(cost: Mapping[str, list[float]]) -> Row:
    """The requirement is for the compiled guard; in a slower one, the client's share is smaller."""
    figures = (
        f"{median(cost['redis']):.0f} vs. {median(cost['memory']):.0f} us; "
        f"{spread(cost, 'redis', 'memory')}"
    )
    compiled = find_compiled()
    return Row(
        f"64 connections: CPU of the {'compiled' if compiled else 'pure'} guard, Redis vs. memory",
        ratio(cost, "redis", "memory"), "x", _LIMIT_CPU if compiled else None,
        figures if compiled else f"{figures}; {NOT_COMPILED}",
    )  # fmt: skip


def _latencies(
    lab: _Lab, rounds: int, pace: Callable[[str, Meanwhile | None], list[float]]
) -> dict[str, list[float]]:
    valkey = lab.valkey
    found: dict[str, list[list[float]]] = {
        name: [] for name in ("memory", "redis", "hung", "killed")
    }
    for _ in range(rounds):
        found["memory"].append(pace("memory", None))
        found["redis"].append(pace("redis", None))
        found["hung"].append(pace("redis", lambda: _fault(valkey.hang, valkey.resume)))
        found["killed"].append(pace("redis", lambda: _fault(valkey.kill, valkey.start)))
    return {
        name: [median(quantile) for quantile in zip(*each, strict=True)]
        for name, each in found.items()
    }


def _fault(harm: Callable[[], None], cure: Callable[[], None]) -> None:
    time.sleep(1)
    harm()
    time.sleep(1)
    cure()
