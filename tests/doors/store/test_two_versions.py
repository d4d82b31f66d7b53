"""Two versions of Loopguard on one Valkey, as during an upgrade: the one before comes from git, and runs beside this one.

docs/operations.md says what is asserted here, under "Upgrade".
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

import extproc
from tests.support.servers import Server, server
from tests.support.versions import unpack

BEFORE = "b15071a"
"""The last commit before the rules stood in `extproc/store/rules/`."""

WORKER = '''
import asyncio, inspect, json, sys
from types import SimpleNamespace
from extproc.metrics import Metrics
from extproc.settings import Settings
from extproc.store import open_store
try:
    from extproc.store.rules.windows import Hit
    from extproc.store.rules.ring import Push
    from extproc.store.rules.session import LIMITS, REFUSED, SUCCEEDED, Limits, Settlement, Step
    NEXT_STEP = b"\\x01"
except ImportError:
    NEXT_STEP = b""
    from extproc.ledger import LIMITS, REFUSED, SUCCEEDED, Limits, Settlement, Step
    from extproc.windows import Hit, Push


class DocumentsBefore:
    """Documents of a store that has methods of its own for each kind of them."""

    def __init__(self, store):
        self.store = store

    async def put(self, kind, subject, name, document, seconds):
        await (self.store.publish if kind == "boards" else self.store.put_order)(subject, name, document, seconds)

    async def drop(self, kind, subject, name):
        return await self.store.drop_order(subject, name)

    async def read(self, kind, subject, known=""):
        if kind == "orders":
            return await self.store.read_orders(subject, known)
        return SimpleNamespace(documents=await self.store.collect(subject))


class Worker:
    """Asks a store what it is told to, and says what that answers in plain values."""

    def __init__(self, store):
        self.store = store
        self.documents = getattr(store, "documents", None) or DocumentsBefore(store)

    async def hit(self, window, key, cooldown):
        [count] = await self.store.hit([Hit(f"{key}:7f", window, 60_000, 3, cooldown, True, 10)])
        return [count.count, count.looping, count.cooldown_ms > 0]

    async def push(self, key, entry, request):
        [entries] = await self.store.push([Push(f"{key}:7f", entry.encode(), request.to_bytes(8, "big"), 8, 60_000)])
        return [bytes(entry).decode() for entry in entries]

    async def step(self, key, number, tool, **limits):
        ends = [(at.to_bytes(6, "big"), at.to_bytes(4, "big") + NEXT_STEP) for at in range(1, number + 1)]
        calls = b"".join(name + tool.encode() + end for name, end in ends)
        total = sum(range(1, number + 1))
        keys = (f"{key}:7f", "sessions:p::7f", "session:p::*:7f")
        limits = Limits(60_000, limits.pop("max_sessions", 100), **limits)
        names = ((tool.encode(), f"the tool {tool}"),)
        call, identity = number.to_bytes(16, "big"), number.to_bytes(8, "big")
        [standing] = await self.store.hit([Step(*keys, limits, identity, call, 5, calls, total, 1, names, (0, 0, 0))])
        return self.tell(standing)

    async def settle(self, key, number, cost, refused):
        outcome = REFUSED if refused else SUCCEEDED
        settlement = Settlement(f"{key}:7f", Limits(60_000, 100), number.to_bytes(16, "big"), cost, False, outcome)
        [standing] = await self.store.hit([settlement])
        return self.tell(standing)

    def tell(self, standing):
        return {
            "limit": LIMITS[standing.limit], "steps": standing.steps, "tool_calls": standing.tool_calls,
            "cost": standing.cost, "reserved": standing.reserved, "shared": standing.shared,
            "tools": [[name, count] for _, name, count in standing.tools],
        }

    async def order(self, name):
        await self.documents.put("orders", "overrides", name, b"{}", 60)

    async def revoke(self, name):
        return await self.documents.drop("orders", "overrides", name)

    async def orders(self):
        return sorted((await self.documents.read("orders", "overrides", "never")).documents)

    async def publish(self, name):
        await self.documents.put("boards", "loops", name, b"what it knows", 60)

    async def collect(self):
        found = await self.documents.read("boards", "loops")
        return {name: document.decode() for name, document in found.documents.items()}

    async def agree(self, secret):
        return (await self.store.share_secret("hash:1", secret.encode())).decode()

    async def health(self):
        return self.store.health()


async def main(url):
    worker = Worker(open_store(url, Metrics(), Settings(store_timeout=30)))
    await worker.store.start()
    for line in sys.stdin:
        what, arguments = json.loads(line)
        print(json.dumps(await getattr(worker, what)(**arguments)), flush=True)
    await worker.store.close()

asyncio.run(main(sys.argv[1]))
'''


class Worker:
    """A process that imports Loopguard from a folder."""

    def __init__(self, folder: Path, url: str) -> None:
        command = [sys.executable, "-c", WORKER, url]
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, cwd=folder, env=environment, **pipes)

    def ask(self, what: str, **arguments: Any) -> Any:  # noqa: ANN401  # JSON
        """What the store answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, arguments]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> Self:
        """Started already."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait() == 0


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as it was."""
    folder = unpack(BEFORE, tmp_path_factory.mktemp("before"), "extproc")
    assert not (folder / "extproc" / "store" / "rules").exists()
    return folder


class Pair:
    """Both versions, on a store that is empty."""

    def __init__(self, before: Worker, now: Worker, one: Server) -> None:
        self.before = before
        self.now = now
        self.client = one.client()

    def take_turns(self, what: str, times: int, **arguments: Any) -> list[Any]:  # noqa: ANN401  # JSON
        """Ask the one before, then this one, and so on."""
        return [(self.before, self.now)[number % 2].ask(what, **arguments) for number in range(times)]


@pytest.fixture(scope="module")
def workers(before: Path) -> Iterator[Pair]:
    """Both, started once."""
    with server() as one:
        url = f"redis://{one.address}"
        with Worker(before, url) as old, Worker(Path(extproc.__file__).parent.parent, url) as new:
            yield Pair(old, new, one)


@pytest.fixture
def pair(workers: Pair) -> Iterator[Pair]:
    """Both, which are well before and after."""
    workers.client.flushall()
    yield workers
    assert workers.take_turns("health", 2) == ["ok", "ok"]


@pytest.mark.parametrize("window", ["sliding_ttl", "fixed", "sliding_log"])
@pytest.mark.parametrize("cooldown", [0, 30_000])
def test_both_count_together(pair: Pair, window: str, cooldown: int) -> None:
    """Each counts on from the other's count and acts on the same request; a cooldown of the one holds for the other."""
    counted = pair.take_turns("hit", 6, window=window, key=f"loop:{window}", cooldown=cooldown)

    assert counted == [[count, count >= 3, count >= 3 and cooldown > 0] for count in range(1, 7)]


def test_both_keep_one_ring(pair: Pair) -> None:
    """What the one has pushed the other one sees, and a request that is sent again to the other pushes nothing."""
    entries = [
        worker.ask("push", key="ring", entry=entry, request=request)
        for worker, entry, request in (
            (pair.before, "a", 1),
            (pair.now, "b", 2),
            (pair.before, "c", 3),
            (pair.now, "c", 3),
        )
    ]

    assert entries == [["a"], ["a", "b"], ["a", "b", "c"], ["a", "b", "c"]]


def test_each_keeps_a_session_in_a_ledger_of_its_own(pair: Pair) -> None:
    """A session has another key in each version, where it counts alone: none misreads what the other has counted."""
    turns = [(pair.before, "session3"), (pair.now, "session5")] * 3
    told = [turn.ask("step", key=key, number=number // 2, tool="read", steps=2) for number, (turn, key) in enumerate(turns, 2)]
    settled = [turn.ask("settle", key=key, number=1, cost=7, refused=False) for turn, key in turns[:2]]

    assert [[one["limit"], one["steps"], one["tool_calls"]] for one in told] == [
        ["", 1, 1], ["", 1, 1], ["", 2, 2], ["", 2, 2], ["max_steps", 2, 3], ["max_steps", 2, 3],
    ]  # fmt: skip
    assert [one["tools"] for one in told] == [[["the tool read", number // 2]] for number in range(2, 8)]
    assert [[one["steps"], one["cost"], one["reserved"]] for one in settled] == [[2, 7, 5]] * 2


def test_a_ledger_of_another_version_is_nothing(pair: Pair) -> None:
    """Even under one key, each begins anew in place of misreading it; the byte in front tells."""
    told = [turn.ask("step", key="session", number=3, tool="read", steps=2) for turn in (pair.before, pair.now, pair.before)]

    assert [[one["limit"], one["steps"], one["tool_calls"]] for one in told] == [["", 1, 3]] * 3


def test_both_count_a_tenant_s_sessions_together(pair: Pair) -> None:
    """The sessions that the one has let begin leave no room in the other."""
    told = [
        (pair.before, pair.now)[number % 2].ask("step", key=f"session:{number}", number=1, tool="read", max_sessions=2)
        for number in range(4)
    ]

    assert [one["shared"] for one in told] == [False, False, True, True]
    assert [one["limit"] for one in told] == [""] * 4


def test_an_order_holds_for_both(pair: Pair) -> None:
    """What is ordered at the one is in force at the other, and can be taken back there."""
    pair.before.ask("order", name="a")
    pair.now.ask("order", name="b")
    both = pair.take_turns("orders", 2)
    revoked = [pair.now.ask("revoke", name="a"), pair.before.ask("revoke", name="b")]

    assert both == [["a", "b"]] * 2
    assert revoked == [True, True]
    assert pair.take_turns("orders", 2) == [[], []]


def test_each_has_boards_of_its_own(pair: Pair) -> None:
    """What operators are shown is what the replicas of the version that they ask know."""
    for name, worker in (("old", pair.before), ("new", pair.now)):
        worker.ask("publish", name=name)

    assert pair.take_turns("collect", 2) == [{"old": "what it knows"}, {"new": "what it knows"}]


def test_both_have_one_hash_key(pair: Pair) -> None:
    """Each version recognises the other's notes, whichever comes first."""
    assert [pair.before.ask("agree", secret="x" * 32), pair.now.ask("agree", secret="y" * 32)] == ["x" * 32] * 2
