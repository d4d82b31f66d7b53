"""An outage of a tool's server, on the real Envoy: many agents are stuck, and none of them is at fault."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.main import main
from tests.support.documents import bundle, policy
from tests.support.harness import eventually, stack
from tests.support.turn_writers import Did, as_chat

PATH = "/v1/chat/completions"
STEER: dict[str, Any] = {"similarity": "turns", "action": "steer", "escalate": {"reject": 5}}
POLICIES = bundle(policy("agents", {"pathExact": PATH}, limit_keys=["header:x-user-id"], **STEER))


def write_agent(task: str, error: str) -> bytes:
    """An agent that has called a tool six times, in its own words."""
    turns = [Did((("crm.find", {"q": task}),), (error,), "", f"{task}: try {number}", number) for number in range(1, 7)]
    return json.dumps(as_chat(turns)).encode()


def test_agents_wait_while_their_tool_is_down(capsys: pytest.CaptureFixture[str]) -> None:
    """From the fifth session on they go on with a note; page, `/loops`, `top` and events have one incident, and no content."""
    with tempfile.TemporaryDirectory(prefix="lg") as name, stack(POLICIES, "--events", f"{name}/events") as made:

        def send(caller: str, task: str, error: str = "error: disk quota of tenant 4711 exceeded") -> int:
            headers = {"x-user-id": caller, "content-type": "application/json"}
            return made.send(PATH, method="POST", body=write_agent(task, error), headers=headers).status

        assert [send(caller, task) for task in ("invoice", "lead") for caller in ("ann", "bob", "cid")] == [429] * 4 + [200] * 2
        assert [send("ann", "lead", "error: another"), send("bob", "invoice")] == [429, 200]

        (*_, seen) = made.upstream.seen
        assert b"Tool failing: " in seen.body
        assert b"Wait before you try it again." in seen.body
        report = made.loopguard.ask("/loops")
        (row,) = report["incidents"]
        assert (row["tool"], row["callers"], row["sessions"], row["not_refused"]) == ("crm.find", 3, 6, 3)
        for shown in (made.loopguard.get("/")[1], json.dumps(report)):
            assert "crm.find" in shown
            assert "4711" not in shown
        assert main(["top", "--once", "--admin", made.loopguard.admin_url]) == 0
        assert re.search("^crm.find fails .* wait +6 in 3 callers", capsys.readouterr().out, re.MULTILINE)
        grouped = made.loopguard.ask("/loops")
        (incident,) = grouped["incidents"]
        assert (incident["sessions"], incident["requests"], len(incident["conversations"])) == (6, 6, 3)
        (left,) = grouped["conversations"]  # its tool has failed in two ways, the last time for it alone
        assert (left["requests"], grouped["total"]["requests"]) == (2, 8)

        def list_events() -> list[dict[str, Any]]:
            events = [json.loads(line) for line in Path(name, "events").read_text().splitlines()]
            return [event for event in events if event["type"] == "io.loopguard.tool.failing.v1"]

        (event,) = eventually(list_events, "an event about the tool")
        assert (event["subject"], event["data"]["gen_ai.tool.name"]) == ("agents", "crm.find")
        assert event["data"]["sessions"] >= 5
