"""How each API writes a conversation, one file each: whoever adds one adds its file, which is found here.

Such a file gives SHAPES (what bodies look like), or BLOCKS (what may stand in a content, and how it is read), or both. LOCATORS
say where in such a block a note has its place. What stands in a content is read alike in all files, because gateways mix them.
"""
# interpreted: an API each; msgspec makes their Structs of annotations, which compiled classes do not keep

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Final

from msgspec import Raw, ValidationError

from extproc.apis.shapes.contents import READERS
from extproc.apis.shapes.conversation import ASSISTANT, USER, Before, Shape, Shapes
from extproc.apis.shapes.places import LOCATORS, Place
from extproc.request.document import NotCounted
from extproc.request.patch import AMBIGUOUS, Patch, Value

_MAX_NEWEST: Final = 100
"""So many results, made at once, may have a place for a note."""

_FILES = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]
_FOUND: list[Shape] = sorted(
    [shape for file in _FILES for shape in getattr(file, "SHAPES", ())], key=lambda shape: shape.fallback
)

for _file in _FILES:
    READERS.update(getattr(_file, "BLOCKS", {}))
    LOCATORS.update(getattr(_file, "LOCATORS", {}))

open_conversation = Shapes(_FOUND).open_conversation


def locate_results(patch: Patch) -> list[Place]:
    """Where a note can be put into the newest results of a conversation, or else into what the user said last.

    Returns:
        places in the body, the newest last; none where the API allows none, or nobody can tell.

    Raises:
        NotCounted: there is no conversation, it cannot be read in one way alone, or is too much.
    """
    shape, given = find_conversation(patch)
    if shape.locate is None:
        return []
    if patch.is_text(given):
        return [Place(given)]
    places: list[Place] = []
    for number, (_, whole) in enumerate(patch.open_newest(given)):
        message = read_message(patch, shape, patch.shorten(whole))
        speaker = shape.name_speaker(message)
        if speaker == ASSISTANT or number == _MAX_NEWEST:
            break
        found = shape.locate(patch, message, whole) if speaker else []
        places += [place for place in found if place.result or speaker == USER]
    places.sort(key=lambda place: place.offset)
    return [place for place in places if place.result] or places


def find_conversation(patch: Patch) -> tuple[Shape, Value]:
    """Where in a body its one conversation stands: a list of messages, or a text in its place.

    Raises:
        NotCounted: there is none, or several.
    """
    found: list[tuple[Shape, Value]] = []
    for shape in _FOUND:
        value: Value | None = patch.root
        for step in shape.path:
            value = patch.open_fields(value).get(step)
        if value is not None and not patch.is_null(value) and not (shape.fallback and found):
            found.append((shape, value))
    if len(found) > 1:
        raise NotCounted(AMBIGUOUS)
    for shape, value in found:
        if shape.locate is None or patch.is_list(value) or shape.take(patch.read_text(value)):
            return shape, value
    raise NotCounted("no_messages")


def read_message(patch: Patch, shape: Shape, raw: bytes | Raw) -> Any:  # noqa: ANN401  # of the shape's
    """What the shape makes of a message, or of a part of one that tells who says it.

    Raises:
        NotCounted: it cannot be read, or is too much.
    """
    try:
        return patch.decode(raw, shape.decode)
    except ValidationError:
        return shape.message()  # of other types than a message's: of no known kind


def look_back(patch: Patch, shape: Shape) -> Before:
    """What a body says about what went before its messages.

    Raises:
        NotCounted: it cannot be read, or is too much.
    """
    given = patch.open_fields(patch.root)
    raw: dict[str, Any] = dict.fromkeys(shape.path[:1])
    for key in shape.kept:
        if key in given:
            if patch.is_long(given[key]):
                return Before(after=b"{}")  # whatever it is, it is something
            raw[key] = patch.read_raw(given[key])
    return shape.look_back(shape.body(**raw))
