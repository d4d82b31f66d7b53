"""In every store, conversations that go on leave the requests without a session as `session` says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.store.rules.session import CONVERSATION, FAILED, JOINED, SUCCEEDED, WITHDRAWN, Settlement, Step
from tests.support.ledger import limit, make_step
from tests.support.servers import Driver
from tests.support.session_calls import in_memory

STARTS = limit(steps=6, cost=40, ends=True)


def name_call(number: int) -> bytes:
    """A name of which the first half names the conversation that the call begins."""
    return number.to_bytes(CONVERSATION) + bytes((number % 256,)) * CONVERSATION


def start(number: int, prompt: int = 0, reserve: int = 0) -> Step:
    """A request that begins a conversation."""
    return make_step(prompt or number, STARTS, call=name_call(number), reserve=reserve)


def finish(number: int, outcome: int, cost: int = 0) -> Settlement:
    """The outcome of a request; of `JOINED`, only the conversation is known."""
    call = name_call(number)
    given = call[:CONVERSATION].ljust(len(call), b"\0") if outcome == JOINED else call
    return Settlement(make_step(1, STARTS).key, STARTS, given, cost, estimated=cost % 2 > 0, outcome=outcome)


@pytest.mark.parametrize("settled", [False, True])
def test_a_start_leaves_with_steps_and_cost(store: Driver, settled: bool) -> None:
    """Whether its cost is known by then or not."""
    store.account([start(1), start(2)], 1)
    if settled:
        store.account([finish(1, SUCCEEDED, 30), finish(2, SUCCEEDED, 4)], 2)

    (after,) = store.account([finish(1, JOINED, 30 if settled else 0)], 3)
    (late,) = store.account([finish(1, SUCCEEDED, 30)], 4)

    assert (after.steps, after.cost, after.reserved) == (1, 4 if settled else 0, 0)
    assert (late.steps, late.cost, late.retry) == (1, 4 if settled else 0, True)


def test_nothing_falls_below_zero(store: Driver) -> None:
    """Also if equal prompts, which count as one step, all go on."""
    store.account([start(number, prompt=9) for number in range(1, 5)], 1)
    store.account([finish(number, SUCCEEDED, 3) for number in (1, 2, 3)], 2)

    joined = store.account([finish(number, JOINED, 5) for number in (1, 2, 3)], 3)
    (withdrawn,) = store.account([finish(4, WITHDRAWN)], 4)

    assert [(standing.steps, standing.cost) for standing in (*joined, withdrawn)] == [(0, 4), (0, 0), (0, 0), (0, 0)]


_MOVES = st.lists(
    st.tuples(
        st.sampled_from(["start", "start", "again", "settle", "fail", "withdraw", "join", "join"]),
        st.integers(1, 8),
        st.integers(0, 12),
        st.sampled_from([0, 1, 5_000, 59_999, 60_000, 600_000]),
    ),
    max_size=60,
)


@given(_MOVES)
def test_a_store_keeps_starts_as_memory_does(opened: Driver, moves: list[tuple[str, int, int, int]]) -> None:
    """In any order of starts, outcomes and conversations that go on."""
    store, memory, now = opened.fresh(), in_memory(), 1_000_000
    outcomes = {"settle": SUCCEEDED, "fail": FAILED, "withdraw": WITHDRAWN, "join": JOINED}

    for move, number, amount, gap in moves:
        now += gap
        prompt = 100 if move == "again" else 0
        asked = finish(number, outcomes[move], amount) if move in outcomes else start(number, prompt, reserve=amount)
        assert store.account([asked], now) == [memory(asked, now)]
