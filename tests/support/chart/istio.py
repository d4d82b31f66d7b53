"""An Envoy configuration with an EnvoyFilter's patches applied, as the chart uses them."""

import copy
from collections.abc import Iterator
from typing import Any

from tests.support.chart import Object

HCM = "envoy.filters.network.http_connection_manager"

# The ports of a listener and of its routes, by context: a gateway's pods listen on the targetPort
# of their Service, and its routes go by the port of the Gateway's server; one inbound listener
# serves every port of a workload.
PORTS = {"GATEWAY": (8443, 443), "SIDECAR_INBOUND": (15006, 8080), "SIDECAR_OUTBOUND": (443, 443)}


# Istio's settings of HTTP connections that the chart leaves alone; tests/mesh checks them.
LEFT = {
    "use_remote_address": True,
    "normalize_path": True,
    "merge_slashes": None,
    "proxy_100_continue": True,
}


def without_loopguard(bootstrap: Object) -> Object:
    """The bootstrap of `loopguard envoy-config` without Loopguard, for an EnvoyFilter."""
    (listener,) = bootstrap["static_resources"]["listeners"]
    del listener["per_connection_buffer_limit_bytes"]
    manager = http_manager(bootstrap)
    for key in ("request_timeout", "http2_protocol_options", "early_header_mutation_extensions"):
        del manager[key]
    for key, value in LEFT.items():
        manager.pop(key, None)
        manager |= {} if value is None else {key: value}
    manager["access_log"] = [
        item for item in manager["access_log"] if item["name"] == "envoy.access_loggers.stdout"
    ]
    manager["internal_address_config"] = {}  # as older Envoys have it where nothing is said
    manager["http_filters"] = [
        item for item in manager["http_filters"] if item["name"] == "envoy.filters.http.router"
    ]
    for host in manager["route_config"]["virtual_hosts"]:
        del host["response_headers_to_add"]
        for route in host["routes"]:
            route.pop("typed_per_filter_config", None)
    return bootstrap


def http_manager(bootstrap: Object) -> Object:
    (listener,) = bootstrap["static_resources"]["listeners"]
    (chain,) = listener["filter_chains"]
    found: Object = chain["filters"][0]["typed_config"]
    return found


def patched(bootstrap: Object, envoy_filter: Object) -> Object:
    """The bootstrap with every patch that matches. Istio ignores others silently."""
    for patch in envoy_filter["spec"]["configPatches"]:
        value, match = patch["patch"]["value"], patch["match"]
        if not _on_port(match):
            continue
        if patch["applyTo"] == "HTTP_FILTER":
            assert patch["patch"]["operation"] == "INSERT_BEFORE"
            filters = http_manager(bootstrap)["http_filters"]
            wanted = match["listener"]["filterChain"]["filter"]["subFilter"]["name"]
            filters.insert([item["name"] for item in filters].index(wanted), value)
        else:
            assert patch["patch"]["operation"] == "MERGE"
            for message in _find(bootstrap, patch["applyTo"], match):
                merge(message, copy.deepcopy(value))
    return bootstrap


def _find(bootstrap: Object, place: str, match: Object) -> Iterator[Object]:
    (listener,) = bootstrap["static_resources"]["listeners"]
    if place == "LISTENER":
        yield listener
    elif place == "NETWORK_FILTER":
        assert match["listener"]["filterChain"]["filter"]["name"] == HCM
        yield listener["filter_chains"][0]["filters"][0]
    elif place == "VIRTUAL_HOST":
        yield from http_manager(bootstrap)["route_config"]["virtual_hosts"]
    elif place == "CLUSTER":
        for cluster in bootstrap["static_resources"]["clusters"]:
            if cluster["name"] == match["cluster"]["name"]:
                # What an Any holds is replaced as a whole
                cluster.pop("typed_extension_protocol_options")
                yield cluster
    else:
        assert place == "HTTP_ROUTE"
        found = list(_routes(bootstrap, match["routeConfiguration"]["vhost"]))
        assert found, f"no route for {match}"
        yield from found


def _on_port(match: Object) -> bool:
    listener, routes = PORTS[match["context"]]
    own = listener if "listener" in match else routes
    place = match.get("listener") or match.get("routeConfiguration") or {}
    return bool(place.get("portNumber", own) == own)


def _routes(bootstrap: Object, wanted: Object) -> Iterator[Object]:
    for host in http_manager(bootstrap)["route_config"]["virtual_hosts"]:
        if wanted.get("name", host["name"]) == host["name"]:
            yield from (
                route for route in host["routes"] if route["name"] == wanted["route"]["name"]
            )


def merge(message: Object, other: Object) -> None:
    """Merge like protobuf: messages and maps key by key, lists one after the other."""
    for key, value in other.items():
        old: Any = message.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            merge(old, value)
        elif isinstance(old, list) and isinstance(value, list):
            old += value
        else:
            message[key] = value
