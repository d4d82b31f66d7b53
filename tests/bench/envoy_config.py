"""The smallest Envoy that drives ext_proc servers: a listener for each, which answers by itself once the filter lets it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPE = "type.googleapis.com/envoy."
_BUFFER_BYTES = 16 << 20
_MANY = 1_000_000


def bootstrap(ports: Mapping[str, int], servers: Mapping[str, int]) -> dict[str, Any]:
    """A configuration.

    Args:
        ports: where to listen, by name.
        servers: ports of ext_proc servers, by the name of the listener that asks them; a listener without one only buffers
            the body, which the filter makes Envoy do as well.
    """
    listeners = [_listener(name, port, _ext_proc(name) if name in servers else _buffer()) for name, port in ports.items()]
    clusters = [_cluster(name, port) for name, port in servers.items()]
    return {"static_resources": {"listeners": listeners, "clusters": clusters}}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _listener(name: str, port: int, http_filter: dict[str, Any]) -> dict[str, Any]:
    route = {"name": "all", "match": {"prefix": "/"}, "direct_response": {"status": 200, "body": {"inline_string": "ok"}}}
    manager = {
        "@type": f"{_TYPE}extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "use_remote_address": True,
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [http_filter, _filter("router", "router.v3.Router")],
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    return {
        "name": name,
        "address": _address(port),
        "per_connection_buffer_limit_bytes": _BUFFER_BYTES,
        "filter_chains": [chain],
    }


def _filter(name: str, kind: str, **config: Any) -> dict[str, Any]:  # noqa: ANN401  # free-form configuration
    typed = {"@type": f"{_TYPE}extensions.filters.http.{kind}", **config}
    return {"name": f"envoy.filters.http.{name}", "typed_config": typed}


def _buffer() -> dict[str, Any]:
    return _filter("buffer", "buffer.v3.Buffer", max_request_bytes=_BUFFER_BYTES)


def _ext_proc(cluster: str) -> dict[str, Any]:
    return _filter(
        "ext_proc",
        "ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": cluster}},
        message_timeout="30s",  # a busy machine must not turn into failures
        processing_mode={
            "request_header_mode": "SEND",
            "request_body_mode": "BUFFERED",
            "response_header_mode": "SKIP",
        },
        request_attributes=["source.address", "xds.route_name"],
    )


def _cluster(name: str, port: int) -> dict[str, Any]:
    limits = {"max_requests": _MANY, "max_pending_requests": _MANY, "max_connections": _MANY}
    options = f"{_TYPE}extensions.upstreams.http.v3.HttpProtocolOptions"
    http2 = {"@type": options, "explicit_http_config": {"http2_protocol_options": {}}}
    return {
        "name": name,
        "connect_timeout": "5s",
        "circuit_breakers": {"thresholds": [limits]},
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(port)}}]}],
        },
    }
