"""Steering: appends a note for the model to a request's newest results.

No other byte changes, and only safe edits are made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from extproc.apis import locate_results
from extproc.apis.places import add_notes
from extproc.decision import Action, Outcome
from extproc.engine.exchange import Exchange
from extproc.engine.guards import Compiled
from extproc.engine.plan import Detector
from extproc.ext_proc.changes.edits import NotEdited, edit
from extproc.request.document import INSPECTION, Document
from extproc.request.http import HttpRequest
from extproc.request.notes import Marks, ends_with_note, frame_note
from extproc.request.patch import Patch, Pieces
from extproc.request.quoting import quote_all

_OUTLOOK: Final = "If this continues, requests will be refused."
LANDING: Final = (
    "Do not call any more tools. Give your final answer now, based on what you have, "
    "and say what is missing."
)
_AGAIN: Final = "An earlier note said so, and nothing has changed."

MAX_PLACES: Final = 16
"""Maximum number of results that get the note, newest first."""


def steer(
    request: HttpRequest,
    body: bytes | memoryview,
    note: str,
    make_marks: Callable[[bytes], Marks],
    document: Document | None = None,
) -> Pieces:
    """Add the note to a request's body; see `edit` and `add_note`.

    Raises:
        NotEdited: the body has no place for the note, or cannot be edited.
    """
    return edit(
        request,
        body,
        lambda patch: add_note(patch, lambda data: (note, make_marks(data)), document),
        document,
    )


def add_note(
    patch: Patch, write: Callable[[bytes], tuple[str, Marks]], document: Document | None
) -> None:
    """Add a note to an open body.

    Args:
        patch: the edit of the body.
        write: returns the note's text, and its marks for the conversation in a body; raises
            NotCounted if there is no conversation.
        document: see `edit`.

    Raises:
        NotEdited: the body has no place for the note.
        NotCounted: the body is ambiguous or too large.
    """
    places = locate_results(patch, document)
    if not places:
        raise NotEdited("no_result")
    patch.foresee([place.value for place in places])
    left = INSPECTION.left
    note, marks = write(patch.data)
    INSPECTION.left = left  # reading the conversation has its own units
    free = [
        place
        for place in places[-MAX_PLACES:]
        if not ends_with_note(patch.data, place.offset, marks)
    ]
    add_notes(patch, free, frame_note(note, marks))


def write_note(outcome: Outcome, exchange: Exchange, guard: Compiled) -> str:
    """The note about an outcome, from the operator's template if there is one."""
    found = exchange.find_cause(outcome.repeat)
    cause, remedy = (found.text, found.advice) if found is not None else ("", "")
    advice = outcome.subject.advise(outcome, exchange.request.method, exchange.request.path)
    repeat = outcome.repeat
    own = guard.steer_note and guard.steer_note.format(
        what=advice.what,
        count=outcome.count,
        tools=quote_all(repeat.tools) if repeat is not None else "",
        instead=advice.instead,
        reason=advice.reason,
        policy=outcome.policy,
        cause=f"{cause} {remedy}".strip(),
    )
    if own.strip():
        sentences = [own, LANDING if outcome.action is Action.LAND else ""]
    elif outcome.action is Action.LAND:
        sentences = [f"{advice.about}: {advice.what}.", cause, _end(advice.reason), LANDING]
    else:
        earlier, outlook = ("", "") if advice.harmless else _look_ahead(outcome, guard)
        what = f"{advice.about}: {advice.what}."
        sentences = [what, earlier, cause, remedy, _end(advice.reason), advice.instead, outlook]
    return " ".join([sentence for sentence in sentences if sentence])


def _end(words: str) -> str:
    """End an operator's words as a sentence."""
    return f"{words}." if words and words[-1].isalnum() else words


def _look_ahead(outcome: Outcome, guard: Compiled) -> tuple[str, str]:
    """Reminder of an earlier note, and what will happen next; either may be empty."""
    outlook = _OUTLOOK if guard.refuses_later else ""
    if not isinstance(guard, Detector):
        return "", outlook
    if outcome.repeat is not None and outcome.repeat.widespread:
        return "", ""
    if Action.LAND in guard.actions and not (outcome.repeat is not None and outcome.repeat.forced):
        outlook = (
            "If this continues, tool calls are "
            f"forbidden{', and then requests are refused' if outlook else ''}."
        )
    notes, action, left = guard.foresee(outcome)
    if left:
        when = "At the next repetition" if left == 1 else f"After {left} more repetitions"
        then = "tool calls are forbidden" if action is Action.LAND else "requests will be refused"
        outlook = f"{when}, {then}."
    return _AGAIN if notes else "", outlook
