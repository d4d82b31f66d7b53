"""Kill switches: a bundle can refuse a caller's requests before any policy sees them.

A request needs one look-up for each scope key in use, so tens of thousands of kill switches cost no more than a few.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from extproc.objects import copy_text
from extproc.policy.bundle import KillSwitch
from extproc.policy.loader import Source
from extproc.request.fingerprint import is_too_long
from extproc.request.http import Descriptor, HttpRequest, compile_plainly

_ALWAYS = float("-inf")
_NEVER = float("inf")
_ANY_ROUTE = ""


class Switch(NamedTuple):
    """One kill switch; times in seconds since 1970.

    Attributes:
        place: `file: /kill_switches/0`.
        number: its position among all switches of a load; the lowest that applies wins.
        scope_key: the limit key to compare.
        reason: for the operator; empty for none.
        begins: when its bundle's `kill_switch_override` ends.
        ends: when it stops to apply.
    """

    place: str
    number: int
    scope_key: str
    reason: str
    begins: float
    ends: float


class KillSwitches:
    """The kill switches of one load."""

    def __init__(self, sources: Iterable[Source]) -> None:
        """Compile; keeps no reference to the sources' own objects."""
        self._switches: dict[tuple[str, str, str], list[Switch]] = {}  # by scope key, value and route
        every = [(source, place, switch) for source in sources for place, switch in source.kill_switches]
        for number, (source, place, switch) in enumerate(every):
            name = copy_text(switch.scope_key), copy_text(switch.scope_value), copy_text(switch.route or _ANY_ROUTE)
            self._switches.setdefault(name, []).append(_compile(source, place, switch, number))
        keys = dict.fromkeys([key for key, _, _ in self._switches])
        self._descriptors = [compile_plainly(key, hidden=False) for key in keys]  # bundles contain the values themselves

    def __len__(self) -> int:
        """The number of different callers and routes."""
        return len(self._switches)

    def list_parts(self) -> list[object]:
        """See `Engine`."""
        return [part for entry in self._switches.items() for part in entry]

    def find(self, request: HttpRequest, now: float) -> Switch | None:
        """The first switch that applies to a request; None for none. `now` in seconds since 1970."""
        found: Switch | None = None
        for descriptor in self._descriptors:
            value = _read(descriptor, request)
            if not value:
                continue
            for route in (_ANY_ROUTE, request.path):
                for switch in self._switches.get((descriptor.key, value, route), ()):
                    if switch.begins <= now < switch.ends and (found is None or switch.number < found.number):
                        found = switch
        return found


def _read(descriptor: Descriptor, request: HttpRequest) -> str:
    """A request's value; empty if it has none, or if finding it would take too long."""
    if descriptor.source == "query" and is_too_long(request.target, request.query):
        return ""
    return descriptor.read(request, descriptor.argument)


def _compile(source: Source, place: int, switch: KillSwitch, number: int) -> Switch:
    return Switch(
        f"{source.file}: /kill_switches/{place}",
        number,
        copy_text(switch.scope_key),
        copy_text(switch.reason or ""),
        _to_seconds(source.override_until, _ALWAYS),
        _to_seconds(switch.expires_at, _NEVER),
    )


def _to_seconds(moment: datetime | None, otherwise: float) -> float:
    return moment.timestamp() if moment is not None else otherwise
