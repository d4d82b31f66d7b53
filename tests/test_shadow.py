"""Shadow policies on live traffic: visible in metrics and metadata, invisible to client and upstream."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.documents import bundle, policy
from tests.harness import Stack, stack

_KEYS: dict[str, Any] = {"limit_keys": ["header:x-user-id"], "threshold_identical_requests": 2}
ENFORCING = [
    policy("e-reject", {"pathExact": "/reject"}, limit_keys=["header:x-user-id"]),
    policy("e-warn", {"pathExact": "/warn"}, action="warn", limit_keys=["header:x-user-id"]),
]
SHADOW = [
    policy("s-reject", {"pathPrefix": "/"}, mode="shadow", **_KEYS),
    policy("s-throttle", {"pathPrefix": "/"}, mode="shadow", action="throttle", **_KEYS),
    policy("s-warn", {"pathPrefix": "/"}, mode="shadow", action="warn", **_KEYS),
]

_BROKEN_EVALUATION = """
import extproc.plan
seal = extproc.plan.Entry.seal
def broken(self, head, body, document, scope):
    if self.plan.shadow:
        raise RuntimeError("shadow evaluation is broken")
    seal(self, head, body, document, scope)
extproc.plan.Entry.seal = broken
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

# What Envoy and the upstream make up anew for every request.
_VARYING = re.compile(
    rb"(?im)^(date|x-request-id|x-envoy-upstream-service-time|x-envoy-external-address|x-envoy-expected-rq-timeout-ms): .*\r\n"
)


def _traffic(made: Stack) -> list[tuple[bytes, ...]]:
    """Raw answers to a mix of requests, and what the upstream saw of them."""
    raw: list[tuple[bytes, ...]] = []
    for path in ("/reject", "/warn", "/other"):
        for body in (b"", b"same", b"same", b"same", b"x" * 200_000, b"x" * 200_000):
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
    """The traffic with the enforcing policies alone, on routes that are guarded all the same."""
    with stack(bundle(*ENFORCING, policy("never", {"pathPrefix": "/"}, threshold_identical_requests=1_000_000))) as made:
        return _traffic(made)


@pytest.mark.parametrize(
    "preamble", ["", _BROKEN_EVALUATION, _BROKEN_STORE], ids=["healthy", "evaluation raises", "store fails"]
)
def test_shadow_changes_no_byte(without_shadow: list[tuple[bytes, ...]], preamble: str) -> None:
    """What client and upstream see is the same to the byte with shadow policies of every action, healthy or broken."""
    with stack(bundle(*SHADOW, *ENFORCING), preamble=preamble) as made:
        traffic = _traffic(made)

        assert traffic == without_shadow
        assert b"429" in traffic[3][0].splitlines()[0]
        assert made.loopguard.metric("loops_detected_total", policy="e-reject", mode="enforce") == 1
        if preamble == _BROKEN_EVALUATION:
            assert made.loopguard.metric("fail_open_total", reason="shadow_error") > 0
        elif preamble == _BROKEN_STORE:
            assert made.loopguard.metric("store_errors_total", kind="connection") > 0
        else:
            for action in ("reject", "throttle", "warn"):
                assert made.loopguard.metric("loops_detected_total", policy=f"s-{action}", mode="shadow", action=action) > 0


def test_shadow_counts_apart_and_shows_in_the_access_log(shared: Stack, user: dict[str, str]) -> None:
    """Beside an enforcing policy a canary with a lower threshold reports from its own count, in metrics and metadata."""
    before = shared.loopguard.metric("loops_detected_total", policy="canary", mode="shadow")
    statuses = [shared.send("/beside", headers=user).status for _ in range(3)]

    assert statuses == [200, 200, 429]
    assert shared.loopguard.metric("loops_detected_total", policy="canary", mode="shadow") == before + 2
    assert shared.envoy.logged("/beside", status=200, loop_shadow_policy="canary")["loop_shadow_action"] == "reject"


def test_the_shadow_flag_shadows_everything() -> None:
    """With --shadow an enforcing bundle counts and reports but refuses nothing."""
    with stack(bundle(*ENFORCING), "--shadow") as made:
        statuses = [made.send("/reject", headers={"x-user-id": "ann"}).status for _ in range(5)]

        assert statuses == [200] * 5
        assert made.loopguard.metric("loops_detected_total", policy="e-reject", mode="shadow", action="reject") == 3
