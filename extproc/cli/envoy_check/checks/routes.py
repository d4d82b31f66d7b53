"""Checks how requests reach guarded routes, and the routes' settings."""

from __future__ import annotations

import re
from collections.abc import Iterator

from extproc.cli.envoy_check.config import Guard, GuardedRoute, find_mirrors
from extproc.cli.envoy_check.document import ConfigPlace
from extproc.cli.envoy_check.findings import Finding, note

_WARNING = re.compile(r"%DYNAMIC_METADATA\(\W*loopguard\W+warning\W*\)%")
_HEADER = '{header: {key: x-fairvisor-warning, value: "%DYNAMIC_METADATA(loopguard:warning)%"}}'


def check_spelling(guard: Guard) -> Iterator[Finding]:
    """Envoy chooses the route by the path as the client spelled it."""
    if len(guard.guarded) == len(guard.manager.routes) and not guard.filter.matcher.is_there:
        return  # every request is guarded
    examples = {"normalize_path": "/x/../v1/chat", "merge_slashes": "//v1/chat"}
    for name, spelling in examples.items():
        place = guard.manager.place.get(name)
        if not place.flag():
            problem = (
                f"a client that writes {spelling} for /v1/chat takes another route, which "
                "may be unguarded"
            )
            yield Finding("path-spelling", place, problem, f"{name}: true")


def check_escaped_slashes(guard: Guard) -> Iterator[Finding]:
    """Only the upstream knows whether it reads %2F as a slash."""
    place = guard.manager.place.get("path_with_escaped_slashes_action")
    if len(guard.guarded) < len(guard.manager.routes) and not place.is_there:
        problem = (
            "Envoy keeps %2F; an upstream that reads it as a slash, as ASGI applications "
            "do, sees another path than Envoy"
        )
        yield note(
            "escaped-slashes",
            place,
            problem,
            "path_with_escaped_slashes_action: UNESCAPE_AND_FORWARD, or KEEP_UNCHANGED",
        )


def check_client_header(guard: Guard) -> Iterator[Finding]:
    """Clients see warnings only in a header that Envoy makes from metadata."""
    silent = [route for route in guard.guarded if not _tells_clients(route)]
    if silent and guard.needs.warns and not guard.observes:
        place = silent[0].route.around[0].get("response_headers_to_add")
        problem = (
            "clients do not see warnings: no response header is made from Loopguard's metadata"
        )
        yield Finding(
            "client-header",
            place,
            problem,
            f"response_headers_to_add: [{_HEADER}]",
            [route.name for route in silent],
        )


def _tells_clients(route: GuardedRoute) -> bool:
    headers = [
        item
        for level in route.route.levels
        for item in level.get("response_headers_to_add").items()
    ]
    return any(_WARNING.search(item.get("header", "value").text()) for item in headers)


def check_upgrades(guard: Guard) -> Iterator[Finding]:
    """Upgrades can have their own filters, without Loopguard, which refuses WebSockets."""
    for item in guard.manager.place.get("upgrade_configs").items():
        filters = item.get("filters")
        names = [
            each.get("name").text() for each in filters.items() if not each.get("disabled").flag()
        ]
        if (
            any(filters.items())
            and item.get("enabled").flag(default=True)
            and guard.filter.name not in names
        ):
            kind = item.get("upgrade_type").text()
            problem = f"upgrades to {kind} have their own filters, which do not include Loopguard"
            yield Finding(
                "upgrades", filters, problem, f"{guard.filter.name} among them, or no filters here"
            )


def check_retries(guard: Guard) -> Iterator[Finding]:
    """Retries by Envoy itself are not counted."""
    for route in guard.guarded:
        place = _find_retries(route)
        if place is not None:
            problem = (
                "Envoy itself retries a request up to "
                f"{place.get('num_retries').number(1):g} times, but it is counted once"
            )
            yield note("retries", place, problem, routes=[route.name])


def check_kept_bodies(guard: Guard) -> Iterator[Finding]:
    """A partly buffered body may reach the upstream with a part repeated if it is retried."""
    for route in guard.guarded:
        keeping = _find_retries(route) is not None or find_mirrors(route.route)
        if route.body_mode != "BUFFERED_PARTIAL" or not keeping:
            continue
        places = [level.get("per_request_buffer_limit_bytes") for level in route.route.levels[:2]]
        nearest = next((place for place in places if place.is_there), places[0])
        if nearest.number(1):
            problem = (
                "Envoy keeps bodies for retries; if Loopguard goes down when BUFFERED_PARTIAL has "
                "collected part of a body, "
                "Envoy sends that part twice"
            )
            right = (
                "per_request_buffer_limit_bytes: 0, so that no request with a body is "
                "retried; or request_body_mode: BUFFERED"
            )
            yield Finding("kept-bodies", nearest, problem, right, [route.name])


def _find_retries(route: GuardedRoute) -> ConfigPlace | None:
    places = (
        route.route.place.get("route", "retry_policy"),
        route.route.around[0].get("retry_policy"),
    )
    return next((place for place in places if place.get("retry_on").text()), None)


def check_overrides(guard: Guard) -> Iterator[Finding]:
    """Envoy ignores some overrides of routes."""
    for route in guard.guarded:
        for overrides in route.overrides:
            place = overrides.get("request_attributes")
            if place.is_there:
                problem = "Envoy accepts request_attributes on a route and ignores them"
                yield Finding(
                    "overrides",
                    place,
                    problem,
                    "request_attributes of the filter itself",
                    [route.name],
                )
