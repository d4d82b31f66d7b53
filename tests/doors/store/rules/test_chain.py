"""Chains in every store are those of `follow`; time is an argument."""

from __future__ import annotations

import inspect
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from extproc.store.memory import MemoryStore
from extproc.store.pushes import AnyPush
from extproc.store.rules.chain import MAX_ENTRIES, MAX_RETRIES
from tests.support.chains import STEPS, Model, Sent, ask_store, make_link
from tests.support.servers import Driver
from tests.support.windows import make_push


@given(steps=STEPS, ttl=st.sampled_from([3_600_000, 400_000, 60_000]), most=st.sampled_from([2**26, 3_000]))
def test_a_store_follows_conversations_as_the_definition_does(
    opened: Driver, steps: list[tuple[Sent, int]], ttl: int, most: int
) -> None:
    """For any requests, on a clock that may be set back, every store answers the same, and drops the same.

    The clock of memory is monotonic: set back, it would miss what it has swept away, which depends on the values in front.
    """
    store, model, now = opened.fresh(), Model(), 10_000_000
    monotonic = isinstance(opened.store, MemoryStore)

    for number, (sent, gap) in enumerate(steps):
        now += abs(gap) if monotonic else gap
        fresh = number.to_bytes(8, "little") if number % 7 else b""
        link = make_link(sent, ttl_ms=ttl, most=most)._replace(fresh=fresh)
        assert ask_store(store, link, now) == model.ask(link, now), (sent, now)


def test_a_conversation_is_followed(store: Driver) -> None:
    """Each turn finds all before it, as many as are kept."""
    shown: tuple[str, ...] = ()
    for number in range(40):
        trail = ask_store(store, make_link(Sent("u", shown, f"e{number}")), 1_000 + number)
        assert trail.entries == [f"e{place}".encode() for place in range(1, number + 1)][-MAX_ENTRIES:]
        assert trail.whole
        shown = (*shown, f"a{number}")


def test_a_request_that_is_sent_again_is_a_retry_three_times(store: Driver) -> None:
    """From then on it is a turn each time."""
    ask_store(store, make_link(Sent("u", (), "")), 0)
    found = [len(ask_store(store, make_link(Sent("u", ("a",), "x")), number).entries) for number in range(MAX_RETRIES + 4)]

    assert found == [1] * (MAX_RETRIES + 1) + [2, 3, 4]


def test_a_node_whose_conversations_have_left_goes_after_two_minutes(store: Driver) -> None:
    """One that was left is found again for that long; one that others may still leave stays."""
    for _ in range(2):
        ask_store(store, make_link(Sent("u", (), "")), 0)
    ask_store(store, make_link(Sent("u", ("a",), "x")), 0)
    ask_store(store, make_link(Sent("u", ("b",), "y")), 100_000)

    assert ask_store(store, make_link(Sent("u", ("c",), "z")), 219_999).entries == [b"z"]
    assert ask_store(store, make_link(Sent("u", ("d",), "z")), 219_999).whole is False
    assert ask_store(store, make_link(Sent("u", ("a", "d"), "z")), 500_000).entries == [b"x", b"z"]


def test_chains_and_rings_are_asked_together(store: Driver) -> None:
    """In one round trip, each answered for itself."""
    links = [make_link(Sent(f"u{number}", ("a",), f"e{number}"), tenant=f"{number:02x}") for number in range(20)]
    pushes: list[AnyPush] = [make_push("r")._replace(key=store.key(make_push("r"))), *links]

    async def settled() -> Any:  # noqa: ANN401  # whatever a store answers
        answer = store.store.push(pushes, 5)
        return await answer if inspect.isawaitable(answer) else answer

    ring, *trails = store.run(settled())

    assert ring == [b"r"]
    assert [trail.entries for trail in trails] == [[f"e{number}".encode()] for number in range(20)]
