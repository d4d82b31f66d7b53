"""The smallest Envoy that drives ext_proc servers: a listener for each, which answers by itself once the filter lets it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench.processes import running

_TYPE = "type.googleapis.com/envoy."
_BUFFER_BYTES = 16 << 20
_MANY = 1_000_000
_USERS = {"rate_limits": [{"actions": [{"request_headers": {"header_name": "x-user-id", "descriptor_key": "user"}}]}]}
"""The descriptor for a rate limit service; other filters do not read it."""


class Listener(NamedTuple):
    """Where Envoy takes requests.

    Attributes:
        port: on loopback.
        server: the name of the ext_proc server that is asked; without one the body is only buffered, which the filter makes
            Envoy do as well.
        metadata: sent to the server with every stream, Envoy's formatters expanded.
        body_mode: how bodies are sent to the server.
        limiter: instead, the name of a rate limit service that is asked about the header `x-user-id`.
        upstream: the name of a server that answers, as rate limit services are not asked about Envoy's own answers.
    """

    port: int
    server: str | None = None
    metadata: Mapping[str, str] = {}
    body_mode: str = "BUFFERED"
    limiter: str | None = None
    upstream: str | None = None


@contextmanager
def running_envoy(directory: Path, listeners: Mapping[str, Listener], servers: Mapping[str, int]) -> Iterator[int]:
    """An Envoy with one worker and these listeners, and servers by port, until the block ends; gives its process id."""
    config = directory / "envoy.json"
    config.write_text(json.dumps(_bootstrap(listeners, servers)), encoding="utf-8")
    envoy = str(Path(sys.executable).parent / "envoy")
    flags = ["--concurrency", "1", "--log-level", "warn", "--disable-hot-restart"]
    port = next(iter(listeners.values())).port
    with running([envoy, "-c", str(config), *flags], port, directory / "envoy.log") as pid:
        yield pid


def _bootstrap(listeners: Mapping[str, Listener], servers: Mapping[str, int]) -> dict[str, Any]:
    shown = [_listener(name, listener) for name, listener in listeners.items()]
    return {"static_resources": {"listeners": shown, "clusters": [_cluster(*server) for server in servers.items()]}}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _listener(name: str, listener: Listener) -> dict[str, Any]:
    route: dict[str, Any] = {
        "name": "all",
        "match": {"prefix": "/"},
        "direct_response": {"status": 200, "body": {"inline_string": "ok"}},
    }
    if listener.upstream:
        route = {"name": "all", "match": {"prefix": "/"}, "route": {"cluster": listener.upstream}}
    manager = {
        "@type": f"{_TYPE}extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "use_remote_address": True,
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route], **_USERS}]},
        "http_filters": [*_ask(listener), _filter("router", "router.v3.Router")],
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    return {
        "name": name,
        "address": _address(listener.port),
        "per_connection_buffer_limit_bytes": _BUFFER_BYTES,
        "filter_chains": [chain],
    }


def _ask(listener: Listener) -> list[dict[str, Any]]:
    if listener.limiter:
        service = {"grpc_service": {"envoy_grpc": {"cluster_name": listener.limiter}}, "transport_api_version": "V3"}
        more = {"domain": "all", "timeout": "30s", "failure_mode_deny": True, "enable_x_ratelimit_headers": "DRAFT_VERSION_03"}
        limit = _filter("ratelimit", "ratelimit.v3.RateLimit", rate_limit_service=service, **more)
        return [limit]
    return [_ext_proc(listener) if listener.server else _buffer()]


def _filter(name: str, kind: str, **config: Any) -> dict[str, Any]:  # noqa: ANN401  # free-form configuration
    typed = {"@type": f"{_TYPE}extensions.filters.http.{kind}", **config}
    return {"name": f"envoy.filters.http.{name}", "typed_config": typed}


def _buffer() -> dict[str, Any]:
    return _filter("buffer", "buffer.v3.Buffer", max_request_bytes=_BUFFER_BYTES)


def _ext_proc(listener: Listener) -> dict[str, Any]:
    metadata = [{"key": key, "value": value} for key, value in listener.metadata.items()]
    return _filter(
        "ext_proc",
        "ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": listener.server}, "initial_metadata": metadata},
        message_timeout="30s",  # a busy machine must not turn into failures
        processing_mode={
            "request_header_mode": "SEND",
            "request_body_mode": listener.body_mode,
            "request_trailer_mode": "SEND",
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
