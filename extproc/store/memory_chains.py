"""Chains in this process: the state of `rules/chain.py`, bounded in bytes.

The least useful values are dropped first: nodes that all of their conversations have left, then
conversations of one node, then others. Within each kind, the value that was written longest ago is
dropped first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from extproc.store.rules.chain import CUT_MS, FIRST_MS, ends_at

_OVERHEAD: Final = 320
"""Bytes that a value takes beside its own: its key, two objects, and a slot in an ordered dict."""

_SWEEP: Final = 4
"""Maximum number of expired values of each kind to remove at once: as many as one turn writes."""


class MemoryChains:
    """Values by key, in an ordered dict for each kind.

    Attributes:
        size: bytes of all values, with their keys.
    """

    def __init__(self, max_bytes: int, on_evicted: Callable[[], object]) -> None:
        """Start empty; `on_evicted` is called for each value that is dropped for lack of room."""
        self._max_bytes = max_bytes
        self._on_evicted = on_evicted
        self.size = 0
        self._kinds: list[OrderedDict[str, bytes]] = [OrderedDict(), OrderedDict(), OrderedDict()]

    def __len__(self) -> int:
        """The number of values, some of which may have expired."""
        return sum([len(kind) for kind in self._kinds])

    def get(self, key: str) -> bytes | None:
        """The value of a key; None if there is none."""
        for kind in self._kinds:
            value = kind.get(key)
            if value is not None:
                return value
        return None

    def change(self, key: str, change: Callable[[bytes], bytes]) -> None:
        """Replace a key's value by one of the same length; its place and expiry do not change."""
        for kind in self._kinds:
            if key in kind:
                kind[key] = change(kind[key])

    def put(self, key: str, value: bytes, life: int) -> None:
        """Store a value for `life` milliseconds, as the most recently written of its kind."""
        for kind in self._kinds:
            if key in kind:
                self.size -= len(kind.pop(key)) + _OVERHEAD
                break
        self._kinds[0 if life <= CUT_MS else 1 if life <= FIRST_MS else 2][key] = value
        self.size += len(value) + _OVERHEAD
        while self.size > self._max_bytes:
            kind = next((kind for kind in self._kinds if kind), self._kinds[0])
            self._drop_oldest(kind)
            self._on_evicted()

    def sweep(self, now: int, turns: int) -> None:
        """Remove expired values from the front of each kind; `turns` since the last sweep."""
        for kind in self._kinds:
            for _ in range(_SWEEP * turns):
                key = next(iter(kind), None)
                if key is None or now < ends_at(kind[key]):
                    break
                self._drop_oldest(kind)

    def _drop_oldest(self, kind: OrderedDict[str, bytes]) -> None:
        _, value = kind.popitem(last=False)
        self.size -= len(value) + _OVERHEAD
