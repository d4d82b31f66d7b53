"""Finds places for notes in a message: after the text of a result or of a user."""

from __future__ import annotations

from collections.abc import Callable

from extproc.apis.contents import READERS
from extproc.request.notes import WRITTEN_SEPARATOR
from extproc.request.patch import Fields, Patch, Value

_MAX_BLOCKS = 100

_TEXTS = frozenset({"text", "input_text", "output_text"})

TEXT_BLOCK = b'{"type":"text","text":', b"}"
INPUT_TEXT_BLOCK = b'{"type":"input_text","text":', b"}"
TEXT_PART = b'{"text":', b"}"
PLAIN = b"", b""
"""JSON around the text of a new block or member."""


class Place:
    """A place for a note.

    Attributes:
        value: a string to extend, or a list or object to append to.
        around: JSON around the note in a new value; None to extend a string.
        key: key of the new member of an object.
        result: the place is in a tool's result, not in a user's text.
        offset: the note's offset in the body, in bytes, after the text that it extends, if any.
    """

    def __init__(
        self,
        value: Value,
        around: tuple[bytes, bytes] | None = None,
        key: str = "",
        *,
        result: bool = False,
    ) -> None:
        self.value = value
        self.around = around
        self.key = key
        self.result = result
        self.offset = value.part.find(value.end - 1)


def add_notes(patch: Patch, places: list[Place], note: bytes, *, separated: bool = True) -> None:
    """Put a note, as in a JSON string, into each place; `separated` from a text before it."""
    tail = WRITTEN_SEPARATOR + note if separated else note
    for place in places:
        if place.around is None:
            patch.extend(place.value, tail)
        else:
            opening, closing = place.around
            patch.append(place.value, b'%b"%b"%b' % (opening, note, closing), place.key)


Locator = Callable[[Patch, Fields, Value], list[Place]]

LOCATORS: dict[str, Locator] = {}
"""Functions that find places in blocks that are results, by `type` or by the block's only key. Each
API adds its own."""


def locate_text(
    patch: Patch, content: Value | None, block: tuple[bytes, bytes], *, result: bool
) -> list[Place]:
    """The place in a content: after its newest text that is no result, or in a new last block.

    Args:
        patch: the edit of the body.
        content: a string or a list of blocks; other values have no place.
        block: JSON around the text of a new block.
        result: the content is a tool's result.
    """
    if content is None or not patch.is_list(content):
        return (
            [Place(content, result=result)]
            if content is not None and patch.is_text(content)
            else []
        )
    for item in patch.open_items(content)[: -_MAX_BLOCKS - 1 : -1]:
        text = _find_text(patch, patch.open_fields(item))
        if text is not None:
            return [Place(text, result=result)]
    return [Place(content, block, result=result)]


def locate_in_content(
    patch: Patch, content: Value | None, block: tuple[bytes, bytes]
) -> list[Place]:
    """The places in a message's content: those in its results, or else after its newest text.

    Args:
        patch: the edit of the body.
        content: as for `locate_text`.
        block: as for `locate_text`.
    """
    results: list[Place] = []
    for item in patch.open_items(content)[-_MAX_BLOCKS:] if content is not None else []:
        fields = patch.open_fields(item)
        locate = LOCATORS.get(_name_kind(patch, fields))
        if locate is not None:
            results += locate(patch, fields, item)
    return results or locate_text(patch, content, block, result=False)


def _find_text(patch: Patch, fields: Fields) -> Value | None:
    """The text of a text block; None for other blocks."""
    text = fields.get("text")
    kind = patch.read_text(fields["type"]) if "type" in fields else "text"
    return text if kind in _TEXTS and patch.is_text(text) else None


def _name_kind(patch: Patch, fields: Fields) -> str:
    """The kind of a block: its `type`, or its first key that is a known kind."""
    kind = patch.read_text(fields.get("type"))
    if kind in READERS:
        return kind
    return next((key for key in fields if key in READERS), "")
