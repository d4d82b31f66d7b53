"""Several detectors in one policy, what is never counted, callers named in the body: between the bundle and the answer."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import pytest

from extproc.decision import Repeat
from extproc.detectors import KINDS, Similarity
from extproc.engine.engine import Engine
from extproc.engine.guards import LoopGuard
from extproc.errors import ProtocolError
from extproc.ext_proc.service import Service
from extproc.ext_proc.stream import Stream
from extproc.ext_proc.upload import UploadMemory
from extproc.ext_proc.wire import LARGE
from extproc.metrics import Metrics
from extproc.pb.external_processor_pb2 import HttpHeaders, HttpTrailers, ProcessingRequest
from extproc.policy.bundle import LoopDetection
from extproc.request.document import Document
from extproc.request.fingerprint import NO_BODY
from extproc.request.http import HttpRequest
from extproc.store.memory import MemoryStore
from extproc.store.rules.windows import UNCOUNTED, Count
from tests.support import ROOT
from tests.support.documents import policy
from tests.support.engine import ANY, keys, make_engine
from tests.support.looping import encoded, looked_into, looping, post, several
from tests.support.messages import body, headers
from tests.support.service import (
    FailingStore,
    decoded,
    exchange,
    headers_of,
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
    """A policy with more keys in its spec."""
    made["spec"] |= spec
    return made


def chat(*texts: str, **more: object) -> bytes:
    """A chat completion with these messages of a user."""
    return encoded({"model": "m", "messages": [{"role": "user", "content": text} for text in texts], **more})


def composites(*policies: Mapping[str, Any], data: bytes, request: HttpRequest | None = None) -> list[str]:
    """What is fingerprinted, after the body's checksum."""
    candidates = looked_into(make_engine(*policies), data, request).enforcing.active
    return [entry.composite.split("|", 4)[4] for entry in candidates if isinstance(entry, LoopGuard)]


def sent(service: Service, data: bytes, *, times: int = 1, **more: Any) -> Any:  # noqa: ANN401  # a ProcessingResponse
    """The answer to the last of several requests with a buffered body."""
    return repeat(service, headers(**more), body(data), times=times)


def status(answer: Any) -> int:  # noqa: ANN401  # a ProcessingResponse
    """The status of a refusal, 0 if the request is let through."""
    return int(answer.immediate_response.status.code)


def uncounted(service: Service) -> dict[tuple[str, str], float]:
    """How often each policy did not count a request, by reason."""
    samples = [
        item for metric in service.metrics.uncounted.collect() for item in metric.samples if item.name.endswith("_total")
    ]
    return {(item.labels["policy"], item.labels["reason"]): item.value for item in samples}


# --- each counts for itself


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({}, "loop:live:default:sliding_ttl:edge:fedb6c17bd4d262b:80d16e9996c49b4d14c83bb7"),
        ({"window_type": "sliding_log"}, "loop:live:default:sliding_log:edge:fedb6c17bd4d262b:80d16e9996c49b4d14c83bb7"),
        (
            {"window_type": "fixed", "body": "ignore", "mode": "shadow"},
            "shadow:loop:live:default:fixed:edge:fedb6c17bd4d262b:519817a725d00879253d4c98",
        ),
    ],
)
def test_a_single_detector_counts_where_it_always_did(more: dict[str, Any], key: str) -> None:
    """An update must not forget the counts of policies that have one object: their keys are those of the first release."""
    engine = make_engine(policy("live", ANY, limit_keys=["header:x-a"], **more))
    check = engine.prepare(HttpRequest("POST", "/v1?b=2&a=1", "host", {"x-a": b"ann"}), "edge")
    assert check is not None

    check.read_body(NO_BODY.plus(b'{"model": "m"}'))

    assert keys(check.enforcing.active + check.shadow.active) == [key]


def test_each_detector_of_a_policy_has_keys_of_its_own() -> None:
    """Keys name the detector, also where two compare the same thing."""
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
    assert len({key.rpartition(":")[2] for key in found[:2]}) == 1  # the fingerprint is what is compared
    assert len(set(found)) == 6


def test_the_strictest_detector_of_a_policy_wins() -> None:
    """One request that three detectors act on gets the strictest answer, and still the warning of another."""
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
    assert [metadata_of(answer).get("action") for answer in answers] == [None, None, "warn", "throttle", "reject"]
    assert [metadata_of(answer).get("detector") for answer in answers[2:]] == ["exact", "slow", "hard"]
    assert [metadata_of(answer).get("warning") for answer in answers[2:]] == ["loop_warn", "loop_warn", None]
    assert headers_of(answers[4])["x-loopguard-count"] == "5"


def test_a_request_counts_once_for_its_policy_and_once_for_each_detector() -> None:
    """requests_total and loops_detected_total are about policies, detections_total about detectors."""
    service = make_service(several("p", {"action": "warn"}, CANONICAL, TAIL | {"threshold_identical_requests": 9}))

    sent(service, chat("hi"), times=3)

    assert sample(service, "requests_total", policy="p", mode="enforce", action="allow") == 2
    assert sample(service, "requests_total", policy="p", mode="enforce", action="warn") == 0
    assert sample(service, "requests_total", policy="p", mode="enforce", action="reject") == 1
    assert sample(service, "loops_detected_total", policy="p", mode="enforce", action="reject") == 1
    found = {
        (name, action): sample(
            service, "detections_total", policy="p", detector=name, mode="enforce", action=action, strength=""
        )
        for name, action in (("exact", "warn"), ("canonical", "reject"), ("tail", "reject"))
    }
    assert found == {("exact", "warn"): 1, ("canonical", "reject"): 1, ("tail", "reject"): 0}


def test_a_detection_is_logged_with_its_detector(caplog: pytest.LogCaptureFixture) -> None:
    """Each detector that acts has lines of its own, which name it; the third in a row of one loop has none."""
    service = make_service(several("p", {"action": "warn"}, CALLS))

    sent(service, looping(3), times=3)

    lines = [vars(record)["fields"] for record in caplog.records if record.levelno == logging.WARNING]
    assert [(line["detector"], line["action"]) for line in lines] == [("tool_calls", "reject")] * 2 + [("exact", "warn")]


def test_metadata_names_the_detector_where_there_are_several() -> None:
    """A policy with a single detector says what it always said."""
    alone, among = make_service(policy("p", ANY)), make_service(several("p", {}))

    assert "detector" not in metadata_of(sent(alone, b"x", times=3))
    assert metadata_of(sent(among, b"x", times=3))["detector"] == "exact"


# --- a detector that cannot look

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


@pytest.mark.parametrize(("loop", "data", "reason"), CANNOT_LOOK)
@pytest.mark.parametrize("first", [True, False])
def test_a_detector_that_cannot_look_leaves_the_others_counting(
    loop: dict[str, Any], data: bytes, reason: str, first: bool
) -> None:
    """What one detector cannot compare is not counted by it, and that is counted; the one beside it catches the loop."""
    service = make_service(several("p", *((loop, {}) if first else ({}, loop))))

    answers = [status(sent(service, data)) for _ in range(3)]

    assert answers == [0, 0, 429]
    assert uncounted(service) == {("p", reason): 3}
    assert sample(service, "detections_total", policy="p", detector="exact", mode="enforce", action="reject", strength="") == 1


def test_a_body_that_is_not_json_is_compared_exactly_by_canonical() -> None:
    """It is counted byte for byte, and that is counted; a body without a byte is no such case."""
    service = make_service(policy("p", ANY, **CANONICAL))

    answers = [status(sent(service, data)) for data in (b"a=1", b"a=1", b"a=2", b"a=1")]
    empty = repeat(service, headers(end=True), times=3)

    assert answers == [0, 0, 0, 429]
    assert status(empty) == 429
    assert sample(service, "compared_exactly_total", policy="p") == 4


def test_without_a_body_nothing_is_looked_into() -> None:
    """A request that ends with its headers has no messages and no calls; canonical counts it like exact does."""
    service = make_service(several("p", {}, CANONICAL, TAIL, CALLS))

    answer = repeat(service, headers(method="GET", end=True), times=3)

    assert status(answer) == 429
    assert uncounted(service) == {("p", "no_messages"): 3}


def test_a_request_that_is_not_counted_is_uncounted_once() -> None:
    """A policy with two detectors did not count one request, not two."""
    service = make_service(several("p", {}, CANONICAL))

    exchange(service, headers(content_type="application/grpc", te="trailers"))
    exchange(service, headers())

    assert uncounted(service) == {("p", "grpc"): 1, ("p", "aborted"): 1}


# --- shadow


def enforced(engine: Engine, data: bytes) -> object:
    """All that the enforcing policies make of a body: what they would count, and why not."""
    try:
        check = looked_into(engine, data)
    except Exception as error:  # noqa: BLE001  # what counts is that it is the same error
        return repr(error)
    ours = [(entry.plan.id, entry.composite, entry.hit, entry.repeat) for entry in check.enforcing.active]
    return ours, [item for item in check.list_uncounted() if item[0] == "e"]


_ENFORCING = several("e", {}, TAIL, CALLS | {"cooldown_seconds": 5}, TAIL | {"name": "one", "tail_messages": 1}, CANONICAL)
_WITHOUT_CANONICAL = several("e", *_ENFORCING["spec"]["loop_detection"][:-1])
_SHADOW = (
    several("s", CANONICAL | {"ignore_fields": ["/messages/*/content"]}, TAIL | {"tail_messages": 200}, CALLS, mode="shadow"),
    with_spec(policy("by-body", ANY, mode="shadow"), limit_keys=["body:/model", "body:/messages/0/content"]),
)
_PAIRS = [(make_engine(each), make_engine(*_SHADOW, each)) for each in (_ENFORCING, _WITHOUT_CANONICAL)]


def fractions(number: int) -> str:
    """This many different numbers with a fraction, as JSON."""
    return "[" + ",".join(f"{place}.5" for place in range(number)) + "]"


@pytest.mark.parametrize("pair", _PAIRS, ids=["with canonical", "without"])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'"\\ud800"',
        b"[" * 100_000,
        b'{"a": %s}' % (b"9" * 700),
        chat("hi", a=10**30),
        chat("hi").replace(b'"m"', b'"m", "a": ' + b"[" * 2_000 + b"]" * 2_000),
        chat("hi").replace(b'"m"', b'"m", "a": ' + b"9" * 700),
        chat("hi").replace(b'"m"', b'"m", "a": 1e' + b"9" * 5_000),
        chat("hi").replace(b'"m"', b'"m", "a": ' + fractions(10_001).encode()),
        chat("hi").replace(b'"hi"', b"[1.5]"),
        looping(3).replace(b'"go"', fractions(10_001).encode()),
        looping(3, temperature=0.7),
        b'{"messages": [{"role": "user", "content": "a"}], "messages": [{"role": "user", "content": "b"}]}',
        b'{"messages": [{"role": "user", "content": "a"}, 5]}',
        b'{"messages": [{"role": 5, "content": 1.0}, {"role": "user", "content": [1.0, 1]}], "model": 1.0}',
        b'{"messages": [{"type": "new kind", "x": 1.0}]}',
    ],
    ids=lambda data: repr(data[:30]) if isinstance(data, bytes) else None,
)
def test_no_shadow_policy_changes_what_enforcing_ones_see(pair: tuple[Engine, Engine], data: bytes) -> None:
    """Whatever a body holds, keys, counts and reasons are those that the enforcing policies would have alone."""
    alone, beside = (enforced(engine, data) for engine in pair)

    assert not isinstance(alone, str)
    assert beside == alone


@pytest.mark.parametrize("loop", [{}, CANONICAL, TAIL, CALLS, CALLS | {"cooldown_seconds": 60}])
def test_every_similarity_works_in_shadow(loop: dict[str, Any]) -> None:
    """A shadow policy reports what it would have done, in metrics and metadata, and the request is let through."""
    service = make_service(several("s", loop, mode="shadow"))

    answer = sent(service, looping(3), times=3)

    assert status(answer) == 0
    told = metadata_of(answer)
    assert (told["shadow_action"], told["shadow_policy"], told["shadow_count"]) == ("reject", "s", 3)
    name = loop.get("similarity", "exact")
    found = sample(service, "detections_total", policy="s", detector=name, mode="shadow", action="reject", strength="")
    assert found == (3 if name == "tool_calls" else 1)


# --- bypass


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
        ([{"header": "x-a", "methods": ["GET"], "pathPrefix": "/"}], HttpRequest("GET", "/", "h", {"x-a": b"1"}), True),
        ([{"header": "x-a", "methods": ["GET"], "pathPrefix": "/"}], HttpRequest("GET", "/"), False),
        ([{"header": "x-a", "methods": ["GET"], "pathPrefix": "/"}], HttpRequest("PUT", "/", "h", {"x-a": b"1"}), False),
        ([{"header": "x-a", "methods": ["GET"], "pathPrefix": "/b"}], HttpRequest("GET", "/", "h", {"x-a": b"1"}), False),
        ([{"header": "x-a"}, {"header": "x-b"}], post(x_b="1"), True),  # any entry
        ([{"header": "x-a"}, {"header": "x-b"}], post(x_c="1"), False),
        ([], post(x_a="1"), False),
    ],
)  # fmt: skip
def test_bypass_takes_what_has_all_of_an_entry(entries: list[dict[str, Any]], request_: HttpRequest, bypassed: bool) -> None:
    """A request that has all that any entry names is not counted, and that is counted; any other is."""
    check = make_engine(with_spec(policy("p", ANY), bypass=entries)).prepare(request_)
    assert check is not None

    assert [entry.plan.id for entry in check.enforcing.active] == ([] if bypassed else ["p"])
    assert check.list_uncounted() == ([("p", "bypass")] if bypassed else [])


def test_a_bypassed_request_is_not_waited_for() -> None:
    """Its stream ends with its headers, its body is never asked for, and it never counts towards a loop."""
    service = make_service(with_spec(several("p", {}, TAIL), bypass=[{"header": "X-Health-Check"}]))

    replies = [exchange(service, headers(x_health_check="1"), body(b"x")) for _ in range(5)]

    assert [[reply.done for reply in exchanged] for exchanged in replies] == [[True]] * 5
    assert uncounted(service) == {("p", "bypass"): 5}
    assert [status(sent(service, b"x")) for _ in range(3)] == [0, 0, 429]


def test_a_bypass_comes_before_descriptors() -> None:
    """What is never counted is no missing descriptor, and no path is too long for it."""
    engine = make_engine(
        with_spec(policy("p", ANY, limit_keys=["jwt:org"], missing_descriptor="skip"), bypass=[{"methods": ["GET"]}])
    )

    check = engine.prepare(HttpRequest("GET", "/" + "x" * 70_000))

    assert check is not None
    assert check.list_uncounted() == [("p", "bypass")]


# --- limit_keys from the body


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
)  # fmt: skip
def test_a_descriptor_is_the_scalar_that_a_pointer_leads_to(key: str, value: object, expected: str) -> None:
    """Strings, numbers by value, booleans; anything else and what is not there is missing, and then the others are left."""
    made = policy("p", ANY, limit_keys=[key, "header:x-a"])

    (found,) = composites(made, data=encoded(value), request=post(x_a="1"))

    assert found == (f"{expected}|x-a=1" if expected else "x-a=1")


@pytest.mark.parametrize("data", [b"{}", b'{"user": null}', b'{"user": {}}', b"not JSON", b""])
def test_a_missing_descriptor_of_the_body_can_skip(data: bytes) -> None:
    """With `skip` a request whose body does not name its caller is not counted."""
    check = looked_into(make_engine(policy("p", ANY, limit_keys=["body:/user"], missing_descriptor="skip")), data)

    assert check.enforcing.active == []
    assert check.list_uncounted() == [("p", "missing_descriptor")]


@pytest.mark.parametrize(("length", "counted"), [(8_192, True), (8_193, False)])
def test_a_descriptor_of_the_body_is_bounded(length: int, counted: bool) -> None:
    """A value longer than any descriptor may be leaves the request uncounted instead of being cut."""
    check = looked_into(make_engine(policy("p", ANY, limit_keys=["body:/user"])), encoded({"user": "x" * length}))

    assert [entry.plan.id for entry in check.enforcing.active] == (["p"] if counted else [])
    assert check.list_uncounted() == ([] if counted else [("p", "descriptor_too_long")])


def test_keys_of_one_name_are_told_apart() -> None:
    """A header, a claim and a member of the body of one name, and members that differ by case, each keep their own value."""
    keys_ = ["header:user", "query:user", "body:/user", "body:/User"]
    request = HttpRequest("POST", "/?user=q", "host", {"user": b"h"})

    (found,) = composites(policy("p", ANY, limit_keys=keys_), data=encoded({"user": "b", "User": "B"}), request=request)

    assert found == "body:/User=B|body:/user=b|header:user=h|query:user=q"


def test_callers_named_in_the_body_count_apart() -> None:
    """The same question of two users is two counts, for every similarity; the key's tenant tells them apart."""
    loops = ({"body": "ignore"}, CANONICAL | {"ignore_fields": ["/user"]}, TAIL, CALLS | {"cooldown_seconds": 9})
    service = make_service(several("p", *loops, limit_keys=["body:/user"]))

    statuses = [status(sent(service, chat("hi", user=user))) for user in ("ann", "bob", "ann", "bob", "ann", "bob", "eve")]

    assert statuses == [0, 0, 0, 0, 429, 429, 0]


def test_a_body_that_names_the_caller_is_waited_for_even_where_it_is_ignored() -> None:
    """`body: ignore` leaves the body out of what is compared, not out of who is calling."""
    service = make_service(policy("p", ANY, limit_keys=["body:/user"], body="ignore"))

    first = exchange(service, headers(), body(encoded({"user": "ann", "n": 1})))
    answers = [status(sent(service, encoded({"user": "ann", "n": number}))) for number in range(2)]
    unknown = [exchange(service, headers(content_type="application/grpc", te="trailers"))[-1] for _ in range(4)]

    assert [reply.done for reply in first] == [False, True]
    assert answers == [0, 429]
    assert all(status(decoded(reply)) == 0 for reply in unknown)
    assert uncounted(service) == {("p", "grpc"): 4}


def test_keys_of_rules_may_stand_in_the_body() -> None:
    """Wherever a descriptor may stand: the keys of a drop-in bundle's rules are united with the policy's."""
    rule = {
        "name": "r",
        "limit_keys": ["body:/model"],
        "algorithm": "token_bucket",
        "algorithm_config": {"tokens_per_second": 1, "burst": 9},
    }
    made = with_spec(policy("p", ANY, limit_keys=["header:x-a"]), rules=[rule])

    assert composites(made, data=encoded({"model": "m"}), request=post(x_a="1")) == ["/model=m|x-a=1"]


# --- the cooldown of tool calls


class Calls:
    """A policy on tool calls with a memory store and a clock of the test's own."""

    def __init__(self, **loop: Any) -> None:  # noqa: ANN401  # keys of loop_detection
        made = policy(
            "p", ANY, limit_keys=["header:x-user"], **CALLS, **{"cooldown_seconds": 60, "window_seconds": None, **loop}
        )
        self._engine = make_engine(made)
        self._store = MemoryStore(Metrics())
        self.asked = 0

    def send(self, data: bytes, now: float, user: str = "ann") -> tuple[str, int | None]:
        """Action and Retry-After of a request at a time in seconds."""
        check = looked_into(self._engine, data, post(x_user=user))
        asked = check.enforcing.list_hits()
        self.asked += len(asked)
        decision = check.decide(self._store.hit(asked, int(now * 1000)))
        return decision.action.value, decision.lead.retry_after if decision.lead else None


def test_a_loop_of_calls_trips_the_cooldown() -> None:
    """The same call in a shorter history, as after a compaction, is refused during the cooldown and let through after it."""
    guard = Calls()

    assert guard.send(looping(2), 0) == ("allow", None)
    assert guard.send(looping(3), 1) == ("reject", None)  # its history says so, and will
    assert guard.send(looping(1), 2) == ("reject", 59)
    assert guard.send(looping(4), 31) == ("reject", None)  # refusals do not prolong it
    assert guard.send(looping(1), 60.9) == ("reject", 1)
    assert guard.send(looping(1), 61) == ("allow", None)
    assert guard.send(looping(3), 62) == ("reject", None)  # and the next loop trips it again


def test_a_cooldown_of_calls_is_about_one_call_of_one_caller() -> None:
    """Other callers, arguments, results and tools are let through, and so is a conversation without calls."""
    guard = Calls()
    guard.send(looping(3), 0)

    answers = [
        guard.send(looping(2), 1, user="bob"),
        guard.send(looping(2, argument="b.txt"), 1),
        guard.send(looping(2, result="found"), 1),
        guard.send(looping(2, tool="write_file"), 1),
        guard.send(chat("hi"), 1),
        guard.send(looping(1), 1),
    ]

    assert [action for action, _ in answers] == ["allow"] * 5 + ["reject"]


def test_without_a_cooldown_nothing_is_asked_of_the_store() -> None:
    """The request carries its own history: a loop is refused each time, and a shorter history never."""
    guard = Calls(cooldown_seconds=0)

    assert [guard.send(looping(times), 0) for times in (2, 3, 1, 4)] == [
        ("allow", None),
        ("reject", None),
        ("allow", None),
        ("reject", None),
    ]
    assert guard.asked == 0


def test_a_cycle_trips_the_cooldown() -> None:
    """After a loop of two calls in turn, a history too short to be a loop is refused while the cooldown lasts."""
    guard = Calls(window_calls=4)  # in which neither call alone stands three times

    def turns(times: int) -> bytes:
        one, two = (json.loads(looping(1, argument=name))["messages"][1:] for name in ("a", "b"))
        return encoded({"messages": [{"role": "user", "content": "go"}, *([*one, *two] * times)]})

    answers = [guard.send(turns(3), 0)[0], guard.send(turns(2), 1)[0]]

    assert answers == ["reject", "reject"]


def test_a_window_given_with_tool_calls_means_nothing() -> None:
    """`window_seconds` is not needed, counts nothing, and is no Retry-After: waiting changes no history."""
    assert Calls(cooldown_seconds=0, window_seconds=30).send(looping(3), 0) == ("reject", None)


def test_counts_and_calls_in_one_policy_are_not_mixed_up() -> None:
    """A detector that asks nothing of the store stands between two that do, and each gets its own count."""
    engine = make_engine(several("p", {}, CALLS, TAIL | {"threshold_identical_requests": 9}))
    check = looked_into(engine, looping(3))

    decision = check.decide([Count(3, True, 0, 7), Count(5, False, 0, 8)])

    assert [(outcome.detector, outcome.count, outcome.span_ms) for outcome in decision.trace] == [
        ("exact", 3, 7),
        ("tool_calls", 3, UNCOUNTED.span_ms),
        ("tail", 5, 8),
    ]


def test_a_store_that_is_down_leaves_a_local_cooldown() -> None:
    """Without the store a loop of calls is still refused, because the request itself shows it."""
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
@pytest.mark.parametrize(("mode", "reason"), [("enforce", "internal_error"), ("shadow", "shadow_error")])
def test_a_detector_that_raises_stops_no_other(mode: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its neighbours in the same policy and in others still count and refuse the loop; each failure is counted and logged."""
    service = make_service(with_spec(several("bad", TAIL, {}), mode=mode), policy("good", ANY))
    service.engine.plans[0].detectors[0].similarity = _Raising(LoopDetection())

    answers = [status(sent(service, chat("hi"))) for _ in range(3)]

    assert answers == [0, 0, 429]
    assert sample(service, "detections_total", policy="bad", detector="exact", mode=mode, action="reject", strength="") == 1
    assert sample(service, "fail_open_total", reason=reason) == 3
    assert "failed" in caplog.text


# --- what cannot be counted, where the policy forbids that


GRPC = {"content_type": "application/grpc", "te": "trailers"}


@pytest.mark.parametrize(
    ("more", "data", "code", "why"),
    [
        (GRPC, b"", 415, "grpc"),
        (GRPC | {"content_length": "8"}, b"\0\0\0\0\3abc", 415, "grpc"),
        ({"upgrade": "websocket"}, b"", 415, "upgrade"),
        ({"content_encoding": "gzip"}, b"not gzip", 415, "content_encoding"),
        ({"content_encoding": "gzip"}, gzip.compress(b" " * 2_000_000, mtime=0), 413, "inspect_limit"),
        ({}, b'{"messages": [' + b" " * 2_000_000 + b"]}", 413, "inspect_limit"),
        ({}, b'{"messages": [NaN]}', 400, "not_json"),
        ({}, b"{}", 400, "no_messages"),
        ({"path": "/?" + "&" * 10_001}, chat("hi"), 400, "target_too_long"),
        ({"x_team": None}, chat("hi"), 400, "missing_descriptor"),
        ({"x_team": "t" * 9_000}, chat("hi"), 400, "descriptor_too_long"),
    ],
)
def test_what_a_policy_cannot_count_it_may_refuse(more: dict[str, Any], data: bytes, code: int, why: str) -> None:
    """With `uncountable: reject` nothing that a client chooses gets a request past the policy; by default it passes."""
    strict, lenient, shadow = (
        with_spec(policy("p", ANY, limit_keys=["header:x-team"], **TAIL), **spec)
        for spec in ({"uncountable": "reject"}, {}, {"uncountable": "reject", "mode": "shadow"})
    )
    given: dict[str, Any] = {name: value for name, value in ({"x_team": "a"} | more).items() if value is not None}

    answers = [exchange(make_service(made), headers(**given), body(data))[-1] for made in (strict, lenient, shadow)]
    refusal, *passed = map(decoded, answers)

    assert (refusal.immediate_response.status.code, refusal.immediate_response.details) == (code, "uncountable")
    assert headers_of(refusal)["x-should-retry"] == "false"
    told = refusal.immediate_response.body
    if why == "grpc":  # whose message is text
        assert b"(grpc)" in told
    else:
        page = json.loads(told)["error"]
        assert (page["type"], page["code"]) == ("uncountable", why)
    assert [status(answer) for answer in passed] == [0, 0]


def test_what_a_policy_forbids_is_counted_by_its_reason() -> None:
    """An operator sees how many were refused, and for what; a loop beside it is told as the loop that it is."""
    service = make_service(with_spec(several("p", {}, TAIL), uncountable="reject"))

    answers = [sent(service, b"not JSON") for _ in range(3)]

    assert [status(answer) for answer in answers] == [400, 400, 429]
    assert sample(service, "uncountable_rejected_total", policy="p", reason="not_json") == 2
    assert uncounted(service) == {("p", "not_json"): 3}


def test_expensive_bodies_of_one_caller_cost_the_others_nothing() -> None:
    """Past its budget a caller's bodies are not inspected, and that is counted; loops of others are still refused."""
    service = make_service(policy("p", ANY, limit_keys=["header:x-team"], **TAIL))
    service.budget.allows("x-team=greedy", perf_counter())
    service.budget.spend("x-team=greedy", 5)

    greedy = [status(sent(service, chat("hi"), x_team="greedy")) for _ in range(4)]

    assert greedy == [0] * 4
    assert uncounted(service) == {("p", "inspect_budget"): 4}
    service.budget.allows("x-team=greedy", perf_counter() + 1_000)  # time passes
    assert [status(sent(service, chat("hi"), x_team="other")) for _ in range(3)] == [0, 0, 429]


# --- what is counted of three requests

_HI, _FRACTIONS = chat("hi"), fractions(10_001).encode()
_AT, _BELOW = {"max_inspect_bytes": len(_HI)}, {"max_inspect_bytes": len(_HI) - 1}
_BY_USER: dict[str, Any] = {"limit_keys": ["body:/user"]}
_PASS, _REFUSE = [0, 0, 0], [0, 0, 429]

Sent = tuple[dict[str, Any], bytes]
THREE: dict[str, tuple[list[dict[str, Any]], list[Sent], list[int], dict[tuple[str, str], float]]] = {
    "a body at the limit of one detector, above that of another": (
        [several("p", TAIL | _AT, TAIL | {"name": "less"} | _BELOW)],
        [({}, _HI)] * 3,
        _REFUSE,
        {("p", "inspect_limit"): 3},
    ),
    "too many fractions for a shadow policy that reads all of the body": (
        [policy("s", ANY, mode="shadow", **CANONICAL), policy("e", ANY, **TAIL)],
        [({}, _HI.replace(b'"m"', b'"m", "embedding": ' + _FRACTIONS))] * 3,
        _REFUSE,
        {("s", "inspect_limit"): 3},
    ),
    "a bypass of the policy beside": (
        [with_spec(policy("p", ANY), bypass=[{"pathPrefix": "/"}]), policy("q", ANY)],
        [({}, b"x")] * 3,
        _REFUSE,
        {("p", "bypass"): 3},
    ),
    **{
        f"a body too large to tell its caller, {loop}": (
            [several("p", loop | {"max_inspect_bytes": 100}, **_BY_USER)],
            [({}, chat("x" * 100, user="ann"))] * 3,
            _PASS,
            {("p", "inspect_limit"): 3},
        )
        for loop in ({}, {"body": "ignore"}, CANONICAL, TAIL, CALLS)
    },
    **{
        f"a body that holds too much to tell its caller, {data[:9]!r}": (
            [policy("p", ANY, **_BY_USER)],
            [({}, data)] * 3,
            _PASS,
            {("p", "inspect_limit"): 3},
        )
        for data in (b'{"user": "ann", "a": ' + _FRACTIONS + b"}", b"[" * 300_000)
    },
    "JSON that claims to be gRPC": ([policy("p", ANY, **TAIL)], [({"content_type": "application/grpc"}, _HI)] * 3, _REFUSE, {}),
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


@pytest.mark.parametrize(("policies", "requests", "statuses", "left_out"), THREE.values(), ids=THREE)
def test_what_is_counted_of_three_requests(
    policies: list[dict[str, Any]], requests: list[Sent], statuses: list[int], left_out: dict[tuple[str, str], float]
) -> None:
    """Which of them are refused, and how often which policy did not count, and why."""
    service = make_service(*policies)

    assert [status(sent(service, data, **more)) for more, data in requests] == statuses
    assert uncounted(service) == left_out


# --- streamed bodies

TRAILERS = ProcessingRequest(request_trailers=HttpTrailers())


def in_chunks(data: bytes, size: int) -> list[ProcessingRequest]:
    """A streamed body in chunks, the last of which ends the stream."""
    cut = [data[place : place + size] for place in range(0, len(data), size)]
    return [headers(mode="STREAMED"), *(body(chunk, end=False) for chunk in cut[:-1]), body(cut[-1])]


@pytest.mark.parametrize("loop", [{}, TAIL, CALLS])
def test_a_body_that_is_only_watched_is_looked_into_as_one(loop: dict[str, Any]) -> None:
    """In observability mode Envoy streams bodies and says nothing about it (1.40 sends no protocol_config)."""
    service = make_service(policy("p", ANY, **loop))
    messages = [headers(mode=None), *in_chunks(looping(2), 100)[1:]]
    for message in messages:
        message.observability_mode = True

    exchange(service, *messages)

    assert uncounted(service) == {}
    assert sample(service, "requests_total", policy="p", mode="enforce", action="allow") == 1


def test_large_chunks_are_kept_as_well() -> None:
    """Messages large enough to be read without copying their bodies make the same body; each chunk is kept as it was."""
    service = make_service(policy("p", ANY, **TAIL), record=True)
    data = chat(*(f"{number:04}" * LARGE for number in range(4)))
    whole = metadata_of(sent(service, data))["fingerprint"]

    found = metadata_of(decoded(exchange(service, *in_chunks(data, 3 * LARGE))[-1]))["fingerprint"]

    assert found == whole


def test_trailers_end_a_streamed_body() -> None:
    """Where trailers follow, the last chunk does not say that it is the last: all of it is looked into when they come."""
    service = make_service(policy("p", ANY, **TAIL))
    data = chat("hi")
    messages = [headers(mode="STREAMED"), body(data[:9], end=False), body(data[9:], end=False), TRAILERS]

    answers = [status(decoded(exchange(service, *messages)[-1])) for _ in range(3)]

    assert answers == [0, 0, 429]
    assert service.kept.bytes == 0


def test_a_streamed_body_past_the_limit_is_not_kept() -> None:
    """What will not be inspected is released at once, and is not counted by the detector that would have inspected it."""
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
    assert uncounted(service) == {("p", "inspect_limit"): 1}
    assert sample(service, "requests_total", policy="p", mode="enforce", action="allow") == 1


@pytest.mark.parametrize("made", [policy("p", ANY), policy("p", ANY, body="ignore")])
def test_a_body_that_is_not_inspected_is_not_kept(made: dict[str, Any]) -> None:
    """A body that only its checksum is taken of is never held in memory."""
    service = make_service(made)
    stream = Stream(service)

    for message in (headers(mode="STREAMED"), body(b"x" * 1_000, end=False)):
        receive(stream, message)
    kept = service.kept.bytes
    stream.close()

    assert kept == 0


def test_all_bodies_under_way_share_one_bound() -> None:
    """Past MAX_KEPT a streamed body is let go of and not looked into; those that were kept before are, and room comes back."""
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
    assert uncounted(service) == {("p", "inspect_limit"): 1}
    assert status(decoded(exchange(service, *in_chunks(data, 30))[-1])) == 0
    assert uncounted(service) == {("p", "inspect_limit"): 1}


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
    "the upstream answers early": lambda _, stream: receive(stream, ProcessingRequest(response_headers=HttpHeaders())),
    "another stream needs its place": lambda service, _: Stream(service).close(),
    "the server stops": lambda service, _: service.release(),
    "the server stops and more comes": _stopped,
    "the peer breaks the protocol": _garbage,
    "a bug": _bug,
    "the body grows past the limit": lambda _, stream: receive(stream, body(b"x" * 2**20, end=False)),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_is_kept_is_let_go_of_however_a_stream_ends(end: str) -> None:
    """When the stream is closed, nothing of its body is counted as kept any more."""
    service = make_service(several("p", TAIL, CANONICAL), max_streams=1)
    stream = Stream(service)
    for message in (headers(mode="STREAMED"), body(b'{"a": 1', end=False), body(b" ", end=False)):
        receive(stream, message)
    kept = service.kept.bytes

    ENDS[end](service, stream)
    stream.close()

    assert (kept, service.kept.bytes) == (8, 0)
    assert (service.streams, len(service.waiting)) == (0, 0)


# --- what is never told

SECRET = "hunter2"


@pytest.mark.parametrize(
    "loop", [{}, CANONICAL, TAIL, CALLS, CALLS | {"cooldown_seconds": 60, "tools": {"*": {"threshold": 2}}}]
)
def test_nothing_that_a_body_says_is_logged_or_measured(loop: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Texts, arguments and results are never in logs, metrics and metadata, whether a loop is found or something breaks."""
    from prometheus_client import generate_latest

    caplog.set_level(logging.DEBUG)
    service = make_service(several("p", loop, limit_keys=["body:/user"]), record=True)
    bodies = [
        looping(3, result=f"result {SECRET}", argument=f"argument {SECRET}", user=f"user {SECRET}"),
        chat(f"text {SECRET}", user=f"user {SECRET}"),
        f'{{"broken": "{SECRET}"'.encode(),
    ]

    answers = [sent(service, data) for data in bodies for _ in range(4)]

    told = [str(metadata_of(answer)) + str(headers_of(answer)) + answer.immediate_response.body.decode() for answer in answers]
    assert any(status(answer) == 429 for answer in answers)
    assert SECRET not in caplog.text + str([vars(record) for record in caplog.records]) + "".join(told)
    assert SECRET not in generate_latest(service.metrics.registry).decode()


@pytest.mark.parametrize("content_length", ["7" * 700, "9" * 5_000])
def test_an_impossible_content_length_is_not_believed(content_length: str) -> None:
    """A number of hundreds of digits is no length; the request is counted by the body that comes."""
    service = make_service(policy("p", ANY))

    for _ in range(3):
        exchange(service, headers(content_length=content_length), body(b"x"))

    assert sample(service, "requests_total", policy="p", mode="enforce", action="reject") == 1
    assert sample(service, "fail_open_total", reason="internal_error") == 0


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "tool_calls": [{"id": None, "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "assistant", "tool_calls": [{"id": 7, "function": {"name": "f", "arguments": "{}"}}], "tool_call_id": None},
    ],
)
def test_ids_that_are_null_or_numbers_hide_no_loop(turn: dict[str, Any]) -> None:
    """What some clients write in place of an id still connects a result with its call."""
    service = make_service(policy("p", ANY, similarity="tool_calls"))
    identity = turn["tool_calls"][0]["id"]
    answer = {"role": "tool", "tool_call_id": identity, "content": "x"}

    reply = sent(service, encoded({"messages": [{"role": "user", "content": "go"}, *[turn, answer] * 3]}))

    assert status(reply) == 429


def test_a_shadow_policy_that_needs_the_body_keeps_no_request_waiting() -> None:
    """A policy that does without bodies decides on the headers, with a shadow policy beside it as without."""
    live = policy("e", ANY, body="ignore")
    alone, beside = make_service(live), make_service(live, policy("s", ANY, mode="shadow", **TAIL))

    verdicts = [[status(decoded(exchange(service, headers(path="/same"))[0])) for _ in range(4)] for service in (alone, beside)]

    assert verdicts == [[0, 0, 429, 429]] * 2
    assert uncounted(beside) == {("s", "aborted"): 2, ("s", "decided_before"): 2}


def test_a_shadow_policy_gets_the_body_of_what_goes_on() -> None:
    """After the others have answered, the body still comes, and the shadow policy counts it."""
    service = make_service(
        policy("e", ANY, body="ignore", threshold_identical_requests=9), policy("s", ANY, mode="shadow", **TAIL)
    )

    for _ in range(3):
        exchange(service, headers(path="/same"), body(chat("hi")))

    assert sample(service, "requests_total", policy="e", mode="enforce", action="allow") == 3
    assert sample(service, "requests_total", policy="s", mode="shadow", action="reject") == 1
    assert service.waiting == {}


@pytest.mark.parametrize("similarity", sorted(KINDS.keys() - {"exact"}))
def test_only_exact_calls_requests_identical(similarity: str) -> None:
    """A refusal says what was compared, and the docs explain it."""
    kind = KINDS[similarity]
    own = [name for name in ("name_repeated", "advise") if getattr(kind, name) is not getattr(Similarity, name)]

    assert own or similarity == "mcp"  # the subject of a call says it: `McpCall`
    assert f"\n## `{similarity}`\n" in (ROOT / "docs" / "detectors.md").read_text()
