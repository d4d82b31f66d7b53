"""`loopguard check-envoy` on routes that take guarded requests in unusual forms: found, or said to be not judged."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import yaml

from extproc.cli.main import main
from tests.support import ROOT
from tests.support.check_envoy import CHAT, MANAGER, Json, find, found, report, run
from tests.support.documents import bundle, policy
from tests.support.routes import (
    FILTER,
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

_TYPE = "type.googleapis.com"
_NAME = "envoy.filters.http.ext_proc"
STEERING = bundle(policy("agents", {"pathPrefix": "/chat"}, similarity="turns", action="steer", limit_keys=["header:x"]))


def codes(document: Json, policies: Json = None) -> list[tuple[str, bool]]:
    """Code of each finding, and whether it is a problem."""
    return [(code, hurts) for code, _, hurts in found(document, policies)]


@pytest.mark.parametrize("policies", [CHAT, None])
@pytest.mark.parametrize(
    "match",
    [
        {"prefix": "/CHAT", "case_sensitive": False},
        {"path_separated_prefix": "/Chat", "case_sensitive": False},
        templated("/{x=**}"),
        {"safe_regex": {"regex": "(?i)/chat.*"}},
        {"safe_regex": {"regex": "/.*"}},
        {"prefix": "/chat", "headers": [{"name": "x-skip", "present_match": True}]},
        {"prefix": "/", "query_parameters": [{"name": "skip", "present_match": True}]},
    ],
)
def test_a_route_before_the_guarded_one_is_found(match: Json, policies: Json) -> None:
    """With policies, which select its requests, and without, since it takes those of a guarded route."""
    assert codes(before(match), policies) == [("unguarded", True)]


@pytest.mark.parametrize("policies", [CHAT, None])
@pytest.mark.parametrize(
    "match",
    [
        {"safe_regex": {"regex": "/c\\pL+.*"}},
        {"safe_regex": {"regex": "/[[:alpha:]]+(/.*)?"}},
        {"path_match_policy": {"name": "their.matcher", "typed_config": {"@type": f"{_TYPE}/their.Matcher"}}},
        {"of_a_later_envoy": "/chat"},
    ],
)
def test_a_match_of_unknown_form_is_named(match: Json, policies: Json) -> None:
    """Neither a finding nor silence."""
    made = report(before(match), policies)

    assert [(item.code, item.hurts, list(item.routes)) for item in made.findings] == [("not-judged", False, ["before"])]
    assert made.findings[0].place.pointer == f"{ROUTES}/0/match"


@pytest.mark.parametrize("policies", [CHAT, None])
@pytest.mark.parametrize(
    "match",
    [
        {"prefix": "/CHAT"},
        {"path": "/images", "case_sensitive": False},
        templated("/files/{x=**}"),
        {"safe_regex": {"regex": "/files/\\pL+"}},
        {"safe_regex": {"regex": "/(files|images)"}},
        {"prefix": "/chat", "runtime_fraction": {"default_value": {"numerator": 0}}},
    ],
)
def test_a_route_for_other_requests_is_no_finding(match: Json, policies: Json) -> None:
    """Nor one that takes none."""
    assert codes(before(match), policies) == []


def test_a_route_for_other_methods_is_no_finding() -> None:
    """If the policy names its methods; without policies, it is a choice."""
    match = {"prefix": "/chat", "headers": [{"name": ":method", "string_match": {"exact": "OPTIONS"}}]}
    posts = bundle(policy("chat", {"pathPrefix": "/chat", "methods": ["POST"]}, limit_keys=["header:x-user-id"]))
    everything = bundle(policy("chat", {"pathPrefix": "/chat"}, limit_keys=["header:x-user-id"]))

    assert codes(before(match), posts) == codes(before(match)) == []
    assert codes(before(match), everything) == [("unguarded", True)]


@pytest.mark.parametrize("policies", [CHAT, None])
@pytest.mark.parametrize("numerator", [0, 50])
def test_a_guarded_route_must_take_all_requests(numerator: int, policies: Json) -> None:
    """`runtime_fraction` leaves the rest to the next route."""
    document = good()
    find(document, f"{ROUTES}/0/match")["runtime_fraction"] = {"default_value": {"numerator": numerator}}
    whole = copy.deepcopy(document)
    find(whole, f"{ROUTES}/0/match")["runtime_fraction"]["default_value"]["numerator"] = 100

    assert codes(document, policies) == [("unguarded", True)]
    assert codes(whole, policies) == []


def test_conditions_of_guarded_routes_are_noted() -> None:
    """Without policies, it is unknown whether the other requests should be guarded."""
    document = good()
    find(document, f"{ROUTES}/0/match")["headers"] = [{"name": "x-team", "present_match": True}]

    assert codes(document) == [("unguarded", False)]
    assert codes(document, CHAT) == [("unguarded", True)]


@pytest.mark.parametrize("policies", [CHAT, None])
def test_a_matcher_tree_of_routes_is_read(policies: Json) -> None:
    """Its routes are listed; which of them a request takes is not judged, unless all are guarded."""
    mixed, whole = report(treed(good(), guarded=False), policies), report(treed(good(), guarded=True), policies)

    assert [bool(route.modes) for route in mixed.routes] == [False, True]
    assert [(item.code, item.place.pointer.rpartition("/")[2]) for item in mixed.findings] == [("not-judged", "matcher")]
    assert [bool(route.modes) for route in whole.routes] == [True, True]
    assert whole.findings == []


def test_virtual_hosts_on_demand_are_noted() -> None:
    """They are not in the file."""
    document = good()
    find(document, f"{MANAGER}/route_config")["vhds"] = {"config_source": {"ads": {}}}

    assert codes(document) == [("routes-missing", False)]


# ---- Requests that reach Loopguard, and match no policy


@pytest.mark.parametrize("policies", [CHAT, None])
@pytest.mark.parametrize(
    ("match", "place"),
    [
        ({"prefix": "/chat", "case_sensitive": False}, "/match/case_sensitive"),
        ({"safe_regex": {"regex": "(?i)/chat.*"}}, "/match"),
    ],
)
def test_a_guarded_route_must_mind_the_case(match: Json, place: str, policies: Json) -> None:
    """Policies do, so `/CHAT` would match none."""
    document = good()
    find(document, f"{ROUTES}/0")["match"] = match

    assert [(code, pointer) for code, pointer, _ in found(document, policies)] == [("unmatched", f"{ROUTES}/0{place}")]


def test_a_policy_by_route_matches_every_spelling() -> None:
    """As does one for all paths."""
    document = good()
    find(document, f"{ROUTES}/0")["match"] = {"prefix": "/chat", "case_sensitive": False}
    name = find(document, f"{ROUTES}/0")["name"]
    by_name = bundle(policy("p", {"routes": [name]}, limit_keys=["header:x"]))
    everywhere = bundle(policy("p", {"pathPrefix": "/", "routes": [name]}, limit_keys=["header:x"]))

    assert codes(document, by_name) == codes(document, everywhere) == []


def test_path_parameters_are_told() -> None:
    """A choice that is made, or that nothing unguarded depends on, is not."""
    silent, ignoring, closed = good(), good(), good()
    del find(silent, f"{MANAGER}/route_config")["ignore_path_parameters_in_path_matching"]
    find(ignoring, f"{MANAGER}/route_config")["ignore_path_parameters_in_path_matching"] = True
    del find(closed, f"{MANAGER}/route_config")["ignore_path_parameters_in_path_matching"]
    find(closed, ROUTES)[1] = {"match": {"prefix": "/"}, "direct_response": {"status": 404}}

    assert codes(silent) == codes(silent, CHAT) == [("path-parameters", False)]
    assert codes(ignoring) == codes(ignoring, CHAT) == [("unmatched", True)]
    assert codes(closed) == codes(good()) == []


def test_unknown_routes_of_a_selector_are_found() -> None:
    """A policy for a route that does not exist matches nothing."""
    made = report(good(), bundle(policy("p", {"routes": ["nowhere"]}, limit_keys=["header:x"])))

    assert [(item.code, item.hurts) for item in made.findings] == [("unmatched", True)]
    assert "nowhere" in made.findings[0].problem


# ---- A matcher around the filter


def test_a_matcher_that_clients_control_is_found() -> None:
    """A note for inputs that cannot be judged; nothing for a matcher that skips nothing."""
    query = {"@type": f"{_TYPE}/envoy.type.matcher.v3.HttpRequestQueryParamMatchInput", "query_param": "skip"}
    metadata = {"@type": f"{_TYPE}/envoy.extensions.matching.common_inputs.network.v3.DynamicMetadataInput", "filter": "x"}

    assert codes(wrapped(good(), header("x-skip"))) == codes(wrapped(good(), query)) == [("skipped", True)]
    assert codes(wrapped(good(), header(":path"))) == codes(wrapped(good(), metadata)) == [("not-judged", False)]
    assert codes(wrapped(good(), header("x-skip"), skips=False)) == []


def test_the_chart_s_matcher_is_understood() -> None:
    """It skips what calls no model: a problem only for policies that select other requests."""
    document = wrapped(good(), header(":path"))
    matcher = yaml.safe_load((ROOT / "helm" / "loopguard" / "envoy" / "apis.yaml").read_text())
    find(document, f"{FILTER}/typed_config")["xds_matcher"] = matcher
    by_api = bundle(policy("models", {"apis": "any", "pathPrefix": "/chat"}, limit_keys=["header:x"]))
    lacking = copy.deepcopy(document)
    find(lacking, f"{FILTER}/typed_config/xds_matcher/matcher_list/matchers/0/predicate/not_matcher/or_matcher/predicate").pop()
    skipping = copy.deepcopy(document)
    skip = find(skipping, f"{FILTER}/typed_config/xds_matcher")
    skip["on_no_match"] = skip["matcher_list"]["matchers"][0]["on_match"]
    tree = copy.deepcopy(document)
    on_match, value = skip["on_no_match"], {"name": "path", "typed_config": header(":path")}
    find(tree, f"{FILTER}/typed_config")["xds_matcher"] = {
        "matcher_tree": {"input": value, "exact_match_map": {"map": {"/x": on_match}}}
    }

    assert codes(document) == codes(document, by_api) == []
    assert codes(document, CHAT) == [("skipped", True)]
    assert codes(lacking) == codes(skipping) == codes(tree) == [("not-judged", False)]


def test_a_route_s_matcher_is_found() -> None:
    """It replaces that of the filter."""
    document = wrapped(good(), header("x-skip"))
    matcher = find(document, f"{FILTER}/typed_config").pop("xds_matcher")
    kind = f"{_TYPE}/envoy.extensions.common.matching.v3.ExtensionWithMatcherPerRoute"
    find(document, f"{FILTER}/typed_config/extension_config/typed_config")["processing_mode"] = {
        "request_body_mode": "BUFFERED",
        "request_trailer_mode": "SEND",
        "response_header_mode": "SEND",
    }
    find(document, f"{ROUTES}/0/typed_per_filter_config")[_NAME] = {"@type": kind, "xds_matcher": matcher}

    assert ("skipped", True) in codes(document)


def test_filters_that_run_programs_are_noted() -> None:
    """They may choose routes and answer requests; so may those that come later."""
    running, later = good(), good()
    kind = f"{_TYPE}/envoy.extensions.filters.http.wasm.v3.Wasm"
    find(running, f"{MANAGER}/http_filters").insert(0, {"name": "program", "typed_config": {"@type": kind}})
    find(later, f"{MANAGER}/http_filters").insert(0, {"name": "ecds", "config_discovery": {"type_urls": ["x"]}})

    assert codes(running) == codes(later) == [("not-judged", False)]


# ---- Aliases


@pytest.mark.parametrize("policies", [CHAT, None])
@pytest.mark.parametrize(
    ("rewrite", "code"),
    [
        ({"prefix_rewrite": "/"}, "alias"),
        (regex("^/alias/(.*)$", "/chat/\\1"), "alias"),
        (regex("/alias", "/chat"), "alias"),
        (by_template("/chat/{x}"), "alias"),
        ({"path_rewrite": "/chat/%REQ(x-model)%"}, "alias"),
        (regex("^/alias(/.*)$", "\\1"), "not-judged"),
        (regex("(.*)", "/images/\\1"), "not-judged"),
        (by_template("/{x}"), "not-judged"),
        ({"path_rewrite": "%REQ(x-path)%"}, "not-judged"),
        (regex("^/alias/(.*)$", "/images/\\1"), ""),
        (by_template("/images/{x}"), ""),
        ({"prefix_rewrite": "/images/"}, ""),
    ],
)
def test_every_rewrite_onto_a_guarded_path_is_found(rewrite: Json, code: str, policies: Json) -> None:
    """By a prefix, an expression, a template or a header."""
    expected = [(code, code == "alias")] if code else []

    assert codes(rewriting({"prefix": "/alias/"}, rewrite), policies) == expected


def test_a_single_path_that_is_rewritten_is_no_alias() -> None:
    """Only that path is rewritten, to one that is not guarded."""
    assert codes(rewriting({"path": "/health"}, {"prefix_rewrite": "/"})) == []


def test_a_cluster_that_requests_choose_is_not_judged() -> None:
    """It may be the guarded upstream, or another."""
    document = rewriting({"prefix": "/alias/"}, {"prefix_rewrite": "/chat/"})
    route = find(document, f"{ROUTES}/0/route")
    del route["cluster"]
    route["cluster_header"] = "x-cluster"

    assert codes(document) == [("not-judged", False)]


def test_a_second_listener_with_wider_routes_is_found() -> None:
    """A catch-all to the same upstream takes the guarded requests as well as equal routes do."""
    document = good()
    listeners = find(document, "/static_resources/listeners")
    second = copy.deepcopy(listeners[0])
    second["name"] = "second"
    manager = second["filter_chains"][0]["filters"][0]["typed_config"]
    del manager["http_filters"][0]
    host = manager["route_config"]["virtual_hosts"][0]
    host["routes"] = host["routes"][1:]
    listeners.append(second)
    unknown = copy.deepcopy(document)
    find(unknown, "/static_resources/listeners/1/filter_chains/0/filters/0/typed_config/route_config/virtual_hosts/0/routes/0")[
        "match"
    ] = {"safe_regex": {"regex": "/\\pL+.*"}}

    assert codes(document) == [("second-listener", True)]
    assert codes(unknown) == [("not-judged", False)]


# ---- Notes in bodies that Envoy does not take back


def test_notes_need_whole_bodies() -> None:
    """With BUFFERED_PARTIAL, steering is a warning that no model reads; duplex and policies without notes are fine."""
    document = good(STEERING)
    overrides = find(document, f"{ROUTES}/0/typed_per_filter_config/{_NAME}/overrides")
    find(document, f"{FILTER}/typed_config")["allow_content_length_header"] = True

    def told(mode: str, policies: Json) -> list[tuple[str, bool]]:
        overrides["processing_mode"]["request_body_mode"] = mode
        return [(code, hurts) for code, hurts in codes(document, policies) if code == "notes"]

    assert told("BUFFERED_PARTIAL", STEERING) == [("notes", True)]
    assert told("BUFFERED_PARTIAL", None) == [("notes", False)]
    assert told("BUFFERED_PARTIAL", CHAT) == told("FULL_DUPLEX_STREAMED", STEERING) == told("BUFFERED", STEERING) == []


@pytest.mark.parametrize("flags", [["--body-mode", "tolerant"], ["--tolerant-routes", "/chat"], ["--body-mode", "duplex"]])
def test_envoy_config_says_where_notes_are_lost(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anybody runs it."""
    (tmp_path / "p.json").write_text(json.dumps(STEERING))

    code = main(["envoy-config", "--policy", str(tmp_path / "p.json"), "--upstream", "127.0.0.1:8080", *flags])

    assert code == 0
    assert ("notes of agents become warnings" in capsys.readouterr().err) == ("duplex" not in flags)


def test_the_sum_says_what_is_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`findings: 0` alone would call it good."""
    file = tmp_path / "envoy.json"
    file.write_text(json.dumps(before({"safe_regex": {"regex": "/c\\pL+.*"}})))

    code, out, _ = run(capsys, str(file))

    assert code == 0
    assert out.endswith("1 of 3 routes guarded; findings: 0 in what could be judged; not judged: 1; notes: 0\n")


def test_a_guarded_route_of_unknown_form_leaves_the_rest_open() -> None:
    """It may take all that the policy selects, so the route behind it is no finding."""
    document = good()
    find(document, f"{ROUTES}/0")["match"] = {"safe_regex": {"regex": "/\\pL+.*"}}

    made = report(document, CHAT)

    assert [(item.code, item.place.pointer, list(item.routes)) for item in made.findings] == [
        ("not-judged", f"{ROUTES}/0/match", ["unguarded"])
    ]


def test_tunnels_to_the_guarded_upstream_are_found() -> None:
    """By CONNECT, or through a listener for connections; elsewhere, both are good."""
    connect, forwarding = before({"connect_matcher": {}}), good()
    cluster = find(forwarding, f"{ROUTES}/0/route")["cluster"]
    kind = f"{_TYPE}/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy"
    proxy = {"name": "tcp", "typed_config": {"@type": kind, "stat_prefix": "t", "cluster": cluster}}
    find(forwarding, "/static_resources/listeners").append({"name": "raw", "filter_chains": [{"filters": [proxy]}]})
    harmless = copy.deepcopy(forwarding)
    find(harmless, "/static_resources/listeners/1/filter_chains/0/filters/0/typed_config")["cluster"] = "else"
    later = copy.deepcopy(forwarding)
    find(later, "/static_resources/listeners/1/filter_chains/0")["filters"] = [{"name": "x", "config_discovery": {}}]
    elsewhere = copy.deepcopy(connect)
    find(elsewhere, f"{ROUTES}/0/route")["cluster"] = "else"

    assert codes(connect) == [("alias", True)]
    assert codes(forwarding) == [("second-listener", True)]
    assert codes(later) == [("not-judged", False)]
    assert codes(harmless) == codes(elsewhere) == []


def test_header_rules_of_unknown_form_are_named() -> None:
    """A rule that may keep a caller's header from Loopguard."""

    def told(pattern: Json) -> list[tuple[str, bool]]:
        document = good()
        find(document, f"{FILTER}/typed_config")["forward_rules"] = {"disallowed_headers": {"patterns": [pattern]}}
        return codes(document, CHAT)

    assert told({"safe_regex": {"regex": "x-\\pL+-id"}}) == told({"custom": {"name": "their"}}) == [("not-judged", False)]
    assert told({"safe_regex": {"regex": "x-.*-id"}}) == told({"contains": "user"}) == [("caller-headers", True)]
    assert told({"safe_regex": {"regex": "y-\\pL+"}}) == told({"suffix": "x"}) == []


def test_token_rules_of_unknown_form_are_named() -> None:
    """A rule of jwt_authn that may cover the route, or not."""
    claims = bundle(policy("p", {"pathPrefix": "/chat"}, limit_keys=["jwt:sub"]))

    def told(*rules: Json) -> list[tuple[str, bool]]:
        document = good(claims)
        kind = f"{_TYPE}/envoy.extensions.filters.http.jwt_authn.v3.JwtAuthentication"
        config = {"@type": kind, "providers": {"idp": {"payload_in_metadata": "claims", "forward": True}}, "rules": list(rules)}
        find(document, f"{MANAGER}/http_filters").insert(0, {"name": "jwt", "typed_config": config})
        return codes(document, claims)

    unknown = {"match": {"safe_regex": {"regex": "/\\pL+"}}, "requires": {"provider_name": "idp"}}

    assert told(unknown) == [("not-judged", False)]
    assert told(unknown, {"match": {"prefix": "/"}, "requires": {"provider_name": "idp"}}) == []
    assert told({"match": {"safe_regex": {"regex": "/other/\\pL+"}}, "requires": {}}) == [("jwt", True)]


def test_a_port_in_the_host_must_lead_to_the_same_routes() -> None:
    """A policy's hosts are without ports; Envoy's domains are not, unless it ignores them."""
    policies = bundle(policy("p", {"pathPrefix": "/chat", "hosts": ["api.example"]}, limit_keys=["header:x"]))
    document = good()
    hosts = find(document, f"{MANAGER}/route_config/virtual_hosts")
    hosts[0]["domains"] = ["api.example"]
    hosts.append({"name": "rest", "domains": ["*"], "routes": [{**hosts[0]["routes"][1], "name": "open"}]})
    ignoring, named, closed = copy.deepcopy(document), copy.deepcopy(document), copy.deepcopy(document)
    find(ignoring, f"{MANAGER}/route_config")["ignore_port_in_host_matching"] = True
    find(named, f"{MANAGER}/route_config/virtual_hosts/0")["domains"] = ["api.example", "api.example:*"]
    find(closed, f"{MANAGER}/route_config/virtual_hosts").pop()

    assert codes(document, policies) == [("host-port", True)]
    assert codes(ignoring, policies) == codes(named, policies) == codes(closed, policies) == []
