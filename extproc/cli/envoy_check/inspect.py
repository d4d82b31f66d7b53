"""Runs all checks on a configuration, route by route."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from extproc.cli.envoy_check.checks import CHECKS
from extproc.cli.envoy_check.config import (
    Guard,
    Manager,
    Resources,
    Route,
    find_guards,
    find_managers,
    list_processors,
)
from extproc.cli.envoy_check.document import ConfigPlace
from extproc.cli.envoy_check.findings import Finding, note, report_unknown
from extproc.cli.envoy_check.needs import Needs
from extproc.cli.envoy_check.paths import describe_match, list_methods
from extproc.cli.envoy_check.selectors import find_taken, name_clusters, share_upstream
from extproc.policy.bundle import Selector

_SNIPPET = "what `loopguard envoy-config --snippet` prints"


@dataclass(frozen=True, slots=True)
class RouteReport:
    """One route, and the body mode of each filter that guards it."""

    listener: str
    route: Route
    modes: Sequence[str]


@dataclass(frozen=True, slots=True)
class CheckReport:
    routes: Sequence[RouteReport]
    findings: Sequence[Finding]

    @property
    def is_good(self) -> bool:
        return not any(finding.hurts for finding in self.findings)


def inspect(
    resources: Resources, needs: Needs, names: Sequence[str] = (), ignored: Sequence[str] = ()
) -> CheckReport:
    """Run all checks on the filters with these `names`, else those that mention Loopguard."""
    routes: list[RouteReport] = []
    findings: list[Finding] = []
    guards: list[Guard] = []
    managers = list(find_managers(resources))
    for manager in managers:
        own = find_guards(manager, needs, names)
        guards += own
        routes += _report_routes(manager, own)
        findings += _check_manager(manager, own, needs)
    findings += _check_other_listeners(managers, guards)
    findings += _check_streams(resources, guards)
    findings += _check_names(managers, needs)
    if not any(guard.guarded for guard in guards):
        findings.insert(0, _explain_nothing(resources, managers, guards))
    # Merge equal routes: a listener may repeat them in a filter chain for each certificate
    merged: dict[tuple[str, str], RouteReport] = {}
    for report in routes:
        key = (report.listener, report.route.place.pointer)
        if not (key in merged and merged[key].modes):
            merged[key] = report
    return CheckReport(
        list(merged.values()),
        [finding for finding in _merge_findings(findings) if finding.code not in ignored],
    )


def _report_routes(manager: Manager, guards: Sequence[Guard]) -> Iterator[RouteReport]:
    modes: dict[str, list[str]] = {}
    for guard in guards:
        for guarded in guard.guarded:
            modes.setdefault(guarded.route.place.pointer, []).append(guarded.body_mode)
    for route in manager.routes:
        yield RouteReport(manager.name, route, modes.get(route.place.pointer, []))


def _check_manager(manager: Manager, guards: Sequence[Guard], needs: Needs) -> Iterator[Finding]:
    if manager.missing:
        problem = (
            f"the routes of {manager.name} are not in this configuration, so they were not "
            f"checked: {manager.missing}"
        )
        yield note(
            "routes-missing",
            manager.place,
            problem,
            "check-envoy --admin, with an Envoy that has them",
        )
    for route in manager.routes:
        if route.around[1].get("vhds").is_there:
            problem = (
                "further virtual hosts are delivered on demand (VHDS), so they were not checked"
            )
            yield note("routes-missing", route.around[1].get("vhds"), problem)
            break
    for guard in guards:
        if guard.guarded:
            yield from (finding for check in CHECKS for finding in check(guard))
    yield from _check_twice(guards)
    if any(guard.guarded for guard in guards):
        yield from _check_selectors(manager, guards, needs)


def _check_other_listeners(
    managers: Sequence[Manager], guards: Sequence[Guard]
) -> Iterator[Finding]:
    """A listener without Loopguard must not lead to a guarded upstream."""
    aims = [route.route for guard in guards for route in guard.guarded]
    guarding = {guard.manager.place.pointer for guard in guards if guard.guarded}
    for manager in [manager for manager in managers if manager.place.pointer not in guarding]:
        ways = [
            (route, aim, _leads_to(route, aim))
            for route in manager.routes
            if not route.is_answered_here
            for aim in aims
        ]
        same = [aim.name for _, aim, answer in ways if answer]
        if same:
            problem = (
                f"{manager.name} has routes to the same upstream without Loopguard: "
                "requests through it are not guarded"
            )
            yield Finding(
                "second-listener", manager.place.get("http_filters"), problem, _SNIPPET, same
            )
        for route, aim, answer in ways if not same else ():
            if answer is None:
                what = (
                    f"whether {route.name!r} of {manager.name} takes requests of the guarded "
                    f"route {aim.name!r}"
                )
                yield report_unknown(route.match, what, [route.name])


def _check_streams(resources: Resources, guards: Sequence[Guard]) -> Iterator[Finding]:
    """A listener that forwards connections has no HTTP filters."""
    aims = {
        cluster
        for guard in guards
        for route in guard.guarded
        for cluster in name_clusters(route.route)
    }
    for listener in resources.listeners:
        for chain in [*listener.get("filter_chains").items(), listener.get("default_filter_chain")]:
            for item in chain.get("filters").items():
                kind, config = item.get("typed_config").message()
                weighted = config.get("weighted_clusters", "clusters").items()
                named = {
                    place.text()
                    for place in (config.get("cluster"), *[each.get("name") for each in weighted])
                }
                if kind.endswith(".TcpProxy") and named & aims:
                    problem = (
                        f"{listener.get('name').text()} forwards connections to the "
                        "upstream: requests in them are not guarded"
                    )
                    yield Finding(
                        "second-listener",
                        item,
                        problem,
                        "an HTTP connection manager with Loopguard",
                    )
                elif item.get("config_discovery").is_there and aims:
                    what = (
                        f"the filter {item.get('name').text()}, whose configuration is "
                        "delivered later (ECDS),"
                    )
                    yield report_unknown(item, what)


def _check_names(managers: Sequence[Manager], needs: Needs) -> Iterator[Finding]:
    names = {route.name for manager in managers for route in manager.routes}
    incomplete = any(manager.missing for manager in managers) or not names
    for identity, selector in needs.selectors if not incomplete else ():
        if selector.routes and names.isdisjoint(selector.routes):
            problem = (
                f"policy {identity} selects the routes {', '.join(selector.routes)}, which "
                "do not exist: it never acts"
            )
            place = managers[0].place.get("route_config")
            yield Finding(
                "unmatched",
                place,
                problem,
                "the name of a route; those in use are in the table above",
            )


def _leads_to(route: Route, aim: Route) -> bool | None:
    """Whether a route takes all requests of another to the same upstream; None if unknown."""
    if route.match.value == aim.match.value:
        takes: bool | None = True
    else:
        takes = route.pattern.includes(aim.pattern) if not list_methods(route.match) else False
    return share_upstream(route, aim) if takes else takes


def _check_twice(guards: Sequence[Guard]) -> Iterator[Finding]:
    acting = [guard for guard in guards if not guard.observes]
    for number, guard in enumerate(acting):
        for other in acting[number + 1 :]:
            theirs = {route.route.place.pointer for route in other.guarded}
            both = [route.name for route in guard.guarded if route.route.place.pointer in theirs]
            if both:
                problem = (
                    f"{guard.filter.name} and {other.filter.name} both ask Loopguard about "
                    "the same request, so it counts twice"
                )
                yield Finding(
                    "twice",
                    other.filter.place,
                    problem,
                    "one of them; or an x-loopguard-scope for each",
                    both,
                )


def _check_selectors(manager: Manager, guards: Sequence[Guard], needs: Needs) -> Iterator[Finding]:
    """Requests that a policy selects must reach Loopguard."""
    guarded = {route.route.place.pointer for guard in guards for route in guard.guarded}
    for identity, selector in needs.selectors:
        for route, doubtful in find_taken(manager.routes, selector):
            if route.place.pointer in guarded or route.is_answered_here:
                continue
            if doubtful is not None:
                place = doubtful.around[0].get("matcher") if doubtful.chosen else doubtful.match
                told = describe_match(doubtful.match)
                what = (
                    f"whether {doubtful.name!r} takes requests that policy {identity} selects, "
                    f"by {told},"
                )
                yield report_unknown(place, what, [route.name])
                continue
            problem = (
                f"policy {identity} selects requests on this route, but Envoy does not ask "
                "Loopguard about them"
            )
            place = route.place.get("typed_per_filter_config").entry(guards[0].filter.name)
            yield Finding(
                "unguarded", place, problem, "an ExtProcPerRoute in a FilterConfig", [route.name]
            )
        yield from _check_ports(manager, identity, selector, guarded)


def _check_ports(
    manager: Manager, identity: str, selector: Selector, guarded: set[str]
) -> Iterator[Finding]:
    """A port in the host may lead to another virtual host; policies ignore the port."""
    strips = any(
        manager.place.get(name).flag()
        for name in ("strip_any_host_port", "strip_matching_host_port")
    )
    routes = [
        route
        for route in manager.routes
        if not route.around[1].get("ignore_port_in_host_matching").flag()
    ]
    if strips or selector.hosts is None:
        return
    usual = {route.place.pointer for route, _ in find_taken(routes, selector)}
    for route, _ in find_taken(routes, selector, port=":1"):
        if route.place.pointer not in usual | guarded and not route.is_answered_here:
            problem = (
                f"a client that adds a port to a host of policy {identity}, such as "
                f"{selector.hosts[0]}:1, takes this route"
            )
            place = route.around[1].get("ignore_port_in_host_matching")
            yield Finding(
                "host-port", place, problem, "ignore_port_in_host_matching: true", [route.name]
            )


def _explain_nothing(
    resources: Resources, managers: Sequence[Manager], guards: Sequence[Guard]
) -> Finding:
    if guards:
        place = guards[0].filter.place
        return Finding(
            "nothing-guarded",
            place,
            f"{guards[0].filter.name} is not on for any route",
            f"on the routes: {_SNIPPET}",
        )
    others = sorted({name for manager in managers for name in list_processors(manager)})
    if others:
        problem = (
            f"no filter mentions Loopguard; the external processors here are {', '.join(others)}"
        )
        return Finding(
            "nothing-guarded",
            managers[0].place.get("http_filters"),
            problem,
            "--filter NAME, if one of them is Loopguard",
        )
    place = managers[0].place.get("http_filters") if managers else ConfigPlace(None)
    problem = "no filter calls Loopguard" if managers else "there is no HTTP listener"
    later = (
        " here; for configuration from xDS, use check-envoy --admin"
        if resources.comes_later
        else ""
    )
    return Finding("nothing-guarded", place, problem + later, _SNIPPET)


def _merge_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings with the same place and problem, and join their routes."""
    merged: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        key = (finding.code, finding.place.pointer, finding.problem)
        known = merged.get(key)
        routes = dict.fromkeys([*(known.routes if known else ()), *finding.routes])
        merged[key] = Finding(
            finding.code,
            finding.place,
            finding.problem,
            finding.right,
            list(routes),
            hurts=finding.hurts,
        )
    return list(merged.values())
