"""What operators see of a night with loops: two replicas on one Valkey behind the real Envoy."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.main import main
from tests.support.documents import bundle, policy
from tests.support.harness import Loopguard, Stack, eventually, stack
from tests.support.pages import list_loops
from tests.support.servers import Server, server
from tests.support.turn_writers import Did, as_chat

_USER: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}
CALL = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "search", "arguments": '{"q": "a"}'}}]}
FOUND = {"role": "tool", "tool_call_id": "1", "content": "nothing"}
STUCK = json.dumps({"model": "gpt-4o", "messages": [CALL, FOUND] * 4}).encode()

NIGHT = bundle(
    policy("storm", {"pathPrefix": "/hook"}, **_USER),
    policy("agents", {"pathExact": "/v1/chat/completions"}, similarity="tool_calls", **_USER),
    policy("canary", {"pathExact": "/v1/chat/completions"}, mode="shadow", action="throttle", **_USER),
)


@pytest.fixture(scope="module")
def valkey() -> Iterator[Server]:
    """A Valkey server."""
    with server() as made:
        yield made


@pytest.fixture(scope="module")
def night(valkey: Server) -> Iterator[Stack]:
    """Two replicas on one store, which show callers, after a storm, a stuck agent and a healthy client."""
    with stack(NIGHT, "--store", f"redis://{valkey.address}", "--show-callers", "--price", "2.5", replicas=2) as made:
        for number in range(40):
            made.send("/hook", method="POST", body=b"{}", headers={"x-user-id": "storm"})
            made.send(f"/hook/{number}", headers={"x-user-id": "healthy"})
        for _ in range(6):
            made.send("/v1/chat/completions", method="POST", body=STUCK, headers={"x-user-id": "stuck"})
        yield made


def read_loops(replica: Loopguard, query: str = "") -> dict[str, Any]:
    """What a replica says about loops."""
    status, body = replica.get(f"/loops{query}")
    assert status == 200, body
    report: dict[str, Any] = json.loads(body)
    return report


def wait_for_loops(replica: Loopguard, requests: int) -> dict[str, dict[str, Any]]:
    """The loops by policy, once a replica knows of this many requests."""

    def probe() -> dict[str, dict[str, Any]] | None:
        report = read_loops(replica)
        loops = list_loops(report)
        return {loop["policy"]: loop for loop in loops} if sum(loop["requests"] for loop in loops) == requests else None

    return eventually(probe, f"{requests} requests in /loops")


def test_every_replica_names_each_loop(night: Stack) -> None:
    """Every replica reports the storm, the stuck agent and the shadow's verdicts, and no healthy client."""
    for replica in night.replicas:
        loops = wait_for_loops(replica, requests=38 + 6 + 4)

        assert sorted(loops) == ["agents", "canary", "storm"]
        storm, agents, canary = loops["storm"], loops["agents"], loops["canary"]
        assert storm["descriptors"] == {"x-user-id": "storm"}
        assert (storm["count"], storm["refused"], storm["requests_not_sent_on"], storm["looping"]) == (40, 38, 38, True)
        assert (agents["descriptors"], agents["tools"]) == ({"x-user-id": "stuck"}, ["search"])
        assert (agents["model"], agents["refused"]) == ("gpt-4o", 6)
        assert agents["input_tokens_not_sent_on"] == len(STUCK) * 6 // 4
        assert agents["cost_usd"] == round(2.5 * agents["input_tokens"] / 1_000_000, 4)
        assert (canary["mode"], canary["shadow"], canary["refused"]) == ("shadow", {"throttle": 4}, 0)


def test_a_looper_that_two_policies_see_is_one_row(night: Stack) -> None:
    """On every replica, with the requests of both, each counted once; page and `top` have it, with the command to act."""

    def probe(replica: Loopguard) -> dict[str, Any] | None:
        report = read_loops(replica, "")
        return report if report["total"]["requests"] == 38 + 6 else None

    for replica in night.replicas:
        report = eventually(partial(probe, replica), "44 requests by conversation")

        storm, stuck = sorted(report["conversations"], key=lambda row: -row["requests"])
        assert (storm["descriptors"], storm["requests"], storm["action"]) == ({"x-user-id": "storm"}, 38, "reject")
        assert (stuck["descriptors"], stuck["tools"]) == ({"x-user-id": "stuck"}, ["search"])
        assert (stuck["requests"], stuck["requests_sent_on"], stuck["requests_not_sent_on"]) == (6, 0, 6)
        assert stuck["input_tokens_not_sent_on"] == len(STUCK) * 6 // 4
        assert (stuck["action"], stuck["shadow"], stuck["policies"]) == ("reject", "throttle", ["agents", "canary"])
        assert sum(loop["requests"] for loop in stuck["loops"]) == 6 + 4
        command = f"loopguard allow --caller {stuck['caller']}"
        assert command in replica.get("/")[1]
        asked = ["top", "--once", "--commands", "--admin", replica.admin_url]
        with redirect_stdout(io.StringIO()) as printed:
            assert main(asked) == 0
        assert "of 2 loops active, 2 callers; 2 replicas" in printed.getvalue()
        assert command in printed.getvalue()


def test_what_reached_the_model_is_apart_from_what_did_not() -> None:
    """An agent that was told, and then refused, and that a canary watches: each request once, on the replica that saw it."""
    steer: dict[str, Any] = {"similarity": "turns", "action": "steer", "escalate": {"reject": 5}, **_USER}
    path = "/v1/chat/completions"
    watched = bundle(
        policy("agents", {"pathExact": path}, **steer), policy("canary", {"pathExact": path}, mode="shadow", **steer)
    )
    bodies = [
        json.dumps(
            as_chat([Did((("search", {"q": "a"}),), ("nothing",), "", f"try {n}", n) for n in range(1, times + 1)])
        ).encode()
        for times in range(1, 8)
    ]
    with stack(watched, "--price", "2.5") as made:
        statuses = [made.send(path, method="POST", body=body, headers={"x-user-id": "ann"}).status for body in bodies]
        (row,) = read_loops(made.loopguard, "")["conversations"]

    assert statuses == [200] * 4 + [429] * 3
    size = sum(len(body) for body in bodies[2:4])
    assert (row["requests"], row["requests_sent_on"], row["requests_not_sent_on"]) == (5, 2, 3)
    assert (row["input_tokens_sent_on"], row["input_tokens_not_sent_on"]) == (size // 4, size * 3 // 2 // 4)
    assert {loop["policy"]: loop["requests"] for loop in row["loops"]} == {"agents": 5, "canary": 5}


def test_callers_are_hidden_and_shown_again_while_the_server_runs(night: Stack) -> None:
    """SIGUSR1 turns the values of callers off and on, and that is logged; the other replica is unchanged."""
    replica = night.replicas[0]
    replica.signal(signal.SIGUSR1)
    replica.wait_for("SIGUSR1: callers are shown by a hash")

    assert {loop["descriptors"] is None for loop in list_loops(read_loops(replica))} == {True}

    replica.signal(signal.SIGUSR1)
    replica.wait_for("SIGUSR1: callers are shown by their values")
    assert {loop["descriptors"] is None for loop in list_loops(read_loops(replica))} == {False}


def test_other_programs_are_told(tmp_path: Path) -> None:
    """A loop, an override, a policy that begins to act, and a store that goes and comes back are events, each once."""
    file = tmp_path / "events.jsonl"
    looked = policy("p", {"pathPrefix": "/"}, mode="shadow", **_USER)
    with server() as valkey, stack(bundle(looked), "--store", f"redis://{valkey.address}", "--events", str(file)) as made:

        def wait_for(kind: str) -> dict[str, Any]:
            return eventually(lambda: _find_event(file, kind), f"an event {kind}")

        for _ in range(4):
            made.send("/", headers={"x-user-id": "ann"})
        began = wait_for("loop.began")
        made.write_policies(bundle({**looked, "spec": {**looked["spec"], "mode": "enforce"}}))
        promoted = wait_for("policy.promoted")
        valkey.kill()
        made.send("/", headers={"x-user-id": "bob"})
        wait_for("store.lost")
        valkey.start()
        wait_for("store.back")

    kinds = [json.loads(line)["type"] for line in file.read_text().splitlines()]
    assert (began["data"]["mode"], began["data"]["requests"]) == ("shadow", {"reject": 2})
    assert (promoted["subject"], promoted["data"]["mode"]) == ("p", "enforce")
    assert len(kinds) == len(set(kinds))


def _find_event(file: Path, kind: str) -> dict[str, Any] | None:
    """The first event of a type in a file."""
    events = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return next((event for event in events if event["type"] == f"io.loopguard.{kind}.v1"), None)


def test_a_replica_that_ends_loses_nothing(night: Stack) -> None:
    """What a replica knew is known to the other one after it has gone."""
    first, second = night.replicas
    wait_for_loops(second, requests=48)

    first.signal(signal.SIGTERM)
    first.wait()

    assert wait_for_loops(second, requests=48).keys() == {"storm", "agents", "canary"}
