"""Thousands of conversations under one caller, as clients of every API send them: each loop is found, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random

import pytest

from extproc.ext_proc.service import Service
from tests.support.conversations import (
    APIS,
    HABITS,
    ORDERS,
    Habit,
    Run,
    Verdicts,
    ask_router,
    ask_summary,
    ask_title,
    interleave,
    judge,
    make_best_of,
    make_few,
    make_runs,
    make_twins,
)
from tests.support.extent import deepen
from tests.support.service import make_service, sample
from tests.support.sessions import agents

SILENT = ("gemini", "ollama")
"""APIs in which the agents of these tests only call tools."""


def send_all(service: Service, runs: Sequence[Run], order: str, random: Random) -> Verdicts:
    """What becomes of their requests."""
    verdicts = Verdicts()

    async def main() -> None:
        for sent in interleave(runs, order, random):
            verdicts.take(sent, refused=await judge(service, sent.data))

    asyncio.run(main())
    assert sample(service, "uncounted_total", policy="agents", reason="inspect_budget") == 0
    return verdicts


def check(runs: Sequence[Run], verdicts: Verdicts) -> None:
    """Every loop is refused, and no request that is in none."""
    assert [(sent.run.task, sent.done) for sent in verdicts.wrong] == []
    assert [run in verdicts.refused for run in runs] == [run.loops for run in runs]


def pick_order(*names: str) -> str:
    """One of the orders, each for a third of the tests."""
    return Random("".join(names)).choice(ORDERS)


@pytest.mark.deep
@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("api", APIS)
def test_every_loop_is_found_and_no_other(api: str, habit: str) -> None:
    """Twelve or sixteen conversations, among them four or eight runs of one task that are equal to the byte at first."""
    random = Random(f"{api}{habit}")
    kept = HABITS[habit]
    runs = [*make_runs(api, kept, random), *make_best_of(random.choice((4, 8)), api, kept, random)]

    verdicts = send_all(make_service(agents(session=None)), runs, pick_order(api, habit), random)

    if api in SILENT and not kept.opening and kept.retries:
        pytest.xfail("windows without words, without the task and sent again: nothing tells an innocent run from a loop")
    if api in SILENT and kept.turns:  # with a name for each as well: in a window, calls without a word are soon alike
        assert [run for run in verdicts.refused if not run.loops] == []
    else:
        check(runs, verdicts)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_conversations_of_all_apis_side_by_side(order: str) -> None:
    """The same in short, all under one caller at once."""
    random = Random(order)
    runs = [run for api in APIS for run in make_best_of(4, api, random.choice(list(HABITS.values())), random)]

    check(runs, send_all(make_service(agents(session=None)), runs, order, random))


@pytest.mark.slow
@pytest.mark.parametrize("ask", deepen([ask_title, ask_router, ask_summary], ask_summary))
@pytest.mark.parametrize("habit", ["whole", "newest 2 results kept", "last 4 turns"])
def test_side_requests_disturb_no_chain(habit: str, ask: Callable[[Run, int], bytes]) -> None:
    """Titles, routers and summaries that are asked for now and then."""
    for api in ("chat", "anthropic", "gemini"):
        random = Random(f"{api}{habit}")
        runs = make_runs(api, HABITS[habit], random)
        for run in runs:
            run.asides = [ask]

        check(runs, send_all(make_service(agents(session=None)), runs, "random", random))


@pytest.mark.slow
@pytest.mark.parametrize("make", deepen([make_few, make_twins], make_twins))
@pytest.mark.parametrize("habit", ["whole", "whole, retries", "ids anew, thoughts cut"])
def test_runs_that_say_the_same_never_mix(habit: str, make: Callable[[int, str, Habit, Random], list[Run]]) -> None:
    """Not even where their messages are equal to the byte, and only what comes back is not."""
    for seed in range(12):
        random = Random(seed)
        runs = make(4, "chat", HABITS[habit], random)

        check(runs, send_all(make_service(agents(session=None)), runs, ORDERS[seed % 3], random))


@pytest.mark.slow
@pytest.mark.parametrize("make", [make_few, make_twins])
@pytest.mark.parametrize("habit", ["newest result kept", "newest 2 results kept"])
def test_what_only_others_have_seen_is_held_against_no_run(
    habit: str, make: Callable[[int, str, Habit, Random], list[Run]]
) -> None:
    """With older results cleared and nothing else to tell runs apart, some loops are missed, but no run is refused wrongly."""
    for seed in range(12):
        random = Random(seed)
        runs = make(4, "chat", HABITS[habit], random)

        assert not send_all(make_service(agents(session=None)), runs, ORDERS[seed % 3], random).wrong


@pytest.mark.deep
@pytest.mark.parametrize("length", range(1, 6))
@pytest.mark.parametrize("opening", [True, False])
@pytest.mark.parametrize("messages", range(2, 9))
def test_a_window_of_messages_hides_no_exact_loop(messages: int, opening: bool, length: int) -> None:  # a case
    """However few the client keeps, and whichever comes first of them; the loop is refused in the end, and stays so."""
    random = Random(messages)
    (loop, *_) = make_twins(1, "chat", Habit(messages=messages, opening=opening), random)
    loop.turns = (loop.turns[-1:] + make_best_of(1, "chat", loop.habit, random)[0].turns[: length - 1]) * (64 // length)
    service = make_service(agents(session=None))

    async def main() -> list[bool]:
        return [await judge(service, sent.data) for sent in interleave([loop], "sequential", random)]

    refused = asyncio.run(main())

    assert any(refused)
    assert refused[-8:].count(True) >= 4
