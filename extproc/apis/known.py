"""Conversations that were read before: a client sends its history again with each request, longer by a turn.

What is known of a body is found by its bytes. A conversation is looked up by everything up to the first message of the
assistant's. From there on its bytes are compared piece by piece, up to the first piece that is not as it was. Only what follows
is decoded. What is kept of a message depends on its bytes alone, so it does not matter who sent it.
"""

from __future__ import annotations

import re
from typing import Any, Final, TypeAlias

from extproc.bounded import Memo

LONGEST: Final = 256 * 2**10
"""Longest body that is known, in bytes; of longer ones, objects are counted first."""

_MOST_BYTES: Final = 32 * 2**20
"""In a generation."""

_MESSAGE_BYTES: Final = 600
"""What is kept of one beside its bytes. Half of them are the assistant's, which take twice as much with two calls."""

_PIECE: Final = 2_048
_FINE: Final = 4
"""Pieces have this many bytes at least, but each of the newest messages is a piece, because clients change those."""

_NEXT: Final = re.compile(rb"[ \t\r\n]*,[ \t\r\n]*")
_END: Final = re.compile(rb"[ \t\r\n]*\]")

Piece: TypeAlias = tuple[int, bytes, int]
"""Where it ends, its bytes, and the number of messages up to there."""


class KnownMessage:
    """One message, without its contents.

    Attributes:
        start: where it begins in the body.
        end: where the next byte is.
        speaker: who says it.
        shown: what it shows to `chain.py`; None if not known.
        action: what it does, as `turn.py` reads it; None if not known.
    """

    __slots__ = ("action", "end", "shown", "speaker", "start")

    def __init__(self, start: int, end: int, speaker: str) -> None:
        self.start = start
        self.end = end
        self.speaker = speaker
        self.shown: Any = None
        self.action: Any = None


class KnownConversation:
    """The messages of a body, which others may go on from.

    Attributes:
        messages: the oldest first.
        pieces: of the bytes from the first message of the assistant's to the end of the newest message.
        transcript: what they show together, as `chain.py` reads it; None if not known.
    """

    __slots__ = ("messages", "pieces", "transcript")

    def __init__(self, messages: list[KnownMessage], pieces: list[Piece]) -> None:
        self.messages = messages
        self.pieces = pieces
        self.transcript: Any = None


def _measure(head: bytes, known: KnownConversation) -> int:
    return len(head) + (known.pieces[-1][0] if known.pieces else 0) + _MESSAGE_BYTES * len(known.messages)


_KNOWN: Final[Memo[bytes, KnownConversation]] = Memo(_MOST_BYTES, _measure)
"""By everything up to the first message of the assistant's."""


class Place:
    """Where a body has its messages, and what is known of them.

    Attributes:
        key: where the key before them begins.
        known: what an earlier body had at this place; None for nothing.
        count: this many of its messages are in this body as well.
        end: where the last of these ends.
    """

    __slots__ = ("_data", "_first", "_head", "_matched", "count", "end", "key", "known")

    def __init__(self, data: bytes, key: int, start: int, first: int) -> None:
        """Look for the conversation; `first` is where the first message of the assistant's tells who speaks."""
        self._data = data
        self._first = first
        self.key = key
        self.end = start
        self.count = 0
        self._matched: list[Piece] = []
        self._head = data[:first]
        self.known = _KNOWN.get(self._head)
        if self.known is not None:
            at = first
            for piece in self.known.pieces:
                if not data.startswith(piece[1], at):
                    break
                at = self.end = piece[0]
                self.count = piece[2]
                self._matched.append(piece)

    def cut_known(self, name: bytes) -> bytes:
        """The body without the messages that are known; the rest stands below another key, a JSON string."""
        view, at = memoryview(self._data), self.end
        if self.count:
            found = _NEXT.match(self._data, at)
            at = found.end() if found is not None else at
        return b"".join([view[: self.key], name, b":[", view[at:]])

    def remember(self, raws: list[Any], speakers: list[str]) -> KnownConversation | None:
        """Keep all messages, given the new ones in order; None if they are not where they were looked for."""
        data, at, messages = self._data, self.end, []
        for number, raw in enumerate(raws):
            if number or self.count:
                found = _NEXT.match(data, at)
                if found is None:
                    return None
                at = found.end()
            part = bytes(raw)
            if not data.startswith(part, at):
                return None
            messages.append(KnownMessage(at, at + len(part), speakers[number]))
            at += len(part)
        if _END.match(data, at) is None:
            return None
        known = self.known
        if known is not None:
            _KNOWN.take(self._head)
            if not messages and self.count == len(known.messages):  # it came again
                _KNOWN.put(self._head, known)
                return known
            messages = known.messages[: self.count] + messages
        made = KnownConversation(messages, self._cut(messages))
        _KNOWN.put(self._head, made)
        return made

    def _cut(self, messages: list[KnownMessage]) -> list[Piece]:
        """Pieces of all messages. Small ones that are no longer among the newest are joined."""
        at, count, pieces = self._first, 0, list[Piece]()
        for piece in self._matched:
            if piece[0] - at < _PIECE:
                break
            pieces.append(piece)
            at, count = piece[0], piece[2]
        for number in range(count, len(messages)):
            end = messages[number].end
            if end > at and (end - at >= _PIECE or number >= len(messages) - _FINE):
                pieces.append((end, self._data[at:end], number + 1))
                at = end
        return pieces


def find_place(data: bytes, key: bytes, opens: re.Pattern[bytes], mark: bytes) -> Place | None:
    """Where a body may have messages; None where that is not clear, or none is the assistant's.

    Args:
        data: the body.
        key: of the messages, as a JSON string.
        opens: that key, and what follows up to the first message.
        mark: what each message of the assistant's has in it, outside of its texts.
    """
    at = data.find(key)
    found = opens.match(data, at) if at >= 0 else None
    if found is None:
        return None
    first = data.find(mark, found.end())
    return Place(data, at, found.end(), first) if first >= 0 else None
