"""Find, free and stop looping callers: the real Envoy, two replicas and a real Valkey."""

import json
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.main import main
from tests.support.documents import bundle, policy
from tests.support.harness import Loopguard, Stack, eventually, stack
from tests.support.night import CHAT, STEERED, USER, Scene
from tests.support.pages import list_loops
from tests.support.receivers import CA, Receiver, receiving
from tests.support.servers import server

POLICIES = bundle(
    policy("webhooks", {"pathPrefix": "/hook"}, action="warn", escalate={"reject": 20}, **USER),
    policy("agents", {"pathExact": CHAT}, similarity="tool_calls", **USER),
    policy(
        "polls",
        {"pathPrefix": "/poll"},
        threshold_identical_requests=2,
        cooldown_seconds=600,
        **USER,
    ),
)

CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "1", "function": {"name": "search_the_web", "arguments": "{}"}}],
}
FOUND = {"role": "tool", "tool_call_id": "1", "content": "nothing"}
STUCK = json.dumps({"model": "gpt-4o", "messages": [CALL, FOUND] * 4}).encode()


@dataclass
class Night:
    """Envoy, two replicas and a webhook; `asked` are flags for the first replica."""

    made: Stack
    told: Receiver
    flags: tuple[str, ...]
    asked: list[str]

    def send(self, path: str, user: str, times: int = 1, body: bytes = b"{}") -> list[int]:
        headers = {"x-user-id": user}
        return [
            self.made.send(path, method="POST", body=body, headers=headers).status
            for _ in range(times)
        ]

    def order(self, *arguments: str) -> str:
        """Give an order by the command, and wait until every replica has it; returns its name."""
        known = self.read_orders()
        assert main([*arguments, *self.asked]) == 0
        eventually(
            lambda: (now := self.read_orders())[0] == now[1] != known[1],
            "the same order everywhere",
        )
        newest: str = json.loads(self.read_orders()[0])["overrides"][0]["override"]
        return newest

    def read_orders(self) -> list[str]:
        return [replica.get("/overrides")[1] for replica in self.made.replicas]

    def read_loops(self) -> list[dict[str, dict[str, Any]]]:
        return [
            {
                loop["descriptors"]["x-user-id"]: loop
                for loop in list_loops(replica.ask("/loops"))
                if loop["descriptors"]  # a replica may have hidden them a moment ago
            }
            for replica in self.made.replicas
        ]

    def find_event(self, kind: str, subject: str) -> Any:  # noqa: ANN401  # as below
        return find_event(
            lambda: [event for _, batch in list(self.told.batches) for event in json.loads(batch)],
            kind,
            subject,
        )

    def restart(self, number: int) -> Loopguard:
        old = self.made.replicas[number]
        old.stop()
        self.made.replicas[number] = Loopguard(self.made.folder, *self.flags, listen=old.address)
        return self.made.replicas[number]


def find_event(read: Callable[[], list[dict[str, Any]]], kind: str, subject: str = "") -> Any:  # noqa: ANN401  # data
    """Wait for the first such event, about any subject unless one is given; returns its data."""

    def probe() -> dict[str, Any] | None:
        found = [event for event in read() if event["type"] == f"io.loopguard.{kind}.v1"]
        return next((event for event in found if subject in ("", event["subject"])), None)

    return eventually(probe, f"an event {kind}")["data"]


@pytest.fixture(scope="module")
def night() -> Iterator[Night]:
    with (
        tempfile.TemporaryDirectory(prefix="lg") as name,
        server() as valkey,
        receiving(204) as told,
    ):
        tokens, authority = Path(name) / "tokens", Path(name) / "ca.pem"
        tokens.write_text("correct-horse-battery-staple")
        CA.cert_pem.write_to_path(str(authority))
        events = ("--events", told.url, "--events-ca", str(authority))
        flags = (
            "--store",
            f"redis://{valkey.address}",
            "--admin-token-file",
            str(tokens),
            "--show-callers",
            *events,
        )
        with stack(POLICIES, *flags, replicas=2) as made:
            asked = ["--admin", made.replicas[0].admin_url, "--token-file", str(tokens)]
            yield Night(made, told, flags, asked)
            for replica in made.replicas:
                replica.stop()


def test_every_replica_distinguishes_the_three_loopers(night: Night) -> None:
    assert night.send("/hook/billing", "storm", 30) == [200] * 19 + [429] * 11
    assert night.send(CHAT, "agent-7", 5, STUCK) == [429] * 5
    assert night.send("/poll", "poller", 6) == [200] + [429] * 5
    for step in range(5):
        content = json.dumps({"messages": [{"role": "user", "content": f"step {step}"}]}).encode()
        for path in (CHAT, "/hook/billing", "/poll"):
            assert night.send(path, f"healthy-{step}", body=content) == [200]
    expected = {
        "storm": ("webhooks", "/hook/billing", [], 17, 11),
        "agent-7": ("agents", CHAT, ["search_the_web"], 0, 5),
        "poller": ("polls", "/poll", [], 0, 5),
    }

    def describe(loops: dict[str, dict[str, Any]]) -> dict[str, tuple[Any, ...]]:
        return {
            user: (loop["policy"], loop["path"], loop["tools"], loop["warned"], loop["refused"])
            for user, loop in loops.items()
        }

    eventually(
        lambda: [describe(loops) for loops in night.read_loops()] == [expected, expected],
        "all loops on both replicas",
    )
    for replica in night.made.replicas:
        page = re.sub(r"\s+", " ", replica.get("/")[1])
        for shown in (
            "3 active loops",
            "2 replicas",
            *(f"x-user-id: <b>{user}</b>" for user in expected),
            "search_the_web",
        ):
            assert shown in page, shown
        assert "healthy" not in page


def test_one_command_frees_or_stops_a_caller_everywhere(night: Night) -> None:
    made = night.made
    assert night.send("/poll", "honest", 3) == [200, 429, 429]
    assert night.send(CHAT, "runaway", 1, STUCK) == [429]
    seen = eventually(lambda: night.read_loops()[0].get("honest"), "the poller on the page")

    night.order("allow", "--caller", seen["caller"], "--for", "30m", "--reason", "polls")
    night.order("block", "--caller", "x-user-id=runaway", "--for", "30m")

    assert night.send("/poll", "honest", 12) == [200] * 12
    answers = [
        made.send(f"/hook/{n}", method="POST", body=b"{}", headers={"x-user-id": "runaway"})
        for n in range(12)
    ]
    assert {(answer.status, answer.headers["x-fairvisor-reason"]) for answer in answers} == {
        (429, "blocked")
    }
    assert int(answers[0].headers["retry-after"]) > 1_700
    assert made.envoy.logged("/hook/0", status=429)["loop_reason"] == "blocked"
    for replica in made.replicas:
        assert replica.metric("overridden_total", kind="allow") > 0
        assert replica.metric("overridden_total", kind="block") > 0


def test_sigusr1_hides_and_shows_callers_on_one_replica(night: Night) -> None:
    night.send("/poll", "shown", 2)
    first, second = night.made.replicas
    for wait, hidden in (
        ("callers are shown by a hash", {True}),
        ("callers are shown by their values", {False}),
    ):
        first.signal(signal.SIGUSR1)
        first.wait_for(f"SIGUSR1: {wait}")

        assert {loop["descriptors"] is None for loop in list_loops(first.ask("/loops"))} == hidden
        assert any(loop["descriptors"] for loop in list_loops(second.ask("/loops")))


def test_orders_and_loops_are_webhook_events(night: Night) -> None:
    night.send("/poll", "eve", 2)
    blocked = night.order("block", "--caller", "x-user-id=eve", "--reason", "incident 7")
    released = night.order("release", "--caller", "x-user-id=eve")
    night.order("overrides", "--revoke", blocked)

    given = night.find_event("override.given", blocked)
    assert (given["kind"], given["reason"]) == ("block", "incident 7")
    assert given["who"].endswith("(token)")
    assert night.find_event("loop.released", released)["kind"] == "release"
    assert night.find_event("override.revoked", blocked)["override"] == blocked
    assert night.find_event("loop.began", "polls")["caller"].keys() == {"x-user-id"}


def test_restart_of_both_replicas_loses_no_orders_or_loops(night: Night) -> None:
    night.order("block", "--caller", "x-user-id=late")
    orders = night.read_orders()
    assert night.send("/poll", "stubborn", 9) == [200] + [429] * 8

    for number in (0, 1):
        fresh = night.restart(number)
        assert fresh.get("/overrides")[1] == orders[number]
    night.asked[1] = night.made.replicas[0].admin_url

    eventually(
        lambda: (
            [loops.get("stubborn", {}).get("refused") for loops in night.read_loops()] == [8, 8]
        ),
        "all that was refused",
    )
    eventually(
        lambda: night.send("/poll", "stubborn") == [429], "a replica that Envoy has found again"
    )
    eventually(lambda: night.send("/poll/other", "late") == [429], "the block")


def test_loops_promotions_outages_and_failing_tools_are_events(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    looked = policy("p", {"pathExact": "/"}, mode="shadow", **USER)
    agents = policy("agents", {"pathExact": CHAT}, **STEERED)

    def read() -> list[dict[str, Any]]:
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    with (
        server() as valkey,
        stack(
            bundle(looked, agents), "--store", f"redis://{valkey.address}", "--events", str(file)
        ) as made,
    ):
        for _ in range(4):
            made.send("/", headers={"x-user-id": "ann"})
        began = find_event(read, "loop.began", "p")
        assert Scene(made, "eve", "crm_find").break_tool(1) == {200, 429}
        failing = find_event(read, "tool.failing", "agents")
        made.write_policies(bundle({**looked, "spec": {**looked["spec"], "mode": "enforce"}}))
        promoted = find_event(read, "policy.promoted", "p")
        valkey.kill()
        made.send("/", headers={"x-user-id": "bob"})
        find_event(read, "store.lost")
        valkey.start()
        find_event(read, "store.back")

    kinds = [event["type"] for event in read() if event["subject"] != "agents"]
    assert (began["mode"], began["requests"]) == ("shadow", {"reject": 2})
    assert failing["gen_ai.tool.name"] == "crm_find"
    assert (promoted["mode"], len(kinds)) == ("enforce", len(set(kinds)))
