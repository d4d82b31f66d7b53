"""Shares tables between replicas: each publishes its own in the store, and merges the others.

A table is published from the server's event loop; packing it, a few milliseconds' work, is done in
a thread. Merging is done in the thread that serves a report. No request waits for either. A
draining replica publishes once more, and its document stays on the board for an hour, so a restart
loses nothing. A replica that is killed loses up to two seconds.
"""
# interpreted: works beside the requests

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from contextlib import suppress
from time import time
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from extproc.errors import StoreError
from extproc.memory import read_memory
from extproc.operator.rows import KEPT_SECONDS, Document
from extproc.store import Store
from extproc.store.rules.documents import BOARDS, make_replica_name

_PUBLISH_SECONDS = 2.0
_REFRESH_SECONDS = 600.0
"""Interval at which an unchanged table is published again, so that it does not expire."""

_COLLECT_SECONDS = 1.0
"""Time that a reader waits for the store, and the maximum age of the documents that it reuses."""

_BOARDS = 5
"""Number of boards that share the memory for tables."""

_UNPACKED = 4
"""Size of an unpacked document in memory, as a multiple of its bytes."""

_MOST_BYTES = 2**24

AnyDocument = TypeVar("AnyDocument", bound=Document)
Made_co = TypeVar("Made_co", bound=Document, covariant=True)


class BoardTable(Protocol[Made_co]):
    """A table that a replica publishes; see `Table`."""

    @property
    def changes(self) -> int:
        """A counter of changes."""

    def drop_quiet(self, before: float) -> None:
        """Drop rows whose last request was before this time, in seconds since 1970."""

    def make_document(self, *, shows_callers: bool) -> Made_co:
        """A snapshot of the table."""


class View(NamedTuple, Generic[AnyDocument]):
    """The merged document of all replicas.

    Attributes:
        document: the merged document.
        replica: this replica's name.
        replicas: the names of all replicas in it.
        problem: why some replicas' documents are missing or old; empty if none are.
    """

    document: AnyDocument
    replica: str
    replicas: list[str]
    problem: str


class Board(Generic[AnyDocument]):
    """One table, shared between the replicas."""

    def __init__(  # noqa: PLR0913  # what distinguishes tables
        self,
        name: str,
        kind: type[AnyDocument],
        table: BoardTable[AnyDocument],
        store: Store,
        shows_callers: Callable[[], bool],
        replica: str = "",
    ) -> None:
        """Nothing is shared until `share` runs. A replica without a name gets a new one."""
        self.replica = replica or make_replica_name()
        self._name = name
        self._kind = kind
        self._table = table
        self._store = store
        self._shows_callers = shows_callers
        self._problem = ""
        self._home: asyncio.AbstractEventLoop | None = None
        self._published = 0  # of the table's changes
        self._published_at = 0.0
        self._collected: dict[str, AnyDocument] = {}
        self._collected_at = 0.0

    async def share(self) -> None:
        """Publish changes until cancelled."""
        self._home = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_PUBLISH_SECONDS)
            await self.publish()

    async def publish(self) -> None:
        """Publish the table if it has changed. If the store fails, the next call tries again."""
        self._table.drop_quiet(time() - KEPT_SECONDS)
        changes = self._table.changes
        if not changes or (
            changes == self._published and time() - self._published_at < _REFRESH_SECONDS
        ):
            return
        document = await asyncio.to_thread(lambda: self._make().pack())
        with suppress(StoreError):  # the store reports that itself
            await self._store.documents.put(
                BOARDS, self._name, self.replica, document, KEPT_SECONDS
            )
            self._published, self._published_at = changes, time()

    def view(self) -> View[AnyDocument]:
        """Merge the tables of all replicas. Must not be called on the event loop's thread."""
        self._ask()
        documents = {self.replica: self._make(), **self._collected}
        return View(
            self._kind.merge(documents.values(), time()),
            self.replica,
            sorted(documents),
            self._problem,
        )

    def _make(self) -> AnyDocument:
        return self._table.make_document(shows_callers=self._shows_callers())

    def _ask(self) -> None:
        """Read the others' tables.

        If the store or the event loop does not answer, the previous ones are used.
        """
        if self._home is None or time() - self._collected_at < _COLLECT_SECONDS:
            return
        asked = asyncio.run_coroutine_threadsafe(
            self._store.documents.read(BOARDS, self._name), self._home
        )
        try:
            found = asked.result(_COLLECT_SECONDS)
        except TimeoutError:
            asked.cancel()
            self._problem = "the server is too busy to ask the store"
            return
        except StoreError as error:
            self._problem = f"the store is unavailable: {error}"
            return
        packed = found.documents if found is not None else {}
        packed.pop(self.replica, None)
        self._collected = unpack_all(
            packed, self._kind, read_memory().share("tables") // _BOARDS // _UNPACKED
        )
        self._collected_at, left_out = time(), len(packed) - len(self._collected)
        self._problem = (
            f"{left_out} of {len(packed)} reports are of another version, or too large"
            if left_out
            else ""
        )


def unpack_all(
    documents: dict[str, bytes], kind: type[AnyDocument], most: int = _MOST_BYTES
) -> dict[str, AnyDocument]:
    """Unpack documents, by replica, up to `most` bytes in total.

    Documents beyond that, and those of an unknown version, are left out.
    """
    decode = msgspec.msgpack.Decoder(kind).decode
    found = {}
    for replica, packed in documents.items():
        with suppress(msgspec.MsgspecError, ValueError, zlib.error):
            unpacking = zlib.decompressobj()
            data = unpacking.decompress(packed, max(1, most))
            if unpacking.eof and len(data) <= most:
                found[replica] = decode(data)
                most -= len(data)
    return found
