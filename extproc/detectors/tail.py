"""Similarity `tail`: the model and the last messages, by role, text, calls and results.

A result is compared together with its call, even if the call is further back.

An agent appends every turn to its history, so whole bodies are almost never equal, but requests of
a stuck agent end in the same way. Text is compared in lower case, with each run of white space as
one blank, and trimmed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import ClassVar, Final

from extproc.apis import open_conversation
from extproc.apis.contents import name_other, read_arguments, read_result
from extproc.apis.conversation import USER, Message
from extproc.apis.messages import CALL, OTHER, RESULT, TEXT, Part
from extproc.detectors.alike import fold
from extproc.detectors.base import Similarity
from extproc.detectors.keys import SimilarityKeys, TailKeys
from extproc.detectors.turn import digest_images
from extproc.objects import JsonObject
from extproc.request.document import ABSENT, Document, NotCounted, open_value, write_canonical

# Separators that UTF-8 never contains, so that joined parts stay distinct.
_NEXT_PART: Final = b"\xff"
_NEXT_MESSAGE: Final = b"\xfe"


class Tail(Similarity):
    """Compares the last `tail_messages` messages of conversations."""

    keys: ClassVar[type[JsonObject]] = TailKeys
    looks: ClassVar[bool] = True

    def __init__(self, keys: SimilarityKeys) -> None:
        self._messages = keys.tail_messages

    def compare(self, document: Document) -> tuple[bytes, None]:
        """The model, the last messages, newest first, and the calls that they answer."""
        conversation = open_conversation(document)
        if conversation.before.open_ended:
            raise NotCounted("no_history")
        messages = conversation.read_backwards()
        unasked: dict[str, int] = {}
        said = [
            conversation.model.encode() + _NEXT_PART + conversation.before.after,
            *[
                _write_message(message, document, unasked)
                for message in islice(messages, self._messages)
            ],
        ]
        return _NEXT_MESSAGE.join(said + _find_calls(messages, unasked)), None

    def show(self, document: Document) -> list[str]:
        """The model and what the request continues, then the messages, oldest first."""
        model, *messages = self.compare(document)[0].split(_NEXT_MESSAGE)
        return [
            text.replace(_NEXT_PART, b" | ").decode()
            for text in (b"model | " + model.removesuffix(_NEXT_PART), *reversed(messages))
        ]

    def name_repeated(self, place: str) -> str:
        """See `Similarity`."""
        return f"a conversation that ends with the same messages {place}"


def _write_message(message: Message, document: Document, unasked: dict[str, int]) -> bytes:
    """A message's speaker and parts; `unasked` gets ids of its results, and loses its calls'."""
    fields = [message.speaker.encode()]
    for part in message.read_parts():
        kind, value = part.kind, part.value
        if part.images is not ABSENT:
            fields += (b"images", digest_images(part))
        if kind == CALL:
            _settle(part.id, unasked)
            fields += _spell_call(part)
        elif kind == RESULT:
            unasked[part.id] = unasked.get(part.id, 0) + 1  # ids need not be unique
            fields += (b"error" if part.failed else b"result", fold(read_result(value)))
        elif kind == TEXT and isinstance(value := open_value(value), str):
            text = fold(value)
            fields += (b"text", text) if text else ()
        else:
            whole = message.find_whole(document) if kind == OTHER and value is ABSENT else value
            fields += () if whole is ABSENT else (b"other", name_other(whole))
    return _NEXT_PART.join(fields)


def _find_calls(messages: Iterator[Message], unasked: dict[str, int]) -> list[bytes]:
    """The older calls whose results are in the tail.

    `ok` after a different call is a different result.
    """
    fields: list[bytes] = []
    for message in messages if unasked else ():
        parts = message.read_parts()
        if message.speaker == USER and all(part.kind == TEXT for part in parts):
            break
        if fields and any(part.kind == RESULT for part in parts):
            break  # the results of an earlier turn
        for part in reversed(parts):
            if part.kind == CALL and _settle(part.id, unasked):
                fields += _spell_call(part)
        if not unasked:
            break
    return [_NEXT_PART.join([b"asked", *fields])] if fields else fields


def _settle(identity: str, unasked: dict[str, int]) -> bool:
    """Whether a result still needs a call with this id; decrements the number of such results."""
    wanted = unasked.pop(identity, 0)
    if wanted > 1:
        unasked[identity] = wanted - 1
    return wanted > 0


def _spell_call(call: Part) -> tuple[bytes, bytes, bytes]:
    return b"call", call.name.encode(), write_canonical(read_arguments(call.value))
