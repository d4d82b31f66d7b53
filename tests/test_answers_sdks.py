"""What programs get from their SDKs when a request is refused: the real SDKs, through the real Envoy and Loopguard."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from tests.documents import bundle, policy
from tests.harness import Stack, stack
from tests.sdks import SDKS, USER, Job, Reply

KEYS = [f"header:{USER}"]
POLICIES = bundle(
    policy("turns", {"pathPrefix": "/"}, similarity="turns", reject_status=400, limit_keys=KEYS),
    policy("rpc", {"pathExact": "/rpc.Echo/Call"}, body="ignore", limit_keys=KEYS),
)


@pytest.fixture(scope="module")
def gate() -> Iterator[Stack]:
    """Envoy and Loopguard."""
    with stack(POLICIES) as made:
        yield made


def ask(gate: Stack, sdk: str, user: dict[str, str], path: str = "", *, stream: bool = False) -> tuple[Reply, int]:
    """What the SDK makes of the refusal of a stuck agent, and how many requests it sends for that."""
    before = count_requests(gate)
    reply = SDKS[sdk](Job(f"http://127.0.0.1:{gate.envoy.port}{path}", user[USER], stream))
    return reply, count_requests(gate) - before


def count_requests(gate: Stack) -> int:
    """That have come to Envoy."""
    return gate.envoy.stat("http.ingress.downstream_rq_total")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("sdk", SDKS)
def test_each_sdk_shows_the_reason(gate: Stack, sdk: str, user: dict[str, str], stream: bool) -> None:
    """The text of its exception says what repeats, with the code."""
    reply, _ = ask(gate, sdk, user, stream=stream)

    assert reply.status == 400
    assert "Loop detected: 3 of the last 3 turns were check with the same input and the same result" in reply.text
    assert "(recursive_loop_detected)" in reply.text


def test_grpc_clients_read_words(gate: Stack, user: dict[str, str]) -> None:
    """The status is RESOURCE_EXHAUSTED, and its details are the message alone."""
    metadata = list(user.items())
    with grpc.insecure_channel(f"127.0.0.1:{gate.envoy.port}") as channel:
        call = channel.unary_unary("/rpc.Echo/Call")
        for _ in range(3):
            with pytest.raises(grpc.RpcError) as refusal:
                call(b"", metadata=metadata, timeout=10)

    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refusal.value.details().startswith(
        "Loop detected: this identical request (POST /rpc.Echo/Call) has been sent 3 times"
    )
    assert refusal.value.details().endswith(" (recursive_loop_detected)")
