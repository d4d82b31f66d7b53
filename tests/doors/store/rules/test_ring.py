"""Rings in every store are those of `ring`; time is an argument."""

import pytest
from hypothesis import given

from extproc.store.rules.ring import Push
from tests.support.servers import Driver
from tests.support.windows import PUSH_STEPS, PUSHES, place_pushes, rings_of


@pytest.mark.parametrize("case", PUSHES)
def test_ring_cases_hold_in_every_store(store: Driver, case: str) -> None:
    for now, pushed, expected in PUSHES[case]:
        assert b" ".join(store.push([pushed], now)[0]) == expected.encode()


@given(steps=PUSH_STEPS)
def test_rings_equal_a_plain_model(opened: Driver, steps: list[tuple[Push, int]]) -> None:
    store = opened.fresh()

    found = [store.push([pushed], now)[0] for pushed, now in place_pushes(steps)]

    assert found == rings_of(place_pushes(steps))
