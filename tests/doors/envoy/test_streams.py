"""Streams and long bodies through the real Envoy: gRPC, WebSockets, HTTP/2, histories in pieces, hostile requests."""

from __future__ import annotations

import json
import queue
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
import websockets.sync.client
import websockets.sync.server

from tests.support.documents import bundle, policy
from tests.support.extent import deepen
from tests.support.harness import PATIENCE, Stack, envoy_version, eventually, stack
from tests.support.streams import over_http2
from tests.support.turn_writers import Did, as_anthropic, as_chat, as_responses

_ECHO = "/loopguard.test.Echo"


@contextmanager
def _grpc_upstream() -> Iterator[str]:
    """A gRPC server whose every method, unary or streaming, answers each message with itself."""

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
    policy("ignoring", {"pathExact": f"{_ECHO}/Ignored"}, threshold_identical_requests=3, body="ignore"),
)


_needs_tolerant = pytest.mark.skipif(envoy_version() < (1, 38), reason="tolerant mode needs Envoy 1.38")
_TOLERANT = pytest.param("tolerant", marks=_needs_tolerant)


@pytest.fixture(scope="module", params=["strict", _TOLERANT])
def over_grpc(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """A stack with a gRPC upstream."""
    options = {"upstream_protocol": "http2", "body_mode": request.param}
    with _grpc_upstream() as address, stack(GRPC, upstream=address, **options) as made:
        yield made


@pytest.fixture
def channel(over_grpc: Stack) -> Iterator[grpc.Channel]:
    """A client's connection to it."""
    with grpc.insecure_channel(f"127.0.0.1:{over_grpc.envoy.port}") as opened:
        yield opened


def test_bidirectional_grpc_keeps_streaming(channel: grpc.Channel) -> None:
    """Each message of an open stream is answered before the next is sent, on a guarded route."""
    outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    answers = channel.stream_stream(f"{_ECHO}/Stream")(iter(outgoing.get, None), timeout=PATIENCE)
    for message in (b"0", b"1", b"2"):
        outgoing.put(message)
        assert next(answers) == message
    outgoing.put(None)


def test_unary_grpc_calls_are_never_refused_for_their_unknown_bodies(over_grpc: Stack, channel: grpc.Channel) -> None:
    """GRPC calls whose messages Loopguard does not see never count as equal, and are reported as uncounted."""
    call = channel.unary_unary(f"{_ECHO}/Unary")

    assert [call(b"%d" % number, timeout=PATIENCE) for number in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
    assert over_grpc.loopguard.metric("uncounted_total", policy="unary", reason="grpc") >= 5


def test_a_grpc_loop_is_refused_as_grpc(channel: grpc.Channel) -> None:
    """A policy that ignores bodies refuses with RESOURCE_EXHAUSTED, and our headers arrive as trailing metadata."""
    call = channel.unary_unary(f"{_ECHO}/Ignored")
    for _ in range(2):
        call(b"x", timeout=PATIENCE)
    with pytest.raises(grpc.RpcError) as refusal:
        call(b"x", timeout=PATIENCE)

    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(refusal.value.trailing_metadata())["x-loopguard-policy"] == "ignoring"
    said = refusal.value.details()
    assert said.startswith(f"Loop detected: this identical request (POST {_ECHO}/Ignored) has been sent 3 times")
    assert said.endswith(" (recursive_loop_detected)")


@pytest.mark.parametrize("body_mode", ["strict", _TOLERANT])
def test_websockets_keep_streaming(body_mode: str) -> None:
    """WebSockets through a guarded route open as often as they like and echo message by message."""

    def echo(connection: websockets.sync.server.ServerConnection) -> None:
        for message in connection:
            connection.send(message)

    with websockets.sync.server.serve(echo, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        upstream = f"127.0.0.1:{server.socket.getsockname()[1]}"
        document = bundle(policy("p", {"pathPrefix": "/"}, threshold_identical_requests=2))
        with stack(document, upstream=upstream, body_mode=body_mode) as made:
            for _ in range(4):
                with websockets.sync.client.connect(f"ws://127.0.0.1:{made.envoy.port}/chat") as client:
                    for word in ("one", "two"):
                        client.send(word)
                        assert client.recv(PATIENCE) == word

            assert made.loopguard.metric("uncounted_total", reason="upgrade") == 4
        server.shutdown()


@pytest.mark.parametrize(("path", "trailers"), [("/reject/h2", False), ("/reject", True), ("/beside", True)])
def test_http2_requests_are_counted_like_others(shared: Stack, user: dict[str, str], path: str, trailers: bool) -> None:
    """Whatever the upstream speaks, and also with trailers and no body, where it does not end with its headers."""
    answers = [over_http2(shared, path, user, trailers=trailers) for _ in range(3)]

    assert [status for status, _ in answers] == ["200", "200", "429"]
    assert json.loads(answers[0][1])["number"]


def test_the_stream_is_over_once_decided(shared: Stack, user: dict[str, str]) -> None:
    """While the upstream still works on a request, Loopguard's stream for it has long ended."""
    before = len(shared.upstream.seen)
    head = f"POST /reject/hang HTTP/1.1\r\nhost: h\r\nx-user-id: {user['x-user-id']}\r\ncontent-length: 2\r\n\r\n{{}}"
    with shared.connect() as connection:
        connection.sendall(head.encode())
        eventually(lambda: len(shared.upstream.seen) > before, "the request at the upstream")

        eventually(lambda: shared.loopguard.metric("streams_in_flight") == 0, "the end of the stream")


def _send_raw(made: Stack, request: bytes) -> bytes:
    """The first line of the answer to raw bytes."""
    with made.connect() as connection:
        connection.sendall(request)
        return connection.makefile("rb").readline()


@_needs_tolerant
@pytest.mark.parametrize("path", deepen(["/unmatched/close", "/bodiless/close", "/counted/close"], "/counted/close"))
def test_where_envoy_retries_bodies_arrive_as_they_were_sent(path: str) -> None:
    """What Envoy has collected of a body in parts, and keeps for retries as well, it must not hand on twice."""

    def retried(config: str) -> str:
        host = 'domains: ["*"]'
        assert host in config
        return config.replace(host, f"{host}\n              retry_policy: {{retry_on: connect-failure}}")

    document = bundle(
        policy("counted", {"pathPrefix": "/counted"}), policy("bodiless", {"pathPrefix": "/bodiless"}, body="ignore")
    )
    with stack(document, body_mode="tolerant", buffer_limit=10_485_760, edit=retried) as made:
        for number in range(20):  # of new connections, on which the upstream takes its time
            body = random.Random(number).randbytes(11_000_000)
            assert made.post(f"{path}?{number}", body).status == 200
            assert hash(made.upstream.seen[-1].body) == hash(body)  # which are too long to be shown


_HOSTILE = {
    "invalid UTF-8 in a header": b"GET /reject/h1 HTTP/1.1\r\nhost: h\r\nx-user-id: \xff\xfe\r\n\r\n",
    "%00 in the query": b"GET /reject/h2?a=%00&%00 HTTP/1.1\r\nhost: h\r\nx-user-id: h\r\n\r\n",
    "broken percent encoding": b"GET /reject/h3?%zz=%1&%=%% HTTP/1.1\r\nhost: h\r\nx-user-id: h\r\n\r\n",
    "10,000 query pairs": b"GET /reject/h4?%b HTTP/1.1\r\nhost: h\r\nx-user-id: h\r\n\r\n" % (b"a=1&" * 10_000),
    "a JWT that is none": b"GET /reject/h5 HTTP/1.1\r\nhost: h\r\nauthorization: Bearer a.b.c\r\nx-user-id: h\r\n\r\n",
    "a header twice": b"GET /reject/h6 HTTP/1.1\r\nhost: h\r\nx-user-id: a\r\nx-user-id: b\r\n\r\n",
    "absolute form": b"GET http://h/reject/h7 HTTP/1.1\r\nhost: h\r\nx-user-id: h\r\n\r\n",
    "the composite's own marks": b"GET /reject/h8?a%7C=%3D%26|&= HTTP/1.1\r\nhost: h\r\nx-user-id: a|b=c&d%25\r\n\r\n",
}


@pytest.mark.parametrize("request_", _HOSTILE.values(), ids=_HOSTILE.keys())
def test_hostile_requests_are_answered_and_counted(shared: Stack, request_: bytes) -> None:
    """An odd request is served or refused by count like any other, and nothing goes wrong inside."""
    lines = [_send_raw(shared, request_) for _ in range(3)]

    assert [line.split()[1] for line in lines] == [b"200", b"200", b"429"]
    assert shared.loopguard.metric("fail_open_total") == 0


def test_megabytes_of_headers_reach_the_service_whole() -> None:
    """Where Envoy allows 8 MB of headers, its largest message is read, counted and answered."""

    def generous(config: str) -> str:
        return config.replace("stat_prefix: ", "max_request_headers_kb: 8192\n          stat_prefix: ", 1)

    with stack(bundle(policy("p", {"pathPrefix": "/"}, mode="shadow")), edit=generous, failure_mode="deny") as made:
        filler = b"".join(b"x-fill-%d: %s\r\n" % (number, b"y" * 50_000) for number in range(90))
        lines = [_send_raw(made, b"GET /big HTTP/1.1\r\nhost: h\r\n" + filler + b"\r\n") for _ in range(3)]

        assert made.loopguard.metric("requests_total", policy="p") == 3
        assert made.loopguard.metric("loops_detected_total", policy="p") == 1
        assert made.envoy.stat("http.ingress.ext_proc.loopguard.streams_failed") == 0
        assert all(line.startswith(b"HTTP/1.1 ") for line in lines)


def test_many_requests_at_once_count_exactly_once_each(shared: Stack, user: dict[str, str]) -> None:
    """Two hundred identical requests over twenty connections: exactly two are let through."""
    with ThreadPoolExecutor(20) as pool:
        statuses = list(pool.map(lambda _: shared.send("/reject/race", headers=user).status, range(200)))

    assert sorted(statuses) == [200] * 2 + [429] * 198


WRITERS = {"/v1/chat/completions": as_chat, "/v1/responses": as_responses, "/v1/messages": as_anthropic}
POLICIES = bundle(policy("p", {"pathPrefix": "/v1/"}, similarity="turns", threshold_identical_requests=3))


def stream(config: str) -> str:
    """The same configuration with bodies in pieces."""
    assert "request_body_mode: BUFFERED\n" in config
    return config.replace("request_body_mode: BUFFERED\n", "request_body_mode: STREAMED\n")


@pytest.fixture(scope="module", params=["fast", "grpcio"])
def transport(request: pytest.FixtureRequest) -> str:
    """Every door into the service."""
    name: str = request.param
    return name


@pytest.fixture(scope="module", params=[str, stream], ids=["buffering", "streaming"])
def made(request: pytest.FixtureRequest, transport: str) -> Iterator[Stack]:
    """Envoy sends bodies as a whole or in pieces, of which only the ends are kept."""
    with stack(POLICIES, "--transport", transport, buffer_limit=8_000_000, edit=request.param) as running:
        yield running


def eight_turns(path: str, size: int, *, loops: bool) -> bytes:
    """A request with eight turns, equal or not, of about this many bytes in all; its texts look like messages."""
    turns = []
    for number in range(1, 9):
        name = "a.py" if loops else f"{number}.py"
        text = f'{name}: "}},{{"role":"user","content":"\\'
        turns.append(Did((("read", {"path": name}),), (text * (size // 8 // len(json.dumps(text))),), number=number))
    return json.dumps(WRITERS[path](turns)).encode()


@pytest.mark.parametrize("path", WRITERS)
def test_a_long_history_is_guarded_as_a_short_one_is(made: Stack, path: str) -> None:
    """Eight equal turns in 0.5 or 1.2 MB are a loop; at 4 MB the newest of them alone is certain, and so it is none."""
    for size, status in ((500_000, 429), (1_200_000, 429), (4_000_000, 200)):
        assert made.post(path, eight_turns(path, size, loops=True)).status == status
        sent = eight_turns(path, size, loops=False)
        assert made.post(path, sent).status == 200
        assert made.upstream.seen[-1].body == sent
