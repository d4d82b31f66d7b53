"""Answers may call tools in parallel until a batch would exceed what a tool's limit leaves."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.service import make_service
from tests.support.session_limits import ask, limited
from tests.support.turn_writers import Did, as_chat

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("scan", "search")]


def holds(most: int, *batches: int, other: int = 0) -> bool:
    """Whether a request is held to one call, after answers with this many calls of the limited tool and of another one."""
    service = make_service(limited(max_calls_per_tool={"scan": most}))
    done = []
    for number, size in enumerate(batches, 1):
        calls: list[tuple[str, dict[str, Any]]] = [("scan", {"n": f"{number}.{place}"}) for place in range(size)]
        calls += [("search", {"n": f"{number}.{place}"}) for place in range(other)]
        done.append(Did(tuple(calls), tuple("done" for _ in calls), number=number))
    response = ask(service, json.dumps({**as_chat(done), "tools": TOOLS}).encode()).request_body.response
    assert not response.HasField("body_mutation") or len(json.loads(response.body_mutation.body)["tools"]) == len(TOOLS)
    return response.HasField("body_mutation") and json.loads(response.body_mutation.body)["parallel_tool_calls"] is False


@pytest.mark.parametrize("most", range(2, 9))
def test_a_first_request_may_be_answered_in_parallel(most: int) -> None:
    """Also if the limit is low."""
    assert not holds(most)


def test_a_tool_with_one_call_left_is_called_alone() -> None:
    """From the first request on, if its limit is one."""
    assert holds(1)
    assert holds(5, 1, 1, 1, 1)
    assert not holds(5, 1, 1, 1)


def test_the_largest_batch_so_far_is_expected_again() -> None:
    """Fewer calls than that are too few."""
    assert not holds(7, 3, 1)
    assert holds(6, 3, 1)
    assert holds(10, 7)
    assert not holds(10, 5)


def test_calls_of_other_tools_make_no_batch() -> None:
    """Nor do calls of several answers."""
    assert not holds(6, 1, 1, 1, 1, other=7)
