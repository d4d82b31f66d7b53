"""People's answers about new loops: what the store keeps of them, and what they amount to."""
# interpreted: tells operators, not requests

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec

from extproc.errors import LoopguardError

RIGHT, WRONG, UNSURE = ANSWERS = ("right", "wrong", "unsure")


class Answer(msgspec.Struct, frozen=True):
    """A person's newest answer about a loop; `at` is in seconds since 1970."""

    answer: Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(ANSWERS)})$")]
    at: Annotated[float, msgspec.Meta(ge=0, le=1e11)]


Answers: TypeAlias = Mapping[str, Mapping[str, Answer]]
"""The answers about a canary, by loop and person."""

ReadAnswers: TypeAlias = dict[str, dict[str, Answer]]


class Tally(NamedTuple):
    """Loops by what people say of them, and the people."""

    right: int = 0
    wrong: int = 0
    unsure: int = 0
    people: tuple[str, ...] = ()

    @property
    def loops(self) -> int:
        """The number of loops that have an answer."""
        return self.right + self.wrong + self.unsure


def count_answers(answers: Answers) -> Tally:
    """Count loops: most people decide about each, and a loop on which they are divided is unsure."""
    loops: Counter[str] = Counter(_settle(given) for given in answers.values() if given)
    people = sorted({person for given in answers.values() for person in given})
    return Tally(loops[RIGHT], loops[WRONG], loops[UNSURE], tuple(people))


def _settle(given: Mapping[str, Answer]) -> str:
    """What people say of one loop together."""
    votes: Counter[str] = Counter(each.answer for each in given.values())
    if votes[RIGHT] == votes[WRONG]:
        return UNSURE
    return RIGHT if votes[RIGHT] > votes[WRONG] else WRONG


def merge_answers(several: Iterable[Answers]) -> ReadAnswers:
    """The answers of several stores: the newest of each person about each loop."""
    merged: ReadAnswers = {}
    for answers in several:
        for loop, given in answers.items():
            known = merged.setdefault(loop, {})
            for person, answer in given.items():
                if person not in known or known[person].at < answer.at:
                    known[person] = answer
    return merged


def encode_answer(answer: Answer) -> bytes:
    """Encode an answer for the store."""
    return msgspec.json.encode(answer)


def decode_answer(document: bytes) -> Answer | None:
    """Decode an answer of the store; None if this version does not understand it."""
    try:
        return msgspec.json.decode(document, type=Answer)
    except msgspec.DecodeError:
        return None


def convert_answers(document: Any) -> dict[str, ReadAnswers]:  # noqa: ANN401  # decoded JSON
    """The answers about each canary, by its identity, as the admin port has them; raises LoopguardError for anything else."""
    try:
        return msgspec.convert(document, dict[str, dict[str, dict[str, Answer]]])
    except msgspec.ValidationError as error:
        raise LoopguardError(f"these are no answers about loops: {error}") from None
