"""What the chart renders for meshes, judged and run by the real Envoy."""

from __future__ import annotations

import copy
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_model import fake_model
from tool_agents import Job, chat_agent

from tests.support import ROOT
from tests.support.agents import CHECK, again, sdk_errors
from tests.support.chart import CASES, DEFAULTS, NAME, Object, Values, environment, merged, objects, of_kind, one, rendered
from tests.support.chart.istio import HCM, http_manager, patched, without_loopguard
from tests.support.documents import bundle, policy, read_yaml
from tests.support.harness import ENVOY, Process, Stack, be_patient, envoy_version, eventually, stack
from tests.support.meshes import FILTER, ISTIO, cluster_names, each_istio, envoy_filter, gateway_configuration, unwrap
from tests.support.model_paths import MODEL_CALLS, OTHER_CALLS

ON: Values = {"enabled": True, "namespace": "istio-ingress", "routes": [{"name": "a"}]}
CLUSTER = "outbound|50051||lg-loopguard.guards.svc.cluster.local"
CANARY_CLUSTER = "outbound|50051||lg-loopguard-canary.guards.svc.cluster.local"

needs_content_length = pytest.mark.skipif(
    envoy_version() < (1, 38), reason="allow_content_length_header is not in this Envoy: the tolerant body mode is NOT tested"
)


# ---- Its values are messages of Envoy

_PARSER = """
import importlib, json, sys
from google.protobuf.json_format import ParseDict, ParseError
MODULES = {
    "CLUSTER": ("envoy.config.cluster.v3.cluster_pb2", "Cluster"),
    "LISTENER": ("envoy.config.listener.v3.listener_pb2", "Listener"),
    "NETWORK_FILTER": ("envoy.config.listener.v3.listener_components_pb2", "Filter"),
    "HTTP_ROUTE": ("envoy.config.route.v3.route_components_pb2", "Route"),
    "VIRTUAL_HOST": ("envoy.config.route.v3.route_components_pb2", "VirtualHost"),
    "HTTP_FILTER": (
        "envoy.extensions.filters.network.http_connection_manager.v3.http_connection_manager_pb2", "HttpFilter"
    ),
}
importlib.import_module(MODULES["HTTP_FILTER"][0])  # what an Any holds has to be there as well
for module in (
    "access_loggers.grpc.v3.als",
    "common.matching.v3.extension_matcher",
    "matching.common_inputs.network.v3.network_inputs",
    "matching.input_matchers.metadata.v3.metadata",
    "filters.common.matcher.action.v3.skip_action",
    "filters.http.ext_proc.v3.ext_proc",
    "filters.http.json_to_metadata.v3.json_to_metadata",
    "http.early_header_mutation.header_mutation.v3.header_mutation",
    "retry.host.previous_hosts.v3.previous_hosts",
    "upstreams.http.v3.http_protocol_options",
):
    importlib.import_module(f"envoy.extensions.{module}_pb2")
importlib.import_module("envoy.type.matcher.v3.http_inputs_pb2")
for place, value in json.load(sys.stdin):
    module, name = MODULES[place]
    try:
        ParseDict(value, getattr(importlib.import_module(module), name)())
        print("OK")
    except ParseError as error:
        print(" ".join(str(error).split()))
"""


def read_as_messages(patches: list[Object]) -> list[str]:
    """What the official messages say to each patch, in a process of its own: they and ours cannot be loaded into one."""
    patches = [patch for patch in patches if "sse_to_metadata" not in patch["patch"]["value"].get("name", "")]  # newer as well
    values = copy.deepcopy([patch["patch"]["value"] for patch in patches])
    for value in values:
        value.get("typed_config", {}).pop("allow_content_length_header", None)  # newer than these messages; Envoy knows it
    given = json.dumps([(patch["applyTo"], value) for patch, value in zip(patches, values, strict=True)])
    done = subprocess.run([sys.executable, "-c", _PARSER], input=given, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_every_patch_is_a_message() -> None:
    """The free-form values of every case parse as the messages that they are patched into, down to what is in an Any."""
    patches = [patch for values in ISTIO.values() for patch in envoy_filter(values)["spec"]["configPatches"]]

    places = {"LISTENER", "NETWORK_FILTER", "HTTP_FILTER", "VIRTUAL_HOST", "HTTP_ROUTE", "CLUSTER"}
    assert {patch["applyTo"] for patch in patches} == places
    assert set(read_as_messages(patches)) == {"OK"}


# ---- Envoy takes it


def configuration(text: str, values: Values, routes: dict[str, str], edit: Callable[[Object], object] = bool) -> str:
    """An Envoy as Istio would configure it, with the EnvoyFilter of these values.

    Args:
        text: of `loopguard envoy-config`; its clusters and ports are taken over.
        values: of the chart.
        routes: names by path prefix, the first that matches is taken.
        edit: changes the configuration last.
    """
    made = without_loopguard(read_yaml(text))
    listed = [
        {"name": name, "match": {"prefix": prefix}, "route": {"cluster": "upstream", "timeout": "0s"}}
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
    patched(made, found)
    edit(made)
    return json.dumps(made)


def without_health(cluster: Object) -> Object:
    """A copy that has none of what finds out that a Loopguard hangs, as Istio's clusters do by themselves."""
    copied = copy.deepcopy(cluster)
    for key in ("health_checks", "outlier_detection", "common_lb_config"):
        del copied[key]
    return copied


@each_istio
def test_envoy_takes_the_patched_configuration(values: Values, tmp_path: Path) -> None:
    """A listener with every patch applied is one that Envoy accepts."""
    envoy = values.get("envoy", {})
    newer = envoy.get("bodyMode") == "tolerant" or envoy.get("usage") == "exact"  # both need Envoy 1.38
    names = [route["name"] for route in values["istio"].get("routes", [{"name": "any"}])]
    bootstrap = ROOT / "envoy" / "bootstrap.yaml"
    file = tmp_path / "envoy.yaml"
    file.write_text(configuration(bootstrap.read_text(), values, {f"/{name}": name for name in names}))

    done = subprocess.run([ENVOY, "--mode", "validate", "-c", str(file)], capture_output=True, text=True, check=False)

    assert (done.returncode == 0) == (not newer or envoy_version() >= (1, 38)), done.stderr


# ---- And it works


USER = {"x-user-id": "ann"}
ROUTES = {"/v1/chat": "chat", "/named": "named", "/own": "own", "/": "unnamed"}


@contextmanager
def mesh(values: Values, routes: dict[str, str], *arguments: str, **more: Any) -> Iterator[Stack]:  # noqa: ANN401  # of `stack`
    """Loopguard with a sidecar behind an Envoy with the EnvoyFilter of these values, and with their policies."""
    (policies,) = one(objects(values), "ConfigMap", f"{NAME}-policies")["data"].values()
    with tempfile.TemporaryDirectory(prefix="sidecar") as folder, ExitStack() as ended:

        def edit(text: str) -> str:
            made, inside = with_sidecars(json.loads(configuration(text, values, routes)), folder)
            be_patient(inside)
            (file := Path(folder) / "envoy.json").write_text(json.dumps(inside))
            sidecar = Process([ENVOY, "-c", str(file), "--use-dynamic-base-id", "-l", "warning"], Path(folder) / "envoy.log")
            ended.callback(sidecar.stop)
            eventually(lambda: len([*Path(folder).glob("*.sock")]) == len(inside["static_resources"]["listeners"]), "sidecars")
            return json.dumps(made)

        with stack(policies, *arguments, edit=edit, **more) as made:
            for name in cluster_names(envoy_filter(values)):
                eventually(partial(made.envoy.stat, f"cluster.{name}.membership_healthy"), name)
            yield made


def with_sidecars(gateway: Object, folder: str) -> tuple[Object, Object]:
    """The gateway's configuration with its mesh clusters sent through sidecars, and that of an Envoy which is these sidecars.

    What counts of a sidecar is that it is Envoy's own HTTP/2 server: it reads every request's `:authority` before it routes.
    """
    listeners: list[Object] = []
    clusters: list[Object] = []
    for cluster in gateway["static_resources"]["clusters"]:
        if not cluster["name"].startswith("outbound|"):
            continue
        name = f"inbound-{len(listeners)}"
        clusters.append({**copy.deepcopy(cluster), "name": name})
        pipe = {"pipe": {"path": f"{folder}/{name}.sock"}}
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": [{"endpoint": {"address": pipe}}]}]
        manager = {
            "@type": f"type.googleapis.com/envoy.extensions.filters.network.{HCM.rpartition('.')[2]}.v3.HttpConnectionManager",
            "stat_prefix": name,
            "codec_type": "HTTP2",
            "http_filters": [copy.deepcopy(http_manager(gateway)["http_filters"][-1])],
            "route_config": {
                "virtual_hosts": [
                    {
                        "name": "all",
                        "domains": ["*"],
                        "routes": [{"match": {"prefix": "/"}, "route": {"cluster": name, "timeout": "0s"}}],
                    }
                ]
            },
        }
        chain = {"filters": [{"name": HCM, "typed_config": manager}]}
        listeners.append({"name": name, "address": pipe, "filter_chains": [chain]})
    return gateway, {"static_resources": {"listeners": listeners, "clusters": clusters}}


@pytest.fixture(scope="module")
def gateway() -> Iterator[Stack]:
    """The case of a gateway; the first of two Loopguards is asked by the stable filter, the second by the canary's."""
    with mesh(CASES["istio-gateway"], ROUTES, replicas=2) as made:
        yield made


def statuses(made: Stack, path: str, times: int, user: str, **more: Any) -> list[int]:  # noqa: ANN401  # of `send`
    """The same request several times."""
    return [made.send(path, headers={"x-user-id": user}, **more).status for _ in range(times)]


def test_the_rendered_filter_refuses_a_loop(gateway: Stack) -> None:
    """On a named route the third identical request is refused, by the policy whose selector takes it."""
    found = statuses(gateway, "/v1/chat", 3, "loop", method="POST", body=b"same")
    refused = gateway.send("/v1/chat", method="POST", body=b"same", headers={"x-user-id": "loop"})

    assert found == [200, 200, 429]
    assert refused.headers["x-loopguard-policy"] == "chat"


@needs_content_length
def test_a_gateway_tells_what_answers_cost() -> None:
    """Through the sidecar, with an entry for each request of a session on a named route; tokens are read in the answer."""
    with mesh(CASES["istio-sessions"], ROUTES) as made:
        session = {"x-user-id": "ann", "x-session-id": "s"}
        for path in ("/v1/chat", "/other"):
            answer = made.send(path, method="POST", body=b"{}", headers={**session, "accept-encoding": "gzip"})
            assert answer.status == 200
        eventually(lambda: made.loopguard.metric("access_log_entries_total", result="taken"), "an entry")
        read = made.envoy.stat("json_to_metadata.resp.success")
        asked = [seen.header("accept-encoding") for seen in made.upstream.seen]

    assert (read, asked) == (1, [None, "gzip"])


BY_API: Values = merged(DEFAULTS, {"istio": {"enabled": True, "namespace": "istio-ingress"}})
"""The defaults on Istio: what `helm install` makes of these two values alone."""


@pytest.mark.parametrize("enforces", [False, True])
def test_the_default_release_finds_an_agent_that_loops(enforces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rendered policies and variables, an agent that shows only its API key is reported, or also refused."""
    enforcing = {"shadow": {"enabled": False}, "networkPolicy": {"gateways": [{"podSelector": {}}]}}
    values = merged(BY_API, enforcing if enforces else {})
    for name, value in environment(one(objects(values), "Deployment")).items():
        monkeypatch.setenv(name, value)
    with fake_model() as model, mesh(values, {"/": "any"}, "--log-format", "text", upstream=f"127.0.0.1:{model.port}") as made:
        model.scripts["sk-a"] = again([CHECK])
        tools = {"check": lambda **_: "Error: there is no build 17"}
        job = Job(f"http://127.0.0.1:{made.envoy.port}/team-a", "", ["Tell me when it is done."], tools, key="sk-a")
        refused = pytest.raises(sdk_errors()) if enforces else nullcontext()
        with refused:
            turns = [*islice(chat_agent(job), 9)]
        reported = made.loopguard.metric("loops_detected_total", policy="agents")

    assert reported > 0
    assert model.asked["sk-a"] == (7 if enforces else len(turns))


@pytest.fixture(scope="module")
def by_api() -> Iterator[Stack]:
    """A gateway of which no route is named."""
    with mesh(BY_API, {"/": "any"}) as made:
        yield made


def test_requests_of_model_apis_are_shown_on_any_route(by_api: Stack) -> None:
    """Those of which a selector by API knows the path, with a query or without; no others, however large, are shown."""
    name = f"http.ingress.ext_proc.{FILTER}.streams_started"
    before = by_api.envoy.stat(name)
    for path in MODEL_CALLS:
        assert [by_api.send(f"{path}{query}", method="POST", body=b"{}").status for query in ("", "?a=b")] == [200, 200]
    shown = by_api.envoy.stat(name)
    for path in OTHER_CALLS:
        assert by_api.send(path, method="POST", body=b"{}").status == 200
    assert [by_api.send("/files", method="POST", body=b"x" * 12_000_000).status for _ in range(9)] == [200] * 9

    assert shown - before == 2 * len(MODEL_CALLS)
    assert by_api.envoy.stat(name) == shown
    assert by_api.loopguard.metric("unmatched_total") == 0


def count_streams(made: Stack) -> list[int]:
    """How often Envoy has asked, by the stable filter and by the canary's."""
    return [made.envoy.stat(f"http.ingress.ext_proc.{name}.streams_started") for name in (FILTER, f"{FILTER}-canary")]


def test_metrics_say_which_filter_asked(gateway: Stack) -> None:
    """Stable filter and canary count apart, for Prometheus as well."""
    started = count_streams(gateway)
    statuses(gateway, "/v1/chat", 1, "apart", method="POST", body=b"x")

    assert [after - before for before, after in zip(started, count_streams(gateway), strict=True)] == [1, 1]
    assert "envoy_http_ext_proc_loopguard_guards_lg_loopguard_failure_mode_allowed" in gateway.envoy.admin("/stats/prometheus")


def test_other_routes_never_meet_loopguard(gateway: Stack) -> None:
    """The filter is off, except on named routes."""
    before = [gateway.loopguard.metric("unmatched_total"), *count_streams(gateway)]

    found = statuses(gateway, "/elsewhere", 4, "other")

    after = [gateway.loopguard.metric("unmatched_total"), *count_streams(gateway)]
    assert found == [200] * 4
    assert after == before


def test_a_route_names_its_policies(gateway: Stack) -> None:
    """A policy whose selector takes no such path acts on the route that names it, and on no other."""
    assert statuses(gateway, "/named/a", 2, "named") == [200, 429]
    assert gateway.send("/named/a", headers={"x-user-id": "named"}).headers["x-loopguard-policy"] == "strict"


def test_a_route_brings_its_own_policies(gateway: Stack) -> None:
    """What stands in the route's metadata acts: a warning that reaches upstream and client, and a throttle."""
    answers = [gateway.send("/own/a", headers={"x-user-id": "own"}) for _ in range(2)]
    warned = [seen.header("x-fairvisor-warning") for seen in gateway.upstream.seen if seen.target == "/own/a"]
    throttled = statuses(gateway, "/own/slow", 3, "slow")

    assert [answer.headers.get("x-fairvisor-warning") for answer in answers] == [None, "loop_warn"]
    assert warned == [None, "loop_warn"]
    assert throttled == [200] * 3
    assert gateway.loopguard.metric("requests_total", policy="slow", action="throttle") == 2
    assert gateway.envoy.stat(f"http.ingress.ext_proc.{FILTER}.override_message_timeout_received") >= 2
    assert gateway.loopguard.metric("handover_errors_total") == 0


RETRY = {"x-envoy-retry-on": "retriable-status-codes", "x-envoy-retriable-status-codes": "200", "x-envoy-max-retries": "5"}


def test_one_count_is_one_upstream_request(gateway: Stack) -> None:
    """A client in a private network cannot have Envoy send its request again and again."""
    gateway.upstream.seen.clear()

    gateway.send("/v1/chat?once", headers={"x-user-id": "once", **RETRY})

    assert [seen.target for seen in gateway.upstream.seen] == ["/v1/chat?once"]


@pytest.mark.parametrize("case", ["istio-gateway", "istio-sidecar"])
def test_a_dead_pod_costs_no_request_anything(case: str) -> None:
    """Every request that finds its Loopguard dead is decided by another one."""
    plain: Values = {
        "envoy": {"failureMode": "deny", "bodyMode": "strict"},
        "canary": {"enabled": False},
        "istio": {"routes": [{"name": "default"}]},
    }
    values = merged(CASES[case], {**plain, "policies": {"bundle": bundle(policy("chat", {"pathPrefix": "/"}))}})

    def edit(text: str) -> str:
        made = json.loads(configuration(text, values, {"/": "default"}))
        loopguard, *_ = clusters = made["static_resources"]["clusters"]
        for cluster in clusters[2:]:
            cluster["load_assignment"]["endpoints"] = loopguard["load_assignment"]["endpoints"]
        return json.dumps(made)

    with stack(values["policies"]["bundle"], edit=edit, replicas=2, failure_mode="deny") as made:
        made.replicas[1].signal(signal.SIGKILL)
        made.replicas[1].wait()

        found = {made.send(f"/{number}", method="POST", headers=USER).status for number in range(40)}

    assert found == {200}


def test_the_buffer_limit_is_raised_and_kept(gateway: Stack) -> None:
    """A body above Envoy's default of 1 MiB is looked at, one above the limit of the values is too large."""
    found = statuses(gateway, "/v1/chat", 3, "large", method="POST", body=b"x" * 3_000_000)
    with suppress(OSError):  # Envoy need not read on once it has answered
        gateway.send("/v1/chat?large", method="POST", body=b"x" * 11_000_000, headers={"x-user-id": "large"})

    assert found == [200, 200, 429]
    assert gateway.envoy.logged("/v1/chat?large")["details"] == "request_payload_too_large"


def test_the_canary_sees_what_the_stable_filter_sees(gateway: Stack) -> None:
    """It counts every request, refused ones included, and no client notices; the upstream gets what the client sent."""
    canary = gateway.replicas[1]

    before = {action: canary.metric("requests_total", policy="chat", action=action) for action in ("allow", "reject")}
    found = statuses(gateway, "/v1/chat", 5, "canary", method="POST", body=b"y" * 100_000)

    assert found == [200, 200, 429, 429, 429]
    for action, times in {"allow": 2, "reject": 3}.items():
        eventually(
            lambda action=action, times=times: (  # type: ignore[misc]  # defaults bind the loop's values
                canary.metric("requests_total", policy="chat", action=action) == before[action] + times
            ),
            f"the canary's count of {action}",
        )
    received = gateway.upstream.seen[-1]
    assert (received.header("content-length"), len(received.body)) == ("100000", 100_000)


def test_an_observing_filter_never_acts() -> None:
    """With observability_mode an enforcing policy counts but refuses no request, and a body above the limit passes."""
    values = CASES["istio-shadow"]
    with mesh(values, {"/": "default"}) as made:
        found = statuses(made, "/a", 5, "ann", method="POST", body=b"same")
        large = made.send("/a", method="POST", body=b"x" * 12_000_000, headers=USER)
        received = made.upstream.seen[-1]

        def is_third() -> bool:  # on a busy machine, Envoy ends some streams before Loopguard has read them
            made.send("/a", method="POST", body=b"same", headers=USER)
            return made.loopguard.metric("loops_detected_total", policy="chat") >= 3

        counted = eventually(is_third, "the third loop")
        made.loopguard.stop()
        without = made.send("/a", method="POST", body=b"same", headers=USER)

    assert found == [200] * 5
    assert (large.status, len(received.body)) == (200, 12_000_000)
    assert counted
    assert without.status == 200


@needs_content_length
@pytest.mark.parametrize("failure_mode", ["allow", "deny"])
def test_a_tolerant_filter_lets_large_bodies_pass(failure_mode: str) -> None:
    """A body above the limit is not counted, but it passes; whether requests do without Loopguard is the failure mode's."""
    chat = policy("chat", {"pathPrefix": "/"}, limit_keys=["header:x-user-id"])
    values = merged(CASES["istio-sidecar"], {"policies": {"bundle": bundle(chat)}, "envoy": {"failureMode": failure_mode}})
    with mesh(values, {"/": "default"}) as made:
        small = statuses(made, "/a", 3, "ann", method="POST", body=b"same")
        large = statuses(made, "/a", 4, "ann", method="POST", body=b"x" * 12_000_000)
        uncounted = made.loopguard.metric("uncounted_total", reason="body_truncated")
        received = made.upstream.seen[-1]
        made.loopguard.stop()
        without = made.send("/a", method="POST", body=b"other", headers=USER).status

    assert small == [200, 200, 429]
    assert large == [200] * 4
    assert uncounted == 4
    assert (received.header("content-length"), len(received.body)) == ("12000000", 12_000_000)
    assert without == (200 if failure_mode == "allow" else 500)


@pytest.mark.parametrize(
    ("envoy", "expected"),
    [
        ({}, ["files"]),
        ({"bodyMode": "tolerant"}, ["plain", "files"]),
        ({"shadowMode": "partial"}, ["plain", "files"]),
        ({"shadowMode": "observability"}, []),
    ],
)
def test_what_is_collected_in_parts_is_not_kept_for_retries(envoy: Values, expected: list[str]) -> None:
    """Envoy would send it twice. Bodies that are collected as a whole, or not at all, are kept."""
    routes = [{"name": "plain"}, {"name": "chat", "bodyMode": "strict"}, {"name": "files", "bodyMode": "tolerant"}]
    shadow = {"shadow": {"enabled": envoy.get("shadowMode") == "partial"}}
    made = envoy_filter(
        merged(CASES["istio-gateway"], {"istio": {"routes": routes}, "canary": {"enabled": False}, "envoy": envoy}, shadow)
    )

    patches = [patch for patch in made["spec"]["configPatches"] if patch["applyTo"] == "HTTP_ROUTE"]
    limits = {
        patch["match"]["routeConfiguration"]["vhost"]["route"]["name"]: patch["patch"]["value"].get(
            "per_request_buffer_limit_bytes"
        )
        for patch in patches
    }

    assert limits == {name: 0 if name in expected else None for name in ("plain", "chat", "files")}


@needs_content_length
def test_one_route_of_a_gateway_is_tolerant() -> None:
    """Strict chat and tolerant uploads pass one filter: above the limit one gets a 413 and the other passes as it was sent."""
    both = bundle(policy("all", {"pathPrefix": "/"}, limit_keys=["header:x-user-id"]), policy("named", {"pathPrefix": "/n"}))
    routes = [{"name": "chat"}, {"name": "files", "bodyMode": "tolerant", "policies": ["named"]}]
    values = merged(
        CASES["istio-gateway"],
        {
            "istio": {"routes": routes},
            "canary": {"enabled": False},
            "policies": {"bundle": both},
            "envoy": {"bufferLimitBytes": 99_999},
        },
    )
    with mesh(values, {"/chat": "chat", "/files": "files"}) as made:
        small = [statuses(made, path, 3, "small", method="POST", body=b"same") for path in ("/chat", "/files")]
        with suppress(OSError):  # Envoy need not read on once it has answered
            made.send("/chat", method="POST", body=b"x" * 1_000_000, headers=USER)
        refused = eventually(lambda: made.loopguard.metric("uncounted_total", policy="all", reason="too_large"), "a 413")
        large = statuses(made, "/files", 4, "large", method="POST", body=b"x" * 1_000_000)
        received = made.upstream.seen[-1]

    assert small == [[200, 200, 429]] * 2
    assert refused == 1
    assert large == [200] * 4
    assert (received.header("content-length"), len(received.body)) == ("1000000", 1_000_000)


# ---- Envoy Gateway


def test_a_gateway_refuses_holds_and_buffers() -> None:
    """As Envoy Gateway runs it, a loop is refused, a throttle held without max_message_timeout, and a large body looked at."""
    values = merged(CASES["envoy-gateway"], {"envoy": {"failureMode": "deny"}})
    policies = values["policies"]["bundle"]
    with stack(policies, edit=lambda text: gateway_configuration(text, values)) as made:
        refused = statuses(made, "/v1/chat", 3, "ann", method="POST", body=b"x" * 3_000_000)
        held = statuses(made, "/slow", 4, "ann")
        ignored = made.envoy.stat("http.ingress.ext_proc.override_message_timeout_ignored")

    assert refused == [200, 200, 429]
    assert held == [200] * 4
    assert ignored == 3


def test_a_gateway_sends_each_request_once_and_asks_the_living() -> None:
    """As Envoy Gateway runs it, no client multiplies its request, and a Loopguard that has died costs next to nothing."""
    values = merged(CASES["envoy-gateway"], {"envoy": {"failureMode": "deny"}})
    policies = bundle(policy("all", {"pathPrefix": "/"}, limit_keys=["ip:address"]))
    with stack(policies, edit=lambda text: gateway_configuration(text, values), replicas=2) as made:
        made.send("/once", headers=RETRY)
        sent = len(made.upstream.seen)
        made.replicas[1].signal(signal.SIGKILL)
        made.replicas[1].wait()
        found = {made.send(f"/{number}").status for number in range(40)}

    assert sent == 1
    assert found == {200}


@pytest.mark.parametrize(
    ("values", "timeout"),
    [
        ({}, "3s500ms"),
        ({"policies": {"bundle": bundle(policy("quick", {"pathPrefix": "/"}))}}, "200ms"),
        ({"policies": {"bundle": bundle(policy("longest", {"pathPrefix": "/"}, action="throttle"))}}, "32s"),
        ({"policies": {"existingConfigMap": "theirs"}}, "35s"),
        ({"policies": {"existingConfigMap": "theirs"}, "envoy": {"maxMessageTimeoutSeconds": 10}}, "10s"),
        ({"policies": {"existingConfigMap": "theirs"}, "envoy": {"maxMessageTimeoutSeconds": 120}}, "120s"),
        ({"envoy": {"messageTimeoutMilliseconds": 5_000}}, "5s"),
    ],
)
def test_a_gateways_timeout_holds_the_longest_throttle(values: Values, timeout: str) -> None:
    """It is no longer than the policies need, so that a Loopguard that hangs delays requests no longer than it must."""
    (found,) = of_kind(objects(merged(CASES["envoy-gateway"], values)), "EnvoyExtensionPolicy")

    assert found["spec"]["extProc"][0]["messageTimeout"] == timeout


@pytest.mark.parametrize(
    ("values", "mode", "open_"),
    [
        ({}, "Buffered", True),
        ({"envoy": {"bodyMode": "tolerant", "failureMode": "deny"}}, "BufferedPartial", False),
        ({"envoy": {"shadowMode": "partial"}, "shadow": {"enabled": True}}, "BufferedPartial", True),
    ],
)
def test_what_a_gateway_does_with_bodies_and_failures(values: Values, mode: str, open_: bool) -> None:
    """The words of `loopguard envoy-config` in Envoy Gateway's."""
    (found,) = of_kind(objects(merged(CASES["envoy-gateway"], values)), "EnvoyExtensionPolicy")
    (proc,) = found["spec"]["extProc"]

    assert (proc["processingMode"]["request"]["body"], proc["failOpen"]) == (mode, open_)


def test_a_gateway_in_the_same_namespace_needs_no_grant() -> None:
    """A ReferenceGrant lets another namespace's policy name the Service, and is there for nothing else."""
    there = objects(CASES["envoy-gateway"])
    here = objects(merged(CASES["envoy-gateway"], {"envoyGateway": {"namespace": "guards"}}))

    (grant,) = of_kind(there, "ReferenceGrant")
    (extension,) = of_kind(there, "EnvoyExtensionPolicy")
    assert grant["spec"]["from"][0]["namespace"] == extension["metadata"]["namespace"] == "gateways"
    assert grant["metadata"]["namespace"] == extension["spec"]["extProc"][0]["backendRefs"][0]["namespace"] == "guards"
    assert of_kind(here, "ReferenceGrant") == []


def test_a_gateway_is_guarded_as_a_whole_without_routes() -> None:
    """All routes of the Gateway that is named; while nothing is held, no request waits for as long as a throttle may take."""
    gateway: Values = {"envoyGateway": {"enabled": True, "clientTrafficPolicy": {"gateway": "public"}}}

    watching, enforcing = (
        of_kind(objects(values), "EnvoyExtensionPolicy")[0]["spec"] for values in (merged(gateway, DEFAULTS), gateway)
    )

    assert watching["targetRefs"] == [{"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "public"}]
    assert [spec["extProc"][0]["messageTimeout"] for spec in (watching, enforcing)] == ["200ms", "32s"]


# ---- What Istio is told besides


@each_istio
def test_filters_ask_services_that_are_there(values: Values) -> None:
    """Every cluster that a filter names is a Service of the release, with a DestinationRule that lets enough through."""
    made = objects(values)
    domain = values["istio"].get("clusterDomain", "cluster.local")
    hosts = {f"{item['metadata']['name']}.{item['metadata']['namespace']}.svc.{domain}" for item in of_kind(made, "Service")}
    asked = {name.removeprefix("outbound|50051||") for name in cluster_names(envoy_filter(values))}
    rules = {item["spec"]["host"]: item["spec"]["trafficPolicy"] for item in of_kind(made, "DestinationRule")}

    assert asked == rules.keys() <= hosts
    for config in filters(values).values():
        grpc = config["grpc_service"]["envoy_grpc"]
        assert grpc["cluster_name"] == f"outbound|50051||{grpc['authority']}"
    for policy_ in rules.values():
        assert policy_["connectionPool"]["http"]["http2MaxRequests"] > 100_000
        wanted = values["istio"].get("tls", "ISTIO_MUTUAL")
        assert policy_.get("tls", {"mode": "AUTO"})["mode"] == wanted


def filters(values: Values) -> dict[str, Object]:
    """The configuration of each ext_proc filter by its name, in the order in which requests meet them."""
    patches = envoy_filter(values)["spec"]["configPatches"]
    added = [patch["patch"]["value"] for patch in patches if patch["applyTo"] == "HTTP_FILTER"]
    configs = {value["name"]: unwrap(value["typed_config"]) for value in added}
    return {name: config for name, config in configs.items() if "grpc_service" in config}


def test_attachments_have_names() -> None:
    """The scope goes with every stream, and a canary has one of its own."""
    scoped = filters(CASES["istio-gateway"])
    unscoped = filters(merged(CASES["istio-gateway"], {"istio": {"scope": ""}}))

    found = {name: config["grpc_service"]["initial_metadata"] for name, config in scoped.items()}
    assert list(found) == [f"{FILTER}-canary", FILTER]
    assert found[FILTER] == [{"key": "x-loopguard-scope", "value": "gateway"}]
    assert found[f"{FILTER}-canary"] == [{"key": "x-loopguard-scope", "value": "gateway-canary"}]
    assert ["initial_metadata" in config["grpc_service"] for config in unscoped.values()] == [False, False]


@pytest.mark.parametrize(
    "more", [{"envoy": {"bodyMode": "tolerant"}}, {"istio": {"routes": [{"name": "f", "bodyMode": "tolerant"}]}}]
)
def test_where_bodies_may_be_cut_off_the_limit_is_told(more: Values) -> None:
    """The filter that acts sends it beside the scope; one that only observes does not need it."""
    found = filters(merged(CASES["istio-gateway"], more))

    limit = {"key": "x-loopguard-buffer-limit", "value": "10485760"}
    assert found[FILTER]["grpc_service"]["initial_metadata"] == [{"key": "x-loopguard-scope", "value": "gateway"}, limit]
    assert limit not in found[f"{FILTER}-canary"]["grpc_service"]["initial_metadata"]


def test_a_canary_that_acts_is_not_attached() -> None:
    """A filter cannot give it a share of the traffic, and two filters that act would both count."""
    values = merged(CASES["istio-gateway"], {"canary": {"shadow": {"enabled": False}}, "store": {"url": "redis://redis"}})

    assert list(filters(values)) == [FILTER]
    assert CANARY_CLUSTER in cluster_names(envoy_filter(CASES["istio-gateway"]))
    assert CANARY_CLUSTER not in cluster_names(envoy_filter(values))


def test_two_releases_on_one_gateway_guard_a_route_each() -> None:
    """Each release's filter is on where that release names a route, and nowhere else."""
    values = merged(
        CASES["istio-gateway"], {"canary": {"enabled": False}, "istio": {"routes": [{"name": "chat"}], "scope": ""}}
    )
    other = merged(values, {"istio": {"routes": [{"name": "unnamed"}]}})
    (second,) = of_kind(objects(other, namespace="others"), "EnvoyFilter")
    routes = {"/v1/chat/a": "chat", "/v1/chat/b": "unnamed"}

    def both(text: str) -> str:
        made = json.loads(configuration(text, values, routes))
        clusters = made["static_resources"]["clusters"]
        clusters.append({**without_health(clusters[-1]), "name": CLUSTER.replace("guards", "others")})
        endpoints = [item["load_assignment"]["endpoints"][0]["lb_endpoints"] for item in clusters]
        endpoints[-2][:], endpoints[-1][:] = endpoints[0][:1], endpoints[0][1:]
        return json.dumps(patched(made, second))

    with stack(values["policies"]["bundle"], edit=both, replicas=2) as made:
        found = [statuses(made, path, 3, "ann", method="POST") for path in routes]
        counted = [replica.metric("requests_total", policy="chat") for replica in made.replicas]

    assert found == [[200, 200, 429]] * 2
    assert counted == [3, 3]


def test_an_envoy_filter_elsewhere_has_a_name_of_its_own() -> None:
    """Where releases of several namespaces put theirs, each is named after its own namespace."""
    names = [
        envoy_filter({"istio": {**ON, "namespace": namespace}})["metadata"]["name"] for namespace in ("guards", "istio-ingress")
    ]

    assert names == ["lg-loopguard", "guards-lg-loopguard"]


@each_istio
def test_everything_is_patched_in_the_same_place(values: Values) -> None:
    """No patch of a listener reaches beyond the context and the port that the values name; routes are found by name alone."""
    istio = values["istio"]
    patches = envoy_filter(values)["spec"]["configPatches"]
    clusters = [patch["match"] for patch in patches if patch["applyTo"] == "CLUSTER"]
    matches = [patch["match"] for patch in patches if patch["applyTo"] != "CLUSTER"]
    listeners = [match.get("listener", {}) for match in matches if "routeConfiguration" not in match]
    routes = [match["routeConfiguration"] for match in matches if "routeConfiguration" in match]

    context = istio.get("context", "GATEWAY")
    assert {match["context"] for match in matches} == {context}
    assert {match["context"] for match in clusters} == {"GATEWAY" if context == "GATEWAY" else "SIDECAR_OUTBOUND"}
    assert {match["cluster"]["name"] for match in clusters} == set(cluster_names(envoy_filter(values)))
    assert {listener.get("portNumber", 0) for listener in listeners} == {istio.get("listenerPort", 0)}
    assert [route for route in routes if "portNumber" in route] == []


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
                "podAnnotations": {"proxy.istio.io/config": "{}", "traffic.sidecar.istio.io/excludeInboundPorts": "8080"},
            },
            {"sidecar.istio.io/inject": "false"},
            {"proxy.istio.io/config": "{}", "traffic.sidecar.istio.io/excludeInboundPorts": "8080"},
        ),
    ],
)
def test_pods_have_the_sidecar_that_mtls_needs(values: Values, labels: Values, annotations: Values) -> None:
    """With ISTIO_MUTUAL they get one that stays while they drain and leaves metrics alone; what the user says comes first."""
    (deployment,) = of_kind(objects(values), "Deployment")
    template = deployment["spec"]["template"]["metadata"]

    assert {key: value for key, value in template["labels"].items() if "istio" in key} == labels
    assert template.get("annotations", {}) == annotations


def test_istioctl_analyze_has_nothing_to_say() -> None:
    """An EnvoyFilter with relative patches has a priority (IST0151), and a workload of the mesh a version."""
    made = objects(CASES["istio-gateway"])

    (found,) = of_kind(made, "EnvoyFilter")
    assert found["spec"]["priority"] != 0
    for deployment in of_kind(made, "Deployment"):
        assert deployment["spec"]["template"]["metadata"]["labels"]["version"]
        assert "version" not in deployment["spec"]["selector"]["matchLabels"]  # or no upgrade could change it


@pytest.mark.parametrize(("sidecar", "native"), [(False, None), (True, "true")])
def test_the_test_pod_ends_whatever_injects_sidecars(sidecar: bool, native: str | None) -> None:
    """It has none, or one that ends with it; an ordinary sidecar would run on, and `helm test` wait for ever."""
    (pod,) = of_kind(objects({"istio": {"testPodSidecar": sidecar}}), "Pod")

    assert pod["metadata"]["labels"]["sidecar.istio.io/inject"] == str(sidecar).lower()
    assert pod["metadata"]["annotations"].get("sidecar.istio.io/nativeSidecar") == native


@pytest.mark.parametrize("case", ["istio-gateway", "istio-sidecar", "envoy-gateway"])
def test_notes_say_how_to_see_that_it_is_attached(case: str) -> None:
    """The command in the notes asks the mesh that is enabled, in its namespace."""
    values = CASES[case]
    notes = rendered(values)["loopguard/templates/NOTES.txt"]
    there = (values.get("istio") or values["envoyGateway"]).get("namespace", "guards")

    commands = {
        "istio": f"istioctl -n {there} proxy-config routes",
        "envoy": f"kubectl -n {there} describe envoyextensionpolicy",
    }
    assert commands[case.partition("-")[0]] in notes
    assert "No route uses it yet" not in notes


def test_notes_name_every_route_and_what_finds_it() -> None:
    """One route that is on says nothing about the others, so all are told, with a command that prints those which are on."""
    notes = rendered(CASES["istio-gateway"])["loopguard/templates/NOTES.txt"]
    (program,) = re.findall(r"jq -r '(.*?)'", notes)

    assert re.search(r"Routes in istio.routes:\n((?:  .*\n)+)", notes)[1].splitlines() == [  # type: ignore[index]  # no match fails as well
        "  chat",
        "  named (in api.example.com:443)",
        "  own",
    ]
    assert f'typedPerFilterConfig["{FILTER}"]' in program


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed: the command that the notes print is NOT tested")
def test_the_command_of_the_notes_prints_the_routes_that_are_on() -> None:
    """It reads what istioctl prints: route configurations, some without virtual hosts, some hosts without routes."""
    notes = rendered(CASES["istio-gateway"])["loopguard/templates/NOTES.txt"]
    (program,) = re.findall(r"jq -r '(.*?)'", notes)
    routes = [{"name": "chat", "typedPerFilterConfig": {FILTER: {}}}, {"name": "other", "typedPerFilterConfig": {"x": {}}}, {}]
    printed = json.dumps([{}, {"virtualHosts": [{"name": "empty"}, {"routes": routes}]}])

    done = subprocess.run(["jq", "-r", program], input=printed, capture_output=True, text=True, check=True)

    assert done.stdout == "chat\n"


def test_the_values_of_the_docs_are_good() -> None:
    """What the page shows for Istio and for Envoy Gateway renders to what it says."""
    text = (ROOT / "docs" / "mesh.md").read_text()
    by_api, by_route = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", text, re.DOTALL))
    inline = re.search(r"`(envoyGateway: .*?)` ", text)
    assert inline is not None
    strict = {"policies": {"bundle": bundle(policy("strict", {"pathPrefix": "/"}))}}

    found = filters(by_api)
    named = filters(merged(by_api, strict, by_route))
    extension = of_kind(objects(yaml.safe_load(inline[1])), "EnvoyExtensionPolicy")

    assert list(found) == list(named) == [FILTER]
    assert [item["spec"]["targetRefs"][0]["name"] for item in extension] == ["chat"]
