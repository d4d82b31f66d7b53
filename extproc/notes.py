"""Notes for a model, put behind the text of what a tool brought back: how one begins and ends, and how it is taken out again.

Its marks are plain ASCII that any serializer writes as it is, so it is recognised in the bytes of a body, however often they
were decoded and encoded since. It holds no quote, so it never reaches beyond the string at whose end it stands.
"""

from __future__ import annotations

from typing import Final

OPENING: Final = "[~loopguard~ Note from the gateway, not from the tool:"
CLOSING: Final = "~loopguard~]"

SEPARATOR: Final = "\n\n"
"""Stands before a note."""

PLACEHOLDERS: Final = ("what", "count", "tools", "instead", "reason", "policy")
"""What an operator's own text may leave to be filled in."""

_OPENING: Final = OPENING.encode()
_CLOSING: Final = CLOSING.encode()
_SEPARATOR: Final = b"\\n\\n"  # as JSON has it
_RARE: Final = 0x7E  # a tilde
"""Second in a note, and so rare elsewhere that looking for it alone, which is what processors are quickest at, is enough."""

_TRIES: Final = 64
"""So many of them that begin no note, and all of the mark is looked for: a body may hold nothing else."""

_ITEMS: Final = (
    (b'{"type":"text","text":"', b'"}'),
    (b'{"type":"input_text","text":"', b'"}'),
    (b'{"text":"', b'"}'),
    (b'"gateway_note":"', b'"'),
)
"""What stands around a note in an item that is there for nothing else; `similarity/shapes` writes these."""


def frame_note(text: str) -> str:
    """A text as a note."""
    plain = text.replace('"', "'").replace(chr(_RARE), "-").strip()
    return f"{SEPARATOR}{OPENING}\n{plain}\n{CLOSING}"


def ends_with_note(data: bytes | memoryview, end: int) -> bool:
    """Whether a note stands before a place in a body; its last mark alone is no note."""
    if data[max(0, end - len(_CLOSING)) : end] != _CLOSING:
        return False
    before = bytes(data[:end])
    return before.rfind(_OPENING) > before.rfind(b'"')


def cut_notes(data: bytes) -> bytes:
    """A body without notes, the one at hand where it has none."""
    if _RARE not in data:
        return data  # as nearly always
    start = _find_note(data, 0)
    if start < 0:
        return data
    kept = []
    done = 0
    while start >= 0:
        quote = data.find(b'"', start)
        if quote < 0:
            break
        end = data.find(_CLOSING, start, quote)
        if end < 0:
            start = _find_note(data, quote)
            continue
        first, last = _widen(data, data.rfind(_OPENING, start, end), end + len(_CLOSING))
        kept.append(data[done:first])
        done = last
        start = _find_note(data, done)
    kept.append(data[done:])
    return b"".join(kept)


def _find_note(data: bytes, start: int) -> int:
    """Where the next note begins, -1 where none does."""
    place = start
    for _ in range(_TRIES):
        place = data.find(_RARE, place + 1)
        if place <= 0 or data.startswith(_OPENING, place - 1):
            return place - 1 if place > 0 else -1
    return data.find(_OPENING, place)


def _widen(data: bytes, start: int, end: int) -> tuple[int, int]:
    """Where a note starts and ends together with what was put there for it."""
    if data.startswith(_SEPARATOR, max(0, start - len(_SEPARATOR))):
        start -= len(_SEPARATOR)
    for opening, closing in _ITEMS:
        if data.endswith(opening, 0, start) and data.startswith(closing, end):
            start, end = start - len(opening), end + len(closing)
            return start - data.startswith(b",", max(0, start - 1)), end
    return start, end
