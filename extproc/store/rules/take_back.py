"""A request that its upstream failed is taken back from what has counted it; the rule of `take_back.lua`.

A window has one request less, a node of a chain one retry less. When they began and when they end stays as it is.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from extproc.store.rules.windows import Tally

COUNTED: Final = "counted"
"""In metadata: what has counted a request, beside whose call it is."""

TALLY, LOG, CHAIN = "tally", "log", "chain"

_TIME: Final = Struct("=q")
_RETRIES: Final = 43
"""Where a node of a chain has them: its format is that of `chain.py`."""

_VERSION: Final = 2


class TakeBack:
    """What an entry of the access log asks; never changed.

    Attributes:
        key: that has counted the request; it ends in two hex digits, as all keys do.
        kind: of its value: TALLY, LOG or CHAIN.
    """

    __slots__ = ("key", "kind")

    def __init__(self, key: str, kind: str) -> None:
        self.key = key
        self.kind = kind


def take_from_tally(state: Tally) -> Tally:
    """A count without its newest request."""
    count, first, last, cooling_until = state
    return max(0, count - 1), first, last, cooling_until


def take_from_log(state: bytearray) -> None:
    """The times of requests without the newest one, in place."""
    if len(state) > _TIME.size:
        del state[-2 * _TIME.size : -_TIME.size]


def take_from_chain(value: bytes) -> bytes:
    """A node with one retry less."""
    if len(value) <= _RETRIES or value[0] != _VERSION or not value[_RETRIES]:
        return value
    return value[:_RETRIES] + bytes((value[_RETRIES] - 1,)) + value[_RETRIES + 1 :]
