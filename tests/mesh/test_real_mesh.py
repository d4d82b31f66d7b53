"""The chart on Istio's own discovery server, which `make test-mesh` builds: Go, and minutes.

tests/support/chart/istio.py is the model of it that `make test` uses.
"""

import json
import random
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from extproc.cli.envoy_check.config import find_managers, find_resources
from extproc.cli.envoy_check.document import ConfigPlace
from extproc.cli.envoy_check.inspect import inspect
from extproc.cli.envoy_check.needs import find_needs
from tests.mesh.istio import (
    CLUSTER,
    GATEWAYS,
    ISSUER,
    LABELS,
    POLICIES,
    VALUES,
    count_missed,
    istio,
    write_endpoints,
)
from tests.support.chart import Object, Values, merged, objects, of_kind
from tests.support.chart.istio import LEFT
from tests.support.check_envoy import found as check, report
from tests.support.documents import bare_policy, bundle, policy
from tests.support.envoy_config import verdict
from tests.support.harness import Loopguard, Stack, eventually, write_policies
from tests.support.meshes import (
    BUILT,
    FILTER,
    ISTIO,
    USER,
    cluster_names,
    envoy_filter,
    statuses,
)
from tests.support.servers import free_port
from tests.support.streams import over_http2
from tests.support.tokens import sign

pytestmark = pytest.mark.skipif(
    not BUILT, reason="`make test-mesh` was not asked for: the real Istio is NOT tested"
)


@pytest.fixture(scope="module")
def gateway() -> Iterator[Stack]:
    with istio(VALUES) as made:
        yield made


def test_a_loop_is_refused(gateway: Stack) -> None:
    before = gateway.loopguard.metric("unmatched_total")

    assert statuses(gateway, "/chat", 3, body=b"same") == [200, 200, 429]
    assert statuses(gateway, "/rest", 4, body=b"same") == [200] * 4
    assert gateway.loopguard.metric("unmatched_total") == before


def test_requests_to_apis_are_guarded_on_unnamed_routes() -> None:
    by_api = policy(
        "models",
        {"apis": "any"},
        action="warn",
        limit_keys=["header:x-user-id"],
        threshold_identical_requests=2,
    )
    values = merged(VALUES, {"policies": {"bundle": bundle(by_api)}, "istio": {"routes": []}})
    with istio(values) as made:
        eventually(lambda: made.envoy.stat(f"cluster.{CLUSTER};.membership_healthy") == 1, "a pod")

        calls = [
            made.send(f"/{route}/v1/messages", method="POST", body=b"{}", headers=USER)
            for route in ("chat", "rest", "rest")
        ]
        uploads = statuses(made, "/files", 4, body=b"x" * 12_000_000)

        assert [answer.headers.get("x-fairvisor-warning") for answer in calls] == [
            None,
            None,
            "loop_warn",
        ]
        assert (uploads, made.loopguard.metric("unmatched_total")) == ([200] * 4, 0)
        hurting = [
            code
            for code, _, hurts in check(
                json.loads(made.envoy.admin("/config_dump")), bundle(by_api)
            )
            if hurts
        ]
        assert hurting == ["request-timeout", "path-spelling"]  # both are in the docs


def test_routes_pass_their_policies(gateway: Stack) -> None:
    assert statuses(gateway, "/pinned", 2, body=b"same") == [200, 429]

    answers = [gateway.send("/own", headers=USER) for _ in range(2)]

    assert [answer.headers.get("x-fairvisor-warning") for answer in answers] == [None, "loop_warn"]
    assert gateway.upstream.seen[-1].header("x-fairvisor-warning") == "loop_warn"


def test_route_chosen_by_claims_is_guarded(gateway: Stack) -> None:
    token = {**sign(iss=ISSUER, sub="s", team="a"), **USER}

    with_token = [
        gateway.send("/rest/claims", method="POST", body=b"same", headers=token).status
        for _ in range(4)
    ]

    assert with_token == [200, 200, 429, 429]
    assert statuses(gateway, "/rest/claims", 4, body=b"same") == [200] * 4


@pytest.mark.parametrize("path", ["/chat", "/files/counted"])
def test_request_with_trailers_alone_is_counted(gateway: Stack, path: str) -> None:
    answers = [over_http2(gateway, f"{path}/trailers", USER, trailers=True) for _ in range(3)]

    assert [status for status, _ in answers] == ["200", "200", "429"]


def test_session_tokens_are_read() -> None:
    limits = {"max_cost_per_session": 10, "unknown_model": {"input": 1, "output": 1}}
    session: Object = {"session": {"keys": ["header:x-session-id"]}, "session_limits": limits}
    chat = bare_policy("chat", "/chat", limit_keys=["header:x-user-id"], **session)
    values = merged(VALUES, {"policies": {"bundle": bundle(chat)}, "envoy": {"usage": "exact"}})
    values["istio"]["routes"] = [{"name": "chat"}]
    with istio(values) as made:
        for path in ("/rest", "/chat"):
            assert made.post(path, {}, {**USER, "x-session-id": "s"}).status == 200
        eventually(
            lambda: made.loopguard.metric("access_log_entries_total", result="taken") == 1,
            "an entry",
        )

        assert made.envoy.stat("json_to_metadata.resp.success") == 1


def test_hung_pod_delays_no_request() -> None:
    with tempfile.TemporaryDirectory(prefix="pod") as name, ExitStack() as ended:
        write_policies(Path(name), POLICIES)
        other = Loopguard(Path(name), listen=f"127.0.0.2:{free_port()}")
        ended.callback(other.stop)
        made = ended.enter_context(istio(VALUES, other))
        healthy = f"cluster.{CLUSTER};.membership_healthy"  # as Istio names its statistics
        eventually(lambda: made.envoy.stat(healthy) == 2, "two pods")
        statuses(made, "/chat", 20)
        asked_both = other.metric("requests_total") > 0
        other.signal(signal.SIGSTOP)
        ended.callback(other.signal, signal.SIGCONT)
        trusted = f"{other.address}::health_flags::healthy"
        eventually(
            lambda: trusted not in made.envoy.admin("/clusters"),
            "the end of trust in the one that hangs",
        )
        eventually(
            lambda: made.envoy.stat(healthy) == 1,
            "trust in the other one, which a busy machine may shake",
        )
        assert other.address in made.envoy.admin("/clusters")
        counted, missed = made.loopguard.metric("requests_total"), count_missed(made)

        found = {
            made.send(f"/chat/{number}", method="POST", body=b"x", headers=USER).status
            for number in range(100)
        }

        assert asked_both
        assert (found, made.loopguard.metric("requests_total") - counted) == ({200}, 100)
        assert count_missed(made) == missed


def test_large_bodies(gateway: Stack) -> None:
    assert statuses(gateway, "/chat/large", 3, body=b"x" * 3_000_000) == [200, 200, 429]
    # Istio's routes retry, and what Envoy keeps for that it must not send twice
    for _ in range(20):
        data = random.randbytes(11_000_000)
        assert statuses(gateway, "/files/close", 1, body=data) == [200]

        received = gateway.upstream.seen[-1]
        assert received.header("content-length") == "11000000"
        assert hash(received.body) == hash(data)  # which are too long to be shown


def test_body_survives_death_of_loopguard() -> None:
    body = random.randbytes(3_000_000)
    with istio(VALUES) as made:
        client = made.connect()
        client.sendall(
            (
                b"POST /files/counted/close HTTP/1.1\r\nhost: h\r\nx-user-id: a\r\n"
                b"content-length: 3000000\r\n\r\n"
            )
            + body[:2_000_000]
        )
        eventually(
            lambda: f"ext_proc.{FILTER}.stream_msgs_received: 1" in made.envoy.admin("/stats"),
            "the answer to its headers",
        )

        made.loopguard.signal(signal.SIGKILL)
        eventually(
            lambda: f"ext_proc.{FILTER}.failure_mode_allowed: 1" in made.envoy.admin("/stats"),
            "the end of its stream",
        )
        client.sendall(body[2_000_000:])

        assert client.makefile("rb").readline() == b"HTTP/1.1 200 OK\r\n"
        assert hash(made.upstream.seen[-1].body) == hash(body)  # which are too long to be shown
        client.close()


# ---- What Istio makes of every case


# Where the cases attach Loopguard.
PROXIES: dict[str, Object] = {
    "GATEWAY": {"Type": "router", "IP": "10.1.1.1", "Namespace": GATEWAYS, "Labels": LABELS},
    "SIDECAR_INBOUND": {
        "Type": "sidecar",
        "IP": "10.1.1.2",
        "Namespace": "guards",
        "Labels": {"app": "agent-api"},
    },
    "SIDECAR_OUTBOUND": {
        "Type": "sidecar",
        "IP": "10.1.1.3",
        "Namespace": "agents",
        "Labels": {"app": "agent"},
    },
}


def write_service(proxy: Object, port: int, at: int) -> Iterator[Object]:
    named = {"name": "proxy", "namespace": proxy["Namespace"]}
    status = {"phase": "Running", "podIP": proxy["IP"], "podIPs": [{"ip": proxy["IP"]}]}
    containers = [{"name": "proxy", "image": "proxy", "ports": [{"containerPort": at}]}]
    pod = {
        "metadata": {**named, "labels": proxy["Labels"]},
        "spec": {"containers": containers},
        "status": status,
    }
    yield {"apiVersion": "v1", "kind": "Pod", **pod}
    ports = [{"name": "http", "port": port, "targetPort": at, "protocol": "TCP"}]
    spec = {"selector": proxy["Labels"], "ports": ports}
    yield from write_endpoints(
        {"apiVersion": "v1", "kind": "Service", "metadata": named, "spec": spec},
        f"{proxy['IP']}:{at}",
    )


def write_surroundings(values: Values) -> Iterator[Object]:
    yield {
        "apiVersion": "networking.istio.io/v1",
        "kind": "Gateway",
        "metadata": {"name": "gateway", "namespace": GATEWAYS},
        "spec": {
            "selector": LABELS,
            "servers": [
                {"port": {"number": 443, "name": "http", "protocol": "HTTP"}, "hosts": ["*"]}
            ],
        },
    }
    yield {
        "apiVersion": "networking.istio.io/v1",
        "kind": "ServiceEntry",
        "metadata": {"name": "model", "namespace": "agents"},
        "spec": {
            "hosts": ["llm.example.com"],
            "location": "MESH_EXTERNAL",
            "resolution": "STATIC",
            "ports": [{"number": 443, "name": "http", "protocol": "HTTP"}],
            "endpoints": [{"address": "10.1.1.9"}],
        },
    }
    to_model = [{"destination": {"host": "llm.example.com", "port": {"number": 443}}}]
    hosts: dict[str, list[str]] = {}
    for route in values["istio"].get("routes", [{"name": "any"}]):
        hosts.setdefault(route.get("virtualHost", "*").partition(":")[0], []).append(route["name"])
    for number, (host, names) in enumerate(hosts.items()):
        yield {
            "apiVersion": "networking.istio.io/v1",
            "kind": "VirtualService",
            "metadata": {"name": f"routes-{number}", "namespace": GATEWAYS},
            "spec": {
                "hosts": [host],
                "gateways": [f"{GATEWAYS}/gateway"],
                "http": [
                    {"name": name, "match": [{"uri": {"prefix": f"/{name}"}}], "route": to_model}
                    for name in names
                ],
            },
        }


def print_pushed(values: Values, folder: Path) -> Object:
    made = objects(values)
    services = [
        item for item in of_kind(made, "Service") if item["spec"]["ports"][0]["port"] == 50_051
    ]
    pods = [
        item
        for number, service in enumerate(services)
        for item in write_endpoints(service, f"10.1.2.{number}:50051")
    ]
    pods += [
        *write_service(PROXIES["GATEWAY"], 443, 8_443),
        *write_service(PROXIES["SIDECAR_INBOUND"], 80, 8_080),
    ]
    configs = [
        *of_kind(made, "EnvoyFilter"),
        *of_kind(made, "DestinationRule"),
        *write_surroundings(values),
    ]
    for file, listed in (("configs.yaml", configs), ("objects.yaml", pods)):
        (folder / file).write_text("\n---\n".join(map(json.dumps, listed)))
    proxy = json.dumps(PROXIES[values["istio"].get("context", "GATEWAY")])
    command = [f"{BUILT}/istiod", proxy, str(folder / "configs.yaml"), str(folder / "objects.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    pushed: Object = json.loads(done.stdout.splitlines()[-1])  # behind its log
    return pushed


NOT_WAYPOINTS = {
    name: values for name, values in ISTIO.items() if "waypoint" not in values["istio"]
}


@pytest.mark.parametrize("values", NOT_WAYPOINTS.values(), ids=NOT_WAYPOINTS)
def test_every_case_guards_named_routes(values: Values, tmp_path: Path) -> None:
    # The domain of this Istio
    values = merged(values, {"istio": {"clusterDomain": "cluster.local"}})
    pushed = print_pushed(values, tmp_path)

    made = inspect(find_resources(ConfigPlace(pushed)), find_needs(None, 65_535))
    guarded = {item.route.name for item in made.routes if item.modes}
    named = {route["name"] for route in values["istio"].get("routes", ())}
    wanted = named or {"default" if values["istio"].get("context") == "SIDECAR_INBOUND" else "any"}
    asked = set(cluster_names(envoy_filter(values)))
    clusters = {
        item["name"]: item for item in pushed["resources"] if item["@type"].endswith(".Cluster")
    }
    assert guarded == wanted
    assert "late-route" not in {item.code for item in made.findings}
    for name in asked:
        protocol = clusters[name]["typed_extension_protocol_options"][
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
        ]
        assert "connection_keepalive" in protocol["explicit_http_config"]["http2_protocol_options"]
        assert clusters[name]["outlier_detection"]["consecutive_gateway_failure"] == 1
        assert ("health_checks" in clusters[name]) == (values["istio"].get("tls") != "AUTO")
    assert verdict(json.dumps(make_bootstrap(pushed)), tmp_path).rstrip().endswith("OK")


def make_bootstrap(pushed: Object) -> Object:
    kinds: dict[str, list[Object]] = {}
    for item in pushed["resources"]:
        kind = item["@type"].rpartition(".")[2]
        kinds.setdefault(kind, []).append(
            {key: value for key, value in item.items() if key != "@type"}
        )
    secrets = {
        "name": "sds-grpc",
        "type": "STATIC",
        "load_assignment": {"cluster_name": "sds-grpc"},
    }
    api = {
        "api_type": "GRPC",
        "transport_api_version": "V3",
        "grpc_services": [{"envoy_grpc": {"cluster_name": "sds-grpc"}}],
    }
    return {
        "node": {"id": "proxy", "cluster": "proxy"},
        "dynamic_resources": {"ads_config": api},
        "static_resources": {
            "listeners": kinds["Listener"],
            "clusters": [secrets, *kinds["Cluster"]],
        },
    }


# ---- What the gateway has


def test_model_of_istio_matches(gateway: Stack) -> None:
    (manager,) = find_managers(
        find_resources(ConfigPlace(json.loads(gateway.envoy.admin("/config_dump"))))
    )

    assert {name: manager.place.get(name).value for name in LEFT} == LEFT
    assert manager.listener.get("per_connection_buffer_limit_bytes").value == 10_485_760
    assert manager.place.get("internal_address_config", "cidr_ranges").value
    assert [item.name for item in manager.filters][-2:] == [FILTER, "envoy.filters.http.router"]


def test_check_envoy_reads_istio_configuration(gateway: Stack) -> None:
    dump = json.loads(gateway.envoy.admin("/config_dump"))

    made = report(dump, POLICIES)

    assert {route.name: route.modes for route in made.routes} == {
        "claims": ["BUFFERED"], "chat": ["BUFFERED"], "pinned": ["BUFFERED"], "own": ["BUFFERED"],
        "files": ["BUFFERED_PARTIAL"], "rest": [],
    }  # fmt: skip
    assert [
        (code, pointer.rpartition("/")[2])
        for code, pointer, hurts in check(dump, POLICIES)
        if hurts
    ] == [("path-spelling", "merge_slashes")]
