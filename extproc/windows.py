"""The window arithmetic: pure, exact, in whole milliseconds, with `now` as an argument.

Every store gives the same answers, so this is also the contract that a store's own scripts are tested against:

- `sliding_ttl`: one count whose time to live is reset by every request counted.
- `fixed`: one count that starts with the first request and ends `window_ms` later.
- `sliding_log`: the requests of the last `window_ms`, each remembered by its time.

A request is acted on (`looping`) when it takes the count to the threshold or past it, or while a cooldown runs. A trip is the
request that takes the count across the threshold while no cooldown runs; it starts one. Refusals do not restart the cooldown:
a client that retries in spite of them must not make its own sentence longer.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import NamedTuple, TypeAlias


class Hit(NamedTuple):
    """One request to be counted under one key.

    Attributes:
        key: the whole counter key.
        window_type: `sliding_ttl`, `sliding_log` or `fixed`.
        window_ms: length of the window, in milliseconds.
        threshold: the first count that is acted on.
        cooldown_ms: how long a trip keeps the key acted on, in milliseconds; 0 for none.
        count_refused: False: a request that is acted on leaves the window as it was.
        count_to: how many requests a `sliding_log` remembers at most; at least `threshold`.
    """

    key: str
    window_type: str
    window_ms: int
    threshold: int
    cooldown_ms: int
    count_refused: bool
    count_to: int


class Count(NamedTuple):
    """What counting a hit found.

    Attributes:
        count: identical requests in the window, this one included.
        looping: the request is to be acted on.
        cooldown_ms: what is left of the cooldown, in milliseconds.
        span_ms: time since the first request of the window, in milliseconds.
    """

    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    looping: bool
    cooldown_ms: int
    span_ms: int


Tally: TypeAlias = tuple[int, int, int, int]
"""The state behind `sliding_ttl` and `fixed`: count, first, last, cooling_until; times in milliseconds of the store's clock."""


def tally(state: Tally | None, hit: Hit, now: int) -> tuple[Tally, Count]:
    """Count one request in a `sliding_ttl` or `fixed` window; `state` is None for a key never seen."""
    if state is None:
        return (1, now, now, 0), Count(1, False, 0, 0)  # thresholds start at 2: a first request never trips
    count, first, last, cooling_until = state
    now = max(now, last)  # another server's clock may be behind after a failover
    if now < (first if hit.window_type == "fixed" else last) + hit.window_ms:
        before, began = count, first
    else:
        before, began = 0, now
    count = before + 1
    looping, cooling_until = _judge(before, count, cooling_until, hit, now)
    answer = Count(count, looping, cooling_until - now if cooling_until > now else 0, now - began)
    if looping and not hit.count_refused:
        return (state[0], first, state[2], cooling_until), answer
    return (count, began, now, cooling_until), answer


def log(state: array[int] | None, hit: Hit, now: int) -> tuple[array[int], Count]:
    """Count one request in a `sliding_log` window.

    Args:
        state: `[cooling_until, time, time, ...]`, changed in place; None for a key never seen.
        hit: what to count.
        now: milliseconds of the store's clock.
    """
    if state is None:
        return array("q", (0, now)), Count(1, False, 0, 0)
    if len(state) > 1:
        now = max(now, state[-1])
    del state[1 : bisect_right(state, now - hit.window_ms, 1)]
    before = len(state) - 1
    count = min(before + 1, hit.count_to)
    looping, state[0] = _judge(before, before + 1, state[0], hit, now)
    answer = Count(count, looping, max(0, state[0] - now), now - state[1] if before else 0)
    if hit.count_refused or not looping:
        state.append(now)
        if before == hit.count_to:
            del state[1]
    return state, answer


def _judge(before: int, count: int, cooling_until: int, hit: Hit, now: int) -> tuple[bool, int]:
    """Whether to act, and until when the cooldown runs from now on."""
    cooling = now < cooling_until
    if not cooling and before < hit.threshold <= count:
        return True, now + hit.cooldown_ms
    return cooling or count >= hit.threshold, cooling_until
