"""Through the real Envoy: a header that changes with every request does not make its client a new caller."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import httpx
import pytest

from tests.support.budget_policies import bucket
from tests.support.documents import bare_policy, bundle, policy
from tests.support.harness import PATIENCE, Answer, Stack, eventually, stack

TOKEN = "correct-horse-battery-staple"
PROMPT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
NUMBERS = count()
BUDGET = bare_policy("budget", "/budget/", rules=[bucket(0.001, keys=["credential"])])
POLICIES = bundle(policy("loop", {"pathPrefix": "/loop/"}, limit_keys=["credential"]), BUDGET)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One for all tests, with a token for orders."""
    tokens: Path = tmp_path_factory.mktemp("operator") / "tokens"
    tokens.write_text(TOKEN)
    with stack(POLICIES, "--admin-token-file", str(tokens)) as running:
        yield running


def ask(made: Stack, path: str, secret: str, body: bytes = PROMPT) -> Answer:
    """Send a request with a credential behind one that is new each time."""
    return made.post(path, body, {"authorization": f"Bearer {secret}", "x-api-key": f"junk-{next(NUMBERS)}"})


def test_a_client_behind_junk_is_one_caller(made: Stack) -> None:
    """Its third equal request is a loop, its fourth different one is over a budget of three; other clients have their own."""
    loop = [ask(made, "/loop/v1/messages", "sk-ann").status for _ in range(3)]
    used = [ask(made, "/budget/v1/messages", "sk-ann", PROMPT + b" " * spaces).status for spaces in range(4)]

    assert (loop, used) == ([200, 200, 429], [200, 200, 200, 429])
    assert [ask(made, path, "sk-bob").status for path in ("/loop/v1/messages", "/budget/v1/messages")] == [200, 200]


def test_a_block_meets_a_credential_behind_junk(made: Stack) -> None:
    """An operator blocks the caller by its credential."""
    assert ask(made, "/loop/v1/messages", "sk-eve").status == 200

    order = {"kind": "block", "caller": {"credential": "sk-eve"}, "seconds": 60, "reason": "stolen"}
    answer = httpx.post(
        f"{made.loopguard.admin_url}/overrides", json=order, headers={"authorization": f"Bearer {TOKEN}"}, timeout=PATIENCE
    )

    assert answer.status_code == 201
    path = "/loop/v1/messages?other"
    eventually(lambda: ask(made, path, "sk-eve").headers.get("x-fairvisor-reason") == "blocked", "the block")
    assert ask(made, "/loop/v1/messages", "sk-dan").status == 200
