"""Failing results that are alike: equal but for what changes by itself, and for numbers.

Numbers that say how much failed or passed are compared, and so are percentages: `3 failed` behind `4 failed` is progress.
"""

from __future__ import annotations

import re
from typing import Final

_NUMBERS_WITHIN = 3_000
"""Numbers are left out of so much of a result, in characters; a failure is told early."""

_OPENING = 96
"""So much of a result, without digits, has to be equal as it came, in characters: that tells most of them apart fast."""

_NO_DIGITS: Final = str.maketrans("", "", "0123456789")

_LABELS = ("attempt", "iteration", "job", "line", "request", "retry", "round", "run", "step", "task", "test", "try")
_BEHIND_LABEL = "|".join([rf"(?<={label}\ .)" for label in _LABELS])
_BEHIND_WORD = "".join(
    [rf"(?<!{word}{sign}.)" for word in ("ailures", "ailed", "rrors", "assed") for sign in (r":\ ", ":", "=", r'":\ ', '":')]
)
_WORDS = "(?:error|fail|pass|problem|issue|warning|violation)"

# In linear time: a match starts where digits do, and gives none of them back. What must stand before the first digit is looked
# back at from behind it, because the engine finds a digit fast, and looks back at every character slowly.
_NUMBERS = re.compile(
    rf"""
    [0-9](?<![0-9].)(?:
      {_BEHIND_WORD}[0-9]*+(?:\.[0-9]++)?+
      (?!\ ?%)
      (?!(?:\ ?/\ ?[0-9]{{1,9}}+|\ (?:out\ )?of\ [0-9]{{1,9}}+)?\ (?:[a-z]{{1,16}}\ )?{_WORDS})
    | (?:{_BEHIND_LABEL}|(?<=\#.))[0-9]*+
    )
    """,
    re.VERBOSE | re.IGNORECASE,
)


def open_result(text: str) -> str:
    """How a result begins, without digits."""
    return text[:_OPENING].translate(_NO_DIGITS)


def leave_out_numbers(text: str) -> str:
    """A text without the numbers that count nothing.

    >>> leave_out_numbers("try 7: 3 of 20 tests failed (45 %), code 12")
    'try : 3 of 20 tests failed (45 %), code '
    """
    return _NUMBERS.sub("", text[:_NUMBERS_WITHIN]) + text[_NUMBERS_WITHIN:]
