"""Budgets on the real Envoy, two replicas and Valkey."""

from __future__ import annotations

import json
import re
import shlex
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.main import main
from tests.support.documents import bundle
from tests.support.harness import PATIENCE, Answer, Stack, envoy_version, eventually, stack
from tests.support.servers import Server, server
from tests.support.usage import Model, Reply, whole

pytestmark = pytest.mark.skipif(envoy_version() < (1, 38), reason="this Envoy reads no answers: budgets are NOT settled")

REJECT = [{"threshold_percent": 100, "action": "reject"}]


def limited(identity: str, kind: str, more: dict[str, Any] | None = None, **config: object) -> dict[str, Any]:
    """A policy of one rule for what is below its name, as the format's examples have it."""
    rule = {"name": f"{identity}-rule", "limit_keys": ["header:x-api-key"], "algorithm": kind, "algorithm_config": config}
    selector = {"pathPrefix": f"/{identity}/", "methods": ["POST"]}
    return {"id": identity, "spec": {"selector": selector, "mode": "enforce", "rules": [rule], **(more or {})}}


BREAKER = {
    "enabled": True,
    "spend_rate_threshold_per_minute": 4,
    "action": "reject",
    "alert": True,
    "auto_reset_after_minutes": 5,
}
USED = {"prompt_tokens": 1, "completion_tokens": 1_999, "total_tokens": 2_000}
LOOP = {"enabled": True, "window_seconds": 60, "threshold_identical_requests": 3, "action": "reject", "similarity": "exact"}

POLICIES = bundle(
    limited("minimal", "token_bucket", tokens_per_second=0.01, burst=3),
    limited("loop", "token_bucket", {"loop_detection": LOOP}, tokens_per_second=0.01, burst=20),
    limited("shadow", "token_bucket", {"mode": "shadow", "loop_detection": LOOP}, tokens_per_second=0.01, burst=2),
    limited(
        "cost",
        "cost_based",
        budget=10,
        period="7d",
        cost_key="fixed",
        fixed_cost=1,
        staged_actions=[
            {"threshold_percent": 80, "action": "warn"},
            {"threshold_percent": 95, "action": "throttle", "delay_ms": 20},
            *REJECT,
        ],
    ),
    limited("breaker", "cost_based", {"circuit_breaker": BREAKER}, budget=10_000, period="7d", staged_actions=REJECT),
    limited(
        "llm",
        "token_bucket_llm",
        algorithm="token_bucket_llm",
        tokens_per_minute=1,
        tokens_per_day=2_000_000,
        burst_tokens=10_000,
        default_max_completion_tokens=1024,
    ),
    limited("tokens", "cost_based", budget=1_000_000, period="7d", cost_key="usage:tokens", staged_actions=REJECT),
    kill_switches=[{"scope_key": "header:x-tenant-id", "scope_value": "tenant-42", "reason": "incident_block"}],
)


class Shop:
    """Envoy before a model that reports tokens, two replicas and Valkey."""

    def __init__(self, made: Stack, model: Model, valkey: Server, tokens: Path) -> None:
        self.tokens = tokens
        self.made = made
        self.model = model
        self.valkey = valkey

    def ask(self, path: str, key: str, body: dict[str, Any] | None = None, reply: Reply | None = None, **more: str) -> Answer:
        """One request of a caller."""
        self.model.reply = reply or whole(usage={"prompt_tokens": 0, "completion_tokens": 0})
        data = json.dumps(body or {"messages": [{"role": "user", "content": "hello"}]}).encode()
        return self.made.send(path, method="POST", body=data, headers={"x-api-key": key, **more})

    def count(self, name: str, **labels: str) -> float:
        """A metric of both replicas together."""
        return sum(replica.metric(name, **labels) for replica in self.made.replicas)

    def await_used(self, policy: str, least: float) -> None:
        """Wait until both replicas together know of this much use."""
        labels = {"policy": policy, "mode": "enforce", "rule": f"{policy}-rule"}
        eventually(lambda: self.count("budget_used_total", **labels) >= least, "settlements")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """One for all tests."""
    model, tokens = Model(), tmp_path_factory.mktemp("operator") / "tokens"
    tokens.write_text("sesame-sesame-sesame-sesame")
    flags = ["--admin-token-file", str(tokens)]
    try:
        with (
            server() as valkey,
            stack(POLICIES, "--store", f"redis://127.0.0.1:{valkey.port}", *flags, replicas=2, upstream=model.address) as made,
        ):
            yield Shop(made, model, valkey, tokens)
    finally:
        model.stop()


def test_a_bucket_is_shared_by_replicas_and_its_headers_reach_clients(shop: Shop) -> None:
    """Allowed requests and refusals have `RateLimit` headers, once each, and a refusal a true `Retry-After`."""
    answers = [shop.ask("/minimal/x", "ann") for _ in range(4)]

    assert [answer.status for answer in answers] == [200, 200, 200, 429]
    assert [answer.headers["ratelimit-remaining"] for answer in answers] == ["2", "1", "0", "0"]
    assert answers[0].headers["ratelimit"] == '"minimal";r=2;t=100'
    told = answers[3].headers
    assert 90 <= int(told["retry-after"]) <= 100
    assert (told["ratelimit-limit"], told["ratelimit-reset"]) == ("3", told["retry-after"])
    assert told["x-fairvisor-reason"] == "token_bucket_exceeded"
    assert shop.ask("/minimal/x", "bob").status == 200


def test_side_by_side_exactly_as_many_pass_as_there_are(shop: Shop) -> None:
    """Sixty requests at once on two replicas."""
    with ThreadPoolExecutor(30) as pool:
        statuses = list(pool.map(lambda _: shop.ask("/cost/x", "crowd").status, range(60)))

    assert sorted(statuses) == [200] * 10 + [429] * 50
    refusal = shop.ask("/cost/x", "crowd")
    assert refusal.headers["x-fairvisor-reason"] == "budget_exceeded"
    assert 0 < int(refusal.headers["retry-after"]) <= 604_800


def test_tokens_are_settled_by_what_responses_report(shop: Shop) -> None:
    """Exact to the token, on two replicas: estimates are replaced, cached tokens count, also beyond the estimate."""
    usage = {"prompt_tokens": 5_000, "completion_tokens": 17, "prompt_tokens_details": {"cached_tokens": 4_000}}

    for _ in range(20):
        assert shop.ask("/tokens/chat/completions", "ann", reply=whole(usage=usage)).status == 200
    shop.await_used("tokens", 20 * 5_017)

    last = shop.ask("/tokens/chat/completions", "ann", {"messages": [{"role": "user", "content": "1234"}], "max_tokens": 7})

    left = 1_000_000 - 20 * 5_017 - 8
    assert int(last.headers["ratelimit-remaining"]) == left
    told = {name: value for name, value in last.headers.items() if name.startswith("x-ratelimit")}
    reset = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(\d+)s", told.pop("x-ratelimit-reset-tokens"))
    assert reset
    hours, minutes, seconds = map(int, reset.groups("0"))
    assert hours * 3_600 + minutes * 60 + seconds == int(last.headers["ratelimit-reset"])
    assert told == {"x-ratelimit-limit-tokens": "1000000", "x-ratelimit-remaining-tokens": f"{left}"}
    assert not [name for name in shop.ask("/minimal/x", "tim").headers if name.startswith("x-ratelimit")]


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
def test_each_official_shape_limits_the_openai_sdk(shop: Shop, shape: str, passed: int, code: str) -> None:
    """As its documents say: this many calls pass, and the next one is the SDK's error with the documented code."""
    import openai

    more = {"x-tenant-id": "tenant-42"} if shape == "killed" else {}
    client = openai.OpenAI(
        api_key="k",
        base_url=f"http://127.0.0.1:{shop.made.envoy.port}/{'minimal' if shape == 'killed' else shape}",
        default_headers={"x-api-key": f"sdk-{shape}", **more},
        max_retries=0,
        timeout=PATIENCE,
    )
    shop.model.reply = whole(id="x", object="chat.completion", created=1, model="m", choices=[], usage=USED)

    def call() -> None:
        client.chat.completions.create(model="m", max_tokens=1_999, messages=[{"role": "user", "content": "four"}])

    for _ in range(passed):
        call()
    if not code:
        return
    with pytest.raises(openai.RateLimitError) as refusal:
        call()
    assert refusal.value.code == code


def test_what_a_killed_replica_has_let_through_stays_counted() -> None:
    """The other one goes on with what is left in the store."""
    policy = bundle(limited("survivor", "cost_based", budget=30, period="7d", staged_actions=REJECT))
    with server() as valkey, stack(policy, "--store", f"redis://{valkey.address}", replicas=2) as made:

        def send(_: int) -> int:
            return made.send("/survivor/x", method="POST", body=b"{}", headers={"x-api-key": "ann"}).status

        before = [send(number) for number in range(12)]
        made.replicas[1].signal(signal.SIGKILL)
        eventually(lambda: made.envoy.stat("cluster.loopguard.membership_healthy") == 1, "one replica")
        with ThreadPoolExecutor(8) as pool:
            after = sorted(pool.map(send, range(40)))

    assert before == [200] * 12
    assert after == [200] * 18 + [429] * 22


def test_a_grant_from_budgets_lets_a_caller_go_on(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    """The command in the row of `/budgets` adds on both replicas, once, although it is sent to both."""
    first, second = shop.made.replicas

    def find_row() -> dict[str, Any] | None:
        rows = first.ask("/budgets?policy=minimal&sort=refused")["budgets"]
        return next((row for row in rows if row["caller"] not in before and row["refused"]), None)

    before = {row["caller"] for row in first.ask("/budgets?policy=minimal")["budgets"]}
    assert [shop.ask("/minimal/x", "gus").status for _ in range(5)] == [200, 200, 200, 429, 429]
    row: dict[str, Any] = eventually(find_row, "the row of the caller")
    _, *command = shlex.split(row["commands"]["free"])

    both = ["--admin", first.admin_url, "--admin", second.admin_url, "--token-file", str(shop.tokens)]
    assert main([*command[: command.index("--amount")], "--amount", "2", *both]) == 0

    assert (row["limit"], row["left"]) == (3, pytest.approx(0, abs=0.5))
    assert "not added again" in capsys.readouterr().err
    assert [shop.ask("/minimal/x", "gus").status for _ in range(3)] == [200, 200, 429]
    assert main(["top", "--once", "--policy", "minimal", "--admin", second.admin_url]) == 0
    assert "minimal/minimal-rule" in capsys.readouterr().out


def test_replicas_without_their_store_let_no_more_pass_together() -> None:
    """Each enforces its half of the budget; when the store is back, it decides again."""
    policy = bundle(limited("halves", "cost_based", budget=10, period="7d", cost_key="fixed", staged_actions=REJECT))

    def crowd(caller: str) -> list[int]:
        def send(_: int) -> int:
            return made.send("/halves/x", method="POST", body=b"{}", headers={"x-api-key": caller}).status

        with ThreadPoolExecutor(8) as pool:
            return sorted(pool.map(send, range(60)))

    with server() as valkey, stack(policy, "--store", f"redis://{valkey.address}", replicas=2) as made:
        eventually(lambda: [replica.metric("replicas") for replica in made.replicas] == [2, 2], "both replicas")

        valkey.kill()
        alone = crowd("ann")
        valkey.start()
        eventually(lambda: all(replica.metric("store_up", shard=valkey.address) for replica in made.replicas), "the store")
        together = crowd("bob")

    assert alone == [200] * 10 + [429] * 50
    assert together == [200] * 10 + [429] * 50
