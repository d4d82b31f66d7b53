"""Meshes: the chart's objects, and what control planes make of them."""

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.chart import CASES, Object, Values, objects, of_kind
from tests.support.chart.istio import http_manager, without_loopguard
from tests.support.documents import read_yaml
from tests.support.harness import Stack

ISTIO = {name: values for name, values in CASES.items() if values.get("istio", {}).get("enabled")}


FILTER = "loopguard.guards.lg-loopguard"


each_istio = pytest.mark.parametrize("values", ISTIO.values(), ids=ISTIO)


def envoy_filter(values: Values) -> Object:
    (found,) = of_kind(objects(values), "EnvoyFilter")
    return found


def unwrap(config: Object) -> Object:
    inside: Object = config.get("extension_config", {}).get("typed_config", config)
    return inside


def cluster_names(found: Object) -> Iterator[str]:
    """The clusters that the filters and access logs of an EnvoyFilter use."""
    for patch in found["spec"]["configPatches"]:
        config = unwrap(patch["patch"]["value"].get("typed_config", {}))
        logs = [log["typed_config"]["common_config"] for log in config.get("access_log", ())]
        for asking in [config, *logs]:
            if "grpc_service" in asking:
                yield asking["grpc_service"]["envoy_grpc"]["cluster_name"]


# Envoy Gateway's settings of HTTP connections that the chart leaves alone; tests/mesh checks them.
GATEWAY_LEFT = {
    "use_remote_address": True,
    "normalize_path": True,
    "merge_slashes": True,
    "path_with_escaped_slashes_action": "UNESCAPE_AND_REDIRECT",
    "proxy_100_continue": None,
}


BODY_MODES = {"Streamed": "STREAMED", "Buffered": "BUFFERED", "BufferedPartial": "BUFFERED_PARTIAL"}


def seconds(duration: str) -> float:
    """A Gateway API duration, in the forms that the chart writes."""
    units = {"s": 1, "ms": 0.001}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)(ms|s)", duration))


def retry_policy(retry: Object) -> Object:
    back_off = {
        name: f"{seconds(text):.3f}s" for name, text in retry["perRetry"]["backOff"].items()
    }
    return {
        "retry_on": ",".join(retry["retryOn"]["triggers"]),
        "num_retries": retry["numRetries"],
        "retry_back_off": {
            "base_interval": back_off["baseInterval"],
            "max_interval": back_off["maxInterval"],
        },
    }


def gateway_configuration(text: str, values: Values) -> str:
    """An Envoy as Envoy Gateway configures it: the filter is disabled, and enabled on targets."""
    made = without_loopguard(read_yaml(text))
    made_of = objects(values)
    (extension,) = of_kind(made_of, "EnvoyExtensionPolicy")
    (client,) = of_kind(made_of, "ClientTrafficPolicy")
    (proc,) = extension["spec"]["extProc"]
    manager = http_manager(made)
    manager |= GATEWAY_LEFT
    if "timeout" in client["spec"]:
        manager["request_timeout"] = client["spec"]["timeout"]["http"]["requestReceivedTimeout"]
    manager["http2_protocol_options"] = {
        "initial_connection_window_size": 1_048_576,
        "initial_stream_window_size": int(client["spec"]["http2"]["initialStreamWindowSize"]),
        "max_concurrent_streams": 100,
    }
    removed = [
        {"remove": name} for name in client["spec"]["headers"]["earlyRequestHeaders"]["remove"]
    ]
    extension_type = (
        "type.googleapis.com/envoy.extensions.http.early_header_mutation"
        ".header_mutation.v3.HeaderMutation"
    )
    manager["early_header_mutation_extensions"] = [
        {
            "name": "envoy.http.early_header_mutation.header_mutation",
            "typed_config": {"@type": extension_type, "mutations": removed},
        }
    ]
    (listener,) = made["static_resources"]["listeners"]
    listener["per_connection_buffer_limit_bytes"] = int(client["spec"]["connection"]["bufferLimit"])
    request = proc["processingMode"]["request"]
    config = {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {
            "envoy_grpc": {"cluster_name": "loopguard", "authority": "lg-loopguard.guards:50051"},
            "timeout": "10s",
            "retry_policy": retry_policy(proc["backendSettings"]["retry"]),
        },
        **({"failure_mode_allow": True} if proc["failOpen"] else {}),
        "message_timeout": f"{seconds(proc['messageTimeout']):.3f}s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": BODY_MODES[request["body"]],
            "request_trailer_mode": "SKIP",
            "response_header_mode": "SKIP",
            "response_trailer_mode": "SKIP",
        },
        "request_attributes": request["attributes"],
        "metadata_options": {
            "forwarding_namespaces": {"untyped": proc["metadata"]["accessibleNamespaces"]},
            "receiving_namespaces": {"untyped": proc["metadata"]["writableNamespaces"]},
        },
    }
    name = "envoy.filters.http.ext_proc/envoyextensionpolicy/gateways/lg-loopguard/extproc/0"
    manager["http_filters"].insert(0, {"name": name, "disabled": True, "typed_config": config})
    on = {"@type": "type.googleapis.com/envoy.config.route.v3.FilterConfig", "config": {}}
    manager["route_config"]["virtual_hosts"][0]["routes"] = [
        {
            "name": "httproute/gateways/chat/rule/0/match/0/*",
            "match": {"prefix": "/"},
            "route": {"cluster": "upstream", "timeout": "0s"},
            "typed_per_filter_config": {name: on},
        }
    ]
    return json.dumps(made)


def kgateway_configuration(text: str, values: Values) -> str:
    """An Envoy as kgateway 2.2 configures it for a policy of the Gateway, from its source.

    The filter is disabled, and enabled by the route configuration. It is in a composite filter,
    so that a route can turn off all ext_proc filters.
    """
    made = without_loopguard(read_yaml(text))
    made_of = objects(values)
    (extension,) = of_kind(made_of, "GatewayExtension")
    (listener_policy,) = of_kind(made_of, "ListenerPolicy")
    asked = extension["spec"]["extProc"]
    settings = listener_policy["spec"]["default"]
    manager = http_manager(made)
    manager |= {"use_remote_address": True, "normalize_path": True, "merge_slashes": True}
    removed = settings["httpSettings"]["earlyRequestHeaderModifier"]["remove"]
    mutation = "envoy.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation"
    manager["early_header_mutation_extensions"] = [
        {
            "name": "envoy.http.early_header_mutation.header_mutation",
            "typed_config": {
                "@type": f"type.googleapis.com/{mutation}",
                "mutations": [{"remove": name} for name in removed],
            },
        }
    ]
    (listener,) = made["static_resources"]["listeners"]
    listener["per_connection_buffer_limit_bytes"] = settings["perConnectionBufferLimitBytes"]
    ext_proc = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3"
    processor = {
        "@type": f"{ext_proc}.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "loopguard"}},
        "failure_mode_allow": asked["failOpen"],
        "message_timeout": f"{seconds(asked['messageTimeout']):.3f}s",
        "max_message_timeout": f"{seconds(asked['maxMessageTimeout']):.3f}s",
        "stat_prefix": asked["statPrefix"],
        "processing_mode": {
            re.sub("([A-Z])", lambda found: f"_{found[0].lower()}", key): mode
            for key, mode in asked["processingMode"].items()
        },
        "request_attributes": asked.get("requestAttributes", []),
        "metadata_options": {"forwarding_namespaces": asked["metadataOptions"]["forwarding"]},
    }
    composite = "type.googleapis.com/envoy.extensions.filters.http.composite.v3"
    matching = "type.googleapis.com/envoy.extensions.matching"
    not_turned_off = {
        "input": {
            "name": "disable",
            "typed_config": {
                "@type": f"{matching}.common_inputs.network.v3.DynamicMetadataInput",
                "filter": "dev.kgateway.disable_ext_proc",
                "path": [{"key": "disable"}],
            },
        },
        "custom_match": {
            "name": "envoy.matching.matchers.metadata_matcher",
            "typed_config": {
                "@type": f"{matching}.input_matchers.metadata.v3.Metadata",
                "invert": True,
                "value": {"bool_match": True},
            },
        },
    }
    action = {
        "name": "composite-action",
        "typed_config": {
            "@type": f"{composite}.ExecuteFilterAction",
            "typed_config": {"name": "envoy.filters.http.ext_proc", "typed_config": processor},
        },
    }
    matcher = {"predicate": {"single_predicate": not_turned_off}, "on_match": {"action": action}}
    name = f"ext_proc/{extension['metadata']['namespace']}/{extension['metadata']['name']}"
    manager["http_filters"].insert(
        0,
        {
            "name": name,
            "disabled": True,
            "typed_config": {
                "@type": "type.googleapis.com/"
                "envoy.extensions.common.matching.v3.ExtensionWithMatcher",
                "extension_config": {
                    "name": "composite_ext_proc",
                    "typed_config": {"@type": f"{composite}.Composite"},
                },
                "xds_matcher": {"matcher_list": {"matchers": [matcher]}},
            },
        },
    )
    manager["route_config"]["typed_per_filter_config"] = {
        name: {"@type": f"{ext_proc}.ExtProcPerRoute", "overrides": {}}
    }
    return json.dumps(made)


# The folder that `make test-mesh` builds into.
BUILT = os.environ.get("LOOPGUARD_TEST_MESH", "")


USER = {"x-user-id": "ann"}


def read_port(cluster: Object) -> int:
    (group,) = cluster["load_assignment"]["endpoints"]
    return int(group["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]["port_value"])


# Of `send`
def statuses(made: Stack, path: str, times: int, **more: Any) -> list[int]:  # noqa: ANN401
    return [made.send(path, method="POST", headers=USER, **more).status for _ in range(times)]
