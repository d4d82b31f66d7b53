"""Reservations of requests, and what they pay if usage is missing or impossible."""

import json
from typing import Any

import pytest

from extproc.apis import open_conversation
from extproc.apis.lengths import count_characters
from extproc.budgets.costs import PERIOD_UNITS, estimate_prompt
from extproc.operator.admin.coverage_report import make_report
from extproc.operator.board import View
from extproc.request.document import MAX_STEPS, Document, NotCounted
from tests.support.budget_policies import (
    REJECT,
    ask,
    chat,
    limited,
    refused,
    rule,
    serve,
    tell,
    tokens_left,
)
from tests.support.bundles import check
from tests.support.pages import STATE
from tests.support.service import CHAT, metadata_of, sample

DAY: dict[str, Any] = {"period": "1d", "staged_actions": REJECT}
TOKENS = rule("cost_based", budget=10_000, cost_key="usage:tokens", **DAY)
STREAM = {"content-type": "text/event-stream; charset=utf-8"}
SENT = (0.1, 0.2)
CUT = [
    "downstream_connection_termination",
    "downstream_remote_reset",
    "downstream_protocol_error",
    "stream_idle_timeout",
    "duration_timeout",
    "upstream_request_timeout",
    "upstream_max_stream_duration_reached",
]


def settled(content: bytes | None = None, spec: dict[str, Any] | None = None, **entry: Any) -> int:  # noqa: ANN401  # see `tell`
    """What one request of 10 tokens, with a maximum of 990, has paid in the end."""
    service, _ = serve(limited(TOKENS, **(spec or {})))
    tell(service, ask(service, content=content or chat("x" * 40, max_tokens=990)), **entry)
    return 10_000 - tokens_left(service)


@pytest.mark.parametrize(
    ("flag", "code", "came"),
    [*((flag, 0, 0) for flag in CUT), (CUT[0], 200, 300), (CUT[0], 504, 24)],
)
def test_client_that_leaves_pays_the_reservation(flag: str, code: int, came: int) -> None:
    entry: dict[str, Any] = {flag: True, "status": code, "sizes": (90, came)}
    assert settled(**entry, headers=STREAM, took=SENT) == 1_000


def test_client_that_leaves_late_pays_for_received_bytes() -> None:
    content = chat("x" * 40)
    assert (
        settled(
            content, sizes=(90, 40_000), headers=STREAM, took=SENT, downstream_remote_reset=True
        )
        > 10_000 - 23
    )


@pytest.mark.parametrize(
    ("entry", "paid"),
    [
        ({"status": 0}, 0),
        ({"status": 0, "downstream_remote_reset": True}, 0),
        ({"status": 504, "upstream_request_timeout": True}, 0),
        (
            {"told": {"input": 100, "output": 20}, "took": SENT, "downstream_remote_reset": True},
            120,
        ),
        ({"told": {"input": 100, "output": 20}, "took": SENT, "status": 0}, 120),
        *(({"status": status}, 0) for status in (401, 403, 429, 503)),
        ({}, 1_200),
        ({"status": 503, "took": SENT}, 0),
        ({"status": 503, "took": SENT, "upstream_connection_failure": True}, 0),
        (
            {"told": {"input": 100, "output": 10, "cached": 5_000}, "sizes": (80, 800)},
            110,
        ),  # never more than the prompt
        ({"told": {"input": 100, "output": 10, "cached": 100}, "sizes": (80, 800)}, 110),
        ({"told": {"input": 0, "output": 9_000}, "sizes": (80, 800)}, 9_000),
    ],
)
def test_known_usage_replaces_the_reservation(entry: dict[str, Any], paid: int) -> None:
    assert settled(**entry) == paid


DOLLARS = rule(
    "cost_based",
    budget=1,
    cost_key="usage:dollars",
    prices={"*": {"input": 0, "output": 140}},
    **DAY,
)


@pytest.mark.parametrize(
    ("made", "content", "entry", "most"),
    [
        (
            DOLLARS,
            chat("hello", max_tokens=1_000),
            {"status": 0, "sizes": (80, 0), "took": SENT, CUT[0]: True},
            7,
        ),
        (TOKENS, chat("x" * 40), {"sizes": (80, 8_108), "headers": STREAM}, 5),
    ],
    ids=["clients that leave", "streams without usage"],
)
def test_missing_usage_buys_no_extra_requests(
    made: dict[str, Any], content: bytes, entry: dict[str, Any], most: int
) -> None:
    service, _ = serve(limited(made))
    passed = 0
    for _ in range(30):
        answer = ask(service, content=content)
        if not refused(answer):
            passed += 1
            tell(service, answer, **entry)

    assert passed == most


def test_session_pays_reservation_of_a_client_that_leaves() -> None:
    limits = {"max_cost_per_session": 3_000, "prices": {"*": {"input": 0, "output": 1_000_000}}}
    service, _ = serve(limited(session_limits=limits, limit_keys=["header:x-api-key"]))

    reasons = []
    for number in range(5):
        answer = ask(service, content=chat(f"hello {number}", max_tokens=1_000), x_session_id="s")
        reasons.append(refused(answer))
        if not reasons[-1]:
            tell(service, answer, status=0, sizes=(80, 0), took=SENT, downstream_remote_reset=True)

    assert reasons == ["", "", "", *["session_limit_exceeded"] * 2]
    assert sample(service, "access_log_entries_total", result="unknown") == 0


@pytest.mark.parametrize(
    ("content", "size", "paid"),
    [
        (chat("x" * 40), 8_000, 2_010),
        (chat("x" * 40, max_tokens=990), 800, 210),
        (chat("x" * 40, max_tokens=990), 80_000, 1_000),
        (chat("x" * 40, max_tokens=90, n=3), 80_000, 635),
        (chat("x" * 40, max_output_tokens=1), 8_000, 2_010),
    ],
    ids=[
        "as if all were text",
        "short",
        "at most what was asked for",
        "by events if that is more",
        "another API's maximum",
    ],
)
def test_stream_without_usage_pays_for_received_bytes(content: bytes, size: int, paid: int) -> None:
    assert settled(content, sizes=(40, size), headers=STREAM) == paid


def test_unknown_path_does_not_lower_the_price() -> None:
    service, _ = serve(limited(TOKENS))
    answer = ask(service, path="/ask", content=chat("x" * 40, max_tokens=1))

    tell(service, answer, sizes=(40, 8_000), headers=STREAM)

    assert tokens_left(service) == 10_000 - 2_010


@pytest.mark.parametrize(
    "made",
    [TOKENS, rule("token_bucket_llm", tokens_per_minute=10_000)],
    ids=["cost_based", "token_bucket_llm"],
)
def test_rule_asks_streams_for_usage(made: dict[str, Any]) -> None:
    asking = made | {"algorithm_config": made["algorithm_config"] | {"usage": "request"}}
    content = chat("hello", stream=True)

    service, _ = serve(limited(asking))
    changed = ask(service, content=content).request_body.response.body_mutation.body

    assert changed == content[:-1] + b',"stream_options":{"include_usage":true}}'
    assert not ask(service, content=chat("hello")).request_body.response.HasField("body_mutation")
    for policy in (limited(made), limited(asking, mode="shadow")):
        assert not ask(serve(policy)[0], content=content).request_body.response.HasField(
            "body_mutation"
        )


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (TOKENS, 1),
        (rule("cost_based", budget=9, cost_key="usage:tokens", usage="request", **DAY), 0),
        (rule("token_bucket_llm", tokens_per_minute=9), 1),
        (rule("token_bucket_llm", tokens_per_minute=9, usage="request"), 0),
        (rule("cost_based", budget=9, **DAY), 0),
    ],
)
def test_validate_notes_that_streams_pay_by_size(made: dict[str, Any], told: int) -> None:
    assert (
        len([note for note in check(limited(made)).notes if "pay for their size" in str(note)])
        == told
    )


@pytest.mark.parametrize(
    "told",
    [
        {"input": 10, "output": 999_999_999},
        {"input": 999_999_999, "output": 10},
        {"input": 10, "output": 10, "cached": 999_999_999},
        {"input": 10, "output": 10, "cache_read": 999_999_999},
        {"input": 10, "output": 10, "cache_write": 1e300},
        {"input": 10, "output": 10, "thoughts": float("inf")},
        {"usage": '{"prompt_tokens": 10, "completion_tokens": 999999999}'},
    ],
)
def test_absurd_usage_pays_the_reservation(told: dict[str, Any]) -> None:
    service, _ = serve(limited(TOKENS))

    tell(service, ask(service, content=chat("x" * 40, max_tokens=990)), told=told, sizes=(80, 800))

    assert tokens_left(service) == 9_000
    assert sample(service, "absurd_usage_total") == 1
    view = View(service.reporter.coverage.make_document(shows_callers=False), "a", ["a"], "")
    assert [found["reason"] for found in make_report(view, STATE, {}, 0)["findings"]] == [
        "absurd_usage"
    ]


ANSWERS = rule(
    "cost_based", budget=10**9, period="1d", cost_key="usage:output", staged_actions=REJECT
)
HELLO = [{"role": "user", "content": "hello"}]
GEMINI = "/v1beta/models/gemini-2.5-pro:generateContent"
CONTENTS = [{"role": "user", "parts": [{"text": "hello"}]}]


def reserve(path: str, body: dict[str, Any]) -> int:
    service, _ = serve(limited(ANSWERS))
    (described,) = json.loads(
        metadata_of(ask(service, path=path, content=json.dumps(body).encode()))["sessions"]
    )
    return int(described["budgets"][0][3]) // PERIOD_UNITS


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        (CHAT, {"messages": HELLO, "max_tokens": 100, "n": 9}, 900),
        (CHAT, {"messages": HELLO, "n": 9}, 9_000),
        (CHAT, {"messages": HELLO, "max_tokens": 100, "n": 9.0}, 900),
        (CHAT, {"messages": HELLO, "max_tokens": "100", "n": "9"}, 900),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 100, "n": 2, "best_of": 5}, 500),
        ("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 100, "n": 2}, 600),
        ("/v1/completions", {"prompt": ["a" * 9_000, "b"], "max_tokens": 100}, 200),
        ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 100}, 200),
        ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 100}, 100),
        (
            GEMINI,
            {
                "contents": CONTENTS,
                "generationConfig": {"maxOutputTokens": 100, "candidateCount": 4},
            },
            400,
        ),
        (
            GEMINI,
            {
                "contents": CONTENTS,
                "generation_config": {"max_output_tokens": 100, "candidate_count": 4},
            },
            400,
        ),
        (CHAT, {"messages": HELLO, "max_tokens": 100, "n": 1}, 100),
        *[
            (CHAT, {"messages": HELLO, "max_tokens": 100, "n": n}, 100)
            for n in (0, -3, None, True, "many", [9], {"n": 9}, 0.5)
        ],
        (CHAT, {"messages": HELLO, "max_completion_tokens": 1, "max_tokens": 5_000}, 5_000),
        (CHAT, {"messages": HELLO, "max_output_tokens": 1}, 1_000),
        (CHAT, {"messages": HELLO, "max_tokens": 1e30}, 10_000_000),
        (CHAT, {"messages": [], "max_tokens": 5_000}, 5_000),
        ("/ask", {"messages": HELLO, "max_tokens": 1, "max_output_tokens": 5_000}, 5_000),
    ],
)
def test_every_requested_answer_is_reserved(path: str, body: dict[str, Any], tokens: int) -> None:
    assert reserve(path, {"model": "m", **body}) == tokens


def _list_bodies(count: int) -> dict[str, dict[str, Any]]:
    user, texts = {"role": "user", "content": "x"}, [{"type": "text", "text": "a"}] * count
    result = {"type": "tool_result", "tool_use_id": "c", "content": texts}
    return {
        "system": {"messages": [user], "system": texts},
        "instructions": {"input": [user], "instructions": texts},
        "result": {"messages": [{"role": "user", "content": [result]}]},
        "parts": {"contents": [{"parts": [{"text": "x"}]}], "systemInstruction": {"parts": texts}},
    }


@pytest.mark.parametrize("place", _list_bodies(0))
def test_very_long_lists_are_estimated_by_bytes(place: str) -> None:
    data = json.dumps(_list_bodies(MAX_STEPS + 1)[place]).encode()

    with pytest.raises(NotCounted, match="inspect_limit"):
        count_characters(open_conversation(Document(data)), data)
    assert estimate_prompt(Document(data), len(data)) == -(-len(data) // 4)


@pytest.mark.parametrize("place", _list_bodies(0))
def test_shorter_lists_are_counted_by_characters(place: str) -> None:
    assert estimate_prompt(Document(json.dumps(_list_bodies(4_000)[place]).encode()), 0) in range(
        1_000, 1_010
    )
