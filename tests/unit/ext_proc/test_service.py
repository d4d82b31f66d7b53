"""One ext_proc stream at a time, message by message, without a socket."""

import asyncio
import json
import logging
from typing import Any
from zlib import crc32

import pytest
from hypothesis import (
    HealthCheck,
    example,
    given,
    settings as hypothesis_settings,
    strategies as st,
)

from extproc.ext_proc.stream import BUFFER_LIMIT_METADATA, Stream
from extproc.ext_proc.upload import SMALLEST_LIMIT
from extproc.ext_proc.wire import LARGE, MAX_HEADERS
from extproc.pb.base_pb2 import HeaderMap, HeaderValue
from extproc.pb.external_processor_pb2 import (
    CommonResponse,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
)
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
    list_uncounted,
    make_service,
    metadata_of,
    receive,
    repeat,
    sample,
    status,
)


def test_request_is_decided_with_its_complete_body() -> None:
    service = make_service(policy("a", ANY))

    first = exchange(service, headers(), body(b"one"))
    refused = repeat(service, headers(), body(b"two"), times=3)

    assert [reply.done for reply in first] == [False, True]
    assert [decoded(reply).WhichOneof("response") for reply in first] == [
        "request_headers",
        "request_body",
    ]
    assert not decoded(first[-1]).HasField("dynamic_metadata")  # nothing was detected
    assert refused.immediate_response.status.code == 429


def test_fingerprint_does_not_depend_on_chunks_or_headers() -> None:
    service = make_service(policy("a", ANY), record=True)
    data = bytes(range(256)) * 40
    chunks = [
        [body(data)],
        [body(data[:5000], end=False), body(data[5000:])],
        [body(data[:7], end=False), body(data[7:9000], end=False), body(data[9000:])],
        [body(data[:-1] + b"?")],
    ]

    found = [
        metadata_of(decoded(exchange(service, first, *parts)[-1]))
        for first in (headers(mode="STREAMED"), headers(mode="STREAMED", x_a="v" * LARGE))
        for parts in chunks
    ]

    names = [told["fingerprint"] for told in found]
    assert names == [names[0]] * 3 + [names[3]] + [names[0]] * 3 + [names[3]]
    assert names[0] != names[3]
    # Nothing was detected
    assert set(found[0]) == {
        "fingerprint",
        "tenant",
        "body_crc32",
        "record",
    }
    assert found[0]["body_crc32"] == found[0]["record"]["body_crc32"] == write_crc32(crc32(data))


def test_refusal_has_the_documented_headers_body_and_metadata() -> None:
    service = make_service(
        policy("p", ANY, reject_status=422, cooldown_seconds=90, limit_keys=["header:x-a"])
    )

    answer = repeat(
        service, headers("/v1/messages?beta=true", method="GET", end=True, x_a="1"), times=3
    )

    immediate = answer.immediate_response
    fingerprint = headers_of(answer)["x-loopguard-fingerprint"]
    assert (immediate.status.code, immediate.grpc_status.status) == (422, 8)
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
        "error": {
            "message": message,
            "type": "loop_detected",
            "param": None,
            "code": "recursive_loop_detected",
        },
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
def test_method_that_is_not_utf_8_is_refused(content_type: str) -> None:
    service = make_service(policy("p", ANY))

    answer = repeat(
        service, headers(method="P\udcffST", content_type=content_type, end=True), times=3
    )

    assert answer.immediate_response.status.code == 429
    page = answer.immediate_response.body.decode()
    message = page if content_type == "application/grpc" else json.loads(page)["error"]["message"]
    assert "this identical request ('P?ST' /) has been sent 3 times" in message
    assert sample(service, "fail_open_total", reason="internal_error") == 0


def test_throttled_request_extends_envoys_timeout_first() -> None:
    service = make_service(policy("p", ANY, action="throttle"), policy("w", ANY, action="warn"))
    reply = [exchange(service, headers(end=True))[-1] for _ in range(3)][-1]

    override = ProcessingResponse.FromString(reply.first)
    assert reply.hold_ms == 300
    assert override.override_message_timeout.ToMilliseconds() > 300
    assert override.WhichOneof("response") is None
    assert decoded(reply).request_headers.response.header_mutation.set_headers
    assert metadata_of(decoded(reply))["action"] == "throttle"


def test_holds_are_bounded_in_all_and_per_tenant() -> None:
    service = make_service(
        policy("p", ANY, action="throttle", limit_keys=["header:x-a"]), max_throttled=10
    )
    tenants = [str(number) for number in range(11)]
    for tenant in tenants:
        repeat(service, headers(end=True, x_a=tenant), times=2)
    streams = {tenant: Stream(service) for tenant in tenants}
    second = Stream(service)

    holds = {
        tenant: receive(stream, headers(end=True, x_a=tenant)).hold_ms
        for tenant, stream in streams.items()
    }
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
    """What Envoy shows of a response, also of its own."""
    listed = [
        HeaderValue(key="server", raw_value=b"envoy"),
        HeaderValue(key=":status", raw_value=status.encode()),
    ]
    return ProcessingRequest(response_headers=HttpHeaders(headers=HeaderMap(headers=listed)))


def test_holds_end_when_the_server_stops() -> None:
    service = make_service(policy("p", ANY))

    async def stop() -> None:
        waiting = asyncio.create_task(service.holds.wait(3_600_000))
        await asyncio.sleep(0)
        service.release()
        await waiting
        await service.holds.wait(3_600_000)

    asyncio.run(asyncio.wait_for(stop(), PATIENCE))


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
def test_request_with_an_unknown_body_passes_uncounted(
    message: ProcessingRequest, reason: str
) -> None:
    service = make_service(
        policy("p", {"routes": ["r"], "pathPrefix": "/"}), policy("q", {"routes": ["r"]})
    )
    message.attributes["envoy.filters.http.ext_proc"].update({"xds.route_name": "r"})

    replies = [exchange(service, message)[-1] for _ in range(4)]

    assert all(
        reply.done and decoded(reply).WhichOneof("response") == "request_headers"
        for reply in replies
    )
    assert sample(service, "uncounted_total", policy="q", reason=reason) == 4


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
        *(
            (headers("/unmatched", mode=mode), True, CommonResponse.CONTINUE)
            for mode in ("BUFFERED", "STREAMED", "NONE", None)
        ),
    ],
)
def test_partly_buffered_body_is_replaced_where_no_policy_waits(
    message: ProcessingRequest, done: bool, status: int
) -> None:
    """Envoy would send it twice where it retries."""
    bodiless = [
        policy(
            name,
            {"pathExact": f"/{name}"},
            body="ignore",
            action=action,
            threshold_identical_requests=2,
        )
        for name, action in (
            ("bodiless", "reject"),
            ("warned", "warn"),
            ("watched", "reject"),
            ("held", "throttle"),
        )
    ]
    watching = [
        policy(f"{name}-too", {"pathExact": f"/{name}"}, mode="shadow")
        for name in ("watched", "held")
    ]
    service = make_service(*bodiless, *watching, policy("counted", {"pathPrefix": "/counted"}))
    times = (
        2 if message.request_headers.headers.headers[1].raw_value in (b"/warned", b"/held") else 1
    )

    *_, (reply,) = [exchange(service, message) for _ in range(times)]

    answer = decoded(reply).request_headers
    assert (reply.done, answer.response.status) == (done, status)
    assert (reply.hold_ms > 0) == (b"/held" in message.SerializeToString())
    assert not answer.response.HasField("body_mutation")


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
def test_buffer_limit_in_metadata_tells_cut_bodies_apart(told: str, whole: list[int]) -> None:
    """A body that fits and does not end its stream ends in trailers; a longer one is cut off."""
    service = make_service(policy("p", ANY))
    counted = []
    for size in (100, 40_000, 100_000, 100_001):
        before = sample(service, "requests_total", policy="p", mode="enforce", action="allow")
        stream = Stream(service, [(BUFFER_LIMIT_METADATA, told)])
        receive(stream, headers(**_PARTIAL))
        assert receive(
            stream, body(b"a" * size, end=False)
        ).done  # nothing more is waited for in either case
        stream.close()
        if sample(service, "requests_total", policy="p", mode="enforce", action="allow") > before:
            counted.append(size)

    assert counted == whole


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([headers(content_type="application/grpc-web+proto"), body(b"x")], ""),
        ([headers(mode="BUFFERED"), body(b"abc", end=False)], ""),  # trailers follow
        ([headers(mode=None, content_length="3"), body(b"abc", end=False)], ""),
        ([headers(mode="BUFFERED_PARTIAL", content_length="3"), body(b"abc", end=False)], ""),
        (
            [headers(mode="BUFFERED_PARTIAL", content_length="9"), body(b"abc", end=False)],
            "body_truncated",
        ),
        ([headers(mode="BUFFERED_PARTIAL"), body(b"abc", end=False)], ""),  # trailers follow
        ([headers(mode="BUFFERED_PARTIAL"), body(b"a" * SMALLEST_LIMIT, end=False)], ""),
        (
            [headers(mode="BUFFERED_PARTIAL"), body(b"a" * (SMALLEST_LIMIT + 1), end=False)],
            "body_truncated",
        ),
        ([headers(mode=None, content_length="-3"), body(b"abc", end=False)], "body_truncated"),
        ([headers(mode="STREAMED"), body(b"a", end=False), body(b"bc", end=False), body(b"")], ""),
        (
            [
                headers(mode="STREAMED"),
                body(b"abc", end=False),
                ProcessingRequest(request_trailers=HttpTrailers()),
            ],
            "",
        ),
        ([headers()], "aborted"),
        ([headers(mode="STREAMED"), body(b"a", end=False)], "aborted"),
        ([headers(mode=None)], "no_body_phase"),  # Envoy may send no bodies at all
        ([headers(mode=None), ProcessingRequest(response_headers=HttpHeaders())], "no_body_phase"),
        ([headers(), ProcessingRequest(response_headers=HttpHeaders())], "no_body_phase"),
        ([headers(), answered("200")], "no_body_phase"),
        ([headers(), answered("408")], "aborted"),  # Envoy's request_timeout
        ([headers(), answered("413")], "too_large"),
        ([headers(mode=None), answered("413")], "too_large"),
        ([headers(mode="STREAMED"), body(b"a", end=False), answered("413")], "too_large"),
    ],
)
def test_body_counts_exactly_when_it_is_whole(
    messages: list[ProcessingRequest], reason: str
) -> None:
    service = make_service(policy("p", ANY))

    replies = exchange(service, *messages)

    unfinished = messages[-1].HasField("request_headers") or (
        reason == "aborted" and messages[-1].HasField("request_body")
    )
    assert [reply.done for reply in replies] == [False] * (len(messages) - 1) + [not unfinished]
    assert sample(service, "requests_total", policy="p", mode="enforce", action="allow") == (
        not reason
    )
    assert list_uncounted(service) == ({reason: 1} if reason else {})
    assert sample(service, "streams_in_flight") == len(service.waiting) == 0


def described(
    *more: tuple[str, str],
    claims: dict[str, Any] | None = None,
    attributes: dict[str, str] | None = None,
) -> ProcessingRequest:
    message = headers(end=True, attributes=attributes)
    for name, value in more:
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    if claims is not None:
        message.metadata_context.filter_metadata["envoy.filters.http.jwt_authn"].update(
            {"payload": claims}
        )
    return message


TOKEN = ("authorization", "Bearer e30.eyJvcmdfaWQiOiAib3JnLWFiYyJ9.x")  # {"org_id": "org-abc"}
# Beside the three of every request
MANY = [(f"x-{number}", "v") for number in range(MAX_HEADERS - 4)]


@pytest.mark.parametrize(
    ("message", "descriptors"),
    [
        (described(claims={"org_id": "org-abc", "level": 7}), "level=7|org_id=org-abc"),
        (described(attributes={"source.address": "[2001:db8::1]:443"}), "address=2001:db8::1"),
        (described(TOKEN), ""),
        (described(TOKEN, ("x-unverified", "1")), "org_id=org-abc"),
        (described(TOKEN, ("x-unverified", "1"), claims={"org_id": "real"}), "org_id=real"),
        (described(("x-a", "first"), ("x-a", "second")), "x-a=first"),
        (described(*MANY, ("x-a", "in time")), "x-a=in time"),
        (described(*MANY, ("x-more", "v"), ("x-a", "late")), ""),
    ],
    ids=[
        "claims",
        "address",
        "token",
        "unverified token",
        "both",
        "repeated",
        "last header",
        "header beyond the cap",
    ],
)
def test_descriptors_come_from_claims_address_and_headers(
    message: ProcessingRequest, descriptors: str
) -> None:
    """A bearer token is read only with --allow-unverified-jwt."""
    keys = ["jwt:org_id", "jwt:level", "ip:address", "header:x-a"]
    unverified = any(
        header.key == "x-unverified" for header in message.request_headers.headers.headers
    )
    made = policy("p", ANY, limit_keys=keys, missing_descriptor="share")
    service = make_service(made, record=True, allow_unverified_jwt=unverified)

    answer = decoded(exchange(service, message)[-1])

    assert metadata_of(answer)["tenant"] == hash_tenant(descriptors)


def test_shadow_policy_only_adds_metadata() -> None:
    service = make_service(policy("s", ANY, mode="shadow"))

    answer = repeat(service, headers(end=True), times=3)

    shadow = {"shadow_action": "reject", "shadow_policy": "s", "shadow_count": 3}
    named = {
        "shadow_fingerprint": write_crc32(crc32(b"POST|/||00000000")),
        "shadow_tenant": hash_tenant(""),
    }
    assert metadata_of(answer) == {**shadow, **named}
    answer.ClearField("dynamic_metadata")
    assert answer == decoded(exchange(make_service(policy("s", ANY)), headers(end=True))[-1])
    assert sample(service, "loops_detected_total", policy="s", mode="shadow", action="reject") == 1


@pytest.mark.parametrize("later", [False, True])
def test_local_window_finds_loops_while_the_store_is_down(later: bool) -> None:
    service = make_service(policy("p", ANY), store=FailingStore(later=later))

    assert [status(decoded(exchange(service, headers(end=True))[-1])) for _ in range(3)] == [
        200,
        200,
        429,
    ]
    assert sample(service, "store_errors_total", kind="connection") == 3
    assert sample(service, "fail_open_total", reason="store_error") == 3


@pytest.mark.parametrize("later", [False, True])
def test_requests_are_refused_with_on_store_error_reject(later: bool) -> None:
    """Shadow policies are not asked."""
    store = FailingStore(later=later)
    enforcing, shadow = (
        make_service(policy("p", ANY, mode=mode), store=store, on_store_error="reject")
        for mode in ("enforce", "shadow")
    )

    answer = decoded(exchange(enforcing, headers(end=True))[-1])
    passed = decoded(exchange(shadow, headers(end=True))[-1])

    assert (answer.immediate_response.status.code, answer.immediate_response.details) == (
        503,
        "store_unavailable",
    )
    assert headers_of(answer)["X-Fairvisor-Reason"] == "store_unavailable"
    assert json.loads(answer.immediate_response.body)["error"]["code"] == "store_unavailable"
    assert passed.WhichOneof("response") == "request_headers"


@pytest.mark.parametrize("later", [False, True])
def test_internal_error_lets_the_request_pass(
    later: bool, caplog: pytest.LogCaptureFixture
) -> None:
    service = make_service(
        policy("p", ANY), store=FailingStore(error=RuntimeError("bug"), later=later)
    )

    (reply,) = exchange(service, headers(end=True))

    assert reply.done
    assert decoded(reply).WhichOneof("response") == "request_headers"
    assert sample(service, "fail_open_total", reason="internal_error") == 1
    assert "a detector failed" in caplog.text


def test_request_sees_one_set_of_policies() -> None:
    service = make_service(policy("old", ANY))
    stream = Stream(service)
    receive(stream, headers())

    service.engine = make_engine(policy("new", ANY))
    receive(stream, body(b"x"))
    stream.close()
    exchange(service, headers(), body(b"x"))

    counted = {
        name: sample(service, "requests_total", policy=name, mode="enforce", action="allow")
        for name in ("old", "new")
    }
    assert counted == {"old": 1, "new": 1}


def test_release_ends_every_wait_for_a_body() -> None:
    service = make_service(policy("p", ANY))
    ended: list[Stream] = []
    streams = Stream(service), Stream(service)
    for stream in streams:
        stream.on_given_up = lambda stream=stream: ended.append(stream)
        receive(stream, headers())
    receive(streams[1], body(b"x"))

    service.release()
    later = [*exchange(service, headers(), body(b"x")), *exchange(service, headers(end=True))]
    for stream in streams:
        stream.close()

    assert service.released
    assert (ended, [reply.done for reply in later]) == ([streams[0]], [True, True])
    assert list_uncounted(service) == {"shutdown": 2}
    assert sample(service, "requests_total", policy="p", mode="enforce", action="allow") == 2


@pytest.mark.slow
def test_detections_are_logged_without_descriptor_values(caplog: pytest.LogCaptureFixture) -> None:
    """Values only with --show-callers. Lines are rate-limited."""

    def lines(*, shown: bool, times: int) -> list[dict[str, Any]]:
        caplog.clear()
        service = make_service(policy("p", ANY, limit_keys=["header:x-a"]), show_callers=shown)
        repeat(service, headers(end=True, x_a="secret"), times=times)
        return [
            vars(record)["fields"] for record in caplog.records if record.levelno == logging.WARNING
        ]

    (line,) = lines(shown=False, times=3)
    assert (line["policy"], line["action"], line["count"]) == ("p", "reject", 3)
    assert "secret" not in str(line)
    assert lines(shown=True, times=3)[0]["descriptors"] == {"x-a": "secret"}
    assert len(lines(shown=False, times=500)) < 100


def test_observed_requests_are_never_held() -> None:
    service = make_service(policy("p", ANY, action="throttle"))
    message = headers(end=True)
    message.observability_mode = True

    replies = [exchange(service, message)[-1] for _ in range(4)]

    assert [reply.hold_ms for reply in replies] == [0, 0, 0, 0]


RAW = st.binary(max_size=12)
HEADER = st.tuples(
    st.sampled_from(
        [
            ":method",
            ":path",
            ":authority",
            "content-type",
            "content-length",
            "upgrade",
            "authorization",
            "x-a",
            "",
        ]
    ),
    RAW
    | st.sampled_from(
        [
            b"/",
            b"/?a=%00&b",
            b"POST",
            b"CONNECT",
            b"application/grpc",
            b"99999999999999999999",
            b"Bearer a.b.c",
        ]
    ),
)


@st.composite
def processing_requests(draw: st.DrawFn) -> ProcessingRequest:
    message = ProcessingRequest()
    kind = draw(
        st.sampled_from(
            [*[field.name for field in ProcessingRequest.DESCRIPTOR.oneofs[0].fields], None]
        )
    )
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
        message.attributes["envoy.filters.http.ext_proc"].update(
            {"source.address": odd, "xds.route_name": odd}
        )
        message.metadata_context.filter_metadata["envoy.filters.http.jwt_authn"].update(
            {"p": {"a": odd}, "q": odd}
        )
    return message


FUZZED = [
    policy(
        "r",
        ANY,
        limit_keys=["jwt:a", "header:x-a", "query:a", "ip:address"],
        threshold_identical_requests=2,
    ),
    policy("t", ANY, action="throttle", body="ignore", threshold_identical_requests=2),
    policy("s", {"routes": ["x"]}, mode="shadow", window_type="sliding_log"),
]


@pytest.mark.slow
@pytest.mark.parametrize("later", [False, True])
@given(messages=st.lists(processing_requests(), max_size=6))
@example(messages=[ProcessingRequest()])
@hypothesis_settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=examples(150),
)
def test_any_sequence_of_messages_is_answered(
    messages: list[ProcessingRequest], later: bool
) -> None:
    """Every message gets one answer of its phase, or a refusal; unknown ones end the stream."""
    service = make_service(
        *FUZZED, store=FailingStore("never", later=later), allow_unverified_jwt=True, record=True
    )

    for message, reply in zip(messages, exchange(service, *messages), strict=False):
        kind = message.WhichOneof("request")
        assert (reply.answer is None) == (kind is None)
        assert reply.done or kind is not None
        assert kind is None or decoded(reply).WhichOneof("response") in (kind, "immediate_response")

    assert service.streams == service.holds.held == 0
    assert sample(service, "fail_open_total", reason="internal_error") == 0
    assert sample(service, "fail_open_total", reason="shadow_error") == 0
