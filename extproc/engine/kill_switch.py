"""Kill switches: a bundle can refuse a caller's requests before any policy sees them.

A request needs one look-up per scope key in use, so tens of thousands of kill switches cost no more
than a few.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from extproc.objects import copy_text
from extproc.policy.bundle import KillSwitch
from extproc.policy.loader import Source
from extproc.request.fingerprint import drop_parameters, is_too_long
from extproc.request.http import Descriptor, HttpRequest, compile_plainly
from extproc.request.secrets import extract_secret

_ALWAYS = float("-inf")
_NEVER = float("inf")
_ANY_ROUTE = ""
_WITH_SCHEME = frozenset({"header:authorization", "header:proxy-authorization"})


class Switch(NamedTuple):
    """One kill switch; times in seconds since 1970.

    Attributes:
        place: `file: /kill_switches/0`.
        scope_key: the limit key to compare.
        reason: for the operator; may be empty.
        begins: when its bundle's `kill_switch_override` ends.
        ends: when it stops to apply.
    """

    place: str
    scope_key: str
    reason: str
    begins: float
    ends: float


FiledSwitch = tuple[tuple[str, str, str], Switch]
"""A switch with its index: scope key, value and route."""


def compile_switches(source: Source) -> list[FiledSwitch]:
    """The kill switches of a file, in order. They keep no reference to the source's objects."""
    return [
        (
            (
                copy_text(switch.scope_key),
                copy_text(switch.scope_value),
                copy_text(switch.route or _ANY_ROUTE),
            ),
            _compile(source, place, switch),
        )
        for place, switch in source.kill_switches
    ]


class KillSwitches:
    """The kill switches of one load. If several apply, the first one wins."""

    def __init__(self, files: Iterable[Sequence[FiledSwitch]]) -> None:
        self._switches: dict[tuple[str, str, str], list[tuple[int, Switch]]] = {}
        every = [filed for switches in files for filed in switches]
        for number, ((key, value, route), switch) in enumerate(every):
            self._switches.setdefault((key, _leave_out_scheme(key, value), route), []).append(
                (number, switch)
            )
        keys = dict.fromkeys([key for key, _, _ in self._switches])
        # Bundles contain the values themselves
        self._descriptors = [compile_plainly(key, hidden=False) for key in keys]

    def __len__(self) -> int:
        """The number of different callers and routes."""
        return len(self._switches)

    def list_parts(self) -> list[object]:
        """See `Engine`."""
        return [part for entry in self._switches.items() for part in entry]

    def find(self, request: HttpRequest, now: float) -> Switch | None:
        """The first switch that applies to a request, if any. `now` in seconds since 1970."""
        found: Switch | None = None
        first = 0
        for descriptor in self._descriptors:
            value = _leave_out_scheme(descriptor.key, _read(descriptor, request))
            if not value:
                continue
            for route in dict.fromkeys((_ANY_ROUTE, request.path, drop_parameters(request.path))):
                for number, switch in self._switches.get((descriptor.key, value, route), ()):
                    if switch.begins <= now < switch.ends and (found is None or number < first):
                        found, first = switch, number
        return found


def _read(descriptor: Descriptor, request: HttpRequest) -> str:
    """The request's value; empty if it has none, or if finding it would take too long."""
    if descriptor.source == "query" and is_too_long(request.target, request.query):
        return ""
    return descriptor.read(request, descriptor.argument)


def _leave_out_scheme(key: str, value: str) -> str:
    """A credential without its scheme, whose spelling varies; any other value unchanged."""
    return extract_secret(value) or value if key in _WITH_SCHEME else value


def _compile(source: Source, place: int, switch: KillSwitch) -> Switch:
    return Switch(
        f"{source.file}: /kill_switches/{place}",
        copy_text(switch.scope_key),
        copy_text(switch.reason or ""),
        _to_seconds(source.override_until, _ALWAYS),
        _to_seconds(switch.expires_at, _NEVER),
    )


def _to_seconds(moment: datetime | None, otherwise: float) -> float:
    return moment.timestamp() if moment is not None else otherwise
