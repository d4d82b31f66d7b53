"""Places for delayed requests: limited in total and per caller, and freed when a stream closes."""

from __future__ import annotations

import asyncio
from collections import Counter


class Holds:
    """The places for delayed requests.

    Attributes:
        held: number of taken places.
        released: set when all delays, present and future, have ended.
    """

    def __init__(self, limit: int) -> None:
        """Allow at most `limit` delayed requests in total, and a tenth of that per caller."""
        self._limit = limit
        self._tenant_limit = max(1, limit // 10)
        self._tenants: Counter[str] = Counter()
        self.released = asyncio.Event()
        self.held = 0

    def claim(self, tenant: str) -> bool:
        """Take a place; returns whether one was free."""
        if self.held >= self._limit or self._tenants[tenant] >= self._tenant_limit:
            return False
        self.held += 1
        self._tenants[tenant] += 1
        return True

    def free(self, tenant: str) -> None:
        """Free a place."""
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
        """End all delays, now and from now on."""
        self.released.set()
