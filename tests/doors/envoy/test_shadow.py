"""Shadow policies on live traffic: visible in metrics and metadata, invisible to client and upstream."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.support.documents import bundle, policy
from tests.support.extent import deepen
from tests.support.harness import Stack, stack

_KEYS: dict[str, Any] = {"limit_keys": ["header:x-user-id"], "threshold_identical_requests": 2}
ENFORCING = [
    policy("e-reject", {"pathExact": "/reject"}, limit_keys=["header:x-user-id"]),
    policy("e-warn", {"pathExact": "/warn"}, action="warn", limit_keys=["header:x-user-id"]),
]
SHADOW = [
    policy("s-reject", {"pathPrefix": "/"}, mode="shadow", canary_of="e-reject", **_KEYS),
    policy("s-throttle", {"pathPrefix": "/"}, mode="shadow", action="throttle", **_KEYS),
    policy("s-warn", {"pathPrefix": "/"}, mode="shadow", action="warn", **_KEYS),
    policy(
        "s-body",
        {"pathPrefix": "/"},
        mode="shadow",
        canary_of="e-warn",
        limit_keys=["body:/user"],
        threshold_identical_requests=2,
    ),
]
LOOKING = policy("s-looks", {"pathPrefix": "/"}, mode="shadow", **_KEYS)
LOOKING["spec"]["loop_detection"] = [
    {**LOOKING["spec"]["loop_detection"], "similarity": similarity, **more}
    for similarity, more in (
        ("canonical", {"ignore_fields": ["/user"]}),
        ("tail", {"action": "throttle"}),
        ("tool_calls", {"action": "warn", "cooldown_seconds": 60}),
    )
]
SHADOW.append(LOOKING)

_BROKEN_EVALUATION = """
import extproc.reload
Engine = extproc.reload.Engine
def broken(*arguments, **options):
    engine = Engine(*arguments, **options)
    for plan in engine.plans:
        if plan.shadow:
            plan._descriptors = (None,)
    return engine
extproc.reload.Engine = broken
"""
_BROKEN_LOOKS = """
import msgspec.json
Decoder = msgspec.json.Decoder
class Broken:
    def decode(self, _):
        raise MemoryError("decoding is broken")
def make(*types, **options):
    return Decoder(*types, **options) if types else Broken()
msgspec.json.Decoder = make
"""
_BROKEN_STORE = """
import extproc.store.memory
from extproc.errors import StoreError
hit = extproc.store.memory.MemoryStore.hit
def broken(self, hits, now=None):
    if any(item.key.startswith("shadow:") for item in hits):
        raise StoreError("the store is down for shadow keys", kind="connection")
    return hit(self, hits, now)
extproc.store.memory.MemoryStore.hit = broken
"""
_BROKEN_COMPARISON = """
import extproc.server
Service = extproc.server.Service
def broken(*arguments, **options):
    service = Service(*arguments, **options)
    for pair in service.pairs.list_pairs():
        pair.tenants._kept.append(None)
    return service
extproc.server.Service = broken
"""

# What Envoy and the upstream make up anew for every request.
_VARYING = re.compile(
    rb"(?im)^(date|x-request-id|x-envoy-upstream-service-time|x-envoy-external-address|x-envoy-expected-rq-timeout-ms): .*\r\n"
)


_TURN = [
    {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "read_file", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "no such file"},
]
_CALLS = json.dumps({"user": "u", "messages": [{"role": "user", "content": "go"}, *_TURN * 3]}).encode()
_FRACTIONS = b'{"user": "u", "embedding": [%s1], "messages": [{"role": "user", "content": "hi"}]}' % (b"1.5," * 10_001)


def _traffic(made: Stack) -> list[tuple[bytes, ...]]:
    """Raw answers to a mix of requests, and what the upstream saw of them."""
    raw: list[tuple[bytes, ...]] = []
    for path in ("/reject", "/warn", "/other"):
        for body in (b"", b"same", b"same", b"same", b"x" * 200_000, b"x" * 200_000, *[_CALLS] * 3, *[_FRACTIONS] * 3):
            head = (
                f"POST {path} HTTP/1.1\r\nhost: h\r\nx-user-id: ann\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            with made.connect() as connection:
                connection.sendall(head.encode() + body)
                raw.append((_VARYING.sub(b"", connection.makefile("rb").read()),))
    for seen in made.upstream.seen:
        lines = "".join(f"{name}: {value}\r\n" for name, value in seen.headers).encode()
        raw.append((f"{seen.method} {seen.target}".encode(), _VARYING.sub(b"", lines), seen.body))
    return raw


@pytest.fixture(scope="module")
def without_shadow() -> list[tuple[bytes, ...]]:
    """The traffic with the enforcing policies alone, on routes that are still guarded."""
    with stack(bundle(*ENFORCING, policy("never", {"pathPrefix": "/"}, threshold_identical_requests=1_000_000))) as made:
        return _traffic(made)


@pytest.mark.parametrize(
    "preamble",
    deepen(["", _BROKEN_EVALUATION, _BROKEN_LOOKS, _BROKEN_STORE, _BROKEN_COMPARISON], "", _BROKEN_EVALUATION),
    ids=["healthy", "evaluation raises", "looking raises", "store fails", "comparison raises"],
)
def test_shadow_changes_no_byte(without_shadow: list[tuple[bytes, ...]], preamble: str) -> None:
    """What client and upstream see is the same to the byte with shadow policies of every action, healthy or broken."""
    with stack(bundle(*SHADOW, *ENFORCING), preamble=preamble) as made:
        traffic = _traffic(made)

        assert traffic == without_shadow
        assert b"429" in traffic[3][0].splitlines()[0]
        assert made.loopguard.metric("loops_detected_total", policy="e-reject", mode="enforce") == 3
        if preamble in (_BROKEN_EVALUATION, _BROKEN_LOOKS, _BROKEN_COMPARISON):
            assert made.loopguard.metric("fail_open_total", reason="shadow_error") > 0
        elif preamble == _BROKEN_STORE:
            assert made.loopguard.metric("store_errors_total", kind="connection") > 0
        else:
            for action in ("reject", "throttle", "warn"):
                assert made.loopguard.metric("loops_detected_total", policy=f"s-{action}", mode="shadow", action=action) > 0
            for detector in ("canonical", "tail", "tool_calls"):
                assert made.loopguard.metric("detections_total", policy="s-looks", detector=detector, mode="shadow") > 0
            assert made.loopguard.metric("uncounted_total", policy="s-body", reason="inspect_limit") > 0


def test_shadow_counts_apart_and_shows_in_the_access_log(shared: Stack, user: dict[str, str]) -> None:
    """Beside an enforcing policy a canary with a lower threshold reports from its own count, in metrics and metadata."""
    before = shared.loopguard.metric("loops_detected_total", policy="canary", mode="shadow")
    assert shared.repeat("/beside", 3, headers=user) == [200, 200, 429]
    assert shared.loopguard.metric("loops_detected_total", policy="canary", mode="shadow") == before + 2
    assert shared.envoy.logged("/beside", status=200, loop_shadow_policy="canary")["loop_shadow_action"] == "reject"


def test_the_shadow_flag_shadows_everything() -> None:
    """With --shadow an enforcing bundle counts and reports but refuses nothing."""
    with stack(bundle(*ENFORCING), "--shadow") as made:
        assert made.repeat("/reject", 5, headers={"x-user-id": "ann"}) == [200] * 5
        assert made.loopguard.metric("loops_detected_total", policy="e-reject", mode="shadow", action="reject") == 3
