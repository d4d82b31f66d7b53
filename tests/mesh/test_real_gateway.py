"""What the chart renders for Envoy Gateway, taken in by its own translator, which `make test-mesh` builds: Go, and minutes.

It checks objects against their definitions, and prints the Envoy configuration that it makes of them, which a real Envoy runs.
`gateway_configuration` in tests/support/meshes.py is the model of it that `make test` has.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from base64 import b64encode
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from extproc.cli.envoy_check.config import find_managers, find_resources
from extproc.cli.envoy_check.document import ConfigPlace
from extproc.cli.envoy_config.options import EnvoyOptions
from extproc.cli.envoy_config.render import render_bootstrap
from extproc.options import read_options
from extproc.policy.loader import load
from tests.support.chart import CASES, Object, Values, objects, of_kind
from tests.support.chart.istio import http_manager
from tests.support.check_envoy import found as check
from tests.support.check_envoy import report
from tests.support.documents import bundle, policy
from tests.support.harness import Stack, stack
from tests.support.meshes import BUILT, GATEWAY_LEFT, gateway_configuration, read_port, statuses
from tests.support.servers import free_port

pytestmark = pytest.mark.skipif(not BUILT, reason="`make test-mesh` was not asked for: the real Envoy Gateway is NOT tested")

GATEWAYS = "gateways"
GUARD_PORT = 50_051
USER: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}
POLICIES = bundle(
    policy("all", {"pathPrefix": "/"}, **USER),
    policy("slow", {"pathPrefix": "/chat/slow"}, action="throttle", max_delay_ms=400, threshold_identical_requests=2, **USER),
)
VALUES: Values = {
    "policies": {"bundle": POLICIES},
    "envoy": {"failureMode": "deny", "requestTimeoutSeconds": 60},
    "envoyGateway": {
        "enabled": True,
        "namespace": GATEWAYS,
        "targetRefs": [{"name": "chat"}, {"name": "several", "sectionName": "guarded"}],
        "clientTrafficPolicy": {"gateway": "public"},
    },
}
GATEWAY_CASES = {name: values for name, values in CASES.items() if values.get("envoyGateway", {}).get("enabled")}
OURS = ("Service", "EnvoyExtensionPolicy", "ClientTrafficPolicy", "BackendTLSPolicy", "ReferenceGrant")
MODELLED = (*GATEWAY_LEFT, "early_header_mutation_extensions", "http2_protocol_options", "request_timeout")
ROUTES = {"chat": ["chat"], "several": ["guarded", "open"], "rest": ["rest"]}
"""HTTPRoutes with their rules, each of which takes what begins with its name."""


def write_object(kind: str, name: str, spec: Object, version: str = "gateway.networking.k8s.io/v1") -> Object:
    """An object among the routes."""
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": GATEWAYS}, "spec": spec}


def write_cluster(port: int, upstream: int) -> Iterator[Object]:
    """A Gateway with two listeners, the first on that port, and routes to an upstream on loopback."""
    controller = "gateway.envoyproxy.io/gatewayclass-controller"
    yield write_object("GatewayClass", "eg", {"controllerName": controller})
    listeners = [{"name": name, "protocol": "HTTP", "port": at} for name, at in (("http", port), ("https", port + 1))]
    yield write_object("Gateway", "public", {"gatewayClassName": "eg", "listeners": listeners})
    yield write_object("Service", "upstream", {"clusterIP": "127.0.0.1", "ports": [{"name": "http", "port": upstream}]}, "v1")
    everything = {"parentRefs": [{"name": "public"}]}
    served = [{"name": "upstream", "port": upstream}]
    for route, names in ROUTES.items():
        matches = {name: [{"path": {"type": "PathPrefix", "value": f"/{name}"}}] for name in names}
        rules = [{"name": name, "matches": matches[name], "backendRefs": served} for name in names]
        yield write_object("HTTPRoute", route, {**everything, "rules": rules})
    yield write_object("GRPCRoute", "tools", {**everything, "rules": [{"backendRefs": served}]})
    authority = b64encode(trustme.CA().cert_pem.bytes()).decode()
    named = {"name": "loopguard-tls", "namespace": "guards"}
    yield {"apiVersion": "v1", "kind": "Secret", "metadata": named, "data": {"ca.crt": authority}}


def translate(values: Values, port: int, upstream: int) -> Object:
    """The objects with what Envoy Gateway says of them, and the Envoy configuration that it makes of them."""
    ours = [item for kind in OURS for item in of_kind(objects(values), kind)]
    for service in of_kind(ours, "Service"):
        service["spec"]["clusterIP"] = "127.0.0.1"  # Kubernetes gives it one
    with tempfile.TemporaryDirectory(prefix="eg") as name:
        file = Path(name) / "objects.yaml"
        file.write_text("\n---\n".join(map(json.dumps, [*ours, *write_cluster(port, upstream)])))
        command = [f"{BUILT}/egctl", "x", "translate", "-f", str(file), "--to", "gateway-api,xds", "-o", "json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "HOME": name})
    assert done.returncode == 0, done.stderr
    translated: Object = json.loads(done.stdout)
    return translated


def find_dump(translated: Object, kind: str) -> list[Object]:
    """What stands in one part of the configuration, as Envoy's config dumps have it."""
    (made,) = translated["xds"].values()
    (found,) = (part for part in made["configs"] if part["@type"].endswith(f".{kind}"))
    listed: list[Object] = next(value for key, value in found.items() if key != "@type")
    return listed


def make_static(message: Object) -> Object:
    """A message that stood in an Any."""
    return {key: value for key, value in message.items() if key != "@type"}


def write_bootstrap(printed: Object, translated: Object, port: int) -> Object:
    """An Envoy that has by itself what Envoy Gateway would push; Loopguard's own cluster is there for `stack`."""
    guard = read_port(printed["static_resources"]["clusters"][0])
    routes = [make_static(item["routeConfig"]) for item in find_dump(translated, "RoutesConfigDump")]
    endpoints = [make_static(item["endpointConfig"]) for item in find_dump(translated, "EndpointsConfigDump")]
    for group in endpoints:
        address = group["endpoints"][0]["lbEndpoints"][0]["endpoint"]["address"]["socketAddress"]
        address["portValue"] = guard if address["portValue"] == GUARD_PORT else address["portValue"]
    known = {group["clusterName"]: group for group in endpoints}
    clusters = []
    for item in find_dump(translated, "ClustersConfigDump"):
        cluster = make_static(item["cluster"])
        del cluster["edsClusterConfig"]
        clusters.append({**cluster, "type": "STATIC", "loadAssignment": known[cluster["name"]]})
    listeners = [make_static(item["activeState"]["listener"]) for item in find_dump(translated, "ListenersConfigDump")]
    (listener,) = (item for item in listeners if item["address"]["socketAddress"]["portValue"] == port)
    listener["address"]["socketAddress"]["address"] = "127.0.0.1"
    manager = listener["defaultFilterChain"]["filters"][0]["typedConfig"]
    name = manager.pop("rds")["routeConfigName"]
    (manager["routeConfig"],) = (route for route in routes if route["name"] == name)
    clusters.append(printed["static_resources"]["clusters"][0])
    return {"admin": printed["admin"], "static_resources": {"listeners": [listener], "clusters": clusters}}


@pytest.fixture(scope="module")
def gateway() -> Iterator[Stack]:
    """Loopguard behind an Envoy whose configuration is Envoy Gateway's."""
    port = free_port()

    def edit(text: str) -> str:
        printed = yaml.safe_load(text)
        upstream = read_port(printed["static_resources"]["clusters"][1])
        return json.dumps(write_bootstrap(printed, translate(VALUES, port, upstream), port))

    with stack(POLICIES, "--listen", f"127.0.0.1:{free_port()}", edit=edit) as made:
        yield made


@pytest.mark.parametrize("values", GATEWAY_CASES.values(), ids=GATEWAY_CASES)
def test_every_object_is_accepted(values: Values) -> None:
    """Envoy Gateway refuses nothing of any case, nor passes over any of it, and makes one filter of it."""
    translated = translate(values, 8_080, 8_000)

    kinds = ("clientTrafficPolicies", "envoyExtensionPolicies", "backendTLSPolicies")
    ours = [item for kind in kinds for item in translated.get(kind, [])]
    said = [condition for item in ours for place in item["status"]["ancestors"] for condition in place["conditions"]]
    assert len(ours) == len([item for kind in OURS[1:4] for item in of_kind(objects(values), kind)])
    assert {condition["message"] for condition in said if condition["status"] != "True"} == set()
    assert {"Accepted"} <= {condition["type"] for condition in said} <= {"Accepted", "ResolvedRefs", "Overridden"}
    listeners = json.dumps(find_dump(translated, "ListenersConfigDump"))
    assert len(set(re.findall(r'"name": "(envoy.filters.http.ext_proc/[^"]+)"', listeners))) == 1


def test_envoy_asks_for_the_name_that_is_set() -> None:
    """With a Secret Loopguard is asked over TLS, and has to have the name of `tls.serverName`."""
    translated = translate(CASES["mutual-tls"], 8_080, 8_000)

    clusters = [item["cluster"] for item in find_dump(translated, "ClustersConfigDump")]
    (asked,) = (json.dumps(cluster) for cluster in clusters if "extproc" in cluster["name"])
    assert "UpstreamTlsContext" in asked
    assert '"sni": "loopguard.example"' in asked


def test_a_loop_is_refused_where_it_was_asked_for(gateway: Stack) -> None:
    """On a targeted route, and on a targeted rule of one; another rule and another route never meet Loopguard."""
    before = gateway.loopguard.metric("requests_total")
    found = {name: statuses(gateway, f"/{name}", 3, body=b"same") for name in ("chat", "guarded", "open", "rest")}

    assert found == {"chat": [200, 200, 429], "guarded": [200, 200, 429], "open": [200] * 3, "rest": [200] * 3}
    assert gateway.loopguard.metric("requests_total") - before == 6


def test_what_is_large_is_looked_at_and_what_is_held_goes_on(gateway: Stack) -> None:
    """Bodies above the Gateway's own 32 KiB are compared, and a throttle is held without a max_message_timeout."""
    assert statuses(gateway, "/chat/large", 3, body=b"x" * 3_000_000) == [200, 200, 429]
    assert statuses(gateway, "/chat/slow", 2) == [200, 200]
    assert gateway.envoy.stat("http.http.ext_proc.override_message_timeout_ignored") == 0


def test_clients_cannot_forge_what_loopguard_says(gateway: Stack) -> None:
    """Marks of Loopguard's own are taken off before any filter sees them."""
    gateway.send("/chat/forged", headers={"x-user-id": "eve", "x-fairvisor-warning": "mine", "x-loopguard-steered": "1"})

    seen = gateway.upstream.seen[-1]
    assert (seen.header("x-fairvisor-warning"), seen.header("x-loopguard-steered")) == (None, None)


def test_check_envoy_reads_what_envoy_gateway_makes(gateway: Stack) -> None:
    """Guarded routes are distinguished from others, which a policy for all routes would guard too; nothing else is wrong."""
    dump = json.loads(gateway.envoy.admin("/config_dump"))

    made = report(dump, POLICIES)

    assert {route.route.name.rpartition("/match/")[0]: route.modes for route in made.routes} == {
        "httproute/gateways/chat/rule/0": ["BUFFERED"],
        "httproute/gateways/several/rule/0": ["BUFFERED"],
        "httproute/gateways/several/rule/1": [],
        "httproute/gateways/rest/rule/0": [],
        "grpcroute/gateways/tools/rule/0": [],
    }
    assert [code for code, _, hurts in check(dump, POLICIES) if hurts] == ["unguarded"] * 3
    assert {"processing-mode", "failure-mode"} <= {code for code, _, hurts in check(dump, POLICIES) if not hurts}


def test_the_model_of_envoy_gateway_is_true(gateway: Stack) -> None:
    """What `gateway_configuration` says of filter, connections and limits is what Envoy Gateway says."""
    (manager,) = find_managers(find_resources(ConfigPlace(json.loads(gateway.envoy.admin("/config_dump")))))
    options = read_options(EnvoyOptions, {"upstream": "127.0.0.1:1"})
    printed = render_bootstrap(load([str(gateway.folder / "policies")], datetime.now(UTC)), options)
    model = json.loads(gateway_configuration(printed, VALUES))
    supposed, real = http_manager(model), manager.place.value

    for each in (supposed, real):
        del each["http_filters"][0]["typed_config"]["grpc_service"]["envoy_grpc"]["cluster_name"]
    assert real["http_filters"][0] == supposed["http_filters"][0]
    assert {key: real.get(key) for key in MODELLED} == {key: supposed.get(key) for key in MODELLED}
    limit = "per_connection_buffer_limit_bytes"
    assert manager.listener.get(limit).value == model["static_resources"]["listeners"][0][limit]
