"""What was seen of late, by key, for tables that people look at: bounded, and no tenant's share hides what others do."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

Value = TypeVar("Value")

Key = tuple[str, ...]
"""The first part is the tenant's name."""


class Recent(Generic[Value]):
    """Whoever has been quiet longest makes room: of the same tenant where that has its share, else of all."""

    def __init__(self, most: int, share: int) -> None:
        """Nothing was seen.

        Args:
            most: is kept in all.
            share: of one tenant's.
        """
        self._most = most
        self._share = share
        self._kept: OrderedDict[Key, Value] = OrderedDict()  # the one that has been quiet longest comes first
        self._tenants: dict[str, dict[Key, None]] = {}  # in the same order; too few each to be slow at their front

    def see(self, key: Key) -> Value | None:
        """What is kept under a key, which is quiet no longer; None for nothing."""
        value = self._kept.get(key)
        if value is not None:
            self._kept.move_to_end(key)
            own = self._tenants[key[0]]
            del own[key]
            own[key] = None
        return value

    def put(self, key: Key, value: Value) -> None:
        """Keep what is new."""
        self._kept[key] = value
        own = self._tenants.get(key[0])
        if own is None:
            own = self._tenants[key[0]] = {}
        own[key] = None
        if len(own) > self._share:
            self._drop(next(iter(own)))
        elif len(self._kept) > self._most:
            self.drop_quietest()

    def find_quietest(self) -> Value | None:
        """What has been quiet longest; None where nothing is kept."""
        return next(iter(self._kept.values())) if self._kept else None

    def drop_quietest(self) -> None:
        """Forget that."""
        self._drop(next(iter(self._kept)))

    def list_values(self) -> list[Value]:
        """All that is kept, the quietest first."""
        return list(self._kept.values())

    def _drop(self, key: Key) -> None:
        del self._kept[key]
        own = self._tenants[key[0]]
        del own[key]
        if not own:
            del self._tenants[key[0]]
