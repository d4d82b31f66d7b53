"""What a session's limits say, against a plain reading of their rules; time is an argument."""

from inspect import signature
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from extproc.metrics import Metrics
from extproc.store.memory import MemoryStore
from extproc.store.rules.session import (
    KNOWN,
    MAX_RECORDS,
    Ledger,
    Limits,
)
from tests.support.examples import examples
from tests.support.ledger import (
    LIMITS_OF_ALL_KINDS,
    MOVES,
    NO_LIMITS,
    Book,
    limit,
    make_record,
    make_step,
    play,
)
from tests.support.session_calls import in_memory


@settings(max_examples=examples(300))
@given(moves=MOVES, limits=LIMITS_OF_ALL_KINDS)
def test_sessions_equal_a_plain_model_on_any_clock(
    moves: list[tuple[int, str, int, int]], limits: Limits
) -> None:
    assert play(moves, limits, in_memory()) == play(moves, limits, Book().ask)


@settings(max_examples=examples(150))
@given(moves=MOVES, limits=LIMITS_OF_ALL_KINDS, entries=st.sampled_from([31, 32, 64, 1_000]))
def test_sessions_equal_a_plain_model_in_any_memory(
    moves: list[tuple[int, str, int, int]], limits: Limits, entries: int
) -> None:
    """The number of unpacked ledgers changes no answer; the clock goes forward."""
    store = MemoryStore(Metrics(), entries)
    moves = [(who, move, amount, abs(gap)) for who, move, amount, gap in moves]

    assert play(moves, limits, lambda asked, now: store.hit([asked], now)[0]) == play(
        moves, limits, Book().ask
    )


@pytest.mark.parametrize("number", [0, 1, 20_000])
def test_any_history_is_accepted(number: int) -> None:
    ledger = Ledger(None, 0)
    ledger.take_step(make_step(1, NO_LIMITS, [bytes(15)] * number), 0)
    many = [position.to_bytes(15) for position in range(20_000)]
    ledger.take_step(make_step(2, limit(tool_calls=10**9), many, tools=()), 1)

    assert len(ledger.pack()) < MAX_RECORDS * KNOWN + 1_000


def test_new_ledger_is_small() -> None:
    ledger = Ledger(None, 0)
    ledger.take_step(make_step(1, NO_LIMITS), 0)

    assert len(ledger.pack()) < 192


@pytest.mark.slow
def test_ledger_is_bounded() -> None:
    limits, state = limit(tool_calls=10**9), b""
    for number in range(1, 400):
        calls = [make_record(at * 8, arguments=str(at)) for at in range(number * 2)]
        ledger = Ledger(state or None, number)
        ledger.take_step(make_step(number, limits, calls, reserve=1), number)
        state = ledger.pack()

    assert len(state) - len(ledger.names) < 10_000


@pytest.mark.slow
def test_sessions_in_memory_are_bounded() -> None:
    store = MemoryStore(Metrics(), max_entries=2_000)
    calls = [make_record(number, "read", str(number)) for number in range(20)]
    for number in range(10_000):
        names = {"key": f"session:p::{number}:7f", "caller": f"sessions:p::{number // 50}:7f"}
        store.hit([make_step(number, NO_LIMITS, calls, **names)], number)

        assert len(store) >= min(number + 1, 200)

    assert len(store) <= 2_000
    assert store.size <= 2_000 * 1_024


def test_packed_sessions_are_kept_until_they_end() -> None:
    store = MemoryStore(Metrics(), max_entries=31)  # too few for unpacked ledgers
    start = 1_764_000_000_000

    def ask_each(number: int, since: int, group: str) -> list[int]:
        names = [
            (f"session:p::{group}{each}:7f", f"sessions:p::{group}{each}:7f") for each in range(10)
        ]
        steps = [make_step(number, NO_LIMITS, key=key, caller=caller) for key, caller in names]
        return [
            store.hit([step], start + since + 137 * each)[0].steps
            for each, step in enumerate(steps)
        ]

    assert ask_each(1, 0, "a") == [1] * 10
    assert ask_each(2, 50_000, "a") == [2] * 10
    for number in range(8):
        assert ask_each(number, 200_000 + 2_000 * number, "b") == [number + 1] * 10

    assert len(store) == 20


def test_with_tools_copies_all_other_limits() -> None:
    """A field that is new is not lost where an operator grants calls of a tool."""
    limits: dict[str, Any] = {
        name: {False: True, (): ()}.get(field.default, number)
        for number, (name, field) in enumerate(signature(Limits).parameters.items())
    }

    made = Limits(**limits).with_tools(((b"tool", 9),))

    assert {name: getattr(made, name) for name in limits} == {**limits, "tools": ((b"tool", 9),)}
