"""Budgets of a policy, from a request to its response."""

import json
from typing import Any

import pytest

from extproc.ext_proc.stream import Stream
from extproc.metrics import Metrics
from extproc.store.memory import MemoryStore
from tests.support.budget_policies import (
    NOON,
    REJECT,
    Clock,
    ask,
    bucket,
    chat,
    limited,
    refused,
    rule,
    serve,
    warning_of,
)
from tests.support.command import find_missing
from tests.support.messages import headers
from tests.support.service import (
    CHAT,
    FailingStore,
    decoded,
    headers_of,
    make_service,
    metadata_of,
    receive,
    sample,
)

PRICES = {"*": {"input": 0, "output": 1_000}}  # per million tokens


def test_bucket_refuses_with_exact_headers_and_refills() -> None:
    service, clock = serve(limited(bucket()))

    answers = [ask(service) for _ in range(4)]
    other = ask(service, "other")
    clock.now += 999
    early = ask(service)
    clock.now += 1
    later = ask(service)

    assert [refused(answer) for answer in answers] == ["", "", "", "token_bucket_exceeded"]
    assert answers[3].immediate_response.status.code == 429
    told = headers_of(answers[3])
    assert {name: told[name] for name in told if name.startswith(("RateLimit", "Retry"))} == {
        "Retry-After": "1",
        "RateLimit-Limit": "3",
        "RateLimit-Remaining": "0",
        "RateLimit-Reset": "1",
        "RateLimit": '"p";r=0;t=1',
    }
    assert "x-should-retry" not in told
    assert (
        json.loads(answers[3].immediate_response.body)["error"]["code"] == "token_bucket_exceeded"
    )
    assert (refused(other), refused(early), refused(later)) == ("", "token_bucket_exceeded", "")


def test_remembered_metadata_is_exact_for_caller_and_second() -> None:
    service, clock = serve(
        limited(rule("cost_based", budget=400, period="1h", staged_actions=REJECT))
    )

    for spent in range(1, 400):
        for caller in ("a", "b"):
            clock.now += 1_000
            seconds = 3_600 - (clock.now - NOON) // 1_000
            told = metadata_of(ask(service, caller))
            assert (
                told
                | {
                    "ratelimit": f'"p";r={400 - spent};t={seconds}',
                    "ratelimit_remaining": f"{400 - spent}",
                    "ratelimit_reset": f"{seconds}",
                }
                == told
            )


def test_metadata_of_a_share_is_not_reused() -> None:
    clock = Clock()
    stores = FailingStore(), MemoryStore(Metrics(), clock=clock)
    made = limited(rule("cost_based", budget=15, period="1d", staged_actions=REJECT))
    service = make_service(made, store=stores[0], local=MemoryStore(Metrics(), clock=clock))
    service.counting.replicas = 3

    alone = metadata_of(ask(service))
    service.counting.store = stores[1]
    together = [metadata_of(ask(service)) for _ in range(11)][-1]

    numbers = [(told["ratelimit_limit"], told["ratelimit_remaining"]) for told in (alone, together)]
    assert numbers == [("5", "4"), ("15", "4")]
    assert alone["ratelimit_reset"] == together["ratelimit_reset"]


@pytest.mark.parametrize(
    ("tokens", "limit", "left", "reset"),
    [
        (rule("token_bucket_llm", "t", tokens_per_minute=6_000), "6000", "5890", "2s"),
        (
            rule("token_bucket_llm", "t", tokens_per_minute=1, burst_tokens=500),
            "500",
            "390",
            "1h50m0s",
        ),
        (
            rule("token_bucket_llm", "t", tokens_per_minute=30, burst_tokens=5_000),
            "5000",
            "4890",
            "3m40s",
        ),
        (
            rule(
                "cost_based",
                "t",
                budget=900,
                period="1h",
                cost_key="usage:tokens",
                staged_actions=REJECT,
            ),
            "900",
            "790",
            "1h0m0s",
        ),
    ],
    ids=["seconds", "hours", "minutes", "a period"],
)
def test_token_budgets_also_have_openai_header_values(
    tokens: dict[str, Any], limit: str, left: str, reset: str
) -> None:
    stages = [{"threshold_percent": 1, "action": "warn"}, *REJECT]
    dollars = rule(
        "cost_based",
        "d",
        budget=1,
        period="1d",
        cost_key="usage:dollars",
        prices=PRICES,
        staged_actions=stages,
    )
    content = chat("x" * 40, max_tokens=100)
    expected = {
        "ratelimit_limit_tokens": limit,
        "ratelimit_remaining_tokens": left,
        "ratelimit_reset_tokens": reset,
    }

    for rules in ([tokens], [tokens, bucket(burst=2)], [tokens, dollars]):
        service, _ = serve(limited(*rules))
        told = metadata_of(ask(service, content=content))
        assert {name: value for name, value in told.items() if name.endswith("_tokens")} == expected


def test_refused_request_takes_nothing_from_other_budgets() -> None:
    service, _ = serve(
        limited(bucket(burst=9, name="wide"), bucket(burst=1, name="tight")),
        limited(bucket(burst=100), identity="s", mode="shadow"),
    )

    answers = [ask(service) for _ in range(20)]
    service.follow(make_service(limited(bucket(burst=9, name="wide"))).engine)
    wide = metadata_of(ask(service))["ratelimit_remaining"]
    service.follow(make_service(limited(bucket(burst=100), identity="s", keep_counts=True)).engine)
    shadow = metadata_of(ask(service))["ratelimit_remaining"]

    assert [refused(answer) for answer in answers] == ["", *["token_bucket_exceeded"] * 19]
    assert metadata_of(answers[0]) == {
        "ratelimit_limit": "1",
        "ratelimit_remaining": "0",
        "ratelimit_reset": "1",
        "ratelimit": '"p";r=0;t=1',
        "budget_rule": "tight",
    }
    assert (wide, shadow) == ("7", "98")


@pytest.mark.parametrize("action", ["reject", "warn"])
def test_refused_loop_pays_nothing(action: str) -> None:
    loop = {
        "enabled": True,
        "window_seconds": 3600,
        "threshold_identical_requests": 2,
        "action": action,
    }
    service, _ = serve(limited(bucket(burst=20_000), loop_detection=loop))

    answers = [ask(service) for _ in range(101)]
    level = metadata_of(ask(service, content=b"other"))["ratelimit_remaining"]

    assert refused(answers[-1]) == ("loop_detected" if action == "reject" else "")
    assert level == str(20_000 - 2 if action == "reject" else 20_000 - 102)


def test_period_has_stages_and_ends_by_calendar() -> None:
    stages = [
        {"threshold_percent": 100, "action": "reject"},
        {"threshold_percent": 40, "action": "warn"},
    ]
    service, clock = serve(
        limited(rule("cost_based", budget=5, period="1h", staged_actions=stages))
    )
    clock.now += 60_000

    answers = [ask(service) for _ in range(6)]
    clock.now = NOON + 3_600_000
    later = ask(service)

    assert [metadata_of(answer).get("action") for answer in answers] == [
        None,
        *["warn"] * 4,
        "reject",
    ]
    assert [warning_of(answer) for answer in answers] == [None, *[b"budget_warn"] * 4, None]
    assert (refused(answers[5]), headers_of(answers[5])["Retry-After"]) == (
        "budget_exceeded",
        str(3_600 - 60),
    )
    assert metadata_of(later)["ratelimit_remaining"] == "4"


@pytest.mark.parametrize(
    ("period", "zone", "seconds"),
    [
        ("5m", None, 240),
        ("1h", None, 3_540),
        ("1d", None, 43_140),
        ("7d", None, 215_940),
        ("month", None, 388_740),
        ("1d", "Asia/Tokyo", 10_740),
        ("7d", "America/New_York", 215_940 + 5 * 3_600),
        ("month", "Europe/Berlin", 388_740 - 3_600),
    ],
)
def test_periods_begin_by_the_calendar(period: str, zone: str | None, seconds: int) -> None:
    config = {"period": period, "timezone": zone} if zone else {"period": period}
    service, clock = serve(limited(rule("cost_based", budget=1, staged_actions=REJECT, **config)))
    clock.now = NOON + 60_000  # on a Thursday

    answers = [ask(service) for _ in range(2)]

    assert headers_of(answers[1])["Retry-After"] == str(seconds)


@pytest.mark.parametrize("stays", [True, False])
def test_delayed_request_pays_only_if_sent_upstream(stays: bool) -> None:
    stages = [{"threshold_percent": 20, "action": "throttle", "delay_ms": 1}, *REJECT]
    service, _ = serve(limited(rule("cost_based", budget=5, period="1d", staged_actions=stages)))

    left = []
    for _ in range(3):
        stream = Stream(service)
        reply = receive(stream, headers(CHAT, x_api_key="k"))
        assert (reply.hold_ms, warning_of(decoded(reply))) == (1, b"budget_throttle")
        left.append(metadata_of(decoded(reply))["ratelimit_remaining"])
        if stays:
            stream.end_hold()
        stream.close()

    assert left == (["4", "3", "2"] if stays else ["4", "4", "4"])


MANY = rule("token_bucket_llm", tokens_per_minute=1_000, default_max_completion=999)


@pytest.mark.parametrize(
    ("made", "requests", "reasons"),
    [
        (
            limited(
                rule(
                    "cost_based",
                    budget=5,
                    period="1d",
                    staged_actions=[{"threshold_percent": 60, "action": "reject"}, *REJECT],
                )
            ),
            [{}] * 4,
            ["", "", "", "budget_exceeded"],
        ),
        (
            limited(MANY),
            [{"content": chat("hi", max_tokens=most)} for most in (499, 0, 499)],
            ["", "tpm_exceeded", ""],
        ),
        (
            limited(bucket(burst=1), bypass=[{"header": "x-health"}]),
            [{"x_health": "1"}] * 3,
            ["", "", ""],
        ),
        (limited(bucket(burst=1)), [{"key": ""}] * 3, ["", "", ""]),
    ],
    ids=[
        "a stage below 100",
        "the default is not cut to what is left",
        "bypassed",
        "no rule applies",
    ],
)
def test_rules_refuse_at_their_limit(
    made: dict[str, Any], requests: list[dict[str, Any]], reasons: list[str]
) -> None:
    service, _ = serve(made)

    answers = [ask(service, **request) for request in requests]

    assert [refused(answer) for answer in answers] == reasons
    assert reasons[1:] != ["", ""] or metadata_of(answers[0]) == {}


@pytest.mark.parametrize(
    ("value", "left"),
    [
        *[
            ("2.5", "7"),
            ("10", "0"),
            ("nan", "9"),
            ("-3", "9"),
            ("0", "9"),
            ("inf", "9"),
            ("", "9"),
            ("1_0", "9"),
            ("x" * 99, "9"),
        ],
        *[("1e-9", "9"), ("1e300", None), ("1e400", None), ("11", None)],
    ],
)
def test_cost_from_a_header_is_bounded(value: str, left: str | None) -> None:
    service, _ = serve(
        limited(
            rule(
                "cost_based",
                budget=10,
                period="1d",
                cost_key="header:X-Cost",
                staged_actions=REJECT,
            )
        )
    )

    answer = ask(service, x_cost=value)

    assert metadata_of(answer)["ratelimit_remaining"] == (left or "10")
    if left is None:
        told = headers_of(answer)
        assert (
            answer.immediate_response.status.code,
            told["x-should-retry"],
            "Retry-After" in told,
        ) == (400, "false", False)
        assert metadata_of(ask(service))["ratelimit_remaining"] == "9"


@pytest.mark.parametrize(
    ("request_", "rule_"),
    [
        ({"x_plan": "free"}, "free"),
        ({"key": "", "x_plan": "free", "x_user": "ann"}, "user"),
        ({"key": "", "x_plan": "free"}, None),
        ({"x_plan": "paid"}, "rest"),
        ({}, "rest"),
    ],
)
def test_rule_is_chosen_by_match_and_descriptors(
    request_: dict[str, Any], rule_: str | None
) -> None:
    free = bucket(burst=1, name="free", more={"match": {"header:x-plan": "free"}})
    user = bucket(
        burst=2, name="user", keys=["header:x-user"], more={"match": {"header:x-plan": "free"}}
    )
    service, _ = serve(limited(free, user, fallback_limit=bucket(burst=5, name="rest")))

    assert metadata_of(ask(service, **request_)).get("budget_rule") == rule_
    missing = sample(service, "missing_descriptor_total", policy="p", key="header:x-user")
    assert bool(missing) is ("x_user" not in request_ and request_.get("x_plan") == "free")


def test_equally_named_rules_of_policies_are_separate() -> None:
    shadow = limited(bucket(burst=2), identity="s", mode="shadow")
    service, _ = serve(limited(bucket(burst=3)), limited(bucket(burst=4), identity="q"), shadow)

    answers = [ask(service) for _ in range(4)]

    assert [refused(answer) for answer in answers] == ["", "", "", "token_bucket_exceeded"]
    assert [metadata_of(answer).get("shadow_action") for answer in answers] == [
        None,
        None,
        "reject",
        "reject",
    ]
    assert sample(
        service,
        "budgets_total",
        policy="s",
        mode="shadow",
        rule="r",
        reason="token_bucket_exceeded",
        action="reject",
    )


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 40_000}}
SEEN = json.dumps(
    {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [IMAGE]}]}
).encode()


@pytest.mark.parametrize(
    ("content", "tokens"),
    [(chat("x" * 400), 100 + 500), (chat("x" * 401, max_tokens=50), 101 + 50), (SEEN, 250 + 1)],
    ids=["the default for an answer", "what the client allows", "an image"],
)
def test_tokens_are_estimated_from_prompt_and_maximum(content: bytes, tokens: int) -> None:
    service, _ = serve(
        limited(rule("token_bucket_llm", tokens_per_minute=10_000, default_max_completion=500))
    )

    assert metadata_of(ask(service, content=content))["ratelimit_remaining"] == f"{10_000 - tokens}"


@pytest.mark.parametrize(
    ("content", "fits"),
    [(chat("hello"), True), (chat("hello", max_tokens=200), False), (chat("x" * 800), False)],
)
def test_default_answer_length_is_capped_at_the_limit(content: bytes, fits: bool) -> None:
    service, _ = serve(limited(rule("token_bucket_llm", tokens_per_minute=100)))

    answer = ask(service, content=content)

    if fits:
        assert metadata_of(answer)["ratelimit_remaining"] == "0"
    else:
        assert (refused(answer), answer.immediate_response.status.code) == ("tpm_exceeded", 400)
        assert headers_of(answer)["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("config", "content", "reason"),
    [
        ({"max_prompt_tokens": 10}, chat("x" * 41), "prompt_tokens_exceeded"),
        ({"max_prompt_tokens": 10}, chat("x" * 40), ""),
        (
            {"max_tokens_per_request": 60},
            chat("x" * 40, max_tokens=51),
            "max_tokens_per_request_exceeded",
        ),
        ({"max_tokens_per_request": 60}, chat("x" * 40, max_tokens=50), ""),
        (
            {"max_tokens_per_request": 60, "max_completion_tokens": 50},
            chat("x" * 40, max_tokens=99),
            "",
        ),
        ({"tokens_per_day": 1_000}, chat("x" * 40, max_tokens=995), "tpd_exceeded"),
        ({"tokens_per_minute": 50}, chat("x" * 40, max_tokens=99), "tpm_exceeded"),
        (
            {"token_source": {"estimator": "header_hint"}, "max_prompt_tokens": 10},
            chat("x"),
            "prompt_tokens_exceeded",
        ),
    ],
)
def test_token_limits_per_request(config: dict[str, Any], content: bytes, reason: str) -> None:
    service, _ = serve(
        limited(rule("token_bucket_llm", **{"tokens_per_minute": 100_000, **config}))
    )

    assert refused(ask(service, content=content, **{"x-token-estimate": "11"})) == reason


def test_breaker_stops_spending_for_its_minutes() -> None:
    breaker = {"enabled": True, "spend_rate_threshold_per_minute": 4, "auto_reset_after_minutes": 5}
    wide = rule("cost_based", budget=100, period="1h", staged_actions=REJECT)
    service, clock = serve(limited(wide, circuit_breaker=breaker))

    answers = [ask(service) for _ in range(4)]
    clock.now += 60_000
    open_still, other = ask(service), ask(service, "other")
    clock.now += 240_000
    closed = ask(service)

    assert [refused(answer) for answer in answers] == ["", "", "", "circuit_breaker_open"]
    assert (headers_of(answers[3])["Retry-After"], headers_of(open_still)["Retry-After"]) == (
        "300",
        "240",
    )
    assert (refused(other), refused(closed)) == ("", "")
    assert metadata_of(closed)["ratelimit_remaining"] == "96"


def test_replica_without_store_enforces_its_share() -> None:
    stages = [{"threshold_percent": 60, "action": "warn"}, *REJECT]
    fixed = limited(rule("cost_based", budget=15, period="1d", staged_actions=stages))
    costly = limited(
        rule("cost_based", budget=15, period="1d", cost_key="header:x-cost", staged_actions=REJECT)
    )
    service, other = (
        make_service(fixed, store=FailingStore()),
        make_service(costly, store=FailingStore()),
    )
    service.counting.replicas = other.counting.replicas = 3

    answers = [ask(service) for _ in range(6)]
    large = [ask(other, x_cost=cost) for cost in ("9", "1", "9", "16")]

    assert [refused(answer) for answer in answers] == [""] * 5 + ["budget_exceeded"]
    assert [warning_of(answer) for answer in answers] == [
        None,
        None,
        b"budget_warn",
        b"budget_warn",
        b"budget_warn",
        None,
    ]
    told = headers_of(answers[5])
    assert (told["RateLimit-Limit"], told["RateLimit-Remaining"], "x-should-retry" in told) == (
        "5",
        "0",
        False,
    )
    assert [refused(answer) for answer in large] == [
        "",
        "budget_exceeded",
        "budget_exceeded",
        "budget_exceeded",
    ]
    assert ["x-should-retry" in headers_of(answer) for answer in large[1:]] == [False, False, True]


def test_refused_loop_gives_back_to_the_share() -> None:
    loop = {
        "enabled": True,
        "window_seconds": 60,
        "threshold_identical_requests": 2,
        "action": "reject",
    }
    service = make_service(
        limited(bucket(per_second=0.001, burst=9), loop_detection=loop), store=FailingStore()
    )
    service.counting.replicas = 3

    loops = [refused(ask(service)) for _ in range(9)]
    others = [refused(ask(service, content=chat(f"{number}"))) for number in range(3)]

    assert (loops, others) == ([""] + ["loop_detected"] * 8, ["", "", "token_bucket_exceeded"])


def test_note_says_how_much_is_used() -> None:
    stages = [{"threshold_percent": 50, "action": "steer"}, *REJECT]
    service, _ = serve(limited(rule("cost_based", budget=2, period="1d", staged_actions=stages)))
    messages = [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "function": {"name": "t", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]

    answer = ask(service, content=json.dumps({"model": "m", "messages": messages}).encode())

    edited = answer.request_body.response.body_mutation.body.decode()
    assert "50 % of the budget for a day is used" in edited
    assert metadata_of(answer)["warning"] == "budget_steer"


def test_dollar_budgets_have_no_ratelimit_headers() -> None:
    amounts: Any = {
        "period": "1d",
        "cost_key": "usage:dollars",
        "unknown_model": {"input": 1, "output": 1},
        "staged_actions": REJECT,
    }
    dime = rule("cost_based", "dime", budget=0.1, **amounts)
    policies = (
        limited(dime),
        limited(dime, bucket(burst=5)),
        limited(rule("cost_based", budget=0.000001, **amounts)),
    )

    alone, both, empty = (ask(serve(made)[0], content=chat("word " * 100)) for made in policies)

    assert metadata_of(both)["ratelimit_limit"] == "5"
    assert refused(empty) == "budget_exceeded"
    told = [*metadata_of(alone), *metadata_of(empty), *headers_of(empty)]
    assert not [name for name in told if name.lower().startswith("ratelimit")]


def test_refusal_counts_in_whole_requests() -> None:
    service, _ = serve(limited(bucket(burst=1, per_second=1)))

    message = [ask(service) for _ in range(2)][-1].immediate_response.body.decode()

    assert (
        find_missing(
            message,
            "allows 1 request in",
            "0 requests of that is left, and this request needs 1 request.",
            "Send it again in 1 second.",
        )
        == []
    )
