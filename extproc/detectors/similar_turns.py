"""Rules in addition to those of `loops.py`, for turns that are not equal, but have something in common.

With a threshold t, the newest turn is part of a loop if

- SIMILAR_ERROR: its result is a failure, and max(6, t) of the last max(6, t) + 4 results are the same, ignoring numbers and
  actions. It gets a note at most.
- LONG_ACTION: the last t + 2 actions are the same, whatever their results. The action is at least 60 bytes long, and is
  neither talk nor by tools that only read. Not used yet.
- ACTION_CYCLE: the last actions are t rounds of a cycle of 2 to 4 different actions, and at least half of the results are the
  same as a round before. Not used yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from extproc.decision import Repeat
from extproc.detectors.tools import READS, Limit, ToolLimits
from extproc.detectors.turn import AnyTurn, fail_alike, may_fail_alike, same_action, same_result, weigh, weigh_apart

SIMILAR_ERROR, LONG_ACTION, ACTION_CYCLE = "similar_error", "long_action", "action_cycle"

MIN_SIMILAR: Final = 6
_MORE_SIMILAR: Final = 4
NOTED_TURNS: Final = MIN_SIMILAR + _MORE_SIMILAR
"""SIMILAR_ERROR reads at most this many turns plus its threshold."""

_MORE_ACTIONS: Final = 2
_LONG: Final = 60
"""Shortest action for LONG_ACTION, in bytes. Without this minimum, it finds dozens of legitimate repetitions."""

_LONGEST_CYCLE: Final = 4


def find_similar_error(recent: Sequence[AnyTurn], limits: ToolLimits, limit: Limit) -> Repeat | None:
    """See SIMILAR_ERROR.

    Args:
        recent: the newest turns, newest first, at least one.
        limits: the limits by tool.
        limit: the limit of the newest turn.
    """
    newest, least = recent[0], max(MIN_SIMILAR, limit.threshold)
    if len(recent) < least or not newest.failed:
        return None
    seen = recent[: least + _MORE_SIMILAR]
    left = len(seen) - least
    maybe: list[AnyTurn] = []
    for turn in seen:
        if may_fail_alike(newest, turn):
            maybe.append(turn)
        else:
            left -= 1
        if left < 0:
            return None
    alike = [turn for turn in maybe if fail_alike(newest, turn) and not limits.of(turn.names).allow]
    if len(alike) < least:
        return None
    found = _describe(SIMILAR_ERROR, alike, len(seen), weigh_apart(alike), limit)
    return found._replace(held=True, notes_only=True)


def find_long_action(recent: Sequence[AnyTurn], limit: Limit) -> Repeat | None:
    """See LONG_ACTION; the arguments are as in `find_similar_error`."""
    newest, count = recent[0], limit.threshold + _MORE_ACTIONS
    turns = recent[:count]
    if len(turns) < count or newest.action_size < _LONG or newest.evidence & READS or not newest.names:
        return None
    if not all(same_action(newest, turn) for turn in turns[1:]):
        return None
    return _describe(LONG_ACTION, turns, count, weigh(turns), limit)


def find_action_cycle(recent: Sequence[AnyTurn], limits: ToolLimits, limit: Limit, *, normalized: bool) -> Repeat | None:
    """See ACTION_CYCLE; the arguments are as in `find_similar_error`; `normalized`: ignore volatile parts of results."""
    for length in range(2, _LONGEST_CYCLE + 1):
        members = recent[:length]
        limited = [limits.of(turn.names) for turn in members]
        rounds = max([each.threshold for each in limited])
        span = length * rounds
        if len(recent) < span or any(each.allow for each in limited) or not all(turn.names for turn in members):
            continue
        places = range(span - length)
        if not all(same_action(recent[place], recent[place + length]) for place in places):
            continue
        if any(same_action(one, other) for place, one in enumerate(members) for other in members[:place]):
            continue
        equal = sum([same_result(recent[place], recent[place + length], normalized=normalized) for place in places])
        if 2 * equal >= len(places):
            found = _describe(ACTION_CYCLE, recent[:span], span, weigh(recent[:span]), limit)
            return found._replace(count=rounds, threshold=rounds)
    return None


def _describe(rule: str, turns: Sequence[AnyTurn], among: int, strength: str, limit: Limit) -> Repeat:
    """A loop of these turns, with all of their tools."""
    names = tuple(dict.fromkeys([name for turn in reversed(turns) for name in turn.names]))
    count = len(turns)
    return Repeat(names, count, among, count, results=True, reason=limit.reason, rule=rule, strength=strength)
