"""A policy's budgets, compiled: its rules, its fallback and its circuit breaker.

Each rule that applies to a request becomes a question to the store (`Take`); the answers become an
outcome. All rules that apply are asked. If several refuse, the outcome names the one with the
longest wait, because the request cannot pass before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple
from urllib.parse import quote
from zoneinfo import ZoneInfo

from extproc.bounded import Memo
from extproc.budgets.costs import BUCKET_UNITS, PERIOD_UNITS, Anchors, CostKey, Estimate, scale
from extproc.budgets.rule_keys import (
    DEFAULT_ANSWER,
    DOLLARS,
    FIXED,
    HEADER_HINT,
    INPUT,
    MEASURED,
    REJECT,
    TOKENS,
    CircuitBreaker,
    CostBased,
    Rule,
    TokenBucket,
    TokenBucketLlm,
)
from extproc.budgets.subject import DOLLAR_UNIT, REQUEST_UNIT, TOKEN_UNIT, BudgetSubject
from extproc.calendar import Calendar
from extproc.decision import SEVERITY, Action, Outcome, Reason, RefusalForm
from extproc.objects import copy_text
from extproc.request.http import HttpRequest
from extproc.sessions.limits import make_rates
from extproc.store.rules.budget import (
    ALONE,
    BREAKER,
    BUCKET,
    FOREVER,
    PERIOD,
    SERVER_CLOCK,
    Take,
    Taken,
    list_arguments,
)

BUDGET: Final = "budget"
"""The guard's name in outcomes."""

CIRCUIT_BREAKER: Final = "circuit_breaker"
"""Replaces the rule's name."""

BREAKER_BUDGET: Final = "rate"
"""The suffix of the breaker's limit."""

_HINT: Final = "x-token-estimate"
_HOUR: Final = 3_600_000
_DAY: Final = 24 * _HOUR
_PERIODS: Final = {"5m": 300_000, "1h": _HOUR, "1d": _DAY, "7d": 7 * _DAY, "month": 31 * _DAY}
_FIRST_SUNDAY: Final = 259_200_000
_SPANS: Final = {
    "5m": "5 minutes",
    "1h": "an hour",
    "1d": "a day",
    "7d": "a week",
    "month": "a month",
}
_MS_PER_MINUTE: Final = 60_000
_MS_PER_SECOND: Final = 1_000
_WHOLE: Final = 100

_MOST_ANSWERS: Final = 128
"""Cached answers of a limit, per generation; at most 60 kB. Without the cache, the benchmark's row
"a rule and the detector vs. the detector" gets 40 % worse."""

ACTIONS: Final = {"warn": Action.WARN, "throttle": Action.THROTTLE, "steer": Action.STEER}


class BudgetLimit:
    """One budget of a rule; immutable.

    Attributes:
        suffix: its name in keys, which tells the kind of state.
        kind: as in `Take`.
        lifetime_ms: as in `Take`.
        most: the whole budget in the rule's unit, even if a stage rejects below 100 percent.
        limit: as in `Take`.
        rate: as in `Take`.
        span: as in `Take`.
        offset: as in `Take`.
        calendar: as in `Take`.
        units: number of units in 1.
        reason: the reason of its refusals.
        words: the budget's time, in words.
        unit: what is counted.
        has_headers: response headers can show it in whole numbers.
        flat: the cost of each request, in units; 0 if it varies.
        place: the prefix of all its keys; set when the policy is compiled.
        answers: cached metadata for requests that continue, by its numbers; see `write_budgets`.
    """

    def __init__(  # noqa: PLR0913  # a record
        self,
        suffix: str,
        kind: int,
        most: float,
        units: int,
        reason: Reason,
        words: str,
        unit: str,
        *,
        rate: int = 0,
        span: int = 0,
        offset: int = 0,
        calendar: Calendar | None = None,
        share: float = _WHOLE,
    ) -> None:
        self.suffix = suffix
        self.kind = kind
        self.most = most
        self.units = units
        self.limit = scale(most * share / _WHOLE, units)
        self.rate = rate
        self.span = span
        self.offset = offset
        self.calendar = calendar
        self.reason = reason
        self.words = words
        self.unit = unit
        self.has_headers = kind != BREAKER and unit != DOLLAR_UNIT
        self.flat = 0
        self.place = ""
        self.answers: Memo[int, bytes] = Memo(_MOST_ANSWERS)
        self.lifetime_ms = Take("", kind, 0, self.limit, rate, span, offset).lifetime_ms
        self._arguments: tuple[int, ...] = ()

    def set_flat(self, amount: int) -> None:
        """Set the cost of each request, if it is fixed, and prepare the question's arguments."""
        self.flat = amount
        self._arguments = (
            list_arguments(self.make_take("", amount), ALONE, SERVER_CLOCK)
            if amount and self.calendar is None
            else ()
        )

    def make_take(self, key: str, amount: int) -> Take:
        """The question for the store."""
        arguments = self._arguments if amount == self.flat else ()
        return Take(
            key,
            self.kind,
            amount,
            self.limit,
            self.rate,
            self.span,
            self.offset,
            -1,
            "",
            self.lifetime_ms,
            arguments,
            self.calendar,
        )


class BudgetStage(NamedTuple):
    """An action that starts at a percentage of a budget."""

    percent: float
    action: Action
    delay_ms: int


class BudgetRule:
    """One rule, compiled.

    Attributes:
        name: the rule's name.
        quoted: the name as written in keys.
        cost: where its cost is found.
        limits: its budgets.
        stages: actions before the budget is used up, highest percentage first.
        hints: clients may send their own estimate of a prompt's tokens.
        refusal: the form of its refusals.
        asks_usage: it makes streams report their usage.
    """

    def __init__(self, rule: Rule) -> None:
        self.name = copy_text(rule.name)
        self.quoted = quote(self.name, safe="")
        self.hints = False
        self.stages: list[BudgetStage] = []
        self._answer, self._most_answer, self._most_prompt, self._most_tokens = (
            float(DEFAULT_ANSWER),
            0.0,
            0.0,
            0.0,
        )
        status = rule.reject_status
        self.refusal = RefusalForm(status if isinstance(status, int) else None)
        if rule.algorithm == "token_bucket":
            bucket = TokenBucket.model_validate(rule.algorithm_config)
            self.cost = CostKey(bucket.cost_source, bucket.fixed_cost, bucket.default_cost)
            rate = scale(
                bucket.tokens_per_second or bucket.rps or 0, BUCKET_UNITS // _MS_PER_SECOND
            )
            words, reason = "a burst", Reason.TOKEN_BUCKET_EXCEEDED
            unit = REQUEST_UNIT if bucket.cost_source == FIXED and bucket.fixed_cost == 1 else ""
            self.limits = [
                BudgetLimit(
                    "bucket",
                    BUCKET,
                    bucket.burst,
                    BUCKET_UNITS,
                    reason,
                    words,
                    unit,
                    rate=max(1, rate),
                )
            ]
        elif rule.algorithm == "cost_based":
            self._compile_cost(CostBased.model_validate(rule.algorithm_config))
        else:
            self._compile_llm(TokenBucketLlm.model_validate(rule.algorithm_config))
        for limit in self.limits:
            limit.set_flat(self.cost.find_flat(limit.units))
        self.asks_usage = rule.algorithm_config.get(
            "usage"
        ) is not None and self.cost.measured not in ("", INPUT)

    def _compile_cost(self, config: CostBased) -> None:
        rates = (
            make_rates(config.prices, config.unknown_model) if config.cost_key == DOLLARS else None
        )
        self.cost = CostKey(config.cost_key, config.fixed_cost, config.default_cost, rates)
        share = min(
            [stage.threshold_percent for stage in config.staged_actions if stage.action == REJECT]
        )
        span, offset = _PERIODS[config.period], _FIRST_SUNDAY if config.period == "7d" else 0
        calendar = None
        if config.period == "month" or config.timezone != "UTC":
            calendar, span = Calendar(config.period, ZoneInfo(config.timezone)), span + _HOUR
        unit = (
            DOLLAR_UNIT
            if config.cost_key == DOLLARS
            else TOKEN_UNIT
            if config.cost_key in MEASURED
            else ""
        )
        words = _SPANS[config.period]
        self.limits = [
            BudgetLimit(
                config.period,
                PERIOD,
                config.budget,
                PERIOD_UNITS,
                Reason.BUDGET_EXCEEDED,
                words,
                unit,
                span=span,
                offset=offset,
                calendar=calendar,
                share=share,
            )
        ]
        stages = [stage for stage in config.staged_actions if stage.action != REJECT]
        stages.sort(key=lambda stage: stage.threshold_percent, reverse=True)
        self.stages = [
            BudgetStage(each.threshold_percent, ACTIONS[each.action], round(each.delay_ms or 0))
            for each in stages
        ]

    def _compile_llm(self, config: TokenBucketLlm) -> None:
        self.cost = CostKey(TOKENS, 1, 1)
        self.hints = config.token_source.estimator == HEADER_HINT
        self._answer = config.default_max_completion
        self._most_answer = config.max_completion_tokens or 0
        self._most_prompt = config.max_prompt_tokens or 0
        self._most_tokens = config.max_tokens_per_request or 0
        rate = max(1, scale(config.tokens_per_minute, BUCKET_UNITS // _MS_PER_MINUTE))
        burst = config.burst_tokens or config.tokens_per_minute
        words = (
            "a minute"
            if burst == config.tokens_per_minute
            else f"a burst, and {config.tokens_per_minute:.9g} a minute"
        )
        self.limits = [
            BudgetLimit(
                "tpm",
                BUCKET,
                burst,
                BUCKET_UNITS,
                Reason.TPM_EXCEEDED,
                words,
                TOKEN_UNIT,
                rate=rate,
            ),
        ]
        if config.tokens_per_day is not None:
            reason = Reason.TPD_EXCEEDED
            most = config.tokens_per_day
            self.limits.append(
                BudgetLimit(
                    "tpd", PERIOD, most, PERIOD_UNITS, reason, "a day", TOKEN_UNIT, span=_DAY
                )
            )

    @property
    def reads_body(self) -> bool:
        """Whether the cost depends on the body."""
        return self.cost.measured != ""

    @property
    def steers(self) -> bool:
        """Whether a stage adds a note to requests."""
        return any(stage.action is Action.STEER for stage in self.stages)

    def list_reads(self) -> list[str]:
        """The limit key of the request's cost in a header or parameter; empty if there is none."""
        if self.hints:
            return [f"header:{_HINT}"]
        return [self.cost.limit_key] if self.cost.limit_key else []

    def find_answer(self, estimate: Estimate) -> int:
        """The tokens to reserve for all answers."""
        answer = float(estimate.answer or self._answer)
        if self._most_answer:
            answer = min(answer, self._most_answer)
        answer *= estimate.copies
        if not estimate.answer and self.cost.measured in ("usage:tokens", "usage:output"):
            room = min([limit.limit // limit.units for limit in self.limits])
            prompt = estimate.prompt if self.cost.measured == TOKENS else 0
            answer = min(answer, max(0, room - prompt))  # a long answer is only a guess
        return round(answer)

    def find_oversize(self, estimate: Estimate, answer: int) -> BudgetSubject | None:
        """Why a request is too large even for a full budget; None if it is not."""
        total = estimate.prompt + answer
        if self._most_prompt and estimate.prompt > self._most_prompt:
            return self._make_oversize(
                Reason.PROMPT_TOKENS_EXCEEDED, self._most_prompt, estimate.prompt
            )
        if self._most_tokens and total > self._most_tokens:
            return self._make_oversize(
                Reason.MAX_TOKENS_PER_REQUEST_EXCEEDED, self._most_tokens, total
            )
        return None

    def _make_oversize(self, reason: Reason, limit: float, asked: float) -> BudgetSubject:
        return BudgetSubject(self.name, reason, limit, limit, asked, "", 0, TOKEN_UNIT, final=True)


class Reservation:
    """An amount that a request takes from one limit, and the store's answer.

    Attributes:
        rule: the rule; its cost decides what is settled.
        limit: the limit.
        take: the question; once answered, the one that the store answered.
        tenant: hash of the caller, as the rule knows it.
        taken: the answer; None before.
    """

    def __init__(
        self, rule: BudgetRule, limit: BudgetLimit, key: str, amount: int, tenant: str
    ) -> None:
        self.rule = rule
        self.limit = limit
        self.take = limit.make_take(key, amount)
        self.tenant = tenant
        self.taken: Taken | None = None

    @property
    def is_refused(self) -> bool:
        """Whether the budget had no room for it."""
        return self.taken is not None and not self.taken.fits

    def answer(self, taken: Taken) -> None:
        """Record the answer."""
        self.taken = taken
        if taken.here is not None:
            self.take = taken.here


class BudgetRules:
    """All budgets of a policy.

    Attributes:
        anchors: corrects estimates of prompts.
        policy: the policy's id.
        mode: `enforce` or `shadow`.
        name: its name in outcomes.
        rules: its rules, with the fallback at the end.
        breaker: the limit of its circuit breaker; None if it has none.
        alerts: log lines about an open breaker have the field `alert`.
        asks_usage: a rule makes streams report their usage.
        needs_body: a rule's cost depends on the body, and is settled after the response.
        steers: a stage adds a note.
        similarity_name: as of a detector.
        steer_note: as of a detector.
        refuses_later: as of a detector.
    """

    def __init__(  # noqa: PLR0913  # the parts of a policy
        self,
        policy: str,
        rules: Sequence[Rule],
        fallback: Rule | None,
        breaker: CircuitBreaker | None,
        *,
        shadow: bool,
        namespace: str,
    ) -> None:
        """Compile them; every key starts with the namespace."""
        self.policy = policy
        self.anchors = Anchors()
        self.shadow = shadow
        self.mode = "shadow" if shadow else "enforce"
        self.name = BUDGET
        self.similarity_name = BUDGET
        self.steer_note = ""
        self.refuses_later = True
        self.rules = [
            BudgetRule(rule) for rule in [*rules, *([fallback] if fallback is not None else [])]
        ]
        self.breaker: BudgetLimit | None = None
        self.alerts = False
        self.breaker_rule = ONE
        if (
            breaker is not None
            and breaker.enabled
            and breaker.spend_rate_threshold_per_minute is not None
        ):
            span = round(breaker.auto_reset_after_minutes * _MS_PER_MINUTE)
            threshold, reason = breaker.spend_rate_threshold_per_minute, Reason.CIRCUIT_BREAKER_OPEN
            self.breaker = BudgetLimit(
                BREAKER_BUDGET, BREAKER, threshold, PERIOD_UNITS, reason, "a minute", "", span=span
            )
            self.alerts = breaker.alert
            if rules:
                self.breaker_rule = self.rules[0]
        self.needs_body = any(rule.reads_body for rule in self.rules)
        self.steers = any(rule.steers for rule in self.rules)
        self.asks_usage = not shadow and any(rule.asks_usage for rule in self.rules)
        self._key = f"{namespace}budget1:{policy}:"
        for rule in self.rules:
            for limit in rule.limits:
                limit.place = f"{self._key}{rule.quoted}:{limit.suffix}:"
        if self.breaker is not None:
            self.breaker.place = f"{self._key}{CIRCUIT_BREAKER}:{self.breaker.suffix}:"

    @property
    def lifetime_seconds(self) -> int:
        """The longest time for which a request affects the store."""
        limits = [limit for rule in self.rules for limit in rule.limits] + (
            [self.breaker] if self.breaker is not None else []
        )
        return max([limit.lifetime_ms for limit in limits]) // _MS_PER_SECOND

    def owns(self, key: str) -> bool:
        """Whether a key names a budget of this policy and mode."""
        return key.startswith(self._key)

    def find_limit(self, rule: str, suffix: str) -> tuple[BudgetRule, BudgetLimit] | None:
        """Find a rule and its limit by their names; None if the policy no longer has them."""
        if self.breaker is not None and suffix == self.breaker.suffix:
            return self.breaker_rule, self.breaker
        for known in self.rules:
            for limit in known.limits:
                if (known.name, limit.suffix) == (rule, suffix):
                    return known, limit
        return None

    def judge(
        self,
        fingerprint: str,
        tenant: str,
        reserved: list[Reservation],
        oversize: BudgetSubject | None,
    ) -> Outcome:
        """The outcome, given the store's answers."""
        if oversize is not None:
            refusal = next(rule.refusal for rule in self.rules if rule.name == oversize.rule)
            return self._make_outcome(Action.REJECT, fingerprint, tenant, oversize, refusal)
        action, found, delay = Action.ALLOW, None, 0
        for each in reserved:
            if each.is_refused:
                worst = max([other for other in reserved if other.is_refused], key=_rank_wait)
                return self._refuse(fingerprint, tenant, worst)
            if each.rule.stages:
                stage = _find_stage(each)
                if stage is not None and (SEVERITY[stage.action], stage.delay_ms) > (
                    SEVERITY[action],
                    delay,
                ):
                    action, found, delay = stage.action, each, stage.delay_ms
        if found is None:
            return self._make_outcome(Action.ALLOW, fingerprint, tenant, NOTHING, _FORM)
        return self._make_outcome(
            action, fingerprint, tenant, make_subject(found), found.rule.refusal, delay_ms=delay
        )

    def _refuse(self, fingerprint: str, tenant: str, reserved: Reservation) -> Outcome:
        taken = reserved.taken
        wait = taken.wait_ms if taken is not None else 0
        retry_after = None if wait == FOREVER else max(1, -(-wait // _MS_PER_SECOND))
        subject = make_subject(reserved, final=wait == FOREVER)
        return self._make_outcome(
            Action.REJECT,
            fingerprint,
            reserved.tenant or tenant,
            subject,
            reserved.rule.refusal,
            retry_after=retry_after,
        )

    def _make_outcome(  # noqa: PLR0913  # all that an outcome tells
        self,
        action: Action,
        fingerprint: str,
        tenant: str,
        subject: BudgetSubject,
        refusal: RefusalForm,
        *,
        delay_ms: int = 0,
        retry_after: int | None = None,
    ) -> Outcome:
        used = max(0.0, subject.limit - subject.left)
        count = int(used)
        return Outcome(
            self.policy,
            self.mode,
            action,
            fingerprint,
            tenant,
            count if count == used else round(used),  # round() is slow
            0,
            0,
            delay_ms,
            retry_after,
            refusal,
            self.name,
            subject,
            None,
            subject.reason,
        )


def _rank_wait(reserved: Reservation) -> float:
    """The wait for a budget, in milliseconds."""
    wait = reserved.taken.wait_ms if reserved.taken is not None else 0
    return float("inf") if wait == FOREVER else wait


def _find_stage(reserved: Reservation) -> BudgetStage | None:
    """The highest stage reached."""
    taken = reserved.taken
    if taken is None or reserved.limit.kind != PERIOD:
        return None
    limit = reserved.limit
    # A part while the store is down
    whole = limit.most * limit.units * (reserved.take.limit / max(1, limit.limit))
    used = (reserved.take.limit - taken.left) * _WHOLE / whole
    for stage in reserved.rule.stages:
        if used >= stage.percent:
            return stage
    return None


def make_subject(reserved: Reservation, *, final: bool = False) -> BudgetSubject:
    """Describe a budget for messages."""
    limit, take, taken = reserved.limit, reserved.take, reserved.taken
    left, reset = (taken.left, taken.reset_ms) if taken is not None else (take.limit, 0)
    return BudgetSubject(
        reserved.rule.name if limit.kind != BREAKER else CIRCUIT_BREAKER,
        limit.reason,
        take.limit / limit.units,
        left / limit.units,
        take.amount / limit.units,
        limit.words,
        -(-max(0, reset) // _MS_PER_SECOND),
        limit.unit,
        final=final,
    )


_FORM: Final = RefusalForm(None)
ONE: Final = BudgetRule(
    Rule(name="one", algorithm="token_bucket", algorithm_config={"rps": 1, "burst": 1})
)
"""If a policy has no rules, each request costs its breaker 1."""

NOTHING: Final = BudgetSubject("", Reason.BUDGET_EXCEEDED, 1, 1, 0, "", 0, "")
"""The subject of a request to which no rule applies."""


def read_hint(request: HttpRequest) -> int:
    """The client's own estimate of the prompt's tokens; 0 if it sends none."""
    text = request.read_header(_HINT).strip()
    return (
        int(text) if text.isascii() and text.isdecimal() and len(text) <= len("1000000000") else 0
    )
