"""Notes spliced into bodies: where they go, that every other byte stays, and that providers would take the body."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.apis import locate_results
from extproc.apis.places import Place, add_notes
from extproc.request.document import NotCounted, decode_json
from extproc.request.patch import AMBIGUOUS, Patch
from tests.support.examples import examples
from tests.support.model_requests import HOSTILE, REQUESTS, spelled
from tests.support.validators import VALIDATORS

NOTE = 'Loop: "f" \\ again \u2014 \U0001f501\n'
_PIXEL = "aGk="

Write = Callable[[Any, str], dict[str, Any]]


def as_chat(result: object, user: str) -> dict[str, Any]:
    """OpenAI's chat; `user` is said behind the result, unless it is empty."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": result},
    ]
    return {"model": "m", "messages": [*messages, {"role": "user", "content": user}] if user else messages}


def as_responses(result: object, user: str) -> dict[str, Any]:
    """OpenAI's Responses."""
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "go"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": result},
    ]
    return {"input": [*items, {"role": "user", "content": [{"type": "input_text", "text": user}]}] if user else items}


def as_anthropic(result: object, user: str) -> dict[str, Any]:
    """Anthropic's messages; the user's text is beside the result."""
    returned = {"type": "tool_result", "tool_use_id": "1"} | ({} if result is None else {"content": result})
    said = [returned, {"type": "text", "text": user}] if user else [returned]
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
        {"role": "user", "content": said},
    ]
    return {"max_tokens": 9, "messages": messages, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}


def as_gemini(result: object, user: str) -> dict[str, Any]:
    """Gemini's generateContent."""
    said = [{"functionResponse": {"name": "f", "response": result}}, *([{"text": user}] if user else [])]
    contents = [
        {"role": "user", "parts": [{"text": "go"}]},
        {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}}}]},
        {"role": "user", "parts": said},
    ]
    return {"contents": contents, "tools": []}


def as_wrapped_gemini(result: object, user: str) -> dict[str, Any]:
    """The same as Gemini's command line sends it."""
    return {"model": "m", "request": as_gemini(result, user)}


def as_bedrock(result: object, user: str) -> dict[str, Any]:
    """Bedrock's Converse."""
    said = [{"toolResult": {"toolUseId": "1", "content": result}}, *([{"text": user}] if user else [])]
    messages = [
        {"role": "user", "content": [{"text": "go"}]},
        {"role": "assistant", "content": [{"toolUse": {"toolUseId": "1", "name": "f", "input": {}}}]},
        {"role": "user", "content": said},
    ]
    return {"messages": messages, "inferenceConfig": {"maxTokens": 9}}


_TEXTS = st.text(max_size=8) | st.sampled_from(["", '"', "\\", "\U0001f501", '{"a":"b"}', "],"])
_URL = f"data:image/png;base64,{_PIXEL}"


def _blocks(*others: dict[str, Any], **text: str) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Contents of text blocks, whose other keys are `text`, and of other ones."""
    texts = _TEXTS.map(lambda written: {**text, "text": written})
    return st.lists(texts | st.sampled_from(others) if others else texts, max_size=3)


# shape -> (how it is written, which results it may have)
SHAPES: dict[str, tuple[Write, st.SearchStrategy[Any]]] = {
    "chat": (as_chat, _TEXTS | _blocks(type="text")),
    "responses": (as_responses, _TEXTS | _blocks({"type": "input_image", "image_url": _URL}, type="input_text")),
    "anthropic": (
        as_anthropic,
        _TEXTS
        | st.none()
        | _blocks({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": _PIXEL}}, type="text"),
    ),
    "gemini": (
        as_gemini,
        st.dictionaries(st.sampled_from(["output", "result", "error", "a", ""]), _TEXTS | st.integers(-9, 9) | st.none()),
    ),
    "bedrock": (
        as_bedrock,
        _blocks({"json": {"a": 1}}, {"image": {"format": "png", "source": {"bytes": _PIXEL}}}),
    ),
}
SHAPES["wrapped gemini"] = as_wrapped_gemini, SHAPES["gemini"][1]
every_shape = pytest.mark.parametrize("shape", SHAPES)


def locate(body: bytes) -> list[Place]:
    """Where a note can go."""
    return locate_results(Patch(body))


def put_each(body: bytes, note: str = NOTE) -> list[bytes]:
    """The body with the note in each of its places, one at a time."""
    bodies = []
    for number in range(len(locate(body))):
        patch = Patch(body)
        add_notes(patch, [locate_results(patch)[number]], json.dumps(note)[1:-1].encode(), separated=False)
        bodies.append(b"".join(patch.apply()))
    return bodies


def count_kept(old: bytes, new: bytes) -> int:
    """How many bytes of a body still stand before and behind what was put in."""
    return min(_count_alike(old, new) + _count_alike(old[::-1], new[::-1]), len(old))


def _count_alike(old: bytes, new: bytes) -> int:
    return next((place for place, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), len(old))


def find_difference(old: Any, new: Any) -> list[object]:  # noqa: ANN401  # any JSON value
    """What was added to a value, at any place: at the end of a text, a list or an object."""
    if isinstance(old, str) and isinstance(new, str) and old != new:
        return [new.removeprefix(old)] if new.startswith(old) else [None]
    if isinstance(old, list) and isinstance(new, list):
        return [found for one, other in zip(old, new, strict=False) for found in find_difference(one, other)] + new[len(old) :]
    if isinstance(old, dict) and isinstance(new, dict):
        same = [found for name in old for found in find_difference(old[name], new.get(name))]
        return same + [new[name] for name in new if name not in old]
    return [] if old == new else [None]


@every_shape
@given(st.data())
def test_a_note_goes_into_the_result_and_nowhere_else(shape: str, data: st.DataObject) -> None:
    """However a body is spelled: it decodes to the old one plus the note, and all other bytes are the same."""
    write, results = SHAPES[shape]
    old = write(data.draw(results), data.draw(st.sampled_from(["", "and now?"])))
    body = spelled(data.draw, old).encode()

    (place,), (new,) = locate(body), put_each(body)

    (added,) = find_difference(old, json.loads(new))
    assert place.result
    assert NOTE in (added, added.get("text") if isinstance(added, dict) else None)
    assert count_kept(body, new) == len(body)


@pytest.mark.parametrize("shape", VALIDATORS)
@settings(max_examples=examples(30))
@given(st.data())
def test_a_body_with_a_note_is_valid(shape: str, data: st.DataObject) -> None:
    """What goes to the provider is a request by the SDK's own types, as it was before."""
    write, results = SHAPES[shape]
    body = json.dumps(write(data.draw(results), "")).encode()
    VALIDATORS[shape](json.loads(body))

    VALIDATORS[shape](json.loads(put_each(body)[-1]))


def _find_texts(body: dict[str, Any]) -> list[object]:
    """Where notes would go: what each place adds to a body."""
    return [json.loads(new) for new in put_each(json.dumps(body).encode(), "#")]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("seen", "seen#"),
        ([{"type": "text", "text": "seen"}, {"type": "image_url"}], [{"type": "text", "text": "seen#"}, {"type": "image_url"}]),
        ([{"type": "image_url"}], [{"type": "image_url"}, {"type": "text", "text": "#"}]),
        ([], [{"type": "text", "text": "#"}]),
    ],
)
def test_without_results_the_user_has_said_them(content: object, expected: object) -> None:
    """An observation that comes as a user message takes the note, in its text or in a new block."""
    said = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "```ls```"},
        {"role": "user", "content": content},
    ]

    (found,) = _find_texts({"messages": said})

    assert found == {"messages": [*said[:2], {"role": "user", "content": expected}]}


def test_results_made_at_once_all_have_places_the_newest_last() -> None:
    """Of parallel calls each result can take the note."""
    results = [{"role": "tool", "tool_call_id": f"{number}", "content": f"{number}"} for number in range(3)]
    body = json.dumps({"messages": [{"role": "assistant", "content": ""}, *results]}).encode()

    assert [body[place.offset - 1 : place.offset] for place in locate(body)] == [b"0", b"1", b"2"]


def test_a_text_in_place_of_items_takes_the_note() -> None:
    """Where the server keeps the history, `input` may be all that the user says."""
    assert _find_texts({"previous_response_id": "r", "input": "seen"}) == [{"previous_response_id": "r", "input": "seen#"}]


@pytest.mark.parametrize(
    "body",
    [
        '{"y":{"messages":[{"role":"user","content":"a"}]},"messages":[{"role":"user","content":"a"}]}',
        '{"y":"\\"messages\\":[{}]","messages" : [{"role":"user","content":"a"}]}',
        '{"messages":[{"role":"assistant","content":"{}]"},{"role":"user","content":"a"}]}',
        '{"messages":[{"role":"user","content":"a"}],"y":{"messages":[{"role":"user","content":"a"}]}}',
        "{" + ",".join(f'"{number}":0' for number in range(2_000)) + ',"messages":[{"role":"user","content":"a"}]}',
    ],
    ids=lambda body: body[:60],
)
def test_what_stands_beside_does_not_matter(body: str) -> None:
    """The place is in the conversation itself, whatever looks like it, and however many keys there are."""
    (new,) = put_each(body.encode(), "!")

    changed = json.loads(new)
    expected = json.loads(body)
    expected["messages"][-1]["content"] += "!"
    assert changed == expected


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
def test_where_it_is_unclear_there_is_no_place(body: str) -> None:
    """No text and no result: a note is not put anywhere."""
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
def test_what_may_be_read_in_two_ways_gets_no_note(body: str) -> None:
    """A key that stands twice on the way to a place, or two conversations."""
    with pytest.raises(NotCounted, match=AMBIGUOUS):
        locate(body.encode())


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_have_places_or_none(name: str) -> None:
    """Whatever a body is, nothing but NotCounted is raised, and a body with a note is JSON."""
    body = HOSTILE[name][0]()
    try:
        bodies = put_each(body)
    except NotCounted:
        return

    for new in bodies:
        decode_json(new, msgspec.json.Decoder(msgspec.Raw).decode)


@given(REQUESTS)
def test_nearly_right_bodies_take_a_note_or_none(value: dict[str, Any]) -> None:
    """With anything in any place, a note changes nothing but one text."""
    body = json.dumps(value).encode()
    try:
        bodies = put_each(body)
    except NotCounted:
        return

    for new in bodies:
        (added,) = find_difference(value, json.loads(new))
        assert NOTE in (added, added.get("text") if isinstance(added, dict) else None)
