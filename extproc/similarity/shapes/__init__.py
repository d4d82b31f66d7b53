"""How each API writes a conversation, one file each: whoever adds one adds its file, which is found here.

Such a file gives SHAPES (what bodies look like), or BLOCKS (what may stand in a content, and how it is read), or both. LOCATORS
say where in such a block a note has its place. What stands in a content is read alike in all files, because gateways mix them.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from msgspec import Raw, Struct, ValidationError, defstruct, json
from msgspec.structs import fields

from extproc.similarity.document import ABSENT, Document, Json, NotCounted, decode_json, write_canonical
from extproc.similarity.shapes.contents import READERS
from extproc.similarity.shapes.conversation import USER, Conversation, Shape
from extproc.similarity.shapes.places import (
    LOCATORS,
    Place,
    Value,
    end_text,
    is_text,
    open_body,
    open_field,
    open_newest,
)

_FILES = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]
_FOUND: list[Shape] = [shape for file in _FILES for shape in getattr(file, "SHAPES", ())]
_SHAPES = sorted(_FOUND, key=lambda shape: shape.fallback)

for _file in _FILES:
    READERS.update(getattr(_file, "BLOCKS", {}))
    LOCATORS.update(getattr(_file, "LOCATORS", {}))


def _make_body() -> type[Struct]:
    """A struct of the keys of all shapes, so that one pass over a body finds out which it has."""
    keys: dict[str, Any] = {"model": (str | None, None)}
    for shape in _SHAPES:
        for field in fields(shape.body):
            optional = (Raw, ABSENT) if field.type is Raw else (field.type | None, None)
            keys.setdefault(field.name, optional)
    return defstruct("AnyBody", [(name, *optional) for name, optional in keys.items()], gc=False)


_AnyBody: Any = _make_body()
_decode_body = json.Decoder(_AnyBody).decode
_RAW_KEYS = [field.name for field in fields(_AnyBody) if field.type is Raw]


def open_conversation(document: Document) -> Conversation:
    """The conversation in a body, of the first shape that it has; everybody who asks shares it.

    Raises:
        NotCounted: there is none, or it cannot be read.
    """
    found: Conversation | NotCounted | None = document.conversation
    if found is None:
        try:
            found = _open(document)
        except NotCounted as failure:
            found = failure.renew()
        document.conversation = found
    else:
        document.start()
    if isinstance(found, NotCounted):
        raise found.renew()
    return found


def locate_results(document: Document) -> list[Place]:
    """Where a note can be put into the newest results of a conversation, or else into what the user said last.

    Returns:
        places in the bytes of `document.data()`, the newest last; none where the API allows none, or nobody can tell.

    Raises:
        NotCounted: there is no conversation, or it cannot be read.
    """
    conversation = open_conversation(document)
    shape = conversation.shape
    value: Value | None = open_body(document.data())
    for step in shape.path:
        value = open_field(value, step) if value is not None else None
    if shape.locate is None or value is None:
        return []
    if is_text(value):
        return [end_text(value, result=False)]
    newest = conversation.list_newest()
    items = open_newest(value, len(conversation) - newest[-1].place) if newest else []
    places: list[Place] = []
    for message in reversed(newest if items else []):
        item = items[len(conversation) - 1 - message.place]
        places += [place for place in shape.locate(message.value, item) if place.result or message.speaker == USER]
    return [place for place in places if place.result] or places


def _open(document: Document) -> Conversation:
    data = document.data()
    if not data:
        raise NotCounted("no_messages")
    try:
        body = value = decode_json(data, _decode_body)
    except ValidationError:
        value = document.value()
        body = _fill_body(value)
    for shape in _SHAPES:
        path = shape.path
        messages = shape.take(getattr(body, path[0]) if value is body and len(path) == 1 else _follow(value, path))
        if messages:
            return Conversation(shape, messages, body, body.model or "")
    raise NotCounted("no_messages")


def _fill_body(value: Json) -> Json:
    """The other keys of a body that was decoded as a whole, because one of them, or its messages, is of another type."""
    given = value if isinstance(value, dict) else {}
    model = given.get("model")
    named = model if model is None or isinstance(model, str) else write_canonical(model).decode()
    return _AnyBody(model=named, **{key: Raw(write_canonical(given[key])) for key in _RAW_KEYS if key in given})


def _follow(value: Json, path: tuple[str, ...]) -> Json:
    """What stands at the end of a path of keys, or of fields; None where nothing does."""
    for step in path:
        value = value.get(step) if isinstance(value, dict) else getattr(value, step, None)
    return value
