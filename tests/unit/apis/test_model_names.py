"""The model that a request asks for, as SDKs write it, and its price."""

import json
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from typing import Any

import pytest

from extproc.apis import find_endpoint
from extproc.apis.api import Question
from extproc.apis.bedrock import complete
from extproc.apis.usage import LONGEST_MODEL, find_model
from extproc.request.http import HttpRequest
from extproc.sessions.rates import Rates, TokenPrice, Usage, read_model
from tests.support.engine import ANY
from tests.support.harness import Upstream
from tests.support.messages import body, headers
from tests.support.sdks import MODEL_SDKS
from tests.support.service import decoded, exchange, make_service, metadata_of

CLAUDE = "anthropic.claude-3-5-sonnet-20240620-v1:0"
ARN = "arn:aws:bedrock:us-east-1:123456789012"


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    made = Upstream()
    yield made
    made.stop()


_PROFILE = f"{ARN}:inference-profile/us.{CLAUDE}"
_APPLICATION = f"{ARN}:application-inference-profile/abc123def456"
_FOUNDATION = f"arn:aws:bedrock:us-east-1::foundation-model/{CLAUDE}"
_VERTEX = "claude-3-5-sonnet-v2@20241022"
ASKED = [
    *[
        (call, CLAUDE, CLAUDE)
        for call in (
            "converse",
            "converse_stream",
            "invoke_model",
            "invoke_model_with_response_stream",
        )
    ],
    *[("converse", model, model) for model in (_PROFILE, _APPLICATION, _FOUNDATION)],
    ("anthropic-bedrock", CLAUDE, CLAUDE),
    ("anthropic-bedrock", _PROFILE, _PROFILE),
    *[
        (call, _VERTEX, _VERTEX)
        for call in ("anthropic-vertex", "anthropic-vertex-stream", "anthropic-vertex-count")
    ],
    ("azure", "my gpt-4o", "my gpt-4o"),
    ("azure-deployment", "gpt-4o", "production"),
    ("openai", "gpt-4o", "gpt-4o"),
    ("gemini", "gemini-2.5-pro", "gemini-2.5-pro"),
    ("gemini-stream", "gemini-2.5-pro", "gemini-2.5-pro"),
    ("gemini", "tunedModels/mine-1", "mine-1"),
    ("vertex", "gemini-2.5-pro", "gemini-2.5-pro"),
    ("vertex", "meta/llama-3.1-405b", "llama-3.1-405b"),
    ("vertex", "projects/p/locations/us-central1/endpoints/123", "123"),
]
"""The SDK and its call, the model as the program names it, and as it is known."""


LIMITED: dict[str, Any] = {
    "id": "p",
    "spec": {
        "selector": ANY,
        "limit_keys": ["header:x-user-id"],
        "session": {"keys": ["header:x-session-id"]},
        "session_limits": {"max_steps": 9},
    },
}


def _ask_session(target: str, content: bytes) -> object:
    *_, last = exchange(
        make_service(LIMITED), headers(target, x_user_id="u", x_session_id="s"), body(content)
    )
    return json.loads(metadata_of(decoded(last))["sessions"])[0]["model"]


@pytest.mark.slow
@pytest.mark.parametrize(("sdk", "model", "expected"), ASKED)
def test_all_readers_find_the_same_model(
    upstream: Upstream, sdk: str, model: str, expected: str
) -> None:
    with suppress(Exception):  # each SDK has an error of its own for an answer that says nothing
        MODEL_SDKS[sdk](f"http://{upstream.address}", model, {})

    seen = upstream.seen[-1]
    request = HttpRequest("POST", seen.target)
    assert Question(request, seen.body).model == expected
    assert read_model(request.path, seen.body) == expected
    assert _ask_session(seen.target, seen.body) == expected


@pytest.mark.parametrize(
    ("path", "named", "expected"),
    [
        (
            f"/model/{ARN}:inference-profile/us.{CLAUDE}/converse",
            "",
            f"{ARN}:inference-profile/us.{CLAUDE}",
        ),
        ("/bedrock/model/amazon.nova-lite-v1%3A0/invoke", "other", "amazon.nova-lite-v1:0"),
        ("/openai/deployments/a%2Fb/embeddings", "other", "a/b"),
        ("/v1/engines/davinci/completions", "", "davinci"),
        ("/v1beta/models/gemini-2.5-pro:countTokens", "other", "gemini-2.5-pro"),
        ("/v1/models/m/chat/completions", "named", "named"),
        ("/v1/models/m/chat/completions", "", "m"),
        ("/v1/messages/count-tokens", "named", "named"),
        ("/v1/chat/completions", "", ""),
        ("/model/", "", ""),
        ("/model/%FF%00/converse", "", "\ufffd\0"),
        ("/model/" + "m" * 60_000 + "/converse", "", "m" * LONGEST_MODEL),
        ("/v1/chat/completions", "m" * 60_000, "m" * LONGEST_MODEL),
    ],
)
def test_model_in_path_goes_before_the_body(path: str, named: str, expected: str) -> None:
    assert find_model(path, named) == expected


def test_arn_with_decoded_slash_is_bedrock() -> None:
    path = f"/model/{ARN}:inference-profile/us.{CLAUDE}/converse"

    assert find_endpoint(Question(HttpRequest("POST", path), b"{}")).complete is complete


_DOLLAR = TokenPrice(Decimal(1), Decimal(1))
_TEN = TokenPrice(Decimal(10), Decimal(10))


@pytest.mark.parametrize(
    "model",
    [
        CLAUDE,
        f"us.{CLAUDE}",
        f"global.{CLAUDE}",
        f"{ARN}:inference-profile/eu.{CLAUDE}",
        f"arn:aws:bedrock:us-east-1::foundation-model/{CLAUDE}",
    ],
)
def test_price_holds_for_all_bedrock_names(model: str) -> None:
    usage = Usage(1_000_000, 0)

    assert Rates({CLAUDE: _DOLLAR, "*": _TEN}, _TEN).find_cost(model, usage) == 10**9
    assert Rates({CLAUDE: _TEN, model: _DOLLAR}, _TEN).find_cost(model, usage) == 10**9


def test_price_of_policy_goes_before_that_of_package() -> None:
    """The answer's name may be known only to the package; the policy prices the requested one."""
    rates = Rates({"production": _DOLLAR}, None)

    assert rates.choose_name("gpt-4o-2024-08-06", "production") == "production"
    assert rates.choose_name("gpt-4o-2024-08-06", "other") == "gpt-4o-2024-08-06"
    assert Rates({"gpt-4o*": _DOLLAR, "production": _TEN}, None).choose_name(
        "gpt-4o-2024-08-06", "production"
    ) == ("gpt-4o-2024-08-06")
