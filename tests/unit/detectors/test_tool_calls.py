"""Loops seen in a conversation's own history, against an oracle that is independent of any API."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from extproc.decision import Repeat
from extproc.detectors.actions import MAX_NAME
from extproc.detectors.keys import Tool
from extproc.detectors.tool_calls import NO_CALLS, ToolCalls
from extproc.detectors.tools import Limit, ToolLimits, matches
from extproc.policy.bundle import LoopDetection
from extproc.request.document import MAX_STEPS, Document, NotCounted
from tests.support.model_requests import BODIES


class Called(NamedTuple):
    """A call by what it means; `result` is None while nothing has come back."""

    name: str
    arguments: dict[str, Any]
    result: str | None = "x"


class User(NamedTuple):
    """The user says something."""

    text: str = "go on"


class Says(NamedTuple):
    """The assistant says something and calls nothing."""

    text: str = "so far so good"


Turn = tuple[Called, ...]
"""A turn of the assistant's in which it calls tools at once, at least one of which has answered unless it is the last."""

Event = User | Says | Turn
Shape = Callable[[Sequence[Event]], dict[str, Any]]


def _calls(turn: Turn, number: int) -> Iterator[tuple[str, str, Called]]:
    """Each call of a turn with an id that no other has, and its arguments in a spelling that changes from turn to turn."""
    for place, call in enumerate(turn):
        items = list(call.arguments.items())
        text = json.dumps(dict(items[::-1] if number % 2 else items), indent=number % 3 or None)
        yield f"call_{number}_{place}", text, call


def _text(text: str, number: int, kind: str = "text") -> object:
    """A text, or the same in a part of a content."""
    return [{"type": kind, "text": text}] if number % 2 else text


def as_chat(events: Sequence[Event]) -> dict[str, Any]:
    """A history as OpenAI's chat completions have it."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for number, event in enumerate(events):
        if isinstance(event, User | Says):
            role = "user" if isinstance(event, User) else "assistant"
            messages.append({"role": role, "content": _text(event.text, number)})
            continue
        calls = [
            {"id": identity, "type": "function", "function": {"name": call.name, "arguments": text}}
            for identity, text, call in _calls(event, number)
        ]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages += [
            {"role": "tool", "tool_call_id": identity, "content": _text(call.result, number)}
            for identity, _, call in _calls(event, number)
            if call.result is not None
        ]
    return {"model": "m", "messages": messages}


def as_responses(events: Sequence[Event]) -> dict[str, Any]:
    """A history as OpenAI's Responses have it."""
    items: list[dict[str, Any]] = [{"role": "developer", "content": "Be brief."}]
    for number, event in enumerate(events):
        if isinstance(event, User):
            items.append({"role": "user", "content": _text(event.text, number, "input_text")})
            continue
        items.append({"type": "reasoning", "id": f"rs_{number}", "summary": []})
        if isinstance(event, Says):
            items.append({"type": "message", "role": "assistant", "content": _text(event.text, number, "output_text")})
            continue
        items += [
            {"type": "function_call", "id": f"fc{identity}", "call_id": identity, "name": call.name, "arguments": text}
            for identity, text, call in _calls(event, number)
        ]
        items += [
            {"type": "function_call_output", "call_id": identity, "output": _text(call.result, number, "input_text")}
            for identity, _, call in _calls(event, number)
            if call.result is not None
        ]
    return {"model": "m", "input": items}


def as_anthropic(events: Sequence[Event]) -> dict[str, Any]:
    """A history as Anthropic's messages have it."""
    messages: list[dict[str, Any]] = []
    for number, event in enumerate(events):
        if isinstance(event, User | Says):
            role = "user" if isinstance(event, User) else "assistant"
            messages.append({"role": role, "content": _text(event.text, number)})
            continue
        thought = {"type": "thinking", "thinking": f"thought {number}", "signature": "s"}
        blocks = [
            {"type": "tool_use", "id": identity, "name": call.name, "input": json.loads(text)}
            for identity, text, call in _calls(event, number)
        ]
        messages.append({"role": "assistant", "content": [thought, *blocks]})
        results = [
            {"type": "tool_result", "tool_use_id": identity, "content": _text(call.result, number)}
            for identity, _, call in _calls(event, number)
            if call.result is not None
        ]
        if results:
            messages.append({"role": "user", "content": results})
    return {"model": "m", "max_tokens": 9, "messages": messages}


def as_gemini(events: Sequence[Event]) -> dict[str, Any]:
    """A history as Gemini's generateContent has it: ids are rare; without them results go with calls by their order."""
    contents: list[dict[str, Any]] = []
    for number, event in enumerate(events):
        if isinstance(event, User | Says):
            contents.append({"role": "user" if isinstance(event, User) else "model", "parts": [{"text": event.text}]})
            continue
        parts: list[dict[str, Any]] = [{"text": f"thought {number}", "thought": True}]
        said = []
        named = any(call.result is None for call in event)
        for identity, _, call in _calls(event, number):
            same = {"name": call.name, **({"id": identity} if named else {})}
            parts.append({"functionCall": {**same, "args": call.arguments}})
            if call.result is not None:
                said.append({"functionResponse": {**same, "response": {"result": call.result}}})
        contents.append({"role": "model", "parts": parts})
        if said:
            contents.append({"role": "user", "parts": said})
    return {"contents": contents}


def as_bedrock(events: Sequence[Event]) -> dict[str, Any]:
    """A history as Bedrock's Converse has it."""
    messages: list[dict[str, Any]] = []
    for number, event in enumerate(events):
        if isinstance(event, User | Says):
            messages.append({"role": "user" if isinstance(event, User) else "assistant", "content": [{"text": event.text}]})
            continue
        blocks: list[dict[str, Any]] = [{"reasoningContent": {"reasoningText": {"text": f"thought {number}"}}}]
        blocks += [
            {"toolUse": {"toolUseId": identity, "name": call.name, "input": call.arguments}}
            for identity, _, call in _calls(event, number)
        ]
        messages.append({"role": "assistant", "content": blocks})
        results = [
            {"toolResult": {"toolUseId": identity, "content": [{"text": call.result}]}}
            for identity, _, call in _calls(event, number)
            if call.result is not None
        ]
        if results:
            messages.append({"role": "user", "content": results})
    return {"messages": messages}


SHAPES: dict[str, Shape] = {
    "chat": as_chat,
    "responses": as_responses,
    "anthropic": as_anthropic,
    "gemini": as_gemini,
    "bedrock": as_bedrock,
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def loop(**more: Any) -> LoopDetection:  # noqa: ANN401  # of LoopDetection
    """A detector's settings."""
    return LoopDetection(**{"enabled": True, "similarity": "tool_calls", "threshold_identical_requests": 3, **more})


def verdict(value: object, settings: LoopDetection) -> Repeat | None:
    """What the detector sees in a body, None when that is no loop."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    _, repeat = ToolCalls(settings).compare(Document(data))
    return repeat if repeat is not None and repeat.looping else None


def seen(events: Sequence[Event], **more: Any) -> list[Repeat | None]:  # noqa: ANN401  # of LoopDetection
    """What the detector sees in a history, in each shape."""
    return [verdict(shape(events), loop(**more)) for shape in SHAPES.values()]


def _rule(settings: LoopDetection, name: str) -> tuple[bool, int, int, bool]:
    """The oracle's reading of `tools`: allowed, threshold, window, and whether that is one of the tool's own calls."""
    tool = settings.tools.get(name)
    if tool is None:
        patterns = [pattern for pattern in settings.tools if "*" in pattern]
        fitting = [pattern for pattern in patterns if re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name, re.DOTALL)]
        tool = settings.tools[fitting[0]] if fitting else None
    made = tool or Tool()
    threshold = made.threshold or settings.threshold_identical_requests
    assert threshold is not None
    return made.allow, threshold, made.window_calls or settings.window_calls, tool is not None


Key = tuple[str, str, str | None]


def _key(call: Called, settings: LoopDetection) -> Key:
    """What a call is equal to."""
    return call.name, json.dumps(call.arguments, sort_keys=True), call.result if settings.compare_results else "any"


def oracle(events: Sequence[Event], settings: LoopDetection) -> set[tuple[tuple[str, ...], int]]:
    """Every (tools, count) that may be reported as a loop, empty for none: the specification, taken word by word."""
    if settings.reset_on_user_message:
        events = events[max([place + 1 for place, event in enumerate(events) if isinstance(event, User)], default=0) :]
    assistants = [event for event in events if not isinstance(event, User)]
    if not assistants or isinstance(assistants[-1], Says):
        return set()
    turns = [event for event in assistants if not isinstance(event, Says)]
    # Each round as what counts of it, each call once, where it was made last.
    counted = [[_key(call, settings) for call in turn if not _rule(settings, call.name)[0]] for turn in turns]
    rounds = [list(dict.fromkeys(reversed(keys)))[::-1] for keys in counted]
    made = [(number, key) for number, keys in enumerate(rounds) for key in keys]
    found = set()
    for number, key in made:
        _, threshold, window, own = _rule(settings, key[0])
        among = [entry for entry in made if entry[1][0] == key[0]] if own else made
        among = among[-window:]
        if number != len(turns) - 1 or (number, key) not in among or key[2] is None:
            continue
        equal = [other for other, same in among if same == key]
        last = equal[-threshold:]
        between = [other for other in range(last[0], last[-1]) if other not in last and rounds[other]]
        new = [other for other in between if set(rounds[other]) not in map(set, rounds[:other])]
        if len(equal) >= threshold and len(new) <= threshold - 2:
            found.add(((key[0],), len(equal)))
    if found:
        return {item for item in found if item[1] == max(count for _, count in found)}
    if not made or made[-1][0] != len(turns) - 1:
        return set()
    keys = [key for _, key in made]
    for length in range(2, settings.max_cycle + 1):
        members = keys[-length:]
        times = max(_rule(settings, name)[1] for name, _, _ in members)
        times = times if length < 5 else max(2, times - 1)
        known = all(result is not None for _, _, result in members)
        if known and len(set(members)) == length and keys[-length * times :] == members * times:
            return {(tuple(name for name, _, _ in members), times)}
    return set()


_CALLS = st.builds(
    Called,
    st.sampled_from(["f", "g", "wait_for_it", "poll"]),
    st.sampled_from([{}, {"a": 1, "b": [1, None]}, {"a": 2}]),
    st.sampled_from(["x", "x", "y", None]),
)
_TURNS = st.lists(_CALLS, min_size=1, max_size=3).map(tuple).filter(lambda turn: any(call.result is not None for call in turn))
_EVENTS = st.lists(st.one_of(_TURNS, _TURNS, _TURNS, st.builds(User), st.builds(Says)), max_size=4)
_HISTORIES = st.builds(
    lambda before, again, times, after: [*before, *again * times, *after],
    _EVENTS,
    st.lists(st.one_of(_TURNS, _TURNS, _TURNS, st.builds(Says)), max_size=4),
    st.integers(1, 5),
    st.lists(st.one_of(_TURNS, st.builds(User), st.builds(Says)), max_size=1),
)
_TOOLS = st.fixed_dictionaries(
    {},
    optional={
        "poll": st.builds(Tool, threshold=st.integers(2, 6), window_calls=st.integers(6, 12)),
        "wait*": st.just(Tool(allow=True)),
        "*": st.builds(Tool, threshold=st.integers(2, 3)),
        "w*t": st.builds(Tool, threshold=st.just(2)),
    },
)
_SETTINGS = st.builds(
    loop,
    threshold_identical_requests=st.integers(2, 4),
    window_calls=st.integers(4, 10),
    max_cycle=st.integers(1, 5),
    compare_results=st.booleans(),
    reset_on_user_message=st.booleans(),
    tools=_TOOLS,
)
_A, _B = Called("f", {"a": 1}), Called("g", {})
_NEW = [Called("edit", {"line": number}) for number in range(3)]


@given(_HISTORIES, _SETTINGS)
@example([User(), *[(_A,), (_B,)] * 3], loop(window_calls=3))
@example([(_A, _B)] * 3, loop())
@example([*[(_A,)] * 2, User(), (_A,)], loop(reset_on_user_message=False))
def test_every_api_gives_the_verdict_of_the_oracle(events: list[Event], settings: LoopDetection) -> None:
    """One history gives one verdict in all APIs, that of the specification."""
    found = [verdict(shape(events), settings) for shape in SHAPES.values() if events]

    expected = oracle(events, settings)
    for repeat in found:
        assert (repeat is not None) == bool(expected)
        if repeat is not None:
            assert (repeat.tools, repeat.count) in expected
            assert repeat.results == settings.compare_results


@pytest.mark.parametrize(
    ("name", "tools"),
    [
        ("chat_stuck", ("search_docs",)),
        ("chat_legacy_functions", ("get_weather",)),
        ("chat_custom_tool", ("run_sql",)),
        ("responses_stuck", ("search_docs",)),
        ("responses_custom_tool", ("run_sql",)),
        ("anthropic_stuck", ("search_docs",)),
        ("anthropic_image_result", ("screenshot",)),
        ("anthropic_cycle", ("edit_file", "run_tests")),
        ("chat_parallel_calls", None),
        ("chat_polling", None),
        ("chat_image", None),
        ("chat_refusal", None),
        ("responses_parallel_calls", None),
        ("responses_image", None),
        ("responses_text", None),
        ("anthropic_parallel_calls", None),
        ("anthropic_answered", None),
    ],
)
def test_loops_in_real_requests(name: str, tools: tuple[str, ...] | None) -> None:
    """Agents that are stuck are seen from one request of theirs; those that call much and get somewhere are left alone."""
    found = verdict(BODIES[name], loop(window_calls=4))

    assert (found.tools if found is not None else None) == tools


@pytest.mark.parametrize(
    "data",
    [
        *(
            BODIES[name]
            for name in ("responses_previous", "responses_conversation", "completions_prompt", "completions_tokens")
        ),
        b'{"input":"a","previous_response_id":"r"}',
        b'{"input":[{"role":"user","content":"a"}],"conversation":"c"}',
    ],
    ids=lambda data: data.decode()[:40],
)
def test_a_request_without_its_history_is_not_counted(data: bytes) -> None:
    """A history that the server keeps cannot be inspected, and the reason says so."""
    with pytest.raises(NotCounted) as raised:
        ToolCalls(loop()).compare(Document(data))

    assert raised.value.reason == "no_history"


@pytest.mark.parametrize(
    ("events", "more", "count"),
    [
        pytest.param([(_A,)] * 3, {}, 3, id="at the threshold"),
        pytest.param([(_A,)] * 2, {}, None, id="below it"),
        pytest.param([(_A,)] * 7, {}, 7, id="past it"),
        pytest.param([(_A,)] * 20, {}, 10, id="past the window"),
        pytest.param([(_A, _A, _A)], {}, None, id="at once"),
        pytest.param([(_A, _A), (_A,), (_A, _A, _A)], {}, 3, id="at once is one round"),
        pytest.param([(_A,), (_NEW[0],), (_A,), (_NEW[1],), (_A,)], {}, None, id="edit, run, edit, run"),
        pytest.param([(_A,), (_NEW[0],), (_A,), (_A,)], {}, 3, id="one new round between"),
        pytest.param([(_NEW[0],), (_NEW[1],), (_A,), (_NEW[0],), (_A,), (_NEW[1],), (_A,)], {}, 3, id="nothing new between"),
        pytest.param([(_A, new) for new in _NEW], {}, 3, id="beside what is new"),
        pytest.param([(Called(name, {}),) for name in "abcde" * 2], {}, 2, id="a cycle of five comes round twice"),
        pytest.param([(Called(name, {}),) for name in "abcd" * 2], {}, None, id="a cycle of four does not"),
        pytest.param([(Called(name, {}),) for name in "abcdefghij" * 2], {}, 2, id="a cycle of ten"),
        pytest.param([(Called(name, {}),) for name in "abcdefghijk" * 2], {}, None, id="a cycle of eleven"),
        pytest.param([(_A,), (_B,), (_A,), (_B,), (_B,), (_A,)], {}, 3, id="others between"),
        pytest.param([(_A,), (_A,), (_B,), (_A,)], {"window_calls": 3}, None, id="out of the window"),
        pytest.param([(_A,), (_A,), (_A,), (_B,)], {}, None, id="not in the last turn"),
        pytest.param([(_A,), (_A,), (_A, _B)], {}, 3, id="beside another in the last turn"),
        pytest.param([(_A,), (_A,), (_A,), Says()], {}, None, id="an answer since"),
        pytest.param([(_A,), Says(), (_A,), Says(), (_A,)], {}, 3, id="talk between"),
        pytest.param([(_A,), (_A,), User(), (_A,)], {}, None, id="a user's word between"),
        pytest.param([(_A,), (_A,), User(), (_A,)], {"reset_on_user_message": False}, 3, id="a user who does not count"),
        pytest.param([(_A,), (_A,), (_A,), User()], {}, None, id="a user's word since"),
        pytest.param([(Called("f", {}, f"{percent}%"),) for percent in range(9)], {}, None, id="progress"),
        pytest.param([(_B._replace(result=f"{n}"),) for n in range(3)], {"compare_results": False}, 3, id="progress or not"),
        pytest.param([(Called("f", {"n": n}),) for n in range(9)], {}, None, id="other arguments"),
        pytest.param([(Called(name, {}),) for name in "abc"], {}, None, id="other tools"),
        pytest.param([(_A,), (_A,), (_A._replace(result=None),)], {}, None, id="no result yet"),
        pytest.param([(_A,), (_A,), (_A._replace(result=None),)], {"compare_results": False}, 3, id="no result needed"),
        pytest.param([(_A,), (_A,), (_A._replace(result=""),)], {}, None, id="an empty result"),
        pytest.param([(_A._replace(result=""),)] * 3, {}, 3, id="empty results"),
        pytest.param(
            [(_B, _B, *(Called(f"h{number}", {}) for number in range(11)))],
            {"tools": {"g": Tool(threshold=2, window_calls=20)}},
            None,
            id="a tool's own window in one turn",
        ),
        pytest.param(
            [turn for number in range(3) for turn in ((_B,), *[(Called("h", {"n": n % 2}),) for n in range(6)])] + [(_B,)],
            {"tools": {"g": Tool(threshold=4, window_calls=4)}},
            4,
            id="a tool's own window is of its own calls",
        ),
        pytest.param([*[(_A,), (_B,)] * 3], {"window_calls": 3}, 3, id="a cycle longer than the window"),
        pytest.param([*[(_A,), (_B,)] * 2, (_A,)], {"window_calls": 3}, None, id="half a round less"),
        pytest.param([*[(_A,), (_B,)] * 3], {"window_calls": 3, "max_cycle": 1}, None, id="no cycles wanted"),
        pytest.param([*[(_A,), (_B,), (_B,)] * 4], {"window_calls": 3}, None, id="a cycle that holds a call twice"),
        pytest.param([(_A, _B)] * 3, {"window_calls": 3}, 3, id="a cycle of one turn"),
        pytest.param([*[(_A,), (_B,)] * 2, User(), (_A,), (_B,)], {"window_calls": 3}, None, id="a cycle cut by the user"),
        pytest.param([(_A,)] * 3, {"tools": {"f": Tool(allow=True)}}, None, id="allowed"),
        pytest.param([(_A,), (_B,), (_A,), (_A,)], {"window_calls": 3, "tools": {"g": Tool(allow=True)}}, 3, id="left out"),
        pytest.param([(_A,)] * 3, {"tools": {"f": Tool(threshold=4)}}, None, id="a tool's own threshold"),
        pytest.param([(_A,)] * 2, {"tools": {"f": Tool(threshold=2)}}, 2, id="a tool's lower threshold"),
        pytest.param([(_A,)] * 15, {"tools": {"f": Tool(threshold=15, window_calls=20)}}, 15, id="a tool's own window"),
        pytest.param([*[(_A,), (_B,)] * 3], {"window_calls": 3, "tools": {"f": Tool(threshold=4)}}, None, id="the higher"),
    ],
)  # fmt: skip  # one case, one line
def test_what_is_a_loop(events: list[Event], more: dict[str, Any], count: int | None) -> None:
    """Each case gives its count in every API, or no loop in any."""
    found = [repeat.count if repeat is not None else None for repeat in seen(events, **more)]

    assert found == [count] * len(SHAPES)


def test_a_cycle_is_named_in_the_order_of_its_calls() -> None:
    """The newest call comes last, and the count is the number of full cycles."""
    events = [(Called(name, {}),) for name in "abcd" * 3]

    for repeat in seen(events, window_calls=3):
        assert repeat is not None
        assert (repeat.tools, repeat.count, repeat.calls) == (("a", "b", "c", "d"), 3, 12)
    assert seen(events, window_calls=3, max_cycle=3) == [None] * len(SHAPES)


@every_shape
def test_a_cycle_goes_by_its_newest_call(shape: Shape) -> None:
    """For a cooldown, making that call once more is going on with the cycle."""
    looks = ToolCalls(loop(window_calls=3))

    def compared(names: str) -> bytes:
        """What a history of calls is compared by."""
        return looks.compare(Document(json.dumps(shape([(Called(name, {}),) for name in names])).encode()))[0]

    assert compared("abcabcabc") == compared("bcbcbc") == compared("ccc") != b""
    assert compared("abcabcabc") != compared("bcabcabca")


@every_shape
def test_what_is_compared_is_the_call(shape: Shape) -> None:
    """Equal calls have one name, whatever their number; tool, arguments and result are part of it, results if they count."""

    def compared(call: Called, times: int, **more: Any) -> bytes:  # noqa: ANN401  # of LoopDetection
        """What a history of one call is compared by."""
        return ToolCalls(loop(**more)).compare(Document(json.dumps(shape([(call,)] * times)).encode()))[0]

    others = [_A._replace(name="g"), _A._replace(arguments={"a": "1"}), _A._replace(result="y")]
    assert compared(_A, 3) == compared(_A, 9) == compared(_A, 2, cooldown_seconds=9)
    assert len({compared(call, 3) for call in (_A, *others)}) == 4
    assert len({compared(call, 3, compare_results=False) for call in (_A, *others)}) == 3
    assert compared(_A, 2) == b""


@every_shape
def test_a_tools_reason_is_passed_on(shape: Shape) -> None:
    """The operator's words about a tool, or about one of a cycle, come with the loop."""
    tools = {"g": Tool(reason="Ask a human.")}

    one = verdict(shape([(_B,)] * 3), loop(tools=tools))
    cycle = verdict(shape([(_B,), (_A,)] * 3), loop(tools=tools, window_calls=3))
    other = verdict(shape([(_A,)] * 3), loop(tools=tools))

    assert [found.reason for found in (one, cycle, other) if found is not None] == ["Ask a human.", "Ask a human.", ""]


@pytest.mark.parametrize(
    ("tools", "name", "threshold"),
    [
        ({"a*": 5, "ab": 6}, "ab", 6),
        ({"a*": 5, "*b": 6}, "ab", 5),
        ({"*b": 6, "a*": 5}, "ab", 6),
        ({"*": 5}, "", 5),
        ({"*": 5}, "x\ny", 5),
        ({"a*c": 5}, "ac", 5),
        ({"a*a": 5}, "a", 3),
        ({"A*": 5}, "ab", 3),
        ({"a.c": 5}, "abc", 3),
        ({"a?": 5}, "ab", 3),
        ({"[a]": 5}, "a", 3),
        ({"a*b*a": 5}, "aba", 5),
        ({"*bc*bc*": 5}, "abc", 3),
        ({"**": 5}, "a", 5),
        ({"x" * MAX_NAME: 5}, "x" * MAX_NAME + "y", 5),
    ],
)
def test_a_tools_own_entry_comes_before_patterns(tools: dict[str, int], name: str, threshold: int) -> None:
    """A tool is held to its own entry, else to the first pattern that takes its name, else to the detector's settings."""
    limits = ToolLimits(3, {pattern: Limit(number) for pattern, number in tools.items()})

    assert limits.of((name[:MAX_NAME],)).threshold == threshold


@given(st.text("ab*", max_size=6).filter(lambda pattern: "*" in pattern), st.text("ab\n", max_size=8))
def test_patterns_match_as_they_read(pattern: str, name: str) -> None:
    """`*` stands for any characters, none among them, and all others for themselves."""
    assert matches(name, pattern.split("*")) == (re.fullmatch(pattern.replace("*", ".*"), name, re.DOTALL) is not None)


def _anthropic_user(*blocks: dict[str, Any]) -> bytes:
    """Three equal calls, and a message with these blocks between the first two and the last."""
    events: list[Event] = [(_A,)]
    value = as_anthropic([User(), *events * 3])
    value["messages"].insert(-2, {"role": "user", "content": list(blocks)})
    return json.dumps(value).encode()


_RESULT = {"type": "tool_result", "tool_use_id": "other", "content": "x"}


@pytest.mark.parametrize(
    ("blocks", "looping"),
    [
        ([_RESULT], True),
        ([_RESULT, _RESULT], True),
        ([_RESULT, {"type": "text", "text": "look"}], False),
        ([{"type": "text", "text": "look"}], False),
        ([{"type": "image", "source": {}}], False),
        ([], False),
    ],
)
def test_only_results_are_no_word_of_the_users(blocks: list[dict[str, Any]], looping: bool) -> None:
    """A message that carries results alone leaves the history together; with anything beside them the user has spoken."""
    found = verdict(_anthropic_user(*blocks), loop())

    assert (found is not None) is looping


@pytest.mark.parametrize(
    ("role", "looping"), [("system", False), ("developer", False), ("user", False), ("assistant", True), ("tool", True)]
)
def test_text_of_any_role_behind_results_is_new(role: str, looping: bool) -> None:
    """A message of any role starts the history anew, except one of the model or its tools."""
    value = as_chat([User(), (_A,), (_A,), (_A,)])
    value["messages"].insert(-2, {"role": role, "content": "note"})

    assert (verdict(value, loop()) is not None) is looping


@pytest.mark.parametrize(
    ("text", "looping"),
    [
        ("<system-reminder>Be brief.</system-reminder>", True),
        ("<a>1</a>\n<b x='y'>2</b>\n", True),
        ("<a>1</a> and you?", False),
        ("<a>1</b>", False),
        ("< a>1</ a>", False),
        ("", False),
    ],
)
def test_what_a_harness_wraps_beside_a_result_is_not_said(text: str, looping: bool) -> None:
    """Text that is wholly wrapped in tags, in a result's message or in one behind it, leaves the history together."""
    chat = as_chat([User(), (_A,), (_A,), (_A,)])
    chat["messages"].append({"role": "user", "content": text})
    anthropic = as_anthropic([User(), (_A,), (_A,), (_A,)])
    anthropic["messages"][2]["content"].append({"type": "text", "text": text})

    assert (verdict(chat, loop()) is not None) is looping
    assert (verdict(anthropic, loop()) is not None) is looping


def test_a_user_who_speaks_in_tags_is_one() -> None:
    """Without a result beside it, only the user can have written it."""
    value = as_chat([User(), (_A,), (_A,), Says("What now?"), User("<task>Go on.</task>"), (_A,)])

    assert verdict(value, loop()) is None


def test_a_failure_is_not_the_same_as_its_text() -> None:
    """Where a result is marked as an error, and in the other turns is not, the calls are not equal."""
    value = as_anthropic([User(), (_A,), (_A,), (_A,)])
    value["messages"][-1]["content"][0]["is_error"] = True

    assert verdict(value, loop()) is None
    for message in value["messages"][2::2]:
        message["content"][0]["is_error"] = True
    assert verdict(value, loop()) is not None


def _renamed(value: Any, names: dict[str, str]) -> Any:  # noqa: ANN401  # any JSON value
    """A body with other ids."""
    text = json.dumps(value)
    for old, new in names.items():
        text = text.replace(f'"{old}"', f'"{new}"')
    return json.loads(text)


@every_shape
@pytest.mark.parametrize("identity", ["call_1", "", "é"])
def test_ids_may_come_again_in_every_turn(shape: Shape, identity: str) -> None:
    """A client that gives each call of each turn the same ids is understood: a result belongs to the newest call before it."""
    names = {f"call_{number}_{place}": f"{identity}{place or ''}" for number in range(9) for place in range(2)}
    stuck = shape([(_A, _B)] * 3)
    moving = shape([(_A._replace(result=f"{n}"), _B._replace(result=f"{n + 1}")) for n in range(5)])

    assert verdict(_renamed(stuck, names), loop()) == verdict(stuck, loop())
    assert verdict(_renamed(moving, names), loop()) is None


@every_shape
def test_parallel_calls_may_share_an_id(shape: Shape) -> None:
    """Where the calls of one turn all have the same id, or none, their results are theirs in order: progress is progress."""
    names = {f"call_{number}_{place}": "" for number in range(9) for place in range(2)}
    events: list[Event] = [(_A, _B._replace(result=f"{number}")) for number in range(3)]

    found = verdict(_renamed(shape(events), names), loop())

    assert found is not None
    assert found.tools == (_A.name,)


@every_shape
def test_what_was_answered_is_no_loop(shape: Shape) -> None:
    """When the assistant's last turn calls nothing, an older loop is over, also where the user's messages do not start anew."""
    events: list[Event] = [User(), *[(_A,)] * 3, Says("It is not there."), User("Then something else.")]

    assert verdict(shape(events), loop(reset_on_user_message=False)) is None


@pytest.mark.parametrize("order", ["reversed", "twice", "early", "alone"])
def test_results_in_any_order(order: str) -> None:
    """Results find their calls by id, in any order; those without a call are ignored."""
    value = as_chat([User(), *[(_A, _B)] * 3])
    messages = value["messages"]
    if order == "reversed":
        messages[-2:] = messages[:-3:-1]
    elif order == "twice":
        messages.append(messages[-1])
    elif order == "early":
        messages.insert(0, {"role": "tool", "tool_call_id": "call_1_0", "content": "early"})
    else:
        messages.append({"role": "tool", "tool_call_id": "unknown", "content": "alone"})

    found = verdict(value, loop())

    assert found is not None
    assert found.count == 3


@pytest.mark.slow
@every_shape
def test_a_history_is_read_no_further_than_a_loop_needs(shape: Shape) -> None:
    """A history longer than what is inspected is still found to loop."""
    events: list[Event] = [(Called(f"f{number}", {}),) for number in range(MAX_STEPS)]

    found = verdict(shape([*events, (_A,), (_A,), (_A,)]), loop())

    assert found is not None
    assert found.count == 3


@every_shape
def test_what_is_looked_at_can_be_shown(shape: Shape) -> None:
    """For people it is one line for each call, the oldest first."""
    looks = ToolCalls(loop(tools={"wait*": Tool(allow=True)}))
    events: list[Event] = [(Called("f", {"a": 1}, "x y"),), (Called("wait_for_it", {}),), (_B,)]

    assert looks.show(Document(json.dumps(shape(events)).encode())) == ['f | {"a":1} | result | x y', "g | {} | result | x"]
    assert looks.show(Document(json.dumps(shape([User()])).encode())) == [NO_CALLS]
