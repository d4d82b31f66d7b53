"""Policies that come with a route: named in gRPC metadata, or carried in the route's metadata."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings as hypothesis_settings, strategies as st

from extproc.engine.engine import Engine
from extproc.engine.handover import (
    MAX_POLICY_JSON,
    POLICY_ATTRIBUTE,
    POLICY_METADATA,
    HandedOver,
    RefusedPolicy,
)
from extproc.ext_proc.service import Service
from extproc.ext_proc.stream import Stream
from extproc.pb.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from extproc.policy import loader
from tests.support.bundles import RULE
from tests.support.documents import bundle, policy
from tests.support.engine import ANY, make_engine
from tests.support.examples import examples
from tests.support.messages import ATTRIBUTES, body, headers
from tests.support.service import (
    RecordingStore,
    decoded,
    headers_of,
    make_service,
    metadata_of,
    receive,
    sample,
)

NOWHERE = {"pathExact": "/nowhere"}
"""The selector of a policy that only a route can bring into play."""
EXPIRED = "2020-01-01T00:00:00Z"


def ask(
    service: Service,
    *more: ProcessingRequest,
    pin: str | Sequence[tuple[str, str | bytes]] = (),
    carry: object = None,
    head: ProcessingRequest | None = None,
    meanwhile: Engine | None = None,
    **request: Any,  # noqa: ANN401  # of `headers`
) -> ProcessingResponse:
    """Sends one request over a stream of its own and returns the last answer.

    Args:
        service: receives the request.
        *more: messages after the headers.
        pin: the value of `x-loopguard-policy`, or all metadata of the stream.
        carry: what the route's metadata holds: a string, or a document to encode.
        head: the headers message, instead of the usual one.
        meanwhile: an engine that is loaded after the headers.
        **request: arguments of `headers`.
    """
    head = head or headers(end=not more, **request)
    if carry is not None:
        text = carry if isinstance(carry, str) else json.dumps(carry)
        head.attributes[ATTRIBUTES].update({POLICY_ATTRIBUTE: text})
    stream = Stream(service, [(POLICY_METADATA, pin)] if isinstance(pin, str) else pin)
    reply = receive(stream, head)
    service.engine = meanwhile or service.engine
    for message in more if not reply.done else ():
        reply = receive(stream, message)
    stream.close()
    assert reply.done
    return decoded(reply)


def counted(service: Service) -> dict[str, float]:
    totals: dict[str, float] = {}
    for metric in service.metrics.registry.collect():
        for item in metric.samples:
            if item.name == "loopguard_requests_total":
                totals[item.labels["policy"]] = totals.get(item.labels["policy"], 0) + item.value
    return totals


def lead_of(answer: ProcessingResponse) -> str:
    """The policy that refuses the request; empty if it passes."""
    return headers_of(answer).get("x-loopguard-policy", "")


def errors(service: Service) -> dict[str, float]:
    reasons = ("unknown_policy", "invalid", "too_large", "unenforced")
    found = {reason: sample(service, "handover_errors_total", reason=reason) for reason in reasons}
    return {reason: value for reason, value in found.items() if value}


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record)["fields"] for record in caplog.records if record.levelno == logging.ERROR]


LOADED = (policy("a", NOWHERE), policy("b", NOWHERE), policy("c", ANY))


@pytest.mark.parametrize(
    ("pin", "applied"),
    [
        ("a", "a"),
        ("a,b", "ab"),
        ("b,a", "ab"),
        (" a ,\tb ", "ab"),
        ("a,,b,", "ab"),
        ("a,a,b,a", "ab"),
        ("a,-", "a"),
        ("-", "c"),
        ("", "c"),
        (" ", "c"),
        (",", "c"),
        ("-, -", "c"),
        ("c,a", "ac"),
        ([(POLICY_METADATA, "a"), (POLICY_METADATA, "b")], "ab"),
        ([(POLICY_METADATA, "-"), (POLICY_METADATA, "b")], "b"),
        ([(POLICY_METADATA, "a"), (POLICY_METADATA, "a")], "a"),
        ([("x-loopguard-scope", "s"), (POLICY_METADATA, "a"), ("x-other", "b")], "a"),
        ([(POLICY_METADATA, b"a")], "c"),
        ([(POLICY_METADATA, b"\xff\xfe"), (POLICY_METADATA, "b")], "b"),
        ([("x-loopguard-policies", "a")], "c"),
        ((), "c"),
    ],
)
def test_metadata_names_the_policies_that_apply(
    pin: str | Sequence[tuple[str, str | bytes]], applied: str
) -> None:
    """Each named policy applies once, whatever its selector says, and no other does.

    Without names, selectors decide.
    """
    store = RecordingStore()
    service = make_service(*LOADED, store=store)

    ask(service, pin=pin)

    assert counted(service) == dict.fromkeys(applied, 1)
    assert [key.split(":")[1] for key in store.keys] == list(applied)
    assert errors(service) == {}


def test_named_policies_keep_bypass_and_missing_descriptor() -> None:
    service = make_service(
        policy("skip", NOWHERE, limit_keys=["header:x-a"], missing_descriptor="skip"),
        {
            "id": "bypass",
            "spec": {**policy("", NOWHERE)["spec"], "bypass": [{"header": "x-health"}]},
        },
    )

    ask(service, pin="skip,bypass", x_health="1")

    assert counted(service) == {}
    assert sample(service, "uncounted_total", policy="skip", reason="missing_descriptor") == 1
    assert sample(service, "uncounted_total", policy="bypass", reason="bypass") == 1


def test_body_is_awaited_only_if_named_policy_needs_it() -> None:
    service = make_service(
        policy("with", NOWHERE), policy("without", NOWHERE, body="ignore"), policy("c", ANY)
    )

    answers = [
        ask(service, body(b"x"), pin=pin).WhichOneof("response") for pin in ("with", "without", "-")
    ]

    assert answers == ["request_body", "request_headers", "request_body"]


@pytest.mark.parametrize(
    ("pin", "applied", "unknown"),
    [
        ("a,nope", "a", ["nope"]),
        ("x,a,y,x", "a", ["x", "y"]),
        ("off,a", "a", ["off"]),
        ("A,a", "a", ["A"]),
        ("a;b", "", ["a;b"]),
        ("nope,nor this", "", ["nope", "nor this"]),
    ],
)
def test_unknown_policy_ids_are_skipped_and_counted(
    pin: str, applied: str, unknown: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """So are disabled policies.

    They are counted once per request and logged; no selector takes their place.
    """
    service = make_service(*LOADED, policy("off", ANY, enabled=False))

    for _ in range(2):
        ask(service, pin=pin)

    assert counted(service) == dict.fromkeys(applied, 2)
    assert errors(service) == {"unknown_policy": 2}
    assert sample(service, "unmatched_total") == (0 if applied else 2)
    assert [line["policies"] for line in lines(caplog)] == [unknown] * 2


def test_log_lines_about_unknown_ids_are_limited(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service, clock = make_service(), [1.0]
    monkeypatch.setattr("extproc.operator.reporting.perf_counter", lambda: clock[0])

    for _ in range(100):
        ask(service, pin="nope")
    clock[0] += 1
    ask(service, pin="nope")

    assert errors(service) == {"unknown_policy": 101}
    assert len(lines(caplog)) == 21
    assert lines(caplog)[-1]["suppressed"] == 80


@pytest.mark.parametrize(
    ("route", "before", "after"),
    [
        ({"pin": "a,b"}, {"a": 1}, {"a": 1, "b": 1}),
        (
            {"carry": policy("carried", {})},
            {"old": 1, "carried": 1},
            {"old": 1, "carried": 2, "new": 1},
        ),
    ],
    ids=["named", "carried"],
)
def test_stream_keeps_policies_it_began_with(
    route: dict[str, Any], before: dict[str, int], after: dict[str, int]
) -> None:
    service = make_service(policy("a", NOWHERE), policy("old", ANY))

    ask(
        service,
        body(b"x"),
        meanwhile=make_engine(policy("b", NOWHERE), policy("new", ANY)),
        **route,
    )
    first = counted(service)
    ask(service, **route)

    assert (first, counted(service)) == (before, after)


CARRIED = policy("carried", {})
OTHER = policy("other", {})
LATER = "2999-01-01T00:00:00Z"
LONG = json.dumps(CARRIED | {"description": "\u20ac"}, ensure_ascii=False)
WITHOUT_SELECTOR = {"id": "carried", "spec": {"loop_detection": CARRIED["spec"]["loop_detection"]}}
SELECTED: list[tuple[dict[str, object], dict[str, Any], bool]] = [
    ({}, {}, True),
    ({"pathExact": None, "pathPrefix": None, "routes": None}, {}, True),
    ({"methods": ["PUT"]}, {"method": "PUT"}, True),
    ({"methods": ["PUT"]}, {"method": "POST"}, False),
    ({"hosts": ["host"]}, {"path": "/deep/down"}, True),
    ({"hosts": ["elsewhere"]}, {}, False),
    ({"hosts": ["host"], "methods": ["PUT"]}, {}, False),
    ({"pathExact": "/x"}, {"path": "/x?y"}, True),
    ({"pathExact": "/x"}, {"path": "/x/y"}, False),
    ({"pathPrefix": "/x"}, {"path": "/x/y"}, True),
    ({"pathPrefix": "/x"}, {"path": "/y"}, False),
    ({"routes": ["r"]}, {"attributes": {"xds.route_name": "r"}}, True),
    ({"routes": ["r"]}, {"attributes": {"xds.route_name": "s"}}, False),
    ({"routes": ["r"]}, {}, False),
]
ROUTES: list[tuple[dict[str, Any], list[str], dict[str, float]]] = [
    ({"carry": CARRIED}, ["c", "carried"], {}),
    ({"carry": [CARRIED]}, ["c", "carried"], {}),
    ({"carry": [CARRIED, OTHER]}, ["c", "carried", "other"], {}),
    ({"carry": bundle(CARRIED)}, ["c", "carried"], {}),
    ({"carry": bundle(CARRIED, OTHER, expires_at=LATER)}, ["c", "carried", "other"], {}),
    ({"carry": policy("off", {}, enabled=False)}, ["c"], {}),
    ({"carry": []}, ["c"], {}),
    ({"carry": bundle()}, ["c"], {}),
    (
        {"carry": LONG + " " * (MAX_POLICY_JSON - len(LONG))},
        ["c", "carried"],
        {},
    ),  # characters count, not bytes
    ({"carry": WITHOUT_SELECTOR}, ["c", "carried"], {}),
    *(
        (
            {"carry": policy("carried", selector), **request},
            ["c", *(["carried"] if applies else [])],
            {},
        )
        for selector, request, applies in SELECTED
    ),
    # names are those of loaded policies; a carried policy replaces the one that it names
    ({"pin": "a,b", "carry": [policy("b", {"methods": ["PUT"]}), policy("d", {})]}, ["a", "d"], {}),
    ({"pin": "d", "carry": policy("d", {})}, ["d"], {"unknown_policy": 1}),
    ({"pin": "a", "carry": "bad"}, ["a"], {"invalid": 1}),
]


@pytest.mark.parametrize(("route", "applied", "problems"), ROUTES)
def test_route_carries_policies(
    route: dict[str, Any], applied: list[str], problems: dict[str, float]
) -> None:
    """Without a path or route in its selector, a carried policy applies to the whole route."""
    service = make_service(*LOADED)

    ask(service, **route)

    assert counted(service) == dict.fromkeys(applied, 1)
    assert errors(service) == problems


def test_carried_policy_replaces_the_loaded_one() -> None:
    """On the route only the carried version counts, under the loaded one's key."""
    store = RecordingStore()
    service = make_service(
        policy("p", ANY), policy("q", ANY, threshold_identical_requests=100), store=store
    )
    carried = policy("p", {}, threshold_identical_requests=3, reject_status=418)

    answer = [ask(service, carry=carried), ask(service), ask(service, carry=carried)][-1]

    assert counted(service) == {"p": 3, "q": 3}
    assert len(set(store.keys)) == 2
    assert [key.split(":")[1] for key in store.keys].count("p") == 3
    assert answer.immediate_response.status.code == 418


@pytest.mark.parametrize(
    "route",
    [{}, {"pin": "a,b"}, {"pin": "b,a"}, {"carry": policy("a", {})}, {"carry": policy("b", {})}],
    ids=["by selectors", "named", "named backwards", "the first carried", "the second carried"],
)
def test_first_policy_of_bundle_leads_among_equals(route: dict[str, Any]) -> None:
    service = make_service(policy("a", ANY), policy("b", ANY))

    assert [lead_of(ask(service, **route)) for _ in range(3)] == ["", "", "a"]


@pytest.mark.parametrize(
    ("carried", "applied"),
    [
        (policy("p", {"methods": ["PUT"]}), {"q": 4}),
        (policy("p", {}, enabled=False), {"q": 4}),
        (policy("p", {}, mode="shadow"), {"p": 4, "q": 4}),
    ],
    ids=["of other requests", "off", "in shadow"],
)
def test_carried_policy_may_disable_the_loaded_one(
    carried: dict[str, Any], applied: dict[str, int]
) -> None:
    service = make_service(policy("p", ANY), policy("q", ANY, threshold_identical_requests=100))

    leads = [lead_of(ask(service, carry=carried)) for _ in range(4)]

    assert leads == [""] * 4
    assert counted(service) == applied


@pytest.mark.parametrize(
    ("route", "settings"),
    [
        ({"pin": "p"}, {}),
        ({"carry": policy("p", {}, mode="shadow")}, {}),
        ({"carry": bundle(policy("p", {}), global_shadow={"enabled": True})}, {}),
        (
            {
                "carry": bundle(
                    policy("p", {}), global_shadow={"enabled": True, "expires_at": LATER}
                )
            },
            {},
        ),
        ({"carry": policy("p", {})}, {"shadow": True}),
    ],
)
def test_named_or_carried_policy_may_be_in_shadow(
    route: dict[str, Any], settings: dict[str, Any]
) -> None:
    store = RecordingStore()
    service = make_service(policy("p", NOWHERE, mode="shadow"), store=store, **settings)

    answers = [ask(service, **route) for _ in range(3)]

    assert [lead_of(answer) for answer in answers] == [""] * 3
    found = metadata_of(answers[2])
    assert (found["shadow_action"], found["shadow_policy"], found["shadow_count"]) == (
        "reject",
        "p",
        3,
    )
    assert [key[:14] for key in store.keys] == ["shadow:loop:p:"] * 3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[datetime]:
    moments = [datetime(2030, 1, 1, tzinfo=UTC)]
    monkeypatch.setattr(
        "extproc.ext_proc.service.datetime", SimpleNamespace(now=lambda _: moments[-1])
    )
    return moments


def test_carried_times_are_checked_as_in_files(clock: list[datetime]) -> None:
    """An expired bundle is refused, one that expires later stays in force; a global shadow ends."""
    known, new, watching = make_service(), make_service(), make_service()
    document = bundle(CARRIED, expires_at="2030-06-01T00:00:00Z")
    shadowed = bundle(
        CARRIED, global_shadow={"enabled": True, "expires_at": "2030-06-01T00:00:00Z"}
    )
    ask(known, carry=document)
    ask(watching, carry=shadowed)

    clock.append(datetime(2031, 1, 1, tzinfo=UTC))
    for service in (known, new):
        ask(service, carry=document)
    answers = [ask(watching, carry=shadowed) for _ in range(3)]

    assert counted(known) == {"carried": 2}
    assert (counted(new), errors(new)) == ({}, {"invalid": 1})
    assert lead_of(answers[2]) == "carried"


UNENFORCED = {
    "a rule": {"rules": [RULE | {"limit_keys": ["ip:country"]}]},
    "a fallback": {"fallback_limit": RULE | {"match": {"ua:bot": "true"}}},
    "a descriptor": {"limit_keys": ["ip:country"]},
}


@pytest.mark.parametrize("part", UNENFORCED.values(), ids=UNENFORCED)
def test_unenforced_parts_are_refused_unless_allowed(
    part: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    strict, tolerant = make_service(), make_service(allow_unenforced=True)
    document = {"id": "p", "spec": {**policy("p", {})["spec"], **part}}

    for service in (strict, tolerant):
        ask(service, carry=document)

    assert (counted(strict), errors(strict)) == ({}, {"unenforced": 1})
    assert (counted(tolerant), errors(tolerant)) == ({"p": 1}, {})
    (line,) = lines(caplog)
    assert line["reason"] == "unenforced"
    assert "cannot be derived" in line["first"][0]


_PADDED = json.dumps(CARRIED | {"description": ""})

BAD: dict[str, tuple[object, str, list[str]]] = {
    "nothing": (None, "invalid", ["is not JSON"]),
    "a boolean": (True, "invalid", ["is not JSON"]),
    "a number": (3.0, "invalid", ["is not JSON"]),
    "an object": ({"id": "p"}, "invalid", ["is not JSON"]),
    "a list": ([1], "invalid", ["is not JSON"]),
    "empty": ("", "invalid", ["is not JSON"]),
    "what a map becomes": ("CelMap value", "invalid", ["is not JSON"]),
    "cut off": (json.dumps(CARRIED)[:-1], "invalid", ["is not JSON"]),
    "no policy": ("3", "invalid", ["must be a bundle"]),
    "null": ("null", "invalid", ["is null"]),
    "too deep": ("[" * 50_000, "invalid", ["nested too deeply"]),
    "a long number": ("9" * 5_000, "invalid", ["thousands of digits"]),
    "a lone surrogate": (r'{"id": "\ud800", "spec": {}}', "invalid", ["/id"]),
    "no loop_detection key": (
        json.dumps({"id": "p", "spec": {"selector": {}, "loop_detecton": {}}}),
        "invalid",
        ["/spec/loop_detecton"],
    ),
    "several errors": (
        json.dumps(
            [
                policy("p", {"pathExact": "x"}, action="refuse"),
                policy("p", {}, threshold_identical_requests=1),
            ]
        ),
        "invalid",
        [
            "/0/spec/selector/pathExact",
            "/0/spec/loop_detection/action",
            "/1/spec/loop_detection/thr",
            "duplicate id 'p'",
        ],
    ),
    "a selector that is none": (
        json.dumps({"id": "p", "spec": {"selector": []}}),
        "invalid",
        ["/spec/selector"],
    ),
    "an empty list of methods": (
        json.dumps(policy("p", {"methods": []})),
        "invalid",
        ["/spec/selector/methods"],
    ),
    "expired": (
        json.dumps(bundle(CARRIED, expires_at=EXPIRED)),
        "invalid",
        ["/expires_at: the bundle expired"],
    ),
    "one bad beside a good": (json.dumps([CARRIED, {"id": "q"}]), "invalid", ["/1"]),
    "too large": (
        _PADDED + " " * (MAX_POLICY_JSON + 1 - len(_PADDED)),
        "too_large",
        ["65537 characters; at most 65536"],
    ),
    "unenforced": (
        json.dumps(bundle(CARRIED, kill_switches=[{"scope_key": "ua:bot", "scope_value": "true"}])),
        "unenforced",
        ["/kill_switches/0"],
    ),
}


@pytest.mark.parametrize(("value", "reason", "problems"), BAD.values(), ids=BAD)
def test_bad_carried_policy_is_counted_and_logged_once(
    value: Any,  # noqa: ANN401  # whatever a Struct holds
    reason: str,
    problems: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = make_service(policy("loaded", ANY))
    head = headers(end=True)
    head.attributes[ATTRIBUTES].update({POLICY_ATTRIBUTE: value})

    answers = [ask(service, head=head) for _ in range(3)]

    assert [lead_of(answer) for answer in answers] == ["", "", "loaded"]
    assert counted(service) == {"loaded": 3}
    assert errors(service) == {reason: 3}
    assert sample(service, "fail_open_total", reason="internal_error") == 0
    (line,) = lines(caplog)
    assert line["reason"] == reason
    assert line["problems"] == len(problems)
    for problem, part in zip(line["first"], problems, strict=True):
        assert problem.startswith("route metadata") or reason == "too_large"
        assert part in problem


MUCH_WRONG = {
    "many errors": "[" + ",".join(["{}"] * 2_000) + "]",
    "a long key": json.dumps({"id": "p", "spec": {"x" * 60_000: 1}}),
    "many parts": json.dumps(
        bundle(CARRIED, kill_switches=[{"scope_key": "ua:bot", "scope_value": "x"}] * 1_000)
    ),
    "much too large": " " * 10_000_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("text", MUCH_WRONG.values(), ids=MUCH_WRONG)
def test_errors_of_carried_policy_are_kept_shortened(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    made, now = HandedOver(shadow=False, allow_unenforced=False), datetime.now(UTC)
    kept = made.compile(text, now)

    assert kept is made.recall(text, now) is made.recall(text[: MAX_POLICY_JSON + 1], now)
    assert isinstance(kept, RefusedPolicy)
    assert len(repr(kept)) < 10_000
    assert len(kept.problems) == min(kept.found, 20)
    ask(make_service(), carry=text)
    assert len(json.dumps(lines(caplog))) < 10_000


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    contents: list[str] = []

    # Passed on as they are
    def parse(files: Mapping[str, bytes], *rest: Any, **more: Any) -> Any:  # noqa: ANN401
        contents.extend(data.decode() for data in files.values())
        return loader.parse(files, *rest, **more)

    monkeypatch.setattr("extproc.engine.handover.parse", parse)
    return contents


@pytest.mark.parametrize("text", [json.dumps(CARRIED), "bad"])
def test_carried_content_is_compiled_once(
    text: str, parsed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    service = make_service(policy("old", ANY))

    for _ in range(5):
        ask(service, carry=text)
    service.engine = make_engine(policy("new", ANY))
    for _ in range(5):
        ask(service, carry=text, path="/elsewhere")

    assert parsed == [text]
    assert counted(service) == {"old": 5, "new": 5} | ({} if text == "bad" else {"carried": 10})
    assert len(lines(caplog)) == (text == "bad")


def test_equal_policies_in_other_content_count_together(parsed: list[str]) -> None:
    service = make_service()

    answers = [
        ask(service, carry=text)
        for text in (json.dumps(CARRIED), json.dumps(CARRIED, indent=1), json.dumps([CARRIED]))
    ]

    assert len(parsed) == 3
    assert [lead_of(answer) for answer in [*answers, ask(service)]] == ["", "", "carried", ""]


@pytest.mark.slow
def test_least_recently_used_content_is_dropped(parsed: list[str]) -> None:
    service = make_service()
    contents = [json.dumps(CARRIED) + " " * number + "bad" * (number % 2) for number in range(257)]

    for text in contents[:256]:
        ask(service, carry=text)
    ask(service, carry=contents[0])
    ask(service, carry=contents[256])
    first = parsed.copy()
    ask(service, carry=contents[0])
    kept = parsed.copy()
    ask(service, carry=contents[1])

    assert first == kept == contents
    assert parsed[257:] == [contents[1]]


def _with_claim(message: ProcessingRequest, **claims: str) -> ProcessingRequest:
    message.metadata_context.filter_metadata["envoy.filters.http.jwt_authn"].update(
        {"payload": claims}
    )
    return message


READ: dict[str, tuple[dict[str, Any], Callable[[str], list[ProcessingRequest]]]] = {
    "a claim": (
        policy("p", {}, limit_keys=["jwt:org"]),
        lambda value: [_with_claim(headers(end=True), org=value)],
    ),
    "the address": (
        policy("p", {}, limit_keys=["ip:address"]),
        lambda value: [headers(end=True, attributes={"source.address": f"192.0.2.{ord(value)}:1"})],
    ),
    "a header": (
        policy("p", {}, limit_keys=["header:x-a"]),
        lambda value: [headers(end=True, x_a=value)],
    ),
    "the body": (
        policy("p", {}, limit_keys=["body:/user"], body="ignore"),
        lambda value: [headers(), body(b'{"user": "%b"}' % value.encode())],
    ),
    "a bundle's tail": (
        policy("p", {}, similarity="tail"),
        lambda value: [
            headers(),
            body(json.dumps({"messages": [{"role": "user", "content": value}]}).encode()),
        ],
    ),
}


@pytest.mark.parametrize(
    "loaded", [(), (policy("loaded", ANY, body="ignore"),)], ids=["alone", "beside"]
)
@pytest.mark.parametrize(("carried", "request_"), READ.values(), ids=READ)
def test_fields_only_a_carried_policy_reads_are_read(
    carried: dict[str, Any],
    request_: Callable[[str], list[ProcessingRequest]],
    loaded: Sequence[dict[str, Any]],
) -> None:
    service = make_service(*loaded)
    totals = []
    for value in "abcaa":
        head, *more = request_(value)
        ask(service, *more, head=head, carry=carried)
        totals.append(
            sample(service, "loops_detected_total", policy="p", mode="enforce", action="reject")
        )

    assert totals == [0, 0, 0, 0, 1]
    assert sample(service, "requests_total", policy="p", mode="enforce", action="allow") == 4


def test_loaded_policies_read_the_same_beside_carried_ones() -> None:
    store = RecordingStore()
    service = make_service(policy("loaded", ANY, limit_keys=["jwt:org"]), store=store)

    for org in "ab":
        head = _with_claim(headers(end=True), org=org, user="u")
        ask(service, head=head, carry=policy("p", {}, limit_keys=["jwt:user"]))

    assert [key.split(":")[1] for key in store.keys] == ["loaded", "p"] * 2
    assert [len(set(store.keys[start::2])) for start in (0, 1)] == [2, 1]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
GOOD = bundle(
    policy(
        "p",
        {"pathPrefix": "/", "methods": ["POST"], "routes": ["r"]},
        limit_keys=["jwt:a", "body:/b"],
        similarity="tail",
    ),
    {
        "id": "q",
        "spec": {
            "loop_detection": [policy("", {})["spec"]["loop_detection"]],
            "bypass": [{"header": "x"}],
        },
    },
    expires_at=LATER,
    global_shadow={"enabled": True, "expires_at": LATER},
)


@st.composite
def mutilated(draw: st.DrawFn) -> str:
    document: Any = json.loads(json.dumps(GOOD))
    place = document
    while True:
        key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if (
            not place[key]
            or not isinstance(place[key], dict | list)
            or draw(st.integers(0, 3)) == 0
        ):
            break
        place = place[key]
    if draw(st.booleans()):
        place[key] = draw(
            JSON
            | st.sampled_from(
                ["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "\ud800", 10**400]
            )
        )
    else:
        del place[key]
    return json.dumps(document)


@pytest.mark.slow
@given(text=st.text(max_size=40) | JSON.map(json.dumps) | mutilated())
@hypothesis_settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(200)
)
def test_no_carried_content_breaks_a_request(text: str) -> None:
    service = make_service(policy("loaded", ANY, body="ignore"))

    answers = [ask(service, body(b"{}"), carry=text) for _ in range(3)]

    assert lead_of(answers[2])
    assert counted(service)["loaded"] == 3
    assert sum(errors(service).values()) in (0, 3)
    assert all(
        sample(service, "fail_open_total", reason=reason) == 0
        for reason in ("internal_error", "shadow_error")
    )
