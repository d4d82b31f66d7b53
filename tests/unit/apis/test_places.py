"""Where notes are spliced into bodies. `edit_fuzzer` tries many more bodies."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from extproc.apis import locate_results
from extproc.apis.places import Place, add_notes
from extproc.request.document import NotCounted, decode_json
from extproc.request.patch import AMBIGUOUS, Patch
from tests.support.examples import examples
from tests.support.messages import encoded
from tests.support.model_requests import HOSTILE
from tests.support.validators import VALIDATORS

NOTE = 'Loop: "f" \\ again \u2014 \U0001f501\n'
_PIXEL = "aGk="

Write = Callable[[Any, str], dict[str, Any]]


def as_chat(result: object, user: str) -> dict[str, Any]:
    """OpenAI's chat; `user` follows the result unless it is empty."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": result},
    ]
    return {
        "model": "m",
        "messages": [*messages, {"role": "user", "content": user}] if user else messages,
    }


def as_responses(result: object, user: str) -> dict[str, Any]:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "go"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": result},
    ]
    return {
        "input": [*items, {"role": "user", "content": [{"type": "input_text", "text": user}]}]
        if user
        else items
    }


def as_anthropic(result: object, user: str) -> dict[str, Any]:
    returned = {"type": "tool_result", "tool_use_id": "1"} | (
        {} if result is None else {"content": result}
    )
    said = [returned, {"type": "text", "text": user}] if user else [returned]
    messages = [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}],
        },
        {"role": "user", "content": said},
    ]
    return {
        "max_tokens": 9,
        "messages": messages,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    }


def as_gemini(result: object, user: str) -> dict[str, Any]:
    said = [
        {"functionResponse": {"name": "f", "response": result}},
        *([{"text": user}] if user else []),
    ]
    contents = [
        {"role": "user", "parts": [{"text": "go"}]},
        {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}}}]},
        {"role": "user", "parts": said},
    ]
    return {"contents": contents, "tools": []}


def as_bedrock(result: object, user: str) -> dict[str, Any]:
    said = [
        {"toolResult": {"toolUseId": "1", "content": result}},
        *([{"text": user}] if user else []),
    ]
    messages = [
        {"role": "user", "content": [{"text": "go"}]},
        {
            "role": "assistant",
            "content": [{"toolUse": {"toolUseId": "1", "name": "f", "input": {}}}],
        },
        {"role": "user", "content": said},
    ]
    return {"messages": messages, "inferenceConfig": {"maxTokens": 9}}


_TEXTS = st.text(max_size=8) | st.sampled_from(["", '"', "\\", "\U0001f501", '{"a":"b"}', "],"])
_URL = f"data:image/png;base64,{_PIXEL}"


def _blocks(*others: dict[str, Any], **text: str) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Contents of text blocks, whose other keys are `text`, and of other blocks."""
    texts = _TEXTS.map(lambda written: {**text, "text": written})
    return st.lists(texts | st.sampled_from(others) if others else texts, max_size=3)


# shape -> (how it is written, which results it may have)
SHAPES: dict[str, tuple[Write, st.SearchStrategy[Any]]] = {
    "chat": (as_chat, _TEXTS | _blocks(type="text")),
    "responses": (
        as_responses,
        _TEXTS | _blocks({"type": "input_image", "image_url": _URL}, type="input_text"),
    ),
    "anthropic": (
        as_anthropic,
        _TEXTS
        | st.none()
        | _blocks(
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": _PIXEL},
            },
            type="text",
        ),
    ),
    "gemini": (
        as_gemini,
        st.dictionaries(
            st.sampled_from(["output", "result", "error", "a", ""]),
            _TEXTS | st.integers(-9, 9) | st.none(),
        ),
    ),
    "bedrock": (
        as_bedrock,
        _blocks({"json": {"a": 1}}, {"image": {"format": "png", "source": {"bytes": _PIXEL}}}),
    ),
}


def locate(body: bytes) -> list[Place]:
    return locate_results(Patch(body))


def put_each(value: object, note: str = "#") -> list[bytes]:
    """The body with the note in each of its places, one at a time."""
    body = encoded(value)
    bodies = []
    for number in range(len(locate(body))):
        patch = Patch(body)
        add_notes(
            patch, [locate_results(patch)[number]], json.dumps(note)[1:-1].encode(), separated=False
        )
        bodies.append(b"".join(patch.apply()))
    return bodies


@pytest.mark.slow
@pytest.mark.parametrize("shape", VALIDATORS)
@settings(max_examples=examples(30))
@given(st.data())
def test_body_with_note_is_valid_to_the_sdk(shape: str, data: st.DataObject) -> None:
    write, results = SHAPES[shape]
    body = encoded(write(data.draw(results), ""))
    VALIDATORS[shape](json.loads(body))

    VALIDATORS[shape](json.loads(put_each(body, NOTE)[-1]))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("seen", "seen#"),
        (
            [{"type": "text", "text": "seen"}, {"type": "image_url"}],
            [{"type": "text", "text": "seen#"}, {"type": "image_url"}],
        ),
        ([{"type": "image_url"}], [{"type": "image_url"}, {"type": "text", "text": "#"}]),
        ([], [{"type": "text", "text": "#"}]),
    ],
)
def test_note_goes_into_user_message_without_results(content: object, expected: object) -> None:
    said = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "```ls```"},
        {"role": "user", "content": content},
    ]

    (found,) = put_each({"messages": said})

    assert json.loads(found) == {"messages": [*said[:2], {"role": "user", "content": expected}]}


def test_each_parallel_result_has_a_place() -> None:
    results = [
        {"role": "tool", "tool_call_id": f"{number}", "content": f"{number}"} for number in range(3)
    ]
    body = json.dumps({"messages": [{"role": "assistant", "content": ""}, *results]}).encode()

    assert [body[place.offset - 1 : place.offset] for place in locate(body)] == [b"0", b"1", b"2"]


def test_note_goes_into_plain_input() -> None:
    (found,) = put_each({"previous_response_id": "r", "input": "seen"})

    assert json.loads(found) == {"previous_response_id": "r", "input": "seen#"}


@pytest.mark.parametrize(
    "body",
    [
        '{"y":{"messages":[{"role":"user","content":"a"}]},"messages":[{"role":"user","content":"a"}]}',
        '{"y":"\\"messages\\":[{}]","messages" : [{"role":"user","content":"a"}]}',
        '{"messages":[{"role":"assistant","content":"{}]"},{"role":"user","content":"a"}]}',
        '{"messages":[{"role":"user","content":"a"}],"y":{"messages":[{"role":"user","content":"a"}]}}',
        "{"
        + ",".join(f'"{number}":0' for number in range(2_000))
        + ',"messages":[{"role":"user","content":"a"}]}',
    ],
    ids=lambda body: body[:60],
)
def test_place_is_within_the_conversation_itself(body: str) -> None:
    (new,) = put_each(body.encode())

    expected = json.loads(body)
    expected["messages"][-1]["content"] += "#"
    assert json.loads(new) == expected


@pytest.mark.parametrize(
    "body",
    [
        '{"prompt":"a"}',
        '{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}',
        '{"messages":[{"role":"assistant","content":"b"},{"role":"tool","content":null}]}',
        '{"messages":[{"role":"assistant","content":"b"},{"role":"tool"}]}',
        '{"messages":[{"role":"assistant","content":"b"},{"role":"system","content":"c"}]}',
        '{"messages":[{"role":"user","content":7}]}',
        '{"input":[{"type":"computer_call_output","output":{"type":"computer_screenshot"}}]}',
        '{"input":[{"type":"shell_call_output","output":[{"stdout":"a"}]}]}',
    ],
    ids=lambda body: body[:60],
)
def test_body_without_text_has_no_place(body: str) -> None:
    assert locate(body.encode()) == []


@pytest.mark.parametrize(
    "body",
    [
        '{"messages":[{"role":"user","content":"a","content":"b"}]}',
        '{"messages":[{"role":"user","content":"a","content":"a"}]}',
        '{"messages":[{"role":"user","content":"a"}],"messages":[{"role":"user","content":"bb"}]}',
        '{"messages":[{"role":"user","content":"a"}],"m\\u0065ssages":[{"role":"user","content":"a"}]}',
        '{"model":"m","messages":[{"role":"user","content":"a"}],"model":"m"}',
        '{"messages":[{"role":"user","content":"a"}],"input":[{"role":"user","content":"a"}]}',
        '{"contents":[{"parts":[{"text":"a"}]}],"request":{"contents":[{"parts":[{"text":"a"}]}]}}',
        '{"messages":[{"role":"user","content":[{"type":"text","text":"a","text":"b"}]}]}',
        '{"messages":[{"role":"user","content":[{"type":"tool_result","content":"a","content":[]}]}]}',
        '{"messages":[{"role":"user","content":[{"toolResult":{"content":[{"text":"a"}],"content":[]}}]}]}',
    ],
    ids=lambda body: body[:60],
)
def test_ambiguous_body_gets_no_note(body: str) -> None:
    with pytest.raises(NotCounted, match=AMBIGUOUS):
        locate(body.encode())


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_body_with_note_is_json(name: str) -> None:
    with suppress(NotCounted):
        for new in put_each(HOSTILE[name][0]()):
            decode_json(new, msgspec.json.Decoder(msgspec.Raw).decode)
