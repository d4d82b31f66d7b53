"""Removes parts of lines that a pattern finds, once for all lines of a shape.

The shape of a line has a 0 for each digit. Tools repeatedly write the same lines with other numbers, and a search takes much
longer than cutting a line in known places. The pattern has to take all digits alike, and look at nothing beyond its line.
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
"""Bounds of each cache: characters of a shape, shapes in each of two generations, and parts of a line. A shape takes up to
3 KB, a cache up to 25 MB even under attack. Without it, the benchmark's row "a log, normalized vs. split into lines" takes 13
times as long."""

_DIGITS: Final = bytes.maketrans(b"123456789", DIGIT.encode() * 9)

Take: TypeAlias = Callable[[str], Iterable[str]] | bool
"""Takes the parts between those that the pattern finds from a line. False if it finds none, True if the shape does not tell."""


def write_shapes(text: str) -> str:
    """The shapes of a text's lines, of the same lengths; only ASCII is told apart."""
    return text.encode("latin-1", "replace").translate(_DIGITS).decode("latin-1")


class Stays:
    """What stays of lines, by their shapes."""

    def __init__(self, pattern: re.Pattern[str], unless: str = "") -> None:
        """Take a pattern; the shape of lines with `unless` in it does not tell what the pattern finds."""
        self._pattern = pattern
        self._unless = unless
        self._known: Memo[str, Take] = Memo(_MOST_SHAPES)

    def find(self, shape: str) -> Take:
        """What to take from lines of a shape, which is no longer than `LONGEST_SHAPE`."""
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
