"""The place of a request in its conversation, by what it shows: what the user said first, and all that the assistant did since.

An assistant message counts with its text and its calls. Ids, thoughts and results say nothing here: clients make ids anew, and
cut thoughts and results out of older messages. Messages that the assistant sends one after the other are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final

from msgspec import json

from extproc.apis import open_conversation
from extproc.apis.contents import read_arguments, unpack
from extproc.apis.conversation import ASSISTANT, USER, Conversation, Shape
from extproc.apis.messages import CALL, TEXT, Part
from extproc.bounded import Memo
from extproc.detectors.actions import cut_thinking
from extproc.request.document import Document, NotCounted, start_looking, write_canonical

_ID: Final = 16
_MOST_SHOWN: Final = 2_000
"""Assistant messages of a request; more are no conversation that is followed."""

_MOST_KNOWN: Final = 8_192
_LONGEST_KEY: Final = 512
"""This many messages are in a generation of those whose hashes are known, longer ones by a hash: in 12 MB under attack."""

_SEPARATOR: Final = b"\xff"  # never in UTF-8
_SUFFIX: Final = b"suffix"
_encode: Final = json.Encoder().encode

_KNOWN: Final[Memo[bytes, bytes]] = Memo(_MOST_KNOWN)
"""Hashes of messages, by those of their bytes: a history comes again with each request."""


class ChainPlace:
    """Where a request stands; each but `depth` a hash of 16 bytes, empty where there is none.

    Attributes:
        node: all that it shows.
        parent: the same without the newest assistant message.
        own: its last two assistant messages.
        before: the last two of its parent.
        first: what the user said first.
        depth: the number of assistant messages.
    """

    __slots__ = ("before", "depth", "first", "node", "own", "parent")

    def __init__(self, first_words: bytes, shown: Sequence[bytes]) -> None:
        """Take the hashes of what the user said first, and of the assistant's messages, the oldest first."""
        self.first = first_words
        self.depth = count = len(shown)
        way = first_words + b"".join(shown)
        self.node = _hash(way)
        self.parent = _hash(way[:-_ID]) if count else b""
        self.own = _hash(_SUFFIX + way[-2 * _ID :]) if count > 1 else b""
        self.before = _hash(_SUFFIX + way[-3 * _ID : -_ID]) if count > 2 else b""  # noqa: PLR2004  # two and the newest

    def identify(self, kind: int) -> bytes:
        """8 bytes that tell the request, which is of one of 256 kinds, from others of its conversation."""
        return bytes((kind,)) + self.node[9:]


def find_place(conversation: Conversation, *, prefilled: bool) -> ChainPlace | None:
    """Where a request stands; None where what it shows cannot be read, or is too much.

    Args:
        conversation: that it shows.
        prefilled: the newest message is how the model is to begin its answer.
    """
    shape = conversation.shape
    try:
        first, turns = conversation.list_turns(USER, ASSISTANT)
        if prefilled:
            turns.pop()
        if len(turns) > _MOST_SHOWN:
            return None
        words = _hash_message(shape, first, b"user") if first is not None else b""
        return ChainPlace(words, [_hash_turn(shape, turn) for turn in turns])
    except NotCounted:
        return None
    finally:
        start_looking()  # as it is where all of them were known


def read_place(document: Document) -> ChainPlace | None:
    """The same for a body; None also where it shows no conversation, or the server keeps what was before."""
    try:
        conversation = open_conversation(document)
        return None if conversation.elsewhere else find_place(conversation, prefilled=conversation.is_prefilled())
    except NotCounted:
        return None


def _hash_turn(shape: Shape, messages: Sequence[Any]) -> bytes:
    if len(messages) == 1:
        return _hash_message(shape, messages[0], b"")
    return _hash(b"".join([_hash_message(shape, message, b"") for message in messages]))


def _hash_message(shape: Shape, message: Any, speaker: bytes) -> bytes:  # noqa: ANN401  # of the shape's
    """What a message says and calls.

    Raises:
        NotCounted: it cannot be read, or is too much.
    """
    raw = _encode(message) + speaker
    if len(raw) > _LONGEST_KEY:
        raw = _hash(raw)
    found = _KNOWN.get(raw)
    if found is None:
        start_looking()  # with bounds of its own, so that it does not depend on what was seen before
        spelled = [_spell(part) for part in shape.read(message) if part.kind in (TEXT, CALL)]
        found = _hash(_SEPARATOR.join([part for part in spelled if part]))
        _KNOWN.put(raw, found)
    return found


def _spell(part: Part) -> bytes:
    if part.kind == CALL:
        return part.name.encode() + _SEPARATOR + write_canonical(read_arguments(part.value))
    value = unpack(part.value)
    return cut_thinking(value).strip().encode() if isinstance(value, str) else write_canonical(value)


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=_ID).digest()
