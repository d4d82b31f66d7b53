"""Plans the routes: the paths that Envoy sends to Loopguard, their order and their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from extproc.apis import API_NAMES, read_path
from extproc.errors import UsageError
from extproc.policy.bundle import Policy
from extproc.policy.loader import PolicySet


class GuardedPath(NamedTuple):
    """A route that Envoy sends to Loopguard.

    Attributes:
        path: the path; empty if `api`, or `name` alone, selects.
        exact: whether paths below it are excluded.
        policies: ids of the policies that need it.
        name: the route's name.
        api: the API whose paths it takes, whatever they begin with.
    """

    path: str
    exact: bool
    policies: tuple[str, ...]
    name: str
    api: str = ""


class _Anchor(NamedTuple):
    path: str
    exact: bool
    api: str = ""

    def list_around(self) -> Iterator[_Anchor]:
        """This anchor, every prefix of it, longest first, and every API that it may call."""
        yield self
        yield _Anchor(self.path or "/", exact=False)
        for end in range(len(self.path) - 1, -1, -1):
            if self.path[end] == "/":
                yield _Anchor(self.path[: end + 1], exact=False)
                yield _Anchor(self.path[:end], exact=False)
        if self.path not in ("", "/"):  # their routes come after those of APIs
            for api in [read_path(self.path).api] if self.exact else API_NAMES:
                yield _Anchor("", exact=False, api=api)

    def rank(self) -> tuple[bool, int]:
        """The sort key: exact paths, then prefixes, longest first, and APIs before `/`."""
        return not self.exact, -len(self.path or "/x")


_EVERYWHERE = _Anchor("/", exact=False)


def plan_routes(policies: PolicySet) -> list[GuardedPath]:
    """The guarded paths, most specific first; raises UsageError for conflicting route names."""
    users: dict[_Anchor, list[Policy]] = {}
    by_name_alone: list[Policy] = []
    for policy in policies.list_acting():
        anchors = list(_find_anchors(policy))
        for anchor in anchors:
            users.setdefault(anchor, []).append(policy)
        if not anchors:
            by_name_alone.append(policy)
    for _, switch in (numbered for source in policies.sources for numbered in source.kill_switches):
        if switch.route is not None:  # possibly no policy's path
            users.setdefault(_Anchor(switch.route, exact=True), [])
    names = {anchor: _choose_name(anchor, asking) for anchor, asking in users.items()}
    homeless = [
        policy
        for policy in by_name_alone
        if not set(names.values()) & set(_list_wanted_names(policy))
    ]
    if homeless:
        users.setdefault(_EVERYWHERE, []).extend(homeless)
        names[_EVERYWHERE] = _choose_name_of_everywhere(homeless, users[_EVERYWHERE])
    return [
        GuardedPath(
            anchor.path,
            anchor.exact,
            tuple(policy.id for policy in users[anchor]),
            _name(anchor, names),
            anchor.api,
        )
        for anchor in sorted(users, key=_Anchor.rank)
    ]


def _find_anchors(policy: Policy) -> Iterator[_Anchor]:
    selector = policy.spec.selector
    if selector.pathExact is not None:
        yield _Anchor(selector.pathExact, exact=True)
    for prefix in selector.list_prefixes():
        yield _Anchor(prefix, exact=False)
    # Without APIs, all requests of its paths are sent
    for api in selector.list_apis() if selector.spans_apis() else ():
        yield _Anchor("", exact=False, api=api)


def _list_wanted_names(policy: Policy) -> Sequence[str]:
    return policy.spec.selector.routes or ()


def _choose_name(anchor: _Anchor, users: Sequence[Policy]) -> str:
    """The first route name that suits every policy of this anchor; empty if none needs a name."""
    asking = [policy for policy in users if _list_wanted_names(policy)]
    if not asking:
        return ""
    for name in _list_wanted_names(asking[0]):
        if all(name in _list_wanted_names(policy) for policy in asking):
            return name
    told = ", ".join(
        f"{policy.id} ({' or '.join(_list_wanted_names(policy))})" for policy in asking
    )
    raise UsageError(
        f"--policy: the path {anchor.path or anchor.api} can have one route name, but its "
        "policies ask for different ones: "
        f"{told}; let them share a name, or leave `routes` out"
    )


def _choose_name_of_everywhere(homeless: Sequence[Policy], users: Sequence[Policy]) -> str:
    """The name of the catch-all route, for policies that select by route name alone."""
    wanted = dict.fromkeys(name for policy in homeless for name in _list_wanted_names(policy))
    if len(wanted) > 1:
        raise UsageError(
            f"--policy: {', '.join(policy.id for policy in homeless)} select by route alone, and "
            "the paths of the "
            f"routes {', '.join(wanted)} are unknown; add a path to those selectors"
        )
    return _choose_name(_EVERYWHERE, users)


def _name(anchor: _Anchor, names: Mapping[_Anchor, str]) -> str:
    """A route's name, else that of the nearest enclosing path or API, whose policies match, too."""
    name = next((names[around] for around in anchor.list_around() if names.get(around)), "")
    return name or f"guarded:{anchor.api or anchor.path}{'' if anchor.exact or anchor.api else '*'}"
