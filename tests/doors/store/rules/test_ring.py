"""Rings in every store are those of `ring`; time is an argument."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given

from extproc.store.rules.ring import Push
from tests.support.servers import Driver
from tests.support.windows import PUSH_STEPS, PUSHES, make_hit, make_push, place_pushes, rings_of


@pytest.mark.parametrize("case", PUSHES)
def test_ring_cases_hold_in_every_store(store: Driver, case: str) -> None:
    for now, pushed, expected in PUSHES[case]:
        assert b" ".join(store.push([pushed], now)[0]) == expected.encode()


@given(steps=PUSH_STEPS)
def test_rings_equal_a_plain_model(opened: Driver, steps: list[tuple[Push, int]]) -> None:
    store = opened.fresh()

    found = [store.push([pushed], now)[0] for pushed, now in place_pushes(steps)]

    assert found == rings_of(place_pushes(steps))


def test_rings_and_counters_are_asked_together(store: Driver) -> None:
    pushes = [make_push("a")._replace(key=f"ring-{number}") for number in range(20)]
    store.push(pushes[5:6], 1_000)

    async def both() -> Any:  # noqa: ANN401  # entries and counts
        asked = [pushed._replace(key=store.key(pushed), request=b"another.") for pushed in pushes]
        return await asyncio.gather(
            store.later(lambda on: on.push(asked, 1_001)), store.ask([make_hit()], 1_001)
        )

    entries, counts = store.run(both())

    assert [len(found) for found in entries] == [2 if number == 5 else 1 for number in range(20)]
    assert [count.count for count in counts] == [1]
