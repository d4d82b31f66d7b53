"""The real Envoy with the configuration that Envoy Gateway's translator makes of the chart."""

import json
import os
import subprocess
import tempfile
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trustme
import yaml

from tests.support.chart import Object, Values, objects, of_kind
from tests.support.documents import bundle, policy
from tests.support.harness import Loopguard, Stack, stack
from tests.support.meshes import BUILT, read_port
from tests.support.servers import free_port

GATEWAYS = "gateways"
GUARD_PORT = 50_051
USER: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}
POLICIES = bundle(
    policy("all", {"pathPrefix": "/"}, **USER),
    policy(
        "slow",
        {"pathPrefix": "/chat/slow"},
        action="throttle",
        max_delay_ms=400,
        threshold_identical_requests=2,
        **USER,
    ),
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
OURS = (
    "Service",
    "EnvoyExtensionPolicy",
    "ClientTrafficPolicy",
    "BackendTLSPolicy",
    "ReferenceGrant",
)
# HTTPRoutes and their rules; each takes the paths that begin with its name.
ROUTES = {"chat": ["chat"], "several": ["guarded", "open"], "rest": ["rest"]}


def write_object(
    kind: str, name: str, spec: Object, version: str = "gateway.networking.k8s.io/v1"
) -> Object:
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name, "namespace": GATEWAYS},
        "spec": spec,
    }


def write_cluster(port: int, upstream: int) -> Iterator[Object]:
    """A Gateway with two listeners, one on this port, and routes to an upstream on loopback."""
    controller = "gateway.envoyproxy.io/gatewayclass-controller"
    yield write_object("GatewayClass", "eg", {"controllerName": controller})
    listeners = [
        {"name": name, "protocol": "HTTP", "port": at}
        for name, at in (("http", port), ("https", port + 1))
    ]
    yield write_object("Gateway", "public", {"gatewayClassName": "eg", "listeners": listeners})
    yield write_object(
        "Service",
        "upstream",
        {"clusterIP": "127.0.0.1", "ports": [{"name": "http", "port": upstream}]},
        "v1",
    )
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


def translate(made: list[Object], port: int, upstream: int) -> Object:
    """The chart's objects with Envoy Gateway's status, and the Envoy configuration."""
    ours = [item for kind in OURS for item in of_kind(made, kind)]
    for service in of_kind(ours, "Service"):
        service["spec"]["clusterIP"] = "127.0.0.1"  # Kubernetes gives it one
    with tempfile.TemporaryDirectory(prefix="eg") as name:
        file = Path(name) / "objects.yaml"
        file.write_text("\n---\n".join(map(json.dumps, [*ours, *write_cluster(port, upstream)])))
        command = [
            f"{BUILT}/egctl",
            "x",
            "translate",
            "-f",
            str(file),
            "--to",
            "gateway-api,xds",
            "-o",
            "json",
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "HOME": name}
        )
    assert done.returncode == 0, done.stderr
    translated: Object = json.loads(done.stdout)
    return translated


def find_dump(translated: Object, kind: str) -> list[Object]:
    (made,) = translated["xds"].values()
    (found,) = (part for part in made["configs"] if part["@type"].endswith(f".{kind}"))
    listed: list[Object] = next(value for key, value in found.items() if key != "@type")
    return listed


def make_static(message: Object) -> Object:
    return {key: value for key, value in message.items() if key != "@type"}


def find_guard(endpoints: list[Object]) -> list[Object]:
    for group in endpoints:
        listed: list[Object] = group["endpoints"][0]["lbEndpoints"]
        if listed[0]["endpoint"]["address"]["socketAddress"]["portValue"] == GUARD_PORT:
            return listed
    raise AssertionError("no endpoint of Loopguard")


def write_bootstrap(
    printed: Object, translated: Object, port: int, others: Sequence[Loopguard]
) -> Object:
    """An Envoy with the whole configuration in its bootstrap.

    Loopguard's own cluster is there for `stack`.
    """
    routes = [
        make_static(item["routeConfig"]) for item in find_dump(translated, "RoutesConfigDump")
    ]
    endpoints = [
        make_static(item["endpointConfig"]) for item in find_dump(translated, "EndpointsConfigDump")
    ]
    guard = find_guard(endpoints)
    guard += [json.loads(json.dumps(guard[0])) for _ in others]
    pods = [
        f"127.0.0.1:{read_port(printed['static_resources']['clusters'][0])}",
        *(other.address for other in others),
    ]
    for each, pod in zip(guard, pods, strict=True):
        host, _, at = pod.rpartition(":")
        each["endpoint"]["address"]["socketAddress"] |= {"address": host, "portValue": int(at)}
    known = {group["clusterName"]: group for group in endpoints}
    clusters = []
    for item in find_dump(translated, "ClustersConfigDump"):
        cluster = make_static(item["cluster"])
        del cluster["edsClusterConfig"]
        for check in cluster.get("healthChecks", ()):
            # As for a gateway that has had traffic for a minute
            check["noTrafficInterval"] = check["interval"]
        clusters.append({**cluster, "type": "STATIC", "loadAssignment": known[cluster["name"]]})
    listeners = [
        make_static(item["activeState"]["listener"])
        for item in find_dump(translated, "ListenersConfigDump")
    ]
    (listener,) = (
        item for item in listeners if item["address"]["socketAddress"]["portValue"] == port
    )
    listener["address"]["socketAddress"]["address"] = "127.0.0.1"
    manager = listener["defaultFilterChain"]["filters"][0]["typedConfig"]
    name = manager.pop("rds")["routeConfigName"]
    (manager["routeConfig"],) = (route for route in routes if route["name"] == name)
    clusters.append(printed["static_resources"]["clusters"][0])
    return {
        "admin": printed["admin"],
        "static_resources": {"listeners": [listener], "clusters": clusters},
    }


@contextmanager
def envoy_gateway(
    values: Values, *others: Loopguard, flags: Sequence[str] = (), edit: Callable[[str], str] = str
) -> Iterator[Stack]:
    """Loopguards behind an Envoy that Envoy Gateway configures.

    Args:
        values: of the chart.
        *others: more pods of the same Service.
        flags: more flags of serve, for the first pod.
        edit: changes Envoy's configuration.
    """
    port = free_port()

    def make(text: str) -> str:
        printed = yaml.safe_load(text)
        upstream = read_port(printed["static_resources"]["clusters"][1])
        return edit(
            json.dumps(
                write_bootstrap(printed, translate(objects(values), port, upstream), port, others)
            )
        )

    with stack(
        values["policies"]["bundle"], "--listen", f"127.0.0.1:{free_port()}", *flags, edit=make
    ) as made:
        yield made
