"""A conversation of any API: who says what, and whether the server keeps what was before.

One pass over a body tells its messages apart and leaves their contents as they are. Nothing of a message is decoded before
somebody looks at it, which for most of a long history nobody does. What a shape is, each file of this folder says for its API.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Any, NamedTuple

from msgspec import Raw, Struct, ValidationError, json

from extproc.similarity.document import MAX_STEPS, Json, NotCounted, decode_json, write_canonical
from extproc.similarity.shapes.messages import Message, Part
from extproc.similarity.shapes.places import Place, Value

ASSISTANT, USER, TOOL, NOBODY = "assistant", "user", "tool", "other"
"""Who says a message; any other is who a client says it is."""

_MAX_NEWEST = 100
"""So many results, made at once, may have a place for a note."""

ASSISTANTS = frozenset({ASSISTANT, "model", "ai"})


class Before(NamedTuple):
    """What a body says about what went before its messages.

    Attributes:
        after: what it goes on from (a response, a message, a conversation), in one spelling; empty where there is nothing.
        open_ended: the server appends to a conversation whose end nobody but it knows.
        in_words: it stands in the messages in words, if at all.
    """

    after: bytes = b""
    open_ended: bool = False
    in_words: bool = False


NOTHING_BEFORE = Before()
"""Of a body that shows its whole history."""


def know_nothing(_: Json) -> Before:
    """Of every body of an API whose requests show their whole history."""
    return NOTHING_BEFORE


def take_list(value: Json) -> Sequence[Json]:
    """The messages in what stands where they belong: those of a list, which is none where there are only texts or numbers."""
    if not isinstance(value, list) or not value:
        return ()
    return value if isinstance(value[0], Struct | dict) or dict in set(map(type, value)) else ()


class Shape(NamedTuple):
    """How one API writes a conversation.

    Attributes:
        path: of keys, to the messages.
        body: a struct of the body's keys in which a conversation stands; all but the first on the path are raw.
        message: a struct of what is read of one message. Each of its keys may be missing.
        name_speaker: who says a message; empty for a thought, which nobody gets to see.
        read: what stands in a message, in order; raises NotCounted where that cannot be read, or is too much.
        find_raw: where in a message its text and its calls stand; ABSENT where that is in several places.
        take: the messages in what stands at the end of the path.
        joins: whether a message is one of several calls that were made at once, where they stand side by side; None where each
            message is one of its own.
        look_back: what such a body says about what went before.
        locate: where a note can be put into a message, the newest place last, given all of it; None where nobody can tell.
        fallback: the key means something else in other APIs, so they are asked first.
    """

    path: tuple[str, ...]
    body: type[Struct]
    message: type[Struct]
    name_speaker: Callable[[Any], str]
    read: Callable[[Any], list[Part]]
    find_raw: Callable[[Any], Raw]
    take: Callable[[Any], Sequence[Json]] = take_list
    joins: Callable[[Any], bool] | None = None
    look_back: Callable[[Any], Before] = know_nothing
    locate: Callable[[Any, Value], list[Place]] | None = None
    fallback: bool = False


class Conversation:
    """The messages of one request.

    Attributes:
        shape: how they are written.
        model: empty when the request names none.
        before: what the request says about what went before them.
    """

    __slots__ = ("_messages", "before", "model", "shape")

    def __init__(self, shape: Shape, messages: Sequence[Any], body: Struct, model: str) -> None:
        """Take messages as structs of the shape's, or as values where the whole body was decoded."""
        self.shape = shape
        self.model = model
        self.before: Before = shape.look_back(body)
        self._messages = messages

    @property
    def elsewhere(self) -> bool:
        """What went before is not in the request: the server keeps it, or a plain prompt holds it in words."""
        return bool(self.before.after) or self.before.in_words

    def read_backwards(self) -> Iterator[Message]:
        """The messages from the newest to the oldest, without thoughts.

        Raises:
            NotCounted: there are too many.
        """
        return self._read_each() if self.shape.joins is None else self._read_joined(self.shape.joins)

    def __len__(self) -> int:
        """How many messages the request has, thoughts among them."""
        return len(self._messages)

    def list_newest(self) -> list[Message]:
        """The messages behind the assistant's last one, the newest first, as far as a note may be put there.

        Raises:
            NotCounted: there are too many.
        """
        behind = takewhile(lambda message: message.speaker != ASSISTANT, self.read_backwards())
        return list(islice(behind, _MAX_NEWEST))

    def _read_each(self) -> Iterator[Message]:
        messages, kind, name_speaker = self._messages, self.shape.message, self.shape.name_speaker
        for place in range(len(messages) - 1, max(len(messages) - 1 - MAX_STEPS, -1), -1):
            value = messages[place]
            if type(value) is not kind:
                value = self._convert(value)
            speaker = name_speaker(value)
            if speaker:
                yield Message(self.shape, speaker, value, place)
        if len(messages) > MAX_STEPS:
            raise NotCounted("inspect_limit")

    def _read_joined(self, joins: Callable[[Any], bool]) -> Iterator[Message]:
        """The same where calls that stand side by side were made at once."""
        calls: Message | None = None
        for message in self._read_each():
            joined = joins(message.value)
            if joined and calls is not None:
                calls.join(message)
                continue
            if calls is not None:
                yield calls
            calls = message if joined else None
            if not joined:
                yield message
        if calls is not None:
            yield calls

    def _convert(self, value: Json) -> Any:  # noqa: ANN401  # of the shape's
        """A message as its shape has it; one of other types than a message's is of no known kind."""
        try:
            return decode_json(write_canonical(value), json.Decoder(self.shape.message).decode)
        except ValidationError:
            return self.shape.message()
