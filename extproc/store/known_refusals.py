"""Loops whose next verdict is certain, answered in this process while they are hammered.

A loop that is being refused stays refused as long as its window or cooldown lasts, whatever other clients do. While that is
certain a hammering client costs the server next to nothing: its requests are added up and sent as one, ten times a second, so
that the window is extended and the count rises all the same.

The verdict is certain, the count is not: other processes count as well. So a loop is answered here only once it has been
refused ten times within a second, and only within a tenth of a second of the server's last word. Up to there each count is the
server's own, and rises by one from request to request, whichever process answers. Past it a count is what the server said last
and what this process has answered since; the server hears of these before it is asked anew, so that what one process says never
goes back. Keys which an operator deletes are soon gone from here as well. Bounded: the loop that was learned first makes room.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from extproc.store.rules.windows import Count, Hit

MAX_LOOPS = 10_000
SETTLE_MS = 100
"""How long requests are added up, and how old the server's word may be."""

HAMMERED = 10
"""Refusals within `_HAMMERED_MS`, from which on the server is spared."""

_HAMMERED_MS = 1_000


class _KnownRefusal:
    """What is known about one loop; times in milliseconds of this process's clock.

    Attributes:
        hit: what is counted.
        answer: what the server said last.
        learned: when it did.
        until: when that is not good any more.
        asked: how often it said so since `began`.
        began: when it started to be hammered, or to be looked at for that.
        owed: refusals that the server has not been told of.
        told: refusals that are on their way to it, and not in what it said last.
    """

    __slots__ = ("answer", "asked", "began", "hit", "learned", "owed", "told", "until")

    def __init__(self, hit: Hit, answer: Count) -> None:
        self.hit = hit
        self.answer = answer
        self.learned = self.until = self.began = 0
        self.asked = self.owed = self.told = 0


class KnownRefusals:
    """The loops known to this process."""

    def __init__(self, settle: Callable[[Hit, int], None]) -> None:
        """`settle` takes a hit and how often it was answered here."""
        self._settle = settle
        self._known: dict[str, _KnownRefusal] = {}

    def __len__(self) -> int:
        """Loops known now."""
        return len(self._known)

    @property
    def knows_any(self) -> bool:
        """There are some; mostly there are none, and to look up a new key costs as much as all else that is done here."""
        return len(self._known) > 0

    def learn(self, hit: Hit, answer: Count, stands_ms: int, told: int) -> None:
        """Remember, or forget, what the server said last.

        Args:
            hit: what was counted.
            answer: what that found.
            stands_ms: how long a looping verdict would stand if nothing more were counted.
            told: refusals that were answered here, and that the server was told of with this hit.
        """
        if not (answer.looping or self._known):
            return
        known = self._known.get(hit.key)
        lasts = min(stands_ms - SETTLE_MS, SETTLE_MS)  # leaves time to send what is owed
        if not answer.looping or lasts <= 0:
            if known is not None:
                del self._known[hit.key]
            return
        if known is None or known.hit != hit:
            if known is None and len(self._known) >= MAX_LOOPS:
                del self._known[next(iter(self._known))]
            known = self._known[hit.key] = _KnownRefusal(hit, answer)
        known.answer, known.learned = answer, _read_clock()
        known.told = max(0, known.told - told)
        known.until = known.learned + lasts
        if known.learned >= known.began + _HAMMERED_MS:
            known.began, known.asked = known.learned, 0
        known.asked += 1

    def answer(self, hit: Hit) -> Count | None:
        """The verdict, if it is certain; the hit is then counted here and settled soon."""
        known = self._known.get(hit.key)
        if known is None or known.asked < HAMMERED or known.hit != hit:  # or the policy has changed
            return None
        now = _read_clock()
        if now >= known.until:
            return None
        if hit.count_refused:
            known.owed += 1
            if known.owed == 1:
                asyncio.get_running_loop().call_later(SETTLE_MS / 1000, self._pay, known)
        age = now - known.learned
        count, span = known.answer.count + known.told + known.owed, known.answer.span_ms + age
        cooldown = max(0, known.answer.cooldown_ms - age)
        if hit.window_type == "sliding_log":
            return Count(min(count, hit.count_to), True, cooldown, min(span, hit.window_ms))
        return Count(count, True, cooldown, span)

    def take_owed(self, hit: Hit) -> int:
        """How often a loop was answered here that the server has not been told of; the next question has to tell it."""
        known = self._known.get(hit.key) if self._known else None
        if known is None or known.hit != hit:
            return 0
        return _take_owed(known)

    def forget_told(self, lost: Callable[[str], bool]) -> None:
        """What was on its way to a server is lost; `lost` says of which keys."""
        for key, known in self._known.items():
            if lost(key):
                known.told = 0

    def close(self) -> None:
        """Settle everything now."""
        for known in self._known.values():
            self._pay(known)
        self._known.clear()

    def _pay(self, known: _KnownRefusal) -> None:
        if owed := _take_owed(known):
            self._settle(known.hit, owed)


def _take_owed(known: _KnownRefusal) -> int:
    owed, known.owed = known.owed, 0
    known.told += owed
    return owed


def _read_clock() -> int:
    return time.monotonic_ns() // 1_000_000
