"""Loops that continue after a summary replaced the history, in a session with a name."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest

from tests.support.told import tell_session
from tests.support.turn_writers import Did, as_chat

PRESET = {"action": "steer", "escalate": {"reject": 7}, "weak_threshold": 14}
TASK = "Mend the tests."
SEGMENTS = 5


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _claude(summary: str) -> list[dict[str, str]]:
    begun = "This session is being continued from a previous conversation that ran out of context."
    return [_user(f"{begun} The summary below covers the earlier portion.\n\nSummary:\n{summary}")]


def _codex(summary: str) -> list[dict[str, str]]:
    begun = "Another language model started to solve this problem and produced a summary of its"
    return [_user(TASK), _user(f"{begun} thinking process. Here is the summary:\n{summary}")]


def _gemini(summary: str) -> list[dict[str, str]]:
    said = {"role": "assistant", "content": "Got it. Thanks for the additional context!"}
    return [_user(f"<state_snapshot>\n{summary}\n</state_snapshot>"), said, _user("Continue.")]


def _langchain(summary: str) -> list[dict[str, str]]:
    return [_user(f"Here is a summary of the conversation to date:\n\n{summary}")]


def _opencode(summary: str) -> list[dict[str, str]]:
    said = {"role": "assistant", "content": f"<summary>{summary}</summary>"}
    return [_user("What did we do so far?"), said, _user("Continue.")]


Summarize = Callable[[str], list[dict[str, str]]]
# With the fewest turns between summaries that are seen: the assistant's own messages count.
CLIENTS: list[tuple[Summarize, int]] = [
    *((client, 1) for client in (_claude, _codex, _langchain)),
    (_gemini, 2),
    (_opencode, 3),
]
RESULTS = [
    "error: permission denied",
    "FAILED tests/test_app.py::test_sum - assert 4 == 5",
    "a line of a long file\n" * 20,
]


def make(tool: str, number: object, result: str) -> Did:
    return Did(((tool, {"path": f"src/{number}.py"}),), (result,))


def send(segments: Sequence[Sequence[Did]], start: Sequence[list[dict[str, str]]]) -> list[str]:
    """All requests of a session whose segments begin with these messages."""
    bodies: list[dict[str, Any]] = []
    number = 0
    for opening, segment in zip(start, segments, strict=True):
        turns = [
            turn._replace(number=number + place, thought=f"Thought {number + place}.")
            for place, turn in enumerate(segment, 1)
        ]
        number += len(turns)
        for end in range(len(turns) + 1):
            body = as_chat(turns[:end])
            body["messages"][1:2] = opening
            bodies.append(body)
        asked = _user("Create a summary for another agent that resumes the task.")
        bodies.append({**body, "messages": [*body["messages"], asked]})
    return [told.action for told in tell_session(bodies, **PRESET)]


def sum_up(summarize: Summarize) -> list[list[dict[str, str]]]:
    more = [summarize(f"The tests fail, attempt {number}.") for number in range(1, SEGMENTS)]
    return [[_user(TASK)], *more]


@pytest.mark.parametrize(("summarize", "fewest"), CLIENTS)
def test_same_turns_after_each_summary_are_a_loop(summarize: Summarize, fewest: int) -> None:
    for result, length in product(RESULTS, range(fewest, 9)):
        turns = [make("run", number, f"{number}: {result}") for number in range(length)]

        told = send([turns] * SEGMENTS, sum_up(summarize))

        assert "allow" not in told[-2:], (result, length)
        assert set(told[: length + 1]) == {"allow"}, (result, length)


@pytest.mark.parametrize("summarize", [client for client, _ in CLIENTS])
def test_progress_after_each_summary_is_no_loop(summarize: Summarize) -> None:
    """The agent may read the same files again before it continues."""
    for result, length in product(RESULTS, range(4)):
        read = [make("read", number, f"{number}: {result}") for number in range(length)]
        segments = [
            [*read, *[make("edit", f"{segment}-{number}", "done") for number in range(2)]]
            for segment in range(SEGMENTS)
        ]

        assert set(send(segments, sum_up(summarize))) == {"allow"}, (result, length)


def test_new_tasks_of_a_session_begin_anew() -> None:
    """A person clears the history, and the agent looks at the same files first."""
    for result, length in product(RESULTS, range(1, 7)):
        read = [make("read", number, f"{number}: {result}") for number in range(length)]
        for tasks in ([TASK] * SEGMENTS, [f"{TASK} No. {number}" for number in range(SEGMENTS)]):
            told = send([read] * SEGMENTS, [[_user(task)] for task in tasks])

            assert set(told) == {"allow"}, (result, length, tasks[-1])
