"""Messages and their parts in requests of each API."""

import re
from typing import Any

import pytest
from hypothesis import given, strategies as st

from extproc.apis.contents import name_other, read_arguments, read_result
from extproc.detectors import Similarity
from extproc.detectors.tail import Tail
from extproc.detectors.tool_calls import ToolCalls
from extproc.policy.bundle import LoopDetection
from extproc.request.document import Document, NotCounted, write_canonical
from tests.support.model_requests import BODIES, VALUES, spelled

SIMILARITIES: dict[str, Similarity] = {
    "tail": Tail(LoopDetection(similarity="tail", tail_messages=200)),
    "tool_calls": ToolCalls(LoopDetection(similarity="tool_calls", threshold_identical_requests=2)),
    "tool_calls without results": ToolCalls(
        LoopDetection(
            similarity="tool_calls",
            threshold_identical_requests=2,
            compare_results=False,
            reset_on_user_message=False,
        )
    ),
}


def outcome(looks: Similarity, document: Document) -> object:
    try:
        return looks.compare(document)
    except NotCounted as why:
        return why.reason


def read(data: bytes) -> list[str]:
    """A conversation in lines: the model, then each message, oldest first; others in short."""
    lines = SIMILARITIES["tail"].show(Document(data))
    return [re.sub(r"other \| \d+-[0-9a-f]{16}", "other", line) for line in lines]


_SYSTEM = "text | you help the on-call engineer. use the tools; say so when they bring nothing."
_BACKUP = 'call | search_docs | {"limit":5,"query":"backup retention"}'
_SELECT = 'call | run_sql | "select count(*) from orders"'
_WEATHER = " | ".join(
    f'call | {tool} | {{"city":"{city}"}}'
    for tool in ("get_weather", "get_time")
    for city in ("Oslo", "Lima")
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
    "chat_image": [
        "model | gpt-4.1",
        "user | text | what is on these pictures? | other | other | other",
    ],
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
        (
            'assistant | text | one moment. | call | get_weather | {"city":"Oslo"} | call | '
            "get_time "
            '| {"city":"Oslo"}'
        ),
        "user | result | -3 °c, snow | result | 14:02",
    ],
    "completions_prompt": ["model | gpt-3.5-turbo-instruct", "user | text | once upon a time"],
    "completions_prompts": [
        "model | gpt-3.5-turbo-instruct",
        "user | text | once upon a time | text | in a galaxy",
    ],
    "completions_tokens": ["model | gpt-3.5-turbo-instruct", "user | other"],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_recorded_requests_are_read(name: str) -> None:
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
        BODIES["chat_empty"].decode(),
    ],
)
@pytest.mark.parametrize("looks", SIMILARITIES.values(), ids=SIMILARITIES)
def test_body_without_messages_is_uncounted(looks: Similarity, text: str) -> None:
    assert outcome(looks, Document(text.encode())) == "no_messages"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '{"messages":[{"role":"user","content":"a"}],"input":"b","prompt":"c"}',
            "user | text | a",
        ),
        ('{"messages":[],"input":"b","prompt":"c"}', "user | text | b"),
        ('{"messages":null,"input":[],"prompt":"c"}', "user | text | c"),
        (
            '{"\\u006dessages":[{"\\u0072ole":"us\\u0065r","content":[{"ty\\u0070e":"text","text":"a"}]}]}',
            "user | text | a",
        ),
        (
            '{"messages":[{"role":"x","content":"a"}],"messages":[{"role":"user","content":"b"}]}',
            "user | text | b",
        ),
        (
            '{"messages":[{"role":"x","role":"user","content":"a","content":"b"}]}',
            "user | text | b",
        ),
        (
            '{"messages":[{"role":"user","content":[{"type":1,"type":"text","text":1,"text":"b"}]}]}',
            "user | text | b",
        ),
        ('{"messages":[{"role":"user","content":["a","b"]}]}', "user | text | a | text | b"),
        ('{"messages":[{"role":"user","content":null}]}', "user"),
        ('{"messages":[{"role":"user"}]}', "user"),
        ('{"messages":[{"role":"user","content":7}]}', "user | other"),
        ('{"messages":[{"role":"user","content":[{"type":"text","text":null}]}]}', "user"),
        ('{"messages":[{"role":"assistant","tool_calls":[{"id":"1"}]}]}', "assistant | other"),
        (
            '{"messages":[{"role":"assistant","tool_calls":null,"content":"a"}]}',
            "assistant | text | a",
        ),
        (
            '{"input":[{"type":"reasoning","summary":[]},{"role":"user","content":"a"}]}',
            "user | text | a",
        ),
        (
            '{"input":[{"type":"computer_call","call_id":"1","action":{"type":"wait"}}]}',
            'assistant | call | computer | {"type":"wait"}',
        ),
        ('{"messages":[{"role":"user","tool_calls":{}}]}', "user | call |  | {}"),
        ('{"input":[{"role":"user","tool_calls":{}}]}', "user"),
        ('{"messages":[{"role":"a","name":[]}]}', "a"),
        ('{"messages":[{"type":"tool_use","name":"f"}]}', "other | other"),
        ('{"messages":5,"input":[{"role":"a"}]}', "a"),
        ('{"messages":"ab","input":[{"role":"a"}]}', "a"),
    ],
)
def test_unusual_messages_are_read(text: str, said: str) -> None:
    """`messages` goes before `input` before `prompt`; the last of a duplicate key counts."""
    assert read(text.encode()) == ["model | ", said]


@pytest.mark.parametrize(
    "message",
    ["null", "1", "[]", '"x"', "true", '{"role":1}', '{"role":1.5,"x":0.5}', '{"type":"x"}', "{}"],
)
@pytest.mark.parametrize("key", ["messages", "input"])
def test_invalid_message_does_not_hide_others(key: str, message: str) -> None:
    """Such a message has no known kind and is compared as a whole."""
    good = '{"role":"user","content":"a"}'

    lines = read(f'{{"{key}":[{good},{message},{good}]}}'.encode())

    assert lines == ["model | ", "user | text | a", "other | other", "user | text | a"]
    assert outcome(
        SIMILARITIES["tail"], Document(f'{{"{key}":[{good},{message}]}}'.encode())
    ) != outcome(SIMILARITIES["tail"], Document(f'{{"{key}":[{good},"another"]}}'.encode()))


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
    assert (write_canonical(read_arguments(one)) == write_canonical(read_arguments(rest))) is same


@pytest.mark.slow
@given(VALUES, st.data())
def test_arguments_are_equal_with_and_without_a_string(value: Any, data: st.DataObject) -> None:  # noqa: ANN401  # any JSON
    """OpenAI's arguments, a string of JSON, equal Anthropic's, which are JSON."""
    text = spelled(data.draw, value)

    if not isinstance(value, str):
        assert write_canonical(read_arguments(text)) == write_canonical(
            Document(text.encode()).value()
        )


@pytest.mark.parametrize(
    ("one", "rest", "same"),
    [
        ("a", " a\n", True),
        ("a", "A", False),
        ("a", [{"type": "text", "text": "a"}], True),
        ("a\nb", [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}], True),
        ("ab", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], False),
        (
            [{"type": "image", "source": {"data": "x"}}],
            [{"type": "image", "source": {"data": "y"}}],
            False,
        ),
        (
            [{"type": "image", "id": "1", "source": {}}],
            [{"type": "image", "id": "1", "source": {}, "cache_control": {}}],
            True,
        ),
        ([{"job": 1, "status": "queued"}], [{"job": 1, "status": "done"}], False),
        ([{"id": "a"}], [{"id": "b"}], False),
        ([{"type": [], "text": "a"}], [{"type": [], "text": "b"}], False),
        (
            [{"type": "text", "text": {"value": "a"}}],
            [{"type": "text", "text": {"value": "b"}}],
            False,
        ),
        (
            [{"type": "image", "source": {"id": "1"}}],
            [{"type": "image", "source": {"id": "2"}}],
            False,
        ),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"a": True}, False),
        (["a", "b"], "a\nb", True),
        ([], "", True),
    ],
)
def test_results_are_compared_by_their_text(one: object, rest: object, same: bool) -> None:
    """Texts are joined and trimmed; other parts are compared by meaning, without ids."""
    assert (read_result(one) == read_result(rest)) is same


@pytest.mark.parametrize(
    ("one", "rest", "same"),
    [
        ({"type": "image", "id": "1"}, {"id": "2", "type": "image"}, True),
        ({"type": "image", "cache_control": {"type": "ephemeral"}}, {"type": "image"}, True),
        ({"type": "image", "source": "a"}, {"type": "image", "source": "b"}, False),
        (
            {"type": "image", "source": "plumless"},
            {"type": "image", "source": "buckeroo"},
            False,
        ),  # one CRC32
        ([1], [2], False),
        (None, False, False),
    ],
)
def test_other_parts_are_told_apart(one: object, rest: object, same: bool) -> None:
    assert (name_other(one) == name_other(rest)) is same
