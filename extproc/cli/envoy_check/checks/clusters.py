"""Checks that Envoy reaches Loopguard, with enough concurrent requests."""

from __future__ import annotations

from collections.abc import Iterator

from extproc.cli.envoy_check.config import Guard, find_named
from extproc.cli.envoy_check.document import ConfigPlace
from extproc.cli.envoy_check.findings import Finding, note

_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_AGGREGATE = "envoy.clusters.aggregate"
_DEFAULT_REQUESTS = 1024
_ENOUGH = 10_000
"""Loopguard's default of --max-throttled."""


def check_cluster(guard: Guard) -> Iterator[Finding]:
    if not guard.cluster:
        return
    cluster = find_named(guard.manager.resources.clusters, guard.cluster)
    if cluster is None:
        place = guard.filter.config.get("grpc_service", "envoy_grpc", "cluster_name")
        if guard.manager.resources.comes_later:
            yield note(
                "cluster",
                place,
                (
                    f"the cluster {guard.cluster!r} is not in this configuration, so it was not "
                    "checked"
                ),
            )
        else:
            yield Finding(
                "cluster",
                place,
                (
                    f"there is no cluster {guard.cluster!r}: Envoy accepts that, and never asks "
                    "Loopguard"
                ),
            )
        return
    members = [cluster]
    if cluster.get("cluster_type", "name").text() == _AGGREGATE:
        names = cluster.get("cluster_type", "typed_config", "clusters").names()
        found = [find_named(guard.manager.resources.clusters, name) for name in names]
        members = [member for member in found if member is not None]
    for member in members:
        yield from _check_protocol(member)
        yield from _check_breakers(member)
        health = member.get("health_checks")
        if not health.is_there:
            problem = (
                "Envoy keeps calling a Loopguard that drains or hangs until its connection fails"
            )
            yield note(
                "health-checks",
                health,
                problem,
                "health_checks with grpc_health_check, every second",
            )


def _check_protocol(cluster: ConfigPlace) -> Iterator[Finding]:
    options = cluster.get("typed_extension_protocol_options").entry(_OPTIONS).message()[1]
    by_alpn = options.get("auto_config").is_there and cluster.get("transport_socket").is_there
    explicit = options.get("explicit_http_config", "http2_protocol_options").is_there
    if not (explicit or by_alpn or cluster.get("http2_protocol_options").is_there):
        place = options if options.is_there else cluster.get("typed_extension_protocol_options")
        yield Finding(
            "http2",
            place,
            "gRPC needs HTTP/2, and this cluster uses another protocol: Loopguard can never answer",
            "explicit_http_config: {http2_protocol_options: {}}",
        )


def _check_breakers(cluster: ConfigPlace) -> Iterator[Finding]:
    thresholds = cluster.get("circuit_breakers", "thresholds")
    default = next(
        (item for item in thresholds.items() if item.get("priority").text("DEFAULT") == "DEFAULT"),
        None,
    )
    place = default.get("max_requests") if default is not None else thresholds
    allowed = place.number(_DEFAULT_REQUESTS)
    if allowed < _ENOUGH:
        yield Finding(
            "circuit-breakers",
            place,
            (
                f"Envoy skips Loopguard above {allowed:,.0f} concurrent requests, which include "
                "throttled ones while they are held"
            ),
            (
                "thresholds: [{max_requests: 1000000, max_pending_requests: 1000000, "
                "max_connections: "
                "1000000}]"
            ),
        )
