"""The commands with which an operator lets a caller go on whose budget is used up."""

# interpreted: written where an operator has to act

from __future__ import annotations

import shlex
from math import ceil, floor, log10
from typing import Final

SOME_REQUESTS: Final = 5
"""A proposed grant is enough for this many requests: after less, the caller would be refused again at once."""

_SHARE = 10


def round_up(amount: float) -> float:
    """The next number of two digits."""
    if amount <= 0:
        return 1.0
    step = 10.0 ** (floor(log10(amount)) - 1)
    return round(ceil(amount / step - 1e-9) * step, 9)


def write_budget_grant(tenant: str, policy: str, rule: str, limit: float, left: float, asked: float) -> str:  # noqa: PLR0913  # a budget
    """The command that gives a caller, by its name, more of a rule's budget: a tenth, or enough for some requests.

    A budget that would hold less than that when it is whole gets a higher limit for a day. `limit`, `left` (below zero if more
    was used) and `asked` by one request are in the rule's unit.
    """
    amount = round_up(max(limit / _SHARE, SOME_REQUESTS * asked - left))
    lasts = " --for 1d" if left + amount > limit else ""
    named = f"--policy {shlex.quote(policy)} --budget {shlex.quote(rule)}"
    return f"loopguard grant --caller {tenant} {named} --amount {amount:.9g}{lasts}"


def write_breaker_release(tenant: str, policy: str) -> str:
    """The command that closes a caller's circuit breaker."""
    return f"loopguard release --caller {tenant} --policy {shlex.quote(policy)}"
