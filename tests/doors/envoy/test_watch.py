"""`loopguard serve` without a policy, behind the real Envoy: clients show an API key, and nothing else to know them by."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from extproc.cli.main import main
from tests.support.harness import Stack, envoy_version, eventually, stack
from tests.support.pages import list_loops

pytestmark = pytest.mark.skipif(envoy_version() < (1, 38), reason="this Envoy has no shadow mode partial: it is NOT tested")

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
    import openai

    client = openai.OpenAI(api_key=api_key, base_url=f"{url}/v1", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "Tell me when build 17 is done."}]
    for turn in range(TURNS):
        client.chat.completions.create(model="m", messages=messages)
        call = {"id": f"call_{turn}", "type": "function", "function": {"name": "check", "arguments": '{"build": 17}'}}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{turn}", "content": "error: no such build"},
        ]


def test_the_loop_of_an_agent_with_an_api_key_alone_is_seen(watching: Stack) -> None:
    """/loops has it, with what the preset would have done, and no request is touched."""
    report = eventually(lambda: watching.loopguard.ask("/loops") or None)

    loops = [loop for loop in list_loops(report) if loop["tools"] == ["check"]]
    assert loops
    assert {loop["mode"] for loop in loops} == {"shadow"}
    (loop,) = [loop for loop in loops if loop["detector"] == "turns"]
    assert (loop["session"], sum(loop["shadow"].values())) == (None, TURNS - 3)
    assert loop["shadow"] == {"steer": 2, "land": 2, "reject": 2}
    assert report["total"]["requests_not_sent_on"] == 0
    assert len(watching.upstream.seen) >= TURNS
    for place, seen in enumerate(watching.upstream.seen[:TURNS]):
        messages = json.loads(seen.body)["messages"]
        assert len(messages) == 1 + 2 * place
        assert {message["content"] for message in messages if message["role"] == "tool"} <= {"error: no such build"}
        assert seen.header("x-fairvisor-warning") is None


def ask_openai(url: str, key: str) -> object:
    """Chat completions."""
    import openai

    client = openai.OpenAI(api_key=key, base_url=f"{url}/v1", max_retries=0)
    return client.chat.completions.create(model="m", messages=[{"role": "user", "content": "again"}])


def ask_responses(url: str, key: str) -> object:
    """Responses."""
    import openai

    return openai.OpenAI(api_key=key, base_url=f"{url}/v1", max_retries=0).responses.create(model="m", input="again")


def ask_anthropic(url: str, key: str) -> object:
    """Messages."""
    import anthropic

    client = anthropic.Anthropic(api_key=key, base_url=url, max_retries=0)
    return client.messages.create(model="m", max_tokens=64, messages=[{"role": "user", "content": "again"}])


def ask_gemini(url: str, key: str) -> object:
    """generateContent, below /v1beta/."""
    from google import genai
    from google.genai import types

    client = genai.Client(api_key=key, http_options=types.HttpOptions(base_url=url, api_version="v1beta"))
    return client.models.generate_content(model="m", contents="again")


def ask_bedrock(url: str, key: str) -> object:
    """Converse, signed anew every time."""
    import boto3
    from botocore.config import Config

    config = Config(retries={"total_max_attempts": 1})
    keys = {"aws_access_key_id": key, "aws_secret_access_key": "secret"}
    client: Any = boto3.client("bedrock-runtime", endpoint_url=url, region_name="us-east-1", config=config, **keys)
    return client.converse(modelId="m", messages=[{"role": "user", "content": [{"text": "again"}]}])


def ask_ollama(url: str, key: str) -> object:
    """/api/chat."""
    import ollama

    client = ollama.Client(host=url, headers={"authorization": f"Bearer {key}"})
    return client.chat(model="m", messages=[{"role": "user", "content": "again"}])


SDKS: dict[str, tuple[Callable[[str, str], object], str]] = {
    "openai chat": (ask_openai, "/v1/chat/completions"),
    "openai responses": (ask_responses, "/v1/responses"),
    "anthropic": (ask_anthropic, "/v1/messages"),
    "google-genai": (ask_gemini, "/v1beta/models/m:generateContent"),
    "boto3": (ask_bedrock, "/model/m/converse"),
    "ollama": (ask_ollama, "/api/chat"),
}


@pytest.mark.parametrize("sdk", SDKS)
def test_the_same_request_again_is_a_loop_of_its_key(watching: Stack, sdk: str) -> None:
    """On each API's own path: ten times from one key are a loop, and those of another key beside it are one of its own."""
    send, path = SDKS[sdk]
    before = len(watching.upstream.seen)
    for number in range(14):
        with suppress(Exception):  # the upstream's answer is no model's
            send(f"http://127.0.0.1:{watching.envoy.port}", f"sk-{sdk.replace(' ', '-')}-{'one' if number % 7 < 5 else 'two'}")

    loops = [
        loop for loop in list_loops(watching.loopguard.ask("/loops")) if (loop["path"], loop["detector"]) == (path, "again")
    ]
    assert [(loop["count"], loop["shadow"]) for loop in loops] == [(10, {"throttle": 6})]
    assert len(watching.upstream.seen) - before == 14
    assert "sk-" not in watching.loopguard.get("/loops")[1] + watching.loopguard.output()


def test_everything_says_that_it_only_watches_and_how_to_enforce(watching: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """The log, /readyz, /policies, the page, `top` and `doctor`."""
    replica = watching.loopguard
    assert ENFORCE in replica.output()
    assert ENFORCE in replica.ask("/readyz")["watching"]
    policies = replica.ask("/policies")
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
        assert "watching" not in made.loopguard.ask("/readyz") | made.loopguard.ask("/policies")
        assert "only watches" not in made.loopguard.get("/")[1] + made.loopguard.output()


def test_an_empty_variable_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A template that lacks a value must not turn a guard into a watcher in silence."""
    monkeypatch.setenv("LOOPGUARD_POLICY", "")

    assert main(["serve"]) == 2
    assert "LOOPGUARD_POLICY is empty; " in capsys.readouterr().err
