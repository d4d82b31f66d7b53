"""A plain `prompt`: what went before stands in it in words, if at all."""
# interpreted: an API each; msgspec makes their Structs of annotations, which compiled classes do not keep

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Raw, Struct

from extproc.apis.shapes.contents import is_given, read_content
from extproc.apis.shapes.conversation import Before, Shape
from extproc.apis.shapes.messages import Part
from extproc.request.document import ABSENT, Json, write_canonical


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
