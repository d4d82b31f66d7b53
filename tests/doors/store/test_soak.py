"""The shared store breaks in every way under load, and no client notices.

Envoy fails closed, in front of two Loopguards.

Each test is one long story. All the while clients send requests, some always new ones and one the
same again and again; Envoy would answer 500 or 504 for any request that a Loopguard failed to
answer.
"""

import asyncio
import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.support.documents import bundle, policy
from tests.support.harness import PATIENCE, Stack, eventually, stack
from tests.support.servers import Server, server

pytestmark = pytest.mark.deep

POLICIES = bundle(
    policy("load", {"pathPrefix": "/load"}, window_seconds=600, threshold_identical_requests=5),
    policy("p", {"pathPrefix": "/p"}, window_seconds=600),
)
THRESHOLD = 3
_numbers = itertools.count()


class Load:
    """Clients on a thread of their own: three that never repeat themselves, one that hammers."""

    def __init__(self, port: int) -> None:
        self.statuses: Counter[str] = Counter()
        self._port = port
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)

    async def _run(self) -> None:
        fresh = (f"/load?n={number}" for number in itertools.count())
        await asyncio.gather(
            *(self._client(targets) for targets in (fresh, fresh, fresh, itertools.repeat("/load")))
        )

    async def _client(self, targets: Iterator[str]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        while not self._stop.is_set():
            writer.write(f"GET {next(targets)} HTTP/1.1\r\nhost: h\r\n\r\n".encode())
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
                await reader.readexactly(length)
            except (asyncio.IncompleteReadError, OSError) as error:
                self.statuses[type(error).__name__] += 1
                return
            self.statuses[head[9:12].decode()] += 1
            await asyncio.sleep(0.002)
        writer.close()


@contextmanager
def soak(url: str) -> Iterator[Stack]:
    with stack(POLICIES, "--store", url, failure_mode="deny", replicas=2) as made:
        load = Load(made.envoy.port)
        try:
            yield made
            eventually(lambda: load.statuses["429"] > 10, "refusals of the one that hammers")
        finally:
            load.stop()
        assert set(load.statuses) == {"200", "429"}


def states(made: Stack) -> list[str]:
    return [json.loads(guard.get("/readyz")[1])["store"] for guard in made.replicas]


def noticed(made: Stack) -> None:
    eventually(lambda: all("unavailable: " in state for state in states(made)), "the outage")
    assert [guard.get("/readyz")[0] for guard in made.replicas] == [200, 200]


def recovered(made: Stack) -> None:
    eventually(lambda: states(made) == ["ok", "ok"], "the recovery")


def loop_is_refused_locally(made: Stack) -> None:
    """Each replica counts separately: at most that many times the threshold minus one pass."""
    target = f"/p?{next(_numbers)}"
    statuses = Counter(made.send(target).status for _ in range(20))

    assert set(statuses) == {200, 429}
    assert statuses[200] <= len(made.replicas) * (THRESHOLD - 1)


def loops_are_refused_across(made: Stack) -> None:
    before = [guard.metric("requests_total", policy="p") for guard in made.replicas]
    for _ in range(8):
        target = f"/p?{next(_numbers)}"
        assert [made.send(target).status for _ in range(4)] == [200, 200, 429, 429]

    after = [guard.metric("requests_total", policy="p") for guard in made.replicas]
    assert all(now - then > 0 for then, now in zip(before, after, strict=True))


FAULTS: dict[str, tuple[Callable[[Server], None], Callable[[Server], None]]] = {
    "killed": (Server.kill, Server.start),
    "hung": (Server.hang, Server.resume),
    "demoted": (
        lambda broken: broken.client().replicaof("127.0.0.1", 1),
        lambda broken: broken.client().replicaof("NO", "ONE"),
    ),
    "full": (
        lambda broken: broken.client().config_set("maxmemory", 1),
        lambda broken: broken.client().config_set("maxmemory", 0),
    ),
}


def test_one_server_recovers_from_every_fault() -> None:
    with server() as broken, soak(f"redis://{broken.address}") as made:
        loops_are_refused_across(made)
        for harm, cure in FAULTS.values():
            harm(broken)
            noticed(made)
            loop_is_refused_locally(made)
            cure(broken)
            recovered(made)
            loops_are_refused_across(made)

        errors = [guard.metric("store_errors_total") for guard in made.replicas]
        broken.client().flushall()
        loops_are_refused_across(made)
        broken.client().script_flush()
        loops_are_refused_across(made)
        assert [guard.metric("store_errors_total") for guard in made.replicas] == errors
        for guard in made.replicas:
            assert guard.output().count("store unavailable") == len(FAULTS)
            assert guard.output().count("store available again") == len(FAULTS)


def test_store_password_is_never_shown() -> None:
    with server("--requirepass", "correct-horse") as locked:
        for password in ("correct-horse", "wrong-horse"):
            url = f"redis://:{password}@{locked.address}/1?prefix=x"
            with stack(POLICIES, "--store", url, "--log-level", "debug") as made:
                made.send("/p")
                pages = [
                    made.loopguard.get(page)[1]
                    for page in ("/readyz", "/metrics", "/policies", "/healthz")
                ]

                assert ("ok" if password == "correct-horse" else "unavailable: WRONGPASS") in pages[
                    0
                ]
                assert "horse" not in "".join(pages)
                made.loopguard.stop()
                assert "horse" not in made.loopguard.output()


def _scoped(name: str) -> Callable[[str], str]:
    plain = "envoy_grpc: {cluster_name: loopguard}\n"
    more = f"                initial_metadata: [{{key: x-loopguard-scope, value: {name}}}]\n"

    def edit(text: str) -> str:
        before, found, after = text.partition(plain)
        assert found
        return before + found + more + after

    return edit


def test_attachments_of_different_scopes_count_separately() -> None:
    with server() as shared:
        url = f"redis://{shared.address}"
        with (
            stack(POLICIES, "--store", url, "--scope", "gateway", failure_mode="deny") as gateway,
            stack(
                POLICIES, "--store", url, failure_mode="deny", edit=_scoped("sidecar")
            ) as sidecar,
            stack(POLICIES, "--store", url, failure_mode="deny", edit=_scoped("gateway")) as second,
        ):
            statuses = [made.send("/p").status for _ in range(2) for made in (gateway, sidecar)]

            assert (statuses, second.send("/p").status) == ([200] * 4, 429)
            assert sidecar.send("/p").status == 429
        keys = {key.decode().split(":")[5] for key in shared.client().keys("loopguard:loop:*")}
        assert keys == {"gateway", "sidecar"}
