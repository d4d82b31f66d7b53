"""Conversations are followed by their chain, without any header."""

from itertools import pairwise
from typing import Any

import pytest

from extproc.apis import open_conversation
from extproc.detectors.chain import ChainPlace, find_place
from extproc.request.document import Document
from tests.support.memory import forget
from tests.support.messages import encoded
from tests.support.service import make_service
from tests.support.sessions import STUCK, agents, send, send_all
from tests.support.turn_writers import SHAPES, Did, as_chat


def test_conversations_of_one_session_are_told_apart() -> None:
    service = make_service(agents())
    start = [Did((("ls", {}),), ("a.py",)), Did((("read", {}),), ("x = 1",))]
    for count in range(3):
        for run in range(4):
            begun = as_chat([turn._replace(thought=f"I am {run}.") for turn in start[:count]])
            assert send(service, encoded(begun), session_id="s") == 200

    stuck = [turn._replace(thought=f"Again, {place}.") for place, turn in enumerate([STUCK] * 3)]
    turns = [turn._replace(thought="I am 0.") for turn in start]
    cleared = [
        encoded(
            as_chat(
                [
                    *turns,
                    *[turn._replace(results=("[cleared]",)) for turn in stuck[:count]],
                    stuck[count],
                ]
            )
        )
        for count in range(3)
    ]

    assert send_all(service, cleared, session_id="s") == [200, 200, 429]


def test_anonymous_callers_have_no_chain() -> None:
    service = make_service(agents(session=None, missing_descriptor="share"))

    assert send_all(service, [encoded(as_chat([STUCK]))] * 9, x_user_id="") == [200] * 9


def test_callers_have_separate_chains() -> None:
    service = make_service(agents(session=None))

    assert {
        send(service, encoded(as_chat([STUCK])), x_user_id=user) for user in ["ann", "bob"] * 4
    } == {200}


def place(body: dict[str, Any]) -> ChainPlace:
    found = find_place(open_conversation(Document(encoded(body))), prefilled=False)
    assert found is not None
    return found


def test_first_words_may_follow_the_first_turns() -> None:
    began, spoken = as_chat([STUCK]), as_chat([STUCK, STUCK])
    for body in (began, spoken):
        body["messages"] = [message for message in body["messages"] if message["role"] != "user"]
    spoken["messages"].insert(3, {"role": "user", "content": "Go on."})
    expected = place(spoken).node
    forget()

    place(began)

    assert place(spoken).node == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_parent_of_a_request_is_the_one_before(shape: str) -> None:
    """In every API; ids, thoughts, results and spellings make no difference."""
    turns = [Did((("run", {"a": turn, "b": [1, 2.5]}),), (f"r{turn}",)) for turn in range(4)]
    again = [
        turn._replace(number=turn_number + 7, results=("other",))
        for turn_number, turn in enumerate(turns)
    ]
    places = [place(SHAPES[shape](turns[:count])) for count in range(5)]

    for earlier, later in pairwise(places):
        assert earlier.node in later.parents
        assert later.before == earlier.own or later.depth == 2
    assert place(SHAPES[shape](turns[1:3])).before == places[2].answer
    assert places[4].node == place(SHAPES[shape](again)).node
    assert (
        places[4].node
        != place(SHAPES[shape]([*turns[:3], turns[3]._replace(calls=(("run", {"a": 9}),))])).node
    )


def test_first_words_tell_conversations_apart() -> None:
    one, other = as_chat([STUCK] * 3), as_chat([STUCK] * 3)
    other["messages"][1]["content"] = "Break it."

    assert place(one).node != place(other).node
    assert place(one).own == place(other).own
