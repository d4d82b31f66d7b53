"""What stands in requests of each API: messages and their parts, read alike however much of the body was decoded before."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.apis.contents import name_other, read_arguments, read_result
from extproc.detectors import Similarity
from extproc.detectors.tail import Tail
from extproc.detectors.tool_calls import ToolCalls
from extproc.policy.bundle import LoopDetection
from extproc.request.document import Document, NotCounted, write_canonical
from tests.support.model_requests import BODIES, REQUESTS, VALUES, WORDS, near_to, spelled

SIMILARITIES: dict[str, Similarity] = {
    "tail": Tail(LoopDetection(similarity="tail", tail_messages=200)),
    "tool_calls": ToolCalls(LoopDetection(similarity="tool_calls", threshold_identical_requests=2)),
    "tool_calls without results": ToolCalls(
        LoopDetection(
            similarity="tool_calls", threshold_identical_requests=2, compare_results=False, reset_on_user_message=False
        )
    ),
}


def outcome(looks: Similarity, document: Document) -> object:
    """All that a similarity says about a body, or why it says nothing."""
    try:
        return looks.compare(document)
    except NotCounted as why:
        return why.reason


def read(data: bytes) -> list[str]:
    """A conversation in lines: the model, then each message, the oldest first, with what is no text in short."""
    lines = SIMILARITIES["tail"].show(Document(data))
    return [re.sub(r"other \| \d+-[0-9a-f]{16}", "other", line) for line in lines]


_SYSTEM = "text | you help the on-call engineer. use the tools; say so when they bring nothing."
_BACKUP = 'call | search_docs | {"limit":5,"query":"backup retention"}'
_SELECT = 'call | run_sql | "select count(*) from orders"'
_WEATHER = " | ".join(
    f'call | {tool} | {{"city":"{city}"}}' for tool in ("get_weather", "get_time") for city in ("Oslo", "Lima")
)
_NO_TABLE = "result | error: relation orders does not exist"

EXPECTED: dict[str, list[str]] = {
    "chat_parallel_calls": [
        "model | gpt-4.1-mini",
        f"system | {_SYSTEM}",
        "user | text | what is the weather and the time in oslo and lima?",
        f"assistant | {_WEATHER}",
        "tool | result | -3 °c, snow",
        "tool | result | 19 °c, fog",
        "tool | result | 14:02",
        "tool | result | 08:02",
    ],
    "chat_stuck": [
        "model | gpt-4.1",
        f"developer | {_SYSTEM}",
        "user | text | how long do we keep backups?",
        f"assistant | text | i will look that up. | {_BACKUP}",
        "tool | result | []",
        *[f"assistant | {_BACKUP}", "tool | result | []"] * 2,
    ],
    "chat_image": ["model | gpt-4.1", "user | text | what is on these pictures? | other | other | other"],
    "chat_refusal": [
        "model | gpt-4.1",
        "user | text | open the vault.",
        "assistant | text | i can't help with that.",
        "user | text | please.",
    ],
    "chat_legacy_functions": [
        "model | gpt-3.5-turbo",
        "user | text | weather in oslo?",
        *['assistant | call | get_weather | {"city":"Oslo"}', "function | result | timeout"] * 3,
    ],
    "chat_custom_tool": [
        "model | gpt-5",
        "user | text | how many orders are open?",
        *[f"assistant | {_SELECT}", f"tool | {_NO_TABLE}"] * 3,
    ],
    "responses_stuck": [
        "model | gpt-5",
        "user | text | how long do we keep backups?",
        *[f"assistant | {_BACKUP}", "tool | result | []"] * 3,
    ],
    "responses_parallel_calls": [
        "model | gpt-5-mini",
        f"developer | {_SYSTEM}",
        "user | text | weather and time in oslo?",
        "assistant | text | one moment.",
        'assistant | call | get_weather | {"city":"Oslo"} | call | get_time | {"city":"Oslo"}',
        "tool | result | -3 °c, snow",
        "tool | result | 14:02",
    ],
    "responses_image": ["model | gpt-5-mini", "user | text | describe. | other | other"],
    "responses_previous": ['model | gpt-5-mini | "resp_0123456789"', "tool | result | []"],
    "responses_text": ["model | gpt-5-mini", "user | text | say hello."],
    "responses_custom_tool": [
        "model | gpt-5",
        "user | text | how many orders are open?",
        *[f"assistant | {_SELECT}", f"tool | {_NO_TABLE}"] * 3,
    ],
    "anthropic_stuck": [
        "model | claude-sonnet-4-5",
        "user | text | how long do we keep backups?",
        f"assistant | text | i will look that up. | {_BACKUP}",
        "user | error | index is locked",
        *[f"assistant | {_BACKUP}", "user | error | index is locked"] * 2,
    ],
    "anthropic_parallel_calls": [
        "model | claude-sonnet-4-5",
        "user | text | weather and time in oslo?",
        'assistant | text | one moment. | call | get_weather | {"city":"Oslo"} | call | get_time | {"city":"Oslo"}',
        "user | result | -3 °c, snow | result | 14:02",
    ],
    "completions_prompt": ["model | gpt-3.5-turbo-instruct", "user | text | once upon a time"],
    "completions_prompts": ["model | gpt-3.5-turbo-instruct", "user | text | once upon a time | text | in a galaxy"],
    "completions_tokens": ["model | gpt-3.5-turbo-instruct", "user | other"],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_each_api_is_read(name: str) -> None:
    """Model, messages, texts, calls and results of a real request are found, whichever API it is for."""
    assert read(BODIES[name]) == EXPECTED[name]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "5",
        '"messages"',
        '[{"role":"user","content":"x"}]',
        "{}",
        '{"model":"m"}',
        '{"messages":[]}',
        '{"messages":null}',
        '{"messages":{}}',
        '{"messages":"hi"}',
        '{"messages":[],"input":[],"prompt":null}',
        '{"input":""}',
        '{"input":null,"previous_response_id":"r"}',
        '{"prompt":null}',
        '{"MESSAGES":[{"role":"user"}]}',
        '{"messages":[{"role":"user"}],"messages":[]}',
        '{"jsonrpc":"2.0","method":"tools/call","id":1}',
    ],
)
@pytest.mark.parametrize("looks", SIMILARITIES.values(), ids=SIMILARITIES)
def test_a_body_without_messages_says_so(looks: Similarity, text: str) -> None:
    """Nothing is made up where no conversation is: an empty history is none."""
    assert outcome(looks, Document(text.encode())) == "no_messages"


def test_the_empty_chat_has_no_messages() -> None:
    """A real request with an empty history is one without messages."""
    assert {outcome(looks, Document(BODIES["chat_empty"])) for looks in SIMILARITIES.values()} == {"no_messages"}


@pytest.mark.parametrize("text", ["hello", '{"messages":[{"role":"user","content":"x"}]', '{"messages":[}', "\ufeff{}"])
@pytest.mark.parametrize("looks", SIMILARITIES.values(), ids=SIMILARITIES)
def test_a_body_that_is_not_json_has_no_conversation(looks: Similarity, text: str) -> None:
    """What is not JSON is not counted, and that is the reason."""
    assert outcome(looks, Document(text.encode())) == "not_json"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"messages":[{"role":"user","content":"a"}],"input":"b","prompt":"c"}', "user | text | a"),
        ('{"messages":[],"input":"b","prompt":"c"}', "user | text | b"),
        ('{"messages":null,"input":[],"prompt":"c"}', "user | text | c"),
        ('{"\\u006dessages":[{"\\u0072ole":"us\\u0065r","content":[{"ty\\u0070e":"text","text":"a"}]}]}', "user | text | a"),
        ('{"messages":[{"role":"x","content":"a"}],"messages":[{"role":"user","content":"b"}]}', "user | text | b"),
        ('{"messages":[{"role":"x","role":"user","content":"a","content":"b"}]}', "user | text | b"),
        ('{"messages":[{"role":"user","content":[{"type":1,"type":"text","text":1,"text":"b"}]}]}', "user | text | b"),
        ('{"messages":[{"role":"user","content":["a","b"]}]}', "user | text | a | text | b"),
        ('{"messages":[{"role":"user","content":null}]}', "user"),
        ('{"messages":[{"role":"user"}]}', "user"),
        ('{"messages":[{"role":"user","content":7}]}', "user | other"),
        ('{"messages":[{"role":"user","content":[{"type":"text","text":null}]}]}', "user"),
        ('{"messages":[{"role":"assistant","tool_calls":[{"id":"1"}]}]}', "assistant | other"),
        ('{"messages":[{"role":"assistant","tool_calls":null,"content":"a"}]}', "assistant | text | a"),
        ('{"input":[{"type":"reasoning","summary":[]},{"role":"user","content":"a"}]}', "user | text | a"),
        (
            '{"input":[{"type":"computer_call","call_id":"1","action":{"type":"wait"}}]}',
            'assistant | call | computer | {"type":"wait"}',
        ),
        ('{"messages":[{"role":"user","tool_calls":{}}]}', "user | call |  | {}"),
        ('{"input":[{"role":"user","tool_calls":{}}]}', "user"),
        ('{"messages":[{"role":"a","name":[]}]}', "a"),
        ('{"messages":[{"type":"tool_use","name":"f"}]}', "other | other"),
    ],
)
def test_corners_of_a_conversation(text: str, said: str) -> None:
    """Messages before input before prompt, the last of a duplicated key, escaped keys, contents of unusual types."""
    assert read(text.encode()) == ["model | ", said]


@pytest.mark.parametrize(
    "message",
    ["null", "1", "[]", '"x"', "true", '{"role":1}', '{"role":1.5,"x":0.5}', '{"type":"x"}', "{}"],
)
@pytest.mark.parametrize("key", ["messages", "input"])
def test_messages_of_other_types_do_not_hide_the_rest(key: str, message: str) -> None:
    """What is not a message has no known kind, and is compared as a whole; the messages beside it are still read."""
    good = '{"role":"user","content":"a"}'

    lines = read(f'{{"{key}":[{good},{message},{good}]}}'.encode())

    assert lines == ["model | ", "user | text | a", "other | other", "user | text | a"]
    assert outcome(SIMILARITIES["tail"], Document(f'{{"{key}":[{good},{message}]}}'.encode())) != outcome(
        SIMILARITIES["tail"], Document(f'{{"{key}":[{good},"another"]}}'.encode())
    )


@pytest.mark.parametrize("messages", ["5", '"ab"', '{"a":1}', "true", "1.5"])
@pytest.mark.parametrize("message", ["1", "{}", "null", '{"type":"item_reference","id":"x"}'])
def test_messages_of_another_type_do_not_hide_the_input(messages: str, message: str) -> None:
    """Where `messages` is no list, `input` is what is read, whatever stands in it."""
    looks = SIMILARITIES["tail"]
    item = f'{{"role":"a"}},{message}'

    found = outcome(looks, Document(f'{{"messages":{messages},"input":[{item}]}}'.encode()))

    assert found == outcome(looks, Document(f'{{"input":[{item}]}}'.encode()))


def spell(arguments: object) -> bytes:
    """A call's arguments in one spelling."""
    return write_canonical(read_arguments(arguments))


@pytest.mark.parametrize(
    ("one", "rest", "same"),
    [
        ('{"a":1,"b":2}', '{ "b":2.0, "a":1 }', True),
        ('{"a":1}', '{"a":2}', False),
        (" {} ", "{}", True),
        ("", " ", True),
        ("", "{}", True),
        ("not json", " not json\n", True),
        ("not json", "not  json", False),
        ('{"a":"x"}', '{"a":"X"}', False),
        ('{"a":1,"a":2}', '{"a":2}', True),
    ],
)
def test_arguments_in_a_string_are_compared_by_meaning(one: str, rest: str, same: bool) -> None:
    """A string of JSON is what it means, and equals the same JSON without a string around it; any other is its text."""
    assert (spell(one) == spell(rest)) is same


@given(VALUES, st.data())
def test_arguments_are_equal_with_and_without_a_string(value: Any, data: st.DataObject) -> None:  # noqa: ANN401  # any JSON
    """OpenAI's arguments, a string of JSON, equal those of Anthropic, which are JSON, except where they are a string."""
    text = spelled(data.draw, value)

    if not isinstance(value, str):
        assert spell(text) == spell(Document(text.encode()).value())


@pytest.mark.parametrize(
    ("one", "rest", "same"),
    [
        ("a", " a\n", True),
        ("a", "A", False),
        ("a", [{"type": "text", "text": "a"}], True),
        ("a\nb", [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}], True),
        ("ab", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], False),
        ([{"type": "image", "source": {"data": "x"}}], [{"type": "image", "source": {"data": "y"}}], False),
        ([{"type": "image", "id": "1", "source": {}}], [{"type": "image", "id": "1", "source": {}, "cache_control": {}}], True),
        ([{"job": 1, "status": "queued"}], [{"job": 1, "status": "done"}], False),
        ([{"id": "a"}], [{"id": "b"}], False),
        ([{"type": [], "text": "a"}], [{"type": [], "text": "b"}], False),
        ([{"type": "text", "text": {"value": "a"}}], [{"type": "text", "text": {"value": "b"}}], False),
        ([{"type": "image", "source": {"id": "1"}}], [{"type": "image", "source": {"id": "2"}}], False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"a": True}, False),
        (["a", "b"], "a\nb", True),
        ([], "", True),
    ],
)
def test_results_in_parts_are_compared_by_what_they_say(one: object, rest: object, same: bool) -> None:
    """Texts are joined, space around them is left out, and other parts are compared by meaning, without their ids."""
    assert (read_result(one) == read_result(rest)) is same


@pytest.mark.parametrize(
    ("one", "rest", "same"),
    [
        ({"type": "image", "id": "1"}, {"id": "2", "type": "image"}, True),
        ({"type": "image", "cache_control": {"type": "ephemeral"}}, {"type": "image"}, True),
        ({"type": "image", "source": "a"}, {"type": "image", "source": "b"}, False),
        ({"type": "image", "source": "plumless"}, {"type": "image", "source": "buckeroo"}, False),  # one CRC32
        ([1], [2], False),
        (None, False, False),
    ],
)
def test_other_parts_have_names_of_their_own(one: object, rest: object, same: bool) -> None:
    """A part that is not text is named by a hash, so that different parts differ."""
    assert (name_other(one) == name_other(rest)) is same


def both_ways(text: str | bytes) -> tuple[dict[str, object], dict[str, object]]:
    """The verdict of every similarity: alone, and where all share a body that was already decoded as a whole."""
    data = text if isinstance(text, bytes) else text.encode()
    shared = Document(data)
    with suppress(NotCounted):
        shared.value()
    alone = {name: outcome(looks, Document(data)) for name, looks in SIMILARITIES.items()}
    return alone, {name: outcome(looks, shared) for name, looks in SIMILARITIES.items()}


@pytest.mark.parametrize("name", BODIES)
def test_who_else_looks_does_not_matter(name: str) -> None:
    """The verdict on a body does not depend on whether the whole of it was decoded before."""
    alone, shared = both_ways(BODIES[name])

    assert alone == shared


@given(REQUESTS, near_to({"model": WORDS, "temperature": st.just(0.5), "previous_response_id": WORDS, "prompt": WORDS}))
def test_nearly_right_bodies_are_read_alike_or_not_at_all(request: dict[str, Any], more: dict[str, Any]) -> None:
    """Whatever types stand where, nothing but NotCounted is raised, and who else looks does not matter."""
    alone, shared = both_ways(json.dumps({**request, **more}))

    assert alone == shared


_HALVES = "[" + ",".join(["0.5"] * 6_000) + "]"


@pytest.mark.parametrize(
    "text",
    [
        # in arguments that are no string
        f'{{"messages":[{{"role":"a","tool_calls":[{{"id":"1","function":{{"name":"f","arguments":{_HALVES}}}}}]}}]}}',
        # elsewhere, and in a string of arguments
        f'{{"x":{_HALVES},"messages":[{{"role":"a","tool_calls":[{{"id":"1","function":{{"arguments":"{_HALVES}"}}}}]}}]}}',
    ],
    ids=["arguments", "elsewhere"],
)
def test_the_bound_on_fractions_does_not_depend_on_others(text: str) -> None:
    """Whether a body holds too many numbers for one similarity does not depend on what another one looks at."""
    alone, shared = both_ways(text)

    assert alone == shared
