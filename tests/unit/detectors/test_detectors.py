"""Several detectors in one policy, uncounted requests, callers in bodies, streamed bodies."""

import gzip
import json
import logging
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import pytest

from extproc.decision import Action, Repeat
from extproc.detectors import KINDS, Similarity
from extproc.engine.guards import LoopGuard
from extproc.errors import ProtocolError
from extproc.ext_proc.service import Service
from extproc.ext_proc.stream import Stream
from extproc.ext_proc.upload import UploadMemory
from extproc.ext_proc.wire import LARGE
from extproc.pb.external_processor_pb2 import HttpHeaders, HttpTrailers, ProcessingRequest
from extproc.policy.bundle import LoopDetection
from extproc.request.document import Document
from extproc.request.fingerprint import NO_BODY
from extproc.request.http import HttpRequest
from extproc.store.rules.windows import UNCOUNTED, Count
from tests.support import ROOT
from tests.support.documents import policy
from tests.support.engine import ANY, keys, make_engine
from tests.support.looping import looked_into, looping, post, several
from tests.support.loops import Guard
from tests.support.messages import body, encoded, headers
from tests.support.service import (
    FailingStore,
    decoded,
    exchange,
    headers_of,
    list_uncounted,
    make_service,
    metadata_of,
    receive,
    repeat,
    sample,
)

CANONICAL: dict[str, Any] = {"similarity": "canonical"}
TAIL: dict[str, Any] = {"similarity": "tail"}
CALLS: dict[str, Any] = {"similarity": "tool_calls"}


def with_spec(made: dict[str, Any], **spec: object) -> dict[str, Any]:
    made["spec"] |= spec
    return made


def chat(*texts: str, **more: object) -> bytes:
    return encoded(
        {"model": "m", "messages": [{"role": "user", "content": text} for text in texts], **more}
    )


def composites(
    *policies: Mapping[str, Any], data: bytes, request: HttpRequest | None = None
) -> list[str]:
    """What is fingerprinted, after the checksum of the body."""
    candidates = looked_into(make_engine(*policies), data, request).enforcing.active
    return [
        entry.composite.split("|", 4)[4] for entry in candidates if isinstance(entry, LoopGuard)
    ]


# A ProcessingResponse
def sent(service: Service, data: bytes, *, times: int = 1, **more: Any) -> Any:  # noqa: ANN401
    """The answer to the last of several requests with a buffered body."""
    return repeat(service, headers(**more), body(data), times=times)


def status(answer: Any) -> int:  # noqa: ANN401  # a ProcessingResponse
    """The status of a refusal, 0 if the request passes."""
    return int(answer.immediate_response.status.code)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({}, "loop:live:default:sliding_ttl:edge:fedb6c17bd4d262b:80d16e9996c49b4d14c83bb7"),
        (
            {"window_type": "sliding_log"},
            "loop:live:default:sliding_log:edge:fedb6c17bd4d262b:80d16e9996c49b4d14c83bb7",
        ),
        (
            {"window_type": "fixed", "body": "ignore", "mode": "shadow"},
            "shadow:loop:live:default:fixed:edge:fedb6c17bd4d262b:519817a725d00879253d4c98",
        ),
    ],
)
def test_key_of_a_single_detector_never_changes(more: dict[str, Any], key: str) -> None:
    """An update must not lose their counts: the keys are those of the first release."""
    engine = make_engine(policy("live", ANY, limit_keys=["header:x-a"], **more))
    check = engine.prepare(HttpRequest("POST", "/v1?b=2&a=1", "host", {"x-a": b"ann"}), "edge")
    assert check is not None

    check.read_body(NO_BODY.plus(b'{"model": "m"}'))

    assert keys(check.enforcing.active + check.shadow.active) == [key]


def test_each_detector_has_its_own_keys() -> None:
    loops: tuple[dict[str, Any], ...] = (
        {},
        {"name": "slow", "window_seconds": 600},
        CANONICAL,
        TAIL,
        CALLS | {"cooldown_seconds": 9},
        TAIL | {"name": "t"},
    )

    found = keys(looked_into(make_engine(several("p", *loops)), looping(1)).enforcing.active)

    names = [key.split(":")[:4] for key in found]
    assert names == [
        ["loop", "p", name, window]
        for name, window in zip(
            ("exact", "slow", "canonical", "tail", "tool_calls", "t"),
            ("sliding_ttl",) * 4 + ("fixed", "sliding_ttl"),
            strict=True,
        )
    ]
    # The fingerprint is what is compared
    assert len({key.rpartition(":")[2] for key in found[:2]}) == 1
    assert len(set(found)) == 6


def test_strictest_detector_of_a_policy_wins() -> None:
    service = make_service(
        several(
            "p",
            {"action": "warn"},
            {"name": "slow", "action": "throttle", "threshold_identical_requests": 4},
            {"name": "hard", "action": "reject", "threshold_identical_requests": 5},
        )
    )

    answers = [sent(service, b"x") for _ in range(5)]

    assert [status(answer) for answer in answers] == [0, 0, 0, 0, 429]
    assert [metadata_of(answer).get("action") for answer in answers] == [
        None,
        None,
        "warn",
        "throttle",
        "reject",
    ]
    assert [metadata_of(answer).get("detector") for answer in answers[2:]] == [
        "exact",
        "slow",
        "hard",
    ]
    assert [metadata_of(answer).get("warning") for answer in answers[2:]] == [
        "loop_warn",
        "loop_warn",
        None,
    ]
    assert headers_of(answers[4])["x-loopguard-count"] == "5"


def test_metrics_count_policies_and_detectors_apart() -> None:
    service = make_service(
        several("p", {"action": "warn"}, CANONICAL, TAIL | {"threshold_identical_requests": 9})
    )

    sent(service, chat("hi"), times=3)

    assert sample(service, "requests_total", policy="p", mode="enforce", action="allow") == 2
    assert sample(service, "requests_total", policy="p", mode="enforce", action="warn") == 0
    assert sample(service, "requests_total", policy="p", mode="enforce", action="reject") == 1
    assert sample(service, "loops_detected_total", policy="p", mode="enforce", action="reject") == 1
    found = {
        (name, action): sample(
            service,
            "detections_total",
            policy="p",
            detector=name,
            mode="enforce",
            action=action,
            strength="",
        )
        for name, action in (("exact", "warn"), ("canonical", "reject"), ("tail", "reject"))
    }
    assert found == {("exact", "warn"): 1, ("canonical", "reject"): 1, ("tail", "reject"): 0}


def test_detection_is_logged_with_its_detector(caplog: pytest.LogCaptureFixture) -> None:
    """The third line in a row about one loop is left out."""
    service = make_service(several("p", {"action": "warn"}, CALLS))

    sent(service, looping(3), times=3)

    lines = [
        vars(record)["fields"] for record in caplog.records if record.levelno == logging.WARNING
    ]
    assert [(line["detector"], line["action"]) for line in lines] == [
        ("tool_calls", "reject")
    ] * 2 + [("exact", "warn")]


def test_metadata_names_one_of_several_detectors() -> None:
    alone, among = make_service(policy("p", ANY)), make_service(several("p", {}))

    assert "detector" not in metadata_of(sent(alone, b"x", times=3))
    assert metadata_of(sent(among, b"x", times=3))["detector"] == "exact"


CANNOT_LOOK: list[tuple[dict[str, Any], bytes, str]] = [
    (TAIL, b"{", "not_json"),
    (TAIL, b"\xff", "not_json"),
    (TAIL, b"[" * 5_000, "not_json"),
    (TAIL, b"5", "no_messages"),
    (TAIL, b'{"messages": []}', "no_messages"),
    (TAIL, b'{"messages": "hi"}', "no_messages"),
    (CALLS, b"nothing", "not_json"),
    (CALLS, b'{"query": "{hero}"}', "no_messages"),
    (CALLS, b'{"prompt": "go on"}', "no_history"),
    (CALLS, b'{"input": "go on", "previous_response_id": "r"}', "no_history"),
    (CALLS, b'{"input": "go on", "conversation": {"id": "c"}}', "no_history"),
    (TAIL | {"max_inspect_bytes": 20}, chat("longer than that"), "inspect_limit"),
    (CANONICAL | {"max_inspect_bytes": 20}, chat("longer than that"), "inspect_limit"),
    (CANONICAL, b'{"a": [' + b"1.5," * 10_000 + b"1.5]}", "inspect_limit"),
    (TAIL, chat("hi").replace(b'"m"', b'"m", "a": [' + b"[]," * 120_000 + b"[]]"), "inspect_limit"),
]


def test_canonical_compares_other_bodies_exactly() -> None:
    service = make_service(policy("p", ANY, **CANONICAL))

    answers = [status(sent(service, data)) for data in (b"a=1", b"a=1", b"a=2", b"a=1")]
    empty = repeat(service, headers(end=True), times=3)

    assert answers == [0, 0, 0, 429]
    assert status(empty) == 429
    assert sample(service, "compared_exactly_total", policy="p") == 4


def test_request_without_body_is_counted_by_exact_detectors() -> None:
    service = make_service(several("p", {}, CANONICAL, TAIL, CALLS))

    answer = repeat(service, headers(method="GET", end=True), times=3)

    assert status(answer) == 429
    assert list_uncounted(service) == {"no_messages": 3}


def test_uncounted_request_is_reported_once_per_policy() -> None:
    service = make_service(several("p", {}, CANONICAL))

    exchange(service, headers(content_type="application/grpc", te="trailers"))
    exchange(service, headers())

    assert list_uncounted(service) == {"grpc": 1, "aborted": 1}


def fractions(number: int) -> str:
    return "[" + ",".join(f"{place}.5" for place in range(number)) + "]"


@pytest.mark.parametrize(
    ("entries", "request_", "bypassed"),
    [
        ([{"header": "X-Health-Check"}], post(x_health_check="1"), True),
        ([{"header": "x-health-check"}], post(x_health_check=""), True),  # there, if empty
        ([{"header": "x-health-check"}], post(x_health="1"), False),
        ([{"pathExact": "/v1/jobs"}], HttpRequest("GET", "/v1/jobs?id=1"), True),
        ([{"pathExact": "/v1/jobs"}], HttpRequest("GET", "/v1/jobs/1"), False),
        ([{"pathPrefix": "/v1/jobs/"}], HttpRequest("GET", "/v1/jobs/1"), True),
        ([{"pathPrefix": "/v1/jobs/"}], HttpRequest("GET", "/v1/jobs"), False),
        ([{"pathPrefix": "/v1/jobs"}], HttpRequest("GET", "/v1/jobs"), True),
        ([{"pathPrefix": "/v1/jobs"}], HttpRequest("GET", "/v1/jobs/1"), True),
        ([{"pathPrefix": "/v1/jobs"}], HttpRequest("GET", "/v1/jobsearch"), False),
        ([{"pathPrefix": "/v1/JOBS"}], HttpRequest("GET", "/v1/jobs"), False),
        ([{"methods": ["get", "HEAD"]}], HttpRequest("GET", "/"), True),
        ([{"methods": ["get", "HEAD"]}], HttpRequest("POST", "/"), False),
        ([{"pathExact": "/a", "pathPrefix": "/b/"}], HttpRequest("GET", "/a"), True),
        ([{"pathExact": "/a", "pathPrefix": "/b/"}], HttpRequest("GET", "/b/c"), True),
        ([{"pathExact": "/a", "pathPrefix": "/b/"}], HttpRequest("GET", "/c"), False),
        (
            [{"header": "x-a", "methods": ["GET"], "pathPrefix": "/"}],
            HttpRequest("GET", "/", "h", {"x-a": b"1"}),
            True,
        ),
        (
            [{"header": "x-a", "methods": ["GET"], "pathPrefix": "/"}],
            HttpRequest("GET", "/"),
            False,
        ),
        (
            [{"header": "x-a", "methods": ["GET"], "pathPrefix": "/"}],
            HttpRequest("PUT", "/", "h", {"x-a": b"1"}),
            False,
        ),
        (
            [{"header": "x-a", "methods": ["GET"], "pathPrefix": "/b"}],
            HttpRequest("GET", "/", "h", {"x-a": b"1"}),
            False,
        ),
        ([{"header": "x-a"}, {"header": "x-b"}], post(x_b="1"), True),  # any entry
        ([{"header": "x-a"}, {"header": "x-b"}], post(x_c="1"), False),
        ([], post(x_a="1"), False),
    ],
)
def test_bypass_needs_all_fields_of_an_entry(
    entries: list[dict[str, Any]], request_: HttpRequest, bypassed: bool
) -> None:
    """A request that has everything that an entry names is not counted."""
    check = make_engine(with_spec(policy("p", ANY), bypass=entries)).prepare(request_)
    assert check is not None

    assert [entry.plan.id for entry in check.enforcing.active] == ([] if bypassed else ["p"])
    assert check.list_uncounted() == ([("p", "bypass")] if bypassed else [])


def test_bypassed_request_ends_with_its_headers() -> None:
    service = make_service(with_spec(several("p", {}, TAIL), bypass=[{"header": "X-Health-Check"}]))

    replies = [exchange(service, headers(x_health_check="1"), body(b"x")) for _ in range(5)]

    assert [[reply.done for reply in exchanged] for exchanged in replies] == [[True]] * 5
    assert list_uncounted(service) == {"bypass": 5}
    assert [status(sent(service, b"x")) for _ in range(3)] == [0, 0, 429]


def test_bypass_goes_before_descriptors() -> None:
    engine = make_engine(
        with_spec(
            policy("p", ANY, limit_keys=["jwt:org"], missing_descriptor="skip"),
            bypass=[{"methods": ["GET"]}],
        )
    )

    check = engine.prepare(HttpRequest("GET", "/" + "x" * 70_000))

    assert check is not None
    assert check.list_uncounted() == [("p", "bypass")]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("body:/model", {"model": "m"}, "/model=m"),
        ("body:/metadata/session_id", {"metadata": {"session_id": "s"}}, "/metadata/session_id=s"),
        ("body:/messages/0/role", {"messages": [{"role": "user"}]}, "/messages/0/role=user"),
        ("body:/a/1", {"a": ["x", "y"]}, "/a/1=y"),
        ("body:/a/1", {"a": {"1": "key"}}, "/a/1=key"),
        ("body:/a/01", {"a": ["x", "y"]}, ""),
        ("body:/a/-", {"a": ["x"]}, ""),
        ("body:/a/-1", {"a": ["x"]}, ""),
        ("body:/a/5", {"a": ["x"]}, ""),
        ("body:/a/99999999999", {"a": ["x"]}, ""),
        ("body:/0", ["x"], "/0=x"),
        ("body:/n", {"n": 7}, "/n=7"),
        ("body:/n", {"n": -0}, "/n=0"),
        ("body:/n", {"n": 2**70}, f"/n={2**70}"),
        ("body:/n", b'{"n": 7.0}', "/n=7"),
        ("body:/n", b'{"n": 70e-1}', "/n=7"),
        ("body:/b", {"b": True}, "/b=true"),
        ("body:/b", {"b": False}, "/b=false"),
        ("body:/x", {"x": None}, ""),
        ("body:/x", {"x": ""}, ""),
        ("body:/x", {"x": {"y": 1}}, ""),
        ("body:/x", {"x": [1]}, ""),
        ("body:/x", {}, ""),
        ("body:/x/y", {"x": "text"}, ""),
        ("body:/x", b"5", ""),
        ("body:/x", b"", ""),
        ("body:/x", b"not JSON", ""),
        ("body:/x", b'{"x": "\xff"}', ""),
        ("body:/a~1b/c~0d", {"a/b": {"c~d": "v"}}, "/a~1b/c~0d=v"),
        ("body:/~01", {"~1": "v"}, "/~01=v"),
        ("body:/", {"": "v"}, "/=v"),
        ("body:/User", {"User": "Ann", "user": "bob"}, "/user=Ann"),
        ("body:/x", {"x": "a%b|c=d&e"}, "/x=a%25b%7Cc%3Dd%26e"),
        ("body:/a=b|c", {"a=b|c": "v"}, "/a%3Db%7Cc=v"),
        ("body:/x", {"x": "\u00e9\U0001f600\n"}, "/x=\u00e9\U0001f600\n"),
    ],
)
def test_body_descriptor_is_a_scalar_found_by_pointer(
    key: str, value: object, expected: str
) -> None:
    """Anything but a scalar is missing; the other descriptors are used then."""
    made = policy("p", ANY, limit_keys=[key, "header:x-a"])

    (found,) = composites(made, data=encoded(value), request=post(x_a="1"))

    assert found == (f"{expected}|x-a=1" if expected else "x-a=1")


def test_keys_of_one_name_are_told_apart() -> None:
    keys_ = ["header:user", "query:user", "body:/user", "body:/User"]
    request = HttpRequest("POST", "/?user=q", "host", {"user": b"h"})

    (found,) = composites(
        policy("p", ANY, limit_keys=keys_),
        data=encoded({"user": "b", "User": "B"}),
        request=request,
    )

    assert found == "body:/User=B|body:/user=b|header:user=h|query:user=q"


def test_ignored_body_is_awaited_if_it_names_callers() -> None:
    service = make_service(policy("p", ANY, limit_keys=["body:/user"], body="ignore"))

    first = exchange(service, headers(), body(encoded({"user": "ann", "n": 1})))
    answers = [status(sent(service, encoded({"user": "ann", "n": number}))) for number in range(2)]
    unknown = [
        exchange(service, headers(content_type="application/grpc", te="trailers"))[-1]
        for _ in range(4)
    ]

    assert [reply.done for reply in first] == [False, True]
    assert answers == [0, 429]
    assert all(status(decoded(reply)) == 0 for reply in unknown)
    assert list_uncounted(service) == {"grpc": 4}


def test_keys_of_rules_may_be_in_the_body() -> None:
    rule = {
        "name": "r",
        "limit_keys": ["body:/model"],
        "algorithm": "token_bucket",
        "algorithm_config": {"tokens_per_second": 1, "burst": 9},
    }
    made = with_spec(policy("p", ANY, limit_keys=["header:x-a"]), rules=[rule])

    assert composites(made, data=encoded({"model": "m"}), request=post(x_a="1")) == [
        "/model=m|x-a=1"
    ]


def _cycle(times: int) -> bytes:
    one, two = (json.loads(looping(1, argument=name))["messages"][1:] for name in ("a", "b"))
    return encoded({"messages": [{"role": "user", "content": "go"}, *([*one, *two] * times)]})


Attempt = tuple[bytes, float, str, int | None]
CALLING: dict[str, tuple[dict[str, Any], list[Attempt]]] = {
    "a loop and shorter histories": (
        {},
        [
            (looping(2), 0, "allow", None),
            (looping(3), 1, "reject", None),  # its history shows the loop, and always will
            (looping(1), 2, "reject", 59),
            (looping(4), 31, "reject", None),  # refusals do not prolong the cooldown
            (looping(1), 60.9, "reject", 1),
            (looping(1), 61, "allow", None),
            (looping(3), 62, "reject", None),  # the next loop starts it again
            (looping(2, argument="b.txt"), 63, "allow", None),
            (looping(2, result="found"), 63, "allow", None),
            (looping(2, tool="write_file"), 63, "allow", None),
            (chat("hi"), 63, "allow", None),
            (looping(1), 63, "reject", 59),
        ],
    ),
    "without a cooldown": (
        {"cooldown_seconds": 0},
        [
            (looping(2), 0, "allow", None),
            (looping(3), 0, "reject", None),
            (looping(1), 0, "allow", None),
            (looping(4), 0, "reject", None),
        ],
    ),
    "a cycle": (  # in this window neither call alone is a loop
        {"window_calls": 4},
        [(_cycle(3), 0, "reject", None), (_cycle(2), 1, "reject", 59)],
    ),
    "a window means nothing": (
        {"cooldown_seconds": 0, "window_seconds": 30},
        [(looping(3), 0, "reject", None)],
    ),
}


@pytest.mark.parametrize(("loop", "attempts"), CALLING.values(), ids=CALLING)
def test_loop_of_calls_starts_a_cooldown(loop: dict[str, Any], attempts: list[Attempt]) -> None:
    guard = Guard(**CALLS, **{"cooldown_seconds": 60, "window_seconds": None, **loop})

    outcomes = [guard.judge(data, now) for data, now, _, _ in attempts]

    found = [
        (each.action.value, each.retry_after if each.action is Action.REJECT else None)
        for each in outcomes
    ]
    assert found == [(action, retry_after) for _, _, action, retry_after in attempts]


def test_each_detector_gets_its_own_count() -> None:
    engine = make_engine(several("p", {}, CALLS, TAIL | {"threshold_identical_requests": 9}))
    check = looked_into(engine, looping(3))

    decision = check.decide([Count(3, True, 0, 7), Count(5, False, 0, 8)])

    assert [(outcome.detector, outcome.count, outcome.span_ms) for outcome in decision.trace] == [
        ("exact", 3, 7),
        ("tool_calls", 3, UNCOUNTED.span_ms),
        ("tail", 5, 8),
    ]


def test_cooldown_is_local_while_the_store_is_down() -> None:
    service = make_service(policy("p", ANY, **CALLS, cooldown_seconds=60))
    service.counting.store = FailingStore()

    answers = [status(sent(service, looping(times))) for times in (3, 1)]

    assert answers == [429, 429]
    assert sample(service, "fail_open_total", reason="store_error") == 2


class _Raising(Similarity):
    """Fails when it is to look into a body."""

    looks = True

    def compare(self, document: Document) -> tuple[bytes | None, Repeat | None]:
        raise ZeroDivisionError(len(document))


@pytest.mark.sources  # compiled classes have no interpreted subclasses
@pytest.mark.parametrize(
    ("mode", "reason"), [("enforce", "internal_error"), ("shadow", "shadow_error")]
)
def test_failing_detector_stops_no_other(
    mode: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    service = make_service(with_spec(several("bad", TAIL, {}), mode=mode), policy("good", ANY))
    service.engine.plans[0].detectors[0].similarity = _Raising(LoopDetection())

    answers = [status(sent(service, chat("hi"))) for _ in range(3)]

    assert answers == [0, 0, 429]
    assert (
        sample(
            service,
            "detections_total",
            policy="bad",
            detector="exact",
            mode=mode,
            action="reject",
            strength="",
        )
        == 1
    )
    assert sample(service, "fail_open_total", reason=reason) == 3
    assert "failed" in caplog.text


GRPC = {"content_type": "application/grpc", "te": "trailers"}


@pytest.mark.parametrize(
    ("more", "data", "code", "why"),
    [
        (GRPC, b"", 415, "grpc"),
        (GRPC | {"content_length": "8"}, b"\0\0\0\0\3abc", 415, "grpc"),
        ({"upgrade": "websocket"}, b"", 415, "upgrade"),
        ({"content_encoding": "gzip"}, b"not gzip", 415, "content_encoding"),
        (
            {"content_encoding": "gzip"},
            gzip.compress(b" " * 2_000_000, mtime=0),
            413,
            "inspect_limit",
        ),
        ({}, b'{"messages": [' + b" " * 2_000_000 + b"]}", 413, "inspect_limit"),
        ({}, b'{"messages": [NaN]}', 400, "not_json"),
        ({}, b"{}", 400, "no_messages"),
        ({"path": "/?" + "&" * 10_001}, chat("hi"), 400, "target_too_long"),
        ({"x_team": None}, chat("hi"), 400, "missing_descriptor"),
        ({"x_team": "t" * 9_000}, chat("hi"), 400, "descriptor_too_long"),
    ],
)
def test_uncountable_reject_refuses_uncountable_requests(
    more: dict[str, Any], data: bytes, code: int, why: str
) -> None:
    """By default it passes, and so it does in shadow."""
    strict, lenient, shadow = (
        with_spec(policy("p", ANY, limit_keys=["header:x-team"], **TAIL), **spec)
        for spec in ({"uncountable": "reject"}, {}, {"uncountable": "reject", "mode": "shadow"})
    )
    given: dict[str, Any] = {
        name: value for name, value in ({"x_team": "a"} | more).items() if value is not None
    }

    answers = [
        exchange(make_service(made), headers(**given), body(data))[-1]
        for made in (strict, lenient, shadow)
    ]
    refusal, *passed = map(decoded, answers)

    assert (refusal.immediate_response.status.code, refusal.immediate_response.details) == (
        code,
        "uncountable",
    )
    assert headers_of(refusal)["x-should-retry"] == "false"
    told = refusal.immediate_response.body
    if why == "grpc":  # whose message is text
        assert b"(grpc)" in told
    else:
        page = json.loads(told)["error"]
        assert (page["type"], page["code"]) == ("uncountable", why)
    assert [status(answer) for answer in passed] == [0, 0]


def test_uncountable_refusals_are_counted_by_reason() -> None:
    service = make_service(with_spec(several("p", {}, TAIL), uncountable="reject"))

    answers = [sent(service, b"not JSON") for _ in range(3)]

    assert [status(answer) for answer in answers] == [400, 400, 429]
    assert sample(service, "uncountable_rejected_total", policy="p", reason="not_json") == 2
    assert list_uncounted(service) == {"not_json": 3}


def test_inspection_budget_is_per_caller() -> None:
    service = make_service(policy("p", ANY, limit_keys=["header:x-team"], **TAIL))
    service.budget.allows("x-team=greedy", perf_counter())
    service.budget.spend("x-team=greedy", 5)

    greedy = [status(sent(service, chat("hi"), x_team="greedy")) for _ in range(4)]

    assert greedy == [0] * 4
    assert list_uncounted(service) == {"inspect_budget": 4}
    service.budget.allows("x-team=greedy", perf_counter() + 1_000)  # time passes
    assert [status(sent(service, chat("hi"), x_team="other")) for _ in range(3)] == [0, 0, 429]


_HI, _FRACTIONS = chat("hi"), fractions(10_001).encode()
_AT, _BELOW = {"max_inspect_bytes": len(_HI)}, {"max_inspect_bytes": len(_HI) - 1}
_BY_USER: dict[str, Any] = {"limit_keys": ["body:/user"]}
_PASS, _REFUSE = [0, 0, 0], [0, 0, 429]

Sent = tuple[dict[str, Any], bytes]
COUNTED: dict[str, tuple[list[dict[str, Any]], list[Sent], list[int], dict[str, float]]] = {
    "a body at the limit of one detector, above that of another": (
        [several("p", TAIL | _AT, TAIL | {"name": "less"} | _BELOW)],
        [({}, _HI)] * 3,
        _REFUSE,
        {"inspect_limit": 3},
    ),
    "too many fractions for a shadow policy that reads all of the body": (
        [policy("s", ANY, mode="shadow", **CANONICAL), policy("e", ANY, **TAIL)],
        [({}, _HI.replace(b'"m"', b'"m", "embedding": ' + _FRACTIONS))] * 3,
        _REFUSE,
        {"inspect_limit": 3},
    ),
    **{
        f"what {loop['similarity']} cannot read, {data[:20]!r}": (
            [several("p", loop, {})],
            [({}, data)] * 3,
            _REFUSE,
            {reason: 3},
        )
        for loop, data, reason in CANNOT_LOOK
    },
    "callers named in the body": (
        [
            several(
                "p",
                {"body": "ignore"},
                CANONICAL | {"ignore_fields": ["/user"]},
                TAIL,
                CALLS | {"cooldown_seconds": 9},
                **_BY_USER,
            )
        ],
        [({}, chat("hi", user=user)) for user in ("ann", "bob", "ann", "bob", "ann", "bob", "eve")],
        [0, 0, 0, 0, 429, 429, 0],
        {},
    ),
    **{
        f"no caller in the body, {data!r}": (
            [policy("p", ANY, **_BY_USER, missing_descriptor="skip")],
            [({}, data)] * 3,
            _PASS,
            {"missing_descriptor": 3},
        )
        for data in (b"{}", b'{"user": null}', b'{"user": {}}', b"not JSON", b"")
    },
    "the longest name of a caller": (
        [policy("p", ANY, **_BY_USER)],
        [({}, encoded({"user": "x" * 8_192}))] * 3,
        _REFUSE,
        {},
    ),
    "a name that is longer": (
        [policy("p", ANY, **_BY_USER)],
        [({}, encoded({"user": "x" * 8_193}))] * 3,
        _PASS,
        {"descriptor_too_long": 3},
    ),
    **{
        f"an impossible length, {digit}...": (
            [policy("p", ANY)],
            [({"content_length": digit * times}, b"x")] * 3,
            _REFUSE,
            {},
        )
        for digit, times in (("7", 700), ("9", 5_000))
    },
    "a bypass of the policy beside": (
        [with_spec(policy("p", ANY), bypass=[{"pathPrefix": "/"}]), policy("q", ANY)],
        [({}, b"x")] * 3,
        _REFUSE,
        {"bypass": 3},
    ),
    **{
        f"a body too large to tell its caller, {loop}": (
            [several("p", loop | {"max_inspect_bytes": 100}, **_BY_USER)],
            [({}, chat("x" * 100, user="ann"))] * 3,
            _PASS,
            {"inspect_limit": 3},
        )
        for loop in ({}, {"body": "ignore"}, CANONICAL, TAIL, CALLS)
    },
    **{
        f"a body that holds too much to tell its caller, {data[:9]!r}": (
            [policy("p", ANY, **_BY_USER)],
            [({}, data)] * 3,
            _PASS,
            {"inspect_limit": 3},
        )
        for data in (b'{"user": "ann", "a": ' + _FRACTIONS + b"}", b"[" * 300_000)
    },
    "JSON that claims to be gRPC": (
        [policy("p", ANY, **TAIL)],
        [({"content_type": "application/grpc"}, _HI)] * 3,
        _REFUSE,
        {},
    ),
    "JSON that claims to be gRPC of another length": (
        [policy("p", ANY, **TAIL)],
        [(GRPC | {"content_length": "100"}, _HI)] * 3,
        _REFUSE,
        {},
    ),
    "the same text in other encodings": (
        [policy("p", ANY, **TAIL)],
        [({}, _HI.decode().encode("utf-8-sig")), ({}, _HI.decode().encode("utf-16")), ({}, _HI)],
        _REFUSE,
        {},
    ),
    "the same text packed": (
        [policy("p", ANY, **TAIL)],
        [({}, _HI), ({"content_encoding": "gzip"}, gzip.compress(_HI)), ({}, _HI)],
        _REFUSE,
        {},
    ),
}


@pytest.mark.parametrize(
    ("policies", "requests", "statuses", "left_out"), COUNTED.values(), ids=COUNTED
)
def test_requests_are_counted_or_uncounted(
    policies: list[dict[str, Any]],
    requests: list[Sent],
    statuses: list[int],
    left_out: dict[str, float],
) -> None:
    service = make_service(*policies)

    assert [status(sent(service, data, **more)) for more, data in requests] == statuses
    assert list_uncounted(service) == left_out


TRAILERS = ProcessingRequest(request_trailers=HttpTrailers())


def in_chunks(data: bytes, size: int) -> list[ProcessingRequest]:
    """A streamed body in chunks, the last of which ends the stream."""
    cut = [data[place : place + size] for place in range(0, len(data), size)]
    return [
        headers(mode="STREAMED"),
        *(body(chunk, end=False) for chunk in cut[:-1]),
        body(cut[-1]),
    ]


@pytest.mark.parametrize("loop", [{}, CALLS])
def test_observed_body_is_inspected_whole(loop: dict[str, Any]) -> None:
    """In observability mode, Envoy 1.40 streams bodies, but sends no protocol_config."""
    service = make_service(policy("p", ANY, **loop))
    messages = [headers(mode=None), *in_chunks(looping(2), 100)[1:]]
    for message in messages:
        message.observability_mode = True

    exchange(service, *messages)

    assert list_uncounted(service) == {}
    assert sample(service, "requests_total", policy="p", mode="enforce", action="allow") == 1


def test_large_chunks_make_the_same_body() -> None:
    service = make_service(policy("p", ANY, **TAIL), record=True)
    data = chat(*(f"{number:04}" * LARGE for number in range(4)))
    whole = metadata_of(sent(service, data))["fingerprint"]

    found = metadata_of(decoded(exchange(service, *in_chunks(data, 3 * LARGE))[-1]))["fingerprint"]

    assert found == whole


def test_trailers_end_a_streamed_body() -> None:
    """If trailers follow, the last chunk does not say that it is the last."""
    service = make_service(policy("p", ANY, **TAIL))
    data = chat("hi")
    messages = [
        headers(mode="STREAMED"),
        body(data[:9], end=False),
        body(data[9:], end=False),
        TRAILERS,
    ]

    answers = [status(decoded(exchange(service, *messages)[-1])) for _ in range(3)]

    assert answers == [0, 0, 429]
    assert service.kept.bytes == 0


def test_streamed_body_beyond_the_limit_is_freed() -> None:
    service = make_service(several("p", TAIL | {"max_inspect_bytes": 100}, {}))
    stream = Stream(service)
    receive(stream, headers(mode="STREAMED"))

    receive(stream, body(b"x" * 60, end=False))
    kept = [service.kept.bytes]
    receive(stream, body(b"x" * 60, end=False))
    kept.append(service.kept.bytes)
    receive(stream, body(b"x" * 10, end=False))
    kept.append(service.kept.bytes)
    receive(stream, body(b"x"))
    stream.close()

    assert kept == [60, 0, 0]
    assert list_uncounted(service) == {"inspect_limit": 1}
    assert sample(service, "requests_total", policy="p", mode="enforce", action="allow") == 1


@pytest.mark.parametrize("made", [policy("p", ANY), policy("p", ANY, body="ignore")])
def test_uninspected_body_is_not_kept(made: dict[str, Any]) -> None:
    service = make_service(made)
    stream = Stream(service)

    for message in (headers(mode="STREAMED"), body(b"x" * 1_000, end=False)):
        receive(stream, message)
    kept = service.kept.bytes
    stream.close()

    assert kept == 0


def test_all_uploads_share_one_memory_bound() -> None:
    service = make_service(several("p", TAIL, {}))
    service.kept = UploadMemory(150)
    data = chat("hi")
    first, second = Stream(service), Stream(service)
    for stream in (first, second):
        receive(stream, headers(mode="STREAMED"))
        receive(stream, body(data[:40], end=False))
        receive(stream, body(data[40:-1] + b" " * 40, end=False))
    kept = service.kept.bytes

    for stream in (first, second):
        receive(stream, body(data[-1:]))
        stream.close()

    assert kept <= 150
    assert service.kept.bytes == 0
    assert list_uncounted(service) == {"inspect_limit": 1}
    assert status(decoded(exchange(service, *in_chunks(data, 30))[-1])) == 0
    assert list_uncounted(service) == {"inspect_limit": 1}


def _garbage(_: Service, stream: Stream) -> None:
    with pytest.raises(ProtocolError):
        stream.receive(b"\xff\xff\xff")


def _bug(service: Service, stream: Stream) -> None:
    service.counting.store = None  # type: ignore[assignment]  # on purpose
    receive(stream, body(b"}"))


def _stopped(service: Service, stream: Stream) -> None:
    service.release()
    receive(stream, body(b"x", end=False))


ENDS: dict[str, Callable[[Service, Stream], object]] = {
    "the client leaves": lambda *_: None,
    "the body ends": lambda _, stream: receive(stream, body(b"}")),
    "trailers end it": lambda _, stream: receive(stream, TRAILERS),
    "the upstream answers early": lambda _, stream: receive(
        stream, ProcessingRequest(response_headers=HttpHeaders())
    ),
    "another stream needs its place": lambda service, _: Stream(service).close(),
    "the server stops": lambda service, _: service.release(),
    "the server stops and more comes": _stopped,
    "the peer breaks the protocol": _garbage,
    "a bug": _bug,
    "the body grows past the limit": lambda _, stream: receive(
        stream, body(b"x" * 2**20, end=False)
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_end_of_a_stream_frees_its_body(end: str) -> None:
    service = make_service(several("p", TAIL, CANONICAL), max_streams=1)
    stream = Stream(service)
    for message in (headers(mode="STREAMED"), body(b'{"a": 1', end=False), body(b" ", end=False)):
        receive(stream, message)
    kept = service.kept.bytes

    ENDS[end](service, stream)
    stream.close()

    assert (kept, service.kept.bytes) == (8, 0)
    assert (service.streams, len(service.waiting)) == (0, 0)


SECRET = "hunter2"


@pytest.mark.parametrize(
    "loop",
    [
        {},
        CANONICAL,
        TAIL,
        CALLS,
        CALLS | {"cooldown_seconds": 60, "tools": {"*": {"threshold": 2}}},
    ],
)
def test_contents_of_bodies_are_never_logged_or_measured(
    loop: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    from prometheus_client import generate_latest

    caplog.set_level(logging.DEBUG)
    service = make_service(several("p", loop, limit_keys=["body:/user"]), record=True)
    bodies = [
        looping(3, result=f"result {SECRET}", argument=f"argument {SECRET}", user=f"user {SECRET}"),
        chat(f"text {SECRET}", user=f"user {SECRET}"),
        f'{{"broken": "{SECRET}"'.encode(),
    ]

    answers = [sent(service, data) for data in bodies for _ in range(4)]

    told = [
        str(metadata_of(answer)) + str(headers_of(answer)) + answer.immediate_response.body.decode()
        for answer in answers
    ]
    assert any(status(answer) == 429 for answer in answers)
    assert SECRET not in caplog.text + str([vars(record) for record in caplog.records]) + "".join(
        told
    )
    assert SECRET not in generate_latest(service.metrics.registry).decode()


def test_shadow_policy_delays_no_decision_on_headers() -> None:
    live = policy("e", ANY, body="ignore")
    alone, beside = make_service(live), make_service(live, policy("s", ANY, mode="shadow", **TAIL))

    verdicts = [
        [status(decoded(exchange(service, headers(path="/same"))[0])) for _ in range(4)]
        for service in (alone, beside)
    ]

    assert verdicts == [[0, 0, 429, 429]] * 2
    assert list_uncounted(beside) == {"aborted": 2, "decided_before": 2}


def test_shadow_policy_gets_body_after_live_decision() -> None:
    service = make_service(
        policy("e", ANY, body="ignore", threshold_identical_requests=9),
        policy("s", ANY, mode="shadow", **TAIL),
    )

    for _ in range(3):
        exchange(service, headers(path="/same"), body(chat("hi")))

    assert sample(service, "requests_total", policy="e", mode="enforce", action="allow") == 3
    assert sample(service, "requests_total", policy="s", mode="shadow", action="reject") == 1
    assert service.waiting == {}


@pytest.mark.parametrize("similarity", sorted(KINDS.keys() - {"exact"}))
def test_each_similarity_names_what_repeats(similarity: str) -> None:
    kind = KINDS[similarity]
    own = [
        name
        for name in ("name_repeated", "advise")
        if getattr(kind, name) is not getattr(Similarity, name)
    ]

    assert own or similarity == "mcp"  # the subject of a call says it: `McpCall`
    assert f"\n## `{similarity}`\n" in (ROOT / "docs" / "detectors.md").read_text()
