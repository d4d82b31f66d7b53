"""Conversations compared by their last messages."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

from extproc.detectors.alike import fold
from extproc.detectors.tail import Tail
from extproc.policy.bundle import LoopDetection
from extproc.request.document import Document, NotCounted
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.messages import body, headers
from tests.support.model_requests import BODIES
from tests.support.service import decoded, exchange, make_service

_NOTHING_TO_COMPARE = ("chat_empty", "responses_conversation")
_SPACES = "".join(chr(code) for code in range(0x3001) if chr(code).isspace())
_FOLDABLE = (
    st.text(st.sampled_from("aAzZ@[`{\x00\x08\x0e\x1b\x1c\x1f\x7f\u200bİßΣé" + _SPACES)) | st.text()
)


def compared(value: Any, messages: int = 3) -> bytes:  # noqa: ANN401  # any JSON value
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    found, said = Tail(LoopDetection(similarity="tail", tail_messages=messages)).compare(
        Document(data)
    )
    assert said is None
    return found


# Any JSON value
def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"model": "m", "messages": list(messages), **more}


def user(content: Any) -> dict[str, Any]:  # noqa: ANN401  # any JSON value
    return {"role": "user", "content": content}


def call(name: str = "f", arguments: str = "{}", identity: str = "1") -> dict[str, Any]:
    calls = [
        {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


@given(_FOLDABLE)
def test_folding_is_lower_case_and_single_spaces(text: str) -> None:
    assert fold(text) == " ".join(text.lower().split()).encode()


@pytest.mark.parametrize("size", [16_383, 16_384, 16_385, 100_000])
@pytest.mark.parametrize("unit", ["a  B", " \t\n", "x\x1c \x1dY", "é  "])
def test_long_texts_are_folded_alike(unit: str, size: int) -> None:
    text = (unit * size)[:size]

    assert fold(text) == " ".join(text.lower().split()).encode()


_PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "case and white space": (chat(user(" Hello \n World")), chat(user("hello world")), True),
    "text": (chat(user("hello")), chat(user("hello!")), False),
    "words joined": (chat(user("hello world")), chat(user("helloworld")), False),
    "model": (chat(user("a")), {**chat(user("a")), "model": "M"}, False),
    "no model": (chat(user("a")), {"messages": [user("a")]}, False),
    "role": (chat(user("a")), chat({"role": "assistant", "content": "a"}), False),
    "sampling": (
        chat(user("a"), temperature=0),
        chat(user("a"), temperature=1, stream=True, tools=[{}]),
        True,
    ),
    "name": (chat(user("a")), chat({**user("a"), "name": "ann"}), True),
    "older messages": (
        chat(user("x"), user("a"), user("b"), user("c")),
        chat(user("a"), user("b"), user("c")),
        True,
    ),
    "third message": (
        chat(user("a"), user("b"), user("c")),
        chat(user("x"), user("b"), user("c")),
        False,
    ),
    "order": (chat(user("a"), user("b")), chat(user("b"), user("a")), False),
    "two messages or one": (chat(user("a"), user("b")), chat(user("a b")), False),
    "an empty message more": (chat(user("a")), chat(user("a"), user("")), False),
    "text or parts": (chat(user("a")), chat(user([{"type": "text", "text": "A "}])), True),
    "an empty part more": (
        chat(user("a")),
        chat(user([{"type": "text", "text": "a"}, {"type": "text", "text": " "}])),
        True,
    ),
    "parts joined": (
        chat(user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])),
        chat(user([{"type": "text", "text": "a b"}])),
        False,
    ),
    "cache mark": (
        chat(user([{"type": "text", "text": "a"}])),
        chat(user([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}])),
        True,
    ),
    "nothing or null": (
        chat({"role": "assistant"}),
        chat({"role": "assistant", "content": None}),
        True,
    ),
    "nothing or empty": (
        chat({"role": "assistant", "content": []}),
        chat({"role": "assistant", "content": ""}),
        True,
    ),
    "call id": (chat(call(identity="1")), chat(call(identity="2")), True),
    "tool": (chat(call("f")), chat(call("g")), False),
    "tool's case": (chat(call("f")), chat(call("F")), False),
    "arguments by meaning": (
        chat(call("f", '{"a":1,"b":2}')),
        chat(call("f", '{ "b": 2.0, "a": 1 }')),
        True,
    ),
    "arguments": (chat(call("f", '{"a":1}')), chat(call("f", '{"a":"1"}')), False),
    "arguments' case": (chat(call("f", '{"a":"x"}')), chat(call("f", '{"a":"X"}')), False),
    "broken arguments": (chat(call("f", '{"a":')), chat(call("f", ' {"a": ')), True),
    "call or text": (
        chat(call("f", "{}")),
        chat({"role": "assistant", "content": "call f {}"}),
        False,
    ),
    "result": (
        chat(call(), {"role": "tool", "tool_call_id": "1", "content": "a"}),
        chat(call(), {"role": "tool", "tool_call_id": "1", "content": "b"}),
        False,
    ),
    "result's id and spelling": (
        chat(call(identity="1"), {"role": "tool", "tool_call_id": "1", "content": "Not  found"}),
        chat(
            call(identity="2"),
            {
                "role": "tool",
                "tool_call_id": "2",
                "content": [{"type": "text", "text": "not found "}],
            },
        ),
        True,
    ),
    "image": (
        chat(user([{"type": "image_url", "image_url": {"url": "data:a"}}])),
        chat(user([{"type": "image_url", "image_url": {"url": "data:b"}}])),
        False,
    ),
    "image's keys in another order": (
        chat(user([{"type": "image_url", "image_url": {"url": "x", "detail": "low"}}])),
        chat(user([{"image_url": {"detail": "low", "url": "x"}, "type": "image_url"}])),
        True,
    ),
    "image or none": (
        chat(user([{"type": "text", "text": "a"}])),
        chat(user([{"type": "text", "text": "a"}, {"type": "x"}])),
        False,
    ),
    "refusal": (
        chat({"role": "assistant", "content": None, "refusal": "no"}),
        chat({"role": "assistant", "content": None, "refusal": "never"}),
        False,
    ),
    "failure": (
        chat(user([{"type": "tool_result", "tool_use_id": "1", "content": "a", "is_error": True}])),
        chat(user([{"type": "tool_result", "tool_use_id": "1", "content": "a"}])),
        False,
    ),
    "no failure": (
        chat(
            user([{"type": "tool_result", "tool_use_id": "1", "content": "a", "is_error": False}])
        ),
        chat(user([{"type": "tool_result", "tool_use_id": "2", "content": "a"}])),
        True,
    ),
    "Anthropic's arguments": (
        chat(
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1, "b": 2}}
                ],
            }
        ),
        chat(
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "2", "name": "f", "input": {"b": 2.0, "a": 1}}
                ],
            }
        ),
        True,
    ),
    "thoughts": (
        chat(
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "a"}],
            }
        ),
        chat({"role": "assistant", "content": [{"type": "text", "text": "a"}]}),
        True,
    ),
    "items' thoughts and ids": (
        {
            "input": [
                {"type": "reasoning", "id": "1"},
                {"type": "function_call", "id": "1", "call_id": "1", "name": "f"},
            ]
        },
        {
            "input": [
                {
                    "type": "function_call",
                    "id": "2",
                    "call_id": "2",
                    "name": "f",
                    "status": "completed",
                }
            ]
        },
        True,
    ),
    "items' arguments": (
        {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}]},
        {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a":1}'}]},
        False,
    ),
    "items' outputs": (
        {"input": [{"type": "function_call_output", "call_id": "1", "output": "a"}]},
        {"input": [{"type": "function_call_output", "call_id": "2", "output": "b"}]},
        False,
    ),
    "unknown items": (
        {
            "input": [
                {
                    "type": "web_search_call",
                    "id": "1",
                    "status": "completed",
                    "action": {"query": "a"},
                }
            ]
        },
        {
            "input": [
                {"type": "web_search_call", "id": "2", "status": "failed", "action": {"query": "a"}}
            ]
        },
        True,
    ),
    "unknown items' contents": (
        {"input": [{"type": "web_search_call", "id": "1", "action": {"query": "a"}}]},
        {"input": [{"type": "web_search_call", "id": "1", "action": {"query": "b"}}]},
        False,
    ),
    "input as a text": (
        {"input": "a"},
        {"input": [user([{"type": "input_text", "text": " A"}])]},
        True,
    ),
    "prompt": ({"prompt": "Once upon"}, {"prompt": "once  upon "}, True),
    "another prompt": ({"prompt": "Once"}, {"prompt": "twice"}, False),
    "prompts": ({"prompt": ["a", "b"]}, {"prompt": ["a", "c"]}, False),
    "tokens": ({"prompt": [1, 2]}, {"prompt": [1, 3]}, False),
    "server's history": (
        {"input": "a", "previous_response_id": "1"},
        {"input": "a", "previous_response_id": "2"},
        False,
    ),
    "words that look like ours": (chat(user("a"), user("b")), chat(user("a\u00fe\u00ffb")), False),
}


@pytest.mark.parametrize(("one", "other", "same"), _PAIRS.values(), ids=_PAIRS)
def test_messages_are_compared_without_ids_and_options(
    one: dict[str, Any], other: dict[str, Any], same: bool
) -> None:
    assert (compared(one) == compared(other)) is same


def test_tail_messages_sets_how_many_are_compared() -> None:
    said = [user(f"message {number}") for number in range(6)]

    def matters(messages: int) -> list[bool]:
        others = [[*said[:place], user("other"), *said[place + 1 :]] for place in range(6)]
        return [
            compared(chat(*said), messages) != compared(chat(*other), messages) for other in others
        ]

    assert matters(LoopDetection().tail_messages) == [False] * 3 + [True] * 3
    assert [sum(matters(messages)) for messages in (1, 2, 5, 6, 200)] == [1, 2, 5, 6, 6]


def _respelled(value: Any) -> str:  # noqa: ANN401  # any JSON value
    """A value with each character escaped, objects reversed, more spaces, and exponents."""
    if isinstance(value, str):
        units = value.encode("utf-16-be").hex()
        return (
            '"'
            + "".join(f"\\u{units[place : place + 4]}" for place in range(0, len(units), 4))
            + '"'
        )
    if isinstance(value, list):
        return "[ " + " , ".join(map(_respelled, value)) + " ]"
    if isinstance(value, dict):
        return (
            "{\n"
            + " ,\t".join(
                f"{_respelled(name)} : {_respelled(value[name])}" for name in reversed(value)
            )
            + "\r}"
        )
    return json.dumps(value) if value is None or isinstance(value, bool) else f"{value}e0"


@pytest.mark.parametrize("name", [name for name in BODIES if name not in _NOTHING_TO_COMPARE])
def test_spelling_of_recorded_requests_does_not_matter(name: str) -> None:
    assert compared(_respelled(json.loads(BODIES[name])).encode()) == compared(BODIES[name])


def test_recorded_requests_all_differ() -> None:
    found = {compared(data) for name, data in BODIES.items() if name not in _NOTHING_TO_COMPARE}

    assert len(found) == len(BODIES) - len(_NOTHING_TO_COMPARE) - 1


def test_compared_messages_are_shown() -> None:
    looks = Tail(LoopDetection(similarity="tail"))

    shown = looks.show(Document(BODIES["chat_stuck"]))

    assert shown == [
        "model | gpt-4.1",
        'asked | call | search_docs | {"limit":5,"query":"backup retention"}',
        "tool | result | []",
        'assistant | call | search_docs | {"limit":5,"query":"backup retention"}',
        "tool | result | []",
    ]


def test_conversation_with_same_end_is_refused() -> None:
    service = make_service(policy("p", ANY, similarity="tail", limit_keys=["header:x-user"]))
    history: list[dict[str, Any]] = []
    answers = []

    for number in range(4):
        history += [
            user("again"),
            call(identity=str(number)),
            {"role": "tool", "tool_call_id": str(number), "content": "no"},
        ]
        requests = [("ann", "m"), ("bob", "m"), ("ann", "n")] if number == 2 else [("ann", "m")]
        for name, model in requests:
            data = json.dumps({**chat(*history), "model": model}).encode()
            answers.append(
                decoded(exchange(service, headers(x_user=name), body(data))[-1]).WhichOneof(
                    "response"
                )
            )

    assert answers == ["request_body"] * 2 + [
        "immediate_response",
        "request_body",
        "request_body",
        "immediate_response",
    ]


def _written(paths: Sequence[str], shape: str) -> dict[str, Any]:
    """A turn in which several files are written at once, each with the same answer."""
    calls = [(f"id{number}", json.dumps({"path": path})) for number, path in enumerate(paths)]
    if shape == "chat":
        asked = [
            {"id": call, "type": "function", "function": {"name": "write", "arguments": text}}
            for call, text in calls
        ]
        answers = [{"role": "tool", "tool_call_id": call, "content": "ok"} for call, _ in calls]
        return {
            "messages": [
                {"role": "user", "content": "go"},
                {"role": "assistant", "tool_calls": asked},
                *answers,
            ]
        }
    items = [
        {"type": "function_call", "call_id": call, "name": "write", "arguments": text}
        for call, text in calls
    ]
    return {
        "input": [
            *items,
            *(
                {"type": "function_call_output", "call_id": call, "output": "ok"}
                for call, _ in calls
            ),
        ]
    }


@pytest.mark.parametrize("shape", ["chat", "responses"])
def test_results_are_compared_with_their_calls(shape: str) -> None:
    """Even if the calls are further back than the tail."""
    one, other, again = (
        compared(_written(paths, shape))
        for paths in (["a", "b", "c"], ["d", "e", "f"], ["a", "b", "c"])
    )

    assert one == again
    assert one != other


@pytest.mark.parametrize(
    "given", ["continue", [{"type": "function_call_output", "call_id": "a", "output": "ok"}]]
)
def test_previous_response_is_compared(given: object) -> None:
    """The server keeps the history, so equal words may be progress."""
    one, other, again = (
        compared({"input": given, "previous_response_id": name}) for name in ("r1", "r2", "r1")
    )

    assert one == again
    assert one != other


def test_conversation_kept_by_server_is_uncounted() -> None:
    with pytest.raises(NotCounted, match="no_history"):
        Tail(LoopDetection(similarity="tail")).compare(
            Document(b'{"conversation":"c","input":"continue"}')
        )


def test_message_in_unknown_keys_is_compared_whole() -> None:
    one, other = (
        {"messages": [{"role": "user", "parts": [{"text": text}]}]} for text in ("a", "b")
    )

    assert compared(one) != compared(other)


def test_texts_to_embed_are_no_conversation() -> None:
    with pytest.raises(NotCounted, match="no_messages"):
        Tail(LoopDetection(similarity="tail")).compare(
            Document(b'{"model":"m","input":["doc 1","",""]}')
        )


def test_item_references_are_compared_by_id() -> None:
    one, other = (
        {"input": [{"type": "item_reference", "id": identity}]} for identity in ("a", "b")
    )

    assert compared(one) != compared(other)
