"""A real server that loses its keys, or would lose them: what operators are told."""

import json
from pathlib import Path

import pytest

from extproc.cli.main import main
from extproc.store.care import EMPTIED
from tests.support.documents import bundle
from tests.support.harness import Loopguard, eventually, write_policies
from tests.support.servers import server

REFUSED = {"threshold_percent": 100, "action": "reject"}
DAILY = {"period": "1d", "cost_key": "fixed", "budget": 5, "staged_actions": [REFUSED]}
RULE = {
    "name": "daily",
    "limit_keys": ["credential"],
    "algorithm": "cost_based",
    "algorithm_config": DAILY,
}
BUDGET = {
    "id": "money",
    "spec": {"selector": {"pathPrefix": "/"}, "mode": "enforce", "rules": [RULE]},
}


def list_findings(guard: Loopguard, reason: str) -> list[str]:
    found = guard.ask("/coverage")["findings"]
    return [each["level"] for each in found if each["reason"] == reason]


def test_emptied_store_is_reported_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_policies(tmp_path, bundle(BUDGET))
    events = tmp_path / "events.jsonl"
    with server() as one:
        guard = Loopguard(tmp_path, "--store", f"redis://{one.address}", "--events", str(events))
        try:
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
        finally:
            guard.stop()


KEPT: dict[str, tuple[list[str], str, list[str]]] = {
    "nothing": ([], "PING", ["problem"]),
    "a log": (["--appendonly", "yes"], "PING", []),
    "snapshots": (["--save", "3600 1"], "PING", ["note"]),
    "hidden": ([], "ACL SETUSER default on nopass ~* +@all -info -config", ["note"]),
}
"""What a server keeps, how it is started, a command to it, and what doctor finds."""


@pytest.mark.parametrize("case", KEPT)
def test_doctor_reports_the_persistence_of_the_store(tmp_path: Path, case: str) -> None:
    arguments, command, levels = KEPT[case]
    with server(*arguments) as one:
        one.client().execute_command(*command.split())
        write_policies(tmp_path, bundle(BUDGET))
        guard = Loopguard(tmp_path, "--store", f"redis://{one.address}")
        try:
            assert list_findings(guard, "store_persistence") == levels
            assert json.loads(guard.get("/readyz")[1])["store"] == "ok"
        finally:
            guard.stop()
