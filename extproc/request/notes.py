"""Notes for a model, appended to tool results: how they are written, recognized and removed.

Answers in the model's place, which explain refusals, are written and recognized in the same way.

A note ends in a mark that others cannot forge: 64 bits of a keyed hash (BLAKE2b) of the caller, the
user's first words in the conversation, and the note's own text. Text with any other mark is not a
note, and stays unchanged. A copy of a note hides only itself.

The frame of a note is plain ASCII that all serializers write unchanged, so it can be found in the
bytes of a body, even after the body was decoded and encoded again. The text is compared in decoded
form. It contains no quote and no backslash, so a note never extends beyond the string that it ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from hashlib import blake2b
from hmac import compare_digest
from json.encoder import encode_basestring_ascii
from typing import Final

from msgspec import json

from extproc.request.hash_key import HashKey

OPENING: Final = "[~loopguard~ Note from the gateway, not from the tool:"
ANSWER: Final = "[~loopguard~ Answer from the gateway, not from the model:"
CLOSING: Final = "~loopguard:"
END: Final = "~]"
"""A note is OPENING (for an answer:

ANSWER), the text, CLOSING, the mark in 16 hex digits, and END.
"""

_SEPARATOR: Final = "\n\n"
WRITTEN_SEPARATOR: Final = rb"\n\n"
"""Separates a note from the text before it; also as written in a JSON string."""

PLACEHOLDERS: Final = ("what", "count", "tools", "instead", "reason", "policy", "cause")
"""Placeholders in an operator's template."""

_PURPOSE: Final = b"note"
_MARK_BYTES: Final = 8
_LONGEST: Final = 4_000
"""Maximum length of a note's text, in characters."""

_LONGEST_WRITTEN: Final = 65_536
"""Maximum length of the text in bytes, even if it is escaped several times."""

_MOST_NOTES: Final = 200
_MOST_WRITTEN: Final = 262_144
"""Maximum number of marks, and of bytes of notes, to check in one body, from its end. Others count
as content."""

_MOST_CALLERS: Final = 8
_MOST_LEVELS: Final = 4
"""Maximum number of levels at which a body may be a string in another one."""

_OPENING: Final = OPENING.encode()
_ANSWER: Final = ANSWER.encode()
_CLOSING: Final = CLOSING.encode()
_ANY_OPENING: Final = b"[~loopguard~ "
_END: Final = END.encode()
RARE: Final = 0x7E  # a tilde
"""The second character of a note. It is rare elsewhere, and searching for one byte is fastest, so
this usually decides."""

_TRIES: Final = 64
"""After this many of them without a note, search for the whole opening: a body may be full of
tildes."""

_OPENINGS: Final = f"(?:{re.escape(OPENING)}|{re.escape(ANSWER)})"
_FORM: Final = (
    f'{_OPENINGS}([^"~]{{1,{_LONGEST_WRITTEN}}}+)'
    f"{CLOSING}([0-9a-f]{{{2 * _MARK_BYTES}}}){re.escape(END)}"
)
_WRITTEN: Final = re.compile(_FORM.encode())
_SAID: Final = re.compile(_FORM.replace("([", "(?:["))
_ORDINARY: Final = b"\n" + bytes(range(0x20, 0x7F))
_OPEN: Final = "\u201c".encode()
_CLOSE: Final = "\u201d".encode()
_QUOTED: Final = _OPEN + _CLOSE
"""Non-ASCII characters of most notes: one quotation."""

_LAST_DIGITS: Final = bytes.maketrans(b"\x9c\x9d", b"cd")
"""Maps the last byte of these quotes (E2 80 9C, E2 80 9D) to the last digit of their escapes (201C,
201D)."""

_ODD: Final = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

# An item, or a member of an object, that exists only for the note, as `add_notes` writes it or a
# client rewrites it. It has no separator before the note.
_TYPE: Final = rb'"type"\s*+:\s*+"(?:input_)?text"\s*+'
_BEFORE: Final = re.compile(
    rb'(,\s*+)?(\{\s*+(?:%b,\s*+)?"text"|"(?:content|gateway_note_*+)")\s*+:\s*+"\Z' % _TYPE,
    re.DOTALL,
)
_BEHIND_ITEM: Final = re.compile(rb'"\s*+(?:,\s*+%b)?\}' % _TYPE)
_BEHIND_MEMBER: Final = re.compile(rb'"')
_NEXT: Final = re.compile(rb"\s*+,\s*+")
_LONGEST_BEFORE: Final = 2_048

_decode_text = json.Decoder(str).decode


class Marks:
    """Makes and verifies the marks of notes in one conversation."""

    def __init__(self, key: HashKey, callers: Sequence[str], said: bytes) -> None:
        """Prepare the hashes.

        Args:
            key: the key shared by all processes that verify the marks.
            callers: callers, as policies identify them by a request's head; notes are made for the
                first.
            said: the hash of the user's first words in the conversation; see `hash_words`.
        """
        self._hashes = [_start(key, caller, said) for caller in callers[:_MOST_CALLERS]]

    def make(self, text: bytes, *, answer: bool = False) -> str:
        """The mark of a note or answer with this text, in UTF-8."""
        mark = self._hashes[0].copy()
        mark.update(_hash_as(text, answer=answer))
        return mark.hexdigest()

    def knows(self, written: bytes, mark: bytes, *, answer: bool = False) -> bool:
        """Whether a mark is that of a note or answer.

        Args:
            written: its text, as in JSON.
            mark: 16 hex digits.
            answer: it is written as an answer.
        """
        text = _read_text(written)
        if text is None:
            return False
        text = _hash_as(text, answer=answer)
        for known in self._hashes:
            made = known.copy()
            made.update(text)
            if compare_digest(made.hexdigest().encode(), mark):
                return True
        return False


def _hash_as(text: bytes, *, answer: bool) -> bytes:
    """The input of the hash.

    A note's text begins with a line end, so it never equals an answer's.
    """
    return _ANSWER + text if answer else text


def hash_words(first_words: str) -> bytes:
    """A hash of the user's first words in a conversation, for its marks."""
    return blake2b(
        _leave_out_notes(first_words).encode("utf-8", "surrogatepass"), digest_size=16
    ).digest()


def _leave_out_notes(text: str) -> str:
    """Remove anything that looks like a note, because the input of marks cannot depend on marks."""
    if OPENING not in text and ANSWER not in text:
        return text
    *pieces, last = _SAID.split(text)
    return "".join([piece.removesuffix(_SEPARATOR) for piece in pieces]) + last


def read_around(text: str) -> str:
    """The text around a note or answer; the whole text if there is none, or several."""
    pieces = _SAID.split(text, 2)
    # Before and behind
    return "".join(pieces).strip() if len(pieces) == 2 else text  # noqa: PLR2004


def _start(key: HashKey, caller: str, said: bytes) -> blake2b:
    started = key.start(_PURPOSE, _MARK_BYTES)
    name = caller.encode("utf-8", "surrogatepass")
    started.update(len(name).to_bytes(8, "little") + name + said)
    return started


def _read_text(written: bytes) -> bytes | None:
    """Unescape a text repeatedly; None if it is not JSON, or escaped over `_MOST_LEVELS` times."""
    for _ in range(_MOST_LEVELS):
        try:
            written = _decode_text(b'"%b"' % written).encode()
        except ValueError:  # errors of msgspec and Unicode are ValueErrors
            return None
        if b"\\" not in written:
            return written
    return None


def frame_note(text: str, marks: Marks) -> bytes:
    """Write a text as a note in a JSON string, in ASCII, as Python's `json` does."""
    plain, raw, usual = _write_plain(text)
    if usual:  # takes a third of the time
        written = (
            raw.replace(b"\n", rb"\n").replace(b"\xe2", rb"\u201").translate(_LAST_DIGITS, b"\x80")
        )
    else:
        written = encode_basestring_ascii(plain)[1:-1].encode()
    return b"".join([_OPENING, written, _CLOSING, marks.make(raw).encode(), _END])


def frame_answer(text: str, marks: Marks) -> str:
    """Write a text as an answer in the model's place."""
    plain, raw, _ = _write_plain(text)
    return f"{ANSWER}{plain}{CLOSING}{marks.make(raw, answer=True)}{END}"


def _write_plain(text: str) -> tuple[str, bytes, bool]:
    """A text without characters that JSON escapes, except line ends.

    Returns the text, the same in UTF-8, and whether all its characters are usual.
    """
    # `translate` is ten times slower for non-ASCII text.
    plain = (
        "\n"
        + text.strip()[:_LONGEST].replace('"', "'").replace("\\", "/").replace(chr(RARE), "-")
        + "\n"
    )
    raw = plain.encode("utf-8", "surrogatepass")  # only once: slow for non-ASCII text
    left = raw.translate(None, _ORDINARY)
    usual = not left or left == _QUOTED or not left.replace(_OPEN, b"").replace(_CLOSE, b"")
    if not usual:
        plain = _ODD.sub(" ", plain)
        raw = plain.encode()
    return plain, raw, usual


def ends_with_note(data: bytes, end: int, marks: Marks) -> bool:
    """Whether one of these notes ends at this offset of a body."""
    if not data.endswith(_END, 0, end):
        return False
    start = data.rfind(_OPENING, max(0, end - _LONGEST_WRITTEN), end)
    found = _WRITTEN.match(data, start, end) if start >= 0 else None
    return found is not None and found.end() == end and marks.knows(found[1], found[2])


def _find_notes(data: bytes, open_marks: Callable[[], Marks | None]) -> list[re.Match[bytes]]:
    """All notes and answers in a body, last first."""
    first = _find_opening(data)
    written = _list_written(data, first) if first >= 0 else []
    marks = open_marks() if written else None
    if marks is None:
        return []
    return [note for note in written if marks.knows(note[1], note[2], answer=_is_answer(note))]


def _is_answer(note: re.Match[bytes]) -> bool:
    return note.string.startswith(_ANSWER, note.start())


def quotes_answer(part: bytes, answers: frozenset[bytes]) -> bool:
    """Whether a part of a body contains one of these answers; in linear time for any content."""
    place = part.find(_ANSWER)
    while place >= 0:
        found = _WRITTEN.match(part, place)
        if found is not None and found[0] in answers:
            return True
        place = part.find(_ANSWER, place + 1)
    return False


def cut_notes(
    data: bytes,
    open_marks: Callable[[], Marks | None],
    leave_out: Callable[[bytes, frozenset[bytes]], bytes] | None = None,
) -> bytes:
    """Remove all notes and answers from a body; returns the same object if it has none.

    Args:
        data: the body.
        open_marks: called if something looks like a note; returns None if no note can be verified.
        leave_out: called first with the body and its answers, as written, to remove whole messages.
    """
    notes = _find_notes(data, open_marks)
    answers = frozenset([note[0] for note in notes if _is_answer(note)])
    if answers and leave_out is not None:
        data = leave_out(data, answers)
        notes = _find_notes(data, open_marks)
    if not notes:
        return data
    whole, end = memoryview(data), len(data)
    kept: list[memoryview] = []
    for note in notes:
        first, last = _widen(data, note.start(), note.end())
        kept.append(whole[last:end])
        end = first
    kept.append(whole[:end])
    return b"".join(kept[::-1])


def _find_opening(data: bytes) -> int:
    """The offset at which the first note may begin; -1 if there is none."""
    place = 0
    for _ in range(_TRIES):
        place = data.find(RARE, place + 1)
        if place <= 0 or data.startswith(_ANY_OPENING, place - 1):
            return place - 1 if place > 0 else -1
    return data.find(_ANY_OPENING, place)


def _list_written(data: bytes, first: int) -> list[re.Match[bytes]]:
    """Everything that looks like a note, last first, within the bounds.

    The first may begin at the offset `first`.
    """
    found: list[re.Match[bytes]] = []
    place, left = len(data), _MOST_WRITTEN
    for _ in range(_MOST_NOTES):
        behind, place = place, data.rfind(_ANY_OPENING, first, place)
        if place < 0:
            break
        most = min(behind, place + _LONGEST_WRITTEN)
        quote = data.find(b'"', place, most)
        end = quote if quote >= 0 else most
        left -= end - place
        if left < 0:
            break
        note = _WRITTEN.match(data, place, end)
        if note is not None:
            found.append(note)
    return found


def _widen(data: bytes, start: int, end: int) -> tuple[int, int]:
    """The start and end of a note, including its separator or the item added for it."""
    if data.endswith(WRITTEN_SEPARATOR, 0, start):
        return start - len(WRITTEN_SEPARATOR), end
    before = (
        _BEFORE.search(data, max(0, start - _LONGEST_BEFORE), start)
        if data.endswith(b'"', 0, start)
        else None
    )
    if before is None:
        return start, end
    behind = (_BEHIND_ITEM if before[2].startswith(b"{") else _BEHIND_MEMBER).match(data, end)
    if behind is None:
        return start, end
    following = _NEXT.match(data, behind.end()) if before[1] is None else None
    return before.start(), following.end() if following is not None else behind.end()
