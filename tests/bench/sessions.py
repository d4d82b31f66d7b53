"""What limits of sessions cost a store: a step beside a hit, in memory and on a real Valkey, and the room that a million take.

Every step is of a session whose ledger knows seven tool calls, and shows one more. The room is measured in a process of its own
(`python -m tests.bench.sessions COUNT`), as that of fingerprints is. Then the dearest steps that there are, by Valkey's own
clock: what one script takes, every other client of the server waits for. At last whole requests: of agents of known sessions,
with and without limits on agents, and of callers with and without a budget.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from statistics import median
from time import thread_time
from typing import Any, cast

from extproc.ext_proc.stream import Stream
from extproc.metrics import Metrics
from extproc.settings import Settings
from extproc.store import Store, open_store
from extproc.store.memory import MemoryStore
from extproc.store.rules.session import RECORD, SUCCEEDED, Limits, Question, Settlement, Step, add_up
from extproc.store.rules.windows import Hit
from tests.bench import samples
from tests.bench.processes import run_module
from tests.bench.report import Row, progress
from tests.bench.timing import at_one_clock, cpu_us, difference, interleaved, process_cpu, ratio, resident_mb, spread
from tests.support.servers import Server, server

TITLE = "sessions: a step in addition to a hit, in the store; 1,000,000 sessions in memory"

_MILLION = 1_000_000
_TOGETHER = 64
_LIMIT_STALL_MS = 50
_LONG = 4_900
_LIMIT_SCRIPT_US = 1_000
_LIMIT_LEDGER_KB = 16
_LIMIT_AGENTS_US = 2
_LIMIT_BUDGET = 1.25
_CALLERS = 40
_BUCKET = {"tokens_per_second": 1_000, "burst": 1_000_000}
_RULE = {"name": "r", "limit_keys": ["header:x-user-id"], "algorithm": "token_bucket", "algorithm_config": _BUCKET}
_ROOTS, _AGENTS = 20, 10
_ON_AGENTS = {"max_agents": 50, "max_depth": 5, "max_concurrent_agents": 20, "max_spawns_per_minute": 30}
_LIMITS = Limits(
    3_600_000,
    _MILLION,
    steps=1_000,
    tool_calls=1_000,
    cost=10**11,
    tools=((b"tl_0", 1_000), (b"tl_1", 1_000)),
    window=5,
    threshold=3,
    blocks=5,
    errors=5,
)
_CALLS = [number.to_bytes(6) + b"tl_%d" % (number % 3) + number.to_bytes(4) + b"\x01" for number in range(8)]
_TOOLS = tuple((b"tl_%d" % number, f"tool_{number}") for number in range(3))


def _hit(number: int) -> Hit:
    return Hit(f"loop:p:default:fixed::{number:016x}:{number:032x}", "fixed", 3_600_000, 5, 0, count_refused=True, count_to=10)


def _step(number: int, calls: int, request: int = 0) -> Step:
    """A request of the session of that number, whose history shows this many calls."""
    tenant = f"{number % 1000:016x}"
    keys = (f"session:p::{number:016x}:{tenant}", f"sessions:p::{tenant}")
    name = (number << 8 | request).to_bytes(8)
    shown = b"".join(_CALLS[:calls])
    return Step(*keys, _LIMITS, name, name, 1_000, shown, add_up(shown), 1, _TOOLS, (0, 0, 0))


def _settle(step: Step) -> Settlement:
    return Settlement(step.key, _LIMITS, step.call, 1_000, estimated=False, outcome=SUCCEEDED)


class _Fixture:
    """As many sessions as a round asks about; every round has a store of its own."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._began = [_step(number, 7) for number in range(count)]
        self.hits: list[list[Question]] = [[_hit(number)] for number in range(count)]
        self.steps: list[list[Question]] = [[_hit(number), _step(number, 8, 1)] for number in range(count)]
        self.settlements: list[list[Question]] = [[_settle(step)] for step in self._began]

    def measure(self, asked: Sequence[Sequence[Question]]) -> float:
        """Microseconds for each."""
        store = MemoryStore(Metrics())
        for step in self._began:
            store.hit([step])

        def work() -> None:
            for questions in asked:
                store.hit(questions)

        return cpu_us(work, self._count)

    async def drive(self, store: Store, asked: Sequence[Sequence[Question]]) -> None:
        """Ask a remote store, as many at a time as wait for one in a busy server."""
        for start in range(0, len(asked), _TOGETHER):
            answers = [cast("Awaitable[object]", store.hit(questions)) for questions in asked[start : start + _TOGETHER]]
            for answer in answers:
                await answer

    def measure_server(self, valkey: Server) -> tuple[dict[str, float], dict[str, float]]:
        """Microseconds of the server's for each request, and round trips, by what is asked."""
        spent, trips = {}, {}
        metrics = Metrics()
        with asyncio.Runner() as runner:
            store = open_store(f"redis://{valkey.address}", metrics, Settings(store_timeout=1.0))
            runner.run(store.start())
            valkey.client().flushall()
            runner.run(self.drive(store, [[step] for step in self._began]))
            for name, asked in {"hit": self.hits, "hit and step": self.steps}.items():
                cpu, before = process_cpu(valkey.pid), _count_trips(metrics)
                runner.run(self.drive(store, asked))
                spent[name] = (process_cpu(valkey.pid) - cpu) / self._count * 1e6
                trips[name] = (_count_trips(metrics) - before) / self._count
            runner.run(store.close())
        return spent, trips


def _count_trips(metrics: Metrics) -> float:
    return metrics.registry.get_sample_value("loopguard_store_batch_size_count") or 0.0


def _long(limits: Limits, history: bytes, number: int, tools: int, newest: int = 1) -> Step:
    """A request with a history of any length, of a session of that number."""
    keys = (f"session:long::{number:016x}:00", "sessions:long::00")
    names = tuple((tool.to_bytes(4), f"tool_{tool}") for tool in range(tools))
    name = os.urandom(8)
    return Step(*keys, limits, name, name, 1_000, history, add_up(history), newest, names, (0, 0, 0))


def _call_tools(count: int, tools: int) -> bytes:
    return b"".join([os.urandom(6) + (at % tools).to_bytes(4) + os.urandom(4) + b"\x01" for at in range(count)])


def _renew(history: bytes, name: bytes = b"") -> bytes:
    """The same calls under other ids."""
    return b"".join([(name or os.urandom(6)) + history[at + 6 : at + RECORD] for at in range(0, len(history), RECORD)])


class _Long:
    """A session of 4,900 calls, sixty tools with limits, and the requests that cost a store most, by name."""

    def __init__(self) -> None:
        limited = tuple((tool.to_bytes(4), 10_000) for tool in range(60))
        self._limits = Limits(3_600_000, _MILLION, tool_calls=10_000, tools=limited, window=500, threshold=400)
        self._history = _call_tools(_LONG, 300)
        self.steps = {
            "ordinary": self._step(self._history + _call_tools(1, 300)),
            "first": self._step(_call_tools(_LONG, _LONG), _LONG, 1),
            "another history": self._step(_call_tools(_LONG, _LONG), _LONG),
            "a window": self._step(self._history[-300 * RECORD :] + _call_tools(1, 300)),
            "ids anew": self._step(_renew(self._history) + _call_tools(1, 300)),
            "ids anew, a window": self._step(_renew(self._history[-300 * RECORD :]) + _call_tools(1, 300)),
            "no ids": self._step(_renew(self._history, bytes(6)) + _call_tools(1, 300)),
        }

    def _step(self, history: bytes, tools: int = 300, number: int = 0) -> Step:
        return _long(self._limits, history, number, tools)

    def begin(self) -> list[Step]:
        """As many requests as fill a ledger."""
        return [self._step(self._history[: most * RECORD]) for most in (4_000, *range(_LONG - 300, _LONG + 1))]

    def measure_memory(self) -> dict[str, float]:
        """Microseconds."""
        spent = {}
        for name, step in self.steps.items():
            store = MemoryStore(Metrics())
            for begun in self.begin():
                store.hit([begun])
            spent[name] = cpu_us(lambda step=step, store=store: store.hit([step]), 1)  # type: ignore[misc]
        return spent

    def measure_server(self, valkey: Server) -> tuple[dict[str, float], int]:
        """Microseconds of one script, by the server's own clock; and the bytes that the ledger takes there."""
        client, spent = valkey.client(), {}
        with asyncio.Runner() as runner:
            store = open_store(f"redis://{valkey.address}", Metrics(), Settings(store_timeout=1.0))
            runner.run(store.start())

            def ask(asked: Sequence[Question]) -> None:
                runner.run(_ask(store, asked))

            for name, step in self.steps.items():
                client.flushall()
                for begun in self.begin():
                    ask([begun])
                spent[name] = _time_scripts(client, ask, [step])
            taken = client.memory_usage(f"loopguard:{self.steps['no ids'].key}")
            client.flushall()
            for number in range(_TOGETHER):
                ask([_long(self._limits, self._history, number, 300)])
            for calls in (15, 50):
                steps = [_long(_LIMITS, _call_tools(calls, 300), number, 300) for number in range(_TOGETHER)]
                spent[f"64 at once, with {calls} calls"] = _time_scripts(client, ask, steps)
            runner.run(store.close())
        return spent, taken


async def _ask(store: Store, asked: Sequence[Question]) -> None:
    await cast("Awaitable[object]", store.hit(asked))


def _time_scripts(
    client: Any,  # noqa: ANN401  # redis-py's
    ask: Callable[[Sequence[Question]], None],
    asked: Sequence[Question],
) -> float:
    """Microseconds of a script that this runs, on average."""
    before = client.info("commandstats")["cmdstat_evalsha"]
    ask(asked)
    after = client.info("commandstats")["cmdstat_evalsha"]
    return float((after["usec"] - before["usec"]) / (after["calls"] - before["calls"]))


def _run_long(*, quick: bool) -> list[Row]:
    fixture, rounds = _Long(), 5 if quick else 15
    with server() as valkey:
        served = [fixture.measure_server(valkey) for _ in range(rounds)]
    spent = {name: min(found[name] for found, _ in served) for name in served[0][0]}  # its clock runs on while others work
    held = [fixture.measure_memory() for _ in range(rounds)]
    kept = {name: median(found[name] for found in held) for name in held[0]}
    dearest, largest = max(spent, key=spent.__getitem__), max(kept, key=kept.__getitem__)
    return [
        Row(f"Valkey: an ordinary step of a session of {_LONG:,} calls", spent["ordinary"], "us"),
        Row("Valkey: the longest script", spent[dearest], "us", _LIMIT_SCRIPT_US, dearest),
        Row(f"a session of {_LONG:,} calls: memory of Valkey", served[0][1] / 1e3, "kB", _LIMIT_LEDGER_KB),
        Row("in memory: the longest step", kept[largest], "us", _LIMIT_STALL_MS * 100, largest),
    ]


class _Agents:
    """Requests of sessions whose agents take turns, each named by Claude Code's headers."""

    def __init__(self, count: int) -> None:
        self._begun, self._later = self._write(0, _ROOTS * _AGENTS), self._write(_ROOTS * _AGENTS, count)

    def _write(self, first: int, count: int) -> list[tuple[bytes, bytes]]:
        heads = [
            samples.headers_message(user=f"user-{root}", more=_name_agent(root, agent))
            for agent in range(_AGENTS)
            for root in range(_ROOTS)
        ]
        return [
            (heads[number % len(heads)], samples.body_message(samples.chat_body(number)))
            for number in range(first, first + count)
        ]

    def measure(self, limits: dict[str, int]) -> float:
        """Microseconds for a request of an agent that has begun, with these limits on agents."""
        policy = samples.budget()
        del policy["spec"]["session"]
        policy["spec"]["session_limits"] |= limits
        return _measure_requests(policy, self._begun, self._later)


def _measure_requests(
    policy: dict[str, Any], begun: Sequence[tuple[bytes, bytes]], later: Sequence[tuple[bytes, bytes]]
) -> float:
    """Microseconds for each later request, by its headers and body, under one policy that lets all pass."""
    serving = samples.service(samples.engine([policy]))

    def work(pairs: Sequence[tuple[bytes, bytes]]) -> None:
        for headers, body in pairs:
            stream = Stream(serving)
            stream.receive(headers)
            stream.receive(body)
            stream.close()

    work(begun)
    spent = at_one_clock(lambda: cpu_us(lambda: work(later), len(later)))
    labels = {"policy": "policy-00000", "mode": "enforce", "action": "allow"}
    if serving.metrics.registry.get_sample_value("loopguard_requests_total", labels) != len(begun) + len(later):
        raise RuntimeError("not every request was counted and let through")
    return spent


def _measure_budgets(rounds: int, count: int) -> Row:
    """One rule of a policy beside its detector, as a share of the same policy without."""
    heads = [samples.headers_message(user=f"user-{number}") for number in range(_CALLERS)]
    pairs = [(heads[number % _CALLERS], samples.body_message(samples.chat_body(number))) for number in range(count + _CALLERS)]
    plain, limited = samples.policy(), samples.policy()
    limited["spec"]["rules"] = [_RULE]
    begun, later = pairs[:_CALLERS], pairs[_CALLERS:]
    works = {
        "plain": lambda: _measure_requests(plain, begun, later),
        "limited": lambda: _measure_requests(limited, begun, later),
    }
    found = interleaved(rounds, works)
    note = spread(found, "limited", "plain")
    return Row("in memory: a policy with a budget vs. without", ratio(found, "limited", "plain"), "x", _LIMIT_BUDGET, note)


def _name_agent(root: int, agent: int) -> dict[str, str]:
    """Headers of an agent; 0 is the session itself, and the first half of the others has started the second."""
    session = {"x-claude-code-session-id": f"5f0c9f8e-7a1b-4c2d-9e3f-{root:012d}"}
    parent = agent - _AGENTS // 2
    started = {"x-claude-code-parent-agent-id": f"agent-{root}-{parent}"} if parent > 0 else {}
    return {**session, "x-claude-code-agent-id": f"agent-{root}-{agent}", **started} if agent else session


def run(*, quick: bool) -> list[Row]:
    """Measure in memory, on Valkey, and the room that sessions take."""
    rounds, count = (5, 1_000) if quick else (15, 5_000)
    fixture = _Fixture(count)
    progress("sessions: in memory", 1, 3)
    works = {"hit": fixture.hits, "hit and step": fixture.steps, "settlement": fixture.settlements}
    found = interleaved(rounds, {name: lambda asked=asked: fixture.measure(asked) for name, asked in works.items()})  # type: ignore[misc]
    progress("sessions: on Valkey", 2, 3)
    with server() as valkey:
        served = [fixture.measure_server(valkey) for _ in range(rounds)]
    spent = {name: median(cpu[name] for cpu, _ in served) for name in served[0][0]}
    trips = {name: median(made[name] for _, made in served) for name in served[0][1]}
    progress("sessions: a million", 3, 3)
    agents = _Agents(500 if quick else 2_000)
    asked = interleaved(rounds, {"limited": lambda: agents.measure(_ON_AGENTS), "unlimited": lambda: agents.measure({})})
    sessions = _MILLION // 10 if quick else _MILLION
    room = run_module("tests.bench.sessions", str(sessions))
    return [
        Row(
            "in memory: a step in addition to a hit",
            difference(found, "hit and step", "hit"),
            "us",
            None,
            "8 tool calls, one of them new",
        ),
        Row("in memory: a settlement", median(found["settlement"]), "us"),
        Row("Valkey's CPU: a hit", spent["hit"], "us"),
        Row("Valkey's CPU: a hit and a step", spent["hit and step"], "us", None, "in the same round trip"),
        Row("round trips, with a step vs. without", trips["hit and step"] / trips["hit"], "x", 1),
        Row(f"{sessions:,} sessions begin: memory", room["mb"], "MB", None, f"{room['kept']:,.0f} are kept"),
        Row(f"{sessions:,} sessions begin: longest call", room["longest_ms"], "ms", _LIMIT_STALL_MS, "CPU"),
        Row(
            "in memory: limits on agents, in addition to other limits",
            difference(asked, "limited", "unlimited"),
            "us",
            _LIMIT_AGENTS_US,
            f"{_ROOTS} sessions of {_AGENTS} agents",
        ),
        _measure_budgets(rounds, count),
        *_run_long(quick=quick),
    ]


def fill(count: int) -> dict[str, float]:
    """Let this many sessions begin, each with a history of eight calls."""
    store = MemoryStore(Metrics())
    gc.collect()
    gc.freeze()  # as the server does once it has started
    before, longest = resident_mb(), 0.0
    for number in range(count):
        step = _step(number, 8)
        started = thread_time()
        store.hit((step,))
        longest = max(longest, thread_time() - started)
    return {"mb": resident_mb() - before, "kept": len(store), "longest_ms": longest * 1e3}


if __name__ == "__main__":
    print(json.dumps(fill(int(sys.argv[1]))))
