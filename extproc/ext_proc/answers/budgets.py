"""What clients are told about budgets: `RateLimit` headers of refusals, and the same as metadata of requests that continue.

Dollars have no headers: these are whole numbers of what a client counts.
"""

from __future__ import annotations

from math import floor
from typing import Any, Final, TypeAlias

from extproc.budgets.guard import Reservation, make_subject
from extproc.budgets.subject import DOLLAR_UNIT, TOKEN_UNIT, BudgetSubject
from extproc.decision import Action, Decision, Outcome
from extproc.engine.budget_candidates import BudgetGuard
from extproc.ext_proc.answers.metadata import SESSIONS, write_entries, write_entries_head, write_text, write_text_head

RULE: Final = "budget_rule"

_TIME: Final = b";t="
_DIGITS: Final = 64
"""More than the digits of any number."""

_LONGEST: Final = 1 << 20
"""Answers with a longer time, in seconds, are not kept."""

_MS_PER_SECOND: Final = 1_000
_SAFE: Final = str.maketrans({"\\": "\\\\", '"': '\\"'})


_NONE: Final[list[Reservation]] = []


def _write_number(number: int) -> bytes:
    """A number; 0 for less."""
    return str(max(0, number)).encode()


class _BudgetForm:
    """The metadata of requests that continue, without two numbers; the same for all numbers with as many digits.

    Attributes:
        first: up to what is left.
        start: the same with what stands before it.
        second: from there to the seconds.
        third: from there to what is left, again; the seconds follow once more.
    """

    __slots__ = ("first", "second", "start", "third")

    def __init__(self, policy: str, reserved: Reservation, left: int, seconds: int) -> None:
        """For `left` and `seconds` digits."""
        quoted = f'"{policy.translate(_SAFE)}";r='.encode()
        whole = len(quoted) + left + len(_TIME) + seconds
        limit = write_text("ratelimit_limit", f"{reserved.take.limit // reserved.limit.units}")
        self.first = limit + write_text(RULE, reserved.rule.name) + write_text_head("ratelimit_remaining", left)
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
    """The same as metadata for the headers `x-ratelimit-*-tokens` of model APIs, whose times are written like 6m0s."""
    minutes, seconds = divmod(subject.reset, 60)
    hours, minutes = divmod(minutes, 60)
    reset = f"{hours}h{minutes}m{seconds}s" if hours else f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
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
        headers += list_rate_limit(subject, lead.policy, subject.reset if again is None else again)
    headers += [("X-Fairvisor-Reason", subject.reason.value), ("x-loopguard-policy", lead.policy)]
    return [*headers, ("x-loopguard-rule", subject.rule)] if subject.rule.isascii() else headers


_Tightest: TypeAlias = tuple[str, Reservation | None, Reservation | None]
"""A policy, and its budget of which the smallest share is left: of all that have headers, and of those that count tokens."""


def _find_tightest(budgets: list[BudgetGuard]) -> _Tightest:
    first = budgets[0].reserved if budgets else _NONE
    if len(first) == 1 and len(budgets) == 1 and first[0].limit.has_headers and first[0].taken is not None:  # usually
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
    """Metadata about the tightest budget, from which Envoy can write response headers; empty if no rule applies.

    A refusal is about the budget that refuses, so it has the values of its headers.
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
    headers = {name.lower().replace("-", "_"): value for name, value in list_rate_limit(subject, policy, seconds)}
    return {**headers, **more, RULE: subject.rule}


def write_budgets(budgets: list[BudgetGuard], calls: str) -> bytes:
    """The same as `describe_budgets`, as bytes for a request that just continues, with SESSIONS; empty for nothing."""
    policy, reserved, tokens = _find_tightest(budgets)
    if reserved is None or reserved.taken is None:
        return write_entries([write_text(SESSIONS, calls)]) if calls else b""
    limit, taken = reserved.limit, reserved.taken
    left, seconds = taken.left // limit.units, -(-taken.reset_ms // _MS_PER_SECOND)
    own = taken.here is not None or reserved.take.limit != limit.limit  # a replica's share, or a limit that an order raises
    if calls or tokens is not None or own or not 0 <= seconds < _LONGEST:
        return _write_numbers(policy, reserved, left, seconds, calls, tokens)
    numbers = left * _LONGEST + seconds
    told = limit.answers.get(numbers)
    if told is None:
        told = _write_numbers(policy, reserved, left, seconds, "", None)
        limit.answers.put(numbers, told)
    return told


def _write_numbers(  # noqa: PLR0913  # all that is told
    policy: str, reserved: Reservation, left: int, seconds: int, calls: str, tokens: Reservation | None
) -> bytes:
    """See `write_budgets`."""
    limit, shared = reserved.limit, reserved.take.limit == reserved.limit.limit
    written, time = _write_number(left), _write_number(seconds)
    known = len(written) * _DIGITS + len(time)
    form = limit.forms.get(known)
    if not shared or not isinstance(form, _BudgetForm):
        form = _BudgetForm(policy, reserved, len(written), len(time))
        if shared:  # else the limit is a replica's share, or one that an order raises
            limit.forms[known] = form
    if calls or tokens is not None:
        told = [form.first, written, form.second, time, form.third, written, _TIME, time]
        if calls:
            told.append(write_text(SESSIONS, calls))
        if tokens is not None:
            told += [write_text(name, value) for name, value in _list_token_limit(make_subject(tokens))]
        return write_entries(told)
    return b"".join([form.start, written, form.second, time, form.third, written, _TIME, time])
