"""Coverage: what is recent, what bounds the numbers, and how replicas' numbers add up."""

import time
from hashlib import blake2b
from typing import Any

import pytest

from extproc.engine.exchange import Exchange
from extproc.ext_proc.service import Service
from extproc.operator.admin.coverage_report import describe_coverage, make_report
from extproc.operator.board import View, unpack_all
from extproc.operator.coverage import WINDOW_SECONDS, Coverage
from extproc.operator.coverage_rows import CoverageDocument, CoverageRow
from extproc.request.http import HttpRequest, StatedFacts
from extproc.store.rules.documents import MAX_DOCUMENT
from tests.support.documents import policy
from tests.support.messages import body, headers
from tests.support.pages import STATE
from tests.support.service import exchange, make_service

ANY = {"pathPrefix": "/"}
BY_USER: dict[str, Any] = {"limit_keys": ["header:x-user-id"], "missing_descriptor": "require_one"}


def describe(*services: Service) -> dict[str, Any]:
    documents = [
        service.reporter.coverage.make_document(shows_callers=False) for service in services
    ]
    seen: dict[str, Any] = describe_coverage(CoverageDocument.merge(documents, time.time()), STATE)[
        "seen"
    ]
    return seen


def ask(service: Service, user: str = "", path: str = "/a") -> None:
    exchange(service, headers(path, **({"x_user_id": user} if user else {})), body(b'{"a": 1}'))  # type: ignore[arg-type]


STRICT = policy("strict", {"pathPrefix": "/strict"}, **BY_USER)
STRICT["spec"]["uncountable"] = "reject"


def test_request_is_covered_once_for_all_policies() -> None:
    policies = [
        policy(
            "all", ANY, limit_keys=["header:host"], missing_descriptor="require_one", body="ignore"
        ),
        policy("watching", ANY, mode="shadow", **BY_USER),
        policy("named", {"pathPrefix": "/a"}, **BY_USER),
    ]
    one, other = make_service(*policies), make_service(*policies)
    for service, users in ((one, ["ann", "ann", ""]), (other, ["ann"])):
        for user in users:
            ask(service, user)
    refusing, open_wide = make_service(STRICT), make_service(policy("p", ANY, **BY_USER))
    ask(refusing, path="/strict")
    ask(open_wide)

    names = ("matched", "guarded", "partly_guarded", "not_guarded", "exempt", "guarded_percent")
    seen = [
        [describe(*services)[name] for name in names]
        for services in ([one, other], [refusing], [open_wide])
    ]
    assert seen == [[4, 3, 1, 0, 0, 75.0], [1, 0, 0, 0, 1, None], [1, 0, 0, 1, 0, 0.0]]


def test_recent_counts_are_those_of_fifteen_minutes() -> None:
    coverage = Coverage({}, 0.0)
    for minute in range(60):
        coverage.requests += 10
        coverage.roll(minute * 60.0)
        coverage.roll(minute * 60.0 + 30)  # changes nothing

    (row,) = [
        row for row in coverage.make_document(shows_callers=False).rows if row.reason == "requests"
    ]
    assert (row.total, row.recent) == (600, 10 * WINDOW_SECONDS // 60)


@pytest.mark.slow
def test_counts_are_bounded_for_any_number_of_routes() -> None:
    coverage = Coverage({}, 0.0)
    for number in range(30_000):
        request = HttpRequest(
            "POST", "/", "", {}, StatedFacts(route=blake2b(b"%d" % number).hexdigest())
        )
        evaluation = Exchange(request)
        evaluation.enforcing.left_out = [("p", "default", "not_json")]
        coverage.note(evaluation)

    document = coverage.make_document(shows_callers=False)
    assert len(document.rows) <= 10_100
    assert sum(row.total for row in document.rows if row.reason == "not_json") == 30_000
    packed = document.pack()
    assert len(packed) <= MAX_DOCUMENT
    assert unpack_all({"a": packed}, CoverageDocument)["a"].left_out > 0


@pytest.mark.parametrize(
    ("unguarded", "recent", "levels"), [(5, 5, ["note"]), (20, 20, ["problem"]), (990, 0, [])]
)
def test_reason_for_one_percent_is_a_problem(
    unguarded: int, recent: int, levels: list[str]
) -> None:
    rows = [
        CoverageRow("", "", "", "", "requests", 1_000, 1_000),
        CoverageRow("p", "enforce", "", "", "counted", 1_000 - recent, 1_000 - recent),
        CoverageRow("p", "enforce", "", "", "not guarded", recent, recent),
        CoverageRow("p", "enforce", "llm", "default", "not_json", recent, unguarded),
    ]
    view = View(CoverageDocument(rows, 0.0, 900.0), "a", ["a"], "")

    findings = make_report(view, STATE, {}, time.time())["findings"]
    assert [found["level"] for found in findings] == levels
    assert all(
        (found["requests"], found["of"], found["place"]) == (unguarded, 1_000, None)
        for found in findings
    )


def test_dropped_turns_evicted_and_missing_entries_are_problems() -> None:
    service = make_service(policy("p", ANY, **BY_USER))
    ask(service, "ann")
    service.metrics.chains_dropped.inc(3)
    service.metrics.store_evictions.inc(5)
    service.metrics.access_log_entries.labels("missing").inc(7)

    view = View(service.reporter.coverage.make_document(shows_callers=False), "a", ["a"], "")
    dropped, evicted, stopped = make_report(view, STATE, {}, time.time())["findings"]

    assert (dropped["level"], dropped["reason"]) == ("problem", "chains_dropped")
    assert dropped["text"].startswith("3 turns were not kept")
    assert (evicted["level"], evicted["reason"]) == ("problem", "evicted")
    assert "dropped 5 entries" in evicted["text"]
    assert (stopped["level"], stopped["reason"]) == ("problem", "entries_stopped")
    assert stopped["text"].startswith("no access log entries arrived for 7 requests")
