"""Removes matches of a pattern from lines, searching once for all lines of a shape.

The shape of a line has a 0 for each digit. Tools write the same lines with other numbers again and
again, and a search takes much longer than cutting a line at known places. The pattern must treat
all digits alike, and not look beyond its line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Final, TypeAlias

from extproc.bounded import Memo

DIGIT: Final = "0"
"""Stands for each digit in a shape."""

LONGEST_SHAPE: Final = 512
_MOST_SHAPES: Final = 4_096
_MOST_STAYS: Final = 16
"""Limits of each cache: characters of a shape, shapes per generation, and parts of a line. A shape
takes up to 3 KB, a cache up to 25 MB even under attack. Without the cache, the benchmark's row "a
log, normalized vs. split into lines" takes 13 times as long."""

_DIGITS: Final = bytes.maketrans(b"123456789", DIGIT.encode() * 9)

Take: TypeAlias = Callable[[str], Iterable[str]] | bool
"""Returns the parts of a line between matches. False if there are no matches, True if the shape
does not determine them."""


def write_shapes(text: str) -> str:
    """The shapes of a text's lines, of the same lengths; characters beyond ASCII become `?`."""
    return text.encode("latin-1", "replace").translate(_DIGITS).decode("latin-1")


class Stays:
    """For each shape, the parts of its lines that no match covers."""

    def __init__(self, pattern: re.Pattern[str], unless: str = "") -> None:
        """If `unless` is in a shape, the shape does not determine the matches."""
        self._pattern = pattern
        self._unless = unless
        self._known: Memo[str, Take] = Memo(_MOST_SHAPES)

    def find(self, shape: str) -> Take:
        """How to cut matches from lines of a shape of at most `LONGEST_SHAPE` characters."""
        known = self._known.get(shape)
        if known is not None:
            return known
        if self._unless and self._unless in shape:
            self._known.put(shape, True)
            return True
        places = [0]
        for found in self._pattern.finditer(shape):
            places += found.span()
        places.append(len(shape))
        stays = [slice(start, end) for start, end in zip(places[::2], places[1::2], strict=True)]
        take: Take = itemgetter(*stays) if len(stays) > 1 else False
        if len(stays) <= _MOST_STAYS:
            self._known.put(shape, take)
        return take
