"""Side by side conversations under one caller: each loop is found, and nothing else."""

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

SILENT = ("gemini", "ollama")  # agents of these tests only call tools there


def send_all(service: Service, runs: Sequence[Run], order: str, random: Random) -> Verdicts:
    verdicts = Verdicts()

    async def main() -> None:
        for sent in interleave(runs, order, random):
            verdicts.take(sent, refused=await judge(service, sent.data))

    asyncio.run(main())
    assert sample(service, "uncounted_total", policy="agents", reason="inspect_budget") == 0
    return verdicts


def check(runs: Sequence[Run], verdicts: Verdicts) -> None:
    assert [(sent.run.task, sent.done) for sent in verdicts.wrong] == []
    assert [run in verdicts.refused for run in runs] == [run.loops for run in runs]


@pytest.mark.deep
@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("api", APIS)
def test_every_loop_is_found_and_nothing_else(api: str, habit: str) -> None:
    """12 or 16 conversations, among them 4 or 8 runs of one task that are equal at first."""
    random = Random(f"{api}{habit}")
    kept = HABITS[habit]
    runs = [*make_runs(api, kept, random), *make_best_of(random.choice((4, 8)), api, kept, random)]

    verdicts = send_all(make_service(agents(session=None)), runs, random.choice(ORDERS), random)

    if api in SILENT and not kept.opening and kept.retries:
        pytest.xfail(
            "windows without words, without the task and sent again: nothing tells an innocent "
            "run from a loop"
        )
    # With a name for each as well: in a window, calls without a word are soon alike
    if api in SILENT and kept.turns:
        assert [run for run in verdicts.refused if not run.loops] == []
    else:
        check(runs, verdicts)


@pytest.mark.slow
@pytest.mark.parametrize("order", deepen(ORDERS, "lockstep"))
def test_conversations_of_all_apis_are_told_apart(order: str) -> None:
    random = Random(order)
    runs = [
        run
        for api in APIS
        for run in make_best_of(4, api, random.choice(list(HABITS.values())), random)
    ]

    check(runs, send_all(make_service(agents(session=None)), runs, order, random))


@pytest.mark.slow
@pytest.mark.parametrize("ask", deepen([ask_title, ask_router, ask_summary], ask_summary))
@pytest.mark.parametrize(
    "habit", deepen(["whole", "newest 2 results kept", "last 4 turns"], "newest 2 results kept")
)
def test_side_requests_disturb_no_chain(habit: str, ask: Callable[[Run, int], bytes]) -> None:
    for api in ("chat", "gemini"):
        random = Random(f"{api}{habit}")
        runs = make_runs(api, HABITS[habit], random)
        for run in runs:
            run.asides = [ask]

        check(runs, send_all(make_service(agents(session=None)), runs, "random", random))


@pytest.mark.slow
@pytest.mark.parametrize("make", deepen([make_few, make_twins], make_twins))
@pytest.mark.parametrize(
    "habit", deepen(["whole", "whole, retries", "ids anew, thoughts cut"], "whole, retries")
)
def test_runs_with_equal_messages_are_told_apart(
    habit: str, make: Callable[[int, str, Habit, Random], list[Run]]
) -> None:
    for seed in range(6):
        random = Random(seed)
        runs = make(4, "chat", HABITS[habit], random)

        check(runs, send_all(make_service(agents(session=None)), runs, ORDERS[seed % 3], random))


@pytest.mark.slow
@pytest.mark.parametrize("make", deepen([make_few, make_twins], make_twins))
@pytest.mark.parametrize(
    "habit", deepen(["newest result kept", "newest 2 results kept"], "newest result kept")
)
def test_results_of_other_runs_refuse_no_run(
    habit: str, make: Callable[[int, str, Habit, Random], list[Run]]
) -> None:
    """Older results are cleared and nothing else tells runs apart: some loops are missed."""
    for seed in range(6):
        random = Random(seed)
        runs = make(4, "chat", HABITS[habit], random)

        assert not send_all(
            make_service(agents(session=None)), runs, ORDERS[seed % 3], random
        ).wrong


@pytest.mark.deep
@pytest.mark.parametrize("length", range(1, 6))
@pytest.mark.parametrize("opening", [True, False])
@pytest.mark.parametrize("messages", range(2, 9))
def test_window_of_messages_hides_no_exact_loop(
    messages: int, opening: bool, length: int
) -> None:  # a case
    """For any number of messages that a client keeps."""
    random = Random(messages)
    (loop, *_) = make_twins(1, "chat", Habit(messages=messages, opening=opening), random)
    loop.turns = (
        loop.turns[-1:] + make_best_of(1, "chat", loop.habit, random)[0].turns[: length - 1]
    ) * (64 // length)
    service = make_service(agents(session=None))

    async def main() -> list[bool]:
        return [
            await judge(service, sent.data) for sent in interleave([loop], "sequential", random)
        ]

    refused = asyncio.run(main())

    assert any(refused)
    assert refused[-8:].count(True) >= 4
