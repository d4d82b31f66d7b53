"""Escalation: one loop gets stricter actions at higher thresholds."""

from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from extproc.decision import Action
from tests.support.looping import looping
from tests.support.loops import STATELESS, Guard
from tests.support.messages import encoded
from tests.support.turn_writers import Did, as_chat

STEPS: dict[str, Any] = {
    "action": "warn",
    "threshold_identical_requests": 2,
    "escalate": {"throttle": 4, "reject": 5},
}
STEER: dict[str, Any] = {"action": "steer", "escalate": {"reject": 5}}
COUNTED = ("exact", "canonical", "tail", "mcp")


def call(tool: str = "f") -> bytes:
    return encoded(
        {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "tools/call",
            "params": {"name": tool, "arguments": {}},
        }
    )


@pytest.mark.parametrize("window_type", ["sliding_ttl", "sliding_log", "fixed"])
@pytest.mark.parametrize("similarity", COUNTED)
def test_each_action_starts_at_its_own_threshold(similarity: str, window_type: str) -> None:
    guard = Guard(similarity=similarity, window_type=window_type, **STEPS)
    data = call() if similarity == "mcp" else looping(1)

    sent = [guard.send(data, now) for now in range(7)]

    assert sent == ["allow", "warn", "warn", "throttle", "reject", "reject", "reject"]


@pytest.mark.parametrize("similarity", STATELESS)
def test_history_gets_strictest_action_whose_threshold_it_meets(similarity: str) -> None:
    guard = Guard(similarity=similarity, **STEPS)

    sent = [guard.send(looping(times)) for times in range(7)]

    assert sent == ["allow", "allow", "warn", "warn", "throttle", "reject", "reject"]


_TURNS = st.lists(st.sampled_from(["aa", "ab", "ba", "cc", "error", "x error"]), max_size=16)


@given(_TURNS, st.integers(1, 4), st.sampled_from(STATELESS))
@example(["aa"] * 10 + ["ab"], 2, "turns")
def test_escalation_equals_separate_detectors(
    turns: list[str], times: int, similarity: str
) -> None:
    """The same action as the strictest of two detectors, each with one of the thresholds."""
    did = [Did(((turn[0], {"n": 1}),), (turn,)) for turn in turns * times]
    data = encoded(as_chat(did))
    single = [
        Guard(similarity=similarity, action=action, threshold_identical_requests=threshold)
        for action, threshold in (("reject", 5), ("warn", 3))
    ]

    sent = Guard(similarity=similarity, action="warn", escalate={"reject": 5}).send(data)

    assert sent == next(
        (action for action in (guard.send(data) for guard in single) if action != "allow"), "allow"
    )


def test_cooldown_starts_at_first_refusal() -> None:
    guard = Guard(**STEPS, window_seconds=10, cooldown_seconds=100)

    sent = [guard.send(b"x", now) for now in (0, 1, 2, 3, 20, 21, 22, 23, 24, 50, 123, 140)]

    held, refused = sent[:4], sent[4:9]
    assert held == ["allow", "warn", "warn", "throttle"]
    assert refused == ["allow", "warn", "warn", "throttle", "reject"]
    assert sent[9:] == ["reject", "reject", "allow"]


@pytest.mark.parametrize("similarity", STATELESS)
def test_warned_history_starts_no_cooldown(similarity: str) -> None:
    guard = Guard(similarity=similarity, **STEPS, cooldown_seconds=60)

    sent = [guard.send(looping(times)) for times in (4, 1, 5, 1, 2)]

    assert sent == ["throttle", "allow", "reject", "reject", "reject"]


def test_count_refused_false_counts_only_passed_requests() -> None:
    guard = Guard(**STEPS, count_refused=False)

    outcomes = [guard.judge(b"x") for _ in range(7)]

    assert [outcome.count for outcome in outcomes] == [1, 2, 3, 4, 5, 5, 5]
    assert [outcome.action for outcome in outcomes[3:]] == [Action.THROTTLE, *[Action.REJECT] * 3]


@pytest.mark.parametrize(("own", "expected"), [(2, [2, 4]), (None, [3, 5]), (6, [6, 8])])
@pytest.mark.parametrize("similarity", [*STATELESS, "mcp"])
def test_tool_with_own_threshold_escalates_as_others_do(
    similarity: str, own: int | None, expected: list[int]
) -> None:
    guard = Guard(similarity=similarity, **STEER, tools={"read_file": {"threshold": own}})
    data = (
        [call("read_file")] * 9
        if similarity == "mcp"
        else [looping(times) for times in range(1, 10)]
    )

    sent = [guard.send(body) for body in data]

    assert [sent.index("steer") + 1, sent.index("reject") + 1] == expected


def test_outcome_names_threshold_of_its_own_action() -> None:
    guard = Guard(similarity="turns", **STEER)

    steered, refused = guard.judge(looping(3)), guard.judge(looping(5))

    assert [outcome.repeat and outcome.repeat.threshold for outcome in (steered, refused)] == [3, 5]
    assert "5 of the last 5 turns" in refused.subject.write_message(refused, "POST", "/")


def test_actions_are_ordered_by_strictness() -> None:
    assert [*Action] == [
        Action.ALLOW,
        Action.WARN,
        Action.STEER,
        Action.THROTTLE,
        Action.LAND,
        Action.REJECT,
    ]
