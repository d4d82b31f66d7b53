"""What clients are told about budgets: `RateLimit` headers of refusals, and the same as metadata of requests that continue."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from typing import Any, Final

from extproc.budgets.guard import Reservation, make_subject
from extproc.budgets.subject import DOLLAR_UNIT, TOKEN_UNIT, BudgetSubject
from extproc.decision import Action, Decision, Outcome
from extproc.engine.budget_candidates import BudgetCandidate
from extproc.ext_proc.answers.metadata import SESSIONS, write_entries, write_entries_head, write_text, write_text_head

RULE: Final = "budget_rule"

_TIME: Final = b";t="
_DIGITS: Final = 64
"""More than the digits of any number."""

_SAFE: Final = str.maketrans({"\\": "\\\\", '"': '\\"'})


class _BudgetForm:
    """The metadata of requests that continue, without two numbers; the same for all numbers with as many digits.

    Attributes:
        first: up to what is left.
        start: the same with what stands before it.
        second: from there to the seconds.
        third: from there to what is left, again; the seconds follow once more.
    """

    __slots__ = ("first", "second", "start", "third")

    def __init__(self, policy: str, subject: BudgetSubject, left: int, seconds: int) -> None:
        """For `left` and `seconds` digits."""
        quoted = f'"{policy.translate(_SAFE)}";r='.encode()
        whole = len(quoted) + left + len(_TIME) + seconds
        limit = write_text("ratelimit_limit", f"{floor(subject.limit)}")
        self.first = limit + write_text(RULE, subject.rule) + write_text_head("ratelimit_remaining", left)
        self.second = write_text_head("ratelimit_reset", seconds)
        self.third = write_text_head("ratelimit", whole) + quoted
        size = len(self.first) + left + len(self.second) + seconds + len(self.third) - len(quoted) + whole
        self.start = write_entries_head(size) + self.first


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


def _list_token_limit(subject: BudgetSubject) -> list[tuple[str, str]]:
    """The same as metadata for headers with OpenAI's names, whose times are written like 6m0s."""
    minutes, seconds = divmod(subject.reset, 60)
    hours, minutes = divmod(minutes, 60)
    reset = f"{hours}h{minutes}m{seconds}s" if hours else f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
    return [
        ("ratelimit_limit_tokens", f"{floor(subject.limit)}"),
        ("ratelimit_remaining_tokens", f"{max(0, floor(subject.left))}"),
        ("ratelimit_reset_tokens", reset),
    ]


def _find_tokens(budgets: Sequence[BudgetCandidate]) -> BudgetSubject | None:
    """The budget of tokens of which the smallest share is left; None if there is none."""
    found: Reservation | None = None
    least = 0.0
    for budget in budgets:
        for each in budget.reserved:
            if each.limit.unit == TOKEN_UNIT and each.taken is not None:
                share = each.taken.left / max(1, each.take.limit)
                if found is None or share < least:
                    found, least = each, share
    return make_subject(found) if found is not None else None


def list_refusal_headers(lead: Outcome, subject: BudgetSubject) -> list[tuple[str, str]]:
    """The headers of a refusal."""
    again = lead.retry_after
    headers = [("x-should-retry", "false")] if again is None else [("Retry-After", str(again))]
    if subject.unit != DOLLAR_UNIT:
        headers += list_rate_limit(subject, lead.policy, subject.reset if again is None else again)
    headers += [("X-Fairvisor-Reason", subject.reason.value), ("x-loopguard-policy", lead.policy)]
    return [*headers, ("x-loopguard-rule", subject.rule)] if subject.rule.isascii() else headers


def find_tightest(budgets: Sequence[BudgetCandidate]) -> tuple[str, BudgetSubject] | None:
    """The budget of which the smallest share is left, and its policy; None if no rule applies.

    Dollars have no headers: these are whole numbers of what a client counts.
    """
    if len(budgets) == 1:  # usually
        only = budgets[0]
        return (only.plan.id, only.told) if only.told.rule and only.told.unit != DOLLAR_UNIT else None
    found: tuple[str, BudgetSubject] | None = None
    least = 0.0
    for each in budgets:
        subject = each.told
        if subject.rule and subject.unit != DOLLAR_UNIT and (found is None or subject.share < least):
            found, least = (each.plan.id, subject), subject.share
    return found


def describe_budgets(budgets: Sequence[BudgetCandidate], decision: Decision) -> dict[str, Any]:
    """Metadata about the tightest budget, from which Envoy can write response headers; empty if no rule applies.

    A refusal is about the budget that refuses, so it has the values of its headers.
    """
    lead = decision.lead
    tokens = _find_tokens(budgets) if decision.action is not Action.REJECT else None
    more = dict(_list_token_limit(tokens)) if tokens is not None else {}
    if lead is not None and isinstance(lead.subject, BudgetSubject) and lead.subject.rule:
        policy, subject = lead.policy, lead.subject
        if subject.unit == DOLLAR_UNIT:
            return {**more, RULE: subject.rule}
        seconds = subject.reset if lead.retry_after is None else lead.retry_after
    else:
        found = find_tightest(budgets)
        if found is None:
            return more
        policy, subject = found
        seconds = subject.reset
    headers = {name.lower().replace("-", "_"): value for name, value in list_rate_limit(subject, policy, seconds)}
    return {**headers, **more, RULE: subject.rule}


def write_budgets(budgets: Sequence[BudgetCandidate], calls: str) -> bytes:
    """The same as `describe_budgets`, as bytes for a request that just continues, with SESSIONS; empty for nothing."""
    found = find_tightest(budgets)
    if found is None:
        return write_entries([write_text(SESSIONS, calls)]) if calls else b""
    policy, subject = found
    left, seconds = str(int(max(0.0, subject.left))).encode(), str(subject.reset).encode()
    known = len(left) * _DIGITS + len(seconds)
    form = subject.forms.get(known)
    if not isinstance(form, _BudgetForm):
        form = subject.forms[known] = _BudgetForm(policy, subject, len(left), len(seconds))
    tokens = _find_tokens(budgets)
    if calls or tokens is not None:
        told = [form.first, left, form.second, seconds, form.third, left, _TIME, seconds]
        if calls:
            told.append(write_text(SESSIONS, calls))
        if tokens is not None:
            told += [write_text(name, value) for name, value in _list_token_limit(tokens)]
        return write_entries(told)
    return b"".join([form.start, left, form.second, seconds, form.third, left, _TIME, seconds])
