"""Answers may call tools in parallel until a batch would exceed what a tool's limit leaves."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.service import make_service
from tests.support.session_limits import ask, changed, limited
from tests.support.turn_writers import Did, as_chat

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("scan", "search")]


@pytest.mark.parametrize(
    ("most", "batches", "other", "held"),
    [
        *((most, [], 0, False) for most in range(2, 9)),  # a first request may be answered in parallel
        (1, [], 0, True),  # a tool with one call left is called alone
        (5, [1, 1, 1, 1], 0, True),
        (5, [1, 1, 1], 0, False),
        (7, [3, 1], 0, False),  # the largest batch so far is expected again
        (6, [3, 1], 0, True),
        (10, [7], 0, True),
        (10, [5], 0, False),
        (6, [1, 1, 1, 1], 7, False),  # calls of other tools, or of several answers, make no batch
    ],
)
def test_a_request_is_held_to_one_call_by_the_largest_batch(most: int, batches: list[int], other: int, held: bool) -> None:
    service = make_service(limited(max_calls_per_tool={"scan": most}))
    done = []
    for number, size in enumerate(batches, 1):
        calls: list[tuple[str, dict[str, Any]]] = [("scan", {"n": f"{number}.{place}"}) for place in range(size)]
        calls += [("search", {"n": f"{number}.{place}"}) for place in range(other)]
        done.append(Did(tuple(calls), tuple("done" for _ in calls), number=number))

    edited = changed(ask(service, json.dumps({**as_chat(done), "tools": TOOLS}).encode()))

    assert (edited.get("parallel_tool_calls") is False) is held
    assert len(edited.get("tools", TOOLS)) == len(TOOLS)
