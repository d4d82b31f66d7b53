"""Edits a JSON text and keeps every other character: white space, order, and the spelling of values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from extproc.objects import Place

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")
_BYTE_ORDER_MARK = "\ufeff"


class _Item(NamedTuple):
    """The position of an object's member, or of an array's element, in the text.

    Attributes:
        step: its key or index.
        lead: where the white space before it starts.
        start: where the member or element starts.
        value: where its value starts.
        end: where its value ends.
    """

    step: str | int
    lead: int
    start: int
    value: int
    end: int


def replace_value(text: str, place: Place, value: object) -> str:
    """Replace the value at a place, which must exist in the text."""
    item, _ = _find_item(text, place)
    return text[: item.value] + json.dumps(value) + text[item.end :]


def insert_behind(text: str, place: Place, key: str, value: object) -> str:
    """Insert a member behind the one at a place, spaced like its neighbours."""
    item, follower = _find_item(text, place)
    neighbour = follower or item
    lead = text[neighbour.lead : neighbour.start]
    colon = text[_DECODER.raw_decode(text, item.start)[1] : item.value]
    return f"{text[: item.end]},{lead}{json.dumps(key)}{colon}{json.dumps(value)}{text[item.end :]}"


def remove_member(text: str, place: Place) -> str:
    """Remove the member at a place, which must not be the only one of its object."""
    item, follower = _find_item(text, place)
    if follower is not None:
        return text[: item.start] + text[follower.start :]
    comma = text.rindex(",", 0, item.start)
    return text[:comma] + text[item.end :]


def _find_item(text: str, place: Place) -> tuple[_Item, _Item | None]:
    """The value at a place, and the next one in the same object or array."""
    at = _skip(text, len(_BYTE_ORDER_MARK) if text.startswith(_BYTE_ORDER_MARK) else 0)
    for step in place[:-1]:
        at = next(item.value for item in _list_items(text, at) if item.step == step)
    items = _list_items(text, at)
    item = next(item for item in items if item.step == place[-1])
    return item, next(items, None)


def _list_items(text: str, at: int) -> Iterator[_Item]:
    """The members of the object or array that starts here."""
    named = text[at] == "{"
    number, lead = 0, at + 1
    start = _skip(text, lead)
    while text[start] not in "}]":
        step: str | int = number
        value = start
        if named:
            step, behind = _DECODER.raw_decode(text, start)
            value = _skip(text, text.index(":", behind) + 1)
        _, end = _DECODER.raw_decode(text, value)
        yield _Item(step, lead, start, value, end)
        lead = _skip(text, end) + (text[_skip(text, end)] == ",")
        start = _skip(text, lead)
        number += 1


def _skip(text: str, at: int) -> int:
    """Where the white space that starts here ends."""
    found = _SPACE.match(text, at)
    return found.end() if found is not None else at
