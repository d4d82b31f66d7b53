"""Counting requests that follow each other without a pause: the rule of `back_to_back.lua`.

A loop sends its next request as soon as it has the answer to the last one. So each request is an
interval, from its start to the end of its answer. The count of a request is the length of the run
that ends with it: a request continues the run if it starts at most `window_ms` after the end of
all requests before it, and overlaps none of them. Otherwise it starts the count anew.

A request is stored when it begins (`begin`). Envoy's access log reports its end later (`end`), in
any order. Only its duration is reported, so gateways need no common clock. Until then, its end is
unknown: it may still be open, or its entry may be late. So it is unknown whether the requests
behind it continue the run, and these do not add to the count, except the newest, which counts as
one more. The count of a loop lags by the requests whose entries are late, and requests that begin
at once count as two at most. Entries arrive within `LATE_MS`: a request that is open for longer
overlaps those that began in the meantime.

Failed requests are removed. Refused ones take no time and add nothing, but the run goes on behind
them, so that a client that retries refusals stays refused.

The newest `MOST` intervals are kept. They are in order, because they begin by the store's clock.
When the oldest is dropped, the count at its successor is kept. Cooldowns are those of `windows.py`.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

from extproc.store.rules.windows import Count, apply_threshold

BACK_TO_BACK: Final = "back_to_back"

MOST: Final = 32
TOLERANCE_MS: Final = 500
_LEAST_TOLERANCE_MS: Final = 100
"""An overlap of at most half a request is ignored, within these bounds, because starts and
durations are inexact."""

LATE_MS: Final = 5_000
"""Longest time between the end of a request and its access log entry. By default, Envoy sends them
every second."""

LOST_MS: Final = 600_000
"""An interval without an end is dropped after this time: its entry is lost."""

NAME: Final = 8
"""Length of a request's name, in bytes."""

_REFUSED_NAME: Final = bytes(NAME)

LEFT_OUT: Final = -1
REFUSED: Final = -2

Interval: TypeAlias = tuple[int, int, bytes]
"""Start, duration plus one (0: not ended), and name; the name is zero for refused requests."""

State: TypeAlias = tuple[int, int, list[Interval]]
"""The count at the oldest interval, the end of the cooldown, and the intervals, oldest first."""


class Begin(NamedTuple):
    """One request to be counted; never changed.

    Attributes:
        key: the whole counter key; it ends in two hex digits.
        name: identifies the request, 8 bytes, not all zero.
        window_ms: longest pause between the end of a request and the next, in milliseconds.
        threshold: the first count to act on.
        cooldown_ms: how long requests are acted on after a trip, in milliseconds; 0 for none.
    """

    key: str
    name: bytes
    window_ms: int
    threshold: int
    cooldown_ms: int

    @property
    def lifetime_ms(self) -> int:
        """How long the state is kept after the newest request began."""
        return max(self.window_ms + LOST_MS, self.cooldown_ms)


class End(NamedTuple):
    """The end of a request; never changed. It may come more than once.

    Attributes:
        key: as in `Begin`.
        name: as in `Begin`.
        lasted_ms: the time from its beginning to the end of its answer; LEFT_OUT removes it, and
            REFUSED says that it was refused.
        window_ms: as in `Begin`; only for REFUSED.
    """

    key: str
    name: bytes
    lasted_ms: int
    window_ms: int = 0


def begin(state: State | None, asked: Begin, now: int) -> tuple[State, Count]:
    """Add a request that begins now, and count it; `state` is None for a new key."""
    oldest, cooling_until, intervals = state if state is not None else (1, 0, [])
    if intervals and intervals[-1][0] > now + TOLERANCE_MS:  # the clock was set back
        intervals = []
    start = max(now, intervals[-1][0]) if intervals else now
    kept = [each for each in intervals if each[1] or each[0] > now - LOST_MS]
    kept.append((start, 0, asked.name))
    if len(kept) == 1:
        oldest = 1
    counts, began = _count(oldest, kept, asked.window_ms, now)
    if len(kept) > MOST:
        oldest = counts[1]
        del kept[0]
    looping, cooling_until = apply_threshold(
        0, counts[-1], cooling_until, asked.threshold, asked.cooldown_ms, now
    )
    answer = Count(counts[-1], looping, max(0, cooling_until - now), start - began)
    return (oldest, cooling_until, kept), answer


def _count(
    oldest: int, intervals: list[Interval], window_ms: int, now: int
) -> tuple[list[int], int]:
    """The count at each interval, and the start of the newest run; the last interval begins now."""
    counts = [oldest]
    began, reach, busy, unknown, run = intervals[0][0], 0, 0, False, oldest
    for place, (start, lasted, name) in enumerate(intervals):
        if place:
            adds = int(name != _REFUSED_NAME)
            if start < busy or (not unknown and start > reach + window_ms):
                run, began = adds, start
            elif not unknown or place == len(intervals) - 1:
                run += adds
            counts.append(run)
        known = lasted - 1 if lasted else max(0, now - LATE_MS - start)
        tolerance = min(TOLERANCE_MS, max(_LEAST_TOLERANCE_MS, known // 2))
        reach, busy = max(reach, start + known), max(busy, start + known - tolerance)
        unknown = unknown or not lasted
    return counts, began


def end(state: State, asked: End) -> State:
    """Note the end of a request; unchanged if it is unknown."""
    oldest, cooling_until, intervals = state
    changed = intervals[:]
    for place, (start, _, name) in enumerate(intervals):
        if name != asked.name or name == _REFUSED_NAME:
            continue
        if asked.lasted_ms >= 0:
            changed[place] = (start, asked.lasted_ms + 1, name)
            break
        before = intervals[place - 1] if place else (0, 0, name)
        if asked.lasted_ms == LEFT_OUT:
            del changed[place]
            oldest -= int(place == 0 and changed[:1] != [] and changed[0][2] == _REFUSED_NAME)
        elif before[2] == _REFUSED_NAME and start <= before[0] + before[1] - 1 + asked.window_ms:
            changed[place - 1] = (before[0], start - before[0] + 1, _REFUSED_NAME)
            del changed[place]
        else:
            changed[place] = (start, 1, _REFUSED_NAME)
            oldest -= int(place == 0)
        break
    return oldest, cooling_until, changed
