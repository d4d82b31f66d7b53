"""Selectors by API match the paths on which a model answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from extproc.apis import API_NAMES, SAMPLES, read_path, write_regex
from extproc.policy.presets import PRESETS, find_preset
from extproc.request.http import HttpRequest
from tests.support.bundles import refused, spec
from tests.support.documents import policy
from tests.support.engine import make_engine
from tests.support.model_paths import MODEL_CALLS, OTHER_CALLS

AGENTS = json.loads(Path(find_preset("agents")).read_text())


def selects(selector: dict[str, Any], path: str, method: str = "POST", host: str = "a.example") -> bool:
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
def test_paths_and_hosts_narrow_a_selector_by_api(narrowed: dict[str, Any], path: str, host: str, expected: bool) -> None:
    assert selects({"apis": "any", **narrowed}, path, host=host) is expected


def test_unknown_api_is_rejected_with_known_names() -> None:
    unknown, word, none = [refused(spec(selector={"apis": apis}))[0] for apis in (["openai", "azure"], "every", [])]

    assert str(unknown).endswith("must be one of anthropic, bedrock, gemini, ollama, openai, not 'azure'")
    assert word.pointer.startswith("/spec/selector/apis")
    assert none.pointer.startswith("/spec/selector/apis")


def test_presets_for_agents_select_by_api() -> None:
    chosen = {name: json.loads(Path(find_preset(name)).read_text())["spec"]["selector"].get("apis") for name in PRESETS}

    assert chosen == dict.fromkeys(PRESETS, "any") | {"webhook": None}
