"""A night on call through real Envoy and Valkey: what is copied from one page holds under every policy."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.main import main
from tests.support.documents import bundle, policy
from tests.support.harness import Stack, eventually, stack
from tests.support.servers import server

KEYS = ("sk-ann", "sk-bob")
ALTERNATIVES = {"first_of": ["jwt:sub", "credential", "header:x-user-id"], "name": "caller"}
REFUSED = {"threshold_percent": 100, "action": "reject"}
DAILY = {"period": "1d", "cost_key": "fixed", "budget": 4, "staged_actions": [REFUSED]}
RULE = {"name": "daily", "limit_keys": ["header:authorization"], "algorithm": "cost_based", "algorithm_config": DAILY}
POLICIES = bundle(
    policy("loops", {"pathPrefix": "/v1/"}, limit_keys=[ALTERNATIVES], threshold_identical_requests=3),
    {
        "id": "sessions",
        "spec": {
            "selector": {"pathPrefix": "/v1/"},
            "mode": "enforce",
            "limit_keys": ["credential"],
            "session": {"keys": ["header:x-session-id"]},
            "session_limits": {"max_steps": 50},
        },
    },
    {"id": "money", "spec": {"selector": {"pathPrefix": "/v1/"}, "mode": "enforce", "rules": [RULE]}},
)


class Night:
    """A server behind Envoy, and an operator beside it."""

    def __init__(self, made: Stack, socket: Path) -> None:
        self.made = made
        self.admin = f"unix:{socket}"

    def send(self, key: str, times: int, word: str = "") -> list[int]:
        """The status of requests; without a word, of different ones."""
        statuses = []
        for place in range(times):
            body = json.dumps({"model": "m", "messages": [{"role": "user", "content": word or f"{key} {place}"}]}).encode()
            named = {"authorization": f"Bearer {key}", "content-type": "application/json", "x-session-id": "s"}
            statuses.append(self.made.send("/v1/chat/completions", method="POST", body=body, headers=named).status)
        return statuses

    def list_rows(self, page: str, name: str) -> list[dict[str, Any]]:
        """The rows of a page."""
        rows: list[dict[str, Any]] = self.made.loopguard.ask(page)[name]
        return rows

    def run(self, command: str) -> int:
        """Run a command that a page proposes."""
        return main([*shlex.split(command)[1:], "--admin", self.admin])


@pytest.fixture
def night() -> Iterator[Night]:
    """Everything running."""
    with server() as one, tempfile.TemporaryDirectory(prefix="lg") as name:
        socket = Path(name) / "admin.sock"
        flags = ("--store", f"redis://{one.address}", "--admin-socket", str(socket))
        with stack(POLICIES, *flags) as made:
            yield Night(made, socket)


def test_one_hash_frees_a_caller_everywhere(night: Night, capsys: pytest.CaptureFixture[str]) -> None:
    """The row of any page has it, links of another page find it, and the order says which policies it meets."""
    assert night.send(KEYS[0], 3, "go")[-1] == 429
    assert eventually(lambda: all([night.list_rows("/loops", "conversations"), night.list_rows("/sessions", "sessions")]))
    loops, sessions = night.list_rows("/loops", "conversations"), night.list_rows("/sessions", "sessions")
    budgets = night.list_rows("/budgets", "budgets")

    (caller,) = {row["caller"] for row in [*loops, *sessions, *budgets]}
    assert night.list_rows(f"/loops?caller={caller}", "conversations")
    assert night.run(f"loopguard allow --caller {caller} --for 1h") == 0
    assert capsys.readouterr().err == ""
    assert night.list_rows("/overrides", "overrides")[0]["meets"] == ["loops", "sessions", "money"]
    assert night.send(KEYS[0], 6, "go") == [200] * 6
    assert night.send(KEYS[1], 3, "go")[-1] == 429


def test_the_grant_that_the_page_proposes_lets_some_requests_pass(night: Night) -> None:
    """It raises the limit for a day where the whole budget would not be enough; another caller's stays."""
    assert night.send(KEYS[0], 6)[-1] == 429
    (row,) = night.list_rows("/budgets", "budgets")
    command = row["commands"]["free"]
    assert command.endswith("--amount 5 --for 1d")

    assert night.run(command) == 0

    assert night.send(KEYS[0], 5) == [200] * 5
    assert night.send(KEYS[0], 1) == [429]
    (row,) = night.list_rows("/budgets", "budgets")
    assert (row["limit"], row["left"]) == (9, 0)
    assert night.send(KEYS[1], 5) == [200] * 4 + [429]
    (standing,) = night.list_rows("/overrides", "overrides")
    assert night.run(f"loopguard overrides --revoke {standing['override']}") == 0
    assert eventually(lambda: night.list_rows("/budgets", "budgets") and night.send(KEYS[0], 1) == [429])
