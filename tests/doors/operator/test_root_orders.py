"""Orders about the session at the root of agents, through the real Envoy, on two replicas that share Valkey."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from extproc.cli.main import main
from tests.support.documents import bundle
from tests.support.harness import Stack, eventually, stack
from tests.support.servers import server

TEAM = "x-team"
ROOT_KEY = "header:x-claude-code-session-id"
LOOP: dict[str, Any] = {"enabled": True, "similarity": "turns", "threshold_identical_requests": 3, "action": "reject"}
GUARDS: dict[str, dict[str, Any]] = {
    "loops": {"loop_detection": LOOP},
    "exact": {"loop_detection": LOOP | {"similarity": "exact", "window_seconds": 60}},
    "limits": {"session_limits": {"max_steps": 1_000}},
}
POLICIES = bundle(
    *[
        {"id": name, "spec": {"selector": {"pathPrefix": f"/{name}/"}, "limit_keys": [f"header:{TEAM}"], **guard}}
        for name, guard in GUARDS.items()
    ]
)
_NUMBERS = count()


class Running(NamedTuple):
    """Envoy, and the credential that its Loopguards accept."""

    stack: Stack
    tokens: Path

    def order(self, kind: str, root: str) -> int:
        """Give an order to the first replica; the exit code of the command."""
        admin = self.stack.loopguard.admin_url
        return main([kind, "--session", f"{ROOT_KEY}={root}", "--admin", admin, "--token-file", str(self.tokens)])

    def ask(self, policy: str, root: str, agent: str = "") -> int:
        """The status of a request of its own."""
        said = {"role": "user", "content": f"task {next(_NUMBERS)}"}
        names = {"x-claude-code-session-id": root, **({"x-claude-code-agent-id": agent} if agent else {})}
        body = json.dumps({"model": "m", "messages": [said]}).encode()
        headers = {TEAM: "t", "content-type": "application/json", **names}
        return self.stack.send(f"/{policy}/v1/chat/completions", method="POST", body=body, headers=headers).status

    def ask_everywhere(self, policy: str, root: str) -> set[int]:
        """The statuses of the root, of two agents and of a new one, four of each, so that both replicas meet some."""
        return {self.ask(policy, root, agent) for agent in ("", "a", "b", f"new{next(_NUMBERS)}") for _ in range(4)}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """One for all tests."""
    with tempfile.TemporaryDirectory(prefix="lg") as name, server() as valkey:
        tokens = Path(name) / "tokens"
        tokens.write_text("correct-horse-battery-staple\n")
        flags = ("--store", f"redis://{valkey.address}", "--admin-token-file", str(tokens))
        with stack(POLICIES, *flags, replicas=2) as made:
            yield Running(made, tokens)


@pytest.mark.parametrize("policy", GUARDS)
@pytest.mark.parametrize("kind", ["kill", "block"])
def test_an_order_about_a_root_ends_its_tree_on_all_replicas(
    running: Running, kind: str, policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether sessions are limited or only loops are detected; other sessions go on, and a release undoes a kill."""
    root, other = f"{kind}-{policy}", f"{kind}-{policy}-other"
    assert running.ask_everywhere(policy, root) == {200}

    assert running.order(kind, root) == 0
    eventually(lambda: running.ask_everywhere(policy, root) == {429}, "the end of the tree")

    assert capsys.readouterr().err == ""
    assert running.ask_everywhere(policy, other) == {200}
    if kind == "kill":
        assert running.order("release", root) == 0
        eventually(lambda: running.ask_everywhere(policy, root) == {200}, "the release")
