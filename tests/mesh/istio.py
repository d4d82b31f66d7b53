"""The real Envoy with all that Istio's own discovery server makes of the chart, over ADS."""

import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.chart import NAME, Object, Values, objects, of_kind
from tests.support.documents import bundle, policy
from tests.support.harness import Loopguard, Process, Stack, be_patient, eventually, stack
from tests.support.meshes import BUILT, read_port
from tests.support.servers import free_port
from tests.support.tokens import KEY

GATEWAYS = "istio-ingress"
CLUSTER = "outbound|50051||lg-loopguard.guards.svc.cluster.local"
ISSUER = "https://idp.example.com"
LABELS = {"istio": "ingressgateway"}

POLICIES = bundle(
    policy("chat", {"pathPrefix": "/chat"}, limit_keys=["header:x-user-id"]),
    policy("claims", {"routes": ["claims"]}, limit_keys=["header:x-user-id"]),
    policy("files", {"pathPrefix": "/files/counted"}, limit_keys=["header:x-user-id"]),
    policy(
        "pinned",
        {"pathPrefix": "/nowhere"},
        limit_keys=["header:x-user-id"],
        threshold_identical_requests=2,
    ),
)
OWN = bundle(
    policy(
        "own",
        {"pathPrefix": "/"},
        action="warn",
        limit_keys=["header:x-user-id"],
        threshold_identical_requests=2,
    )
)
VALUES: Values = {
    "policies": {"bundle": POLICIES},
    "istio": {
        "enabled": True,
        "namespace": GATEWAYS,
        "workloadSelector": LABELS,
        "tls": "DISABLE",  # no certificates are issued here
        "routes": [
            {"name": "chat"},
            {"name": "claims"},
            {"name": "pinned", "policies": ["pinned"]},
            {"name": "own", "bundle": OWN},
            {"name": "files", "bodyMode": "tolerant"},
        ],
    },
}
ROUTES = ("chat", "pinned", "own", "files", "rest")


def write_mesh(port: int, upstream: int) -> Iterator[Object]:
    yield {
        "apiVersion": "networking.istio.io/v1",
        "kind": "Gateway",
        "metadata": {"name": "gateway", "namespace": GATEWAYS},
        "spec": {
            "selector": LABELS,
            "servers": [
                {
                    "port": {"number": port, "name": "http", "protocol": "HTTP"},
                    "bind": "127.0.0.1",
                    "hosts": ["*"],
                }
            ],
        },
    }
    yield {
        "apiVersion": "networking.istio.io/v1",
        "kind": "ServiceEntry",
        "metadata": {"name": "upstream", "namespace": GATEWAYS},
        "spec": {
            "hosts": ["upstream.example"],
            "resolution": "STATIC",
            "ports": [{"number": 80, "name": "http", "protocol": "HTTP"}],
            "endpoints": [{"address": "127.0.0.1", "ports": {"http": upstream}}],
        },
    }
    yield {
        "apiVersion": "security.istio.io/v1",
        "kind": "RequestAuthentication",
        "metadata": {"name": "tokens", "namespace": GATEWAYS},
        "spec": {
            "selector": {"matchLabels": LABELS},
            "jwtRules": [{"issuer": ISSUER, "jwks": json.dumps({"keys": [KEY]})}],
        },
    }
    to_upstream = [{"destination": {"host": "upstream.example", "port": {"number": 80}}}]
    yield {
        "apiVersion": "networking.istio.io/v1",
        "kind": "VirtualService",
        "metadata": {"name": "routes", "namespace": GATEWAYS},
        "spec": {
            "hosts": ["*"],
            "gateways": ["gateway"],
            "http": [
                {
                    "name": "claims",
                    "match": [
                        {
                            "uri": {"prefix": "/rest/claims"},
                            "headers": {"@request.auth.claims.team": {"exact": "a"}},
                        }
                    ],
                    "route": to_upstream,
                },
                *(
                    {"name": name, "match": [{"uri": {"prefix": f"/{name}"}}], "route": to_upstream}
                    for name in ROUTES
                ),
            ],
        },
    }


def write_endpoints(service: Object, *pods: str) -> Iterator[Object]:
    """A Service with an address, and its pods, each as IP:PORT; Istio tells pods apart by IP."""
    yield {**service, "spec": {**service["spec"], "clusterIP": "10.0.0.1"}}
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    for number, (address, _, port) in enumerate(pod.rpartition(":") for pod in pods):
        labels = {"kubernetes.io/service-name": name}
        yield {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": f"{name}-{number}", "namespace": namespace, "labels": labels},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
            "ports": [
                {"name": service["spec"]["ports"][0]["name"], "port": int(port), "protocol": "TCP"}
            ],
        }


def write_bootstrap(printed: Object, istiod: int) -> Object:
    """An Envoy that gets everything from Istio.

    Loopguard's own cluster is there for `stack`, which waits for its health.
    """
    options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    http2 = {
        "@type": f"type.googleapis.com/{options}",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    discovery = {
        "api_type": "GRPC",
        "transport_api_version": "V3",
        "grpc_services": [{"envoy_grpc": {"cluster_name": "istiod"}}],
    }
    ads: Object = {"ads": {}, "resource_api_version": "V3", "initial_fetch_timeout": "0s"}
    address = {"socket_address": {"address": "127.0.0.1", "port_value": istiod}}
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": address}}]}]
    return {
        "admin": printed["admin"],
        "node": {
            # No endpoint has this address: with an endpoint's, such as 127.0.0.1, Istio would use
            # that endpoint's labels.
            "id": f"router~192.0.2.1~gateway.{GATEWAYS}~{GATEWAYS}.svc.cluster.local",
            "cluster": "gateway",
            "metadata": {
                "NAMESPACE": GATEWAYS,
                "LABELS": LABELS,
                "CLUSTER_ID": "Kubernetes",
                "ISTIO_VERSION": "1.30.0",
            },
        },
        "dynamic_resources": {"ads_config": discovery, "lds_config": ads, "cds_config": ads},
        "static_resources": {
            "clusters": [
                printed["static_resources"]["clusters"][0],
                {
                    "name": "istiod",
                    "type": "STATIC",
                    "typed_extension_protocol_options": {options: http2},
                    "load_assignment": {"cluster_name": "istiod", "endpoints": endpoints},
                },
            ]
        },
    }


@contextmanager
def istio(
    values: Values,
    *others: Loopguard,
    flags: Sequence[str] = (),
    patient: bool = False,
    **more: Any,  # noqa: ANN401  # of `stack`
) -> Iterator[Stack]:
    """Loopguards behind an Envoy that Istio configures, with the chart's objects.

    Args:
        values: of the chart.
        *others: more pods of the same Service.
        flags: more flags of serve, for the first pod.
        patient: lengthen Envoy's timeouts for a busy machine.
        **more: of `stack`.
    """
    with tempfile.TemporaryDirectory(prefix="istio") as name, ExitStack() as ended:
        folder = Path(name)

        def edit(text: str) -> str:
            printed, discovery = yaml.safe_load(text), free_port()
            upstream = read_port(printed["static_resources"]["clusters"][1])
            made = objects(values)
            if patient:
                be_patient(made)
            configs = [
                *of_kind(made, "EnvoyFilter"),
                *of_kind(made, "DestinationRule"),
                *write_mesh(free_port(), upstream),
            ]
            (service,) = (
                item for item in of_kind(made, "Service") if item["metadata"]["name"] == NAME
            )
            first = read_port(printed["static_resources"]["clusters"][0])
            kubernetes = write_endpoints(
                service, f"127.0.0.1:{first}", *(other.address for other in others)
            )
            for file, listed in (("configs.yaml", configs), ("objects.yaml", kubernetes)):
                (folder / file).write_text("\n---\n".join(map(json.dumps, listed)))
            places = [
                f"127.0.0.1:{discovery}",
                str(folder / "configs.yaml"),
                str(folder / "objects.yaml"),
            ]
            istiod = Process([f"{BUILT}/istiod", *places], folder / "istiod.log")
            ended.callback(istiod.stop)
            istiod.wait_for("serving")
            return json.dumps(write_bootstrap(printed, discovery))

        arguments = ("--listen", f"127.0.0.1:{free_port()}", *flags)
        with stack(values["policies"]["bundle"], *arguments, edit=edit, **more) as made:
            eventually(lambda: made.send("/rest").status == 200, "Istio's routes")
            yield made


def count_missed(made: Stack) -> int:
    """Requests that passed without an answer or waited in vain."""
    names = "failure_mode_allowed|message_timeouts"
    return sum(
        int(found)
        for found in re.findall(
            rf"ext_proc\.(?:\S+\.)?(?:{names}): (\d+)", made.envoy.admin("/stats")
        )
    )
