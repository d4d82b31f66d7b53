"""What a session's limits say, against a plain reading of their rules; time is an argument."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.metrics import Metrics
from extproc.store.memory import MemoryStore
from extproc.store.rules.session import KNOWN, MAX_MONEY, MAX_RECORDS, Ledger, Limits, Settlement, Standing, Step, enter
from tests.support.examples import examples
from tests.support.ledger import (
    CASES,
    LIMITS_OF_ALL_KINDS,
    MOVES,
    NO_LIMITS,
    Book,
    ask,
    call,
    digest,
    limit,
    make_record,
    make_step,
    play,
    settle_step,
    tell,
)


class Ledgers:
    """All sessions by the functions that the stores share."""

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}

    def ask(self, asked: Step | Settlement, now: int) -> Standing:
        """What a store is asked."""
        ledger = self._take(asked.key, asked.limits, now)
        if isinstance(asked, Settlement):
            standing = ledger.settle(asked, now) if ledger is not None else Standing(retry=True)
        else:
            if ledger is None:
                self._kept[asked.tenant], halvings = enter(self._kept.get(asked.tenant), asked.limits, now)
                ledger = Ledger(None, now, asked.earlier, halvings)
            standing = ledger.take_step(asked, now)
        if ledger is not None:
            self._kept[asked.key] = ledger.pack()
        return standing

    def _take(self, key: str, limits: Limits, now: int) -> Ledger | None:
        state = self._kept.pop(key, None)
        ledger = Ledger(state, now) if state is not None else None
        return None if ledger is not None and ledger.is_over(limits, now) else ledger


@settings(max_examples=examples(300))
@given(moves=MOVES, limits=LIMITS_OF_ALL_KINDS)
def test_a_session_is_judged_by_the_rules(moves: list[tuple[int, str, int, int]], limits: Limits) -> None:
    assert play(moves, limits, Ledgers().ask) == play(moves, limits, Book().ask)


@settings(max_examples=examples(150))
@given(moves=MOVES, limits=LIMITS_OF_ALL_KINDS, entries=st.sampled_from([31, 32, 64, 1_000]))
def test_a_session_in_any_memory_is_judged_by_the_rules(
    moves: list[tuple[int, str, int, int]], limits: Limits, entries: int
) -> None:
    """Whether none, one, two or all of their ledgers are at hand, sessions are told the same; the clock goes forward."""
    store = MemoryStore(Metrics(), entries)
    moves = [(who, move, amount, abs(gap)) for who, move, amount, gap in moves]

    assert play(moves, limits, lambda asked, now: store.hit([asked], now)[0]) == play(moves, limits, Book().ask)


@pytest.mark.parametrize("case", CASES)
def test_a_session_in_memory(case: str) -> None:
    store = MemoryStore(Metrics())

    assert [tell(store.hit([asked], now)[0]) for now, asked, _ in CASES[case]] == [expected for _, _, expected in CASES[case]]


def test_calls_that_are_not_known_any_more_are_not_counted_again() -> None:
    """In a history longer than what is kept of it, what stands before a known call is older, and behind it new."""
    history = [make_record(number, "send" if number == 3 else "read") for number in range(900)]
    limits = limit(tools=((digest("send"), 1),))

    lengths = (300, 301, 600, 899, 900)

    standings = ask(*(make_step(length, limits, history[:length]) for length in lengths))

    assert [(tell(standing), standing.tool_calls) for standing in standings] == [("ok", length) for length in lengths]


def test_as_many_calls_are_known_as_a_limit_needs() -> None:
    """Where a thousand calls are allowed, twice as many are found again in a history that has lost its newest turns."""
    history = [make_record(number, arguments=str(number)) for number in range(900)]
    shown = (history, history[388:420], history[300:330])

    standings = ask(*(make_step(number, limit(tool_calls=1_000), calls) for number, calls in enumerate(shown)))

    assert [standing.tool_calls for standing in standings] == [900, 900, 930]  # of a thousand, the newest 512


def test_tools_are_counted_as_far_as_there_is_room() -> None:
    """64 tools are counted, each by the start of its name; one that has a limit always is."""
    calls = [number.to_bytes(6) + number.to_bytes(4) + bytes(5) for number in range(100)]
    tools = tuple((number.to_bytes(4), "\U0001f600" * number + "\ud800") for number in range(100))
    limits = limit(tools=(((99).to_bytes(4), 5),))

    (standing,) = ask(make_step(1, limits, calls, tools=tools))

    assert standing.tool_calls == 100
    assert [tool for tool, _, _ in standing.tools] == [number.to_bytes(4) for number in (*range(63), 99)]
    assert [name for _, name, _ in standing.tools[:3]] == ["?", "\U0001f600?", "\U0001f600" * 2 + "?"]
    assert standing.tools[-1][1] == "\U0001f600" * 63


def test_money_stays_exact() -> None:
    steps = [make_step(number, NO_LIMITS, reserve=10**30) for number in range(100)]

    *_, standing = ask(*steps, settle_step(steps[-1], cost=10**30))

    assert standing.cost == MAX_MONEY
    assert standing.reserved <= MAX_MONEY


@pytest.mark.parametrize("number", [0, 1, 20_000])
def test_whatever_a_history_holds_is_taken(number: int) -> None:
    ledger = Ledger(None, 0)
    ledger.take_step(make_step(1, NO_LIMITS, [bytes(15)] * number), 0)
    many = [position.to_bytes(15) for position in range(20_000)]
    ledger.take_step(make_step(2, limit(tool_calls=10**9), many, tools=()), 1)

    assert len(ledger.pack()) < MAX_RECORDS * KNOWN + 1_000


def test_a_fresh_ledger_is_small() -> None:
    ledger = Ledger(None, 0)
    ledger.take_step(make_step(1, NO_LIMITS), 0)

    assert len(ledger.pack()) < 192


def test_a_ledger_is_bounded() -> None:
    limits, state = limit(tool_calls=10**9), b""
    for number in range(1, 400):
        calls = [make_record(at * 8, arguments=str(at)) for at in range(number * 2)]
        ledger = Ledger(state or None, number)
        ledger.take_step(make_step(number, limits, calls, reserve=1), number)
        state = ledger.pack()

    assert len(state) - len(ledger.names) < 10_000


def test_every_call_of_a_long_history_is_counted() -> None:
    """Also by tool, where only the newest are looked at one by one: a session that was not known may have a long past."""
    tools = ["send" if number % 10 == 3 else "read" for number in range(4_900)]
    limits = limit(tool_calls=10**9, tools=((digest("send"), 490),))

    (first, second) = ask(*(make_step(number, limits, call(*tools, *["send"] * number)) for number in range(2)))

    assert (tell(first), first.tool_calls) == ("ok", 4_900)
    assert (tell(second), second.tool_calls) == ("max_calls_per_tool 491/490 send", 4_901)


@pytest.mark.slow
def test_sessions_in_memory_are_bounded() -> None:
    store = MemoryStore(Metrics(), max_entries=2_000)
    calls = [make_record(number, "read", str(number)) for number in range(20)]
    for number in range(10_000):
        names = {"key": f"session:p::{number}:7f", "tenant": f"sessions:p::{number // 50}:7f"}
        store.hit([make_step(number, NO_LIMITS, calls, **names)], number)

        assert len(store) >= min(number + 1, 200)

    assert len(store) <= 2_000
    assert store.size <= 2_000 * 1_024


def test_packed_sessions_are_kept_until_they_are_over_and_no_longer() -> None:
    store = MemoryStore(Metrics(), max_entries=31)  # too few for ledgers at hand
    start = 1_764_000_000_000

    def ask_each(number: int, since: int, group: str) -> list[int]:
        names = [(f"session:p::{group}{each}:7f", f"sessions:p::{group}{each}:7f") for each in range(10)]
        steps = [make_step(number, NO_LIMITS, key=key, tenant=tenant) for key, tenant in names]
        return [store.hit([step], start + since + 137 * each)[0].steps for each, step in enumerate(steps)]

    assert ask_each(1, 0, "a") == [1] * 10
    assert ask_each(2, 50_000, "a") == [2] * 10
    for number in range(8):
        assert ask_each(number, 200_000 + 2_000 * number, "b") == [number + 1] * 10

    assert len(store) == 20


def test_other_tools_leave_all_other_limits() -> None:
    """A field that is new is not lost where an operator grants calls of a tool."""
    limits: dict[str, Any] = {
        name: {False: True, (): ()}.get(field.default, number)
        for number, (name, field) in enumerate(signature(Limits).parameters.items())
    }

    made = Limits(**limits).with_tools(((b"tool", 9),))

    assert {name: getattr(made, name) for name in limits} == {**limits, "tools": ((b"tool", 9),)}
