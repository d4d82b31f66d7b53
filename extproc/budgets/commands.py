"""Commands that operators run for a caller whose budget is used up."""

# interpreted: rarely called

from __future__ import annotations

import shlex
from math import ceil, floor, log10
from typing import Final

SOME_REQUESTS: Final = 5
"""A proposed grant covers at least this many requests. With a smaller one, the caller would soon be
refused again."""

_SHARE = 10


def round_up(amount: float) -> float:
    """Round up to two significant digits."""
    if amount <= 0:
        return 1.0
    step = 10.0 ** (floor(log10(amount)) - 1)
    return round(ceil(amount / step - 1e-9) * step, 9)


def write_budget_grant(  # noqa: PLR0913  # a budget
    tenant: str, policy: str, rule: str, limit: float, left: float, cost: float
) -> str:
    """The command that grants a caller more of a rule's budget.

    The amount is a tenth of the budget, or enough for a few requests if that is more. If a full
    budget is smaller than that, the grant raises the limit for a day. `limit`, `left` (negative if
    overdrawn) and `cost` (of one request) are in the rule's unit.
    """
    amount = round_up(max(limit / _SHARE, SOME_REQUESTS * cost - left))
    lasts = " --for 1d" if left + amount > limit else ""
    named = f"--policy {shlex.quote(policy)} --budget {shlex.quote(rule)}"
    return f"loopguard grant --caller {tenant} {named} --amount {amount:.9g}{lasts}"


def write_breaker_release(tenant: str, policy: str) -> str:
    """The command that closes a caller's circuit breaker."""
    return f"loopguard release --caller {tenant} --policy {shlex.quote(policy)}"
