"""Limits of conversations that no header names are exact, whatever their clients leave out or send again, in every API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from tests.support.conversations import HABITS, ORDERS, Habit, Run, interleave, judge, make_best_of, make_few, make_runs
from tests.support.extent import deepen
from tests.support.service import make_service, sample
from tests.support.session_limits import TOOL, limited

MOST = 5


def list_wrong(runs: list[Run], order: str, random: Random, limit: str) -> list[tuple[int, int, bool]]:
    """The requests that are refused too early, or pass too late: the run, its turns, and whether it was refused."""
    limits: dict[str, Any] = {limit: MOST}
    service = make_service(limited(**limits))
    wrong = []

    async def main() -> None:
        for sent in interleave(runs, order, random):
            data = json.dumps({**json.loads(sent.data), "tools": [TOOL]}).encode()
            refused = await judge(service, data, x_team="t")
            if refused != (sent.done >= MOST):
                wrong.append((runs.index(sent.run), sent.done, refused))

    asyncio.run(main())
    assert sample(service, "session_unnamed_total", policy="agents", mode="enforce") == 0
    return wrong


@pytest.mark.deep
@pytest.mark.parametrize("limit", ["max_steps", "max_tool_calls"])
@pytest.mark.parametrize("habit", ["whole", "whole, retries", "newest 2 results kept", "last 5 turns, no opening, retries"])
def test_limits_are_exact(habit: str, limit: str) -> None:
    """Of eight conversations side by side, of one task and of others."""
    silent = [] if HABITS[habit].turns else ["gemini", "ollama"]  # windows of agents that say nothing are all alike in a loop
    for number, api in enumerate(["chat", "responses", "anthropic", "bedrock", *silent]):
        random = Random(f"{habit}{api}")
        assert list_wrong(make_runs(api, HABITS[habit], random), ORDERS[number % 3], random, limit) == []


@pytest.mark.slow
@pytest.mark.parametrize("make", deepen([make_best_of, make_few], make_few))
@pytest.mark.parametrize("habit", ["whole", "ids anew, thoughts cut", "newest 2 results kept"])
def test_limits_of_equal_runs_are_exact(habit: str, make: Callable[[int, str, Habit, Random], list[Run]]) -> None:
    """Four runs of one task whose messages are equal to the byte for a while, or again and again."""
    for seed in range(12):
        random = Random(seed)
        assert list_wrong(make(4, "chat", HABITS[habit], random), ORDERS[seed % 3], random, "max_steps") == []


@pytest.mark.slow
@pytest.mark.parametrize("habit", ["2 kept, retries, ids anew, cut", pytest.param("whole, retries", marks=pytest.mark.deep)])
def test_retries_of_equal_runs_are_no_steps(habit: str) -> None:
    """Although one that is sent again may take the name of another run, from which nothing tells it: one in thousands is."""
    wrong = []
    for seed in range(12):
        random = Random(seed)
        wrong += list_wrong(make_best_of(4, "chat", HABITS[habit], random), ORDERS[seed % 3], random, "max_steps")

    assert len(wrong) <= 1
