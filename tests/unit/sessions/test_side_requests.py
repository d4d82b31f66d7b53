"""What programs ask beside their turns, in shapes as theirs, made up: it is no step, and hides none."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from extproc.ext_proc.service import Service
from extproc.request.document import Document
from extproc.sessions.history import read_tool_calls
from extproc.store.rules.session import OFFERS_NONE, OFFERS_TOOLS
from tests.support.messages import body, headers
from tests.support.service import decoded, exchange, make_service
from tests.support.session_limits import TOOL, ask, limited, status, turns
from tests.support.sessions import agents, send, turn
from tests.support.turn_writers import Did, as_chat, as_gemini


def write(messages: list[dict[str, Any]], **more: Any) -> bytes:  # noqa: ANN401  # of a body
    """A body of Chat Completions."""
    return json.dumps({"model": "m", "messages": messages, **more}).encode()


TITLE = write(
    [
        {"role": "system", "content": "Name the thread. Answer with the name alone."},
        {"role": "user", "content": "Name this conversation:"},
        {"role": "user", "content": "Fix the build."},
    ]
)
SUMMARY = write(
    [
        {"role": "system", "content": "Sum up."},
        {"role": "user", "content": "<conversation>\n[User]: Fix the build.\n[Assistant]: ..."},
    ]
)


def compact(count: int) -> bytes:
    """The whole history again, without tools, and the order to sum it up."""
    document = json.loads(turns(count))
    return json.dumps(
        {**document, "tools": [], "messages": [*document["messages"], {"role": "user", "content": "Write a handoff summary."}]}
    ).encode()


def used(service: Service) -> tuple[int, int]:
    """Steps and tool calls of the one session."""
    (run,) = service.reporter.sessions.copy()
    return run.standing.steps, run.standing.tool_calls


def test_a_title_before_the_first_step_is_none() -> None:
    """Nothing tells it from a step until the first request with tools comes; that takes it back."""
    service = make_service(limited(max_steps=3))

    assert [status(ask(service, data)) for data in (TITLE, turns(0), turns(1), turns(2), turns(3))] == [200] * 4 + [429]
    assert used(service) == (3, 3)


def test_a_summary_between_two_steps_is_none() -> None:
    """Neither one that quotes the conversation, nor one that shows it: the calls in that are the agent's, and count once."""
    service = make_service(limited(max_steps=4))

    sent = [TITLE, turns(0), turns(1), SUMMARY, turns(2), compact(3), write([{"role": "user", "content": "x"}], tools=[TOOL])]

    assert [status(ask(service, data)) for data in sent] == [200] * 7
    assert used(service) == (4, 3)
    assert status(ask(service, turns(4))) == 429


def test_a_loop_does_not_hide_as_side_requests() -> None:
    """Three for each step are free, retries among them: as many requests pass as by retries alone."""
    service = make_service(limited(max_steps=5))
    posing = [write([{"role": "user", "content": f"try {number}"}]) for number in range(40)]

    found = [status(ask(service, data)) for data in [turns(1), *posing]]

    assert found == [200] * 20 + [429] * 21


@pytest.mark.deep
def test_whatever_the_order_steps_stay_exact() -> None:
    """Against a count of the requests with tools: with at most three side requests behind each, these alone are steps."""
    for seed in range(60):
        order = Random(seed)
        service, most = make_service(limited(max_steps=1_000)), 0
        sent = [TITLE] * order.randint(0, 2)
        for number in range(order.randint(1, 30)):
            sent.append(turns(number))
            most += 1
            sent += [
                order.choice([TITLE, SUMMARY, compact(number), write([{"role": "user", "content": str(order.random())}])])
                for _ in range(order.randint(0, 3))
            ]
        assert {status(ask(service, data)) for data in sent} == {200}
        assert used(service)[0] == most, seed


def test_a_program_without_tools_has_steps_all_the_same() -> None:
    """Side requests are known by the tools that the others have: where there are none, each request is a step."""
    service = make_service(limited(max_steps=2))
    texts = [write([{"role": "user", "content": f"step {number}"}]) for number in range(3)]

    assert [status(ask(service, data)) for data in texts] == [200, 200, 429]


def test_side_requests_without_a_header_are_conversations_of_their_own() -> None:
    """A router that asks another model before each turn: its program names no session."""
    service = make_service(limited(max_steps=3))
    router = {"contents": [{"role": "user", "parts": [{"text": "Which model?"}]}], "generationConfig": {"temperature": 0}}
    tools = [{"functionDeclarations": [{"name": "read_file"}]}]
    done = [Did((("read_file", {"path": str(at)}),), (f"text {at}",), number=at) for at in range(1, 5)]

    def send_one(path: str, document: dict[str, Any]) -> int:
        sent = exchange(
            service, headers(f"/v1beta/models/{path}:generateContent", x_team="t"), body(json.dumps(document).encode())
        )
        return status(decoded(sent[-1]))

    found = []
    for number in range(5):
        asked = {**as_gemini(done[:number]), "tools": tools}
        routed = router | {"systemInstruction": {"parts": [{"text": f"step {number}"}]}}
        found.append((send_one("small", routed), send_one("large", asked)))

    assert found == [(200, 200)] * 3 + [(200, 429)] * 2


@pytest.mark.parametrize(
    ("document", "offer"),
    [
        ({"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}, OFFERS_TOOLS),
        ({"messages": [{"role": "user", "content": "x"}], "functions": [{"name": "f"}]}, OFFERS_TOOLS),
        ({"messages": [{"role": "user", "content": "x"}], "tools": []}, OFFERS_NONE),
        ({"messages": [{"role": "user", "content": "x"}], "tools": None}, OFFERS_NONE),
        ({"messages": [{"role": "user", "content": "x"}]}, OFFERS_NONE),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}], "toolConfig": {"tools": [{}]}}, OFFERS_TOOLS),
        ({"input": "x", "tools": [{"type": "web_search"}]}, OFFERS_TOOLS),
        ({"input": "x"}, OFFERS_NONE),
        ({"contents": [{"parts": [{"text": "x"}]}], "tools": [{"functionDeclarations": []}]}, OFFERS_TOOLS),
        ({"contents": [{"parts": [{"text": "x"}]}], "cachedContent": "c1"}, 0),
        ({"input": "x", "previous_response_id": "r1"}, 0),
    ],
)
def test_what_a_request_offers_is_read_for_every_api(document: dict[str, Any], offer: int) -> None:
    """Where the server may keep the tools, it is not known."""
    assert read_tool_calls(Document(json.dumps(document).encode())).offer == offer


def test_long_histories_that_are_known_again_offer_what_they_offered() -> None:
    """Of such a body only what is new is read, and the tools are not."""
    service = make_service(limited(max_steps=100))
    long = [Did((("run", {"step": at}),), ("y" * 3_000,), number=at) for at in range(1, 31)]

    for count in range(10, 31):
        assert status(ask(service, json.dumps({**as_chat(long[:count]), "tools": [TOOL]}).encode())) == 200
        if count % 3 == 0:
            assert status(ask(service, json.dumps(as_chat(long[:count])).encode())) == 200

    assert used(service) == (21, 30)


def test_turns_are_not_disturbed() -> None:
    """The third equal turn of a session is refused, whatever is asked between them."""
    service = make_service(agents())

    sent = [TITLE, turn(1), TITLE, SUMMARY, turn(2), SUMMARY, turn(3)]

    assert [send(service, data, session_id="s") for data in sent] == [200] * 6 + [429]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("HEAD", "/"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/v1beta/models/m:countTokens"),
        ("POST", "/v1/responses/input_tokens"),
        ("POST", "/model/m/count-tokens"),
    ],
)
def test_what_asks_no_model_is_no_step(method: str, path: str) -> None:
    """However often a program looks whether a server is there, or how long its prompt is."""
    document = limited(max_steps=1)
    document["spec"] |= {"selector": {"pathPrefix": "/"}, "unnamed_limits": {"max_steps": 1}}
    service = make_service(document)

    def send_one(**named: Any) -> int:  # noqa: ANN401  # of `headers`
        message = headers(path, method=method, x_team="t", **named)
        return status(decoded(exchange(service, message, body(turns(1)))[-1]))

    assert [send_one(x_session_id="s") for _ in range(6)] == [200] * 6
    assert [send_one() for _ in range(6)] == [200] * 6
    assert service.reporter.sessions.copy() == []
    assert status(ask(service, turns(1))) == 200
