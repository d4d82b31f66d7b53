"""Removes Loopguard's own answers from the history of a client that continued.

They are not turns.

An answer is removed together with the program's reply to it: a result, or a complaint about a
missing action or the format. If a person replied, answer and reply stay.
"""

from __future__ import annotations

import re
from typing import Any, Final

from extproc.apis import find_conversation
from extproc.apis.contents import is_injected, list_texts
from extproc.apis.conversation import ASSISTANT, USER, Shape
from extproc.apis.locate import read_message
from extproc.apis.messages import RESULT, TEXT
from extproc.detectors.complaints import complains
from extproc.detectors.turn import HARNESS, NUMBERS, strike_injected
from extproc.request.document import NotCounted
from extproc.request.notes import quotes_answer, read_around
from extproc.request.patch import Patch, Value

_MOST_AROUND: Final = 16
"""Maximum number of characters that an agent's program adds to an answer, such as the end of a code
block."""

_SAID_WITHIN: Final = 2_000
"""Number of characters of a reply to compare."""

_ERROR: Final = re.compile(
    (
        r"\W{0,8}(?:\w{1,16} ){0,2}\w{0,16}(?:error|exception)(?::| "
        r"(?:in|while|when|parsing|occurred)\b)"
    ),
    re.IGNORECASE,
)
"""How programs begin a complaint. Patterns for errors in results would match too much: people also
say `try again`."""


def leave_out_answers(data: bytes, answers: frozenset[bytes]) -> bytes:
    """Remove our answers, and complaints about them, from a body; the same object without any.

    Args:
        data: the body.
        answers: verified answers, as written in the body.
    """
    try:
        patch = Patch(data)
        shape, given = find_conversation(patch)
        messages = patch.open_items(given)
        own = _Reader(patch, shape, messages, answers).list_own()
        patch.remove(given, own)
        return b"".join(patch.apply()) if own else data
    except NotCounted:
        return data


class _Reader:
    """Reads the messages of one body."""

    def __init__(
        self, patch: Patch, shape: Shape, messages: list[Value], answers: frozenset[bytes]
    ) -> None:
        self._patch = patch
        self._shape = shape
        self._messages = messages
        self._answers = answers

    def list_own(self) -> set[int]:
        """The indexes of the messages to remove."""
        own: set[int] = set()
        heard: set[tuple[str, ...]] = set()
        for place in range(len(self._messages)):
            if not self._quotes(place) or not self._is_answer(place):
                continue
            behind = self._find_reply(place)
            if behind is None:
                own.add(place)
            elif self._is_automatic(behind, heard):
                own |= {place, behind}
        return own

    def _quotes(self, place: int) -> bool:
        """Whether a message contains one of the answers."""
        return quotes_answer(bytes(self._patch.read_raw(self._messages[place])), self._answers)

    def _open(self, place: int) -> Any:  # noqa: ANN401  # of the shape's
        return read_message(self._patch, self._shape, self._patch.read_raw(self._messages[place]))

    def _is_answer(self, place: int) -> bool:
        """Whether a message with an answer is the assistant's, and contains nothing else."""
        message = self._open(place)
        if self._shape.name_speaker(message) != ASSISTANT:
            return False
        parts = self._shape.read(message)
        said = "".join(list_texts(parts))
        return all(part.kind == TEXT for part in parts) and len(read_around(said)) <= _MOST_AROUND

    def _find_reply(self, place: int) -> int | None:
        """The index of the next message but reminders; None if the assistant's, or without one."""
        for behind in range(place + 1, len(self._messages)):
            speaker = self._shape.name_speaker(self._open(behind))
            if speaker == ASSISTANT:
                return None
            if speaker and speaker not in HARNESS:
                return behind
        return None

    def _is_automatic(self, place: int, heard: set[tuple[str, ...]]) -> bool:
        """Whether the reply to an answer is a program's, not a person's.

        A program's reply is a result, quotes the answer, complains, or repeats an earlier reply.
        Later replies do not count, so that a message is read in the same way in all later requests.
        """
        message = self._open(place)
        parts = self._shape.read(message)
        if (
            self._shape.name_speaker(message) != USER
            or any(part.kind == RESULT for part in parts)
            or self._quotes(place)
        ):
            return True
        texts = [
            strike_injected(text) for text in list_texts(parts) if not is_injected(text.strip())
        ]
        said = "\n".join(texts).strip()[:_SAID_WITHIN]
        words = tuple(NUMBERS.sub("", said).casefold().split())
        again = words in heard
        heard.add(words)
        return again or complains(said) or _ERROR.match(said) is not None
