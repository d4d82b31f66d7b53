"""Finds a conversation in a body that is being edited, and places for notes in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from msgspec import Raw, ValidationError

from extproc.apis.conversation import (
    ASSISTANT,
    USER,
    Conversation,
    Shape,
    find_known,
    locate_message,
)
from extproc.apis.places import Place
from extproc.request.document import Document, NotCounted
from extproc.request.patch import AMBIGUOUS, Patch, Value

_MAX_NEWEST: Final = 100
"""Number of results of one turn, newest first, in which to look for a place for a note."""


class Locations:
    """Finds the conversations of all APIs in bodies to edit."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        """The shapes are tried in this order."""
        self._shapes = shapes

    def find_conversation(self, patch: Patch) -> tuple[Shape, Value]:
        """Where an edited body has its only conversation: a list of messages, or a string instead.

        Raises:
            NotCounted: there is none, or several.
        """
        found: list[tuple[Shape, Value]] = []
        fields_at_top = patch.open_fields(patch.root)
        for shape in self._shapes:
            value = fields_at_top.get(shape.path[0])
            for step in shape.path[1:]:
                value = patch.open_fields(value).get(step)
            if value is not None and not patch.is_null(value) and not (shape.fallback and found):
                found.append((shape, value))
        if len(found) > 1:
            raise NotCounted(AMBIGUOUS)
        for shape, given in found:
            if shape.locate is None or patch.is_list(given) or shape.take(patch.read_text(given)):
                return shape, given
        raise NotCounted("no_messages")

    def locate_results(self, patch: Patch, document: Document | None = None) -> list[Place]:
        """Places for a note in the newest results, or else in the user's last message.

        Args:
            patch: the edit of the body.
            document: the same body as read by policies, to reuse the offsets of its messages; may
                be None.

        Returns:
            places in the body, newest last; empty if the API has none, or they are unclear.

        Raises:
            NotCounted: there is no conversation, or it is ambiguous or too large.
        """
        shape, given = self.find_conversation(patch)
        if shape.locate is None:
            return []
        if patch.is_text(given):
            return [Place(given)]
        places: list[Place] = []
        for speaker, message, whole in _read_newest(patch, shape, given, document):
            if speaker:
                places += [
                    place
                    for place in shape.locate(patch, message, whole)
                    if place.result or speaker == USER
                ]
        if len(places) > 1:
            places.sort(key=_get_offset)
        return [place for place in places if place.result] or places


def open_patch(document: Document | None, data: bytes) -> Patch:
    """Open a body for an edit; raises as `Patch` does.

    Args:
        document: the same body as read by policies, to reuse its messages and the layout around
            them; may be None.
        data: the body.
    """
    found = find_known(document, data)
    if found is None or found.known is None or found.known.beside is None:
        return Patch(data)
    messages, beside = (
        (locate_message(found, 0)[0], locate_message(found, len(found) - 1)[1]),
        found.known.beside,
    )
    patch = Patch(data, messages, beside.around)
    if beside.around is None:
        beside.around = patch.describe_around()
    return patch


def _read_newest(
    patch: Patch, shape: Shape, given: Value, document: Document | None
) -> list[tuple[str, Any, Value]]:
    """The messages after the newest of the assistant, last first: speaker, struct, position.

    Only these are decoded if all offsets are known. A prefill does not count as the newest.

    Raises:
        NotCounted: they are ambiguous or too large.
    """
    known = find_known(document, patch.data)
    items = patch.open_items(given) if known is None else []
    read = document.conversation if document is not None else None
    skips = isinstance(read, Conversation) and read.prefilled
    found: list[tuple[str, Any, Value]] = []
    for place in range((len(items) if known is None else len(known)) - 1, -1, -1):
        if known is None:
            message = read_message(patch, shape, patch.read_raw(items[place]))
            speaker, start, end = shape.name_speaker(message), items[place].start, items[place].end
        else:
            message, speaker, (start, end) = (
                None,
                known.find_facts(place).speaker,
                locate_message(known, place),
            )
        if skips and speaker == ASSISTANT:
            skips = False
            continue
        if speaker == ASSISTANT or len(found) == _MAX_NEWEST:
            break
        whole = patch.open_element(start, end)
        patch.open_fields(whole)  # raises if a key is repeated
        found.append((speaker, known.open_message(place) if known is not None else message, whole))
    return found


def _get_offset(place: Place) -> int:
    return place.offset


# Of the shape's
def read_message(patch: Patch, shape: Shape, raw: bytes | Raw) -> Any:  # noqa: ANN401
    """Decode a message, or enough of it to know the speaker.

    Raises:
        NotCounted: it is unreadable or too large.
    """
    try:
        return patch.decode(raw, shape.decode)
    except ValidationError:
        return shape.message()  # unexpected types: an unknown kind
