"""Budget grants: a one-time credit for a caller's budget, or a higher limit for some time.

A higher limit is an override like others: each replica adds it to the limit in its requests to the
store. A token bucket is also credited at once, because otherwise its level would only rise over
time.

A one-time credit is not an active override. The replicas share a budget's state, so the replica
that receives the order credits it in the store. It finds the budget in the rows of `/budgets`,
which have all callers of the last hour.
"""
# interpreted: takes what operators order

from __future__ import annotations

from collections.abc import Sequence

from extproc.budgets.guard import CIRCUIT_BREAKER
from extproc.engine.orders import ActiveOverride
from extproc.engine.plan import Plan
from extproc.errors import BadOrderError
from extproc.operator import standing_orders
from extproc.operator.budget_rows import BudgetRow
from extproc.operator.standing_orders import ShownRow
from extproc.store.rules.budget import BREAKER, BUCKET, Take

_SHOWN = 20


def find_credits(
    grant: ActiveOverride, rows: Sequence[BudgetRow], plans: Sequence[Plan], now: float
) -> tuple[list[Take], list[str]]:
    """The credits to apply at once for a budget grant, and remarks for the operator.

    Args:
        grant: the budget grant.
        rows: the budgets known to all replicas.
        plans: the active policies.
        now: in seconds since 1970.

    Raises:
        BadOrderError: the grant matches no budget, or budgets of several policies.
    """
    rule = grant.budget
    if rule == CIRCUIT_BREAKER:
        raise BadOrderError(f"a {CIRCUIT_BREAKER} has no budget: use release, which closes it")
    known = list_rules([plan for plan in plans if grant.policy in ("", plan.id)])
    if rule not in known:
        where = f"policy {grant.policy} has" if grant.policy else "the policies have"
        there = ", ".join(sorted(known)[:_SHOWN]) or "none"
        raise BadOrderError(f"budget must be the name of a rule; {where}: {there}")
    found = [row for row in rows if concerns(grant, row)]
    if grant.raises:
        callers = {row.tenant for row in found}
        notes = (
            [f"this applies to the budgets of {len(callers)} callers"] if len(callers) > 1 else []
        )
        if not found:
            notes.append(f"no known request of this caller met rule {rule} in the last hour")
        buckets = [
            (row, max(1, round(grant.amount * row.units))) for row in found if row.kind == BUCKET
        ]
        return [row.make_credit(amount, amount) for row, amount in buckets], notes
    if not found:
        raise BadOrderError(
            f"no request of this caller met rule {rule} in the last hour, so there is nothing to "
            "add to; /budgets lists callers"
        )
    policies = sorted({row.policy for row in found})
    if len(policies) > 1:
        raise BadOrderError(
            f"rule {rule} is in several policies: name one of {', '.join(policies)} with policy"
        )
    largest = max(row.limit / row.units for row in found)
    if grant.amount > largest:
        raise BadOrderError(
            f"amount is more than the whole budget of {largest:.9g}, and a budget cannot exceed "
            "its limit: to raise the limit"
            " temporarily, give seconds (--for)"
        )
    added = [
        row.make_credit(min(row.limit, max(1, round(grant.amount * row.units)))) for row in found
    ]
    return added, _remark(found, grant.amount, now)


def list_rules(plans: Sequence[Plan]) -> set[str]:
    """The rules of these policies, including those that a ramp shadows for some callers."""
    budgets = [each.budget for plan in plans for each in (plan, plan.watching) if each is not None]
    return {rule.name for budget in budgets if budget is not None for rule in budget.guard.rules}


def concerns(grant: ActiveOverride, row: BudgetRow) -> bool:
    """Whether a grant applies to a row's budget."""
    about = ShownRow(
        {row.policy}, (row.tenant, row.alias, *row.parts), dict(row.hashes), budgets={row.rule}
    )
    return row.kind != BREAKER and standing_orders.concerns(grant, about)


def _remark(rows: Sequence[BudgetRow], amount: float, now: float) -> list[str]:
    notes = []
    callers = {row.tenant for row in rows}
    if len(callers) > 1:
        notes.append(f"this was added to the budgets of {len(callers)} callers")
    for row in rows:
        room = (row.limit - row.find_left(now)) / row.units
        if room < amount:
            notes.append(
                f"{row.tenant} had used {max(0.0, room):.9g} of {row.limit / row.units:.9g} "
                f"({row.rule}, {row.budget}):"
                " the budget is full again and cannot exceed its limit; --for raises the limit "
                "temporarily"
            )
    return notes[:_SHOWN]
