"""Ways for a request to bypass Loopguard, or to reach it in a form that no policy matches.

Anything unknown, such as an expression that only RE2 understands, is reported as a note: it never
counts as safe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from extproc.apis import API_NAMES, SAMPLES, read_path, write_header_regex
from extproc.cli.envoy_check.config import Guard, Route, is_on, list_said, mentions_loopguard
from extproc.cli.envoy_check.document import ConfigPlace
from extproc.cli.envoy_check.findings import Finding, note, report_unknown
from extproc.cli.envoy_check.paths import (
    ANYTHING,
    BELOW,
    PathPattern,
    find_share,
    list_methods,
    read_regex,
)
from extproc.cli.envoy_check.selectors import share_upstream
from extproc.policy.bundle import Selector

_HERE = "Loopguard on this route, too"
_CHOSEN_BY_CLIENTS = ("headers", "query_parameters", "cookies", "grpc")
_GROUP = re.compile(r"\\\d")
_PROGRAMS = (
    "wasm.v3.Wasm",
    "golang.v3alpha.Config",
    "dynamic_modules.v3.DynamicModuleFilter",
    "composite.v3.Composite",
)
"""Filters that run a program, or other filters, which are not in this configuration."""


def check_other_routes(guard: Guard) -> Iterator[Finding]:
    """Without policies, no other route may take the paths of guarded routes."""
    if guard.needs.known:
        return  # the selectors show what must be guarded
    others: dict[str, list[Route]] = {}
    for route in _list_unguarded(guard):
        if not route.is_answered_here and find_share(route.match):
            others.setdefault(route.around[0].pointer, []).append(route)
    for aim in [route.route for route in guard.guarded]:
        for route in others.get(aim.around[0].pointer, ()):
            answer, behind = route.pattern.includes(aim.pattern), route.number > aim.number
            if (
                answer is False
                or (behind and not aim.conditions)
                or list_methods(aim.match if behind else route.match)
            ):
                continue
            yield _report_other_route(route, aim, certain=answer is True)
            if behind and answer and not route.conditions:
                break


def _report_other_route(route: Route, aim: Route, *, certain: bool) -> Finding:
    """The finding for a route that takes requests of a guarded one, before it or after it."""
    behind = route.number > aim.number
    conditions = aim.conditions if behind else route.conditions
    if not certain or route.chosen:
        what = route.place.get("match") if not route.chosen else route.around[0].get("matcher")
        return report_unknown(
            what,
            f"whether {route.name!r} takes requests of the guarded route {aim.name!r}",
            [route.name],
        )
    if behind:
        problem = (
            f"requests of {aim.name!r} for which {' and '.join(conditions)} does not hold "
            f"take {route.name!r}, unguarded"
        )
        hurts = "runtime_fraction" in conditions
    else:
        problem = f"it takes requests of the guarded route {aim.name!r} before that"
        problem += f", if {' and '.join(conditions)} holds" if conditions else ""
        hurts = not conditions or any(name in _CHOSEN_BY_CLIENTS for name in conditions)
    return Finding("unguarded", route.place.get("match"), problem, _HERE, [route.name], hurts=hurts)


def check_spellings(guard: Guard) -> Iterator[Finding]:
    """Policies are case-sensitive: a route that ignores the case may match no policy."""
    selectors = [selector for _, selector in guard.needs.selectors]
    for route in guard.guarded:
        spellings = route.route.pattern.list_spellings()
        if spellings and not all(
            any(_selects(each, path, route.name) for each in selectors) for path in spellings
        ):
            place = route.route.match.get("case_sensitive")
            place = place if place.is_there else route.route.match
            problem = (
                f"it also takes requests for {spellings[1]}, which no policy matches: "
                "policies tell upper case from lower case"
            )
            right = "case_sensitive: true; or a policy that selects the route by its name"
            yield Finding("unmatched", place, problem, right, [route.name])


def check_path_parameters(guard: Guard) -> Iterator[Finding]:
    """Only the upstream knows whether `;x=1` is part of the path."""
    place = next((route.route.around[1] for route in guard.guarded), ConfigPlace(None))
    place = place.get("ignore_path_parameters_in_path_matching")
    selectors = [selector for _, selector in guard.needs.selectors]
    exact = not selectors or any(_list_paths(selector) for selector in selectors)
    if place.flag() and exact:
        problem = (
            "Envoy takes /v1/chat;x=1 for /v1/chat, but policies do not: such requests are "
            "sent to Loopguard, and match none"
        )
        yield Finding("unmatched", place, problem, "ignore_path_parameters_in_path_matching: false")
    elif not place.is_there and any(not route.is_answered_here for route in _list_unguarded(guard)):
        problem = (
            "Envoy keeps ;x=1 in paths; an upstream that ignores it, as servlet containers "
            "do, sees another path than Envoy"
        )
        right = (
            "ignore_path_parameters_in_path_matching: false, if the upstream keeps it, too; "
            "else refuse such paths"
        )
        yield note("path-parameters", place, problem, right)


def _list_unguarded(guard: Guard) -> list[Route]:
    guarded = {route.route.place.pointer for route in guard.guarded}
    return [route for route in guard.manager.routes if route.place.pointer not in guarded]


def _selects(selector: Selector, path: str, route: str) -> bool:
    if selector.routes and not _list_paths(selector, every=True):
        return route in selector.routes
    if selector.spans_apis():
        return read_path(path).api in selector.list_apis()
    prefixes = [
        PathPattern(prefix, ANYTHING if prefix.endswith("/") else BELOW)
        for prefix in selector.list_prefixes()
    ]
    return path == selector.pathExact or any(prefix.takes(path) for prefix in prefixes)


def _list_paths(selector: Selector, *, every: bool = False) -> list[str]:
    """The selector's paths, by default those that a path parameter at the end would change."""
    paths = [selector.pathExact or "", *selector.list_prefixes()]
    paths += [
        path for api in selector.list_apis() if selector.spans_apis() for path in SAMPLES[api]
    ]
    return [path for path in paths if path and (every or not path.endswith("/"))]


def check_matchers(guard: Guard) -> Iterator[Finding]:
    """A matcher around the filter may skip it."""
    places = [(guard.filter.matcher, [route.name for route in guard.guarded])]
    for route in guard.guarded:
        places += [
            (said, [route.name]) for said in list_said(guard.filter, *route.route.levels)[:1]
        ]
    for place, routes in places:
        actions = (".SkipFilter", ".ExecuteFilterAction")
        if not any(inner.message()[0].endswith(actions) for inner in place.walk()):
            continue
        sent = _list_matcher_inputs(place)
        if sent == [":path"] and _shows_apis(place):
            others = [
                identity for identity, selector in guard.needs.selectors if selector.apis is None
            ]
            if others:
                problem = (
                    f"the matcher around {guard.filter.name} shows it only requests to "
                    "model APIs, and policies select"
                )
                problem += f" others: {', '.join(others)}"
                yield Finding(
                    "skipped",
                    place,
                    problem,
                    "no matcher, and the routes of these policies guarded",
                    routes,
                )
        elif any(not name.startswith(":") for name in sent):
            problem = (
                f"the matcher around {guard.filter.name} can skip it: a client chooses "
                f"{' and '.join(sent)}"
            )
            yield Finding("skipped", place, problem, "no matcher that skips it", routes)
        else:
            told = f" by {' and '.join(sent)}" if sent else ""
            yield report_unknown(
                place, f"which requests the matcher around {guard.filter.name} skips{told}", routes
            )


def _shows_apis(matcher: ConfigPlace) -> bool:
    """Whether it skips only requests that call no model, like the Helm chart's."""
    xds = matcher.get("xds_matcher")
    matchers = list(xds.get("matcher_list", "matchers").items())
    if len(matchers) != 1 or xds.get("on_no_match").is_there:
        return False
    predicates = matchers[0].get("predicate", "not_matcher", "or_matcher", "predicate").items()
    shown = {
        place.get("single_predicate", "value_match", "safe_regex", "regex").text()
        for place in predicates
    }
    return shown >= {write_header_regex(name) for name in API_NAMES}


def _list_matcher_inputs(matcher: ConfigPlace) -> list[str]:
    found: dict[str, None] = {}
    for place in matcher.walk():
        kind = place.message()[0]
        if kind.endswith(".HttpRequestHeaderMatchInput"):
            found[place.get("header_name").text().lower()] = None
        elif kind.endswith(".HttpRequestQueryParamMatchInput"):
            found[f"?{place.get('query_param').text()}"] = None
        found |= dict.fromkeys(
            [
                item.get("name").text()
                for item in place.get("http_request_headers_match", "headers").items()
            ]
        )
    return list(found)


def check_aliases(guard: Guard) -> Iterator[Finding]:
    """An unguarded route may rewrite its path to a guarded one."""
    for route in _list_unguarded(guard):
        tunnel = route.match.get("connect_matcher")
        same = [
            aim.route.name
            for aim in guard.guarded
            if tunnel.is_there and share_upstream(route, aim.route)
        ]
        if same:
            problem = (
                f"{route.name!r} opens tunnels to the guarded upstream: requests in them "
                "are not guarded"
            )
            yield Finding("alias", tunnel, problem, "no CONNECT to this cluster", same[:1])
        place, target = _find_target(route)
        if target is None:
            continue
        answers = [
            (shared if meets else meets, aim.route.name)
            for aim in guard.guarded
            if (shared := share_upstream(route, aim.route)) is not False
            and (meets := target.meets(aim.route.pattern)) is not False
        ]
        certain = [name for answer, name in answers if answer]
        if certain:
            told = f" under {target.literal}" if target.literal else ""
            problem = (
                f"requests on {route.name!r} reach the upstream{told}, which is guarded, "
                "without Loopguard"
            )
            yield Finding("alias", place, problem, _HERE, certain[:1])
        elif answers:
            yield report_unknown(
                place, f"whether {route.name!r} turns its paths into guarded ones", [route.name]
            )


def _find_target(route: Route) -> tuple[ConfigPlace, PathPattern | None]:
    """The setting that rewrites paths, and the resulting paths; None if they are not rewritten."""
    action, own = route.place.get("route"), route.pattern
    place = action.get("prefix_rewrite")
    if place.text():
        return place, PathPattern(
            place.text(), own.rest if own.rest in (ANYTHING, BELOW, None) else ""
        )
    place = action.get("regex_rewrite")
    if place.is_there:
        regex = place.get("pattern", "regex").text()
        first = read_regex(regex)
        if not (regex.startswith("^") or (first.literal and own.literal.startswith(first.literal))):
            return place, PathPattern("", None)  # may replace any part of the path
        return place, _read_prefix(_GROUP.split(place.get("substitution").text(), maxsplit=1))
    place = action.get("path_rewrite_policy")
    if place.is_there:
        text = place.get("typed_config").message()[1].get("path_template_rewrite").text()
        return place, _read_prefix(text.split("{", maxsplit=1))
    place = action.get("path_rewrite")
    return place, _read_prefix(place.text().split("%", maxsplit=1)) if place.is_there else None


def _read_prefix(parts: list[str]) -> PathPattern:
    """The paths that begin with the text before the first group or variable."""
    return PathPattern(parts[0], ANYTHING if len(parts[0]) > 1 else None)


def check_programs(guard: Guard) -> Iterator[Finding]:
    """Filters that run a program, or are delivered later, can do anything with a request."""
    for item in guard.manager.filters:
        if (
            item.is_a(*_PROGRAMS)
            and not mentions_loopguard(item)
            and any(is_on(item, route) for route in guard.manager.routes)
        ):
            yield report_unknown(
                item.place,
                f"whether {item.name} chooses other routes, or answers guarded requests,",
            )
        elif not item.kind and item.place.get("config_discovery").is_there:
            yield report_unknown(
                item.place, f"{item.name}, whose configuration is delivered later (ECDS),"
            )
