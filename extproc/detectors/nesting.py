"""Nested prompts: a program repeatedly puts a complaint before its own request: `Try again: Try again: ...`.

Takes linear time: of the places where the beginning of the text recurs, a bounded number is tried.
"""

from __future__ import annotations

from typing import Final

_SHORTEST: Final = 12
"""Minimum length of the repeated words, in characters; shorter ones may be a line of dashes, or laughter."""

_LEAST: Final = 3
_MOST: Final = 32
"""Minimum and maximum number of repetitions; more are deliberate padding."""

_TRIES: Final = 64


def count_nested(text: str) -> tuple[int, str]:
    """How many times in a row a text begins with the same words, and the words; 0 if it does not, or has no other words.

    >>> count_nested("That was no JSON. That was no JSON. That was no JSON. List the files.")
    (3, 'That was no JSON. ')
    """
    text = text.strip()
    size = text.find(text[:_SHORTEST], _SHORTEST) if len(text) > _LEAST * _SHORTEST else -1
    for _ in range(_TRIES):
        if size < 0 or _LEAST * size >= len(text):
            break
        words = text[:size]
        if text.startswith(words, size) and text.startswith(words, 2 * size):
            return _count(text, words)
        size = text.find(text[:_SHORTEST], size + 1)
    return 0, ""


def _count(text: str, words: str) -> tuple[int, str]:
    size, times = len(words), _LEAST
    while times <= _MOST and text.startswith(words, times * size):
        times += 1
    rest = text[times * size :].strip()
    letters = sum([letter.isalpha() for letter in words])
    padded = times > _MOST or not rest or words.startswith(rest) or 2 * letters < size
    short = any(text.startswith(words[step:] + words[:step]) for step in range(1, _SHORTEST))
    return (0, "") if padded or short else (times, words)
