"""Checks for requests that reach a guarded route too late to call Loopguard.

Envoy sets up a request's filters by its first route, without those that are off there. A filter
that clears the route cache
makes Envoy choose again, with changed headers, claims or a model that is known by then. Sources:
    Envoy's code of each filter
named below, and its page on HTTP filters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from extproc.cli.envoy_check.config import Guard, HttpFilter, Route, is_on, mentions_loopguard
from extproc.cli.envoy_check.document import ConfigPlace
from extproc.cli.envoy_check.findings import Finding
from extproc.cli.envoy_check.selectors import takes_everything

_FIRST = (
    "the processing_mode of guarded routes in their overrides, and of the filter, not "
    "`disabled`, all SKIP"
)


def check_order(guard: Guard) -> Iterator[Finding]:
    """Filters after the router are not called."""
    kinds = list(guard.manager.filters)
    routers = [number for number, item in enumerate(kinds) if item.is_a("router.v3.Router")]
    if routers and kinds.index(guard.filter) > routers[0]:
        problem = (
            "it comes after the router, which must be the last filter: Envoy refuses this listener"
        )
        yield Finding(
            "filter-order", guard.filter.place, problem, "before envoy.filters.http.router"
        )


def check_late_routes(guard: Guard) -> Iterator[Finding]:
    """A filter that may change the route must precede Loopguard's, which must be on everywhere."""
    filters = list(guard.manager.filters)
    routes = guard.manager.routes
    guarded = {route.route.place.pointer for route in guard.guarded}
    unguarded = [route for route in routes if route.place.pointer not in guarded]
    left_out = [route for route in routes if not is_on(guard.filter, route)]
    covered = any(takes_everything(route) for route in routes)
    for number, item in enumerate(filters):
        may = next((may for kind, may in _MAY_CLEAR.items() if item.is_a(kind)), None)
        if not (may(item.config) if may else _clears(item.config.value)):
            continue
        if item == guard.filter or mentions_loopguard(item):  # Loopguard never changes the route
            continue
        behind = number > filters.index(guard.filter)
        first = unguarded if behind else left_out  # routes whose requests have bypassed Loopguard
        # Requests without a first route
        anywhere = not covered and (behind or guard.filter.place.get("disabled").flag())
        if any(is_on(item, route) for route in first) or (
            anywhere and not item.place.get("disabled").flag()
        ):
            yield _report(guard, item, first, behind=behind)


def _report(guard: Guard, item: HttpFilter, first: list[Route], *, behind: bool) -> Finding:
    start = f"from {first[0].name!r}" if first else "that had no route"
    problem = (
        f"{item.name} may choose another route: a request {start} that it moves to a guarded "
        "route is not guarded, because "
    ) + (
        f"{guard.filter.name} runs before it"
        if behind
        else f"{guard.filter.name} was already left out"
    )
    right = f"{guard.filter.name} after it" if behind else _FIRST
    return Finding(
        "late-route", item.place, problem, right, [route.name for route in guard.guarded]
    )


def _clears(config: Any) -> bool:  # noqa: ANN401  # whatever a document holds
    """Whether clear_route_cache is set; jwt_authn, ext_authz and others have this field."""
    if isinstance(config, list):
        return any(_clears(item) for item in config)
    if not isinstance(config, dict):
        return False
    said = ConfigPlace(config).get("clear_route_cache").flag()
    return said or any(
        _clears(value) for value in config.values() if isinstance(value, dict | list)
    )


def _may_script_clear(config: ConfigPlace) -> bool:
    """Whether a script may clear the cache: changing a header does, unless that is turned off."""
    text = json.dumps(config.value)
    if "clearRouteCache" in text or "filename" in text:
        return True
    changes = any(call in text for call in (":add(", ":replace(", ":remove("))
    return (
        changes
        and "envoy_on_request" in text
        and config.get("clear_route_cache").flag(default=True)
    )


def _may_processor_clear(config: ConfigPlace) -> bool:
    kept = (
        config.get("disable_clear_route_cache").flag()
        or config.get("route_cache_action").text() == "RETAIN"
    )
    return not kept and not config.get("observability_mode").flag()


_MAY_CLEAR: Mapping[str, Callable[[ConfigPlace], bool]] = {
    "lua.v3.Lua": _may_script_clear,
    "ext_proc.v3.ExternalProcessor": _may_processor_clear,
    "grpc_json_transcoder.v3.GrpcJsonTranscoder": lambda config: (
        not config.get("match_incoming_request_route").flag()
    ),
    "json_to_metadata.v3.JsonToMetadata": lambda config: config.get("request_rules").is_there,
}
"""Filters that clear the cache by default, and whether a configuration leaves that on."""
