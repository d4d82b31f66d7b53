"""The commands with which an operator lets a caller go on whose budget is used up."""

from __future__ import annotations

import shlex
from math import ceil, floor, log10

_SHARE = 10


def suggest_amount(limit: float, left: float, asked: float) -> float:
    """What to grant, in the rule's unit: a tenth of the budget or what the request lacks, at most the whole budget."""
    return min(limit, _round_up(max(limit / _SHARE, asked - left)))


def _round_up(amount: float) -> float:
    """The next number of two digits."""
    if amount <= 0:
        return 1.0
    step = 10.0 ** (floor(log10(amount)) - 1)
    return round(ceil(amount / step - 1e-9) * step, 9)


def write_budget_grant(tenant: str, policy: str, rule: str, amount: float) -> str:
    """The command that gives a caller, by its hash, more of a rule's budget once."""
    named = f"--policy {shlex.quote(policy)} --budget {shlex.quote(rule)}"
    return f"loopguard grant --caller {tenant} {named} --amount {amount:.9g}"


def write_breaker_release(tenant: str, policy: str) -> str:
    """The command that closes a caller's circuit breaker."""
    return f"loopguard release --caller {tenant} --policy {shlex.quote(policy)}"
