"""Counts the replicas that share a store.

While it is unavailable, each of them enforces its share of every budget.

Every few seconds, a replica writes its name to a board in the store, where it soon expires, and
counts the names. Requests never wait for this. A replica that starts while the store is unavailable
counts only itself.
"""
# interpreted: waits for a network

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from extproc.errors import StoreError
from extproc.store import Store
from extproc.store.rules.documents import BOARDS

_BOARD: Final = "replicas"

_EVERY_SECONDS: Final = 2.0

KEPT_SECONDS: Final = 10.0
"""A replica that crashes is counted for this long, so a few of its writes may be late."""


class ReplicaCount:
    """The number of replicas, from several looks at the board.

    A larger number applies at once. A smaller one applies after KEPT_SECONDS without one as large
    as before, because an emptied store gets the names back one by one.

    Attributes:
        number: replicas, including this one; 1 before the first look.
    """

    def __init__(self) -> None:
        self.number = 1
        self._seen_at = float("-inf")

    def note(self, number: int, now: float) -> None:
        """Note how many names were on the board at the time `now`, in seconds."""
        if number >= self.number or now - self._seen_at >= KEPT_SECONDS:
            self.number, self._seen_at = max(1, number), now


class ReplicaWatch:
    """Announces this replica, and counts all of them."""

    def __init__(
        self, store: Store, name: str, is_needed: Callable[[], bool], report: Callable[[int], None]
    ) -> None:
        """Call `report` with the number after each look; no looks while `is_needed` is false.

        The replicas' `news` are written beside their names, and `hear` gets them after each look.
        """
        self._store = store
        self._name = name
        self._is_needed = is_needed
        self._report = report
        self._count = ReplicaCount()
        self.news: Callable[[], bytes] = bytes
        self.hear: Callable[[list[bytes]], None] = lambda _: None

    async def run(self) -> None:
        """Look periodically until cancelled."""
        while True:
            # The last number holds; the store reports its failure itself.
            with suppress(StoreError):
                await self.look(time.monotonic())
            await asyncio.sleep(_EVERY_SECONDS)

    async def look(self, now: float) -> None:
        """Write the name to the board, and count the names; `now` in seconds. Raises StoreError."""
        await self._store.documents.put(BOARDS, _BOARD, self._name, self.news(), KEPT_SECONDS)
        found = await self._store.documents.read(BOARDS, _BOARD)
        told = list(found.documents.values()) if found is not None else []
        self.hear(told)
        self._count.note(len(told), now)
        self._report(self._count.number)

    async def leave(self) -> None:
        """Remove the name from the board when this replica stops."""
        if self._is_needed():
            with suppress(StoreError):
                await self._store.documents.drop(BOARDS, _BOARD, self._name)
