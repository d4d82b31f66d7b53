"""Conversations that were read before: a client sends its history again with each request, longer by a turn.

What is known of a body is found by its bytes, in one pass over them. A conversation is looked up by everything up to the first
message of the assistant's. From there on its bytes are compared piece by piece, each by a hash, up to the first piece that is
not as it was. Only what follows is decoded.

The hash is Python's own (SipHash, with a key that each process draws at random), so nobody outside can make two pieces that are
taken for one another. What is kept of a message depends on its bytes alone, so it does not matter who sent it.
"""

from __future__ import annotations

import os
import re
from typing import Any, Final, TypeAlias

from extproc.bounded import Memo

KNOWS: Final = os.environ.get("PYTHONHASHSEED", "random") == "random"
"""Whether this process draws a key; with a given one, nothing is taken for known."""

LONGEST: Final = 256 * 2**10
"""Longest body that is known, in bytes; of longer ones, objects are counted first."""

_MOST_BYTES: Final = 24 * 2**20
"""In a generation."""

_MESSAGE_BYTES: Final = 600
"""What is kept of one, on average at most: half of them are the assistant's, and have up to two calls."""

_PIECE: Final = 2_048
_FINE: Final = 4
"""Pieces have this many bytes at least, but each of the newest messages is a piece, because clients change those."""

_SPACE: Final = re.compile(rb"[ \t\r\n]*")
_NEXT: Final = re.compile(rb"[ \t\r\n]*,[ \t\r\n]*")
_END: Final = re.compile(rb"[ \t\r\n]*\]")

Piece: TypeAlias = tuple[int, int, int]
"""Where it ends, its hash, and the number of messages up to there."""


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


_Key: TypeAlias = tuple[int, int, int]
"""Where the first message begins, where the first one of the assistant's does, and a hash of all up to there."""


def _measure(_: _Key, known: KnownConversation) -> int:
    return _MESSAGE_BYTES * len(known.messages)


_KNOWN: Final[Memo[_Key, KnownConversation]] = Memo(_MOST_BYTES, _measure)


class Place:
    """Where a body has its messages, and what is known of them.

    Attributes:
        key: where the key before them begins.
        start: where the first one begins.
        known: what an earlier body had at this place; None for nothing.
        count: this many of its messages are in this body as well.
        end: where the last of these ends.
    """

    __slots__ = ("_data", "_first", "_matched", "_name", "count", "end", "key", "known", "start")

    def __init__(self, data: bytes, key: int, start: int, first: int) -> None:
        """Look for the conversation; `first` is where the first message of the assistant's tells who speaks."""
        self._data = data
        self._first = first
        self.key = key
        self.start = self.end = start
        self.count = 0
        self._matched: list[Piece] = []
        view = memoryview(data)
        self._name = start, first, hash(view[:first])
        self.known = _KNOWN.get(self._name)
        if self.known is not None:
            at = first
            for piece in self.known.pieces:
                end, known_hash, count = piece
                if hash(view[at:end]) != known_hash:
                    break
                at = self.end = end
                self.count = count
                self._matched.append(piece)

    def cut_known(self, name: bytes) -> bytes:
        """The body without the messages that are known; the rest stands below another key, a JSON string."""
        data, at = self._data, self.end
        if self.count:
            found = _NEXT.match(data, at)
            at = found.end() if found is not None else at
        return b"%b%b:[%b" % (data[: self.key], name, data[at:])

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
            _KNOWN.take(self._name)
            if not messages and self.count == len(known.messages):  # it came again
                _KNOWN.put(self._name, known)
                return known
            messages = known.messages[: self.count] + messages
        made = KnownConversation(messages, self._cut(messages))
        _KNOWN.put(self._name, made)
        return made

    def _cut(self, messages: list[KnownMessage]) -> list[Piece]:
        """Pieces of all messages. Small ones that are no longer among the newest are joined."""
        view, at, count, pieces = memoryview(self._data), self._first, 0, []
        for piece in self._matched:
            if piece[0] - at < _PIECE:
                break
            pieces.append(piece)
            at, count = piece[0], piece[2]
        for number in range(count, len(messages)):
            end = messages[number].end
            if end > at and (end - at >= _PIECE or number >= len(messages) - _FINE):
                pieces.append((end, hash(view[at:end]), number + 1))
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
