"""Finds policies of different files that apply to the same requests.

Two selectors overlap if their paths overlap, and if they share an API, a host, a method and a
route, where both name any. Whether a policy that selects only by route overlaps one that selects by
path depends on Envoy's routes, so this is not reported.
"""
# interpreted: runs at load

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from extproc.policy.bundle import SHADOW, is_below
from extproc.policy.loader import Source
from extproc.policy.outline import SlimSelector

MAX_PAIRS = 20
"""Maximum number of pairs of files to report; one pair of policies is named for each."""

_MAX_COMPARISONS = 100_000
"""Takes a tenth of a second; the rest is not compared."""

_BY_ROUTE = ""


class Overlap(NamedTuple):
    """Two policies of different files that apply to the same requests."""

    file: str
    policy: str
    other_file: str
    other: str

    def __str__(self) -> str:
        """The warning."""
        both = f"{self.policy} ({self.file}) and {self.other} ({self.other_file})"
        return (
            "policies of different files apply to the same requests, and each counts and "
            f"acts: {both}"
        )


class _Anchored(NamedTuple):
    place: int  # of its file
    file: str
    policy: str
    selector: SlimSelector


def find_overlaps(sources: Iterable[Source]) -> list[Overlap]:
    """The first overlap of each pair of files, in order."""
    listed = [source for source in sources if source.outlines]
    if len(listed) < 2:  # noqa: PLR2004  # two files
        return []
    anchors: dict[str, list[_Anchored]] = {}
    found: dict[tuple[int, int], Overlap] = {}
    compared = 0
    # If paths are nested, one is the other's ancestor, so looking up every policy's ancestors finds
    # all pairs.
    every = [item for place, source in enumerate(listed) for item in _list_items(place, source)]
    for anchor, item in every:
        anchors.setdefault(anchor, []).append(item)
    for anchor, item in every:
        for above in _list_ancestors(anchor):
            for other in anchors.get(above, ()):
                compared += 1
                if compared > _MAX_COMPARISONS or len(found) == MAX_PAIRS:
                    return [found[pair] for pair in sorted(found)]
                first, second = sorted((item, other), key=lambda each: each.place)
                pair = first.place, second.place
                if (
                    first.place != second.place
                    and pair not in found
                    and meet(item.selector, other.selector)
                ):
                    found[pair] = Overlap(first.file, first.policy, second.file, second.policy)
    return [found[pair] for pair in sorted(found)]


def find_uncompared(sources: Iterable[Source], compared: Collection[str]) -> list[str]:
    """Notes on the first shadow policies that overlap an enforcing one without comparison."""
    every = [(source, policy) for source in sources for policy in source.outlines if policy.enabled]
    watching = [
        (source, policy)
        for source, policy in every
        if policy.mode == SHADOW and policy.id not in compared
    ]
    found = []
    for source, policy in watching[:MAX_PAIRS]:
        for other, live in every:
            if (
                live.mode != SHADOW
                and other.namespace == source.namespace
                and meet(policy.selector, live.selector)
            ):
                told = (
                    f"{policy.id} ({source.file}) is in shadow mode, and `loopguard canary` "
                    "compares it with no policy"
                )
                found.append(f'{told}: "canary_of": "{live.id}" would compare them')
                break
    return found


def _list_items(place: int, source: Source) -> Iterator[tuple[str, _Anchored]]:
    for policy in source.outlines:
        if policy.enabled:
            item = _Anchored(place, source.file, policy.id, policy.selector)
            for anchor in dict.fromkeys(_list_paths(policy.selector)) or [_BY_ROUTE]:
                yield anchor, item


def _list_ancestors(path: str) -> Iterator[str]:
    """The path, and every prefix that may match it."""
    yield path
    position = path.find("/")
    while position >= 0:
        if path[: position + 1] != path:
            yield path[: position + 1]
        if position > 0:
            yield path[:position]
        position = path.find("/", position + 1)


def meet(one: SlimSelector, other: SlimSelector) -> bool:
    """Whether two selectors may match the same request."""
    pairs = (
        (one.apis, other.apis),
        (one.hosts, other.hosts),
        (one.methods, other.methods),
        (one.routes, other.routes),
    )
    return all(
        a is None or b is None or not set(a).isdisjoint(b) for a, b in pairs
    ) and _paths_meet(one, other)


def _paths_meet(one: SlimSelector, other: SlimSelector) -> bool:
    if _BY_ROUTE in (_first_path(one), _first_path(other)):
        return _first_path(one) == _first_path(other)
    if one.exact is not None and one.exact == other.exact:
        return True
    both = ((one, other), (other, one))
    return any(
        is_below(path, prefix) for a, b in both for path in _list_paths(a) for prefix in b.prefixes
    )


def _list_paths(selector: SlimSelector) -> list[str]:
    return [path for path in (selector.exact, *selector.prefixes) if path is not None]


def _first_path(selector: SlimSelector) -> str:
    return next(iter(_list_paths(selector)), _BY_ROUTE)
