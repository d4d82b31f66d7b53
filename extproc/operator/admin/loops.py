"""The loops of all replicas: each publishes its table, and whoever is asked merges what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import time
from typing import Any

import msgspec

from extproc.operator.admin.board import KEPT_SECONDS, Board, fit
from extproc.operator.loop_table import MINUTES, Loop, LoopTable
from extproc.store import Store
from extproc.store.rules.documents import MAX_DOCUMENT

BOARD = "loops"


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


decode = msgspec.msgpack.Decoder(Document).decode


class SharedLoops:
    """The tables of all replicas.

    Attributes:
        board: where they are.
    """

    def __init__(self, table: LoopTable, store: Store, shows_callers: Callable[[], bool], replica: str = "") -> None:
        """Nothing is shared until the board is; callers' values leave this process only where they may be shown."""
        self._table = table
        self._shows_callers = shows_callers
        self.board = Board(BOARD, store, table, self._make, pack, decode, replica)

    def view(self) -> View:
        """What all replicas know; called from any thread but the event loop's."""
        documents = self.board.collect()
        return View(
            merge_rows((row for document in documents.values() for row in document.rows), time() - KEPT_SECONDS),
            merge_lines((line for document in documents.values() for line in document.lines), int(time()) // 60),
            self.board.replica,
            sorted(documents),
            sum(document.left_out for document in documents.values()),
            self.board.problem,
        )

    def _make(self) -> Document:
        return make_document(self._table, shows_callers=self._shows_callers())


def make_document(table: LoopTable, *, shows_callers: bool) -> Document:
    """A table as it is now, what is largest first."""
    rows = sorted((_make_row(loop, shows_callers=shows_callers) for loop in table.copy()), key=lambda row: -row.size)
    minute = int(time()) // 60
    lines = [Line(*key, minute, curve.list_counts(minute)) for key, curve in table.curves.copy().items()]
    return Document(rows, [line for line in lines if any(line.counts)])


def pack(document: Document) -> bytes:
    """A document small enough for a board: where it is not, the smallest loops are left out."""
    rows = document.rows
    packed = fit(len(rows), lambda kept: Document(rows[:kept], document.lines, len(rows) - kept))
    return packed if len(packed) <= MAX_DOCUMENT else fit(0, lambda _: Document([], [], len(rows)))


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
