"""Pods that hang or are replaced, and a store that is cut off, under load: two pods and Valkey.

docs/operations.md says what is asserted here, under "When something fails".
"""

import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest

from tests.mesh import envoy_gateway as gateway_mesh, istio as istio_mesh
from tests.mesh.envoy_gateway import envoy_gateway
from tests.mesh.istio import count_missed, istio
from tests.support.chart import merged
from tests.support.harness import Loopguard, Stack, eventually, write_policies
from tests.support.meshes import BUILT, statuses
from tests.support.servers import free_port, relay, server

pytestmark = pytest.mark.skipif(
    not BUILT, reason="`make test-mesh` was not asked for: the real Istio is NOT tested"
)

VALUES = {
    "istio": istio_mesh.VALUES,
    "envoy-gateway": merged(gateway_mesh.VALUES, {"envoy": {"failureMode": "allow"}}),
}
CLUSTERS = {
    "istio": f"{istio_mesh.CLUSTER};",
    "envoy-gateway": "envoyextensionpolicy/gateways/lg-loopguard/extproc/0",
}
each_mesh = pytest.mark.parametrize("mesh", VALUES)
LOOP = [200, 200, 429]
CLIENTS = 4
# Seconds until a pod gives up on a silent store; on a busy machine, too, a healthy one answers
# before.
UNREACHABLE = "1"


@dataclass
class Pods:
    """Two pods behind one gateway, each with its own connection to the shared store.

    Attributes:
        made: the gateway, with the first pod.
        pods: both, also after a replacement.
        ways: whether data passes between a pod and the store.
        flags: of serve, for each pod.
        cluster: Envoy's name for both.
    """

    made: Stack
    pods: list[Loopguard]
    ways: list[threading.Event]
    flags: Sequence[Sequence[str]]
    cluster: str

    def await_health(self, pods: int) -> None:
        eventually(
            lambda: self.made.envoy.stat(f"cluster.{self.cluster}.membership_healthy") == pods,
            f"{pods} healthy pods",
        )


def stop(pods: Sequence[Loopguard]) -> None:
    for pod in pods:
        pod.stop()


@contextmanager
def two_pods(mesh: str, *flags: str, patient: bool = True) -> Iterator[Pods]:
    values = VALUES[mesh]
    with tempfile.TemporaryDirectory(prefix="pods") as name, ExitStack() as ended:
        write_policies(Path(name), values["policies"]["bundle"])
        store = ended.enter_context(server())
        ways = [threading.Event(), threading.Event()]
        for way in ways:
            way.set()
            ended.callback(way.set)
        urls = [f"redis://{ended.enter_context(relay(store, passes=way))}" for way in ways]
        given = [("--store", url, "--store-timeout", UNREACHABLE, *flags) for url in urls]
        pods: list[Loopguard] = []
        ended.callback(lambda: stop(pods))
        pods.append(Loopguard(Path(name), *given[1], listen=f"127.0.0.2:{free_port()}"))
        if mesh == "istio":
            made = ended.enter_context(istio(values, pods[0], flags=given[0], patient=patient))
        else:
            made = ended.enter_context(envoy_gateway(values, pods[0], flags=given[0]))
        pods.insert(0, made.loopguard)
        running = Pods(made, pods, ways, given, CLUSTERS[mesh])
        running.await_health(2)
        yield running


@dataclass
class Load:
    """Clients that each send one request several times, then the next one."""

    made: Stack
    times: int
    loops: list[list[int]] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(CLIENTS)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def _run(self, client: int) -> None:
        number = 0
        while not self._stop.wait(0.02):
            number += 1
            self.loops.append(
                statuses(self.made, f"/chat/{client}/{number}", self.times, body=b"same")
            )

    def go_on(self, loops: int = 20) -> None:
        wanted = len(self.loops) + loops
        eventually(lambda: len(self.loops) >= wanted, f"{loops} loops")

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


@each_mesh
def test_rolling_restart_loses_no_request(mesh: str) -> None:
    with two_pods(mesh, "--drain-delay", "5") as running, ExitStack() as ended:
        made = running.made
        assert statuses(made, "/chat/before", 2, body=b"same") == [200, 200]
        with Load(made, len(LOOP)) as load:
            load.go_on()
            for number, pod in enumerate(running.pods):
                pod.signal(signal.SIGTERM)
                running.await_health(1)
                assert pod.wait() == 0
                load.go_on()
                folder = pod.log.parent
                running.pods[number] = Loopguard(folder, *running.flags[number], listen=pod.address)
                ended.callback(running.pods[number].stop)
                running.await_health(2)
                load.go_on()

        assert [loop for loop in load.loops if loop != LOOP] == []
        assert len(load.loops) >= 100
        assert count_missed(made) == 0
        assert sum(seen.target.startswith("/chat/") for seen in made.upstream.seen) == 2 + 2 * len(
            load.loops
        )
        assert all(pod.metric("requests_total") > 0 for pod in running.pods)
        assert statuses(made, "/chat/before", 1, body=b"same") == [429]


@each_mesh
def test_undecided_requests_are_in_statistics(mesh: str) -> None:
    with two_pods(mesh, patient=False) as running:
        made, hung = running.made, running.pods[1]
        assert statuses(made, "/chat/before", 2, body=b"same") == [200, 200]
        with Load(made, len(LOOP)) as load:
            load.go_on()
            hung.signal(signal.SIGSTOP)
            try:
                running.await_health(1)
                load.go_on()
            finally:
                hung.signal(signal.SIGCONT)
            running.await_health(2)
            load.go_on()

        assert {loop[0] for loop in load.loops} == {200}
        assert {status for loop in load.loops for status in loop} == {200, 429}
        assert sum(429 not in loop for loop in load.loops) <= count_missed(made)
        assert statuses(made, "/chat/before", 1, body=b"same") == [429]


@each_mesh
@pytest.mark.parametrize("cut", [[1], [0, 1]], ids=["one pod", "both pods"])
def test_pods_count_locally_without_the_store(mesh: str, cut: list[int]) -> None:
    """The store has one count, and each pod that is cut off another."""
    most = (1 + len(cut)) * (len(LOOP) - 1)
    with two_pods(mesh) as running:
        made = running.made
        with Load(made, most + 1) as load:
            load.go_on()
            for number in cut:
                running.ways[number].clear()
            for number in cut:
                eventually(
                    lambda: running.pods[number].metric("store_up") == 0,  # noqa: B023
                    "a pod that knows it",
                )
            load.go_on()
            told = [running.pods[number].get("/readyz") for number in cut]
            for number in cut:
                running.ways[number].set()
            for pod in running.pods:
                eventually(lambda: pod.metric("store_up") == 1, "a way back")  # noqa: B023
            load.go_on()

        assert {status for loop in load.loops for status in loop} == {200, 429}
        assert [
            loop for loop in load.loops if loop[:2] != [200, 200] or loop.count(200) > most
        ] == []
        assert (count_missed(made), [status for status, _ in told]) == (0, [200] * len(cut))
        assert all(f"unavailable: no answer within {UNREACHABLE} s" in page for _, page in told)
        assert all(running.pods[number].metric("store_errors_total") > 0 for number in cut)
        assert statuses(made, "/chat/after", 3, body=b"same") == LOOP
