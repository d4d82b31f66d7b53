"""The smallest Envoy that calls ext_proc servers: a listener for each, which answers by itself."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench.processes import running

_TYPE = "type.googleapis.com/envoy."
_BUFFER_BYTES = 16 << 20
_MANY = 1_000_000


@contextmanager
def running_envoy(
    directory: Path, listeners: Mapping[str, int], servers: Mapping[str, int]
) -> Iterator[int]:
    """An Envoy with one worker until the block ends. Yields its process id.

    Each listener calls the server of its name; without one, it buffers the body, as the filter
    does. Both are given as ports on loopback.
    """
    config = directory / "envoy.json"
    shown = [_listener(name, port, asks=name in servers) for name, port in listeners.items()]
    resources = {"listeners": shown, "clusters": [_cluster(*server) for server in servers.items()]}
    config.write_text(json.dumps({"static_resources": resources}), encoding="utf-8")
    envoy = str(Path(sys.executable).parent / "envoy")
    flags = ["--concurrency", "1", "--log-level", "warn", "--disable-hot-restart"]
    port = next(iter(listeners.values()))
    with running([envoy, "-c", str(config), *flags], port, directory / "envoy.log") as pid:
        yield pid


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _listener(name: str, port: int, *, asks: bool) -> dict[str, Any]:
    route = {
        "name": "all",
        "match": {"prefix": "/"},
        "direct_response": {"status": 200, "body": {"inline_string": "ok"}},
    }
    asking = (
        _ext_proc(name)
        if asks
        else _filter("buffer", "buffer.v3.Buffer", max_request_bytes=_BUFFER_BYTES)
    )
    manager = {
        "@type": f"{_TYPE}extensions.filters.network.http_connection_manager.v3"
        ".HttpConnectionManager",
        "stat_prefix": name,
        "use_remote_address": True,
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [asking, _filter("router", "router.v3.Router")],
    }
    chain = {
        "filters": [
            {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
        ]
    }
    return {
        "name": name,
        "address": _address(port),
        "per_connection_buffer_limit_bytes": _BUFFER_BYTES,
        "filter_chains": [chain],
    }


# Free-form configuration
def _filter(name: str, kind: str, **config: Any) -> dict[str, Any]:  # noqa: ANN401
    typed = {"@type": f"{_TYPE}extensions.filters.http.{kind}", **config}
    return {"name": f"envoy.filters.http.{name}", "typed_config": typed}


def _ext_proc(server: str) -> dict[str, Any]:
    return _filter(
        "ext_proc",
        "ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": server}},
        message_timeout="30s",  # a busy machine must not turn into failures
        processing_mode={
            "request_header_mode": "SEND",
            "request_body_mode": "BUFFERED",
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
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2
        },
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(port)}}]}],
        },
    }
