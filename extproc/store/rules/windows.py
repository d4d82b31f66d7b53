"""Counting requests in windows: the rules of `tally.lua` and `sliding_log.lua`.

- `sliding_ttl`: one count whose time to live is reset by every request counted (`tally`).
- `fixed`: one count that starts with the first request and ends `window_ms` later (`tally`).
- `sliding_log`: the requests of the last `window_ms`, each remembered by its time (`log`).

A request is acted on (`looping`) if it brings the count to the threshold or above, or if a cooldown
runs. A trip is the request that crosses the threshold while no cooldown runs; it starts one.
Refusals do not restart the cooldown, so a client that keeps retrying does not prolong it.

A clock may be set back, or may be behind on another server after a failover. Then the time since
the last request is unknown. A time in the future by less than its own length (window or cooldown)
is treated as now, so a loop stays a loop. A time further ahead is forgotten, so that a window or
cooldown never lasts as long as the clock was set back.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from typing import TypeAlias

Tally: TypeAlias = tuple[int, int, int, int]
"""Of `sliding_ttl` and `fixed`: count, first, last, cooling_until; times in milliseconds."""

_LOG_END = struct.Struct("=qq")
_LOG_TIME = struct.Struct("=q")


class Hit:
    """One request to be counted under one key; never changed.

    Attributes:
        key: the whole counter key; it ends in two hex digits that spread keys evenly.
        window_type: `sliding_ttl`, `sliding_log` or `fixed`.
        window_ms: length of the window, in milliseconds.
        threshold: the first count to act on; 1 acts at once, for a request that is known to be a
            loop.
        cooldown_ms: how long requests are acted on after a trip, in milliseconds; 0 for none.
        count_refused: if False, requests that are acted on do not change the window.
        count_to: maximum number of requests that a `sliding_log` remembers; at least `threshold`.
    """

    def __init__(  # noqa: PLR0913  # a record
        self,
        key: str,
        window_type: str,
        window_ms: int,
        threshold: int,
        cooldown_ms: int,
        count_refused: bool,  # noqa: FBT001  # a field
        count_to: int,
    ) -> None:
        self.key = key
        self.window_type = window_type
        self.window_ms = window_ms
        self.threshold = threshold
        self.cooldown_ms = cooldown_ms
        self.count_refused = count_refused
        self.count_to = count_to

    def __eq__(self, other: object) -> bool:
        """Whether all fields are equal."""
        return isinstance(other, Hit) and self._list() == other._list()

    def __hash__(self) -> int:
        """Hash the fields that equality compares."""
        return hash(self._list())

    def _list(self) -> tuple[str, str, int, int, int, bool, int]:
        window, cooldown = self.window_ms, self.cooldown_ms
        return (
            self.key,
            self.window_type,
            window,
            self.threshold,
            cooldown,
            self.count_refused,
            self.count_to,
        )


class Count:
    """The result of counting a hit; never changed.

    Attributes:
        count: identical requests in the window, including this one.
        looping: the request is to be acted on.
        cooldown_ms: the rest of the cooldown, in milliseconds.
        span_ms: time since the first request of the window, in milliseconds.
    """

    def __init__(self, count: int, looping: bool, cooldown_ms: int, span_ms: int) -> None:  # noqa: FBT001  # a field
        self.count = count
        self.looping = looping
        self.cooldown_ms = cooldown_ms
        self.span_ms = span_ms

    def __eq__(self, other: object) -> bool:
        """Compare all fields: stores are compared by their answers."""
        return isinstance(other, Count) and self._list() == other._list()

    def __hash__(self) -> int:
        """Hash the fields that equality compares."""
        return hash(self._list())

    def __repr__(self) -> str:
        """The form in which tests write it."""
        return f"Count{self._list()}"

    def _list(self) -> tuple[int, bool, int, int]:
        return self.count, self.looping, self.cooldown_ms, self.span_ms


UNCOUNTED = Count(0, False, 0, 0)


def apply_threshold(  # noqa: PLR0913  # not a hit, because kinds of questions differ
    before: int, count: int, cooling_until: int, threshold: int, cooldown_ms: int, now: int
) -> tuple[bool, int]:
    """Whether to act, and the new end of the cooldown."""
    ahead = cooling_until - cooldown_ms - now
    if ahead > 0:  # the cooldown starts in the future
        cooling_until = now + cooldown_ms if ahead < cooldown_ms else 0
    cooling = now < cooling_until
    if not cooling and before < threshold <= count:
        return True, now + cooldown_ms
    return cooling or count >= threshold, cooling_until


def tally(state: Tally | None, hit: Hit, now: int) -> tuple[Tally, Count]:
    """Count one request in a `sliding_ttl` or `fixed` window; `state` is None for a new key."""
    if state is None:
        if hit.threshold > 1:
            return (1, now, now, 0), Count(1, False, 0, 0)
        state = (0, now, now, 0)
    count, first, last, cooling_until = state
    if now < last:
        count, first, last = (
            (count, first - (last - now), now) if last - now < hit.window_ms else (0, now, now)
        )
    if count and now < (first if hit.window_type == "fixed" else last) + hit.window_ms:
        before, began = count, first
    else:
        before, began = 0, now
    looping, cooling_until = apply_threshold(
        before, before + 1, cooling_until, hit.threshold, hit.cooldown_ms, now
    )
    answer = Count(
        before + 1, looping, cooling_until - now if cooling_until > now else 0, now - began
    )
    if looping and not hit.count_refused:
        return (count, first, last, cooling_until), answer
    return (before + 1, began, now, cooling_until), answer


def log(state: bytearray | None, hit: Hit, now: int) -> tuple[bytearray, Count]:
    """Count one request in a `sliding_log` window.

    Args:
        state: 64-bit integers, `time, time, ..., cooling_until`, changed in place; None for a new
            key. A bytearray removes old times from the front and adds new ones at the back quickly.
            The garbage collector, which takes 100 ms to walk a million arrays, never visits one.
        hit: the hit to count.
        now: the store's time in milliseconds.
    """
    if state is None:
        if hit.threshold > 1:
            return bytearray(_LOG_END.pack(now, 0)), Count(1, False, 0, 0)
        state = bytearray(_LOG_TIME.pack(0))
    # Closed again, because an open view prevents changes of the state's length.
    with memoryview(state).cast("q") as times:
        known = len(times) - 1
        cooling_until = times[known]
        ahead = times[known - 1] - now if known else 0
        if 0 < ahead < hit.window_ms:
            for place in range(known):
                times[place] -= ahead
        gone = (
            bisect_right(times, now - hit.window_ms, 0, known) if ahead < hit.window_ms else known
        )
        before = known - gone
        began = times[gone] if before else now
    looping, cooling_until = apply_threshold(
        before, before + 1, cooling_until, hit.threshold, hit.cooldown_ms, now
    )
    answer = Count(min(before + 1, hit.count_to), looping, max(0, cooling_until - now), now - began)
    if looping and not hit.count_refused:
        state[-_LOG_TIME.size :] = _LOG_TIME.pack(cooling_until)
    else:
        state[-_LOG_TIME.size :] = _LOG_END.pack(now, cooling_until)
        gone += before == hit.count_to
    del state[: gone * _LOG_TIME.size]
    return state, answer


def read_log_times(state: bytearray) -> tuple[int, int]:
    """When the last request was counted, or the cooldown ends if there is none, and that end."""
    (cooling_until,) = _LOG_TIME.unpack_from(state, -_LOG_TIME.size)
    return (
        _LOG_END.unpack_from(state, -_LOG_END.size)
        if len(state) > _LOG_TIME.size
        else (cooling_until, cooling_until)
    )
