"""One ext_proc stream at a time, message by message, without a socket."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from extproc.errors import ProtocolError
from extproc.ext_proc.service import Service
from extproc.ext_proc.stream import BUFFER_LIMIT_METADATA, Stream
from extproc.ext_proc.throttle import Holds
from extproc.ext_proc.transaction import Reply
from extproc.ext_proc.upload import SMALLEST_LIMIT
from extproc.ext_proc.wire import LARGE, MAX_HEADERS, parse_message, read_request
from extproc.pb.base_pb2 import HeaderMap, HeaderValue
from extproc.pb.external_processor_pb2 import CommonResponse, HttpHeaders, HttpTrailers, ProcessingRequest, ProcessingResponse
from extproc.request.fingerprint import hash_tenant, write_crc32
from tests.support.documents import policy
from tests.support.engine import ANY, make_engine
from tests.support.examples import examples
from tests.support.harness import PATIENCE
from tests.support.messages import MODES, body, headers
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


def test_a_request_that_no_policy_matches_is_finished_at_once() -> None:
    """The stream ends in the headers phase, and the request counts as unmatched."""
    service = make_service(policy("a", {"pathExact": "/guarded"}))

    (reply,) = exchange(service, headers("/other"))

    assert reply.done
    assert decoded(reply).WhichOneof("response") == "request_headers"
    assert sample(service, "unmatched_total") == 1


def test_a_request_without_a_body_is_decided_in_the_headers_phase() -> None:
    """End of stream in the headers means that nothing more will come."""
    service = make_service(policy("a", ANY))

    answer = repeat(service, headers(method="GET", end=True), times=3)

    assert answer.immediate_response.status.code == 429


def test_a_body_is_waited_for_and_decided_once_complete() -> None:
    """Headers are answered, the decision comes with the body, and different bodies are different requests."""
    service = make_service(policy("a", ANY))

    first = exchange(service, headers(), body(b"one"))
    repeat(service, headers(), body(b"two"), times=2)
    refused = repeat(service, headers(), body(b"two"), times=1)

    assert [reply.done for reply in first] == [False, True]
    assert [decoded(reply).WhichOneof("response") for reply in first] == ["request_headers", "request_body"]
    assert refused.immediate_response.status.code == 429


def test_large_messages_are_read_like_small_ones() -> None:
    """A body is its bytes, whatever chunks it comes in and however large its headers are; a changed byte is another body."""
    service = make_service(policy("a", ANY), record=True)
    data = bytes(range(256)) * 40
    plain, large = headers(mode="STREAMED"), headers(mode="STREAMED", x_a="v" * LARGE)
    chunks = [
        [body(data)],
        [body(data[:5000], end=False), body(data[5000:])],
        [body(data[:7], end=False), body(data[7:9000], end=False), body(data[9000:])],
        [body(data[:-1] + b"?")],
    ]

    found = [
        metadata_of(decoded(exchange(service, first, *parts)[-1]))["fingerprint"]
        for first in (plain, large)
        for parts in chunks
    ]

    assert found[:3] + found[4:7] == [found[0]] * 6
    assert {found[3], found[7]} == {found[3]} != {found[0]}


def test_a_refusal_carries_everything_a_client_needs() -> None:
    """Status, headers, details, gRPC status, body and metadata are as documented."""
    service = make_service(policy("p", ANY, reject_status=422, cooldown_seconds=90, limit_keys=["header:x-a"]))

    answer = repeat(service, headers("/v1/messages?beta=true", method="GET", end=True, x_a="1"), times=3)

    immediate = answer.immediate_response
    fingerprint = headers_of(answer)["x-loopguard-fingerprint"]
    assert immediate.status.code == 422
    assert immediate.grpc_status.status == 8
    assert immediate.details == "loop_detected"
    assert headers_of(answer) == {
        "content-type": "application/json",
        "Retry-After": "90",
        "x-should-retry": "false",
        "X-Fairvisor-Reason": "loop_detected",
        "x-loopguard-policy": "p",
        "x-loopguard-fingerprint": fingerprint,
        "x-loopguard-count": "3",
    }
    page = json.loads(immediate.body)
    message = page["error"]["message"]
    assert page == {
        "type": "error",
        "error": {"message": message, "type": "loop_detected", "param": None, "code": "recursive_loop_detected"},
        "detail": {"error": "recursive_loop_detected", "message": message, "cooldown_seconds": 90},
    }
    assert metadata_of(answer) == {
        "action": "reject",
        "reason": "loop_detected",
        "policy": "p",
        "fingerprint": fingerprint,
        "count": 3,
        "tenant": hash_tenant("x-a=1"),
    }


@pytest.mark.parametrize("content_type", ["application/grpc", "application/json"])
def test_a_method_that_is_not_utf_8_is_refused_as_any_other(content_type: str) -> None:
    """Its bytes stand in the refusal as escapes: an error in there would let the request through."""
    service = make_service(policy("p", ANY))

    answer = repeat(service, headers(method="P\udcffST", content_type=content_type, end=True), times=3)

    assert answer.immediate_response.status.code == 429
    page = answer.immediate_response.body.decode()
    message = page if content_type == "application/grpc" else json.loads(page)["error"]["message"]
    assert "this identical request ('P?ST' /) has been sent 3 times" in message
    assert sample(service, "fail_open_total", reason="internal_error") == 0


def test_a_warning_goes_upstream_and_into_the_metadata() -> None:
    """The warn action sets the header on the request and `warning` in the metadata, and lets the request through."""
    answer = repeat(make_service(policy("p", ANY, action="warn")), headers(), body(b"x"), times=3)

    (option,) = answer.request_body.response.header_mutation.set_headers
    assert (option.header.key, option.header.raw_value) == ("X-Fairvisor-Warning", b"loop_warn")
    assert metadata_of(answer)["warning"] == "loop_warn"


def test_a_throttled_request_makes_envoy_wait_first() -> None:
    """One override of the message timeout, longer than the hold; then the answer that lets the request through."""
    service = make_service(policy("p", ANY, action="throttle"), policy("w", ANY, action="warn"))
    for _ in range(3):
        reply = exchange(service, headers(end=True))[-1]

    override = ProcessingResponse.FromString(reply.first)
    assert reply.hold_ms == 300
    assert override.override_message_timeout.ToMilliseconds() > 300
    assert override.WhichOneof("response") is None
    assert decoded(reply).request_headers.response.header_mutation.set_headers
    assert metadata_of(decoded(reply))["action"] == "throttle"


def test_holds_are_bounded_in_all_and_per_tenant() -> None:
    """Requests of a tenant past a tenth of --max-throttled are rejected, as are all past its total; closing frees a place."""
    service = make_service(policy("p", ANY, action="throttle", limit_keys=["header:x-a"]), max_throttled=10)
    tenants = [str(number) for number in range(11)]
    for tenant in tenants:
        repeat(service, headers(end=True, x_a=tenant), times=2)
    streams = {tenant: Stream(service) for tenant in tenants}
    second = Stream(service)

    holds = {tenant: receive(stream, headers(end=True, x_a=tenant)).hold_ms for tenant, stream in streams.items()}
    same_tenant = decoded(receive(second, headers(end=True, x_a="0")))
    streams.pop("0").close()
    third = Stream(service)
    freed = receive(third, headers(end=True, x_a="0"))

    assert holds == {**dict.fromkeys(tenants, 300), "10": 0}
    assert same_tenant.immediate_response.status.code == 429
    assert freed.hold_ms > 0
    assert sample(service, "throttled_in_flight") == 10
    for stream in (*streams.values(), second, third):
        stream.close()
    assert sample(service, "throttled_in_flight") == sample(service, "streams_in_flight") == 0
    assert sample(service, "loops_detected_total", policy="p", mode="enforce", action="reject") == 2


def answered(status: str) -> ProcessingRequest:
    """What Envoy shows of a response, be it its own."""
    listed = [HeaderValue(key="server", raw_value=b"envoy"), HeaderValue(key=":status", raw_value=status.encode())]
    return ProcessingRequest(response_headers=HttpHeaders(headers=HeaderMap(headers=listed)))


def test_a_hold_ends_early_when_the_server_stops() -> None:
    """Released holds end at once, and so does every later one."""

    async def scenario() -> None:
        holds = Holds(10)
        waiting = asyncio.create_task(holds.wait(3_600_000))
        await asyncio.sleep(0)
        holds.release()
        await waiting
        await holds.wait(3_600_000)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (headers(content_type="application/grpc", te="trailers"), "grpc"),
        (headers(content_type="application/grpc+proto", te="trailers"), "grpc"),
        (headers(content_type="Application/gRPC", te="Trailers"), "grpc"),
        (headers(upgrade="websocket", method="GET"), "upgrade"),
        (headers("", method="CONNECT"), "connect"),
        (headers(mode="NONE"), "no_body_phase"),
        (headers(mode="GRPC"), "body_mode"),
    ],
)
def test_an_unknowable_body_finishes_the_stream_uncounted(message: ProcessingRequest, reason: str) -> None:
    """However often it comes, such a request passes at once and is counted as uncounted."""
    service = make_service(policy("p", {"routes": ["r"], "pathPrefix": "/"}), policy("q", {"routes": ["r"]}))
    message.attributes["envoy.filters.http.ext_proc"].update({"xds.route_name": "r"})

    replies = [exchange(service, message)[-1] for _ in range(4)]

    assert all(reply.done and decoded(reply).WhichOneof("response") == "request_headers" for reply in replies)
    assert sample(service, "uncounted_total", policy="q", reason=reason) == 4


def test_grpc_web_bodies_are_known() -> None:
    """application/grpc-web is an ordinary body."""
    service = make_service(policy("p", ANY))

    assert [reply.done for reply in exchange(service, headers(content_type="application/grpc-web+proto"), body(b"x"))] == [
        False,
        True,
    ]


TRAILERS = ProcessingRequest(request_trailers=HttpTrailers())
_DUPLEX: dict[str, Any] = {"mode": "FULL_DUPLEX_STREAMED"}
_RARE: dict[str, Any] = {"body": "ignore", "threshold_identical_requests": 1_000}


def handed_back(replies: Sequence[Reply], kind: str = "request_body") -> list[tuple[bytes, bool]]:
    """What is handed back of a body, with the end of the stream."""
    sent = [data for reply in replies if reply.answer is not None for data in (reply.join_answer(), *reply.rest)]
    answers = [answer for data in sent if (answer := ProcessingResponse.FromString(data)).WhichOneof("response") == kind]
    parts = [getattr(answer, kind).response.body_mutation.streamed_response for answer in answers]
    return [(part.body, part.end_of_stream) for part in parts]


@pytest.mark.parametrize(
    ("last", "parts"),
    [
        ([body(b"c")], [(b"a", False), (b"b" * 70_000, False), (b"c", True)]),
        ([body(b"")], [(b"a", False), (b"b" * 70_000, False), (b"", True)]),
        ([TRAILERS], [(b"a", False), (b"b" * 70_000, False)]),
    ],
    ids=["body", "nothing", "trailers"],
)
@pytest.mark.parametrize(
    "service",
    [
        pytest.param(lambda: make_service(policy("s", ANY, mode="shadow"), policy("p", ANY, **_RARE)), id="watched"),
        pytest.param(lambda: make_service(policy("p", {"pathExact": "/other"})), id="unmatched"),
        pytest.param(lambda: make_service(policy("p", ANY, action="warn", body="ignore")), id="warned"),
        pytest.param(lambda: make_service(policy("p", ANY, **_RARE), store=FailingStore()), id="no store"),
        pytest.param(lambda: make_service(policy("p", ANY, **_RARE), store=FailingStore(later=True)), id="no store, later"),
    ],
)
def test_in_full_duplex_a_body_is_handed_back(
    service: Callable[[], Service], last: list[ProcessingRequest], parts: list[tuple[bytes, bool]]
) -> None:
    """Envoy keeps nothing of it, so the stream of a request that is not held lasts as long as its body does."""
    made = service()
    for _ in range(3):
        replies = exchange(made, headers(**_DUPLEX), body(b"a", end=False), body(b"b" * 70_000, end=False), *last)

    assert [reply.done for reply in replies] == [False, False, False, True]
    assert decoded(replies[0]).WhichOneof("response") == "request_headers"
    assert handed_back(replies) == parts
    assert made.kept.bytes == made.streams == made.given_up == 0


def test_shadow_policies_count_what_full_duplex_hands_back() -> None:
    """They do not hold it, and count it once it has passed; a request that ends with its headers is counted as ever."""
    service = make_service(policy("s", ANY, mode="shadow"), policy("p", ANY, **_RARE))

    for _ in range(3):
        exchange(service, headers(**_DUPLEX), body(b"a", end=False), body(b"b", end=False), TRAILERS)
    repeat(service, headers(**_DUPLEX, end=True), times=3)

    assert sample(service, "loops_detected_total", policy="s", mode="shadow", action="reject") == 2
    assert sample(service, "requests_total", policy="p", mode="enforce", action="allow") == 6


def test_an_error_forgets_a_refusal_and_no_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong once a request is refused lets it through, with its body."""
    service = make_service(policy("p", ANY, body="ignore"))
    repeat(service, headers(**_DUPLEX), body(b"x"), times=2)
    monkeypatch.setattr(service.metrics, "decision_seconds", None)

    replies = exchange(service, headers(**_DUPLEX), body(b"x"))

    assert [reply.done for reply in replies] == [False, True]
    assert handed_back(replies) == [(b"x", True)]
    assert sample(service, "fail_open_total", reason="internal_error") == 1


def test_full_duplex_takes_no_place_and_survives_an_overload() -> None:
    """Uploads that are only handed back do not turn the guard off for other requests, and an overload loses none of them."""
    service = make_service(policy("p", {"pathExact": "/p"}), max_streams=1)
    open_ones: list[Stream] = []
    for _ in range(3):
        open_ones.append(Stream(service))
        receive(open_ones[-1], headers(**_DUPLEX))
    refused = repeat(service, headers("/p"), body(b"x"), times=3)
    before = sample(service, "overload_total")
    busy = Stream(service)  # decides something still

    overloaded = exchange(service, headers(**_DUPLEX), body(b"x", end=False), TRAILERS)

    assert before == 0
    assert refused.immediate_response.status.code == 429
    assert sample(service, "overload_total") == 1
    assert handed_back(overloaded) == [(b"x", False)]
    assert [reply.done for reply in overloaded] == [False, False, True]
    for stream in (*open_ones, busy):
        stream.close()
    assert service.streams == service.given_up == 0


def response_part(kind: str, data: bytes = b"", *, end: bool) -> ProcessingRequest:
    """A message about a response."""
    message = ProcessingRequest()
    part = getattr(message, kind)
    part.end_of_stream = end
    if data:
        part.body = data
    return message


@pytest.mark.parametrize("mode", ["NONE", "BUFFERED", "FULL_DUPLEX_STREAMED"])
def test_in_full_duplex_an_answer_is_handed_back(mode: str) -> None:
    """The stream lasts until the response has ended; Envoy would lose what is under way."""
    service = make_service(policy("p", ANY))
    first = headers(mode=mode)
    first.protocol_config.response_body_mode = MODES["FULL_DUPLEX_STREAMED"]  # type: ignore[assignment]  # open
    request = [body(b"q")] if mode != "NONE" else []
    response = [response_part("response_headers", end=False), response_part("response_body", b"a", end=False)]

    replies = exchange(service, first, *request, *response, response_part("response_body", b"b", end=True))

    assert [reply.done for reply in replies] == [False] * (len(replies) - 1) + [True]
    assert handed_back(replies, "response_body") == [(b"a", False), (b"b", True)]
    assert handed_back(replies) == ([(b"q", True)] if mode == "FULL_DUPLEX_STREAMED" else [(b"", False)] * len(request))


def test_a_stream_that_carries_a_body_says_so() -> None:
    """The transport must then end it with an error: half a request is worse than none."""
    service = make_service(policy("p", ANY))
    first = headers(**_DUPLEX)
    first.protocol_config.response_body_mode = MODES["FULL_DUPLEX_STREAMED"]  # type: ignore[assignment]  # open
    stream, plain = Stream(service), Stream(service)
    receive(plain, headers())

    carries = [plain.carries, stream.carries]
    for message in (first, body(b"x", end=True), response_part("response_headers", end=False), body(b"", end=True)):
        receive(stream, message)
        carries.append(stream.carries)

    assert carries == [False, False, True, False, True, True]
    stream.close()
    plain.close()


_PARTIAL: dict[str, Any] = {"mode": "BUFFERED_PARTIAL"}
_REPLACE = CommonResponse.CONTINUE_AND_REPLACE


@pytest.mark.parametrize(
    ("message", "done", "status"),
    [
        (headers("/unmatched", **_PARTIAL), True, _REPLACE),
        (headers("/bodiless", **_PARTIAL), True, _REPLACE),
        (headers("/warned", **_PARTIAL), True, _REPLACE),
        (headers("/counted", **_PARTIAL, upgrade="websocket"), True, _REPLACE),
        (headers("/counted", **_PARTIAL), False, CommonResponse.CONTINUE),
        (headers("/watched", **_PARTIAL), False, CommonResponse.CONTINUE),
        (headers("/held", **_PARTIAL), True, _REPLACE),
        (headers("/unmatched", **_PARTIAL, end=True), True, CommonResponse.CONTINUE),
        *((headers("/unmatched", mode=mode), True, CommonResponse.CONTINUE) for mode in ("BUFFERED", "STREAMED", "NONE", None)),
    ],
)
def test_envoy_collects_only_bodies_that_a_policy_waits_for(message: ProcessingRequest, done: bool, status: int) -> None:
    """What it had collected in parts when the stream ends, it would send twice where it retries."""
    bodiless = [
        policy(name, {"pathExact": f"/{name}"}, body="ignore", action=action, threshold_identical_requests=2)
        for name, action in (("bodiless", "reject"), ("warned", "warn"), ("watched", "reject"), ("held", "throttle"))
    ]
    watching = [policy(f"{name}-too", {"pathExact": f"/{name}"}, mode="shadow") for name in ("watched", "held")]
    service = make_service(*bodiless, *watching, policy("counted", {"pathPrefix": "/counted"}))
    times = 2 if message.request_headers.headers.headers[1].raw_value in (b"/warned", b"/held") else 1

    *_, (reply,) = [exchange(service, message) for _ in range(times)]

    answer = decoded(reply).request_headers
    assert (reply.done, answer.response.status) == (done, status)
    assert (reply.hold_ms > 0) == (b"/held" in message.SerializeToString())
    assert not answer.response.HasField("body_mutation")


@pytest.mark.parametrize(
    ("messages", "counted"),
    [
        ([headers(mode="BUFFERED"), body(b"abc", end=False)], True),  # trailers follow
        ([headers(mode=None, content_length="3"), body(b"abc", end=False)], True),
        ([headers(mode="BUFFERED_PARTIAL", content_length="3"), body(b"abc", end=False)], True),
        ([headers(mode="BUFFERED_PARTIAL", content_length="9"), body(b"abc", end=False)], False),
        ([headers(mode="BUFFERED_PARTIAL"), body(b"abc", end=False)], True),  # trailers follow
        ([headers(mode="BUFFERED_PARTIAL"), body(b"a" * SMALLEST_LIMIT, end=False)], True),
        ([headers(mode="BUFFERED_PARTIAL"), body(b"a" * (SMALLEST_LIMIT + 1), end=False)], False),
        ([headers(mode=None, content_length="-3"), body(b"abc", end=False)], False),
        ([headers(mode="STREAMED"), body(b"a", end=False), body(b"bc", end=False), body(b"")], True),
        ([headers(mode="STREAMED"), body(b"abc", end=False), ProcessingRequest(request_trailers=HttpTrailers())], True),
        ([headers(mode=None), ProcessingRequest(response_headers=HttpHeaders())], False),
    ],
)
def test_a_body_counts_exactly_when_it_is_whole(messages: list[ProcessingRequest], counted: bool) -> None:
    """A body cut off at the buffer limit is not counted; one that is merely followed by trailers is."""
    service = make_service(policy("p", ANY))

    replies = exchange(service, *messages)

    assert len(replies) == len(messages)
    assert replies[-1].done
    assert sample(service, "requests_total", policy="p", mode="enforce", action="allow") == counted
    assert sum(s.value for m in service.metrics.uncounted.collect() for s in m.samples if s.name.endswith("_total")) == (
        not counted
    )


@pytest.mark.parametrize(
    ("told", "whole"),
    [
        ("100", [100]),
        ("100000", [100, 40_000, 100_000]),
        ("10485760", [100, 40_000, 100_000, 100_001]),
        ("none", [100]),
        ("-1", [100]),
        ("", [100]),
        ("9" * 100, [100, 40_000, 100_000, 100_001]),
    ],
)
def test_envoy_tells_its_buffer_limit(told: str, whole: list[int]) -> None:
    """A body that is no longer than that and does not end its stream ends in trailers; a longer one has been cut off."""
    service = make_service(policy("p", ANY))
    counted = []
    for size in (100, 40_000, 100_000, 100_001):
        before = sample(service, "requests_total", policy="p", mode="enforce", action="allow")
        stream = Stream(service, [(BUFFER_LIMIT_METADATA, told)])
        receive(stream, headers(**_PARTIAL))
        assert receive(stream, body(b"a" * size, end=False)).done  # whichever it is, nothing more is waited for
        stream.close()
        if sample(service, "requests_total", policy="p", mode="enforce", action="allow") > before:
            counted.append(size)

    assert counted == whole


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([headers()], "aborted"),
        ([headers(mode="STREAMED"), body(b"a", end=False)], "aborted"),
        ([headers(mode=None)], "no_body_phase"),  # Envoy may send no bodies at all
        ([headers(), ProcessingRequest(response_headers=HttpHeaders())], "no_body_phase"),
        ([headers(), answered("200")], "no_body_phase"),
        ([headers(), answered("408")], "aborted"),  # Envoy's request_timeout
        ([headers(), answered("413")], "too_large"),
        ([headers(mode=None), answered("413")], "too_large"),
        ([headers(mode="STREAMED"), body(b"a", end=False), answered("413")], "too_large"),
    ],
)
def test_a_stream_that_ends_before_its_body_is_uncounted(messages: list[ProcessingRequest], reason: str) -> None:
    """Clients that leave while uploading, bodies that are refused and bodies that Envoy does not send are told apart."""
    service = make_service(policy("p", ANY))

    exchange(service, *messages)

    assert sample(service, "uncounted_total", policy="p", reason=reason) == 1
    assert sample(service, "streams_in_flight") == len(service.waiting) == 0


def test_descriptors_come_from_where_envoy_puts_them() -> None:
    """Verified claims, the trusted address without its port, the route's name."""
    keys = ["jwt:org_id", "jwt:level", "ip:address"]
    service = make_service(policy("p", {"routes": ["llm"]}, limit_keys=keys), show_callers=True)
    message = headers(end=True, attributes={"source.address": "[2001:db8::1]:443", "xds.route_name": "llm"})
    metadata = message.metadata_context.filter_metadata["envoy.filters.http.jwt_authn"]
    metadata.update({"my_payload": {"org_id": "org-abc", "level": 7}})
    facts = read_request(parse_message(message.SerializeToString())).facts

    exchange(service, message)

    assert (facts.claim("org_id"), facts.claim("level"), facts.claim("other")) == ("org-abc", "7", "")
    assert (facts.address(), facts.route()) == ("2001:db8::1", "llm")
    assert sample(service, "requests_total", policy="p", mode="enforce", action="allow") == 1


def test_unverified_tokens_are_read_only_by_opt_in() -> None:
    """A bearer token is decoded only with --allow-unverified-jwt, and a verified claim wins over it."""
    token = "Bearer e30.eyJvcmdfaWQiOiAib3JnLWFiYyJ9.x"  # {"org_id": "org-abc"}

    def claim(*, allowed: bool, verified: bool) -> str:
        message = headers(end=True, authorization=token)
        if verified:
            message.metadata_context.filter_metadata["envoy.filters.http.jwt_authn"].update({"x": {"org_id": "real"}})
        said = parse_message(message.SerializeToString())
        return read_request(said, allow_unverified_jwt=allowed).facts.claim("org_id")

    assert not claim(allowed=False, verified=False)
    assert claim(allowed=True, verified=False) == "org-abc"
    assert claim(allowed=True, verified=True) == "real"


def test_the_first_of_repeated_headers_wins() -> None:
    """A second header of the same name changes nothing."""
    message = headers(end=True, x_a="first")
    message.request_headers.headers.headers.add(key="x-a", raw_value=b"second")

    assert read_request(parse_message(message.SerializeToString())).read_header("x-a") == "first"


def test_headers_beyond_the_cap_count_as_missing() -> None:
    """The first headers are read, pseudo-headers among them, and a caller's name that comes too late is no name."""
    service = make_service(policy("a", {"pathPrefix": "/"}, limit_keys=["header:x-late"], missing_descriptor="skip"))
    message = headers(end=True)
    listed = message.request_headers.headers.headers
    for number in range(MAX_HEADERS - len(listed) - 1):
        listed.add(key=f"x-{number}", raw_value=b"v")
    listed.add(key="x-late", raw_value=b"1")

    exchange(service, message)
    listed.insert(5, HeaderValue(key="x-more", raw_value=b"v"))
    exchange(service, message)

    assert sample(service, "requests_total", policy="a", mode="enforce", action="allow") == 1
    assert sample(service, "uncounted_total", policy="a", reason="missing_descriptor") == 1


def test_shadow_reports_and_does_nothing_else() -> None:
    """Past its threshold a shadow policy adds metadata to an answer that is otherwise that of a plain allow."""
    service = make_service(policy("s", ANY, mode="shadow"))

    answer = repeat(service, headers(end=True), times=3)

    shadow = {"shadow_action": "reject", "shadow_policy": "s", "shadow_count": 3}
    named = {"shadow_fingerprint": write_crc32(crc32(b"POST|/||00000000")), "shadow_tenant": hash_tenant("")}
    assert metadata_of(answer) == {**shadow, **named}
    answer.ClearField("dynamic_metadata")
    assert answer == decoded(exchange(make_service(policy("s", ANY)), headers(end=True))[-1])
    assert sample(service, "loops_detected_total", policy="s", mode="shadow", action="reject") == 1


@pytest.mark.parametrize("later", [False, True])
def test_a_store_that_is_down_leaves_a_local_window(later: bool) -> None:
    """By default the requests pass, and a window of this process still catches the loop."""
    service = make_service(policy("p", ANY), store=FailingStore(later=later))

    answers = [decoded(exchange(service, headers(end=True))[-1]) for _ in range(3)]

    assert [answer.WhichOneof("response") for answer in answers] == ["request_headers", "request_headers", "immediate_response"]
    assert sample(service, "store_errors_total", kind="connection") == 3
    assert sample(service, "fail_open_total", reason="store_error") == 3


@pytest.mark.parametrize("later", [False, True])
def test_a_store_that_is_down_can_refuse(later: bool) -> None:
    """With --on-store-error reject the answer is 503 store_unavailable, never a loop; shadow policies are not asked."""
    store = FailingStore(later=later)
    service = make_service(policy("p", ANY), store=store, on_store_error="reject")
    shadow_only = make_service(policy("s", ANY, mode="shadow"), store=store, on_store_error="reject")

    answer = decoded(exchange(service, headers(end=True))[-1])
    passed = decoded(exchange(shadow_only, headers(end=True))[-1])

    assert answer.immediate_response.status.code == 503
    assert answer.immediate_response.details == "store_unavailable"
    assert headers_of(answer)["X-Fairvisor-Reason"] == "store_unavailable"
    assert json.loads(answer.immediate_response.body)["error"]["code"] == "store_unavailable"
    assert passed.WhichOneof("response") == "request_headers"


@pytest.mark.parametrize("later", [False, True])
def test_an_internal_error_lets_the_request_through(later: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A bug is counted and logged, and the client never notices."""
    service = make_service(policy("p", ANY), store=FailingStore(error=RuntimeError("bug"), later=later))

    (reply,) = exchange(service, headers(end=True))

    assert reply.done
    assert decoded(reply).WhichOneof("response") == "request_headers"
    assert sample(service, "fail_open_total", reason="internal_error") == 1
    assert "a detector failed" in caplog.text


def test_a_request_sees_one_set_of_policies() -> None:
    """Policies that change between a request's headers and its body act on the next request, not on half of this one."""
    service = make_service(policy("old", ANY))
    stream = Stream(service)
    receive(stream, headers())

    service.engine = make_engine(policy("new", ANY))
    receive(stream, body(b"x"))
    stream.close()
    exchange(service, headers(), body(b"x"))

    counted = {name: sample(service, "requests_total", policy=name, mode="enforce", action="allow") for name in ("old", "new")}
    assert counted == {"old": 1, "new": 1}


def test_overload_lets_requests_through_at_once() -> None:
    """Past --max-streams a request is not even looked at, and that is counted."""
    service = make_service(policy("p", ANY), max_streams=1)
    first = Stream(service)

    (reply,) = exchange(service, headers())
    first.close()

    assert reply.done
    assert sample(service, "overload_total") == 1
    assert [reply.done for reply in exchange(service, headers(), body())] == [False, True]


def test_stalled_uploads_do_not_keep_others_out() -> None:
    """At --max-streams the upload that has waited longest passes uncounted, and new requests are inspected."""
    service = make_service(policy("p", ANY), max_streams=3)
    ended: list[int] = []
    stalled = [Stream(service) for _ in range(3)]
    for number, stream in enumerate(stalled):
        stream.on_given_up = lambda number=number: ended.append(number)
        receive(stream, headers())

    answers = [decoded(exchange(service, headers(end=True))[-1]).WhichOneof("response") for _ in range(3)]
    late = receive(stalled[0], body(b"late"))
    counted = sample(service, "requests_total", policy="p", mode="enforce", action="allow")
    for stream in stalled:
        stream.close()

    assert answers == ["request_headers", "request_headers", "immediate_response"]
    assert ended == [0]  # its place is enough, one after the other
    assert (late.done, decoded(late).WhichOneof("response"), counted) == (True, "request_body", 2)
    assert sample(service, "uncounted_total", policy="p", reason="overload") == sample(service, "overload_total") == 1
    assert sample(service, "uncounted_total", policy="p", reason="aborted") == 2
    assert (service.streams, service.given_up, len(service.waiting)) == (0, 0, 0)


def test_a_stream_given_up_may_be_closed_at_once() -> None:
    """The owner of the socket may close the stream while it is being told."""
    service = make_service(policy("p", ANY), max_streams=1)
    first = Stream(service)
    first.on_given_up = first.close
    receive(first, headers())

    second = Stream(service)
    receive(second, headers())
    streams = service.streams, service.given_up, list(service.waiting)
    second.close()

    assert streams == (1, 0, [second])


def test_release_ends_every_wait_for_a_body() -> None:
    """Before the server stops, uploads pass uncounted, including those that begin afterwards; other requests are decided."""
    service = make_service(policy("p", ANY))
    ended: list[Stream] = []
    first, decided = Stream(service), Stream(service)
    for stream in (first, decided):
        stream.on_given_up = lambda stream=stream: ended.append(stream)
        receive(stream, headers())
    receive(decided, body(b"x"))

    service.release()
    late = exchange(service, headers(), body(b"x"))
    whole = exchange(service, headers(end=True))
    for stream in (first, decided):
        stream.close()

    assert service.released
    assert ended == [first]
    assert [reply.done for reply in (*late, *whole)] == [True, True]
    assert sample(service, "uncounted_total", policy="p", reason="shutdown") == 2
    assert sample(service, "requests_total", policy="p", mode="enforce", action="allow") == 2


def test_record_reports_every_matched_request() -> None:
    """With --record even a plain allow carries fingerprint, tenant, the body's CRC32 and what a replay needs."""
    service = make_service(policy("p", ANY), record=True)

    recorded = metadata_of(decoded(exchange(service, headers(), body(b"plumless"))[-1]))

    assert set(recorded) == {"fingerprint", "tenant", "body_crc32", "record"}
    assert recorded["body_crc32"] == recorded["record"]["body_crc32"] == "4ddb0c25"


def test_a_plain_allow_sends_no_metadata() -> None:
    """Nothing detected, nothing said."""
    answer = decoded(exchange(make_service(policy("p", ANY)), headers(end=True))[-1])

    assert not answer.HasField("dynamic_metadata")


def test_detections_are_logged_without_descriptor_values(caplog: pytest.LogCaptureFixture) -> None:
    """One line per detection with policy, fingerprint, count and action; values only with --show-callers; rate-limited."""

    def lines(*, shown: bool, times: int) -> list[dict[str, Any]]:
        caplog.clear()
        service = make_service(policy("p", ANY, limit_keys=["header:x-a"]), show_callers=shown)
        repeat(service, headers(end=True, x_a="secret"), times=times)
        return [vars(record)["fields"] for record in caplog.records if record.levelno == logging.WARNING]

    (line,) = lines(shown=False, times=3)
    assert (line["policy"], line["action"], line["count"]) == ("p", "reject", 3)
    assert "secret" not in str(line)
    assert lines(shown=True, times=3)[0]["descriptors"] == {"x-a": "secret"}
    assert len(lines(shown=False, times=500)) < 100


def test_garbage_bytes_are_a_protocol_error() -> None:
    """What is not a ProcessingRequest is refused with INVALID_ARGUMENT."""
    stream = Stream(make_service(policy("p", ANY)))

    with pytest.raises(ProtocolError) as error:
        stream.receive(b"\xff\xff\xff")

    assert error.value.code == 3


def test_an_unknown_phase_ends_the_stream() -> None:
    """A message of an unknown phase has no well-formed answer; the stream ends with OK so that Envoy continues."""
    (reply,) = exchange(make_service(policy("p", ANY)), ProcessingRequest())

    assert (reply.answer, reply.done) == (None, True)


def test_observability_mode_never_holds() -> None:
    """Envoy does not wait, so holding a stream would have no effect."""
    service = make_service(policy("p", ANY, action="throttle"))
    message = headers(end=True)
    message.observability_mode = True

    replies = [exchange(service, message)[-1] for _ in range(4)]

    assert [reply.hold_ms for reply in replies] == [0, 0, 0, 0]


RAW = st.binary(max_size=12)
HEADER = st.tuples(
    st.sampled_from(
        [":method", ":path", ":authority", "content-type", "content-length", "upgrade", "authorization", "x-a", ""]
    ),
    RAW
    | st.sampled_from([b"/", b"/?a=%00&b", b"POST", b"CONNECT", b"application/grpc", b"99999999999999999999", b"Bearer a.b.c"]),
)


@st.composite
def processing_requests(draw: st.DrawFn) -> ProcessingRequest:
    """Any message that protobuf can express, likely or not."""
    message = ProcessingRequest()
    kind = draw(st.sampled_from([*[field.name for field in ProcessingRequest.DESCRIPTOR.oneofs[0].fields], None]))
    if kind is not None:
        part = getattr(message, kind)
        part.SetInParent()
        if kind.endswith("headers"):
            part.end_of_stream = draw(st.booleans())
            for name, value in draw(st.lists(HEADER, max_size=6)):
                part.headers.headers.add(key=name, raw_value=value)
        if kind.endswith("body"):
            part.end_of_stream = draw(st.booleans())
            part.body = draw(RAW)
    message.observability_mode = draw(st.booleans())
    if draw(st.booleans()):
        message.protocol_config.request_body_mode = draw(st.sampled_from([*MODES.values(), 99]))  # type: ignore[assignment]
    if draw(st.booleans()):
        odd = draw(st.text(max_size=5) | st.floats() | st.booleans() | st.none())
        message.attributes["envoy.filters.http.ext_proc"].update({"source.address": odd, "xds.route_name": odd})
        message.metadata_context.filter_metadata["envoy.filters.http.jwt_authn"].update({"p": {"a": odd}, "q": odd})
    return message


FUZZED = [
    policy("r", ANY, limit_keys=["jwt:a", "header:x-a", "query:a", "ip:address"], threshold_identical_requests=2),
    policy("t", ANY, action="throttle", body="ignore", threshold_identical_requests=2),
    policy("s", {"routes": ["x"]}, mode="shadow", window_type="sliding_log"),
]


@pytest.mark.parametrize("later", [False, True])
@given(messages=st.lists(processing_requests(), max_size=6))
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(150))
def test_any_sequence_of_messages_is_answered(messages: list[ProcessingRequest], later: bool) -> None:
    """Nothing raises, and every message up to the end of the stream gets one answer of its own phase, or a refusal."""
    store = FailingStore("never", later=later)
    service = make_service(*FUZZED, store=store, allow_unverified_jwt=True, record=True)
    stream = Stream(service)
    for message in messages:
        reply = receive(stream, message)
        kind = message.WhichOneof("request")
        assert (reply.answer is None) == (kind is None)
        if kind is not None:
            assert decoded(reply).WhichOneof("response") in (kind, "immediate_response")
        if reply.done:
            break
    stream.close()

    assert service.streams == service.holds.held == 0
    assert sample(service, "fail_open_total", reason="internal_error") == 0
    assert sample(service, "fail_open_total", reason="shadow_error") == 0
