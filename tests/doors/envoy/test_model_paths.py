"""The routes that `envoy-config` makes of a selector by API, on a real Envoy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
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
    with stack(AGENTS) as running:

        def count() -> float:
            return running.loopguard.metric("requests_total") + running.loopguard.metric("unmatched_total")

        told = {}
        for path in [*MODEL_CALLS, *OTHER_CALLS]:
            before = count()
            status = running.send(path, method="POST", body=BODY, headers={"x-user-id": path}).status
            told[path] = (status, count() > before)

    assert told == dict.fromkeys(MODEL_CALLS, (200, True)) | dict.fromkeys(OTHER_CALLS, (200, False))


def _unguarded(document: Any, policies: Any = AGENTS) -> list[str]:  # noqa: ANN401  # YAML
    """The codes of what `check-envoy` finds about guarded and other routes."""
    return [code for code, _, hurts in found(document, policies) if hurts and code in ("unguarded", "unmatched", "not-judged")]


def test_check_envoy_accepts_the_routes_of_every_api() -> None:
    """The printed bootstrap has no finding."""
    assert not found(yaml.safe_load(bootstrap(AGENTS)), AGENTS)


@pytest.mark.parametrize(
    ("match", "expected"),
    [
        ({"prefix": "/anthropic/"}, ["unguarded"]),
        ({"path": "/v1/messages"}, ["unguarded"]),
        ({"path": "/v1/embeddings"}, []),
        ({"path": "/healthz"}, []),
        ({"prefix": "/"}, ["unguarded"]),
        ({"safe_regex": {"regex": ".*/messages"}}, ["unguarded"]),
    ],
)
def test_check_envoy_finds_an_unguarded_route_for_an_api(match: dict[str, Any], expected: list[str]) -> None:
    """A route before the guarded ones takes requests that the policy selects."""
    document = yaml.safe_load(bootstrap(AGENTS))
    routes = find(document, ROUTES)
    routes.insert(0, {"name": "before", "match": match, "route": {"cluster": "upstream"}})

    assert _unguarded(document) == expected


def test_a_route_that_may_take_model_calls_is_named() -> None:
    """Of an unknown prefix, only the clients know whether a model is behind it."""
    document = yaml.safe_load(bootstrap(AGENTS))
    find(document, ROUTES).insert(0, {"name": "before", "match": {"prefix": "/shop/"}, "route": {"cluster": "upstream"}})

    assert [code for code, _, hurts in found(document, AGENTS) if not hurts] == ["not-judged"]
    assert not _unguarded(document)


def test_check_envoy_accepts_all_posts_for_an_api() -> None:
    """A guarded route for every POST takes all that the policy selects, so the next route may be unguarded."""
    document = yaml.safe_load(bootstrap(AGENTS))
    routes = find(document, ROUTES)
    post = {"name": ":method", "string_match": {"exact": "POST"}}
    routes[:-1] = [{**routes[0], "name": "posts", "match": {"prefix": "/", "headers": [post]}}]

    assert not _unguarded(document)


def test_narrowed_api_keeps_its_path_as_route() -> None:
    """Envoy sends all below the path; Loopguard counts the API's requests among them."""
    narrowed = bundle(policy("p", {"apis": ["anthropic"], "pathPrefix": "/team"}, limit_keys=["header:x-user-id"]))

    routes = find(yaml.safe_load(bootstrap(narrowed)), ROUTES)
    with stack(narrowed) as running:
        for path in ("/team/v1/messages", "/team/v1/messages/count_tokens", "/team/v1/responses"):
            running.send(path, method="POST", body=BODY, headers={"x-user-id": "ann"})
        counted, unmatched = running.loopguard.metric("requests_total"), running.loopguard.metric("unmatched_total")
        findings = httpx.get(f"{running.loopguard.admin_url}/coverage").json()["findings"]

    assert [route["match"] for route in routes] == [{"path_separated_prefix": "/team"}, {"prefix": "/"}]
    assert (counted, unmatched) == (1, 2)
    assert [each["text"] for each in findings if each["reason"] == "unmatched_calls"] == [
        "1 model call passed unguarded, because no policy matches"
    ]
