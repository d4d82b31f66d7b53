"""What the chart renders for meshes, accepted and run by the real Envoy."""

import copy
import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import ROOT
from tests.support.chart import (
    CASES,
    DEFAULTS,
    NAME,
    Object,
    Values,
    environment,
    merged,
    objects,
    of_kind,
    one,
    rendered,
)
from tests.support.chart.istio import http_manager, patched, without_loopguard
from tests.support.documents import bundle, policy, read_yaml
from tests.support.harness import (
    ENVOY,
    Stack,
    envoy_version,
    eventually,
    stack,
)
from tests.support.looping import looping
from tests.support.meshes import (
    FILTER,
    cluster_names,
    each_istio,
    envoy_filter,
    gateway_configuration,
    kgateway_configuration,
    unwrap,
)
from tests.support.model_paths import MODEL_CALLS, OTHER_CALLS

ON: Values = {"enabled": True, "namespace": "istio-ingress", "routes": [{"name": "a"}]}
CLUSTER = "outbound|50051||lg-loopguard.guards.svc.cluster.local"
CANARY_CLUSTER = "outbound|50051||lg-loopguard-canary.guards.svc.cluster.local"

needs_content_length = pytest.mark.skipif(
    envoy_version() < (1, 38),
    reason="allow_content_length_header is not in this Envoy: the tolerant body mode is NOT tested",
)


# ---- Envoy accepts it


def configuration(text: str, values: Values, routes: dict[str, str]) -> str:
    """An Envoy as Istio would configure it, with the EnvoyFilter of these values.

    Args:
        text: of `loopguard envoy-config`; its clusters and ports are taken over.
        values: of the chart.
        routes: names by path prefix, the first that matches is taken.
    """
    made = without_loopguard(read_yaml(text))
    listed = [
        {
            "name": name,
            "match": {"prefix": prefix},
            "route": {"cluster": "upstream", "timeout": "0s"},
        }
        for prefix, name in routes.items()
    ]
    found = envoy_filter(values)
    (host,) = http_manager(made)["route_config"]["virtual_hosts"]
    names = [
        patch["match"]["routeConfiguration"]["vhost"].get("name")
        for patch in found["spec"]["configPatches"]
        if patch["applyTo"] == "HTTP_ROUTE"
    ]
    host["name"] = next((name for name in names if name), "all")
    host["routes"] = listed
    clusters = made["static_resources"]["clusters"]
    for number, name in enumerate(sorted({CLUSTER, *cluster_names(found)})):
        own = without_health(clusters[0])
        own["name"] = own["load_assignment"]["cluster_name"] = name
        (group,) = own["load_assignment"]["endpoints"]
        endpoints = group["lb_endpoints"]
        group["lb_endpoints"] = [endpoints[number % len(endpoints)]]
        clusters.append(own)
    return json.dumps(patched(made, found))


def without_health(cluster: Object) -> Object:
    copied = copy.deepcopy(cluster)
    for key in ("health_checks", "outlier_detection", "common_lb_config"):
        del copied[key]
    return copied


@each_istio
def test_envoy_accepts_the_patched_configuration(values: Values, tmp_path: Path) -> None:
    envoy = values.get("envoy", {})
    # Both need Envoy 1.38
    newer = envoy.get("bodyMode") == "tolerant" or envoy.get("usage") == "exact"
    names = [route["name"] for route in values["istio"].get("routes", [{"name": "any"}])]
    bootstrap = ROOT / "envoy" / "bootstrap.yaml"
    file = tmp_path / "envoy.yaml"
    file.write_text(
        configuration(bootstrap.read_text(), values, {f"/{name}": name for name in names})
    )

    done = subprocess.run(
        [ENVOY, "--mode", "validate", "-c", str(file)], capture_output=True, text=True, check=False
    )

    assert (done.returncode == 0) == (not newer or envoy_version() >= (1, 38)), done.stderr


# ---- Loopguard behind Istio's Envoy


CHAT = bundle(policy("chat", {"pathPrefix": "/"}, limit_keys=["header:x-user-id"]))
ROUTES = {"/v1/chat": "chat", "/named": "named", "/own": "own", "/": "unnamed"}


@contextmanager
def mesh(values: Values, routes: dict[str, str], *arguments: str, **more: Any) -> Iterator[Stack]:  # noqa: ANN401  # of `stack`
    """Loopguard behind an Envoy with the EnvoyFilter and policies of these values."""
    (policies,) = one(objects(values), "ConfigMap", f"{NAME}-policies")["data"].values()
    with stack(
        policies, *arguments, edit=lambda text: configuration(text, values, routes), **more
    ) as made:
        for name in cluster_names(envoy_filter(values)):
            eventually(partial(made.envoy.stat, f"cluster.{name}.membership_healthy"), name)
        yield made


@pytest.fixture(scope="module")
def gateway() -> Iterator[Stack]:
    """The stable filter calls the first of two Loopguards, the canary's calls the second."""
    with mesh(CASES["istio-gateway"], ROUTES, replicas=2) as made:
        yield made


@pytest.mark.parametrize(
    ("path", "expected", "by"),
    [("/v1/chat", [200, 200, 429], "chat"), ("/named/a", [200, 429, 429], "strict")],
)
def test_rendered_filter_refuses_a_loop(
    user: dict[str, str], gateway: Stack, path: str, expected: list[int], by: str
) -> None:
    answers = [gateway.post(path, b"same", user) for _ in range(3)]

    assert [answer.status for answer in answers] == expected
    assert answers[2].headers["x-loopguard-policy"] == by


@needs_content_length
def test_gateway_reports_tokens_of_named_routes() -> None:
    with mesh(CASES["istio-sessions"], ROUTES) as made:
        session = {"x-user-id": "ann", "x-session-id": "s"}
        for path in ("/v1/chat", "/other"):
            assert made.post(path, {}, {**session, "accept-encoding": "gzip"}).status == 200
        eventually(
            lambda: made.loopguard.metric("access_log_entries_total", result="taken"), "an entry"
        )
        read = made.envoy.stat("json_to_metadata.resp.success")
        asked = [seen.header("accept-encoding") for seen in made.upstream.seen]

    assert (read, asked) == (1, [None, "gzip"])


BY_API: Values = merged(DEFAULTS, {"istio": {"enabled": True, "namespace": "istio-ingress"}})


@pytest.mark.parametrize(("enforces", "status"), [(False, 200), (True, 400)])
def test_default_release_sees_model_calls_and_finds_loops(
    enforces: bool, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    enforcing = {"shadow": {"enabled": False}, "networkPolicy": {"gateways": [{"podSelector": {}}]}}
    values = merged(BY_API, enforcing if enforces else {})
    for name, value in environment(one(objects(values), "Deployment")).items():
        monkeypatch.setenv(name, value)
    with mesh(values, {"/": "any"}, "--log-format", "text") as made:
        answer = made.post(
            "/team-a/v1/chat/completions", looping(7), {"authorization": "Bearer sk-a"}
        )

        assert answer.status == status
        assert made.loopguard.metric("loops_detected_total", policy="agents") == 1
        if not enforces:
            found = [
                made.post(f"{path}{query}", {}).status
                for path in MODEL_CALLS
                for query in ("", "?a=b")
            ]
            found += [made.post(path, {}).status for path in OTHER_CALLS]
            found += made.repeat("/files", 4, body=b"x" * 12_000_000)
            assert (set(found), count_streams(made)[0]) == ({200}, 1 + 2 * len(MODEL_CALLS))
            assert made.loopguard.metric("unmatched_total") == 0


def count_streams(made: Stack) -> list[int]:
    return [
        made.envoy.stat(f"http.ingress.ext_proc.{name}.streams_started")
        for name in (FILTER, f"{FILTER}-canary")
    ]


def test_only_named_routes_are_shown_to_loopguard(user: dict[str, str], gateway: Stack) -> None:
    started, unmatched = count_streams(gateway), gateway.loopguard.metric("unmatched_total")

    assert gateway.repeat("/elsewhere", 4, headers=user) == [200] * 4
    assert (count_streams(gateway), gateway.loopguard.metric("unmatched_total")) == (
        started,
        unmatched,
    )
    gateway.post("/v1/chat", b"x", user)
    assert count_streams(gateway) == [before + 1 for before in started]
    assert (
        "envoy_http_ext_proc_loopguard_guards_lg_loopguard_failure_mode_allowed"
        in gateway.envoy.admin("/stats/prometheus")
    )


def test_policies_in_route_metadata_apply(user: dict[str, str], gateway: Stack) -> None:
    answers = [gateway.send("/own/a", headers=user) for _ in range(2)]
    warned = [
        seen.header("x-fairvisor-warning")
        for seen in gateway.upstream.seen
        if seen.target == "/own/a"
    ]
    throttled = gateway.repeat("/own/slow", 3, headers=user)

    assert (
        [answer.headers.get("x-fairvisor-warning") for answer in answers]
        == warned
        == [None, "loop_warn"]
    )
    assert throttled == [200] * 3
    assert gateway.loopguard.metric("requests_total", policy="slow", action="throttle") == 2
    assert (
        gateway.envoy.stat(f"http.ingress.ext_proc.{FILTER}.override_message_timeout_received") >= 2
    )
    assert gateway.loopguard.metric("handover_errors_total") == 0


RETRY = {
    "x-envoy-retry-on": "retriable-status-codes",
    "x-envoy-retriable-status-codes": "200",
    "x-envoy-max-retries": "5",
}


def test_forged_retry_headers_do_not_multiply_a_request(
    user: dict[str, str], gateway: Stack
) -> None:
    gateway.upstream.seen.clear()

    gateway.send("/v1/chat?once", headers={**user, **RETRY})

    assert [seen.target for seen in gateway.upstream.seen] == ["/v1/chat?once"]


def test_dead_pod_costs_no_request(user: dict[str, str]) -> None:
    envoy, routes = {"failureMode": "deny", "bodyMode": "strict"}, [{"name": "default"}]
    more: Values = {
        "envoy": envoy,
        "canary": {"enabled": False},
        "istio": {"routes": routes},
        "policies": {"bundle": CHAT},
    }
    values = merged(CASES["istio-sidecar"], more)

    def edit(text: str) -> str:
        made = json.loads(configuration(text, values, {"/": "default"}))
        loopguard, *_ = clusters = made["static_resources"]["clusters"]
        for cluster in clusters[2:]:
            cluster["load_assignment"]["endpoints"] = loopguard["load_assignment"]["endpoints"]
        return json.dumps(made)

    with stack(CHAT, edit=edit, replicas=2, failure_mode="deny") as made:
        made.replicas[1].signal(signal.SIGKILL)
        made.replicas[1].wait()

        assert {made.post(f"/{number}", headers=user).status for number in range(40)} == {200}


def test_buffer_limit_of_the_values_applies(user: dict[str, str], gateway: Stack) -> None:
    found = gateway.repeat("/v1/chat", 3, body=b"x" * 3_000_000, headers=user)
    with suppress(OSError):  # Envoy need not read on once it has answered
        gateway.post("/v1/chat?large", b"x" * 11_000_000, user)

    assert found == [200, 200, 429]
    assert gateway.envoy.logged("/v1/chat?large")["details"] == "request_payload_too_large"


def test_canary_counts_every_request_and_changes_none(user: dict[str, str], gateway: Stack) -> None:
    def count() -> dict[str, float]:
        metric = gateway.replicas[1].metric
        return {
            action: metric("requests_total", policy="chat", action=action)
            for action in ("allow", "reject")
        }

    before = count()
    found = gateway.repeat("/v1/chat", 5, body=b"y" * 100_000, headers=user)

    assert found == [200, 200, 429, 429, 429]
    eventually(
        lambda: count() == {"allow": before["allow"] + 2, "reject": before["reject"] + 3},
        "the canary's count",
    )
    assert (
        gateway.upstream.seen[-1].header("content-length"),
        len(gateway.upstream.seen[-1].body),
    ) == ("100000", 100_000)


def test_observing_filter_counts_and_never_acts(user: dict[str, str]) -> None:
    with mesh(CASES["istio-shadow"], {"/": "default"}) as made:
        found = made.repeat("/a", 5, body=b"same", headers=user)
        large = made.post("/a", b"x" * 12_000_000, user)
        received = made.upstream.seen[-1]

        def is_third() -> (
            bool
        ):  # on a busy machine, Envoy ends some streams before Loopguard has read them
            found.append(made.post("/a", b"same", user).status)
            return made.loopguard.metric("loops_detected_total", policy="chat") >= 3

        eventually(is_third, "the third loop")
        made.loopguard.stop()
        found.append(made.post("/a", b"same", user).status)

    assert (set(found), large.status, len(received.body)) == ({200}, 200, 12_000_000)


@pytest.mark.parametrize(
    ("envoy", "expected"),
    [
        ({}, ["files"]),
        ({"bodyMode": "tolerant"}, ["plain", "files"]),
        ({"shadowMode": "partial"}, ["plain", "files"]),
        ({"shadowMode": "observability"}, []),
    ],
)
def test_partly_buffered_bodies_are_not_kept_for_retries(
    envoy: Values, expected: list[str]
) -> None:
    """Envoy would send them twice."""
    routes = [
        {"name": "plain"},
        {"name": "chat", "bodyMode": "strict"},
        {"name": "files", "bodyMode": "tolerant"},
    ]
    more: Values = {"istio": {"routes": routes}, "canary": {"enabled": False}, "envoy": envoy}
    shadow = {"shadow": {"enabled": envoy.get("shadowMode") == "partial"}}

    patches = envoy_filter(merged(CASES["istio-gateway"], more, shadow))["spec"]["configPatches"]

    limits = {
        patch["match"]["routeConfiguration"]["vhost"]["route"]["name"]: patch["patch"]["value"].get(
            "per_request_buffer_limit_bytes"
        )
        for patch in patches
        if patch["applyTo"] == "HTTP_ROUTE"
    }
    assert limits == {name: 0 if name in expected else None for name in ("plain", "chat", "files")}


@needs_content_length
def test_strict_and_tolerant_routes_share_one_filter(user: dict[str, str]) -> None:
    both = bundle(
        policy("all", {"pathPrefix": "/"}, limit_keys=["header:x-user-id"]),
        policy("named", {"pathPrefix": "/n"}),
    )
    routes = [{"name": "chat"}, {"name": "files", "bodyMode": "tolerant", "policies": ["named"]}]
    limited: Values = {
        "policies": {"bundle": both},
        "envoy": {"bufferLimitBytes": 99_999, "failureMode": "deny"},
        "canary": {"enabled": False},
    }
    values = merged(CASES["istio-gateway"], {"istio": {"routes": routes}, **limited})
    with mesh(values, {"/chat": "chat", "/files": "files"}) as made:
        small = [made.repeat(path, 3, body=b"same", headers=user) for path in ("/chat", "/files")]
        with suppress(OSError):  # Envoy need not read on once it has answered
            made.post("/chat", b"x" * 1_000_000, user)
        refused = eventually(
            lambda: made.loopguard.metric("uncounted_total", policy="all", reason="too_large"),
            "a 413",
        )
        large = made.repeat("/files", 4, body=b"x" * 1_000_000, headers=user)
        received = made.upstream.seen[-1]
        made.loopguard.stop()
        without = made.post("/files", b"other", user).status

    assert (small, refused, large, without) == ([[200, 200, 429]] * 2, 1, [200] * 4, 500)
    assert (received.header("content-length"), len(received.body)) == ("1000000", 1_000_000)


# ---- Envoy Gateway


def test_envoy_gateway_refuses_holds_and_survives_a_death(user: dict[str, str]) -> None:
    values = merged(CASES["envoy-gateway"], {"envoy": {"failureMode": "deny"}})
    with stack(
        values["policies"]["bundle"],
        edit=lambda text: gateway_configuration(text, values),
        replicas=2,
    ) as made:
        made.send("/once", headers={**user, **RETRY})
        sent = len(made.upstream.seen)
        held = made.repeat("/slow", 8, headers=user)  # by two replicas without a common store
        ignored = made.envoy.stat("http.ingress.ext_proc.override_message_timeout_ignored")
        made.replicas[1].signal(signal.SIGKILL)
        made.replicas[1].wait()
        refused = made.repeat("/v1/chat", 3, body=b"x" * 3_000_000, headers=user)
        found = {made.send(f"/{number}").status for number in range(40)}

    assert (sent, held, ignored, refused, found) == (1, [200] * 8, 6, [200, 200, 429], {200})


# ---- kgateway


@contextmanager
def kgateway(*policies: Object, **more: object) -> Iterator[Stack]:
    loaded = bundle(*policies)
    values = merged(
        CASES["example-kgateway"], {"policies": {"bundle": loaded}, "envoy": dict(more)}
    )
    with stack(loaded, edit=lambda text: kgateway_configuration(text, values)) as made:
        yield made


def test_kgateway_refuses_holds_and_removes_forged_headers(user: dict[str, str]) -> None:
    slow = policy("slow", {"pathPrefix": "/slow"}, action="throttle", max_delay_ms=400)
    with kgateway(policy("chat", {"pathPrefix": "/chat"}), slow) as made:
        refused = made.repeat("/chat", 4, body=b"x" * 3_000_000, headers=user)
        held = made.repeat("/slow", 5, headers={**user, "x-loopguard-steered": "1", **RETRY})
        received = made.upstream.seen[-1]
        ignored = made.envoy.stat(
            "http.ingress.ext_proc.loopguard.override_message_timeout_ignored"
        )
        made.loopguard.stop()
        without = made.send("/chat", headers=user).status

    assert (refused, held, ignored, without) == ([200, 200, 429, 429], [200] * 5, 0, 200)
    assert received.header("x-loopguard-steered") is None


def test_kgateway_sends_addresses_to_policies_that_read_them(user: dict[str, str]) -> None:
    by_address = policy("p", {"pathPrefix": "/"}, limit_keys=["ip:address"])
    by_user = policy("p", {"pathPrefix": "/"}, limit_keys=["header:x-user-id"])
    extensions = [
        of_kind(
            objects(merged(CASES["example-kgateway"], {"policies": {"bundle": bundle(each)}})),
            "GatewayExtension",
        )[0]["spec"]["extProc"]
        for each in (by_address, by_user)
    ]
    with kgateway(by_address) as made:
        refused = made.repeat("/", 3, headers=user)

    assert ["requestAttributes" in extension for extension in extensions] == [True, False]
    assert refused == [200, 200, 429]


def test_kgateway_answers_413_or_500_as_values_say(user: dict[str, str]) -> None:
    chat = policy("chat", {"pathPrefix": "/chat"})
    with kgateway(chat, bufferLimitBytes=99_999, failureMode="deny") as made:
        with suppress(OSError):  # Envoy need not read on once it has answered
            made.post("/chat", b"x" * 1_000_000, user)
        refused = eventually(
            lambda: made.loopguard.metric("uncounted_total", policy="chat", reason="too_large"),
            "a 413",
        )
        made.loopguard.stop()
        without = made.post("/chat", b"other", user).status

    assert (refused, without) == (1, 500)


THEIRS: Values = {"policies": {"existingConfigMap": "theirs"}}


@pytest.mark.parametrize(
    ("values", "timeout", "mode", "fails_open"),
    [
        ({}, "3s500ms", "Buffered", True),
        ({"policies": {"bundle": CHAT}}, "200ms", "Buffered", True),
        (
            {"policies": {"bundle": bundle(policy("p", {"pathPrefix": "/"}, action="throttle"))}},
            "32s",
            "Buffered",
            True,
        ),
        (THEIRS, "35s", "Buffered", True),
        ({**THEIRS, "envoy": {"maxMessageTimeoutSeconds": 10}}, "10s", "Buffered", True),
        ({**THEIRS, "envoy": {"maxMessageTimeoutSeconds": 120}}, "120s", "Buffered", True),
        ({"envoy": {"messageTimeoutMilliseconds": 5_000}}, "5s", "Buffered", True),
        (
            {"envoy": {"bodyMode": "tolerant", "failureMode": "deny"}},
            "3s500ms",
            "BufferedPartial",
            False,
        ),
        (
            {"envoy": {"shadowMode": "partial"}, "shadow": {"enabled": True}},
            "200ms",
            "BufferedPartial",
            True,
        ),
    ],
)
def test_envoy_gateway_timeout_is_that_of_the_longest_throttle(
    values: Values, timeout: str, mode: str, fails_open: bool
) -> None:
    """And no longer: a Loopguard that hangs delays requests by it."""
    (found,) = of_kind(objects(merged(CASES["envoy-gateway"], values)), "EnvoyExtensionPolicy")
    (proc,) = found["spec"]["extProc"]

    assert (
        proc["messageTimeout"],
        proc["processingMode"]["request"]["body"],
        proc["failOpen"],
    ) == (timeout, mode, fails_open)


def test_gateway_in_the_same_namespace_needs_no_grant() -> None:
    there = objects(CASES["envoy-gateway"])
    here = objects(merged(CASES["envoy-gateway"], {"envoyGateway": {"namespace": "guards"}}))

    (grant,) = of_kind(there, "ReferenceGrant")
    (extension,) = of_kind(there, "EnvoyExtensionPolicy")
    backend = extension["spec"]["extProc"][0]["backendRefs"][0]
    assert grant["spec"]["from"][0]["namespace"] == extension["metadata"]["namespace"] == "gateways"
    assert grant["metadata"]["namespace"] == backend["namespace"] == "guards"
    assert of_kind(here, "ReferenceGrant") == []


def test_gateway_without_routes_is_guarded_as_a_whole() -> None:
    gateway: Values = {
        "envoyGateway": {"enabled": True, "clientTrafficPolicy": {"gateway": "public"}}
    }

    watching, enforcing = (
        of_kind(objects(values), "EnvoyExtensionPolicy")[0]["spec"]
        for values in (merged(gateway, DEFAULTS), gateway)
    )

    assert watching["targetRefs"] == [
        {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "public"}
    ]
    assert [spec["extProc"][0]["messageTimeout"] for spec in (watching, enforcing)] == [
        "200ms",
        "32s",
    ]


# ---- Objects for Istio


@each_istio
def test_filters_call_services_of_the_release(values: Values) -> None:
    made = objects(values)
    domain = values["istio"].get("clusterDomain", "cluster.local")
    hosts = {
        f"{item['metadata']['name']}.{item['metadata']['namespace']}.svc.{domain}"
        for item in of_kind(made, "Service")
    }
    asked = {name.removeprefix("outbound|50051||") for name in cluster_names(envoy_filter(values))}
    rules = {
        item["spec"]["host"]: item["spec"]["trafficPolicy"]
        for item in of_kind(made, "DestinationRule")
    }

    assert asked == rules.keys() <= hosts
    # Without these, a call's authority would be its cluster's name, which sidecars refuse.
    text = json.dumps(envoy_filter(values))
    named = re.findall(r'"authority": "([^"]*)"', text)
    calls = len(re.findall(r'"(?:envoy_grpc|grpc_health_check)":', text))
    assert (set(named), len(named)) == (asked, calls)
    for config in filters(values).values():
        grpc = config["grpc_service"]["envoy_grpc"]
        assert grpc["cluster_name"] == f"outbound|50051||{grpc['authority']}"
    for policy_ in rules.values():
        assert policy_["connectionPool"]["http"]["http2MaxRequests"] > 100_000
        wanted = values["istio"].get("tls", "ISTIO_MUTUAL")
        assert policy_.get("tls", {"mode": "AUTO"})["mode"] == wanted


def filters(values: Values) -> dict[str, Object]:
    """The configuration of each ext_proc filter by its name, in the order of requests."""
    patches = envoy_filter(values)["spec"]["configPatches"]
    added = [patch["patch"]["value"] for patch in patches if patch["applyTo"] == "HTTP_FILTER"]
    configs = {value["name"]: unwrap(value["typed_config"]) for value in added}
    return {name: config for name, config in configs.items() if "grpc_service" in config}


SCOPE = {"key": "x-loopguard-scope", "value": "gateway"}
OF_CANARY = {"key": "x-loopguard-scope", "value": "gateway-canary"}
LIMIT = {"key": "x-loopguard-buffer-limit", "value": "10485760"}


@pytest.mark.parametrize(
    ("more", "stable", "canary"),
    [
        ({}, [SCOPE], [OF_CANARY]),
        ({"istio": {"scope": ""}}, None, None),
        ({"envoy": {"bodyMode": "tolerant"}}, [SCOPE, LIMIT], [OF_CANARY]),
        (
            {"istio": {"routes": [{"name": "f", "bodyMode": "tolerant"}]}},
            [SCOPE, LIMIT],
            [OF_CANARY],
        ),
    ],
)
def test_streams_carry_their_scope_and_buffer_limit(
    more: Values, stable: object, canary: object
) -> None:
    """The limit only where bodies may be cut off."""
    found = filters(merged(CASES["istio-gateway"], more))

    told = [
        (name, config["grpc_service"].get("initial_metadata")) for name, config in found.items()
    ]
    assert told == [(f"{FILTER}-canary", canary), (FILTER, stable)]


def test_enforcing_canary_is_not_attached() -> None:
    """A filter cannot give it a share of the traffic, and two filters that act would both count."""
    values = merged(
        CASES["istio-gateway"],
        {"canary": {"shadow": {"enabled": False}}, "store": {"url": "redis://redis"}},
    )

    assert list(filters(values)) == [FILTER]
    assert CANARY_CLUSTER in cluster_names(envoy_filter(CASES["istio-gateway"]))
    assert CANARY_CLUSTER not in cluster_names(envoy_filter(values))


def test_two_releases_on_one_gateway_guard_a_route_each(user: dict[str, str]) -> None:
    values = merged(
        CASES["istio-gateway"],
        {"canary": {"enabled": False}, "istio": {"routes": [{"name": "chat"}], "scope": ""}},
    )
    other = merged(values, {"istio": {"routes": [{"name": "unnamed"}]}})
    (second,) = of_kind(objects(other, namespace="others"), "EnvoyFilter")
    routes = {"/v1/chat/a": "chat", "/v1/chat/b": "unnamed"}

    def both(text: str) -> str:
        made = json.loads(configuration(text, values, routes))
        clusters = made["static_resources"]["clusters"]
        clusters.append(
            {**without_health(clusters[-1]), "name": CLUSTER.replace("guards", "others")}
        )
        endpoints = [item["load_assignment"]["endpoints"][0]["lb_endpoints"] for item in clusters]
        endpoints[-2][:], endpoints[-1][:] = endpoints[0][:1], endpoints[0][1:]
        return json.dumps(patched(made, second))

    with stack(values["policies"]["bundle"], edit=both, replicas=2) as made:
        found = [made.repeat(path, 3, body=b"x", headers=user) for path in routes]
        counted = [replica.metric("requests_total", policy="chat") for replica in made.replicas]

    assert (found, counted) == ([[200, 200, 429]] * 2, [3, 3])


def test_envoy_filter_elsewhere_is_named_after_its_namespace() -> None:
    found = [
        envoy_filter({"istio": {**ON, "namespace": namespace}})
        for namespace in ("guards", "istio-ingress")
    ]

    assert [each["metadata"]["name"] for each in found] == ["lg-loopguard", "guards-lg-loopguard"]


@each_istio
def test_patches_stay_in_their_context_and_port(values: Values) -> None:
    istio, found = values["istio"], envoy_filter(values)
    context = "SIDECAR_INBOUND" if "waypoint" in istio else istio.get("context", "GATEWAY")
    patches = found["spec"]["configPatches"]
    clusters = [patch["match"] for patch in patches if patch["applyTo"] == "CLUSTER"]
    others = [patch["match"] for patch in patches if patch["applyTo"] != "CLUSTER"]

    assert {match["context"] for match in others} == {context}
    assert {match["context"] for match in clusters} == {
        "GATEWAY" if context == "GATEWAY" else "SIDECAR_OUTBOUND"
    }
    assert {match["cluster"]["name"] for match in clusters} == set(cluster_names(found))
    ports = {
        match.get("listener", {}).get("portNumber", 0)
        for match in others
        if "routeConfiguration" not in match
    }
    assert ports == {istio.get("listenerPort", 0)}
    assert not any("portNumber" in match.get("routeConfiguration", {}) for match in others)


@pytest.mark.parametrize(
    ("values", "labels", "annotations"),
    [
        ({}, {}, {}),
        (
            {"istio": ON, "drain": {"delaySeconds": 2.5}},
            {"sidecar.istio.io/inject": "true"},
            {
                "proxy.istio.io/config": '{"terminationDrainDuration":"38s"}',
                "traffic.sidecar.istio.io/excludeInboundPorts": "9900",
            },
        ),
        ({"istio": {**ON, "tls": "AUTO"}}, {}, {}),
        (
            {
                "istio": ON,
                "podLabels": {"sidecar.istio.io/inject": "false"},
                "podAnnotations": {
                    "proxy.istio.io/config": "{}",
                    "traffic.sidecar.istio.io/excludeInboundPorts": "8080",
                },
            },
            {"sidecar.istio.io/inject": "false"},
            {"proxy.istio.io/config": "{}", "traffic.sidecar.istio.io/excludeInboundPorts": "8080"},
        ),
    ],
)
def test_pods_have_the_sidecar_that_mtls_needs(
    values: Values, labels: Values, annotations: Values
) -> None:
    """It stays while the pod drains, and leaves metrics alone. Values of the user come first."""
    (deployment,) = of_kind(objects(values), "Deployment")
    template = deployment["spec"]["template"]["metadata"]

    assert {key: value for key, value in template["labels"].items() if "istio" in key} == labels
    assert template.get("annotations", {}) == annotations


def test_istioctl_analyze_finds_nothing() -> None:
    """It wants a priority for relative patches (IST0151), and a version of each workload."""
    made = objects(CASES["istio-gateway"])

    (found,) = of_kind(made, "EnvoyFilter")
    assert found["spec"]["priority"] != 0
    for deployment in of_kind(made, "Deployment"):
        assert deployment["spec"]["template"]["metadata"]["labels"]["version"]
        # Otherwise, no upgrade could change it
        assert "version" not in deployment["spec"]["selector"]["matchLabels"]


@pytest.mark.parametrize(("sidecar", "native"), [(False, None), (True, "true")])
def test_test_pod_ends_with_or_without_a_sidecar(sidecar: bool, native: str | None) -> None:
    (pod,) = of_kind(objects({"istio": {"testPodSidecar": sidecar}}), "Pod")

    assert pod["metadata"]["labels"]["sidecar.istio.io/inject"] == str(sidecar).lower()
    assert pod["metadata"]["annotations"].get("sidecar.istio.io/nativeSidecar") == native


@pytest.mark.parametrize(
    ("case", "command"),
    [
        ("istio-gateway", "istioctl -n istio-ingress proxy-config routes"),
        ("istio-sidecar", "istioctl -n guards proxy-config routes"),
        ("envoy-gateway", "kubectl -n gateways describe envoyextensionpolicy"),
    ],
)
def test_notes_name_the_command_and_every_route(case: str, command: str) -> None:
    notes = rendered(CASES[case])["loopguard/templates/NOTES.txt"]

    assert command in notes
    assert "No route uses it yet" not in notes
    listed = "Routes in istio.routes:\n  chat\n  named (in api.example.com:443)\n  own\n"
    assert (listed in notes) == (case == "istio-gateway")


@pytest.mark.skipif(
    shutil.which("jq") is None,
    reason="jq is not installed: the command that the notes print is NOT tested",
)
def test_command_of_the_notes_prints_guarded_routes() -> None:
    (program,) = re.findall(
        r"jq -r '(.*?)'", rendered(CASES["istio-gateway"])["loopguard/templates/NOTES.txt"]
    )
    routes = [
        {"name": "chat", "typedPerFilterConfig": {FILTER: {}}},
        {"name": "other", "typedPerFilterConfig": {"x": {}}},
        {},
    ]
    printed = json.dumps([{}, {"virtualHosts": [{"name": "empty"}, {"routes": routes}]}])

    assert subprocess.check_output(["jq", "-r", program], input=printed, text=True) == "chat\n"


def test_values_in_the_docs_render() -> None:
    text = (ROOT / "docs" / "mesh.md").read_text()
    blocks = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", text, re.DOTALL))
    by_api, by_route, *others, _ = blocks  # the last one is of agentgateway itself
    inline = re.search(r"`(envoyGateway: .*?)` ", text)
    assert inline is not None
    strict = {"policies": {"bundle": bundle(policy("strict", {"pathPrefix": "/"}))}}

    found = filters(by_api)
    named = filters(merged(by_api, strict, by_route))
    extension = of_kind(objects(yaml.safe_load(inline[1])), "EnvoyExtensionPolicy")

    policies = {"EnvoyFilter", "TrafficPolicy", "AgentgatewayPolicy"}

    assert list(found) == list(named) == [FILTER]
    assert [policies & {item["kind"] for item in objects(values)} for values in others] == [
        {"EnvoyFilter"},
        {"TrafficPolicy"},
        {"AgentgatewayPolicy"},
    ]
    assert [item["spec"]["targetRefs"][0]["name"] for item in extension] == ["chat"]
