"""Which policies a request meets: selectors compiled to an index whose cost does not grow with their number.

A selector is filed under its anchor (an exact path, a path prefix, or none when it selects by route alone) and, below it, under
its host, method and route. A lookup visits the anchors that the request's path can have, a number bounded by the deepest
prefix filed, and in each asks once per combination of fields that selectors there use (at most eight).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Generic, TypeVar

from extproc.policy.bundle import Selector, normalize_host

Item = TypeVar("Item")
_Key = tuple[str, str | None, str | None, str | None]  # anchor, host, method, route; None: any
_Shape = tuple[bool, bool, bool]  # names a host, names a method, names a route


def is_below(path: str, prefix: str) -> bool:
    """Whether a `pathPrefix` takes a path: `/v1` takes `/v1` and `/v1/...`, `/v1/` what starts with it."""
    return path.startswith(prefix) and (prefix.endswith("/") or path[len(prefix) : len(prefix) + 1] in ("", "/"))


def copy_text(text: str) -> str:
    """An equal text, of a document that goes: the text itself would keep all of the memory around it from being given back."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")


class Texts:
    """Texts that outlive the documents they stand in: a copy of each, and one for all that are equal."""

    def __init__(self) -> None:
        """Nothing is kept yet."""
        self._kept: dict[str, str] = {}

    def keep(self, text: str) -> str:
        """An equal text that may be kept."""
        kept = self._kept.get(text)
        if kept is None:
            kept = copy_text(text)
            self._kept[kept] = kept
        return kept


class _Table:
    """The selectors whose anchors are of one kind, by the anchor and the fields they name besides it.

    One dictionary for all anchors rather than one in each: of a hundred thousand policies most have an anchor of their own.
    """

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[_Shape, ...]] = {}  # by anchor
        self.places: dict[_Key, list[int]] = {}
        self._known: dict[tuple[_Shape, ...], tuple[_Shape, ...]] = {}  # so that equal ones are kept once

    def add(self, anchor: str, selector: Selector, place: int, texts: Texts) -> None:
        anchor = texts.keep(anchor)
        fields = [None if values is None else [texts.keep(value) for value in values] for values in _list_fields(selector)]
        shape = (fields[0] is not None, fields[1] is not None, fields[2] is not None)
        shapes = self.shapes.get(anchor, ())
        if shape not in shapes:
            shapes = (*shapes, shape)
            self.shapes[anchor] = self._known.setdefault(shapes, shapes)
        for key in product(*(dict.fromkeys(values) if values is not None else (None,) for values in fields)):
            filed = (anchor, key[0], key[1], key[2])
            if filed in self.places:
                self.places[filed].append(place)
            else:
                self.places[filed] = [place]

    def find(self, anchor: str, host: str, method: str, route: str, found: list[int]) -> None:
        """Add the places of the items that take this request to `found`."""
        shapes = self.shapes.get(anchor)
        if shapes is None:
            return
        for by_host, by_method, by_route in shapes:
            key = (anchor, host if by_host else None, method if by_method else None, route if by_route else None)
            filed = self.places.get(key)
            if filed is not None:
                found += filed


class Index(Generic[Item]):
    """Items by the selector they were filed under."""

    def __init__(self, entries: Iterable[tuple[Selector, Item]]) -> None:
        """File every item; the order of `entries` is the order of answers."""
        self._items: list[Item] = []
        self._exact, self._prefix, self._anywhere = _Table(), _Table(), _Table()
        self._depth = 0
        self.uses_hosts = self.uses_routes = False
        texts = Texts()
        self._methods = [""]  # which stands for selectors that name none
        for place, (selector, item) in enumerate(entries):
            self._items.append(item)
            self._methods += [texts.keep(method) for method in selector.methods or () if method not in self._methods]
            self.uses_hosts = self.uses_hosts or selector.hosts is not None
            self.uses_routes = self.uses_routes or selector.routes is not None
            if selector.pathExact is not None:
                self._exact.add(selector.pathExact, selector, place, texts)
            if selector.pathPrefix is not None:
                self._prefix.add(selector.pathPrefix, selector, place, texts)
                self._depth = max(self._depth, selector.pathPrefix.count("/"))
            if selector.pathExact is None and selector.pathPrefix is None:
                self._anywhere.add("", selector, place, texts)

    def list_parts(self) -> list[object]:
        """See `Engine`."""
        return [
            part for table in (self._exact, self._prefix, self._anywhere) for entry in table.places.items() for part in entry
        ]

    def match(self, method: str | None, authority: str, path: str, route: str = "") -> Sequence[Item]:
        """Every item whose selector takes this request, each once, in filing order.

        Args:
            method: as sent; methods are case-sensitive (RFC 9110 section 9.1). None takes each item that has some method.
            authority: host, with or without port.
            path: without the query.
            route: Envoy's name of the route, empty when unknown.
        """
        host = normalize_host(authority) if self.uses_hosts else ""
        found: list[int] = []
        for name in self._methods if method is None else (method,):
            self._exact.find(path, host, name, route, found)
            if self._depth:
                for prefix in self._prefixes(path):
                    self._prefix.find(prefix, host, name, route, found)
            if self._anywhere.shapes:
                self._anywhere.find("", host, name, route, found)
        if len(found) > 1:  # one with both anchors may stand twice
            found = sorted(set(found))
        return [self._items[place] for place in found]

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


def _list_fields(selector: Selector) -> tuple[list[str] | None, list[str] | None, list[str] | None]:
    return selector.hosts, selector.methods, selector.routes
