"""Starts of conversations without a name: they count with the caller's requests without a session until these go on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.metrics import Metrics
from extproc.sessions.rates import Usage
from extproc.store.memory import MemoryStore
from tests.support.examples import examples
from tests.support.service import make_service, sample
from tests.support.session_limits import (
    TOOL,
    WRITERS,
    Request,
    ask,
    changed,
    kept,
    limited,
    nameless,
    settle,
    status,
    told,
    unnamed,
    write,
)

PRICES = {"*": {"input": 10_000, "output": 10_000}}
"""A cent for each token."""


def prompt(text: str) -> bytes:
    """A request that begins a conversation."""
    return go_on(text, 0)


def go_on(text: str, turns: int) -> bytes:
    """A later request of the same conversation."""
    messages = [{"role": "user", "content": text}]
    for number in range(turns):
        messages += [{"role": "assistant", "content": f"step {number}"}, {"role": "user", "content": "go on"}]
    return json.dumps({"model": "m", "messages": messages, "tools": [TOOL]}).encode()


def prompts(*texts: object) -> list[bytes]:
    """A start for each of these."""
    return [prompt(f"{text}") for text in texts]


CASES: dict[str, tuple[dict[str, Any], Sequence[Request], list[int]]] = {
    **{
        f"a plain loop ends, {writer.__name__}": (
            unnamed(max_steps=5),
            [write([], writer)] * 100 + [(write([], writer), {"team": "other"})],
            [200] * 20 + [429] * 80 + [200],  # three retries of each step are free, as everywhere
        )
        for writer in WRITERS
    },
    "different prompts add up": (unnamed(max_steps=5), prompts(*range(10)), [200] * 5 + [429] * 5),
    "starts and unknown conversations add up": (
        unnamed(max_steps=4),
        [data for at in range(3) for data in (prompt(f"Do {at}"), kept(at + 1))],
        [200] * 4 + [429] * 2,
    ),
    "sessions still have all their limits": (
        unnamed(limits={"max_steps": 3}, max_steps=50),
        [go_on("Task", turns) for turns in range(5)],
        [200] * 3 + [429] * 2,
    ),
    "a retried turn leaves room once": (
        unnamed(max_steps=3),
        [*prompts("a", "b", "c"), *[go_on("a", 1)] * 4, *prompts("d", "e")],
        [200] * 8 + [429],
    ),
    "an unseen start leaves no room": (
        unnamed(max_steps=2),
        [prompt("a"), go_on("x", 1), go_on("y", 1), *prompts("b", "c")],
        [200] * 4 + [429],
    ),
    "a named session is none of them": (
        unnamed(max_steps=1),
        [(prompt("Hi"), {"session": f"s{number}"}) for number in range(9)],
        [200] * 9,
    ),
    "a refused start takes no room": (
        unnamed(limits={"max_steps": 9, "max_tool_calls": 1}, max_steps=1),
        [*prompts("a", "b", "b"), go_on("a", 1), go_on("a", 2), *prompts("b", "c")],
        [200, 429, 429, 200, 200, 200, 429],
    ),
    "shadow policies only report": (unnamed("shadow", max_steps=1), prompts(*"abc"), [200] * 3),
    "without unnamed limits they are only sessions": (limited(max_steps=2), prompts("Hi") * 100, [200] * 100),
}


@pytest.mark.parametrize(("document", "requests", "expected"), CASES.values(), ids=CASES)
def test_starts_count_until_they_go_on(document: dict[str, Any], requests: Sequence[Request], expected: list[int]) -> None:
    assert nameless(make_service(document), requests) == expected


def test_a_conversation_that_goes_on_leaves_room() -> None:
    """300 agents that one key starts within an hour are none too many, although only two may wait at a time."""
    now = [0]
    service = make_service(unnamed(max_steps=2), store=MemoryStore(Metrics(), clock=lambda: now[0]))

    for number in range(300):
        now[0] = number * 12_000
        assert nameless(service, [go_on(f"Task {number}", turns) for turns in range(4)]) == [200] * 4


@settings(deadline=None, max_examples=examples(60))
@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=30), random=st.randoms(use_true_random=False))
def test_only_waiting_starts_are_counted(lengths: list[int], random: Random) -> None:
    """In any order, a start passes exactly while fewer than four others wait."""
    service, left, waiting = make_service(unnamed(max_steps=4)), dict(enumerate(lengths)), set[int]()
    sent = dict.fromkeys(left, 0)

    while left:
        number = random.choice(list(left))
        (passed,) = nameless(service, [go_on(f"Task {number}", sent[number])])
        assert passed == (429 if not sent[number] and len(waiting) == 4 else 200)
        if passed == 429 or sent[number] == left[number]:
            del left[number]
        waiting.discard(number)
        if passed == 200 and not sent[number]:
            waiting.add(number)
        sent[number] += 1


@pytest.mark.parametrize("late", [False, True])
def test_a_start_s_cost_goes_with_its_conversation(late: bool) -> None:
    service = make_service(unnamed(limits={"max_cost_per_session": 50, "prices": PRICES}, max_cost_per_session=20))

    for number in range(5):
        answer = ask(service, prompt(f"Task {number}"), session="")
        if not late:
            settle(service, answer, Usage(1_500, 0))
        assert nameless(service, [go_on(f"Task {number}", 1)]) == [200]
        if late:
            settle(service, answer, Usage(1_500, 0))
        assert status(answer) == 200

    settle(service, ask(service, go_on("Task 0", 2), session=""), Usage(4_000, 0))
    assert nameless(service, [go_on("Task 0", 3)]) == [429]


def test_costs_of_prompts_add_up() -> None:
    service = make_service(unnamed(limits={"max_cost_per_session": 50, "prices": PRICES}, max_cost_per_session=20))

    for data in prompts(1, 2):
        settle(service, ask(service, data, session=""), Usage(1_000, 0))

    assert told(ask(service, prompt("Task 3"), session=""))["limit"] == "max_cost_per_session"


def test_starts_are_not_reported_as_nameless() -> None:
    service = make_service(unnamed(max_steps=1))

    assert nameless(service, prompts("a", "b")) == [200, 429]
    assert sample(service, "session_unnamed_total", policy="agents", mode="enforce") == 0
    assert sample(service, "session_limits_total", policy="agents", mode="enforce", limit="max_steps", action="reject") == 1


def test_tools_that_need_approval_are_forbidden_at_starts() -> None:
    answer = ask(make_service(unnamed(limits={"max_calls_per_tool": {"run": 0}}, max_steps=9)), prompt("Hi"), session="")

    assert changed(answer)["tool_choice"] == "none"
