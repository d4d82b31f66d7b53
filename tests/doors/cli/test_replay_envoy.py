"""The round trip: traffic through the real Envoy, and its access log replayed with the policies that decided it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from extproc.cli.main import main
from extproc.cli.replay.records import parse_line
from extproc.store.rules.session import LIMITS
from tests.support.documents import bundle, policy
from tests.support.harness import Stack, eventually, stack
from tests.support.random_agents import PATHS, Agent
from tests.support.recorded import Replay
from tests.support.servers import server
from tests.support.usage import Model, whole

KEYS = ["header:x-user-id", "ip:address"]
POLICIES = bundle(
    policy("reject", {"pathPrefix": "/reject"}, limit_keys=KEYS, cooldown_seconds=60),
    policy("skip", {"pathPrefix": "/reject"}, limit_keys=["header:x-team"], missing_descriptor="skip"),
    policy("warn", {"pathPrefix": "/warn", "hosts": ["api.example.com"]}, action="warn", limit_keys=["query:user"]),
    policy("throttle", {"pathPrefix": "/throttle"}, action="throttle", max_delay_ms=100, limit_keys=KEYS),
    policy("log", {"pathPrefix": "/log"}, window_type="sliding_log", count_refused=False, limit_keys=KEYS),
    policy("bodiless", {"pathPrefix": "/bodiless"}, body="ignore", limit_keys=KEYS),
    policy("canary", {"pathPrefix": "/"}, mode="shadow", threshold_identical_requests=2, limit_keys=KEYS),
    policy("turns", {"pathPrefix": "/turns"}, similarity="turns", limit_keys=KEYS),
)

WORDS = {"refused": "reject", "throttled": "throttle", "steered": "steer", "warned": "warn"}


@pytest.fixture(scope="module")
def recorded() -> Iterator[Stack]:
    """A stack whose access log can be replayed."""
    with stack(POLICIES, "--record") as made:
        yield made


def send_traffic(gate: Stack) -> int:
    """Loops and other requests, on every path, of several callers; returns how many requests there were."""
    sent = 0
    for path in ("/reject/a", "/warn/a", "/throttle/a", "/log/a", "/bodiless/a", "/turns"):
        for number in range(5):
            for user in ("ann", "bob"):
                headers = {"x-user-id": user, "host": "api.example.com"} | ({"x-team": "t"} if number % 2 else {})
                body = json.dumps({"messages": ["again" if user == "ann" else number]}).encode()
                gate.send(f"{path}?user={user}&b=%7C%3D+x", method="POST", body=body, headers=headers)
                gate.send(f"{path}?user={user}", headers=headers)
                sent += 2
    grpc = {"content-type": "application/grpc", "te": "trailers"}
    for _ in range(4):  # streams: no request waits for their bodies
        gate.send("/reject/grpc", method="POST", body=iter([b"x"]), headers={"x-user-id": "ann", "x-team": "t", **grpc})
    return sent + 4


def read_log(gate: Stack, sent: int) -> list[dict[str, Any]]:
    """The access log, once it has all lines."""

    def probe() -> list[dict[str, Any]] | None:
        lines = [line for line in gate.envoy.output().splitlines() if line.startswith("{") and line.endswith("}")]
        return [json.loads(line) for line in lines] if len(lines) >= sent else None

    return eventually(probe, f"{sent} lines in the access log")


def test_a_replayed_access_log_gives_the_same_decisions(recorded: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """Each count is the live one, and so is each reason for none."""
    gate = recorded
    sent = send_traffic(gate)
    entries = read_log(gate, sent)
    log = gate.folder / "envoy.log"

    code = main(["replay", "--policy", str(gate.folder / "policies"), "--json", str(log)])
    document = json.loads(capsys.readouterr().out)

    assert code == 0
    assert document["log"]["requests"] == sent == len(entries)
    found = {item["policy"]: item for item in document["policies"]}
    for name, item in found.items():
        metric = partial(gate.loopguard.metric, policy=name)
        assert {word: item[word] for word in WORDS} == {
            word: metric("requests_total", action=action) for word, action in WORDS.items()
        }
        assert item["requests"] == metric("requests_total")
        assert item["uncounted"] == {why: metric("uncounted_total", reason=why) for why in item["uncounted"]}
        assert sum(item["uncounted"].values()) == metric("uncounted_total")
    assert [found[name]["refused"] > 0 for name in ("reject", "log", "bodiless", "canary")] == [True] * 4
    assert found["reject"]["uncounted"]["grpc"] == 4
    assert (found["turns"]["requests"], found["turns"]["uncounted"]) == (0, {"no_messages": 20})
    assert Counter(entry.get("loop_action") for entry in entries)["reject"] == sum(
        item["refused"] for item in document["policies"] if item["mode"] == "enforce"
    )


def test_the_access_log_names_no_caller(recorded: Stack) -> None:
    """What is recorded tells callers apart, and shows neither who they are nor the values of a query."""
    recorded.send("/reject/secret?user=carol&key=s3cret", headers={"x-user-id": "carol"})

    record = recorded.envoy.logged("/reject/secret?user=carol&key=s3cret")["loop_record"]

    assert set(record["headers"]) == {"x-user-id", "x-team"}
    assert record["headers"]["x-team"] is None
    assert record["path"] == "/reject/secret"
    assert record["address"] not in ("", "127.0.0.1")
    assert [word for word in ("carol", "s3cret") if word in json.dumps(record)] == []


def test_names_are_recorded_where_the_operator_wants_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --show-callers, fingerprints of a replay are those of the live log, too."""
    with stack(POLICIES, "--record", "--show-callers") as gate:
        for _ in range(3):
            gate.send("/reject/plain?x=1", headers={"x-user-id": "ann"})
        entry = gate.envoy.logged("/reject/plain?x=1", loop_action="reject")
        log = tmp_path / "access.log"
        log.write_text(gate.envoy.output())

    assert main(["replay", "--policy", str(write(tmp_path)), "--json", str(log)]) == 0
    worst = json.loads(capsys.readouterr().out)["worst"]

    assert entry["loop_record"]["headers"]["x-user-id"] == "ann"
    assert (entry["fingerprint"], entry["tenant"]) in [(item["fingerprint"], item["tenant"]) for item in worst]


def write(folder: Path) -> Path:
    """The policies as a file."""
    file = folder / "policies.json"
    file.write_text(json.dumps(POLICIES))
    return file


def test_a_caller_of_a_replay_can_be_blocked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A replay shows the live hashes of callers. Its fingerprints are its own, which is said if one is to be blocked."""
    admin = tmp_path / "admin.sock"
    with stack(POLICIES, "--record", "--admin-socket", str(admin)) as gate:
        for _ in range(3):
            gate.send("/reject/loop", headers={"x-user-id": "ann"})
        entry = gate.envoy.logged("/reject/loop", loop_action="reject")
        log = tmp_path / "access.log"
        log.write_text(gate.envoy.output())
        assert main(["replay", "--policy", str(write(tmp_path)), "--json", str(log)]) == 0
        worst = json.loads(capsys.readouterr().out)["worst"][0]

        def block(*about: str) -> str:
            assert main(["block", *about, "--admin", f"unix:{admin}"]) == 0
            return capsys.readouterr().err

        assert worst["tenant"] == entry["tenant"]
        assert f"the fingerprint {worst['fingerprint']} was not" in block("--fingerprint", worst["fingerprint"])
        assert gate.send("/reject/other", headers={"x-user-id": "ann"}).status == 200
        assert block("--caller", worst["tenant"]) == ""
        assert gate.send("/reject/another", headers={"x-user-id": "ann"}).status == 429


def test_agents_are_replayed_from_the_access_log_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each action of live and shadow policies that compare turns, and each caller, is the same in a replay of Envoy's log."""
    keys: dict[str, Any] = {"similarity": "turns", "limit_keys": ["header:x-user-id"]}
    policies = [
        policy("live", {"pathPrefix": "/v1/"}, **keys, action="warn", escalate={"reject": 5}, weak_threshold=6),
        policy("canary", {"pathPrefix": "/v1/"}, **keys, mode="shadow", canary_of="live", threshold_identical_requests=2),
    ]
    random = Random(5)
    agents = [agent for agent in (Agent(random, str(number)) for number in range(40)) if PATHS[agent.shape].startswith("/v1/")]
    with stack(bundle(*policies), "--record") as gate:
        for sent in range(150):
            agent = random.choice(agents[:5])
            gate.send(
                f"{PATHS[agent.shape]}?number={sent}",
                method="POST",
                body=json.dumps(agent.write()).encode(),
                headers={"x-user-id": agent.sent["x_user_id"], "content-type": "application/json"},
            )
            agent.step()
        entries = read_log(gate, 150)
        log = tmp_path / "access.log"
        log.write_text(gate.envoy.output())
        counted = {each: gate.loopguard.metric("requests_total", policy=each) for each in ("live", "canary")}
    entries.sort(key=lambda entry: float(entry["loop_record"]["time"]))
    replay = Replay(*policies)

    differences = []
    for entry in entries:
        judged = replay.judge.judge(parse_line(json.dumps(entry).encode()))
        assert judged is not None
        _, decision = judged
        found = (decision.lead, decision.shadow)
        actions = tuple(None if outcome is None else outcome.action.value for outcome in found)
        tenants = {outcome.tenant for outcome in decision.trace}
        live = entry.get("loop_action"), entry.get("loop_shadow_action")
        if actions != live or tenants - {entry.get("tenant")}:
            differences.append((entry["path"], live, actions))
    assert differences == []
    assert replay.judge.take_problems() == []
    assert Counter(entry.get("loop_action") for entry in entries).keys() == {None, "warn", "reject"}
    file = tmp_path / "policies.json"
    file.write_text(json.dumps(bundle(*policies)))
    assert main(["replay", "--policy", str(file), "--json", str(log)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {item["policy"]: item["requests"] for item in document["policies"]} == counted
    assert {item["tenant"] for item in document["worst"]} <= {entry.get("tenant") for entry in entries}


def test_session_limits_are_replayed_from_the_access_log_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps, calls, money that the model's answers cost, and failures: two replicas, Valkey, agents with names and without."""
    keys: dict[str, Any] = {"similarity": "turns", "limit_keys": ["header:x-user-id"], "action": "warn"}
    limits: dict[str, dict[str, Any]] = {
        "calls": {"max_tool_calls": 25, "max_calls_per_tool": {"bash": 7}, "loop_detection": {"window": 8, "threshold": 5}},
        "money": {"max_steps": 30, "max_cost_per_session": 0.015, "circuit_breaker": {"consecutive_errors": 2}},
    }
    policies = [policy(name, {"pathPrefix": "/v1/"}, **keys) for name in limits]
    for made, (name, found) in zip(policies, limits.items(), strict=True):
        made["spec"] |= {"mode": "shadow"} if name == "money" else {}
        made["spec"]["session_limits"] = found | {"unknown_model": {"input": 5, "output": 10}}
    random = Random(7)
    agents = [agent for agent in (Agent(random, str(number)) for number in range(40)) if PATHS[agent.shape].startswith("/v1/")]
    model = Model()
    try:
        with server() as valkey:
            flags = ("--record", "--store", f"redis://{valkey.address}")
            with stack(bundle(*policies), *flags, replicas=2, upstream=model.address) as gate:
                for sent in range(160):
                    agent = random.choice(agents[:6])
                    body = json.dumps(agent.write()).encode()
                    more = {name.replace("_", "-"): value for name, value in agent.sent.items()}
                    answer = whole(object="chat.completion", usage={"prompt_tokens": 300, "completion_tokens": 40})
                    model.reply = answer._replace(status=503) if sent % 40 in range(12) else answer
                    gate.send(
                        f"{PATHS[agent.shape]}?number={sent}",
                        method="POST",
                        body=body,
                        headers={"content-type": "application/json", **more},
                    )
                    agent.step()
                entries = read_log(gate, 160)
                log = tmp_path / "access.log"
                log.write_text(gate.envoy.output())
                for replica in gate.replicas:
                    replica.stop()
    finally:
        model.stop()
    entries.sort(key=lambda entry: float(entry["loop_record"]["time"]))
    replay = Replay(*policies)

    differences, limited = [], Counter[str]()
    for entry in entries:
        judged = replay.judge.judge(parse_line(json.dumps(entry).encode()))
        assert judged is not None
        evaluation, decision = judged
        actions = tuple(outcome.action.value if outcome is not None else None for outcome in (decision.lead, decision.shadow))
        if actions != (entry.get("loop_action"), entry.get("loop_shadow_action")):
            differences.append((entry["path"], entry.get("loop_action"), entry.get("loop_shadow_action"), actions))
        limited += Counter(
            LIMITS[each.standing.limit] for each in evaluation.sessions if each.standing is not None and each.standing.limit
        )
    assert differences == []
    assert replay.judge.take_problems() == []
    assert limited.keys() >= {"max_tool_calls", "max_calls_per_tool", "max_cost_per_session", "killed"}
    file = tmp_path / "policies.json"
    file.write_text(json.dumps(bundle(*policies)))
    assert main(["replay", "--policy", str(file), "--json", str(log)]) == 0
    assert json.loads(capsys.readouterr().out)["log"]["problems"].keys() == {"not_json"}  # Envoy's own lines
    answered = [entry["loop_usage"] for entry in entries if "loop_usage" in entry]
    assert {(usage["input"], usage["output"]) for usage in answered} == {(300, 40)}
