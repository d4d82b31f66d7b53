"""What sessions cost and what kills them, on the real Envoy, two replicas and Valkey."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple

import pytest

from extproc.cli.main import main
from extproc.policy.presets import find_preset
from tests.support.documents import bare_policy, bundle
from tests.support.harness import PATIENCE, Answer, Stack, envoy_version, eventually
from tests.support.stacks import await_session, open_before_model
from tests.support.turn_writers import Did, as_chat
from tests.support.usage import DELTA, EVENTS, HUNG_UP, Model, Reply, whole, write_event

pytestmark = pytest.mark.skipif(
    envoy_version() < (1, 38), reason="this Envoy reads no answers: their costs are NOT tested"
)

TOKEN_COSTS_A_CENT = {"*": {"input": 0, "output": 10_000}}


def limited(identity: str, **limits: Any) -> dict[str, Any]:  # noqa: ANN401  # of a policy
    named = {"keys": ["header:x-session-id"]}
    return bare_policy(
        identity,
        f"/{identity}/",
        limit_keys=["header:x-team"],
        session=named,
        session_limits=limits,
    )


PRESET = json.loads(Path(find_preset("sessions")).read_text())
PRESET["spec"]["selector"]["pathPrefix"] = "/preset"


POLICIES = bundle(
    PRESET,
    limited("cap", max_cost_per_session=0.1, prices=TOKEN_COSTS_A_CENT),
    limited("once", max_cost_per_session=1.0, prices=TOKEN_COSTS_A_CENT),
    limited("asked", usage="request", max_cost_per_session=4.0, prices=TOKEN_COSTS_A_CENT),
    limited("errors", max_steps=100, circuit_breaker={"consecutive_errors": 3}),
    limited("growth", max_input_growth=2),
    limited("steps", max_steps=3, circuit_breaker={"consecutive_blocks": 4}),
)

_numbers = count()


class Bank(NamedTuple):
    """Envoy before a model that sends bills, two replicas, Valkey, and the operator's token."""

    made: Stack
    model: Model
    tokens: Path

    def send(
        self, reply: Reply, path: str, session: str, team: str = "red", body: bytes = b""
    ) -> Answer:
        """A request unlike all others."""
        self.model.reply = reply
        headers = {"x-team": team, "x-session-id": session}
        data = (
            body
            or json.dumps(
                {"messages": [{"role": "user", "content": f"step {next(_numbers)}"}]}
            ).encode()
        )
        return self.made.send(path, method="POST", body=data, headers=headers)

    def play(self, path: str, session: str, times: int, team: str = "red") -> list[int]:
        return [self.send(FREE, path, session, team).status for _ in range(times)]

    def find(self, session: str, **expected: object) -> dict[str, Any]:
        return await_session(self.made, session, **expected)

    def order(self, *arguments: str) -> None:
        """Give an order by the command, and wait until it applies on both replicas."""
        known = self._read_orders()
        assert (
            main(
                [
                    *arguments,
                    "--admin",
                    self.made.loopguard.admin_url,
                    "--token-file",
                    str(self.tokens),
                ]
            )
            == 0
        )
        eventually(
            lambda: (now := self._read_orders())[0] == now[1] != known[1],
            "the same order everywhere",
        )

    def _read_orders(self) -> list[str]:
        return [replica.get("/overrides")[1] for replica in self.made.replicas]


FREE = whole(usage={"prompt_tokens": 0, "completion_tokens": 0})


def tokens(output: int) -> Reply:
    """An answer that costs this many cents."""
    return whole(usage={"prompt_tokens": 0, "completion_tokens": output})


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bank]:
    tokens = tmp_path_factory.mktemp("operator") / "tokens"
    tokens.write_text("correct-horse-battery-staple")
    with open_before_model(
        POLICIES, "--show-callers", "--admin-token-file", str(tokens), replicas=2
    ) as opened:
        yield Bank(*opened, tokens)


@pytest.fixture
def session() -> str:
    return f"session-{next(_numbers)}"


def read_refusal(answer: Answer) -> tuple[str, object, object]:
    detail = answer.json()["detail"]
    loop = "recursive_loop_detected", "loop_detected"
    expected = loop if detail["limit"] == "loop_detection" else ("session_limit_exceeded",) * 2
    assert (detail["error"], answer.headers["x-fairvisor-reason"]) == expected
    return detail["limit"], detail["used"], detail["allowed"]


def test_call_after_the_cost_cap_is_refused(bank: Bank, session: str) -> None:
    for cost, sum_ in ((4, 0.04), (5, 0.09), (2, 0.11)):
        assert bank.send(tokens(cost), "/cap/x", session).status == 200
        bank.find(session, actual_cost=sum_, reserved_cost=0.0)

    refused = [bank.send(FREE, "/cap/x", session) for _ in range(4)]

    assert [answer.status for answer in refused] == [429] * 4
    assert {read_refusal(answer) for answer in refused} == {("max_cost_per_session", 0.11, 0.1)}
    assert "retry-after" not in refused[0].headers
    assert bank.send(tokens(1), "/cap/x", session, "blue").status == 200


def test_concurrent_requests_cannot_all_spend_the_last_dollar(bank: Bank, session: str) -> None:
    """Of twelve, on two replicas, after an answer of 20 cents, four run."""
    assert bank.send(tokens(20), "/once/x", session).status == 200
    bank.find(session, actual_cost=0.2, reserved_cost=0.0)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: bank.send(tokens(20), "/once/x", session), range(12)))

    assert sorted(answer.status for answer in answers) == [200] * 4 + [429] * 8
    run = bank.find(session, actual_cost=1.0, reserved_cost=0.0, total_step_count=5)
    assert (run["usage"]["output_tokens"], run["limits"]) == (100, {"max_cost_per_session": 1})
    spent = [20] * 5
    eventually(
        lambda: [step["output_tokens"] for step in bank.find(session)["steps"]] == spent,
        "each step's tokens",
    )
    eventually(
        lambda: sum(event["times"] for event in bank.find(session)["events"]) == 8,
        "refusals of both replicas",
    )
    last = bank.send(FREE, "/once/x", session)
    assert (last.status, read_refusal(last), "retry-after" in last.headers) == (
        429,
        ("max_cost_per_session", 1.0, 1.0),
        False,
    )
    bank.find(session, ended="refused")


def test_stream_reports_usage_and_times_of_model_and_tools(bank: Bank, session: str) -> None:
    def tell() -> bytes:
        sleep(0.3)
        asked = json.loads(bank.model.body).get("stream_options") == {"include_usage": True}
        return write_event(
            {**DELTA, "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 7}}
            if asked
            else DELTA
        )

    reply = Reply([write_event(DELTA), tell, write_event("[DONE]")], EVENTS)
    for turn in range(2):
        sleep(turn * 0.4)
        body = json.dumps(
            {**as_chat([Did((("scan", {}),), ("Error: gone",), number=1)][:turn]), "stream": True}
        ).encode()
        assert bank.send(reply, "/asked/v1/chat/completions", session, body=body).status == 200

    def find_steps() -> Any:  # noqa: ANN401  # JSON
        steps = bank.find(session, actual_cost=0.14, estimated_cost=0.0, reserved_cost=0.0)["steps"]
        return steps if steps[1]["tools"] and steps[1]["tool_seconds"] >= 0.3 else None

    # Each replica knows when it let a step through
    steps = eventually(find_steps, "the time of the tools")
    assert [(step["tools"], step["tool_errors"], step["output_tokens"]) for step in steps] == [
        ([], 0, 7),
        (["scan"], 1, 7),
    ]
    assert all(0.3 <= step["model_seconds"] <= PATIENCE for step in steps)


def test_grown_session_gets_a_note_until_it_compacts(bank: Bank, session: str) -> None:
    noted = []
    for number, (prompt, growth) in enumerate(
        [(12_000, 1.0), (25_000, 2.1), (14_000, 1.2), (9_000, 0.8)], 1
    ):
        done = [Did((("scan", {"at": at}),), (f"line {at}",), number=at) for at in range(number)]
        usage = {"prompt_tokens": prompt, "completion_tokens": 5}
        answer = bank.send(
            whole(usage=usage), "/growth/v1/x", session, body=json.dumps(as_chat(done)).encode()
        )
        assert answer.status == 200
        noted.append(b"Input growing" in bank.model.body)
        bank.find(session, input_growth=growth, growing=growth >= 2)

    assert noted == [False, False, True, False]


def test_failures_in_a_row_kill_until_a_release(bank: Bank, session: str) -> None:
    """5xx and broken connections count; a success resets the count."""
    failed = whole()._replace(status=500)
    replies = [
        (failed, 1),
        (HUNG_UP, 2),
        (FREE, 0),
        (HUNG_UP, 1),
        (failed, 2),
        (failed._replace(status=503), 3),
    ]
    for number, (reply, errors) in enumerate(replies, start=1):
        bank.send(reply, "/errors/x", session)
        run = bank.find(session, total_step_count=number, consecutive_error_count=errors)

    assert run["killed"] == "consecutive_errors"
    assert {read_refusal(bank.send(FREE, "/errors/x", session)) for _ in range(4)} == {
        ("killed", 3, 3)
    }
    bank.order("release", "--session", f"header:x-session-id={session}", "--caller", "x-team=red")
    assert bank.play("/errors/x", session, 4) == [200] * 4


def test_orders_kill_release_and_grant_one_session(bank: Bank, session: str) -> None:
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


# ---- The preset


def ask(bank: Bank, text: str, key: str) -> int:
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
    return bank.made.post(
        "/preset/v1/chat/completions", body, {"authorization": f"Bearer {key}"}
    ).status


def test_preset_ends_a_plain_loop(bank: Bank) -> None:
    assert [ask(bank, "Fetch the page", "loop") for _ in range(60)] == [200] * 24 + [429] * 36


def test_preset_lets_documents_and_samples_pass(bank: Bank) -> None:
    texts = [f"Section {number}: {number} euros.\n\nWho pays?" for number in range(100)] + [
        "Name a colour."
    ] * 20
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda text: ask(bank, text, "batch"), texts))

    assert found == [200] * 120
