"""`make demo-agent`, as a user runs it."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.documents import bundle, policy
from tests.support.harness import PATIENCE, Process
from tests.support.processes import alive

COMMAND = [sys.executable, str(ROOT / "envoy" / "agent_demo.py")]


def run(log: Path, *flags: str) -> Process:
    """The demo with its output in a file."""
    return Process([*COMMAND, *flags], log)


def left(output: str) -> Sequence[int]:
    """Of the children that the output names, those that still run."""
    pids = [int(pid) for pid in re.findall(r"\(pid (\d+)\)", output)]
    assert len(pids) == 2
    return [pid for pid in pids if alive(pid)]


def write(path: Path, **loop: object) -> str:
    """A policy file for all that agents ask for; returns its path."""
    mode = str(loop.pop("mode", "enforce"))
    path.write_text(json.dumps(bundle(policy("p", {"pathPrefix": "/v1"}, mode=mode, limit_keys=["header:x-user-id"], **loop))))
    return str(path)


@pytest.mark.deep
def test_every_scene_goes_as_told(tmp_path: Path) -> None:
    """Four loops and a cycle are refused with the reason, progress is not; the exit code is 0 and nothing stays behind."""
    demo = run(tmp_path / "log")

    code = demo.wait()

    output = demo.output()
    assert code == 0, output
    for line in (
        "1. An agent that repeats a failing call: the model reads the note, and finishes (openai SDK, chat completions)",
        "     3  deploy(build=4711)                    error: build 4711 is not signed",
        "     4  REFUSED                               openai.RateLimitError, status 429",
        "     4  REFUSED                               anthropic.RateLimitError, status 429",
        "        Loop detected: 3 of the last 3 turns were search_docs with the same input and the same result,",
        "        Loop detected: 3 of the last 3 turns returned the same result, so this request was refused.",
        "        user: Then fix the tests.",
        "    16  (answers)                             I tried three things; the same tests fail.",
        "  as expected: not refused after 16 turns; 16 requests sent, 16 reached the model",
        "        Loop detected: the last 10 turns were 2 rounds of the same 5 steps (list_tickets, open_ticket,",
        "  ok   cycle       refused after 10 turns; 11 requests sent, 10 reached the model",
        "        [~loopguard~ Note from the gateway, not from the tool: Loop detected: 3 of the last 3 turns were",
        "     4  ask_operator()                        restored from the backup",
        "        read_file with the same input and the same result. The error was \u201cerror: no such file\u201d each",
        "        result you have so far. At the next repetition, tool calls are forbidden.",
        "  ok   steered     not refused after 5 turns; 5 requests sent, 5 reached the model",
        "  ok   landed      not refused after 6 turns; 6 requests sent, 6 reached the model",
        "8 of 8 scenes ended as expected.",
    ):
        assert f"\n{line}\n" in output
    assert "\x1b" not in output  # no colours where there is no terminal
    assert left(output) == []


@pytest.mark.deep
def test_an_agent_that_is_not_stopped_is_reported(tmp_path: Path) -> None:
    """With a policy in shadow mode the looping agent is given up some turns later: exit code 1, in red on a terminal."""
    shadow = write(tmp_path / "policy.json", mode="shadow", similarity="tool_calls")
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    command = [*COMMAND, "--policy", shadow, "--scene", "chat"]
    with subprocess.Popen(command, stdout=theirs, env=environment) as demo:
        os.close(theirs)
        output = _read(ours)
        code = demo.wait(PATIENCE)

    assert code == 1
    assert "\x1b[31m  NOT as expected: not refused after 8 turns; 8 requests sent, 8 reached the model" in output
    assert "expected:        refused after 3 turns; 4 requests sent, 3 reached the model" in output
    assert "0 of 1 scenes ended as expected." in output
    assert left(output) == []


def _read(terminal: int) -> str:
    """All that is written to a terminal until its other side is closed."""
    parts = []
    try:
        while part := os.read(terminal, 65_536):
            parts.append(part)
    except OSError:  # how Linux reports that the other side is closed
        pass
    os.close(terminal)
    return b"".join(parts).decode()


@pytest.mark.deep
def test_ctrl_c_stops_everything(tmp_path: Path) -> None:
    """Ctrl-C in the middle of a scene ends the demo with 130, and nothing stays behind."""
    slow = write(tmp_path / "policy.json", action="throttle", body="ignore", threshold_identical_requests=2)
    demo = run(tmp_path / "log", "--policy", slow, "--scene", "chat")
    demo.wait_for(r"\n +2  deploy")  # the turns after it are held for longer and longer, 3 s in all

    demo.signal(signal.SIGINT)

    assert demo.wait() == 130
    assert "Summary" not in demo.output()
    assert "Traceback" not in demo.output()
    assert left(demo.output()) == []


@pytest.mark.deep
def test_a_broken_policy_is_told(tmp_path: Path) -> None:
    """A policy with errors ends the demo with 1, and the errors are on the screen."""
    demo = run(tmp_path / "log", "--policy", write(tmp_path / "policy.json", similarity="telepathy"))

    code = demo.wait()

    assert code == 1
    assert "demo-agent: Loopguard ended" in demo.output()
    assert "/policies/0/spec/loop_detection/similarity" in demo.output()


def test_help_has_examples() -> None:
    """`--help` names every scene and shows how to run one."""
    shown = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, check=True).stdout

    assert "make demo-agent ARGS='--scene cycle'" in shown
    assert "{steered,chat,progress,responses,anthropic,stored,cycle,landed}" in shown


def test_make_installs_the_sdks_and_passes_flags() -> None:
    """`make demo-agent ARGS=...` starts the demo with those flags, from an environment with its own extra."""
    command = ["make", "--no-print-directory", "-n", "-W", "pyproject.toml", "demo-agent", "ARGS=--scene chat"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "install --editable '.[agent-demo]'" in told
    assert told.splitlines()[-1].endswith("envoy/agent_demo.py --scene chat")
