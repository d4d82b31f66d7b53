"""Conversations under one caller without any header, through the whole service, against what each shows as a whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import pytest

from extproc.apis import open_conversation
from extproc.detectors.chain import ChainPlace, find_place
from extproc.detectors.turns import Turns
from extproc.policy.bundle import LoopDetection
from extproc.request.document import Document
from tests.support.loops import WRITERS
from tests.support.memory import forget
from tests.support.service import make_service
from tests.support.sessions import STUCK, agents, send, send_all
from tests.support.turn_writers import SHAPES, Did, as_chat

ORACLE = Turns(LoopDetection(enabled=True, similarity="turns"))
ORDERS = ["sequential", "lockstep", "random"]


class Agent(NamedTuple):
    """One conversation.

    Attributes:
        turns: in their order.
        window: this many of them are shown, 0 for all.
        kept: this many of the newest results are shown as they were, 0 for all.
    """

    turns: Sequence[Did]
    window: int = 0
    kept: int = 0

    def write(self, writer: Callable[[Sequence[Did]], dict[str, Any]], count: int) -> bytes:
        """The request after a number of turns."""
        turns = list(self.turns[:count])
        if self.kept:
            turns = [
                turn if place >= count - self.kept else turn._replace(results=("[cleared]",) * len(turn.results))
                for place, turn in enumerate(turns)
            ]
        return json.dumps(writer(turns[-self.window :] if self.window else turns)).encode()

    def loops(self, writer: Callable[[Sequence[Did]], dict[str, Any]]) -> bool:
        """Whether any of its requests would show a loop, were nothing left out."""
        bodies = [json.dumps(writer(self.turns[:count])).encode() for count in range(1, len(self.turns) + 1)]
        return any((found := ORACLE.compare(Document(body))[1]) is not None and found.looping for body in bodies)


def make_turns(random: Random, *, looping: bool) -> list[Did]:
    """An agent at work, which gets stuck or does not, wording each thought anew."""
    work = [
        Did(((random.choice(["read", "edit", "run"]), {"n": random.randrange(10**6)}),), (f"result {random.randrange(10**6)}",))
        for _ in range(random.randint(2, 6))
    ]
    name = f"part {random.randrange(10**6)}"
    cycle = [Did((("check", {name: part}),), (f"{name}.{part} is broken",)) for part in range(random.randint(1, 3))]
    turns = [*work, *(cycle * 8 if looping else work[:1])]
    return [turn._replace(number=number, thought=f"thought {random.randrange(10**9)}") for number, turn in enumerate(turns, 1)]


def list_refused(
    runs: Sequence[Agent], writer: Callable[[Sequence[Did]], dict[str, Any]], order: str, random: Random
) -> list[bool]:
    """Which of these, side by side, are refused at some time."""
    service = make_service(agents(session=None))
    at, refused = [0] * len(runs), [False] * len(runs)
    number = 0
    while left := [place for place, run in enumerate(runs) if at[place] <= len(run.turns)]:
        place = left[0] if order == "sequential" else left[number % len(left)] if order == "lockstep" else random.choice(left)
        number += 1
        refused[place] |= send(service, runs[place].write(writer, at[place])) != 200
        at[place] += 1
    return refused


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", ["chat", "anthropic", "responses"])
@pytest.mark.parametrize("kept", [0, 2])
def test_runs_of_one_task_are_no_loop(shape: str, order: str, kept: int) -> None:
    """Eight that begin with the same words and the same results, and end apart."""
    random = Random(f"{shape}{order}")
    same = make_turns(random, looping=False)
    runs = [Agent([*same, *make_turns(random, looping=False)], 0, kept) for _ in range(8)]

    assert not any(list_refused(runs, WRITERS[shape], order, random))


def test_a_session_of_several_conversations_is_no_loop() -> None:
    """Four agents below one name do the same at first: what they show tells them apart, and the one that loops is found."""
    service = make_service(agents())
    start = [Did((("ls", {}),), ("a.py",)), Did((("read", {}),), ("x = 1",))]
    for count in range(3):
        for run in range(4):
            turns = [turn._replace(thought=f"I am {run}.") for turn in start[:count]]
            assert send(service, json.dumps(as_chat(turns)).encode(), session_id="s") == 200

    stuck = [turn._replace(thought=f"Again, {place}.") for place, turn in enumerate([STUCK] * 3)]
    turns = [turn._replace(thought="I am 0.") for turn in start]
    cleared = [
        json.dumps(as_chat([*turns, *[turn._replace(results=("[cleared]",)) for turn in stuck[:count]], stuck[count]])).encode()
        for count in range(3)
    ]

    assert send_all(service, cleared, session_id="s") == [200, 200, 429]


def test_anonymous_callers_have_no_chain() -> None:
    """What tells no callers apart tells no conversations apart either."""
    service = make_service(agents(session=None, missing_descriptor="share"))
    turn = json.dumps(as_chat([STUCK])).encode()

    assert send_all(service, [turn] * 9, x_user_id="") == [200] * 9


def test_callers_have_chains_apart() -> None:
    """Two that send the same to the byte are two conversations."""
    service = make_service(agents(session=None))
    body = json.dumps(as_chat([STUCK])).encode()

    for _ in range(4):
        assert send_all(service, [body], x_user_id="ann") == [200]
        assert send_all(service, [body], x_user_id="bob") == [200]


def place(body: dict[str, Any]) -> ChainPlace:
    """Where a body stands."""
    found = find_place(open_conversation(Document(json.dumps(body).encode())), prefilled=False)
    assert found is not None
    return found


def test_a_conversation_begins_with_the_first_words_that_come_later() -> None:
    """What is known of a body without a user's message does not hide the first one."""
    began, spoken = as_chat([STUCK]), as_chat([STUCK, STUCK])
    for body in (began, spoken):
        body["messages"] = [message for message in body["messages"] if message["role"] != "user"]
    spoken["messages"].insert(3, {"role": "user", "content": "Go on."})
    expected = place(spoken).node
    forget()

    place(began)

    assert place(spoken).node == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_a_request_stands_below_the_one_before(shape: str) -> None:
    """Its parent is where that stood, in every API; ids, thoughts, results and spellings make no difference."""
    turns = [Did((("run", {"a": turn, "b": [1, 2.5]}),), (f"r{turn}",)) for turn in range(4)]
    again = [turn._replace(number=turn_number + 7, results=("other",)) for turn_number, turn in enumerate(turns)]
    places = [place(SHAPES[shape](turns[:count])) for count in range(5)]

    for earlier, later in pairwise(places):
        assert earlier.node in later.parents
        assert later.before == earlier.own
    assert places[4].node == place(SHAPES[shape](again)).node
    assert places[4].node != place(SHAPES[shape]([*turns[:3], turns[3]._replace(calls=(("run", {"a": 9}),))])).node


def test_what_the_user_said_first_tells_conversations_apart() -> None:
    """The same answers to other words are another conversation, whose last two messages are the same."""
    one, other = as_chat([STUCK] * 3), as_chat([STUCK] * 3)
    other["messages"][1]["content"] = "Break it."

    assert place(one).node != place(other).node
    assert place(one).own == place(other).own
