"""Session limits where no header names a session: each conversation is known by what it shows, and has limits of its own."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.engine.orders import KILL, Target
from extproc.sessions.rates import Usage
from tests.support.examples import examples
from tests.support.orders import apply_orders, order
from tests.support.service import make_service, sample
from tests.support.session_limits import (
    WRITERS,
    Request,
    ask,
    describe,
    do,
    limited,
    nameless,
    settle,
    status,
    told,
    write,
)
from tests.support.turn_writers import Did, as_chat

PRICES = {"*": {"input": 1_000_000, "output": 1_000_000}}
MOST = 4
DONE, OTHER = do(*range(40)), do("x", *range(9))
TWINS = do(1, 2, 3, 4), do("x", 2, 3, 4)


def after(*turns: int, done: Sequence[Did] = DONE, writer: Any = as_chat, window: int = 0) -> list[bytes]:  # noqa: ANN401  # of turn_writers
    """Requests behind so many turns, of which the client sends the newest alone where it keeps a window."""
    shown = [done[:at] for at in turns]
    return [write(each[-window:] if window else each, writer) for each in shown]


CASES: dict[str, tuple[dict[str, Any], Sequence[Request], list[int]]] = {
    **{
        f"each conversation of each caller has its own steps, {writer.__name__}": (
            {"max_steps": MOST},
            [
                *after(*range(7), writer=writer),
                *after(*range(6), done=OTHER, writer=writer),
                *((data, {"team": "other"}) for data in after(*range(6), writer=writer)),
            ],
            [200] * 4 + [429] * 3 + ([200] * 4 + [429] * 2) * 2,
        )
        for writer in WRITERS
    },
    **{
        f"a window of {window} messages is no way out": (
            {"max_steps": 12},
            after(*range(20), window=window),
            [200] * 12 + [429] * 8,
        )
        for window in (3, 5, 8)
    },
    "an unknown history of all steps but one": ({"max_steps": 6}, after(5), [200]),
    "an unknown history of all steps": ({"max_steps": 6}, after(6), [429]),
    "an unknown history of all calls but one": ({"max_tool_calls": 6}, after(5), [200]),
    "an unknown history of all calls": ({"max_tool_calls": 6}, after(6), [429]),
    "turns that were not seen count as soon as they are shown": ({"max_steps": 6}, after(0, 1, 4, 5, 6), [200] * 4 + [429]),
    "retries are no steps": ({"max_steps": 3}, after(0, 1, 1, 1, 1, 2, 2, 3, 3), [200] * 7 + [429] * 2),
    "conversations in a named session count together": (
        {"max_steps": 4},
        [(write(run[:at]), {"session": "s"}) for at in range(4) for run in TWINS],
        [200] * 5 + [429] * 3,
    ),
}


@pytest.mark.parametrize(("limits", "requests", "expected"), CASES.values(), ids=CASES)
def test_a_conversation_has_so_many_steps(limits: dict[str, Any], requests: Sequence[Request], expected: list[int]) -> None:
    service = make_service(limited(**limits))

    assert nameless(service, requests) == expected
    assert sample(service, "session_unnamed_total", policy="agents", mode="enforce") == 0


_PLANS = st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=8), min_size=1, max_size=8)


@settings(deadline=None, max_examples=examples(100))
@given(plans=_PLANS, most=st.integers(1, 6), random=st.randoms(use_true_random=False))
def test_runs_of_one_task_have_limits_of_their_own(plans: list[list[str]], most: int, random: Random) -> None:
    """Eight at once, equal to the byte until they part, in any order: each has its steps, and not one more."""
    service = make_service(limited(max_steps=most))
    runs = [do(*plan) for plan in plans]
    left = dict.fromkeys(range(len(runs)), 0)
    passed = [0] * len(runs)

    while left:
        number = random.choice(list(left))
        at, run = left[number], runs[number]
        (answer,) = nameless(service, [write(run[:at])])
        passed[number] += answer == 200
        if answer == 429 or at == len(run):
            del left[number]
        else:
            left[number] = at + 1

    assert passed == [min(most, len(run) + 1) for run in runs]


def test_what_conversations_cost_is_counted_apart() -> None:
    service = make_service(limited(max_cost_per_session=1e4, prices=PRICES))

    first, other = (ask(service, write(done[:1]), session="") for done in (DONE, OTHER))
    settle(service, first, Usage(20_000, 0))

    assert status(other) == 200
    assert nameless(service, [write(done[:2]) for done in (DONE, OTHER)]) == [429, 200]


def test_the_breaker_counts_per_conversation() -> None:
    service = make_service(limited(max_steps=2, circuit_breaker={"consecutive_blocks": 2}))

    found = [told(ask(service, data, session=""))["limit"] for data in after(*range(2, 6))]

    assert found == ["max_steps", "max_steps", "killed", "killed"]
    assert nameless(service, after(0, done=OTHER)) == [200]


def test_operators_find_a_conversation_and_stop_it() -> None:
    service = make_service(limited(max_steps=9))
    nameless(service, [data for done in (DONE, OTHER) for data in after(0, 1, 2, done=done)])
    found = describe(service)
    assert [row["total_step_count"] for row in found] == [3, 3]
    apply_orders(service, order(KILL, Target(session=found[0]["session"])))

    answers = [ask(service, write(run[:3]), session="") for run in (DONE, OTHER)]

    assert sorted(status(answer) for answer in answers) == [200, 429]
    (stopped,) = [told(answer) for answer in answers if status(answer) == 429]
    assert "an operator has stopped this session" in stopped["message"]
