"""Rows and documents that replicas publish, and how they are merged and cut to fit a board.

A field's annotation has the function that merges it, given both rows and the field's name. A field
without one is the same on all replicas. During an upgrade, two versions share a store, so new
fields go last and have a default. Unknown fields are skipped.
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
"""Rows are shown for this long after their last request."""

_LEAST_CUT = 10

Adding = Callable[[Any, Any, str], Any]


def join(how: Callable[[Any, Any], Any]) -> Adding:
    """Merge a field by a function of its two values."""
    return lambda one, other, field: how(getattr(one, field), getattr(other, field))


def newest(by: str) -> Adding:
    """Merge a field by taking it from the row with the greater value of field `by`."""
    return lambda one, other, field: getattr(
        other if getattr(other, by) > getattr(one, by) else one, field
    )


SUM, MAX, MIN = join(add), join(max), join(min)
FIRST = join(lambda one, other: one or other)
"""The first value that is not empty."""

COUNTS = join(
    lambda one, other: {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}
)


class Row(msgspec.Struct):
    """A row that several replicas may have; `name` is its key.

    Rows with `last`, the time of the last request in seconds since 1970, expire after KEPT_SECONDS.
    """

    def absorb(self, other: Self) -> None:
        """Merge another replica's row with the same name into this one."""
        for field, value in [
            (field, how(self, other, field)) for field, how in _find_adding(type(self))
        ]:
            setattr(self, field, value)


@cache
def _find_adding(kind: type[Row]) -> list[tuple[str, Adding]]:
    hints = get_type_hints(kind, include_extras=True)
    annotated = [
        (field, getattr(hints[field], "__metadata__", ())) for field in kind.__struct_fields__
    ]
    return [(field, how) for field, said in annotated for how in said if callable(how)]


AnyRow = TypeVar("AnyRow", bound=Any)


def merge(rows: Iterable[AnyRow]) -> list[AnyRow]:
    """Merge rows into one per name, in order. The given rows are not changed."""
    merged: dict[Any, AnyRow] = {}
    for row in rows:
        if (known := merged.get(row.name)) is None:
            merged[row.name] = copy(row)
        else:
            known.absorb(row)
    return list(merged.values())


class Document(Row):
    """The `rows` of one replica, or of all after merging; `left_out` had no space."""

    def pack(self: Any) -> bytes:  # subclasses define the fields, because their order matters
        """Pack as many rows as fit on a board; the last ones are left out."""
        rows = self.rows
        return fit(
            len(rows),
            lambda kept: msgspec.structs.replace(self, rows=rows[:kept], left_out=len(rows) - kept),
        )

    def finish(self: Any, now: float) -> None:
        """Merge the rows of several replicas and drop expired ones."""
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
    """Pack as many entries as fit a board; `make(n)` is the document with `n`, at most `most`."""
    kept = most
    while True:
        packed = zlib.compress(msgspec.msgpack.encode(make(kept)), 9)
        if len(packed) <= MAX_DOCUMENT or not kept:
            return packed
        kept = max(0, kept - max(_LEAST_CUT, kept // 8))
