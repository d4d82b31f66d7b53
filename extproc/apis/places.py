"""Where in a message a note has its place: behind the text of a result, or of what is said."""

from __future__ import annotations

from collections.abc import Callable
from json import dumps
from typing import NamedTuple

from extproc.apis.contents import READERS
from extproc.request.patch import Fields, Patch, Value

_MAX_BLOCKS = 100

_TEXTS = frozenset({"text", "input_text", "output_text"})

TEXT_BLOCK = b'{"type":"text","text":', b"}"
INPUT_TEXT_BLOCK = b'{"type":"input_text","text":', b"}"
TEXT_PART = b'{"text":', b"}"
PLAIN = b"", b""
"""What stands around the text of a new block, or of a new member."""


class Place(NamedTuple):
    """Where a note can be put.

    Attributes:
        value: a string that goes on, or a list or an object that gets something new.
        around: what has to stand around the note, as a string, where that is new.
        key: of a new member of an object.
        result: in a result of a tool; else in what is said.
    """

    value: Value
    around: tuple[bytes, bytes] | None = None
    key: str = ""
    result: bool = False

    @property
    def offset(self) -> int:
        """In the body, in bytes: what stands before it is the text that goes on, where there is one."""
        return self.value.end - 1


def splice(patch: Patch, places: list[Place], note: str, separator: str = "") -> bytes:
    """A body with a note in each of these places; the separator goes between a text and its note.

    Raises:
        NotCounted: something else would change with it, or it is too much to see whether it does.
    """
    for place in places:
        if place.around is None:
            patch.extend(place.value, separator + note)
        else:
            opening, closing = place.around
            patch.append(place.value, opening + dumps(note).encode() + closing, place.key)
    return patch.apply()


Locator = Callable[[Patch, Fields, Value], list[Place]]

LOCATORS: dict[str, Locator] = {}
"""By the `type` of a block, or by the one key that names it: where in a result that is one. Every API adds its own."""


def locate_text(patch: Patch, content: Value | None, block: tuple[bytes, bytes], *, result: bool) -> list[Place]:
    """The one place in a content: behind its newest text. A result that stands in it is no text.

    Args:
        patch: of the body.
        content: a string, or a list of blocks; nothing else has a place.
        block: how the API writes a block of text.
        result: it is one of a tool.
    """
    if content is None or not patch.is_list(content):
        return [Place(content, result=result)] if content is not None and patch.is_text(content) else []
    for item in patch.open_items(content)[: -_MAX_BLOCKS - 1 : -1]:
        text = _find_text(patch, patch.open_fields(item))
        if text is not None:
            return [Place(text, result=result)]
    return [Place(content, block, result=result)]


def locate_in_content(patch: Patch, content: Value | None, block: tuple[bytes, bytes]) -> list[Place]:
    """The places in what is said: those in the results that stand there, or else behind its newest text.

    Args:
        patch: of the body.
        content: see `locate_text`.
        block: the same.
    """
    results: list[Place] = []
    for item in patch.open_items(content)[-_MAX_BLOCKS:] if content is not None else []:
        fields = patch.open_fields(item)
        locate = LOCATORS.get(_name_kind(patch, fields))
        if locate is not None:
            results += locate(patch, fields, item)
    return results or locate_text(patch, content, block, result=False)


def _find_text(patch: Patch, fields: Fields) -> Value | None:
    """The text of a block that is one."""
    text = fields.get("text")
    kind = patch.read_text(fields["type"]) if "type" in fields else "text"
    return text if kind in _TEXTS and patch.is_text(text) else None


def _name_kind(patch: Patch, fields: Fields) -> str:
    """What a block is: what its `type` says, or its first key that says it."""
    kind = patch.read_text(fields.get("type"))
    if kind in READERS:
        return kind
    return next((key for key in fields if key in READERS), "")
