"""The rules of other programs in `make precision`: their documented thresholds."""

import json
from collections.abc import Sequence

import pytest

from tests.bench.precision.others import (
    Step,
    apply_rules,
    count_detections,
    count_equal_calls,
    count_streak,
    find_stuck,
    read_steps,
)
from tests.support.scratchpads import FORMS, Step as Written
from tests.support.turn_writers import SHAPES, Did, Writer, as_chat


def call(
    tool: str = "a", given: bytes = b"{}", result: str = "same", *, failed: bool = False
) -> Step:
    return Step("", [(tool, given)], [(failed, result)])


def talk(said: str, heard: str = "") -> Step:
    return Step(said, (), [(False, heard)] if heard else [])


A, B, C = call("a"), call("b"), call("c")
FAILED = [call(result=f"error {n}", failed=True) for n in range(4)]
USER = talk("Done.", "Again, please.")


@pytest.mark.parametrize(
    ("steps", "stuck"),
    [
        ([A] * 3, 0),
        ([B, *[A] * 4], 1),
        ([*[A] * 3, USER, A], 0),
        ([call(result=str(n)) for n in range(6)], 0),
        (FAILED[:2], 0),
        (FAILED[:3], 1),
        ([talk("Hm.")] * 2, 0),
        ([talk("Hm."), talk("So."), talk("Well.")], 1),
        ([talk("Hm."), talk("So.", "Go on."), talk("Well.")], 0),
        ([B, A, B, A, B], 0),
        ([A, B, A, B, A, B], 1),
        ([A, B, C] * 4, 0),
    ],
)
def test_openhands_is_stuck_at_documented_counts(steps: Sequence[Step], stuck: int) -> None:
    assert find_stuck(steps) == stuck


@pytest.mark.parametrize(
    ("steps", "detections"),
    [
        ([A] * 4, 0),
        ([A] * 5, 1),
        ([A] * 6, 2),
        ([call(result=str(n)) for n in range(5)], 1),
        ([*[A] * 4, B, A], 0),
        ([*[A] * 4, USER, A], 0),
        ([A, B] * 5, 1),
        ([*[A, B] * 4, A], 0),
        ([call(tool) for tool in "abcde"] * 5, 1),
        ([call(tool) for tool in "abcdef"] * 5, 0),
        ([*[A] * 6, B], 0),
        ([talk("I will look at the file again, because it is empty. " * 9)], 0),
        ([talk("I will look at the file again, because it is empty. " * 11)], 1),
        ([talk("```\n" + "I will look at the file again, because it is empty. " * 11)], 0),
        ([talk("- I will look at the file again, because it is empty.\n" * 11)], 0),
        (
            [
                talk(
                    "".join(
                        f"File {n} is empty, and so I look at the next one now: {n}. {'x' * n}"
                        for n in range(11)
                    )
                )
            ],
            0,
        ),
    ],
)
def test_gemini_cli_detects_at_documented_counts(steps: Sequence[Step], detections: int) -> None:
    assert count_detections(steps) == detections


@pytest.mark.parametrize(
    ("steps", "streak"),
    [
        ([A], 1),
        ([A] * 6, 6),
        ([A, B, A, B, A], 3),
        ([A, call("a", b"[]"), A], 1),
        ([Step("", [*A.calls] * 5)], 1),
        ([*[A] * 2, USER, A], 3),
        ([*[A] * 5, B], 1),
        ([talk("The same.", "ok")] * 5, 0),
        ([talk("The  same.", "ok"), *[talk("The same.", "ok")] * 5], 6),
        ([talk("I am stuck. " * 5)], 0),
        ([talk("I am stuck. " * 6)], 6),
        ([talk("no " * 11)], 0),
        ([talk("no " * 12)], 12),
        ([talk("I am stuck. " * 6 + "Not any more.")], 0),
    ],
)
def test_openrouter_streak_grows_as_documented(steps: Sequence[Step], streak: int) -> None:
    assert count_streak(steps) == streak


@pytest.mark.parametrize(
    ("steps", "count"),
    [([A], 1), ([A, B, C, A, USER, A], 3), ([Step("", [*A.calls] * 2)], 1), ([A, USER], 0)],
)
def test_counter_counts_equal_calls_of_the_conversation(steps: Sequence[Step], count: int) -> None:
    assert count_equal_calls(steps) == count


@pytest.mark.parametrize("write", SHAPES.values(), ids=SHAPES)
def test_steps_are_read_in_every_format(write: Writer) -> None:
    did = [Did((("read", {"b": 1, "a": 2}),), ("nothing",), "", f"thought {n}", n) for n in (1, 2)]
    body = write([*did, Did((), (), "Go on.", "Done.", 3)])

    last, *reads = read_steps(json.dumps(body).encode())

    assert [(step.calls, "nothing" in step.results[0][1]) for step in reads] == [
        (reads[0].calls, True)
    ] * 2
    assert (last.calls, [text.split("\n")[-1] for _, text in last.results]) == ([], ["Go on."])


@pytest.mark.parametrize("form", FORMS)
def test_steps_are_read_in_one_message(form: str) -> None:
    steps = list(
        read_steps(json.dumps(FORMS[form]([Written("look", "a", "nothing")] * 3)).encode())
    )

    assert [len(steps), count_equal_calls(steps)] == [3, 3]


def test_rules_see_steps_that_requests_leave_out() -> None:
    """A client that keeps its last message, and sends one request twice."""
    did = [Did((("read", {"n": n % 2}),), ("nothing",), "", f"Look {n}.", n) for n in range(1, 8)]
    shown = [as_chat(did[max(end - 1, 0) : end]) for end in range(8)]
    bodies = [json.dumps(body).encode() for body in (*shown[:4], *shown[3:])]

    assert [found for found in apply_rules(bodies) if found[1] < 9] == [
        ("equal calls", 7, False),
        ("OpenHands", 8, True),
        ("equal calls", 8, False),
    ]
