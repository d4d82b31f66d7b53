"""A real server that loses its keys, or would lose them: what operators are told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from extproc.cli.main import main
from extproc.store.care import EMPTIED
from tests.support.documents import bundle
from tests.support.harness import Loopguard, eventually, write_policies
from tests.support.servers import Server, server

REFUSED = {"threshold_percent": 100, "action": "reject"}
DAILY = {"period": "1d", "cost_key": "fixed", "budget": 5, "staged_actions": [REFUSED]}
RULE = {"name": "daily", "limit_keys": ["credential"], "algorithm": "cost_based", "algorithm_config": DAILY}
BUDGET = {"id": "money", "spec": {"selector": {"pathPrefix": "/"}, "mode": "enforce", "rules": [RULE]}}


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[Server, Loopguard, Path]]:
    """A server, a replica with a budget that uses it, and the file of its events."""
    with server() as one:
        write_policies(tmp_path, bundle(BUDGET))
        events = tmp_path / "events.jsonl"
        guard = Loopguard(tmp_path, "--store", f"redis://{one.address}", "--events", str(events))
        try:
            yield one, guard, events
        finally:
            guard.stop()


def list_findings(guard: Loopguard, reason: str) -> list[str]:
    """The levels of the findings with a reason."""
    found = guard.ask("/coverage")["findings"]
    return [each["level"] for each in found if each["reason"] == reason]


def test_an_emptied_store_is_told_everywhere(
    guarded: tuple[Server, Loopguard, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """In the log, an event, a metric, the page and doctor; the mark has no end, and is put back."""
    one, guard, events = guarded
    kept = one.client().get("loopguard:secret:epoch:0")
    assert kept is not None
    assert one.client().ttl("loopguard:secret:epoch:0") == -1
    assert list_findings(guard, "store_emptied") == []

    one.client().flushall()

    assert eventually(lambda: list_findings(guard, "store_emptied") == ["problem"])
    assert EMPTIED in guard.output()
    assert eventually(lambda: "io.loopguard.store.emptied.v1" in events.read_text())
    assert "loopguard_store_emptied_total 1.0" in guard.get("/metrics")[1]
    assert EMPTIED in guard.get("/coverage")[1]
    assert EMPTIED in guard.ask("/loops")["coverage"][0]["line"]
    assert main(["doctor", "--admin", guard.admin_url]) == 1
    assert EMPTIED in capsys.readouterr().out
    assert one.client().get("loopguard:secret:epoch:0") not in (None, kept)


def test_doctor_asks_whether_the_store_keeps_anything(guarded: tuple[Server, Loopguard, Path]) -> None:
    """The tests' server keeps nothing."""
    _, guard, _ = guarded

    assert list_findings(guard, "store_persistence") == ["problem"]


@pytest.mark.parametrize(
    ("arguments", "level"), [(("--appendonly", "yes"), []), (("--save", "3600 1"), ["note"])], ids=["log", "snapshots"]
)
def test_a_store_that_keeps_what_it_has_is_no_problem(tmp_path: Path, arguments: tuple[str, str], level: list[str]) -> None:
    """An append-only log is enough; snapshots lose what came after the last one."""
    with server(*arguments) as one:
        write_policies(tmp_path, bundle(BUDGET))
        guard = Loopguard(tmp_path, "--store", f"redis://{one.address}")
        try:
            assert list_findings(guard, "store_persistence") == level
        finally:
            guard.stop()


def test_a_user_that_may_not_ask_is_told_so(tmp_path: Path) -> None:
    """What a server keeps is then unknown, and nothing else depends on it."""
    with server() as one:
        one.client().execute_command("ACL", "SETUSER", "default", "on", "nopass", "~*", "+@all", "-info", "-config")
        write_policies(tmp_path, bundle(BUDGET))
        guard = Loopguard(tmp_path, "--store", f"redis://{one.address}")
        try:
            assert list_findings(guard, "store_persistence") == ["note"]
            assert json.loads(guard.get("/readyz")[1])["store"] == "ok"
        finally:
            guard.stop()
