"""Removes a request whose upstream failed from its counts; the rule of `take_back.lua`.

A window loses one request, the node of a chain one retry. Their start and end do not change.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from extproc.store.rules.windows import Tally

COUNTED: Final = "counted"
"""Metadata key of the counters that have counted a request, except its sessions."""

TALLY, LOG, CHAIN = "tally", "log", "chain"

_TIME: Final = Struct("=q")
_RETRIES: Final = 43
"""The offset of the retries in a node of a chain, whose format is that of `chain.py`."""

_VERSION: Final = 2


class TakeBack(NamedTuple):
    """A counter from which to remove a request; never changed.

    Attributes:
        key: the key under which the request was counted; like all keys, it ends in two hex digits.
        kind: the kind of its value: TALLY, LOG or CHAIN.
    """

    key: str
    kind: str


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
