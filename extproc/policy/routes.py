"""Which policies a request meets: selectors compiled to an index whose cost does not grow with their number.

A selector is filed under its anchor (an exact path, a path prefix, or none when it selects by route alone) and, below it, under
its host, method and route. A lookup visits the anchors that the request's path can have, a number bounded by the deepest
prefix filed, and in each asks once per combination of fields that selectors there use (at most eight).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from operator import itemgetter
from typing import Generic, TypeVar

from extproc.policy.bundle import Selector, normalize_host

Item = TypeVar("Item")
_Key = tuple[str | None, str | None, str | None]  # host, method, route; None: any


def is_below(path: str, prefix: str) -> bool:
    """Whether a `pathPrefix` takes a path: `/v1` takes `/v1` and `/v1/...`, `/v1/` what starts with it."""
    return path.startswith(prefix) and (prefix.endswith("/") or path[len(prefix) : len(prefix) + 1] in ("", "/"))


class _Anchor(Generic[Item]):
    """The selectors that share a path, by the fields they name besides it."""

    __slots__ = ("shapes",)

    def __init__(self) -> None:
        # (names a host, names a method, names a route) -> key -> (order, item) pairs
        self.shapes: dict[tuple[bool, bool, bool], dict[_Key, list[tuple[int, Item]]]] = {}

    def add(self, selector: Selector, order: int, item: Item) -> None:
        fields = (selector.hosts, selector.methods, selector.routes)
        table = self.shapes.setdefault((fields[0] is not None, fields[1] is not None, fields[2] is not None), {})
        for key in product(*(dict.fromkeys(values) if values is not None else (None,) for values in fields)):
            table.setdefault((key[0], key[1], key[2]), []).append((order, item))

    def find(self, host: str, method: str, route: str, found: list[tuple[int, Item]]) -> None:
        """Add the items that take this request to `found`."""
        for (by_host, by_method, by_route), table in self.shapes.items():
            filed = table.get((host if by_host else None, method if by_method else None, route if by_route else None))
            if filed is not None:
                found += filed


class Index(Generic[Item]):
    """Items by the selector they were filed under."""

    def __init__(self, entries: Iterable[tuple[Selector, Item]]) -> None:
        """File every item; the order of `entries` is the order of answers."""
        self._exact: dict[str, _Anchor[Item]] = {}
        self._prefix: dict[str, _Anchor[Item]] = {}
        self._anywhere: _Anchor[Item] = _Anchor()
        self._depth = 0
        self.uses_hosts = self.uses_routes = False
        for order, (selector, item) in enumerate(entries):
            self.uses_hosts = self.uses_hosts or selector.hosts is not None
            self.uses_routes = self.uses_routes or selector.routes is not None
            if selector.pathExact is not None:
                self._exact.setdefault(selector.pathExact, _Anchor()).add(selector, order, item)
            if selector.pathPrefix is not None:
                self._prefix.setdefault(selector.pathPrefix, _Anchor()).add(selector, order, item)
                self._depth = max(self._depth, selector.pathPrefix.count("/"))
            if selector.pathExact is None and selector.pathPrefix is None:
                self._anywhere.add(selector, order, item)

    def match(self, method: str, authority: str, path: str, route: str = "") -> Sequence[Item]:
        """Every item whose selector takes this request, each once, in filing order.

        Args:
            method: as sent; methods are case-sensitive (RFC 9110 section 9.1).
            authority: host, with or without port.
            path: without the query.
            route: Envoy's name of the route, empty when unknown.
        """
        host = normalize_host(authority) if self.uses_hosts else ""
        found: list[tuple[int, Item]] = []
        exact = self._exact.get(path)
        if exact is not None:
            exact.find(host, method, route, found)
        if self._depth:
            for prefix in self._prefixes(path):
                anchor = self._prefix.get(prefix)
                if anchor is not None:
                    anchor.find(host, method, route, found)
        if self._anywhere.shapes:
            self._anywhere.find(host, method, route, found)
        if len(found) > 1:  # one with both anchors may stand twice
            return [item for _, item in sorted(dict(found).items(), key=itemgetter(0))]
        return [item for _, item in found]

    def _prefixes(self, path: str) -> Iterator[str]:
        """The prefixes that would match `path`: itself, and its start up to each slash, with and without the slash.

        `/v1` matches `/v1` and `/v1/...` (Envoy's path_separated_prefix), `/v1/` what starts with it.
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
