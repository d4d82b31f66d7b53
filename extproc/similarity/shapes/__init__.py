"""How each API writes a conversation, one file each: whoever adds one adds its file, which is found here.

Such a file gives SHAPES (what bodies look like), or BLOCKS (what may stand in a content, and how it is read), or both. LOCATORS
say where in such a block a note has its place. What stands in a content is read alike in all files, because gateways mix them.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from extproc.similarity.document import Document
from extproc.similarity.shapes.contents import READERS
from extproc.similarity.shapes.conversation import USER, Shape, Shapes
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

for _file in _FILES:
    READERS.update(getattr(_file, "BLOCKS", {}))
    LOCATORS.update(getattr(_file, "LOCATORS", {}))

open_conversation = Shapes(_FOUND).open_conversation


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
