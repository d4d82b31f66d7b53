"""What programs get from their SDKs when a request is refused: the real SDKs, through the real Envoy and Loopguard."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from extproc.request.notes import ANSWER
from tests.support.documents import bundle, policy
from tests.support.harness import Stack, stack
from tests.support.sdks import (
    SDKS,
    USER,
    Ask,
    Job,
    Reply,
    ask_anthropic_bedrock,
    ask_bedrock,
    ask_gemini,
    ask_ollama,
    ask_python,
)

RETRYING: dict[str, Ask] = {
    "gemini-retrying": partial(ask_python, partial(ask_gemini, retries=True)),
    **{f"bedrock-{mode}": partial(ask_python, partial(ask_bedrock, mode=mode)) for mode in ("legacy", "standard", "adaptive")},
}
"""SDKs that are configured to retry."""

OTHERS: dict[str, Ask] = {
    "ollama": partial(ask_python, ask_ollama),
    "anthropic-bedrock": partial(ask_python, ask_anthropic_bedrock),
}
"""SDKs of what is rarely called through a gateway."""

ASK = SDKS | RETRYING | OTHERS
KEYS = [f"header:{USER}"]
POLICIES = bundle(
    *(
        policy(str(status), {"pathPrefix": f"/{status}/"}, similarity="turns", reject_status=status, limit_keys=KEYS)
        for status in (429, "auto")
    ),
    policy("completion", {"pathPrefix": "/completion/"}, similarity="turns", refuse_as="completion", limit_keys=KEYS),
)


@pytest.fixture(scope="module")
def made() -> Iterator[Stack]:
    """Envoy and Loopguard."""
    with stack(POLICIES) as made:
        yield made


def ask(made: Stack, sdk: str, user: dict[str, str], path: str = "", *, stream: bool = False) -> tuple[Reply, int]:
    """What the SDK makes of the refusal of a stuck agent, and how many requests it sends for that."""
    before = made.envoy.stat("http.ingress.downstream_rq_total")
    reply = ASK[sdk](Job(f"http://127.0.0.1:{made.envoy.port}{path}", user[USER], stream))
    return reply, made.envoy.stat("http.ingress.downstream_rq_total") - before


SAID = "Loop detected: 3 of the last 3 turns were check with the same input and the same result"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("sdk", SDKS | RETRYING)
def test_each_sdk_shows_the_reason_and_sends_no_more(made: Stack, sdk: str, user: dict[str, str], stream: bool) -> None:
    """With the status `auto`, a final refusal is a 400, which no SDK sends again; its exception says what repeats."""
    reply, requests = ask(made, sdk, user, "/auto", stream=stream)

    assert (requests, reply.status) == (1, 400)
    assert SAID in reply.text
    assert "(recursive_loop_detected)" in reply.text


@pytest.mark.parametrize("sdk", ["bedrock", "gemini-retrying", "node-vercel-openai"])
def test_some_sdks_retry_429_whatever_it_says(made: Stack, sdk: str, user: dict[str, str]) -> None:
    """Which is what `auto` is for: once none of them does any more, it can go."""
    assert ask(made, sdk, user, "/429")[1] == 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("sdk", [*SDKS, *OTHERS])
def test_a_refusal_may_be_an_answer_of_the_model(made: Stack, sdk: str, user: dict[str, str], stream: bool) -> None:
    """Each SDK takes it for one, whole or streamed as it asked; it sends one request, which goes no further."""
    seen = len(made.upstream.seen)

    reply, requests = ask(made, sdk, user, "/completion", stream=stream)

    assert reply.status == 0
    assert reply.text.startswith(f"{ANSWER}\n{SAID}")
    assert " (recursive_loop_detected)\n" in reply.text
    assert (requests, len(made.upstream.seen)) == (1, seen)


def test_an_answer_of_the_model_is_logged_as_a_refusal(made: Stack, user: dict[str, str]) -> None:
    """Envoy's access log shows it under status 200, with the action and the reason."""
    ask(made, "chat", user, "/completion")

    entry = made.envoy.logged("/completion/v1/chat/completions", status=200, details="loop_detected")
    assert (entry["loop_action"], entry["loop_policy"]) == ("reject", "completion")
