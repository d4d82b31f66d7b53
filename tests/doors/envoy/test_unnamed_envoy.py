"""Real SDKs with an API key and nothing else, through the real Envoy, two replicas and Valkey: each caller has its limits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.support.documents import bundle
from tests.support.harness import Stack, envoy_version, eventually, stack
from tests.support.servers import server
from tests.support.usage import Model, whole

pytestmark = pytest.mark.skipif(envoy_version() < (1, 38), reason="this Envoy reads no answers: these requests are NOT tested")

MOST = 5

POLICIES = bundle(
    {
        "id": "agents",
        "spec": {
            "selector": {"pathPrefix": "/"},
            "limit_keys": ["header:authorization", "header:x-api-key"],
            "session_limits": {"max_steps": 2},
            "unnamed_limits": {"max_steps": MOST},
        },
    }
)

CHAT = whole(object="chat.completion", choices=[{"index": 0, "message": {"role": "assistant", "content": "x"}}])
MESSAGE = whole(type="message", role="assistant", content=[{"type": "text", "text": "x"}])


@pytest.fixture(scope="module")
def gateway() -> Iterator[tuple[Stack, Model]]:
    """Envoy before a model, two replicas, Valkey."""
    model = Model()
    try:
        with server() as valkey:
            flags = ("--store", f"redis://{valkey.address}")
            with stack(POLICIES, *flags, replicas=2, upstream=model.address) as made:
                yield made, model
                for replica in made.replicas:
                    replica.stop()
    finally:
        model.stop()


def ask_openai(url: str, key: str, text: str) -> None:
    """One question."""
    client = openai.OpenAI(api_key=key, base_url=f"{url}/v1", max_retries=0)
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])


def ask_anthropic(url: str, key: str, text: str) -> None:
    """One question."""
    client = anthropic.Anthropic(api_key=key, base_url=url, max_retries=0)
    client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": text}])


def count_passed(ask: Callable[[str, str, str], None], url: str, key: str) -> tuple[int, str]:
    """How many different requests pass before the first one is refused, and what that says."""
    for number in range(2 * MOST):
        try:
            ask(url, key, f"step {number}")
        except (openai.RateLimitError, anthropic.RateLimitError) as refusal:
            return number, str(refusal)
    return 2 * MOST, ""


@pytest.mark.parametrize(("ask", "answer"), [(ask_openai, CHAT), (ask_anthropic, MESSAGE)], ids=["openai", "anthropic"])
def test_unnamed_limits_refuse_at_their_number(
    gateway: tuple[Stack, Model],
    ask: Callable[[str, str, str], None],
    answer: Any,  # noqa: ANN401  # a Reply
) -> None:
    """Whichever replica is asked, and whichever other key has used up its own."""
    made, model = gateway
    model.reply = answer
    url = f"http://127.0.0.1:{made.envoy.port}"

    for key in (f"sk-{ask.__name__}-a", f"sk-{ask.__name__}-b"):
        passed, said = count_passed(ask, url, key)
        assert passed == MOST
        assert "name no session have used 5 of their 5 steps" in said

    def find() -> bool:
        _, text = made.replicas[0].get("/sessions")
        rows = json.loads(text)["sessions"]
        return len([row for row in rows if row["session"] == "unnamed" and row["unnamed_requests"] == MOST + 1]) >= 2

    assert eventually(find, "the rows of both callers")
