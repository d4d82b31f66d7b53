"""What honest agents repeat is steered at most by the preset, and what stuck agents repeat is refused at its threshold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import extproc
from extproc.detectors import make_similarity
from extproc.engine.plan import Detector
from extproc.policy.bundle import LoopDetection
from extproc.request.document import Document
from extproc.store.rules.windows import UNCOUNTED
from tests.support.families import FATAL, HONEST, LONG, PROGRESS, TURNS, UNTELLABLE, Family, call, make_loop
from tests.support.turn_writers import SHAPES, STYLES, Did, as_text

PRESET = json.loads((Path(extproc.__file__).parent / "policy/presets/agents.json").read_text())["spec"]["loop_detection"][0]
WRITTEN = ["chat", "anthropic", "responses", "text"]


def make_detector(**more: Any) -> Detector:  # noqa: ANN401  # keys of loop_detection
    """The preset's `turns`."""
    loop = LoopDetection.model_validate(PRESET | more)
    return Detector("agents", "turns", loop, make_similarity(loop), shadow=False, namespace="")


AGENTS = make_detector()


def write_text(turn: Did) -> str:
    """The assistant's message where actions are texts."""
    return STYLES["fence"](turn) if turn.calls else turn.thought


def act(turns: Sequence[Did], written: str, detector: Detector = AGENTS) -> list[str]:
    """What is done about each request of a conversation with an agent that has tools; in texts it has none."""
    actions = []
    for end in range(1, len(turns) + 1):
        if written == "text":
            body = as_text(turns[:end], write_text)
        else:
            body = SHAPES[written](turns[:end]) | {"tools": [{"type": "function", "function": {"name": "f"}}]}
        found = detector.similarity.compare(Document(json.dumps(body).encode()))[1]
        outcome = detector.judge("0" * 8, "0" * 16, UNCOUNTED, detector.similarity, found)
        actions.append(outcome.action.value)
    return actions


def writes(variant: list[Did], number: int) -> str:
    """How a variant is written; a program's prompts are told from results by the tools that the agent has."""
    written = WRITTEN[number % len(WRITTEN)]
    return "chat" if written == "text" and not variant[0].calls else written


def refused(variants: Sequence[list[Did]], detector: Detector = AGENTS) -> list[tuple[int, list[str]]]:
    """Of the variants those that land or are refused, by number."""
    acted = [(number, act(variant, writes(variant, number), detector)) for number, variant in enumerate(variants)]
    return [(number, actions) for number, actions in acted if not {"land", "reject"}.isdisjoint(actions)]


@pytest.mark.slow
@pytest.mark.parametrize("family", HONEST.values(), ids=HONEST)
def test_honest_repetition_is_not_refused_before_it_stands_fourteen_times(family: Family) -> None:
    """At the preset, in every API and as texts: at most it gets notes."""
    variants = family()

    assert len(variants) >= 30
    assert all(len(variant) >= TURNS for variant in variants)
    assert refused(variants) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", PROGRESS.values(), ids=PROGRESS)
def test_nothing_is_done_about_progress(family: Family) -> None:
    """Not even a note."""
    variants = family()
    acted = [act(variant, writes(variant, number)) for number, variant in enumerate(variants)]

    assert len(variants) >= 30
    assert [actions for actions in acted if set(actions) != {"allow"}] == []


def test_a_similar_error_is_steered() -> None:
    """Nothing else sees it."""
    turns = [call("do", f"error: job {n} is broken, its log is at 0x{n}", n, at=n) for n in range(13)]

    found = AGENTS.similarity.compare(Document(json.dumps(SHAPES["chat"](turns)).encode()))[1]

    assert found is not None
    assert found.rule == "similar_error"
    assert act(turns, "chat")[-1] == "steer"


@pytest.mark.parametrize(
    ("action", "escalate", "expected"),
    [("throttle", {"reject": 7}, "warn"), ("reject", {}, "warn"), ("warn", {"reject": 7}, "warn"), ("steer", {}, "steer")],
)
def test_a_similar_error_gets_a_note_at_most(action: str, escalate: dict[str, int], expected: str) -> None:
    """However often it stands there; a policy without notes warns."""
    detector = make_detector(action=action, escalate=escalate)
    turns = [call("do", f"error: job {n} is broken", n, at=n) for n in range(24)]

    assert act(turns, "chat", detector) == ["allow"] * 5 + [expected] * 19


@pytest.mark.deep
@pytest.mark.parametrize("result", [LONG, FATAL], ids=["long", "fatal"])
@pytest.mark.parametrize("family", HONEST.values(), ids=HONEST)
def test_the_same_made_a_loop_is_refused_at_its_threshold(family: Family, result: str) -> None:
    """A long result or a fatal error that comes back seven times."""
    expected = ["allow"] * 2 + ["steer"] * 2 + ["land"] * 2 + ["reject"] * (TURNS - 6)
    for number, variant in enumerate(family()):
        assert act(make_loop(variant, result), WRITTEN[number % len(WRITTEN)]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", UNTELLABLE.values(), ids=UNTELLABLE)
def test_what_cannot_be_told_from_a_loop_has_to_be_allowed(family: Family) -> None:
    """Three kinds of honest repetition are refused; with `tools.allow` none is."""
    variants = family()
    allowed = make_detector(tools={variant[0].calls[0][0]: {"allow": True} for variant in variants})

    assert len(variants) >= 30
    assert [number for number, _ in refused(variants)] == list(range(len(variants)))
    assert refused(variants, allowed) == []


def test_even_honest_repetition_ends() -> None:
    """A weak loop lands when it has stood fourteen times, and is refused two turns later."""
    turns = [Did((("poll", {}),), ("running",), "", f"Thought no. {number}!") for number in range(16)]

    assert act(turns, "chat") == ["allow"] * 2 + ["steer"] * 11 + ["land"] * 2 + ["reject"]
