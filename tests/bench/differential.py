"""Compares two versions: both get the same exchanges, and must answer alike, byte for byte.

`.venv/bin/python -m tests.bench.differential --before PYTHON [--after PYTHON]`, from the root of
a checkout. Each PYTHON imports a version: that of a checkout's .venv, or one with a compiled
wheel.

Both versions serve the same policies on Unix sockets, in memory and on a Valkey each. Requests,
access log entries and orders are sent one after the other, from a seed: agents of every API,
bodies of the edit fuzzer, JSON-RPC and junk. Answers are compared with their dynamic metadata,
and after each batch metrics, admin pages and all keys in Valkey.

Time stands still in both versions and in Valkey, and moves only when the driver says so;
randomness follows from the time. Timers are real, so all delays are short; what depends on them
is in `_MASKED`. Not compared are lifetimes of keys, logs, events, concurrent requests, TLS, and
failures of the store. Servers forget ended orders, and loops and sessions that are idle for an
hour, by their own timers: here orders are revoked, and 20,000 exchanges take less.
"""

import argparse
import asyncio
import gzip
import http.client
import json
import mmap
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import brotli
import grpc
import redis
from google.protobuf.json_format import MessageToDict

from extproc.pb.als_pb2 import StreamAccessLogsMessage
from extproc.pb.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from extproc.policy.presets import PRESETS, find_preset
from tests.support.edit_fuzzer import Writer
from tests.support.envoy_logs import add_entry
from tests.support.messages import ATTRIBUTES, MODES
from tests.support.model_requests import BODIES
from tests.support.random_agents import Agent
from tests.support.servers import SERVER
from tests.support.turn_writers import PATHS

_BATCH = 500
_NOON = 1_795_694_400 * 10**9
_ERROR = b"error: "  # no message starts with this
_TOKEN = "token-of-an-operator"
_PAGES = (
    "/loops",
    "/sessions",
    "/budgets",
    "/policies",
    "/coverage",
    "/canary",
    "/overrides",
    "/readyz",
)
# Meaningless differences: the process's own figures, and what servers write by their own timers.
_MASKED = (
    r"metric:(process_|python_)|admin:.*coverage|key:b'loopguard:(boards:|orders:overrides:version)"
)

# Runs the command of a version, which first prints its path.
_MAIN = (
    "import sys, extproc; print(extproc.__file__, flush=True); from extproc.cli.main import "
    "main; sys.exit(main())"
)

# Imported first by both servers: the driver's time, and randomness that follows from it.
_CLOCK = """
import hashlib, mmap, os, time
_file = mmap.mmap(os.open(os.environ["DIFFERENTIAL_CLOCK"], os.O_RDONLY), 8, prot=mmap.PROT_READ)
_drawn = {}
def _now():
    return int.from_bytes(_file[:8], "little")
def _draw(size):
    now = _now()
    at, count = _drawn.get(size, (0, 0))
    _drawn[size] = now, count + 1 if at == now else 0
    return hashlib.shake_128(b"%d %d %d" % (size, *_drawn[size])).digest(size)
os.urandom, os.getpid = _draw, lambda: 4242
time.time_ns = time.monotonic_ns = time.perf_counter_ns = _now
time.time = time.monotonic = time.perf_counter = lambda: _now() / 1e9
time.thread_time = time.process_time = lambda: 0.0
import random
random._urandom = _draw
random.seed(1)
"""

# The same time for Valkey.
_CLOCK_C = """
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static int64_t now(void) {
    static volatile int64_t *clock;
    if (!clock) {
        int file = open(getenv("DIFFERENTIAL_CLOCK"), O_RDONLY);
        clock = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    }
    return *clock;
}
int gettimeofday(struct timeval *to, void *zone) {
    to->tv_sec = now() / 1000000000; to->tv_usec = now() / 1000 % 1000000; return 0;
}
time_t time(time_t *to) { time_t t = now() / 1000000000; if (to) *to = t; return t; }
int clock_gettime(clockid_t which, struct timespec *to) {
    if (which != CLOCK_REALTIME) return syscall(SYS_clock_gettime, which, to);
    to->tv_sec = now() / 1000000000; to->tv_nsec = now() % 1000000000; return 0;
}
"""


# --- policies: each host has some of its own


def _loop(
    similarity: str = "exact",
    threshold: int = 3,
    action: str = "reject",
    **more: Any,  # noqa: ANN401  # keys of a detector
) -> dict[str, Any]:
    loop = {
        "name": f"{similarity}-{action}",
        "enabled": True,
        "similarity": similarity,
        "window_seconds": 60,
        "action": action,
    }
    return {**loop, "threshold_identical_requests": threshold, "max_delay_ms": 1, **more}


def _rule(
    name: str,
    algorithm: str,
    keys: list[str],
    config: Mapping[str, Any],
    **more: Any,  # noqa: ANN401  # keys of a rule
) -> dict[str, Any]:
    return {
        "name": name,
        "limit_keys": keys,
        "algorithm": algorithm,
        "algorithm_config": dict(config),
        **more,
    }


_USER = ["header:x-user-id"]
_END = {"threshold_percent": 100, "action": "reject"}
_PRICE = {"input": 3, "output": 15, "cache_read": 0.3}
_STAGES = [
    {"threshold_percent": 40, "action": "warn"},
    {"threshold_percent": 60, "action": "throttle", "delay_ms": 1},
]
_STAGES += [{"threshold_percent": 80, "action": "steer"}, _END]
_LATE = {"steer": 4, "land": 6, "reject": 8}
_HOSTS: list[dict[str, dict[str, Any]]] = [
    {
        "exact": {
            "loop_detection": [
                _loop(count_refused=False, cooldown_seconds=5),
                _loop(threshold=2, action="warn"),
            ]
        },
        "log": {
            "loop_detection": _loop(
                action="throttle",
                window_type="sliding_log",
                escalate={"reject": 5},
                reject_status="auto",
            ),
        },
        "fixed": {
            "loop_detection": _loop(
                window_type="fixed", threshold=5, body="ignore", count_failed=False
            )
        },
    },
    {
        "canonical": {
            "loop_detection": _loop(
                "canonical", ignore_fields=["/metadata", "/messages/*/id"], cooldown_seconds=30
            ),
        },
        "tail": {
            "loop_detection": _loop(
                "tail", tail_messages=2, action="steer", steer_share=50, escalate={"reject": 5}
            ),
        },
        "as-completion": {
            "loop_detection": _loop("canonical", 4, refuse_as="completion", reject_status=400)
        },
    },
    {
        "turns": {
            "loop_detection": _loop(
                "turns", action="warn", escalate=_LATE, weak_threshold=10, reject_status="auto"
            ),
        },
    },
    {
        "turns-exactly": {
            "loop_detection": _loop(
                "turns",
                action="steer",
                escalate={"reject": 6},
                normalize_results=False,
                incidents=False,
                max_cycle=3,
                ignore_arguments=["why"],
                tools={"think": {"allow": True}, "ba*": {"threshold": 4, "reason": "Read it."}},
                steer_note="{what} {count} {tools} {instead} {reason} {policy} {cause}",
            ),
        },
        "calls": {
            "loop_detection": [
                _loop(
                    "tool_calls",
                    action="steer",
                    escalate={"land": 4, "reject": 5},
                    tools={"think": {"allow": True}},
                ),
                _loop(
                    "tool_calls",
                    4,
                    compare_results=False,
                    reset_on_user_message=False,
                    window_calls=20,
                    refuse_as="completion",
                ),
            ],
        },
    },
    {
        "mcp": {
            "loop_detection": _loop("mcp", tools={"mcp__*": {"allow": True}}, cooldown_seconds=9)
        },
        "mcp-headers": {"loop_detection": _loop("mcp", 4, "throttle", trust_headers=True)},
    },
    {
        "session": {
            "session_limits": {
                "max_steps": 12,
                "max_tool_calls": 10,
                "max_tool_calls_mode": "finish",
                "max_cost_per_session": 0.5,
                "max_calls_per_tool": {"write_file": 2, "get_weather": 0},
                "unknown_model": _PRICE,
                "reject_status": "auto",
                "loop_detection": {"window": 8, "threshold": 5},
                "usage": "request",
                "prices": {"gpt*": _PRICE},
                "circuit_breaker": {"consecutive_blocks": 4, "consecutive_errors": 3},
                "escalate": {
                    "warn": {"max_steps": 4, "max_cost_per_session": 0.1},
                    "steer": {"max_tool_calls": 5},
                },
            },
            "unnamed_limits": {"max_steps": 30, "max_tool_calls": 60, "max_cost_per_session": 5},
            "loop_detection": _loop("turns", 4, "steer"),
        },
    },
    {
        "tree": {
            "session": {"idle_seconds": 300, "max_sessions_per_tenant": 6},
            "session_limits": {
                "max_agents": 3,
                "max_depth": 2,
                "max_concurrent_agents": 2,
                "max_spawns_per_minute": 3,
                "max_steps": 40,
                "max_tool_calls": 15,
                "max_tool_calls_mode": "narrow",
                "max_calls_per_tool": {"bash": 6},
                "escalate": {"steer": {"max_agents": 2}, "warn": {"max_tool_calls": 8}},
            },
        },
    },
    {
        "budgets": {
            "rules": [
                _rule("rate", "token_bucket", _USER, {"rps": 2, "burst": 12}),
                _rule(
                    "tokens",
                    "token_bucket_llm",
                    _USER,
                    {"tokens_per_minute": 60000, "tokens_per_day": 900000},
                ),
                _rule(
                    "cost",
                    "cost_based",
                    _USER,
                    {"budget": 20, "period": "5m", "staged_actions": _STAGES},
                ),
                _rule(
                    "big",
                    "cost_based",
                    ["ip:address"],
                    {
                        "budget": 1,
                        "period": "1h",
                        "cost_key": "usage:dollars",
                        "unknown_model": _PRICE,
                        "staged_actions": _STAGES,
                    },
                    match={"header:x-plan": "big"},
                ),
            ],
            "fallback_limit": _rule(
                "rest", "token_bucket", ["ip:address"], {"tokens_per_second": 1, "burst": 9}
            ),
            "circuit_breaker": {
                "enabled": True,
                "spend_rate_threshold_per_minute": 60,
                "auto_reset_after_minutes": 0.2,
            },
        },
        "used": {
            "rules": [
                _rule(
                    "all",
                    "cost_based",
                    _USER,
                    {
                        "budget": 90000,
                        "period": "1d",
                        "cost_key": "usage:tokens",
                        "staged_actions": [_END],
                    },
                ),
            ],
            "loop_detection": _loop("canonical", 6, "throttle"),
        },
    },
    {
        "live": {"loop_detection": _loop("canonical", 4), "keep_counts": True},
        "canary-1": {
            "loop_detection": _loop("canonical", 3),
            "mode": "shadow",
            "canary_of": "live",
        },
        "ramping": {
            "loop_detection": _loop("turns", 3),
            "enforce_percent": 50,
            "ramp_by": _USER,
            "ramp_seed": "s",
        },
        "mild": {
            "loop_detection": _loop("tail", 3, "land"),
            "enforce_percent": 30,
            "canary_of": "live",
        },
    },
    {
        "shares": {
            "limit_keys": ["jwt:sub"],
            "missing_descriptor": "share",
            "loop_detection": _loop("canonical", 4, "warn"),
        },
        "skips": {
            "limit_keys": ["jwt:sub", "credential"],
            "missing_descriptor": "skip",
            "loop_detection": _loop(),
        },
        "reads": {
            "limit_keys": ["body:/metadata/user_id", "query:team"],
            "uncountable": "reject",
            "loop_detection": _loop("canonical"),
        },
        "shown": {
            "limit_keys": [
                {"first_of": ["jwt:sub", "header:x-user-id", "ip:address"], "name": "caller"}
            ],
            "labels": ["header:x-plan", "jwt:org"],
            "bypass": [{"header": "x-health"}, {"pathPrefix": "/health"}],
            "aliases": {"0123456789abcdef": "nobody"},
            "loop_detection": _loop("canonical", max_inspect_bytes=900),
        },
    },
]


def _make_policies() -> list[dict[str, Any]]:
    made = [
        {
            "id": identity,
            "spec": {
                "selector": {"pathPrefix": "/", "hosts": [f"h{number}"]},
                "limit_keys": _USER,
                **spec,
            },
        }
        for number, room in enumerate(_HOSTS)
        for identity, spec in room.items()
    ]
    for name in PRESETS:
        preset = json.loads(Path(find_preset(name)).read_bytes())
        preset["spec"]["selector"]["hosts"] = [f"h{len(_HOSTS)}"]
        made.append(preset)
    watching = {
        "selector": {"pathPrefix": "/v1/"},
        "mode": "shadow",
        "limit_keys": _USER,
        "loop_detection": _loop("turns", 5),
    }
    return [*made, {"id": "everywhere", "spec": watching}]


_KILLS = [
    {
        "scope_key": "header:x-plan",
        "scope_value": "killed",
        "reason": "gone",
        "expires_at": "2099-01-01T00:00:00Z",
    }
]


# --- exchanges

_Headers = list[tuple[str, str]]


class Traffic:
    def __init__(self, random: Random) -> None:
        self._random = random
        self._agents = [self._make_agent(f"a{number}") for number in range(14)]

    def _make_agent(self, name: str) -> tuple[Agent, str, _Headers]:
        random = self._random
        agent = Agent(random, name)
        run = f"{name}-{random.randrange(10**6)}"
        named: _Headers = [(key.replace("_", "-"), value) for key, value in agent.sent.items()]
        if random.random() < 0.3:
            named += [
                ("x-claude-code-session-id", f"run {run[:2]}"),
                ("x-claude-code-agent-id", run),
            ]
        elif random.random() < 0.4:
            named.append(("x-session-id", run))
        some = [
            ("x-plan", random.choice(["big", "small", "killed"])),
            ("authorization", f"Bearer key-{name}"),
            ("x-api-key", name),
        ]
        return (
            agent,
            f"h{random.randrange(len(_HOSTS) + 1)}",
            [*named, *(pair for pair in some if random.random() < 0.3)],
        )

    def make(self) -> tuple[str, list[bytes], bool]:
        """The next exchange: place, messages, and whether each waits for the answer before it."""
        random, place = self._random, self._random.randrange(len(self._agents))
        if random.random() < 0.02:
            self._agents[place] = self._make_agent(f"a{place}")
        agent, host, named = self._agents[place]
        if random.random() < 0.75:
            agent.step()
        path, data = (
            PATHS[agent.shape],
            json.dumps(agent.write() | {"stream": random.random() < 0.3}).encode(),
        )
        odd = random.random()
        if odd < 0.05:
            data = Writer(random).bytes()
        elif odd < 0.08:
            data = random.choice(
                [
                    b"",
                    b"{",
                    b"\xff" * 30,
                    b'{"messages": 5}',
                    data[:-5],
                    random.choice(list(BODIES.values())),
                ]
            )
        elif odd < 0.12 or host == "h4":
            call = {
                "name": random.choice(["bash", "mcp__x__list"]),
                "arguments": {"a": random.randrange(2)},
            }
            method = random.choice(["tools/call", "tools/call", "tools/list", "ping"])
            path, data = (
                "/mcp",
                json.dumps(
                    {"jsonrpc": "2.0", "id": random.randrange(9), "method": method, "params": call}
                ).encode(),
            )
            named = [*named, ("mcp-method", method), ("mcp-session-id", "m")]
        if random.random() < 0.1:
            coding, pack = random.choice(
                [("gzip", gzip.compress), ("br", brotli.compress), ("deflate", zlib.compress)]
            )
            named, data = [*named, ("content-encoding", coding)], pack(data)
        path += random.choice(["", "", "", "?team=a", "?team=b&x=1"])
        mode = random.choice(
            [
                "BUFFERED",
                "BUFFERED",
                "BUFFERED",
                "FULL_DUPLEX_STREAMED",
                "STREAMED",
                "BUFFERED_PARTIAL",
                "NONE",
            ]
        )
        return (
            f"{host}{path} {mode}",
            self._frame(host, path, named, data, mode),
            mode != "FULL_DUPLEX_STREAMED",
        )

    def _frame(self, host: str, path: str, named: _Headers, data: bytes, mode: str) -> list[bytes]:
        random = self._random
        head = ProcessingRequest()
        head.request_headers.end_of_stream = bare = random.random() < 0.02
        method = "GET" if bare else "POST"
        pseudo: _Headers = [
            (":method", method),
            (":path", path),
            (":authority", host),
            ("content-type", "application/json"),
        ]
        for name, value in [*pseudo, *named]:
            head.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        if random.random() < 0.9:
            # Proto3 enums are open
            head.protocol_config.request_body_mode = MODES[mode]  # type: ignore[assignment]
        if random.random() < 0.9:
            head.attributes[ATTRIBUTES].update(
                {"source.address": f"10.0.0.{random.randrange(3)}:99", "xds.route_name": "r"}
            )
        if random.random() < 0.5:
            claims = {"payload": {"sub": random.choice(["ann", "bob"]), "org": "o"}}
            head.metadata_context.filter_metadata["envoy.filters.http.jwt_authn"].update(claims)
        if bare or mode == "NONE":
            return [head.SerializeToString()]
        pieces = [data]
        if mode.endswith("STREAMED") and data:
            size = max(1, len(data) // random.choice([1, 2, 5]))
            pieces = [data[start : start + size] for start in range(0, len(data), size)]
        messages = [head]
        for number, piece in enumerate(pieces, 1):
            messages.append(ProcessingRequest())
            messages[-1].request_body.body = piece
            messages[-1].request_body.end_of_stream = number == len(pieces)
        return [message.SerializeToString() for message in messages]

    def make_entry(self) -> dict[str, Any]:
        """An access log entry, without Loopguard's metadata."""
        random = self._random
        told = {
            "input": random.randrange(5_000),
            "output": random.randrange(900),
            "cache_read": random.randrange(50),
        }
        return {
            "status": random.choice([200, 200, 200, 200, 429, 500, 503, 0]),
            "told": told if random.random() < 0.7 else None,
            "took": (0.1, random.choice([0.5, 20])),
            "upstream_remote_reset": random.random() < 0.05,
        }

    def make_order(self) -> dict[str, Any]:
        random = self._random
        kind = random.choice(["block", "allow", "kill", "grant", "release"])
        target: dict[str, Any] = random.choice(
            [
                {"caller": {"x-user-id": random.choice(["ann", "bob"])}},
                {"session": {"x-session-id": f"run a{random.randrange(14)}"}},
            ]
        )
        more = {"grant": {"steps": 5, "tool_calls": 3, "cost": 0.5, "key": "k"}, "release": {}}.get(
            kind, {"seconds": 90_000}
        )
        policy = random.choice(["session", "turns", "canonical", "budgets"])
        return {"kind": kind, "policy": policy, "reason": "why", **target, **more}


# --- the two versions


class Side:
    def __init__(
        self, python: str, folder: Path, environment: Mapping[str, str], *flags: str
    ) -> None:
        folder.mkdir()
        self._log = folder / "log"
        address = f"unix:{folder}/s"
        command = [
            python,
            "-P",
            "-c",
            _MAIN,
            "serve",
            "--listen",
            address,
            "--admin",
            "127.0.0.1:0",
            *flags,
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=folder, env={**os.environ, **environment}
            )
        self._channel = grpc.aio.insecure_channel(address)
        self._process_call = self._channel.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
        )
        self._tell = self._channel.stream_unary(
            "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
        )
        self._admin = self._wait()

    def _wait(self) -> int:
        for _ in range(600):
            if found := re.search(
                r"serving listen=\S+ admin=\S+?:(\d+) ", told := self._log.read_text()
            ):
                print(f"{self._log.parent.name}: {told.splitlines()[0]}")
                return int(found[1])
            if self._process.poll() is not None:
                break
            time.sleep(0.05)
        raise SystemExit(f"a server does not start: {self._log.read_text()[-3000:]}")

    async def send(self, messages: list[bytes], *, waits: bool) -> list[bytes]:
        """All answers to an exchange, or an error."""
        call, answers, said = self._process_call(timeout=20), [], asyncio.Event()

        async def read() -> None:
            try:
                while (answer := await call.read()) is not grpc.aio.EOF:
                    answers.append(answer)
                    if _is_last(answer, waits=waits):
                        said.set()
            except grpc.aio.AioRpcError as error:
                if (
                    error.code() is not grpc.StatusCode.INTERNAL
                ):  # grpcio's own error for a stream that is reset after its end
                    answers.append(_ERROR + f"{error.code()} {error.details()}".encode())
            said.set()

        reader = asyncio.create_task(read())
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the server needs no more
            for number, message in enumerate(messages, 1):
                said.clear()
                await call.write(message)
                with suppress(
                    TimeoutError
                ):  # a body that is streamed may be refused by its headers
                    async with asyncio.timeout(
                        20 if waits or number == len(messages) else 0.008 if number == 1 else 0
                    ):
                        await said.wait()
                if reader.done() or (said.is_set() and not waits):
                    break
            await call.done_writing()
        await reader
        return answers

    async def tell(self, answers: list[bytes], entry: Mapping[str, Any]) -> None:
        message = StreamAccessLogsMessage()
        add_entry(message, **entry, sessions=[])
        metadata = message.http_logs.log_entry[0].common_properties.metadata.filter_metadata
        metadata["loopguard"].Clear()
        for answer in answers:
            if answer.startswith(_ERROR):
                continue
            if "loopguard" in (said := ProcessingResponse.FromString(answer).dynamic_metadata):
                # A Struct
                metadata["loopguard"].MergeFrom(said["loopguard"])  # type: ignore[arg-type]
        await self._tell(iter([message.SerializeToString()]), timeout=20)

    def ask(self, path: str, order: object = None, method: str = "GET") -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._admin, timeout=20)
        body = None if order is None else json.dumps(order)
        headers = {"authorization": f"Bearer {_TOKEN}", "content-type": "application/json"}
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def _is_last(answer: bytes, *, waits: bool) -> bool:
    """Whether Envoy sends more after this answer: it grants no time, or it ends a streamed body."""
    said = ProcessingResponse.FromString(answer)
    if waits or said.HasField("immediate_response"):
        return not said.HasField("override_message_timeout")
    return said.request_body.response.body_mutation.streamed_response.end_of_stream


# --- comparing


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, str]]:  # noqa: ANN401  # JSON
    if isinstance(value, dict) and isinstance(value.get("header"), dict):
        yield from _flatten(value["header"].get("rawValue"), f"{path}.{value['header'].get('key')}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _flatten(item, f"{path}.{key}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _flatten(item, f"{path}[{number}]")
    else:
        yield path, repr(value)


def _read_answers(answers: list[bytes]) -> dict[str, str]:
    read: dict[str, str] = {}
    for number, answer in enumerate(answers):
        failed = answer.startswith(_ERROR)
        message: dict[str, Any] = (
            {"error": answer.decode()}
            if failed
            else MessageToDict(ProcessingResponse.FromString(answer))
        )
        metadata = message.pop("dynamicMetadata", {})
        read |= {f"metadata:{path}": value for path, value in _flatten(metadata, f"[{number}]")}
        read |= {f"answer:{path}": value for path, value in _flatten(message, f"[{number}]")}
    return read


def _read_metrics(text: str) -> dict[str, str]:
    text = re.sub(r"127\.0\.0\.1:\d+", "valkey", text)
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {f"metric:{name}": value for name, _, value in lines}


def _read_page(path: str, answer: tuple[int, str]) -> dict[str, str]:
    status, text = answer
    try:
        return {
            f"admin:{path} {status}{place}": value for place, value in _flatten(json.loads(text))
        }
    except ValueError:
        return {f"admin:{path} {status}": text}


def _read_keys(client: Any) -> dict[str, str]:  # noqa: ANN401  # redis-py's own types say little
    keys = sorted(client.scan_iter(count=1_000))
    with client.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.type(key)
        kinds = pipe.execute()
        readers = {b"string": pipe.get, b"hash": pipe.hgetall, b"set": pipe.smembers}
        for key, kind in zip(keys, kinds, strict=True):
            readers[kind](key) if kind in readers else pipe.dump(key)
        values = pipe.execute(raise_on_error=False)
    shown = [repr(sorted(value.items()) if isinstance(value, dict) else value) for value in values]
    return {f"key:{key!r}": value for key, value in zip(keys, shown, strict=True)}


class Differences:
    def __init__(self, ignored: list[str]) -> None:
        self._ignored = re.compile("|".join([_MASKED, *ignored]))
        self.found: dict[str, list[Any]] = {}

    def compare(self, about: str, before: Mapping[str, str], after: Mapping[str, str]) -> None:
        for name in before.keys() | after.keys() if before != after else ():
            if before.get(name) != after.get(name) and not self._ignored.match(name):
                kind = re.sub(
                    r"\[\d+\]",
                    "",
                    re.sub(r"\{.*|[0-9a-f]{8,}|\d{4,}", "*", name) if name[0] in "mk" else name,
                )
                shown = {
                    "at": f"{name} {about}",
                    "before": before.get(name, "-"),
                    "after": after.get(name, "-"),
                }
                example = [f"  {what}: {text[:600]}" for what, text in shown.items()]
                self.found.setdefault(kind, [0, *example])[0] += 1

    def print(self) -> None:
        for kind, (count, *example) in sorted(self.found.items()):
            print(f"{kind}: {count}", *example, sep="\n")


# --- running


def _write_files(options: argparse.Namespace, folder: Path) -> list[str]:
    (folder / "clock").write_bytes(_NOON.to_bytes(8, "little"))
    (folder / "sitecustomize.py").write_text(_CLOCK)
    (folder / "key").write_text("k" * 64)
    (folder / "tokens").write_text(_TOKEN)
    (folder / "tokens").chmod(0o600)
    (folder / "clock.c").write_text(_CLOCK_C)
    policy = folder / "policy.json"
    policy.write_text(
        json.dumps({"bundle_version": 1, "policies": options.policies, "kill_switches": _KILLS})
    )
    flags = [
        "--policy",
        str(policy),
        "--hash-key-file",
        f"{folder}/key",
        "--admin-token-file",
        f"{folder}/tokens",
    ]
    return [*flags, "--store-timeout", "5", "--drain-delay", "0", *options.flag]


# Step by step
async def _run(options: argparse.Namespace, store: str, folder: Path) -> Differences:  # noqa: C901
    """Send everything to both versions, on one kind of store."""
    differences, flags, clock = (
        Differences(options.ignore),
        _write_files(options, folder),
        folder / "clock",
    )
    environment = {
        "PYTHONPATH": str(folder),
        "DIFFERENTIAL_CLOCK": str(clock),
        "PYTHONHASHSEED": "0",
    }
    clients: list[Any] = []
    with ExitStack() as stack, clock.open("r+b") as file:
        now = mmap.mmap(file.fileno(), 8)
        sides = []
        for name, python in (("before", options.before), ("after", options.after)):
            more = []
            if store == "valkey":
                clients.append(stack.enter_context(_serve_valkey(folder, clock)))
                more = [
                    "--store",
                    f"redis://127.0.0.1:{clients[-1].connection_pool.connection_kwargs['port']}",
                ]
            sides.append(Side(python, folder / name, environment, *flags, *more))
            stack.callback(sides[-1].stop)
        random, moment, answered, given = Random(f"{options.seed} {store}"), _NOON, 0, ""
        for batch in range(-(-options.exchanges // _BATCH)):
            traffic = Traffic(Random(f"{options.seed} {batch}"))
            for number in range(min(_BATCH, options.exchanges - batch * _BATCH)):
                if number % 10 == 0:
                    await asyncio.sleep(
                        0.04 if clients else 0
                    )  # for what servers write after their answers
                    moment += random.choice([50, 200, 1_000, 3_000]) * 10**6
                    now[:] = moment.to_bytes(8, "little")
                where, messages, waits = traffic.make()
                answers = await asyncio.gather(
                    *(side.send(messages, waits=waits) for side in sides)
                )
                answered += len(answers[0])
                if answers[0] != answers[1]:
                    about = f"{where} {messages[1] if messages[1:] else b''!r}"
                    read = [_read_answers(said) for said in answers]
                    if read[0] == read[1]:
                        read = [{"answer:bytes": repr(said)} for said in answers]
                    differences.compare(about, *read)
                if random.random() < 0.5:
                    entry = traffic.make_entry()
                    await asyncio.gather(
                        *(side.tell(said, entry) for side, said in zip(sides, answers, strict=True))
                    )
                await asyncio.sleep(0.001 if clients else 0)
                if random.random() < 0.005:
                    for side in sides if given else ():
                        side.ask(f"/overrides/{given}", method="DELETE")
                    order = traffic.make_order()
                    replies = [side.ask("/overrides", order, "POST") for side in sides]
                    given = json.loads(replies[0][1]).get("override", "")
                    differences.compare(
                        json.dumps(order), *(_read_page("order", reply) for reply in replies)
                    )
            for page in _PAGES:
                differences.compare(
                    f"batch {batch}", *(_read_page(page, side.ask(page)) for side in sides)
                )
            differences.compare(
                f"batch {batch}", *(_read_metrics(side.ask("/metrics")[1]) for side in sides)
            )
            if clients:
                differences.compare(f"batch {batch}", *map(_read_keys, clients))
            moment += 30 * 10**9
    print(
        f"{store}: {options.exchanges} exchanges, {answered} answers, {len(differences.found)} "
        "kinds of differences"
    )
    return differences


@contextmanager
def _serve_valkey(folder: Path, clock: Path) -> Iterator[Any]:
    library = folder / "clock.so"
    if not library.exists():
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O2", "-o", library, folder / "clock.c"], check=True
        )
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        SERVER,
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--appendonly",
        "no",
    ]
    environment = {**os.environ, "LD_PRELOAD": str(library), "DIFFERENTIAL_CLOCK": str(clock)}
    with (folder / f"valkey-{port}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment)
    try:
        client = redis.Redis(port=port)
        for _ in range(200):
            with suppress(redis.ConnectionError):
                client.ping()
                break
            time.sleep(0.05)
        yield client
    finally:
        process.kill()
        process.wait()


def _accepts(python: str, policies: list[dict[str, Any]], folder: Path) -> str:
    file = folder / "tried.json"
    file.write_text(
        json.dumps({"bundle_version": 1, "policies": policies, "kill_switches": _KILLS})
    )
    command = [python, "-P", "-c", _MAIN, "validate", str(file)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr + done.stdout


def _select_policies(pythons: list[str], folder: Path) -> list[dict[str, Any]]:
    policies = _make_policies()
    for python in pythons:
        if _accepts(python, policies, folder):
            for policy in list(policies):
                if said := _accepts(python, [policy], folder):
                    print(f"without policy {policy['id']}, which {python} refuses: {said[-600:]}")
                    policies.remove(policy)
    return policies


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares how two versions answer.")
    parser.add_argument("--before", required=True, metavar="PYTHON")
    parser.add_argument("--after", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--exchanges", type=int, default=20_000)
    parser.add_argument("--store", choices=["memory", "valkey", "both"], default="both")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="PATTERN",
        help="kinds that may differ; repeatable",
    )
    parser.add_argument(
        "--flag",
        action="append",
        default=[],
        help="another flag of serve; repeatable: --flag=--record",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="differential") as name:
        folder = Path(name)
        options.policies = _select_policies([options.before, options.after], folder)
        stores = ["memory", "valkey"] if options.store == "both" else [options.store]
        for store in stores:
            (folder / store).mkdir()
        with ProcessPoolExecutor(len(stores), get_context("spawn")) as pool:
            found = list(
                pool.map(
                    _start, [options] * len(stores), stores, [folder / store for store in stores]
                )
            )
    for differences in found:
        differences.print()
    return int(any(differences.found for differences in found))


def _start(options: argparse.Namespace, store: str, folder: Path) -> Differences:
    return asyncio.run(_run(options, store, folder))


if __name__ == "__main__":
    sys.exit(main())
