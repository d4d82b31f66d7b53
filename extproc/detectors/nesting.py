"""Prompts that contain their own repetition.

- Nested: a program repeatedly puts a complaint before its own request: `Try again: Try again: ...`.
- Repeated ending: the text ends with the same step several times.

Both take linear time: the number of places and lines to compare is bounded.
"""

from __future__ import annotations

from typing import Final

_SHORTEST: Final = 12
"""Minimum length of the repeated words, in characters; shorter ones may be a line of dashes, or
laughter."""

_LEAST: Final = 3
_MOST: Final = 32
"""Minimum and maximum number of repetitions; more are deliberate padding."""

_TRIES: Final = 64

_SHORTEST_BLOCK: Final = 30
"""Minimum length of a repeated block at the end of a text, in bytes. Several shorter ones count as
one."""

_MOST_LINES: Final = 256
_MOST_BEHIND: Final = 8
"""Maximum number of lines to read, and of lines after the last block."""

_DIGITS: Final = b"0123456789"
_DATA: Final = _DIGITS + b"{}[]()<>|,\"'"
"""Characters with which lines of data begin."""


def count_nested(text: str) -> tuple[int, str]:
    """How many times in a row a text begins with the same words, and the words.

    0 if there are no other words.

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


def count_endings(text: str, least: int) -> tuple[int, bytes]:
    r"""Count how many times in a row a text ends with the same step of at least two lines.

    Numbers and empty lines are ignored. Up to eight other lines may follow the last step. Steps in
    a quoted block are not counted, nor are lines of data, such as those of a log or a table.

    Returns:
        The number and the step; 0 and nothing if the number is below `least`.

    >>> count_endings("List files.\n" + "Action: list_files\nResult: error after 3 s\n" * 4 + "What
        is next?", 4)
    (4, b'Action: list_files\nResult: error after  s')
    """
    if len(text) < least * _SHORTEST_BLOCK:
        return 0, b""
    newest = text.encode("utf-8", "replace").rsplit(b"\n", _MOST_LINES)[-_MOST_LINES:]
    lines = [stripped for line in newest if (stripped := line.strip())]
    plain = [line.translate(None, _DIGITS) for line in lines]
    for end in range(len(plain), max(0, len(plain) - _MOST_BEHIND - 1), -1):
        if sum([line.startswith(b"```") for line in lines[end:]]) % 2:
            continue
        last = plain[end - 1]
        alike = next((place for place in range(1, end) if plain[end - 1 - place] != last), end)
        # A shorter block is one line, again and again
        for size in range(alike + 1, end // least + 1):
            if plain[end - 1 - size] != last:
                continue
            block, times = plain[end - size : end], 1
            while plain[end - size * (times + 1) : end - size * times] == block:
                times += 1
            times //= -(-_SHORTEST_BLOCK // sum([len(line) for line in block]))
            if times >= least and not all(line[:1] in _DATA for line in lines[end - size : end]):
                return times, b"\n".join(block)
    return 0, b""


def _count(text: str, words: str) -> tuple[int, str]:
    size, times = len(words), _LEAST
    while times <= _MOST and text.startswith(words, times * size):
        times += 1
    rest = text[times * size :].strip()
    letters = sum([letter.isalpha() for letter in words])
    padded = times > _MOST or not rest or words.startswith(rest) or 2 * letters < size
    short = any(text.startswith(words[step:] + words[:step]) for step in range(1, _SHORTEST))
    return (0, "") if padded or short else (times, words)
