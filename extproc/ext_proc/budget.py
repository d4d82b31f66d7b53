"""Time for looking into bodies, shared fairly: a caller may use what no other caller asks for, and no more than that.

A bucket for all bodies fills with time as it passes, and what is looked into takes out the time that it took. While there is
time in it, any caller may use it. Below that there is a reserve, which only callers use who keep to their own share: a caller
that comes back gets the same share as the others that are there now, and one place is kept for a caller that is new. So a
caller that sends laborious bodies uses up what is left over, then its own share, and never what the others ask for.

A client may have a new name for each request. New names use half of the reserve at most, push out no caller that comes back,
and are not counted as callers that are there.

Shadow policies look with the time that enforcing ones leave: what they take, those never miss.
"""

from __future__ import annotations

from typing import Final

from extproc.bounded import LRU

SHARE: Final = 0.5
"""Of the processor's time, for looking into all bodies."""

BURST_SECONDS: Final = 1.0
"""Time that is saved up at most for any caller: some twenty bodies as laborious as a body can be."""

RESERVE_SECONDS: Final = 0.5
"""Time beyond that for callers that keep to their own share."""

NEW_SECONDS: Final = RESERVE_SECONDS / 2
"""Of the reserve, what new callers may use; the others share the rest, which lasts if all of them use their own time."""

PRESENT_SECONDS: Final = 1.0
"""A caller is there until it has asked for nothing for one to two such spans."""

MAX_TENANTS: Final = 9_000
"""Callers that are known; the one that asked longest ago makes room, and is new when it comes back."""

MAX_NEW: Final = 1_000
"""Callers that have asked once, likewise."""


class _Account:
    """What is left of a caller's own share.

    Attributes:
        left: of it, in seconds.
        given: what each caller had been given when that was worked out.
        span: in which it has asked last.
    """

    __slots__ = ("given", "left", "span")

    def __init__(self, given: float) -> None:
        self.left = 0.0
        self.given = given
        self.span = -1


class _Shares:
    """The time of all callers."""

    def __init__(self, share: float, now: float) -> None:
        self._share = share
        self._left = BURST_SECONDS
        self._filled = now
        self._given = 0.0  # to each caller that is there, since the start
        self._span = 0
        self._began = now  # that span
        self._present = 0  # callers that have asked in it
        self._places = 1  # that share the time: as many as have asked in it, or in the one before, and one that is new
        self._known: LRU[str, _Account] = LRU(MAX_TENANTS)
        self._new: LRU[str, _Account] = LRU(MAX_NEW)

    def __len__(self) -> int:
        """The number of callers."""
        return len(self._known) + len(self._new)

    def allows(self, tenant: str, now: float) -> bool:
        """Whether there is time left for this caller."""
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
        """A caller has used that much: of what is left over where there is some, else of its own share."""
        if self._left <= 0:
            caller = self._known.peek(tenant) or self._new.peek(tenant)
            if caller is not None:
                caller.left -= seconds
        self._left -= seconds

    def _fill(self, now: float) -> None:
        gained = max(0.0, now - self._filled) * self._share
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
    """The time of this process."""

    def __init__(self, now: float, share: float = SHARE) -> None:
        """Nothing is spent; `now` is in seconds of any monotonic clock, here and below.

        Args:
            now: the time.
            share: of the processor's time, above 0 and at most 1.
        """
        self._acting = _Shares(share, now)
        self._watching = _Shares(share, now)  # what is left for shadow policies

    def __len__(self) -> int:
        """The number of callers that are kept, of enforcing and of shadow policies."""
        return len(self._acting) + len(self._watching)

    def allows(self, tenant: str, now: float, *, shadow: bool = False) -> bool:
        """Whether there is time left to look into a body of this tenant's, perhaps for shadow policies alone."""
        return (self._watching if shadow else self._acting).allows(tenant, now)

    def spend(self, tenant: str, seconds: float, *, shadow: bool = False) -> None:
        """A body of this tenant's took that long."""
        self._watching.spend(tenant, seconds)
        if not shadow:
            self._acting.spend(tenant, seconds)
