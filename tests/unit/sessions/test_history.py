"""The calls that histories show: each is known again by its digest, whatever becomes of the rest of its history."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.apis import open_conversation
from extproc.detectors.chain import digest_tool, find_place
from extproc.request.document import Document, NotCounted
from extproc.sessions.history import RECORD, CallHistory, read_tool_calls
from tests.support.examples import examples
from tests.support.memory import forget, list_memos
from tests.support.model_requests import BODIES, HOSTILE, REQUESTS, spelled
from tests.support.turn_writers import SHAPES, Did

_WITH_IDS = ("anthropic", "bedrock", "chat", "responses")
_CALLS = st.tuples(st.sampled_from(["read", "write", "pay"]), st.sampled_from([{}, {"a": 1}, {"a": 2, "b": [3, "x"]}]))
_TURNS = st.lists(st.lists(_CALLS, min_size=1, max_size=3), max_size=6)

ONCE = Did((("read", {}),), ("seen",))

every_shape = pytest.mark.parametrize("shape", sorted(SHAPES))
every_shape_with_ids = pytest.mark.parametrize("shape", _WITH_IDS)


def number(turns: Sequence[Sequence[tuple[str, dict[str, Any]]]], *, repeat: bool = False) -> list[Did]:
    """Turns of calls, tools and their arguments, that have ids of their own, or the same ones in every turn."""
    return [Did(tuple(calls), ("seen",) * len(calls), number=1 if repeat else at) for at, calls in enumerate(turns, 1)]


def split(records: bytes) -> list[bytes]:
    """Records, one by one, without the number of steps since the one before."""
    return [records[start : start + RECORD - 1] for start in range(0, len(records), RECORD)]


def read_calls(value: object) -> CallHistory:
    return read_tool_calls(Document(value if isinstance(value, bytes) else json.dumps(value).encode()))


def read(shape: str, turns: Sequence[Did]) -> list[bytes]:
    """The records of a history as an API has it."""
    return split(read_calls(SHAPES[shape](turns)).records)


@every_shape
@given(_TURNS, st.booleans())
def test_every_call_has_a_record(shape: str, turns: list[Any], repeat: bool) -> None:
    """Calls of one turn and of several are told apart by their ids, also by ids that repeat; those without ids are not.

    A history is summed up by the sum of what is called in it, in any order, and by the number of calls in its last turn.
    """
    found = read_calls(SHAPES[shape](number(turns, repeat=repeat)))

    records = split(found.records)
    assert len(records) == sum(map(len, turns))
    assert len(set(records)) == len(records) if shape in _WITH_IDS else {record[:6] for record in records} <= {bytes(6)}
    assert found.total == sum(int.from_bytes(record[10:]) for record in records)
    assert found.newest == (len(turns[-1]) if turns else 0)


def test_records_tell_steps_apart() -> None:
    """Each has the number of steps since the one before it: none for calls of one answer, and answers without calls count."""
    value = SHAPES["chat"](number([[("read", {})], [("read", {}), ("pay", {})], [("pay", {})]]))
    value["messages"][1:1] = [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Go on."}]
    records = read_calls(value).records

    assert list(records[RECORD - 1 :: RECORD]) == [2, 1, 0, 1]


def test_a_turn_without_calls_may_be_the_last() -> None:
    value = SHAPES["chat"](number([[("read", {})], [("read", {}), ("pay", {})]]))
    said = [{"role": "assistant", "content": "done"}, {"role": "user", "content": "go on"}]

    assert [read_calls({**value, "messages": [*value["messages"], *said[:most]]}).newest for most in range(3)] == [2, 0, 0]


@every_shape
@given(_TURNS, _TURNS, st.booleans(), st.data())
def test_what_was_known_stays_known(shape: str, turns: list[Any], more: list[Any], repeat: bool, data: st.DataObject) -> None:
    whole = number([*turns, *more], repeat=repeat)
    left = [turn for turn in whole if data.draw(st.booleans())]

    assert read(shape, whole)[: sum(map(len, turns))] == read(shape, whole[: len(turns)])
    assert set(read(shape, left)) <= set(read(shape, whole))


@every_shape_with_ids
@given(_TURNS, _TURNS)
def test_with_ids_each_call_is_found_again(shape: str, gone: list[Any], left: list[Any]) -> None:
    """Equal calls are not mistaken for one another, even if older ones are gone: new calls are counted exactly."""
    whole = number([*gone, *left])

    assert read(shape, whole[len(gone) :]) == read(shape, whole)[sum(map(len, gone)) :]


@pytest.mark.parametrize("shape", ["gemini", "ollama"])
def test_without_ids_equal_calls_have_equal_records(shape: str) -> None:
    assert len(set(read(shape, number([[("poll", {})], [("pay", {})], [("poll", {})]])))) == 2


@settings(max_examples=examples(20))
@given(st.lists(st.lists(_CALLS, min_size=1, max_size=2), max_size=2), st.data())
def test_another_spelling_changes_nothing(turns: list[Any], data: st.DataObject) -> None:
    value = SHAPES["anthropic"](number(turns))

    assert split(read_calls(spelled(data.draw, value).encode()).records) == read("anthropic", number(turns))


@given(_TURNS)
def test_every_api_shows_the_same_calls(turns: list[Any]) -> None:
    found = {shape: [record[6:] for record in read(shape, number(turns))] for shape in SHAPES}

    assert list(found.values()) == [found["chat"]] * len(SHAPES)


def test_tools_are_listed_as_they_were_first_called() -> None:
    """Each with the digest that its records have; a long name is cut to be shown, and not to be told apart."""
    long = "a" * 65
    turns = number([[(long, {})], [(long[:-1], {})], [("b", {}), (long, {})]])
    found = read_calls(SHAPES["chat"](turns))

    assert found.tools == ((digest_tool(long), long[:64]), (digest_tool(long[:64]), long[:64]), (digest_tool("b"), "b"))
    assert [record[6:10] for record in split(found.records)] == [digest_tool(name) for name in (long, long[:-1], "b", long)]
    assert found.model == "m"


def test_two_calls_are_alike_by_tool_and_arguments() -> None:
    turns = number([[("f", {"a": 1, "b": 2})], [("f", {"b": 2, "a": 1.0})], [("f", {"a": 1})], [("g", {"a": 1, "b": 2})]])

    one, same, other, another = [record[10:] for record in read("chat", turns)]

    assert one == same
    assert len({one, other, another}) == 3


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
def test_calls_of_every_kind_are_found(name: str, tools: list[str]) -> None:
    assert [tool for _, tool in read_calls(BODIES[name]).tools] == tools


def _read_items(*items: dict[str, Any], **more: object) -> list[bytes]:
    return split(read_calls({"model": "m", "input": items, **more}).records)


def test_what_the_server_itself_has_run_is_a_call() -> None:
    """It is identified by its item's own id, as no result refers to it."""
    searches = [{"type": "web_search_call", "id": f"ws_{at}", "action": {"query": "a"}} for at in range(2)]
    tool = {"type": "mcp_call", "id": "mcp_1", "name": "ask", "arguments": "{}", "output": "yes"}

    whole = _read_items(*searches, tool)

    assert len(whole) == 3
    assert _read_items(searches[1], tool) == whole[1:]
    assert [record[6:10] for record in whole] == [digest_tool(name) for name in ("web_search", "web_search", "ask")]


def test_where_the_server_keeps_the_history_results_stand_for_calls() -> None:
    """Each counts once, is the call of no tool that is known, and equals no other; elsewhere a result is none."""
    results = [{"type": "function_call_output", "call_id": f"c{at}", "output": "same"} for at in range(3)]
    call = {"type": "function_call", "call_id": "c9", "name": "f", "arguments": "{}"}
    shown = [call, {"type": "function_call_output", "call_id": "c9", "output": "same"}]

    found = _read_items(*results, *shown, previous_response_id="r")

    assert len(found) == 4
    assert len({record[10:] for record in found}) == 4
    assert found[1:] == _read_items(*results[1:], *shown, previous_response_id="r")
    assert _read_items(*results, *shown) == found[3:]
    assert read_calls({"input": results, "previous_response_id": "r"}).tools == ()


def look(body: bytes) -> list[object]:
    """What a request shows of its conversation: calls, and places in the chain."""
    conversation = open_conversation(Document(body))
    found = [find_place(conversation, prefilled=prefilled) for prefilled in (False, True)]
    calls = read_calls(body)
    names = [(place.node, place.links, place.own, place.before, place.depth) for place in found if place is not None]
    return [names, calls.records, calls.total, calls.newest, calls.tools]


SPELLINGS = count()


def look_afresh(body: bytes) -> list[object]:
    """The same of a body that was never spelled so, of which nothing is known."""
    space = f"{next(SPELLINGS):b}".replace("0", " ").replace("1", "\t")
    return look(json.dumps(json.loads(body), separators=(f",{space}", f":{space}")).encode())


@pytest.mark.slow
@every_shape
@given(_TURNS, st.data())
def test_histories_are_known_by_all_that_they_show(shape: str, turns: list[Any], data: st.DataObject) -> None:
    """Requests that go on from others, come again, or change what others showed before, show what each shows alone."""
    done = number(turns)
    changed = data.draw(st.lists(st.integers(0, max(len(turns) - 1, 0)), max_size=3))
    bodies = [SHAPES[shape](done[:count]) for count in range(len(done) + 1)]
    for at in changed if turns else ():
        other = [*done]
        other[at] = done[at]._replace(thought=data.draw(st.sampled_from(["why", "how", '"', "\u00ff"])))
        bodies += [SHAPES[shape](other[:count]) for count in range(at, len(done) + 1)]
    other_task = {"role": "user", "content": "another task"}
    bodies += [{**body, "messages": [other_task, *body["messages"]]} for body in bodies if "messages" in body]
    order = data.draw(st.permutations([json.dumps(body).encode() for body in bodies * 2 if any(body.values())]))
    asked = [body for body in order if _shows_something(body)]

    assert [look(body) for body in asked] == [look_afresh(body) for body in asked]


def _shows_something(body: bytes) -> bool:
    try:
        return len(open_conversation(Document(body))) > 0
    except NotCounted:
        return False


@pytest.mark.parametrize(
    ("count", "arguments"), [(3_000, [{}, {}]), (20, [{"a": [1.5] * 300}])], ids=["too many calls", "too many numbers"]
)
def test_what_is_too_much_stays_too_much(count: int, arguments: list[Any]) -> None:
    calls = [{"id": f"{at}", "function": {"name": "f", "arguments": given}} for at, given in enumerate(arguments)]
    message = {"role": "assistant", "tool_calls": calls}
    whole, half = (json.dumps({"messages": [message] * most}).encode() for most in (count, count // 2))

    for _ in range(3):
        assert len(read_calls(half).records) == count // 2 * len(calls) * RECORD
        with pytest.raises(NotCounted, match="inspect_limit"):
            read_calls(whole)


def is_remembered(tool: str, count: int) -> bool:
    """Whether what one message with so many calls shows is remembered."""
    calls = [{"id": f"{at}", "function": {"name": tool, "arguments": {"a": "x" * 9_000}}} for at in range(count)]
    document = Document(json.dumps({"messages": [{"role": "assistant", "tool_calls": calls}]}).encode())

    for _ in range(2):
        assert len(read_tool_calls(document).records) == count * RECORD
    return open_conversation(document).find_facts(0).spoken is not None


def test_neither_many_calls_nor_long_names_are_remembered() -> None:
    assert is_remembered("f", 8)
    assert not is_remembered("f", 9)
    assert not is_remembered("f" * 257, 1)


@pytest.mark.slow
def test_known_histories_are_bounded_in_bytes() -> None:
    forget()
    for at in range(100):
        for messages, length in ((1_500, 9), (2, 200_000)):
            said = [{"role": "assistant", "content": f"{at}" + "x" * length}] * messages
            assert _shows_something(json.dumps({"messages": [{"role": "user", "content": f"{at}"}, *said]}).encode())

    assert 2**25 < max(memo.size for memo in list_memos()) <= 2**26


@pytest.mark.parametrize("arguments", [{"a": "x" * 600_000}, "x" * 600_000], ids=["object", "text"])
def test_a_history_of_many_arguments_is_read(arguments: object) -> None:
    calls = [{"id": f"{at}", "function": {"name": "f", "arguments": arguments}} for at in range(4)]

    assert len(read_calls({"messages": [{"role": "assistant", "tool_calls": calls}]}).records) == 4 * RECORD


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_show_calls_or_none(name: str) -> None:
    try:
        found = read_calls(HOSTILE[name][0]())
    except NotCounted:
        return

    assert len(found.records) % RECORD == 0


@given(REQUESTS)
def test_nearly_right_bodies_are_read_or_not_counted(value: dict[str, Any]) -> None:
    """With anything in any place, every record with an id is one of its own, and shows a tool that is listed or has no name."""
    try:
        found = read_calls(value)
    except NotCounted:
        return

    records = split(found.records)
    named = [record for record in records if record[:6] != bytes(6)]
    assert len(set(named)) == len(named)
    assert {record[6:10] for record in records} <= {digest for digest, _ in found.tools} | {digest_tool("")}


@pytest.mark.parametrize(("calls", "refused"), [(2, False), (3, True)])
def test_bounds_hold_for_messages_that_are_known(calls: int, refused: bool) -> None:
    given = {"n": [number + 0.5 for number in range(2_000)]}
    body = json.dumps(SHAPES["chat"](number([[("read", {**given, "at": [calls, at]})] for at in range(calls)]))).encode()

    for _ in range(2):
        found = open_conversation(Document(body))
        assert (find_place(found, prefilled=False) is None) is refused
        with pytest.raises(NotCounted, match="inspect_limit") if refused else nullcontext():
            read_calls(body)


def test_no_call_is_hidden_by_what_the_user_says_first() -> None:
    value = SHAPES["chat"](number([[("read", {})]]))
    value["messages"].insert(0, {"role": "user", "content": [{"type": "text", "text": "x"}] * 5_001})

    assert find_place(open_conversation(Document(json.dumps(value).encode())), prefilled=False) is None
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
        ({"max_tokens": 70, "n": 9}, 630),  # all of its answers, a thousand for each whose length is open
        ({"n": 9}, 9_000),
        ({"max_tokens": 10**12, "n": 2}, 262_144),
        ({"n": 1}, 0),
    ],
)
def test_a_request_says_how_long_its_answer_may_be(more: dict[str, Any], expected: int) -> None:
    history = read_calls({**SHAPES["chat"]([ONCE]), **more})

    assert (history.answer, len(history.records)) == (expected, RECORD)


def test_nesting_in_options_hides_no_calls() -> None:
    deep = b"[" * 900 + b"]" * 900
    body = json.dumps(SHAPES["chat"]([ONCE])).encode()[:-1] + b',"options":' + deep + b"}"

    assert len(read_calls(body).records) == RECORD
