"""What clients are told about budgets: `RateLimit` headers of refusals, and the same as metadata of requests that continue."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from typing import Any, Final

from extproc.budgets.guard import Reservation, make_subject
from extproc.budgets.subject import BudgetSubject
from extproc.decision import Decision, Outcome
from extproc.engine.budget_candidates import BudgetCandidate

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


def find_tightest(budgets: Sequence[BudgetCandidate]) -> tuple[str, Reservation] | None:
    """The budget of which the smallest share is left, and its policy; None if no rule applies."""
    found = [(each.plan.id, tightest) for each in budgets if (tightest := each.find_tightest()) is not None]
    return min(found, key=lambda pair: _find_share(pair[1])) if found else None


def _find_share(reserved: Reservation) -> float:
    return reserved.taken.left / max(1, reserved.take.limit) if reserved.taken is not None else 1.0


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
        policy, reserved = found
        subject = make_subject(reserved)
        seconds = subject.reset
    headers = {name.lower().replace("-", "_"): value for name, value in list_rate_limit(subject, policy, seconds)}
    return {**headers, "budget_rule": subject.rule}
