"""The window that remembers each request by its time, `sliding_log`: the rule of `sliding_log.lua`."""

from __future__ import annotations

import struct
from bisect import bisect_right

from extproc.store.rules.hit import Count, Hit, judge

_LOG_END = struct.Struct("=qq")
_LOG_TIME = struct.Struct("=q")


def log(state: bytearray | None, hit: Hit, now: int) -> tuple[bytearray, Count]:
    """Count one request in a `sliding_log` window.

    Args:
        state: 64-bit integers, `time, time, ..., cooling_until`, changed in place; None for a key never seen. Old times go at
            the front and new ones come at the back because a bytearray is quick at just that; the garbage collector, which
            takes 100 ms to walk a million arrays, never looks at one.
        hit: what to count.
        now: milliseconds of the store's clock.
    """
    if state is None:
        if hit.threshold > 1:
            return bytearray(_LOG_END.pack(now, 0)), Count(1, False, 0, 0)
        state = bytearray(_LOG_TIME.pack(0))
    with memoryview(state).cast("q") as times:  # closed again, because while it is open the state cannot change its length
        known = len(times) - 1
        cooling_until = times[known]
        ahead = times[known - 1] - now if known else 0
        if 0 < ahead < hit.window_ms:
            for place in range(known):
                times[place] -= ahead
        gone = bisect_right(times, now - hit.window_ms, 0, known) if ahead < hit.window_ms else known
        before = known - gone
        began = times[gone] if before else now
    looping, cooling_until = judge(before, before + 1, cooling_until, hit, now)
    answer = Count(min(before + 1, hit.count_to), looping, max(0, cooling_until - now), now - began)
    if looping and not hit.count_refused:
        state[-_LOG_TIME.size :] = _LOG_TIME.pack(cooling_until)
    else:
        state[-_LOG_TIME.size :] = _LOG_END.pack(now, cooling_until)
        gone += before == hit.count_to
    del state[: gone * _LOG_TIME.size]
    return state, answer


def read_log_times(state: bytearray) -> tuple[int, int]:
    """When the last request was counted and until when the cooldown runs; a log without requests is as old as its cooldown."""
    (cooling_until,) = _LOG_TIME.unpack_from(state, -_LOG_TIME.size)
    return _LOG_END.unpack_from(state, -_LOG_END.size) if len(state) > _LOG_TIME.size else (cooling_until, cooling_until)
