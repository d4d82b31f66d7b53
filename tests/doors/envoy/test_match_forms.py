"""What `check-envoy` reads in the match of a route is what Envoy does with it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.cli.envoy_check.document import ConfigPlace
from extproc.cli.envoy_check.paths import list_conditions, read_match
from tests.support.chart.istio import http_manager
from tests.support.documents import policy, read_yaml
from tests.support.harness import stack

_TEMPLATE = "type.googleapis.com/envoy.extensions.path.match.uri_template.v3.UriTemplateMatchConfig"
PATHS = (
    "/", "/v1", "/v1/", "/V1/", "/v1x", "/v1/chat", "/V1/CHAT", "/v1/chat/", "/v1/chat/completions", "/v1//chat",
    "/v1/chat;x=1", "/v1/chat%20x", "/v1/Chat-1_2.3~4", "/v1/chat:run", "/v1/42", "/v1/a+b", "/v2/chat",
    "/v1/chat/x/completions",
)  # fmt: skip
TEMPLATES = ("/v1/{x=**}", "/v1/*", "/v1/{x}", "/v1/{x=*}/completions", "/v1/**", "/v1/{x=chat}", "/v1/{x=chat/*}", "/v1/chat",
             "/**", "/*/chat", "/v1/{x=**}/completions")  # fmt: skip
REGEXES = (
    "/v1/.*", "/v1/(chat|embeddings)", "/v1(/.*)?", "/v1/[a-z]+", "/v1/\\d+", "/v1/chat|/v2/chat", "(?i)/v1/chat", "^/v1/chat$",
    "/v1/?", "/v1+/.*", "/v1/a\\+b", "/v1/\\w+", "/v1/[[:alpha:]]+", "/v1/\\Qchat\\E", "/v1/(?P<kind>chat)(/.*)?",
    "/v1/(?i:CHAT)", "/v1/.*?", "/v1/[^/]*", "/v1/ch{1,2}at", "(?:/v1|/v2)/chat", "/v1/chat\\z", "/v1/(?U)chat.*", "",
)  # fmt: skip
MATCHES: list[dict[str, Any]] = [
    {"prefix": "/v1/"}, {"prefix": "/"}, {"prefix": "/v1", "case_sensitive": False}, {"path": "/v1/chat"},
    {"path": "/v1/chat", "case_sensitive": False}, {"path_separated_prefix": "/v1"},
    {"path_separated_prefix": "/v1", "case_sensitive": False}, {"connect_matcher": {}},
    *[{"safe_regex": {"regex": regex}} for regex in REGEXES if regex],
    *[
        {
            "path_match_policy": {
                "name": "envoy.path.match.uri_template.uri_template_matcher",
                "typed_config": {"@type": _TEMPLATE, "path_template": template},
            }
        }
        for template in TEMPLATES
    ],
]  # fmt: skip


def add_hosts(text: str) -> str:
    """A virtual host for each match, which answers 200 where it matches and else 404; paths are matched as they come."""
    document = read_yaml(text)
    manager = http_manager(document)
    for key in ("normalize_path", "merge_slashes", "path_with_escaped_slashes_action"):
        del manager[key]
    manager["route_config"]["virtual_hosts"] = [
        {
            "name": f"h{number}",
            "domains": [f"h{number}.example"],
            "routes": [
                {"match": match, "direct_response": {"status": 200}},
                {"match": {"prefix": "/"}, "direct_response": {"status": 404}},
            ],
        }
        for number, match in enumerate(MATCHES)
    ]
    return json.dumps(document)


@pytest.fixture(scope="module")
def taken() -> list[set[str]]:
    """The paths that the real Envoy takes, by match."""
    with stack(policy("p", {"pathPrefix": "/"}), edit=add_hosts) as made:
        return [
            {path for path in PATHS if made.post(path, b"", {"host": f"h{number}.example"}).status == 200}
            for number in range(len(MATCHES))
        ]


@pytest.mark.parametrize("number", range(len(MATCHES)), ids=[json.dumps(match)[:70] for match in MATCHES])
def test_envoy_takes_what_is_judged_to_match(taken: list[set[str]], number: int) -> None:
    """Each answer but "not judged" is Envoy's; and of all paths, some are judged unless the syntax is RE2's own."""
    pattern = read_match(ConfigPlace(MATCHES[number]))
    judged = {path: pattern.takes(path) for path in PATHS}

    assert {path: answer for path, answer in judged.items() if answer not in (None, path in taken[number])} == {}
    assert all(pattern.reaches(path) is not False for path in taken[number])
    assert list_conditions(ConfigPlace(MATCHES[number])) == []


def test_envoy_agrees_which_routes_include_others(taken: list[set[str]]) -> None:
    """A route that is said to take all or none of another's paths does; a covered prefix is taken below, too."""
    patterns = [read_match(ConfigPlace(match)) for match in MATCHES]
    for one, own in zip(patterns, taken, strict=True):
        for other, theirs in zip(patterns, taken, strict=True):
            assert not one.includes(other) or theirs <= own
            assert one.meets(other) is not False or not (theirs & own)
        for prefix in ("/", "/v1", "/v1/"):
            below = {path for path in PATHS if f"{path}/".startswith(f"{prefix.rstrip('/')}/") and path.startswith(prefix)}
            assert not one.covers(prefix) or below <= own
