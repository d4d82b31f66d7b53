"""What sessions cost and what kills them, on the real Envoy, two replicas and Valkey; and the field's own format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from time import sleep
from typing import Any, NamedTuple

import pytest

from extproc.cli.main import main
from tests.support.documents import bare_policy, bundle
from tests.support.harness import PATIENCE, Answer, Loopguard, Stack, envoy_version, eventually
from tests.support.sdks import MODEL_SDKS
from tests.support.servers import Server, server
from tests.support.session_limits import TOOL
from tests.support.stacks import await_session, open_before_model
from tests.support.turn_writers import Did, as_chat
from tests.support.usage import DELTA, EVENTS, HUNG_UP, Model, Reply, whole, write_event

pytestmark = pytest.mark.skipif(envoy_version() < (1, 38), reason="this Envoy reads no answers: their costs are NOT tested")

AGENTS: dict[str, Any] = json.loads("""
{"id": "agents", "spec": {"selector": {"pathPrefix": "/v1/"}, "limit_keys": ["header:x-team"],
  "session": {"keys": ["header:x-session-id"], "idle_seconds": 3600},
  "session_limits": {"max_steps": 20, "max_tool_calls": 50, "max_tool_calls_mode": "narrow",
    "max_calls_per_tool": {"issue_refund": 1, "send_email": 5}, "max_cost_per_session": 10.0,
    "loop_detection": {"window": 5, "threshold": 3}, "circuit_breaker": {"consecutive_blocks": 5, "consecutive_errors": 3}}}}
""")
"""A session file of an in-process SDK, as a policy."""

CLAUDE = "anthropic.claude-3-5-sonnet-20240620-v1:0"
BY_NAME = {
    name: {"input": cents * 10_000, "output": 0}
    for cents, name in enumerate((CLAUDE, "production", "gemini-2.5-pro", "claude-3-5-sonnet-v2@20241022", "gpt-4o"), 1)
}
"""This many cents for each token of the prompt."""

TOKEN_COSTS_A_CENT = {"*": {"input": 0, "output": 10_000}}


def limited(identity: str, session: dict[str, Any] | None = None, **limits: Any) -> dict[str, Any]:  # noqa: ANN401  # of a policy
    """A policy for what is below its name."""
    named = {"keys": ["header:x-session-id"], **(session or {})}
    return bare_policy(identity, f"/{identity}/", limit_keys=["header:x-team"], session=named, session_limits=limits)


_FOUR_DOLLARS: dict[str, Any] = {"max_cost_per_session": 4.0, "prices": TOKEN_COSTS_A_CENT}
TOLD_POLICY = limited("told", **_FOUR_DOLLARS)
TOLD_POLICY["spec"]["loop_detection"] = {
    "enabled": True,
    "window_seconds": 60,
    "threshold_identical_requests": 3,
    "similarity": "turns",
    "action": "steer",
}

POLICIES = bundle(
    AGENTS,
    TOLD_POLICY,
    limited("fewer", max_calls_per_tool={"issue_refund": 1}, **_FOUR_DOLLARS),
    limited("named", max_cost_per_session=10_000.0, prices=BY_NAME, unknown_model={"input": 90_000, "output": 90_000}),
    limited("cap", max_cost_per_session=0.1, prices=TOKEN_COSTS_A_CENT),
    limited("once", max_cost_per_session=1.0, prices=TOKEN_COSTS_A_CENT),
    limited("asked", usage="request", **_FOUR_DOLLARS),
    limited("errors", max_steps=100, circuit_breaker={"consecutive_errors": 3}),
    limited("steps", max_steps=3, circuit_breaker={"consecutive_blocks": 4}),
    limited("flood", {"max_sessions_per_tenant": 3}, max_steps=2),
)

_numbers = count()


class Bank(NamedTuple):
    """Envoy before a model that sends bills, two replicas, Valkey; how replicas are started."""

    made: Stack
    model: Model
    valkey: Server
    flags: tuple[str, ...]

    def send(self, reply: Reply, path: str, session: str, team: str = "red", body: bytes = b"") -> Answer:
        """A request that is like no other."""
        self.model.reply = reply
        headers = {"x-team": team, "x-session-id": session}
        data = body or json.dumps({"messages": [{"role": "user", "content": f"step {next(_numbers)}"}]}).encode()
        return self.made.send(path, method="POST", body=data, headers=headers)

    def play(self, path: str, session: str, times: int, team: str = "red") -> list[int]:
        """What becomes of requests, one after the other."""
        return [self.send(FREE, path, session, team).status for _ in range(times)]

    def find(self, session: str, **expected: object) -> dict[str, Any]:
        """Wait until a replica knows that a session stands so; its report."""
        return await_session(self.made, session, **expected)

    def order(self, *arguments: str) -> None:
        """Give an order by the command, and wait until it applies on both replicas."""
        known = self._read_orders()
        assert main([*arguments, "--admin", self.made.loopguard.admin_url, "--token-file", self.flags[-1]]) == 0
        eventually(lambda: (now := self._read_orders())[0] == now[1] != known[1], "the same order everywhere")

    def _read_orders(self) -> list[str]:
        return [replica.get("/overrides")[1] for replica in self.made.replicas]


FREE = whole(usage={"prompt_tokens": 0, "completion_tokens": 0})


def tokens(output: int) -> Reply:
    """An answer that costs as much."""
    return whole(usage={"prompt_tokens": 0, "completion_tokens": output})


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bank]:
    """One for all tests."""
    tokens = tmp_path_factory.mktemp("operator") / "tokens"
    tokens.write_text("correct-horse-battery-staple")
    with server() as valkey:
        flags = ("--store", f"redis://{valkey.address}", "--show-callers", "--admin-token-file", str(tokens))
        with open_before_model(POLICIES, *flags, replicas=2) as (made, model):
            yield Bank(made, model, valkey, flags)
            for replica in made.replicas:
                replica.stop()


@pytest.fixture
def session() -> str:
    """The name of a session that no other test has."""
    return f"session-{next(_numbers)}"


def read_refusal(answer: Answer) -> tuple[str, object, object]:
    """Limit, used and allowed."""
    detail = answer.json()["detail"]
    loop = "recursive_loop_detected", "loop_detected"
    expected = loop if detail["limit"] == "loop_detection" else ("session_limit_exceeded",) * 2
    assert (detail["error"], answer.headers["x-fairvisor-reason"]) == expected
    return detail["limit"], detail["used"], detail["allowed"]


_CHAT = {"object": "chat.completion", "choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}}]}
_CONTENT = {"candidates": [{"content": {"role": "model", "parts": [{"text": "x"}]}}]}
_MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "x"}]}
_BEDROCK_ANSWER = whole(output={"message": {"role": "assistant", "content": [{"text": "x"}]}}, usage={"inputTokens": 100})
_ARN = "arn:aws:bedrock:us-east-1:123456789012:inference-profile/us."


@pytest.mark.parametrize(
    ("sdk", "model", "answer", "dollars"),
    [
        ("converse", CLAUDE, _BEDROCK_ANSWER, 1),
        ("converse", _ARN + CLAUDE, _BEDROCK_ANSWER, 1),
        (
            "anthropic-bedrock",
            CLAUDE,
            whole(**_MESSAGE, model="claude-3-5", usage={"input_tokens": 100, "output_tokens": 0}),
            1,
        ),
        ("azure-deployment", "m", whole(**_CHAT, model="gpt-4o-2024-08-06", usage={"prompt_tokens": 100}), 2),
        ("gemini", "gemini-2.5-pro", whole(**_CONTENT, usageMetadata={"promptTokenCount": 100}), 3),
        ("vertex", "gemini-2.5-pro", whole(**_CONTENT, usageMetadata={"promptTokenCount": 100}), 3),
        (
            "anthropic-vertex",
            "claude-3-5-sonnet-v2@20241022",
            whole(**_MESSAGE, model="claude-3-5", usage={"input_tokens": 100, "output_tokens": 0}),
            4,
        ),
        ("openai", "gpt-4o", whole(**_CHAT, model="gpt-4o-2024-08-06", usage={"prompt_tokens": 100}), 5),
    ],
)
def test_the_price_in_the_policy_is_the_price_charged(  # a table
    bank: Bank, session: str, sdk: str, model: str, answer: Reply, dollars: int
) -> None:
    """For the model as a program names it to its SDK, wherever that puts it, and whatever the model calls itself."""
    bank.model.reply = answer
    headers = {"x-team": "red", "x-session-id": session}

    MODEL_SDKS[sdk](f"http://127.0.0.1:{bank.made.envoy.port}/named", model, headers)

    assert bank.find(session, reserved_cost=0.0)["actual_cost"] == dollars


def test_the_call_that_passes_the_cap_has_run_and_the_next_is_refused(bank: Bank, session: str) -> None:
    """By whichever replica, once the bill has come; what it says is in dollars."""
    for cost, sum_ in ((4, 0.04), (5, 0.09), (2, 0.11)):
        assert bank.send(tokens(cost), "/cap/x", session).status == 200
        bank.find(session, actual_cost=sum_, reserved_cost=0.0)

    refused = [bank.send(FREE, "/cap/x", session) for _ in range(4)]

    assert [answer.status for answer in refused] == [429] * 4
    assert {read_refusal(answer) for answer in refused} == {("max_cost_per_session", 0.11, 0.1)}
    assert "retry-after" not in refused[0].headers
    assert bank.send(tokens(1), "/cap/x", session, "blue").status == 200


def test_requests_at_once_do_not_all_run_on_the_last_dollar(bank: Bank, session: str) -> None:
    """Of twelve at once, on two replicas, after an answer of 20 cents, four run: the dollar is spent, and no more."""
    assert bank.send(tokens(20), "/once/x", session).status == 200
    bank.find(session, actual_cost=0.2, reserved_cost=0.0)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: bank.send(tokens(20), "/once/x", session), range(12)))

    assert sorted(answer.status for answer in answers) == [200] * 4 + [429] * 8
    run = bank.find(session, actual_cost=1.0, reserved_cost=0.0, total_step_count=5)
    assert (run["usage"]["output_tokens"], run["limits"]) == (100, {"max_cost_per_session": 1})
    spent = [20] * 5
    eventually(lambda: [step["output_tokens"] for step in bank.find(session)["steps"]] == spent, "each step's tokens")
    eventually(lambda: sum(event["times"] for event in bank.find(session)["events"]) == 8, "refusals of both replicas")
    last = bank.send(FREE, "/once/x", session)
    assert (last.status, read_refusal(last), "retry-after" in last.headers) == (429, ("max_cost_per_session", 1.0, 1.0), False)
    bank.find(session, ended="refused")


def test_a_stream_is_asked_for_its_usage_and_reports_the_model_s_time(bank: Bank, session: str) -> None:
    """The model tells the usage of a stream only if it is asked to, so the bill is no estimate; the tools' time is the rest."""

    def tell() -> bytes:
        sleep(0.3)
        asked = json.loads(bank.model.body).get("stream_options") == {"include_usage": True}
        return write_event({**DELTA, "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 7}} if asked else DELTA)

    reply = Reply([write_event(DELTA), tell, write_event("[DONE]")], EVENTS)
    for turn in range(2):
        sleep(turn * 0.4)
        body = json.dumps({**as_chat([Did((("scan", {}),), ("Error: gone",), number=1)][:turn]), "stream": True}).encode()
        assert bank.send(reply, "/asked/v1/chat/completions", session, body=body).status == 200

    def find_steps() -> Any:  # noqa: ANN401  # JSON
        steps = bank.find(session, actual_cost=0.14, estimated_cost=0.0, reserved_cost=0.0)["steps"]
        return steps if steps[1]["tools"] and steps[1]["tool_seconds"] >= 0.3 else None

    steps = eventually(find_steps, "the time of the tools")  # each replica knows when it let a step through
    assert [(step["tools"], step["tool_errors"], step["output_tokens"]) for step in steps] == [([], 0, 7), (["scan"], 1, 7)]
    assert all(0.3 <= step["model_seconds"] <= PATIENCE for step in steps)


_WARNINGS = {"top level": "loop_warn", "tools": "loop_steer", "tool_choice": "loop_steer", "messages": "loop_warn"}
"""A note has to read what is around the newest message, and that."""


@pytest.mark.parametrize("place", _WARNINGS)
@pytest.mark.parametrize("path", ["/told/x", "/fewer/x"])
def test_a_body_that_cannot_be_changed_costs_what_it_costs(bank: Bank, session: str, path: str, place: str) -> None:
    """With a byte that is no text in some key, calls of 2.25 dollars are over their 4 dollars after two, as all others are."""
    keys = {"top level": b"nonce", "tools": b"parameters", "tool_choice": b"why", "messages": b"seen_at"}

    statuses = []
    for number in range(1, 9):
        body = write_history("issue_refund", 3 if path == "/told/x" else 1, equal=True, tool_choice={"type": "auto", "why": 1})
        body = body.replace(b'"role": "tool"', b'"role": "tool", "seen_at": 1')
        answer = bank.send(tokens(225), path, session, body=body.replace(keys[place], b"\x80"))
        statuses.append(answer.status)
        if answer.status == 200:
            assert answer.headers.get("x-fairvisor-warning", "") == (_WARNINGS[place] if path == "/told/x" else "")
            bank.find(session, total_step_count=number, actual_cost=2.25 * number, reserved_cost=0.0)

    assert statuses == [200] * 2 + [429] * 6


def test_failures_in_a_row_kill_and_a_release_frees(bank: Bank, session: str) -> None:
    """5xx and broken connections count; a success resets the count; a released session starts at zero, on both replicas."""
    failed = whole()._replace(status=500)
    replies = [(failed, 1), (HUNG_UP, 2), (FREE, 0), (HUNG_UP, 1), (failed, 2), (failed._replace(status=503), 3)]
    for number, (reply, errors) in enumerate(replies, start=1):
        bank.send(reply, "/errors/x", session)
        run = bank.find(session, total_step_count=number, consecutive_error_count=errors)

    assert run["killed"] == "consecutive_errors"
    assert {read_refusal(bank.send(FREE, "/errors/x", session)) for _ in range(4)} == {("killed", 3, 3)}
    bank.order("release", "--session", f"header:x-session-id={session}", "--caller", "x-team=red")
    assert bank.play("/errors/x", session, 4) == [200] * 4


def test_a_person_kills_releases_and_has_go_on(bank: Bank, session: str) -> None:
    """Another session of the same team, and the same name in another team, are let through; grants add to the limit."""
    named = ("--session", f"header:x-session-id={session}", "--caller", "x-team=red")
    assert bank.play("/steps/x", session, 1) == [200]

    bank.order("kill", *named, "--reason", "incident 7")
    assert {read_refusal(bank.send(FREE, "/steps/x", session))[0] for _ in range(4)} == {"killed"}
    assert bank.play("/steps/x", session, 2, "blue") == [200] * 2
    assert bank.play("/steps/x", f"{session}-2", 2) == [200] * 2

    bank.order("release", *named)
    assert bank.play("/steps/x", session, 4) == [200] * 3 + [429]
    for steps, limit in ((2, 5), (1, 6)):
        bank.order("grant", *named[:2], "--steps", f"{steps}")
        assert bank.play("/steps/x", session, steps) == [200] * steps
        assert read_refusal(bank.send(FREE, "/steps/x", session)) == ("max_steps", limit, limit)


def write_history(tool: str, calls: int, *, equal: bool = False, **more: object) -> bytes:
    """A conversation in which a tool was called so often, and in which it is offered beside another one."""
    done = [Did(((tool, {"n": 0 if equal else n}),), (f"result {0 if equal else n}",), number=n) for n in range(1, calls + 1)]
    tools = [TOOL, {"type": "function", "function": {"name": tool, "parameters": {}}}]
    return json.dumps({**as_chat(done), "tools": tools, "nonce": next(_numbers), **more}).encode()


def test_the_fields_own_format_ends_calls_of_tools(bank: Bank, session: str) -> None:
    """A refund is offered until there was one; after fifty calls nothing else is; the third equal call is refused."""
    path = "/v1/chat/completions"
    for calls, offered in ((0, ["run", "issue_refund"]), (1, ["run"])):
        assert bank.send(FREE, path, session, body=write_history("issue_refund", calls)).status == 200
        sent = json.loads(bank.model.body)
        assert [tool["function"]["name"] for tool in sent["tools"]] == offered
        assert sent.get("parallel_tool_calls") is (False if "issue_refund" in offered else None)
    assert read_refusal(bank.send(FREE, path, session, body=write_history("issue_refund", 2))) == ("max_calls_per_tool", 2, 1)

    assert bank.send(FREE, path, f"{session}-2", body=write_history("look", 50)).status == 200
    assert json.loads(bank.model.body)["tool_choice"] == "none"
    assert read_refusal(bank.send(FREE, path, f"{session}-2", body=write_history("look", 51))) == ("max_tool_calls", 51, 50)

    assert bank.send(FREE, path, f"{session}-3", body=write_history("look", 2, equal=True)).status == 200
    refused = bank.send(FREE, path, f"{session}-3", body=write_history("look", 3, equal=True))
    assert read_refusal(refused) == ("loop_detection", 3, 3)


def test_a_restart_loses_nothing(bank: Bank, session: str) -> None:
    """Both replicas are replaced in the middle of a session."""
    assert bank.play("/steps/x", session, 2) == [200] * 2

    for number, old in enumerate(bank.made.replicas):
        old.stop()
        bank.made.replicas[number] = Loopguard(bank.made.folder, *bank.flags, listen=old.address)
    bank.made.loopguard = bank.made.replicas[0]
    eventually(lambda: bank.play("/flood/x", f"probe-{next(_numbers)}", 1, f"probe-{next(_numbers)}") == [200])
    eventually(lambda: bank.made.envoy.stat("cluster.loopguard.membership_healthy") == 2)

    assert bank.play("/steps/x", session, 3) == [200, 429, 429]


def test_without_valkey_each_replica_counts_for_itself(bank: Bank, session: str) -> None:
    """Requests are let through, and sessions still end."""
    bank.valkey.kill()

    def probe() -> bool:
        bank.play("/flood/x", f"probe-{next(_numbers)}", 2, f"probe-{next(_numbers)}")
        return all("unavailable" in replica.get("/readyz")[1] for replica in bank.made.replicas)

    eventually(probe, "two that know it")
    eventually(lambda: bank.made.envoy.stat("cluster.loopguard.membership_healthy") == 2)
    statuses = bank.play("/steps/x", session, 3)

    def is_over() -> bool:
        statuses.extend(bank.play("/steps/x", session, 1))
        return statuses.count(200) == 6  # three of each replica, whichever Envoy asks

    eventually(is_over, "the steps of both replicas")

    assert statuses[:3] == [200] * 3
    assert bank.play("/steps/x", session, 6) == [429] * 6
