"""The root session of an agent whose requests name only its parent; the rule of `root.lua`.

opencode's agents do so.

A step of a session can include the search, which then needs no round trip of its own: see
`session.move_step`.

The first search decides: an agent's root never changes, whatever later requests claim. So each
search looks only at the parent, not at the parent's parents, and cycles cost nothing.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

ROOT_SIZE: Final = 8
"""Bytes of a session's name."""


class RootSearch(NamedTuple):
    """The search for one agent's root; never changed.

    Attributes:
        key: the agent's key; like all keys it ends in two hex digits that spread keys evenly.
        parent_key: its parent's, which ends in the same digits.
        parent: the parent's session, 8 bytes: the root, if the parent itself has none.
        ttl_ms: lifetime of the answer, in milliseconds.
    """

    key: str
    parent_key: str
    parent: bytes
    ttl_ms: int


def find_root(own: bytes | None, parents: bytes | None, asked: RootSearch) -> bytes:
    """The agent's root session, given its own value and its parent's; it is its new value."""
    return own or parents or asked.parent


_ASKED: Final = struct.Struct(">8sI")


def pack_search(asked: RootSearch | None) -> bytes:
    """Pack the search of a step; empty if it has none."""
    return b"" if asked is None else _ASKED.pack(asked.parent, asked.ttl_ms)
