"""How many examples a property is tried with."""

from __future__ import annotations

from hypothesis import settings


def examples(number: int) -> int:
    """As many, where others get a hundred; in proportion where they get fewer."""
    return max(1, number * settings().max_examples // 100)
