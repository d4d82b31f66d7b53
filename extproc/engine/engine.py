"""All policies of one load; `prepare` finds those that match a request.

Pure: no clock, no asyncio, no store.

An index finds them in a time that does not depend on their number. A selector is indexed by its
anchor (an exact path, a path prefix, or none if it selects only by route), then by host, method,
route and API. A look-up visits the anchors that the request's path can have; the deepest prefix in
the index bounds their number. At each anchor, it looks up every combination of fields that
selectors use there, at most sixteen.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import product
from typing import Generic, NamedTuple, TypeVar

from extproc.apis import read_path
from extproc.engine.exchange import Exchange
from extproc.engine.kill_switch import FiledSwitch, KillSwitches, Switch, compile_switches
from extproc.engine.plan import Parts, Plan
from extproc.policy.bundle import SHADOW, normalize_host
from extproc.policy.loader import PolicySet, Source
from extproc.policy.outline import Outline, SlimSelector
from extproc.policy.pairings import find_pairings
from extproc.request.fingerprint import drop_parameters
from extproc.request.hash_key import PROCESS_KEY, HashKey
from extproc.request.http import HttpRequest

Item = TypeVar("Item")

_ITEMS_AT_ONCE = 1_000
"""Number of items to index before yielding to other threads. Compiled code would otherwise hold the
interpreter lock throughout."""

# Anchor, host, method, route, API; None: any
_Key = tuple[str, str | None, str | None, str | None, str | None]
_Fields = tuple[str, str, str, str]  # host, method, route, API of a request
_Shape = tuple[bool, bool, bool, bool]  # names a host, names a method, names a route, names an API


class CompiledFile(NamedTuple):
    """One file's part of an engine; later engines reuse it while the file is unchanged.

    Attributes:
        shadow: all of its policies are forced into shadow mode.
        plans: of its enabled policies, in order.
        switches: in order.
    """

    shadow: bool
    plans: list[Plan]
    switches: list[FiledSwitch]


def compile_file(source: Source, parts: Parts, *, shadow: bool) -> CompiledFile:
    """Compile a file before its policies are freed; `shadow` forces them into shadow mode."""
    enabled = [policy for policy in source.policies if policy.spec.is_enabled()]
    plans = [Plan(policy, parts, shadow=shadow or policy.spec.mode == SHADOW) for policy in enabled]
    return CompiledFile(shadow, plans, compile_switches(source))


class Engine:
    """Immutable; a reload builds a new one.

    Attributes:
        files: its parts, by file.
        parts: objects that its policies share.
        plans: enabled policies in bundle order.
        pairings: shadow policies that are compared with enforcing ones.
        has_switches: there are kill switches, so call `find_switch`.
    """

    def __init__(
        self,
        policies: PolicySet,
        now: datetime,
        *,
        shadow: bool = False,
        known: Mapping[str, CompiledFile] | None = None,
        parts: Parts | None = None,
    ) -> None:
        """Compile.

        Args:
            policies: the result of the loader.
            now: decides whether a `global_shadow` still applies.
            shadow: force every policy into shadow mode.
            known: files that are already compiled; their policies may have been freed.
            parts: shared with an earlier engine.
        """
        self.parts = parts if parts is not None else Parts()
        self.files: dict[str, CompiledFile] = {}
        for source in policies.sources:
            made = known.get(source.file) if known is not None else None
            self.files[source.file] = made or compile_file(
                source, self.parts, shadow=shadow or source.forces_shadow(now)
            )
        every = [(source, policy) for source in policies.sources for policy in source.outlines]
        guarding = [(source, policy) for source, policy in every if policy.enabled]
        self.plans = [plan for file in self.files.values() for plan in file.plans]
        self._places = {plan.id: place for place, plan in enumerate(self.plans)}
        self._idle = frozenset([policy.id for _, policy in every if not policy.enabled])
        self._index = Index(
            [
                (policy.selector, plan)
                for (_, policy), plan in zip(guarding, self.plans, strict=True)
            ]
        )
        self._switches = KillSwitches([file.switches for file in self.files.values()])
        self.has_switches = len(self._switches) > 0
        self.pairings = find_pairings([(source.namespace, policy) for source, policy in guarding])
        paired = {name for pairing in self.pairings for name in (pairing.live, pairing.candidate)}
        aliases = _collect_aliases(every)
        for (source, _), plan in zip(guarding, self.plans, strict=True):
            plan.paired = plan.id in paired
            if plan.aliases != aliases[source.namespace]:
                plan.name_callers(aliases[source.namespace])

    def list_parts(self) -> list[object]:
        """Its parts, to free an old engine step by step."""
        return [*self.plans, *self._index.list_parts(), *self._switches.list_parts()]

    def match(self, request: HttpRequest) -> Sequence[Plan]:
        """The policies that match the request, in bundle order, with or without path parameters.

        If the request opens a WebSocket for model calls, its method is ignored: it is GET, but the
        calls would be POST.
        """
        route = request.facts.route() if self._index.uses_routes else ""
        method, path = None if request.opens_responses else request.method, request.path
        found = self._index.match(method, request.authority, path, route)
        if ";" in path or "%3B" in path:
            others = self._index.match(method, request.authority, drop_parameters(path), route)
            every = [*found, *[plan for plan in others if plan not in found]]
            return sorted(every, key=lambda plan: self._places[plan.id])
        return found

    def find_plan(self, policy: str) -> Plan | None:
        """The enabled policy with this id; None if there is none."""
        place = self._places.get(policy)
        return self.plans[place] if place is not None else None

    def holds(self, policy: str) -> bool:
        """Whether a policy, enabled or not, has this id."""
        return policy in self._places or policy in self._idle

    def list_unknown(self, names: Sequence[str]) -> list[str]:
        """The ids that no enabled policy has."""
        return [name for name in names if name not in self._places]

    def find_switch(
        self, request: HttpRequest, now: float, handed_over: Engine | None = None
    ) -> Switch | None:
        """The first kill switch that applies to a request, if any.

        Switches that came with its route are last.
        """
        found = self._switches.find(request, now) if self.has_switches else None
        if found is None and handed_over is not None:
            return handed_over.find_switch(request, now)
        return found

    def prepare(
        self,
        request: HttpRequest,
        scope: str = "",
        pinned: Sequence[str] = (),
        handed_over: Engine | None = None,
        key: HashKey = PROCESS_KEY,
    ) -> Exchange | None:
        """Match policies and read descriptors; None if no policy matches.

        The request's facts are then dropped.

        Args:
            request: the request without its body.
            scope: name of the attachment; a gateway and a sidecar on one store then count
                separately.
            pinned: ids of policies to apply instead of matching selectors; unknown ids are skipped.
            handed_over: policies that came with the request's route; they replace policies with the
                same ids.
            key: the key of keyed hashes.
        """
        request.hash_key = key
        plans = self._find_named(pinned) if pinned else self.match(request)
        if handed_over is not None:
            own = {plan.id: plan for plan in handed_over.match(request)}
            plans = [
                own.pop(plan.id, plan)
                for plan in plans
                if plan.id in own or not handed_over.holds(plan.id)
            ]
            plans += own.values()
        if not plans:
            return None
        exchange = Exchange(request, scope, key)
        exchange.plans = plans
        for plan in plans:
            exchange.admit(plan)
        request.facts = request.facts.let_go()
        return exchange

    def _find_named(self, names: Sequence[str]) -> list[Plan]:
        return [
            self.plans[place]
            for place in sorted(self._places[name] for name in names if name in self._places)
        ]


def _collect_aliases(every: Sequence[tuple[Source, Outline]]) -> dict[str, dict[str, str]]:
    """Names of callers, by namespace. Those from files outside all namespaces apply everywhere."""
    own: dict[str, dict[str, str]] = {"": {}}
    for source, policy in every:
        named = own.setdefault(source.namespace, {})
        named.update(policy.aliases)
    return {
        namespace: {**named, **own[""]} if namespace else named for namespace, named in own.items()
    }


class _Table:
    """Selectors with one kind of anchor.

    All anchors share one dictionary, because most of a hundred thousand policies have their own
    anchor.
    """

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[_Shape, ...]] = {}  # by anchor
        self.places: dict[_Key, list[int]] = {}
        self._known: dict[tuple[_Shape, ...], tuple[_Shape, ...]] = {}  # equal ones are shared

    def add(self, anchor: str, selector: SlimSelector, place: int) -> None:
        fields = (selector.hosts, selector.methods, selector.routes, selector.apis)
        shape = (
            fields[0] is not None,
            fields[1] is not None,
            fields[2] is not None,
            fields[3] is not None,
        )
        shapes = self.shapes.get(anchor, ())
        if shape not in shapes:
            shapes = (*shapes, shape)
            self.shapes[anchor] = self._known.setdefault(shapes, shapes)
        for key in product(
            *(dict.fromkeys(values) if values is not None else (None,) for values in fields)
        ):
            filed = (anchor, key[0], key[1], key[2], key[3])
            if filed in self.places:
                self.places[filed].append(place)
            else:
                self.places[filed] = [place]

    def find(self, anchor: str, fields: _Fields, found: list[int]) -> None:
        """Append the places of matching items to `found`."""
        shapes = self.shapes.get(anchor)
        if shapes is None:
            return
        host, method, route, api = fields
        for by_host, by_method, by_route, by_api in shapes:
            kept_method, kept_route = method if by_method else None, route if by_route else None
            filed = self.places.get(
                (
                    anchor,
                    host if by_host else None,
                    kept_method,
                    kept_route,
                    api if by_api else None,
                )
            )
            if filed is not None:
                found += filed


class Index(Generic[Item]):
    """Items by their selectors."""

    def __init__(self, entries: Iterable[tuple[SlimSelector, Item]]) -> None:
        """The order of `entries` is the order of results."""
        self._items: list[Item] = []
        self._exact, self._prefix, self._anywhere = _Table(), _Table(), _Table()
        self._depth = 0
        self.uses_hosts = self.uses_routes = self.uses_apis = False
        self._methods = [""]  # for selectors without any
        for place, (selector, item) in enumerate(entries):
            self._items.append(item)
            if place % _ITEMS_AT_ONCE == _ITEMS_AT_ONCE - 1:
                time.sleep(0)
            self._methods += [
                method for method in selector.methods or () if method not in self._methods
            ]
            self.uses_hosts = self.uses_hosts or selector.hosts is not None
            self.uses_routes = self.uses_routes or selector.routes is not None
            self.uses_apis = self.uses_apis or selector.apis is not None
            if selector.exact is not None:
                self._exact.add(selector.exact, selector, place)
            for prefix in selector.prefixes:
                self._prefix.add(prefix, selector, place)
                self._depth = max(self._depth, prefix.count("/"))
            if selector.exact is None and not selector.prefixes:
                self._anywhere.add("", selector, place)

    def list_parts(self) -> list[object]:
        """See `Engine`."""
        return [
            part
            for table in (self._exact, self._prefix, self._anywhere)
            for entry in table.places.items()
            for part in entry
        ]

    def match(
        self, method: str | None, authority: str, path: str, route: str = ""
    ) -> Sequence[Item]:
        """Every item whose selector matches the request, once, in the order of `entries`.

        Args:
            method: as sent; methods are case-sensitive (RFC 9110 section 9.1). None ignores the
                methods of selectors.
            authority: host, with or without port.
            path: without the query.
            route: Envoy's name of the route; empty if unknown.
        """
        host = normalize_host(authority) if self.uses_hosts else ""
        api = read_path(path).api if self.uses_apis else ""
        found: list[int] = []
        for name in self._methods if method is None else (method,):
            fields = (host, name, route, api)
            self._exact.find(path, fields, found)
            if self._depth:
                for prefix in self._prefixes(path):
                    self._prefix.find(prefix, fields, found)
            if self._anywhere.shapes:
                self._anywhere.find("", fields, found)
        if len(found) > 1:  # an item with two anchors may be found twice
            found = sorted(set(found))
        return [self._items[place] for place in found]

    def _prefixes(self, path: str) -> Iterator[str]:
        """The prefixes that match `path`: itself and its start up to each slash, and without it.

        `/v1` matches `/v1` and `/v1/...` (Envoy's path_separated_prefix), `/v1/` all paths that
        start with it.
        """
        position = path.find("/")
        for _ in range(self._depth):
            if position < 0:
                break
            yield path[: position + 1]
            position = path.find("/", position + 1)
            if position > 0:
                yield path[:position]
        if position < 0:
            yield path
