"""`loopguard check-envoy` about filters beside Loopguard's, other ways to the upstream, and settings of clusters and routes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from tests.support.check_envoy import CHAT, MANAGER, Json, find, found, report
from tests.support.documents import bundle, policy
from tests.support.envoy_config import bootstrap

_HTTP = "type.googleapis.com/envoy.extensions.filters.http"
_FILTERS = f"{MANAGER}/http_filters"
_ROUTES = f"{MANAGER}/route_config/virtual_hosts/0/routes"
_NAME = "envoy.filters.http.ext_proc"
_RULES = {"rules": {"action": "DENY", "policies": {"p": {}}}}
_OFF = {"@type": "type.googleapis.com/envoy.config.route.v3.FilterConfig", "disabled": True}


def good() -> Json:
    """What `loopguard envoy-config` prints for one guarded path."""
    return yaml.safe_load(bootstrap(CHAT))


def add_filter(document: Json, kind: str, config: Json, *, behind: bool = True, **more: Any) -> None:  # noqa: ANN401  # YAML
    """Put a filter before or behind Loopguard's."""
    entry = {"name": "theirs", "typed_config": {"@type": f"{_HTTP}.{kind}", **config}, **more}
    find(document, _FILTERS).insert(1 if behind else 0, entry)


def codes(document: Json, policies: Json = CHAT) -> list[tuple[str, bool]]:
    """Codes of findings, and whether they hurt."""
    return [(code, hurts) for code, _, hurts in found(document, policies)]


REFUSERS: dict[str, tuple[str, Json]] = {
    "ext_authz": ("ext_authz.v3.ExtAuthz", {}),
    "jwt_authn": (
        "jwt_authn.v3.JwtAuthentication",
        {"rules": [{"match": {"prefix": "/"}, "requires": {"provider_name": "p"}}]},
    ),
    "rbac": ("rbac.v3.RBAC", _RULES),
    "basic_auth": ("basic_auth.v3.BasicAuth", {}),
    "local_ratelimit": ("local_ratelimit.v3.LocalRateLimit", {"token_bucket": {"max_tokens": 1}}),
    "ratelimit": ("ratelimit.v3.RateLimit", {"rate_limits": [{"actions": []}]}),
}


@pytest.mark.parametrize("name", REFUSERS)
def test_what_refuses_belongs_before_loopguard(name: str) -> None:
    """Behind it, Loopguard counts what is refused; before it, all is well, and so where it is off on the guarded route."""
    kind, config = REFUSERS[name]
    behind, before, off = good(), good(), good()
    add_filter(behind, kind, config)
    add_filter(before, kind, config, behind=False)
    add_filter(off, kind, config)
    find(off, f"{_ROUTES}/0")["typed_per_filter_config"]["theirs"] = _OFF

    assert codes(behind) == [("late-refusal", True)]
    assert codes(before) == codes(off) == []


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("rbac.v3.RBAC", {}),
        ("local_ratelimit.v3.LocalRateLimit", {"stat_prefix": "s"}),
        ("ratelimit.v3.RateLimit", {"domain": "d"}),
        ("jwt_authn.v3.JwtAuthentication", {"providers": {}}),
        ("cors.v3.Cors", {}),
        ("lua.v3.Lua", {"default_source_code": {"inline_string": "function envoy_on_response(handle) end"}}),
    ],
)
def test_what_refuses_nothing_may_stand_anywhere(kind: str, config: Json) -> None:
    """Without rules, limits or an answer of its own."""
    document = good()
    add_filter(document, kind, config)

    assert codes(document) == []


def test_settings_of_a_route_make_a_filter_refuse() -> None:
    """A route's own rules, bucket or limits count like the filter's."""
    cases: dict[str, Json] = {
        "rbac.v3.RBAC": {"rbac": _RULES},
        "local_ratelimit.v3.LocalRateLimit": {"token_bucket": {"max_tokens": 1}},
        "ratelimit.v3.RateLimit": {"rate_limits": [{"actions": []}]},
    }
    for kind, own in cases.items():
        document = good()
        add_filter(document, kind, {})
        find(document, f"{_ROUTES}/0")["typed_per_filter_config"]["theirs"] = {"@type": "x", **own}

        assert codes(document) == [("late-refusal", True)]


def test_scripts_and_processors_behind_are_notes() -> None:
    """They may refuse, which a configuration does not say."""
    script, processor = good(), good()
    code = "function envoy_on_request(h) h:respond({[':status'] = '403'}, '') end"
    add_filter(script, "lua.v3.Lua", {"default_source_code": {"inline_string": code}})
    add_filter(
        processor,
        "ext_proc.v3.ExternalProcessor",
        {"grpc_service": {"envoy_grpc": {"cluster_name": "a"}}, "route_cache_action": "RETAIN"},
    )

    assert codes(script) == codes(processor) == [("late-refusal", False)]


def test_envoy_gateway_orders_filters_by_its_own_setting() -> None:
    """The repair names it."""
    document = good()
    loopguard = find(document, f"{_FILTERS}/0")
    loopguard["name"] = "envoy.filters.http.ext_proc/envoyextensionpolicy/default/loopguard/extproc/0"
    per_route = find(document, f"{_ROUTES}/0")["typed_per_filter_config"]
    per_route[loopguard["name"]] = per_route.pop(_NAME)
    add_filter(document, "rbac.v3.RBAC", _RULES)
    find(document, f"{_FILTERS}/1")["name"] = "envoy.filters.http.rbac"

    [late] = [finding for finding in report(document, CHAT).findings if finding.code == "late-refusal"]

    assert (
        late.right
        == "spec.filterOrder of the EnvoyProxy: [{name: envoy.filters.http.ext_proc, after: envoy.filters.http.rbac}]"
    )


CLAIMS = bundle(policy("claims", {"pathPrefix": "/chat"}, limit_keys=["jwt:sub"]))


@pytest.mark.parametrize(
    ("rules", "known"),
    [
        ([{"match": {"prefix": "/"}, "requires": {"provider_name": "idp"}}], True),
        ([{"match": {"prefix": "/cha"}, "requires": {"provider_name": "idp"}}], True),
        ([{"match": {"safe_regex": {"regex": "/c.*"}}, "requires": {"provider_name": "idp"}}], True),
        ([{"match": {"prefix": "/other"}, "requires": {"provider_name": "idp"}}], False),
        ([{"match": {"prefix": "/chat"}}, {"match": {"prefix": "/"}, "requires": {"provider_name": "idp"}}], False),
    ],
)
def test_a_rule_has_to_cover_the_route(rules: Json, known: bool) -> None:
    """The first rule that matches decides, and one without `requires` verifies nothing."""
    document = good()
    providers = {"idp": {"payload_in_metadata": "claims", "forward": True}}
    add_filter(document, "jwt_authn.v3.JwtAuthentication", {"providers": providers, "rules": rules}, behind=False)

    assert codes(document, CLAIMS) == ([] if known else [("jwt", True)])


@pytest.mark.parametrize("rewrite", ["/chat", "/chat/completions", "/ch"])
def test_an_alias_of_a_guarded_path_is_found(rewrite: str) -> None:
    """An unguarded route that rewrites its path to a guarded one, for the same cluster."""
    document = good()
    routes = find(document, _ROUTES)
    cluster = routes[0]["route"]["cluster"]
    routes.insert(0, {"name": "alias", "match": {"prefix": "/alias"}, "route": {"cluster": cluster, "prefix_rewrite": rewrite}})
    elsewhere = copy.deepcopy(document)
    find(elsewhere, f"{_ROUTES}/0")["route"]["cluster"] = "else"
    harmless = copy.deepcopy(document)
    find(harmless, f"{_ROUTES}/0")["route"]["prefix_rewrite"] = "/images"

    assert codes(document) == [("alias", True)]
    assert codes(elsewhere) == codes(harmless) == []


def weigh(document: Json, *settings: Json) -> Json:
    """Split the guarded route between clusters with these settings for Loopguard's filter; None for none."""
    route = find(document, f"{_ROUTES}/0")
    cluster = route["route"].pop("cluster")
    route["route"]["weighted_clusters"] = {
        "clusters": [
            {"name": cluster, "weight": 1, **({} if setting is None else {"typed_per_filter_config": {_NAME: setting}})}
            for setting in settings
        ]
    }
    return route


def test_a_weighted_cluster_that_is_off_is_found() -> None:
    """Its part of the requests is not guarded; one that turns the filter on is no finding."""
    off, on, disabled = good(), good(), good()
    weigh(off, None, _OFF)
    weigh(on, None, None)
    find(disabled, f"{_FILTERS}/0")["disabled"] = True
    own = find(disabled, f"{_ROUTES}/0")["typed_per_filter_config"].pop(_NAME)
    weigh(disabled, own, own)
    partly = copy.deepcopy(disabled)
    del find(partly, f"{_ROUTES}/0/route/weighted_clusters/clusters/1")["typed_per_filter_config"]

    assert codes(off) == codes(partly) == [("unguarded", True)]
    assert codes(on) == codes(disabled) == []


def test_a_second_listener_is_found() -> None:
    """The same routes without Loopguard; a listener for something else is no finding."""
    document = good()
    listeners = find(document, "/static_resources/listeners")
    second = copy.deepcopy(listeners[0])
    second["name"] = "second"
    manager = second["filter_chains"][0]["filters"][0]["typed_config"]
    del manager["http_filters"][0]
    for route in manager["route_config"]["virtual_hosts"][0]["routes"]:
        route.pop("typed_per_filter_config", None)
    other = copy.deepcopy(second)
    manager = other["filter_chains"][0]["filters"][0]["typed_config"]
    manager["route_config"]["virtual_hosts"][0]["routes"] = [
        {"match": {"prefix": "/health"}, "direct_response": {"status": 200}}
    ]
    harmless = copy.deepcopy(document)
    listeners.append(second)
    find(harmless, "/static_resources/listeners").append(other)

    assert codes(document) == [("second-listener", True)]
    assert codes(harmless) == []


def test_upgrades_with_filters_of_their_own_need_loopguard_among_them() -> None:
    """An entry that is off is none; an empty list stands for the filters of other requests."""
    cases: list[tuple[Json, list[tuple[str, bool]]]] = [
        ([{"name": "envoy.filters.http.router"}], [("upgrades", True)]),
        ([{"name": _NAME, "disabled": True}], [("upgrades", True)]),
        ([{"name": _NAME}], []),
        ([], []),
    ]
    for filters, expected in cases:
        document = good()
        find(document, MANAGER)["upgrade_configs"] = [{"upgrade_type": "websocket", "filters": filters}]

        assert codes(document) == expected


def test_an_aggregate_cluster_is_its_members() -> None:
    """They speak HTTP/2 and have limits; the aggregate itself has neither."""
    document = good()
    clusters = find(document, "/static_resources/clusters")
    member = next(cluster for cluster in clusters if cluster["name"] == "loopguard")
    member["name"] = "loopguard-a"
    config = {"@type": "type.googleapis.com/envoy.extensions.clusters.aggregate.v3.ClusterConfig", "clusters": ["loopguard-a"]}
    clusters.append({"name": "loopguard", "cluster_type": {"name": "envoy.clusters.aggregate", "typed_config": config}})
    weak = copy.deepcopy(document)
    del next(cluster for cluster in find(weak, "/static_resources/clusters") if cluster["name"] == "loopguard-a")[
        "circuit_breakers"
    ]

    assert codes(document) == []
    assert codes(weak) == [("circuit-breakers", True)]


def test_a_route_s_own_service_has_to_exist() -> None:
    """Envoy accepts a cluster that does not."""
    document = good()
    overrides = find(document, f"{_ROUTES}/0/typed_per_filter_config/{_NAME}/overrides")
    overrides["grpc_service"] = {"envoy_grpc": {"cluster_name": "nowhere"}}

    assert codes(document) == [("cluster", True)]


def test_a_matcher_around_the_filter_changes_nothing() -> None:
    """It only chooses the requests."""
    document = good()
    guard = find(document, f"{_FILTERS}/0")
    kind = "type.googleapis.com/envoy.extensions.common.matching.v3.ExtensionWithMatcher"
    inner = {"name": guard["name"], "typed_config": guard["typed_config"]}
    guard["typed_config"] = {"@type": kind, "xds_matcher": {"matcher_list": {"matchers": []}}, "extension_config": inner}

    assert codes(document) == []


def test_mirrors_and_small_buffers_are_notes() -> None:
    """A copy may be counted by a second Loopguard, and a buffer filter may refuse bodies."""
    document = good()
    find(document, f"{_ROUTES}/0/route")["request_mirror_policies"] = [{"cluster": "copies"}]
    add_filter(document, "buffer.v3.Buffer", {"max_request_bytes": 1_000}, behind=False)

    assert codes(document) == [("mirrors", False), ("buffer-limit", False)]
