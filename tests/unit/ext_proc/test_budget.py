"""Time for looking into bodies, with the clock as an argument."""

from __future__ import annotations

import pytest

from extproc.ext_proc.budget import BURST_SECONDS, MAX_TENANTS, SHARE, TENANT_SHARE, InspectionBudget


def use_up(budget: InspectionBudget, tenant: str, now: float, each: float = 0.05, *, shadow: bool = False) -> int:
    """How many bodies of a tenant are looked into at one moment, each of which takes so long."""
    looked = 0
    while budget.allows(tenant, now, shadow=shadow):
        budget.spend(tenant, each, shadow=shadow)
        looked += 1
    return looked


def test_a_tenant_uses_up_only_its_own_time() -> None:
    """Past its burst none of its bodies is inspected until time has passed; those of other tenants are."""
    budget = InspectionBudget(0.0)

    greedy = use_up(budget, "greedy", 0.0)
    others = [budget.allows(f"tenant {number}", 0.5) for number in range(100)]
    later = use_up(budget, "greedy", 0.5)

    assert greedy == pytest.approx(BURST_SECONDS / 0.05, abs=1)
    assert all(others)
    assert later == pytest.approx(0.5 * TENANT_SHARE / 0.05, abs=1)


def test_shadow_policies_take_what_is_left_over() -> None:
    """What they look into costs enforcing ones nothing; what those look into leaves the others less."""
    watched, quiet = InspectionBudget(0.0), InspectionBudget(0.0)
    whole = use_up(quiet, "a", 0.0)

    assert use_up(watched, "a", 0.0, shadow=True) == whole
    assert use_up(watched, "a", 0.0) == whole
    assert use_up(quiet, "a", 0.0, shadow=True) == 0


def test_all_tenants_together_leave_time_for_the_rest() -> None:
    """Over ten seconds of greed from a hundred tenants no more than the share of all is spent."""
    budget = InspectionBudget(0.0)

    spent = 0
    for step in range(1_000):
        for tenant in range(100):
            if budget.allows(str(tenant), step / 100):
                budget.spend(str(tenant), 0.01)
                spent += 1

    assert spent * 0.01 == pytest.approx(10 * SHARE + BURST_SECONDS, abs=0.05)


def test_a_quiet_tenant_saves_no_more_than_a_burst() -> None:
    """An hour without a request is worth no more than a moment."""
    budget = InspectionBudget(0.0)
    first = use_up(budget, "a", 0.0)

    assert use_up(budget, "a", 3_600.0) == first


def test_endless_new_names_take_bounded_memory() -> None:
    """A client that changes its name each time evicts other tenants, and still spends the budget that all share."""
    budget = InspectionBudget(0.0)

    looked = 0
    for number in range(2 * MAX_TENANTS):
        if budget.allows(f"name {number}", 0.0):
            budget.spend(f"name {number}", 0.05)
            looked += 1

    assert len(budget._tenants) == MAX_TENANTS
    assert looked <= BURST_SECONDS / 0.05 + 1


def test_a_clock_that_stands_still_or_goes_back_gives_nothing() -> None:
    """Time is only given for time that has passed."""
    budget = InspectionBudget(10.0)
    use_up(budget, "a", 10.0)

    assert not budget.allows("a", 10.0)
    assert not budget.allows("a", 5.0)
