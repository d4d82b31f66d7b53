"""Chains by what they promise: conversations side by side never mix, and none is lost on its way."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.metrics import Metrics
from extproc.store.memory import MemoryStore
from tests.support.chains import Model, Run, Sent, interleave, make_link

_ORDERS = ["sequential", "lockstep", "random"]
_TURNS = st.lists(st.sampled_from(["a", "b"]), max_size=12).map(lambda turns: [(message, f"{message}!") for message in turns])
"""What runs of one task do: little of it is different, so that they go together for a while, and come back to the same."""


@settings(deadline=None)
@given(st.lists(_TURNS, min_size=1, max_size=9), st.sampled_from(_ORDERS), st.randoms(use_true_random=False))
def test_runs_of_one_task_never_mix(turns: list[list[tuple[str, str]]], order: str, random: Random) -> None:
    """With full histories, each finds its own turns, exactly; runs that are equal so far are one until they part."""
    model = Model()

    for now, (_, sent, truth) in enumerate(interleave([Run("task", each) for each in turns], order, random)):
        assert model.ask(make_link(sent), now).entries == truth


@settings(deadline=None)
@given(st.lists(_TURNS, min_size=1, max_size=4), st.randoms(use_true_random=False), st.data())
def test_a_retry_changes_nothing(turns: list[list[tuple[str, str]]], random: Random, data: st.DataObject) -> None:
    """Up to three of a request, whatever else goes on."""
    model = Model()
    retried: set[Sent] = set()

    for now, (_, sent, truth) in enumerate(interleave([Run("task", each) for each in turns], "random", random)):
        times = 1 if sent in retried else data.draw(st.integers(1, 4))
        retried.update([sent] if times > 1 else [])
        for _ in range(times):
            assert model.ask(make_link(sent), now).entries == truth


@pytest.mark.parametrize("window", [3, 5, 8])
@pytest.mark.parametrize("order", _ORDERS)
def test_windows_of_the_last_messages_are_linked(window: int, order: str) -> None:
    """Where each message is worded anew, the last two tell whose it is, and all turns are found."""
    for seed in range(40):
        random = Random(seed)
        runs = [
            Run("task", [(f"{random.randrange(10**9)} {turn}", random.choice("ab")) for turn in range(20)], window)
            for _ in range(random.randint(1, 6))
        ]
        model = Model()
        for now, (_, sent, truth) in enumerate(interleave(runs, order, random)):
            assert model.ask(make_link(sent), now).entries == truth


@pytest.mark.parametrize("window", range(1, 9))
@pytest.mark.parametrize("order", _ORDERS)
def test_a_window_hides_no_exact_loop(window: int, order: str) -> None:
    """Whatever goes on beside it, the same turns again and again are found again and again."""
    for length in range(1, 6):
        random = Random(length)
        loop = Run("task", [(f"a{turn % length}", f"e{turn % length}") for turn in range(64)], window)
        others = [
            Run(f"task {number}", [(f"{number} {turn}", f"{number} {turn}") for turn in range(40)]) for number in range(3)
        ]
        model = Model()
        found = [
            model.ask(make_link(sent), now).entries
            for now, (run, sent, _) in enumerate(interleave([loop, *others], order, random))
            if run is loop
        ]

        newest = found[-1][-1]
        assert found[-1].count(newest) >= 3


def test_conversations_that_end_alike_are_not_linked() -> None:
    """Two whose windows end with the same two messages: neither is taken for the other."""
    model = Model()
    for task, first in (("t1", "p"), ("t2", "q")):
        for end in range(4):
            shown = (first, "x", "y", "z")[: end + 1]
            model.ask(make_link(Sent(task, shown, f"{first}{end}")))

    trail = model.ask(make_link(Sent("t1", ("y", "z", "w"), "new")))

    assert trail.entries == [b"new"]


def test_a_caller_cannot_take_up_all() -> None:
    """What begins conversations without end is dropped from a bound on, and said so; another caller's stay."""
    metrics = Metrics()
    store = MemoryStore(metrics)
    asked = [make_link(Sent(f"task {number}", ("a", "b"), "x"), most=50_000) for number in range(1_000)]
    other = make_link(Sent("task", ("a",), "x"), tenant="01", most=50_000)

    [first] = store.push([other], 0)
    dropped = [store.push([link], 0)[0].dropped for link in asked]  # type: ignore[union-attr]  # of a link
    [again] = store.push([other], 0)

    assert not dropped[0]
    assert dropped[-1]
    assert len(store) < 300
    assert first == again


def test_all_callers_together_have_a_bound() -> None:
    """The memory store drops conversations of one node before those that go on, and counts them."""
    metrics = Metrics()
    store = MemoryStore(metrics, 10_000)
    kept = [Sent("kept", tuple(f"a{turn}" for turn in range(length)), f"e{length}") for length in range(6)]
    for sent in kept:
        store.push([make_link(sent)], 0)

    for number in range(5_000):
        store.push([make_link(Sent(f"task {number}", (), ""), tenant=f"{number:06x}")], 0)

    assert metrics.store_evictions._value.get() > 0
    assert store._chains._bytes <= 10_000 * 256 // 4
    [trail] = store.push([make_link(Sent("kept", (*kept[-1].shown, "a5"), "e6"))], 0)
    assert trail.entries == [f"e{turn}".encode() for turn in range(1, 7)]  # type: ignore[union-attr]  # of a link
