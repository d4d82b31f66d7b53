"""Chains by what they promise: concurrent conversations never mix, and none is lost."""

from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from extproc.metrics import Metrics
from extproc.store.memory import MemoryStore
from extproc.store.rules.chain import MAX_NAMES
from tests.support.chains import Model, Run, Sent, interleave, make_link

_ORDERS = ["sequential", "lockstep", "random"]
_TURNS = st.lists(st.sampled_from(["a", "b"]), max_size=12).map(
    lambda turns: [(message, f"{message}!") for message in turns]
)
"""Turns of runs of one task: they differ little, so runs are equal for a while, and again later."""


def name_freshly(number: int) -> bytes:
    return (number + 1).to_bytes(8, "little")


@settings(deadline=None)
@given(
    st.lists(_TURNS, min_size=1, max_size=9),
    st.sampled_from(_ORDERS),
    st.randoms(use_true_random=False),
)
def test_runs_of_one_task_never_mix(
    turns: list[list[tuple[str, str]]], order: str, random: Random
) -> None:
    """With full histories, each finds its own turns; equal runs are one until they differ.

    What is counted below names, from what a history shows where its name is new, is exact for each
    run.
    """
    model, counts = Model(), dict[bytes, int]()

    for number, (_, sent, truth) in enumerate(
        interleave([Run("task", each) for each in turns], order, random)
    ):
        found = model.ask(make_link(sent)._replace(fresh=name_freshly(number)), number)
        counts[found.name] = counts.get(found.name, len(sent.shown)) + 1
        assert found.entries == truth
        assert counts[found.name] == len(truth) + 1

    assert len(counts) == len(turns)


@settings(deadline=None)
@given(st.lists(_TURNS, min_size=1, max_size=4), st.randoms(use_true_random=False), st.data())
def test_no_retry_makes_a_conversation_longer(
    turns: list[list[tuple[str, str]]], random: Random, data: st.DataObject
) -> None:
    """The count of its name is at least what it shows, at most what the longest run has sent."""
    model, counts, counted = Model(), dict[bytes, int](), set[tuple[bytes, Sent]]()

    for number, (_, sent, truth) in enumerate(
        interleave([Run("task", each) for each in turns], "random", random)
    ):
        for again in range(data.draw(st.integers(1, 3))):
            name = model.ask(
                make_link(sent)._replace(fresh=name_freshly(4 * number + again)), number
            ).name
            if (name, sent) not in counted:
                counts[name] = counts.get(name, len(sent.shown)) + 1
                counted.add((name, sent))
            assert len(truth) < counts[name] <= max([len(each) for each in turns]) + 1


def test_node_has_the_newest_names() -> None:
    model = Model()
    for number in range(MAX_NAMES + 2):
        model.ask(make_link(Sent("u", (), ""))._replace(fresh=name_freshly(number)), 0)

    shown = [Sent("u", (str(number),), "x") for number in range(MAX_NAMES + 1)]
    found = [model.ask(make_link(sent)._replace(fresh=b"f" * 8), 0).name for sent in shown]

    assert found == [name_freshly(number) for number in range(2, MAX_NAMES + 2)] + [b"f" * 8]


@settings(deadline=None)
@given(st.lists(_TURNS, min_size=1, max_size=4), st.randoms(use_true_random=False), st.data())
def test_retry_changes_nothing(
    turns: list[list[tuple[str, str]]], random: Random, data: st.DataObject
) -> None:
    model = Model()
    retried: set[Sent] = set()

    for now, (_, sent, truth) in enumerate(
        interleave([Run("task", each) for each in turns], "random", random)
    ):
        times = 1 if sent in retried else data.draw(st.integers(1, 4))
        retried.update([sent] if times > 1 else [])
        for _ in range(times):
            assert model.ask(make_link(sent), now).entries == truth


@pytest.mark.slow
@pytest.mark.parametrize("window", [3, 4, 5, 8])
@pytest.mark.parametrize("order", _ORDERS)
def test_windows_of_the_last_messages_are_linked(window: int, order: str) -> None:
    """The last two messages identify a conversation whose messages are all new."""
    for seed in range(40):
        random = Random(seed)
        runs = [
            Run(
                "task",
                [(f"{random.randrange(10**9)} {turn}", random.choice("ab")) for turn in range(20)],
                window,
            )
            for _ in range(random.randint(1, 6))
        ]
        model, names = Model(), dict[bytes, list[int]]()
        for number, (_, sent, truth) in enumerate(interleave(runs, order, random)):
            found = model.ask(make_link(sent)._replace(fresh=name_freshly(number)), number)
            names.setdefault(found.name, []).append(len(truth) + 1)
            assert found.entries == truth
        assert sorted(names.values()) == [list(range(1, 22))] * len(runs)


def test_conversations_that_end_alike_are_not_linked() -> None:
    """Two whose windows end with the same messages are not confused, nor do they share a name."""
    model = Model()
    for number, (task, first) in enumerate((("t1", "p"), ("t2", "q"))):
        for end in range(4):
            shown = (first, "x", "y", "z")[: end + 1]
            model.ask(
                make_link(Sent(task, shown, f"{first}{end}"))._replace(fresh=name_freshly(number))
            )

    trail = model.ask(make_link(Sent("t1", ("y", "z", "w"), "new"))._replace(fresh=name_freshly(9)))

    assert (trail.entries, trail.name) == ([b"new"], b"")


def test_history_of_unseen_turns_is_not_whole() -> None:
    """Its first request was seen, but the first words alone do not identify it."""
    model = Model()
    model.ask(make_link(Sent("u", (), "")))

    assert not model.ask(make_link(Sent("u", ("a", "b", "c"), "x"))).whole
    assert model.ask(make_link(Sent("u", ("d+e+f",), "x"))).whole


def test_memory_of_one_caller_is_bounded() -> None:
    store = MemoryStore(Metrics())
    asked = [
        make_link(Sent(f"task {number}", ("a", "b"), "x"), most=50_000) for number in range(1_000)
    ]
    other = make_link(Sent("task", ("a",), "x"), caller="01", most=50_000)

    [first] = store.push([other], 0)
    # Of a link
    dropped = [store.push([link], 0)[0].dropped for link in asked]  # type: ignore[union-attr]
    [again] = store.push([other], 0)

    assert not dropped[0]
    assert dropped[-1]
    assert len(store) < 300
    assert first == again


def test_memory_of_all_callers_is_bounded() -> None:
    metrics = Metrics()
    store = MemoryStore(metrics, 2_500)
    kept = [
        Sent("kept", tuple(f"a{turn}" for turn in range(length)), f"e{length}")
        for length in range(6)
    ]
    for sent in kept:
        store.push([make_link(sent)], 0)

    for number in range(5_000):
        store.push([make_link(Sent(f"task {number}", (), ""), caller=f"{number:06x}")], 0)

    assert metrics.registry.get_sample_value("loopguard_store_evictions_total")
    assert store.size <= 2_500 * 1_024 // 4
    [trail] = store.push([make_link(Sent("kept", (*kept[-1].shown, "a5"), "e6"))], 0)
    assert trail.entries == [f"e{turn}".encode() for turn in range(1, 7)]  # type: ignore[union-attr]  # of a link
