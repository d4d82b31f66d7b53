"""`loopguard serve` without a policy, behind the real Envoy: clients show an API key, and nothing else to know them by."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from extproc.cli.main import main
from tests.support.harness import Loopguard, Stack, eventually, stack

ENFORCE = "`loopguard init > policies/agents.json`, then `loopguard serve --policy policies/`"
TURNS = 9


@pytest.fixture(scope="module")
def watching() -> Iterator[Stack]:
    """Upstream, a Loopguard without a policy, and Envoy, after a stuck agent."""
    with stack(None, shadow_mode="partial") as made:
        run_stuck_agent(f"http://127.0.0.1:{made.envoy.port}", "sk-stuck")
        yield made


def run_stuck_agent(url: str, api_key: str) -> None:
    """An agent on OpenAI's SDK whose tool says the same every time, until it has called it `TURNS` times."""
    client = openai.OpenAI(api_key=api_key, base_url=f"{url}/v1", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "Tell me when build 17 is done."}]
    for turn in range(TURNS):
        client.chat.completions.create(model="m", messages=messages)
        call = {"id": f"call_{turn}", "type": "function", "function": {"name": "check", "arguments": '{"build": 17}'}}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{turn}", "content": "pending"},
        ]


def ask(replica: Loopguard, path: str) -> dict[str, Any]:
    """What an admin page says."""
    status, body = replica.get(path)
    assert status == 200, body
    report: dict[str, Any] = json.loads(body)
    return report


def test_the_loop_of_an_agent_with_an_api_key_alone_is_seen(watching: Stack) -> None:
    """/loops has it, with what the preset would have done, and no request is touched."""
    report = eventually(lambda: ask(watching.loopguard, "/loops") or None)

    loops = [loop for loop in report["loops"] if loop["tools"] == ["check"]]
    assert loops
    assert {loop["mode"] for loop in loops} == {"shadow"}
    assert sum(loop["shadow"].get("steer", 0) for loop in loops) >= 1
    assert report["total"]["requests_not_sent_on"] == 0
    assert len(watching.upstream.seen) == TURNS
    for place, seen in enumerate(watching.upstream.seen):
        messages = json.loads(seen.body)["messages"]
        assert len(messages) == 1 + 2 * place
        assert {message["content"] for message in messages if message["role"] == "tool"} <= {"pending"}
        assert seen.header("x-fairvisor-warning") is None


def test_everything_says_that_it_only_watches_and_how_to_enforce(watching: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """The log, /readyz, /policies, the page, `top` and `doctor`."""
    replica = watching.loopguard
    assert ENFORCE in replica.output()
    assert ENFORCE in ask(replica, "/readyz")["watching"]
    policies = ask(replica, "/policies")
    assert ENFORCE in policies["watching"]
    assert policies["modes"] == {"agents": "shadow"}
    assert "only watches" in replica.get("/")[1]

    assert main(["top", "--once", "--admin", replica.admin_url]) == 0
    assert ENFORCE in " ".join(capsys.readouterr().out.split())
    main(["doctor", "--admin", replica.admin_url])
    assert f"change: {ENFORCE}" in capsys.readouterr().out


def test_a_server_with_a_policy_says_nothing_of_that() -> None:
    """It is for those who have none."""
    document = {"id": "p", "spec": {"selector": {"pathPrefix": "/"}, "limit_keys": ["ip:address"]}}
    document["spec"]["loop_detection"] = {"enabled": True, "window_seconds": 60, "threshold_identical_requests": 5}  # type: ignore[index]
    with stack(document) as made:
        assert "watching" not in ask(made.loopguard, "/readyz") | ask(made.loopguard, "/policies")
        assert "only watches" not in made.loopguard.get("/")[1] + made.loopguard.output()


def test_an_empty_variable_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A template that lacks a value must not turn a guard into a watcher in silence."""
    monkeypatch.setenv("LOOPGUARD_POLICY", "")

    assert main(["serve"]) == 2
    assert "LOOPGUARD_POLICY is empty; " in capsys.readouterr().err
