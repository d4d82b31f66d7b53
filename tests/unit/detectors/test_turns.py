"""Loops that `turns` finds in each API and in each style of action.

`test_verdicts` has the oracle.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

from extproc.detectors.turns import Turns
from extproc.policy.bundle import LoopDetection
from extproc.request.document import Document
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.loops import WRITERS, Write
from tests.support.model_requests import HOSTILE
from tests.support.service import FailingStore, make_service, sample
from tests.support.sessions import agents, waits_for_store
from tests.support.told import is_loop, read_told, send, tell, tell_all, tell_session
from tests.support.turn_writers import (
    SHAPES,
    STYLES,
    Did,
    as_anthropic,
    as_chat,
    as_responses,
    as_text,
)

Meaning = tuple[str, str]  # an action and a result


def find_rule(value: object, **loop: Any) -> str:  # noqa: ANN401  # of loop_detection
    """The rule by which a request is refused; `note` if it only gets a note."""
    told = tell(value, **loop)
    return told.rule if told.action == "reject" else {"allow": "", "warn": "note"}[told.action]


def means(turns: Sequence[Meaning]) -> list[Did]:
    return [
        Did(
            ((action, {"path": f"src/{action}.py", "n": 1}),),
            (dressed(result, number),),
            thought=f"Thought no. {number}!",
        )
        for number, (action, result) in enumerate(turns)
    ]


def dressed(result: str, number: int) -> str:
    if not result:
        return ""
    clock = f"2026-11-{number % 28 + 1:02d}T10:{number % 60:02d}:07.{number}Z"
    return (
        f"[{clock}] {result} (line {number}, took {number}.5 ms, pid={number}) in "
        f"/tmp/run-{number}/x at a.py:{number}"  # noqa: S108  # no file
    )


_A, _B = ("view", "ok"), ("run", "3 failed")


def new(number: int) -> Meaning:
    return f"tweak{number}", "ok"


STUCK: dict[str, tuple[list[Meaning], str]] = {
    "at the threshold": ([_A] * 3, "repeat"),
    "below it": ([_A] * 2, ""),
    "past it": ([_A] * 9, "repeat"),
    "empty results": ([("view", "")] * 3, "repeat"),
    "one new turn in between": ([_A, new(1), _A, _A], "repeat"),
    "two new turns in between": ([_A, new(1), _A, new(2), _A], ""),
    "edit, run, edit, run": ([turn for n in range(6) for turn in (new(n), _B)], ""),
    "edit, run, with the same edit": ([new(0), _B] * 3, "cycle"),
    "turns in between that were seen before": (
        [new(1), new(2), _A, new(1), _A, new(2), _A],
        "repeat",
    ),
    "first and last of ten turns": ([_A, *[new(1)] * 6, _A, new(1), _A], "repeat"),
    "first and last of eleven turns": ([_A, *[new(1)] * 7, _A, new(1), _A], ""),
    "nothing new": (
        [_A, _B, new(0), new(1), _A, new(1), new(0), _B, _A, new(2), new(1), new(0)],
        "note",
    ),
    "a cycle of four": ([("a", "1"), ("b", "2"), ("c", "3"), ("d", "4")] * 3, "cycle"),
    "a cycle of four, a round short": ([("a", "1"), ("b", "2"), ("c", "3"), ("d", "4")] * 2, ""),
    "a cycle of five comes round twice": ([(name, "ok") for name in "abcde"] * 2, "cycle"),
    "a cycle of ten": ([(name, "ok") for name in "abcdefghij"] * 2, "cycle"),
    "a cycle of eleven": ([(name, "ok") for name in "abcdefghijk"] * 2, ""),
    "a cycle whose results change": ([(name, str(n)) for n, name in enumerate("abcde" * 2)], ""),
    "the same error, whatever is tried": (
        [(f"try{n}", "error: no such table") for n in range(6)],
        "error",
    ),
    "the same error, five times": ([(f"try{n}", "error: no such table") for n in range(5)], ""),
    "an error with other numbers": (
        [(f"try{n}", f"error: job no. {n} is broken") for n in range(6)],
        "note",
    ),
    "an error, and sometimes none": (
        [(f"try{n}", "ok" if n % 3 == 1 else "error: no x") for n in range(10)],
        "note",
    ),
    "an error with other numbers, five times": (
        [(f"try{n}", f"error: job no. {n} is broken") for n in range(5)],
        "",
    ),
    "an error with numbers that count failures": (
        [(f"try{n}", f"{20 - n} tests failed") for n in range(10)],
        "",
    ),
    "the same success, whatever is done": ([(f"tweak{n}", "done") for n in range(9)], ""),
    "paging": ([(f"page{n}", f"rows {n}0 to {n}9") for n in range(9)], ""),
    "scrolling": ([("scroll", f"rows {n}0 to {n}9") for n in range(9)], ""),
    "polling with another answer each time": ([("status", f"{n}0 %") for n in range(9)], ""),
    "not the newest": ([_A, _A, _A, new(1)], ""),
}


@pytest.mark.slow
@pytest.mark.parametrize(("turns", "rule"), STUCK.values(), ids=STUCK)
def test_repeats_cycles_and_errors_are_loops(turns: list[Meaning], rule: str) -> None:
    found = {name: find_rule(write(means(turns))) for name, write in WRITERS.items()}

    assert found == dict.fromkeys(WRITERS, rule)


@pytest.mark.parametrize("shape", SHAPES)
def test_parallel_calls_are_one_turn(shape: str) -> None:
    once = Did((("f", {"a": 1}),) * 3, ("x",) * 3)
    mixed = [Did((("f", {"a": 1}),) * (n + 1), ("x",) * (n + 1)) for n in range(3)]
    one = Did((("f", {"a": 1}), ("g", {})), ("x", "y"))
    other = Did((("g", {}), ("f", {"a": 1})), ("y", "x"))

    assert not is_loop(SHAPES[shape]([Did((("g", {}),), ("y",)), once]))
    assert tell(SHAPES[shape](mixed))[:3] == ("reject", 3, "f")
    assert is_loop(SHAPES[shape]([one, other, one]))
    assert not is_loop(SHAPES[shape]([one, one._replace(results=("y", "x")), one]))


_VOLATILE = (
    st.uuids().map(str),
    st.datetimes().map(lambda moment: moment.isoformat()),
    st.datetimes().map(
        lambda moment: f"{moment:%a %b} {moment.day} {moment:%H:%M:%S} {moment.year:04d}"
    ),
    st.times().map(lambda moment: f"{moment:%H:%M:%S}"),
    st.tuples(
        st.integers(0, 10**6), st.sampled_from(["ms", "s", " seconds", " minutes", "h", " ms"])
    ).map("{0[0]}{0[1]}".format),
    st.floats(0, 1e4).map("{:.2f}s".format),
    st.binary(min_size=4, max_size=32).map(bytes.hex).filter(lambda text: not text.isdecimal()),
    st.integers(1_500_000_000, 1_999_999_999).map(str),
)
# Never opened
_PATHS = st.from_regex(r"/tmp/[a-z0-9_.-]{1,12}(/[a-z0-9]{1,8})?", fullmatch=True)  # noqa: S108
_NUMBERED = ["line {}", "Line: {}", "Step {}/20", "pid={}", "port: {}", "x/a.py:{}"]


@given(st.data(), st.sampled_from(sorted(WRITERS)))
def test_volatile_parts_hide_no_loop(data: st.DataObject, writer: str) -> None:
    kinds = data.draw(st.lists(st.sampled_from([*_VOLATILE, _PATHS]), min_size=1, max_size=4))
    formats = data.draw(st.lists(st.sampled_from(_NUMBERED), max_size=4))
    turns = []
    for number in range(3):
        numbers = [form.format(data.draw(st.integers(0, 10**6))) for form in formats]
        result = " and ".join(["3 failed", *[data.draw(kind) for kind in kinds], *numbers, "end"])
        turns.append(Did((("run", {"a": 1}),), (result,), thought=f"no. {number}"))

    assert is_loop(WRITERS[writer](turns))


def run(*results: str, said: str = "", tool: str = "run", **arguments: object) -> list[Did]:
    """The same call with each of these results; `@` is the number of the turn."""
    return [
        Did(
            ((tool, {name: put(value, number) for name, value in arguments.items()}),),
            (result,),
            put(said, number),
        )
        for number, result in enumerate(results)
    ]


def put(value: Any, number: int) -> Any:  # noqa: ANN401  # JSON
    return value.replace("@", str(number)) if isinstance(value, str) else value


def say(*pairs: tuple[str, str], role: str = "user") -> dict[str, Any]:
    messages = [{"role": "user", "content": "go"}]
    for said, back in pairs:
        messages += [{"role": "assistant", "content": said}, {"role": role, "content": back}]
    return {"messages": messages}


def follow(body: dict[str, Any], *messages: dict[str, Any]) -> dict[str, Any]:
    return {**body, "messages": [*body["messages"], *messages]}


_ONCE = as_chat(run("x"))["messages"][2:]
_DETAILS = "<environment_details>Context: {} tokens</environment_details>"
_SMOLAGENTS = (
    "Look {0}.\nCalling tools:\n[{{'id': 'call_{0}', 'function': {{'name': 'find', "
    "'arguments': {{'id': '{1}'}}}}}}]"
)
_UNNAMED = (
    "Thought: look.\n<code>\nprint(1)\n</code>\nCalling tools:\n[{{'id': 'call_{}', "
    "'function': {{'name': 'python'}}}}]"
)
_GONE = (
    "Error:\nError executing tool 'read' with arguments {{'path': '{0}'}}: FileNotFoundError: "
    "{0}\nNow let's retry."
)
_UNKNOWN = "Error:\nUnknown tool read, should be one of: look.\nNow let's retry."
_INJECTED = "<system-reminder>Turn @</system-reminder>\n<note>@</note>"
_FENCE = WRITERS["text, fence"]

LOOPS: dict[str, dict[str, Any]] = {
    "the same thoughts of a tool for thinking": as_chat(
        [Did((("think", {"thought": "so"}),), ("logged",))] * 3
    ),
    "a text before a call, as a message of its own": {
        "messages": [
            each
            for n in range(3)
            for each in ({"role": "assistant", "content": f"Thought {n}"}, *_ONCE)
        ]
    },
    "no results at all": as_chat([Did((("run", {"a": 1}),))] * 3),
    "tags beside a result": as_anthropic(run(*"xxx", said=_INJECTED)),
    "tags behind a result": as_chat(run(*"xxx", said=_INJECTED)),
    "the same tags beside empty results": as_chat(run("", "", "", said="<view>one</view>")),
    "details of the environment beside a text": {
        "messages": [
            message
            for n in range(3)
            for message in (
                {
                    "role": "assistant",
                    "content": "<execute_command>\n<command>npm test</command>\n</execute_command>",
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": text} for text in ("3 failed", _DETAILS.format(n))
                    ],
                },
            )
        ]
    },
    "the same details alone": _FENCE(run(*[_DETAILS.format(1)] * 3)),
    **{
        f"a reminder of its own by {role}, {write.__name__}": follow(
            write(run(*"xxx")), {"role": role, "content": "Use them."}
        )
        for role in ("system", "developer")
        for write in (as_chat, as_anthropic)
    },
    **{
        f"{role} alone brings back the same": say(*[("Look.", "1 file")] * 3, role=role)
        for role in ("system", "developer")
    },
    **{
        f"new words of {role} behind each result": {
            "messages": [
                each
                for n in range(3)
                for each in (*_ONCE, {"role": role, "content": f"{n} files are open"})
            ]
        }
        for role in ("system", "developer")
    },
    **{
        f"a word of {role} behind a turn without an action": {
            "messages": [
                *_ONCE * 3,
                {"role": "assistant", "content": "Done."},
                {"role": role, "content": "Go on."},
                *_ONCE,
            ]
        }
        for role in ("system", "developer")
    },
    "the number of a call before an observation": say(
        *[(_UNNAMED.format(n), f"Call id: call_{n}\nError:\nForbidden function") for n in range(3)]
    ),
    "calls in a text": say(
        *[(_SMOLAGENTS.format(n, "a"), "Observation:\nno rows") for n in range(3)]
    ),
    "a call that only its error shows": say(
        *[(f"Thought {n}: look.", _GONE.format("a")) for n in range(3)]
    ),
    "a tool that only its error shows": say(*[(f"Thought {n}: look.", _UNKNOWN) for n in range(3)]),
    "keys of other APIs": {"input": 7, "contents": "x", **as_chat(run(*"xxx"))},
    "durations in a result": as_chat(run("done in 0.3s", "done in 1.3s", "done in 2.3s")),
}
PROGRESS: dict[str, dict[str, Any]] = {
    "no results at all, twice": as_chat([Did((("run", {"a": 1}),))] * 2),
    "words beside tags": as_anthropic(run(*"xxx", said=f"{_INJECTED} and you?")),
    "other tags as results": as_anthropic(run(*[put(_INJECTED, n) for n in range(3)])),
    **{
        f"{tag} beside a result, {write.__name__}": write(
            run(*["Scrolled."] * 3, said=f"<{tag}>page @</{tag}>")
        )
        for tag in ("browser_state", "observation", "function_results", "feedback", "user_query")
        for write in (as_anthropic, as_chat)
    },
    "other tags beside empty results": as_chat(run("", "", "", said="<view>no. x@</view>")),
    "other details alone": _FENCE(
        run(*[f"<environment_details>Open: {name}</environment_details>" for name in "abc"])
    ),
    **{
        f"{role} alone brings back another text": say(
            *[("Look.", "1 file")] * 2, ("Look.", "2 files"), role=role
        )
        for role in ("system", "developer")
    },
    "a person's word behind a turn without an action": {
        "messages": [
            *_ONCE * 3,
            {"role": "assistant", "content": "Done."},
            {"role": "user", "content": "Go on."},
            *_ONCE,
        ]
    },
    "the number of a call alone": say(
        *[(_UNNAMED.format(n), f"Call id: call_{n}") for n in range(3)]
    ),
    "calls in a text with other ids": say(
        *[(_SMOLAGENTS.format(n, "abc"[n]), "Observation:\nno rows") for n in range(3)]
    ),
    "other calls that only their errors show": say(
        *[(f"Thought {n}: look.", _GONE.format("abc"[n])) for n in range(3)]
    ),
}


@pytest.mark.parametrize(
    ("body", "expected"),
    [*((body, True) for body in LOOPS.values()), *((body, False) for body in PROGRESS.values())],
    ids=[*LOOPS, *PROGRESS],
)
def test_texts_beside_results_count_if_they_are_content(
    body: dict[str, Any], expected: bool
) -> None:
    assert is_loop(body) is expected


@pytest.mark.parametrize("write", [as_chat, as_anthropic, _FENCE])
def test_tags_of_a_harness_are_no_part_of_results(write: Write) -> None:
    """A tag that is not closed is part of the text."""

    def stuck(start: str, end: str, rest: str = "") -> bool:
        return is_loop(
            write(run(*[f"3 failed{start}Open: a.py, {n} tokens{end}{rest}" for n in range(3)]))
        )

    for tag in ("environment_details", "system-reminder"):
        assert stuck(f"\n\n<{tag}>", f"</{tag}>")
        assert stuck(f" <{tag}>", f"</{tag}>", f" 5 passed <{tag}>x</{tag}>")
        assert not stuck(f"\n\n<{tag}>", "")
    assert not stuck("\n\n<log>", "</log>")


def test_normalize_results_false_compares_bytes() -> None:
    assert not is_loop(LOOPS["durations in a result"], normalize_results=False)
    assert is_loop(as_chat(run(*["done in 0.3s"] * 3)), normalize_results=False)


@pytest.mark.parametrize(
    "key",
    ["memory", "current_state", "thought", "reasoning", "evaluation_previous_goal", "next_goal"],
)
def test_thoughts_among_arguments_are_ignored(key: str) -> None:
    body = as_chat(run(*"xxx", index=4, **{key: "thought @"}))

    assert is_loop(body)
    assert not is_loop(body, ignore_arguments=["note"])
    assert is_loop(as_chat(run(*"xxx", note="@")), ignore_arguments=["note"])


@pytest.mark.parametrize("key", ["description", "goal", "summary", "timeout", "yield_time_ms"])
def test_description_of_a_command_is_ignored(key: str) -> None:
    """In a call without a command, these arguments may be all that it does."""
    said: dict[str, Any] = {key: "word @"}
    same: list[dict[str, Any]] = [{"command": "make test"}, {"cmd": ["make", "test"]}]
    other: list[dict[str, Any]] = [{"path": "a.py"}, {"command": "create"}, {"command": "make @"}]

    for write in SHAPES.values():
        found = [
            is_loop(write(run(*"xxx", tool="create", **given, **said))) for given in same + other
        ]
        assert found == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("tools", "times", "expected"),
    [
        ({"run": {"threshold": 3, "allow": True}}, 4, 0),
        ({"r*": {"threshold": 5}}, 4, 0),
        ({"r*": {"threshold": 4, "reason": "Ask a human."}}, 4, 4),
        ({"other": {"threshold": 3, "allow": True}}, 4, 4),
        ({"run": {"threshold": 14}}, 13, 0),
        ({"run": {"threshold": 14}}, 14, 14),
    ],
)
@pytest.mark.parametrize("writer", ["chat", "text, fence"])
def test_tools_have_their_own_thresholds(
    tools: dict[str, Any], times: int, expected: int, writer: str
) -> None:
    """A tool is matched by its name, or by the first word of a text action."""
    told = tell(WRITERS[writer](run(*["x"] * times, a=1)), tools=tools)

    assert (told.count, told.tool) == (expected, "run" if expected else "")
    assert told.more.startswith(tools.get("r*", {}).get("reason", ""))


@pytest.mark.parametrize(
    ("threshold", "between", "expected"),
    [(20, 0, 20), (20, 12, 20), (20, 13, 0), (30, 2, 30), (30, 3, 0)],
)
def test_high_threshold_counts_32_turns_of_the_store(
    threshold: int, between: int, expected: int
) -> None:
    poll = Did((("poll_job_status", {"id": 7}),), ("running",))
    work = [
        Did((("tweak", {"part": number}),), (f"part no. {number}",)) for number in range(between)
    ]
    done = [poll, *work, *[poll] * (threshold - 1)]
    turns = [
        turn._replace(thought=f"Thought no. {number}", number=number)
        for number, turn in enumerate(done, 1)
    ]
    requests = [as_chat(turns[max(0, end - 3) : end]) for end in range(1, len(turns) + 1)]

    told = tell_all(requests, tools={"poll_job_status": {"threshold": threshold}})

    assert [each.count for each in told] == [0] * (len(turns) - 1) + [expected]


@pytest.mark.parametrize(
    ("action", "error", "named"),
    [
        (
            {"content": "Look."},
            "Error:\nError executing tool 'read_file' with arguments {'path': 'a'}: gone",
            "read_file",
        ),
        ({"content": _SMOLAGENTS.format(1, 1)}, "no rows", "find"),
        ({"content": "Let me look."}, "Error: no such file", "the same message"),
        (
            {"tool_calls": [{"id": "c", "function": {"name": "", "arguments": "{}"}}]},
            "Error: no name",
            "the same call",
        ),
    ],
)
def test_unnamed_turn_is_named_by_its_error(action: dict[str, Any], error: str, named: str) -> None:
    """Smolagents leaves out calls that failed; then the error names the tool."""
    turn = [{"role": "assistant", **action}, {"role": "user", "content": error}]

    assert tell({"messages": turn * 3}).what.startswith(f"3 of the last 3 turns were {named}")


@pytest.mark.parametrize("nothing", [[], None, {}], ids=repr)
def test_empty_tool_calls_leave_actions_in_texts(nothing: Any) -> None:  # noqa: ANN401  # a case
    body = _FENCE([Did((("cat", {"path": "notes"}),), ("error: no such file",))] * 4)
    for message in body["messages"]:
        if message["role"] == "assistant":
            message["tool_calls"] = nothing

    told = tell(body, threshold_identical_requests=4)

    assert (told.rule, told.count) == ("repeat", 4)


@pytest.mark.parametrize(
    ("shape", "mark", "marked"),
    [
        ("anthropic", '"type": "tool_result"', '"type": "tool_result", "is_error": true'),
        ("bedrock", '"status": "success"', '"status": "error"'),
        ("gemini", '"output":', '"error":'),
    ],
)
def test_result_marked_as_error_is_an_error(shape: str, mark: str, marked: str) -> None:
    text = json.dumps(SHAPES[shape]([Did(((f"try{n}", {}),), ("nope",)) for n in range(6)]))

    assert find_rule(text.encode()) == ""
    assert find_rule(text.replace(mark, marked).encode()) == "error"


def write_all(turns: Sequence[Did], shown: Sequence[int], write: Write = as_chat) -> list[bytes]:
    """An agent's requests, each with this many of its last turns."""
    turns = [turn._replace(number=number) for number, turn in enumerate(turns, 1)]
    ends = enumerate(shown, 1)
    return [json.dumps(write(turns[max(0, end - most) : end])).encode() for end, most in ends]


def _thread(
    write: Callable[[Sequence[Did]], dict[str, Any]], pointer: dict[str, Any], *results: str
) -> list[dict[str, Any]]:
    """Requests with only the newest result each, of a conversation that the server keeps."""
    bodies = []
    for number, result in enumerate(results, 1):
        body = write([Did((("f", {}),), (result,), number=number)])
        key = "messages" if "messages" in body else "input"
        bodies.append({**body, key: body[key][-1:], **pointer})
    return bodies


_REACT = write_all(means([_A] * 3), [1, 1, 1], lambda turns: as_text(turns, STYLES["react"]))
_OTHERS = write_all(means([_A] * 2), [1, 2])
_NEWEST = write_all(means([_A] * 3), [1, 1, 1])
_STARTED = [as_anthropic(means([new(n) for n in range(end)])[-2:]) for end in range(1, 8)]
_POINTERS: list[tuple[Write, dict[str, Any]]] = [
    (as_responses, {"previous_response_id": "r"}),
    (as_responses, {"conversation": {"id": "c"}}),
    (as_anthropic, {"thread": {"type": "continue", "previous_message_id": "m"}}),
]
SESSIONS: dict[str, tuple[Sequence[object], str]] = {
    "a retry, a count of tokens, another model": (
        [
            as_anthropic(means([_A])) | more
            for more in ({}, {}, {"max_tokens": 9}, {"model": "other"}, {"stream": True})
        ],
        "",
    ),
    "the newest turns": (write_all(means([_A] * 3), [1, 1, 1], as_anthropic), "repeat"),
    "a text that is sent again": ([_REACT[0]] * 5, ""),
    "texts": (_REACT, "repeat"),
    "the beginning of the next answer": (
        [follow(body, {"role": "assistant", "content": "{"}) for body in _STARTED],
        "",
    ),
    "a name that does not fit into an entry": (
        write_all([Did((("very_long_name_" * 9, {"n": 1}),), ("same",))] * 3, [1, 1, 1]),
        "repeat",
    ),
    "another conversation": ([*_OTHERS, as_chat(means([_B, _A]))], ""),
    "the same conversation": ([*_OTHERS, _NEWEST[2]], "repeat"),
    **{
        f"equal results, {pointer}": (_thread(write, pointer, *"xxx"), "result")
        for write, pointer in _POINTERS
    },
    **{
        f"empty results, {pointer}": (_thread(write, pointer, "", "", ""), "")
        for write, pointer in _POINTERS
    },
    **{
        f"results in turn, {pointer}": (_thread(write, pointer, *["ok", "3 failed"] * 4), "")
        for write, pointer in _POINTERS
    },
    "a user who says yes": (
        [{"previous_response_id": f"r{n}", "input": "yes"} for n in range(5)],
        "",
    ),
    "a user who says yes in a message": (
        [
            {"previous_response_id": f"r{n}", "input": [{"role": "user", "content": "yes"}]}
            for n in range(5)
        ],
        "",
    ),
}


@pytest.mark.parametrize(("requests", "rule"), SESSIONS.values(), ids=SESSIONS)
def test_session_supplies_turns_that_requests_leave_out(
    requests: Sequence[object], rule: str
) -> None:
    assert [told.rule for told in tell_session(requests)] == [*[""] * (len(requests) - 1), rule]


@pytest.mark.parametrize(
    ("body", "waits"),
    [
        (as_chat(means([_A])), True),
        (as_chat(means([_A] * 3)), False),
        (as_chat(means([new(n) for n in range(32)])), False),
        (as_chat(means([new(n) for n in range(31)])), True),
        (as_chat(means([*[new(n) for n in range(30)], ("view", "cut"), _A])), True),
        (as_chat([Did((("wait", {}),), ("x",))]), False),
        ({"previous_response_id": "r", "input": "yes"}, False),
    ],
    ids=[
        "few turns",
        "a loop",
        "as many turns as are looked at",
        "one less",
        "as many turns, and an equal action",
        "a tool that is allowed",
        "only a user speaks",
    ],
)
def test_only_undecided_requests_wait_for_the_ring(body: dict[str, Any], waits: bool) -> None:
    service = make_service(
        agents(tools={"wait": {"allow": True}}), store=FailingStore("nothing", later=True)
    )

    assert waits_for_store(service, json.dumps(body).encode(), session_id="s") == waits


_TRIED = means([(f"try{n}", "error: no such table") for n in range(6)])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            as_chat(means([_A] * 3)),
            "3 of the last 3 turns were view with the same input and the same result",
        ),
        (
            as_chat(means(STUCK["a cycle of four"][0])),
            "the last 12 turns were 3 rounds of the same 4 steps (a, b, c, d)",
        ),
        (as_chat(_TRIED), "the last 6 results were the same error, whatever was tried (try0, try1"),
        (say(*[("Go on?", "Go on?")] * 3), "3 of the last 3 turns were the same message"),
    ],
)
def test_message_says_what_repeated_and_what_to_do(body: dict[str, Any], said: str) -> None:
    told = tell(body)

    assert said in told.what
    assert "Progress means" in told.more


def test_message_about_a_thread_names_results() -> None:
    *_, last = tell_session(_thread(as_responses, {"conversation": "c"}, *"xxxx"))

    assert last.what == "4 of the last 4 turns returned the same result"


def test_cooldown_is_identified_by_the_newest_turn() -> None:
    looping, again, other = [
        as_chat(means(turns)) for turns in ([_A] * 3, [_B, *[_A] * 4], [_B] * 3)
    ]
    near = as_responses(means([_B, _A, new(1), _A, new(2), new(3), _A]))

    tripped, cooling, *others = tell_all(
        [looping, near, again, other, as_chat(means([_B, _A, _B]))], cooldown_seconds=9
    )

    assert cooling[:3] == ("reject", 2, "view")
    assert cooling.what == "view was part of a loop, and this same turn stays refused for a while"
    assert (
        tripped.fingerprint == cooling.fingerprint == others[0].fingerprint != others[1].fingerprint
    )
    assert [told.action for told in others] == ["reject", "reject", "reject"]


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_body_gets_a_verdict_or_reason(name: str) -> None:
    keys: dict[str, Any] = {
        "limit_keys": ["header:x-caller"],
        "session": {},
        "threshold_identical_requests": 2,
    }
    service = make_service(policy("p", ANY, similarity="turns", **keys))

    told = [
        read_told(send(service, HOSTILE[name][0](), "ann", session_id="s")).action for _ in range(2)
    ]

    assert sample(service, "fail_open_total", reason="internal_error") == 0
    assert told[0] in {"allow", "reject"}


def test_turns_are_shown_shortened() -> None:
    looks = Turns(LoopDetection(enabled=True, similarity="turns"))
    turns = [
        Did((("run", {"a": 1}),), ("3 failed",)),
        Did((("run", {"a": "x" * 999}),), ("y" * 999,)),
    ]

    first, second = looks.show(Document(json.dumps(as_chat(turns)).encode()))

    assert first == 'run | {"a":1} | 3 failed'
    assert len(second) < 999
    assert looks.show(Document(json.dumps(as_chat([])).encode())) == [
        "no turns: the assistant has not done anything yet"
    ]
