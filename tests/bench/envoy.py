"""The guard behind the real Envoy, compared with servers that do nothing: CPU per request, of the server and of Envoy."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple
from urllib.request import urlopen

from tests.bench import go_build, samples
from tests.bench.agents import make_agents, take_turns
from tests.bench.builds import NOT_COMPILED, SOURCES, find_compiled, serve
from tests.bench.envoy_config import Listener, running_envoy
from tests.bench.load import load, write_chats, write_request
from tests.bench.processes import apart, command_module, free_port, running
from tests.bench.report import Row, progress
from tests.bench.timing import process_cpu, ratio, spread

TITLE = (
    "envoy: CPU per request behind the real Envoy (POST, 16 connections, concurrency 1; the server has a processor of its own)"
)

_CONNECTIONS = 16
_SMALL, _LARGE = 1024, 1_000_000
_LIMIT_LARGE = 1.2
_LIMIT_DUPLEX = 1.3
_WARM_UP = 500
_LIMIT_AGENTS = 1.2
_CHANGING = {"x-request-id": "%REQ(x-request-id)%"}
"""A header of the gRPC stream that no two requests share, as tracing has one (traceparent)."""

_SERVERS = {
    "go": "null server on grpc-go (GOMAXPROCS=1)",
    "null": "null server on grpc.aio",
    "guard": "guard, compiled",
    "duplex": "guard, compiled, with bodies that Envoy does not keep (FULL_DUPLEX_STREAMED)",
    "pure": "guard, pure Python",
    "changing": "guard, compiled, with a changing header in the stream's metadata",
    "grpcio": "guard, pure Python, on --transport grpcio",
}
"""By listener; all take part in every round, as far as they are there."""

_SHARING = ("changing", "duplex")
"""Listeners that ask the server of another one, `guard`."""

_AGENTS = "agents"
"""The listener of a guard that knows agents by their keys and by what they show; see `samples.agents`."""


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
    _Comparison("changing", "guard", "guard, compiled, a changing header vs. none"),
    _Comparison("duplex", "guard", "guard, compiled, FULL_DUPLEX_STREAMED vs. BUFFERED", _LIMIT_DUPLEX),
    _Comparison("grpcio", "null", "guard on --transport grpcio vs. grpc.aio"),
)


class _Cost(NamedTuple):
    """Of one request, in microseconds of CPU."""

    server: float
    envoy: float
    per_second: float


class _Lab:
    """Envoy and the servers, running, and by listener why one is missing."""

    def __init__(
        self,
        envoy: int,
        listeners: Mapping[str, Listener],
        pids: Mapping[str, int],
        admins: Mapping[str, int],
        missing: Mapping[str, str],
    ) -> None:
        self.missing = missing
        self._envoy = envoy
        self._listeners = listeners
        self._pids = pids
        self._admins = admins
        self._sent = 0
        self._guarded: Counter[str] = Counter()

    @property
    def names(self) -> Sequence[str]:
        """Listeners that work, but for that of agents."""
        return [name for name in self._listeners if name != _AGENTS]

    def load(self, name: str, requests: int, length: int) -> _Cost:
        """Send requests that were never sent before to one listener, and see what they cost."""
        self._sent += requests
        return self.send(name, write_chats(self._sent - requests, requests, length), requests)

    def send(self, name: str, sent: Iterator[bytes], requests: int) -> _Cost:
        """The same for requests that are made by the caller, of that number."""
        port, server, *_ = self._listeners[name]
        before = self._clocks(server)
        seconds = asyncio.run(load(port, _CONNECTIONS, sent, requests))
        used, envoy = (after - start for after, start in zip(self._clocks(server), before, strict=True))
        if server is not None:
            self._guarded[server] += requests
        return _Cost(used / requests * 1e6, envoy / requests * 1e6, requests / seconds)

    def check_guards(self) -> None:
        """Had a guard not seen every body, or refused anything, the figures would be of something else."""
        for name, admin in self._admins.items():
            with urlopen(f"http://127.0.0.1:{admin}/metrics", timeout=10) as answer:  # our own server
                text = answer.read().decode()
            line = 'loopguard_requests_total{action="allow",mode="enforce",policy="policy-00000"} '
            counted = float(text.partition(line)[2].partition("\n")[0] or 0)
            if counted != self._guarded[name]:
                raise RuntimeError(f"{name} counted {counted:.0f} of {self._guarded[name]} requests")

    def _clocks(self, server: str | None) -> tuple[float, float]:
        return process_cpu(self._pids[server]) if server else 0.0, process_cpu(self._envoy)


@contextmanager
def _lab(directory: Path) -> Iterator[_Lab]:
    """Start everything; stop everything."""
    policy = directory / "policy.json"
    policy.write_bytes(samples.bundle([samples.policy(window_seconds=3600)]))
    agents = directory / "agents.json"
    agents.write_bytes(samples.bundle([samples.agents()]))
    ports = {name: free_port() for name in (*_SERVERS, _AGENTS) if name not in _SHARING}
    admins = {name: free_port() for name in ("guard", "pure", "grpcio", _AGENTS)}
    commands, missing = _commands(policy, agents, ports, admins)
    listeners = {"without": Listener(free_port()), **{name: Listener(free_port(), name) for name in commands}}
    if "guard" in commands:
        listeners["changing"] = Listener(free_port(), "guard", _CHANGING)
        listeners["duplex"] = Listener(free_port(), "guard", body_mode="FULL_DUPLEX_STREAMED")
    with ExitStack() as stack:
        pids = {
            name: stack.enter_context(running(command, ports[name], directory / f"{name}.log"))
            for name, command in commands.items()
        }
        proxy = stack.enter_context(running_envoy(directory, listeners, {name: ports[name] for name in commands}))
        stack.enter_context(apart(pids.values(), [proxy]))
        yield _Lab(proxy, listeners, pids, {name: admins[name] for name in admins if name in pids}, missing)


def _commands(
    policy: Path, agents: Path, ports: Mapping[str, int], admins: Mapping[str, int]
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """What runs each server, and why some cannot run."""

    def guard(name: str, build: Path, *flags: str) -> list[str]:
        file = agents if name == _AGENTS else policy
        return serve(build, file, ports[name], "--admin", f"127.0.0.1:{admins[name]}", *flags)

    commands = {
        "null": command_module("tests.bench.null_server", str(ports["null"])),
        "pure": guard("pure", SOURCES),
        "grpcio": guard("grpcio", SOURCES, "--transport", "grpcio"),
    }
    missing = {}
    try:
        commands["go"] = [str(go_build.build()), f"127.0.0.1:{ports['go']}"]
    except go_build.NoGoError as error:
        missing["go"] = str(error)
    compiled = find_compiled()
    if compiled is None:
        missing["guard"] = missing["changing"] = missing["duplex"] = missing[_AGENTS] = NOT_COMPILED
    else:
        commands["guard"] = guard("guard", compiled)
        commands[_AGENTS] = guard(_AGENTS, compiled)
    return commands, missing


def run(*, quick: bool) -> list[Row]:
    """Small bodies first, then large ones; the servers take turns."""
    rounds = 3 if quick else 9
    with tempfile.TemporaryDirectory() as directory, _lab(Path(directory)) as lab:
        progress("envoy: warming up", 0, 1)
        for name in lab.names:
            lab.load(name, _WARM_UP, _SMALL)
        small = _rounds(lab, lab.names, rounds, 1000 if quick else 3000, _SMALL)
        guard = "pure" if "guard" in lab.missing else "guard"
        held = () if "duplex" in lab.missing else ("duplex",)
        large = _rounds(lab, ("null", guard, *held), rounds, 100 if quick else 300, _LARGE)
        agents = _agent_rows(lab, rounds, 10 if quick else 40)
        lab.check_guards()
    rows = [*_small_rows(small, lab.missing), *agents, *_large_rows(large["null"], large[guard], _SERVERS[guard])]
    return [*rows, _duplex_row(large, lab.missing)]


def _rounds(lab: _Lab, names: Sequence[str], rounds: int, requests: int, length: int) -> dict[str, list[_Cost]]:
    """What each listener cost in every round."""
    found: dict[str, list[_Cost]] = {name: [] for name in names}
    for number in range(1, rounds + 1):
        progress(f"envoy: bodies of {length:,} bytes", number, rounds)
        for name in names:
            found[name].append(lab.load(name, requests, length))
    return found


def _agent_rows(lab: _Lab, rounds: int, count: int) -> list[Row]:
    """What this many agents cost whose histories grow, each round other ones, compared with handing over the same bodies."""
    name = "agents, 39 KB on average: turns and session limits vs. grpc-go"
    if why := lab.missing.get(_AGENTS) or lab.missing.get("go"):
        return [Row(name, None, "x", _LIMIT_AGENTS, why)]
    found: dict[str, list[float]] = {"go": [], _AGENTS: []}
    for number in range(rounds + 1):
        progress("envoy: agents", number, rounds)
        agents = make_agents(count, number * count)
        requests = [write_request(agent.number, body, agent.path) for agent, body in take_turns(agents)]
        costs = {server: lab.send(server, iter(requests), len(requests)).server for server in found}
        for server, cost in costs.items() if number else ():  # the first round is to warm up
            found[server].append(cost)
    figure = ratio(found, _AGENTS, "go")
    note = f"goal 1.0; {median(found[_AGENTS]):.0f} us vs. {median(found['go']):.0f} us; {spread(found, _AGENTS, 'go')}"
    return [Row(name, figure, "x", _LIMIT_AGENTS, note)]


def _small_rows(found: Mapping[str, Sequence[_Cost]], missing: Mapping[str, str]) -> list[Row]:
    server = {name: [cost.server for cost in costs] for name, costs in found.items()}
    rows = []
    for name, reference, label, at_most, note in _COMPARISONS:
        why = missing.get(name) or missing.get(reference)
        figure = None if why else ratio(server, name, reference)
        rows.append(Row(f"1 KB: {label}", figure, "x", at_most, why or f"{note}{spread(server, name, reference)}"))
    for name, label in _SERVERS.items():
        rows.append(Row(f"1 KB: {label}", median(server[name]) if name in server else None, "us", None, missing.get(name, "")))
    for name, label in ({"without": "without the filter"} | _SERVERS).items():
        if name in found:
            per_second = median(cost.per_second for cost in found[name])
            envoy = median(cost.envoy for cost in found[name])
            rows.append(Row(f"1 KB: Envoy itself, {label}", envoy, "us", note=f"{per_second:,.0f} requests/s"))
    return rows


def _duplex_row(found: Mapping[str, Sequence[_Cost]], missing: Mapping[str, str]) -> Row:
    """What it costs to hold a large body here, and to hand it back, compared with one that Envoy holds."""
    name, why = "1 MB: guard, compiled, FULL_DUPLEX_STREAMED vs. BUFFERED", missing.get("duplex", "")
    if why:
        return Row(name, None, "x", _LIMIT_DUPLEX, why)
    server = {listener: [cost.server for cost in costs] for listener, costs in found.items()}
    note = f"{median(server['duplex']):.0f} us vs. {median(server['guard']):.0f} us; {spread(server, 'duplex', 'guard')}"
    return Row(name, ratio(server, "duplex", "guard"), "x", _LIMIT_DUPLEX, note)


def _large_rows(null: Sequence[_Cost], guard: Sequence[_Cost], label: str) -> list[Row]:
    excess = median(one.server / other.server for one, other in zip(guard, null, strict=True))
    return [
        Row(f"1 MB: {label} vs. grpc.aio", excess, "x", _LIMIT_LARGE),
        Row("1 MB: null server on grpc.aio", median(cost.server for cost in null), "us"),
        Row(f"1 MB: {label}", median(cost.server for cost in guard), "us"),
    ]
