"""The routes that `envoy-config` makes of a selector by API, on a real Envoy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.policy.presets import find_preset
from tests.support.check_envoy import find, found
from tests.support.documents import bundle, policy
from tests.support.envoy_config import bootstrap
from tests.support.harness import stack
from tests.support.model_paths import MODEL_CALLS, OTHER_CALLS
from tests.support.routes import ROUTES

AGENTS = json.loads(Path(find_preset("agents")).read_text())
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "again"}]}).encode()


def test_envoy_sends_model_calls_of_every_prefix_alone() -> None:
    """Each path on which a model answers reaches Loopguard and is counted; the others pass without it."""
    told = {}
    with stack(AGENTS) as running:
        for path in [*MODEL_CALLS, *OTHER_CALLS]:
            before = running.loopguard.metric("requests_total") + running.loopguard.metric("unmatched_total")
            status = running.post(path, BODY, {"x-user-id": path}).status
            after = running.loopguard.metric("requests_total") + running.loopguard.metric("unmatched_total")
            told[path] = (status, after > before)

    assert told == dict.fromkeys(MODEL_CALLS, (200, True)) | dict.fromkeys(OTHER_CALLS, (200, False))


ALL_POSTS = {"prefix": "/", "headers": [{"name": ":method", "string_match": {"exact": "POST"}}]}


def judge(document: Any) -> list[str]:  # noqa: ANN401  # YAML
    """The codes of what `check-envoy` finds about guarded and other routes."""
    return [code for code, *_ in found(document, AGENTS) if code in ("unguarded", "unmatched", "not-judged")]


def test_check_envoy_accepts_the_routes_of_every_api() -> None:
    """The printed bootstrap has no finding; nor has one with a guarded route for every POST."""
    document = yaml.safe_load(bootstrap(AGENTS))
    assert not found(document, AGENTS)

    routes = find(document, ROUTES)
    routes[:-1] = [{**routes[0], "name": "posts", "match": ALL_POSTS}]
    assert judge(document) == []


@pytest.mark.parametrize(
    ("match", "expected"),
    [
        ({"prefix": "/anthropic/"}, ["unguarded", "not-judged"]),
        ({"path": "/v1/messages"}, ["unguarded"]),
        ({"path": "/v1/embeddings"}, []),
        ({"path": "/healthz"}, []),
        ({"prefix": "/"}, ["unguarded"]),
        ({"safe_regex": {"regex": ".*/messages"}}, ["unguarded", "not-judged"]),
        ({"prefix": "/shop/"}, ["not-judged"]),  # only the clients know whether a model is behind it
    ],
)
def test_check_envoy_finds_an_unguarded_route_for_an_api(match: dict[str, Any], expected: list[str]) -> None:
    """A route before the guarded ones takes requests that the policy selects, or may take them."""
    document = yaml.safe_load(bootstrap(AGENTS))
    find(document, ROUTES).insert(0, {"name": "before", "match": match, "route": {"cluster": "upstream"}})

    assert judge(document) == expected


def test_narrowed_api_keeps_its_path_as_route() -> None:
    """Envoy sends all below the path; Loopguard counts the API's requests among them."""
    narrowed = bundle(policy("p", {"apis": ["anthropic"], "pathPrefix": "/team"}, limit_keys=["header:x-user-id"]))

    routes = find(yaml.safe_load(bootstrap(narrowed)), ROUTES)
    with stack(narrowed) as running:
        for path in ("/team/v1/messages", "/team/v1/messages/count_tokens", "/team/v1/responses"):
            running.post(path, BODY, {"x-user-id": "ann"})
        counted, unmatched = running.loopguard.metric("requests_total"), running.loopguard.metric("unmatched_total")
        findings = running.loopguard.ask("/coverage")["findings"]

    assert [route["match"] for route in routes] == [{"path_separated_prefix": "/team"}, {"prefix": "/"}]
    assert (counted, unmatched) == (1, 2)
    assert [each["text"] for each in findings if each["reason"] == "unmatched_calls"] == [
        "1 model call passed unguarded, because no policy matches"
    ]
