"""Runs of one caller that send equal requests: each gets what its own turns deserve, or less."""

from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Any

import pytest

from extproc.request.document import Document
from tests.support.chains import CHAINS, Model
from tests.support.conversations import (
    ORDERS,
    Habit,
    Run,
    get_stuck,
    interleave,
    word,
    work,
)
from tests.support.preset import AGENTS
from tests.support.turn_writers import Did
from tests.support.verdict_fuzzer import act

LABELS = [("ok",), ("positive", "negative"), ("Hello! How can I help?",)]
APIS = ["chat", "anthropic", "responses", "ollama", "text, react", "text, fence"]
SAME = "Do the same."


class Caller:
    """The preset's detector, and what a store knows of one caller."""

    def __init__(self) -> None:
        self._model = Model()
        self._now = 0

    def send(self, data: bytes) -> str:
        self._now += 1_000
        _, found, memory = AGENTS.similarity.compare_in_session(Document(data), named=False)
        if memory is not None and memory.place is not None:
            link = CHAINS.make_link("turns", "", "00", "", memory.place, memory.entry)
            entries = self._model.ask(link, self._now).entries
            found = memory.recall(entries, followed=True) if memory.waits else found
        return act(AGENTS, found)

    def restart_store(self) -> None:
        self._model = Model()


class FewShot(Run):
    """A run whose requests begin with examples."""

    examples: Sequence[str] = ()

    def _write(self, turns: Sequence[Did]) -> dict[str, Any]:
        document = super()._write(turns)
        examples: list[dict[str, Any]] = []
        for number, answer in enumerate(self.examples):
            examples += [
                {"role": "user", "content": f"Example {number}"},
                {"role": "assistant", "content": answer},
            ]
        document["messages"][1:1] = examples
        return document


def make_equal(
    count: int, api: str, habit: Habit, random: Random, *, again: bool = False, fails: bool = False
) -> list[Run]:
    """Runs that do the same, with ids of their own; then they part.

    Some of it is done twice: at once, or `again` behind other turns; it may fail alike.
    """
    done = [
        turn._replace(results=(f"Error: no {_name(random)} here. {'None. ' * 40}",))
        if fails
        else turn
        for turn in work(random, 7)
    ]
    one, other, *rest = done
    twice = [one, other, rest[2], other, one] if again else [one, one, other, other]
    same = [*rest[:2], *twice, *rest[2:]]
    runs = []
    for run in range(count):
        turns = [turn._replace(number=100 * run + at) for at, turn in enumerate(same, 1)]
        runs.append(Run(api, SAME, [*turns, *word(work(random, 3), random)], habit, loops=False))
    return runs


def _name(random: Random) -> str:
    return "".join(random.choices("abcdefgh", k=12))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("labels", LABELS)
def test_runs_with_equal_examples_are_never_touched(labels: tuple[str, ...], order: str) -> None:
    for examples, steps in product((1, 2, 3, 4), (0, 1, 3)):
        random = Random(f"{examples} {steps}")
        turns = word(work(random, steps), random)
        runs = [FewShot("chat", SAME, turns, Habit(), loops=False) for _ in range(16)]
        for run in runs:
            run.examples = (labels * examples)[:examples]
        caller = Caller()

        acted = {caller.send(sent.data) for sent in interleave(runs, order, random)}

        assert acted == {"allow"}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("api", APIS)
def test_runs_that_begin_with_equal_calls_are_never_touched(api: str, order: str) -> None:
    for given, steps in product((1, 2, 3), (0, 1, 3)):
        random = Random(f"{given} {steps}")
        turns = word(work(random, given + steps), random)
        runs = [Run(api, SAME, turns, Habit(), loops=False) for _ in range(16)]
        caller = Caller()

        sent = [each for each in interleave(runs, order, random) if each.done >= given]

        assert {caller.send(each.data) for each in sent} == {"allow"}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize(
    "habit", [Habit(turns=2), Habit(turns=2, opening=False), Habit(turns=3), Habit(kept=1)]
)
def test_equal_runs_get_a_note_at_most(habit: Habit, retries: int, order: str) -> None:
    """16 side by side, of clients that show their last turns, or cut results."""
    for number, (api, again) in enumerate(product(APIS, (True, False))):
        random = Random(f"{number} {api}")
        kept = habit._replace(retries=retries)
        runs = make_equal(16, api, kept, random, again=again, fails=number % 4 > 1)
        caller = Caller()

        acted = {caller.send(sent.data) for sent in interleave(runs, order, random)}

        assert acted <= {"allow", "steer"}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("habit", [Habit(turns=2), Habit(turns=3), Habit(kept=1, retries=1)])
def test_store_that_starts_anew_refuses_no_equal_run(habit: Habit, order: str) -> None:
    """At 3 % of the requests of 16 runs side by side."""
    for number, (api, again) in enumerate(product(APIS, (True, False))):
        random = Random(f"{number} {api}")
        runs = make_equal(16, api, habit, random, again=again, fails=number % 4 > 1)
        caller, acted = Caller(), set[str]()

        for sent in interleave(runs, order, random):
            if random.random() < 0.03:
                caller.restart_store()
            acted.add(caller.send(sent.data))

        assert acted <= {"allow", "steer"}


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("shown", [2, 3, 4])
@pytest.mark.parametrize("retries", [0, 1])
def test_looping_runs_with_equal_requests_are_refused(
    retries: int, shown: int, length: int
) -> None:
    """Of clients that show their last turns; each in its own right, side by side."""
    for api, opening in product(APIS, (True, False)):
        if (api, opening) == ("anthropic", False):
            continue  # the harness's reminders beside results are the first words, and change
        random = Random(f"{api} {opening}")
        runs = []
        for run in range(3):
            turns = [*work(random, run), *get_stuck(random, length) * 2]
            turns = [turn._replace(number=100 * run + at) for at, turn in enumerate(turns, 1)]
            habit = Habit(turns=shown, opening=opening, retries=retries)
            runs.append(Run(api, f"Task {run}", turns, habit, loops=True))
        caller, acted = Caller(), dict[Run, list[str]]()

        for sent in interleave(runs, "lockstep", random):
            acted.setdefault(sent.run, []).append(caller.send(sent.data))

        for actions in acted.values():
            assert "steer" in actions
            if "reject" in actions or not retries or length == 1 or shown > 2:
                assert actions.index("steer") < actions.index("reject")
