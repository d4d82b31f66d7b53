"""What the chart renders for Envoy Gateway, taken in by its own translator, which `make test-mesh` builds: Go, and minutes.

It checks objects against their definitions, and prints the Envoy configuration that it makes of them, which a real Envoy runs.
`gateway_configuration` in tests/support/meshes.py is the model of it that `make test` has.
"""

from __future__ import annotations

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
from tests.support.check_envoy import found as check
from tests.support.check_envoy import report
from tests.support.harness import Stack
from tests.support.meshes import BUILT, GATEWAY_LEFT, gateway_configuration, statuses

pytestmark = pytest.mark.skipif(not BUILT, reason="`make test-mesh` was not asked for: the real Envoy Gateway is NOT tested")

GATEWAY_CASES = {name: values for name, values in CASES.items() if values.get("envoyGateway", {}).get("enabled")}
MODELLED = (*GATEWAY_LEFT, "early_header_mutation_extensions", "http2_protocol_options", "request_timeout")


@pytest.fixture(scope="module")
def gateway() -> Iterator[Stack]:
    """With one Loopguard."""
    with envoy_gateway(VALUES) as made:
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
    """A filter in front that chooses a request's route, as Envoy AI Gateway's does by the model."""
    made = json.loads(text)
    lua = {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua",
        "defaultSourceCode": {"inlineString": LATE},
    }
    manager = made["static_resources"]["listeners"][0]["defaultFilterChain"]["filters"][0]["typedConfig"]
    manager["httpFilters"].insert(0, {"name": "late", "typedConfig": lua})
    return json.dumps(made)


@pytest.mark.parametrize(
    ("target", "last"), [({"kind": "Gateway", "name": "public"}, 429), ({"name": "chat"}, 200)], ids=["Gateway", "HTTPRoute"]
)
def test_a_route_that_is_chosen_late_is_guarded_by_a_policy_for_the_gateway(target: dict[str, str], last: int) -> None:
    """Not by one for this route alone: Envoy Gateway turns the filter on by the first route of a request."""
    values = merged(VALUES, {"envoyGateway": {"targetRefs": [target]}})
    with envoy_gateway(values, edit=choose_late) as made:
        assert statuses(made, "/rest/late/x", 3, body=b"same") == [200, 200, last]
        codes = [code for code, _, _ in check(json.loads(made.envoy.admin("/config_dump")), POLICIES)]
        assert ("late-route" in codes) == (last == 200)


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

    assert {route.name.rpartition("/match/")[0]: route.modes for route in made.routes} == {
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
