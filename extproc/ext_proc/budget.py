"""Time for looking into bodies, shared fairly: a caller that sends laborious bodies uses up its own time, not the others'.

A bucket for each tenant and one for all fill with time as it passes, and what is looked into takes out the time that it took.
While a bucket is empty, nothing is looked into at its expense. What a bucket holds at most is what a tenant may use at once.
Shadow policies look with the time that enforcing ones leave: what they take, those never miss.
"""

from __future__ import annotations

from typing import Final

from extproc.bounded import LRU

SHARE: Final = 0.5
"""Of the processor's time, for looking into all bodies."""

TENANT_SHARE: Final = 0.2
"""Of the processor's time, for the bodies of one tenant."""

BURST_SECONDS: Final = 1.0
"""Time that a bucket holds at most: some twenty bodies as laborious as a body can be."""

MAX_TENANTS: Final = 10_000
"""Buckets that are kept; the one that was used longest ago makes room, and is full when it comes back."""


class _Bucket:
    """What is left of a caller's time."""

    __slots__ = ("_filled", "_left", "_share", "_spare")

    def __init__(self, share: float, now: float) -> None:
        self._share = share
        self._left = BURST_SECONDS
        self._spare = BURST_SECONDS  # for shadow policies
        self._filled = now

    def fill(self, now: float, *, shadow: bool) -> float:
        """What is left now, in seconds; not above 0 when it is used up."""
        gained = max(0.0, now - self._filled) * self._share
        self._left = min(BURST_SECONDS, self._left + gained)
        self._spare = min(BURST_SECONDS, self._spare + gained)
        self._filled = now
        return self._spare if shadow else self._left

    def spend(self, seconds: float, *, shadow: bool) -> None:
        self._spare -= seconds
        if not shadow:
            self._left -= seconds


class InspectionBudget:
    """The buckets of this process."""

    def __init__(self, now: float) -> None:
        """All are full; `now` is in seconds of any monotonic clock, here and below."""
        self._all = _Bucket(SHARE, now)
        self._tenants: LRU[str, _Bucket] = LRU(MAX_TENANTS)

    def allows(self, tenant: str, now: float, *, shadow: bool = False) -> bool:
        """Whether there is time left to look into a body of this tenant's, perhaps for shadow policies alone."""
        bucket = self._tenants.use(tenant)
        if bucket is None:
            bucket = _Bucket(TENANT_SHARE, now)
            self._tenants.put(tenant, bucket)
        return bucket.fill(now, shadow=shadow) > 0 and self._all.fill(now, shadow=shadow) > 0

    def spend(self, tenant: str, seconds: float, *, shadow: bool = False) -> None:
        """A body of this tenant's took that long."""
        self._all.spend(seconds, shadow=shadow)
        bucket = self._tenants.peek(tenant)
        if bucket is not None:
            bucket.spend(seconds, shadow=shadow)
