"""Finds listeners, routes and clusters in any form of configuration.

A bootstrap has them in `static_resources`, a config dump in a section for each kind, and xDS
delivers a list. Resources that are delivered later are missing; checks report that instead of
guessing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from extproc.cli.envoy_check.document import ConfigPlace
from extproc.cli.envoy_check.needs import Needs
from extproc.cli.envoy_check.paths import PathPattern, list_conditions, read_match
from extproc.errors import UsageError

_MANAGER = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_KINDS = {
    "envoy.config.listener.v3.Listener": "listeners",
    "envoy.config.route.v3.RouteConfiguration": "routes",
    "envoy.config.cluster.v3.Cluster": "clusters",
    "envoy.config.core.v3.TypedExtensionConfig": "extensions",
}

_ROUTE, _ROUTES = "envoy.config.route.v3.Route", "envoy.config.route.v3.RouteList"
_WITH_MATCHER = "envoy.extensions.common.matching.v3.ExtensionWithMatcher"
_COMPOSITE = "envoy.extensions.filters.http.composite.v3.Composite"
_EXECUTE = "envoy.extensions.filters.http.composite.v3.ExecuteFilterAction"

_KINDS_BY_NAME = {"envoy.filters.http.router": "envoy.extensions.filters.http.router.v3.Router"}
"""Kinds of filters without a typed_config, by name, for older configurations."""


@dataclass(slots=True)
class Resources:
    """All configured resources, each once.

    Attributes:
        routes: RouteConfigurations outside listeners.
        extensions: separately delivered filter configurations (ECDS).
        comes_later: whether xDS delivers more resources.
        version: Envoy's version, or None.
    """

    listeners: list[ConfigPlace] = field(default_factory=list)
    routes: list[ConfigPlace] = field(default_factory=list)
    clusters: list[ConfigPlace] = field(default_factory=list)
    extensions: list[ConfigPlace] = field(default_factory=list)
    comes_later: bool = False
    version: tuple[int, int] | None = None

    def add(self, resource: ConfigPlace) -> None:
        """Add an Any to the list of its kind."""
        kind, message = resource.message()
        if kind in _KINDS:
            getattr(self, _KINDS[kind]).append(message)


def find_named(places: Sequence[ConfigPlace], name: str) -> ConfigPlace | None:
    return next((place for place in places if place.get("name").text() == name), None)


def find_resources(document: ConfigPlace) -> Resources:
    """The resources in a bootstrap, a config dump or a list; raises UsageError for others."""
    found = Resources()
    if document.get("configs").is_there:
        _read_dump(document.get("configs"), found)
    elif document.get("resources").is_there:
        found.comes_later = True
        for resource in document.get("resources").items():
            found.add(resource)
    elif any(
        document.get(name).is_there
        for name in ("static_resources", "dynamic_resources", "admin", "node")
    ):
        static = document.get("static_resources")
        found.listeners += static.get("listeners").items()
        found.clusters += static.get("clusters").items()
        found.comes_later = document.get("dynamic_resources").is_there
    elif document.message()[0] in _KINDS:
        found.comes_later = True
        found.add(document)
    else:
        raise UsageError(
            "this is not an Envoy configuration: expected a bootstrap, a config dump or xDS "
            "resources"
        )
    return found


def _read_dump(configs: ConfigPlace, found: Resources) -> None:
    for section in configs.items():
        kind, message = section.message()
        match kind.rpartition(".")[2]:
            case "BootstrapConfigDump":
                version = message.get("bootstrap", "node", "user_agent_build_version", "version")
                if version.is_there:
                    numbers = [
                        version.get(name).number(0) for name in ("major_number", "minor_number")
                    ]
                    found.version = int(numbers[0]), int(numbers[1])
            case "ListenersConfigDump":
                found.listeners += _list_dumped(message, ("static_listeners",), "listener")
                found.listeners += _list_dumped(
                    message, ("dynamic_listeners",), "active_state", "listener"
                )
            case "RoutesConfigDump":
                found.routes += _list_dumped(
                    message, ("static_route_configs", "dynamic_route_configs"), "route_config"
                )
            case "ClustersConfigDump":
                found.clusters += _list_dumped(
                    message, ("static_clusters", "dynamic_active_clusters"), "cluster"
                )
            case "EcdsConfigDump":
                found.extensions += _list_dumped(message, ("ecds_filters",), "ecds_filter")


def _list_dumped(message: ConfigPlace, sections: Sequence[str], *names: str) -> list[ConfigPlace]:
    items = [item.get(*names) for section in sections for item in message.get(section).items()]
    return [item.message()[1] for item in items if item.is_there]


@dataclass(frozen=True)
class Route:
    """One entry of a virtual host.

    Attributes:
        around: the virtual host and its RouteConfiguration.
        number: its position, from 1.
        chosen: whether a matcher of the host chooses it, by more than its own match.
    """

    place: ConfigPlace
    around: tuple[ConfigPlace, ConfigPlace]
    number: int
    chosen: bool = False

    @cached_property
    def pattern(self) -> PathPattern:
        """The paths that it takes."""
        return read_match(self.match)

    @property
    def name(self) -> str:
        """Its own name, else the host's name and its position."""
        return (
            self.place.get("name").text()
            or f"{self.around[0].get('name').text()}[{self.number - 1}]"
        )

    @property
    def levels(self) -> tuple[ConfigPlace, ConfigPlace, ConfigPlace]:
        """The entry, its host and its RouteConfiguration: the first with a setting wins."""
        return (self.place, *self.around)

    @property
    def is_answered_here(self) -> bool:
        """Whether Envoy itself answers, without an upstream."""
        return any(self.place.get(name).is_there for name in ("direct_response", "redirect"))

    @property
    def match(self) -> ConfigPlace:
        return self.place.get("match")

    @property
    def conditions(self) -> list[str]:
        """Conditions beside the path."""
        return [*(["matcher"] if self.chosen else []), *list_conditions(self.match)]


@dataclass(frozen=True, slots=True)
class Manager:
    """An HTTP connection manager: filters and routes behind one port.

    Attributes:
        filters: HTTP filters, in the order of requests.
        routes: routes, in Envoy's order.
        missing: why the routes are unknown, or empty.
    """

    resources: Resources
    listener: ConfigPlace
    place: ConfigPlace
    filters: Sequence[HttpFilter]
    routes: Sequence[Route]
    missing: str

    @property
    def name(self) -> str:
        """The listener's name and address."""
        address = self.listener.get("address", "socket_address")
        where = (
            f"{address.get('address').text()}:{address.get('port_value').number(0):g}"
            if address.is_there
            else ""
        )
        return (
            " ".join(filter(None, (self.listener.get("name").text(), where)))
            or self.listener.pointer
        )


@dataclass(frozen=True, slots=True)
class HttpFilter:
    """An entry of `http_filters`.

    Attributes:
        kind: the type of its configuration; empty if unknown.
        matcher: the ExtensionWithMatcher around it, which may skip it; missing if there is none.
    """

    place: ConfigPlace
    kind: str
    config: ConfigPlace
    matcher: ConfigPlace

    @property
    def name(self) -> str:
        """The name that routes use for it."""
        return self.place.get("name").text()

    @property
    def is_of_envoy_gateway(self) -> bool:
        """Whether Envoy Gateway made it from an EnvoyExtensionPolicy, which lacks some settings."""
        return self.name.startswith("envoy.filters.http.ext_proc/envoyextensionpolicy/")

    def is_a(self, *kinds: str) -> bool:
        """Whether it is of one of these kinds, such as `ext_proc.v3.ExternalProcessor`."""
        return self.kind.endswith(tuple(f".{kind}" for kind in kinds))


def find_managers(resources: Resources) -> Iterator[Manager]:
    for listener in resources.listeners:
        chains = [*listener.get("filter_chains").items(), listener.get("default_filter_chain")]
        for chain in chains:
            for network_filter in chain.get("filters").items():
                kind, place = network_filter.get("typed_config").message()
                if kind == _MANAGER:
                    yield _read_manager(listener, place, resources)


def _read_manager(listener: ConfigPlace, place: ConfigPlace, resources: Resources) -> Manager:
    routes, missing = place.get("route_config"), ""
    if not routes.is_there:
        name = place.get("rds", "route_config_name").text()
        found = find_named(resources.routes, name) if name else None
        if found is None:
            missing = (
                f"they come from RDS as {name!r}"
                if name
                else "they come from neither route_config nor RDS"
            )
        routes = found or routes
    return Manager(
        resources,
        listener,
        place,
        [_read_filter(item, resources) for item in place.get("http_filters").items()],
        list(_list_routes(routes)),
        missing,
    )


def _read_filter(place: ConfigPlace, resources: Resources) -> HttpFilter:
    if place.get("config_discovery").is_there:
        extension = find_named(resources.extensions, place.get("name").text())
        kind, config = (extension or place.get("config_discovery")).get("typed_config").message()
    else:
        kind, config = place.get("typed_config").message()
    matcher = ConfigPlace(None)
    if kind == _WITH_MATCHER:
        matcher = config
        kind, config = config.get("extension_config", "typed_config").message()
    if kind == _COMPOSITE:  # it runs filters that the matcher names, such as kgateway's
        for inner in matcher.get("xds_matcher").walk():
            action, run = inner.message()
            if action == _EXECUTE:
                kind, config = run.get("typed_config", "typed_config").message()
                break
    return HttpFilter(
        place, kind or _KINDS_BY_NAME.get(place.get("name").text(), ""), config, matcher
    )


def _list_routes(configuration: ConfigPlace) -> Iterator[Route]:
    for host in configuration.get("virtual_hosts").items():
        places = [(place, False) for place in host.get("routes").items()]
        for place in host.get("matcher").walk():
            kind, message = place.message()
            if kind == _ROUTE:
                places.append((message, True))
            elif kind == _ROUTES:
                places += [(item, True) for item in message.get("routes").items()]
        for number, (place, chosen) in enumerate(places, 1):
            yield Route(place, (host, configuration), number, chosen)


@dataclass(frozen=True, slots=True)
class Guard:
    """A filter that calls Loopguard, and its routes.

    Attributes:
        guarded: routes on which it sends part of each request.
        blind: routes that configure it, but on which it sends nothing.
    """

    needs: Needs
    manager: Manager
    filter: HttpFilter
    guarded: Sequence[GuardedRoute]
    blind: Sequence[GuardedRoute]

    @property
    def observes(self) -> bool:
        """Whether it only observes, so that Envoy ignores Loopguard's responses."""
        return self.filter.config.get("observability_mode").flag()

    @property
    def cluster(self) -> str:
        """The name of the cluster that it calls, or empty."""
        return self.filter.config.get("grpc_service", "envoy_grpc", "cluster_name").text()


@dataclass(frozen=True, slots=True)
class GuardedRoute:
    """A route on which a filter is on, with its overrides of the filter's settings and mode."""

    route: Route
    mode: ConfigPlace
    overrides: Sequence[ConfigPlace]

    @property
    def name(self) -> str:
        return self.route.name

    @property
    def body_mode(self) -> str:
        return self.mode.get("request_body_mode").text("NONE")

    @property
    def is_shown(self) -> bool:
        """Whether any part of its requests is sent; otherwise Envoy opens no stream."""
        headers, trailers = (
            self.mode.get("request_header_mode").text(),
            self.mode.get("request_trailer_mode").text(),
        )
        return headers != "SKIP" or trailers == "SEND" or self.body_mode != "NONE"


def find_guards(manager: Manager, needs: Needs, names: Sequence[str]) -> list[Guard]:
    """The filters of a manager with these names, else those that mention Loopguard."""
    processors = [item for item in manager.filters if item.is_a("ext_proc.v3.ExternalProcessor")]
    meant = [
        item for item in processors if (item.name in names if names else mentions_loopguard(item))
    ]
    guards = []
    for item in meant:
        routes = list(_list_enabled(manager, item))
        blind = [
            route for route in routes if not route.is_shown and list_said(item, *route.route.levels)
        ]
        guards.append(
            Guard(needs, manager, item, [route for route in routes if route.is_shown], blind)
        )
    return guards


def list_processors(manager: Manager) -> list[str]:
    return [item.name for item in manager.filters if item.is_a("ext_proc.v3.ExternalProcessor")]


def mentions_loopguard(item: HttpFilter) -> bool:
    """Whether its name, its service or its accepted metadata mentions Loopguard."""
    service = item.config.get("grpc_service")
    told = (
        item.name,
        service.get("envoy_grpc", "cluster_name").text(),
        service.get("envoy_grpc", "authority").text(),
        service.get("google_grpc", "target_uri").text(),
        *item.config.get("metadata_options", "receiving_namespaces", "untyped").names(),
    )
    return any("loopguard" in text.lower() for text in told)


def _list_enabled(manager: Manager, item: HttpFilter) -> Iterator[GuardedRoute]:
    """The routes on which a filter is on, if only for a weighted cluster."""
    for route in manager.routes:
        weighted = route.place.get("route", "weighted_clusters", "clusters").items()
        inner = [
            place for place in weighted if is_on(item, Route(place, route.around, 0), route.levels)
        ]
        if is_on(item, route) or inner:
            levels = [*inner[:1], *route.levels]
            overrides = [
                _read_per_route(entry).get("overrides") for entry in list_said(item, *levels)
            ]
            modes = [place.get("processing_mode") for place in overrides]
            mode = next(
                (place for place in modes if place.is_there), item.config.get("processing_mode")
            )
            yield GuardedRoute(route, mode, [place for place in overrides if place.is_there])


def is_on(item: HttpFilter, route: Route, around: Sequence[ConfigPlace] = ()) -> bool:
    """Whether a filter is on for a route; the innermost setting applies.

    Args:
        item: the filter.
        route: the route, or one of its weighted clusters.
        around: the levels around a weighted cluster, innermost first; a route has its own.
    """
    said = list_said(item, route.place, *(around or route.around))
    if not said:
        return not item.place.get("disabled").flag()
    return not (said[0].get("disabled").flag() or _read_per_route(said[0]).get("disabled").flag())


def list_settings(item: HttpFilter, route: Route) -> list[ConfigPlace]:
    """A route's settings for a filter, innermost first, without wrappers."""
    return [_read_per_route(entry) for entry in list_said(item, *route.levels)]


def list_said(item: HttpFilter, *levels: ConfigPlace) -> list[ConfigPlace]:
    """The settings of these levels for a filter, as written."""
    said = [level.get("typed_per_filter_config").entry(item.name) for level in levels]
    return [entry for entry in said if entry.is_there]


def _read_per_route(entry: ConfigPlace) -> ConfigPlace:
    kind, message = entry.message()
    return message.get("config").message()[1] if kind.endswith(".FilterConfig") else message


def find_mirrors(route: Route) -> ConfigPlace | None:
    """The setting of a route, or of a level around it, that mirrors its requests."""
    places = [
        level.get("request_mirror_policies") for level in (route.place.get("route"), *route.around)
    ]
    return next((place for place in places if place.is_there), None)
