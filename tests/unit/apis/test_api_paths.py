"""Which paths ask a model of which API, with or without path parameters (`;x=1`)."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from extproc.apis import API_NAMES, SAMPLES, read_path, write_regex
from extproc.engine.engine import Engine
from extproc.policy.presets import PRESETS, find_preset
from extproc.request.http import HttpRequest
from tests.support import bundles
from tests.support.budget_policies import ask, bucket, chat, limited, refused, rule, serve
from tests.support.bundles import NOW, check, spec
from tests.support.documents import bundle, policy
from tests.support.engine import make_engine
from tests.support.model_paths import MODEL_CALLS, OTHER_CALLS

AGENTS = json.loads(Path(find_preset("agents")).read_text())


def selects(
    selector: dict[str, Any], path: str, method: str = "POST", host: str = "a.example"
) -> bool:
    return bool(make_engine(policy("p", selector)).match(HttpRequest(method, path, authority=host)))


@pytest.mark.parametrize(("path", "api"), MODEL_CALLS.items())
def test_model_call_is_selected_by_its_api(path: str, api: str) -> None:
    others = [name for name in API_NAMES if name != api]

    assert make_engine(AGENTS).match(HttpRequest("POST", path))
    assert selects({"apis": "any"}, path)
    assert selects({"apis": [api]}, path)
    assert not selects({"apis": others}, path)


@pytest.mark.parametrize("path", [path for path in OTHER_CALLS if ";" not in path])
def test_other_call_is_not_selected_by_api(path: str) -> None:
    assert not selects({"apis": "any"}, path)


def test_path_parameters_do_not_hide_a_model_call() -> None:
    """Servers that know path parameters ignore them, so the engine tries the path without them."""
    assert not read_path("/v1/messages;x=1").api
    assert selects({"apis": ["anthropic"]}, "/v1/messages;x=1")


@pytest.mark.parametrize("path", [*MODEL_CALLS, *OTHER_CALLS])
def test_regex_for_envoy_agrees_with_the_selector(path: str) -> None:
    assert [name for name in API_NAMES if re.fullmatch(write_regex(name), path)] == [
        name for name in [read_path(path).api] if name
    ]


def test_samples_of_each_api_are_its_own_paths() -> None:
    """`check-envoy` and its probe try them."""
    assert {read_path(path).api for path in SAMPLES["openai"]} == {"openai"}
    assert all({read_path(path).api for path in SAMPLES[name]} == {name} for name in API_NAMES)


@pytest.mark.parametrize(
    ("narrowed", "path", "host", "expected"),
    [
        ({"pathPrefix": "/anthropic"}, "/anthropic/v1/messages", "a.example", True),
        ({"pathPrefix": "/anthropic"}, "/v1/messages", "a.example", False),
        ({"pathPrefix": "/v1"}, "/v1/messages", "a.example", True),
        ({"pathPrefix": "/v1"}, "/v1/embeddings", "a.example", False),
        ({"pathPrefixes": ["/a/", "/b/"]}, "/b/api/chat", "a.example", True),
        ({"pathExact": "/v1/messages"}, "/v1/messages", "a.example", True),
        ({"hosts": ["b.example"]}, "/v1/messages", "a.example", False),
        ({"hosts": ["a.example"]}, "/v1/messages", "a.example", True),
    ],
)
def test_paths_and_hosts_narrow_a_selector_by_api(
    narrowed: dict[str, Any], path: str, host: str, expected: bool
) -> None:
    assert selects({"apis": "any", **narrowed}, path, host=host) is expected


def test_unknown_api_is_rejected_with_known_names() -> None:
    unknown, word, none = [
        bundles.refused(spec(selector={"apis": apis}))[0]
        for apis in (["openai", "azure"], "every", [])
    ]

    assert str(unknown).endswith(
        "must be one of anthropic, bedrock, gemini, ollama, openai, not 'azure'"
    )
    assert word.pointer.startswith("/spec/selector/apis")
    assert none.pointer.startswith("/spec/selector/apis")


def test_presets_for_agents_select_by_api() -> None:
    chosen = {
        name: json.loads(Path(find_preset(name)).read_text())["spec"]["selector"].get("apis")
        for name in PRESETS
    }

    assert chosen == dict.fromkeys(PRESETS, "any") | {"webhook": None}


MODEL = "/v1beta/models/gemini-2.5-pro:generateContent"
COUNT = "/v1beta/models/gemini-2.5-pro:countTokens"


@pytest.mark.parametrize(
    "path",
    [COUNT, "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/model/a%3Ab/count-tokens"],
)
def test_counting_tokens_asks_no_model(path: str) -> None:
    assert not read_path(path).asks_model


@pytest.mark.parametrize(
    "path",
    [
        *[
            f"{MODEL}{mark}:countTokens"
            for mark in (";", ";x=", "%3B", "%3b", "%3F", "%23", "%00", "%253B", "%5C", "\\")
        ],
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

    answers = [
        refused(ask(service, path=path, content=chat("hello", max_tokens=400))) for _ in range(3)
    ]

    assert answers == ["", "", "tpm_exceeded"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions;x=1",
        "/v1/chat;x/completions",
        "/v1/chat%3Bx/completions;y",
        "/v1;/chat/completions",
    ],
)
@pytest.mark.parametrize(
    "selector", [{"pathExact": "/v1/chat/completions"}, {"pathPrefix": "/v1/chat/completions"}]
)
def test_selector_matches_path_with_parameters(selector: dict[str, str], path: str) -> None:
    service, _ = serve(
        limited(bucket(burst=1), selector=selector), limited(bucket(burst=9), identity="q")
    )

    assert [refused(ask(service, path=each)) for each in (path, "/v1/chat/completions")] == [
        "",
        "token_bucket_exceeded",
    ]


@pytest.mark.parametrize(
    ("path", "killed"),
    [("/v1/chat;x/completions;y=1", True), ("/v1/chat/completions", True), ("/v1/x;y", False)],
)
def test_kill_switch_matches_path_with_parameters(path: str, killed: bool) -> None:  # a parameter
    switch = {
        "scope_key": "header:host",
        "scope_value": "api",
        "route": "/v1/chat/completions",
        "reason": "test",
    }
    policies = check(bundle(limited(bucket()), kill_switches=[switch]))

    found = Engine(policies, NOW).find_switch(HttpRequest("GET", path, "api"), NOW.timestamp())

    assert (found is not None) is killed
