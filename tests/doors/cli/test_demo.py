"""`make run`: the demo, on free ports."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.command import find_missing
from tests.support.harness import PATIENCE, Process, eventually
from tests.support.processes import alive

ENVOY_FOLDER = ROOT / "envoy"
SAMPLE = ENVOY_FOLDER / "policy.json"
PORT_FLAGS = (
    "--port",
    "--envoy-admin-port",
    "--loopguard-port",
    "--loopguard-admin-port",
    "--upstream-port",
)


class Demo(Process):
    def __init__(self, policy: Path, log: Path) -> None:
        flags = [item for flag in PORT_FLAGS for item in (flag, "0")]
        super().__init__(
            [sys.executable, str(ENVOY_FOLDER / "demo.py"), "--policy", str(policy), *flags], log
        )
        try:
            self.wait_for("Ctrl-C stops everything")
        except BaseException:
            self.stop()
            raise
        screen = self.output()
        self.ports = [
            int(port) for port in dict.fromkeys(re.findall(r"127\.0\.0\.1:(\d+)", screen))
        ]
        self.envoy = int(self.wait_for(r"Envoy +http://127\.0\.0\.1:(\d+)")[1])
        self.admin = int(self.wait_for(r"Loopguard .*admin http://127\.0\.0\.1:(\d+)")[1])
        self.children = [int(pid) for pid in re.findall(r"pid (\d+)", screen)]

    def post(self, path: str) -> int:
        return request(self.envoy, "POST", path)[0]

    def metrics(self) -> str:
        return request(self.admin, "GET", "/metrics")[1]

    def left(self) -> list[str]:
        return [f"pid {pid}" for pid in self.children if alive(pid)] + [
            f"port {port}" for port in self.ports if listens(port)
        ]


def request(port: int, method: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request(
            method, path, b'{"again": true}' if method == "POST" else None, {"x-user-id": "ann"}
        )
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE).close()
    except OSError:
        return False
    return True


def test_demo_refuses_a_loop_until_ctrl_c(tmp_path: Path) -> None:
    """It also warns, follows an edited policy, and suggests only guarded requests."""
    policy = Path(shutil.copy(SAMPLE, tmp_path))
    demo = Demo(policy, tmp_path / "demo.log")
    try:
        statuses = [demo.post("/v1/chat/completions") for _ in range(6)]
        warned = [
            json.loads(request(demo.envoy, "GET", "/search?q=again")[1])["headers"]
            for _ in range(3)
        ]
        metrics = demo.metrics()
        document = json.loads(policy.read_text())
        document["policies"][0]["spec"]["loop_detection"]["reject_status"] = 403
        policy.write_text(json.dumps(document))
        eventually(lambda: demo.post("/v1/chat/completions") == 403, "the edited policy")
        reloaded = demo.metrics()
        demo.signal(signal.SIGINT)
        code = demo.wait()
        eventually(lambda: demo.left() == [], "the end of all that was started")
    finally:
        demo.stop()

    assert (statuses, code) == ([200, 200, 200, 200, 429, 429], 0)
    assert [headers.get("x-fairvisor-warning") for headers in warned] == [None, None, "loop_warn"]
    assert (
        find_missing(
            metrics,
            'loops_detected_total{action="reject",mode="enforce",policy="chat-reject"} 2.0',
            'mode="shadow",policy="chat-reject-sooner"',
        )
        == []
    )
    assert 'policy_reloads_total{result="ok"} 1.0' in reloaded
    assert f"with a path that {policy} guards" in demo.output()
    assert "/v1/embeddings" not in demo.output()


@pytest.mark.deep
@pytest.mark.parametrize(("child", "name"), [(0, "Envoy"), (1, "Loopguard")])
def test_death_of_a_child_ends_the_demo(child: int, name: str, tmp_path: Path) -> None:
    demo = Demo(SAMPLE, tmp_path / "demo.log")
    screen = demo.output()
    try:
        os.kill(demo.children[child], signal.SIGKILL)
        code = demo.wait()
        eventually(lambda: demo.left() == [], "the end of all that was started")
    finally:
        demo.stop()

    assert code == 1
    assert f"demo: {name} ended with exit code -9" in demo.output()
    assert "/v1/embeddings" in screen  # the suggestions for the sample policy
    assert "{" not in re.sub(r"'\{.*?\}'|%\{\w+\}", "", screen)


def test_ports_in_use_are_named_with_their_flags(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as first,
        socket.create_server(("127.0.0.1", 0)) as second,
    ):
        flags = dict.fromkeys(PORT_FLAGS, "0")
        flags["--port"], flags["--upstream-port"] = (
            str(taken.getsockname()[1]) for taken in (first, second)
        )
        command = [
            sys.executable,
            str(ENVOY_FOLDER / "demo.py"),
            *(item for pair in flags.items() for item in pair),
        ]
        demo = Process(command, tmp_path / "demo.log")

        code = demo.wait()

    assert code == 1
    for flag in ("--port", "--upstream-port"):
        assert re.search(
            rf"port {flags[flag]}, for .* in use; choose another with {flag} PORT", demo.output()
        )
    assert "make run ARGS='--port 0 --upstream-port 0'" in demo.output()


@pytest.mark.parametrize(
    ("target", "flags", "script"),
    [("run", "--port 0", "demo.py"), ("demo-agent", "--scene chat", "agent_demo.py")],
)
def test_make_passes_flags(target: str, flags: str, script: str) -> None:
    command = [
        "make",
        "--no-print-directory",
        "-n",
        "-W",
        "pyproject.toml",
        target,
        f"ARGS={flags}",
    ]

    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert printed.splitlines()[-1].endswith(f"envoy/{script} {flags}")
    assert ("install --editable '.[agent-demo]'" in printed) == (target == "demo-agent")


@pytest.mark.deep
@pytest.mark.parametrize(
    ("script", "flags", "told"),
    [
        ("demo.py", [item for flag in PORT_FLAGS for item in (flag, "0")], ""),
        ("agent_demo.py", [], "demo-agent: Loopguard ended"),
    ],
)
def test_errors_of_a_policy_are_shown(
    script: str, flags: list[str], told: str, tmp_path: Path
) -> None:
    policy = tmp_path / "policy.json"
    policy.write_text('{"bundle_version": 1, "policies": [{"id": "p"}]}')
    demo = Process(
        [sys.executable, str(ENVOY_FOLDER / script), "--policy", str(policy), *flags],
        tmp_path / "demo.log",
    )

    code = demo.wait()

    assert code == 1
    assert find_missing(demo.output(), "/policies/0/spec: ", told) == []
