"""`loopguard check-envoy` finds every harmful setting in its place, and nothing else."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.cli.envoy_check.checks import CHECKS
from extproc.cli.envoy_check.config import find_resources
from extproc.cli.envoy_check.document import read_file
from extproc.cli.envoy_check.inspect import inspect
from extproc.cli.envoy_check.needs import find_needs
from extproc.cli.envoy_check.show import make_json
from extproc.cli.main import main
from extproc.errors import UsageError
from tests.support import ROOT
from tests.support.check_envoy import CHAT, MANAGER, UPLOADS, Json, find, found, report, run, without_an_end
from tests.support.documents import bundle, policy
from tests.support.envoy_config import bootstrap, theirs
from tests.support.extent import deepen
from tests.support.harness import envoy_version

COSTS = bundle(
    {
        "id": "agents",
        "spec": {
            "selector": {"pathPrefix": "/v1/"},
            "limit_keys": ["header:x-user-id"],
            "session_limits": {"max_cost_per_session": 1, "unknown_model": {"input": 1, "output": 1}},
        },
    }
)
"""Needs the costs of answers."""
FILTER = f"{MANAGER}/http_filters/0/typed_config"
HOST = f"{MANAGER}/route_config/virtual_hosts/0"
GUARDED = f"{HOST}/routes/0"
CLUSTER = "/static_resources/clusters/0"
PER_ROUTE = f"{GUARDED}/typed_per_filter_config/envoy.filters.http.ext_proc/overrides"
MODE = f"{PER_ROUTE}/processing_mode"


def good() -> Json:
    """What `loopguard envoy-config` prints for one guarded path."""
    return yaml.safe_load(bootstrap(CHAT))


@pytest.mark.parametrize("name", ["bootstrap", "bootstrap-partial", "bootstrap-observability"])
def test_what_we_print_is_good(name: str) -> None:
    """The committed bootstraps have no problem, whatever policies may need, and each guarded route is listed as such."""
    made = inspect(find_resources(read_file(str(ROOT / "envoy" / f"{name}.yaml"))), find_needs(None, UPLOADS))

    told = {"bootstrap-observability": ["observing"], "bootstrap-partial": ["notes"]}  # notes, not findings
    assert [item.code for item in made.findings] == told.get(name, [])
    assert [bool(route.modes) for route in made.routes] == [True, True, True, False]
    assert made.is_good


# ---- One setting wrong, one finding

Edit = Callable[[Json], object]


def put(pointer: str, value: Json) -> Edit:
    """An edit that sets something."""
    above, _, last = pointer.rpartition("/")

    def edit(document: Json) -> None:
        find(document, above)[last] = value

    return edit


def drop(pointer: str) -> Edit:
    """An edit that takes something away."""
    above, _, last = pointer.rpartition("/")
    return lambda document: find(document, above).pop(last)


def putting(code: str, pointer: str, value: Json) -> tuple[Edit, str, str]:
    """A case of something set that is found in its own place."""
    return put(pointer, value), code, pointer


def dropping(code: str, pointer: str) -> tuple[Edit, str, str]:
    """The same of something taken away."""
    return drop(pointer), code, pointer


def behind(document: Json) -> None:
    """The filter stands behind the router."""
    find(document, f"{MANAGER}/http_filters").reverse()


def older(document: Json) -> None:
    """The filter is off, and on with all that it says where a route asks for it: the shape of Envoy Gateway, and once ours."""
    mode = find(document, PER_ROUTE).pop("processing_mode")
    find(document, FILTER)["processing_mode"] = mode
    find(document, f"{MANAGER}/http_filters/0")["disabled"] = True
    on = find(document, f"{GUARDED}/typed_per_filter_config")
    kind = "type.googleapis.com/envoy.config.route.v3.FilterConfig"
    on["envoy.filters.http.ext_proc"] = {"@type": kind, "config": on["envoy.filters.http.ext_proc"]}


def show_nothing(document: Json) -> None:
    """The other route speaks of the filter, and forgets what it is to show."""
    kind = find(document, f"{GUARDED}/typed_per_filter_config")["envoy.filters.http.ext_proc"]["@type"]
    entry = {"@type": kind, "overrides": {}}
    find(document, f"{HOST}/routes/1")["typed_per_filter_config"] = {"envoy.filters.http.ext_proc": entry}


OBSERVING = {f"{FILTER}/observability_mode": True, f"{MODE}/request_body_mode": "STREAMED"}


def observing(pointer: str, value: Json) -> Edit:
    """An edit of a filter that only observes."""

    def edit(document: Json) -> None:
        for place, setting in {**OBSERVING, pointer: value}.items():
            put(place, setting)(document)

    return edit


TOLD: Json = [{"key": "x-loopguard-buffer-limit", "value": "10485760"}]


def in_parts(settings: dict[str, Json]) -> Edit:
    """An edit of a filter that collects bodies in parts."""

    def edit(document: Json) -> None:
        put(f"{MODE}/request_body_mode", "BUFFERED_PARTIAL")(document)
        put(f"{FILTER}/allow_content_length_header", value=True)(document)
        put(f"{FILTER}/grpc_service/initial_metadata", TOLD)(document)
        for place, setting in settings.items():
            put(place, setting)(document)

    return edit


OFF = {"@type": "type.googleapis.com/envoy.config.route.v3.FilterConfig", "disabled": True}
RETRIES = {"retry_on": "connect-failure"}
KEPT = ("kept-bodies", f"{GUARDED}/per_request_buffer_limit_bytes")
WRONG: dict[str, tuple[Edit, str, str]] = {  # the edit, the code, the place
    "the limit of an Envoy that says none": dropping(
        "buffer-limit", "/static_resources/listeners/0/per_connection_buffer_limit_bytes"
    ),
    "a small limit": putting("buffer-limit", "/static_resources/listeners/0/per_connection_buffer_limit_bytes", 65_535),
    "a small window": (
        put(f"{MANAGER}/http2_protocol_options", {"initial_stream_window_size": 65_535}),
        "http2-window",
        f"{MANAGER}/http2_protocol_options/initial_stream_window_size",
    ),
    "uploads that stall": (without_an_end, "request-timeout", f"{MANAGER}/stream_idle_timeout"),
    "a hold that 408 ends": putting("request-timeout", f"{MANAGER}/request_timeout", "20s"),
    "a hold that silence ends": putting("idle-timeout", f"{MANAGER}/stream_idle_timeout", "20s"),
    "a route's own idle timeout": putting("idle-timeout", f"{GUARDED}/route/idle_timeout", "20s"),
    "networks that are believed": putting("envoy-headers", f"{MANAGER}/internal_address_config", {}),
    "forged marks": dropping("forged-marks", f"{MANAGER}/early_header_mutation_extensions"),
    "dots in paths": putting("path-spelling", f"{MANAGER}/normalize_path", False),
    "slashes in paths": dropping("path-spelling", f"{MANAGER}/merge_slashes"),
    "clients that hear nothing": dropping("client-header", f"{HOST}/response_headers_to_add"),
    "another header": putting(
        "client-header",
        f"{HOST}/response_headers_to_add",
        [{"header": {"key": "a", "value": "%DYNAMIC_METADATA(other:warning)%"}}],
    ),
    "attributes of a route": putting("overrides", f"{PER_ROUTE}/request_attributes", ["source.address"]),
    "behind the router": (behind, "filter-order", f"{MANAGER}/http_filters/1"),
    "no headers": putting("processing-mode", f"{MODE}/request_header_mode", "SKIP"),
    "no bodies": dropping("processing-mode", f"{MODE}/request_body_mode"),
    "a route's own mode, which says nothing of bodies": (
        put(MODE, {"request_header_mode": "SEND"}),
        "processing-mode",
        f"{PER_ROUTE}/processing_mode/request_body_mode",
    ),
    "bodies in pieces": putting("processing-mode", f"{MODE}/request_body_mode", "STREAMED"),
    "bodies in both directions": (
        put(f"{MODE}/request_body_mode", "FULL_DUPLEX_STREAMED"),
        "content-length",
        f"{FILTER}/allow_content_length_header",
    ),
    "bodies in gRPC's mode": putting("processing-mode", f"{MODE}/request_body_mode", "GRPC"),
    "a buffer limit that is none": (
        in_parts({f"{FILTER}/grpc_service/initial_metadata": [{"key": "x-loopguard-buffer-limit", "value": "10485761"}]}),
        "told-limit",
        f"{FILTER}/grpc_service/initial_metadata",
    ),
    "upgrades that meet other filters": (
        put(f"{MANAGER}/upgrade_configs", [{"upgrade_type": "websocket", "filters": [{"name": "envoy.filters.http.router"}]}]),
        "upgrades",
        f"{MANAGER}/upgrade_configs/0/filters",
    ),
    "no trailers": dropping("processing-mode", f"{MODE}/request_trailer_mode"),
    "answers": putting("processing-mode", f"{MODE}/response_body_mode", "BUFFERED"),
    "looking on, and waiting": (
        observing(f"{MODE}/request_body_mode", "BUFFERED"),
        "processing-mode",
        f"{MODE}/request_body_mode",
    ),
    "looking on, and failing": (
        observing(f"{FILTER}/failure_mode_allow", False),
        "failure-mode",
        f"{FILTER}/failure_mode_allow",
    ),
    "chunks": (
        put(f"{MODE}/request_body_mode", "BUFFERED_PARTIAL"),
        "content-length",
        f"{FILTER}/allow_content_length_header",
    ),
    "a part kept for retries": (in_parts({f"{HOST}/retry_policy": RETRIES}), *KEPT),
    "a part kept for a mirror": (in_parts({f"{GUARDED}/route/request_mirror_policies": [{"cluster": "other"}]}), *KEPT),
    "a small part kept": (in_parts({f"{HOST}/retry_policy": RETRIES, KEPT[1]: 1_000}), *KEPT),
    "a part kept of one route": (
        in_parts({f"{HOST}/retry_policy": RETRIES, f"{HOST}/per_request_buffer_limit_bytes": 0, KEPT[1]: 1_000}),
        *KEPT,
    ),
    "a failure mode that was not set": dropping("failure-mode", f"{FILTER}/failure_mode_allow"),
    "no time for throttles": dropping("message-timeout", f"{FILTER}/max_message_timeout"),
    "little time for throttles": putting("message-timeout", f"{FILTER}/max_message_timeout", "30s"),
    "no refusals": putting("answers", f"{FILTER}/disable_immediate_response", True),
    "no headers of ours": (
        put(f"{FILTER}/mutation_rules", {"disallow_all": {"value": True}}),
        "answers",
        f"{FILTER}/mutation_rules/disallow_all",
    ),
    "metadata that is dropped": (
        drop(f"{FILTER}/metadata_options/receiving_namespaces"),
        "metadata",
        f"{FILTER}/metadata_options/receiving_namespaces/untyped",
    ),
    "no such cluster": (
        put(f"{CLUSTER}/name", "other"),
        "cluster",
        f"{FILTER}/grpc_service/envoy_grpc/cluster_name",
    ),
    "HTTP/1.1 to Loopguard": dropping("http2", f"{CLUSTER}/typed_extension_protocol_options"),
    "1,024 requests at a time": (
        drop(f"{CLUSTER}/circuit_breakers"),
        "circuit-breakers",
        f"{CLUSTER}/circuit_breakers/thresholds",
    ),
    "100 requests at a time": (
        put(f"{CLUSTER}/circuit_breakers", {"thresholds": [{"priority": "HIGH"}, {"max_requests": 100}]}),
        "circuit-breakers",
        f"{CLUSTER}/circuit_breakers/thresholds/1/max_requests",
    ),
    "a route that shows nothing": (
        show_nothing,
        "processing-mode",
        f"{PER_ROUTE.replace('routes/0', 'routes/1')}/processing_mode",
    ),
    "no route is on": (
        drop(f"{GUARDED}/typed_per_filter_config"),
        "nothing-guarded",
        f"{MANAGER}/http_filters/0",
    ),
    "no filter": dropping("nothing-guarded", f"{MANAGER}/http_filters"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("edit", "code", "pointer"), WRONG.values(), ids=WRONG)
def test_what_would_hurt_is_found_in_its_place(edit: Edit, code: str, pointer: str) -> None:
    """One wrong setting in a good configuration is one finding, there."""
    document = good()
    edit(document)

    hurting = [(finding, place) for finding, place, hurts in found(document) if hurts]

    assert hurting == [(code, pointer)]


NOTES: dict[str, tuple[Edit, str]] = {
    "large bodies pass uncounted": (
        in_parts(
            {
                "/static_resources/listeners/0/per_connection_buffer_limit_bytes": 65_535,
                f"{FILTER}/grpc_service/initial_metadata": [{"key": "x-loopguard-buffer-limit", "value": "65535"}],
            }
        ),
        "buffer-limit",
    ),
    "a limit that is not passed on": (in_parts({f"{FILTER}/grpc_service/initial_metadata": []}), "told-limit"),
    "Envoy's own window": (drop(f"{MANAGER}/http2_protocol_options"), "http2-window"),
    "an address that clients can choose": (drop(f"{MANAGER}/use_remote_address"), "client-address"),
    "no networks, in an Envoy of unknown age": (drop(f"{MANAGER}/internal_address_config"), "envoy-headers"),
    "networks that are set on purpose": (
        put(f"{MANAGER}/internal_address_config", {"cidr_ranges": [{"address_prefix": "10.0.0.0", "prefix_len": 8}]}),
        "envoy-headers",
    ),
    "clients that wait": (put(f"{MANAGER}/proxy_100_continue", value=True), "expect"),
    "%2F": (drop(f"{MANAGER}/path_with_escaped_slashes_action"), "escaped-slashes"),
    "retries": (put(f"{GUARDED}/route/retry_policy", {"retry_on": "5xx"}), "retries"),
    "a 413 that is not told": (put(f"{MODE}/response_header_mode", "SKIP"), "processing-mode"),
    "deny, said": (put(f"{FILTER}/failure_mode_allow", value=False), "failure-mode"),
    "patience": (put(f"{FILTER}/message_timeout", "35s"), "message-timeout"),
    "no addresses": (put(f"{FILTER}/request_attributes", ["xds.route_name"]), "attributes"),
    "no health checks": (drop(f"{CLUSTER}/health_checks"), "health-checks"),
    "looking on": (observing(f"{FILTER}/failure_mode_allow", True), "observing"),
}


@pytest.mark.parametrize(("edit", "code"), NOTES.values(), ids=NOTES)
def test_what_is_a_choice_is_a_note(edit: Edit, code: str) -> None:
    """What only some would mind is told, and is no reason to fail."""
    document = good()
    edit(document)

    made = report(document)

    assert [item.code for item in made.findings if item.code != "notes"] == [code]
    assert made.is_good


@pytest.mark.parametrize("place", [HOST, GUARDED])
def test_what_keeps_no_bodies_may_collect_them_in_parts(place: str) -> None:
    """Retries are good beside BUFFERED_PARTIAL where bodies are not kept for them, and so are kept bodies beside BUFFERED."""
    in_parts_alone, kept_whole = good(), good()
    in_parts({f"{HOST}/retry_policy": RETRIES, f"{place}/per_request_buffer_limit_bytes": 0})(in_parts_alone)
    put(f"{HOST}/retry_policy", RETRIES)(kept_whole)

    assert [code for code, _, _ in found(in_parts_alone)] == ["notes", "retries"]
    assert [code for code, _, _ in found(kept_whole)] == ["retries"]


@pytest.mark.parametrize(
    "bound",
    [
        put(f"{MANAGER}/request_timeout", "60s"),
        put(f"{MANAGER}/stream_idle_timeout", "300s"),
        put(f"{GUARDED}/route/idle_timeout", "300s"),
        put(f"{GUARDED}/route/max_stream_duration", {"max_stream_duration": "900s"}),
        put(f"{MANAGER}/common_http_protocol_options", {"max_stream_duration": "900s"}),
    ],
)
def test_an_upload_that_stalls_may_end_in_several_ways(bound: Edit) -> None:
    """Each of these bounds it."""
    document = good()
    without_an_end(document)
    bound(document)

    assert found(document) == []


# ---- Routes that are chosen late


def add(place: int, name: str, config: Json) -> Edit:
    """An edit that puts another filter in."""
    full = {"@type": f"type.googleapis.com/envoy.extensions.filters.http.{config.pop('is')}", **config}

    def edit(document: Json) -> None:
        find(document, f"{MANAGER}/http_filters").insert(place, {"name": name, "typed_config": copy.deepcopy(full)})

    return edit


def catch_all(document: Json) -> None:
    """Every route is guarded."""
    del find(document, f"{HOST}/routes")[1:]
    find(document, GUARDED)["match"] = {"prefix": "/"}


SCRIPT = 'function envoy_on_request(h) h:headers():replace("x-model", "large") end'
CLAIMS = {"is": "jwt_authn.v3.JwtAuthentication", "providers": {"idp": {"issuer": "i", "clear_route_cache": True}}}
SKIPPED = {"request_header_mode": "SKIP"}
LATE: dict[str, tuple[list[Edit], bool]] = {  # edits, and whether that hurts
    "nothing chooses": ([older], False),
    "claims": ([older, add(0, "it", {**CLAIMS})], True),
    "claims, whatever they are": ([add(0, "it", {**CLAIMS})], False),
    "claims that come too late": ([add(1, "it", {**CLAIMS})], True),
    "claims that choose no route": ([older, add(0, "it", {**CLAIMS, "providers": {"idp": {"issuer": "i"}}})], False),
    "claims where every route is guarded": ([older, catch_all, add(0, "it", {**CLAIMS})], False),
    "authorisation": ([older, add(0, "it", {"is": "ext_authz.v3.ExtAuthz", "clear_route_cache": True})], True),
    "authorisation alone": ([older, add(0, "it", {"is": "ext_authz.v3.ExtAuthz"})], False),
    "a script": ([older, add(0, "it", {"is": "lua.v3.Lua", "default_source_code": {"inline_string": SCRIPT}})], True),
    "a script that may not": (
        [older, add(0, "it", {"is": "lua.v3.Lua", "inline_code": SCRIPT, "clear_route_cache": False})],
        False,
    ),
    "a script that does so itself": (
        [older, add(1, "it", {"is": "lua.v3.Lua", "inline_code": "h:clearRouteCache()", "clear_route_cache": False})],
        True,
    ),
    "a script for answers": (
        [older, add(0, "it", {"is": "lua.v3.Lua", "inline_code": SCRIPT.replace("request", "response")})],
        False,
    ),
    "the choice of a model": ([older, add(0, "it", {"is": "ext_proc.v3.ExternalProcessor"})], True),
    "the choice of a model, before": ([add(0, "it", {"is": "ext_proc.v3.ExternalProcessor"})], False),
    "a Loopguard beside it": (
        [older, add(0, "loopguard-canary", {"is": "ext_proc.v3.ExternalProcessor", "processing_mode": SKIPPED})],
        False,
    ),
    "a processor that chooses nothing": (
        [older, add(0, "it", {"is": "ext_proc.v3.ExternalProcessor", "route_cache_action": "RETAIN"})],
        False,
    ),
    "a processor that must not": (
        [older, add(0, "it", {"is": "ext_proc.v3.ExternalProcessor", "disable_clear_route_cache": True})],
        False,
    ),
    "gRPC of JSON": ([older, add(0, "it", {"is": "grpc_json_transcoder.v3.GrpcJsonTranscoder"})], True),
    "a filter that is off": (
        [older, add(0, "it", {**CLAIMS}), put(f"{MANAGER}/http_filters/0/disabled", value=True)],
        False,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("edits", "hurts"), LATE.values(), ids=LATE)
def test_a_route_that_may_be_chosen_late_is_told(edits: list[Edit], hurts: bool) -> None:
    """Where a filter may choose another route when Loopguard's was left out already, that filter and the routes are named."""
    document = good()
    for edit in edits:
        edit(document)

    made = report(document)

    late = [item for item in made.findings if item.code == "late-route"]
    assert [item.code for item in made.findings if item.hurts] == ["late-route"] * hurts
    assert [(find(document, item.place.pointer)["name"], item.routes) for item in late] == [("it", ["guarded:/chat*"])] * hurts
    assert all("it may choose another route: a request from 'unguarded'" in item.problem for item in late)


def test_a_request_that_had_no_route_may_get_one_late() -> None:
    """Where every route is guarded and none takes everything, as those of claims do."""
    document = good()
    older(document)
    add(0, "it", {**CLAIMS})(document)
    del find(document, f"{HOST}/routes")[1:]

    (late,) = (item for item in report(document).findings if item.hurts)

    assert (late.code, late.place.pointer) == ("late-route", f"{MANAGER}/http_filters/0")
    assert "a request that had no route" in late.problem


# ---- What policies need


def test_what_answers_cost_is_told() -> None:
    """What we print for a policy that limits costs is good for it."""
    assert found(yaml.safe_load(bootstrap(COSTS)), COSTS) == []


def test_without_access_logs_costs_stay_estimates() -> None:
    """Without an access log that goes to the cluster which the filter asks, costs stay as they were estimated."""
    document = yaml.safe_load(bootstrap(COSTS))
    log = f"{MANAGER}/access_log"
    put(f"{log}/0/typed_config/common_config/grpc_service/envoy_grpc/cluster_name", "other")(document)
    elsewhere = found(document, COSTS)
    drop(log)(document)

    assert elsewhere == found(document, COSTS) == [("outcomes", log, True)]
    assert found(document, CHAT)[0][0] != "outcomes"


@pytest.mark.parametrize(
    "edit",
    [
        put(f"{GUARDED}/typed_per_filter_config/envoy.filters.http.sse_to_metadata", OFF),
        put(f"{GUARDED}/typed_per_filter_config/envoy.filters.http.json_to_metadata", OFF),
        lambda document: find(document, f"{MANAGER}/http_filters").pop(1),
    ],
    ids=["off for events", "off for JSON", "no filter for events"],
)
def test_tokens_that_are_not_read_are_estimated(edit: Edit) -> None:
    """That may be meant: a filter that is missing, or off on a guarded route, is a note."""
    document = yaml.safe_load(bootstrap(COSTS))
    edit(document)

    assert [(code, hurts) for code, _, hurts in found(document, COSTS)] == [("usage", False)]


JWT = {
    "name": "envoy.filters.http.jwt_authn",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.jwt_authn.v3.JwtAuthentication",
        "providers": {"idp": {"payload_in_metadata": "claims"}},
    },
}


def with_jwt(place: int, **provider: object) -> Edit:
    """An edit that has tokens verified, before the filter or behind it."""

    def edit(document: Json) -> None:
        verifier = copy.deepcopy(JWT)
        verifier["typed_config"]["providers"]["idp"] = provider  # type: ignore[index]  # a document
        find(document, f"{MANAGER}/http_filters").insert(place, verifier)

    return edit


FIRST = {"first_of": ["jwt:sub", "credential"], "name": "caller"}


def forwarding(**rules: object) -> Edit:
    """The filter forwards headers by these rules."""
    return put(f"{FILTER}/forward_rules", rules)


def keyed(*keys: object, **selector: object) -> Json:
    """A policy with these limit keys."""
    return bundle(policy("chat", {"pathPrefix": "/chat", **selector}, limit_keys=list(keys)))


NEEDS: dict[str, tuple[Json, list[Edit], list[str]]] = {
    "claims that are not verified": (keyed("jwt:org"), [], ["jwt"]),
    "claims": (keyed("jwt:org"), [with_jwt(0, payload_in_metadata="claims")], []),
    "claims that come too late": (keyed("jwt:org"), [with_jwt(1, payload_in_metadata="claims")], ["jwt"]),
    "claims that are not kept": (keyed("jwt:org"), [with_jwt(0)], ["jwt"]),
    "claims that stay in Envoy": (
        keyed("jwt:org"),
        [with_jwt(0, payload_in_metadata="claims"), drop(f"{MANAGER}/http_filters/1/typed_config/metadata_options")],
        ["metadata", "jwt"],
    ),
    "claims, or else a credential": (keyed(FIRST), [], []),
    "claims that come too late, or else a credential": (keyed(FIRST), [with_jwt(1, payload_in_metadata="claims")], ["jwt"]),
    "a token that is taken away": (keyed("credential"), [with_jwt(0)], ["caller-headers"]),
    "a token that stays": (keyed("credential"), [with_jwt(0, forward=True)], []),
    "a token that is no caller": (keyed("header:x"), [with_jwt(0)], []),
    "headers that are not forwarded": (
        keyed("credential", "header:x"),
        [
            forwarding(
                allowed_headers={"patterns": [{"exact": "Authorization"}, {"prefix": "x-"}, {"safe_regex": {"regex": "c.*"}}]}
            )
        ],
        ["caller-headers"],
    ),
    "headers that are forwarded": (
        keyed("credential", "header:x"),
        [forwarding(allowed_headers={"patterns": [{"suffix": "-key"}, {"contains": "auth"}, {"safe_regex": {"regex": "x"}}]})],
        [],
    ),
    "headers that are withheld": (
        keyed("header:x"),
        [forwarding(disallowed_headers={"patterns": [{"exact": "x"}]})],
        ["caller-headers"],
    ),
    "other headers that are withheld": (
        keyed("header:x"),
        [forwarding(disallowed_headers={"patterns": [{"exact": "cookie"}, {"safe_regex": {"regex": "("}}]})],
        [],
    ),
    "an address": (keyed("ip:address"), [drop(f"{MANAGER}/use_remote_address")], ["client-address"]),
    "no address": (keyed("header:x"), [drop(f"{MANAGER}/use_remote_address")], []),
    "an address that is not told": (keyed("ip:address"), [put(f"{FILTER}/request_attributes", [])], ["attributes"]),
    "no throttle": (keyed("header:x"), [drop(f"{FILTER}/max_message_timeout"), put(f"{MANAGER}/request_timeout", "5s")], []),
    "no warning": (keyed("header:x"), [drop(f"{HOST}/response_headers_to_add")], []),
    "a throttle in shadow": (
        bundle(policy("chat", {"pathPrefix": "/chat"}, action="throttle", mode="shadow", limit_keys=["header:x"])),
        [drop(f"{FILTER}/max_message_timeout")],
        [],
    ),
    "a short throttle": (
        bundle(policy("chat", {"pathPrefix": "/chat"}, action="throttle", max_delay_ms=500, limit_keys=["header:x"])),
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
}


@pytest.mark.slow
@pytest.mark.parametrize(("policies", "edits", "codes"), NEEDS.values(), ids=NEEDS)
def test_policies_say_what_is_needed(policies: Json, edits: list[Edit], codes: list[str]) -> None:
    """With policies only what they need is asked for, and what they select has to be guarded."""
    document = good()
    for edit in edits:
        edit(document)

    assert [code for code, _, hurts in found(document, policies) if hurts] == codes


ROUTES = [
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
def test_a_selector_finds_the_routes_that_envoy_would_take(selector: dict[str, Any], names: list[str]) -> None:
    """The first route that takes all of a path ends the search; one that also looks at headers does not."""
    document = good()
    on = find(document, f"{GUARDED}/typed_per_filter_config")
    hosts = find(document, f"{MANAGER}/route_config/virtual_hosts")
    hosts[0] |= {"name": "all", "routes": ROUTES}
    hosts.append({"name": "own", "domains": ["a.example"], "routes": [{"name": "own", "match": {"prefix": "/"}}]})
    hosts.append({"name": "wild", "domains": ["*.wild.example"], "routes": [{"name": "wild", "match": {"prefix": "/"}}]})
    hosts.append(
        {"name": "on", "domains": ["on.example"], "routes": [{"match": {"prefix": "/"}, "typed_per_filter_config": on}]}
    )
    selector = {"hosts": ["nobody.example"], **selector}

    made = report(document, bundle(policy("p", selector, limit_keys=["header:x"])))

    assert [name for item in made.findings if item.code == "unguarded" for name in item.routes] == names


def test_two_filters_on_one_route_count_twice() -> None:
    """Unless one of them only observes."""
    document = good()
    filters = find(document, f"{MANAGER}/http_filters")
    filters.insert(0, {**copy.deepcopy(filters[0]), "name": "loopguard-too"})
    filters[0]["typed_config"]["processing_mode"] = find(document, MODE)
    twice = [(code, pointer) for code, pointer, hurts in found(document) if hurts]
    filters[0]["typed_config"] |= {"observability_mode": True, "processing_mode": {"request_body_mode": "STREAMED"}}

    assert twice == [("twice", f"{MANAGER}/http_filters/1")]
    assert [code for code, _, hurts in found(document) if hurts] == []


# ---- Forms


EDGE = """
static_resources:
  listeners:
    name: edge
    address: {socket_address: {address: 0.0.0.0, port_value: 8443}}
    per_connection_buffer_limit_bytes: 32768
    filter_chains:
      filters:
        name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          use_remote_address: true
          normalize_path: true
          merge_slashes: true
          path_with_escaped_slashes_action: UNESCAPE_AND_REDIRECT
          request_timeout: 300s
          stream_idle_timeout: 300s
          http2_protocol_options: {max_concurrent_streams: 100, initial_stream_window_size: 65536}
          http_filters:
          - name: picker
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
              grpc_service: {envoy_grpc: {cluster_name: endpoint-picker}}
              processing_mode: {request_body_mode: FULL_DUPLEX_STREAMED, response_body_mode: FULL_DUPLEX_STREAMED}
          - name: envoy.filters.http.router
          route_config:
            virtual_hosts:
              name: local
              domains: "*"
              routes:
              - match: {prefix: /models}
                route: {cluster: models, idle_timeout: 15s}
              - match: {prefix: /}
                direct_response: {status: 403}
  clusters:
    name: models
"""
"""As Envoy's own page on edges advises: small limits, and a filter of another vendor. Lists of one are no lists."""


def test_an_edge_with_small_limits_would_break_uploads() -> None:
    """With all of the snippet but its limits, that edge refuses long prompts; what others ask of Envoy is not judged."""
    document = yaml.safe_load(EDGE)
    ours, listener = good(), document["static_resources"]["listeners"]
    manager = listener["filter_chains"]["filters"]["typed_config"]
    before = found(document)
    manager["early_header_mutation_extensions"] = find(ours, f"{MANAGER}/early_header_mutation_extensions")
    manager["http_filters"].insert(1, find(ours, f"{MANAGER}/http_filters")[0])
    host = manager["route_config"]["virtual_hosts"]
    host["response_headers_to_add"] = find(ours, f"{HOST}/response_headers_to_add")
    host["routes"][0]["typed_per_filter_config"] = find(ours, f"{GUARDED}/typed_per_filter_config")
    document["static_resources"]["clusters"] = [find(ours, CLUSTER)]

    place = "/static_resources/listeners/filter_chains/filters/typed_config"
    assert [(code, hurts) for code, _, hurts in before] == [("nothing-guarded", True)]
    assert [item for item in found(document, bundle(policy("all", {"pathPrefix": "/"}, action="throttle"))) if item[2]] == [
        ("buffer-limit", "/static_resources/listeners/per_connection_buffer_limit_bytes", True),
        ("http2-window", f"{place}/http2_protocol_options/initial_stream_window_size", True),
        ("idle-timeout", f"{place}/route_config/virtual_hosts/routes/0/route/idle_timeout", True),
    ]


def test_a_listener_for_http3_has_a_limit_of_its_own() -> None:
    """It is a listener like others, but bodies are limited by the window of its streams, as in the real Envoy."""
    document = good()
    (listener,) = document["static_resources"]["listeners"]
    listener |= {"per_connection_buffer_limit_bytes": 1000, "udp_listener_config": {"quic_options": {}}}
    find(document, MANAGER).pop("http2_protocol_options")
    before = found(document)
    listener["udp_listener_config"]["quic_options"] = {"quic_protocol_options": {"initial_stream_window_size": 20_000}}
    (whole,) = report(document).findings
    find(document, MODE)["request_body_mode"] = "BUFFERED_PARTIAL"
    (partly,) = (item for item in report(document).findings if item.code == "told-limit")

    assert before == []
    assert (whole.code, whole.place.pointer.rpartition("/")[2]) == ("http2-window", "initial_stream_window_size")
    assert "an HTTP/3 body above 20,000 bytes gets a 413" in whole.problem
    assert "above 20,000 bytes" in partly.problem


def test_an_envoy_without_loopguard_guards_nothing() -> None:
    """An Envoy without Loopguard is one finding, and what it needs is named."""
    made = report(theirs(good()))

    assert [(item.code, item.place.pointer) for item in made.findings] == [("nothing-guarded", f"{MANAGER}/http_filters")]
    assert "envoy-config --snippet" in made.findings[0].right
    assert [route.modes for route in made.routes] == [[]] * 3


def test_another_filter_is_taken_for_loopguards_only_by_name() -> None:
    """Envoy may have other ext_proc filters: Loopguard's is recognised by its name, or by the name that is given."""
    document = good()
    find(document, FILTER)["grpc_service"]["envoy_grpc"]["cluster_name"] = "processor"
    find(document, CLUSTER)["name"] = "processor"
    find(document, FILTER)["metadata_options"]["receiving_namespaces"] = {"untyped": ["x"]}

    assert "the external processors here are envoy.filters.http.ext_proc" in report(document).findings[0].problem
    assert found(document, names=["envoy.filters.http.ext_proc"])[0][0] == "metadata"


@pytest.mark.parametrize(
    ("levels", "guarded"),
    [
        ([None, None, None], False),
        ([{"config": {}}, None, None], True),
        ([None, {"config": {}}, None], True),
        ([None, None, {"config": {}}], True),
        ([{"disabled": True}, {"config": {}}, None], False),
        (
            [
                {"config": {"@type": "x/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute", "disabled": True}},
                None,
                None,
            ],
            False,
        ),
        ([{"config": {}}, {"disabled": True}, None], True),
    ],
)
def test_what_is_nearest_to_a_route_counts(levels: list[Json], guarded: bool) -> None:
    """The route, its virtual host and the whole configuration may turn the filter on and off."""
    document = good()
    older(document)
    places = [GUARDED, HOST, f"{MANAGER}/route_config"]
    find(document, GUARDED).pop("typed_per_filter_config")
    for place, said in zip(places, levels, strict=True):
        if said is not None:
            entry = {"@type": "type.googleapis.com/envoy.config.route.v3.FilterConfig", **said}
            find(document, place)["typed_per_filter_config"] = {"envoy.filters.http.ext_proc": entry}

    assert bool(report(document).routes[0].modes) == guarded


def write_camel_case(value: Json) -> Json:
    """The same message, with the other names that JSON has for fields; keys of maps stay."""
    if isinstance(value, list):
        return [write_camel_case(item) for item in value]
    if not isinstance(value, dict):
        return value
    maps = {"typed_per_filter_config", "typed_extension_protocol_options"}
    return {
        "".join([key.split("_")[0], *(part.capitalize() for part in key.split("_")[1:])]): (
            {name: write_camel_case(item) for name, item in inner.items()} if key in maps else write_camel_case(inner)
        )
        for key, inner in value.items()
    }


def test_fields_may_be_in_camel_case() -> None:
    """Both names of a field are read, and a finding points at the one that stands there."""
    document = write_camel_case(good())
    document["staticResources"]["listeners"][0]["perConnectionBufferLimitBytes"] = "65535"

    assert found(document) == [("buffer-limit", "/staticResources/listeners/0/perConnectionBufferLimitBytes", True)]


def resources(document: Json) -> Json:
    """The same as xDS would deliver it."""
    manager = find(document, MANAGER)
    routes = manager.pop("route_config")
    manager["rds"] = {"route_config_name": routes["name"]}
    listed = [("listener.v3.Listener", document["static_resources"]["listeners"][0]), ("route.v3.RouteConfiguration", routes)]
    listed += [("cluster.v3.Cluster", cluster) for cluster in document["static_resources"]["clusters"]]
    return {"resources": [{"@type": f"type.googleapis.com/envoy.config.{kind}", **item} for kind, item in listed]}


def test_resources_of_xds_are_read() -> None:
    """Listener and routes may come apart; what is not there is a note, and not guessed."""
    whole = resources(good())
    apart = {"resources": [item for item in whole["resources"] if "Listener" in item["@type"]]}

    assert found(whole) == []
    assert [code for code, *_ in found(apart)] == ["nothing-guarded", "routes-missing"]
    assert "RDS as 'ingress'" in report(apart).findings[1].problem


def test_a_filter_that_comes_by_itself_is_read() -> None:
    """What ECDS brings stands elsewhere in a dump."""
    document = good()
    entry = find(document, f"{MANAGER}/http_filters")[0]
    extension = {
        "@type": "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig",
        "name": entry["name"],
        "typed_config": entry.pop("typed_config"),
    }
    entry["config_discovery"] = {
        "type_urls": ["type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor"]
    }
    whole = resources(document)

    without = found(whole)
    whole["resources"].append(extension)

    assert without[0][0] == "nothing-guarded"
    assert found(whole) == []


def test_a_typed_struct_is_looked_into() -> None:
    """As control planes wrap what they do not know."""
    document = good()
    config = find(document, FILTER)
    kind = config.pop("@type")
    wrapped = {"@type": "type.googleapis.com/xds.type.v3.TypedStruct", "type_url": kind, "value": config}
    find(document, f"{MANAGER}/http_filters")[0]["typed_config"] = wrapped
    config["disable_immediate_response"] = True

    assert found(document) == [("answers", f"{FILTER}/value/disable_immediate_response", True)]


def test_a_route_can_raise_the_limit() -> None:
    """What a route says of its bodies' size is as good as the listener's limit, and less changes nothing."""
    document = good()
    find(document, "/static_resources/listeners/0")["per_connection_buffer_limit_bytes"] = 65_535
    find(document, GUARDED)["request_body_buffer_limit"] = {"value": UPLOADS}
    raised = found(document)
    find(document, GUARDED)["request_body_buffer_limit"] = 1_000

    assert raised == []
    assert [code for code, *_ in found(document)] == ["buffer-limit"]


def walk(value: Json, pointer: str = "") -> Iterator[str]:
    """Pointers to everything."""
    yield pointer
    for step, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from walk(inner, f"{pointer}/{step.replace('/', '~1') if isinstance(step, str) else step}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "odd", deepen([None, 0, -1.5, "x", True, [], {}, [1, None, "x"], {"a": {"b": []}}], None, "x", {"a": {"b": []}}), ids=repr
)
def test_whatever_stands_somewhere_nothing_breaks(odd: Json) -> None:
    """Any value in place of any other makes a report, which can be printed; wrong types are Envoy's to refuse."""
    whole = good()
    for pointer in walk(whole):
        document = copy.deepcopy(whole)
        if not pointer or "~" in pointer:
            continue
        above, _, last = pointer.rpartition("/")
        place = find(document, above)
        place[int(last) if isinstance(place, list) else last] = odd
        try:
            made = report(document, CHAT)
        except UsageError:
            continue
        assert json.dumps(make_json(made, "x"))


def test_it_prints_routes_and_findings_with_their_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each route with what guards it, each finding with file, line and pointer, and what would be right."""
    lines = [line for line in bootstrap(CHAT).splitlines(keepends=True) if "max_message_timeout" not in line]
    (file := tmp_path / "envoy.yaml").write_text("".join(lines))
    number = next(
        number
        for number, line in enumerate(lines, 1)
        if "typed_config:" in line and "filters.http.ext_proc" in "".join(lines[number - 6 : number])
    )

    code, out, _ = run(capsys, str(file))

    assert code == 1
    assert out.splitlines()[1].split() == ["guarded:/chat*", "path", "separated", "prefix", "/chat", "BUFFERED"]
    assert f"message-timeout  {file}:{number}: {FILTER}/max_message_timeout\n" in out
    assert "  right: max_message_timeout: 35s\n" in out
    assert out.endswith("1 of 2 routes guarded; findings: 1; notes: 0\n")


def test_it_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For programs: whether it is good, routes, findings and notes."""
    document = good()
    find(document, FILTER).pop("max_message_timeout")
    (file := tmp_path / "envoy.json").write_text(json.dumps(document))

    code, out, _ = run(capsys, "--json", str(file))

    told = json.loads(out)
    assert (code, told["good"]) == (1, False)
    assert [(route["route"], route["guarded"]) for route in told["routes"]] == [("guarded:/chat*", True), ("unguarded", False)]
    assert [(item["code"], item["pointer"]) for item in told["findings"]] == [
        ("message-timeout", f"{FILTER}/max_message_timeout")
    ]


def test_what_is_meant_can_be_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finding that is known by its code is no reason to fail, nor is a limit that is large enough for one's uploads."""
    document = good()
    find(document, FILTER).pop("max_message_timeout")
    find(document, "/static_resources/listeners/0")["per_connection_buffer_limit_bytes"] = 2_000_000
    (file := tmp_path / "envoy.json").write_text(json.dumps(document))

    assert run(capsys, str(file), "--ignore", "message-timeout", "--uploads", "2000000")[0] == 0
    assert run(capsys, str(file), "--ignore", "message-timeout")[0] == 1


def test_what_is_no_finding_cannot_be_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A code that is misspelt is refused with those that there are."""
    (file := tmp_path / "envoy.json").write_text(json.dumps(good()))

    assert main(["check-envoy", str(file), "--ignore", "retries", "--ignore", "retry"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("loopguard: --ignore retry is neither a finding nor a request; known: alias, answers, attributes, ")
    assert "retries" in told


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
    ],
)
def test_what_cannot_be_read_is_told(text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one line, which names the file where it is about the file."""
    (file := tmp_path / "envoy.yaml").write_text(text)

    code, out, error = run(capsys, str(file))

    assert (code, out, error.count("\n")) == (2, "", 1)
    assert told in error


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "name a FILE, --admin URL or --probe URL"),
        (["/no/such/file"], "/no/such/file: No such file or directory"),
        (["--admin", "127.0.0.1:9901"], "--admin must be a URL, such as http://127.0.0.1:9901"),
        (["--admin", "http://127.0.0.1:1"], "no Envoy answered with its configuration"),
        (["x", "--uploads", "10MiB"], "--uploads: must be a number of bytes, not '10MiB'"),
    ],
)
def test_a_bad_command_line_is_told(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one line."""
    code, out, error = run(capsys, *flags)

    assert (code, out, error.count("\n")) == (2, "", 1)
    assert told in error


def test_yaml_is_read_with_its_anchors_and_merges(tmp_path: Path) -> None:
    """An alias stands for what it means, a merge key for the keys that it brings."""
    (file := tmp_path / "x.yaml").write_text("a: &a {x: 1, y: [2]}\nb:\n  <<: *a\n  x: 3\nc: *a\n")

    read = read_file(str(file))

    assert read.value == {"a": {"x": 1, "y": [2]}, "b": {"x": 3, "y": [2]}, "c": {"x": 1, "y": [2]}}
    assert read.get("b", "x").line == 4
    assert read.get("b", "nothing").line == 2


@pytest.mark.skipif(envoy_version() < (1, 36), reason="older Envoys say of more networks that they are internal")
def test_the_version_of_a_running_envoy_is_known() -> None:
    """What depends on Envoy's age is no guess where it runs."""
    document = good()
    find(document, MANAGER).pop("internal_address_config")
    dumped = {
        "configs": [
            {
                "@type": "type.googleapis.com/envoy.admin.v3.BootstrapConfigDump",
                "bootstrap": {"node": {"user_agent_build_version": {"version": {"major_number": 1, "minor_number": 35}}}},
            },
            {
                "@type": "type.googleapis.com/envoy.admin.v3.ListenersConfigDump",
                "static_listeners": [{"listener": document["static_resources"]["listeners"][0]}],
            },
            {
                "@type": "type.googleapis.com/envoy.admin.v3.ClustersConfigDump",
                "dynamic_active_clusters": [{"cluster": cluster} for cluster in document["static_resources"]["clusters"]],
            },
        ]
    }
    version = dumped["configs"][0]["bootstrap"]["node"]["user_agent_build_version"]["version"]  # type: ignore[index]  # a document

    old = found(dumped)
    version["minor_number"] = 36

    assert [(code, hurts) for code, _, hurts in old] == [("envoy-headers", True)]
    assert found(dumped) == []


def test_every_code_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    """Every code that a check can report has an entry in `--help`."""
    with pytest.raises(SystemExit):
        main(["check-envoy", "--help"])
    _, _, page = capsys.readouterr().out.partition("\nfindings:\n")
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "extproc" / "cli" / "envoy_check").rglob("*.py")]
    given = {code for text in sources for code in re.findall(r'(?:Finding|note)\(\s*"([a-z0-9-]+)"', text)}

    assert len(CHECKS) > 1
    assert re.findall(r"^  ([a-z0-9-]+) ", page, re.MULTILINE) == sorted(given)
