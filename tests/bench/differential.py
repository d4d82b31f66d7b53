"""Compares two versions of Loopguard: the same exchanges to both, and every answer byte for byte.

    .venv/bin/python -m tests.bench.differential --before /path/to/other/venv/bin/python

Both run `loopguard serve` as a process of their own and are asked through their doors alone: ext_proc and the access log over
gRPC, the admin port, and the keys in Valkey. What is sent is made once, from a seed, and sent to one after the other. Clock,
random bytes and the key of hashes are the same for both (`_SITE`), so that two runs of one version do not differ. With Valkey,
whose own clock cannot be set, times in texts are masked, and keys are compared by name and type.

It goes when the rebuild that it watches is over.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import grpc
import httpx
import redis
from google.protobuf.json_format import MessageToDict

from extproc.pb.als_pb2 import StreamAccessLogsMessage
from extproc.pb.external_processor_pb2 import HttpBody, ProcessingRequest, ProcessingResponse
from tests.support.budget_policies import REJECT, rule
from tests.support.documents import bundle, policy
from tests.support.edit_fuzzer import Writer
from tests.support.messages import body, headers
from tests.support.random_agents import PATHS, Agent
from tests.support.servers import server

_PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
_LOG = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
_PAGES = ("/loops", "/sessions", "/budgets", "/coverage", "/policies", "/overrides", "/canary")
_START = 1_795_694_400_000_000_000
_MOST_SHOWN = 600
_TIMED = re.compile(r"(_seconds|_bucket|_created|python_|process_|store_batch)")
_MASKS = [
    (re.compile(rb"within (a second|[0-9.]+ [a-z]+)"), b"within T"),
    (re.compile(rb"(after|for|in) [0-9.]+ (seconds?|minutes?|hours?)"), b"after T"),
    (re.compile(rb'("cooldown_seconds": ?)[0-9.]+'), rb"\1T"),
]

_SITE = """
import hashlib, mmap, os, struct, sys, time
_file = open(os.environ["DIFFERENTIAL_CLOCK"], "r+b")
_map = mmap.mmap(_file.fileno(), 8)
_now = lambda: struct.unpack("<q", _map[:8])[0]
time.time_ns = time.monotonic_ns = time.perf_counter_ns = _now
time.time = time.monotonic = time.perf_counter = lambda: _now() / 1e9
time.thread_time = time.process_time = lambda: 0.0
_counts = {}
def urandom(size):
    _counts[size] = number = _counts.get(size, 0) + 1
    return hashlib.shake_256(b"%d %d" % (size, number)).digest(size)
os.urandom = urandom
os.getpid = lambda: 4242
import random
random._urandom = urandom
"""
"""Run by each server's Python before anything else."""


class Side(NamedTuple):
    """One running version."""

    name: str
    process: subprocess.Popen[bytes]
    ask: Any
    log: Any
    admin: httpx.Client
    store: redis.Redis | None


class Differences:
    """What differed, by kind, with the first example of each."""

    def __init__(self, ignored: Sequence[str]) -> None:
        self._ignored = [re.compile(pattern) for pattern in ignored]
        self.groups: dict[str, tuple[int, str]] = {}

    def add(self, kind: str, example: str) -> None:
        """Note one."""
        if not any(pattern.search(kind) for pattern in self._ignored):
            count, first = self.groups.get(kind, (0, example))
            self.groups[kind] = count + 1, first

    def compare(self, kind: str, what: str, one: Any, other: Any) -> None:  # noqa: ANN401  # JSON
        """Note the places at which two documents differ."""
        if isinstance(one, dict) and isinstance(other, dict):
            for key in one.keys() | other.keys():
                self.compare(f"{kind}/{key}", what, one.get(key), other.get(key))
        elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
            for left, right in zip(one, other, strict=True):
                self.compare(f"{kind}/*", what, left, right)
        elif one != other:
            self.add(kind, f"{what}\n    before: {one!r:.{_MOST_SHOWN}}\n    after:  {other!r:.{_MOST_SHOWN}}")


# --- what is sent

USER = {"limit_keys": ["header:x-user-id"]}
TURNS: dict[str, Any] = {"similarity": "turns", "session": {}, **USER}
PRICES = {"unknown_model": {"input": 5, "output": 15}}


def _limited(name: str, mode: str = "enforce", session: dict[str, Any] | None = None, **limits: object) -> dict[str, Any]:
    spec = {"selector": {"pathPrefix": "/"}, "mode": mode, **USER, "session_limits": {**PRICES, **limits}}
    return {"id": name, "spec": spec | ({} if session is None else {"session": session})}


def _budget(name: str, *rules: dict[str, Any], **spec: object) -> dict[str, Any]:
    return {"id": name, "spec": {"selector": {"pathPrefix": "/"}, "rules": [*rules], **spec}}


def list_bundles(presets: Path) -> dict[str, dict[str, Any]]:
    """Bundles by name; each is served for a part of the exchanges."""
    every = {"pathPrefix": "/"}
    own = [json.loads(file.read_text()) for file in sorted(presets.glob("*.json"))]
    named = {each["id"]: each for document in own for each in document.get("policies", [document])}
    return {
        "presets": bundle(*named.values()),
        "detectors": bundle(
            policy("exact", every, **USER, action="warn", escalate={"throttle": 4}, max_delay_ms=1),
            policy("log", every, window_type="sliding_log", count_refused=False, cooldown_seconds=5, action="warn", **USER),
            policy("fixed", every, mode="shadow", window_type="fixed", limit_keys=["query:user", "ip:address"]),
            policy("canonical", every, similarity="canonical", mode="shadow", ignore_keys=["/metadata"], **USER),
            policy("tail", every, similarity="tail", mode="shadow", messages=2, **USER),
            policy("calls", every, similarity="tool_calls", mode="shadow", tools={"bash": {"threshold": 2}}, **USER),
            policy("mcp", every, similarity="mcp", mode="shadow", missing_descriptor="share", **USER),
            policy("turns", every, **TURNS, action="steer", escalate={"land": 5, "reject": 7}, weak_threshold=9),
            policy("strict", every, **TURNS, mode="shadow", canary_of="turns", threshold_identical_requests=2),
            policy("share", every, **TURNS, action="warn", enforce_percent=50, cooldown_seconds=20),
            policy("skip", every, missing_descriptor="skip", mode="shadow", limit_keys=["jwt:org", "header:x-run"]),
            policy("bodiless", every, body="ignore", action="warn", threshold_identical_requests=9, **USER),
        ),
        "sessions": bundle(
            _limited("steps", "shadow", max_steps=9, loop_detection={"window": 6, "threshold": 3}),
            _limited("money", max_cost_per_session=0.05, circuit_breaker={"consecutive_errors": 2, "consecutive_blocks": 9}),
            _limited("tools", max_tool_calls=14, max_tool_calls_mode="narrow", max_calls_per_tool={"bash": 6, "read_file": 3}),
            _limited("finish", "shadow", {"keys": ["header:x-run"]}, max_tool_calls=6, max_tool_calls_mode="finish"),
            _limited("agents", "shadow", max_agents=3, max_depth=2, max_concurrent_agents=2),
            policy("turns", every, **TURNS, action="warn"),
        ),
        "budgets": bundle(
            _budget("requests", rule("token_bucket", "requests", ["header:x-user-id"], tokens_per_second=2, burst=9), mode="shadow"),
            _budget("tokens", rule("token_bucket_llm", "tokens", ["header:x-user-id"], tokens_per_minute=90_000)),
            _budget(
                "day",
                rule("cost_based", "day", ["header:x-user-id"], budget=900, period="1d", staged_actions=REJECT, default_cost=1),
                circuit_breaker={"enabled": True, "spend_rate_threshold_per_minute": 500, "auto_reset_after_minutes": 1},
                mode="shadow",
            ),
            policy("loops", every, **USER, threshold_identical_requests=4),
        ),
    }


def make_exchanges(random: Random, count: int) -> Iterator[tuple[str, list[ProcessingRequest]]]:
    """What is sent to a path: agents of every API that work side by side, fuzzed bodies, repeated and odd requests."""
    agents = [Agent(random, f"{random.randrange(10**6)}") for _ in range(12)]
    for number in range(count):
        kind = random.random()
        more: dict[str, Any] = {"x_user_id": random.choice(["ann", "bob", "eve"])}
        if kind < 0.6:
            agent = random.choice(agents)
            agent.step()
            path, data, more = PATHS[agent.shape], json.dumps(agent.write()).encode(), dict(agent.sent)
            if number % 97 == 0:
                agents[agents.index(agent)] = Agent(random, f"{random.randrange(10**6)}")
        elif kind < 0.75:
            path, data = random.choice([*PATHS.values()]), Writer(Random(random.randrange(500))).bytes()
        elif kind < 0.85:
            path, data = f"/v1/x?user={random.randrange(3)}&b=%7C+x", json.dumps({"n": random.randrange(4)}).encode()
        else:
            path, data = random.choice(["/mcp", "/../v1//messages", "/v1/files"]), random.choice([b"", b"{", b"\xff", _CALL])
        more |= {"content_type": "application/json"}
        if random.random() < 0.1:
            more |= {"authorization": f"Bearer sk-{random.randrange(3)}"}
        if random.random() < 0.1:
            more |= {"x_claude_code_agent_id": f"a{random.randrange(6)}", "x_claude_code_session_id": f"s{random.randrange(3)}"}
        mode = random.choice(["BUFFERED", "BUFFERED", "BUFFERED_PARTIAL"])
        head = headers(path, mode=mode, end=not data, attributes={"source.address": "10.0.0.1:5", "xds.route_name": "r"}, **more)
        yield path, [head, *([body(data)] if data else [])]


_CALL = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "t", "arguments": {}}}).encode()

_ORDERS: list[dict[str, Any]] = [
    {"kind": "block", "caller": {"x-user-id": "eve"}, "seconds": 60, "reason": "test"},
    {"kind": "allow", "caller": {"x-user-id": "bob"}, "seconds": 60, "reason": "test"},
    {"kind": "release", "caller": {"x-user-id": "ann"}, "seconds": 60, "reason": "test"},
]


def write_entry(random: Random, answer: bytes) -> bytes:
    """An access log entry that settles what an answer's metadata names; empty if it names nothing."""
    metadata = ProcessingResponse.FromString(answer).dynamic_metadata
    if "loopguard" not in metadata.fields or "sessions" not in metadata.fields["loopguard"].struct_value.fields:
        return b""
    message = StreamAccessLogsMessage()
    entry = message.http_logs.log_entry.add()
    known = entry.common_properties.metadata.filter_metadata
    known["loopguard"].update({"sessions": metadata.fields["loopguard"].struct_value.fields["sessions"].string_value})
    if random.random() < 0.7:
        known["loopguard.usage"].update({"input": random.randrange(9_000), "output": random.randrange(900), "model": "gpt-4o"})
    entry.response.response_code.value = random.choice([200, 200, 200, 503])
    entry.request.request_body_bytes, entry.response.response_body_bytes = 4_000, 800
    return message.SerializeToString()


# --- the two servers


def start(name: str, python: str, folder: Path, policies: Path, store: str, stack: ExitStack) -> Side:
    """Serve with one version; raises RuntimeError if it does not."""
    own = folder / name
    own.mkdir()
    socket, admin = own / "grpc.sock", own / "admin.sock"
    flags = ["--policy", str(policies), "--listen", f"unix:{socket}", "--admin-socket", str(admin), "--store", store]
    more = ["--admin", "127.0.0.1:0", "--record", "--hash-key-file", str(folder / "key"), "--log-level", "error"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder / "site"), "DIFFERENTIAL_CLOCK": str(folder / "clock")}
    process = subprocess.Popen([python, "-m", "extproc.cli", "serve", *flags, *more], cwd=own, env=environment)
    stack.callback(lambda: (process.terminate(), process.wait()))
    client = httpx.Client(transport=httpx.HTTPTransport(uds=str(admin)), base_url="http://localhost")
    for _ in range(300):
        if process.poll() is not None:
            raise RuntimeError(f"{name} ended with {process.returncode}")
        try:
            if client.get("/readyz").status_code == 200:  # OK
                break
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    channel = grpc.insecure_channel(f"unix:{socket}")
    stack.callback(channel.close)
    parts = re.fullmatch(r"redis://([^:]+):(\d+)/?(\d*)", store)
    keys = redis.Redis(parts[1], int(parts[2]), int(parts[3] or 0)) if parts else None
    return Side(name, process, channel.stream_stream(_PROCESS), channel.stream_unary(_LOG), client, keys)


def find_package(python: str, folder: Path) -> str:
    """Where an interpreter has extproc."""
    code = "import extproc; print(extproc.__file__)"
    return subprocess.run([python, "-P", "-c", code], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def validates(python: str, document: dict[str, Any], folder: Path) -> bool:
    """Whether a version loads a bundle."""
    file = folder / "one.json"
    file.write_text(json.dumps(document))
    done = subprocess.run(
        [python, "-P", "-m", "extproc.cli", "validate", str(file)], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(f"  not loaded by {python}: {done.stderr.strip()[:300]}")
    return done.returncode == 0


def run_bundle(  # what is compared
    name: str, document: dict[str, Any], pythons: Sequence[str], count: int, seed: int, *, shared: bool, found: Differences
) -> int:
    """Send exchanges under one bundle; returns the number of compared answers."""
    random = Random(f"{seed} {name}")
    compared = 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lg")))
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(_SITE)
        (folder / "key").write_bytes(bytes(range(32)))
        (folder / "clock").write_bytes(_START.to_bytes(8, "little"))
        (folder / "policies.json").write_text(json.dumps(document))
        for python in pythons:
            if not validates(python, document, folder):
                return 0
        clock = mmap.mmap(stack.enter_context((folder / "clock").open("r+b")).fileno(), 8)
        stores = ["memory://", "memory://"]
        if shared:
            address = stack.enter_context(server()).address
            stores = [f"redis://{address}/0", f"redis://{address}/1"]
        sides = [
            start(side, python, folder, folder / "policies.json", store, stack)
            for side, python, store in zip(("before", "after"), pythons, stores, strict=True)
        ]
        now = _START
        for number, (path, messages) in enumerate(make_exchanges(random, count)):
            now += random.choice([0, 10**8, 10**9, 10**9, 7 * 10**9])
            clock[:8] = now.to_bytes(8, "little")
            sent = [message.SerializeToString() for message in messages]
            answers = [[bytes(part) for part in side.ask(iter(sent), timeout=30)] for side in sides]
            compared += len(answers[0])
            if mask(answers[0], shared=shared) != mask(answers[1], shared=shared):
                tell(f"{name}: exchange {number} to {path}", messages, answers, found, shared=shared)
            entry = write_entry(random, answers[0][-1]) if answers[0] else b""
            if entry and random.random() < 0.8:
                for side in sides:
                    side.log(iter([entry]), timeout=30)
            if number % 997 == 500:  # now and then
                order = random.choice(_ORDERS)
                made = [side.admin.post("/overrides", json=order) for side in sides]
                found.compare("order", str(order), made[0].status_code, made[1].status_code)
        compare_pages(name, sides, found, shared=shared)
    return compared


def mask(answers: Sequence[bytes], *, shared: bool) -> list[bytes]:
    """Answers without what depends on the store's clock."""
    if not shared:
        return list(answers)
    masked = []
    for answer in answers:
        text = ProcessingResponse.FromString(answer).SerializeToString(deterministic=True)
        for pattern, by in _MASKS:
            text = pattern.sub(by, text)
        masked.append(text)
    return masked


def tell(
    what: str, messages: Sequence[ProcessingRequest], answers: Sequence[Sequence[bytes]], found: Differences, *, shared: bool
) -> None:
    """Note where the answers to an exchange differ."""
    if len(answers[0]) != len(answers[1]):
        found.add("answers", f"{what}: {len(answers[0])} before, {len(answers[1])} after")
        return
    shown = [message.request_body.body[:300] for message in messages if message.HasField("request_body")]
    what = f"{what}: {shown or [HttpBody()]}"
    for one, other in zip(*answers, strict=True):
        before, after = (MessageToDict(ProcessingResponse.FromString(each)) for each in (one, other))
        if before != after:
            if not shared or mask([one], shared=True) != mask([other], shared=True):
                found.compare("answer", what, before, after)
        elif one != other:
            found.add("answer, bytes alone", what)


def compare_pages(name: str, sides: Sequence[Side], found: Differences, *, shared: bool) -> None:
    """Compare metrics, pages of the admin port, and keys."""
    for page in _PAGES:
        got = [side.admin.get(page) for side in sides]
        texts = [re.sub(r'"(loaded|since|until|at|ends|first_seen|last_seen)": ?"[^"]*"', "", answer.text) for answer in got]
        if [answer.status_code for answer in got] != [200, 200] or not (shared or texts[0] == texts[1]):
            if all(answer.status_code == 200 for answer in got):  # OK
                found.compare(page, name, *[json.loads(text) if shared else answer.json() for text, answer in zip(texts, got, strict=True)])
            elif got[0].status_code != got[1].status_code:
                found.add(page, f"{name}: {[answer.status_code for answer in got]}")
    lines = [
        dict(line.rsplit(" ", 1) for line in side.admin.get("/metrics").text.splitlines() if not line.startswith("#"))
        for side in sides
    ]
    for metric in sorted(lines[0].keys() | lines[1].keys()):
        if not _TIMED.search(metric) and lines[0].get(metric) != lines[1].get(metric):
            found.add(f"metric {metric.partition('{')[0]}", f"{name}: {metric}: {lines[0].get(metric)}, {lines[1].get(metric)}")
    if sides[0].store is not None and sides[1].store is not None:
        keys = [{key: side.store.type(key) for key in side.store.scan_iter(count=1000)} for side in sides if side.store is not None]
        for key in keys[0].keys() ^ keys[1].keys():
            found.add(f"key {key.decode(errors='replace').partition(':')[0]}", f"{name}: {key!r} only {'before' if key in keys[0] else 'after'}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and print what differs; returns 1 if anything does."""
    parser = argparse.ArgumentParser(prog="tests.bench.differential", description=__doc__)
    parser.add_argument("--before", required=True, metavar="PYTHON", help="interpreter of the other version")
    parser.add_argument("--after", default=sys.executable, metavar="PYTHON", help="default: this one")
    parser.add_argument("--exchanges", type=int, default=20_000, help="in all (default 20000)")
    parser.add_argument("--store", choices=("memory", "valkey", "both"), default="both")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ignore", action="append", default=[], metavar="REGEX", help="kinds that are expected; repeatable")
    options = parser.parse_args(arguments)
    pythons = options.before, options.after
    stores = [False, True] if options.store == "both" else [options.store == "valkey"]
    found = Differences(options.ignore)
    with tempfile.TemporaryDirectory() as folder:
        packages = [Path(find_package(python, Path(folder))) for python in pythons]
    print("before:", packages[0], "\nafter: ", packages[1])
    bundles = list_bundles(packages[0].parent / "policy" / "presets")
    for shared in stores:
        for name, document in bundles.items():
            began, count = time.monotonic(), options.exchanges // (len(stores) * len(bundles))
            compared = run_bundle(name, document, pythons, count, options.seed, shared=shared, found=found)
            print(f"{'valkey' if shared else 'memory'} {name}: {compared} answers, {time.monotonic() - began:.0f} s", flush=True)
    for kind, (number, example) in sorted(found.groups.items()):
        print(f"\n{kind}: {number}\n  {example}")
    print(f"\n{len(found.groups)} kinds of differences")
    return int(bool(found.groups))


if __name__ == "__main__":
    sys.exit(main())
