"""Time for looking into bodies, with the clock as an argument."""

import random
from collections.abc import Mapping

import pytest

from extproc.ext_proc.budget import (
    BURST_SECONDS,
    MAX_NEW,
    MAX_TENANTS,
    NEW_SECONDS,
    RESERVE_SECONDS,
    SHARE,
    InspectionBudget,
)

MOST_AT_ONCE = BURST_SECONDS + RESERVE_SECONDS


def use_up(
    budget: InspectionBudget, tenant: str, now: float, each: float = 0.05, *, shadow: bool = False
) -> int:
    """The number of bodies of a tenant inspected at one moment; each takes `each` seconds."""
    looked = 0
    while budget.allows(tenant, now, shadow=shadow):
        budget.spend(tenant, each, shadow=shadow)
        looked += 1
    return looked


def run(
    budget: InspectionBudget,
    wanted: Mapping[str, float],
    seconds: float,
    start: float = 0.0,
    each: float = 0.002,
    seed: int = 0,
) -> dict[str, float]:
    """Callers' shares of the processor, by what bodies would take; each takes `each` seconds."""
    chance = random.Random(seed)
    arrivals = [
        (start + chance.uniform(0, seconds), tenant)
        for tenant, share in wanted.items()
        for _ in range(round(share * seconds / each))
    ]
    got = dict.fromkeys(wanted, 0.0)
    for now, tenant in sorted(arrivals):
        if budget.allows(tenant, now):
            budget.spend(tenant, each)
            got[tenant] += each / seconds
    return got


def test_tenant_uses_up_only_its_own_time() -> None:
    budget = InspectionBudget(0.0)

    assert use_up(budget, "greedy", 0.0) == pytest.approx(BURST_SECONDS / 0.05, abs=1)
    assert all(budget.allows(f"tenant {number}", 0.0) for number in range(100))
    later = use_up(budget, "greedy", 0.5)
    # Its own part, which it may exceed by one body
    assert later == pytest.approx(0.5 * SHARE / 0.05, abs=3)


@pytest.mark.slow
def test_only_caller_gets_all_of_the_time() -> None:
    got = run(InspectionBudget(0.0), {"company": 3.0}, 60.0)

    assert got["company"] == pytest.approx(SHARE + BURST_SECONDS / 60, rel=0.02)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(3))
def test_time_is_shared_fairly_and_used_up(seed: int) -> None:
    chance = random.Random(seed)
    shy = {f"shy {number}": chance.uniform(0.001, 0.5) for number in range(chance.randrange(1, 10))}
    greedy = {
        f"greedy {number}": chance.uniform(1.0, 5.0) for number in range(chance.randrange(1, 6))
    }
    fair = SHARE / (len(shy) + len(greedy) + 1)
    shy = {name: 0.7 * fair * wanted * 2 for name, wanted in shy.items()}
    budget = InspectionBudget(0.0)
    run(budget, shy | greedy, 10.0, seed=seed)

    got = run(budget, shy | greedy, 30.0, start=10.0, seed=seed)

    assert sum(got.values()) == pytest.approx(SHARE, rel=0.05)
    assert all(
        got[name] == pytest.approx(wanted, rel=0.1, abs=0.002) for name, wanted in shy.items()
    )
    assert all(got[name] >= 0.9 * fair for name in greedy)


@pytest.mark.deep
@pytest.mark.parametrize("wanted", [1.0, 100.0])
def test_callers_within_their_share_miss_nothing_in_a_flood(wanted: float) -> None:
    budget = InspectionBudget(0.0)
    run(budget, {"shy": 0.02}, 5.0)
    run(budget, {"greedy": wanted, "shy": 0.02}, 5.0, start=5.0)

    got = run(budget, {"greedy": wanted, "shy": 0.02, "new": 0.02}, 10.0, start=10.0)

    assert [got["shy"], got["new"]] == pytest.approx([0.02, 0.02])
    assert got["greedy"] == pytest.approx(SHARE - 0.04, rel=0.05)


def test_changing_names_take_no_time_from_known_callers() -> None:
    budget = InspectionBudget(0.0)
    run(budget, {"shy": 0.05}, 5.0)

    flood = {f"name {number}": 0.002 for number in range(3 * MAX_TENANTS)}
    got = run(budget, {"shy": 0.05, **flood}, 10.0, start=5.0, each=0.02)

    assert got["shy"] == pytest.approx(0.05)
    assert sum(got.values()) <= SHARE + MOST_AT_ONCE / 10


@pytest.mark.slow
def test_all_tenants_together_spend_no_more_than_the_share() -> None:
    got = run(InspectionBudget(0.0), {str(number): 1.0 for number in range(100)}, 10.0, each=0.01)

    assert 10 * SHARE + BURST_SECONDS <= sum(got.values()) * 10 <= 10 * SHARE + MOST_AT_ONCE


def test_quiet_tenant_saves_no_more_than_a_burst() -> None:
    budget = InspectionBudget(10.0)
    use_up(budget, "a", 10.0)

    assert not budget.allows("a", 10.0)
    assert not budget.allows("a", 5.0)
    later = use_up(budget, "a", 3_600.0)
    assert use_up(budget, "a", 9_999.0) == later
    assert later * 0.05 <= MOST_AT_ONCE


def test_endless_new_names_take_bounded_memory() -> None:
    budget = InspectionBudget(0.0)

    looked = 0
    for number in range(4 * MAX_TENANTS):
        for _ in range(number % 3):
            if budget.allows(f"name {number}", 0.0):
                budget.spend(f"name {number}", 0.05)
                looked += 1

    assert MAX_TENANTS < len(budget) <= MAX_TENANTS + MAX_NEW
    assert looked * 0.05 <= BURST_SECONDS + NEW_SECONDS + 0.05
