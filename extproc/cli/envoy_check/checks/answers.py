"""Checks that Loopguard learns how requests end, which limits on costs and errors need."""

from __future__ import annotations

from collections.abc import Iterator

from extproc.cli.envoy_check.config import Guard, is_on
from extproc.cli.envoy_check.document import ConfigPlace
from extproc.cli.envoy_check.findings import Finding, note

_LOGGER = "envoy.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig"
_READERS = {
    "events": "envoy.extensions.filters.http.sse_to_metadata.v3.SseToMetadata",
    "JSON": "envoy.extensions.filters.http.json_to_metadata.v3.JsonToMetadata",
}
"""Filters that read tokens, by kind of response."""


def check_entries(guard: Guard) -> Iterator[Finding]:
    """Loopguard learns how a request ended from the access log."""
    if not guard.needs.outcomes or guard.observes:
        return
    place = guard.manager.place.get("access_log")
    if guard.cluster not in [_find_receiver(logger) for logger in place.items()]:
        problem = (
            "Loopguard does not learn how requests end: errors are not counted, and costs "
            "remain estimates"
        )
        yield Finding(
            "outcomes",
            place,
            problem,
            f"an envoy.access_loggers.http_grpc to the cluster {guard.cluster!r}",
        )


def _find_receiver(logger: ConfigPlace) -> str:
    kind, config = logger.get("typed_config").message()
    return (
        config.get("common_config", "grpc_service", "envoy_grpc", "cluster_name").text()
        if kind == _LOGGER
        else ""
    )


def check_usage(guard: Guard) -> Iterator[Finding]:
    """Without filters that read tokens, costs are estimated, which may be intended."""
    if not guard.needs.usage or guard.observes:
        return
    for answers, kind in _READERS.items():
        readers = [item for item in guard.manager.filters if item.kind == kind]
        blind = [
            route.name
            for route in guard.guarded
            if not any(is_on(item, route.route) for item in readers)
        ]
        if blind:
            problem = (
                f"no filter reads the tokens used from answers in {answers}: costs are "
                "estimated from sizes"
            )
            name = kind.split(".")[4]
            place = readers[0].place if readers else guard.manager.place.get("http_filters")
            yield note(
                "usage",
                place,
                problem,
                f"envoy.filters.http.{name}, on for the route (Envoy 1.38)",
                blind,
            )
