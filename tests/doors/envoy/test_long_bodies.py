"""Histories above `max_inspect_bytes` through the real Envoy: a loop in them is refused, and all others arrive whole."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.documents import bundle, policy
from tests.support.harness import Stack, stack
from tests.support.turn_writers import Did, as_anthropic, as_chat, as_responses

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
