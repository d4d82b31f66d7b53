"""The windows that keep one count for each key, `sliding_ttl` and `fixed`: the rule of `tally.lua`."""

from __future__ import annotations

from typing import TypeAlias

from extproc.store.rules.hit import Count, Hit, judge

Tally: TypeAlias = tuple[int, int, int, int]
"""The state behind `sliding_ttl` and `fixed`: count, first, last, cooling_until; times in milliseconds of the store's clock."""


def tally(state: Tally | None, hit: Hit, now: int) -> tuple[Tally, Count]:
    """Count one request in a `sliding_ttl` or `fixed` window; `state` is None for a key never seen."""
    if state is None:
        if hit.threshold > 1:
            return (1, now, now, 0), Count(1, False, 0, 0)
        state = (0, now, now, 0)
    count, first, last, cooling_until = state
    if now < last:
        count, first, last = (count, first - (last - now), now) if last - now < hit.window_ms else (0, now, now)
    if count and now < (first if hit.window_type == "fixed" else last) + hit.window_ms:
        before, began = count, first
    else:
        before, began = 0, now
    looping, cooling_until = judge(before, before + 1, cooling_until, hit, now)
    answer = Count(before + 1, looping, cooling_until - now if cooling_until > now else 0, now - began)
    if looping and not hit.count_refused:
        return (count, first, last, cooling_until), answer
    return (before + 1, began, now, cooling_until), answer
