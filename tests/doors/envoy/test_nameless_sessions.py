"""Real SDKs with an API key and nothing else, through the real Envoy, two replicas and Valkey: limits of each conversation.

Where nothing tells conversations apart, because the server keeps them, they have limits of their caller's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.support.documents import bundle
from tests.support.harness import Stack, envoy_version, eventually, stack
from tests.support.servers import server
from tests.support.usage import Model, whole

pytestmark = pytest.mark.skipif(envoy_version() < (1, 38), reason="this Envoy reads no answers: these requests are NOT tested")

MOST = 5
STEPS = 3

POLICIES = bundle(
    {
        "id": "agents",
        "spec": {
            "selector": {"pathPrefix": "/"},
            "limit_keys": ["header:authorization", "header:x-api-key"],
            "session_limits": {"max_steps": STEPS},
            "unnamed_limits": {"max_steps": MOST},
        },
    }
)

CHAT = whole(object="chat.completion", choices=[{"index": 0, "message": {"role": "assistant", "content": "x"}}])
RESPONSE = whole(object="response", id="resp_2", output=[])
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


def say(number: int) -> str:
    """What the assistant says in a turn."""
    return f"step {number}"


def go_on_openai(url: str, key: str, task: str, shown: Sequence[str]) -> None:
    """One turn of a conversation of chat completions, as an agent sends it."""
    import openai

    client = openai.OpenAI(api_key=key, base_url=f"{url}/v1", max_retries=0)
    turns = [({"role": "assistant", "content": text}, {"role": "user", "content": "go on"}) for text in shown]
    messages: Any = [{"role": "user", "content": task}, *(message for turn in turns for message in turn)]
    client.chat.completions.create(model="m", messages=messages)


def go_on_anthropic(url: str, key: str, task: str, shown: Sequence[str]) -> None:
    """The same of messages."""
    import anthropic

    client = anthropic.Anthropic(api_key=key, base_url=url, max_retries=0)
    turns = [({"role": "assistant", "content": text}, {"role": "user", "content": "go on"}) for text in shown]
    messages: Any = [{"role": "user", "content": task}, *(message for turn in turns for message in turn)]
    client.messages.create(model="m", max_tokens=9, messages=messages)


GO_ON: list[Any] = [pytest.param(go_on_openai, CHAT, id="openai"), pytest.param(go_on_anthropic, MESSAGE, id="anthropic")]


def passes(go_on: Callable[..., None], *asked: Any) -> bool:  # noqa: ANN401  # arguments
    """Whether a request is let through."""
    import anthropic
    import openai

    try:
        go_on(*asked)
    except (openai.RateLimitError, anthropic.RateLimitError):
        return False
    return True


@pytest.mark.parametrize(("go_on", "answer"), GO_ON)
def test_each_conversation_has_its_steps(gateway: tuple[Stack, Model], go_on: Callable[..., None], answer: Any) -> None:  # noqa: ANN401  # a Reply
    """Of two keys, two tasks of each, and two runs of each task that are equal until they part, all side by side."""
    made, model = gateway
    model.reply = answer
    url = f"http://127.0.0.1:{made.envoy.port}"
    runs = [(f"sk-{go_on.__name__}-{key}", task, run) for key in "ab" for task in ("mow", "rake") for run in "12"]

    passed = dict.fromkeys(runs, 0)
    for number in range(STEPS + 2):
        for key, task, run in runs:
            shown = [say(at) if at == 0 else f"{say(at)} of {run}" for at in range(number)]
            passed[key, task, run] += passes(go_on, url, key, task, shown)

    assert passed == dict.fromkeys(runs, STEPS)


def ask_openai(url: str, key: str, text: str) -> None:
    """One question in a conversation that the server keeps."""
    import openai

    client = openai.OpenAI(api_key=key, base_url=f"{url}/v1", max_retries=0)
    client.responses.create(model="m", input=text, previous_response_id="resp_1")


def count_passed(ask: Callable[[str, str, str], None], url: str, key: str) -> tuple[int, str]:
    """How many different requests pass before the first one is refused, and what that says."""
    import openai

    for number in range(2 * MOST):
        try:
            ask(url, key, f"step {number}")
        except openai.RateLimitError as refusal:
            return number, str(refusal)
    return 2 * MOST, ""


def test_unnamed_limits_refuse_at_their_number(gateway: tuple[Stack, Model]) -> None:
    """Whichever replica is asked, and whichever other key has used up its own."""
    made, model = gateway
    model.reply = RESPONSE
    url = f"http://127.0.0.1:{made.envoy.port}"

    for key in ("sk-kept-a", "sk-kept-b"):
        passed, said = count_passed(ask_openai, url, key)
        assert passed == MOST
        assert "name no session have used 5 of their 5 steps" in said

    def find() -> bool:
        _, text = made.replicas[0].get("/sessions")
        rows = json.loads(text)["sessions"]
        return len([row for row in rows if row["session"] == "unnamed" and row["unnamed_requests"] == MOST + 1]) >= 2

    assert eventually(find, "the rows of both callers")
