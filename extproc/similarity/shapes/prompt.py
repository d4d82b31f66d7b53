"""A plain `prompt`: what went before stands in it in words, if at all."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Raw, Struct

from extproc.similarity.document import ABSENT, Json, write_canonical
from extproc.similarity.shapes.contents import is_given, read_content
from extproc.similarity.shapes.conversation import Before, Shape
from extproc.similarity.shapes.messages import Part


class Message(Struct, gc=False):
    """The one message that a prompt is."""

    content: Raw = ABSENT


class Body(Struct, gc=False):
    """A body with a `prompt`."""

    prompt: Raw = ABSENT


def _take(value: Json) -> Sequence[Json]:
    prompt = value if isinstance(value, Raw) else Raw(write_canonical(value))
    return [Message(prompt)] if is_given(prompt) else []


def _look_back(_: Body) -> Before:
    return Before(in_words=True)


def _name_speaker(_: Message) -> str:
    return "user"


def _find_raw(message: Message) -> Raw:
    return message.content


def _read(message: Message) -> list[Part]:
    return read_content(message.content)


SHAPES = (Shape(("prompt",), Body, Message, _name_speaker, _read, _find_raw, _take, look_back=_look_back, fallback=True),)
