"""`make run`, as far as a machine can try it: the demo on free ports."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.harness import PATIENCE, Process, eventually
from tests.support.processes import alive

ENVOY_FOLDER = ROOT / "envoy"
PORT_FLAGS = ("--port", "--envoy-admin-port", "--loopguard-port", "--loopguard-admin-port", "--upstream-port")


class Demo(Process):
    """A demo on free ports, once it is up."""

    def __init__(self, policy: Path, log: Path) -> None:
        """Start it and read from its screen what runs where."""
        flags = [item for flag in PORT_FLAGS for item in (flag, "0")]
        super().__init__([sys.executable, str(ENVOY_FOLDER / "demo.py"), "--policy", str(policy), *flags], log)
        try:
            self.wait_for("Ctrl-C stops everything")
        except BaseException:
            self.stop()
            raise
        screen = self.output()
        self.ports = [int(port) for port in dict.fromkeys(re.findall(r"127\.0\.0\.1:(\d+)", screen))]
        self.envoy = int(self.wait_for(r"Envoy +http://127\.0\.0\.1:(\d+)")[1])
        self.admin = int(self.wait_for(r"Loopguard .*admin http://127\.0\.0\.1:(\d+)")[1])
        self.children = [int(pid) for pid in re.findall(r"pid (\d+)", screen)]

    def post(self, path: str) -> int:
        """The status of one and the same request through Envoy."""
        return request(self.envoy, "POST", path)[0]

    def metrics(self) -> str:
        """Loopguard's metrics."""
        return request(self.admin, "GET", "/metrics")[1]

    def left(self) -> list[str]:
        """What is still there of it: children that run, ports that answer."""
        return [f"pid {pid}" for pid in self.children if alive(pid)] + [f"port {port}" for port in self.ports if listens(port)]


def request(port: int, method: str, path: str) -> tuple[int, str]:
    """Status and body of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request(method, path, b'{"again": true}' if method == "POST" else None, {"x-user-id": "ann"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def listens(port: int) -> bool:
    """Whether anything takes connections on the port."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE).close()
    except OSError:
        return False
    return True


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Demo]]:
    """Starts the demo on a copy of its policy, `policy.json` in the test's folder."""
    shutil.copy(ENVOY_FOLDER / "policy.json", tmp_path)
    started: list[Demo] = []

    def run() -> Demo:
        started.append(Demo(tmp_path / "policy.json", tmp_path / "demo.log"))
        return started[-1]

    yield run
    for demo in started:
        demo.stop()


def test_refuses_a_loop_follows_an_edit_and_ends_on_ctrl_c(start: Callable[[], Demo], tmp_path: Path) -> None:
    """The fifth identical request is refused; an edited policy acts while the demo runs; Ctrl-C leaves nothing behind."""
    demo = start()
    policy = tmp_path / "policy.json"

    statuses = [demo.post("/v1/chat/completions") for _ in range(6)]

    assert statuses == [200, 200, 200, 200, 429, 429]
    assert 'loops_detected_total{action="reject",mode="enforce",policy="chat-reject"} 2.0' in demo.metrics()
    assert 'mode="shadow",policy="chat-reject-sooner"' in demo.metrics()

    document = json.loads(policy.read_text())
    document["policies"][0]["spec"]["loop_detection"]["reject_status"] = 403
    policy.write_text(json.dumps(document))

    eventually(lambda: demo.post("/v1/chat/completions") == 403, "the edited policy")

    assert 'policy_reloads_total{result="ok"} 1.0' in demo.metrics()

    demo.signal(signal.SIGINT)

    assert demo.wait() == 0
    eventually(lambda: demo.left() == [], "the end of all that was started")


@pytest.mark.deep
def test_warns_client_and_upstream(start: Callable[[], Demo]) -> None:
    """The sample upstream shows the header that it got, so the curl lines on the screen have something to show."""
    demo = start()

    bodies = [request(demo.envoy, "GET", "/search?q=again")[1] for _ in range(3)]

    warned = [json.loads(body)["headers"].get("x-fairvisor-warning") for body in bodies]
    assert warned == [None, None, "loop_warn"]


@pytest.mark.deep
def test_shows_lines_that_fit_the_policies(start: Callable[[], Demo], tmp_path: Path) -> None:
    """The lines to try are those of the sample policies only where these are in force."""
    other = start().output()
    sample = Demo(ENVOY_FOLDER / "policy.json", tmp_path / "sample.log")
    sample.stop()

    assert "/v1/embeddings" not in other
    assert f"with a path that {tmp_path}/policy.json guards" in other
    assert "/v1/embeddings" in sample.output()
    assert "{" not in re.sub(r"'\{.*?\}'|%\{\w+\}", "", sample.output())


@pytest.mark.deep
@pytest.mark.parametrize(("child", "name"), [(0, "Envoy"), (1, "Loopguard")])
def test_a_dead_child_ends_it(child: int, name: str, start: Callable[[], Demo]) -> None:
    """When a child dies, the other is stopped as well. The demo says which one it was and exits with 1."""
    demo = start()

    os.kill(demo.children[child], signal.SIGKILL)

    assert demo.wait() == 1
    assert f"demo: {name} ended with exit code -9" in demo.output()
    eventually(lambda: demo.left() == [], "the end of all that was started")


def test_taken_ports_are_named(tmp_path: Path) -> None:
    """Every port that is taken is named with the flag that chooses another, and nothing is started."""
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        flags = dict.fromkeys(PORT_FLAGS, "0")
        flags["--port"], flags["--upstream-port"] = (str(taken.getsockname()[1]) for taken in (first, second))
        command = [sys.executable, str(ENVOY_FOLDER / "demo.py"), *(item for pair in flags.items() for item in pair)]
        demo = Process(command, tmp_path / "demo.log")

        code = demo.wait()

    assert code == 1
    for flag in ("--port", "--upstream-port"):
        assert re.search(rf"port {flags[flag]}, for .* in use; choose another with {flag} PORT", demo.output())
    assert "make run ARGS='--port 0 --upstream-port 0'" in demo.output()


def test_make_passes_flags() -> None:
    """`make run ARGS=...` starts the demo with those flags."""
    root = ENVOY_FOLDER.parent

    command = ["make", "--no-print-directory", "-n", "run", "ARGS=--port 0"]
    told = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout

    assert told.splitlines()[-1].endswith("envoy/demo.py --port 0")


@pytest.mark.deep
def test_a_broken_policy_is_told(tmp_path: Path) -> None:
    """A policy file with errors ends the demo with 1, and the errors are on the screen."""
    policy = tmp_path / "policy.json"
    policy.write_text('{"bundle_version": 1, "policies": [{"id": "p"}]}')
    flags = [item for flag in PORT_FLAGS for item in (flag, "0")]
    demo = Process([sys.executable, str(ENVOY_FOLDER / "demo.py"), "--policy", str(policy), *flags], tmp_path / "demo.log")

    code = demo.wait()

    assert code == 1
    assert "/policies/0/spec: " in demo.output()
