"""A policy's budgets: the keys of `rules`, `fallback_limit` and `circuit_breaker`.

A rule's `algorithm_config` has different keys for each `algorithm`; `CONFIGS` maps an algorithm to
its model.
"""
# interpreted: runs at start and at reload; pydantic makes its models of annotations, which compiled
# classes do not keep

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from extproc.objects import AUTO, NO_ITEMS, JsonObject, Place, Status, make_error
from extproc.request.http import write_claim
from extproc.request.limit_keys import CallerKey, check_limit_key, is_in_body
from extproc.sessions.session_limits import Model, Price

MAX_AMOUNT: Final = 1_000_000_000
"""Maximum of a budget, a burst and a cost. It keeps all sums exact in Lua's numbers."""

DEFAULT_ANSWER: Final = 1000
"""Tokens reserved for an answer if the request sets no limit."""

MIN_RATE: Final = 0.001
MAX_STAGE_DELAY_MS: Final = 30_000
MAX_RESET_MINUTES: Final = 525_600

FIXED: Final = "fixed"
TOKENS, INPUT, OUTPUT, DOLLARS = "usage:tokens", "usage:input", "usage:output", "usage:dollars"
MEASURED: Final = (TOKENS, INPUT, OUTPUT, DOLLARS)
"""Costs that are known after the response, from Envoy's access log."""

FALLBACK: Final = "fallback_limit"
HEADER_HINT: Final = "header_hint"
REJECT: Final = "reject"
THROTTLE: Final = "throttle"
_WHOLE: Final = 100

_SOURCE = re.compile(r"(?:header|query):[A-Za-z0-9_-]+\Z")


def _check_source(value: str) -> str:
    if value != FIXED and not _SOURCE.match(value):
        raise make_error("must be 'fixed', 'header:<name>' or 'query:<name>'")
    return value.lower() if value.lower().startswith("header:") else value


def _check_cost_key(value: str) -> str:
    if value in MEASURED:
        return value
    if value != FIXED and not _SOURCE.match(value):
        raise make_error(
            "must be 'fixed', 'header:<name>', 'query:<name>', "
            f"{', '.join(map(repr, MEASURED[:-1]))} or '{DOLLARS}'"
        )
    return value.lower() if value.startswith("header:") else value


def _check_timezone(value: str) -> str:
    try:
        return ZoneInfo(value).key
    except (KeyError, ValueError, OSError) as error:
        raise make_error("must be an IANA time zone, such as 'Europe/Berlin'") from error


def _check_name(value: str) -> str:
    if not value.isprintable():
        raise make_error("must have no control characters")
    return value


def _check_match_key(value: str) -> str:
    if is_in_body(value):
        raise make_error("must not be in the body", ": rules are chosen before the body arrives")
    return check_limit_key(value)


def _write_match_value(value: object) -> str:
    """Convert a value to text, as limit keys do."""
    written = write_claim(value)
    if not written:
        raise make_error("must be a string, a number or a boolean, and not empty")
    return written


Amount = Annotated[float, Field(gt=0, le=MAX_AMOUNT, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=MIN_RATE, le=MAX_AMOUNT, allow_inf_nan=False)]
Percent = Annotated[float, Field(ge=0, le=_WHOLE, allow_inf_nan=False)]
MatchKey = Annotated[str, AfterValidator(_check_match_key)]
MatchValue = Annotated[
    str,
    BeforeValidator(_write_match_value),
    WithJsonSchema({"type": ["string", "number", "boolean"]}),
]
CostSource = Annotated[str, AfterValidator(_check_source)]
CostKey = Annotated[str, AfterValidator(_check_cost_key)]
Asked = Literal["request"]
TimeZone = Annotated[str, AfterValidator(_check_timezone)]
RuleName = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_check_name)]


class Stage(JsonObject):
    """What happens from a share of a budget on.

    Attributes:
        threshold_percent: percentage of the budget, 0 to 100, including the request.
        action: `warn` adds a header, `throttle` delays, `steer` adds a note for the model, `reject`
            refuses what would exceed this share.
        delay_ms: the delay of `throttle`, in milliseconds, at most 30000.
    """

    threshold_percent: Percent
    action: Literal["warn", "throttle", "steer", "reject"]
    delay_ms: Annotated[float, Field(gt=0, le=MAX_STAGE_DELAY_MS, allow_inf_nan=False)] | None = (
        None
    )


class TokenSource(JsonObject):
    """How the tokens of a prompt are estimated.

    Attributes:
        estimator: `simple_word` counts four characters as a token; `header_hint` uses the header
            `x-token-estimate` if it is higher.
    """

    estimator: Literal["simple_word", "header_hint"] = "simple_word"


class TokenBucket(JsonObject):
    """A rate of requests: `algorithm: token_bucket`.

    Attributes:
        algorithm: the rule's algorithm again; may be omitted.
        tokens_per_second: how fast the bucket fills.
        rps: the same by another name.
        burst: what the bucket holds; at least `tokens_per_second`.
        cost_source: cost of a request: `fixed`, `header:<name>` or `query:<name>`.
        fixed_cost: cost of each request with `fixed`.
        default_cost: cost of a request whose header or parameter is missing or has no positive
            number.
    """

    algorithm: Literal["token_bucket"] | None = None
    tokens_per_second: Rate | None = None
    rps: Rate | None = None
    burst: Amount
    cost_source: CostSource = FIXED
    fixed_cost: Amount = 1
    default_cost: Amount = 1


class CostBased(JsonObject):
    """A budget for a period: `algorithm: cost_based`.

    Attributes:
        algorithm: the rule's algorithm again; may be omitted.
        budget: what may be used in a period.
        period: `5m`, `1h`, `1d`, `7d` or `month`, by the calendar; weeks begin on Sunday.
        timezone: where a day, a week or a month begins at midnight, such as `Europe/Berlin`.
        cost_key: cost of a request: `fixed`, `header:<name>`, `query:<name>`, or what the response
            has used: `usage:tokens`, `usage:input`, `usage:output` or `usage:dollars`.
        fixed_cost: cost of each request with `fixed`.
        default_cost: cost of a request whose header or parameter is missing or has no positive
            number.
        staged_actions: what happens from which share of the budget on; the last one rejects at 100.
        prices: prices of models for `usage:dollars`, as in `session_limits`.
        unknown_model: price of other models for `usage:dollars`, as in `session_limits`.
        usage: `request` makes streams report their usage, if their API does so only on request.
            Otherwise they pay for their size, four bytes a token. Clients get one more event.
    """

    algorithm: Literal["cost_based"] | None = None
    budget: Amount
    period: Literal["5m", "1h", "1d", "7d", "month"]
    timezone: TimeZone = "UTC"
    cost_key: CostKey = FIXED
    fixed_cost: Amount = 1
    default_cost: Amount = 1
    staged_actions: Annotated[list[Stage], Field(min_length=1)]
    prices: dict[Model, Price] = {}
    unknown_model: Price | None = None
    usage: Asked | None = None


class TokenBucketLlm(JsonObject):
    """A rate of tokens: `algorithm: token_bucket_llm`.

    Attributes:
        algorithm: the rule's algorithm again; may be omitted.
        tokens_per_minute: how fast the bucket fills.
        tokens_per_day: tokens for a day, by the calendar in UTC.
        burst_tokens: what the bucket holds; at least `tokens_per_minute`, which is the default.
        max_tokens_per_request: most tokens of a request, with those of its answer.
        max_prompt_tokens: most tokens of a prompt.
        max_completion_tokens: most tokens that are reserved for an answer.
        default_max_completion: tokens reserved for an answer if the request sets no maximum.
        default_max_completion_tokens: ignored; `default_max_completion` is meant.
        token_source: how the tokens of a prompt are estimated.
        usage: `request` makes streams report their usage, if their API does so only on request.
            Otherwise they pay for their size, four bytes a token. Clients get one more event.
    """

    algorithm: Literal["token_bucket_llm"] | None = None
    tokens_per_minute: Amount
    tokens_per_day: Amount | None = None
    burst_tokens: Amount | None = None
    max_tokens_per_request: Amount | None = None
    max_prompt_tokens: Amount | None = None
    max_completion_tokens: Amount | None = None
    default_max_completion: Amount = DEFAULT_ANSWER
    default_max_completion_tokens: Any = None
    token_source: TokenSource = TokenSource()
    usage: Asked | None = None


CONFIGS: Final[dict[str, type[TokenBucket | CostBased | TokenBucketLlm]]] = {
    "token_bucket": TokenBucket,
    "cost_based": CostBased,
    "token_bucket_llm": TokenBucketLlm,
}
"""The model of each algorithm's `algorithm_config`."""


class Rule(JsonObject):
    """One budget of a policy; its `limit_keys` also identify the callers of the policy's detectors.

    Attributes:
        name: the rule's name in metrics, logs and answers; unique in its policy.
        limit_keys: what tells the callers of this budget apart. A request that lacks one is not
            counted by the rule, unless the policy sets `missing_descriptor`.
        algorithm: `token_bucket` for requests, `token_bucket_llm` for tokens, `cost_based` for
            costs in a period.
        algorithm_config: the keys of the algorithm.
        reject_status: status of a refusal; `auto`: 429 if waiting helps, else 400.
        match: limit keys outside the body, and the value that each must have; all must be equal for
            the rule to apply.
    """

    name: RuleName
    limit_keys: list[CallerKey] = NO_ITEMS
    algorithm: Literal["token_bucket", "cost_based", "token_bucket_llm"]
    algorithm_config: dict[str, Any]
    reject_status: Status = AUTO
    match: dict[MatchKey, MatchValue] | None = None

    def needs_answers(self) -> bool:
        """Whether the cost of a request is known only after the response."""
        return (
            self.algorithm == "token_bucket_llm"
            or self.algorithm_config.get("cost_key") in MEASURED
        )


class FallbackLimit(Rule):
    """The budget of requests for which no rule's `match` holds.

    Attributes:
        name: the rule's name. Default: `fallback_limit`.
    """

    name: RuleName = FALLBACK


class CircuitBreaker(JsonObject):
    """Refuses all requests of a caller that spends too fast, at the first rule's prices.

    Attributes:
        enabled: `true` turns it on; `validate` warns if the key is missing.
        spend_rate_threshold_per_minute: spending in a minute from which on requests are refused.
        action: `reject`.
        auto_reset_after_minutes: how long requests are refused; 0 until an operator releases the
            caller.
        alert: with `true`, the line in the log has `alert`.
    """

    enabled: bool = False
    spend_rate_threshold_per_minute: Amount | None = None
    action: Literal["reject"] = "reject"
    auto_reset_after_minutes: Annotated[
        float, Field(ge=0, le=MAX_RESET_MINUTES, allow_inf_nan=False)
    ] = 0
    alert: bool = False


def list_configs(spec: dict[str, Any]) -> Iterator[tuple[Place, type[JsonObject], Any]]:
    """The checkable `algorithm_config` of each rule of a raw spec: place, model and value."""
    for place, rule in _list_rules(spec):
        algorithm = rule.get("algorithm")
        model = CONFIGS.get(algorithm) if isinstance(algorithm, str) else None
        if model is not None and isinstance(rule.get("algorithm_config"), dict):
            yield (*place, "algorithm_config"), model, rule["algorithm_config"]


def _list_rules(spec: dict[str, Any]) -> list[tuple[Place, dict[str, Any]]]:
    """The rules of a raw spec and its fallback, with their places; only objects are listed."""
    rules, fallback = spec.get("rules"), spec.get(FALLBACK)
    listed: list[tuple[Place, Any]] = [
        (("rules", number), rule)
        for number, rule in enumerate(rules if isinstance(rules, list) else ())
    ]
    return [
        (place, rule)
        for place, rule in [*listed, ((FALLBACK,), fallback)]
        if isinstance(rule, dict)
    ]


def find_rule_errors(spec: dict[str, Any]) -> Iterator[tuple[Place, str]]:
    """Check the keys of a raw spec's budgets against each other.

    Yields place below the spec and message.
    """
    first: dict[str, Place] = {}
    for place, rule in _list_rules(spec):
        name = rule.get("name", FALLBACK if place == (FALLBACK,) else None)
        if isinstance(name, str) and first.setdefault(name, place) != place:
            taken = f"duplicate name {name!r}, also at {'/'.join(map(str, first[name]))}"
            yield (
                (*place, "name"),
                (
                    f"{taken}; the rules of a policy need names of their own, or they would share "
                    "a "
                    "budget"
                ),
            )
        config = rule.get("algorithm_config")
        if isinstance(config, dict):
            for below, message in _find_config_errors(rule.get("algorithm"), config):
                yield (*place, "algorithm_config", *below), message
    breaker = spec.get("circuit_breaker")
    if (
        isinstance(breaker, dict)
        and breaker.get("enabled") is True
        and breaker.get(_THRESHOLD) is None
    ):
        yield ("circuit_breaker",), f"when enabled is true, {_THRESHOLD} is required"


_THRESHOLD: Final = "spend_rate_threshold_per_minute"


def _find_config_errors(algorithm: object, config: dict[str, Any]) -> Iterator[tuple[Place, str]]:
    if algorithm == "token_bucket":
        name = "tokens_per_second" if config.get("tokens_per_second") is not None else "rps"
        if config.get(name) is None:
            yield (), "tokens_per_second or rps is required"
        if (
            None not in (rates := [config.get("tokens_per_second"), config.get("rps")])
            and rates[0] != rates[1]
        ):
            yield (
                ("rps",),
                "rps is another name for tokens_per_second, but has another value; leave one out",
            )
        yield from _find_burst_errors(config, "burst", name)
    elif algorithm == "token_bucket_llm":
        yield from _find_burst_errors(config, "burst_tokens", "tokens_per_minute")
    elif algorithm == "cost_based":
        yield from _find_stage_errors(config.get("staged_actions"))
        if config.get("timezone") is not None and config.get("period") in ("5m", "1h"):
            yield ("timezone",), "timezone belongs to the periods 1d, 7d and month"
        for key in ("prices", "unknown_model"):
            if config.get(key) and config.get("cost_key") != DOLLARS:
                yield (key,), f"{key} belongs to cost_key {DOLLARS}"


def _find_burst_errors(
    config: dict[str, Any], burst: str, rate: str
) -> Iterator[tuple[Place, str]]:
    holds, flows = _read_number(config.get(burst)), _read_number(config.get(rate))
    if holds is not None and flows is not None and 0 < holds < flows:
        yield (burst,), f"{burst} must be >= {rate}, which is {flows:g}, not {holds:g}"


def _find_stage_errors(stages: object) -> Iterator[tuple[Place, str]]:
    if not isinstance(stages, list) or not stages:
        return  # the model reports it
    first: dict[float, int] = {}
    rejects = False
    for number, stage in enumerate(stages):
        if not isinstance(stage, dict):
            continue
        action, place = stage.get("action"), ("staged_actions", number)
        percent = _read_number(stage.get("threshold_percent"))
        if percent is not None and first.setdefault(percent, number) != number:
            yield (
                (*place, "threshold_percent"),
                f"duplicate threshold {percent:g}, also at staged_actions/{first[percent]}",
            )
        if action == THROTTLE and stage.get("delay_ms") is None:
            yield place, "throttle needs delay_ms, in milliseconds"
        elif action != THROTTLE and stage.get("delay_ms") is not None:
            yield (*place, "delay_ms"), "delay_ms belongs to the action throttle"
        rejects = rejects or (action == REJECT and percent == _WHOLE)
    if not rejects:
        last = f'{{"threshold_percent": {_WHOLE}, "action": "reject"}}'
        yield (
            ("staged_actions",),
            f"staged_actions must contain {last}: without it, the budget has no end",
        )


def _read_number(value: Any) -> float | None:  # noqa: ANN401  # raw JSON
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
