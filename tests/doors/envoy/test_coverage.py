"""What Envoy shows Loopguard, and what `check-envoy` says about it, from a file or by a probe."""

import copy
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from extproc.cli.envoy_check.document import ConfigPlace
from extproc.cli.envoy_check.paths import list_conditions, read_match
from extproc.cli.main import main
from extproc.cli.probe import list_names
from extproc.policy.presets import find_preset
from tests.support.chart.istio import http_manager
from tests.support.check_envoy import MANAGER, Json, find, found, report
from tests.support.documents import bundle, policy, read_yaml
from tests.support.envoy_config import bootstrap, verdict
from tests.support.harness import Stack, envoy_version, stack
from tests.support.model_paths import MODEL_CALLS, OTHER_CALLS
from tests.support.routes import (
    ROUTES,
    before,
    by_template,
    good,
    header,
    regex,
    rewriting,
    templated,
    treed,
    wrapped,
)
from tests.support.servers import listening

CHAT = bundle(policy("chat", {"pathPrefix": "/chat"}, limit_keys=["header:x-user-id"]))
CHAT_OF_HOST = bundle(
    policy(
        "chat", {"pathPrefix": "/chat", "hosts": ["api.example"]}, limit_keys=["header:x-user-id"]
    )
)
USER = {"x-user-id": "ann"}


def never(document: Json) -> Json:
    """The guarded route takes no request."""
    find(document, f"{ROUTES}/0/match")["runtime_fraction"] = {"default_value": {"numerator": 0}}
    return document


def shift(match: Json, rewrite: Json) -> Callable[[Json], Json]:
    """An unguarded route that rewrites its path."""

    def edit(document: Json) -> Json:
        before(match, document)
        find(document, f"{ROUTES}/0/route").update(rewrite)
        return document

    return edit


def open_host(document: Json) -> Json:
    """Envoy uses the unguarded virtual host for all other hosts if the host has a port."""
    hosts = find(document, f"{MANAGER}/route_config/virtual_hosts")
    hosts[0]["domains"] = ["api.example"]
    hosts.append(
        {"name": "rest", "domains": ["*"], "routes": [{**hosts[0]["routes"][1], "name": "open"}]}
    )
    return document


def ignore_case(document: Json) -> Json:
    find(document, f"{ROUTES}/0/match")["case_sensitive"] = False
    return document


# By name: the change of the configuration, a path, headers, and what the check says.
DETOURS: Mapping[str, tuple[Callable[[Json], Json], str, dict[str, str], str]] = {
    "case": (
        lambda made: before({"prefix": "/CHAT", "case_sensitive": False}, made),
        "/chat/x",
        {},
        "unguarded",
    ),
    "template": (lambda made: before(templated("/{x=**}"), made), "/chat/x", {}, "unguarded"),
    "RE2": (
        lambda made: before({"safe_regex": {"regex": "/[[:alpha:]]+/x"}}, made),
        "/chat/x",
        {},
        "not-judged",
    ),
    "tree": (lambda made: treed(made, guarded=False), "/chat/x", {"x-tier": "gold"}, "not-judged"),
    "fraction": (never, "/chat/x", {}, "unguarded"),
    "matcher": (
        lambda made: wrapped(made, header("x-skip")),
        "/chat/x",
        {"x-skip": "yes"},
        "skipped",
    ),
    "alias by regex": (
        shift({"prefix": "/alias/"}, regex("^/alias/(.*)$", "/chat/\\1")),
        "/alias/x",
        {},
        "alias",
    ),
    "alias by root": (
        shift({"prefix": "/alias/"}, {"prefix_rewrite": "/"}),
        "/alias/chat/x",
        {},
        "alias",
    ),
    "alias by template": (
        shift(templated("/alias/{x=**}"), by_template("/chat/{x}")),
        "/alias/x",
        {},
        "alias",
    ),
    "host": (open_host, "/chat/x", {"host": "api.example:1"}, "host-port"),
}


def combine(configurations: Mapping[str, Json]) -> Json:
    made = copy.deepcopy(next(iter(configurations.values())))
    address = {"socket_address": {"address": "127.0.0.1", "port_value": 0}}
    listeners = {
        name: each["static_resources"]["listeners"][0] for name, each in configurations.items()
    }
    made["static_resources"]["listeners"] = [
        {**each, "name": name, "address": address} for name, each in listeners.items()
    ]
    return made


class Detoured(NamedTuple):
    """An Envoy with a listener for each changed configuration, by name."""

    made: Stack
    configurations: dict[str, Json]

    def send(self, name: str, path: str, headers: dict[str, str]) -> tuple[int, float, float]:
        """Status, and how many requests Loopguard counted and did not match because of this one."""
        for listener in json.loads(self.made.envoy.admin("/listeners?format=json"))[
            "listener_statuses"
        ]:
            if listener["name"] == name:
                self.made.envoy.port = listener["local_address"]["socket_address"]["port_value"]
        metric = self.made.loopguard.metric
        before = metric("requests_total"), metric("unmatched_total")
        status = self.made.send(path, headers={**USER, **headers}).status
        return status, metric("requests_total") - before[0], metric("unmatched_total") - before[1]


@pytest.fixture(scope="module")
def detoured() -> Iterator[Detoured]:
    kept: dict[str, Json] = {}

    def change(text: str) -> str:
        edits = {name: edit for name, (edit, *_) in DETOURS.items()} | {"any case": ignore_case}
        kept.update({name: edit(yaml.safe_load(text)) for name, edit in edits.items()})
        return json.dumps(combine(kept))

    with stack(CHAT, edit=change) as made:
        yield Detoured(made, kept)


@pytest.mark.parametrize("name", DETOURS)
def test_check_envoy_finds_what_lets_requests_pass(detoured: Detoured, name: str) -> None:
    _, path, headers, code = DETOURS[name]

    assert detoured.send(name, path, headers) == (200, 0, 0)

    assert detoured.made.upstream.seen[-1].target == "/chat/x"
    for policies in (CHAT_OF_HOST,) if name == "host" else (None, CHAT):
        assert code in [
            finding.code for finding in report(detoured.configurations[name], policies).findings
        ]


def test_check_envoy_finds_guarded_requests_without_a_policy(detoured: Detoured) -> None:
    assert detoured.send("any case", "/CHAT/x", {}) == (200, 0, 1)
    assert [
        finding.code for finding in report(detoured.configurations["any case"], CHAT).findings
    ] == ["unmatched"]


def test_host_without_a_port_is_guarded(detoured: Detoured) -> None:
    assert detoured.send("host", "/chat/x", {"host": "api.example"}) == (200, 1, 0)
    assert [
        finding.code for finding in report(detoured.configurations["host"], CHAT_OF_HOST).findings
    ] == ["host-port"]


def test_envoy_accepts_the_configurations_of_the_tests(tmp_path: Path) -> None:
    documents = [
        treed(good(), guarded=True),
        wrapped(good(), header("x-skip")),
        rewriting({"prefix": "/alias/"}, regex("(.*)", "/images/\\1")),
        rewriting(templated("/alias/{x=**}"), by_template("/{x}")),
    ]
    if envoy_version() >= (1, 38):
        documents.append(rewriting({"prefix": "/alias/"}, {"path_rewrite": "/chat/%REQ(x-model)%"}))

    combined = combine({f"{number}": document for number, document in enumerate(documents)})

    assert verdict(json.dumps(combined), tmp_path).endswith(" OK\n")


AGENTS = json.loads(Path(find_preset("agents")).read_text())
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "again"}]}).encode()


def test_envoy_shows_loopguard_exactly_the_model_calls() -> None:
    shown = {}
    with stack(AGENTS) as running:
        metric = running.loopguard.metric
        for path in [*MODEL_CALLS, *OTHER_CALLS]:
            before = metric("requests_total") + metric("unmatched_total")
            assert running.post(path, BODY, {"x-user-id": path}).status == 200
            shown[path] = metric("requests_total") + metric("unmatched_total") > before

    assert shown == dict.fromkeys(MODEL_CALLS, True) | dict.fromkeys(OTHER_CALLS, False)


ALL_POSTS = {"prefix": "/", "headers": [{"name": ":method", "string_match": {"exact": "POST"}}]}


def judge(document: Any) -> list[str]:  # noqa: ANN401  # YAML
    """The codes that are about routes."""
    return [
        code
        for code, *_ in found(document, AGENTS)
        if code in ("unguarded", "unmatched", "not-judged")
    ]


def test_check_envoy_accepts_routes_for_every_api() -> None:
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
        (
            {"prefix": "/shop/"},
            ["not-judged"],
        ),  # only the clients know whether a model is behind it
    ],
)
def test_check_envoy_finds_unguarded_routes_for_apis(
    match: dict[str, Any], expected: list[str]
) -> None:
    document = yaml.safe_load(bootstrap(AGENTS))
    find(document, ROUTES).insert(
        0, {"name": "before", "match": match, "route": {"cluster": "upstream"}}
    )

    assert judge(document) == expected


def test_api_below_a_path_is_guarded_by_that_path() -> None:
    """Loopguard selects the API's requests among those that Envoy shows."""
    narrowed = bundle(
        policy("p", {"apis": ["anthropic"], "pathPrefix": "/team"}, limit_keys=["header:x-user-id"])
    )

    routes = find(yaml.safe_load(bootstrap(narrowed)), ROUTES)
    with stack(narrowed) as running:
        for path in ("/team/v1/messages", "/team/v1/messages/count_tokens", "/team/v1/responses"):
            running.post(path, BODY, {"x-user-id": "ann"})
        counted, unmatched = (
            running.loopguard.metric("requests_total"),
            running.loopguard.metric("unmatched_total"),
        )
        findings = running.loopguard.ask("/coverage")["findings"]

    assert [route["match"] for route in routes] == [
        {"path_separated_prefix": "/team"},
        {"prefix": "/"},
    ]
    assert (counted, unmatched) == (1, 2)
    assert [each["text"] for each in findings if each["reason"] == "unmatched_calls"] == [
        "1 model call passed unguarded, because no policy matches"
    ]


EXACT = bundle(policy("chat", {"pathExact": "/v1/chat"}, limit_keys=["header:x-user-id"]))
AS_ANN = ("-H", "x-user-id: ann")


def probe(
    made: Stack, capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[int, dict[str, tuple[str, str]]]:
    """Exit code, and the verdict and the reason for each request."""
    url = f"http://127.0.0.1:{made.envoy.port}/v1/chat"
    code = main(
        ["check-envoy", "--probe", url, "--loopguard", made.loopguard.admin_url, "--json", *flags]
    )
    results: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["probes"]
    return code, {result["request"]: (result["verdict"], result["why"]) for result in results}


@pytest.fixture(scope="module")
def running() -> Iterator[Stack]:
    with stack(EXACT) as made:
        yield made


def test_probe_names_the_requests_that_are_not_counted(
    running: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    """An upgrade, and spellings that Envoy keeps, are not counted."""
    others = (
        "escaped slash",
        "upper case",
        "path parameter",
        "path parameter of the first segment",
    )
    before = len(running.upstream.seen)

    code, found = probe(running, capsys, *AS_ANN)

    assert found == {
        **dict.fromkeys(list_names(), ("guarded", "counted by chat")),
        **dict.fromkeys(
            others, ("UNGUARDED", "Loopguard is not asked")
        ),  # this upstream answers any path
        "WebSocket upgrade": ("UNGUARDED", "matches chat, but is not counted (chat: upgrade)"),
    }
    assert code == 1
    assert all(request.header("x-loopguard-probe") for request in running.upstream.seen[before:])
    accepted = [flag for name in (*others, "WebSocket upgrade") for flag in ("--ignore", name)]
    assert probe(running, capsys, *AS_ANN, *accepted, "--probe-size", "1000")[0] == 0


def test_probe_finds_large_bodies_that_are_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    if envoy_version() < (1, 38):
        pytest.skip("needs Envoy 1.38")
    with stack(EXACT, body_mode="tolerant", buffer_limit=100_000) as running:
        _, found = probe(running, capsys, *AS_ANN)

    verdict, why = found["HTTP/1.1, large body, chunked"]
    assert (verdict, "chat" in why) == ("UNGUARDED", True)
    assert found["HTTP/1.1"] == ("guarded", "counted by chat")


def test_probe_of_a_listener_uses_the_policies_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = bundle(policy("local", {"apis": ["ollama"]}, limit_keys=["header:x-user-id"]))
    file = tmp_path / "policies.json"
    file.write_text(json.dumps(document))
    with stack(document) as running:
        listener, admin = f"http://127.0.0.1:{running.envoy.port}", running.loopguard.admin_url
        main(
            [
                "check-envoy",
                "--probe",
                listener,
                "--loopguard",
                admin,
                "--policy",
                str(file),
                "--json",
                "--probe-size",
                "1000",
                *AS_ANN,
            ]
        )

    found = {
        each["request"]: (each["path"], each["verdict"])
        for each in json.loads(capsys.readouterr().out)["probes"]
    }
    assert found["HTTP/1.1"] == ("/api/chat", "guarded")


def switch_protocols(client: socket.socket) -> None:
    """An upstream that accepts each handshake, and answers all else with 200 on new connections."""
    head = client.recv(65_536)
    upgrade = b"101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket"
    client.sendall(
        b"HTTP/1.1 %b\r\n\r\n"
        % (
            upgrade
            if b"sec-websocket" in head
            else b"200 OK\r\nconnection: close\r\ncontent-length: 0"
        )
    )


def test_probe_reports_websockets_that_open(capsys: pytest.CaptureFixture[str]) -> None:
    with listening(switch_protocols) as upstream, stack(EXACT, upstream=upstream) as made:
        _, found = probe(made, capsys, *AS_ANN, "--probe-size", "1000")

    assert found["WebSocket upgrade"] == (
        "UNGUARDED",
        "matches chat, but is not counted (chat: upgrade)",
    )


def test_probe_without_credentials_says_why_nothing_is_counted(
    running: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = probe(running, capsys, "--probe-size", "1000")

    assert (code, found["HTTP/1.1"][0]) == (1, "UNGUARDED")
    assert "chat: " in found["HTTP/1.1"][1]


# ---- The match of a route

_TEMPLATE = "type.googleapis.com/envoy.extensions.path.match.uri_template.v3.UriTemplateMatchConfig"
PATHS = (
    "/",
    "/v1",
    "/v1/",
    "/V1/",
    "/v1x",
    "/v1/chat",
    "/V1/CHAT",
    "/v1/chat/",
    "/v1/chat/completions",
    "/v1//chat",
    "/v1/chat;x=1",
    "/v1/chat%20x",
    "/v1/Chat-1_2.3~4",
    "/v1/chat:run",
    "/v1/42",
    "/v1/a+b",
    "/v2/chat",
    "/v1/chat/x/completions",
)
TEMPLATES = (
    "/v1/{x=**}",
    "/v1/*",
    "/v1/{x}",
    "/v1/{x=*}/completions",
    "/v1/**",
    "/v1/{x=chat}",
    "/v1/{x=chat/*}",
    "/v1/chat",
    "/**",
    "/*/chat",
    "/v1/{x=**}/completions",
)
REGEXES = (
    "/v1/.*",
    "/v1/(chat|embeddings)",
    "/v1(/.*)?",
    "/v1/[a-z]+",
    "/v1/\\d+",
    "/v1/chat|/v2/chat",
    "(?i)/v1/chat",
    "^/v1/chat$",
    "/v1/?",
    "/v1+/.*",
    "/v1/a\\+b",
    "/v1/\\w+",
    "/v1/[[:alpha:]]+",
    "/v1/\\Qchat\\E",
    "/v1/(?P<kind>chat)(/.*)?",
    "/v1/(?i:CHAT)",
    "/v1/.*?",
    "/v1/[^/]*",
    "/v1/ch{1,2}at",
    "(?:/v1|/v2)/chat",
    "/v1/chat\\z",
    "/v1/(?U)chat.*",
    "",
)
MATCHES: list[dict[str, Any]] = [
    {"prefix": "/v1/"},
    {"prefix": "/"},
    {"prefix": "/v1", "case_sensitive": False},
    {"path": "/v1/chat"},
    {"path": "/v1/chat", "case_sensitive": False},
    {"path_separated_prefix": "/v1"},
    {"path_separated_prefix": "/v1", "case_sensitive": False},
    {"connect_matcher": {}},
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
]


def add_hosts(text: str) -> str:
    """A virtual host for each match: 200 where it matches, else 404, with paths as they come."""
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
            {
                path
                for path in PATHS
                if made.post(path, b"", {"host": f"h{number}.example"}).status == 200
            }
            for number in range(len(MATCHES))
        ]


def test_envoy_matches_the_paths_that_check_envoy_expects(taken: list[set[str]]) -> None:
    """Every answer but "not judged" is Envoy's."""
    for match, paths in zip(MATCHES, taken, strict=True):
        pattern = read_match(ConfigPlace(match))
        judged = {path: pattern.takes(path) for path in PATHS}

        assert {
            path: answer for path, answer in judged.items() if answer not in (None, path in paths)
        } == {}, match
        assert all(pattern.reaches(path) is not False for path in paths), match
        assert list_conditions(ConfigPlace(match)) == [], match


def test_routes_said_to_include_others_do(taken: list[set[str]]) -> None:
    patterns = [read_match(ConfigPlace(match)) for match in MATCHES]
    for one, own in zip(patterns, taken, strict=True):
        for other, theirs in zip(patterns, taken, strict=True):
            assert not one.includes(other) or theirs <= own
            assert one.meets(other) is not False or not (theirs & own)
        for prefix in ("/", "/v1", "/v1/"):
            below = {
                path
                for path in PATHS
                if f"{path}/".startswith(f"{prefix.rstrip('/')}/") and path.startswith(prefix)
            }
            assert not one.covers(prefix) or below <= own
