"""Refuses loops without asking the server, while the next verdict is certain.

A refused loop stays refused until its window or cooldown ends, whatever other clients do. While
this is certain, such a client costs the server almost nothing: its requests are added up and sent
together ten times a second, so the window is still extended and the count still rises.

The verdict is certain, but the count is not, because other processes count, too. So this process
answers only after ten refusals of a loop within a second, and only within a tenth of a second of
the server's last answer. Before that, each count is the server's own, and rises by one from request
to request, whichever process answers. After that, a count is the server's last one plus those
answered here since. The server is told of these before it is asked again, so the counts of one
process never
decrease. Keys that an operator deletes are soon forgotten here, too. The number of loops is
    bounded: the one that was learned
first is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from extproc.store.rules.windows import Count, Hit

MAX_LOOPS = 10_000
SETTLE_MS = 100
"""How long requests are added up, and the maximum age of the server's last answer."""

HAMMERED = 10
"""After this many refusals within `_HAMMERED_MS`, this process answers."""

_HAMMERED_MS = 1_000


class _KnownRefusal:
    """What is known about one loop; times in milliseconds of this process's clock.

    Attributes:
        hit: the counted hit.
        answer: the server's last answer.
        learned: when that answer came.
        until: when it expires.
        asked: number of the server's answers since `began`.
        began: start of the period in which refusals are counted.
        owed: refusals that were not reported to the server yet.
        told: refusals in a report under way to the server, which are not in its last answer.
    """

    def __init__(self, hit: Hit, answer: Count) -> None:
        self.hit = hit
        self.answer = answer
        self.learned = self.until = self.began = 0
        self.asked = self.owed = self.told = 0


class KnownRefusals:
    """The refused loops known to this process."""

    def __init__(self, settle: Callable[[Hit, int], None]) -> None:
        """Report with `settle`, which takes a hit and the number of times it was answered here."""
        self._settle = settle
        self._known: dict[str, _KnownRefusal] = {}

    def __len__(self) -> int:
        """The number of known loops."""
        return len(self._known)

    @property
    def knows_any(self) -> bool:
        """Whether any loop is known.

        Usually none is, and a look-up by a new key would be the most expensive part.
        """
        return len(self._known) > 0

    def learn(self, hit: Hit, answer: Count, stands_ms: int, told: int) -> None:
        """Remember the server's last answer, or forget the loop.

        Args:
            hit: the counted hit.
            answer: the server's answer.
            stands_ms: how long a looping verdict would last if nothing more were counted.
            told: refusals answered here that this hit reported to the server.
        """
        if not (answer.looping or self._known):
            return
        known = self._known.get(hit.key)
        lasts = min(stands_ms - SETTLE_MS, SETTLE_MS)  # leaves time to report what is owed
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
        """The verdict, if it is certain; the hit is then soon reported to the server."""
        known = self._known.get(hit.key)
        # If the hit differs, the policy has changed.
        if known is None or known.asked < HAMMERED or known.hit != hit:
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
        """The number of refusals not reported yet; the next question must include it."""
        known = self._known.get(hit.key) if self._known else None
        if known is None or known.hit != hit:
            return 0
        return _take_owed(known)

    def forget_told(self, lost: Callable[[str], bool]) -> None:
        """Forget reports under way to a failed server; `lost`: a key is on that server."""
        for key, known in self._known.items():
            if lost(key):
                known.told = 0

    def close(self) -> None:
        """Report everything now."""
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
