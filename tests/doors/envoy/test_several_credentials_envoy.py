"""Through the real Envoy: a header that changes with every request does not make its client a new caller."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import bundle, policy
from tests.support.harness import PATIENCE, Answer, Stack, eventually, stack

TOKEN = "correct-horse-battery-staple"
PROMPT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
NUMBERS = count()
BUDGET = {
    "id": "budget",
    "spec": {
        "selector": {"pathPrefix": "/budget/"},
        "rules": [
            {
                "name": "requests",
                "limit_keys": ["credential"],
                "algorithm": "token_bucket",
                "algorithm_config": {"tokens_per_second": 0.001, "burst": 3},
            }
        ],
    },
}
POLICIES = bundle(policy("loop", {"pathPrefix": "/loop/"}, limit_keys=["credential"]), BUDGET)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One for all tests, with a token for orders."""
    tokens: Path = tmp_path_factory.mktemp("operator") / "tokens"
    tokens.write_text(TOKEN)
    with stack(POLICIES, "--admin-token-file", str(tokens)) as running:
        yield running


def send(made: Stack, path: str, secret: str, body: bytes = PROMPT) -> Answer:
    """Send a request with a credential behind one that is new each time."""
    shown = {"authorization": f"Bearer {secret}", "x-api-key": f"junk-{next(NUMBERS)}", "content-type": "application/json"}
    return made.send(path, method="POST", body=body, headers=shown)


def ask(made: Stack, path: str, secret: str, body: bytes = PROMPT) -> int:
    """The status of such a request."""
    return send(made, path, secret, body).status


def order(made: Stack, **fields: Any) -> None:  # noqa: ANN401  # of an order
    """Give an order."""
    connection = http.client.HTTPConnection("127.0.0.1", made.loopguard.admin_port, timeout=PATIENCE)
    try:
        headers = {"content-type": "application/json", "authorization": f"Bearer {TOKEN}"}
        connection.request("POST", "/overrides", json.dumps(fields).encode(), headers)
        answer = connection.getresponse()
        assert answer.status == 201, answer.read()
    finally:
        connection.close()


def test_a_loop_behind_junk_is_refused(made: Stack) -> None:
    """The third request is; that of another client, with junk of its own, is not."""
    assert [ask(made, "/loop/v1/messages", "sk-ann") for _ in range(3)] == [200, 200, 429]
    assert ask(made, "/loop/v1/messages", "sk-bob") == 200


def test_a_budget_behind_junk_is_used_up(made: Stack) -> None:
    """Four different requests are one too many for a budget of three."""
    answers = [ask(made, "/budget/v1/messages", "sk-ann", PROMPT + b" " * spaces) for spaces in range(4)]

    assert answers == [200, 200, 200, 429]
    assert ask(made, "/budget/v1/messages", "sk-bob") == 200


def test_a_block_meets_a_credential_behind_junk(made: Stack) -> None:
    """An operator blocks the caller by its credential."""
    assert ask(made, "/loop/v1/messages", "sk-eve") == 200

    order(made, kind="block", caller={"credential": "sk-eve"}, seconds=60, reason="stolen")

    def is_blocked() -> bool:
        answer = send(made, f"/loop/v1/messages?{next(NUMBERS)}", "sk-eve")  # no loop
        return answer.headers.get("x-fairvisor-reason") == "blocked"

    eventually(is_blocked, "the block")
    assert ask(made, "/loop/v1/messages", "sk-dan") == 200
