"""Session limits without a session header: each conversation is recognized by its history."""

import asyncio
import json
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from extproc.engine.orders import KILL, Target
from extproc.sessions.rates import Usage
from tests.support.conversations import (
    HABITS,
    ORDERS,
    Run,
    interleave,
    judge,
    make_best_of,
    make_runs,
)
from tests.support.examples import examples
from tests.support.orders import apply_orders, order
from tests.support.service import make_service, sample, status
from tests.support.session_limits import (
    TOOL,
    WRITERS,
    Request,
    ask,
    describe,
    do,
    limited,
    nameless,
    settle,
    told,
    write,
)
from tests.support.turn_writers import Did, as_chat

DONE, OTHER = do(*range(40)), do("x", *range(9))
TWINS = do(1, 2, 3, 4), do("x", 2, 3, 4)


def after(
    *turns: int,
    done: Sequence[Did] = DONE,
    writer: Any = as_chat,  # noqa: ANN401  # of turn_writers
    window: int = 0,
) -> list[bytes]:
    shown = [done[:at] for at in turns]
    return [write(each[-window:] if window else each, writer) for each in shown]


SHOWN: dict[str, tuple[dict[str, Any], Sequence[Request], list[int]]] = {
    **{
        f"each conversation of each caller has its own steps, {writer.__name__}": (
            {"max_steps": 4},
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
        f"a window of {window} messages does not evade the limit": (
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
    "unseen turns count once shown": (
        {"max_steps": 6},
        after(0, 1, 4, 5, 6),
        [200] * 4 + [429],
    ),
    "retries are no steps": (
        {"max_steps": 3},
        after(0, 1, 1, 1, 1, 2, 2, 3, 3),
        [200] * 7 + [429] * 2,
    ),
    "conversations in a named session count together": (
        {"max_steps": 4},
        [(write(run[:at]), {"session": "s"}) for at in range(4) for run in TWINS],
        [200] * 5 + [429] * 3,
    ),
}


_PLANS = st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=8), min_size=1, max_size=8)


@settings(deadline=None, max_examples=examples(100))
@given(plans=_PLANS, most=st.integers(1, 6), random=st.randoms(use_true_random=False))
def test_equal_runs_have_separate_limits(plans: list[list[str]], most: int, random: Random) -> None:
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


def test_conversations_have_separate_costs() -> None:
    service = make_service(
        limited(max_cost_per_session=1e4, prices={"*": {"input": 1_000_000, "output": 1_000_000}})
    )

    first, other = (ask(service, write(done[:1]), session="") for done in (DONE, OTHER))
    settle(service, first, Usage(20_000, 0))

    assert status(other) == 200
    assert nameless(service, [write(done[:2]) for done in (DONE, OTHER)]) == [429, 200]


def test_breaker_counts_per_conversation() -> None:
    service = make_service(limited(max_steps=2, circuit_breaker={"consecutive_blocks": 2}))

    found = [told(ask(service, data, session=""))["limit"] for data in after(*range(2, 6))]

    assert found == ["max_steps", "max_steps", "killed", "killed"]
    assert nameless(service, after(0, done=OTHER)) == [200]


def test_operator_can_kill_one_conversation() -> None:
    service = make_service(limited(max_steps=9))
    nameless(service, [data for done in (DONE, OTHER) for data in after(0, 1, 2, done=done)])
    found = describe(service)
    assert [row["total_step_count"] for row in found] == [3, 3]
    apply_orders(service, order(KILL, Target(session=found[0]["session"])))

    answers = [ask(service, write(run[:3]), session="") for run in (DONE, OTHER)]

    assert sorted(status(answer) for answer in answers) == [200, 429]
    (stopped,) = [told(answer) for answer in answers if status(answer) == 429]
    assert "an operator has stopped this session" in stopped["message"]


FORKS = 12


def fork(steps: int, *, task: int = 0, said: str = "", result: str = "") -> list[Did]:
    done = [
        Did((("run", {"task": task, "step": step}),), (f"did {step}",), number=step)
        for step in range(1, steps + 1)
    ]
    if not done:
        return []
    return [*done[:-1], done[-1]._replace(user=said, results=(result or f"did {steps}",))]


def write_question(words: str, ends_in: str) -> list[Did]:
    return fork(2, said=words) if ends_in == "said" else fork(2, result=words)


def carry_on(done: Sequence[Did], way: object, steps: int) -> list[Did]:
    more = [
        Did((("run", {"way": str(way), "step": step}),), (f"did {step}",), number=100 + step)
        for step in range(steps)
    ]
    return [*done, *more]


ASIDE = [{**as_chat(fork(step, said="Sum up.")), "model": "small"} for step in range(1, 4)]
RETRIES = {
    "the same": ["Again."] * 9,
    "a clock": [f"Again: it is 10:00:{number:02d} now." for number in range(1, 10)],
    "the attempt": [f"Again (attempt {number})." for number in range(1, 10)],
}
FORKED: dict[str, tuple[dict[str, Any], Sequence[Request], list[int]]] = {
    **{
        f"questions behind the same examples pass, {ends_in}": (
            {"max_steps": 4, "max_tool_calls": 4},
            [write(write_question(f"Question {number}?", ends_in)) for number in range(100)],
            [200] * 100,
        )
        for ends_in in ("said", "result")
    },
    **{
        f"each fork has its own limit, which its history uses, {writer.__name__}": (
            {"max_steps": 5},
            [
                write(carry_on(fork(2, said=f"Way {way}."), way, step), writer)
                for way in range(FORKS)
                for step in range(4)
            ],
            [200, 200, 200, 429] * FORKS,
        )
        for writer in WRITERS
    },
    **{
        f"a fork that is sent again is a retry, {name}": (
            {"max_steps": 4},
            [
                write(fork(0)),
                write(fork(1)),
                *(write(fork(2, said=said)) for said in ("", "Another way.", *again)),
            ],
            [200] * 12 + [429],
        )
        for name, again in RETRIES.items()
    },
    "new ids make no fork": (
        {"max_steps": 2},
        [write([]), *(write([fork(1)[0]._replace(number=6 * number)]) for number in range(1, 10))],
        [200] * 5 + [429] * 5,
    ),
    "a side request without tools is no fork": (
        {"max_steps": 4},
        [
            write([]),
            *(
                data
                for step in range(1, 4)
                for data in (json.dumps(ASIDE[step - 1]).encode(), write(fork(step)))
            ),
            write(fork(4)),
        ],
        [200] * 7 + [429],
    ),
}


@pytest.mark.parametrize(
    ("limits", "requests", "expected"), (SHOWN | FORKED).values(), ids=SHOWN | FORKED
)
def test_unnamed_conversations_have_separate_limits(
    limits: dict[str, Any], requests: Sequence[Request], expected: list[int]
) -> None:
    service = make_service(limited(**limits))

    assert nameless(service, requests) == expected
    assert sample(service, "session_unnamed_total", policy="agents", mode="enforce") == 0


MOST = 5


def list_wrong(
    runs: list[Run], order: str, random: Random, limit: str
) -> list[tuple[int, int, bool]]:
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
@pytest.mark.parametrize(
    "habit",
    ["whole", "whole, retries", "newest 2 results kept", "last 5 turns, no opening, retries"],
)
def test_limits_of_interleaved_conversations_are_exact(habit: str, limit: str) -> None:
    # Windows of agents that say nothing are all alike in a loop
    silent = [] if HABITS[habit].turns else ["gemini", "ollama"]
    for number, api in enumerate(["chat", "responses", "anthropic", "bedrock", *silent]):
        random = Random(f"{habit}{api}")
        assert (
            list_wrong(make_runs(api, HABITS[habit], random), ORDERS[number % 3], random, limit)
            == []
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "habit",
    ["2 kept, retries, ids anew, cut", pytest.param("whole, retries", marks=pytest.mark.deep)],
)
def test_retries_of_equal_runs_are_no_steps(habit: str) -> None:
    wrong = []
    for seed in range(12):
        random = Random(seed)
        wrong += list_wrong(
            make_best_of(4, "chat", HABITS[habit], random), ORDERS[seed % 3], random, "max_steps"
        )

    assert len(wrong) <= 1
