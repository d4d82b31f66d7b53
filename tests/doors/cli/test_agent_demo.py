"""`make demo-agent`: most of it in this process, where the SDKs are imported already."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import agent_demo
import pytest

from tests.support import ROOT
from tests.support.command import find_missing
from tests.support.documents import bundle, policy
from tests.support.processes import alive


def list_left(output: str) -> list[int]:
    """The children named in the output that still run."""
    pids = [int(pid) for pid in re.findall(r"\(pid (\d+)\)", output)]
    assert len(pids) == 2
    return [pid for pid in pids if alive(pid)]


@pytest.mark.deep
def test_every_scene_ends_as_expected(capsys: pytest.CaptureFixture[str]) -> None:
    code = agent_demo.main([])

    output = capsys.readouterr().out
    assert code == 0, output
    for line in (
        (
            "1. An agent that repeats a failing call: the model reads the note, and finishes "
            "(openai SDK, chat completions)"
        ),
        "     3  deploy(build=4711)                    error: build 4711 is not signed",
        "     4  REFUSED                               openai.RateLimitError, status 429",
        "     4  REFUSED                               anthropic.RateLimitError, status 429",
        (
            "        Loop detected: 3 of the last 3 turns were search_docs with the same input and "
            "the same result,"
        ),
        (
            "        Loop detected: 3 of the last 3 turns returned the same result, so this "
            "request "
            "was refused."
        ),
        "        user: Then fix the tests.",
        "    16  (answers)                             I tried three things; the same tests fail.",
        "  as expected: not refused after 16 turns; 16 requests sent, 16 reached the model",
        (
            "        Loop detected: the last 10 turns were 2 rounds of the same 5 steps "
            "(list_tickets, open_ticket,"
        ),
        "  ok   cycle       refused after 10 turns; 11 requests sent, 10 reached the model",
        (
            "        [~loopguard~ Note from the gateway, not from the tool: Loop detected: 3 of "
            "the "
            "last 3 turns were"
        ),
        "     4  ask_operator()                        restored from the backup",
        (
            "        read_file with the same input and the same result. The error was "
            "\u201cerror: no "
            "such file\u201d each"
        ),
        "        result you have so far. At the next repetition, tool calls are forbidden.",
        "  ok   steered     not refused after 5 turns; 5 requests sent, 5 reached the model",
        "  ok   landed      not refused after 6 turns; 6 requests sent, 6 reached the model",
        "8 of 8 scenes ended as expected.",
    ):
        assert f"\n{line}\n" in output
    assert "\x1b" not in output  # no colours where there is no terminal
    assert list_left(output) == []


@pytest.fixture
def shadow(tmp_path: Path) -> str:
    """A policy that refuses nothing, for all that the agents send."""
    path = tmp_path / "policy.json"
    keys = ["header:x-user-id"]
    path.write_text(
        json.dumps(
            bundle(
                policy(
                    "p",
                    {"pathPrefix": "/v1"},
                    mode="shadow",
                    similarity="tool_calls",
                    limit_keys=keys,
                )
            )
        )
    )
    return str(path)


@pytest.mark.deep
def test_agent_that_is_not_refused_fails_in_red(
    shadow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)

    code = agent_demo.main(["--policy", shadow, "--scene", "chat"])

    output = terminal.getvalue()
    assert code == 1
    assert (
        find_missing(
            output,
            "\x1b[31m  NOT as expected: not refused after 8 turns; 8 requests sent, 8 reached",
            "expected:        refused after 3 turns; 4 requests sent, 3 reached the model",
            "0 of 1 scenes ended as expected.",
        )
        == []
    )
    assert list_left(output) == []


@pytest.mark.deep
def test_ctrl_c_within_a_scene_stops_everything(
    shadow: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agent_demo.Screen, "turn", lambda *_: os.kill(os.getpid(), signal.SIGINT))

    code = agent_demo.main(["--policy", shadow, "--scene", "chat"])

    shown = capsys.readouterr()
    assert (code, shown.err) == (130, "")
    assert "Summary" not in shown.out
    assert list_left(shown.out) == []


def test_help_has_examples() -> None:
    command = [sys.executable, str(ROOT / "envoy" / "agent_demo.py"), "--help"]

    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert (
        find_missing(
            shown,
            "make demo-agent ARGS='--scene cycle'",
            "{steered,chat,progress,responses,anthropic,stored,cycle,landed}",
        )
        == []
    )
