"""The root session of an agent whose requests name only its parent, as opencode's do; the rule of `root.lua`.

A step of a session can bring the question along, so that it needs no round trip of its own: see `session.move_step`.

The first request that asks decides: an agent's root never changes, whatever later requests claim. So a chain of parents is
followed by one step at each agent's beginning, and circles of parents cost nothing.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

ROOT_SIZE: Final = 8
"""Bytes of a session's name."""


class RootSearch(NamedTuple):
    """One agent's question; never changed.

    Attributes:
        key: the agent's key; like all keys it ends in two hex digits that spread keys evenly.
        parent_key: its parent's, which ends in the same digits.
        parent: the parent's session, 8 bytes: the root, if the parent itself has none.
        ttl_ms: how long the answer is kept, in milliseconds.
    """

    key: str
    parent_key: str
    parent: bytes
    ttl_ms: int


def find_root(own: bytes | None, parents: bytes | None, asked: RootSearch) -> bytes:
    """The agent's root session, 8 bytes, which is kept under its key; given what is kept under its own and its parent's."""
    return own or parents or asked.parent


_ASKED: Final = struct.Struct(">8sI")


def pack_search(asked: RootSearch | None) -> bytes:
    """Pack a question that a step brings along; empty if there is none."""
    return b"" if asked is None else _ASKED.pack(asked.parent, asked.ttl_ms)
