"""The parts that an existing configuration needs, cut out of the bootstrap's templates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from extproc.apis import write_regex
from extproc.cli.envoy_config.options import EnvoyOptions
from extproc.cli.envoy_config.render import (
    describe_guard,
    describe_route,
    find_tolerant,
    read_template,
)
from extproc.cli.envoy_config.routes import GuardedPath, plan_routes
from extproc.cli.envoy_config.template import cut_parts
from extproc.policy.loader import PolicySet

_HEAD = """\
# The parts that an existing Envoy configuration needs to call Loopguard. Made by
# `loopguard envoy-config --snippet` for Envoy {envoy} and newer. The comment above each part says
# where it goes. Add lists to yours; settings replace yours. Configuration from a control plane has
# the same places under other names.
# When all parts are in place: envoy --mode validate -c FILE && loopguard check-envoy FILE
"""

_LISTENER = "static_resources.listeners[]"
_MANAGER = f"{_LISTENER}.filter_chains[].filters[].typed_config"
_ROUTES = f"{_MANAGER}.route_config"
_HOST = f"{_ROUTES}.virtual_hosts[]"


class _Place(NamedTuple):
    path: str
    words: str


_PLACES = {  # by their names in the templates, in the order of the templates
    "listener": _Place(_LISTENER, "the listener through which the requests come"),
    "manager": _Place(_MANAGER, "its envoy.filters.network.http_connection_manager"),
    "tracing": _Place(f"{_MANAGER}.tracing", "beside your provider and your own tags"),
    "entries": _Place(f"{_MANAGER}.access_log", "one more access log, which goes to Loopguard"),
    "access_log": _Place(
        f"{_MANAGER}.access_log[].typed_config.log_format.json_format",
        "the decision, where you want it logged",
    ),
    "filter": _Place(
        f"{_MANAGER}.http_filters",
        (
            "right before envoy.filters.http.router, after all filters that may refuse a request "
            "or "
            "choose its route"
        ),
    ),
    "usage": _Place(f"{_MANAGER}.http_filters", "right before envoy.filters.http.router"),
    "route_config": _Place(_ROUTES, "that of the routes to guard"),
    "virtual_host": _Place(_HOST, "those that have routes to guard"),
    "route": _Place(f"{_HOST}.routes[]", ""),  # described by the routes
    "action": _Place(f"{_HOST}.routes[].route", ""),  # described by the routes
    "cluster": _Place("static_resources.clusters", "one more cluster"),
}


def render_snippet(policies: PolicySet, options: EnvoyOptions) -> str:
    """The parts as YAML documents with their places; raises UsageError for a route without one."""
    parts = enumerate(_make_parts(policies, options), 1)
    head = _HEAD.format(envoy=describe_guard(policies, options)["envoy"])
    return head + "".join(
        f"---\n# {number}. {place.path}: {place.words}\n{text}" for number, (place, text) in parts
    )


def find_unseen(policies: PolicySet, names: Sequence[str]) -> list[str]:
    """Ids of policies that select by route name, but not by one of these."""
    return [
        policy.id
        for policy in policies.list_acting()
        if policy.spec.selector.routes and not set(policy.spec.selector.routes) & set(names)
    ]


def _make_parts(policies: PolicySet, options: EnvoyOptions) -> Iterator[tuple[_Place, str]]:
    # Values that no part uses are left blank
    values = defaultdict[str, str | bool](str, describe_guard(policies, options))
    found = cut_parts(read_template("bootstrap"), values)
    for name, place in _PLACES.items():
        if name == "route":
            yield from _make_route_parts(policies, options)
        elif name in found:
            yield place, found[name]


def _make_route_parts(policies: PolicySet, options: EnvoyOptions) -> Iterator[tuple[_Place, str]]:
    """A part for strict routes and one for tolerant ones."""
    routes = [
        GuardedPath("", exact=False, policies=(), name=name) for name in options.routes
    ] or plan_routes(policies)
    tolerant = find_tolerant(routes, options.tolerant_routes)
    for is_tolerant in (False, True):
        chosen = [route for route in routes if (route in tolerant) == is_tolerant]
        if chosen:
            values = defaultdict[str, str | bool](
                str, describe_route(policies, options, tolerant=is_tolerant)
            )
            found = cut_parts(read_template("guarded_route"), values)
            for part in ("route", "action"):
                if part in found:
                    yield _PLACES[part]._replace(words=_name_routes(chosen)), found[part]


def _name_routes(routes: Sequence[GuardedPath]) -> str:
    if not (routes[0].path or routes[0].api):
        return f"the routes named {', '.join(route.name for route in routes)}"
    told = "every route for one of these paths"
    for route in routes:
        path = f"{route.path}{'' if route.exact else ' and below'}"
        path = f"safe_regex {write_regex(route.api)} ({route.api})" if route.api else path
        told += f"\n#    {path}, for {', '.join(route.policies)}"
    return told
