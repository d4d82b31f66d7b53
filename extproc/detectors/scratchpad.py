"""Scratchpads: one text with all steps of a ReAct agent, as LangChain's classic agents send it.

    Question: ...
    Thought: I have to look
    Action: search
    Action Input: lamps
    Observation: nothing found
    Thought:

Each step is read as two messages: the assistant's, with thought and action, and the observation.
The description of the format and its examples come before the last question, and are not steps.
"""

from __future__ import annotations

import re
from typing import Final

from extproc.apis.contents import list_texts
from extproc.apis.conversation import ASSISTANT, USER, Message
from extproc.apis.messages import TEXT

_LEAST_STEPS: Final = 2
_FENCE: Final = "```"
_LOOKED_AT: Final = 131_072
"""Number of characters to search, from the end of a text."""

_OBSERVED: Final = "bservation"
"""Every scratchpad contains this."""

_MARK: Final = re.compile(
    r"""
    ^[ \t>*\#-]{0,16}+(?=[taofqbnTAOFQBN])(?:
        (?P<acts>thought|action)(?:\ ?[0-9]{1,3})?[*]{0,2}:
      | (?P<input>action\ input)(?:\ ?[0-9]{1,3})?[*]{0,2}:
      | (?P<observation>observation)(?:\ ?[0-9]{1,3})?[*]{0,2}:
      | (?P<ends>question|final\ answer|begin!|new\ input)[*]{0,2}(?::|[ \t]*$)
    )
    """,
    re.VERBOSE | re.MULTILINE | re.IGNORECASE,
)
_ACTS: Final = "acts"
_OBSERVES: Final = "observation"
_ENDS: Final = "ends"
_BEGIN: Final = "begin!"


def unfold(message: Message) -> list[Message]:
    """The messages of a scratchpad, newest first; the message itself if it is not one."""
    parts = message.read_parts()
    if not parts or any(part.kind != TEXT for part in parts):
        return [message]
    text = "\n".join(list_texts(parts))
    steps = find_steps(text) if _OBSERVED in text else []
    if len(steps) < _LEAST_STEPS:
        return [message]
    said = [(message.speaker, text[: steps[0][0]])]
    for start, middle, behind, end in steps:
        said.append((ASSISTANT, text[start:middle].strip()))
        said.append((USER, text[behind:end].strip()))
    return message.divide(said)[::-1]


def find_steps(text: str) -> list[tuple[int, int, int, int]]:
    """The start and end of each step's thought and action, then those of its observation."""
    steps: list[tuple[int, int, int, int]] = []
    begins = acted = -1
    observes = False
    for mark in _MARK.finditer(text, max(0, len(text) - _LOOKED_AT)):
        kind = mark.lastgroup
        if kind == _ENDS:
            if (
                not observes or mark[_ENDS].lower() == _BEGIN
            ):  # otherwise, it is part of the observation
                steps, begins, acted, observes = [], -1, -1, False
        elif kind == _ACTS:
            if observes:
                start, middle, behind, _ = steps[-1]
                steps[-1] = start, middle, behind, mark.start()
                begins, acted, observes = -1, -1, False
            begins = mark.start() if begins < 0 else begins
            if mark[_ACTS].lower() == "action":
                acted = mark.start()
        elif kind == _OBSERVES and acted >= 0 and not observes:
            steps.append((begins, mark.start(), mark.end(), len(text)))
            observes = True
    if steps and text.count(_FENCE, 0, steps[0][0]) % 2:  # in an open code block: a quotation
        return []
    return steps
