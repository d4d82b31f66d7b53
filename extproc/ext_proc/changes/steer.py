"""Steering: adds a note for the model behind the text of a request's newest results; no other byte changes.

A body is edited only if this is certainly safe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from extproc.apis import locate_results
from extproc.apis.places import splice
from extproc.decision import Outcome
from extproc.engine.candidates import Guard
from extproc.ext_proc.changes.edits import NotEdited, open_patch
from extproc.request.document import NotCounted
from extproc.request.http import HttpRequest
from extproc.request.notes import SEPARATOR, Marks, ends_with_note, frame_note
from extproc.request.quoting import quote_all

_OUTLOOK: Final = "If this continues, requests will be refused."

MAX_PLACES: Final = 16
"""Most results that get the note, from the newest on."""


def steer(request: HttpRequest, body: bytes | memoryview, note: str, make_marks: Callable[[bytes], Marks]) -> bytes:
    """The request's body with the note.

    Args:
        request: whose body it is.
        body: all of it.
        note: its text.
        make_marks: for the conversation in a body; raises NotCounted where there is none.

    Raises:
        NotEdited: there is no place for it.
    """
    mark, patch = open_patch(request, body)
    try:
        places = locate_results(patch)
        if not places:
            raise NotEdited("no_result")
        marks = make_marks(patch.data)
        free = [place for place in places[-MAX_PLACES:] if not ends_with_note(patch.data, place.offset, marks)]
        return mark + splice(patch, free, frame_note(note, marks), SEPARATOR)
    except NotCounted as why:
        raise NotEdited(why.reason) from None


def write_note(outcome: Outcome, request: HttpRequest, guard: Guard) -> str:
    """The note about the outcome of a guard that steers, in the operator's words or in our own."""
    advice = outcome.subject.advise(outcome, request.method, request.path)
    repeat = outcome.repeat
    if guard.steer_note:
        return guard.steer_note.format(
            what=advice.what,
            count=outcome.count,
            tools=quote_all(repeat.tools) if repeat is not None else "",
            instead=advice.instead,
            reason=advice.reason,
            policy=outcome.policy,
        )
    outlook = _OUTLOOK if guard.refuses_later and not (repeat is not None and repeat.widespread) else ""
    sentences = [f"{advice.about}: {advice.what}.", advice.reason, advice.instead, outlook]
    return " ".join([sentence for sentence in sentences if sentence])
