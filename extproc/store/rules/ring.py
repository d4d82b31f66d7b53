"""Rings: the newest entries of a key, one for each request, kept for some time after the last push."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from extproc.store.rules.change import State


class Push(NamedTuple):
    """One entry for the ring of a key; pushes of one key agree in `ttl_ms`.

    Attributes:
        key: the whole key, different from any counter's; like counter keys, it ends in two hex digits that spread keys evenly.
        entry: up to 64 bytes.
        request: a digest of 8 bytes; a repeated request pushes nothing.
        size: number of entries that the ring keeps.
        ttl_ms: time after its last push, retries included, at which the ring is forgotten, in milliseconds.
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
    """Push an entry; returns the new state and the ring's entries, oldest first. `state` is None for a new key.

    A ring is forgotten if its last push was `ttl_ms` ago, or that far in the future, because the clock was set back.
    """
    records = split_records(state[1]) if state is not None and abs(now - state[0]) < pushed.ttl_ms else []
    del records[: -pushed.size]
    if pushed.request not in [record[:_DIGEST] for record in records]:
        records.append(pushed.request + bytes((len(pushed.entry),)) + pushed.entry)
        del records[: -pushed.size]
    return (now, b"".join(records)), read_entries(records)


_VERSION: Final = 1
_HEAD: Final = struct.Struct(">BQ")
"""In a remote store: the version, and the time of the last push."""


def push_in(state: State, pushed: Push, now: int) -> list[bytes]:
    """Push an entry to a ring in a remote store."""
    ring, entries = push(_open(state.get(pushed.key)), pushed, now)
    state.put(pushed.key, _HEAD.pack(_VERSION, ring[0]) + ring[1], pushed.ttl_ms)
    return entries


def _open(value: bytes | None) -> Ring | None:
    """Unpack a ring; None if there is none, or the value is none of Loopguard's."""
    if value is None or len(value) < _HEAD.size or value[0] != _VERSION:
        return None
    try:
        split_records(value[_HEAD.size :])
    except IndexError:
        return None
    last: int
    _, last = _HEAD.unpack_from(value)
    return last, value[_HEAD.size :]


def split_records(joined: bytes, before: int = _DIGEST) -> list[bytes]:
    """The records of a ring: `before` bytes, a length, and that many bytes; raises IndexError if they are malformed."""
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
