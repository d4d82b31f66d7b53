"""What callers used of a policy's budgets in recorded traffic, and the budgets that this suggests, each with its reason.

What is measured does not depend on how large the budgets are: a period's budget has to cover what a caller used in its busiest
one, and a bucket the most that its use ran ahead of the rate.
"""
# interpreted: works on files

from __future__ import annotations

import json
from datetime import UTC, datetime
from math import floor, log10
from typing import Any, Final, NamedTuple

from extproc.bounded import LRU
from extproc.budgets.guard import BudgetGuard, BudgetLimit, BudgetRule, Reservation
from extproc.budgets.rule_keys import FALLBACK, MAX_AMOUNT
from extproc.cli.replay.advice import FEWEST_RUNS, PERCENTILES, find_percentile
from extproc.cli.replay.judge import Judge
from extproc.cli.replay.records import Recorded, RecordedEnd
from extproc.cli.replay.runs import DROPPED
from extproc.engine.engine import Engine
from extproc.policy.bundle import Policy
from extproc.policy.loader import parse
from extproc.request.hash_key import PROCESS_KEY, HashKey
from extproc.store.rules.budget import BREAKER, BUCKET, HIGHEST

_KEYS: Final = {"bucket": "burst", "tpm": "burst_tokens", "tpd": "tokens_per_day"}
"""The key of a limit's size, by its suffix; `budget` for others."""

_RATES: Final = {"bucket": ("tokens_per_second", "rps"), "tpm": ("tokens_per_minute",)}
"""The keys of a bucket's rate, below which its size cannot be."""

_DROPPED: Final = frozenset({*DROPPED, "loop_detection", "circuit_breaker"})
"""Parts of a policy that say nothing about what its callers use."""


class Spending:
    """What one caller used of one budget.

    Attributes:
        time: of the newest request, or the start of the newest period, in milliseconds.
        used: in this period, or ahead of the bucket's rate, in the limit's units.
        most: the highest value of `used`, with what the newest request had to reserve if it used less.
    """

    __slots__ = ("most", "time", "used")

    def __init__(self) -> None:
        self.time = self.used = self.most = 0

    def add(self, limit: BudgetLimit, reserved: int, amount: int, time: int) -> None:
        """Add what a request reserved and used at a time, in milliseconds."""
        if limit.kind == BUCKET:
            self.used = max(0, self.used - max(0, time - self.time) * limit.rate)
            self.time = max(self.time, time)
        else:
            start = time - (time - limit.offset) % limit.span
            self.time, self.used = start, self.used if start == self.time else 0
        self.most = max(self.most, min(HIGHEST, self.used + max(reserved, amount)))
        self.used = min(HIGHEST, self.used + amount)


class BudgetNeed(NamedTuple):
    """What callers took of a budget, by percentile, the recommended value, and how many callers are beyond it."""

    budget: str
    percentiles: dict[int, float]
    value: float
    callers_beyond: int


class BudgetsAdvice(NamedTuple):
    """Recommended keys of each rule's `algorithm_config`, empty for none, the rows that they follow from, and why."""

    keys: dict[str, dict[str, float]]
    rows: list[BudgetNeed]
    reasons: list[str]


class SpendingCollector(Judge):
    """Collects what the callers of one policy use.

    Attributes:
        requests: to which a rule applied.
        estimated: of these, requests whose tokens the log does not have.
        callers: the number of callers, as the rules tell them apart.
        dropped: callers' use of a budget, for lack of room.
    """

    def __init__(self, policy: Policy, max_entries: int, key: HashKey = PROCESS_KEY) -> None:
        """Start without use; `key` is that of the live servers' hashes."""
        document, now = _write_trial(policy), datetime.now(UTC)
        super().__init__(Engine(parse({"tune": json.dumps(document).encode()}, now), now), max_entries, key, tries=True)
        self.requests = self.estimated = self.dropped = 0
        self._spent: LRU[tuple[str, str, str], Spending] = LRU(max_entries)

    def add(self, recorded: Recorded) -> None:
        """Count the next request."""
        found = self.judge(recorded)
        if found is None:
            return
        for budget in found[0].budgets:
            self.requests += bool(budget.reserved)
            if recorded.end is None or recorded.end.estimated:
                self.estimated += any(each.rule.cost.measured for each in budget.reserved)
            for each in budget.reserved:
                if each.limit.kind != BREAKER:
                    self._spend(each, _measure(each, budget.model, recorded.end), recorded.time)

    def _spend(self, reserved: Reservation, amount: int, time: int) -> None:
        name = reserved.rule.name, reserved.limit.suffix, reserved.tenant
        spending = self._spent.use(name)
        if spending is None:
            spending = Spending()
            self.dropped += self._spent.put(name, spending) is not None
        spending.add(reserved.limit, reserved.take.amount, amount, time)

    @property
    def callers(self) -> int:
        """How many callers there are, as the rules tell them apart."""
        return len({tenant for (_, _, tenant), _ in self._spent.items()})

    def recommend(self, guard: BudgetGuard, configs: dict[str, dict[str, Any]], percentile: float) -> BudgetsAdvice:
        """Each budget at a percentile of its callers.

        Args:
            guard: the policy's.
            configs: `algorithm_config` by the rule's name.
            percentile: of the callers to which the rule applied.
        """
        most: dict[tuple[str, str], list[int]] = {}
        for (rule, suffix, _), spending in self._spent.items():
            most.setdefault((rule, suffix), []).append(spending.most)
        advice = BudgetsAdvice({}, [], [])
        for each in guard.rules:
            for limit in each.limits:
                _advise(advice, each, limit, configs[each.name], sorted(most.get((each.name, limit.suffix), [])), percentile)
        if self.estimated:
            advice.reasons.append(f"{self.estimated:,} requests have no tokens in the log and count as estimated")
        return advice


def _measure(reserved: Reservation, model: str, end: RecordedEnd | None) -> int:
    """What a request used, or its estimate, in units of the limit."""
    cost = reserved.rule.cost
    if end is None or not cost.measured:
        return reserved.take.amount
    return cost.measure(end.usage, end.model or model, reserved.limit.units)


def _advise(  # noqa: PLR0913  # all that a recommendation depends on
    advice: BudgetsAdvice, rule: BudgetRule, limit: BudgetLimit, config: dict[str, Any], taken: list[int], percentile: float
) -> None:
    key = _find_key(limit)
    name = f"{key} of {rule.name}"
    enough = find_percentile(taken, percentile) if taken else 0
    if not enough:
        advice.reasons.append(f"no {name}: these logs show no use of it")
        return
    shown = {each: round(find_percentile(taken, each) / limit.units, 6) for each in PERCENTILES}
    share = limit.limit / (limit.most * limit.units)  # below 1 if a stage rejects before the budget is used up
    value = _round_up(enough / limit.units / share)
    rate = max([float(config.get(name) or 0) for name in _RATES.get(limit.suffix, ())], default=0.0)
    value = max(value, rate)
    beyond = sum(each > enough for each in taken)
    advice.keys.setdefault(rule.name, {})[key] = int(value) if value == int(value) else value
    advice.rows.append(BudgetNeed(name, shown, value, beyond))
    need = f"at most {enough / limit.units:,.6g}"
    need = f"a burst of {need}" if limit.kind == BUCKET else f"{need} in {limit.words}"
    told = f"{percentile:g}% of {len(taken):,} callers need {need}"
    more = f"{beyond:,} need more, up to {taken[-1] / limit.units:,.6g}"
    advice.reasons.append(f"{name} {value:,.6g}: {told}; {more}")
    if len(taken) < FEWEST_RUNS:
        advice.reasons.append(f"{name}: results are more reliable from {FEWEST_RUNS} callers")


def _find_key(limit: BudgetLimit) -> str:
    return _KEYS.get(limit.suffix, "budget")


def _round_up(amount: float) -> float:
    """The next amount with two digits."""
    digits = 1 - floor(log10(amount))
    scaled = amount * 10.0**digits
    return round((floor(scaled) + (scaled > floor(scaled) + 1e-9)) / 10.0**digits, max(digits, 0))


def _write_trial(policy: Policy) -> dict[str, Any]:
    """A policy for the same requests that only has the rules, with budgets that no reservation exceeds."""
    rules = [BudgetRule(rule) for rule in policy.spec.list_budget_rules()]
    largest: dict[str, dict[str, float]] = {
        rule.name: {_find_key(limit): MAX_AMOUNT for limit in rule.limits} for rule in rules
    }
    document = write_budgets(policy, largest)
    spec = {name: value for name, value in document["spec"].items() if name not in _DROPPED}
    return {"id": policy.id, "spec": spec | {"mode": "enforce"}}


def list_configs(policy: Policy) -> dict[str, dict[str, Any]]:
    """The `algorithm_config` of each rule, by its name."""
    return {rule.name: rule.algorithm_config for rule in policy.spec.list_budget_rules()}


def write_budgets(policy: Policy, keys: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The policy with these budgets."""
    document: dict[str, Any] = policy.model_dump(mode="json", by_alias=True, exclude_unset=True)
    spec = document["spec"]
    fallback = spec.get(FALLBACK)
    for rule in [*spec.get("rules", []), *([fallback] if fallback is not None else [])]:
        rule["algorithm_config"] |= keys.get(rule.get("name", FALLBACK), {})
    return document
