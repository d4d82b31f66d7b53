"""Starts of conversations without a name: they count with the caller's requests without a session until these go on."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.engine.settlements import Entry, list_settlements
from extproc.ext_proc.service import Service
from extproc.metrics import Metrics
from extproc.pb.external_processor_pb2 import ProcessingResponse
from extproc.sessions.rates import Usage
from extproc.store.memory import MemoryStore
from tests.support.examples import examples
from tests.support.service import make_service, metadata_of, sample
from tests.support.session_limits import TOOL, ask, kept, limited, status, told
from tests.support.turn_writers import as_anthropic, as_bedrock, as_chat, as_gemini, as_ollama, as_responses

PRICES = {"*": {"input": 10_000, "output": 10_000}}
"""A cent for each token."""
WRITERS = [as_chat, as_responses, as_anthropic, as_gemini, as_bedrock, as_ollama]


def policy(mode: str = "enforce", limits: dict[str, Any] | None = None, **unnamed: Any) -> dict[str, Any]:  # noqa: ANN401  # keys
    """A policy with limits of sessions, and these of requests without one."""
    document = limited(mode, **(limits or {"max_steps": 16}))
    document["spec"] |= {"unnamed_limits": unnamed}
    return document


def prompt(text: str) -> bytes:
    """A request that begins a conversation."""
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], "tools": [TOOL]}).encode()


def go_on(text: str, turns: int) -> bytes:
    """A later request of the same conversation."""
    body = json.loads(prompt(text))
    for number in range(turns):
        body["messages"] += [{"role": "assistant", "content": f"step {number}"}, {"role": "user", "content": "go on"}]
    return json.dumps(body).encode()


def send(service: Service, data: bytes, **named: str) -> int:
    """What becomes of a request that names no session."""
    return status(ask(service, data, session="", **named))


def settle(service: Service, answer: ProcessingResponse, cost: int) -> None:
    """Report that a request has cost this many dollars."""
    named = tuple(json.loads(metadata_of(answer)["sessions"]))
    entry = Entry(named, 200, False, 0, 0, "", Usage(100 * cost, 0), estimated=False, refused=False)
    service.counting.settle([each.settlement for each in list_settlements(service.engine, entry)], lambda _: None)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_plain_loop_ends_at_unnamed_limits(writer: Any) -> None:  # noqa: ANN401  # of turn_writers
    """In the form of every API; three retries of each step are free, as everywhere."""
    service = make_service(policy(max_steps=5))
    data = json.dumps({**writer([]), "tools": [TOOL]}).encode()

    found = [send(service, data) for _ in range(100)]

    assert found == [200] * 20 + [429] * 80
    assert send(service, data, team="other") == 200


def test_different_prompts_add_up() -> None:
    """A program that varies each prompt cannot be stopped by comparison."""
    service = make_service(policy(max_steps=5))

    assert [send(service, prompt(f"Fetch page {number}")) for number in range(10)] == [200] * 5 + [429] * 5
    answer = ask(service, prompt("Fetch it"), session="")
    assert told(answer)["limit"] == "max_steps"
    assert "have used 5 of their 5 steps" in told(answer)["message"]


def test_starts_and_unknown_conversations_add_up() -> None:
    """Neither can be told from a loop yet."""
    service = make_service(policy(max_steps=4))

    found = [send(service, data) for at in range(3) for data in (prompt(f"Do {at}"), kept(at + 1))]

    assert found == [200] * 4 + [429] * 2


def test_a_conversation_that_goes_on_leaves_room() -> None:
    """300 agents that one key starts within an hour are none too many, although only two may wait at a time."""
    now = [0]
    service = make_service(policy(max_steps=2), store=MemoryStore(Metrics(), clock=lambda: now[0]))

    for number in range(300):
        now[0] = number * 12_000
        assert [send(service, go_on(f"Task {number}", turns)) for turns in range(4)] == [200] * 4


def test_sessions_still_have_all_their_limits() -> None:
    """The start is a step of its session as well."""
    service = make_service(policy(limits={"max_steps": 3}, max_steps=50))

    assert [send(service, go_on("Task", turns)) for turns in range(5)] == [200] * 3 + [429] * 2


def test_a_retried_turn_leaves_room_once() -> None:
    """Otherwise a client would make room for its loops."""
    service = make_service(policy(max_steps=3))
    sent = [send(service, prompt(text)) for text in ("a", "b", "c")]

    retried = [send(service, go_on("a", 1)) for _ in range(4)]

    assert (sent, retried) == ([200] * 3, [200] * 4)
    assert [send(service, prompt(text)) for text in ("d", "e")] == [200, 429]


def test_an_unseen_start_leaves_no_room() -> None:
    """A conversation that is known from its second request on was never counted."""
    service = make_service(policy(max_steps=2))

    found = [send(service, data) for data in (prompt("a"), go_on("x", 1), go_on("y", 1), prompt("b"), prompt("c"))]

    assert found == [200] * 4 + [429]


@settings(deadline=None, max_examples=examples(60))
@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=30), random=st.randoms(use_true_random=False))
def test_only_waiting_starts_are_counted(lengths: list[int], random: Random) -> None:
    """In any order, a start passes exactly while fewer than four others wait."""
    service, left, waiting = make_service(policy(max_steps=4)), dict(enumerate(lengths)), set[int]()
    sent = dict.fromkeys(left, 0)

    while left:
        number = random.choice(list(left))
        passed = send(service, go_on(f"Task {number}", sent[number]))
        assert passed == (429 if not sent[number] and len(waiting) == 4 else 200)
        if passed == 429 or sent[number] == left[number]:
            del left[number]
        waiting.discard(number)
        if passed == 200 and not sent[number]:
            waiting.add(number)
        sent[number] += 1


@pytest.mark.parametrize("late", [False, True])
def test_a_start_s_cost_goes_with_its_conversation(late: bool) -> None:
    """Whether the access log reports it before or after the conversation goes on."""
    service = make_service(policy(limits={"max_cost_per_session": 50, "prices": PRICES}, max_cost_per_session=20))

    for number in range(5):
        answer = ask(service, prompt(f"Task {number}"), session="")
        if not late:
            settle(service, answer, 15)
        assert send(service, go_on(f"Task {number}", 1)) == 200
        if late:
            settle(service, answer, 15)
        assert status(answer) == 200

    again = ask(service, go_on("Task 0", 2), session="")
    settle(service, again, 40)
    assert send(service, go_on("Task 0", 3)) == 429


def test_costs_of_prompts_add_up() -> None:
    """The access log settles a request that may begin a session with both."""
    service = make_service(policy(limits={"max_cost_per_session": 50, "prices": PRICES}, max_cost_per_session=20))

    for number in range(2):
        answer = ask(service, prompt(f"Task {number}"), session="")
        assert status(answer) == 200
        settle(service, answer, 10)

    assert told(ask(service, prompt("Task 3"), session=""))["limit"] == "max_cost_per_session"


def test_a_named_session_is_none_of_them() -> None:
    """It has limits of its own from its first request on."""
    service = make_service(policy(max_steps=1))

    assert [status(ask(service, prompt("Hi"), session=f"s{number}")) for number in range(9)] == [200] * 9


def test_starts_are_not_reported_as_nameless() -> None:
    """Their conversations are known by what they show."""
    service = make_service(policy(max_steps=1))

    assert [send(service, prompt(text)) for text in "ab"] == [200, 429]
    assert sample(service, "session_unnamed_total", policy="agents", mode="enforce") == 0
    assert sample(service, "session_limits_total", policy="agents", mode="enforce", limit="max_steps", action="reject") == 1


def test_a_refused_start_takes_no_room() -> None:
    """Neither does one that the session's own limits refuse."""
    service = make_service(policy(limits={"max_steps": 9, "max_tool_calls": 1}, max_steps=1))

    assert [send(service, prompt(text)) for text in ("a", "b", "b")] == [200, 429, 429]
    assert [send(service, go_on("a", turns)) for turns in (1, 2)] == [200, 200]
    assert [send(service, prompt(text)) for text in ("b", "c")] == [200, 429]


def test_tools_that_need_approval_are_forbidden_at_starts() -> None:
    """As in any first request of a session."""
    answer = ask(make_service(policy(limits={"max_calls_per_tool": {"run": 0}}, max_steps=9)), prompt("Hi"), session="")

    assert json.loads(answer.request_body.response.body_mutation.body)["tool_choice"] == "none"


def test_shadow_policies_only_report() -> None:
    """What would be refused is in the metrics."""
    service = make_service(policy("shadow", max_steps=1))

    assert [send(service, prompt(text)) for text in "abc"] == [200] * 3
    assert sample(service, "session_limits_total", policy="agents", mode="shadow", limit="max_steps", action="reject") == 2


def test_without_unnamed_limits_starts_are_only_sessions() -> None:
    """Each has limits of its own."""
    service = make_service(limited(max_steps=2))

    assert [send(service, prompt("Hi")) for _ in range(100)] == [200] * 100
