"""Commands in the server's format: arrays of bulk strings (RESP, redis.io/docs/latest/develop/reference/protocol-spec).

hiredis can pack them, too, but word by word. Most words of a batch are keys, which can all be written as one text.
"""

from __future__ import annotations

from collections.abc import Sequence


def write_word(word: str | int | bytes) -> bytes:
    """One word of a command."""
    raw = word if isinstance(word, bytes) else str(word).encode()
    return b"$%d\r\n%b\r\n" % (len(raw), raw)


def write_keys(start: str, keys: Sequence[str]) -> bytes:
    """Keys as words of a command, each with a prefix."""
    width = len(start)
    size, head, words = -1, "", []
    for key in keys:
        if len(key) != size:  # most are as long as the previous one
            size = len(key)
            head = f"${width + size}\r\n{start}"
        words.append(f"{head}{key}\r\n")
    text = "".join(words)
    # Lengths are in bytes; only for ASCII are these as many as the characters.
    return text.encode() if text.isascii() else b"".join([write_word(start + key) for key in keys])
