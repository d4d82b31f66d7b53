"""How far a reader follows one request: the modules and functions that it passes through have a budget."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.trace import REQUESTS, trace

BUDGET = {"exact": (15, 90), "turns": (37, 255), "session": (37, 265)}
"""Modules and functions at most, by request."""


@pytest.mark.parametrize("name", REQUESTS)
def test_the_way_of_a_request_is_short(name: str) -> None:
    """To add to it, take something away elsewhere. A process of its own remembers nothing of other tests' requests."""
    way = subprocess.run([sys.executable, "-m", "tests.support.trace", name], capture_output=True, text=True, check=True).stdout
    found = re.match(r"# `\w+`: (\d+) functions in (\d+) modules", way)
    assert found is not None
    modules, functions = BUDGET[name]
    assert int(found[2]) <= modules, way
    assert int(found[1]) <= functions, way


def test_the_way_is_written_in_the_order_of_the_request() -> None:
    """It begins where Envoy's bytes come in, and every function is numbered and described."""
    lines = trace(*REQUESTS["exact"]).write().splitlines()
    assert lines[1] == "## ext_proc"
    numbers = [int(line.partition(".")[0]) for line in lines if line[:1].isdigit()]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))
    assert any("`Stream.receive`: " in line for line in lines)


def test_requests_that_are_not_let_through_are_not_traced() -> None:
    """The way of a refusal is another one, so that a request which is refused would be measured in its place by mistake."""
    policy, write_body = REQUESTS["exact"]
    strict = {
        **policy,
        "spec": {
            **policy["spec"],
            "loop_detection": {"enabled": True, "window_seconds": 60, "threshold_identical_requests": 2},
        },
    }
    with pytest.raises(RuntimeError, match="not let through"):
        trace(strict, lambda _: write_body(0))
