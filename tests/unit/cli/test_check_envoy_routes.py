"""`loopguard check-envoy` on routes, listeners and filters that let requests bypass Loopguard."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import ROOT
from tests.support.check_envoy import (
    CHAT,
    MANAGER,
    Edit,
    Json,
    add_filter,
    codes,
    drop,
    edited,
    find,
    found,
    insert,
    put,
    report,
)
from tests.support.command import Run, written
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
_PER_ROUTE = f"{ROUTES}/0/typed_per_filter_config"
_CONFIG = f"{MANAGER}/route_config"
_OFF = {"@type": f"{_TYPE}/envoy.config.route.v3.FilterConfig", "disabled": True}
STEERING = bundle(
    policy(
        "agents",
        {"pathPrefix": "/chat"},
        similarity="turns",
        action="steer",
        limit_keys=["header:x"],
    )
)


# ---- Routes before the guarded one, and what the guarded one takes


@pytest.mark.parametrize("policies", [CHAT, None])
@pytest.mark.parametrize(
    ("match", "told"),
    [
        ({"prefix": "/CHAT", "case_sensitive": False}, "unguarded"),
        ({"path_separated_prefix": "/Chat", "case_sensitive": False}, "unguarded"),
        (templated("/{x=**}"), "unguarded"),
        ({"safe_regex": {"regex": "(?i)/chat.*"}}, "unguarded"),
        ({"safe_regex": {"regex": "/.*"}}, "unguarded"),
        ({"prefix": "/chat", "headers": [{"name": "x-skip", "present_match": True}]}, "unguarded"),
        (
            {"prefix": "/", "query_parameters": [{"name": "skip", "present_match": True}]},
            "unguarded",
        ),
        ({"safe_regex": {"regex": "/c\\pL+.*"}}, "(not-judged)"),
        ({"safe_regex": {"regex": "/[[:alpha:]]+(/.*)?"}}, "(not-judged)"),
        (
            {
                "path_match_policy": {
                    "name": "x",
                    "typed_config": {"@type": f"{_TYPE}/their.Matcher"},
                }
            },
            "(not-judged)",
        ),
        ({"of_a_later_envoy": "/chat"}, "(not-judged)"),
        ({"connect_matcher": {}}, "alias"),
        ({"prefix": "/CHAT"}, ""),
        ({"path": "/images", "case_sensitive": False}, ""),
        (templated("/files/{x=**}"), ""),
        ({"safe_regex": {"regex": "/files/\\pL+"}}, ""),
        ({"safe_regex": {"regex": "/(files|images)"}}, ""),
        ({"prefix": "/chat", "runtime_fraction": {"default_value": {"numerator": 0}}}, ""),
    ],
)
def test_route_before_the_guarded_one_is_checked(match: Json, told: str, policies: Json) -> None:
    document = before(match)

    assert codes(document, policies) == [told] * bool(told)
    if told == "(not-judged)":
        assert [item[:2] for item in found(document, policies)] == [
            ("not-judged", f"{ROUTES}/0/match")
        ]
        assert report(document, policies).findings[0].routes == ["before"]


OPTIONS = {
    "prefix": "/chat",
    "headers": [{"name": ":method", "string_match": {"exact": "OPTIONS"}}],
}
POSTS = bundle(
    policy("chat", {"pathPrefix": "/chat", "methods": ["POST"]}, limit_keys=["header:x-user-id"])
)
FRACTION = f"{ROUTES}/0/match/runtime_fraction"
NO_CASE = put(f"{ROUTES}/0/match", {"prefix": "/chat", "case_sensitive": False})
BY_NAME = bundle(policy("p", {"routes": ["guarded:/chat*"]}, limit_keys=["header:x"]))
EVERYWHERE = bundle(
    policy("p", {"pathPrefix": "/", "routes": ["guarded:/chat*"]}, limit_keys=["header:x"])
)
IGNORES = f"{_CONFIG}/ignore_path_parameters_in_path_matching"
CLOSED = put(f"{ROUTES}/1", {"match": {"prefix": "/"}, "direct_response": {"status": 404}})
HOSTED = bundle(
    policy("p", {"pathPrefix": "/chat", "hosts": ["api.example"]}, limit_keys=["header:x"])
)


def own_host(document: Json) -> None:
    hosts = find(document, f"{_CONFIG}/virtual_hosts")
    hosts[0]["domains"] = ["api.example"]
    hosts.append(
        {"name": "rest", "domains": ["*"], "routes": [{**hosts[0]["routes"][1], "name": "open"}]}
    )


def weigh(*settings: Json) -> Edit:
    """Split the guarded route between clusters with these settings for Loopguard's filter."""

    def edit(document: Json) -> None:
        route = find(document, f"{ROUTES}/0/route")
        cluster = {"name": route.pop("cluster"), "weight": 1}
        own = [
            {} if each is None else {"typed_per_filter_config": {_NAME: each}} for each in settings
        ]
        route["weighted_clusters"] = {"clusters": [cluster | each for each in own]}

    return edit


OVERRIDES = good()["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0][
    "typed_config"
]
OVERRIDES = OVERRIDES["route_config"]["virtual_hosts"][0]["routes"][0]["typed_per_filter_config"][
    _NAME
]
DISABLED = [put(f"{FILTER}/disabled", value=True), drop(f"{_PER_ROUTE}/{_NAME}")]
ROUTE_CASES: dict[str, tuple[list[Edit], Json, list[str]]] = {
    "a route for other methods": (
        [insert(f"{ROUTES}/0", {"name": "b", "match": OPTIONS, "route": {"cluster": "upstream"}})],
        POSTS,
        [],
    ),
    "a route for methods that count": (
        [insert(f"{ROUTES}/0", {"name": "b", "match": OPTIONS, "route": {"cluster": "upstream"}})],
        CHAT,
        ["unguarded"],
    ),
    "a condition without policies": (
        [put(f"{ROUTES}/0/match/headers", [{"name": "x-team", "present_match": True}])],
        None,
        ["(unguarded)"],
    ),
    "a condition": (
        [put(f"{ROUTES}/0/match/headers", [{"name": "x-team", "present_match": True}])],
        CHAT,
        ["unguarded"],
    ),
    "no request": ([put(FRACTION, {"default_value": {"numerator": 0}})], CHAT, ["unguarded"]),
    "half of the requests": (
        [put(FRACTION, {"default_value": {"numerator": 50}})],
        None,
        ["unguarded"],
    ),
    "all requests": ([put(FRACTION, {"default_value": {"numerator": 100}})], CHAT, []),
    "virtual hosts on demand": (
        [put(f"{_CONFIG}/vhds", {"config_source": {"ads": {}}})],
        None,
        ["(routes-missing)"],
    ),
    "any case, for a policy by route": ([NO_CASE], BY_NAME, []),
    "any case, for a policy of all paths": ([NO_CASE], EVERYWHERE, []),
    "path parameters": ([drop(IGNORES)], CHAT, ["(path-parameters)"]),
    "path parameters without policies": ([drop(IGNORES)], None, ["(path-parameters)"]),
    "path parameters that are ignored": ([put(IGNORES, value=True)], CHAT, ["unmatched"]),
    "ignored without policies": ([put(IGNORES, value=True)], None, ["unmatched"]),
    "path parameters with nothing unguarded": ([drop(IGNORES), CLOSED], None, []),
    "a guarded route of unknown form": (
        [put(f"{ROUTES}/0/match", {"safe_regex": {"regex": "/\\pL+.*"}})],
        CHAT,
        ["(not-judged)"],
    ),
    "a port in the host": ([own_host], HOSTED, ["host-port"]),
    "a port that Envoy ignores": (
        [own_host, put(f"{_CONFIG}/ignore_port_in_host_matching", value=True)],
        HOSTED,
        [],
    ),
    "a port that is named": (
        [own_host, put(f"{_CONFIG}/virtual_hosts/0/domains", ["api.example", "api.example:*"])],
        HOSTED,
        [],
    ),
    "a port that leads nowhere": ([own_host, drop(f"{_CONFIG}/virtual_hosts/1")], HOSTED, []),
    "a weighted cluster that is off": ([weigh(None, _OFF)], CHAT, ["unguarded"]),
    "weighted clusters": ([weigh(None, None)], CHAT, []),
    "weighted clusters that are on": ([*DISABLED, weigh(OVERRIDES, OVERRIDES)], CHAT, []),
    "a weighted cluster that is not on": ([*DISABLED, weigh(OVERRIDES, None)], CHAT, ["unguarded"]),
    "a route's own service that does not exist": (
        [
            put(
                f"{_PER_ROUTE}/{_NAME}/overrides/grpc_service",
                {"envoy_grpc": {"cluster_name": "nowhere"}},
            )
        ],
        CHAT,
        ["cluster"],
    ),
    "mirrors and small buffers": (
        [
            put(f"{ROUTES}/0/route/request_mirror_policies", [{"cluster": "copies"}]),
            add_filter("buffer.v3.Buffer", place=0, max_request_bytes=1_000),
        ],
        CHAT,
        ["(mirrors)", "(buffer-limit)"],
    ),
}


@pytest.mark.parametrize(("edits", "policies", "expected"), ROUTE_CASES.values(), ids=ROUTE_CASES)
def test_guarded_route_must_match_what_policies_select(
    edits: list[Edit], policies: Json, expected: list[str]
) -> None:
    assert codes(edited(good(), *edits), policies) == expected


@pytest.mark.parametrize("policies", [CHAT, None])
@pytest.mark.parametrize(
    ("match", "place"),
    [
        ({"prefix": "/chat", "case_sensitive": False}, "/match/case_sensitive"),
        ({"safe_regex": {"regex": "(?i)/chat.*"}}, "/match"),
    ],
)
def test_case_insensitive_guarded_route_is_found(match: Json, place: str, policies: Json) -> None:
    document = edited(good(), put(f"{ROUTES}/0/match", match))

    assert found(document, policies) == [("unmatched", f"{ROUTES}/0{place}", True)]


@pytest.mark.parametrize("policies", [CHAT, None])
def test_matcher_tree_of_routes_is_read(policies: Json) -> None:
    mixed, whole = (
        report(treed(good(), guarded=False), policies),
        report(treed(good(), guarded=True), policies),
    )

    assert [bool(route.modes) for route in (*mixed.routes, *whole.routes)] == [
        False,
        True,
        True,
        True,
    ]
    assert [(item.code, item.pointer.rpartition("/")[2]) for item in mixed.findings] == [
        ("not-judged", "matcher")
    ]
    assert whole.findings == []


def test_selector_with_an_unknown_route_is_found() -> None:
    (finding,) = report(
        good(), bundle(policy("p", {"routes": ["nowhere"]}, limit_keys=["header:x"]))
    ).findings

    assert (finding.code, finding.hurts, "nowhere" in finding.problem) == ("unmatched", True, True)


SEVERAL = [
    {"name": "exact", "match": {"path": "/a"}},
    {"name": "posts", "match": {"prefix": "/b/", "headers": [{"name": ":method"}]}},
    {"name": "regex", "match": {"safe_regex": {"regex": "/b/[0-9]+"}}},
    {"name": "below", "match": {"path_separated_prefix": "/b"}},
    {"name": "rest", "match": {"prefix": "/"}},
]


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ({"pathExact": "/a"}, ["exact"]),
        ({"pathExact": "/b/7"}, ["posts", "regex"]),
        ({"pathExact": "/b/x"}, ["posts", "below"]),
        ({"pathExact": "/c"}, ["rest"]),
        ({"pathPrefix": "/b"}, ["posts", "regex", "below"]),
        ({"pathPrefix": "/"}, ["exact", "posts", "regex", "below", "rest"]),
        ({"pathExact": "/a", "hosts": ["a.example"]}, ["own"]),
        ({"pathExact": "/a", "hosts": ["x.wild.example:8080"]}, ["wild"]),
        ({"pathExact": "/a", "hosts": ["elsewhere.example"]}, ["exact"]),
    ],
)
def test_unguarded_routes_are_those_that_envoy_takes(
    selector: dict[str, Any], names: list[str]
) -> None:
    document = good()
    all_ = {"prefix": "/"}
    hosts = [
        {"name": "all", "domains": ["*"], "routes": SEVERAL},
        {"name": "own", "domains": ["a.example"], "routes": [{"name": "own", "match": all_}]},
        {
            "name": "wild",
            "domains": ["*.wild.example"],
            "routes": [{"name": "wild", "match": all_}],
        },
        {
            "name": "on",
            "domains": ["on.example"],
            "routes": [{"match": all_, "typed_per_filter_config": find(document, _PER_ROUTE)}],
        },
    ]
    policies = bundle(
        policy("p", {"hosts": ["nobody.example"], **selector}, limit_keys=["header:x"])
    )

    made = report(edited(document, put(f"{_CONFIG}/virtual_hosts", hosts)), policies)

    assert [
        name for item in made.findings if item.code == "unguarded" for name in item.routes
    ] == names


# ---- Filters beside Loopguard's

RULES: Json = {"rules": {"action": "DENY", "policies": {"p": {}}}}
ALL_TOKENS = {"match": {"prefix": "/"}, "requires": {"provider_name": "idp"}}
LIMITS: Json = {"rate_limits": [{"actions": []}]}
BUCKET: Json = {"token_bucket": {"max_tokens": 1}}
REFUSERS: dict[str, tuple[str, Json]] = {
    "ext_authz": ("ext_authz.v3.ExtAuthz", {}),
    "jwt_authn": ("jwt_authn.v3.JwtAuthentication", {"rules": [ALL_TOKENS]}),
    "rbac": ("rbac.v3.RBAC", RULES),
    "basic_auth": ("basic_auth.v3.BasicAuth", {}),
    "local_ratelimit": ("local_ratelimit.v3.LocalRateLimit", BUCKET),
    "ratelimit": ("ratelimit.v3.RateLimit", LIMITS),
}


@pytest.mark.parametrize(("kind", "config"), REFUSERS.values(), ids=REFUSERS)
def test_filter_that_refuses_after_loopguard_is_found(kind: str, config: Json) -> None:
    behind = edited(good(), add_filter(kind, **config))

    assert codes(behind, CHAT) == ["late-refusal"]
    assert codes(edited(good(), add_filter(kind, place=0, **config)), CHAT) == []
    assert codes(edited(behind, put(f"{_PER_ROUTE}/it", _OFF)), CHAT) == []


def of_route(kind: str, own: Json) -> list[Edit]:
    """A filter that refuses only by the settings of the guarded route."""
    return [add_filter(kind), put(f"{_PER_ROUTE}/it", {"@type": "x", **own})]


UPGRADES = f"{MANAGER}/upgrade_configs"
CLAIMS = bundle(policy("claims", {"pathPrefix": "/chat"}, limit_keys=["jwt:sub"]))
PROVIDERS = {"idp": {"payload_in_metadata": "claims", "forward": True}}
MEMBERS = {
    "name": "loopguard",
    "cluster_type": {
        "name": "envoy.clusters.aggregate",
        "typed_config": {
            "@type": f"{_TYPE}/envoy.extensions.clusters.aggregate.v3.ClusterConfig",
            "clusters": ["member"],
        },
    },
}


def verified(*rules: Json) -> list[Edit]:
    return [
        add_filter(
            "jwt_authn.v3.JwtAuthentication", place=0, providers=PROVIDERS, rules=list(rules)
        )
    ]


def requires(**match: Json) -> Json:
    return {"match": match, "requires": {"provider_name": "idp"}}


def upgrading(*filters: Json) -> list[Edit]:
    return [put(UPGRADES, [{"upgrade_type": "websocket", "filters": list(filters)}])]


def withheld(pattern: Json) -> list[Edit]:
    return [
        put(f"{FILTER}/typed_config/forward_rules", {"disallowed_headers": {"patterns": [pattern]}})
    ]


FILTER_CASES: dict[str, tuple[Json, list[Edit], list[str]]] = {
    "access without rules": (CHAT, [add_filter("rbac.v3.RBAC")], []),
    "a limit without a bucket": (
        CHAT,
        [add_filter("local_ratelimit.v3.LocalRateLimit", stat_prefix="s")],
        [],
    ),
    "a limit without limits": (CHAT, [add_filter("ratelimit.v3.RateLimit", domain="d")], []),
    "tokens without rules": (
        CHAT,
        [add_filter("jwt_authn.v3.JwtAuthentication", providers={})],
        [],
    ),
    "CORS": (CHAT, [add_filter("cors.v3.Cors")], []),
    "a script for answers": (
        CHAT,
        [add_filter("lua.v3.Lua", inline_code="function envoy_on_response(handle) end")],
        [],
    ),
    "access by a route's rules": (
        CHAT,
        of_route("rbac.v3.RBAC", {"rbac": RULES}),
        ["late-refusal"],
    ),
    "a route's bucket": (
        CHAT,
        of_route("local_ratelimit.v3.LocalRateLimit", BUCKET),
        ["late-refusal"],
    ),
    "a route's limits": (CHAT, of_route("ratelimit.v3.RateLimit", LIMITS), ["late-refusal"]),
    "a script behind": (
        CHAT,
        [
            add_filter(
                "lua.v3.Lua",
                inline_code="function envoy_on_request(h) h:respond({[':status'] = '403'}, '') end",
            )
        ],
        ["(late-refusal)"],
    ),
    "a processor behind": (
        CHAT,
        [
            add_filter(
                "ext_proc.v3.ExternalProcessor",
                grpc_service={"envoy_grpc": {"cluster_name": "a"}},
                route_cache_action="RETAIN",
            )
        ],
        ["(late-refusal)"],
    ),
    "a program": (None, [add_filter("wasm.v3.Wasm", place=0)], ["(not-judged)"]),
    "a filter that comes later": (
        None,
        [
            insert(
                f"{MANAGER}/http_filters/0",
                {"name": "ecds", "config_discovery": {"type_urls": ["x"]}},
            )
        ],
        ["(not-judged)"],
    ),
    "upgrades without Loopguard": (
        CHAT,
        upgrading({"name": "envoy.filters.http.router"}),
        ["upgrades"],
    ),
    "upgrades with Loopguard off": (
        CHAT,
        upgrading({"name": _NAME, "disabled": True}),
        ["upgrades"],
    ),
    "upgrades with Loopguard": (CHAT, upgrading({"name": _NAME}), []),
    "upgrades with the usual filters": (CHAT, upgrading(), []),
    "an aggregate of clusters": (
        CHAT,
        [
            put("/static_resources/clusters/0/name", "member"),
            insert("/static_resources/clusters/1", MEMBERS),
        ],
        [],
    ),
    "an aggregate of a weak cluster": (
        CHAT,
        [
            put("/static_resources/clusters/0/name", "member"),
            drop("/static_resources/clusters/0/circuit_breakers"),
            insert("/static_resources/clusters/1", MEMBERS),
        ],
        ["circuit-breakers"],
    ),
    "tokens everywhere": (CLAIMS, verified(ALL_TOKENS), []),
    "tokens of a shorter prefix": (CLAIMS, verified(requires(prefix="/cha")), []),
    "tokens by an expression": (CLAIMS, verified(requires(safe_regex={"regex": "/c.*"})), []),
    "tokens elsewhere": (CLAIMS, verified(requires(prefix="/other")), ["jwt"]),
    "a rule before that verifies nothing": (
        CLAIMS,
        verified({"match": {"prefix": "/chat"}}, ALL_TOKENS),
        ["jwt"],
    ),
    "tokens by an unknown expression": (
        CLAIMS,
        verified(requires(safe_regex={"regex": "/\\pL+"})),
        ["(not-judged)"],
    ),
    "an unknown expression, then everywhere": (
        CLAIMS,
        verified(requires(safe_regex={"regex": "/\\pL+"}), ALL_TOKENS),
        [],
    ),
    "tokens elsewhere by an expression": (
        CLAIMS,
        verified({"match": {"safe_regex": {"regex": "/other/\\pL+"}}, "requires": {}}),
        ["jwt"],
    ),
    "headers of an unknown expression": (
        CHAT,
        withheld({"safe_regex": {"regex": "x-\\pL+-id"}}),
        ["(not-judged)"],
    ),
    "headers of an unknown form": (CHAT, withheld({"custom": {"name": "their"}}), ["(not-judged)"]),
    "the caller by an expression": (
        CHAT,
        withheld({"safe_regex": {"regex": "x-.*-id"}}),
        ["caller-headers"],
    ),
    "the caller by a part": (CHAT, withheld({"contains": "user"}), ["caller-headers"]),
    "other headers by an unknown expression": (
        CHAT,
        withheld({"safe_regex": {"regex": "y-\\pL+"}}),
        [],
    ),
    "other headers by a suffix": (CHAT, withheld({"suffix": "x"}), []),
}


@pytest.mark.parametrize(("policies", "edits", "expected"), FILTER_CASES.values(), ids=FILTER_CASES)
def test_other_filters_are_checked(policies: Json, edits: list[Edit], expected: list[str]) -> None:
    assert codes(edited(good(policies or CHAT), *edits), policies) == expected


def test_advice_for_envoy_gateway_names_its_setting() -> None:
    name = "envoy.filters.http.ext_proc/envoyextensionpolicy/default/loopguard/extproc/0"
    edits = [
        drop(f"{_PER_ROUTE}/{_NAME}"),
        add_filter("rbac.v3.RBAC", **RULES),
        put(f"{FILTER}/name", name),
    ]
    document = edited(
        good(), *edits, put(f"{MANAGER}/http_filters/1/name", "envoy.filters.http.rbac")
    )
    find(document, _PER_ROUTE)[name] = OVERRIDES

    ((*_, right, _),) = [
        item for item in report(document, CHAT).findings if item.code == "late-refusal"
    ]

    assert right == (
        "spec.filterOrder of the EnvoyProxy: [{name: envoy.filters.http.ext_proc, after: "
        "envoy.filters.http.rbac}]"
    )


# ---- A matcher around the filter

QUERY = {
    "@type": f"{_TYPE}/envoy.type.matcher.v3.HttpRequestQueryParamMatchInput",
    "query_param": "skip",
}
STATE = {
    "@type": f"{_TYPE}/envoy.extensions.matching.common_inputs.network.v3.DynamicMetadataInput",
    "filter": "x",
}


@pytest.mark.parametrize(
    ("reads", "skips", "expected"),
    [
        (header("x-skip"), True, ["skipped"]),
        (QUERY, True, ["skipped"]),
        (header(":path"), True, ["(not-judged)"]),
        (STATE, True, ["(not-judged)"]),
        (header("x-skip"), False, []),
    ],
)
def test_matcher_that_clients_control_is_found(
    reads: Json, skips: bool, expected: list[str]
) -> None:
    assert codes(wrapped(good(), reads, skips=skips)) == expected


@pytest.mark.parametrize(
    ("reads", "expected"), [(STATE, ["(not-judged)"]), (header("x-on"), ["skipped"])]
)
def test_composite_filter_is_judged_by_its_matcher(reads: Json, expected: list[str]) -> None:
    """A filter of kgateway, which a route can turn off."""
    place = f"{FILTER}/typed_config"
    document = wrapped(good(), reads, skips=False)
    kind = f"{_TYPE}/envoy.extensions.filters.http.composite.v3"
    run = {
        "@type": f"{kind}.ExecuteFilterAction",
        "typed_config": find(document, f"{place}/extension_config"),
    }
    composite = {"name": "composite", "typed_config": {"@type": f"{kind}.Composite"}}
    edits = (
        put(f"{place}/xds_matcher/matcher_list/matchers/0/on_match/action/typed_config", run),
        put(f"{place}/extension_config", composite),
    )

    assert codes(edited(document, *edits)) == expected


def test_matcher_of_the_chart_is_understood() -> None:
    place = f"{FILTER}/typed_config/xds_matcher"
    matcher = yaml.safe_load((ROOT / "helm" / "loopguard" / "envoy" / "apis.yaml").read_text())
    document = edited(wrapped(good(), header(":path")), put(place, matcher))
    by_api = bundle(
        policy("models", {"apis": "any", "pathPrefix": "/chat"}, limit_keys=["header:x"])
    )
    lacking = drop(f"{place}/matcher_list/matchers/0/predicate/not_matcher/or_matcher/predicate/0")
    skipping = put(
        f"{place}/on_no_match", find(document, f"{place}/matcher_list/matchers/0/on_match")
    )
    values = {"map": {"/x": matcher["matcher_list"]["matchers"][0]["on_match"]}}
    tree = {"input": {"name": "path", "typed_config": header(":path")}, "exact_match_map": values}

    assert codes(document) == codes(document, by_api) == []
    assert codes(document, CHAT) == ["skipped"]
    for edit in (lacking, skipping, put(place, {"matcher_tree": tree})):
        assert codes(edited(document, edit)) == ["(not-judged)"]


def test_matcher_of_a_route_is_found() -> None:
    document = wrapped(good(), header("x-skip"))
    matcher = find(document, f"{FILTER}/typed_config").pop("xds_matcher")
    kind = f"{_TYPE}/envoy.extensions.common.matching.v3.ExtensionWithMatcherPerRoute"
    modes = {
        "request_body_mode": "BUFFERED",
        "request_trailer_mode": "SEND",
        "response_header_mode": "SEND",
    }
    own = [
        put(f"{FILTER}/typed_config/extension_config/typed_config/processing_mode", modes),
        put(f"{_PER_ROUTE}/{_NAME}", {"@type": kind, "xds_matcher": matcher}),
    ]

    assert "skipped" in codes(edited(document, *own))
    assert (
        codes(
            edited(
                document,
                put(f"{FILTER}/typed_config/xds_matcher", {"matcher_list": {"matchers": []}}),
            ),
            CHAT,
        )
        == []
    )


# ---- Aliases


@pytest.mark.parametrize("policies", [CHAT, None])
@pytest.mark.parametrize(
    ("rewrite", "code"),
    [
        ({"prefix_rewrite": "/"}, "alias"),
        ({"prefix_rewrite": "/chat"}, "alias"),
        ({"prefix_rewrite": "/chat/completions"}, "alias"),
        ({"prefix_rewrite": "/ch"}, "alias"),
        (regex("^/alias/(.*)$", "/chat/\\1"), "alias"),
        (regex("/alias", "/chat"), "alias"),
        (by_template("/chat/{x}"), "alias"),
        ({"path_rewrite": "/chat/%REQ(x-model)%"}, "alias"),
        (regex("^/alias(/.*)$", "\\1"), "(not-judged)"),
        (regex("(.*)", "/images/\\1"), "(not-judged)"),
        (by_template("/{x}"), "(not-judged)"),
        ({"path_rewrite": "%REQ(x-path)%"}, "(not-judged)"),
        ({"prefix_rewrite": "/chat/", "cluster_header": "x-cluster"}, "(not-judged)"),
        (regex("^/alias/(.*)$", "/images/\\1"), ""),
        (by_template("/images/{x}"), ""),
        ({"prefix_rewrite": "/images/"}, ""),
        ({"prefix_rewrite": "/chat/", "cluster": "else"}, ""),
    ],
)
def test_rewrite_to_a_guarded_path_is_found(rewrite: Json, code: str, policies: Json) -> None:
    document = rewriting(
        {"prefix": "/alias" if rewrite.get("prefix_rewrite") == "/ch" else "/alias/"}, rewrite
    )
    if "cluster_header" in rewrite:
        document = edited(document, drop(f"{ROUTES}/0/route/cluster"))

    assert codes(document, policies) == [code] * bool(code)


def test_rewrite_of_one_other_path_is_no_alias() -> None:
    assert codes(rewriting({"path": "/health"}, {"prefix_rewrite": "/"})) == []


def make_listener(routes: Json) -> Json:
    made = find(good(), "/static_resources/listeners/0")
    manager = made["filter_chains"][0]["filters"][0]["typed_config"]
    del manager["http_filters"][0]
    manager["route_config"]["virtual_hosts"][0]["routes"] = routes
    return made | {"name": "second"}


FIRST, REST = (
    {key: value for key, value in route.items() if key != "typed_per_filter_config"}
    for route in find(good(), ROUTES)
)
RAW = {
    "@type": f"{_TYPE}/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy",
    "stat_prefix": "t",
    "cluster": "upstream",
}
LISTENERS: dict[str, tuple[Json, list[str]]] = {
    "the same routes": (make_listener([FIRST, REST]), ["second-listener"]),
    "wider routes": (make_listener([REST]), ["second-listener"]),
    "routes of an unknown form": (
        make_listener([{**REST, "match": {"safe_regex": {"regex": "/\\pL+.*"}}}]),
        ["(not-judged)"],
    ),
    "another path": (
        make_listener([{"match": {"prefix": "/health"}, "direct_response": {"status": 200}}]),
        [],
    ),
    "connections": (
        {"name": "raw", "filter_chains": [{"filters": [{"name": "tcp", "typed_config": RAW}]}]},
        ["second-listener"],
    ),
    "connections that lead elsewhere": (
        {
            "name": "raw",
            "filter_chains": [
                {"filters": [{"name": "tcp", "typed_config": RAW | {"cluster": "else"}}]}
            ],
        },
        [],
    ),
    "filters that come later": (
        {"name": "raw", "filter_chains": [{"filters": [{"name": "x", "config_discovery": {}}]}]},
        ["(not-judged)"],
    ),
}


@pytest.mark.parametrize(("listener", "expected"), LISTENERS.values(), ids=LISTENERS)
def test_second_listener_to_the_upstream_is_found(listener: Json, expected: list[str]) -> None:
    assert (
        codes(edited(good(), insert("/static_resources/listeners/1", listener)), CHAT) == expected
    )


# ---- Notes in bodies that Envoy does not take back


@pytest.mark.parametrize(
    ("mode", "policies", "told"),
    [
        ("BUFFERED_PARTIAL", STEERING, ["notes"]),
        ("BUFFERED_PARTIAL", None, ["(notes)"]),
        ("BUFFERED_PARTIAL", CHAT, []),
        ("FULL_DUPLEX_STREAMED", STEERING, []),
        ("BUFFERED", STEERING, []),
    ],
)
def test_notes_need_whole_bodies(mode: str, policies: Json, told: list[str]) -> None:
    document = edited(
        good(STEERING),
        put(f"{_PER_ROUTE}/{_NAME}/overrides/processing_mode/request_body_mode", mode),
        put(f"{FILTER}/typed_config/allow_content_length_header", value=True),
    )

    assert [code for code in codes(document, policies) if "notes" in code] == told


@pytest.mark.parametrize(
    "flags",
    [["--body-mode", "tolerant"], ["--tolerant-routes", "/chat"], ["--body-mode", "duplex"]],
)
def test_envoy_config_warns_where_notes_are_lost(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "p.json", STEERING)

    run = Run(capsys, "envoy-config", "--policy", file, "--upstream", "127.0.0.1:8080", *flags)

    assert (run.code, "notes of agents become warnings" in run.err) == (0, "duplex" not in flags)


def test_summary_counts_what_could_not_be_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(
        capsys,
        "check-envoy",
        written(tmp_path / "envoy.json", before({"safe_regex": {"regex": "/c\\pL+.*"}})),
    )

    assert run.code == 0
    assert run.out.endswith(
        "1 of 3 routes guarded; findings: 0 in what could be judged; not judged: 1; notes: 0\n"
    )
