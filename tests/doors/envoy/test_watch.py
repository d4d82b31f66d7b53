"""Watching traffic behind Envoy: shadow policies, and `loopguard serve` without a policy."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from extproc.cli.main import main
from tests.support.documents import bundle, policy
from tests.support.extent import deepen
from tests.support.harness import Stack, envoy_version, eventually, stack
from tests.support.pages import list_loops
from tests.support.turn_writers import Did, as_chat

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
    rb"(?im)^(date|x-request-id|x-envoy-upstream-service-time|x-envoy-external-address"
    rb"|x-envoy-expected-rq-timeout-ms): .*\r\n"
)


_TURN = [
    {
        "role": "assistant",
        "tool_calls": [{"id": "c", "function": {"name": "read_file", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "no such file"},
]
_CALLS = json.dumps(
    {"user": "u", "messages": [{"role": "user", "content": "go"}, *_TURN * 3]}
).encode()
_FRACTIONS = (
    b'{"user": "u", "embedding": [%s1], "messages": [{"role": "user", "content": "hi"}]}'
    % (b"1.5," * 10_001)
)


def _traffic(made: Stack) -> list[tuple[bytes, ...]]:
    """Raw answers to a mix of requests, and the requests that reached the upstream."""
    raw: list[tuple[bytes, ...]] = []
    for path in ("/reject", "/warn", "/other"):
        for body in (
            b"",
            b"same",
            b"same",
            b"same",
            b"x" * 200_000,
            b"x" * 200_000,
            *[_CALLS] * 3,
            *[_FRACTIONS] * 3,
        ):
            head = (
                f"POST {path} HTTP/1.1\r\nhost: h\r\nx-user-id: ann\r\nconnection: "
                f"close\r\ncontent-length: {len(body)}\r\n\r\n"
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
    with stack(
        bundle(
            *ENFORCING, policy("never", {"pathPrefix": "/"}, threshold_identical_requests=1_000_000)
        )
    ) as made:
        return _traffic(made)


@pytest.mark.parametrize(
    "preamble",
    deepen(
        ["", _BROKEN_EVALUATION, _BROKEN_LOOKS, _BROKEN_STORE, _BROKEN_COMPARISON],
        "",
        _BROKEN_EVALUATION,
    ),
    ids=["healthy", "evaluation raises", "looking raises", "store fails", "comparison raises"],
)
def test_shadow_policies_change_no_byte(
    without_shadow: list[tuple[bytes, ...]], preamble: str
) -> None:
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
                assert (
                    made.loopguard.metric(
                        "loops_detected_total", policy=f"s-{action}", mode="shadow", action=action
                    )
                    > 0
                )
            for detector in ("canonical", "tail", "tool_calls"):
                assert (
                    made.loopguard.metric(
                        "detections_total", policy="s-looks", detector=detector, mode="shadow"
                    )
                    > 0
                )
            assert (
                made.loopguard.metric("uncounted_total", policy="s-body", reason="inspect_limit")
                > 0
            )


def test_canary_counts_apart_and_shows_in_access_log(shared: Stack, user: dict[str, str]) -> None:
    before = shared.loopguard.metric("loops_detected_total", policy="canary", mode="shadow")
    assert shared.repeat("/beside", 3, headers=user) == [200, 200, 429]
    assert (
        shared.loopguard.metric("loops_detected_total", policy="canary", mode="shadow")
        == before + 2
    )
    assert (
        shared.envoy.logged("/beside", status=200, loop_shadow_policy="canary")[
            "loop_shadow_action"
        ]
        == "reject"
    )


ENFORCE = "`loopguard init > policies/agents.json`, then `loopguard serve --policy policies/`"
STUCK = Did((("check", {"build": 17}),), ("error: no such build",))
TURNS = 9


@pytest.fixture(scope="module")
def watching() -> Iterator[Stack]:
    if envoy_version() < (1, 38):
        pytest.skip("this Envoy has no shadow mode partial: it is NOT tested")
    with stack(None, shadow_mode="partial") as made:
        for turn in range(TURNS):
            made.post(
                "/v1/chat/completions",
                as_chat([STUCK] * turn),
                {"authorization": "Bearer sk-stuck"},
            )
        yield made


def test_loop_of_an_api_key_is_reported(watching: Stack) -> None:
    report = eventually(lambda: watching.loopguard.ask("/loops") or None)

    loops = [loop for loop in list_loops(report) if loop["tools"] == ["check"]]
    assert {loop["mode"] for loop in loops} == {"shadow"}
    (loop,) = [loop for loop in loops if loop["detector"] == "turns"]
    assert (loop["session"], loop["shadow"]) == (None, {"steer": 2, "land": 2, "reject": 2})
    assert report["total"]["requests_not_sent_on"] == 0
    for turn, seen in enumerate(watching.upstream.seen[:TURNS]):
        assert json.loads(seen.body) == as_chat([STUCK] * turn)
        assert seen.header("x-fairvisor-warning") is None


SIGNED = (
    "AWS4-HMAC-SHA256 Credential={key}/20261128/us-east-1/bedrock/aws4_request, "
    "SignedHeaders=host, Signature={number}"
)
ASKED: Any = [{"role": "user", "content": "again"}]
# By path: the header that shows the key, its form, and a request.
CALLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "/v1/chat/completions": ("authorization", "Bearer {key}", {"messages": ASKED}),
    "/v1/responses": ("authorization", "Bearer {key}", {"input": "again"}),
    "/v1/messages": ("x-api-key", "{key}", {"max_tokens": 64, "messages": ASKED}),
    "/v1beta/models/m:generateContent": (
        "x-goog-api-key",
        "{key}",
        {"contents": [{"role": "user", "parts": [{"text": "again"}]}]},
    ),
    "/model/m/converse": (
        "authorization",
        SIGNED,
        {"messages": [{"role": "user", "content": [{"text": "again"}]}]},
    ),
    "/api/chat": ("authorization", "Bearer {key}", {"messages": ASKED}),
}


@pytest.mark.parametrize("path", CALLS)
def test_repeated_request_is_a_loop_of_its_key(watching: Stack, path: str) -> None:
    """The requests of another key beside it are counted apart."""
    header, shown, body = CALLS[path]
    for number in range(14):
        key = f"sk-{path.replace('/', '-')}-{'one' if number % 7 < 5 else 'two'}"
        assert (
            watching.post(
                path, {"model": "m", **body}, {header: shown.format(key=key, number=number)}
            ).status
            == 200
        )

    loops = [loop for loop in list_loops(watching.loopguard.ask("/loops")) if loop["path"] == path]
    assert [(loop["count"], loop["shadow"]) for loop in loops if loop["detector"] == "again"] == [
        (10, {"throttle": 6})
    ]
    assert "sk-" not in watching.loopguard.get("/loops")[1] + watching.loopguard.output()


def test_every_report_says_it_only_watches(
    watching: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    replica = watching.loopguard
    policies = replica.ask("/policies")
    assert main(["top", "--once", "--admin", replica.admin_url]) == 0
    top = " ".join(capsys.readouterr().out.split())
    main(["doctor", "--admin", replica.admin_url])

    assert f"change: {ENFORCE}" in capsys.readouterr().out
    for told in (replica.output(), replica.ask("/readyz")["watching"], policies["watching"], top):
        assert ENFORCE in told
    assert policies["modes"] == {"agents": "shadow"}
    assert "only watches" in replica.get("/")[1]


def test_server_with_a_policy_does_not_say_it_watches(shared: Stack) -> None:
    assert "watching" not in shared.loopguard.ask("/readyz") | shared.loopguard.ask("/policies")
    assert "only watches" not in shared.loopguard.get("/")[1] + shared.loopguard.output()


def test_empty_policy_variable_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It must not turn a guard into a watcher."""
    monkeypatch.setenv("LOOPGUARD_POLICY", "")

    assert main(["serve"]) == 2
    assert "LOOPGUARD_POLICY is empty; " in capsys.readouterr().err
