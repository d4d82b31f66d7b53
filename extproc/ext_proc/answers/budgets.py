"""What clients are told about budgets: `RateLimit` headers of refusals, and the same as metadata of requests that continue."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from typing import Any, Final

from extproc.bounded import Memo
from extproc.budgets.subject import BudgetSubject
from extproc.decision import Decision, Outcome
from extproc.engine.budget_candidates import BudgetCandidate
from extproc.ext_proc.answers.metadata import SESSIONS, make_heads, write_entries, write_text

RULE: Final = "budget_rule"

_FIXED: Final[Memo[tuple[str, str, float], tuple[bytes, bytes]]] = Memo(512)
"""What is the same in the metadata of all requests that continue, by policy, rule and limit."""

_SHORT: Final = 100
_DIGITS: Final = 20
_REMAINING: Final = make_heads("ratelimit_remaining", _DIGITS)
_RESET: Final = make_heads("ratelimit_reset", _DIGITS)
_WHOLE: Final = make_heads("ratelimit", _SHORT)
_TIME: Final = b";t="

_SAFE: Final = str.maketrans({"\\": "\\\\", '"': '\\"'})


def list_rate_limit(subject: BudgetSubject, policy: str, seconds: int) -> list[tuple[str, str]]:
    """The headers about one budget; `seconds` until it is whole again, or until the request fits.

    Their names and values are those of Fairvisor, from two versions of draft-ietf-httpapi-ratelimit-headers.
    """
    left = max(0, floor(subject.left))
    return [
        ("RateLimit-Limit", f"{floor(subject.limit)}"),
        ("RateLimit-Remaining", f"{left}"),
        ("RateLimit-Reset", f"{seconds}"),
        ("RateLimit", f'"{policy.translate(_SAFE)}";r={left};t={seconds}'),
    ]


def list_refusal_headers(lead: Outcome, subject: BudgetSubject) -> list[tuple[str, str]]:
    """The headers of a refusal."""
    again = lead.retry_after
    headers = [("x-should-retry", "false")] if again is None else [("Retry-After", str(again))]
    headers += list_rate_limit(subject, lead.policy, subject.reset if again is None else again)
    headers += [("X-Fairvisor-Reason", subject.reason.value), ("x-loopguard-policy", lead.policy)]
    return [*headers, ("x-loopguard-rule", subject.rule)] if subject.rule.isascii() else headers


def find_tightest(budgets: Sequence[BudgetCandidate]) -> tuple[str, BudgetSubject] | None:
    """The budget of which the smallest share is left, and its policy; None if no rule applies."""
    found: tuple[str, BudgetSubject] | None = None
    least = 0.0
    for each in budgets:
        subject = each.told
        if subject.rule and (found is None or subject.share < least):
            found, least = (each.plan.id, subject), subject.share
    return found


def describe_budgets(budgets: Sequence[BudgetCandidate], decision: Decision) -> dict[str, Any]:
    """Metadata about the tightest budget, from which Envoy can write response headers; empty if no rule applies.

    A refusal is about the budget that refuses, so it has the values of its headers.
    """
    lead = decision.lead
    if lead is not None and isinstance(lead.subject, BudgetSubject) and lead.subject.rule:
        policy, subject = lead.policy, lead.subject
        seconds = subject.reset if lead.retry_after is None else lead.retry_after
    else:
        found = find_tightest(budgets)
        if found is None:
            return {}
        policy, subject = found
        seconds = subject.reset
    headers = {name.lower().replace("-", "_"): value for name, value in list_rate_limit(subject, policy, seconds)}
    return {**headers, RULE: subject.rule}


def write_budgets(budgets: Sequence[BudgetCandidate], calls: str) -> bytes:
    """The same as `describe_budgets`, as bytes for a request that just continues, with SESSIONS; empty for nothing."""
    entries = [write_text(SESSIONS, calls)] if calls else []
    found = find_tightest(budgets)
    if found is not None:
        policy, subject = found
        known = policy, subject.rule, subject.limit
        fixed = _FIXED.get(known)
        if fixed is None:
            rule = write_text(RULE, subject.rule)
            fixed = write_text("ratelimit_limit", f"{floor(subject.limit)}") + rule, f'"{policy.translate(_SAFE)}";r='.encode()
            _FIXED.put(known, fixed)
        left, seconds = str(max(0, floor(subject.left))).encode(), str(subject.reset).encode()
        whole = b"".join([fixed[1], left, _TIME, seconds])
        entries += [fixed[0], _REMAINING[len(left)], left, _RESET[len(seconds)], seconds]
        entries += [_WHOLE[len(whole)], whole] if len(whole) < _SHORT else [write_text("ratelimit", whole.decode())]
    return write_entries(entries) if entries else b""
