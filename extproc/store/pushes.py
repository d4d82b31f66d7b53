"""Questions to a store that come before any counting."""

from __future__ import annotations

from typing import TypeAlias

from extproc.store.rules.chain import ChainLink
from extproc.store.rules.ring import Push
from extproc.store.rules.root import RootSearch

AnyPush: TypeAlias = Push | ChainLink | RootSearch
"""Answered with a ring's entries, a `Trail`, and a list of one root."""
