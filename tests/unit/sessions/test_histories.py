"""Known histories: reading the new part of a request finds the same as reading all of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.request.document import MAX_STEPS, Document, NotCounted
from extproc.sessions import histories
from extproc.sessions.histories import read_known_calls
from extproc.sessions.history import RECORD, read_tool_calls
from tests.support.turn_writers import SHAPES, Did

_NUMBERS = count()
_CALLS = st.tuples(st.sampled_from(["read", "write", "pay", ""]), st.sampled_from([{}, {"a": 1}, {"a": 1.5}, {"b": [3, "x"]}]))
_TURNS = st.lists(
    st.builds(
        lambda calls, user, number: Did(tuple(calls), ("seen",) * len(calls), user, number=number),
        st.lists(_CALLS, min_size=1, max_size=3),
        st.sampled_from(["", "go on"]),
        st.integers(0, 40),
    ),
    max_size=8,
)
_STEPS = st.lists(
    st.tuples(st.sampled_from(["append", "append", "append", "condense", "mark", "model", "respell"]), _TURNS), max_size=8
)
_GAPS = st.lists(
    st.sampled_from(
        [
            *(
                ",",
                " ",
                "\n",
                "]",
                "[",
                "}",
                "{",
                "null",
                "1",
                '"',
                '"x"',
                ",null",
                ",[]",
                ',"x"',
                ",{}",
                '],"messages":[',
                "\\",
                "\0",
            ),
            *(
                ',{"role":"user","content":"x"}',
                ',{"role":"assistant","content":1.5}',
                ',{"role":7}',
                '],"model":"n","messages":[{}',
            ),
            ',{"role":"assistant","content":null,"tool_calls":[{"id":"z","type":"function","function":{"name":"f","arguments":"{}"}}]}',
            '{"role":"assistant","function_call":{"name":"g","arguments":"{}"}}',
        ]
    ),
    max_size=6,
).map("".join)


def name_session() -> str:
    """A name that no other session has."""
    return f"session {next(_NUMBERS)}"


def look(body: bytes, session: str = "") -> object:
    """What a history shows, read as a whole or, in a session, as far as it is new; or why it is not counted."""
    try:
        found = read_known_calls(Document(body), session) if session else read_tool_calls(Document(body))
    except NotCounted as why:
        return why.reason
    return found.records, found.total, found.newest, found.tools, found.model


def is_known(body: bytes, session: str) -> bool:
    """Whether a body is not read as a whole."""
    document = Document(body)
    read_known_calls(document, session)
    return document.conversation is None


def make_chat(turns: int, *, agent: str = "a", more: str = "") -> dict[str, Any]:
    """A chat after this many turns of an agent's."""
    value = SHAPES["chat"]([Did((("read", {"path": f"{agent}{at}"}),), ("seen",)) for at in range(turns)])
    return {**value, **({"user": more} if more else {})}


def write(value: dict[str, Any], indent: int | None = None) -> bytes:
    """A body that is worth remembering."""
    return json.dumps({"metadata": "x" * 4_096, **value}, indent=indent).encode()


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Have no history known."""
    yield
    histories._SESSIONS._young.clear()
    histories._SESSIONS._old.clear()


@pytest.mark.parametrize("shape", sorted(SHAPES))
@given(_TURNS, _STEPS)
def test_what_is_known_changes_nothing(shape: str, turns: list[Did], steps: list[tuple[str, list[Did]]]) -> None:
    """However histories grow, are condensed, marked or spelled differently: both ways of reading find the same."""
    session, marked, model, indent = name_session(), False, 0, None
    for what, others in [("append", []), *steps]:
        turns = [*turns, *others] if what != "condense" else turns[len(others) :]
        marked = marked or what == "mark"
        model += what == "model"
        indent = 1 if what == "respell" else indent
        value = SHAPES[shape](turns)
        last: dict[str, Any] = next((item for item in value.values() if isinstance(item, list)), [{}])[-1]
        last |= {"cache_control": {"type": "ephemeral"}} if marked else {}
        value["model"] = f"{value.pop('model', '')}{model}"  # behind the messages
        body = write(value, indent)

        assert look(body, session) == look(body)


@pytest.mark.parametrize("shape", ["anthropic", "chat", "responses", "gemini"])
@given(st.integers(3, 12), _GAPS, st.integers(0, 3))
def test_anything_may_stand_in_the_gap(shape: str, turns: int, gap: str, back: int) -> None:
    """Whatever stands in place of the new messages, valid or not, a history never looks like another one."""
    did = [Did((("read", {"path": f"{at}"}),), ("seen",)) for at in range(turns)]
    bodies = [write(SHAPES[shape](did[:most])) for most in range(1, turns + 1)]
    session = name_session()
    for body in bodies:
        look(body, session)
    body = bodies[-1]
    place = body.rindex(b"]}") if shape != "responses" else body.rindex(b"}]") + 1
    for _ in range(back):
        place = body.rindex(b", {", 0, place)
    changed = body[:place] + gap.encode() + body[place:]

    replaced = body[:place] + gap.encode() + body[body.rindex(b"]") :]

    for candidate in (changed, replaced, body):
        assert look(candidate, session) == look(candidate)


@pytest.mark.parametrize("shape", ["anthropic", "bedrock", "chat", "gemini", "ollama", "responses"])
def test_a_history_that_goes_on_is_not_read_as_a_whole(shape: str) -> None:
    """From where it is worth the while, in each API; and what is known moves along with it."""
    session = name_session()
    did = [Did((("read", {"path": f"{at}"}),), ("seen",), number=at + 1) for at in range(60)]
    known = []
    for most in range(1, 61):
        body = write(SHAPES[shape](did[:most]))
        known.append(is_known(body, session))

        assert look(body, session) == look(body)

    assert known[2:] == [True] * 58
    kept = histories._SESSIONS.get(session)
    assert kept is not None
    assert len(kept._known) == 1
    assert len(kept._known[0].tally.records) >= 50 * RECORD


@pytest.mark.parametrize("marked", [1, 2, 4])
def test_marks_may_move_along(marked: int) -> None:
    """A client that marks only its newest messages to be cached is still known, except the first time."""
    session, known = name_session(), []
    for turns in range(1, 30):
        value = make_chat(turns)
        for message in value["messages"][-marked:]:
            message["cache_control"] = {"type": "ephemeral"}
        known.append(is_known(write(value), session))

    assert known == [False] * 2 + [True] * 27


def test_two_agents_of_a_session_are_known_side_by_side() -> None:
    """A sub-agent has a history of its own, and takes turns with its parent."""
    session, known = name_session(), []
    for turns in range(5, 30):
        for agent in ("parent", "child"):
            body = write(make_chat(turns, agent=agent))
            known.append(is_known(body, session))

            assert look(body, session) == look(body)

    assert known[2:] == [True] * 48


def test_no_other_session_is_known_by_the_same_history() -> None:
    """What one session has shown says nothing of another one's."""
    one, other = name_session(), name_session()
    body = write(make_chat(9))
    look(body, one)

    assert is_known(body, one)
    assert not is_known(body, other)


def test_a_session_that_never_goes_on_is_not_noted_for_ever() -> None:
    """If no body continues the one before, histories are noted in vain four times; one that does is noted again."""
    session = name_session()
    bodies = [write({"n": number, **make_chat(9)}) for number in range(20)]
    assert not any(is_known(body, session) for body in bodies)
    assert not is_known(bodies[4], session)

    assert is_known(write({"n": 3, **make_chat(11)}), session)
    assert [is_known(bodies[4], session) for _ in range(2)] == [False, True]


@pytest.mark.parametrize(
    ("shape", "calls"),
    [
        ("chat", [("f", {"n": at}) for at in range(520)]),
        ("chat", [(f"f{at}", {}) for at in range(40)]),
        ("chat", [("f", {"n": at % 30}) for at in range(60)]),
    ],
    ids=["calls", "tools", "equal calls"],
)
def test_what_takes_much_room_is_not_known(shape: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    """Many calls, many tools, and many calls with equals whose ids repeat are read as a whole."""
    session = name_session()
    body = write(SHAPES[shape]([Did((call,), number=1 + at % 30) for at, call in enumerate(calls)]))

    assert [is_known(body, session) for _ in range(2)] == [False, False]


def test_bounds_hold_for_what_is_known() -> None:
    """The bound on messages is the same as for a history that is not known."""
    many = name_session()
    talk = [{"role": "user", "content": "x"}] * (MAX_STEPS - 22)
    value = make_chat(10)
    whole = {**value, "messages": [*value["messages"], *talk]}
    assert [is_known(write(value), many), is_known(write(whole), many)] == [False, True]
    whole["messages"].append(talk[0])
    assert look(write(whole), many) == look(write(whole)) == "inspect_limit"

    calls = [{"id": f"z{at}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for at in range(MAX_STEPS)]
    bodies = [
        write({**value, "messages": [*value["messages"], {"role": "assistant", "tool_calls": calls[most:]}]})
        for most in (11, 10)
    ]
    assert [look(body, many) for body in bodies] == [look(body) for body in bodies]
    assert look(bodies[0]) != look(bodies[1]) == "inspect_limit"


def test_numbers_in_what_is_known_keep_their_bound() -> None:
    """A history whose numbers count against a bound is read as a whole."""
    one, other = name_session(), name_session()
    value = SHAPES["ollama"]([Did((("f", {"a": at + 0.5}),)) for at in range(12)])
    assert [is_known(write(value), one) for _ in range(2)] == [False, False]

    turns = [*[Did((("f", {"a": at}),)) for at in range(12)], *[Did((("f", {"a": [at + 0.5] * 900}),)) for at in range(12)]]
    bodies = [write(SHAPES["ollama"](turns[:most])) for most in range(12, 25)]
    assert [look(body, other) for body in bodies] == [look(body) for body in bodies]
    assert look(bodies[-1]) == "inspect_limit"


@pytest.mark.parametrize(
    "body",
    [
        {"copy": make_chat(9)["messages"], **make_chat(9)},
        {**make_chat(9), "model": 7},
        {**SHAPES["responses"]([Did((("f", {"n": at}),), ("x",)) for at in range(9)]), "previous_response_id": "r"},
        {"request": SHAPES["gemini"]([Did((("f", {"n": at}),), ("x",)) for at in range(9)])},
    ],
    ids=["messages that stand there twice", "a model of another type", "a history with the server", "a wrapped body"],
)
def test_what_is_never_known(body: dict[str, Any]) -> None:
    """If the bytes do not tell where messages stand, or messages alone do not say all, the whole body is read."""
    session = name_session()

    assert [is_known(write(body), session) for _ in range(2)] == [False, False]
    assert look(write(body), session) == look(write(body))


def test_half_a_body_is_not_json() -> None:
    """Also where the end of what is left is what the whole one ended in."""
    session = name_session()
    value = make_chat(9)
    value["messages"][-1]["content"] = [{"type": "text", "text": "x"}]
    whole = write({"messages": value["messages"]})

    assert [is_known(whole, session) for _ in range(2)] == [False, True]
    assert look(whole[: whole.rindex(b"]}")], session) == "not_json"
