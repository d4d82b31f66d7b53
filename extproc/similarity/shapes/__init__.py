"""How each API writes a conversation, one file each: a new one adds its file, and its line to the lists below.

A file gives a SHAPE (what bodies look like), or BLOCKS (what may stand in a content), or both. What stands in a content is read
alike in all of them, because gateways mix them.
"""

from __future__ import annotations

from typing import Any

from msgspec import Raw, Struct, ValidationError, defstruct, json
from msgspec.structs import fields

from extproc.similarity.document import ABSENT, Document, NotCounted, decode_json
from extproc.similarity.shapes import anthropic, bedrock, chat, gemini, prompt, responses
from extproc.similarity.shapes.conversation import READERS, Shape
from extproc.similarity.shapes.structs import Conversation

SHAPES: tuple[Shape, ...] = (chat.SHAPE, responses.SHAPE, gemini.SHAPE, gemini.WRAPPED, prompt.SHAPE)

for _blocks in (chat.BLOCKS, anthropic.BLOCKS, bedrock.BLOCKS, gemini.BLOCKS):
    READERS.update(_blocks)


def _body_of_any_shape() -> type[Struct]:
    """A struct of the keys of all shapes, so that one pass over a body finds out which it has."""
    keys: dict[str, Any] = {}
    for shape in SHAPES:
        for field in fields(shape.body):
            optional = (Raw, ABSENT) if field.type is Raw else (field.type | None, None)
            keys.setdefault(field.encode_name, optional)
    return defstruct("AnyBody", [(name, *optional) for name, optional in keys.items()], gc=False)


_decode_any = json.Decoder(_body_of_any_shape()).decode
_KEYS = [(shape, fields(shape.body)[0].encode_name, json.Decoder(shape.body).decode) for shape in SHAPES]


_EMPTY: tuple[Any, ...] = ([], "")


def open_conversation(document: Document) -> Conversation:
    """The conversation in a body, of the first shape that it has.

    Raises:
        NotCounted: there is none, or it cannot be read.
    """
    if not len(document):
        raise NotCounted("no_messages")
    data = document.data()
    try:
        body = decode_json(data, _decode_any)
    except ValidationError:
        return _open_first(data)
    for shape, key, _ in _KEYS:
        found = getattr(body, key)
        if found is not None and found is not ABSENT and found not in _EMPTY:
            return shape.open(body)
    raise NotCounted("no_messages")


def _open_first(data: bytes) -> Conversation:
    """The same where the key of one shape holds something else than its conversation."""
    for shape, _, decode in _KEYS:
        try:
            return shape.open(decode_json(data, decode))
        except ValidationError:
            continue
    raise NotCounted("no_messages")
