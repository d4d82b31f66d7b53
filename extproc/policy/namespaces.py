"""Namespaces: policies below a folder may only select requests of its team.

A namespace restricts hosts, paths, routes and ids. If it names hosts, each of its policies must
name at least one of them and no others; the same is true of paths and routes. A prefix of ids is
reserved, so that no other file can take an id first. Canaries are compared, and callers are named
(aliases), only within a namespace.
"""
# interpreted: reads options, and runs at load

from __future__ import annotations

import os.path
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from extproc.errors import UsageError
from extproc.objects import Place
from extproc.policy.bundle import KillSwitch, Policy, Selector, is_below, normalize_host

_FORM = "must be PATH=host:NAME,path:/PREFIX,route:NAME,id:PREFIX with at least one of these"

Error = tuple[Place, str]
"""The place below the policy or kill switch, and what is expected."""


class Namespace(NamedTuple):
    """A folder or file, and the requests its policies may select; empty kinds are unrestricted.

    Attributes:
        path: the folder, as given.
        hosts: hosts, in lower case without port.
        paths: path prefixes, as in `pathPrefix`.
        routes: Envoy route names.
        ids: prefixes of policy ids.
    """

    path: str
    hosts: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()

    def holds(self, file: str) -> bool:
        """Whether a file is at or below the namespace's path."""
        return _is_inside(file, self.path)


def _is_inside(path: str, folder: str) -> bool:
    path, folder = os.path.normpath(path), os.path.normpath(folder)
    # Ends in one slash, `/` as well
    return path == folder or path.startswith(os.path.join(folder, ""))  # noqa: PTH118


def parse_namespace(text: str) -> Namespace:
    """Parse `PATH=host:a.example.com,path:/a`; raises ValueError with what is expected."""
    path, found, listed = text.partition("=")
    kinds: dict[str, list[str]] = {"host": [], "path": [], "route": [], "id": []}
    for item in listed.split(",") if found else ():
        kind, _, value = item.strip().partition(":")
        if kind not in kinds or not value:
            raise ValueError(_FORM)
        kinds[kind].append(value)
    if not path or not any(kinds.values()):
        raise ValueError(_FORM)
    try:
        selector = Selector(pathPrefixes=kinds["path"] or None, hosts=kinds["host"] or None)
    except ValueError:
        raise ValueError(f"{_FORM}; a path begins with '/', and a host has no wildcard") from None
    hosts = tuple(normalize_host(host) for host in selector.hosts or ())
    return Namespace(
        path, hosts, tuple(selector.list_prefixes()), tuple(kinds["route"]), tuple(kinds["id"])
    )


def read_namespaces(texts: Sequence[str], paths: Sequence[str]) -> tuple[Namespace, ...]:
    """Parse the values of `--namespace-of`.

    Raises UsageError if one is invalid, or no policy path includes it.
    """
    found = []
    for text in texts:
        try:
            namespace = parse_namespace(text)
        except ValueError as error:
            raise UsageError(f"--namespace-of {error}, not {text!r}") from None
        if not any(
            _is_inside(path, namespace.path) or _is_inside(namespace.path, path) for path in paths
        ):
            raise UsageError(
                f"--namespace-of {namespace.path}: no policy path includes it; these are "
                f"{', '.join(paths)}"
            )
        found.append(namespace)
    return tuple(found)


def name_namespace(file: str, namespaces: Sequence[Namespace]) -> str:
    """The name of a file's namespaces; empty if it has none."""
    return " ".join(namespace.path for namespace in namespaces if namespace.holds(file))


def find_policy_errors(
    file: str, policy: Policy, namespaces: Sequence[Namespace]
) -> Iterator[Error]:
    """Where a valid policy in this file exceeds its namespaces."""
    for namespace in namespaces:
        if namespace.holds(file):
            yield from _find_selector_errors(policy.spec.selector, namespace)
            if namespace.ids and not policy.id.startswith(namespace.ids):
                yield (
                    ("id",),
                    f"must begin with {_list(namespace.ids)}, as all ids in {namespace.path} do",
                )
        elif namespace.ids and policy.id.startswith(namespace.ids):
            yield (
                ("id",),
                f"must not begin with {_list(namespace.ids)}: these ids belong to {namespace.path}",
            )


def find_switch_errors(
    file: str, switch: KillSwitch, namespaces: Sequence[Namespace]
) -> Iterator[Error]:
    """Why a kill switch in this file could affect requests outside its namespaces."""
    for namespace in namespaces:
        if not namespace.holds(file):
            continue
        if namespace.hosts or namespace.routes or not namespace.paths:
            yield (
                (),
                (
                    f"a kill switch applies to all hosts and routes, so {namespace.path} cannot "
                    "have "
                    "one"
                ),
            )
        elif switch.route is None or not _is_allowed(switch.route, namespace.paths):
            yield (
                ("route",),
                f"must be a path below {_list(namespace.paths)}, as all paths in {namespace.path}",
            )


def _find_selector_errors(selector: Selector, namespace: Namespace) -> Iterator[Error]:
    place: Place = ("spec", "selector")
    for key, own, allowed in (
        ("hosts", selector.hosts, namespace.hosts),
        ("routes", selector.routes, namespace.routes),
    ):
        if allowed and not (own and set(own) <= set(allowed)):
            yield (*place, key), f"must name only {_list(allowed)}, the {key} of {namespace.path}"
    if not namespace.paths:
        return
    named = [path for path in (selector.pathExact, *selector.list_prefixes()) if path is not None]
    if not named or not all(_is_allowed(path, namespace.paths) for path in named):
        yield (
            place,
            (
                f"must name a path, and only paths below {_list(namespace.paths)}, those of "
                f"{namespace.path}"
            ),
        )


def _is_allowed(path: str, prefixes: Sequence[str]) -> bool:
    return any(is_below(path, prefix) for prefix in prefixes)


def _list(values: Sequence[str]) -> str:
    return " or ".join(values)
