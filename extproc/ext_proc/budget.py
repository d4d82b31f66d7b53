"""Processor time for inspecting bodies, shared fairly: no caller can use time that others need.

A token bucket fills with time, and each inspection removes the time that it took. While the bucket
is not empty, any caller may use it. Below zero, there is a reserve for callers within their own
share: all active returning callers have equal shares, and one more share is for a new caller. So a
caller that sends expensive bodies uses up the surplus and its own share, but never the time of
others.

A client may use a new name for each request. New names can use at most half of the reserve, do not
displace returning callers, and do not count as active.

Shadow policies use the time that enforcing policies leave, and never take time from them.
"""

from __future__ import annotations

from typing import Final

from extproc.bounded import LRU

SHARE: Final = 0.5
"""The part of the processor's time for inspecting bodies."""

BURST_SECONDS: Final = 1.0
"""Maximum seconds in the bucket, enough for about twenty of the most expensive bodies."""

RESERVE_SECONDS: Final = 0.5
"""Seconds in the reserve."""

NEW_SECONDS: Final = RESERVE_SECONDS / 2
"""Seconds of the reserve that new callers may use. The rest is enough for the shares of returning
callers."""

PRESENT_SECONDS: Final = 1.0
"""Length of a span, in seconds.

A caller stays active for one to two spans after its last request.
"""

MAX_TENANTS: Final = 9_000
"""Maximum number of returning callers. The least recently active is dropped, and counts as new if
it returns."""

MAX_NEW: Final = 1_000
"""Maximum number of callers seen once. The least recently active is dropped."""


class _Account:
    """A caller's own share.

    Attributes:
        left: the time left, in seconds.
        given: the total time given to each caller when `left` was computed.
        span: number of the span with its last request.
    """

    def __init__(self, given: float) -> None:
        self.left = 0.0
        self.given = given
        self.span = -1


class _Shares:
    """The time of all callers, for policies of one mode."""

    def __init__(self, now: float) -> None:
        self._left = BURST_SECONDS
        self._filled = now
        self._given = 0.0  # total per active caller
        self._span = 0
        self._began = now  # the current span
        self._present = 0  # callers in this span
        self._places = 1  # number of shares: max(callers now, callers before) + 1
        self._known: LRU[str, _Account] = LRU(MAX_TENANTS)
        self._new: LRU[str, _Account] = LRU(MAX_NEW)

    def __len__(self) -> int:
        """The number of callers."""
        return len(self._known) + len(self._new)

    def allows(self, tenant: str, now: float) -> bool:
        self._fill(now)
        caller = self._known.use(tenant)
        if caller is None:
            caller = self._new.drop(tenant)
            if caller is None:
                self._new.put(tenant, _Account(self._given))
                return self._left > -NEW_SECONDS
            self._known.put(tenant, caller)
        if caller.span != self._span:
            caller.span = self._span
            self._present += 1
            self._places = max(self._places, self._present + 1)
        most = (RESERVE_SECONDS - NEW_SECONDS) / self._places
        caller.left = min(most, caller.left + self._given - caller.given)
        caller.given = self._given
        return self._left > 0 or (caller.left > 0 and self._left > -RESERVE_SECONDS)

    def spend(self, tenant: str, seconds: float) -> None:
        """Charge a caller: the surplus first, then its own share."""
        if self._left <= 0:
            caller = self._known.peek(tenant) or self._new.peek(tenant)
            if caller is not None:
                caller.left -= seconds
        self._left -= seconds

    def _fill(self, now: float) -> None:
        gained = max(0.0, now - self._filled) * SHARE
        self._filled = now
        self._left = min(BURST_SECONDS, self._left + gained)
        self._given += gained / self._places
        passed = now - self._began
        if passed >= PRESENT_SECONDS:
            self._places = self._present + 1 if passed < 2 * PRESENT_SECONDS else 1
            self._present = 0
            self._span += 1
            self._began = now


class InspectionBudget:
    """The inspection time of this process."""

    def __init__(self, now: float) -> None:
        """Start with a full bucket.

        `now` is in seconds of any monotonic clock, as in all methods.
        """
        self._acting = _Shares(now)
        self._watching = _Shares(now)  # also charged for enforcing policies

    def __len__(self) -> int:
        """The number of known callers, for enforcing plus for shadow policies."""
        return len(self._acting) + len(self._watching)

    def allows(self, tenant: str, now: float, *, shadow: bool = False) -> bool:
        """Whether there is time to inspect this caller's body; `shadow`: for shadow policies."""
        return (self._watching if shadow else self._acting).allows(tenant, now)

    def spend(self, tenant: str, seconds: float, *, shadow: bool = False) -> None:
        """Charge a caller for an inspection."""
        self._watching.spend(tenant, seconds)
        if not shadow:
            self._acting.spend(tenant, seconds)
