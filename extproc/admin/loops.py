"""The loops of all replicas: each publishes its table on a board in the store, and whoever is asked merges what it finds there.

Publishing is asked for on the server's event loop, with a few milliseconds' work in a thread; merging is done in the thread
that answers. No request waits for either. A replica that drains publishes once more, and keeps its place for an hour when it
is gone, so that a restart loses nothing; one that is killed loses the last two seconds.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from time import time
from typing import Any

import msgspec

from extproc.errors import StoreError
from extproc.loop_table import MINUTES, Loop, LoopTable
from extproc.store import Store
from extproc.store.boards import MAX_DOCUMENT, make_replica_name

BOARD = "loops"

KEPT_SECONDS = 3_600
"""What has been quiet for longer is shown no more."""

_PUBLISH_SECONDS = 2.0
_REFRESH_SECONDS = 600.0
"""A table that does not change is published that often, so that the board does not forget it."""

_COLLECT_SECONDS = 1.0
"""How long whoever asks waits for the store, and how old its last answer may be."""

_LEAST_CUT = 10


class Row(msgspec.Struct, array_like=True):
    """A loop as replicas tell it each other; see `Loop`. New fields go behind the others and have a default."""

    policy: str
    detector: str
    mode: str
    tenant: str
    repeats: str
    session: str
    fingerprint: str
    method: str
    path: str
    route: str
    model: str
    tools: list[str]
    caller: list[tuple[str, str]]
    first: float
    last: float
    count: int
    requests: dict[str, int]
    size: int
    stopped: int
    stopped_size: int

    def absorb(self, other: Row) -> None:
        """Take what another replica saw of the same loop."""
        if other.last > self.last:
            self.last, self.count, self.fingerprint = other.last, other.count, other.fingerprint
        self.first = min(self.first, other.first)
        self.caller = self.caller or other.caller
        for action, requests in other.requests.items():
            self.requests[action] = self.requests.get(action, 0) + requests
        self.size += other.size
        self.stopped += other.stopped
        self.stopped_size += other.stopped_size


class Line(msgspec.Struct, array_like=True):
    """A curve: requests acted on in each of the `MINUTES` that end with `minute`."""

    policy: str
    mode: str
    action: str
    minute: int
    counts: list[int]


class Document(msgspec.Struct, array_like=True):
    """What one replica publishes."""

    rows: list[Row]
    lines: list[Line]
    left_out: int = 0


class View(msgspec.Struct):
    """What all replicas know.

    Attributes:
        rows: one for each loop.
        lines: one for each policy, mode and action, all of them ending with the same minute.
        replica: who was asked.
        replicas: whose tables these are.
        left_out: loops that did not fit on the board.
        problem: why other replicas' tables are missing or old, empty where they are not.
    """

    rows: list[Row]
    lines: list[Line]
    replica: str
    replicas: list[str]
    left_out: int
    problem: str


_decode = msgspec.msgpack.Decoder(Document).decode


class SharedLoops:
    """The tables of all replicas."""

    def __init__(self, table: LoopTable, store: Store, shows_callers: Callable[[], bool]) -> None:
        """Nothing is shared until `share` runs; callers' values leave this process only where they may be shown."""
        self._table = table
        self._store = store
        self._shows_callers = shows_callers
        self._replica = make_replica_name()
        self._home: asyncio.AbstractEventLoop | None = None
        self._published = 0  # of the table's changes
        self._published_at = 0.0
        self._collected: dict[str, Document] = {}
        self._collected_at = 0.0
        self._problem = ""

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
        document = await asyncio.to_thread(self._pack)
        with suppress(StoreError):  # the store tells that itself
            await self._store.publish(BOARD, self._replica, document, KEPT_SECONDS)
            self._published, self._published_at = changes, time()

    def view(self) -> View:
        """What all replicas know; called from any thread but the event loop's."""
        self._collect()
        own = make_document(self._table, shows_callers=self._shows_callers())
        documents = {self._replica: own, **self._collected}
        return View(
            merge_rows((row for document in documents.values() for row in document.rows), time() - KEPT_SECONDS),
            merge_lines((line for document in documents.values() for line in document.lines), int(time()) // 60),
            self._replica,
            sorted(documents),
            sum(document.left_out for document in documents.values()),
            self._problem,
        )

    def _pack(self) -> bytes:
        return pack(make_document(self._table, shows_callers=self._shows_callers()))

    def _collect(self) -> None:
        """Read the others' tables; where the store or the event loop does not answer, the last ones have to do."""
        if self._home is None or time() - self._collected_at < _COLLECT_SECONDS:
            return
        asked = asyncio.run_coroutine_threadsafe(self._store.collect(BOARD), self._home)
        try:
            found = asked.result(_COLLECT_SECONDS)
        except TimeoutError:
            asked.cancel()
            self._problem = "the server is too busy to ask the store"
            return
        except StoreError as error:
            self._problem = f"the store is away: {error}"
            return
        self._collected = unpack_all(found, but=self._replica)
        self._collected_at, self._problem = time(), ""


def make_document(table: LoopTable, *, shows_callers: bool) -> Document:
    """A table as it is now, what is largest first."""
    rows = sorted((_make_row(loop, shows_callers=shows_callers) for loop in table.copy()), key=lambda row: -row.size)
    minute = int(time()) // 60
    lines = [Line(*key, minute, curve.list_counts(minute)) for key, curve in table.curves.copy().items()]
    return Document(rows, [line for line in lines if any(line.counts)])


def pack(document: Document) -> bytes:
    """A document small enough for a board: where it is not, the smallest loops are left out."""
    rows, kept = document.rows, len(document.rows)
    while True:
        packed = zlib.compress(msgspec.msgpack.encode(Document(rows[:kept], document.lines, len(rows) - kept)), 9)
        if len(packed) <= MAX_DOCUMENT:
            return packed
        if not kept:
            return zlib.compress(msgspec.msgpack.encode(Document([], [], len(rows))))
        kept = max(0, kept - max(_LEAST_CUT, kept // 8))


def unpack_all(documents: Mapping[str, bytes], but: str) -> dict[str, Document]:
    """The documents of all replicas but one; what cannot be read is of a version that is not known here, and left out."""
    found = {}
    for replica, packed in documents.items():
        if replica == but:
            continue
        try:
            found[replica] = _decode(zlib.decompress(packed))
        except (msgspec.MsgspecError, ValueError, zlib.error):
            continue
    return found


def merge_rows(rows: Iterable[Row], since: float) -> list[Row]:
    """One row for each loop that was acted on since then."""
    merged: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row.last < since:
            continue
        key = (row.policy, row.detector, row.mode, row.tenant, row.repeats)
        if (known := merged.get(key)) is None:
            merged[key] = msgspec.structs.replace(row, requests=dict(row.requests))
        else:
            known.absorb(row)
    return list(merged.values())


def merge_lines(lines: Iterable[Line], minute: int) -> list[Line]:
    """One line for each policy, mode and action, for the hour that ends with this minute."""
    merged: dict[tuple[str, str, str], Line] = {}
    for line in lines:
        key = (line.policy, line.mode, line.action)
        shifted = ([*line.counts[:MINUTES], *[0] * max(0, minute - line.minute)])[-MINUTES:]
        known = merged.setdefault(key, Line(*key, minute, [0] * MINUTES))
        known.counts = [one + other for one, other in zip(known.counts, shifted, strict=True)]
    return [merged[key] for key in sorted(merged) if any(merged[key].counts)]


def _make_row(loop: Loop, *, shows_callers: bool) -> Row:
    return Row(
        loop.policy,
        loop.detector,
        loop.mode,
        loop.tenant,
        loop.repeats,
        loop.session,
        loop.fingerprint,
        loop.method,
        loop.path,
        loop.route,
        loop.model,
        list(loop.tools),
        list(loop.caller) if shows_callers else [],
        loop.first,
        loop.last,
        loop.count,
        dict(loop.requests),
        loop.size,
        loop.stopped,
        loop.stopped_size,
    )
