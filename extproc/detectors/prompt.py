"""Similarity `prompt`: first requests, without what a program changes in each retry.

A program that repeats a prompt often adds the time or an attempt number, and a new `seed` or
request id; a parser's retry quotes the answer that it could not parse. Without these, the body is
compared as with `canonical`. Ids, hex and all other numbers are content, because requests for many
items, generated from one template, are different.

Requests with a turn of the assistant are not counted. `turns` compares these.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import ClassVar, Final

from extproc.apis import open_conversation
from extproc.apis.conversation import ASSISTANT, TOOL
from extproc.detectors.base import Similarity
from extproc.detectors.complaints import leave_out_answer
from extproc.request.document import Document, NotCounted, split_pointer, write_canonical

_OPTIONS: Final = [
    split_pointer(pointer)
    for pointer in (
        "/metadata",
        "/requestMetadata",
        "/labels",
        "/seed",
        "/temperature",
        "/generationConfig/seed",
        "/generationConfig/temperature",
        "/generation_config/seed",
        "/generation_config/temperature",
        "/inferenceConfig/temperature",
        "/options/seed",
        "/options/temperature",
    )
]
"""Ignored fields of bodies: notes about a request, and options that only vary its answer."""

_MOST_PLACES: Final = 500
"""Maximum number of places to search, for each of `_MOVING`; the rest is compared unchanged."""

_COMPLETION: Final = b"Completion:\\n"
_ABOVE: Final = b"Above, the Completion did not satisfy the constraints given in the Prompt."
_QUOTED: Final = [
    ("from completion ", ". Got: "),
    ("Invalid json output: ", "For troubleshooting"),
]
"""The words around an answer in prompts of LangChain's retry parsers, and in their errors."""

_WORD: Final = r"(?:(?<![a-z])|(?<=\\[nrt]))"
_NUMBER: Final = r"(?:[ _-]?(?:number|count|no\.?))?+"
_COUNT: Final = r"""[\\"']{0,2}+[ ]?[:=\#(\[_-]?[ ]?[\#]?[0-9]{1,4}+"""
_OF: Final = r"[ ]?(?:/|of)[ ]?[0-9]{1,4}+"
_END: Final = r"(?![0-9a-z])"


def _compile(pattern: str) -> re.Pattern[bytes]:
    return re.compile(pattern.encode(), re.VERBOSE)


_MOVING: Final[list[tuple[re.Pattern[bytes], int, re.Pattern[bytes]]]] = [
    (  # a time of day
        re.compile(rb":[0-5][0-9]"),
        2,
        _compile(
            r"""
            (?:(?<![0-9a-z:.])|(?<=\\[nrt])|(?<=[0-9]t))
            (?:[01]?[0-9]|2[0-3])(?:(?<=[0-9][0-9])|(?=:[0-5][0-9](?::[0-5]|\ ?[ap]\.?m\b)))
            :[0-5][0-9](?::[0-5][0-9](?:[.,][0-9]{1,9}+)?+)?+
            (?:\ ?[ap]\.?m\b\.?|z\b|\ ?[+-][0-9]{2}:?[0-9]{2}\b)?+(?!:?[0-9a-z])
            """
        ),
    ),
    (  # a time of day after its date, without colons
        re.compile(rb"t[0-9]{6}"),
        0,
        _compile(rf"(?<=[0-9]{{8}})t[0-9]{{6}}(?:\.[0-9]{{1,9}}+)?+z?+{_END}"),
    ),
    *[  # a Unix time
        (
            re.compile(word.encode()),
            0,
            _compile(
                rf"""
                {_WORD}{word}(?:stamp)?+[\\"']{{0,2}}+[ ]?[:=]?[ ]?
                1[5-9][0-9]{{8}}(?:[0-9]{{3}}){{0,3}}+(?:\.[0-9]{{1,9}}+)?+{_END}
                """
            ),
        )
        for word in ("time", "now")
    ],
    (re.compile(rb"attempt"), 0, _compile(rf"{_WORD}attempts?{_NUMBER}{_COUNT}(?:{_OF})?+{_END}")),
    (  # "try 5 of them" may be an order
        re.compile(rb"try"),
        2,
        _compile(
            rf"{_WORD}(?:retry{_NUMBER}{_COUNT}(?:{_OF})?+|try{_NUMBER}{_COUNT}(?:{_OF}|(?=[])}},:]))){_END}"
        ),
    ),
]
"""An anchor to search for in lower case, how many bytes before it a match may begin, and the
pattern to remove."""


class Prompt(Similarity):
    """Compares prompts."""

    looks: ClassVar[bool] = True

    def compare(self, document: Document) -> tuple[bytes, None]:
        """The body without options, clocks and attempt numbers; see `Similarity`."""
        conversation = open_conversation(document)
        speakers = [speaker for speaker in conversation.list_speakers() if speaker]
        if speakers and speakers[-1] == ASSISTANT:  # the start of the answer
            speakers.pop()
        if conversation.before.open_ended or ASSISTANT in speakers or TOOL in speakers:
            raise NotCounted("has_history")
        written = leave_out_completion(write_canonical(document.value(), _OPTIONS))
        return leave_out_moving(written), None

    def show(self, document: Document) -> list[str]:
        """See `Similarity`."""
        return [self.compare(document)[0].decode()]

    def name_repeated(self, place: str) -> str:
        """See `Similarity`."""
        return f"the same prompt {place}"


def leave_out_completion(text: bytes) -> bytes:
    """A body without the answer that a retry parser quotes below the prompt."""
    before, above, behind = text.rpartition(_ABOVE)
    prompt, found, _ = before.rpartition(_COMPLETION)
    if not found:
        return text
    error = behind.replace(b"\\", b"").replace(b'"', b"'").decode("utf-8", "replace")
    for start, end in _QUOTED:
        opening, found_start, quoted = error.partition(start)
        error = opening + quoted.rpartition(end)[2] if found_start else error
    return prompt + above + leave_out_answer(error).encode()


def leave_out_moving(text: bytes) -> bytes:
    """A text with `#` for each clock and each attempt number."""
    lowered = text.lower()
    spans = []
    for anchor, back, pattern in _MOVING:
        for found in islice(anchor.finditer(lowered), _MOST_PLACES):
            for start in range(max(found.start() - back, 0), found.start() + 1):
                moving = pattern.match(lowered, start)
                if moving is not None:
                    spans.append(moving.span())
                    break
    kept = []
    done = 0
    for start, end in sorted(spans):
        if start >= done:
            kept += [text[done:start], b"#"]
            done = end
    return b"".join([*kept, text[done:]])
