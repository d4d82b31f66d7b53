"""Assistants that only talk, to a program that says the same each time."""

import json

import pytest

from tests.support.told import Told, find_strength, tell
from tests.support.verdict_fuzzer import SHAPES
from tests.support.verdicts import Turn, write

PROGRAMS = [
    "Stop hook feedback: the goal is not reached yet. Continue to work on it.",
    "You have not finished. Please proceed to the next step on your own (attempt {n}).",
    "Auto-continue: {n} tasks are left in the list, so keep going until it is empty.",
    "No tool call was needed? Then say so, or go on with the plan that you made.",
    "It is {n}:00 now. Check whether there is anything new to do, and do it.",
    "Your message has been received. The other agents are waiting for your decision.",
]
PEOPLE = ["continue", "next", "yes", "go on, please", "Anything else?", "ok, and then?"]


def talk(said: str, times: int) -> list[Turn]:
    """The user says the same, whatever the assistant says."""
    return [
        Turn(
            "", f"I am blocked for reason {'abcdefghij'[n % 10] * (n // 10 + 1)}.", said.format(n=n)
        )
        for n in range(times)
    ]


def ask(turns: list[Turn], shape: str = "chat") -> Told:
    body = json.loads(write(turns, shape, offers=True))
    return tell(body, action="steer", escalate={"land": 5, "reject": 7}, weak_threshold=14)


@pytest.mark.parametrize("shape", SHAPES)
def test_talk_to_a_program_is_a_weak_loop(shape: str) -> None:
    for said in PROGRAMS:
        told = ask(talk(said, 10), shape)

        assert (told.action, told.rule, told.count) == ("steer", "talk", 10)
        assert [ask(talk(said, times), shape).action for times in (9, 13, 14, 15, 16, 30)] == [
            "allow", "steer", "land", "land", "reject", "reject"
        ]  # fmt: skip
    assert find_strength(json.loads(write(talk(PROGRAMS[0], 10), shape, offers=True))) == "weak"


@pytest.mark.parametrize("shape", SHAPES)
def test_talk_to_a_person_gets_a_note_at_most(shape: str) -> None:
    for said in PEOPLE:
        assert [ask(talk(said, times), shape).action for times in (9, 10, 30, 40)] == [
            "allow",
            "steer",
            "steer",
            "steer",
        ]


@pytest.mark.parametrize(
    "other",
    [Turn("view", "a", "ok"), Turn("", "Hm.", "Now write the tests for the new page, please.")],
)
def test_action_or_other_words_end_talk(other: Turn) -> None:
    said = PROGRAMS[0]

    assert ask([*talk(said, 6), other, *talk(said, 6)]).action == "allow"
    assert ask([*talk(said, 6), other, *talk(said, 10)]).action == "steer"
