"""Which of Envoy's routes take requests that a policy selects, as far as paths and names tell."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from extproc.cli.envoy_check.config import Route
from extproc.policy.bundle import Selector, is_below, normalize_host


def find_taken(routes: Sequence[Route], selector: Selector) -> Iterator[Route]:
    """The routes, as Envoy tries them, that may get a request which the selector takes.

    Headers, methods and queries in a route's match are not looked at: such a route takes some requests of its paths, and leaves
    the others to the next one.
    """
    if selector.hosts is not None:
        serving = _find_hosts(routes, selector.hosts)
        routes = [route for route in routes if route.around[0].pointer in serving]
    if selector.routes:
        yield from (route for route in routes if route.name in selector.routes)
        return
    if selector.pathExact is not None:
        yield from _find_by_path(routes, selector.pathExact)
    if selector.pathPrefix is not None:
        yield from _find_below(routes, selector.pathPrefix)


def _find_hosts(routes: Sequence[Route], hosts: Sequence[str]) -> set[str]:
    """Pointers of the virtual hosts that serve these: by their names, else by a wildcard, else the one for all others."""
    domains = {route.around[0].pointer: route.around[0].get("domains").names() for route in routes}
    found: set[str] = set()
    for host in map(normalize_host, hosts):
        for serves in (_names, _matches_wildcard, _is_for_all):
            serving = {pointer for pointer, listed in domains.items() if any(serves(domain, host) for domain in listed)}
            if serving:
                found |= serving
                break
    return found


def _names(domain: str, host: str) -> bool:
    return normalize_host(domain) == host


def _matches_wildcard(domain: str, host: str) -> bool:
    inside = domain.strip("*")
    return (
        len(inside) < len(domain)
        and bool(inside)
        and (host.endswith(inside) if domain.startswith("*") else host.startswith(inside))
    )


def _is_for_all(domain: str, _: str) -> bool:
    return domain == "*"


def _find_by_path(routes: Sequence[Route], path: str) -> Iterator[Route]:
    done: set[str] = set()  # virtual hosts in which the path has found its route
    for route in routes:
        host = route.around[0].pointer
        if host not in done and _takes(route, path):
            yield route
            if _takes_all_of_a_path(route):
                done.add(host)


def _find_below(routes: Sequence[Route], prefix: str) -> Iterator[Route]:
    done: set[str] = set()  # virtual hosts in which everything below the prefix has found its route
    for route in routes:
        host = route.around[0].pointer
        if host in done:
            continue
        if _takes(route, prefix):
            yield route
            if _takes_all_below(route, prefix):
                done.add(host)
        elif _is_inside(route, prefix):
            yield route


def _takes(route: Route, path: str) -> bool:
    """Whether it takes this very path."""
    match = route.place.get("match")
    if match.get("path").is_there:
        return match.get("path").text() == path
    if match.get("prefix").is_there:
        return path.startswith(match.get("prefix").text())
    if match.get("path_separated_prefix").is_there:
        return is_below(path, match.get("path_separated_prefix").text())
    if match.get("safe_regex").is_there:
        return _matches(match.get("safe_regex", "regex").text(), path)
    return False  # for CONNECT, or by a template


def _matches(regex: str, path: str) -> bool:
    try:
        return re.fullmatch(regex, path) is not None
    except re.error:  # RE2 has some that Python does not
        return False


def _takes_all_of_a_path(route: Route) -> bool:
    """Nothing but the path decides."""
    return not any(
        route.place.get("match", name).is_there for name in ("headers", "query_parameters", "dynamic_metadata", "grpc")
    )


def _takes_all_below(route: Route, prefix: str) -> bool:
    match = route.place.get("match")
    wide = match.get("prefix").is_there or match.get("path_separated_prefix").is_there
    return wide and _takes(route, prefix) and _takes_all_of_a_path(route)


def takes_everything(route: Route) -> bool:
    """Whatever the request is, this route takes it."""
    return _takes_all_below(route, "/")


def _is_inside(route: Route, prefix: str) -> bool:
    """Whether what it takes is below the prefix."""
    match = route.place.get("match")
    named = match.get("path").text() or match.get("prefix").text() or match.get("path_separated_prefix").text()
    return bool(named) and is_below(named, prefix)
