"""Budgets as `RateLimit` headers of refusals, and as metadata of requests that continue.

There are no headers for dollars, because their values are whole numbers.
"""

from __future__ import annotations

from math import floor
from typing import Any, Final, TypeAlias

from extproc.budgets.guard import Reservation, make_subject
from extproc.budgets.subject import DOLLAR_UNIT, TOKEN_UNIT, BudgetSubject
from extproc.decision import Action, Decision, Outcome
from extproc.engine.budget_guard import BudgetGuard
from extproc.ext_proc.answers.metadata import SESSIONS, write_entries, write_sessions, write_text

RULE: Final = "budget_rule"

_LONGEST: Final = 1 << 20
"""Answers with a longer time, in seconds, are not cached."""

_MS_PER_SECOND: Final = 1_000
_HEADERS: Final = ("RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset", "RateLimit")
_KEYS: Final = ("ratelimit_limit", "ratelimit_remaining", "ratelimit_reset", "ratelimit")

_NONE: Final[list[Reservation]] = []


def _write_rate_limit(
    policy: str, limit: int, left: int, seconds: int
) -> tuple[str, str, str, str]:
    """The values of `_HEADERS`; `seconds` until a budget is full again, or until the request fits.

    Names and values are those of Fairvisor, from two versions of
    draft-ietf-httpapi-ratelimit-headers.
    """
    left, seconds = max(0, left), max(0, seconds)
    return f"{limit}", f"{left}", f"{seconds}", f'"{policy}";r={left};t={seconds}'


def _list_token_limit(subject: BudgetSubject) -> list[tuple[str, str]]:
    """The same as metadata for the headers `x-ratelimit-*-tokens`, with times such as 6m0s."""
    minutes, seconds = divmod(subject.reset, 60)
    hours, minutes = divmod(minutes, 60)
    reset = (
        f"{hours}h{minutes}m{seconds}s"
        if hours
        else f"{minutes}m{seconds}s"
        if minutes
        else f"{seconds}s"
    )
    return [
        ("ratelimit_limit_tokens", f"{floor(subject.limit)}"),
        ("ratelimit_remaining_tokens", f"{max(0, floor(subject.left))}"),
        ("ratelimit_reset_tokens", reset),
    ]


def list_refusal_headers(lead: Outcome, subject: BudgetSubject) -> list[tuple[str, str]]:
    """The headers of a refusal."""
    again = lead.retry_after
    headers = [("x-should-retry", "false")] if again is None else [("Retry-After", str(again))]
    if subject.unit != DOLLAR_UNIT:
        seconds = subject.reset if again is None else again
        headers += zip(
            _HEADERS,
            _write_rate_limit(lead.policy, floor(subject.limit), floor(subject.left), seconds),
            strict=True,
        )
    headers += [("X-Fairvisor-Reason", subject.reason.value), ("x-loopguard-policy", lead.policy)]
    return [*headers, ("x-loopguard-rule", subject.rule)] if subject.rule.isascii() else headers


_Tightest: TypeAlias = tuple[str, Reservation | None, Reservation | None]
"""A policy, and its budgets with the smallest share left: of those with headers, and of those in
tokens."""


def _find_tightest(budgets: list[BudgetGuard]) -> _Tightest:
    first = budgets[0].reserved if budgets else _NONE
    # The usual case
    if (
        len(first) == 1
        and len(budgets) == 1
        and first[0].limit.has_headers
        and first[0].taken is not None
    ):
        only = first[0]
        return budgets[0].plan.id, only, only if only.limit.unit == TOKEN_UNIT else None
    policy, least, fewest = "", 0.0, 0.0
    reserved: Reservation | None = None
    tokens: Reservation | None = None
    for budget in budgets:
        for each in budget.reserved:
            taken = each.taken
            if taken is None or not each.limit.has_headers:
                continue
            share = taken.left / max(1, each.take.limit)
            if reserved is None or share < least:
                policy, reserved, least = budget.plan.id, each, share
            if each.limit.unit == TOKEN_UNIT and (tokens is None or share < fewest):
                tokens, fewest = each, share
    return policy, reserved, tokens


def describe_budgets(budgets: list[BudgetGuard], decision: Decision) -> dict[str, Any]:
    """Metadata about the tightest budget, for response headers; empty if no rule applies.

    For a refusal, it has the values of the refusal's headers.
    """
    lead = decision.lead
    tightest, reserved, tokens = _find_tightest(budgets)
    more: dict[str, Any] = {}
    if tokens is not None and decision.action is not Action.REJECT:
        more.update(_list_token_limit(make_subject(tokens)))
    if lead is not None and isinstance(lead.subject, BudgetSubject) and lead.subject.rule:
        policy, subject = lead.policy, lead.subject
        if subject.unit == DOLLAR_UNIT:
            return {**more, RULE: subject.rule}
        seconds = subject.reset if lead.retry_after is None else lead.retry_after
    elif reserved is None:
        return more
    else:
        policy, subject = tightest, make_subject(reserved)
        seconds = subject.reset
    told = _write_rate_limit(policy, floor(subject.limit), floor(subject.left), seconds)
    return {**dict(zip(_KEYS, told, strict=True)), **more, RULE: subject.rule}


def write_budgets(budgets: list[BudgetGuard], calls: str) -> bytes:
    """The bytes of `describe_budgets` for a request that continues, with SESSIONS; may be empty."""
    policy, reserved, tokens = _find_tightest(budgets)
    if reserved is None or reserved.taken is None:
        return write_sessions(calls) if calls else b""
    limit, taken, most = reserved.limit, reserved.taken, reserved.take.limit
    left, seconds = taken.left // limit.units, -(-taken.reset_ms // _MS_PER_SECOND)
    own = taken.here is not None or most != limit.limit  # a replica's share, or a raised limit
    alike = not (calls or own) and tokens is None and 0 <= seconds < _LONGEST
    told = limit.answers.get(left * _LONGEST + seconds) if alike else None
    if told is None:
        texts = list(
            zip(_KEYS, _write_rate_limit(policy, most // limit.units, left, seconds), strict=True)
        )
        texts.insert(1, (RULE, reserved.rule.name))
        if calls:
            texts.append((SESSIONS, calls))
        if tokens is not None:
            texts += _list_token_limit(make_subject(tokens))
        told = write_entries([write_text(name, value) for name, value in texts])
        if alike:
            limit.answers.put(left * _LONGEST + seconds, told)
    return told
