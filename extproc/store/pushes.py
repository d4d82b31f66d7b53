"""What a store is asked before anything is counted."""

from __future__ import annotations

from typing import TypeAlias

from extproc.store.rules.chain import ChainLink
from extproc.store.rules.ring import Push
from extproc.store.rules.root import RootSearch

AnyPush: TypeAlias = Push | ChainLink | RootSearch
"""A push is answered with the ring's entries, a link with a `Trail`, a search with a list of the root alone."""
