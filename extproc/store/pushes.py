"""Questions to a store that come before any counting."""

from __future__ import annotations

from typing import TypeAlias

from extproc.store.rules.chain import ChainLink
from extproc.store.rules.ring import Push
from extproc.store.rules.root import RootSearch

AnyPush: TypeAlias = Push | ChainLink | RootSearch
"""A `Push` is answered with the ring's entries, a `ChainLink` with a `Trail`, a `RootSearch` with a list of one root."""
