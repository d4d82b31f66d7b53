"""The preset steers honest repetition at most, and refuses stuck agents at its threshold."""

import json
from collections.abc import Sequence

import pytest

from extproc.engine.plan import Detector
from extproc.request.document import Document
from extproc.store.rules.windows import UNCOUNTED
from tests.support.families import (
    EMPTY,
    FATAL,
    HONEST,
    LONG,
    LOOPS,
    PROGRESS,
    TURNS,
    UNTELLABLE,
    Family,
    call,
    make_loop,
)
from tests.support.preset import AGENTS, make_detector
from tests.support.turn_writers import SHAPES, STYLES, Did, as_text

WRITTEN = ["chat", "anthropic", "responses", "text"]


def write_text(turn: Did) -> str:
    return STYLES["fence"](turn) if turn.calls else turn.thought


def find_refused(variants: Sequence[list[Did]], detector: Detector = AGENTS) -> list[int]:
    """The numbers of variants that land or are refused."""
    acted = [
        act(variant, writes(variant, number), detector) for number, variant in enumerate(variants)
    ]
    return [
        number for number, actions in enumerate(acted) if not {"land", "reject"}.isdisjoint(actions)
    ]


def act(turns: Sequence[Did], written: str, detector: Detector = AGENTS) -> list[str]:
    """The action on each request of a conversation; an agent that writes texts has no tools."""
    actions = []
    for end in range(1, len(turns) + 1):
        if written == "text":
            body = as_text(turns[:end], write_text)
        else:
            body = SHAPES[written](turns[:end]) | {
                "tools": [{"type": "function", "function": {"name": "f"}}]
            }
        found = detector.similarity.compare(Document(json.dumps(body).encode()))[1]
        outcome = detector.judge("0" * 8, "0" * 16, UNCOUNTED, detector.similarity, found)
        actions.append(outcome.action.value)
    return actions


def writes(variant: list[Did], number: int) -> str:
    """How a variant is written; prompts of a program are told from results by the agent's tools."""
    written = WRITTEN[number % len(WRITTEN)]
    return "chat" if written == "text" and not variant[0].calls else written


@pytest.mark.slow
@pytest.mark.parametrize("family", HONEST.values(), ids=HONEST)
def test_honest_repetition_passes_below_14_turns(family: Family) -> None:
    variants = family()

    assert len(variants) >= 30
    assert all(len(variant) >= TURNS for variant in variants)
    assert find_refused(variants[::3]) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", PROGRESS.values(), ids=PROGRESS)
def test_progress_is_allowed(family: Family) -> None:
    variants = family()
    acted = [act(variant, writes(variant, number)) for number, variant in enumerate(variants[::3])]

    assert len(variants) >= 30
    assert [actions for actions in acted if set(actions) != {"allow"}] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "the same error in every third turn",
        "the same change, and the file grows",
        "reworded searches find nothing",
        "a circle whose results vary",
    ],
)
def test_weakest_loops_are_only_steered(kind: str) -> None:
    variants = LOOPS[kind]()
    acted = [act(variant, writes(variant, number)) for number, variant in enumerate(variants[::3])]

    assert len(variants) >= 30
    assert {(actions[-1], *sorted(set(actions))) for actions in acted} == {
        ("steer", "allow", "steer")
    }


def test_similar_error_is_steered() -> None:
    turns = [
        call("do", f"error: job {n} is broken, its log is at 0x{n}", n, at=n) for n in range(13)
    ]

    found = AGENTS.similarity.compare(Document(json.dumps(SHAPES["chat"](turns)).encode()))[1]

    assert found is not None
    assert found.rule == "similar_error"
    assert act(turns, "chat")[-1] == "steer"


@pytest.mark.parametrize(
    ("result", "empty"),
    [
        *[(result, True) for result in EMPTY],
        ("<no output>", True),
        ("No results found.", True),
        ("Query returned no results", True),
        ("Found 0 matches", True),
        ("null", True),
        ('{"success": true, "data": {"items": [], "next": null}}', True),
        ("No errors found", False),
        ('{"ok": true, "errors": []}', False),
        ('{"state": "running", "output": ""}', False),
        ('{"count": 0}', False),
        ('["a"]', False),
        ("[1 file", False),
        ("no results, so here are others: " + "a page. " * 9, False),
        ("ok", False),
        ("\u2713", False),
    ],
)
def test_searches_are_steered_if_results_are_empty(result: str, empty: bool) -> None:
    turns = [call("grep", result, n, pattern=f"word {n}") for n in range(9)]

    assert act(turns, "chat") == ["allow"] * 7 + ["steer" if empty else "allow"] * 2


def test_allowed_searches_may_find_nothing() -> None:
    turns = [call("grep", "[]", n, pattern=f"word {n}") for n in range(12)]

    assert set(act(turns, "chat", make_detector(tools={"grep": {"allow": True}}))) == {"allow"}


def test_poll_that_ends_is_allowed() -> None:
    states = ["queued", "queued", "running", "running", "done"]
    turns = [
        turn
        for n, state in enumerate(states)
        for turn in (call("sleep", "ok", n, s=5), call("poll", state, n, job=7))
    ]

    assert act(turns, "chat") == ["allow"] * 4 + ["steer", "allow"] + ["steer"] * 3 + ["allow"]


@pytest.mark.parametrize(
    ("action", "escalate", "expected"),
    [
        ("throttle", {"reject": 7}, "warn"),
        ("reject", {}, "warn"),
        ("warn", {"reject": 7}, "warn"),
        ("steer", {}, "steer"),
    ],
)
def test_similar_error_gets_a_note_at_most(
    action: str, escalate: dict[str, int], expected: str
) -> None:
    detector = make_detector(action=action, escalate=escalate)
    turns = [call("do", f"error: job {n} is broken", n, at=n) for n in range(24)]

    assert act(turns, "chat", detector) == ["allow"] * 5 + [expected] * 19


@pytest.mark.deep
@pytest.mark.parametrize("result", [LONG, FATAL], ids=["long", "fatal"])
@pytest.mark.parametrize("family", HONEST.values(), ids=HONEST)
def test_loop_is_refused_at_its_threshold(family: Family, result: str) -> None:
    expected = ["allow"] * 2 + ["steer"] * 2 + ["land"] * 2 + ["reject"] * (TURNS - 6)
    for number, variant in enumerate(family()):
        assert act(make_loop(variant, result), WRITTEN[number % len(WRITTEN)]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", UNTELLABLE.values(), ids=UNTELLABLE)
def test_allowed_tool_may_repeat_like_a_loop(family: Family) -> None:
    variants = family()
    allowed = make_detector(tools={variant[0].calls[0][0]: {"allow": True} for variant in variants})

    assert len(variants) >= 30
    assert find_refused(variants[::3]) == list(range(len(variants[::3])))
    assert find_refused(variants[::3], allowed) == []


def test_weak_loop_lands_and_is_refused_later() -> None:
    turns = [
        Did((("poll", {}),), ("running",), "", f"Thought no. {number}!") for number in range(16)
    ]

    assert act(turns, "chat") == ["allow"] * 2 + ["steer"] * 11 + ["land"] * 2 + ["reject"]
