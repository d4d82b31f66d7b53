"""What budgets cost behind Envoy, with one Valkey: one rule of a policy, and a budget of requests beside envoyproxy/ratelimit.

For the latter, both count a caller's requests of the day in a fixed window, by one descriptor, tell clients what is left, and
let every request pass. The service of Envoy's project is written in Go. It joins writes to the store if it is told to, so it is
measured twice.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench import go_build, samples
from tests.bench.builds import NOT_COMPILED, SOURCES, find_compiled, serve
from tests.bench.envoy_config import Listener, running_envoy
from tests.bench.load import load, write_chats
from tests.bench.processes import apart, free_port, running
from tests.bench.report import Row, progress
from tests.bench.timing import interleaved, process_cpu, ratio, spread
from tests.support.servers import Server, server

TITLE = "budgets: on Valkey, 64 in flight (POST 1 KB)"

_CONNECTIONS = 64
_LIMIT = 0.5
_LIMIT_RULE = 1.25
_MOST = 1_000_000

_RULE = {
    "name": "requests",
    "limit_keys": ["header:x-user-id"],
    "algorithm": "cost_based",
    "algorithm_config": {
        "budget": _MOST,
        "period": "1d",
        "staged_actions": [{"threshold_percent": 100, "action": "reject"}],
    },
}
_POLICY: dict[str, Any] = {
    "id": "budget",
    "spec": {"selector": {"pathExact": samples.PATH, "methods": ["POST"]}, "rules": [_RULE]},
}

_BUCKET = {"tokens_per_second": 1_000, "burst": _MOST}
_DETECTOR, _DETECTOR_AND_RULE = samples.policy(), samples.policy()
_DETECTOR_AND_RULE["spec"]["rules"] = [
    {"name": "r", "limit_keys": ["header:x-user-id"], "algorithm": "token_bucket", "algorithm_config": _BUCKET}
]
_GUARDS = {"guard": _POLICY, "detector": _DETECTOR, "detector and rule": _DETECTOR_AND_RULE}

_DESCRIPTORS = f"""
domain: all
descriptors:
- key: user
  rate_limit: {{unit: day, requests_per_unit: {_MOST}}}
"""

_JOINED = {"REDIS_PIPELINE_WINDOW": "150us"}
"""As its README recommends."""

_MISSING = "CPU per decision, Loopguard vs. ratelimit"

_RATELIMITS: dict[str, Mapping[str, str]] = {"ratelimit": {}, "ratelimit, joined": _JOINED}


def run(*, quick: bool) -> list[Row]:
    """Each server takes its turn."""
    missing, program = "", None
    try:
        program = go_build.install_ratelimit()
    except go_build.NoGoError as error:
        missing = str(error)
    rounds, requests = (3, 2_000) if quick else (9, 5_000)
    with tempfile.TemporaryDirectory() as directory, _lab(Path(directory), program) as (ports, pids):
        sent = iter(range(0, 1 << 40, 1 << 20))

        def cpu(name: str, count: int = requests) -> float:
            before = process_cpu(pids[name])
            asyncio.run(load(ports[name], _CONNECTIONS, write_chats(next(sent), count), count))
            return (process_cpu(pids[name]) - before) / count * 1e6

        for number, name in enumerate(ports, 1):
            progress("budgets: warming up", number, len(ports) + 1)
            cpu(name)
        progress("budgets: CPU behind Envoy", len(ports) + 1, len(ports) + 1)
        cost = interleaved(rounds, {name: lambda name=name: cpu(name) for name in ports})  # type: ignore[misc]
    figures = f"{median(cost['detector and rule']):.0f} vs. {median(cost['detector']):.0f} us"
    price = ratio(cost, "detector and rule", "detector")
    note = f"{figures}; {spread(cost, 'detector and rule', 'detector')}"
    return [
        Row("CPU per request, a detector and a rule vs. the detector", price, "x", _LIMIT_RULE, note),
        *([_row(cost, name) for name in _RATELIMITS] if program else [Row(_MISSING, None, "x", _LIMIT, missing)]),
    ]


def _row(cost: Mapping[str, list[float]], name: str) -> Row:
    build = "compiled" if find_compiled() else "pure"
    figures = f"{median(cost['guard']):.0f} vs. {median(cost[name]):.0f} us; {spread(cost, 'guard', name)}"
    return Row(
        f"CPU per decision, {build} Loopguard vs. {name}",
        ratio(cost, "guard", name), "x", _LIMIT if find_compiled() else None,
        figures if find_compiled() else f"{figures}; {NOT_COMPILED}",
    )  # fmt: skip


@contextmanager
def _lab(directory: Path, program: Path | None) -> Iterator[tuple[dict[str, int], dict[str, int]]]:
    """The ports of Envoy and the process ids of the servers behind it, by name."""
    config = directory / "limits" / "config"
    config.mkdir(parents=True)
    (config / "limits.yaml").write_text(_DESCRIPTORS)
    limiters = _RATELIMITS if program else {}
    with ExitStack() as stack:
        valkey = stack.enter_context(server())
        ports, servers = ({name: free_port() for name in (*_GUARDS, *limiters)} for _ in range(2))
        pids = {}
        for name, made in _GUARDS.items():
            policy = directory / f"{name}.json"
            policy.write_bytes(samples.bundle([made]))
            more = ("--admin", "127.0.0.1:0", "--store", f"redis://{valkey.address}")
            command = serve(find_compiled() or SOURCES, policy, servers[name], *more)
            pids[name] = stack.enter_context(running(command, servers[name], directory / f"{name}.log"))
        for name, settings in limiters.items():
            known = ["env", *[f"{key}={value}" for key, value in _configure(servers[name], valkey, config, settings).items()]]
            pids[name] = stack.enter_context(running([*known, str(program)], servers[name], directory / f"{name}.log"))
        listeners = {name: Listener(ports[name], limiter=name, upstream="answers") for name in limiters}
        listeners |= {name: Listener(ports[name], name, upstream="answers") for name in _GUARDS}
        servers["answers"] = free_port()
        listeners["answers"] = Listener(servers["answers"])
        proxy = stack.enter_context(running_envoy(directory, listeners, servers))
        stack.enter_context(apart(pids.values(), [proxy, valkey.pid]))
        yield ports, pids


def _configure(port: int, valkey: Server, config: Path, more: Mapping[str, str]) -> dict[str, str]:
    """Its settings: what a client sees as Loopguard's clients do, and nothing that only costs."""
    return {
        "GRPC_HOST": "127.0.0.1",
        "GRPC_PORT": f"{port}",
        "HOST": "127.0.0.1",
        "PORT": f"{free_port()}",
        "DEBUG_HOST": "127.0.0.1",
        "DEBUG_PORT": f"{free_port()}",
        "LOG_LEVEL": "WARN",
        "DISABLE_STATS": "true",
        "RUNTIME_ROOT": str(config.parent),
        "RUNTIME_SUBDIRECTORY": "",
        "RUNTIME_WATCH_ROOT": "false",
        "REDIS_SOCKET_TYPE": "tcp",
        "REDIS_URL": valkey.address,
        **more,
    }
