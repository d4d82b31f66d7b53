"""A transcript is judged as its requests would have been."""

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from extproc.cli.packed import FilePlace
from extproc.cli.scan.transcripts import About, ModelCall
from extproc.cli.scan.watch import RunReport, Watch
from extproc.decision import Repeat
from extproc.request.document import Document, NotCounted
from tests.support.scanning import JUDGING
from tests.support.turn_writers import SHAPES, Did

ABOUT, PLACE = About("k", "s", "p", "a"), FilePlace("f", 1)
RESULTS = (
    "ok",
    "running",
    "Error: no such file",
    "Error: line 7: " + "it is broken. " * 20,
    "Took 3.2 s, all is well. " * 12,
    "Took 4.7 s, all is well. " * 12,
    "Traceback (most recent call last): KeyError: 5",
    "connection refused",
    "",
)
CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("read", {"path": "a"}),
    ("read", {"path": "b"}),
    ("edit", {"path": "a", "text": "x" * 80}),
    ("status", {}),
)
TURNS = st.builds(
    Did,
    st.lists(st.sampled_from(CALLS), max_size=2).map(tuple),
    st.lists(st.sampled_from(RESULTS), min_size=2, max_size=2).map(tuple),
    st.sampled_from(["", "", "", "", "Go on.", "Do 5 more."]),
    st.sampled_from(["", "I think.", "So it is."]),
)


def describe(loop: Repeat | None) -> str:
    return (
        "" if loop is None else f"{loop.rule} {loop.count} {loop.strength} {loop.step} {loop.held}"
    )


def find_live(shape: str, turns: list[Did]) -> str:
    try:
        document = Document(json.dumps(SHAPES[shape](turns)).encode())
        return describe(JUDGING.turns.find_loop(JUDGING.turns.rule.read(document)))
    except NotCounted:
        return ""


def make_watch(key: str = "messages", *, tools: bool = True) -> tuple[Watch, list[RunReport]]:
    """A watch over messages under this key, and what it reports once it is closed."""
    done: list[RunReport] = []
    return Watch(JUDGING, ABOUT, key, done.append, tools=tools), done


def find_scanned(shape: str, turns: list[Did]) -> list[str]:
    """What `scan` finds at each turn, reading only the new messages."""
    key = {"gemini": "contents", "responses": "input"}.get(shape, "messages")
    watch, _ = make_watch(key, tools=False)
    found, shown = [], len(SHAPES[shape]([])[key])
    for count in range(1, len(turns) + 1):
        messages = SHAPES[shape](turns[:count])[key]
        watch.ask(ModelCall(PLACE))
        watch.add([json.dumps(message).encode() for message in messages[shown:]])
        shown = len(messages)
        found.append(describe(watch.judge(RunReport(ABOUT, PLACE))[0]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@given(
    turns=st.lists(TURNS, min_size=1, max_size=6), order=st.lists(st.integers(0, 5), max_size=40)
)
def test_calls_are_judged_as_their_requests(shape: str, turns: list[Did], order: list[int]) -> None:
    done = [
        turns[number % len(turns)]._replace(number=place) for place, number in enumerate(order, 1)
    ]
    done = [
        turn._replace(calls=turn.calls, results=turn.results[: len(turn.calls)]) for turn in done
    ]

    assert find_scanned(shape, done) == [
        find_live(shape, done[:count]) for count in range(1, len(done) + 1)
    ]


def test_loop_of_large_turns_is_found() -> None:
    large = Did((("read", {"path": "a"}),), ("Error: " + "x" * 400_000,))

    assert find_scanned("chat", [large] * 4)[2:] == [
        "repeat 3 strong 0 False",
        "repeat 4 strong 0 False",
    ]


def test_only_the_newest_turns_are_kept() -> None:
    watch, done = make_watch()
    for number in range(100):
        watch.ask(ModelCall(PLACE))
        watch.add([json.dumps({"role": "assistant", "content": f"step {number}"}).encode()])
    _, history = watch.judge(RunReport(ABOUT, PLACE))
    watch.close()

    assert (len(history.newest(100)), done[0].spent.calls) == (32, 100)


@pytest.mark.slow
def test_calls_after_an_unreadable_message_are_not_judged() -> None:
    watch, done = make_watch()
    text = {"type": "text", "text": "x"}
    for content in (*[[text]] * 4, [text] * 200_000, *[[text]] * 4):
        watch.ask(ModelCall(PLACE))
        watch.add(
            [
                json.dumps({"role": "assistant", "content": content}).encode(),
                b'{"role":"user","content":"no"}',
            ]
        )
    watch.close()

    assert [(loop.noted, loop.ends) for loop in done[0].loops] == [(4, 5)]
    assert done[0].unread == {"inspect_limit": 4}
