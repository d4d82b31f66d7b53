"""A rule in addition to those of `loops.py`, for turns that are not equal, but fail alike.

With a threshold t, the newest turn is part of a loop if

- SIMILAR_ERROR: its result is a failure, and max(6, t) of the last max(6, t) + 4 results are the same, ignoring numbers and
  actions. It gets a note at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from extproc.decision import Repeat
from extproc.detectors.tools import Limit, ToolLimits
from extproc.detectors.turn import AnyTurn, fail_alike, may_fail_alike, weigh_apart

SIMILAR_ERROR = "similar_error"

MIN_SIMILAR: Final = 6
_MORE_SIMILAR: Final = 4
NOTED_TURNS: Final = MIN_SIMILAR + _MORE_SIMILAR
"""SIMILAR_ERROR reads at most this many turns plus its threshold."""


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
    names = tuple(dict.fromkeys([name for turn in reversed(alike) for name in turn.names]))
    count, strength = len(alike), weigh_apart(alike)
    found = Repeat(names, count, len(seen), count, results=True, reason=limit.reason, rule=SIMILAR_ERROR, strength=strength)
    return found._replace(held=True, notes_only=True)
