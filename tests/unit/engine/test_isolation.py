"""Shadow policies, healthy or failing, change nothing that Envoy is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.engine.guards import Kept
from extproc.ext_proc.budget import BURST_SECONDS
from extproc.ext_proc.service import Service
from extproc.store.pushes import AnyPush
from extproc.store.rules.session import Question
from tests.support.documents import policy
from tests.support.examples import examples
from tests.support.messages import body, headers
from tests.support.service import FailingStore, decoded, exchange, make_service, repeat, sample

USER: dict[str, Any] = {"limit_keys": ["header:x-user-id"], "threshold_identical_requests": 2}
ENFORCING = [
    policy("reject", {"pathExact": "/reject"}, **USER),
    policy("warn", {"pathExact": "/warn"}, action="warn", **USER),
    policy("hold", {"pathExact": "/hold"}, action="throttle", **USER),
    policy("head", {"pathExact": "/head"}, body="ignore", **USER),
    policy("head-hold", {"pathExact": "/head-hold"}, body="ignore", action="throttle", **USER),
    policy("steer", {"pathExact": "/steer"}, similarity="tool_calls", action="steer", escalate={"reject": 3}, **USER),
]
PATHS = ["/reject", "/warn", "/hold", "/head", "/head-hold", "/steer", "/nobody"]

_TURN = [
    {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "grep", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "nothing"},
]
BODIES = [
    None,
    b"",
    b"not JSON",
    *(
        json.dumps({"user": "u", "messages": [{"role": "user", "content": "go"}, *_TURN * turns]}).encode()
        for turns in (1, 2, 3)
    ),
]


class Sent(NamedTuple):
    """One request."""

    path: str
    user: str
    body: bytes | None


TRAFFIC = st.lists(
    st.builds(Sent, st.sampled_from(PATHS), st.sampled_from(["ann", "bob", ""]), st.sampled_from(BODIES)),
    min_size=1,
    max_size=4,
).flatmap(lambda kinds: st.lists(st.sampled_from(kinds), min_size=4, max_size=10))
"""Few kinds of requests, so that most of them repeat."""

SHADOWS = st.lists(
    st.fixed_dictionaries(
        {
            "similarity": st.sampled_from(["exact", "canonical", "tail", "tool_calls", "turns", "mcp"]),
            "action": st.sampled_from(["reject", "throttle", "steer", "warn"]),
            "limit_keys": st.sampled_from([["header:x-user-id"], ["body:/user"], ["header:x-user-id", "query:q"]]),
            "missing_descriptor": st.sampled_from(["require_one", "skip", "share"]),
            "uncountable": st.sampled_from(["allow", "reject"]),
            "cooldown_seconds": st.sampled_from([0, 60]),
            "canary_of": st.sampled_from([None, *(each["id"] for each in ENFORCING)]),
            "session": st.sampled_from([None, {}]),
        }
    ),
    min_size=1,
    max_size=3,
)
HEALTH = ["healthy", "slow", "raises", "store fails", "store fails later"]


class Still(FailingStore):
    """A store whose clock stands, so that no answer depends on how busy the machine is."""

    def hit(self, hits: Sequence[Question], now: int | None = None) -> list[Any] | Awaitable[list[Any]]:  # noqa: ARG002  # stands
        """Count or fail."""
        return super().hit(hits, 1_000_000)

    def push(self, pushes: Sequence[AnyPush], now: int | None = None) -> Sequence[Kept] | Awaitable[Sequence[Kept]]:  # noqa: ARG002  # stands
        """Push or fail."""
        return super().push(pushes, 1_000_000)


def make_shadow(number: int, shape: dict[str, Any]) -> dict[str, Any]:
    loop = {name: shape[name] for name in ("similarity", "action", "cooldown_seconds")}
    made = policy(f"shadow-{number}", {"pathPrefix": "/"}, mode="shadow", threshold_identical_requests=2, **loop)
    spec = ("limit_keys", "missing_descriptor", "uncountable", "canary_of", "session")
    made["spec"] |= {name: shape[name] for name in spec if shape[name] is not None}
    return made


def watched(shapes: Sequence[dict[str, Any]], health: str) -> Service:
    failing = "shadow:" if health.startswith("store fails") else "never"
    store = Still(failing=failing, later=health in ("slow", "store fails later"))
    shadows = [make_shadow(number, shape) for number, shape in enumerate(shapes)]
    service = make_service(*shadows, *ENFORCING, store=store)
    if health == "raises":
        for plan in service.engine.plans:
            if plan.shadow:
                plan.detectors = (None,)  # type: ignore[assignment]  # as a bug would
    return service


def list_effects(service: Service, traffic: Sequence[Sent]) -> list[list[tuple[bytes, int, bytes]]]:
    """What Envoy is told about each request except to continue, without dynamic metadata, which no client sees."""
    effects = []
    for sent in traffic:
        ended = sent.body is None
        messages = [headers(sent.path, end=ended, **({"x_user_id": sent.user} if sent.user else {}))]  # type: ignore[arg-type]  # of **more
        messages += [] if sent.body is None else [body(sent.body)]
        told = []
        for reply in exchange(service, *messages):
            answer = decoded(reply)
            answer.ClearField("dynamic_metadata")
            data = answer.SerializeToString()
            if len(data) > 2 or reply.hold_ms:
                told.append((data, reply.hold_ms, reply.first))
        effects.append(told)
    return effects


@pytest.mark.slow
@pytest.mark.parametrize("health", HEALTH)
@settings(max_examples=examples(40))  # for each state of health
@given(shapes=SHADOWS, traffic=TRAFFIC)
def test_shadow_policies_change_no_effect(health: str, shapes: list[dict[str, Any]], traffic: list[Sent]) -> None:
    alone = make_service(*ENFORCING, store=Still(failing="never"))

    assert list_effects(watched(shapes, health), traffic) == list_effects(alone, traffic)


class Silent(FailingStore):
    """A store that never answers about keys of shadow policies."""

    def hit(self, hits: Sequence[Question], now: int | None = None) -> list[Any] | Awaitable[list[Any]]:
        """Count, or wait for ever."""
        if any("shadow:" in hit.key for hit in hits):
            return asyncio.Event().wait()  # type: ignore[return-value]  # it never comes
        return super().hit(hits, now)


@pytest.mark.parametrize("later", [False, True])
def test_answer_leaves_at_deadline_of_shadow_policies(later: bool) -> None:
    store = Silent(failing="never", later=later)
    service = make_service(policy("live", ROOT, **USER), policy("watches", ROOT, mode="shadow", **USER), store=store)

    answers = [decoded(exchange(service, headers(x_user_id="ann"), body(b"x"))[-1]) for _ in range(2)]

    assert [answer.immediate_response.status.code for answer in answers] == [0, 429]
    assert sample(service, "uncounted_total", policy="watches", reason="shadow_deadline") == 2
    assert sample(service, "requests_total", policy="live", mode="enforce", action="allow") == 1


def test_body_read_only_by_shadow_policies_shapes_no_refusal() -> None:
    call = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "grep", "arguments": {}}}
    live = policy("live", ROOT, **USER)
    watching = policy("watches", ROOT, mode="shadow", similarity="canonical", **USER)

    alone, beside = [
        repeat(service, headers("/", x_user_id="ann"), body(json.dumps(call).encode()), times=2)
        for service in (make_service(live), make_service(live, watching))
    ]

    assert alone.immediate_response.status.code == 429
    assert alone.immediate_response == beside.immediate_response


SHAPE = {
    "similarity": "exact", "action": "reject", "limit_keys": ["header:x-user-id"], "missing_descriptor": "skip",
    "uncountable": "allow", "cooldown_seconds": 0, "canary_of": "warn", "session": None,
}  # fmt: skip


def test_traffic_of_isolation_tests_meets_every_action() -> None:
    """The traffic of these tests is refused, held, steered and warned about, and shadow policies would refuse more of it."""
    traffic = [Sent(path, "ann", BODIES[4]) for path in PATHS for _ in range(2)]
    service = watched([SHAPE], "healthy")

    effects = list_effects(service, traffic)

    acted = {path for path, told in zip([sent.path for sent in traffic], effects, strict=True) if told}
    assert acted == set(PATHS) - {"/nobody"}
    assert any(hold for told in effects for _, hold, _ in told)
    (pair,) = service.pairs.list_pairs()
    assert (pair.both, pair.extra > 0) == (1, True)


@pytest.mark.parametrize("health", ["raises", "store fails", "store fails later"])
def test_failures_of_shadow_policies_are_counted(health: str) -> None:
    service = watched([SHAPE], health)

    list_effects(service, [Sent("/warn", "ann", b"x")])

    assert sample(service, "fail_open_total", reason="shadow_error") == (health == "raises")
    assert sample(service, "store_errors_total", kind="connection") == (health != "raises")


ROOT = {"pathExact": "/"}
READER = {"similarity": "tail", **USER}
ACTS = policy("acts", ROOT, **READER)
WATCHES = policy("watches", ROOT, mode="shadow", **READER)


def test_shadow_inspection_costs_enforcing_policies_no_time() -> None:
    alone, beside = make_service(WATCHES), make_service(ACTS, WATCHES)

    for service in (alone, beside):
        exchange(service, headers(x_user_id="ann"), body(BODIES[-1] or b""))
        service.budget.spend("x-user-id=ann", BURST_SECONDS - 1e-9)

    assert alone.budget.allows("x-user-id=ann", 0.0)
    assert not alone.budget.allows("x-user-id=ann", 0.0, shadow=True)
    assert not beside.budget.allows("x-user-id=ann", 0.0)


def test_shadow_policies_without_time_left_count_nothing() -> None:
    service = make_service(ACTS, WATCHES)
    service.budget.allows("x-user-id=ann", perf_counter())
    service.budget.spend("x-user-id=ann", 1_000, shadow=True)

    answers = [decoded(exchange(service, headers(x_user_id="ann"), body(BODIES[-1] or b""))[-1]) for _ in range(2)]

    assert [answer.immediate_response.status.code for answer in answers] == [0, 429]
    uncounted = [sample(service, "uncounted_total", policy=name, reason="inspect_budget") for name in ("acts", "watches")]
    assert uncounted == [0, 2]
