"""Conversations that fork: requests with one history that go on in other words have session limits of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from extproc.ext_proc.service import Service
from extproc.policy.presets import find_preset
from tests.support.service import make_service, sample
from tests.support.session_limits import TOOL, ask, limited, status
from tests.support.turn_writers import Did, as_anthropic, as_bedrock, as_chat, as_gemini, as_ollama, as_responses

WRITERS = [as_chat, as_responses, as_anthropic, as_gemini, as_bedrock, as_ollama]
FORKS = 12

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


def send(service: Service, turns: Sequence[Did], writer: Writer = as_chat, **more: Any) -> int:  # noqa: ANN401  # of a body
    """What happens to a request that names no session."""
    return status(ask(service, json.dumps({**writer(turns), "tools": [TOOL], **more}).encode(), session="", authorization="k"))


@pytest.mark.parametrize("seen", [False, True], ids=["history unknown", "history known"])
@pytest.mark.parametrize("writer", WRITERS)
def test_forks_pass_under_the_preset(writer: Writer, seen: bool) -> None:  # a parameter
    """Twelve of each history, at once, and each goes on for as many steps as are left."""
    policy = json.loads(Path(find_preset("sessions")).read_text())
    service = make_service(policy)
    most, random = policy["spec"]["session_limits"]["max_steps"], Random(1)

    for depth in range(1, 6):
        for step in range(1, depth if seen else 0):
            assert send(service, do(step, task=depth), writer) == 200
        forks = [do(depth, task=depth, said=f"Try way {way}.") for way in range(FORKS)]
        left = dict.fromkeys(range(FORKS), most - depth)
        while left:
            way = random.choice(list(left))
            left[way] -= 1
            assert send(service, go_on(forks[way], f"{depth}.{way}", most - depth - 1 - left[way]), writer) == 200
            if not left[way]:
                del left[way]

    assert sample(service, "session_unnamed_total", policy="sessions", mode="enforce") == 0


@pytest.mark.parametrize("ends_in", ["said", "result"])
def test_questions_behind_the_same_examples_pass(ends_in: str) -> None:
    """As in prompts with examples, whose last message is another one each time."""
    service = make_service(limited(max_steps=4, max_tool_calls=4))

    assert {send(service, write_question(f"Question {number}?", ends_in)) for number in range(100)} == {200}


def test_each_fork_has_limits_of_its_own() -> None:
    """Its history counts as its first steps."""
    service = make_service(limited(max_steps=5))
    forks = [do(2, said=f"Way {way}.") for way in range(FORKS)]

    passed = [[send(service, go_on(fork, way, step)) for step in range(4)] for way, fork in enumerate(forks)]

    assert passed == [[200, 200, 200, 429]] * FORKS


@pytest.mark.parametrize(
    "way", ["Again.", "Again: it is 10:00:{:02d} now.", "Again (attempt {})."], ids=["same", "clock", "attempt"]
)
def test_a_fork_that_is_sent_again_is_a_retry(way: str) -> None:
    """Also if only a clock or the number of the attempt changes: the first retries are no steps."""
    service = make_service(limited(max_steps=4))
    assert [send(service, do(step)) for step in range(3)] == [200] * 3
    assert send(service, do(2, said="Another way.")) == 200

    answers = [send(service, do(2, said=way.format(number))) for number in range(1, 10)]

    assert answers == [200] * 8 + [429]


def test_new_ids_make_no_fork() -> None:
    """Some gateways make the ids of calls anew with each request."""
    service = make_service(limited(max_steps=2))
    assert send(service, []) == 200

    answers = [send(service, [do(1)[0]._replace(number=6 * number)]) for number in range(1, 10)]

    assert answers == [200] * 4 + [429] * 5


def test_what_is_asked_aside_is_no_fork() -> None:
    """A summary without tools continues the history in other words."""
    service = make_service(limited(max_steps=4))
    assert send(service, []) == 200

    for step in range(1, 4):
        aside = {**as_chat(do(step, said="Sum up.")), "model": "small"}
        assert status(ask(service, json.dumps(aside).encode(), session="", authorization="k")) == 200
        assert send(service, do(step)) == 200

    assert send(service, do(4)) == 429
