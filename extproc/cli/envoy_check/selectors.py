"""Finds the Envoy routes whose requests a policy selects, by paths and names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from extproc.apis import write_regex
from extproc.cli.envoy_check.config import Route
from extproc.cli.envoy_check.paths import PathPattern, find_share, list_methods, read_regex
from extproc.policy.bundle import Selector, normalize_host

Taken = tuple[Route, Route | None]
"""A route, and the one whose unknown match makes that uncertain, perhaps itself, or None."""

_LATE = ("cluster_header", "cluster_specifier_plugin", "inline_cluster_specifier_plugin")
"""Fields that choose a cluster for each request."""


def find_taken(routes: Sequence[Route], selector: Selector, *, port: str = "") -> Iterator[Taken]:
    """The routes, in Envoy's order, that may take a request which the selector matches.

    A route with conditions on headers or queries takes some requests of its paths and leaves the
    others to the next route. `port` is appended to the selector's hosts, such as `:1`.
    """
    if selector.hosts is not None:
        serving = _find_hosts(routes, [f"{normalize_host(host)}{port}" for host in selector.hosts])
        routes = [route for route in routes if route.around[0].pointer in serving]
    if selector.routes:
        yield from ((route, None) for route in routes if route.name in selector.routes)
        return
    methods = selector.methods or ()
    if selector.pathExact is not None:
        yield from _find_by_path(routes, methods, PathPattern(selector.pathExact, ""))
    for prefix in selector.list_prefixes():
        yield from _find_by_path(routes, methods, prefix)
    for api in selector.list_apis() if selector.spans_apis() else ():
        yield from _find_by_path(routes, methods, read_regex(write_regex(api)))


def _find_hosts(routes: Sequence[Route], hosts: Sequence[str]) -> set[str]:
    """Pointers of the virtual hosts for these: by name, else by wildcard, else the default one."""
    domains = {route.around[0].pointer: route.around[0].get("domains").names() for route in routes}
    found: set[str] = set()
    for host in hosts:
        ranks = {
            pointer: max([0, *(_rank(domain, host) for domain in listed)])
            for pointer, listed in domains.items()
        }
        found |= {
            pointer for pointer, rank in ranks.items() if rank and rank == max(ranks.values())
        }
    return found


def _rank(domain: str, host: str) -> int:
    """How closely a domain matches a host: 3 by name, 2 by wildcard, 1 by `*`, 0 not at all."""
    inside = domain.strip("*")
    if host in (domain, normalize_host(domain)):
        return 3
    if not inside or inside == domain:
        return int(domain == "*")
    return 2 * (host.endswith(inside) if domain.startswith("*") else host.startswith(inside))


def _find_by_path(
    routes: Sequence[Route], methods: Sequence[str], aim: str | PathPattern
) -> Iterator[Taken]:
    done: set[str] = set()  # virtual hosts in which a route takes all of these paths
    uncertain: dict[str, Route] = {}  # by virtual host, the first route that may take them
    for route in routes:
        host, pattern, taken = route.around[0].pointer, route.pattern, list_methods(route.match)
        answer = pattern.reaches(aim) if isinstance(aim, str) else pattern.meets(aim)
        if (
            host in done
            or answer is False
            or not find_share(route.match)
            or (methods and taken and taken.isdisjoint(methods))
        ):
            continue
        if answer is None or route.chosen:
            uncertain.setdefault(host, route)
        yield route, uncertain.get(host)
        every = pattern.covers(aim) if isinstance(aim, str) else pattern.includes(aim)
        if answer and every and (not route.conditions or _takes_methods(route, methods)):
            done.add(host)


def _takes_methods(route: Route, methods: Sequence[str]) -> bool:
    """Whether the route's only condition is a method, which is the one selected."""
    asked = [header.get("name").text() for header in route.match.get("headers").items()]
    return (
        route.conditions == ["headers"]
        and asked == [":method"]
        and {*methods} == list_methods(route.match)
    )


def share_upstream(route: Route, other: Route) -> bool | None:
    """Whether two routes use the same cluster; None if a request or plugin chooses one."""
    if name_clusters(route) & name_clusters(other):
        return True
    return None if _chooses_late(route) or _chooses_late(other) else False


def _chooses_late(route: Route) -> bool:
    action = route.place.get("route")
    chosen = [action, *action.get("weighted_clusters", "clusters").items()]
    return any(place.get(name).is_there for place in chosen for name in _LATE)


def name_clusters(route: Route) -> set[str]:
    action = route.place.get("route")
    weighted = [
        item.get("name").text() for item in action.get("weighted_clusters", "clusters").items()
    ]
    return {name for name in (action.get("cluster").text(), *weighted) if name}


def takes_everything(route: Route) -> bool:
    return route.pattern.covers("/") and not route.conditions
