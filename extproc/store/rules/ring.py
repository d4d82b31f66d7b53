"""Rings: the newest entries of a key, one for each request; the rule of `ring.lua`.

A ring is forgotten some time after its last push.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias


class Push(NamedTuple):
    """One entry for the ring of a key; pushes of one key agree in `ttl_ms`.

    Attributes:
        key: the whole key, different from any counter's; like counter keys, it ends in two hex
            digits that spread keys evenly.
        entry: up to 64 bytes.
        request: a digest of 8 bytes; a repeated request pushes nothing.
        size: number of entries that the ring keeps.
        ttl_ms: time after its last push, retries included, at which the ring is forgotten, in
            milliseconds.
    """

    key: str
    entry: bytes
    request: bytes
    size: int
    ttl_ms: int


Ring: TypeAlias = tuple[int, bytes]
"""The state of a ring: the time of its last push, in milliseconds, and its joined records."""

_DIGEST = 8
_ENTRY = _DIGEST + 1
"""Where the entry begins in a record: behind its request's digest and a byte for its length."""


def push(state: Ring | None, pushed: Push, now: int) -> tuple[Ring, list[bytes]]:
    """Push an entry; returns the new state and the ring's entries, oldest first.

    `state` is None for a new key.

    A ring is forgotten if its last push was `ttl_ms` ago, or that far in the future, because the
    clock was set back.
    """
    records = (
        split_records(state[1]) if state is not None and abs(now - state[0]) < pushed.ttl_ms else []
    )
    del records[: -pushed.size]
    if pushed.request not in [record[:_DIGEST] for record in records]:
        records.append(pushed.request + bytes((len(pushed.entry),)) + pushed.entry)
        del records[: -pushed.size]
    return (now, b"".join(records)), read_entries(records)


def split_records(joined: bytes, before: int = _DIGEST) -> list[bytes]:
    """The records of a ring.

    `before` bytes, a length, and that many bytes; raises IndexError if they are malformed.
    """
    records = []
    start = 0
    while start < len(joined):
        end = start + before + 1 + joined[start + before]
        if end > len(joined):
            raise IndexError
        records.append(joined[start:end])
        start = end
    return records


def read_entries(records: Sequence[bytes]) -> list[bytes]:
    """The entries without the digests of their requests."""
    return [record[_ENTRY:] for record in records]
