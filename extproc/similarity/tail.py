"""Similarity `tail`: the model and the last messages of a conversation, by role, text, tool names, arguments and results.

What a tool brought back is compared together with what it was asked, also where the call itself is further back.

An agent appends every turn to its history, so whole bodies are almost never equal; one that is stuck ends its requests the same
way all the same. Text is compared without the space around it, in lower case, each run of white space as one space.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import ClassVar

from extproc.policy.objects import JsonObject
from extproc.similarity.base import Similarity
from extproc.similarity.conversation import (
    RESULT_ROLES,
    Message,
    arguments,
    content,
    conversation,
    is_only_text,
    list_chat_calls,
    other,
    parts,
    result,
    write_id,
)
from extproc.similarity.document import Document, Json, NotCounted, open_value
from extproc.similarity.keys import SimilarityKeys, TailKeys
from extproc.similarity.shapes.structs import CALL, RESULT, TEXT, Part

# What UTF-8 never contains separates what is joined, so that different things never look alike.
_NEXT_PART = b"\xff"
_TEXT = _NEXT_PART + b"text" + _NEXT_PART
_RESULT = _NEXT_PART + b"result" + _NEXT_PART
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
        """See `Similarity`."""
        self._messages = keys.tail_messages

    def compare(self, document: Document) -> tuple[bytes, None]:
        """The model and the last messages, the newest first, and the calls that they answer; see `Similarity`."""
        talk = conversation(document)
        if talk.open_ended:
            raise NotCounted("no_history")
        messages = talk.backwards(document)
        unasked: dict[str, int] = {}
        said = [
            talk.model.encode() + _NEXT_PART + talk.after,
            *(_write_message(message, unasked) for message in islice(messages, self._messages)),
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
        return f"a conversation that ends with these same messages {place}"


def _write_message(message: Message, unasked: dict[str, int]) -> bytes:
    """A message's role and parts; results whose calls have not been met yet leave their ids in `unasked`."""
    said = content(message)
    if is_only_text(message, said):
        text = fold(said)
        speaker = message.role.encode() if message.role else b""
        return speaker + _TEXT + text if text else speaker
    if message.role in RESULT_ROLES:
        _want_call(write_id(message.tool_call_id), unasked)
        return (b"tool" if message.role == "tool" else b"function") + _RESULT + _fold_result(message.content)
    fields = [(message.role or message.type or "").encode()]
    for part in parts(message, said):
        fields += _list_fields(part)
        if part.kind == RESULT:
            _want_call(part.id, unasked)
        elif part.kind == CALL:
            _settle_call(part, unasked)
    return _NEXT_PART.join(fields)


def _find_calls(messages: Iterator[Message], unasked: dict[str, int]) -> bytes:
    """The calls, in older messages, that results in the tail answer: `ok` is not `ok` where something else was done."""
    fields: list[bytes] = []
    calling = False
    for message in messages:
        if message.tool_calls:
            found: Sequence[Part] = [part for part in list_chat_calls(message) if part.id in unasked]
        else:
            said = content(message)
            if message.role == "user" and is_only_text(message, said):
                break
            found = parts(message, said)
            if calling and any(part.kind == RESULT for part in found):
                break  # of the turn before
        for part in reversed(found):
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
        text = fold(value)
        return (b"text", text) if text else ()
    if kind == CALL:
        return b"call", part.name.encode(), arguments(value)
    if kind == RESULT:
        return b"error" if part.failed else b"result", _fold_result(value)
    return b"other", other(value)


def _fold_result(value: Json) -> bytes:
    value = open_value(value)
    return fold(value if type(value) is str else result(value).decode())


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
