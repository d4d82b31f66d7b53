"""Circles in which a step varies: hardly any turn is new, though no other rule applies."""

import json
from random import Random

import pytest

from tests.support.told import Told, find_strength, tell
from tests.support.verdict_fuzzer import SHAPES
from tests.support.verdicts import Turn, write

STEPS = [Turn("view", f"page {n}", f"the text of page {n}") for n in range(7)]
EDIT = Turn("edit", "page 1", "ok")


def new(number: int) -> Turn:
    return Turn("view", f"note {number}", f"the text of note {number}")


def ask(turns: list[Turn], shape: str = "chat", **keys: object) -> Told:
    body = json.loads(write(turns, shape, offers=True))
    return tell(body, **{"action": "steer", "escalate": {"reject": 7}, "weak_threshold": 14} | keys)


def go_round(dice: Random, rounds: int, new_each: int = 1) -> list[Turn]:
    """Rounds of new steps, eight in all, the others known, in another order each time."""
    turns = list(STEPS)
    for number in range(rounds):
        turns += [new(number * new_each + more) for more in range(new_each)]
        turns += dice.sample(STEPS, 8 - new_each)
    return turns


def ask_each(turns: list[Turn], shape: str = "chat", **keys: object) -> list[Told]:
    """The answers to the last eight requests; a step that was last seen long ago gets no note."""
    return [ask(turns[:end], shape, **keys) for end in range(len(turns) - 7, len(turns) + 1)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_circle_with_a_varying_step_gets_a_note(shape: str) -> None:
    for seed in range(6):
        told = ask_each(go_round(Random(seed), 3), shape)

        assert {(each.action, each.rule) for each in told} == {
            ("allow", ""),
            ("steer", "nothing_new"),
        }
        assert "reject" not in {each.action for each in ask_each(go_round(Random(seed), 9), shape)}


def test_note_is_weak_and_never_a_refusal() -> None:
    told = ask_each(go_round(Random(1), 3), weak_threshold=None, action="reject", escalate={})

    assert {each.action for each in told} == {"allow", "warn"}
    assert find_strength(json.loads(write(go_round(Random(1), 3), "chat", offers=True))) == "weak"


@pytest.mark.parametrize("shape", SHAPES)
def test_two_new_steps_in_eight_are_work(shape: str) -> None:
    for seed in range(6):
        assert {each.action for each in ask_each(go_round(Random(seed), 4, new_each=2), shape)} == {
            "allow"
        }


@pytest.mark.slow
def test_steps_that_may_repeat_are_new() -> None:
    """Reads after a change, and calls of a tool with a threshold of its own, or without one."""
    turns = go_round(Random(1), 3)
    polls = [Turn("poll", turn.argument, turn.result) for turn in turns]

    assert ask(polls).action == ask(turns).action == "steer"
    assert ask([*turns[:-4], EDIT, *turns[-4:]]).action == "allow"
    assert ask(polls, tools={"poll": {"threshold": 20}}).action == "allow"
    assert (
        ask(
            [*polls[:-8], *turns[-8:-4], *polls[-4:-2], *turns[-2:]],
            tools={"poll": {"allow": True}},
        ).action
        == "allow"
    )


def test_step_is_new_if_its_result_differs() -> None:
    """A monitor that goes through the same pages."""
    dice = Random(3)
    turns = [
        Turn("view", step.argument, f"{n} visitors")
        for n in range(5)
        for step in dice.sample(STEPS, len(STEPS))
    ]

    assert {each.action for each in ask_each(turns)} == {"allow"}
