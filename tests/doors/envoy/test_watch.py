"""`loopguard serve` without a policy, behind the real Envoy: clients show an API key, and nothing else to know them by."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from extproc.cli.main import main
from tests.support.documents import policy
from tests.support.harness import Stack, envoy_version, eventually, stack
from tests.support.pages import list_loops
from tests.support.turn_writers import Did, as_chat

pytestmark = pytest.mark.skipif(envoy_version() < (1, 38), reason="this Envoy has no shadow mode partial: it is NOT tested")

ENFORCE = "`loopguard init > policies/agents.json`, then `loopguard serve --policy policies/`"
STUCK = Did((("check", {"build": 17}),), ("error: no such build",))
TURNS = 9


@pytest.fixture(scope="module")
def watching() -> Iterator[Stack]:
    """Upstream, a Loopguard without a policy, and Envoy, after a stuck agent."""
    with stack(None, shadow_mode="partial") as made:
        for turn in range(TURNS):
            made.post("/v1/chat/completions", as_chat([STUCK] * turn), {"authorization": "Bearer sk-stuck"})
        yield made


def test_the_loop_of_an_agent_with_an_api_key_alone_is_seen(watching: Stack) -> None:
    """/loops has it, with what the preset would have done, and no request is touched."""
    report = eventually(lambda: watching.loopguard.ask("/loops") or None)

    loops = [loop for loop in list_loops(report) if loop["tools"] == ["check"]]
    assert {loop["mode"] for loop in loops} == {"shadow"}
    (loop,) = [loop for loop in loops if loop["detector"] == "turns"]
    assert (loop["session"], loop["shadow"]) == (None, {"steer": 2, "land": 2, "reject": 2})
    assert report["total"]["requests_not_sent_on"] == 0
    for turn, seen in enumerate(watching.upstream.seen[:TURNS]):
        assert json.loads(seen.body) == as_chat([STUCK] * turn)
        assert seen.header("x-fairvisor-warning") is None


SIGNED = "AWS4-HMAC-SHA256 Credential={key}/20261128/us-east-1/bedrock/aws4_request, SignedHeaders=host, Signature={number}"
ASKED: Any = [{"role": "user", "content": "again"}]
CALLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "/v1/chat/completions": ("authorization", "Bearer {key}", {"messages": ASKED}),
    "/v1/responses": ("authorization", "Bearer {key}", {"input": "again"}),
    "/v1/messages": ("x-api-key", "{key}", {"max_tokens": 64, "messages": ASKED}),
    "/v1beta/models/m:generateContent": (
        "x-goog-api-key",
        "{key}",
        {"contents": [{"role": "user", "parts": [{"text": "again"}]}]},
    ),
    "/model/m/converse": ("authorization", SIGNED, {"messages": [{"role": "user", "content": [{"text": "again"}]}]}),
    "/api/chat": ("authorization", "Bearer {key}", {"messages": ASKED}),
}
"""By path, the header that shows the key, how it does, and a request."""


@pytest.mark.parametrize("path", CALLS)
def test_the_same_request_again_is_a_loop_of_its_key(watching: Stack, path: str) -> None:
    """On each API's own path: ten times from one key are a loop, and those of another key beside it are one of its own."""
    header, shown, body = CALLS[path]
    for number in range(14):
        key = f"sk-{path.replace('/', '-')}-{'one' if number % 7 < 5 else 'two'}"
        assert watching.post(path, {"model": "m", **body}, {header: shown.format(key=key, number=number)}).status == 200

    loops = [loop for loop in list_loops(watching.loopguard.ask("/loops")) if loop["path"] == path]
    assert [(loop["count"], loop["shadow"]) for loop in loops if loop["detector"] == "again"] == [(10, {"throttle": 6})]
    assert "sk-" not in watching.loopguard.get("/loops")[1] + watching.loopguard.output()


def test_everything_says_that_it_only_watches_and_how_to_enforce(watching: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """The log, /readyz, /policies, the page, `top` and `doctor`."""
    replica = watching.loopguard
    policies = replica.ask("/policies")
    assert main(["top", "--once", "--admin", replica.admin_url]) == 0
    top = " ".join(capsys.readouterr().out.split())
    main(["doctor", "--admin", replica.admin_url])

    assert f"change: {ENFORCE}" in capsys.readouterr().out
    for told in (replica.output(), replica.ask("/readyz")["watching"], policies["watching"], top):
        assert ENFORCE in told
    assert policies["modes"] == {"agents": "shadow"}
    assert "only watches" in replica.get("/")[1]


def test_a_server_with_a_policy_says_nothing_of_that() -> None:
    """It is for those who have none."""
    with stack(policy("p", {"pathPrefix": "/"})) as made:
        assert "watching" not in made.loopguard.ask("/readyz") | made.loopguard.ask("/policies")
        assert "only watches" not in made.loopguard.get("/")[1] + made.loopguard.output()


def test_an_empty_variable_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A template that lacks a value must not turn a guard into a watcher in silence."""
    monkeypatch.setenv("LOOPGUARD_POLICY", "")

    assert main(["serve"]) == 2
    assert "LOOPGUARD_POLICY is empty; " in capsys.readouterr().err
