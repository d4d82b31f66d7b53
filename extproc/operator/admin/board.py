"""A table that each replica publishes on a board in the store, so that whoever is asked knows what all of them know.

Publishing is asked for on the server's event loop, with a few milliseconds' work in a thread; merging is done in the thread
that answers. No request waits for either. A replica that drains publishes once more, and keeps its place for an hour when it
is gone, so that a restart loses nothing; one that is killed loses the last two seconds.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from contextlib import suppress
from time import time
from typing import Generic, Protocol, TypeVar

import msgspec

from extproc.errors import StoreError
from extproc.store import Store
from extproc.store.rules.documents import MAX_DOCUMENT, make_replica_name

T = TypeVar("T")

KEPT_SECONDS = 3_600
"""What has been quiet for longer is shown no more."""

_PUBLISH_SECONDS = 2.0
_REFRESH_SECONDS = 600.0
"""A table that does not change is published that often, so that the board does not forget it."""

_COLLECT_SECONDS = 1.0
"""How long whoever asks waits for the store, and how old its last answer may be."""

_LEAST_CUT = 10


class Table(Protocol):
    """What is published.

    Attributes:
        changes: how often anything was noted.
    """

    changes: int

    def drop_quiet(self, before: float) -> None:
        """Forget what has been quiet since before then, in seconds since 1970."""
        ...


class Board(Generic[T]):
    """One table, as this replica and the others know it.

    Attributes:
        replica: this one's name.
        problem: why other replicas' tables are missing or old, empty where they are not.
    """

    def __init__(  # noqa: PLR0913  # what tells one table from another
        self,
        name: str,
        store: Store,
        table: Table,
        make: Callable[[], T],
        pack: Callable[[T], bytes],
        decode: Callable[[bytes], T],
        replica: str = "",
    ) -> None:
        """Nothing is shared until `share` runs.

        Args:
            name: of the board.
            store: that has it.
            table: of this replica.
            make: the document about it.
            pack: makes a document small enough, see `fit`.
            decode: reads what `fit` has encoded.
            replica: the name of this one; a new one where it is empty.
        """
        self.replica = replica or make_replica_name()
        self.problem = ""
        self._name = name
        self._store = store
        self._table = table
        self._make = make
        self._pack = pack
        self._decode = decode
        self._home: asyncio.AbstractEventLoop | None = None
        self._published = 0  # of the table's changes
        self._published_at = 0.0
        self._collected: dict[str, T] = {}
        self._collected_at = 0.0

    async def share(self) -> None:
        """Publish what changes, until cancelled."""
        self._home = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_PUBLISH_SECONDS)
            await self.publish()

    async def publish(self) -> None:
        """Publish the table if it has changed; what the store misses is published the next time."""
        self._table.drop_quiet(time() - KEPT_SECONDS)
        changes = self._table.changes
        if not changes or (changes == self._published and time() - self._published_at < _REFRESH_SECONDS):
            return
        document = await asyncio.to_thread(lambda: self._pack(self._make()))
        with suppress(StoreError):  # the store tells that itself
            await self._store.publish(self._name, self.replica, document, KEPT_SECONDS)
            self._published, self._published_at = changes, time()

    def collect(self) -> dict[str, T]:
        """What all replicas know, by their names; called from any thread but the event loop's."""
        self._ask()
        return {self.replica: self._make(), **self._collected}

    def _ask(self) -> None:
        """Read the others' tables; where the store or the event loop does not answer, the last ones have to do."""
        if self._home is None or time() - self._collected_at < _COLLECT_SECONDS:
            return
        asked = asyncio.run_coroutine_threadsafe(self._store.collect(self._name), self._home)
        try:
            found = asked.result(_COLLECT_SECONDS)
        except TimeoutError:
            asked.cancel()
            self.problem = "the server is too busy to ask the store"
            return
        except StoreError as error:
            self.problem = f"the store is unavailable: {error}"
            return
        packed = {replica: document for replica, document in found.items() if replica != self.replica}
        self._collected = unpack_all(packed, self._decode)
        self._collected_at, self.problem = time(), ""


def fit(most: int, make: Callable[[int], object]) -> bytes:
    """A document packed, small enough for a board, if it is so with no entries at all.

    Args:
        most: entries there are.
        make: the document with so many of them.
    """
    kept = most
    while True:
        packed = zlib.compress(msgspec.msgpack.encode(make(kept)), 9)
        if len(packed) <= MAX_DOCUMENT or not kept:
            return packed
        kept = max(0, kept - max(_LEAST_CUT, kept // 8))


def unpack_all(documents: dict[str, bytes], decode: Callable[[bytes], T]) -> dict[str, T]:
    """Documents by replica; what cannot be read is of a version that is not known here, and left out."""
    found = {}
    for replica, packed in documents.items():
        with suppress(msgspec.MsgspecError, ValueError, zlib.error):
            found[replica] = decode(zlib.decompress(packed))
    return found
