"""Policies that Envoy sends with a route, in addition to policies that select requests themselves.

There are two ways. Both are part of Envoy's configuration, which only the operator controls:

- A route's gRPC initial metadata `x-loopguard-policy: <id>[,<id>]` names loaded policies, whatever
  their selectors say.
- A route's metadata contains a whole policy file (`loopguard` / `policy_json`). Its policies need
  no selector, because they apply to the route. A policy replaces a loaded one with the same id.

Errors in either never reach the client: the request continues without that policy, and the error is
counted and logged.
"""
# interpreted: parses a route's policies once for all of its requests

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from extproc.bounded import LRU
from extproc.engine.engine import Engine
from extproc.engine.plan import Plan
from extproc.errors import BundleErrors, excerpt
from extproc.policy.loader import PolicySet, Source, Unenforced, parse

POLICY_METADATA = "x-loopguard-policy"
"""The key in a stream's gRPC initial metadata for the ids of a route's policies, separated by
commas."""

POLICY_ATTRIBUTE = "xds.route_metadata.filter_metadata['loopguard']['policy_json']"
"""The request attribute that Envoy must send, spelled exactly so (`request_attributes` of the
filter)."""

MAX_POLICY_JSON = 65_536
"""Maximum length of a policy file in route metadata, in characters. It is checked on the event
loop, while requests wait."""

_MAX_KEPT = 256

_NOT_SET = frozenset({"", "-"})
"""Envoy's formatters write these for a missing value."""


def parse_names(value: str) -> list[str]:
    """The policy ids in one value of `x-loopguard-policy`."""
    return [name for part in value.split(",") if (name := part.strip()) not in _NOT_SET]


class RefusedPolicy(NamedTuple):
    """Why a policy file in route metadata is invalid; a few kilobytes at most.

    Attributes:
        reason: `invalid`, `too_large` or `unenforced`, as in the metric.
        problems: the first problems, shortened: what is wrong and what is expected.
        found: number of problems.
    """

    reason: str
    problems: list[str]
    found: int


def _refuse(reason: str, problems: Sequence[object]) -> RefusedPolicy:
    return RefusedPolicy(reason, excerpt(problems), len(problems))


class _HandedOver(NamedTuple):
    sources: tuple[Source, ...]
    checked: datetime
    shadowed: bool
    unenforced: tuple[Unenforced, ...]
    engine: Engine


class HandedOver:
    """Policy files from route metadata, compiled once for each content; an LRU cache."""

    def __init__(self, *, shadow: bool, allow_unenforced: bool) -> None:
        """The arguments are options of `serve`."""
        self._shadow = shadow
        self._allow_unenforced = allow_unenforced
        self._known: LRU[str, _HandedOver | RefusedPolicy] = LRU(_MAX_KEPT)

    def list_plans(self) -> list[Plan]:
        """The policies of all cached files."""
        return [
            plan
            for _, made in self._known.items()
            if isinstance(made, _HandedOver)
            for plan in made.engine.plans
        ]

    def list_unenforced(self) -> list[Unenforced]:
        """The unenforced parts of all cached files; may be called from any thread."""
        return [
            part
            for _, made in self._known.items()
            if isinstance(made, _HandedOver)
            for part in made.unenforced
        ]

    def recall(self, text: str, now: datetime) -> Engine | RefusedPolicy | None:
        """The cached result for this content; None if it is new."""
        name = _cut(text)
        found = self._known.use(name)
        if isinstance(found, _HandedOver) and found.shadowed != _is_shadowed(found.sources, now):
            found = self._make_engine(text, now, found.checked)
            self._known.put(name, found)
        return found.engine if isinstance(found, _HandedOver) else found

    def compile(self, text: str, now: datetime) -> Engine | RefusedPolicy:
        """Compile new content and cache the result."""
        made = self._make_engine(text, now, now)
        self._known.put(_cut(text), made)
        return made.engine if isinstance(made, _HandedOver) else made

    def _make_engine(
        self, text: str, now: datetime, checked: datetime
    ) -> _HandedOver | RefusedPolicy:
        """Compile, as of `now`, a file that was checked at `checked`.

        Its policies are freed, because they are large.
        """
        policies = self._parse(text, checked)
        if isinstance(policies, RefusedPolicy):
            return policies
        engine = Engine(policies, now, shadow=self._shadow)
        for source in policies.sources:
            source.policies.clear()
            source.kill_switches.clear()
        return _HandedOver(
            policies.sources,
            checked,
            _is_shadowed(policies.sources, now),
            policies.unenforced,
            engine,
        )

    def _parse(self, text: str, now: datetime) -> PolicySet | RefusedPolicy:
        if len(text) > MAX_POLICY_JSON:
            return _refuse(
                "too_large", [f"{len(text)} characters; at most {MAX_POLICY_JSON} are allowed"]
            )
        try:
            policies = parse(
                {"route metadata": text.encode("utf-8", "surrogateescape")}, now, on_route=True
            )
        except BundleErrors as error:
            return _refuse("invalid", error.errors)
        if policies.unenforced and not self._allow_unenforced:
            return _refuse("unenforced", policies.unenforced)
        return policies


def _cut(text: str) -> str:
    """The cache key of a content; all contents that are too large share one."""
    return text[: MAX_POLICY_JSON + 1]


def _is_shadowed(sources: Iterable[Source], now: datetime) -> bool:
    return any(source.forces_shadow(now) for source in sources)
