"""Checks mirrored requests, and filters that may refuse or change counted requests.

A filter that refuses requests belongs before Loopguard, which otherwise counts requests that never
reach an upstream, and under identities that were not verified.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from extproc.cli.envoy_check.config import (
    Guard,
    GuardedRoute,
    HttpFilter,
    Route,
    find_mirrors,
    is_on,
    list_settings,
    mentions_loopguard,
)
from extproc.cli.envoy_check.document import ConfigPlace
from extproc.cli.envoy_check.findings import Finding, note, report_unknown
from extproc.cli.envoy_check.paths import read_match

_AUTHENTICATION = (
    "ext_authz.v3.ExtAuthz",
    "jwt_authn.v3.JwtAuthentication",
    "rbac.v3.RBAC",
    "basic_auth.v3.BasicAuth",
    "api_key_auth.v3.ApiKeyAuth",
    "oauth2.v3.OAuth2",
)
_RATE_LIMITS = (
    "ratelimit.v3.RateLimit",
    "local_ratelimit.v3.LocalRateLimit",
    "rate_limit_quota.v3.RateLimitQuotaFilterConfig",
    "admission_control.v3.AdmissionControl",
)


def check_refusals(guard: Guard) -> Iterator[Finding]:
    """Authentication and rate limits belong before Loopguard."""
    filters = list(guard.manager.filters)
    for item in filters[filters.index(guard.filter) + 1 :]:
        routes = [route.name for route in guard.guarded if _acts(item, route.route)]
        if not routes:
            continue
        right = f"{item.name} before {guard.filter.name}"
        if guard.filter.is_of_envoy_gateway:
            # filterOrder takes the first part of a filter's name
            kind = item.name.partition("/")[0]
            right = (
                f"spec.filterOrder of the EnvoyProxy: [{{name: envoy.filters.http.ext_proc, "
                f"after: {kind}}}]"
            )
        if item.is_a(*_AUTHENTICATION):
            problem = (
                f"{item.name} runs after Loopguard: requests that it refuses are counted, so a "
                "stranger who names a caller can "
                "have that caller refused"
            )
            yield Finding("late-refusal", item.place, problem, right, routes)
        elif item.is_a(*_RATE_LIMITS):
            problem = (
                f"{item.name} runs after Loopguard: retries of requests that it refuses count as "
                "a loop, except with "
                '"count_failed": false'
            )
            yield Finding("late-refusal", item.place, problem, right, routes)
        elif item.is_a("lua.v3.Lua") and ":respond(" in json.dumps(item.config.value):
            yield note(
                "late-refusal",
                item.place,
                f"{item.name} may answer requests that Loopguard has counted",
                right,
                routes,
            )
        elif item.is_a("ext_proc.v3.ExternalProcessor") and not mentions_loopguard(item):
            problem = f"{item.name} may refuse or change requests that Loopguard has counted"
            yield note("late-refusal", item.place, problem, right, routes)


def _acts(item: HttpFilter, route: Route) -> bool:
    """Whether a filter may refuse requests of a route; some need settings for that."""
    said = list_settings(item, route)
    if not is_on(item, route):
        return False
    if item.is_a("rbac.v3.RBAC"):
        own = said[0].get("rbac") if said and said[0].get("rbac").is_there else item.config
        return any(own.get(name).is_there for name in ("rules", "matcher"))
    if item.is_a("local_ratelimit.v3.LocalRateLimit"):
        return any(place.get("token_bucket").is_there for place in (item.config, *said))
    if item.is_a("ratelimit.v3.RateLimit"):
        return any(
            place.get("rate_limits").is_there
            for place in (item.config, route.place.get("route"), *route.around, *said)
        )
    if item.is_a("jwt_authn.v3.JwtAuthentication"):
        return any(rule.get("requires").is_there for rule in item.config.get("rules").items())
    return True


def check_tokens(guard: Guard) -> Iterator[Finding]:
    """Claims are known only on routes with a rule of jwt_authn."""
    if not guard.needs.requires("jwt:"):
        return
    for item in guard.manager.filters:
        rules = item.config.get("rules")
        if not item.is_a("jwt_authn.v3.JwtAuthentication") or not rules.is_there:
            continue
        verified = {
            route.name: _is_verified(item, route)
            for route in guard.guarded
            if is_on(item, route.route)
        }
        bare, unknown = [
            [name for name, answer in verified.items() if answer is known]
            for known in (False, None)
        ]
        if unknown:
            yield report_unknown(
                rules, f"whether {item.name} verifies tokens on this route", unknown
            )
        if bare:
            problem = (
                f"no rule of {item.name} verifies tokens on this route: jwt: keys are "
                "always missing"
            )
            yield Finding(
                "jwt", rules, problem, "a rule whose match covers the route, with requires", bare
            )


def _is_verified(item: HttpFilter, route: GuardedRoute) -> bool | None:
    """Whether the first rule that matches the route's path requires a token; None if unknown."""
    if any(place.get("requirement_name").is_there for place in list_settings(item, route.route)):
        return True
    path, answers = route.route.pattern.find_example(), set()
    for rule in item.config.get("rules").items():
        takes = read_match(rule.get("match")).takes(path) if path else None
        if takes is not False:
            answers.add(any(rule.get(name).is_there for name in ("requires", "requirement_name")))
        if takes:
            break
    else:
        answers.add(False)
    return answers.pop() if len(answers) == 1 else None


def check_weighted_clusters(guard: Guard) -> Iterator[Finding]:
    """A weighted cluster may have settings of its own."""
    for route in guard.guarded:
        for cluster in route.route.place.get("route", "weighted_clusters", "clusters").items():
            place = cluster.get("typed_per_filter_config").entry(guard.filter.name)
            inner = Route(cluster, route.route.levels[:2], route.route.number)
            if not is_on(guard.filter, inner, route.route.levels):
                problem = (
                    f"requests that go to the cluster {cluster.get('name').text()!r} do not "
                    "reach Loopguard"
                )
                yield Finding(
                    "unguarded",
                    place,
                    problem,
                    "the same setting as the route's, or none",
                    [route.name],
                )


def check_mirrors(guard: Guard) -> Iterator[Finding]:
    """A mirrored request may reach Loopguard through a second gateway."""
    for route in guard.guarded:
        if place := find_mirrors(route.route):
            problem = (
                "Envoy sends copies of requests to another cluster: behind a second "
                "Loopguard, they count again"
            )
            yield note("mirrors", place, problem, "no ext_proc for the copies there", [route.name])


def check_buffer(guard: Guard) -> Iterator[Finding]:
    """The buffer filter has a limit of its own."""
    for item in guard.manager.filters:
        place = item.config.get("max_request_bytes")
        if (
            item.is_a("buffer.v3.Buffer")
            and place.number(guard.needs.uploads) < guard.needs.uploads
        ):
            routes = [route.name for route in guard.guarded if is_on(item, route.route)]
            if routes:
                problem = f"a body above {place.number(0):,.0f} bytes gets a 413 from {item.name}"
                yield note(
                    "buffer-limit",
                    place,
                    problem,
                    f"max_request_bytes: {guard.needs.uploads}",
                    routes,
                )


def check_services(guard: Guard) -> Iterator[Finding]:
    """A route may override the filter's service."""
    clusters = [cluster.get("name").text() for cluster in guard.manager.resources.clusters]
    for route in guard.guarded:
        for overrides in route.overrides[:1]:
            place: ConfigPlace = overrides.get("grpc_service", "envoy_grpc", "cluster_name")
            name = place.text()
            if not name or name == guard.cluster:
                continue
            if name not in clusters and not guard.manager.resources.comes_later:
                problem = (
                    f"there is no cluster {name!r}: Envoy accepts that, and never asks "
                    "Loopguard on this route"
                )
                yield Finding(
                    "cluster", place, problem, "the filter's cluster, or none here", [route.name]
                )
            elif "loopguard" not in name.lower():
                yield note(
                    "cluster",
                    place,
                    f"this route asks {name!r} in place of {guard.cluster!r}",
                    routes=[route.name],
                )
