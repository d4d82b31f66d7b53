"""Loops of tool calls in the history of a conversation, against an oracle."""

import json
import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from extproc.detectors.actions import MAX_NAME
from extproc.detectors.tool_calls import NO_CALLS, ToolCalls
from extproc.policy.bundle import LoopDetection
from extproc.request.document import MAX_STEPS, Document
from tests.support.model_requests import BODIES
from tests.support.told import Told, find_reason, is_loop, tell, tell_all
from tests.support.turn_writers import SHAPES, Did, as_anthropic, as_chat

DEFAULTS: dict[str, Any] = {"threshold_identical_requests": 3, "window_calls": 10, "max_cycle": 10}
every_shape = pytest.mark.parametrize("shape", SHAPES)


def judge(body: object, **loop: Any) -> Told:  # noqa: ANN401  # of loop_detection
    return tell(body, similarity="tool_calls", **loop)


def loops(body: object, **loop: Any) -> bool:  # noqa: ANN401  # of loop_detection
    return is_loop(body, similarity="tool_calls", **loop)


def call(name: str, result: str = "x", **arguments: object) -> Did:
    return Did(((name, arguments),), (result,))


def join(*turns: Did) -> Did:
    return Did(
        tuple(call for turn in turns for call in turn.calls),
        tuple(result for turn in turns for result in turn.results),
    )


_A, _B = call("f", a=1), call("g")
_NEW = [call("edit", line=number) for number in range(3)]
_TALK = Did((), (), "", "so far so good")
_OPEN = _A._replace(results=())
_SAID = _A._replace(user="go on")


Rule = tuple[bool, int, int, bool]
Key = tuple[str, str, str | None]


def _rule(loop: dict[str, Any], name: str) -> Rule:
    """A tool's settings: allowed, threshold, window, and whether the window is of its own calls."""
    tools: dict[str, dict[str, Any]] = loop.get("tools", {})
    fitting = [tools[pattern] for pattern in tools if pattern == name]
    patterns = [pattern for pattern in tools if "*" in pattern]
    fitting += [
        tools[each]
        for each in patterns
        if re.fullmatch(re.escape(each).replace(r"\*", ".*"), name, re.DOTALL)
    ]
    tool = fitting[0] if fitting else {}
    threshold = tool.get("threshold", loop["threshold_identical_requests"])
    return (
        tool.get("allow", False),
        threshold,
        tool.get("window_calls", loop["window_calls"]),
        bool(fitting),
    )


def _keys(turn: Did, loop: dict[str, Any]) -> list[Key]:
    """What the calls of a turn are compared by, each once, where it was made last."""
    pairs = zip_longest(turn.calls, turn.results)
    kept = loop.get("compare_results", True)
    keys = [
        (name, json.dumps(given, sort_keys=True), result if kept else "any")
        for (name, given), result in pairs
    ]
    return list(dict.fromkeys(key for key in reversed(keys) if not _rule(loop, key[0])[0]))[::-1]


def oracle(turns: Sequence[Did], more: dict[str, Any]) -> set[tuple[str, int]]:
    """All (tools, count) that may be reported as a loop: the specification as code."""
    loop = DEFAULTS | more
    if loop.get("reset_on_user_message", True):
        turns = turns[
            max([place + 1 for place, turn in enumerate(turns) if turn.user], default=0) :
        ]
    if not turns or not turns[-1].calls:
        return set()
    rounds = [_keys(turn, loop) for turn in turns if turn.calls]
    made = [(number, key) for number, keys in enumerate(rounds) for key in keys]
    found = set()
    for number, key in made:
        _, threshold, window, own = _rule(loop, key[0])
        among = [entry for entry in made if entry[1][0] == key[0]] if own else made
        among = among[-window:]
        if number != len(rounds) - 1 or (number, key) not in among or key[2] is None:
            continue
        equal = [other for other, same in among if same == key]
        last = equal[-threshold:]
        between = [
            other for other in range(last[0], last[-1]) if other not in last and rounds[other]
        ]
        new = [other for other in between if set(rounds[other]) not in map(set, rounds[:other])]
        if len(equal) >= threshold and len(new) <= threshold - 2:
            found.add((key[0], len(equal)))
    if found:
        return {item for item in found if item[1] == max(count for _, count in found)}
    if not made or made[-1][0] != len(rounds) - 1:
        return set()
    every = [key for _, key in made]
    for length in range(2, loop["max_cycle"] + 1):
        members = every[-length:]
        times = max(_rule(loop, name)[1] for name, _, _ in members)
        times = times if length < 5 else max(2, times - 1)
        known = all(result is not None for _, _, result in members)
        if known and len(set(members)) == length and every[-length * times :] == members * times:
            return {(" ".join(dict.fromkeys(name for name, _, _ in members)), times)}
    return set()


_CALLS = st.lists(
    st.tuples(
        st.sampled_from(["f", "g", "wait_for_it", "poll"]),
        st.sampled_from([{}, {"a": 1, "b": [1, None]}, {"a": 2}]),
    ),
    min_size=1,
    max_size=3,
).map(tuple)
_TURNS = st.builds(
    lambda calls, results, user: Did(calls, tuple(results[: len(calls)]), user),
    _CALLS,
    st.lists(st.sampled_from(["x", "x", "y"]), min_size=1, max_size=3),
    st.sampled_from(["", "", "", "", "go on"]),
) | st.sampled_from([_TALK, _TALK._replace(user="go on")])
_HISTORIES = st.builds(
    lambda before, again, times, after: [*before, *again * times, *after],
    st.lists(_TURNS, max_size=4),
    st.lists(_TURNS.map(lambda turn: turn._replace(user="")), max_size=4),
    st.integers(1, 5),
    st.lists(_TURNS, max_size=1),
)
_LOOPS = st.fixed_dictionaries(
    {
        "threshold_identical_requests": st.integers(2, 4),
        "window_calls": st.integers(4, 10),
        "max_cycle": st.integers(1, 5),
        "compare_results": st.booleans(),
        "reset_on_user_message": st.booleans(),
        "tools": st.fixed_dictionaries(
            {},
            optional={
                "poll": st.fixed_dictionaries(
                    {"threshold": st.integers(2, 6), "window_calls": st.integers(6, 12)}
                ),
                "wait*": st.just({"allow": True}),
                "*": st.fixed_dictionaries({"threshold": st.integers(2, 3)}),
                "w*t": st.just({"threshold": 2}),
            },
        ),
    }
)


@given(_HISTORIES, _LOOPS)
@example([_A, _B] * 3, {"window_calls": 3})
@example([join(_A, _B)] * 3, {})
@example([join(_A, call("f"))] * 3, {"window_calls": 4})
@example([_A, _SAID, _A], {"reset_on_user_message": False})
@example(
    [join(_A, _A)._replace(results=("x",))] * 2 + [_A._replace(results=("x",))],
    {"threshold_identical_requests": 2, "window_calls": 4},
)
def test_every_api_gets_the_verdict_of_the_oracle(turns: list[Did], loop: dict[str, Any]) -> None:
    """If results are missing, calls with ids lack the last ones, others the first ones."""
    missing: Any = None
    last = [
        turn._replace(results=(missing,) * (len(turn.calls) - len(turn.results)) + turn.results)
        for turn in turns
    ]
    by_id, by_order = oracle(turns, loop) or {("", 0)}, oracle(last, loop) or {("", 0)}

    for name, write in SHAPES.items():
        told = judge(write(turns), **loop)
        assert (told.tool, told.count) in (by_order if name in {"gemini", "ollama"} else by_id)
        assert ("the same result" in told.what) == (
            told.rule == "calls" and loop.get("compare_results", True)
        )


@pytest.mark.parametrize(
    ("name", "tools"),
    [
        ("chat_stuck", "search_docs"),
        ("chat_legacy_functions", "get_weather"),
        ("chat_custom_tool", "run_sql"),
        ("responses_stuck", "search_docs"),
        ("responses_custom_tool", "run_sql"),
        ("anthropic_stuck", "search_docs"),
        ("anthropic_image_result", "screenshot"),
        ("anthropic_cycle", "edit_file run_tests"),
        ("chat_parallel_calls", ""),
        ("chat_polling", ""),
        ("chat_image", ""),
        ("chat_refusal", ""),
        ("responses_parallel_calls", ""),
        ("responses_image", ""),
        ("responses_text", ""),
        ("anthropic_parallel_calls", ""),
        ("anthropic_answered", ""),
    ],
)
def test_loops_in_recorded_requests_are_found(name: str, tools: str) -> None:
    assert judge(BODIES[name], window_calls=4).tool == tools


@pytest.mark.parametrize(
    "data",
    [
        *[
            BODIES[name]
            for name in (
                "responses_previous",
                "responses_conversation",
                "completions_prompt",
                "completions_tokens",
            )
        ],
        b'{"input":"a","previous_response_id":"r"}',
        b'{"input":[{"role":"user","content":"a"}],"conversation":"c"}',
    ],
    ids=lambda data: data.decode()[:40],
)
def test_request_without_history_is_uncounted(data: bytes) -> None:
    assert find_reason(data, similarity="tool_calls") == "no_history"


CASES: dict[str, tuple[list[Did], dict[str, Any], int]] = {
    "at the threshold": ([_A] * 3, {}, 3),
    "below it": ([_A] * 2, {}, 0),
    "past it": ([_A] * 7, {}, 7),
    "past the window": ([_A] * 20, {}, 10),
    "at once": ([join(_A, _A, _A)], {}, 0),
    "at once is one round": ([join(_A, _A), _A, join(_A, _A, _A)], {}, 3),
    "edit, run, edit, run": ([_A, _NEW[0], _A, _NEW[1], _A], {}, 0),
    "one new round between": ([_A, _NEW[0], _A, _A], {}, 3),
    "nothing new between": ([_NEW[0], _NEW[1], _A, _NEW[0], _A, _NEW[1], _A], {}, 3),
    "beside what is new": ([join(_A, new) for new in _NEW], {}, 3),
    "a cycle of five comes round twice": ([call(name) for name in "abcde" * 2], {}, 2),
    "a cycle of four does not": ([call(name) for name in "abcd" * 2], {}, 0),
    "a cycle of ten": ([call(name) for name in "abcdefghij" * 2], {}, 2),
    "a cycle of eleven": ([call(name) for name in "abcdefghijk" * 2], {}, 0),
    "others between": ([_A, _B, _A, _B, _B, _A], {}, 3),
    "out of the window": ([_A, _A, _B, _A], {"window_calls": 3}, 0),
    "not in the last turn": ([_A, _A, _A, _B], {}, 0),
    "beside another in the last turn": ([_A, _A, join(_A, _B)], {}, 3),
    "an answer since": ([_A, _A, _A, _TALK], {}, 0),
    "an answer since, and words that do not count": (
        [_A, _A, _A, _TALK._replace(user="Then something else.")],
        {"reset_on_user_message": False},
        0,
    ),
    "talk between": ([_A, _TALK, _A, _TALK, _A], {}, 3),
    "a user's word between": ([_A, _SAID, _A], {}, 0),
    "a user who does not count": ([_A, _SAID, _A], {"reset_on_user_message": False}, 3),
    "a user's word since": ([_A, _A, _SAID], {}, 0),
    "progress": ([call("f", f"{percent}%") for percent in range(9)], {}, 0),
    "progress or not": ([call("g", f"{n}") for n in range(3)], {"compare_results": False}, 3),
    "other arguments": ([call("f", n=n) for n in range(9)], {}, 0),
    "other tools": ([call(name) for name in "abc"], {}, 0),
    "no result yet": ([_A, _A, _OPEN], {}, 0),
    "no result needed": ([_A, _A, _OPEN], {"compare_results": False}, 3),
    "an empty result": ([_A, _A, _A._replace(results=("",))], {}, 0),
    "empty results": ([_A._replace(results=("",))] * 3, {}, 3),
    "a tool's own window in one turn": (
        [join(_B, _B, *[call(f"h{number}") for number in range(11)])],
        {"tools": {"g": {"threshold": 2, "window_calls": 20}}},
        0,
    ),
    "a tool's own window is of its own calls": (
        [*[turn for _ in range(3) for turn in (_B, *[call("h", n=n % 2) for n in range(6)])], _B],
        {"tools": {"g": {"threshold": 4, "window_calls": 4}}},
        4,
    ),
    "a cycle longer than the window": ([_A, _B] * 3, {"window_calls": 3}, 3),
    "half a round less": ([*[_A, _B] * 2, _A], {"window_calls": 3}, 0),
    "no cycles wanted": ([_A, _B] * 3, {"window_calls": 3, "max_cycle": 1}, 0),
    "a shorter cycle wanted": (
        [call(name) for name in "abcd" * 3],
        {"window_calls": 3, "max_cycle": 3},
        0,
    ),
    "a cycle that holds a call twice": ([_A, _B, _B] * 4, {"window_calls": 3}, 0),
    "a cycle of one turn": ([join(_A, _B)] * 3, {"window_calls": 3}, 3),
    "a cycle cut by the user": (
        [_A, _B, _A, _B._replace(user="go on"), _A, _B],
        {"window_calls": 3},
        0,
    ),
    "allowed": ([_A] * 3, {"tools": {"f": {"allow": True}}}, 0),
    "left out": ([_A, _B, _A, _A], {"window_calls": 3, "tools": {"g": {"allow": True}}}, 3),
    "a tool's own threshold": ([_A] * 3, {"tools": {"f": {"threshold": 4}}}, 0),
    "a tool's lower threshold": ([_A] * 2, {"tools": {"f": {"threshold": 2}}}, 2),
    "a tool's own window": ([_A] * 15, {"tools": {"f": {"threshold": 15, "window_calls": 20}}}, 15),
    "the higher": ([_A, _B] * 3, {"window_calls": 4, "tools": {"f": {"threshold": 4}}}, 0),
}


@pytest.mark.parametrize(("turns", "more", "count"), CASES.values(), ids=CASES)
def test_repeated_calls_and_cycles_are_loops(
    turns: list[Did], more: dict[str, Any], count: int
) -> None:
    found = {name: judge(write(turns), **more).count for name, write in SHAPES.items()}

    assert found == dict.fromkeys(SHAPES, count)


def name_all(shape: str, histories: Sequence[Sequence[Did]], **more: Any) -> list[str]:  # noqa: ANN401  # of loop_detection
    return [
        told.fingerprint
        for told in tell_all(map(SHAPES[shape], histories), similarity="tool_calls", **more)
    ]


@every_shape
def test_cycle_is_named_in_order_of_its_calls(shape: str) -> None:
    """For a cooldown, one more call of the cycle continues it."""
    cycles = [
        [call(name) for name in names] for names in ("abcabcabc", "bcbcbc", "ccc", "bcabcabca")
    ]

    assert judge(SHAPES[shape]([call(name) for name in "abcd" * 3]), window_calls=3)[1:3] == (
        3,
        "a b c d",
    )
    one, same, again, other = name_all(shape, cycles, window_calls=3)
    assert one == same == again != other


@every_shape
def test_tool_arguments_and_result_are_compared(shape: str) -> None:
    calls = [_A, call("g", a=1), call("f", a="1"), call("f", "y", a=1)]
    histories = [[_A] * 9, *[[each] * 3 for each in calls]]

    first, *names = name_all(shape, histories)
    assert first == names[0]
    assert len(set(names)) == 4
    assert len(set(name_all(shape, histories, compare_results=False))) == 3


@every_shape
def test_reason_of_a_tool_is_in_the_message(shape: str) -> None:
    more = {"tools": {"g": {"reason": "Ask a human."}}, "window_calls": 3}

    said = [
        judge(SHAPES[shape](turns), **more).more for turns in ([_B] * 3, [_B, _A] * 3, [_A] * 3)
    ]

    assert [text.startswith("Ask a human.") for text in said] == [True, True, False]


@pytest.mark.parametrize(
    ("tools", "name", "threshold"),
    [
        ({"a*": 5, "ab": 6}, "ab", 6),
        ({"a*": 5, "*b": 6}, "ab", 5),
        ({"*b": 6, "a*": 5}, "ab", 6),
        ({"*": 5}, "", 5),
        ({"*": 5}, "x\ny", 5),
        ({"a*c": 5}, "ac", 5),
        ({"a*c": 5}, "acd", 3),
        ({"*b": 5}, "aba", 3),
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
def test_entry_of_a_tool_goes_before_patterns(
    tools: dict[str, int], name: str, threshold: int
) -> None:
    limits = {pattern: {"threshold": number} for pattern, number in tools.items()}

    refused = [times for times in range(2, 8) if loops(as_chat([call(name)] * times), tools=limits)]

    assert refused[0] == threshold


def _insert(place: int, *messages: dict[str, Any]) -> dict[str, Any]:
    """A chat of three equal calls with more messages among them."""
    value = as_chat([_A] * 3)
    value["messages"][place:place] = messages
    return value


def _beside(*blocks: dict[str, Any]) -> dict[str, Any]:
    """Three equal calls, and a message with these blocks before the last."""
    value = as_anthropic([_A] * 3)
    value["messages"].insert(-2, {"role": "user", "content": list(blocks)})
    return value


_RESULT = {"type": "tool_result", "tool_use_id": "other", "content": "x"}
_LOOK = {"type": "text", "text": "look"}
_WRAPPED = {
    "<system-reminder>Be brief.</system-reminder>": True,
    "<a>1</a>\n<b x='y'>2</b>\n": True,
    "<a>1</a> and you?": False,
    "<a>1</b>": False,
    "< a>1</ a>": False,
    "": False,
}
SPOKEN: dict[str, tuple[dict[str, Any], bool]] = {
    "a result": (_beside(_RESULT), True),
    "two results": (_beside(_RESULT, _RESULT), True),
    "a result and a text": (_beside(_RESULT, _LOOK), False),
    "a text": (_beside(_LOOK), False),
    "an image": (_beside({"type": "image", "source": {}}), False),
    "nothing": (_beside(), False),
    **{
        f"a message of {role}": (_insert(-2, {"role": role, "content": "note"}), loops_on)
        for role, loops_on in {
            "system": False,
            "developer": False,
            "user": False,
            "assistant": True,
            "tool": True,
        }.items()
    },
    **{
        f"behind a result: {text}": (_insert(8, {"role": "user", "content": text}), on)
        for text, on in _WRAPPED.items()
    },
    **{
        f"beside a result: {text}": (
            as_anthropic([_A, _A._replace(user=text) if text else _A, _A]),
            on,
        )
        for text, on in _WRAPPED.items()
        if text
    },
    "tags without a result": (
        as_chat([_A, _A, _TALK._replace(user="<task>Go on.</task>"), _A]),
        False,
    ),
}


@pytest.mark.parametrize(("body", "expected"), SPOKEN.values(), ids=SPOKEN)
def test_words_of_a_user_start_anew(body: dict[str, Any], expected: bool) -> None:
    """Messages of any role but `assistant` and `tool` start anew, except text in tags."""
    assert loops(body) is expected


def test_failure_differs_from_its_text() -> None:
    value = as_anthropic([_A] * 3)
    results = [message["content"][0] for message in value["messages"][2::2]]

    found = []
    for result in reversed(results):
        result["is_error"] = True
        found.append(loops(value))

    assert found == [False, False, True]


def _rename(body: dict[str, Any], to: str) -> dict[str, Any]:
    r"""A body with other ids; `\1` is the place of a call in its turn."""
    renamed: dict[str, Any] = json.loads(
        re.sub(r'"(?:c|fc|toolu_|t)\d+[-_](\d)"', f'"{to}"', json.dumps(body))
    )
    return renamed


@every_shape
@pytest.mark.parametrize("identity", [r"call_1\1", r"\1", r"é\1"])
def test_ids_may_repeat_in_every_turn(shape: str, identity: str) -> None:
    stuck = SHAPES[shape]([join(_A, _B)] * 3)
    moving = SHAPES[shape]([join(call("f", f"{n}", a=1), call("g", f"{n + 1}")) for n in range(5)])

    assert judge(_rename(stuck, identity))[:3] == judge(stuck)[:3]
    assert not loops(_rename(moving, identity))


@every_shape
def test_parallel_calls_may_share_an_id(shape: str) -> None:
    body = SHAPES[shape]([join(_A, call("g", f"{number}")) for number in range(3)])

    assert judge(_rename(body, "")).tool == "f"


@pytest.mark.parametrize("order", ["reversed", "twice", "early", "alone", "missing"])
def test_results_find_their_calls_in_any_order(order: str) -> None:
    value = as_chat([join(_A, _B)] * 3)
    messages = value["messages"]
    if order == "reversed":
        messages[-2:] = messages[:-3:-1]
    elif order == "twice":
        messages.append(messages[-1])
    elif order == "early":
        messages.insert(0, {"role": "tool", "tool_call_id": "c1-0", "content": "early"})
    elif order == "alone":
        messages.append({"role": "tool", "tool_call_id": "unknown", "content": "alone"})
    else:
        del messages[-2]

    told = judge(value)

    assert told.count == 3
    assert order != "missing" or told.tool == "g"


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["chat"])
def test_loop_at_end_of_long_history_is_found(shape: str) -> None:
    turns = [*[call(f"f{number}") for number in range(MAX_STEPS)], _A, _A, _A]

    assert judge(SHAPES[shape](turns), max_inspect_bytes=2**24).count == 3


@every_shape
def test_compared_calls_are_shown(shape: str) -> None:
    keys = {
        "similarity": "tool_calls",
        "threshold_identical_requests": 3,
        "tools": {"wait*": {"allow": True}},
    }
    looks = ToolCalls(LoopDetection.model_validate(keys))
    turns = [call("f", "x y", a=1), call("wait_for_it"), _B]

    assert looks.show(Document(json.dumps(SHAPES[shape](turns)).encode())) == [
        'f | {"a":1} | result | x y',
        "g | {} | result | x",
    ]
    assert looks.show(Document(json.dumps(SHAPES[shape]([])).encode())) == [NO_CALLS]
