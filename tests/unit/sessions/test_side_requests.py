"""Requests beside the turns, such as titles and summaries, are no steps and hide none."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from extproc.ext_proc.service import Service
from extproc.request.document import Document
from extproc.sessions.history import read_tool_calls
from extproc.store.rules.session import OFFERS_NONE, OFFERS_TOOLS
from tests.support.messages import body, headers
from tests.support.service import decoded, exchange, make_service, status
from tests.support.session_limits import TOOL, ask, limited, turns
from tests.support.sessions import agents, send, turn
from tests.support.turn_writers import Did, as_chat, as_gemini


def say(*texts: str, **more: Any) -> bytes:  # noqa: ANN401  # of a body
    messages = [
        {"role": "system" if text.startswith("System: ") else "user", "content": text}
        for text in texts
    ]
    return json.dumps({"model": "m", "messages": messages, **more}).encode()


TITLE = say(
    "System: Name the thread. Answer with the name alone.",
    "Name this conversation:",
    "Fix the build.",
)
SUMMARY = say("System: Sum up.", "<conversation>\n[User]: Fix the build.\n[Assistant]: ...")


def compact(count: int) -> bytes:
    document = json.loads(turns(count))
    return json.dumps(
        {
            **document,
            "tools": [],
            "messages": [
                *document["messages"],
                {"role": "user", "content": "Write a handoff summary."},
            ],
        }
    ).encode()


def used(service: Service) -> tuple[int, int]:
    (run,) = service.reporter.sessions.copy()
    return run.standing.steps, run.standing.tool_calls


LONG = [Did((("run", {"step": at}),), ("y" * 3_000,), number=at) for at in range(1, 31)]
CASES: dict[str, tuple[int, Sequence[bytes], list[int], tuple[int, int]]] = {
    "a title before the first step is no step": (
        3,
        [TITLE, *(turns(number) for number in range(4))],
        [200] * 4 + [429],
        (3, 3),
    ),
    "a summary between two steps is no step": (
        4,
        [
            TITLE,
            turns(0),
            turns(1),
            SUMMARY,
            turns(2),
            compact(3),
            say("x", tools=[TOOL]),
            turns(4),
        ],
        [200] * 7 + [429],
        (4, 4),
    ),
    "posing as side requests gains no more than retries": (
        5,
        [turns(1), *(say(f"try {number}") for number in range(40))],
        [200] * 20 + [429] * 21,
        (5, 1),
    ),
    "without any tools, each request is a step": (
        2,
        [say(f"step {number}") for number in range(3)],
        [200, 200, 429],
        (2, 0),
    ),
    "recognized long histories keep their offer": (
        100,
        [
            json.dumps({**as_chat(LONG[:count]), **offer}).encode()
            for count in range(10, 31)
            for offer in ({"tools": [TOOL]}, *([{}] if count % 3 == 0 else []))
        ],
        [200] * 28,
        (21, 30),
    ),
}


@pytest.mark.parametrize(("most", "requests", "expected", "counted"), CASES.values(), ids=CASES)
def test_side_request_is_no_step(
    most: int, requests: Sequence[bytes], expected: list[int], counted: tuple[int, int]
) -> None:
    service = make_service(limited(max_steps=most))

    assert [status(ask(service, data)) for data in requests] == expected
    assert used(service) == counted


def test_unnamed_side_requests_are_separate_conversations() -> None:
    service = make_service(limited(max_steps=3))
    router = {
        "contents": [{"role": "user", "parts": [{"text": "Which model?"}]}],
        "generationConfig": {"temperature": 0},
    }
    tools = [{"functionDeclarations": [{"name": "read_file"}]}]
    done = [
        Did((("read_file", {"path": str(at)}),), (f"text {at}",), number=at) for at in range(1, 5)
    ]

    found = []
    for number in range(5):
        routed = router | {"systemInstruction": {"parts": [{"text": f"step {number}"}]}}
        for model, document in (
            ("small", routed),
            ("large", {**as_gemini(done[:number]), "tools": tools}),
        ):
            message = headers(f"/v1beta/models/{model}:generateContent", x_team="t")
            found.append(
                status(decoded(exchange(service, message, body(json.dumps(document).encode()))[-1]))
            )

    assert found == [200] * 6 + [200, 429] * 2


@pytest.mark.parametrize(
    ("document", "offer"),
    [
        (
            {"messages": [{"role": "user", "content": "x"}], "functions": [{"name": "f"}]},
            OFFERS_TOOLS,
        ),
        ({"messages": [{"role": "user", "content": "x"}], "tools": []}, OFFERS_NONE),
        ({"messages": [{"role": "user", "content": "x"}], "tools": None}, OFFERS_NONE),
        ({"messages": [{"role": "user", "content": "x"}]}, OFFERS_NONE),
        (
            {
                "messages": [{"role": "user", "content": [{"text": "x"}]}],
                "toolConfig": {"tools": [{}]},
            },
            OFFERS_TOOLS,
        ),
        ({"input": "x", "tools": [{"type": "web_search"}]}, OFFERS_TOOLS),
        ({"input": "x"}, OFFERS_NONE),
        (
            {"contents": [{"parts": [{"text": "x"}]}], "tools": [{"functionDeclarations": []}]},
            OFFERS_TOOLS,
        ),
        ({"contents": [{"parts": [{"text": "x"}]}], "cachedContent": "c1"}, 0),
        ({"input": "x", "previous_response_id": "r1"}, 0),
    ],
)
def test_offered_tools_are_read_for_every_api(document: dict[str, Any], offer: int) -> None:
    assert read_tool_calls(Document(json.dumps(document).encode())).offer == offer


def test_side_requests_hide_no_loop_of_turns() -> None:
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
def test_request_without_a_model_call_is_no_step(method: str, path: str) -> None:
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
