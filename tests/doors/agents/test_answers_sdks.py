"""What programs get from the real SDKs when a request is refused."""

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
    **{
        f"bedrock-{mode}": partial(ask_python, partial(ask_bedrock, mode=mode))
        for mode in ("legacy", "standard", "adaptive")
    },
}

OTHERS: dict[str, Ask] = {
    "ollama": partial(ask_python, ask_ollama),
    "anthropic-bedrock": partial(ask_python, ask_anthropic_bedrock),
}

ASK = SDKS | RETRYING | OTHERS
KEYS = [f"header:{USER}"]
POLICIES = bundle(
    *(
        policy(
            str(status),
            {"pathPrefix": f"/{status}/"},
            similarity="turns",
            reject_status=status,
            limit_keys=KEYS,
        )
        for status in (429, "auto")
    ),
    policy(
        "completion",
        {"pathPrefix": "/completion/"},
        similarity="turns",
        refuse_as="completion",
        limit_keys=KEYS,
    ),
)


@pytest.fixture(scope="module")
def made() -> Iterator[Stack]:
    with stack(POLICIES) as made:
        yield made


def ask(
    made: Stack, sdk: str, user: dict[str, str], path: str = "", *, stream: bool = False
) -> tuple[Reply, int]:
    """What the SDK makes of a stuck agent's refusal, and the number of requests that it sends."""
    before = made.envoy.stat("http.ingress.downstream_rq_total")
    reply = ASK[sdk](Job(f"http://127.0.0.1:{made.envoy.port}{path}", user[USER], stream))
    return reply, made.envoy.stat("http.ingress.downstream_rq_total") - before


SAID = "Loop detected: 3 of the last 3 turns were check with the same input and the same result"


@pytest.mark.parametrize(
    ("sdk", "stream"), [*((sdk, False) for sdk in SDKS | RETRYING), *((sdk, True) for sdk in SDKS)]
)
def test_sdk_shows_the_reason_and_does_not_retry(
    made: Stack, sdk: str, user: dict[str, str], stream: bool
) -> None:
    reply, requests = ask(made, sdk, user, "/auto", stream=stream)

    assert (requests, reply.status) == (1, 400)
    assert SAID in reply.text
    assert "(recursive_loop_detected)" in reply.text


@pytest.mark.parametrize("sdk", ["bedrock", "gemini-retrying", "node-vercel-openai"])
def test_some_sdks_retry_status_429(made: Stack, sdk: str, user: dict[str, str]) -> None:
    # This is why there is `auto`: when none of them retries any more, it can be removed.
    assert ask(made, sdk, user, "/429")[1] == 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("sdk", [*SDKS, *OTHERS])
def test_refusal_as_completion_is_an_answer_for_sdks(
    made: Stack, sdk: str, user: dict[str, str], stream: bool
) -> None:
    seen = len(made.upstream.seen)

    reply, requests = ask(made, sdk, user, "/completion", stream=stream)

    assert reply.status == 0
    assert reply.text.startswith(f"{ANSWER}\n{SAID}")
    assert " (recursive_loop_detected)\n" in reply.text
    assert (requests, len(made.upstream.seen)) == (1, seen)


def test_refusal_as_completion_is_logged_as_refusal(made: Stack, user: dict[str, str]) -> None:
    ask(made, "chat", user, "/completion")

    entry = made.envoy.logged(
        "/completion/v1/chat/completions", status=200, details="loop_detected"
    )
    assert (entry["loop_action"], entry["loop_policy"]) == ("reject", "completion")
