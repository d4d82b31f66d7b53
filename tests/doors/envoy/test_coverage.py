"""What a real Envoy shows Loopguard, and what `check-envoy` says about that, by a configuration or by a probe."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.cli.main import main
from extproc.cli.probe import list_names
from extproc.policy.presets import find_preset
from tests.support.check_envoy import MANAGER, Json, find, found, report
from tests.support.documents import bundle, policy
from tests.support.envoy_config import bootstrap, verdict
from tests.support.harness import Stack, envoy_version, stack
from tests.support.model_paths import MODEL_CALLS, OTHER_CALLS
from tests.support.routes import ROUTES, before, by_template, good, header, regex, rewriting, templated, treed, wrapped
from tests.support.servers import listening

CHAT = bundle(policy("chat", {"pathPrefix": "/chat"}, limit_keys=["header:x-user-id"]))
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


DETOURS: Mapping[str, tuple[Callable[[Json], Json], str, dict[str, str], str]] = {
    "case": (lambda made: before({"prefix": "/CHAT", "case_sensitive": False}, made), "/chat/x", {}, "unguarded"),
    "template": (lambda made: before(templated("/{x=**}"), made), "/chat/x", {}, "unguarded"),
    "RE2": (lambda made: before({"safe_regex": {"regex": "/[[:alpha:]]+/x"}}, made), "/chat/x", {}, "not-judged"),
    "tree": (lambda made: treed(made, guarded=False), "/chat/x", {"x-tier": "gold"}, "not-judged"),
    "fraction": (never, "/chat/x", {}, "unguarded"),
    "matcher": (lambda made: wrapped(made, header("x-skip")), "/chat/x", {"x-skip": "yes"}, "skipped"),
    "alias by regex": (shift({"prefix": "/alias/"}, regex("^/alias/(.*)$", "/chat/\\1")), "/alias/x", {}, "alias"),
    "alias by root": (shift({"prefix": "/alias/"}, {"prefix_rewrite": "/"}), "/alias/chat/x", {}, "alias"),
    "alias by template": (shift(templated("/alias/{x=**}"), by_template("/chat/{x}")), "/alias/x", {}, "alias"),
}


def keep(edit: Callable[[Json], Json], kept: list[Json]) -> Callable[[str], str]:
    """For `stack`: a changed configuration, which is kept as well."""

    def change(text: str) -> str:
        kept.append(edit(yaml.safe_load(text)))
        return json.dumps(kept[0])

    return change


def open_host(document: Json) -> Json:
    """The virtual host for all others is not guarded."""
    hosts = find(document, f"{MANAGER}/route_config/virtual_hosts")
    hosts[0]["domains"] = ["api.example"]
    hosts.append({"name": "rest", "domains": ["*"], "routes": [{**hosts[0]["routes"][1], "name": "open"}]})
    return document


def test_a_port_in_the_host_that_passes_loopguard_is_told() -> None:
    """Envoy takes the virtual host for all others, which is not guarded."""
    policies = bundle(policy("chat", {"pathPrefix": "/chat", "hosts": ["api.example"]}, limit_keys=["header:x-user-id"]))
    kept: list[Json] = []
    with stack(policies, edit=keep(open_host, kept)) as running:
        for host, asked in (("api.example:1", 0), ("api.example", 1)):
            assert running.send("/chat/x", headers={**USER, "host": host}).status == 200
            assert running.loopguard.metric("requests_total") == asked

    assert [finding.code for finding in report(kept[0], policies).findings] == ["host-port"]


@pytest.mark.parametrize("name", DETOURS)
def test_a_request_that_passes_loopguard_is_told(name: str) -> None:
    """It reaches the upstream under a guarded path, Loopguard is not asked, and the check says why."""
    edit, path, headers, code = DETOURS[name]
    kept: list[Json] = []
    with stack(CHAT, edit=keep(edit, kept)) as running:
        answer = running.send(path, headers={**USER, **headers})
        asked = running.loopguard.metric("requests_total") + running.loopguard.metric("unmatched_total")

    assert (answer.status, asked, running.upstream.seen[-1].target) == (200, 0, "/chat/x")
    for policies in (None, CHAT):
        assert code in [finding.code for finding in report(kept[0], policies).findings]


def ignore_case(document: Json) -> Json:
    """The guarded route takes paths in any case."""
    find(document, f"{ROUTES}/0/match")["case_sensitive"] = False
    return document


def test_a_guarded_request_that_matches_no_policy_is_told() -> None:
    """Envoy sends `/CHAT` to Loopguard, whose policies are for `/chat`."""
    kept: list[Json] = []
    with stack(CHAT, edit=keep(ignore_case, kept)) as running:
        running.send("/CHAT/x", headers=USER)
        assert running.loopguard.metric("unmatched_total") == 1

    assert [finding.code for finding in report(kept[0], CHAT).findings] == ["unmatched"]


@pytest.mark.parametrize(
    "document",
    [
        treed(good(), guarded=True),
        wrapped(good(), header("x-skip")),
        rewriting({"prefix": "/alias/"}, {"path_rewrite": "/chat/%REQ(x-model)%"}),
        rewriting({"prefix": "/alias/"}, regex("(.*)", "/images/\\1")),
        rewriting(templated("/alias/{x=**}"), by_template("/{x}")),
    ],
)
def test_envoy_accepts_what_is_checked(document: Json, tmp_path: Path) -> None:
    """The configurations of the tests are real ones."""
    if "path_rewrite" in json.dumps(document) and envoy_version() < (1, 38):
        pytest.skip("needs Envoy 1.38")
    assert verdict(json.dumps(document), tmp_path).endswith(" OK\n")


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


EXACT = bundle(policy("chat", {"pathExact": "/v1/chat"}, limit_keys=["header:x-user-id"]))
AS_ANN = ("-H", "x-user-id: ann")


Found = dict[str, tuple[str, str]]
"""The verdict and the reason for each request."""


def probe(made: Stack, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, Found]:
    """Exit code, and what is found."""
    url = f"http://127.0.0.1:{made.envoy.port}/v1/chat"
    code = main(["check-envoy", "--probe", url, "--loopguard", made.loopguard.admin_url, "--json", *flags])
    results: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["probes"]
    return code, {result["request"]: (result["verdict"], result["why"]) for result in results}


@pytest.fixture(scope="module")
def running() -> Iterator[Stack]:
    """A guarded path."""
    with stack(EXACT) as made:
        yield made


def test_a_probe_tells_what_is_guarded(running: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """Each request to a guarded path is counted; an upgrade and spellings that Envoy keeps, which are not, are named."""
    others = ("escaped slash", "upper case", "path parameter", "path parameter of the first segment")
    before = len(running.upstream.seen)

    code, found = probe(running, capsys, *AS_ANN)

    assert found == {
        **dict.fromkeys(list_names(), ("guarded", "counted by chat")),
        **dict.fromkeys(others, ("UNGUARDED", "Loopguard is not asked")),  # this upstream answers any path
        "WebSocket upgrade": ("UNGUARDED", "matches chat, but is not counted (chat: upgrade)"),
    }
    assert code == 1
    assert all(request.header("x-loopguard-probe") for request in running.upstream.seen[before:])
    accepted = [flag for name in (*others, "WebSocket upgrade") for flag in ("--ignore", name)]
    assert probe(running, capsys, *AS_ANN, *accepted)[0] == 0


def test_a_probe_finds_what_only_looks_guarded(capsys: pytest.CaptureFixture[str]) -> None:
    """Where large bodies pass uncounted, and where a filter does not send trailers, the table says so."""
    if envoy_version() < (1, 38):
        pytest.skip("needs Envoy 1.38")
    with stack(EXACT, body_mode="tolerant", buffer_limit=100_000) as running:
        _, found = probe(running, capsys, *AS_ANN)

    verdict, why = found["HTTP/1.1, large body, chunked"]
    assert (verdict, "chat" in why) == ("UNGUARDED", True)
    assert found["HTTP/1.1"] == ("guarded", "counted by chat")


def test_probe_tries_a_path_of_each_selected_api(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A listener without a path is probed on the paths of the policies."""
    document = bundle(policy("local", {"apis": ["ollama"]}, limit_keys=["header:x-user-id"]))
    file = tmp_path / "policies.json"
    file.write_text(json.dumps(document))
    with stack(document) as running:
        listener, admin = f"http://127.0.0.1:{running.envoy.port}", running.loopguard.admin_url
        main(["check-envoy", "--probe", listener, "--loopguard", admin, "--policy", str(file), "--json", *AS_ANN])

    found = {each["request"]: (each["path"], each["verdict"]) for each in json.loads(capsys.readouterr().out)["probes"]}
    assert found["HTTP/1.1"] == ("/api/chat", "guarded")


def switch_protocols(client: socket.socket) -> None:
    """An upstream that accepts each handshake, and answers all else with 200; Envoy must not use a connection again."""
    head = client.recv(65_536)
    upgrade = b"101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket"
    client.sendall(
        b"HTTP/1.1 %b\r\n\r\n" % (upgrade if b"sec-websocket" in head else b"200 OK\r\nconnection: close\r\ncontent-length: 0")
    )


def test_probe_opens_websockets(capsys: pytest.CaptureFixture[str]) -> None:
    """They pass uncounted, as the reason says; a handshake is all that is sent."""
    with listening(switch_protocols) as upstream, stack(EXACT, upstream=upstream) as made:
        _, found = probe(made, capsys, *AS_ANN, "--probe-size", "1000")

    assert found["WebSocket upgrade"] == ("UNGUARDED", "matches chat, but is not counted (chat: upgrade)")


def test_a_request_without_a_caller_is_not_counted(running: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """The probe needs the credentials of a client; the reason says so."""
    code, found = probe(running, capsys, "--probe-size", "1000")

    assert (code, found["HTTP/1.1"][0]) == (1, "UNGUARDED")
    assert "chat: " in found["HTTP/1.1"][1]
