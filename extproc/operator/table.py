"""A bounded table of what this process has seen recently, such as loops and sessions.

A tenant gets at most a tenth of the rows, so it cannot evict those of others. Only the event loop
writes; other threads read with `copy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from extproc.bounded import LRU
from extproc.engine.guards import Guard
from extproc.memory import read_memory
from extproc.request.http import cut_text

MAX_ROWS: Final = 1_000
MAX_TENANT_ROWS: Final = 100

NAME_SHOWN: Final = 128
NAMES_SHOWN: Final = 8


def cut_caller(values: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Truncate the names and values of a caller's descriptors for a row."""
    return [
        (cut_text(name, NAME_SHOWN), cut_text(value, NAME_SHOWN))
        for name, value in values[:NAMES_SHOWN]
    ]


def write_time(seconds: float) -> str:
    """Write a time, in seconds since 1970, in the format of RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


class KnownAs(NamedTuple):
    """What is shown with a caller's hash.

    Attributes:
        alias: empty if there is none.
        labels: names and values.
        credentials: hashes of secrets.
        parts: hashes of the single values, if several identify the caller together.
    """

    alias: str
    labels: list[tuple[str, str]]
    credentials: list[str]
    parts: list[str]


UNKNOWN: Final = KnownAs("", [], [], [])


def find_known(candidate: Guard) -> KnownAs:
    """What is shown with the hash of a guard's caller."""
    labels, credentials = cut_caller(candidate.labels), candidate.list_credentials()
    return KnownAs(candidate.find_alias(), labels, credentials, candidate.list_parts())


class TableRow(Protocol):
    """A row of a table; `last` is the time of its last request, in seconds since 1970."""

    last: float


AnyRow = TypeVar("AnyRow", bound=TableRow)
Document = TypeVar("Document")


class Table(Generic[AnyRow, Document]):
    """Rows by key, which begins with the tenant.

    When full, the least recently used row is dropped.
    """

    def __init__(self, most: int = MAX_ROWS, share: int = MAX_TENANT_ROWS) -> None:
        """Create an empty table for `most` rows, at most `share` per tenant.

        Little memory lowers both.
        """
        self._share = read_memory().scale(share)
        self._rows: LRU[tuple[str, ...], AnyRow] = LRU(read_memory().scale(most))
        self._tenants: dict[str, LRU[tuple[str, ...], AnyRow]] = {}

    @property
    def changes(self) -> int:
        """The number of uses and additions of rows."""
        return self._rows.uses

    def use(self, key: tuple[str, ...]) -> AnyRow | None:
        """The row, marked as recently used, or None."""
        return self._rows.use(key)

    def peek(self, key: tuple[str, ...]) -> AnyRow | None:
        """The row, without marking it, or None."""
        return self._rows.peek(key)

    def put(self, key: tuple[str, ...], row: AnyRow) -> None:
        """Add a row."""
        own = self._tenants.get(key[0])
        if own is not None and len(own) >= self._share:
            self._drop(own.find_oldest())
        dropped = self._rows.put(key, row)
        if dropped is not None:
            self._forget(dropped)
        self._tenants.setdefault(key[0], LRU(self._share)).share(key, self._rows)

    def make_document(self, *, shows_callers: bool) -> Document:
        """A snapshot for a board. Callers' values are left out unless they may be shown."""
        raise NotImplementedError

    def copy(self) -> list[AnyRow]:
        """A list of all rows, least recently used first. The rows themselves are not copied."""
        return [row for _, row in self._rows.items()]

    def drop_quiet(self, before: float) -> None:
        """Drop rows whose last request was before this time, in seconds since 1970."""
        for key, row in self._rows.items():
            if row.last < before:
                self._drop(key)

    def _drop(self, key: tuple[str, ...]) -> None:
        self._rows.drop(key)
        self._forget(key)

    def _forget(self, key: tuple[str, ...]) -> None:
        """Remove a dropped row from its tenant's share."""
        own = self._tenants[key[0]]
        own.drop(key)
        if not own:
            del self._tenants[key[0]]
