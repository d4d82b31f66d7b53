"""Counts in Redis beside counts in memory, in one run on loopback: latency, CPU, round trips, bytes, and faults.

Two Loopguards behind one Envoy, one with each store, take turns. What happens in the store alone (batches, hammered loops) is
measured in this process, where exactly 64 requests are in flight.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple, cast

from extproc.engine.plan import Detector
from extproc.ext_proc.service import Service
from extproc.ext_proc.stream import Stream
from extproc.ext_proc.transaction import Reply
from extproc.metrics import Metrics
from extproc.settings import Settings
from extproc.store import Store, open_store
from extproc.store.memory import MemoryStore
from extproc.store.rules.windows import Hit
from tests.bench import samples
from tests.bench.builds import NOT_COMPILED, SOURCES, find_compiled, serve
from tests.bench.envoy_config import Listener, running_envoy
from tests.bench.load import load, write_chats
from tests.bench.paced import Meanwhile, run_paced
from tests.bench.processes import apart, free_port, running
from tests.bench.report import Row, progress
from tests.bench.timing import interleaved, process_cpu, ratio, spread
from tests.support.records import replace
from tests.support.servers import Server, server

TITLE = "redis: counts in Valkey on loopback, vs. in memory (POST 1 KB, one policy)"

_IN_FLIGHT = 64
_RATE = 1_000
_CONNECTIONS = 64
_LIMIT_TRIPS = 1 / 8
_LIMIT_CPU = 1.3
_TIMEOUT_MS = 50
_LIMIT_FAULT_MS = _TIMEOUT_MS + 50
_QUANTILES = ("p50", "p99", "p99.9")


def run(*, quick: bool) -> list[Row]:
    """The store alone first, then whole servers behind Envoy."""
    with server() as valkey:
        rows = _store_alone(valkey, quick=quick)
    return [*rows, *_behind_envoy(quick=quick)]


# --- in this process


class _Streams:
    """A service driven by 64 clients at the same time, each with one request in flight."""

    def __init__(self, runner: asyncio.Runner, store: Store, metrics: Metrics) -> None:
        self._runner = runner
        self.metrics = metrics
        self.store = store
        runner.run(store.start())
        engine = samples.engine([samples.policy(window_seconds=3600)])
        self._service = Service(engine, store, MemoryStore(Metrics()), metrics, Settings())
        self._next = 0

    def cpu_us(self, count: int) -> float:
        """Microseconds of this process's CPU per request, each of which is a new one."""
        first, self._next = self._next, self._next + count
        pairs = [
            (samples.headers_message(user=f"user-{number % 1000}"), samples.body_message(samples.chat_body(number)))
            for number in range(first, first + count)
        ]
        started = time.process_time()
        self._runner.run(self._drive(pairs))
        return (time.process_time() - started) / count * 1e6

    async def _drive(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        waiting = iter(pairs)

        async def client() -> None:
            for headers, body in waiting:
                stream = Stream(self._service)
                stream.receive(headers)
                reply = stream.receive(body)
                if not isinstance(reply, Reply):
                    reply = await reply
                stream.close()
                await asyncio.sleep(0)  # as a transport returns to its event loop between requests

        await asyncio.gather(*(client() for _ in range(_IN_FLIGHT)))
        value = self.metrics.registry.get_sample_value
        if value("loopguard_fail_open_total", {"reason": "store_error"}):
            raise RuntimeError("the store failed under load")


def _store_alone(valkey: Server, *, quick: bool) -> list[Row]:
    rounds, count = (3, 2_000) if quick else (9, 10_000)
    settings = Settings(store_timeout=1.0)  # what is measured here is work, on a machine that does other things as well
    with asyncio.Runner() as runner:
        metrics = {"memory": Metrics(), "redis": Metrics()}
        urls = {"memory": "memory://", "redis": f"redis://{valkey.address}"}
        streams = {name: _Streams(runner, open_store(urls[name], metrics[name], settings), metrics[name]) for name in urls}
        for each in streams.values():
            each.cpu_us(500)
        progress("redis: 64 in flight", 1, 5)
        before, sent = _trips(metrics["redis"]), process_cpu(valkey.pid)
        found = interleaved(rounds, {name: lambda each=each: each.cpu_us(count) for name, each in streams.items()})  # type: ignore[misc]
        trips, hits = (after - start for after, start in zip(_trips(metrics["redis"]), before, strict=True))
        served = (process_cpu(valkey.pid) - sent) / hits * 1e6
        progress("redis: a hammered loop", 2, 5)
        refused, commands = runner.run(_hammer(streams["redis"].store, valkey, 5_000 if quick else 50_000))
        for each in streams.values():
            runner.run(each.store.close())
        progress("redis: bytes", 3, 5)
        taken = runner.run(_bytes(valkey, 10_000 if quick else 100_000))
    return [
        Row("64 in flight: round trips per request", trips / hits, "", _LIMIT_TRIPS, f"{hits / trips:.0f} hits per round trip"),
        Row(
            "64 in flight: Loopguard's CPU per request without transport, Redis vs. memory",
            ratio(found, "redis", "memory"), "x", None,
            f"{median(found['redis']):.0f} vs. {median(found['memory']):.0f} us",
        ),
        Row("64 in flight: Valkey's CPU per request", served, "us"),
        Row("hammered loop: commands per refused request", commands / refused, "", 0.1, f"{commands} for {refused:,}"),
        Row("bytes per fingerprint in Valkey", taken, "B", None, "sliding_ttl, key and value and their overhead"),
    ]  # fmt: skip


def _trips(metrics: Metrics) -> tuple[float, float]:
    value = metrics.registry.get_sample_value
    return value("loopguard_store_batch_size_count") or 0.0, value("loopguard_store_batch_size_sum") or 0.0


def _hit(number: int) -> Hit:
    """What the sample policy asks the store for."""
    detector: Detector = samples.engine([samples.policy(window_seconds=3600)]).plans[0].detectors[0]
    digest = f"{number & 0xFFFFFFFF:08x}{number:016x}"
    hit = detector.make_hit("", f"{number % 1000:016x}", digest, detector.similarity)
    assert hit is not None
    return hit


async def _hammer(store: Store, valkey: Server, count: int) -> tuple[int, int]:
    """Requests of one loop, 64 in flight, all refused; and how many script calls reached the server for them."""
    hit = replace(_hit(0), key=f"{_hit(0).key[:-2]}aa")
    for _ in range(hit.threshold):
        await cast("Awaitable[object]", store.hit([hit]))
    before = valkey.commands()["evalsha"]
    left = iter(range(count))

    async def client() -> None:
        for _ in left:
            answer = store.hit([hit])
            counts = await answer if isinstance(answer, Awaitable) else answer
            if not counts[0].looping:
                raise RuntimeError("a request of the loop was let through")
            await asyncio.sleep(0)

    await asyncio.gather(*(client() for _ in range(_IN_FLIGHT)))
    await asyncio.sleep(0.3)  # what is owed
    return count, valkey.commands()["evalsha"] - before


async def _bytes(valkey: Server, count: int) -> float:
    client = valkey.client()
    client.flushall()
    store = open_store(f"redis://{valkey.address}", Metrics(), Settings(store_timeout=10.0))
    template = _hit(0)
    hits = [replace(template, key=f"{template.key[:-41]}{number:016x}:{number:08x}{number:016x}") for number in range(count)]
    before = client.info("memory")["used_memory"]
    for start in range(0, count, 200):
        await cast("Awaitable[object]", store.hit(hits[start : start + 200]))
    taken = client.info("memory")["used_memory"] - before
    if client.dbsize() != count:
        raise RuntimeError("not every fingerprint has a key")
    await store.close()
    return cast("float", taken / count)


# --- behind Envoy


class _Lab(NamedTuple):
    """Two Loopguards behind Envoy, and the server of one of them."""

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
            flags = ["--admin", "127.0.0.1:0", "--store", url, "--store-timeout", str(_TIMEOUT_MS / 1000)]
            command = serve(find_compiled() or SOURCES, policy, servers[name], *flags)
            pids[name] = stack.enter_context(running(command, servers[name], directory / f"{name}.log"))
        listeners = {name: Listener(port, name) for name, port in ports.items()}
        proxy = stack.enter_context(running_envoy(directory, listeners, servers))
        stack.enter_context(apart(pids.values(), [proxy, valkey.pid]))
        yield _Lab(valkey, ports, pids)


def _behind_envoy(*, quick: bool) -> list[Row]:
    rounds, requests, seconds = (3, 1_000, 3) if quick else (9, 3_000, 5)
    with tempfile.TemporaryDirectory() as directory, _lab(Path(directory)) as lab:
        sent = iter(range(0, 1 << 40, 1 << 20))  # every run sends requests that were never sent before

        def cpu(name: str, count: int = requests) -> float:
            before = process_cpu(lab.pids[name])
            asyncio.run(load(lab.ports[name], _CONNECTIONS, write_chats(next(sent), count), count))
            return (process_cpu(lab.pids[name]) - before) / count * 1e6

        for name in lab.ports:
            cpu(name, 500)
        progress("redis: CPU behind Envoy", 4, 5)
        cost = interleaved(rounds, {name: lambda name=name: cpu(name) for name in lab.ports})  # type: ignore[misc]
        progress("redis: 1,000 requests/s and faults", 5, 5)

        def pace(name: str, fault: Meanwhile | None) -> list[float]:
            return run_paced(lab.ports[name], _RATE, seconds, next(sent), fault)

        found = _latencies(lab, 1 if quick else 3, pace)
    calm = found["redis"]
    rows = [_cpu_row(cost)]
    for at, quantile in enumerate(_QUANTILES[:2]):
        added = calm[at] - found["memory"][at]
        note = f"{calm[at]:.2f} vs. {found['memory'][at]:.2f} ms at the client"
        rows.append(Row(f"1,000 requests/s: {quantile} added to memory's", added, "ms", None, note))
    for name in ("hung", "killed"):
        p50, p99, p999 = found[name]
        note = f"p50 {p50:.2f}, p99 {p99:.2f} ms; without fault p99.9 {calm[2]:.2f} ms"
        rows.append(Row(f"1,000 requests/s, server {name} for 1 s: p99.9", p999, "ms", _LIMIT_FAULT_MS, note))
    return rows


def _cpu_row(cost: Mapping[str, list[float]]) -> Row:
    """The requirement is of the compiled guard: what the client library costs weighs less on one that is slower itself."""
    figures = f"{median(cost['redis']):.0f} vs. {median(cost['memory']):.0f} us; {spread(cost, 'redis', 'memory')}"
    compiled = find_compiled()
    return Row(
        f"behind Envoy, 64 connections: CPU of the {'compiled' if compiled else 'pure'} guard, Redis vs. memory",
        ratio(cost, "redis", "memory"), "x", _LIMIT_CPU if compiled else None,
        figures if compiled else f"{figures}; {NOT_COMPILED}",
    )  # fmt: skip


def _latencies(lab: _Lab, rounds: int, pace: Callable[[str, Meanwhile | None], list[float]]) -> dict[str, list[float]]:
    """Quantiles of calm and of troubled seconds, each the median of some rounds."""
    valkey = lab.valkey
    found: dict[str, list[list[float]]] = {name: [] for name in ("memory", "redis", "hung", "killed")}
    for _ in range(rounds):
        found["memory"].append(pace("memory", None))
        found["redis"].append(pace("redis", None))
        found["hung"].append(pace("redis", lambda: _fault(valkey.hang, valkey.resume)))
        found["killed"].append(pace("redis", lambda: _fault(valkey.kill, valkey.start)))
    return {name: [median(quantile) for quantile in zip(*each, strict=True)] for name, each in found.items()}


def _fault(harm: Callable[[], None], cure: Callable[[], None]) -> None:
    time.sleep(1)
    harm()
    time.sleep(1)
    cure()
