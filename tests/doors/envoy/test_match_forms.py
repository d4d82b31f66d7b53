"""What `check-envoy` reads in the match of a route is what Envoy does with it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from extproc.cli.envoy_check.document import ConfigPlace
from extproc.cli.envoy_check.paths import list_conditions, read_match
from tests.support.envoy_config import verdict
from tests.support.harness import ENVOY, Process, eventually

_TYPE = "type.googleapis.com/envoy.extensions"
_TEMPLATE = "path.match.uri_template.v3.UriTemplateMatchConfig"
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
                "typed_config": {"@type": f"{_TYPE}.{_TEMPLATE}", "path_template": template},
            }
        }
        for template in TEMPLATES
    ],
]  # fmt: skip


def name(number: int) -> str:
    """The host whose first route has a match."""
    return f"h{number}.example"


def configure(matches: list[dict[str, Any]], admin: str) -> dict[str, Any]:
    """An Envoy with a virtual host for each match, which answers 200 where it matches and else 404."""
    hosts = [
        {
            "name": name(number),
            "domains": [name(number)],
            "routes": [
                {"match": match, "direct_response": {"status": 200}},
                {"match": {"prefix": "/"}, "direct_response": {"status": 404}},
            ],
        }
        for number, match in enumerate(matches)
    ]
    manager = {
        "@type": f"{_TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "forms",
        "http_filters": [{"name": "router", "typed_config": {"@type": f"{_TYPE}.filters.http.router.v3.Router"}}],
        "route_config": {"virtual_hosts": hosts},
    }
    chain = {"filters": [{"name": "manager", "typed_config": manager}]}
    local = {"socket_address": {"address": "127.0.0.1", "port_value": 0}}
    return {
        "admin": {"address": local},
        "static_resources": {"listeners": [{"name": admin, "address": local, "filter_chains": [chain]}]},
    }


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of an Envoy with all matches."""
    folder = tmp_path_factory.mktemp("forms")
    config, admin = folder / "envoy.json", folder / "admin.txt"
    config.write_text(json.dumps(configure(MATCHES, "forms")))
    arguments = ["-c", str(config), "--concurrency", "1", "--use-dynamic-base-id", "--admin-address-path", str(admin)]
    process = Process([ENVOY, *arguments], folder / "envoy.log")
    try:
        eventually(lambda: admin.exists() and admin.read_text(), "Envoy's admin address")
        page = f"http://{admin.read_text()}/listeners?format=json"
        listeners = eventually(lambda: httpx.get(page).json().get("listener_statuses"), "the listener")
        yield int(listeners[0]["local_address"]["socket_address"]["port_value"])
    finally:
        process.stop()


def ask(port: int, host: str, path: str) -> bool:
    """Whether Envoy takes the first route."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.putrequest("POST", path, skip_host=True)
    connection.putheader("host", host)
    connection.putheader("content-length", "0")
    connection.endheaders()
    status = connection.getresponse().status
    connection.close()
    return status == 200


@pytest.mark.parametrize("number", range(len(MATCHES)), ids=[json.dumps(match)[:70] for match in MATCHES])
def test_envoy_takes_what_is_judged_to_match(port: int, number: int) -> None:
    """Each answer but "not judged" is Envoy's; and of all paths, some are judged unless the syntax is RE2's own."""
    pattern = read_match(ConfigPlace(MATCHES[number]))
    judged = {path: pattern.takes(path) for path in PATHS}
    taken = {path: ask(port, name(number), path) for path in PATHS}

    assert {path: answer for path, answer in judged.items() if answer not in (None, taken[path])} == {}
    assert all(pattern.reaches(path) is not False for path in PATHS if taken[path])
    assert list_conditions(ConfigPlace(MATCHES[number])) == []


def test_envoy_agrees_which_routes_include_others(port: int) -> None:
    """A route that is said to take all or none of another's paths does; a covered prefix is taken below, too."""
    patterns = [read_match(ConfigPlace(match)) for match in MATCHES]
    taken = [{path for path in PATHS if ask(port, name(number), path)} for number in range(len(MATCHES))]
    for one, own in zip(patterns, taken, strict=True):
        for other, theirs in zip(patterns, taken, strict=True):
            assert not one.includes(other) or theirs <= own
            assert one.meets(other) is not False or not (theirs & own)
        for prefix in ("/", "/v1", "/v1/"):
            below = {path for path in PATHS if f"{path}/".startswith(f"{prefix.rstrip('/')}/") and path.startswith(prefix)}
            assert not one.covers(prefix) or below <= own


def test_envoy_validates_all_forms(tmp_path: Path) -> None:
    """So that none of the cases above is a mistake of the test."""
    assert verdict(json.dumps(configure(MATCHES, "forms")), tmp_path).endswith(" OK\n")
