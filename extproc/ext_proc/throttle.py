"""Places for throttled requests: bounded in total and per tenant, and freed when a stream closes."""

from __future__ import annotations

import asyncio
from collections import Counter


class Holds:
    """The places for held requests.

    Attributes:
        held: the number of taken places.
        released: set when all holds, present and future, have ended.
    """

    def __init__(self, limit: int) -> None:
        """Hold at most `limit` requests in total, and a tenth of that per tenant."""
        self._limit = limit
        self._tenant_limit = max(1, limit // 10)
        self._tenants: Counter[str] = Counter()
        self.released = asyncio.Event()
        self.held = 0

    def claim(self, tenant: str) -> bool:
        """Claim a place; returns False if none is free."""
        if self.held >= self._limit or self._tenants[tenant] >= self._tenant_limit:
            return False
        self.held += 1
        self._tenants[tenant] += 1
        return True

    def free(self, tenant: str) -> None:
        """Give a place back."""
        self.held -= 1
        self._tenants[tenant] -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]

    async def wait(self, milliseconds: int) -> None:
        """Wait this long, or until `release`."""
        try:
            async with asyncio.timeout(milliseconds / 1000):
                await self.released.wait()
        except TimeoutError:
            pass

    def release(self) -> None:
        """End every hold at once, now and from now on."""
        self.released.set()
