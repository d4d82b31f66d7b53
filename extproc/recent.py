"""What was used of late, by key: bounded, and whoever has been quiet longest makes room.

To use something costs a number. All are put in order only when one has to go, and that order is good for as many as they were:
whoever was used since then is passed over.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar


class Used:
    """What is kept.

    Attributes:
        used: when it was used last, as whoever keeps it counts.
    """

    __slots__ = ("used",)

    used: int


class Row(Used):
    """What is kept in a table that people look at.

    Attributes:
        tenant: whose it is.
        last: when its last request came, in seconds since 1970.
    """

    __slots__ = ("last", "tenant")

    tenant: str
    last: float


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value", bound=Used)
AnyRow = TypeVar("AnyRow", bound=Row)


class Recent(Generic[Key, Value]):
    """Values by key.

    Attributes:
        kept: all of them.
        changes: how often any was used.
    """

    def __init__(self) -> None:
        """There are none."""
        self.kept: dict[Key, Value] = {}
        self.changes = 0
        self._order: list[Key] = []  # the one that has been quiet longest comes last
        self._ordered = 0  # when the last of these was used

    def use(self, key: Key) -> Value | None:
        """What is kept under a key; None for nothing."""
        value = self.kept.get(key)
        if value is not None:
            self.changes += 1
            value.used = self.changes
        return value

    def put(self, key: Key, value: Value) -> None:
        """Keep what is new, which is used thereby."""
        self.changes += 1
        value.used = self.changes
        self.kept[key] = value

    def find_quietest(self) -> Key:
        """Where the one is that has been quiet longest; there has to be one."""
        kept = self.kept
        while True:
            while self._order:
                value = kept.get(self._order[-1])
                if value is not None and value.used <= self._ordered:
                    return self._order[-1]
                self._order.pop()
            self._order = sorted(kept, key=lambda key: -kept[key].used)
            self._ordered = kept[self._order[0]].used


class Table(Recent[tuple[str, ...], AnyRow]):
    """Rows that people look at; no tenant's share of them hides what others do."""

    def __init__(self, most: int, share: int) -> None:
        """It is empty.

        Args:
            most: rows in all.
            share: of them, one tenant's.
        """
        super().__init__()
        self._most = most
        self._share = share
        self._tenants: dict[str, Recent[tuple[str, ...], AnyRow]] = {}

    def put(self, key: tuple[str, ...], value: AnyRow) -> None:
        """Keep what is new; where a tenant has more than its share, its own quietest row makes room."""
        super().put(key, value)
        own = self._tenants.get(value.tenant)
        if own is None:
            own = self._tenants[value.tenant] = Recent()
        own.kept[key] = value
        if len(own.kept) > self._share:
            self._drop(own.find_quietest())
        elif len(self.kept) > self._most:
            self._drop(self.find_quietest())

    def copy(self) -> list[AnyRow]:
        """All rows as of now, the quietest first; they go on changing. For whichever thread wants them."""
        return sorted(self.kept.values(), key=lambda row: row.used)

    def drop_quiet(self, before: float) -> None:
        """Forget the rows whose last request came before then, in seconds since 1970."""
        for key in [key for key, row in self.kept.items() if row.last < before]:
            self._drop(key)

    def _drop(self, key: tuple[str, ...]) -> None:
        tenant = self.kept.pop(key).tenant
        own = self._tenants[tenant].kept
        del own[key]
        if not own:
            del self._tenants[tenant]
