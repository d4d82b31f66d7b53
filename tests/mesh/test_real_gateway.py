"""The chart on Envoy Gateway's own translator, which `make test-mesh` builds: Go, and minutes.

`gateway_configuration` in tests/support/meshes.py is the model of it that `make test` uses.
"""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from extproc.cli.envoy_check.config import find_managers, find_resources
from extproc.cli.envoy_check.document import ConfigPlace
from extproc.cli.envoy_config.options import EnvoyOptions
from extproc.cli.envoy_config.render import render_bootstrap
from extproc.options import read_options
from extproc.policy.loader import load
from tests.mesh.envoy_gateway import OURS, POLICIES, VALUES, envoy_gateway, find_dump, translate
from tests.support.chart import CASES, Values, merged, objects, of_kind
from tests.support.chart.istio import http_manager
from tests.support.check_envoy import found as check, report
from tests.support.harness import Stack
from tests.support.meshes import BUILT, GATEWAY_LEFT, gateway_configuration, statuses

pytestmark = pytest.mark.skipif(
    not BUILT, reason="`make test-mesh` was not asked for: the real Envoy Gateway is NOT tested"
)

GATEWAY_CASES = {
    name: values for name, values in CASES.items() if values.get("envoyGateway", {}).get("enabled")
}
MODELLED = (
    *GATEWAY_LEFT,
    "early_header_mutation_extensions",
    "http2_protocol_options",
    "request_timeout",
)


@pytest.fixture(scope="module")
def gateway() -> Iterator[Stack]:
    with envoy_gateway(VALUES) as made:
        yield made


@pytest.mark.parametrize("values", GATEWAY_CASES.values(), ids=GATEWAY_CASES)
def test_envoy_gateway_accepts_every_object(values: Values) -> None:
    translated = translate(objects(values), 8_080, 8_000)

    kinds = ("clientTrafficPolicies", "envoyExtensionPolicies", "backendTLSPolicies")
    ours = [item for kind in kinds for item in translated.get(kind, [])]
    said = [
        condition
        for item in ours
        for place in item["status"]["ancestors"]
        for condition in place["conditions"]
    ]
    assert len(ours) == len([item for kind in OURS[1:4] for item in of_kind(objects(values), kind)])
    assert {condition["message"] for condition in said if condition["status"] != "True"} == set()
    assert (
        {"Accepted"}
        <= {condition["type"] for condition in said}
        <= {"Accepted", "ResolvedRefs", "Overridden"}
    )
    listeners = json.dumps(find_dump(translated, "ListenersConfigDump"))
    assert len(set(re.findall(r'"name": "(envoy.filters.http.ext_proc/[^"]+)"', listeners))) == 1


@pytest.mark.parametrize(("failure_mode", "answer"), [("deny", {"status": 500}), ("allow", None)])
def test_policy_without_its_service_follows_failure_mode(failure_mode: str, answer: object) -> None:
    """Between the two deletions of `helm uninstall`."""
    values = merged(VALUES, {"envoy": {"failureMode": failure_mode}})
    made = [item for item in objects(values) if item["kind"] != "Service"]

    translated = translate(made, 8_080, 8_000)

    (route,) = {
        json.dumps([route.get("directResponse"), route.get("typedPerFilterConfig")])
        for item in find_dump(translated, "RoutesConfigDump")
        for host in item["routeConfig"].get("virtualHosts", ())
        for route in host["routes"]
        if route["name"].startswith("httproute/gateways/chat/")
    }
    assert json.loads(route) == [answer, None]


def test_server_name_is_verified() -> None:
    translated = translate(objects(CASES["mutual-tls"]), 8_080, 8_000)

    clusters = [item["cluster"] for item in find_dump(translated, "ClustersConfigDump")]
    (asked,) = (json.dumps(cluster) for cluster in clusters if "extproc" in cluster["name"])
    assert "UpstreamTlsContext" in asked
    assert '"sni": "loopguard.example"' in asked


def test_loop_is_refused_on_targets_only(gateway: Stack) -> None:
    before = gateway.loopguard.metric("requests_total")
    found = {
        name: statuses(gateway, f"/{name}", 3, body=b"same")
        for name in ("chat", "guarded", "open", "rest")
    }

    assert found == {
        "chat": [200, 200, 429],
        "guarded": [200, 200, 429],
        "open": [200] * 3,
        "rest": [200] * 3,
    }
    assert gateway.loopguard.metric("requests_total") - before == 6


LATE = """
function envoy_on_request(handle)
  local path = handle:headers():get(":path")
  if path:sub(1, 11) == "/rest/late/" then
    handle:headers():replace(":path", "/chat/" .. path:sub(12))
    handle:clearRouteCache()
  end
end
"""


def choose_late(text: str) -> str:
    made = json.loads(text)
    lua = {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua",
        "defaultSourceCode": {"inlineString": LATE},
    }
    manager = made["static_resources"]["listeners"][0]["defaultFilterChain"]["filters"][0][
        "typedConfig"
    ]
    manager["httpFilters"].insert(0, {"name": "late", "typedConfig": lua})
    return json.dumps(made)


@pytest.mark.parametrize(
    ("target", "last"),
    [({"kind": "Gateway", "name": "public"}, 429), ({"name": "chat"}, 200)],
    ids=["Gateway", "HTTPRoute"],
)
def test_late_route_needs_policy_of_gateway(target: dict[str, str], last: int) -> None:
    values = merged(VALUES, {"envoyGateway": {"targetRefs": [target]}})
    with envoy_gateway(values, edit=choose_late) as made:
        assert statuses(made, "/rest/late/x", 3, body=b"same") == [200, 200, last]
        codes = [
            code for code, _, _ in check(json.loads(made.envoy.admin("/config_dump")), POLICIES)
        ]
        assert ("late-route" in codes) == (last == 200)


def test_large_bodies_are_compared_and_throttles_held(gateway: Stack) -> None:
    assert statuses(gateway, "/chat/large", 3, body=b"x" * 3_000_000) == [200, 200, 429]
    assert statuses(gateway, "/chat/slow", 2) == [200, 200]
    assert gateway.envoy.stat("http.http.ext_proc.override_message_timeout_ignored") == 0


def test_forged_marks_are_removed(gateway: Stack) -> None:
    gateway.send(
        "/chat/forged",
        headers={"x-user-id": "eve", "x-fairvisor-warning": "mine", "x-loopguard-steered": "1"},
    )

    seen = gateway.upstream.seen[-1]
    assert (seen.header("x-fairvisor-warning"), seen.header("x-loopguard-steered")) == (None, None)


def test_check_envoy_reads_envoy_gateway_configuration(gateway: Stack) -> None:
    dump = json.loads(gateway.envoy.admin("/config_dump"))

    made = report(dump, POLICIES)

    assert {route.name.rpartition("/match/")[0]: route.modes for route in made.routes} == {
        "httproute/gateways/chat/rule/0": ["BUFFERED"],
        "httproute/gateways/several/rule/0": ["BUFFERED"],
        "httproute/gateways/several/rule/1": [],
        "httproute/gateways/rest/rule/0": [],
        "grpcroute/gateways/tools/rule/0": [],
    }
    assert [code for code, _, hurts in check(dump, POLICIES) if hurts] == ["unguarded"] * 3
    assert {"processing-mode", "failure-mode"} <= {
        code for code, _, hurts in check(dump, POLICIES) if not hurts
    }


def test_model_of_envoy_gateway_matches(gateway: Stack) -> None:
    (manager,) = find_managers(
        find_resources(ConfigPlace(json.loads(gateway.envoy.admin("/config_dump"))))
    )
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
