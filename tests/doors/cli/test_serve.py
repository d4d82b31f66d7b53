"""`loopguard serve` as a process: how it starts, what it refuses, and how it ends."""

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import GOOD, NOT_ENFORCED, WITH_RULES, Run, find_missing, written
from tests.support.documents import bundle, policy
from tests.support.harness import PATIENCE, Loopguard, write_policies

pytestmark = pytest.mark.usefixtures("_no_settings")


def test_validate_and_serve_fail_alike(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = written(tmp_path / "rules.json", bundle(WITH_RULES))
    warned = written(tmp_path / "warned.json", policy("q", {"pathExact": "/b"}))

    line = f"{file}: {NOT_ENFORCED}; remove it, or start with --allow-unenforced"
    for flags in ([], ["--strict"]):
        run, fine = (
            Run(capsys, "validate", *flags, file, warned),
            Run(capsys, "validate", *flags, warned),
        )
        assert (run.code, run.out, run.err.splitlines()) == (1, "", [line])
        assert (fine.code, fine.out) == (0, "good: 1 policy in 1 file\n")

    assert served("--policy", file, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0") == (
        1,
        [line],
    )


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        yield f"127.0.0.1:{holder.getsockname()[1]}"


def served(*arguments: str) -> tuple[int, list[str]]:
    """Exit code and stderr of a server that must not start."""
    command = [sys.executable, "-P", "-m", "extproc.cli", "serve", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.stdout == ""
    return ended.returncode, ended.stderr.splitlines()


@pytest.mark.parametrize(("flag", "other"), [("--listen", "--admin"), ("--admin", "--listen")])
def test_port_in_use_is_a_one_line_error(good: str, taken: str, flag: str, other: str) -> None:
    code, lines = served("--policy", good, flag, taken, other, "127.0.0.1:0")

    assert code == 1
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"loopguard: cannot listen on {taken}: ")
    assert flag in lines[0]


def test_serve_refuses_invalid_policies_with_every_error(tmp_path: Path) -> None:
    bad = written(tmp_path / "bad.json", policy("p", {}, action="explode"))

    code, (missing, *lines) = served("--policy", f"{tmp_path}/none", "--policy", bad)

    assert (code, missing) == (1, f"{tmp_path}/none: /: cannot be read: No such file or directory")
    assert [line.partition(": ")[0] for line in lines] == [bad, bad]


def test_serve_warns_about_unenforced_parts_and_unknown_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_policies(tmp_path, bundle(WITH_RULES))
    monkeypatch.setenv("LOOPGUARD_SHADOWS", "1")
    server = Loopguard(tmp_path, "--allow-unenforced")
    server.stop()

    assert (
        find_missing(
            server.output(),
            f"warning {tmp_path}/policies/policies.json: {NOT_ENFORCED}\n",
            "warning LOOPGUARD_SHADOWS is not a setting; did you mean LOOPGUARD_SHADOW?\n",
        )
        == []
    )


def test_running_server_is_healthy_until_ctrl_c(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_policies(tmp_path, GOOD)
    server = Loopguard(tmp_path)
    try:
        health = Run(capsys, "healthcheck", "--address", server.address)
        server.signal(signal.SIGINT)
        code = server.wait()
    finally:
        server.stop()

    assert (health.code, health.out, code) == (0, "serving\n", 0)
    assert server.output().splitlines()[-1].endswith("info    stopped")


def test_serve_reads_environment_and_logs_json_until_sigterm(tmp_path: Path) -> None:
    write_policies(tmp_path, GOOD)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "extproc.cli", "serve"],
        stderr=subprocess.PIPE,
        text=True,
        env={
            "LOOPGUARD_POLICY": f"{tmp_path}/policies",
            "LOOPGUARD_LISTEN": "127.0.0.1:0",
            "LOOPGUARD_ADMIN": "127.0.0.1:0",
            "LOOPGUARD_DRAIN_DELAY": "0",
            "LOOPGUARD_LOG_FORMAT": "json",
        },
    )
    try:
        assert process.stderr is not None
        first = json.loads(process.stderr.readline())
        process.send_signal(signal.SIGTERM)
        rest = [json.loads(line) for line in process.communicate(timeout=PATIENCE)[1].splitlines()]
    finally:
        process.kill()

    assert (first["message"], first["policies"], first["store"]) == ("serving", 1, "memory://")
    assert re.fullmatch(r"127\.0\.0\.1:[1-9]\d*", first["listen"])
    assert ([line["message"] for line in rest], process.returncode) == (["draining", "stopped"], 0)


_HANGUP = """
import os, signal
from extproc import reload
real = reload.read_all
def read_all(paths):
    print("hangup", flush=True)
    os.kill(os.getpid(), signal.SIGHUP)
    return real(paths)
reload.read_all = read_all
"""


def test_sighup_during_start_is_survived(tmp_path: Path) -> None:
    write_policies(tmp_path, GOOD)
    server = Loopguard(tmp_path, preamble=_HANGUP)  # waits until it serves
    server.stop()

    assert "hangup" in server.output()
    assert server.wait() == 0
