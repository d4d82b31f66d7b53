"""The chart in a waypoint, as Istio's own control plane configures it, run by the real Envoy.

A waypoint's HTTP filters are behind an HBONE tunnel, which Envoy ends on another listener. Here,
they are on a plain listener.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.mesh.istio import CLUSTER, write_endpoints
from tests.support.chart import CASES, NAME, Object, merged, objects, of_kind, one
from tests.support.documents import bundle, policy
from tests.support.harness import stack
from tests.support.meshes import BUILT, FILTER, statuses

pytestmark = pytest.mark.skipif(
    not BUILT, reason="`make test-mesh` was not asked for: the real waypoint is NOT tested"
)

MODEL_CALLS = policy("chat", {"apis": "any"}, limit_keys=["header:x-user-id"])
VALUES = merged(
    CASES["example-istio-waypoint"], {"policies": {"bundle": bundle(MODEL_CALLS)}, "shadow": {}}
)
WAYPOINT = {"gateway.networking.k8s.io/gateway-name": "waypoint"}
MANAGED = {"gateway.istio.io/managed": "istio.io-mesh-controller"}
APP = "inbound-vip|80|http|app.example"


def write_object(version: str, kind: str, name: str, spec: Object, **more: Any) -> Object:  # noqa: ANN401
    metadata = {"name": name, "namespace": "agents", **more}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def write_mesh() -> Iterator[Object]:
    gateway = write_object(
        "gateway.networking.k8s.io/v1",
        "Gateway",
        "waypoint",
        {
            "gatewayClassName": "istio-waypoint",
            "listeners": [{"name": "mesh", "port": 15008, "protocol": "HBONE"}],
        },
    )
    host = "waypoint.agents.svc.cluster.local"
    yield {**gateway, "status": {"addresses": [{"type": "Hostname", "value": host}]}}
    yield write_object(
        "networking.istio.io/v1",
        "ServiceEntry",
        "app",
        {
            "hosts": ["app.example"],
            "addresses": ["192.0.2.1"],
            "ports": [{"number": 80, "name": "http", "protocol": "HTTP"}],
            "resolution": "STATIC",
            "endpoints": [{"address": "192.0.2.2"}],
        },
        labels={"istio.io/use-waypoint": "waypoint"},
    )
    yield write_object(
        "networking.istio.io/v1", "WorkloadEntry", "one", {"address": "192.0.2.3"}, labels=WAYPOINT
    )


def write_kubernetes(made: list[Object]) -> Iterator[Object]:
    yield from write_endpoints(one(made, "Service", NAME), "192.0.2.4:50051")
    port = {"appProtocol": "hbone", "name": "mesh", "port": 15008}
    yield write_object(
        "v1",
        "Service",
        "waypoint",
        {"clusterIP": "192.0.2.5", "ports": [port], "selector": WAYPOINT},
        labels=WAYPOINT | MANAGED,
    )


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    """What Istio sends to the waypoint."""
    folder: Path = tmp_path_factory.mktemp("waypoint")
    made, mesh = objects(VALUES), list(write_mesh())
    configs = [*of_kind(made, "EnvoyFilter"), *of_kind(made, "DestinationRule"), *mesh]
    kubernetes = [*write_kubernetes(made), *mesh]  # Istio reads a waypoint's services here, too
    for name, listed in (("configs", configs), ("objects", kubernetes)):
        (folder / name).write_text("\n---\n".join(map(json.dumps, listed)))
    proxy = {
        "Type": "waypoint",
        "IP": "192.0.2.3",
        "Namespace": "agents",
        "Labels": WAYPOINT | MANAGED,
    }
    done = subprocess.run(
        [f"{BUILT}/istiod", json.dumps(proxy), str(folder / "configs"), str(folder / "objects")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PILOT_ENABLE_AMBIENT": "true"},
    )
    assert done.returncode == 0, done.stderr
    resources: list[Object] = json.loads(done.stdout[done.stdout.index('{"resources"') :])[
        "resources"
    ]
    return resources


def find_listener(resources: list[Object], name: str) -> Object:
    return next(item for item in resources if item.get("name") == name and "filter_chains" in item)


def find_managers(resources: list[Object], listener: str) -> dict[str, Object]:
    """The HTTP connection managers of a listener, by filter chain."""
    return {
        chain["name"]: filter_["typed_config"]
        for chain in find_listener(resources, listener)["filter_chains"]
        for filter_ in chain["filters"]
        if "http_filters" in filter_.get("typed_config", {})
    }


def test_waypoint_has_filter_where_requests_are_but_not_where_tunnels_end(
    pushed: list[Object],
) -> None:
    names = {
        chain: [item["name"] for item in manager["http_filters"]]
        for listener in ("main_internal", "connect_terminate")
        for chain, manager in find_managers(pushed, listener).items()
    }

    assert {chain: FILTER in listed for chain, listed in names.items()} == {
        APP: True,
        "direct-http": True,
        "default": False,
    }
    assert names[APP][-2:] == [FILTER, "envoy.filters.http.router"]
    listener = find_listener(pushed, "main_internal")
    assert listener["per_connection_buffer_limit_bytes"] == 10_485_760


def test_waypoint_knows_loopguard_and_its_health(pushed: list[Object]) -> None:
    (cluster,) = (item for item in pushed if item.get("name") == CLUSTER)

    assert "outlier_detection" in cluster or "health_checks" in cluster
    assert cluster["circuit_breakers"]["thresholds"][0]["max_requests"] == 1_000_000


def test_loop_is_refused_behind_a_waypoint(pushed: list[Object]) -> None:
    manager = json.loads(json.dumps(find_managers(pushed, "main_internal")[APP]))
    manager["http_filters"] = [
        item
        for item in manager["http_filters"]
        if "peer_metadata" not in item["name"]  # only Istio's own build of Envoy has it
    ]
    for key in ("tracing", "access_log"):  # these name peers
        manager.pop(key, None)

    def edit(text: str) -> str:
        made = yaml.safe_load(text)
        resources = made["static_resources"]
        guard, upstream = resources["clusters"][:2]  # `stack` waits for the first
        resources["clusters"] += [{**guard, "name": CLUSTER}, {**upstream, "name": APP}]
        (chain,) = resources["listeners"][0]["filter_chains"]
        chain["filters"][0]["typed_config"] = manager
        return json.dumps(made)

    with stack(VALUES["policies"]["bundle"], edit=edit) as made:
        found = {
            path: statuses(made, path, 4, body=b'{"messages": []}')
            for path in ("/v1/chat/completions", "/files")
        }

    assert found == {"/v1/chat/completions": [200, 200, 429, 429], "/files": [200] * 4}
