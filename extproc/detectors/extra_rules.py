"""Rules in addition to those of `loops.py`, for turns that are not equal, but have something in common.

With a threshold t, the newest turn is part of a loop if

- SIMILAR_ERROR: its result is a failure, and max(6, t) of the last max(6, t) + 4 results are the same, ignoring numbers and
  actions. This rule is always on, and gets a note at most.

The others are on if a policy lists them (`extra_rules`):

- LONG_ACTION: the last t + 2 actions are the same, whatever their results. The action is at least 60 bytes long, and is
  neither talk nor by tools that only read.
- TWO_ERRORS: the last 2t + 4 results are failures of at most two kinds, ignoring numbers.
- FAILING_TURN: it failed, and t of the last 4t + 4 turns equal it, itself included, with at most t - 2 new turns between them.
  Talk and thinking are not new.
- ACTION_CYCLE: the last actions are t rounds of a cycle of 2 to 4 different actions, and at least half of the results are the
  same as a round before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from extproc.decision import STRONG, Repeat
from extproc.detectors.arguments import is_for_thinking
from extproc.detectors.tools import READS, Limit, ToolLimits
from extproc.detectors.turn import AnyTurn, fail_alike, may_fail_alike, same_action, same_result, same_turn, weigh, weigh_apart

SIMILAR_ERROR = "similar_error"
LONG_ACTION, TWO_ERRORS, FAILING_TURN, ACTION_CYCLE = "long_action", "two_errors", "failing_turn", "action_cycle"
EXTRA_RULES = (LONG_ACTION, TWO_ERRORS, FAILING_TURN, ACTION_CYCLE)

MIN_SIMILAR: Final = 6
_MORE_SIMILAR: Final = 4
NOTED_TURNS: Final = MIN_SIMILAR + _MORE_SIMILAR
"""SIMILAR_ERROR reads at most this many turns plus its threshold."""

_MORE_ACTIONS: Final = 2
_LONG: Final = 60
"""Shortest action for LONG_ACTION, in bytes. Without this minimum, it finds dozens of legitimate repetitions."""

_LONGEST_CYCLE: Final = 4


class Recent:
    """The turns that a rule looks at, with a detector's settings.

    Attributes:
        turns: newest first, at least one.
        limits: the limits by tool.
        limit: the limit of the newest turn.
        normalized: results are compared without volatile parts.
    """

    __slots__ = ("limit", "limits", "normalized", "turns")

    def __init__(self, turns: Sequence[AnyTurn], limits: ToolLimits, limit: Limit, *, normalized: bool) -> None:
        self.turns = turns
        self.limits = limits
        self.limit = limit
        self.normalized = normalized

    def is_allowed(self, turn: AnyTurn) -> bool:
        """Whether a turn's tools are exempt."""
        return self.limits.of(turn.names).allow

    def same(self, one: AnyTurn, other: AnyTurn) -> bool:
        """Whether two turns are equal."""
        return same_turn(one, other, normalized=self.normalized)

    def describe(self, rule: str, turns: Sequence[AnyTurn], among: int, strength: str) -> Repeat:
        """A loop of these turns, with all of their tools."""
        names = tuple(dict.fromkeys([name for turn in reversed(turns) for name in turn.names]))
        count = len(turns)
        return Repeat(names, count, among, count, results=True, reason=self.limit.reason, rule=rule, strength=strength)


def find_similar_error(recent: Recent) -> Repeat | None:
    """See SIMILAR_ERROR."""
    newest, least = recent.turns[0], max(MIN_SIMILAR, recent.limit.threshold)
    if len(recent.turns) < least or not newest.failed:
        return None
    seen = recent.turns[: least + _MORE_SIMILAR]
    left = len(seen) - least
    maybe: list[AnyTurn] = []
    for turn in seen:
        if may_fail_alike(newest, turn):
            maybe.append(turn)
        else:
            left -= 1
        if left < 0:
            return None
    alike = [turn for turn in maybe if fail_alike(newest, turn) and not recent.is_allowed(turn)]
    if len(alike) < least:
        return None
    found = recent.describe(SIMILAR_ERROR, alike, len(seen), weigh_apart(alike))
    return found._replace(held=True, notes_only=True)


def find_extra(rules: frozenset[str], recent: Recent, found: Repeat | None) -> Repeat | None:
    """The first strong loop that one of these rules finds, or else `found`, or else the first weak one."""
    for rule, find in _FIND.items():
        another = find(recent) if rule in rules else None
        if another is not None and another.strength == STRONG:
            return another
        found = found or another
    return found


def _find_long_action(recent: Recent) -> Repeat | None:
    newest, count = recent.turns[0], recent.limit.threshold + _MORE_ACTIONS
    turns = recent.turns[:count]
    if len(turns) < count or newest.action_size < _LONG or newest.evidence & READS or not newest.names:
        return None
    if not all(same_action(newest, turn) for turn in turns[1:]):
        return None
    return recent.describe(LONG_ACTION, turns, count, weigh(turns))


def _find_two_errors(recent: Recent) -> Repeat | None:
    count = 2 * recent.limit.threshold + 4
    turns = recent.turns[:count]
    if len(turns) < count or not turns[0].failed:
        return None
    other: AnyTurn | None = None
    for turn in turns:
        if not turn.failed or recent.is_allowed(turn):
            return None
        if fail_alike(turns[0], turn):
            continue
        if other is None:
            other = turn
        elif not fail_alike(other, turn):
            return None
    return recent.describe(TWO_ERRORS, turns, count, weigh_apart(turns))


def _find_failing_turn(recent: Recent) -> Repeat | None:
    newest, threshold = recent.turns[0], recent.limit.threshold
    if not newest.failed or not newest.names:
        return None
    turns = recent.turns[: 4 * threshold + 4]
    places = [place for place, turn in enumerate(turns) if place == 0 or recent.same(newest, turn)]
    if len(places) < threshold:
        return None
    new = [place for place in range(places[threshold - 1]) if place not in places and _is_news(recent, place)]
    if len(new) > threshold - 2:
        return None
    return recent.describe(FAILING_TURN, [turns[place] for place in places], len(turns), weigh([newest]))


def _is_news(recent: Recent, place: int) -> bool:
    """Whether the turn at a place is new, and more than talk or thinking."""
    turn = recent.turns[place]
    if all(is_for_thinking(name) for name in turn.names):
        return not turn.known
    return not any(recent.same(turn, older) for older in recent.turns[place + 1 :])


def _find_action_cycle(recent: Recent) -> Repeat | None:
    for length in range(2, _LONGEST_CYCLE + 1):
        turns = recent.turns
        members = turns[:length]
        limits = [recent.limits.of(turn.names) for turn in members]
        rounds = max([limit.threshold for limit in limits])
        span = length * rounds
        if len(turns) < span or any(limit.allow for limit in limits) or not all(turn.names for turn in members):
            continue
        places = range(span - length)
        if not all(same_action(turns[place], turns[place + length]) for place in places):
            continue
        if any(same_action(one, other) for place, one in enumerate(members) for other in members[:place]):
            continue
        equal = sum([same_result(turns[place], turns[place + length], normalized=recent.normalized) for place in places])
        if 2 * equal >= len(places):
            found = recent.describe(ACTION_CYCLE, turns[:span], span, weigh(turns[:span]))
            return found._replace(count=rounds, threshold=rounds)
    return None


_FIND: Final[dict[str, Callable[[Recent], Repeat | None]]] = {
    LONG_ACTION: _find_long_action,
    TWO_ERRORS: _find_two_errors,
    FAILING_TURN: _find_failing_turn,
    ACTION_CYCLE: _find_action_cycle,
}
