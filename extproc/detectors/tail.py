"""Similarity `tail`: the model and the last messages of a conversation, by role, text, tool names, arguments and results.

What a tool brought back is compared together with what it was asked, also where the call itself is further back.

An agent appends every turn to its history, so whole bodies are almost never equal; one that is stuck ends its requests the same
way all the same. Text is compared without the space around it, in lower case, each run of white space as one space.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import ClassVar

from extproc.apis import open_conversation
from extproc.apis.contents import name_other, read_arguments, read_result, unpack
from extproc.apis.messages import CALL, OTHER, RESULT, TEXT, Message, Part
from extproc.detectors.base import Similarity
from extproc.detectors.keys import SimilarityKeys, TailKeys
from extproc.objects import JsonObject
from extproc.request.document import ABSENT, Document, NotCounted, write_canonical

# What UTF-8 never contains separates what is joined, so that different things never look alike.
_NEXT_PART = b"\xff"
_NEXT_MESSAGE = b"\xfe"

_LONG = 16_384
_ASCII_SPACE = bytes(range(9, 14)) + bytes(range(28, 32))
_OTHER_SPACES = "\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
_FOLDED = bytes.maketrans(
    _ASCII_SPACE + bytes(range(ord("A"), ord("Z") + 1)), b" " * len(_ASCII_SPACE) + bytes(range(ord("a"), ord("z") + 1))
)


class Tail(Similarity):
    """A detector's `tail_messages`, ready to look into conversations."""

    keys: ClassVar[type[JsonObject]] = TailKeys
    looks: ClassVar[bool] = True

    def __init__(self, keys: SimilarityKeys) -> None:
        self._messages = keys.tail_messages

    def compare(self, document: Document) -> tuple[bytes, None]:
        """The model and the last messages, the newest first, and the calls that they answer; see `Similarity`."""
        conversation = open_conversation(document)
        if conversation.before.open_ended:
            raise NotCounted("no_history")
        messages = conversation.read_backwards()
        unasked: dict[str, int] = {}
        said = [
            conversation.model.encode() + _NEXT_PART + conversation.before.after,
            *[_write_message(message, document, unasked) for message in islice(messages, self._messages)],
        ]
        if unasked and (asked := _find_calls(messages, unasked)):
            said.append(asked)
        return _NEXT_MESSAGE.join(said), None

    def show(self, document: Document) -> list[str]:
        """The model and what it goes on from, then the messages, the oldest first; see `Similarity`."""
        model, *messages = self.compare(document)[0].split(_NEXT_MESSAGE)
        return [
            text.replace(_NEXT_PART, b" | ").decode()
            for text in (b"model | " + model.removesuffix(_NEXT_PART), *reversed(messages))
        ]

    def name_repeated(self, place: str) -> str:
        """See `Similarity`."""
        return f"a conversation that ends with the same messages {place}"


def _write_message(message: Message, document: Document, unasked: dict[str, int]) -> bytes:
    """A message's speaker and parts; results whose calls have not been met yet leave their ids in `unasked`."""
    fields = [message.speaker.encode()]
    for part in message.read_parts():
        kind = part.kind
        if kind == OTHER and part.value is ABSENT:
            whole = message.find_whole(document)
            fields += () if whole is ABSENT else (b"other", name_other(whole))
            continue
        fields += _list_fields(part)
        if kind == RESULT:
            _want_call(part.id, unasked)
        elif kind == CALL:
            _settle_call(part, unasked)
    return _NEXT_PART.join(fields)


def _find_calls(messages: Iterator[Message], unasked: dict[str, int]) -> bytes:
    """The calls, in older messages, that results in the tail answer: `ok` is not `ok` where something else was done."""
    fields: list[bytes] = []
    calling = False
    for message in messages:
        parts = message.read_parts()
        if message.speaker == "user" and all(part.kind == TEXT for part in parts):
            break
        if calling and any(part.kind == RESULT for part in parts):
            break  # of the turn before
        for part in reversed(parts):
            if part.kind == CALL and _settle_call(part, unasked):
                calling = True
                fields += _list_fields(part)
        if not unasked:
            break
    return _NEXT_PART.join([b"asked", *fields]) if fields else b""


def _want_call(identity: str, unasked: dict[str, int]) -> None:
    """A result wants the call of this id; ids need not be unique."""
    unasked[identity] = unasked.get(identity, 0) + 1


def _settle_call(call: Part, unasked: dict[str, int]) -> bool:
    """Whether a result still wants this call; it is then wanted once less."""
    if call.id not in unasked:
        return False
    unasked[call.id] -= 1
    if not unasked[call.id]:
        del unasked[call.id]
    return True


def _list_fields(part: Part) -> tuple[bytes, ...]:
    kind, value = part.kind, part.value
    if kind == TEXT:
        value = value if type(value) is str else unpack(value)
        if type(value) is str:
            text = fold(value)
            return (b"text", text) if text else ()
    if kind == CALL:
        return b"call", part.name.encode(), write_canonical(read_arguments(value))
    if kind == RESULT:
        return b"error" if part.failed else b"result", fold(read_result(value))
    return b"other", name_other(value)


def fold(text: str) -> bytes:
    """Lower case, each run of white space as one space, none around it."""
    if not text.isascii():
        for space in _OTHER_SPACES:
            if space in text:
                text = text.replace(space, " ")
        text = str.lower(text)  # written like this because mypyc's own text.lower() knows no final sigma before Python 3.13
    folded = text.encode().translate(_FOLDED)
    if b"  " not in folded:  # asked once: it takes longer than all of the above
        return folded.strip(b" ")
    if len(folded) < _LONG:
        return b" ".join(folded.split())
    while b"  " in folded:  # slower where words are many, but never much: a megabyte of them would take 50 ms to split
        folded = folded.replace(b"  ", b" ")
    return folded.strip(b" ")
