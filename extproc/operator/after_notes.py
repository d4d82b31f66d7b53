"""Measures whether notes help: how loops continue after their first note.

Clients do not store notes, so a conversation's history does not contain them. But a detector can
compute its previous action from the history without the newest turn. So each request alone shows
what has just changed, on any replica. The only state is a bounded table of the conversations that
are followed.

An episode begins when a loop's first note is due. In shadow mode, or outside `steer_share`, no note
is sent, which gives a control group. An episode ends when the newest turn leaves the loop, with a
landing, or with a refusal. Without any of these, the conversation has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from extproc.bounded import LRU
from extproc.decision import Action, Decision, Outcome
from extproc.engine.exchange import Exchange
from extproc.engine.guards import LoopGuard
from extproc.memory import read_memory
from extproc.operator.loop_table import find_guard, name_repeated
from extproc.request.fingerprint import NO_BODY, name_request, write_head, write_query

BEGUN, WENT_ON, TURNED, LANDED, REFUSED = AFTER = (
    "begun",
    "went_on",
    "turned_round",
    "landed",
    "refused",
)
"""Changes in an episode: its first note, the loop continuing after it, or one of the ENDS."""

ARMS: Final = ("noted", "not_noted")
ENDS: Final = (TURNED, LANDED, REFUSED)
NO_CAUSE: Final = "none"

_MOST_FOLLOWED: Final = 10_000
_NOTED: Final = frozenset({Action.STEER, Action.THROTTLE})
"""Actions of a steering detector that mean that a loop has a note."""

_ENDING: Final = {Action.LAND: LANDED, Action.REJECT: REFUSED}


class AfterNote(NamedTuple):
    """A change in an episode.

    Attributes:
        outcome: the outcome of the request that shows it.
        repeats: what identifies the loop, which the request may have left; see `Loop`.
        fingerprint: fingerprint of the loop.
        after: one of AFTER.
        noted: whether the conversation gets notes.
        cause: a kind of `Cause`, or NO_CAUSE.
    """

    outcome: Outcome
    repeats: str
    fingerprint: str
    after: str
    noted: bool
    cause: str

    @property
    def labels(self) -> tuple[str, str, str, str, str, str]:
        """Policy, detector, mode, cause, arm and change."""
        outcome = self.outcome
        return outcome.policy, outcome.detector, outcome.mode, self.cause, self.arm, self.after

    @property
    def arm(self) -> str:
        """One of ARMS."""
        return ARMS[not self.noted]


class NoteFollower:
    """Finds the changes in episodes that requests show."""

    def __init__(self) -> None:
        # By policy, detector, mode, tenant and node of the chain: whether the conversation is
        # followed from there. It is not if its body could not be edited. Nodes also identify
        # repeated requests.
        self._nodes: LRU[tuple[str, str, str, str, bytes], bool] = LRU(
            read_memory().scale(_MOST_FOLLOWED)
        )

    def follow(self, exchange: Exchange, decision: Decision) -> list[AfterNote]:
        """The changes that a decided request shows."""
        found = [
            self._follow(exchange, outcome) for outcome in decision.trace if may_follow(outcome)
        ]
        return [change for change in found if change is not None]

    def _follow(self, exchange: Exchange, outcome: Outcome) -> AfterNote | None:
        candidate = find_guard(exchange, outcome)
        if (
            not isinstance(candidate, LoopGuard)
            or Action.STEER not in candidate.detector.actions
            or candidate.is_allowed
        ):
            return None
        now, before, earlier = candidate.detector.find_earlier_actions(outcome)
        if outcome.action in _ENDING:
            now = outcome.action
        elif now in _ENDING:  # spared by an incident, or unable to land
            now = Action.STEER
        after = find_change(now, before, earlier)
        if not after and now not in _NOTED:
            return None
        noted = outcome.mode == "enforce" and exchange.gets_notes(outcome)
        failed = noted and now in _NOTED and outcome.action is Action.WARN
        if not self._is_followed(outcome, candidate, failed=failed) or not after:
            return None
        repeat, newer, fingerprint = outcome.repeat, 0, outcome.fingerprint
        if after == TURNED and repeat is not None and repeat.before is not None:
            # The fingerprint that the previous turn's request had
            compared = repeat.before.compared
            request, sums = exchange.request, NO_BODY.plus(compared)
            query = write_query(request.read_shown_query()) if request.query else ""
            fingerprint = name_request(
                write_head(request.method, request.path, query), sums, candidate.caller
            )[1]
            repeat, newer = repeat.before.last, 1
        cause = exchange.find_cause(repeat, newer)
        kind = cause.kind if cause is not None else NO_CAUSE
        return AfterNote(
            outcome, name_repeated(repeat, fingerprint), fingerprint, after, noted, kind
        )

    def _is_followed(self, outcome: Outcome, candidate: LoopGuard, *, failed: bool) -> bool:
        place = candidate.memory.place if candidate.memory is not None else None
        if place is None:
            return not failed
        here = outcome.policy, outcome.detector, outcome.mode, outcome.tenant, place.node
        if self._nodes.peek(here) is not None:
            return False
        before = [
            known
            for parent in place.parents
            if (known := self._nodes.peek((*here[:-1], parent))) is not None
        ]
        followed = not failed and before[:1] != [False]
        self._nodes.put(here, followed)
        return followed


def describe_after(counts: Mapping[str, int], active: int | None = None) -> dict[str, int]:
    """The counts of AFTER, and of open episodes; `active` is how many are active, if known."""
    found = {after: counts.get(after, 0) for after in AFTER}
    left = count_open(counts)
    more = (
        {"open_or_ended": left}
        if active is None
        else {"open": min(left, active), "ended": max(0, left - active)}
    )
    return {**found, **more}


def count_open(counts: Mapping[str, int]) -> int:
    """The number of episodes without an end."""
    return max(0, counts.get(BEGUN, 0) - sum([counts.get(end, 0) for end in ENDS]))


def write_after(counts: Mapping[str, int], *, noted: bool) -> str:
    """Write the counts as text."""
    words = ("turned_round", "landed", "refused", "ended", "open", "open_or_ended")
    said = ", ".join(
        [f"{counts[word]:,} {word.replace('_', ' ')}" for word in words if counts.get(word)]
    )
    return f"{'steered' if noted else 'not steered'} {counts[BEGUN]:,}{': ' if said else ''}{said}"


def may_follow(outcome: Outcome) -> bool:
    """Whether an outcome may show a change: a loop was acted on, or has just ended."""
    repeat = outcome.repeat
    if repeat is None:
        return outcome.action is not Action.ALLOW
    return repeat.looping or (repeat.before is not None and repeat.before.last is not None)


def find_change(now: Action, before: Action, earlier: Action) -> str:
    """The change, given the actions for this request and the two before it; empty for none."""
    if before not in _NOTED:
        return BEGUN if now in _NOTED and before not in _ENDING else ""
    if now in _ENDING:
        return _ENDING[now]
    if now not in _NOTED:
        return TURNED
    return "" if earlier in _NOTED else WENT_ON
