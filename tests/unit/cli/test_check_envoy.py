"""`loopguard check-envoy` finds every harmful setting; its probe interprets responses."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.cli.probe import ProbeAnswer, ProbeRequest, Result, is_guarded, judge
from tests.support import ROOT
from tests.support.check_envoy import (
    CHAT,
    MANAGER,
    Edit,
    Json,
    UnreadConfigurationError,
    add_filter,
    codes,
    drop,
    edited,
    find,
    found,
    put,
    report,
    without_an_end,
)
from tests.support.command import Run, find_missing, written
from tests.support.documents import bundle, policy
from tests.support.envoy_config import bootstrap, theirs
from tests.support.harness import envoy_version
from tests.support.routes import good

COSTS = bundle(
    {
        "id": "agents",
        "spec": {
            "selector": {"pathPrefix": "/v1/"},
            "limit_keys": ["header:x-user-id"],
            "session_limits": {
                "max_cost_per_session": 1,
                "unknown_model": {"input": 1, "output": 1},
            },
        },
    }
)
NAME = "envoy.filters.http.ext_proc"
LISTENER = "/static_resources/listeners/0"
LIMIT = f"{LISTENER}/per_connection_buffer_limit_bytes"
FILTER = f"{MANAGER}/http_filters/0/typed_config"
METADATA = f"{FILTER}/grpc_service/initial_metadata"
HOST = f"{MANAGER}/route_config/virtual_hosts/0"
GUARDED = f"{HOST}/routes/0"
CLUSTER = "/static_resources/clusters/0"
PER_ROUTE = f"{GUARDED}/typed_per_filter_config/{NAME}/overrides"
MODE = f"{PER_ROUTE}/processing_mode"
FILTER_CONFIG = "type.googleapis.com/envoy.config.route.v3.FilterConfig"
OFF = {"@type": FILTER_CONFIG, "disabled": True}


@pytest.mark.parametrize(
    ("name", "notes"),
    [
        ("bootstrap", []),
        ("bootstrap-partial", ["notes"]),
        ("bootstrap-observability", ["observing"]),
    ],
)
def test_committed_bootstraps_have_no_findings(name: str, notes: list[str]) -> None:
    made = report(yaml.safe_load((ROOT / "envoy" / f"{name}.yaml").read_text()))

    assert (made.good, [item.code for item in made.findings]) == (True, notes)
    assert [bool(route.modes) for route in made.routes] == [True, True, True, False]


# ---- One setting wrong, one finding


def putting(code: str, pointer: str, value: Json) -> tuple[list[Edit], str, str]:
    return [put(pointer, value)], code, pointer


def dropping(code: str, pointer: str) -> tuple[list[Edit], str, str]:
    return [drop(pointer)], code, pointer


def older(document: Json) -> None:
    find(document, FILTER)["processing_mode"] = find(document, PER_ROUTE).pop("processing_mode")
    find(document, f"{MANAGER}/http_filters/0")["disabled"] = True
    on = find(document, f"{GUARDED}/typed_per_filter_config")
    on[NAME] = {"@type": FILTER_CONFIG, "config": on[NAME]}


def wrap_in_a_struct(document: Json) -> None:
    config = find(document, FILTER)
    wrapped = {
        "@type": "type.googleapis.com/xds.type.v3.TypedStruct",
        "type_url": config.pop("@type"),
        "value": config,
    }
    find(document, f"{MANAGER}/http_filters/0")["typed_config"] = wrapped


OBSERVING = [
    put(f"{FILTER}/observability_mode", value=True),
    put(f"{MODE}/request_body_mode", "STREAMED"),
]
PARTS = [
    put(f"{MODE}/request_body_mode", "BUFFERED_PARTIAL"),
    put(f"{FILTER}/allow_content_length_header", value=True),
    put(METADATA, [{"key": "x-loopguard-buffer-limit", "value": "10485760"}]),
]
RETRIES = put(f"{HOST}/retry_policy", {"retry_on": "connect-failure"})
KEPT = f"{GUARDED}/per_request_buffer_limit_bytes"
WINDOW = f"{MANAGER}/http2_protocol_options/initial_stream_window_size"
WRONG: dict[str, tuple[list[Edit], str, str]] = {  # the edits, the code, the place
    "the limit of an Envoy that says none": dropping("buffer-limit", LIMIT),
    "a small limit": putting("buffer-limit", LIMIT, 65_535),
    "a small window": putting("http2-window", WINDOW, 65_535),
    "uploads that stall": ([without_an_end], "request-timeout", f"{MANAGER}/stream_idle_timeout"),
    "a hold that 408 ends": putting("request-timeout", f"{MANAGER}/request_timeout", "20s"),
    "a hold that silence ends": putting("idle-timeout", f"{MANAGER}/stream_idle_timeout", "20s"),
    "a route's own idle timeout": putting("idle-timeout", f"{GUARDED}/route/idle_timeout", "20s"),
    "networks that are believed": putting(
        "envoy-headers", f"{MANAGER}/internal_address_config", {}
    ),
    "forged marks": dropping("forged-marks", f"{MANAGER}/early_header_mutation_extensions"),
    "dots in paths": putting("path-spelling", f"{MANAGER}/normalize_path", value=False),
    "slashes in paths": dropping("path-spelling", f"{MANAGER}/merge_slashes"),
    "clients that hear nothing": dropping("client-header", f"{HOST}/response_headers_to_add"),
    "another header": putting(
        "client-header",
        f"{HOST}/response_headers_to_add",
        [{"header": {"key": "a", "value": "%DYNAMIC_METADATA(other:warning)%"}}],
    ),
    "attributes of a route": putting(
        "overrides", f"{PER_ROUTE}/request_attributes", ["source.address"]
    ),
    "behind the router": (
        [lambda document: find(document, f"{MANAGER}/http_filters").reverse()],
        "filter-order",
        f"{MANAGER}/http_filters/1",
    ),
    "no headers": putting("processing-mode", f"{MODE}/request_header_mode", "SKIP"),
    "no bodies": dropping("processing-mode", f"{MODE}/request_body_mode"),
    "a route's own mode, which says nothing of bodies": (
        [put(MODE, {"request_header_mode": "SEND"})],
        "processing-mode",
        f"{MODE}/request_body_mode",
    ),
    "bodies in pieces": putting("processing-mode", f"{MODE}/request_body_mode", "STREAMED"),
    "bodies in both directions": (
        [put(f"{MODE}/request_body_mode", "FULL_DUPLEX_STREAMED")],
        "content-length",
        f"{FILTER}/allow_content_length_header",
    ),
    "bodies in gRPC's mode": putting("processing-mode", f"{MODE}/request_body_mode", "GRPC"),
    "a buffer limit that is none": (
        [*PARTS, put(f"{METADATA}/0/value", "10485761")],
        "told-limit",
        METADATA,
    ),
    "upgrades that meet other filters": (
        [
            put(
                f"{MANAGER}/upgrade_configs",
                [{"upgrade_type": "websocket", "filters": [{"name": "envoy.filters.http.router"}]}],
            )
        ],
        "upgrades",
        f"{MANAGER}/upgrade_configs/0/filters",
    ),
    "no trailers": dropping("processing-mode", f"{MODE}/request_trailer_mode"),
    "answers": putting("processing-mode", f"{MODE}/response_body_mode", "BUFFERED"),
    "looking on, and waiting": (
        [*OBSERVING, put(f"{MODE}/request_body_mode", "BUFFERED")],
        "processing-mode",
        f"{MODE}/request_body_mode",
    ),
    "looking on, and failing": (
        [*OBSERVING, put(f"{FILTER}/failure_mode_allow", value=False)],
        "failure-mode",
        f"{FILTER}/failure_mode_allow",
    ),
    "chunks": ([PARTS[0]], "content-length", f"{FILTER}/allow_content_length_header"),
    "a part kept for retries": ([*PARTS, RETRIES], "kept-bodies", KEPT),
    "a part kept for a mirror": (
        [*PARTS, put(f"{GUARDED}/route/request_mirror_policies", [{"cluster": "other"}])],
        "kept-bodies",
        KEPT,
    ),
    "a small part kept": ([*PARTS, RETRIES, put(KEPT, 1_000)], "kept-bodies", KEPT),
    "a part kept of one route": (
        [*PARTS, RETRIES, put(f"{HOST}/per_request_buffer_limit_bytes", 0), put(KEPT, 1_000)],
        "kept-bodies",
        KEPT,
    ),
    "a failure mode that was not set": dropping("failure-mode", f"{FILTER}/failure_mode_allow"),
    "no time for throttles": dropping("message-timeout", f"{FILTER}/max_message_timeout"),
    "little time for throttles": putting("message-timeout", f"{FILTER}/max_message_timeout", "30s"),
    "no refusals": putting("answers", f"{FILTER}/disable_immediate_response", value=True),
    "no headers of ours": (
        [put(f"{FILTER}/mutation_rules", {"disallow_all": {"value": True}})],
        "answers",
        f"{FILTER}/mutation_rules/disallow_all",
    ),
    "metadata that is dropped": (
        [drop(f"{FILTER}/metadata_options/receiving_namespaces")],
        "metadata",
        f"{FILTER}/metadata_options/receiving_namespaces/untyped",
    ),
    "no such cluster": (
        [put(f"{CLUSTER}/name", "other")],
        "cluster",
        f"{FILTER}/grpc_service/envoy_grpc/cluster_name",
    ),
    "HTTP/1.1 to Loopguard": dropping("http2", f"{CLUSTER}/typed_extension_protocol_options"),
    "1,024 requests at a time": (
        [drop(f"{CLUSTER}/circuit_breakers")],
        "circuit-breakers",
        f"{CLUSTER}/circuit_breakers/thresholds",
    ),
    "100 requests at a time": (
        [
            put(
                f"{CLUSTER}/circuit_breakers",
                {"thresholds": [{"priority": "HIGH"}, {"max_requests": 100}]},
            )
        ],
        "circuit-breakers",
        f"{CLUSTER}/circuit_breakers/thresholds/1/max_requests",
    ),
    "a route that shows nothing": (
        [
            put(
                f"{HOST}/routes/1/typed_per_filter_config",
                {
                    NAME: {
                        "@type": "x/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
                        "overrides": {},
                    }
                },
            )
        ],
        "processing-mode",
        f"{PER_ROUTE.replace('routes/0', 'routes/1')}/processing_mode",
    ),
    "no route is on": (
        [drop(f"{GUARDED}/typed_per_filter_config")],
        "nothing-guarded",
        f"{MANAGER}/http_filters/0",
    ),
    "no filter": dropping("nothing-guarded", f"{MANAGER}/http_filters"),
    "a typed struct": (
        [put(f"{FILTER}/disable_immediate_response", value=True), wrap_in_a_struct],
        "answers",
        f"{FILTER}/value/disable_immediate_response",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("edits", "code", "pointer"), WRONG.values(), ids=WRONG)
def test_wrong_setting_is_one_finding_at_its_place(
    edits: list[Edit], code: str, pointer: str
) -> None:
    assert [item for item in found(edited(good(), *edits)) if item[2]] == [(code, pointer, True)]


# ---- What is a note, what policies need, and filters that choose a route late

NOTES: dict[str, tuple[list[Edit], list[str]]] = {
    "large bodies pass uncounted": (
        [*PARTS, put(LIMIT, 65_535), put(f"{METADATA}/0/value", "65535")],
        ["buffer-limit", "notes"],
    ),
    "a limit that is not passed on": ([*PARTS, put(METADATA, [])], ["notes", "told-limit"]),
    "Envoy's own window": ([drop(f"{MANAGER}/http2_protocol_options")], ["http2-window"]),
    "an address that clients can choose": (
        [drop(f"{MANAGER}/use_remote_address")],
        ["client-address"],
    ),
    "no networks, in an Envoy of unknown age": (
        [drop(f"{MANAGER}/internal_address_config")],
        ["envoy-headers"],
    ),
    "networks that are set on purpose": (
        [
            put(
                f"{MANAGER}/internal_address_config",
                {"cidr_ranges": [{"address_prefix": "10.0.0.0", "prefix_len": 8}]},
            )
        ],
        ["envoy-headers"],
    ),
    "clients that wait": ([put(f"{MANAGER}/proxy_100_continue", value=True)], ["expect"]),
    "%2F": ([drop(f"{MANAGER}/path_with_escaped_slashes_action")], ["escaped-slashes"]),
    "retries": ([put(f"{GUARDED}/route/retry_policy", {"retry_on": "5xx"})], ["retries"]),
    "retries of bodies that are kept whole": ([RETRIES], ["retries"]),
    "retries where the host keeps no parts": (
        [*PARTS, RETRIES, put(f"{HOST}/per_request_buffer_limit_bytes", 0)],
        ["notes", "retries"],
    ),
    "retries where the route keeps no parts": (
        [*PARTS, RETRIES, put(KEPT, 0)],
        ["notes", "retries"],
    ),
    "a 413 that is not told": ([put(f"{MODE}/response_header_mode", "SKIP")], ["processing-mode"]),
    "deny, said": ([put(f"{FILTER}/failure_mode_allow", value=False)], ["failure-mode"]),
    "patience": ([put(f"{FILTER}/message_timeout", "35s")], ["message-timeout"]),
    "no addresses": ([put(f"{FILTER}/request_attributes", ["xds.route_name"])], ["attributes"]),
    "no health checks": ([drop(f"{CLUSTER}/health_checks")], ["health-checks"]),
    "looking on": ([*OBSERVING, put(f"{FILTER}/failure_mode_allow", value=True)], ["observing"]),
    "an upload that its request's timeout ends": (
        [without_an_end, put(f"{MANAGER}/request_timeout", "60s")],
        [],
    ),
    "an upload that silence ends": (
        [without_an_end, put(f"{MANAGER}/stream_idle_timeout", "300s")],
        [],
    ),
    "an upload that the route's silence ends": (
        [without_an_end, put(f"{GUARDED}/route/idle_timeout", "300s")],
        [],
    ),
    "an upload that its route ends": (
        [
            without_an_end,
            put(f"{GUARDED}/route/max_stream_duration", {"max_stream_duration": "900s"}),
        ],
        [],
    ),
    "an upload that its connection ends": (
        [
            without_an_end,
            put(f"{MANAGER}/common_http_protocol_options", {"max_stream_duration": "900s"}),
        ],
        [],
    ),
    "a route that raises the limit": (
        [put(LIMIT, 65_535), put(f"{GUARDED}/request_body_buffer_limit", {"value": 10 * 2**20})],
        [],
    ),
}


@pytest.mark.parametrize(("edits", "notes"), NOTES.values(), ids=NOTES)
def test_acceptable_setting_is_at_most_a_note(edits: list[Edit], notes: list[str]) -> None:
    assert sorted(codes(edited(good(), *edits))) == [f"({code})" for code in notes]


JWT, PROCESSOR, LUA = (
    "jwt_authn.v3.JwtAuthentication",
    "ext_proc.v3.ExternalProcessor",
    "lua.v3.Lua",
)
SCRIPT = 'function envoy_on_request(h) h:headers():replace("x-model", "large") end'
CLAIMS = {"idp": {"issuer": "i", "clear_route_cache": True}}
LATE: dict[str, tuple[list[Edit], bool]] = {  # edits, and whether that hurts
    "nothing chooses": ([older], False),
    "claims": ([older, add_filter(JWT, place=0, providers=CLAIMS)], True),
    "claims, whatever they are": ([add_filter(JWT, place=0, providers=CLAIMS)], False),
    "claims that come too late": ([add_filter(JWT, providers=CLAIMS)], True),
    "claims that choose no route": (
        [older, add_filter(JWT, place=0, providers={"idp": {"issuer": "i"}})],
        False,
    ),
    "claims where every route is guarded": (
        [
            older,
            drop(f"{HOST}/routes/1"),
            put(f"{GUARDED}/match", {"prefix": "/"}),
            add_filter(JWT, place=0, providers=CLAIMS),
        ],
        False,
    ),
    "authorisation": (
        [older, add_filter("ext_authz.v3.ExtAuthz", place=0, clear_route_cache=True)],
        True,
    ),
    "authorisation alone": ([older, add_filter("ext_authz.v3.ExtAuthz", place=0)], False),
    "a script": (
        [older, add_filter(LUA, place=0, default_source_code={"inline_string": SCRIPT})],
        True,
    ),
    "a script that may not": (
        [older, add_filter(LUA, place=0, inline_code=SCRIPT, clear_route_cache=False)],
        False,
    ),
    "a script that does so itself": (
        [older, add_filter(LUA, inline_code="h:clearRouteCache()", clear_route_cache=False)],
        True,
    ),
    "a script for answers": (
        [older, add_filter(LUA, place=0, inline_code=SCRIPT.replace("request", "response"))],
        False,
    ),
    "the choice of a model": ([older, add_filter(PROCESSOR, place=0)], True),
    "the choice of a model, before": ([add_filter(PROCESSOR, place=0)], False),
    "a Loopguard beside it": (
        [
            older,
            add_filter(PROCESSOR, place=0, processing_mode={"request_header_mode": "SKIP"}),
            put(f"{MANAGER}/http_filters/0/name", "loopguard-canary"),
        ],
        False,
    ),
    "a processor that chooses nothing": (
        [older, add_filter(PROCESSOR, place=0, route_cache_action="RETAIN")],
        False,
    ),
    "a processor that must not": (
        [older, add_filter(PROCESSOR, place=0, disable_clear_route_cache=True)],
        False,
    ),
    "gRPC of JSON": (
        [older, add_filter("grpc_json_transcoder.v3.GrpcJsonTranscoder", place=0)],
        True,
    ),
    "a filter that is off": (
        [
            older,
            add_filter(JWT, place=0, providers=CLAIMS),
            put(f"{MANAGER}/http_filters/0/disabled", value=True),
        ],
        False,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("edits", "hurts"), LATE.values(), ids=LATE)
def test_filter_that_may_change_the_route_is_found(edits: list[Edit], hurts: bool) -> None:
    document = edited(good(), *edits)

    late = [item for item in report(document).findings if item.hurts]

    assert [item.code for item in late] == ["late-route"] * hurts
    assert [(find(document, item.pointer)["name"], item.routes) for item in late] == [
        ("it", ["guarded:/chat*"])
    ] * hurts
    assert all(
        "it may choose another route: a request from 'unguarded'" in item.problem for item in late
    )


def test_late_route_of_an_unrouted_request_is_found() -> None:
    document = edited(
        good(), older, add_filter(JWT, place=0, providers=CLAIMS), drop(f"{HOST}/routes/1")
    )

    (late,) = (item for item in report(document).findings if item.hurts)

    assert (late.code, late.pointer) == ("late-route", f"{MANAGER}/http_filters/0")
    assert "a request that had no route" in late.problem


LOG = f"{MANAGER}/access_log"
OTHER_LOG = put(f"{LOG}/0/typed_config/common_config/grpc_service/envoy_grpc/cluster_name", "other")
COST_SETTINGS: dict[str, tuple[list[Edit], list[tuple[str, str, bool]]]] = {
    "as printed": ([], []),
    "a log to another cluster": ([OTHER_LOG], [("outcomes", LOG, True)]),
    "no log": ([drop(LOG)], [("outcomes", LOG, True)]),
    "off for events": (
        [put(f"{GUARDED}/typed_per_filter_config/envoy.filters.http.sse_to_metadata", OFF)],
        [],
    ),
    "off for JSON": (
        [put(f"{GUARDED}/typed_per_filter_config/envoy.filters.http.json_to_metadata", OFF)],
        [],
    ),
    "no filter for events": ([drop(f"{MANAGER}/http_filters/1")], []),
}


@pytest.mark.parametrize("name", COST_SETTINGS)
def test_costs_need_the_log_and_should_have_usage(name: str) -> None:
    edits, hurting = COST_SETTINGS[name]
    document = edited(good(COSTS), *edits)

    assert [item for item in found(document, COSTS) if item[2]] == hurting
    assert ("(usage)" in codes(document, COSTS)) == (" for " in name)
    assert "outcomes" not in codes(document, CHAT)


def with_jwt(place: int, **provider: object) -> Edit:
    return add_filter(JWT, place=place, providers={"idp": provider})


def forwarding(**rules: object) -> Edit:
    return put(f"{FILTER}/forward_rules", rules)


def keyed(*keys: object, **selector: object) -> Json:
    return bundle(policy("chat", {"pathPrefix": "/chat", **selector}, limit_keys=list(keys)))


FIRST = {"first_of": ["jwt:sub", "credential"], "name": "caller"}
NO_TIME = drop(f"{FILTER}/max_message_timeout")


def add_another_loopguard(document: Json) -> None:
    config = find(document, FILTER) | {"processing_mode": find(document, MODE)}
    find(document, f"{MANAGER}/http_filters").insert(
        0, {"name": "loopguard-too", "typed_config": config}
    )


NEEDS: dict[str, tuple[Json, list[Edit], list[str]]] = {
    "claims that are not verified": (keyed("jwt:org"), [], ["jwt"]),
    "claims": (keyed("jwt:org"), [with_jwt(0, payload_in_metadata="claims")], []),
    "claims that come too late": (
        keyed("jwt:org"),
        [with_jwt(1, payload_in_metadata="claims")],
        ["jwt"],
    ),
    "claims that are not kept": (keyed("jwt:org"), [with_jwt(0)], ["jwt"]),
    "claims that stay in Envoy": (
        keyed("jwt:org"),
        [
            with_jwt(0, payload_in_metadata="claims"),
            drop(f"{MANAGER}/http_filters/1/typed_config/metadata_options"),
        ],
        ["metadata", "jwt"],
    ),
    "claims, or else a credential": (keyed(FIRST), [], []),
    "claims that come too late, or else a credential": (
        keyed(FIRST),
        [with_jwt(1, payload_in_metadata="claims")],
        ["jwt"],
    ),
    "a token that is taken away": (keyed("credential"), [with_jwt(0)], ["caller-headers"]),
    "a token that stays": (keyed("credential"), [with_jwt(0, forward=True)], []),
    "a token that is no caller": (keyed("header:x"), [with_jwt(0)], []),
    "headers that are not forwarded": (
        keyed("credential", "header:x"),
        [
            forwarding(
                allowed_headers={
                    "patterns": [
                        {"exact": "Authorization"},
                        {"prefix": "x-"},
                        {"safe_regex": {"regex": "c.*"}},
                    ]
                }
            )
        ],
        ["caller-headers"],
    ),
    "headers that are forwarded": (
        keyed("credential", "header:x"),
        [
            forwarding(
                allowed_headers={
                    "patterns": [
                        {"suffix": "-key"},
                        {"contains": "auth"},
                        {"safe_regex": {"regex": "x"}},
                    ]
                }
            )
        ],
        [],
    ),
    "headers that are withheld": (
        keyed("header:x"),
        [forwarding(disallowed_headers={"patterns": [{"exact": "x"}]})],
        ["caller-headers"],
    ),
    "other headers that are withheld": (
        keyed("header:x"),
        [
            forwarding(
                disallowed_headers={
                    "patterns": [{"exact": "cookie"}, {"safe_regex": {"regex": "("}}]
                }
            )
        ],
        [],
    ),
    "an address": (
        keyed("ip:address"),
        [drop(f"{MANAGER}/use_remote_address")],
        ["client-address"],
    ),
    "no address": (keyed("header:x"), [drop(f"{MANAGER}/use_remote_address")], []),
    "an address that is not told": (
        keyed("ip:address"),
        [put(f"{FILTER}/request_attributes", [])],
        ["attributes"],
    ),
    "no throttle": (keyed("header:x"), [NO_TIME, put(f"{MANAGER}/request_timeout", "5s")], []),
    "no warning": (keyed("header:x"), [drop(f"{HOST}/response_headers_to_add")], []),
    "a throttle in shadow": (
        bundle(
            policy(
                "chat",
                {"pathPrefix": "/chat"},
                action="throttle",
                mode="shadow",
                limit_keys=["header:x"],
            )
        ),
        [NO_TIME],
        [],
    ),
    "a short throttle": (
        bundle(
            policy(
                "chat",
                {"pathPrefix": "/chat"},
                action="throttle",
                max_delay_ms=500,
                limit_keys=["header:x"],
            )
        ),
        [put(f"{FILTER}/max_message_timeout", "2.5s")],
        [],
    ),
    "another path": (keyed("header:x", pathPrefix="/other"), [], ["unguarded"]),
    "a path that a guarded route takes": (keyed("header:x", pathPrefix="/chat/deep"), [], []),
    "a route by its name": (keyed("header:x", routes=["unguarded"]), [], ["unguarded"]),
    "a route that is not told": (
        keyed("header:x", routes=["guarded:/chat*"]),
        [put(f"{FILTER}/request_attributes", [])],
        ["attributes"],
    ),
    "two filters on one route": (None, [add_another_loopguard], ["twice"]),
    "two filters, of which one observes": (
        None,
        [
            add_another_loopguard,
            put(f"{FILTER}/observability_mode", value=True),
            put(f"{FILTER}/processing_mode", {"request_body_mode": "STREAMED"}),
        ],
        [],
    ),
    "a route that lowers the limit": (
        None,
        [put(f"{GUARDED}/request_body_buffer_limit", 1_000), put(LIMIT, 65_535)],
        ["buffer-limit"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("policies", "edits", "expected"), NEEDS.values(), ids=NEEDS)
def test_policies_decide_which_settings_are_needed(
    policies: Json, edits: list[Edit], expected: list[str]
) -> None:
    assert [code for code in codes(edited(good(), *edits), policies) if code[0] != "("] == expected


# ---- Forms of configurations


def test_single_object_stands_for_a_list_of_one() -> None:
    document = edited(good(), put(LIMIT, 32_768))
    (document["static_resources"]["listeners"],) = document["static_resources"]["listeners"]

    assert found(document) == [
        ("buffer-limit", "/static_resources/listeners/per_connection_buffer_limit_bytes", True)
    ]


def test_http3_bodies_are_limited_by_their_window() -> None:
    document = edited(good(), put(LIMIT, 1000), drop(f"{MANAGER}/http2_protocol_options"))
    document = edited(document, put(f"{LISTENER}/udp_listener_config", {"quic_options": {}}))
    window = {"quic_protocol_options": {"initial_stream_window_size": 20_000}}
    small = edited(document, put(f"{LISTENER}/udp_listener_config/quic_options", window))
    (whole,) = report(small).findings
    told = [item for item in report(edited(small, PARTS[0])).findings if item.code == "told-limit"]

    assert found(document) == []
    assert (whole.code, whole.pointer.rpartition("/")[2]) == (
        "http2-window",
        "initial_stream_window_size",
    )
    assert "an HTTP/3 body above 20,000 bytes gets a 413" in whole.problem
    assert ["above 20,000 bytes" in item.problem for item in told] == [True]


def test_envoy_without_loopguard_is_one_finding() -> None:
    made = report(theirs(good()))

    ((code, pointer, *_, right, _),) = made.findings
    assert (code, pointer) == ("nothing-guarded", f"{MANAGER}/http_filters")
    assert "envoy-config --snippet" in right
    assert [route.modes for route in made.routes] == [[]] * 3


def test_filter_flag_names_a_filter_with_another_name() -> None:
    document = edited(
        good(),
        put(f"{FILTER}/grpc_service/envoy_grpc/cluster_name", "processor"),
        put(f"{CLUSTER}/name", "processor"),
        put(f"{FILTER}/metadata_options/receiving_namespaces", {"untyped": ["x"]}),
    )

    assert f"the external processors here are {NAME}" in report(document).findings[0].problem
    assert found(document, None, "--filter", NAME)[0][0] == "metadata"


OFF_PER_ROUTE = {
    "config": {
        "@type": "x/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
        "disabled": True,
    }
}


@pytest.mark.parametrize(
    ("levels", "guarded"),
    [
        ([None, None, None], False),
        ([{"config": {}}, None, None], True),
        ([None, {"config": {}}, None], True),
        ([None, None, {"config": {}}], True),
        ([{"disabled": True}, {"config": {}}, None], False),
        ([OFF_PER_ROUTE, None, None], False),
        ([{"config": {}}, {"disabled": True}, None], True),
    ],
)
def test_most_specific_setting_of_a_route_applies(levels: list[Json], guarded: bool) -> None:
    places = [
        f"{place}/typed_per_filter_config" for place in (GUARDED, HOST, f"{MANAGER}/route_config")
    ]
    edits = [
        put(place, {NAME: {"@type": FILTER_CONFIG, **said}})
        for place, said in zip(places, levels, strict=True)
        if said is not None
    ]

    assert bool(report(edited(good(), older, drop(places[0]), *edits)).routes[0].modes) == guarded


def write_camel_case(value: Json, *, is_map: bool = False) -> Json:
    """The same message, with the other names that JSON has for fields; keys of maps stay."""
    if isinstance(value, list):
        return [write_camel_case(item) for item in value]
    if not isinstance(value, dict):
        return value
    maps = {"typed_per_filter_config", "typed_extension_protocol_options"}
    return {
        key if is_map else re.sub("_(.)", lambda found: found[1].upper(), key): write_camel_case(
            inner, is_map=key in maps
        )
        for key, inner in value.items()
    }


def test_fields_in_camel_case_are_read() -> None:
    document = write_camel_case(edited(good(), put(LIMIT, "65535")))

    assert found(document) == [
        ("buffer-limit", "/staticResources/listeners/0/perConnectionBufferLimitBytes", True)
    ]


def resources(document: Json) -> Json:
    manager = find(document, MANAGER)
    routes = manager.pop("route_config")
    manager["rds"] = {"route_config_name": routes["name"]}
    listed = [
        ("listener.v3.Listener", document["static_resources"]["listeners"][0]),
        ("route.v3.RouteConfiguration", routes),
    ]
    listed += [
        ("cluster.v3.Cluster", cluster) for cluster in document["static_resources"]["clusters"]
    ]
    return {
        "resources": [
            {"@type": f"type.googleapis.com/envoy.config.{kind}", **item} for kind, item in listed
        ]
    }


def test_xds_resources_are_read() -> None:
    whole = resources(good())
    apart = {"resources": whole["resources"][:1]}

    assert found(whole) == []
    assert codes(apart) == ["nothing-guarded", "(routes-missing)"]
    assert "RDS as 'ingress'" in report(apart).findings[1].problem


def test_filter_from_ecds_is_read() -> None:
    document = good()
    entry = find(document, f"{MANAGER}/http_filters")[0]
    kind = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig"
    extension = {"@type": kind, "name": entry["name"], "typed_config": entry.pop("typed_config")}
    entry["config_discovery"] = {"type_urls": [extension["typed_config"]["@type"]]}
    whole = resources(document)

    assert codes(whole)[0] == "nothing-guarded"
    assert codes({"resources": [*whole["resources"], extension]}) == []


def walk(value: Json, pointer: str = "") -> Iterator[str]:
    for step, inner in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        below = f"{pointer}/{step}"
        if "/" not in str(step):
            yield below
            yield from walk(inner, below)


@pytest.mark.slow
def test_any_value_anywhere_gives_a_report_or_error() -> None:
    odd: list[Json] = [None, 0, -1.5, "x", True, [], {}, [1, None, "x"], {"a": {"b": []}}]
    reports = 0
    for number, pointer in enumerate(walk(good())):
        try:
            report(edited(good(), put(pointer, odd[number % len(odd)])), CHAT)
        except UnreadConfigurationError:
            continue
        reports += 1

    assert reports > 100


# ---- What the command prints


def test_output_has_routes_and_findings_with_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        line
        for line in bootstrap(CHAT).splitlines(keepends=True)
        if "max_message_timeout" not in line
    ]
    file = written(tmp_path / "envoy.yaml", "".join(lines).encode())
    kind = next(
        number
        for number, line in enumerate(lines)
        if "filters.http.ext_proc.v3.ExternalProcessor" in line
    )

    run = Run(capsys, "check-envoy", file)

    assert run.code == 1
    assert run.out.splitlines()[1].split() == [
        "guarded:/chat*",
        "path",
        "separated",
        "prefix",
        "/chat",
        "BUFFERED",
    ]
    assert (
        find_missing(
            run.out,
            f"message-timeout  {file}:{kind}: {FILTER}/max_message_timeout\n",
            "  right: max_message_timeout: 35s\n",
        )
        == []
    )
    assert run.out.endswith("1 of 2 routes guarded; findings: 1; notes: 0\n")


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ([], 1),
        (["--ignore", "message-timeout"], 1),
        (["--ignore", "message-timeout", "--uploads", "2000000"], 0),
    ],
)
def test_findings_can_be_ignored(
    flags: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "envoy.json", edited(good(), NO_TIME, put(LIMIT, 2_000_000)))

    assert Run(capsys, "check-envoy", file, *flags).code == code


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is neither YAML nor JSON: "),
        ("a: [", "is neither YAML nor JSON: "),
        ("a: &x {b: *x}", "an alias refers to itself"),
        ("a: 1\n---\nb: 2", "expected a single document"),
        ("", "this is not an Envoy configuration"),
        ("[]", "this is not an Envoy configuration"),
        ("kind: Deployment", "this is not an Envoy configuration"),
        ("admin: {}", ""),
    ],
)
def test_unreadable_file_is_a_one_line_error(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(capsys, "check-envoy", written(tmp_path / "envoy.yaml", text.encode()))

    assert (run.code, bool(run.out), run.err.count("\n")) == (
        (2, False, 1) if told else (1, True, 0)
    )
    assert told in run.err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "name a FILE, --admin URL or --probe URL"),
        (["/no/such/file"], "/no/such/file: No such file or directory"),
        (["--admin", "127.0.0.1:9901"], "--admin must be a URL, such as http://127.0.0.1:9901"),
        (["--admin", "http://127.0.0.1:1"], "no Envoy answered with its configuration"),
        (["x", "--uploads", "10MiB"], "--uploads: must be a number from 0, not '10MiB'"),
        (
            ["x", "--ignore", "retries", "--ignore", "retry"],
            (
                "--ignore retry is neither a finding nor a request; known: alias, answers, "
                "attributes, "
            ),
        ),
        (
            ["--probe", "example.com/a"],
            "--probe must be http(s)://HOST[:PORT][/PATH], not 'example.com/a'",
        ),
        (["--probe", "http://a b/"], "--probe must be"),
        (["--probe", "http://a/", "-H", "x"], "-H must be 'NAME: VALUE', not 'x'"),
        (
            ["--probe", "http://a/", "--loopguard", "http://127.0.0.1:1"],
            "set --loopguard to a running server",
        ),
    ],
)
def test_invalid_command_line_is_a_one_line_error(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(capsys, "check-envoy", *flags)

    assert (run.code, run.out) == (1 if "--loopguard" in flags else 2, "")
    assert told in run.complaint


def test_yaml_anchors_and_merges_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = yaml.safe_dump(edited(good(), drop(LIMIT)), sort_keys=False)
    file = written(
        tmp_path / "envoy.yaml",
        f"limits: &limits\n  per_connection_buffer_limit_bytes: 65535\n{text}".replace(
            "  - name: ", "  - <<: *limits\n    name: ", 1
        ).encode(),
    )

    (finding,) = json.loads(Run(capsys, "check-envoy", "--json", file).out)["findings"]

    assert (finding["code"], finding["pointer"], finding["line"]) == ("buffer-limit", LIMIT, 2)


@pytest.mark.skipif(
    envoy_version() < (1, 36), reason="older Envoys say of more networks that they are internal"
)
@pytest.mark.parametrize(("minor", "told"), [(35, ["envoy-headers"]), (36, [])])
def test_version_of_a_running_envoy_is_used(minor: int, told: list[str]) -> None:
    static = edited(good(), drop(f"{MANAGER}/internal_address_config"))["static_resources"]
    build = {"version": {"major_number": 1, "minor_number": minor}}
    kind = "type.googleapis.com/envoy.admin.v3"
    dumped = [
        {
            "@type": f"{kind}.BootstrapConfigDump",
            "bootstrap": {"node": {"user_agent_build_version": build}},
        },
        {
            "@type": f"{kind}.ListenersConfigDump",
            "static_listeners": [{"listener": static["listeners"][0]}],
        },
        {
            "@type": f"{kind}.ClustersConfigDump",
            "dynamic_active_clusters": [{"cluster": each} for each in static["clusters"]],
        },
    ]

    assert codes({"configs": dumped}) == told


def test_help_lists_every_finding(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, page = Run(capsys, "check-envoy", "--help").out.partition("\nfindings:\n")
    sources = [
        path.read_text(encoding="utf-8")
        for path in (ROOT / "extproc" / "cli" / "envoy_check").rglob("*.py")
    ]
    given = {
        code
        for text in sources
        for code in re.findall(r'(?:Finding|note)\(\s*"([a-z0-9-]+)"', text)
    }

    assert len(given) > 40
    assert re.findall(r"^  ([a-z0-9-]+) ", page, re.MULTILINE) == sorted(given)


PLAIN, ALIAS = ProbeRequest("HTTP/1.1", "/a"), ProbeRequest("dot segments", "/b/../a", alias=True)


def noted(*counted: str, matched: tuple[str, ...] = ("p",), **left_out: str) -> dict[str, Any]:
    return {"matched": [*matched], "counted": [*counted], "left_out": left_out}


@pytest.mark.parametrize(
    ("request_", "reply", "said", "verdict"),
    [
        (PLAIN, ProbeAnswer(429), noted("p"), "guarded"),
        (PLAIN, ProbeAnswer(200, reached=True), noted("p"), "guarded"),
        (PLAIN, ProbeAnswer(200, reached=True), noted(p="bypass"), "guarded"),
        (PLAIN, ProbeAnswer(200, reached=True), noted(p="body_truncated"), "UNGUARDED"),
        (PLAIN, ProbeAnswer(200, reached=True), noted(matched=()), "UNGUARDED"),
        (PLAIN, ProbeAnswer(200), None, "UNGUARDED"),  # where Envoy is told to hide its headers
        (PLAIN, ProbeAnswer(500, reached=True), None, "UNGUARDED"),
        (PLAIN, ProbeAnswer(413), noted(), "stopped"),
        (PLAIN, ProbeAnswer(307), None, "stopped"),
        (PLAIN, ProbeAnswer(0, error="reset"), None, "stopped"),
        (ALIAS, ProbeAnswer(404, reached=True), None, "no such path"),
        (ALIAS, ProbeAnswer(400, reached=True), None, "UNGUARDED"),
        (ALIAS, ProbeAnswer(405, reached=True), None, "UNGUARDED"),  # as the usual path is answered
    ],
)
def test_response_gives_the_verdict(
    request_: ProbeRequest, reply: ProbeAnswer, said: dict[str, Any] | None, verdict: str
) -> None:
    assert judge(request_, reply, said, ProbeAnswer(405, reached=True))[0] == verdict


def test_unguarded_result_fails_unless_ignored() -> None:
    found = [
        Result("http://a/", "/a", PLAIN, ProbeAnswer(200), "guarded", ""),
        Result("http://a/", "/a", PLAIN._replace(name="HTTP/2"), ProbeAnswer(0), "UNGUARDED", ""),
    ]

    assert is_guarded(found[:1], [])
    assert not is_guarded(found, [])
    assert is_guarded(found, ["HTTP/2"])
