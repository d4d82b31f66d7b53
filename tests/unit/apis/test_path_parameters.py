"""Path parameters (`;x=1`) hide neither what is asked for nor which policy applies."""

from __future__ import annotations

import pytest

from extproc.apis import read_path
from extproc.engine.engine import Engine
from extproc.request.http import HttpRequest
from tests.support.budget_policies import ask, bucket, chat, limited, refused, rule, serve
from tests.support.bundles import NOW, check
from tests.support.documents import bundle

MODEL = "/v1beta/models/gemini-2.5-pro:generateContent"
COUNT = "/v1beta/models/gemini-2.5-pro:countTokens"


@pytest.mark.parametrize(
    "path", [COUNT, "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/model/a%3Ab/count-tokens"]
)
def test_counting_tokens_asks_no_model(path: str) -> None:
    assert not read_path(path).asks_model


@pytest.mark.parametrize(
    "path",
    [
        *[f"{MODEL}{mark}:countTokens" for mark in (";", ";x=", "%3B", "%3b", "%3F", "%23", "%00", "%253B", "%5C", "\\")],
        f"{MODEL}:countTokens",
        f"{COUNT};x=1",
        "/v1/messages;/count_tokens",
        "/v1/chat/completions;/v1/messages/count_tokens",
        "/v1beta/models/gemini-2.5-pro:generateContent;a/:countTokens",
        "/v1beta/models/x%3AgenerateContent:countTokens",
    ],
)
def test_ambiguous_path_pays(path: str) -> None:
    tokens = rule("token_bucket_llm", tokens_per_minute=1_000)
    service, _ = serve(limited(tokens))

    answers = [refused(ask(service, path=path, content=chat("hello", max_tokens=400))) for _ in range(3)]

    assert answers == ["", "", "tpm_exceeded"]


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions;x=1", "/v1/chat;x/completions", "/v1/chat%3Bx/completions;y", "/v1;/chat/completions"]
)
@pytest.mark.parametrize("selector", [{"pathExact": "/v1/chat/completions"}, {"pathPrefix": "/v1/chat/completions"}])
def test_selector_matches_path_with_parameters(selector: dict[str, str], path: str) -> None:
    policy = limited(bucket(burst=1), selector=selector)
    service, _ = serve(policy, limited(bucket(burst=9), identity="q"))

    assert [refused(ask(service, path=each)) for each in (path, "/v1/chat/completions")] == ["", "token_bucket_exceeded"]


@pytest.mark.parametrize(
    ("path", "killed"), [("/v1/chat;x/completions;y=1", True), ("/v1/chat/completions", True), ("/v1/x;y", False)]
)
def test_kill_switch_matches_path_with_parameters(path: str, killed: bool) -> None:  # a parameter
    switch = {"scope_key": "header:host", "scope_value": "api", "route": "/v1/chat/completions", "reason": "test"}
    policies = check(bundle(limited(bucket()), kill_switches=[switch]))

    found = Engine(policies, NOW).find_switch(HttpRequest("GET", path, "api"), NOW.timestamp())

    assert (found is not None) is killed
