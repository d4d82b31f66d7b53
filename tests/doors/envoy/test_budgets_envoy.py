"""Budgets on the real Envoy, two replicas and Valkey: shared, settled and given back."""

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.documents import bare_policy, bundle
from tests.support.harness import PATIENCE, Answer, Stack, envoy_version, eventually, stack
from tests.support.servers import server
from tests.support.stacks import open_before_model
from tests.support.usage import CHAT_USAGE, DELTA, Model, Reply, stream, whole

pytestmark = pytest.mark.skipif(
    envoy_version() < (1, 38), reason="this Envoy reads no answers: budgets are NOT settled"
)

CHAT = "/chat/completions"
REJECT = [{"threshold_percent": 100, "action": "reject"}]


def limited(
    identity: str, kind: str = "cost_based", more: dict[str, Any] | None = None, **config: object
) -> dict[str, Any]:
    """A policy of one rule for requests below its name; costs are those of a week."""
    if kind == "cost_based":
        config = {"period": "7d", "staged_actions": REJECT, **config}
    rule = {
        "name": f"{identity}-rule",
        "limit_keys": ["header:x-api-key"],
        "algorithm": kind,
        "algorithm_config": config,
    }
    return bare_policy(identity, f"/{identity}/", rules=[rule], **(more or {}))


BREAKER = {
    "enabled": True,
    "spend_rate_threshold_per_minute": 4,
    "action": "reject",
    "alert": True,
    "auto_reset_after_minutes": 5,
}
USED = {"prompt_tokens": 1, "completion_tokens": 1_999, "total_tokens": 2_000}
LOOP = {
    "enabled": True,
    "window_seconds": 60,
    "threshold_identical_requests": 3,
    "action": "reject",
    "similarity": "exact",
}
STAGES = [
    {"threshold_percent": 80, "action": "warn"},
    {"threshold_percent": 95, "action": "throttle", "delay_ms": 20},
    *REJECT,
]
LLM: dict[str, Any] = {
    "algorithm": "token_bucket_llm",
    "tokens_per_minute": 1,
    "tokens_per_day": 2_000_000,
    "burst_tokens": 10_000,
    "default_max_completion_tokens": 1024,
}
POLICIES = bundle(
    limited("minimal", "token_bucket", tokens_per_second=0.01, burst=3),
    limited("loop", "token_bucket", {"loop_detection": LOOP}, tokens_per_second=0.01, burst=20),
    limited(
        "shadow",
        "token_bucket",
        {"mode": "shadow", "loop_detection": LOOP},
        tokens_per_second=0.01,
        burst=2,
    ),
    limited("cost", budget=10, cost_key="fixed", fixed_cost=1, staged_actions=STAGES),
    limited("breaker", more={"circuit_breaker": BREAKER}, budget=10_000),
    limited("llm", "token_bucket_llm", **LLM),
    limited("tokens", budget=1_000_000, cost_key="usage:tokens"),
    limited("shared", more={"missing_descriptor": "share"}, budget=3, cost_key="fixed"),
    limited("strict", more={"uncountable": "reject"}, budget=3, cost_key="fixed"),
    limited("plain", budget=10_000, cost_key="usage:tokens"),
    limited("asks", budget=10_000, cost_key="usage:tokens", usage="request"),
    kill_switches=[
        {"scope_key": "header:x-tenant-id", "scope_value": "tenant-42", "reason": "incident_block"}
    ],
)


class Shop:
    """Envoy before a model that reports tokens, two replicas and Valkey."""

    def __init__(self, made: Stack, model: Model) -> None:
        self.made = made
        self.model = model
        self._used: Counter[str] = Counter()

    def ask(self, path: str, key: str, reply: Reply | None = None, **body: object) -> Answer:
        self.model.reply = reply or whole(usage={"prompt_tokens": 0, "completion_tokens": 0})
        return self.made.post(
            path, {"messages": [{"role": "user", "content": "x" * 40}], **body}, {"x-api-key": key}
        )

    def settle(self, policy: str) -> int:
        """The tokens that the newest request has paid, once that is known."""

        def read() -> float:
            return (
                self.made.total("budget_used_total", policy=policy, mode="enforce")
                - self._used[policy]
            )

        paid = round(eventually(read, "a settlement"))
        self._used[policy] += paid
        return paid


@pytest.fixture(scope="module")
def shop() -> Iterator[Shop]:
    with open_before_model(POLICIES, replicas=2) as opened:
        yield Shop(*opened)


def crowd(made: Stack, path: str, key: str, times: int) -> list[int]:
    with ThreadPoolExecutor(8) as pool:
        return sorted(
            pool.map(lambda _: made.post(path, {}, {"x-api-key": key}).status, range(times))
        )


def test_replicas_share_a_bucket_and_its_headers_reach_clients(shop: Shop) -> None:
    answers = [shop.ask("/minimal/x", "ann") for _ in range(4)]

    assert [answer.status for answer in answers] == [200, 200, 200, 429]
    assert [answer.headers["ratelimit-remaining"] for answer in answers] == ["2", "1", "0", "0"]
    assert answers[0].headers["ratelimit"] == '"minimal";r=2;t=100'
    assert not [name for name in answers[0].headers if name.startswith("x-ratelimit")]
    told = answers[3].headers
    assert 90 <= int(told["retry-after"]) <= 100
    assert (told["ratelimit-limit"], told["ratelimit-reset"]) == ("3", told["retry-after"])
    assert told["x-fairvisor-reason"] == "token_bucket_exceeded"
    assert shop.ask("/minimal/x", "bob").status == 200


def test_concurrent_requests_spend_exactly_the_budget(shop: Shop) -> None:
    assert crowd(shop.made, "/cost/x", "crowd", 60) == [200] * 10 + [429] * 50
    refusal = shop.ask("/cost/x", "crowd")
    assert refusal.headers["x-fairvisor-reason"] == "budget_exceeded"
    assert 0 < int(refusal.headers["retry-after"]) <= 604_800


def test_tokens_are_settled_by_reported_usage(shop: Shop) -> None:
    """Cached tokens count, also beyond the estimate."""
    usage = {
        "prompt_tokens": 5_000,
        "completion_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 4_000},
    }
    for _ in range(4):
        assert shop.ask(f"/tokens{CHAT}", "ann", whole(usage=usage)).status == 200
        assert shop.settle("tokens") == 5_017

    last = shop.ask(
        f"/tokens{CHAT}", "ann", messages=[{"role": "user", "content": "1234"}], max_tokens=7
    )

    left = 1_000_000 - 4 * 5_017 - 8
    assert int(last.headers["ratelimit-remaining"]) == left
    told = {name: value for name, value in last.headers.items() if name.startswith("x-ratelimit")}
    reset = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(\d+)s", told.pop("x-ratelimit-reset-tokens"))
    assert reset
    hours, minutes, seconds = map(int, reset.groups("0"))
    assert hours * 3_600 + minutes * 60 + seconds == int(last.headers["ratelimit-reset"])
    assert told == {
        "x-ratelimit-limit-tokens": "1000000",
        "x-ratelimit-remaining-tokens": f"{left}",
    }


@pytest.mark.parametrize(
    ("shape", "passed", "code"),
    [
        ("minimal", 3, "token_bucket_exceeded"),
        ("loop", 2, "recursive_loop_detected"),
        ("shadow", 6, ""),
        ("cost", 10, "budget_exceeded"),
        ("breaker", 3, "circuit_breaker_open"),
        ("llm", 5, "tpm_exceeded"),
        ("killed", 0, "kill_switch"),
    ],
)
def test_each_documented_rule_limits_the_openai_sdk(
    shop: Shop, shape: str, passed: int, code: str
) -> None:
    import openai

    url = f"http://127.0.0.1:{shop.made.envoy.port}/{'minimal' if shape == 'killed' else shape}"
    headers = {
        "x-api-key": f"sdk-{shape}",
        "x-tenant-id": "tenant-42" if shape == "killed" else "other",
    }
    client = openai.OpenAI(
        api_key="k", base_url=url, default_headers=headers, max_retries=0, timeout=PATIENCE
    )
    shop.model.reply = whole(
        id="x", object="chat.completion", created=1, model="m", choices=[], usage=USED
    )

    def call() -> None:
        client.chat.completions.create(
            model="m", max_tokens=1_999, messages=[{"role": "user", "content": "four"}]
        )

    for _ in range(passed):
        call()
    if code:
        with pytest.raises(openai.RateLimitError) as refusal:
            call()
        assert refusal.value.code == code


def test_replicas_without_a_store_enforce_half_each() -> None:
    policy = bundle(limited("halves", budget=10, cost_key="fixed"))
    with (
        server() as valkey,
        stack(policy, "--store", f"redis://{valkey.address}", replicas=2) as made,
    ):
        eventually(
            lambda: [replica.metric("replicas") for replica in made.replicas] == [2, 2],
            "both replicas",
        )

        valkey.kill()
        alone = crowd(made, "/halves/x", "ann", 60)
        valkey.start()
        eventually(
            lambda: all(
                replica.metric("store_up", shard=valkey.address) for replica in made.replicas
            ),
            "the store",
        )
        together = crowd(made, "/halves/x", "bob", 60)

    assert alone == together == [200] * 10 + [429] * 50


# ---- Every request pays


def test_caller_that_hides_its_key_pays_or_is_refused(shop: Shop) -> None:
    """Envoy removes headers that `Connection` names before any filter sees them."""
    headers = {"connection": "x-api-key", "x-api-key": "k"}

    assert shop.made.repeat("/shared/x", 8, body=b"{}", headers=headers) == [200] * 3 + [429] * 5
    assert shop.made.repeat("/strict/x", 2, body=b"{}", headers=headers) == [400, 400]


@pytest.mark.parametrize("begun", [False, True])
def test_clients_that_leave_pay_what_they_reserved(shop: Shop, begun: bool) -> None:
    """Before an answer, or after its first event."""
    key, came, gone = f"leaver-{begun}", threading.Event(), threading.Event()

    def wait() -> bytes:
        came.set()
        gone.wait(PATIENCE)
        return b"data: [DONE]\n\n"

    reply = (
        stream(DELTA)._replace(parts=[*stream(DELTA).parts, wait])
        if begun
        else stream(DELTA)._replace(before=wait)
    )
    body = json.dumps(
        {"model": "m", "max_tokens": 990, "messages": [{"role": "user", "content": "x" * 40}]}
    ).encode()
    head = (
        f"POST /plain{CHAT} HTTP/1.1\r\nhost: h\r\nx-api-key: {key}\r\ncontent-length: "
        f"{len(body)}\r\n\r\n"
    )
    shop.model.reply = reply
    paid = []
    for _ in range(10):
        came.clear()
        with shop.made.connect() as client:
            client.sendall(head.encode() + body)
            assert came.wait(PATIENCE)
            assert not begun or client.recv(4_000).startswith(b"HTTP/1.1 200")
        paid.append(shop.settle("plain"))
    gone.set()

    assert paid == [1_000] * 10
    assert shop.ask(f"/plain{CHAT}", key, whole(usage=CHAT_USAGE)).status == 429


EVENT = {"choices": [{"index": 0, "delta": {"content": "x" * 8_000}}]}
GEMINI = "/v1beta/models/gemini-2.5-pro:generateContent"


@pytest.mark.parametrize(
    ("path", "reply", "more", "paid"),
    [
        (
            f"/asks{CHAT}",
            stream(DELTA, {**DELTA, "choices": [], "usage": CHAT_USAGE}, "[DONE]"),
            {"stream": True},
            1_234,
        ),
        (f"/plain{CHAT}", stream(EVENT), {"stream": True}, pytest.approx(2_025, abs=20)),
        (f"/plain{GEMINI};:countTokens", whole(usage=CHAT_USAGE), {}, 1_234),
    ],
    ids=["asked for usage", "no usage in a stream", "a parameter"],
)
def test_requests_pay_for_their_answers_on_any_path(
    shop: Shop, path: str, reply: Reply, more: dict[str, Any], paid: object
) -> None:
    """As reported, or by the characters of the answer."""
    assert shop.ask(path, path, reply, **more).status == 200
    assert shop.settle(path.split("/")[1]) == paid
    asked = json.loads(shop.model.body).get("stream_options")
    assert asked == ({"include_usage": True} if path.startswith("/asks") else None)
