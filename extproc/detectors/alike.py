"""Similar texts: equal except for case and white space or, for failed results, except for numbers.

Numbers of failures and passes are compared, and so are percentages: `3 failed` after `4 failed` is
progress.
"""

from __future__ import annotations

import re
from typing import Final

from extproc.detectors.shapes import DIGIT, LONGEST_SHAPE, Stays, write_shapes

_LONG: Final = 16_384
"""Texts of at least this length, in bytes, are not split into words."""

_ASCII_SPACE: Final = bytes(range(9, 14)) + bytes(range(28, 32))
_OTHER_SPACES: Final = (
    "\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
_FOLDED: Final = bytes.maketrans(
    _ASCII_SPACE + bytes(range(ord("A"), ord("Z") + 1)),
    b" " * len(_ASCII_SPACE) + bytes(range(ord("a"), ord("z") + 1)),
)

_NUMBERS_WITHIN: Final = 3_000
"""Only the first characters of a result lose their numbers; failures are reported early."""

_OPENING: Final = 96
"""Number of first characters to compare, without digits: a quick check that excludes most."""

_DIGITS: Final = b"0123456789"

_LABELS: Final = (
    "attempt",
    "iteration",
    "job",
    "line",
    "request",
    "retry",
    "round",
    "run",
    "step",
    "task",
    "test",
    "try",
)
_BEHIND_LABEL: Final = "|".join([rf"(?<={label}\ .)" for label in _LABELS])
_BEHIND_WORD: Final = "".join(
    [
        rf"(?<!{word}{sign}.)"
        for word in ("ailures", "ailed", "rrors", "assed")
        for sign in (r":\ ", ":", "=", r'":\ ', '":')
    ]
)
_WORDS: Final = "(?:error|fail|pass|problem|issue|warning|violation)"

# Takes linear time: a match starts with the first digit of a number and is possessive. Lookbehinds
# come after that digit, because the engine finds digits fast, but would be slow to look back at
# every character. Before these, they look at the one character that all of them need.
_NUMBERS: Final = re.compile(
    rf"""
    [0-9](?<![0-9].)(?:
      (?>(?<![:=].)(?<!:\ .)|(?i:{_BEHIND_WORD}))[0-9]*+(?:\.[0-9]++)?+
      (?!\ ?%)
      (?!(?=[\ /])(?i:
        (?:\ ?/\ ?[0-9]{{1,9}}+|\ (?:out\ )?of\ [0-9]{{1,9}}+)?\ (?:[a-z]{{1,16}}\ )?{_WORDS}
      ))
    | (?:(?<=\#.)|(?i:(?<=[a-z]\ .)(?:{_BEHIND_LABEL})))[0-9]*+
    )
    """,
    re.VERBOSE,
)

_STAYS: Final = Stays(_NUMBERS)


def fold(text: str) -> bytes:
    """A text in lower case, with each run of white space as one blank, and trimmed."""
    if not text.isascii():
        for space in _OTHER_SPACES:
            if space in text:
                text = text.replace(space, " ")
        text = str.lower(text)  # mypyc's own text.lower() knows no final sigma before Python 3.13
    folded = text.encode().translate(_FOLDED)
    if folded.find(b"  ") < 0:  # slower than all of the above
        return folded.strip(b" ")
    if len(folded) < _LONG:
        return b" ".join(folded.split())
    while b"  " in folded:  # bounded: splitting a megabyte of words would take 50 ms
        folded = folded.replace(b"  ", b" ")
    return folded.strip(b" ")


def open_result(text: str) -> str:
    """The start of a result without digits, of constant length even if its numbers grow."""
    return text[: 2 * _OPENING].encode().translate(None, _DIGITS).decode()[:_OPENING]


def leave_out_numbers(text: str) -> str:
    """A text without numbers, except those of failures or passes, and percentages.

    >>> leave_out_numbers("try 7: 3 of 20 tests failed (45 %), code 12")
    'try : 3 of 20 tests failed (45 %), code '
    """
    start, rest = text[:_NUMBERS_WITHIN], text[_NUMBERS_WITHIN:]
    lines: list[str] = []
    for line, shape in zip(start.split("\n"), write_shapes(start).split("\n"), strict=True):
        take = DIGIT in shape and (
            len(shape) > LONGEST_SHAPE or not line.isascii() or _STAYS.find(shape)
        )
        if take is True:
            lines.append(_NUMBERS.sub("", line))
        else:
            lines.append("".join(take(line)) if take else line)
    return "\n".join(lines) + rest
