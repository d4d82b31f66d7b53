"""Conversations that fork: requests with one history that go on in other words have session limits of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from extproc.policy.presets import find_preset
from tests.support.service import make_service, sample
from tests.support.session_limits import WRITERS, limited, nameless, write
from tests.support.turn_writers import Did, as_chat

FORKS = 12
CALLER = {"authorization": "k"}

Writer = Callable[[Sequence[Did]], dict[str, Any]]


def do(steps: int, *, task: int = 0, said: str = "", result: str = "") -> list[Did]:
    """Turns of which the last one ends in other words, or with another result."""
    done = [Did((("run", {"task": task, "step": step}),), (f"did {step}",), number=step) for step in range(1, steps + 1)]
    if not done:
        return []
    return [*done[:-1], done[-1]._replace(user=said, results=(result or f"did {steps}",))]


def write_question(words: str, ends_in: str) -> list[Did]:
    """Turns whose last message is the user's or a result."""
    return do(2, said=words) if ends_in == "said" else do(2, result=words)


def go_on(done: Sequence[Did], way: object, steps: int) -> list[Did]:
    """More turns, which no other fork has."""
    more = [Did((("run", {"way": str(way), "step": step}),), (f"did {step}",), number=100 + step) for step in range(steps)]
    return [*done, *more]


@pytest.mark.parametrize("seen", [False, True], ids=["history unknown", "history known"])
@pytest.mark.parametrize("writer", WRITERS)
def test_forks_pass_under_the_preset(writer: Writer, seen: bool) -> None:  # a parameter
    """Twelve of each history, at once, and each goes on for as many steps as are left."""
    policy = json.loads(Path(find_preset("sessions")).read_text())
    service = make_service(policy)
    most, random = policy["spec"]["session_limits"]["max_steps"], Random(1)

    for depth in range(1, 6):
        for step in range(1, depth if seen else 0):
            assert nameless(service, [(write(do(step, task=depth), writer), CALLER)]) == [200]
        forks = [do(depth, task=depth, said=f"Try way {way}.") for way in range(FORKS)]
        left = dict.fromkeys(range(FORKS), most - depth)
        while left:
            way = random.choice(list(left))
            left[way] -= 1
            shown = go_on(forks[way], f"{depth}.{way}", most - depth - 1 - left[way])
            assert nameless(service, [(write(shown, writer), CALLER)]) == [200]
            if not left[way]:
                del left[way]

    assert sample(service, "session_unnamed_total", policy="sessions", mode="enforce") == 0


ASIDE = [{**as_chat(do(step, said="Sum up.")), "model": "small"} for step in range(1, 4)]
RETRIES = {
    "the same": ["Again."] * 9,
    "a clock": [f"Again: it is 10:00:{number:02d} now." for number in range(1, 10)],
    "the attempt": [f"Again (attempt {number})." for number in range(1, 10)],
}
CASES: dict[str, tuple[dict[str, Any], Sequence[bytes], list[int]]] = {
    **{
        f"questions behind the same examples pass, {ends_in}": (
            {"max_steps": 4, "max_tool_calls": 4},
            [write(write_question(f"Question {number}?", ends_in)) for number in range(100)],
            [200] * 100,
        )
        for ends_in in ("said", "result")
    },
    "each fork has its own, of which its history is the first": (
        {"max_steps": 5},
        [write(go_on(do(2, said=f"Way {way}."), way, step)) for way in range(FORKS) for step in range(4)],
        [200, 200, 200, 429] * FORKS,
    ),
    **{
        f"a fork that is sent again is a retry, {name}": (
            {"max_steps": 4},
            [write(do(0)), write(do(1)), *(write(do(2, said=said)) for said in ("", "Another way.", *again))],
            [200] * 12 + [429],
        )
        for name, again in RETRIES.items()
    },
    "new ids make no fork": (
        {"max_steps": 2},
        [write([]), *(write([do(1)[0]._replace(number=6 * number)]) for number in range(1, 10))],
        [200] * 5 + [429] * 5,
    ),
    "what is asked aside, without tools, is none": (
        {"max_steps": 4},
        [
            write([]),
            *(data for step in range(1, 4) for data in (json.dumps(ASIDE[step - 1]).encode(), write(do(step)))),
            write(do(4)),
        ],
        [200] * 7 + [429],
    ),
}


@pytest.mark.parametrize(("limits", "requests", "expected"), CASES.values(), ids=CASES)
def test_a_fork_has_limits_of_its_own(limits: dict[str, Any], requests: Sequence[bytes], expected: list[int]) -> None:
    assert nameless(make_service(limited(**limits)), requests) == expected
