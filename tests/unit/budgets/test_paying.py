"""Callers without their key are reported, refused, or share a budget; no request is free."""

import time
from typing import Any

import pytest

from extproc.ext_proc.service import Service
from extproc.operator.admin.coverage_report import make_report
from extproc.operator.board import View
from tests.support.budget_policies import ask, bucket, chat, limited, refused, rule, serve
from tests.support.bundles import check
from tests.support.messages import headers
from tests.support.pages import STATE
from tests.support.service import CHAT, decoded, exchange, sample

USER = ["header:x-user-id"]
BREAKER = {"enabled": True, "spend_rate_threshold_per_minute": 4}
LOOP = {"enabled": True, "window_seconds": 60, "threshold_identical_requests": 30}


def send(service: Service, times: int = 8, path: str = CHAT, **more: Any) -> list[str]:  # noqa: ANN401  # headers
    return [refused(ask(service, "", path, b'{"n": 1}', **more)) for _ in range(times)]


def doctor(service: Service) -> list[dict[str, Any]]:
    view = View(service.reporter.coverage.make_document(shows_callers=False), "a", ["a"], "")
    spec = {"rules": [{"limit_keys": USER}]}
    found: list[dict[str, Any]] = make_report(
        view, STATE, {"p": ("f", "", {"spec": spec})}, time.time()
    )["findings"]
    return found


@pytest.mark.parametrize(
    "more", [{}, {"loop_detection": LOOP}, {"fallback_limit": bucket(name="f")}]
)
def test_doctor_reports_callers_without_their_header(more: dict[str, Any]) -> None:
    service, _ = serve(limited(bucket(keys=USER), **more))

    assert send(service) == [""] * 8
    assert sample(service, "uncounted_total", policy="p", reason="missing_descriptor") == 8
    (found,) = [finding for finding in doctor(service) if finding["detector"] == "budget"]
    assert (found["level"], found["reason"], found["requests"]) == (
        "problem",
        "missing_descriptor",
        8,
    )
    assert "header:x-user-id" in found["text"]
    assert "uncountable" in found["change"]


@pytest.mark.parametrize(
    "policy",
    [
        limited(bucket(keys=USER), uncountable="reject"),
        limited(bucket(keys=["body:/user"]), uncountable="reject"),
        limited(bucket(keys=[*USER, "header:host"]), uncountable="reject"),
        limited(bucket(burst=99, keys=[]), bucket(keys=USER, name="second"), uncountable="reject"),
        limited(bucket(keys=USER), circuit_breaker=BREAKER, uncountable="reject"),
        limited(fallback_limit=bucket(keys=USER, name="f"), uncountable="reject"),
        limited(
            bucket(keys=USER), loop_detection=LOOP, limit_keys=["header:host"], uncountable="reject"
        ),
    ],
    ids=[
        "header",
        "body",
        "one of two",
        "one of two rules",
        "breaker",
        "fallback",
        "beside a detector",
    ],
)
def test_uncountable_reject_refuses_callers_without_key(policy: dict[str, Any]) -> None:
    service, _ = serve(policy)

    assert send(service) == ["uncountable"] * 8
    assert refused(ask(service, "", content=b'{"user": "ann"}', x_user_id="ann")) == ""


@pytest.mark.parametrize("key", ["header:x-user-id", "body:/user", "query:user", "jwt:sub"])
def test_callers_without_key_share_one_budget(key: str) -> None:
    service, _ = serve(limited(bucket(keys=[key]), missing_descriptor="share"))

    assert send(service) == [""] * 3 + ["token_bucket_exceeded"] * 5
    named = ask(service, "", f"{CHAT}?user=ann", b'{"user": "ann"}', x_user_id="ann")
    assert refused(named) == ("" if key != "jwt:sub" else "token_bucket_exceeded")


@pytest.mark.parametrize(
    ("made", "content", "reason"),
    [
        (
            limited(
                bucket(burst=99, keys=USER), circuit_breaker=BREAKER, missing_descriptor="share"
            ),
            b"{}",
            "circuit_breaker_open",
        ),
        (
            limited(
                rule("token_bucket_llm", keys=USER, tokens_per_minute=3_000),
                missing_descriptor="share",
            ),
            chat("hello", max_tokens=900),
            "tpm_exceeded",
        ),
    ],
    ids=["a breaker", "tokens"],
)
def test_callers_without_key_share_breakers_and_tokens(
    made: dict[str, Any], content: bytes, reason: str
) -> None:
    service, _ = serve(made)

    assert [refused(ask(service, "", content=content)) for _ in range(4)] == ["", "", "", reason]


@pytest.mark.parametrize(
    ("missing", "passed"),
    [("require_one", 3), ("skip", 8), ("share", 3)],
    ids=["by the others", "not", "by the others too"],
)
def test_missing_descriptor_decides_for_one_missing_key(missing: str, passed: int) -> None:
    service, _ = serve(limited(bucket(keys=[*USER, "header:x-team"]), missing_descriptor=missing))

    assert send(service, x_user_id="ann") == [""] * passed + ["token_bucket_exceeded"] * (
        8 - passed
    )
    assert sample(service, "uncounted_total", policy="p", reason="missing_descriptor") == (
        8 if missing == "skip" else 0
    )


def test_header_rule_counts_requests_without_body() -> None:
    service, _ = serve(limited(bucket(keys=USER), bucket(keys=["body:/user"], name="b")))

    without = headers(CHAT, x_user_id="ann", mode="NONE")
    answers = [decoded(exchange(service, without)[-1]) for _ in range(4)]

    assert [refused(answer) for answer in answers] == ["", "", "", "token_bucket_exceeded"]
    assert sample(service, "uncounted_total", policy="p", reason="missing_descriptor") == 4


@pytest.mark.parametrize("query", ["&" * 10_001, "%41" * 10_001, "x" * 66_000])
def test_long_query_does_not_escape_a_budget(query: str) -> None:
    service, _ = serve(limited(bucket(keys=USER), bucket(keys=["query:user"], name="q")))

    answers = send(service, 4, f"{CHAT}?user=bob&{query}", x_user_id="ann")

    assert answers == ["", "", "", "token_bucket_exceeded"]


def test_bypass_exempts_uncountable_requests() -> None:
    service, _ = serve(
        limited(bucket(keys=USER), uncountable="reject", bypass=[{"header": "x-health"}])
    )

    assert send(service, 1, x_health="1") == [""]
    assert send(service, 1) == ["uncountable"]


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({}, 1),
        ({"missing_descriptor": "share"}, 0),
        ({"missing_descriptor": "skip"}, 0),
        ({"uncountable": "reject"}, 0),
    ],
)
def test_validate_notes_how_a_rule_can_be_escaped(spec: dict[str, Any], told: int) -> None:
    policy = limited(
        bucket(keys=[*USER, "ip:address"]),
        rule("token_bucket", "ip", ["ip:address"], rps=1, burst=1),
        **spec,
    )

    notes = [note for note in check(policy).notes if "do not pay" in str(note)]

    assert len(notes) == told
    assert all("header:x-user-id" in str(note) and "uncountable" in str(note) for note in notes)
