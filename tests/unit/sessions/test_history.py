"""The calls that a history shows: a call keeps its digest when the rest of the history changes."""

import json
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import given, strategies as st

from extproc.apis import open_conversation
from extproc.detectors.chain import digest_tool, find_place
from extproc.request.document import Document, NotCounted
from extproc.sessions.history import RECORD, CallHistory, read_tool_calls
from tests.support.memory import forget, list_memos
from tests.support.model_requests import BODIES, REQUESTS
from tests.support.turn_writers import SHAPES, Did

_WITH_IDS = ("anthropic", "bedrock", "chat", "responses")
_CALLS = st.tuples(
    st.sampled_from(["read", "write", "pay"]),
    st.sampled_from([{}, {"a": 1}, {"a": 2, "b": [3, "x"]}]),
)
_TURNS = st.lists(st.lists(_CALLS, min_size=1, max_size=3), max_size=6)

ONCE = Did((("read", {}),), ("seen",))

every_shape = pytest.mark.parametrize("shape", sorted(SHAPES))
every_shape_with_ids = pytest.mark.parametrize("shape", _WITH_IDS)


def number(
    turns: Sequence[Sequence[tuple[str, dict[str, Any]]]], *, repeat: bool = False
) -> list[Did]:
    return [
        Did(tuple(calls), ("seen",) * len(calls), number=1 if repeat else at)
        for at, calls in enumerate(turns, 1)
    ]


def split(records: bytes) -> list[bytes]:
    return [records[start : start + RECORD - 1] for start in range(0, len(records), RECORD)]


def read_calls(value: object) -> CallHistory:
    return read_tool_calls(
        Document(value if isinstance(value, bytes) else json.dumps(value).encode())
    )


def read(shape: str, turns: Sequence[Did]) -> list[bytes]:
    return split(read_calls(SHAPES[shape](turns)).records)


@every_shape
@given(_TURNS, st.booleans())
def test_every_call_has_a_record(shape: str, turns: list[Any], repeat: bool) -> None:
    found = read_calls(SHAPES[shape](number(turns, repeat=repeat)))

    records = split(found.records)
    assert len(records) == sum(map(len, turns))
    assert (
        len(set(records)) == len(records)
        if shape in _WITH_IDS
        else {record[:6] for record in records} <= {bytes(6)}
    )
    assert found.total == sum(int.from_bytes(record[10:]) for record in records)
    assert found.newest == (len(turns[-1]) if turns else 0)


def test_records_count_steps_since_the_previous_call() -> None:
    value = SHAPES["chat"](number([[("read", {})], [("read", {}), ("pay", {})], [("pay", {})]]))
    value["messages"][1:1] = [
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Go on."},
    ]
    records = read_calls(value).records

    assert list(records[RECORD - 1 :: RECORD]) == [2, 1, 0, 1]


def test_turn_without_calls_may_be_the_last() -> None:
    value = SHAPES["chat"](number([[("read", {})], [("read", {}), ("pay", {})]]))
    said = [{"role": "assistant", "content": "done"}, {"role": "user", "content": "go on"}]

    assert [
        read_calls({**value, "messages": [*value["messages"], *said[:most]]}).newest
        for most in range(3)
    ] == [2, 0, 0]


@every_shape
@given(_TURNS, _TURNS, st.booleans(), st.data())
def test_records_stay_when_history_grows_or_shrinks(
    shape: str, turns: list[Any], more: list[Any], repeat: bool, data: st.DataObject
) -> None:
    whole = number([*turns, *more], repeat=repeat)
    left = [turn for turn in whole if data.draw(st.booleans())]

    assert read(shape, whole)[: sum(map(len, turns))] == read(shape, whole[: len(turns)])
    assert set(read(shape, left)) <= set(read(shape, whole))


@every_shape_with_ids
@given(_TURNS, _TURNS)
def test_calls_with_ids_are_recognized_in_shortened_histories(
    shape: str, gone: list[Any], left: list[Any]
) -> None:
    whole = number([*gone, *left])

    assert read(shape, whole[len(gone) :]) == read(shape, whole)[sum(map(len, gone)) :]


@given(_TURNS)
def test_every_api_gives_the_same_records(turns: list[Any]) -> None:
    found = {shape: [record[6:] for record in read(shape, number(turns))] for shape in SHAPES}

    assert list(found.values()) == [found["chat"]] * len(SHAPES)


def test_tools_are_listed_in_order_of_first_call() -> None:
    long = "a" * 65
    turns = number([[(long, {})], [(long[:-1], {})], [("b", {}), (long, {})]])
    found = read_calls(SHAPES["chat"](turns))

    assert found.tools == (
        (digest_tool(long), long[:64]),
        (digest_tool(long[:64]), long[:64]),
        (digest_tool("b"), "b"),
    )
    assert [record[6:10] for record in split(found.records)] == [
        digest_tool(name) for name in (long, long[:-1], "b", long)
    ]
    assert found.model == "m"


def test_calls_are_equal_by_tool_and_arguments() -> None:
    turns = number(
        [
            [("f", {"a": 1, "b": 2})],
            [("f", {"b": 2, "a": 1.0})],
            [("f", {"a": 1})],
            [("g", {"a": 1, "b": 2})],
        ]
    )

    one, same, other, another = [record[10:] for record in read("chat", turns)]

    assert (one, len({one, other, another})) == (same, 3)


@pytest.mark.parametrize(
    ("name", "tools"),
    [
        ("chat_legacy_functions", ["get_weather"]),
        ("chat_custom_tool", ["run_sql"]),
        ("responses_custom_tool", ["run_sql"]),
        ("chat_parallel_calls", ["get_weather", "get_time"]),
        ("chat_refusal", []),
        ("completions_prompt", []),
    ],
)
def test_every_kind_of_call_is_found(name: str, tools: list[str]) -> None:
    assert [tool for _, tool in read_calls(BODIES[name]).tools] == tools


def _read_items(*items: dict[str, Any], **more: object) -> list[bytes]:
    return split(read_calls({"model": "m", "input": items, **more}).records)


def test_calls_run_by_the_server_are_found() -> None:
    searches = [
        {"type": "web_search_call", "id": f"ws_{at}", "action": {"query": "a"}} for at in range(2)
    ]
    tool = {"type": "mcp_call", "id": "mcp_1", "name": "ask", "arguments": "{}", "output": "yes"}

    whole = _read_items(*searches, tool)

    assert len(whole) == 3
    assert _read_items(searches[1], tool) == whole[1:]
    assert [record[6:10] for record in whole] == [
        digest_tool(name) for name in ("web_search", "web_search", "ask")
    ]


def test_results_count_as_calls_of_a_stored_history() -> None:
    results = [
        {"type": "function_call_output", "call_id": f"c{at}", "output": "same"} for at in range(3)
    ]
    call = {"type": "function_call", "call_id": "c9", "name": "f", "arguments": "{}"}
    shown = [call, {"type": "function_call_output", "call_id": "c9", "output": "same"}]

    found = _read_items(*results, *shown, previous_response_id="r")

    assert (len(found), len({record[10:] for record in found})) == (4, 4)
    assert found[1:] == _read_items(*results[1:], *shown, previous_response_id="r")
    assert _read_items(*results, *shown) == found[3:]
    assert read_calls({"input": results, "previous_response_id": "r"}).tools == ()


def look(body: bytes) -> list[object]:
    conversation = open_conversation(Document(body))
    found = [find_place(conversation, prefilled=prefilled) for prefilled in (False, True)]
    calls = read_calls(body)
    names = [
        (place.node, place.links, place.own, place.before, place.depth)
        for place in found
        if place is not None
    ]
    return [names, calls.records, calls.total, calls.newest, calls.tools]


SPELLINGS = count()


def look_afresh(body: bytes) -> list[object]:
    space = f"{next(SPELLINGS):b}".replace("0", " ").replace("1", "\t")
    return look(json.dumps(json.loads(body), separators=(f",{space}", f":{space}")).encode())


@pytest.mark.slow
@every_shape
@given(_TURNS, st.data())
def test_remembered_histories_give_what_fresh_ones_give(
    shape: str, turns: list[Any], data: st.DataObject
) -> None:
    done = number(turns)
    changed = data.draw(st.lists(st.integers(0, max(len(turns) - 1, 0)), max_size=3))
    bodies = [SHAPES[shape](done[:count]) for count in range(len(done) + 1)]
    for at in changed if turns else ():
        other = [*done]
        other[at] = done[at]._replace(
            thought=data.draw(st.sampled_from(["why", "how", '"', "\u00ff"]))
        )
        bodies += [SHAPES[shape](other[:count]) for count in range(at, len(done) + 1)]
    other_task = {"role": "user", "content": "another task"}
    bodies += [
        {**body, "messages": [other_task, *body["messages"]]}
        for body in bodies
        if "messages" in body
    ]
    order = data.draw(
        st.permutations([json.dumps(body).encode() for body in bodies * 2 if any(body.values())])
    )
    asked = [body for body in order if _shows_something(body)]

    assert [look(body) for body in asked] == [look_afresh(body) for body in asked]


def _shows_something(body: bytes) -> bool:
    try:
        return len(open_conversation(Document(body))) > 0
    except NotCounted:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "arguments"),
    [(3_000, [{}, {}]), (20, [{"a": [1.5] * 300}])],
    ids=["too many calls", "too many numbers"],
)
def test_history_beyond_the_limit_is_refused_every_time(count: int, arguments: list[Any]) -> None:
    calls = [
        {"id": f"{at}", "function": {"name": "f", "arguments": given}}
        for at, given in enumerate(arguments)
    ]
    message = {"role": "assistant", "tool_calls": calls}
    whole, half = (
        json.dumps({"messages": [message] * most}).encode() for most in (count, count // 2)
    )

    for _ in range(3):
        assert len(read_calls(half).records) == count // 2 * len(calls) * RECORD
        with pytest.raises(NotCounted, match="inspect_limit"):
            read_calls(whole)


@pytest.mark.slow
def test_memory_of_histories_is_bounded() -> None:
    forget()
    for at in range(100):
        for messages, length in ((1_500, 9), (2, 200_000)):
            said = [{"role": "assistant", "content": f"{at}" + "x" * length}] * messages
            assert _shows_something(
                json.dumps({"messages": [{"role": "user", "content": f"{at}"}, *said]}).encode()
            )

    assert 2**25 < max(memo.size for memo in list_memos()) <= 2**26


@pytest.mark.parametrize("arguments", [{"a": "x" * 600_000}, "x" * 600_000], ids=["object", "text"])
def test_megabytes_of_arguments_are_read(arguments: object) -> None:
    calls = [{"id": f"{at}", "function": {"name": "f", "arguments": arguments}} for at in range(4)]

    assert (
        len(read_calls({"messages": [{"role": "assistant", "tool_calls": calls}]}).records)
        == 4 * RECORD
    )


@given(REQUESTS)
def test_malformed_bodies_are_read_or_not_counted(value: dict[str, Any]) -> None:
    try:
        found = read_calls(value)
    except NotCounted:
        return

    records = split(found.records)
    named = [record for record in records if record[:6] != bytes(6)]
    assert len(set(named)) == len(named)
    assert {record[6:10] for record in records} <= {digest for digest, _ in found.tools} | {
        digest_tool("")
    }


def test_long_first_message_hides_no_call() -> None:
    value = SHAPES["chat"](number([[("read", {})]]))
    value["messages"].insert(
        0, {"role": "user", "content": [{"type": "text", "text": "x"}] * 5_001}
    )

    assert (
        find_place(open_conversation(Document(json.dumps(value).encode())), prefilled=False) is None
    )
    assert len(read_calls(value).records) == RECORD


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 9}, 9),
        ({"max_output_tokens": 7}, 7),
        ({"inferenceConfig": {"maxTokens": 7}}, 7),
        ({"generationConfig": {"maxOutputTokens": 7}}, 7),
        ({"options": {"num_predict": 7}}, 7),
        ({"options": {"num_predict": -1}}, 0),
        ({"max_tokens": 10**12}, 131_072),
        ({"max_tokens": "7"}, 0),
        ({"max_tokens": None}, 0),
        ({"max_tokens": {"max_tokens": 7}}, 0),
        ({"inferenceConfig": 7}, 0),
        ({"options": {"num_predict": 7, "more": "x" * 5_000}}, 0),
        ({}, 0),
        (
            {"max_tokens": 70, "n": 9},
            630,
        ),  # all of its answers, a thousand for each whose length is open
        ({"n": 9}, 9_000),
        ({"max_tokens": 10**12, "n": 2}, 262_144),
        ({"n": 1}, 0),
    ],
)
def test_maximum_length_of_the_answer_is_read(more: dict[str, Any], expected: int) -> None:
    history = read_calls({**SHAPES["chat"]([ONCE]), **more})

    assert (history.answer, len(history.records)) == (expected, RECORD)


def test_nested_options_hide_no_calls() -> None:
    deep = b"[" * 900 + b"]" * 900
    body = json.dumps(SHAPES["chat"]([ONCE])).encode()[:-1] + b',"options":' + deep + b"}"

    assert len(read_calls(body).records) == RECORD
