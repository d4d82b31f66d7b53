"""Finds the Envoy routes whose requests a policy selects, as far as paths and names tell."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from extproc.cli.envoy_check.config import Route
from extproc.cli.envoy_check.document import ConfigPlace
from extproc.policy.bundle import Selector, is_below, normalize_host


def find_taken(routes: Sequence[Route], selector: Selector) -> Iterator[Route]:
    """The routes, in Envoy's order, that may get a request which the selector matches.

    Headers, methods and queries in a route's match are ignored: such a route takes some requests of its paths, and leaves the
    others to the next route.
    """
    if selector.hosts is not None:
        serving = _find_hosts(routes, selector.hosts)
        routes = [route for route in routes if route.around[0].pointer in serving]
    if selector.routes:
        yield from (route for route in routes if route.name in selector.routes)
        return
    if selector.pathExact is not None:
        yield from _find_by_path(routes, selector.pathExact, below=False)
    for prefix in selector.list_prefixes():
        yield from _find_by_path(routes, prefix, below=True)


def _find_hosts(routes: Sequence[Route], hosts: Sequence[str]) -> set[str]:
    """Pointers of the virtual hosts that serve these hosts: by name, else by a wildcard, else the one for all others."""
    domains = {route.around[0].pointer: route.around[0].get("domains").names() for route in routes}
    found: set[str] = set()
    for host in map(normalize_host, hosts):
        ranks = {pointer: max([0, *(_rank(domain, host) for domain in listed)]) for pointer, listed in domains.items()}
        found |= {pointer for pointer, rank in ranks.items() if rank and rank == max(ranks.values())}
    return found


def _rank(domain: str, host: str) -> int:
    """How closely a domain matches a host: 3 by name, 2 by a wildcard, 1 by `*`, 0 not at all."""
    inside = domain.strip("*")
    if normalize_host(domain) == host:
        return 3
    if not inside or inside == domain:
        return int(domain == "*")
    return 2 * (host.endswith(inside) if domain.startswith("*") else host.startswith(inside))


def _find_by_path(routes: Sequence[Route], path: str, *, below: bool) -> Iterator[Route]:
    done: set[str] = set()  # virtual hosts in which the path, or everything below it, has its route
    for route in routes:
        host = route.around[0].pointer
        fits = host not in done and takes(route.place, path)
        if fits or (below and host not in done and _is_inside(route, path)):
            yield route
        if fits and _takes_all_of_a_path(route) and (not below or _is_wide(route)):
            done.add(host)


def takes(place: ConfigPlace, path: str) -> bool:
    """Whether the `match` of a route, or of another rule, matches this exact path."""
    match = place.get("match")
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
    except re.error:  # RE2 accepts patterns that Python does not
        return False


def _takes_all_of_a_path(route: Route) -> bool:
    """Whether it matches by path only."""
    return not any(
        route.place.get("match", name).is_there for name in ("headers", "query_parameters", "dynamic_metadata", "grpc")
    )


def _is_wide(route: Route) -> bool:
    """Whether it also matches everything below a path."""
    return any(route.place.get("match", name).is_there for name in ("prefix", "path_separated_prefix"))


def name_clusters(route: Route) -> set[str]:
    """The clusters to which a route sends requests."""
    action = route.place.get("route")
    weighted = [item.get("name").text() for item in action.get("weighted_clusters", "clusters").items()]
    return {name for name in (action.get("cluster").text(), *weighted) if name}


def takes_everything(route: Route) -> bool:
    """Whether this route matches every request."""
    return _is_wide(route) and takes(route.place, "/") and _takes_all_of_a_path(route)


def _is_inside(route: Route, prefix: str) -> bool:
    """Whether its path is below the prefix."""
    match = route.place.get("match")
    named = match.get("path").text() or match.get("prefix").text() or match.get("path_separated_prefix").text()
    return bool(named) and is_below(named, prefix)
