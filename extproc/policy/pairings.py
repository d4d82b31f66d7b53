"""Pairs shadow policies with the enforcing policies that they are compared with."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from extproc.policy.bundle import SHADOW
from extproc.policy.outline import Outline
from extproc.policy.rules import is_watching

MAX_PAIRINGS = 100
"""Maximum number of pairs in a namespace, because comparisons are in memory. Further candidates are
not compared."""


class Pairing(NamedTuple):
    """A candidate and the policy that it may replace.

    Attributes:
        live: id of the enforcing policy.
        candidate: id of the shadow policy, or of one that acts on a percentage of its callers.
        identity: digests of both policies, 32 hex digits; a change restarts the comparison.
        percent: the percentage of callers that the candidate acts on; 0 in shadow mode.
    """

    live: str
    candidate: str
    identity: str
    percent: int = 0


def find_pairings(policies: Sequence[tuple[str, Outline]]) -> list[Pairing]:
    """Every shadow policy that names an enforcing one, or has the selector of exactly one.

    Policies come with their namespaces, and are only compared within them.
    """
    by_namespace: dict[str, list[Outline]] = {}
    for namespace, policy in policies:
        by_namespace.setdefault(namespace, []).append(policy)
    return [pairing for own in by_namespace.values() for pairing in _find_pairings(own)]


def _find_pairings(policies: Sequence[Outline]) -> list[Pairing]:
    candidates = [
        policy for policy in policies if policy.mode == SHADOW or policy.canary_of is not None
    ]
    if not candidates:
        return []
    enforcing = {policy.id: policy for policy in policies if policy.mode != SHADOW}
    by_selector: dict[tuple[object, ...], list[Outline]] = {}
    for policy in enforcing.values():
        by_selector.setdefault(policy.selector.identify(), []).append(policy)
    found = []
    for candidate in candidates:
        live = enforcing.get(candidate.canary_of or "")
        if candidate.canary_of is None:
            alike = by_selector.get(candidate.selector.identify(), [])
            live = alike[0] if len(alike) == 1 else None
        if live is not None:
            identity = f"{live.digest:016x}{candidate.digest:016x}"
            found.append(Pairing(live.id, candidate.id, identity, candidate.percent))
    return found[:MAX_PAIRINGS]


class Claim(NamedTuple):
    """The part of a raw policy that pairing needs, even if the rest is invalid.

    `canary_of` is None if the policy acts on all callers.
    """

    identity: str
    mode: str
    canary_of: str | None
    namespace: str = ""


def read_claim(entry: Any, namespace: str = "") -> Claim | None:  # noqa: ANN401  # raw JSON
    """The claim of a raw policy; None if its id or spec is invalid."""
    spec = entry.get("spec") if isinstance(entry, dict) else None
    if not isinstance(spec, dict) or not isinstance(entry.get("id"), str):
        return None
    mode, named = spec.get("mode", "enforce"), spec.get("canary_of")
    named = named if isinstance(named, str) and is_watching(spec) else None
    return Claim(entry["id"], mode if isinstance(mode, str) else "", named, namespace)


def make_claim(policy: Outline, namespace: str) -> Claim:
    """The claim of a valid policy."""
    return Claim(policy.id, policy.mode, policy.canary_of, namespace)


def find_pairing_errors(claims: Iterable[Claim | None]) -> Iterator[tuple[int, str]]:
    """The place of each policy whose `canary_of` is invalid, and what is expected."""
    claimed = list(claims)
    known = {claim.identity: claim for claim in claimed if claim is not None}
    for place, claim in enumerate(claimed):
        if claim is None or claim.canary_of is None:
            continue
        named = claim.canary_of
        if named == claim.identity:
            yield place, "canary_of must name another policy, not this one"
        elif named not in known:
            close = difflib.get_close_matches(named, known, n=1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            yield place, f"canary_of must name a loaded policy, and there is no {named!r}{meant}"
        elif known[named].namespace != claim.namespace:
            yield (
                place,
                (
                    f"canary_of must name a policy of the same namespace, and {named!r} is "
                    "outside of "
                    "it"
                ),
            )
        elif known[named].mode == SHADOW:
            yield (
                place,
                f"canary_of must name a policy with mode enforce, but {named!r} is in shadow mode",
            )
