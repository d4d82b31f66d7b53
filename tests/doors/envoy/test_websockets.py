"""WebSockets for model calls are refused, so that clients fall back to HTTP; others pass."""

import base64
import hashlib
import json
import re
import socket
from typing import Any

import h2.config
import h2.connection
import h2.events
import pytest
import websockets.exceptions
import websockets.sync.client

from extproc.engine.orders import ALLOW, BLOCK
from extproc.ext_proc.service import Service
from extproc.pb.external_processor_pb2 import ProcessingRequest
from tests.support.documents import bundle, policy
from tests.support.engine import ANY
from tests.support.harness import PATIENCE, Stack, envoy_version, stack
from tests.support.messages import headers
from tests.support.orders import USER, apply_orders, order
from tests.support.servers import listening
from tests.support.service import decoded, exchange, headers_of, make_service, sample, status

POSTS = {"pathPrefix": "/v1/", "methods": ["POST"]}
WHY = "responses_websocket"


def _greet(client: socket.socket) -> None:
    """An upstream that says hello on a WebSocket and echoes; it answers all else with 200."""
    head = b""
    while b"\r\n\r\n" not in head:
        head += client.recv(65_536)
    key = re.search(rb"(?i)sec-websocket-key: (\S+)", head)
    if key is None:
        client.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        return
    accepted = base64.b64encode(
        hashlib.sha1(key[1] + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()  # noqa: S324
    )
    switching = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    client.sendall(switching + b"sec-websocket-accept: %b\r\n\r\n\x81\x05hello" % accepted)
    while (frame := client.recv(65_536)) and frame[
        0
    ] != 0x88:  # short masked texts, each of which comes back
        mask, said = frame[2:6], frame[6:]
        client.sendall(
            b"\x81%c%b"
            % (len(said), bytes(byte ^ mask[place % 4] for place, byte in enumerate(said)))
        )
    client.sendall(b"\x88\x00")  # closed: the client would wait ten seconds for that


def _open(made: Stack, path: str, **more: str) -> int:
    """The status of a handshake; a WebSocket that opens is tried out."""
    try:
        with websockets.sync.client.connect(
            f"ws://127.0.0.1:{made.envoy.port}{path}", additional_headers=more
        ) as client:
            assert client.recv(PATIENCE) == "hello"
            for word in ("one", "two"):
                client.send(word)
                assert client.recv(PATIENCE) == word
    except websockets.exceptions.InvalidStatus as refusal:
        return refusal.response.status_code
    return 101


_TOLERANT = pytest.mark.skipif(envoy_version() < (1, 38), reason="tolerant mode needs Envoy 1.38")


@pytest.mark.parametrize("body_mode", ["strict", pytest.param("tolerant", marks=_TOLERANT)])
@pytest.mark.parametrize("transport", ["fast", "grpcio"])
def test_websockets_for_model_calls_are_refused_and_others_stream(
    transport: str, body_mode: str
) -> None:
    """Codex gets 426 and falls back to POST, whatever methods the policy names.

    In shadow all pass.
    """
    document = bundle(
        policy("preset", POSTS, **USER, missing_descriptor="require_one"),
        policy("azure", {"pathPrefix": "/openai/", "methods": ["POST"]}, body="ignore"),
        policy("watching", {"pathPrefix": "/shadow/", "methods": ["POST"]}, mode="shadow"),
        policy("elsewhere", {"pathPrefix": "/elsewhere/", "hosts": ["other.example"]}),
        policy("guarded", {"pathPrefix": "/elsewhere/"}, mode="shadow"),
        policy("any", {"pathPrefix": "/any/"}, threshold_identical_requests=2),
    )
    flags = ["--transport", transport]
    with (
        listening(_greet) as upstream,
        stack(document, *flags, upstream=upstream, body_mode=body_mode) as made,
    ):
        refused = [
            _open(made, "/v1/responses"),
            _open(made, "/openai/v1/responses?api-version=preview", x_user_id="ann"),
        ]
        others = [
            "/v1/realtime",
            "/shadow/v1/responses",
            "/elsewhere/v1/responses",
            *["/any/chat"] * 4,
        ]
        passed = [_open(made, path) for path in others]
        posted = [
            made.send(
                "/v1/responses", method="POST", body=b"{}", headers={"x-user-id": "ann"}
            ).status
            for _ in range(3)
        ]

        assert (refused, passed, posted) == ([426, 426], [101] * 7, [200, 200, 429])
        metric = made.loopguard.metric
        for name in ("preset", "azure"):
            assert metric("uncountable_rejected_total", policy=name) == 1
            assert metric("uncounted_total", policy=name, reason=WHY) == 1
        assert metric("uncounted_total", policy="watching", reason=WHY) == 1
        assert metric("uncounted_total", policy="any", reason="upgrade") == 4
        assert metric("uncountable_rejected_total") == 2


def test_websocket_for_model_calls_over_http2_is_refused() -> None:
    """An extended CONNECT (RFC 8441); its refusal has no header that HTTP/2 forbids."""

    def connecting(config: str) -> str:
        options = "http2_protocol_options:\n            initial_stream"
        assert options in config
        return config.replace(
            options, options.replace("initial", "allow_connect: true\n            initial"), 1
        )

    with stack(bundle(policy("p", POSTS)), edit=connecting) as made, made.connect() as connection:
        settings = h2.config.H2Configuration(validate_outbound_headers=False)
        http = h2.connection.H2Connection(settings)
        http.initiate_connection()
        lines = {
            ":method": "CONNECT",
            ":protocol": "websocket",
            ":scheme": "http",
            ":path": "/v1/responses",
            ":authority": "h",
        }
        connection.sendall(http.data_to_send())
        http.receive_data(connection.recv(65_536))  # that it takes an extended CONNECT
        http.send_headers(1, [*lines.items(), ("sec-websocket-version", "13")])
        connection.sendall(http.data_to_send())
        events: list[h2.events.Event] = []
        while not any(isinstance(event, h2.events.ResponseReceived) for event in events):
            events += http.receive_data(connection.recv(65_536))

        answer = next(event for event in events if isinstance(event, h2.events.ResponseReceived))
        assert dict(answer.headers)[b":status"] == b"426"


def handshake(path: str = "/v1/responses", **more: str) -> ProcessingRequest:
    given: dict[str, Any] = {"connection": "Upgrade", "upgrade": "websocket", **more}
    return headers(path, method="GET", **given)


def _refuse(service: Service, message: ProcessingRequest) -> int:
    return status(decoded(exchange(service, message)[-1]))


def test_websocket_refusal_says_to_use_post() -> None:
    """RFC 9110 section 15.5.22."""
    answer = decoded(exchange(make_service(policy("p", POSTS)), handshake())[-1])

    told = headers_of(answer)
    assert (told["Upgrade"], told["Connection"], told["x-should-retry"]) == (
        "HTTP/1.1",
        "Upgrade",
        "false",
    )
    error = json.loads(answer.immediate_response.body)["error"]
    assert error["code"] == WHY
    assert "by HTTP POST" in error["message"]


_ENDED = headers("/v1/responses", method="GET", upgrade="websocket", end=True)
_PROTOCOL: dict[str, Any] = {":protocol": "websocket"}
_REALTIME = handshake("/v1/realtime")
_OF_SPEC = ("uncountable", "bypass")


@pytest.mark.parametrize(
    ("made", "message", "expected"),
    [
        ({}, handshake(), 426),
        ({}, _ENDED, 426),
        ({}, handshake(upgrade="WebSocket"), 426),
        ({}, handshake(upgrade="h2c, websocket/13"), 426),
        ({}, headers("/v1/responses", method="CONNECT", **_PROTOCOL), 426),
        ({}, handshake("/v1/responses/"), 200),
        ({}, handshake(upgrade="h2c"), 200),
        ({}, _REALTIME, 200),
        ({}, handshake("/v2/responses"), 200),
        ({"body": "ignore"}, handshake(), 426),
        ({"limit_keys": ["header:x-user-id"], "missing_descriptor": "skip"}, handshake(), 426),
        ({"limit_keys": ["header:x-user-id"]}, handshake(x_user_id="u" * 9_000), 426),
        ({"limit_keys": ["body:/model"]}, handshake(), 426),
        ({"mode": "shadow"}, handshake(), 200),
        ({"mode": "shadow", "body": "ignore"}, handshake(), 200),
        ({"selector": POSTS | {"hosts": ["host"]}}, handshake(), 426),
        ({"selector": POSTS | {"hosts": ["other"]}}, handshake(), 200),
        ({"selector": POSTS | {"routes": ["r"]}}, handshake(), 200),
        # with `uncountable: reject`, other upgrades that its methods select are refused
        ({"selector": {"pathPrefix": "/v1/"}, "uncountable": "reject"}, _REALTIME, 415),
        ({"selector": {"pathPrefix": "/v1/"}, "uncountable": "reject"}, handshake(), 426),
        ({"bypass": [{"header": "x-trusted"}]}, handshake(x_trusted="1"), 200),
        ({"bypass": [{"header": "x-trusted"}]}, handshake(), 426),
    ],
)
def test_websockets_are_refused_by_path_host_and_route(
    made: dict[str, Any], message: ProcessingRequest, expected: int
) -> None:
    """By every enforcing policy; only the methods of its selector are ignored."""
    document = policy(
        "p", **({"selector": POSTS} | {key: made[key] for key in made if key not in _OF_SPEC})
    )
    document["spec"] |= {key: made[key] for key in made if key in _OF_SPEC}
    service = make_service(document)

    assert [_refuse(service, message) for _ in range(4)] == [expected] * 4  # nor is it ever counted
    websockets_refused = sample(service, "uncountable_rejected_total", policy="p", reason=WHY)
    assert websockets_refused == (4 if expected == 426 else 0)


def test_orders_and_ramps_decide_about_websockets() -> None:
    allowed = apply_orders(make_service(policy("p", ANY, **USER)), order(ALLOW))
    blocked = apply_orders(make_service(policy("p", ANY, **USER)), order(BLOCK))
    ramped = make_service(policy("p", POSTS, **USER, enforce_percent=50))

    assert [_refuse(allowed, handshake(x_user_id=user)) for user in ("ann", "bob")] == [200, 426]
    assert _refuse(blocked, handshake(x_user_id="ann")) == 429
    assert {_refuse(ramped, handshake(x_user_id=str(number))) for number in range(40)} == {200, 426}
