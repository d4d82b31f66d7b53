"""Counts how much of the matched traffic is guarded, and why the rest is not.

Requests that policies count are in the metrics already. This adds those left out, by policy, Envoy
route and reason. None of these labels is chosen by a client. A request that all its policies count
costs one addition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import time
from typing import Final, TypeAlias

from extproc.apis import read_path
from extproc.engine.exchange import Exchange, Guards
from extproc.metrics import Decisions
from extproc.operator.coverage_rows import (
    COUNTED,
    CROWDED,
    EXEMPT,
    GROWN,
    PARTLY,
    REQUESTS,
    SHARED,
    UNGUARDED,
    UNMATCHED,
    UNMATCHED_CALLS,
    CoverageDocument,
    CoverageRow,
)
from extproc.request.http import HttpRequest

BY_DESIGN: Final = {
    "bypass": "match an entry of the policy's bypass",
    "not_a_call": "call no tool or agent",
    "allowed_tool": "call a tool that the policy allows",
    "has_history": "continue a conversation, which the similarity prompt leaves to other detectors",
    "decided_before": "were refused or delayed before a shadow policy saw their body",
    "aborted": (
        "were cancelled by the client or ended by Envoy, by its request_timeout or for their size"
    ),
    "no_body": "are replayed from a log without bodies",
    "not_recorded": "are replayed from a log without what the policy needs",
    GROWN: (
        "are in sessions whose input has reached max_input_growth: their clients should compact"
    ),
}
"""Reasons that need no repair of a policy, with texts: requests were left out on purpose, ended
early, or only got a note."""

WINDOW_SECONDS: Final = 900
_SNAPSHOT_SECONDS: Final = 60
_MOST_KEYS: Final = 5_000

_Key: TypeAlias = tuple[str, str, str, str, str]
"""Policy (empty for all requests), mode, route, detector and reason."""

_Counts: TypeAlias = dict[_Key, int]


def _name(reason: str) -> _Key:
    return ("", "", "", "", reason)


class Coverage:
    """Counts matched, unmatched and left-out requests. Only the event loop writes."""

    def __init__(
        self, decisions: Decisions, now: float, count_lost: Callable[[], Mapping[str, int]] = dict
    ) -> None:
        """Start empty.

        Args:
            decisions: the metric of requests that policies count.
            now: in seconds since 1970.
            count_lost: returns counts of lost data, by reason of a row.
        """
        self._count_lost = count_lost
        self.requests = 0
        self.unmatched = 0
        self._decisions = decisions
        self._left_out: _Counts = {}
        self._since = now
        self._before: list[tuple[float, _Counts]] = []  # the oldest first
        self.roll(now)

    @property
    def changes(self) -> int:
        """The number of requests."""
        return self.requests + self.unmatched

    def note_unmatched(self, request: HttpRequest) -> None:
        """Note a request that no policy matches."""
        self.unmatched += 1
        if request.method == "POST" and read_path(request.path).api:
            self._add(_name(UNMATCHED_CALLS))

    def note(self, exchange: Exchange) -> None:
        """Note a request that some policy did not count, or not with all of its detectors."""
        # Refused as uncountable, so it does not pass unguarded
        if exchange.enforcing.forbidden is not None:
            self._add(_name(EXEMPT))
            return
        route = exchange.request.facts.route()
        counted = flawed = False
        for group in exchange.groups:
            counted = counted or bool(group.active)
            flawed = self._note_group(group, route) or flawed
        # A request counted with its first part is not noted for its second
        if exchange.plans and (flawed or not counted):
            self._add(_name(PARTLY if counted else UNGUARDED if flawed else EXEMPT))

    def _note_group(self, group: Guards, route: str) -> bool:
        """Count the guards that a group left out; returns whether any reason is not by design."""
        mode = "shadow" if group.shadow else "enforce"
        counted = {candidate.plan.id for candidate in group.active}
        left_out = [
            *group.left_out,
            *((policy, "", "internal_error") for policy, _ in group.failures),
        ]
        for policy, detector, reason in dict.fromkeys(left_out):
            self._add((policy, mode, route, detector, reason))
        for policy, reasons in _group_reasons(left_out).items():
            if policy not in counted:
                self._add(
                    (policy, mode, route, "", UNGUARDED if reasons - BY_DESIGN.keys() else EXEMPT)
                )
        if group.missing:
            for policy in {
                each.plan.id
                for each in group.active
                if each.plan.merges_strangers and not each.caller
            }:
                self._add((policy, mode, route, "", SHARED))
        return any(reason not in BY_DESIGN for _, _, reason in left_out)

    def note_crowded(self, policy: str, mode: str) -> None:
        """Note a request in a session that expires early because its caller has too many."""
        self._add((policy, mode, "", "", CROWDED))

    def note_grown(self, policy: str, mode: str) -> None:
        """Note a request in a session whose input has reached `max_input_growth`."""
        self._add((policy, mode, "", "", GROWN))

    def note_unsteered(self, policies: Sequence[str], reason: str) -> None:
        """Note a request that got a warning instead of a note."""
        for policy in policies:
            self._add((policy, "enforce", "", "", f"unsteered {reason}"))

    def _add(self, key: _Key) -> None:
        counts = self._left_out
        if key not in counts and len(counts) >= _MOST_KEYS:
            key = (
                (key[0], key[1], "", "", key[4]) if len(counts) < 2 * _MOST_KEYS else _name(key[4])
            )
        counts[key] = counts.get(key, 0) + 1

    def roll(self, now: float) -> None:
        """Take a snapshot once a minute, from which recent counts are computed.

        `now` is in seconds since 1970.
        """
        before = self._before
        if before and now - before[-1][0] < _SNAPSHOT_SECONDS:
            return
        before.append((now, self._count()))
        while len(before) > 1 and before[1][0] <= now - WINDOW_SECONDS:
            del before[0]

    def drop_quiet(self, before: float) -> None:
        """Do nothing, because counts do not expire; see `Table.drop_quiet`."""

    # It has none
    def make_document(self, *, shows_callers: bool) -> CoverageDocument:  # noqa: ARG002
        """A snapshot of the counts of the last `WINDOW_SECONDS` and since the start."""
        began, before = self._before[0]
        rows = [
            CoverageRow(*key, count - before.get(key, 0), count)
            for key, count in self._count().items()
        ]
        return CoverageDocument(rows, self._since, time() - began)

    def _count(self) -> _Counts:
        """All counts. Thread-safe."""
        counts = self._left_out.copy()
        for (policy, mode, _), number in self._decisions.copy().items():
            key = (policy, mode, "", "", COUNTED)
            counts[key] = counts.get(key, 0) + number
        counts.update({_name(reason): number for reason, number in self._count_lost().items()})
        counts[_name(REQUESTS)] = self.requests
        counts[_name(UNMATCHED)] = self.unmatched
        return counts


def _group_reasons(left_out: Sequence[tuple[str, str, str]]) -> dict[str, set[str]]:
    reasons: dict[str, set[str]] = {}
    for policy, _, reason in left_out:
        reasons.setdefault(policy, set()).add(reason)
    return reasons
