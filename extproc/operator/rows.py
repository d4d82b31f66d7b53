"""Rows as replicas publish them, how those of several replicas add up, and how many fit into a document.

The annotation of a field says how it adds up: it has a function of both rows and the field's name. A field without one is the
same on all replicas. New fields go behind the others and have a default, because two versions share a store; unknown ones are
skipped.
"""
# interpreted: msgspec makes its classes

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from copy import copy
from functools import cache
from operator import add
from typing import Any, Self, TypeVar, get_type_hints

import msgspec

from extproc.store.rules.documents import MAX_DOCUMENT

KEPT_SECONDS = 3_600
"""Rows without requests for longer than this are not shown."""

_LEAST_CUT = 10

Adding = Callable[[Any, Any, str], Any]


def join(how: Callable[[Any, Any], Any]) -> Adding:
    """Fields that add up by their two values alone."""
    return lambda one, other, field: how(getattr(one, field), getattr(other, field))


def newest(by: str) -> Adding:
    """Fields that are the ones of the row with the greater value of another field."""
    return lambda one, other, field: getattr(other if getattr(other, by) > getattr(one, by) else one, field)


SUM, MAX, MIN = join(add), join(max), join(min)
FIRST = join(lambda one, other: one or other)
"""The first value that is not empty."""

COUNTS = join(lambda one, other: {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}})


class Row(msgspec.Struct):
    """A row that several replicas may have; `name` is the same on all of them.

    With `last`, the time of its last request in seconds since 1970, it is shown for KEPT_SECONDS.
    """

    def absorb(self, other: Self) -> None:
        """Add what another replica knows of the same row."""
        for field, value in [(field, how(self, other, field)) for field, how in _find_adding(type(self))]:
            setattr(self, field, value)


@cache
def _find_adding(kind: type[Row]) -> list[tuple[str, Adding]]:
    hints = get_type_hints(kind, include_extras=True)
    annotated = [(field, getattr(hints[field], "__metadata__", ())) for field in kind.__struct_fields__]
    return [(field, how) for field, said in annotated for how in said if callable(how)]


AnyRow = TypeVar("AnyRow", bound=Any)


def merge(rows: Iterable[AnyRow]) -> list[AnyRow]:
    """One row for each name, in order; the given ones stay as they are."""
    merged: dict[Any, AnyRow] = {}
    for row in rows:
        if (known := merged.get(row.name)) is None:
            merged[row.name] = copy(row)
        else:
            known.absorb(row)
    return list(merged.values())


class Document(Row):
    """What one replica publishes of a table, or what all of them know: `rows`, and the number `left_out`, for lack of room."""

    def pack(self: Any) -> bytes:  # the fields are in the classes below, in an order of their own
        """Pack as many rows as fit on a board; the last ones are left out."""
        rows = self.rows
        return fit(len(rows), lambda kept: msgspec.structs.replace(self, rows=rows[:kept], left_out=len(rows) - kept))

    def finish(self: Any, now: float) -> None:
        """Merge the rows of several replicas, without those that are too old; `now` is in seconds since 1970."""
        self.rows = merge([row for row in self.rows if row.last >= now - KEPT_SECONDS])

    @classmethod
    def merge(cls, documents: Iterable[Self], now: float) -> Self:
        """Merge one or more documents."""
        first, *others = documents
        merged = copy(first)
        for other in others:
            merged.absorb(other)
        merged.finish(now)
        return merged


def fit(most: int, make: Callable[[int], object]) -> bytes:
    """As much of a document as fits on a board, packed; `make` makes it with a number of entries, up to `most`."""
    kept = most
    while True:
        packed = zlib.compress(msgspec.msgpack.encode(make(kept)), 9)
        if len(packed) <= MAX_DOCUMENT or not kept:
            return packed
        kept = max(0, kept - max(_LEAST_CUT, kept // 8))
