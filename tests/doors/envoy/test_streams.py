"""Streams and long bodies through Envoy: gRPC, HTTP/2, long histories, hostile requests."""

import json
import queue
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from tests.support.documents import bundle, policy
from tests.support.harness import PATIENCE, Stack, envoy_version, eventually, stack
from tests.support.streams import over_http2
from tests.support.turn_writers import Did, as_chat

_ECHO = "/loopguard.test.Echo"


@contextmanager
def _grpc_upstream() -> Iterator[str]:
    """A gRPC server that sends each message back, in unary calls and in streams."""

    class Echo(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc is untyped
        def service(self, call: Any) -> Any:  # noqa: ANN401  # grpc is untyped
            if call.method.endswith("/Stream"):
                return grpc.stream_stream_rpc_method_handler(lambda messages, _: messages)
            return grpc.unary_unary_rpc_method_handler(lambda message, _: message)

    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)


GRPC = bundle(
    policy("unary", {"pathExact": f"{_ECHO}/Unary"}, threshold_identical_requests=2),
    policy("stream", {"pathExact": f"{_ECHO}/Stream"}, threshold_identical_requests=2),
    policy(
        "ignoring", {"pathExact": f"{_ECHO}/Ignored"}, threshold_identical_requests=3, body="ignore"
    ),
)


_needs_tolerant = pytest.mark.skipif(
    envoy_version() < (1, 38), reason="tolerant mode needs Envoy 1.38"
)


@pytest.fixture(scope="module", params=["strict", pytest.param("tolerant", marks=_needs_tolerant)])
def over_grpc(request: pytest.FixtureRequest) -> Iterator[Stack]:
    options = {"upstream_protocol": "http2", "body_mode": request.param}
    with _grpc_upstream() as address, stack(GRPC, upstream=address, **options) as made:
        yield made


@pytest.fixture
def channel(over_grpc: Stack) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{over_grpc.envoy.port}") as opened:
        yield opened


def test_guarded_bidirectional_grpc_keeps_streaming(channel: grpc.Channel) -> None:
    outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    answers = channel.stream_stream(f"{_ECHO}/Stream")(iter(outgoing.get, None), timeout=PATIENCE)
    for message in (b"0", b"1", b"2"):
        outgoing.put(message)
        assert next(answers) == message
    outgoing.put(None)


def test_grpc_calls_with_unknown_bodies_are_never_refused(
    over_grpc: Stack, channel: grpc.Channel
) -> None:
    call = channel.unary_unary(f"{_ECHO}/Unary")

    assert [call(b"%d" % number, timeout=PATIENCE) for number in range(5)] == [
        b"0",
        b"1",
        b"2",
        b"3",
        b"4",
    ]
    assert over_grpc.loopguard.metric("uncounted_total", policy="unary", reason="grpc") >= 5


def test_grpc_loop_is_refused_with_a_grpc_status(channel: grpc.Channel) -> None:
    """The policy ignores bodies, which Loopguard does not see."""
    call = channel.unary_unary(f"{_ECHO}/Ignored")
    for _ in range(2):
        call(b"x", timeout=PATIENCE)
    with pytest.raises(grpc.RpcError) as refusal:
        call(b"x", timeout=PATIENCE)

    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(refusal.value.trailing_metadata())["x-loopguard-policy"] == "ignoring"
    said = refusal.value.details()
    assert said.startswith(
        f"Loop detected: this identical request (POST {_ECHO}/Ignored) has been sent 3 times"
    )
    assert said.endswith(" (recursive_loop_detected)")


@pytest.mark.parametrize(
    ("path", "trailers"), [("/reject/h2", False), ("/reject", True), ("/beside", True)]
)
def test_http2_requests_with_and_without_trailers_are_counted(
    shared: Stack, user: dict[str, str], path: str, trailers: bool
) -> None:
    answers = [over_http2(shared, path, user, trailers=trailers) for _ in range(3)]

    assert [status for status, _ in answers] == ["200", "200", "429"]
    assert json.loads(answers[0][1])["number"]


def test_stream_ends_before_the_upstream_answers(shared: Stack, user: dict[str, str]) -> None:
    before = len(shared.upstream.seen)
    head = (
        "POST /reject/hang HTTP/1.1\r\nhost: h\r\nx-user-id: "
        f"{user['x-user-id']}\r\ncontent-length: 2\r\n\r\n{{}}"
    )
    with shared.connect() as connection:
        connection.sendall(head.encode())
        eventually(lambda: len(shared.upstream.seen) > before, "the request at the upstream")

        eventually(
            lambda: shared.loopguard.metric("streams_in_flight") == 0, "the end of the stream"
        )


def _send_raw(made: Stack, request: bytes) -> bytes:
    """The first line of the answer to raw bytes."""
    with made.connect() as connection:
        connection.sendall(request)
        return connection.makefile("rb").readline()


@_needs_tolerant
def test_retries_of_envoy_send_partly_buffered_bodies_once() -> None:
    """Envoy may keep the collected part of a body for a retry, and must not send it twice."""

    def retried(config: str) -> str:
        host = 'domains: ["*"]'
        assert host in config
        return config.replace(
            host, f"{host}\n              retry_policy: {{retry_on: connect-failure}}"
        )

    document = bundle(
        policy("counted", {"pathPrefix": "/counted"}),
        policy("bodiless", {"pathPrefix": "/bodiless"}, body="ignore"),
    )
    with stack(document, body_mode="tolerant", buffer_limit=10_485_760, edit=retried) as made:
        for number in range(9):  # on new connections, which the upstream is slow to accept
            body = random.Random(number).randbytes(11_000_000)
            path = ("/unmatched", "/bodiless", "/counted")[number % 3]
            assert made.post(f"{path}/close?{number}", body).status == 200
            assert hash(made.upstream.seen[-1].body) == hash(body)  # too long to be printed


_HOSTILE = {
    "invalid UTF-8 in a header": (
        b"GET /reject/h1 HTTP/1.1\r\nhost: h\r\nx-user-id: \xff\xfe\r\n\r\n"
    ),
    "%00 in the query": b"GET /reject/h2?a=%00&%00 HTTP/1.1\r\nhost: h\r\nx-user-id: h\r\n\r\n",
    "broken percent encoding": (
        b"GET /reject/h3?%zz=%1&%=%% HTTP/1.1\r\nhost: h\r\nx-user-id: h\r\n\r\n"
    ),
    "10,000 query pairs": b"GET /reject/h4?%b HTTP/1.1\r\nhost: h\r\nx-user-id: h\r\n\r\n"
    % (b"a=1&" * 10_000),
    "a JWT that is none": (
        b"GET /reject/h5 HTTP/1.1\r\nhost: h\r\nauthorization: Bearer a.b.c\r\nx-user-id: h\r\n\r\n"
    ),
    "a header twice": b"GET /reject/h6 HTTP/1.1\r\nhost: h\r\nx-user-id: a\r\nx-user-id: b\r\n\r\n",
    "absolute form": b"GET http://h/reject/h7 HTTP/1.1\r\nhost: h\r\nx-user-id: h\r\n\r\n",
    "the composite's own marks": (
        b"GET /reject/h8?a%7C=%3D%26|&= HTTP/1.1\r\nhost: h\r\nx-user-id: a|b=c&d%25\r\n\r\n"
    ),
}


@pytest.mark.parametrize("request_", _HOSTILE.values(), ids=_HOSTILE.keys())
def test_hostile_requests_are_counted_without_an_error(shared: Stack, request_: bytes) -> None:
    lines = [_send_raw(shared, request_) for _ in range(3)]

    assert [line.split()[1] for line in lines] == [b"200", b"200", b"429"]
    assert shared.loopguard.metric("fail_open_total") == 0


def test_megabytes_of_headers_are_counted() -> None:
    def generous(config: str) -> str:
        return config.replace(
            "stat_prefix: ", "max_request_headers_kb: 8192\n          stat_prefix: ", 1
        )

    with stack(
        bundle(policy("p", {"pathPrefix": "/"}, mode="shadow")), edit=generous, failure_mode="deny"
    ) as made:
        filler = b"".join(b"x-fill-%d: %s\r\n" % (number, b"y" * 50_000) for number in range(90))
        lines = [
            _send_raw(made, b"GET /big HTTP/1.1\r\nhost: h\r\n" + filler + b"\r\n")
            for _ in range(3)
        ]

        assert made.loopguard.metric("requests_total", policy="p") == 3
        assert made.loopguard.metric("loops_detected_total", policy="p") == 1
        assert made.envoy.stat("http.ingress.ext_proc.loopguard.streams_failed") == 0
        assert all(line.startswith(b"HTTP/1.1 ") for line in lines)


def write_turns(size: int, *, loops: bool) -> bytes:
    """A chat of about this size: eight turns, equal or not, whose results look like messages."""
    turns = []
    for number in range(1, 9):
        name = "a.py" if loops else f"{number}.py"
        text = f'{name}: "}},{{"role":"user","content":"\\'
        turns.append(
            Did(
                (("read", {"path": name}),),
                (text * (size // 8 // len(json.dumps(text))),),
                number=number,
            )
        )
    return json.dumps(as_chat(turns)).encode()


@pytest.mark.parametrize("transport", ["fast", "grpcio"])
def test_loop_in_a_long_streamed_history_is_refused(transport: str) -> None:
    """Only the ends of a streamed body are kept.

    At 4 MB the newest turn alone is certain, and that is no loop.
    """

    def stream(config: str) -> str:
        assert "request_body_mode: BUFFERED\n" in config
        return config.replace("request_body_mode: BUFFERED\n", "request_body_mode: STREAMED\n")

    guarded = bundle(
        policy("p", {"pathPrefix": "/v1/"}, similarity="turns", threshold_identical_requests=3)
    )
    with stack(guarded, "--transport", transport, buffer_limit=8_000_000, edit=stream) as made:
        for size, status in ((500_000, 429), (1_200_000, 429), (4_000_000, 200)):
            assert made.post("/v1/chat/completions", write_turns(size, loops=True)).status == status
            sent = write_turns(size, loops=False)
            assert made.post("/v1/chat/completions", sent).status == 200
            assert made.upstream.seen[-1].body == sent


_LOW_LIMITS = """
from extproc.transport import fast
from extproc.transport.http2 import Http2Limits
FastServer, patience = fast.FastServer, Http2Limits().patience // 20
limits = Http2Limits(patience=patience, patience_per_second=0)
fast.FastServer = lambda *arguments: FastServer(*arguments, limits)
"""


def test_envoy_stays_far_below_the_limits_of_a_peer() -> None:
    """With a twentieth of the patience, no connection is ended, whatever Envoy's clients do."""
    document = bundle(
        policy("reject", {"pathPrefix": "/reject"}),
        policy("hold", {"pathPrefix": "/hold"}, action="throttle", threshold_identical_requests=2),
    )

    def hang_up(number: int) -> None:
        with made.connect() as client:
            head = b"POST /hold HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % (number % 2)
            client.sendall(head + b"x" * (number % 3 % 2))

    def upload(number: int) -> int:
        return made.post(f"/reject/{number % 150}", b"x" * (number % 5 * 40_000)).status

    with (
        stack(document, preamble=_LOW_LIMITS, failure_mode="deny") as made,
        ThreadPoolExecutor(32) as clients,
    ):
        hung_up = clients.map(hang_up, range(200))
        assert set(clients.map(upload, range(600))) == {200, 429}
        list(hung_up)
        eventually(
            lambda: made.loopguard.metric("streams_in_flight") == 0, "the end of all streams"
        )

        assert made.envoy.stat("http.ingress.ext_proc.loopguard.streams_failed") == 0
        assert made.envoy.stat("cluster.loopguard.upstream_cx_total") == 1
