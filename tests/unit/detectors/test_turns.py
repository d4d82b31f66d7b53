"""Agents that are stuck, whatever API they use and however they write their actions, against a slow and obvious oracle."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from extproc.detectors.turns import Turns
from extproc.policy.bundle import LoopDetection
from extproc.request.document import Document
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.loops import WRITERS, Write
from tests.support.model_requests import HOSTILE
from tests.support.service import FailingStore, make_service, sample
from tests.support.sessions import agents, ask
from tests.support.told import find_reason, is_loop, read_told, send, tell, tell_all, tell_session
from tests.support.turn_writers import SHAPES, STYLES, Did, as_anthropic, as_chat, as_responses, as_text

Meaning = tuple[str, str]
"""An action and a result, each in a word."""

_NO_DIGITS = str.maketrans("", "", "0123456789")


def oracle(turns: Sequence[Meaning], threshold: int = 3, max_cycle: int = 10) -> set[str]:
    """The rules by which the newest of these turns, the oldest first, is part of a loop: the specification, word by word."""
    turns = turns[-32:]
    found = set()
    window = range(max(0, len(turns) - (2 * threshold + 4)), len(turns))
    places = [place for place in window if turns[place] == turns[-1]][-threshold:]
    if len(places) == threshold:
        between = [place for place in range(places[0], places[-1]) if place not in places]
        if sum(turns[place] not in turns[:place] for place in between) <= threshold - 2:
            found.add("repeat")
    for length in range(2, max_cycle + 1):
        rounds = threshold if length < 5 else max(2, threshold - 1)
        cycle = list(turns[-length:])
        if length * rounds <= 32 and list(turns[-length * rounds :]) == cycle * rounds and len(set(cycle)) == length:
            found.add("cycle")
    last = [result for _, result in turns[-2 * threshold :]]
    if len(last) == 2 * threshold and len(set(last)) == 1 and ("error" in last[0] or "failed" in last[0]):
        found.add("error")
    often = max(6, threshold)
    newest = [result if "failed" in result else result.translate(_NO_DIGITS) for _, result in turns[-often - 4 :]]
    if newest.count(newest[-1]) >= often and ("error" in newest[-1] or "failed" in newest[-1]):
        found.add("note")
    return found


def find_rule(value: object, **loop: Any) -> str:  # noqa: ANN401  # of loop_detection
    """By which rule a request is refused; `note` where it only gets one, empty where nothing is done."""
    told = tell(value, **loop)
    return told.rule if told.action == "reject" else {"allow": "", "warn": "note"}[told.action]


def means(turns: Sequence[Meaning]) -> list[Did]:
    """Turns that mean this, each with a thought of its own and with what changes by itself in its result."""
    return [
        Did(((action, {"path": f"src/{action}.py", "n": 1}),), (dressed(result, number),), thought=f"Thought no. {number}!")
        for number, (action, result) in enumerate(turns)
    ]


def dressed(result: str, number: int) -> str:
    """A result with what changes by itself."""
    if not result:
        return ""
    clock = f"2026-11-{number % 28 + 1:02d}T10:{number % 60:02d}:07.{number}Z"
    return f"[{clock}] {result} (line {number}, took {number}.5 ms, pid={number}) in /tmp/run-{number}/x at a.py:{number}"


_RESULTS = st.sampled_from(["ok", "3 failed", "error: no", ""])
_MEANINGS = st.tuples(st.sampled_from(["view", "tweak", "run", "poll"]), _RESULTS)
_HISTORIES = st.builds(
    lambda before, again, times, after: [*before, *again * times, *after],
    st.lists(_MEANINGS, max_size=12),
    st.lists(_MEANINGS, min_size=1, max_size=11),
    st.integers(1, 5),
    st.lists(_MEANINGS, max_size=2),
)
_AGAIN = [("view", "ok")] * 4 + [("view", "3 failed"), ("view", "ok")] + [("run", "3 failed")] * 4 + [("view", "3 failed")]


@given(_HISTORIES, st.integers(2, 8), st.integers(1, 10), st.sampled_from(sorted(WRITERS)))
@example([("tweak", "ok"), ("run", "3 failed")] * 3, 3, 10, "chat")
@example(_AGAIN, 3, 1, "observed")
def test_every_conversation_gets_the_verdict_of_the_oracle(
    turns: list[Meaning], threshold: int, max_cycle: int, writer: str
) -> None:
    """In every API and in every style of action the verdict is that of the specification."""
    found = find_rule(WRITERS[writer](means(turns)), threshold_identical_requests=threshold, max_cycle=max_cycle)

    assert found in (oracle(turns, threshold, max_cycle) or {""})


_A, _B = ("view", "ok"), ("run", "3 failed")


def new(number: int) -> Meaning:
    """A turn that no other equals."""
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
    "turns in between that were seen before": ([new(1), new(2), _A, new(1), _A, new(2), _A], "repeat"),
    "out of the window": ([_A, *[new(1)] * 8, _A, new(1), _A], ""),
    "a cycle of four": ([("a", "1"), ("b", "2"), ("c", "3"), ("d", "4")] * 3, "cycle"),
    "a cycle of four, a round short": ([("a", "1"), ("b", "2"), ("c", "3"), ("d", "4")] * 2, ""),
    "a cycle of five comes round twice": ([(name, "ok") for name in "abcde"] * 2, "cycle"),
    "a cycle of ten": ([(name, "ok") for name in "abcdefghij"] * 2, "cycle"),
    "a cycle of eleven": ([(name, "ok") for name in "abcdefghijk"] * 2, ""),
    "a cycle whose results change": ([(name, str(n)) for n, name in enumerate("abcde" * 2)], ""),
    "the same error, whatever is tried": ([(f"try{n}", "error: no such table") for n in range(6)], "error"),
    "the same error, five times": ([(f"try{n}", "error: no such table") for n in range(5)], ""),
    "an error with other numbers": ([(f"try{n}", f"error: job no. {n} is broken") for n in range(6)], "note"),
    "an error, and sometimes none": ([(f"try{n}", "ok" if n % 3 == 1 else "error: no x") for n in range(10)], "note"),
    "an error with other numbers, five times": ([(f"try{n}", f"error: job no. {n} is broken") for n in range(5)], ""),
    "an error with numbers that count failures": ([(f"try{n}", f"{20 - n} tests failed") for n in range(10)], ""),
    "the same success, whatever is done": ([(f"tweak{n}", "done") for n in range(9)], ""),
    "paging": ([(f"page{n}", f"rows {n}0 to {n}9") for n in range(9)], ""),
    "scrolling": ([("scroll", f"rows {n}0 to {n}9") for n in range(9)], ""),
    "polling with another answer each time": ([("status", f"{n}0 %") for n in range(9)], ""),
    "not the newest": ([_A, _A, _A, new(1)], ""),
}


@pytest.mark.slow
@pytest.mark.parametrize(("turns", "rule"), STUCK.values(), ids=STUCK)
def test_what_is_a_loop(turns: list[Meaning], rule: str) -> None:
    """Each case is the same in every API and in every style of action, and what the oracle says."""
    found = {name: find_rule(write(means(turns))) for name, write in WRITERS.items()}

    assert found == dict.fromkeys(WRITERS, rule)
    assert rule in (oracle(turns) or {""})


@pytest.mark.parametrize("shape", SHAPES)
def test_calls_made_at_once_are_one_turn(shape: str) -> None:
    """However often one is among them, and in whatever order; exchanged results are news."""
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
    st.datetimes().map(lambda moment: f"{moment:%a %b} {moment.day} {moment:%H:%M:%S} {moment.year:04d}"),
    st.times().map(lambda moment: f"{moment:%H:%M:%S}"),
    st.tuples(st.integers(0, 10**6), st.sampled_from(["ms", "s", " seconds", " minutes", "h", " ms"])).map(
        "{0[0]}{0[1]}".format
    ),
    st.floats(0, 1e4).map("{:.2f}s".format),
    st.binary(min_size=4, max_size=32).map(bytes.hex).filter(lambda text: not text.isdecimal()),
    st.integers(1_500_000_000, 1_999_999_999).map(str),
)
_PATHS = st.from_regex(r"/tmp/[a-z0-9_.-]{1,12}(/[a-z0-9]{1,8})?", fullmatch=True)  # noqa: S108  # never opened
_NUMBERED = ["line {}", "Line: {}", "Step {}/20", "pid={}", "port: {}", "x/a.py:{}"]


@given(st.data(), st.sampled_from(sorted(WRITERS)))
def test_what_changes_by_itself_does_not_matter(data: st.DataObject, writer: str) -> None:
    """Timestamps, durations, ids, line and step numbers and temporary paths do not hide a loop."""
    kinds = data.draw(st.lists(st.sampled_from([*_VOLATILE, _PATHS]), min_size=1, max_size=4))
    formats = data.draw(st.lists(st.sampled_from(_NUMBERED), max_size=4))
    turns = []
    for number in range(3):
        numbers = [form.format(data.draw(st.integers(0, 10**6))) for form in formats]
        result = " and ".join(["3 failed", *[data.draw(kind) for kind in kinds], *numbers, "end"])
        turns.append(Did((("run", {"a": 1}),), (result,), thought=f"no. {number}"))

    assert is_loop(WRITERS[writer](turns))


@given(st.lists(st.sampled_from(["tests", "failed", "warnings", "of", "%", "rows"]), min_size=1, max_size=5), st.data())
def test_anything_else_in_a_result_matters(words: list[str], data: st.DataObject) -> None:
    """Another word, or another number that counts something, is progress."""
    numbers = data.draw(st.lists(st.integers(0, 10**5), min_size=3, max_size=3, unique=True))

    assert not is_loop(as_chat(run(*[f"{number} {' '.join(words)}" for number in numbers])))
    assert not is_loop(as_chat(run(*[f"found {words[0]} {number}x" for number in range(3)])))


def run(*results: str, said: str = "", tool: str = "run", **arguments: object) -> list[Did]:
    """The same call with each of these results; in what is said behind it and in arguments, `@` is the number of the turn."""
    return [
        Did(((tool, {name: put(value, number) for name, value in arguments.items()}),), (result,), put(said, number))
        for number, result in enumerate(results)
    ]


def put(value: Any, number: int) -> Any:  # noqa: ANN401  # JSON
    """A text with a number in it."""
    return value.replace("@", str(number)) if isinstance(value, str) else value


def say(*pairs: tuple[str, str], role: str = "user") -> dict[str, Any]:
    """A chat of what an assistant says, and what comes back each time."""
    messages = [{"role": "user", "content": "go"}]
    for said, back in pairs:
        messages += [{"role": "assistant", "content": said}, {"role": role, "content": back}]
    return {"messages": messages}


def follow(body: dict[str, Any], *messages: dict[str, Any]) -> dict[str, Any]:
    """A body with more messages at its end."""
    return {**body, "messages": [*body["messages"], *messages]}


_ONCE = as_chat(run("x"))["messages"][2:]
_DETAILS = "<environment_details>Context: {} tokens</environment_details>"
_SMOLAGENTS = "Look {0}.\nCalling tools:\n[{{'id': 'call_{0}', 'function': {{'name': 'find', 'arguments': {{'id': '{1}'}}}}}}]"
_UNNAMED = "Thought: look.\n<code>\nprint(1)\n</code>\nCalling tools:\n[{{'id': 'call_{}', 'function': {{'name': 'python'}}}}]"
_GONE = "Error:\nError executing tool 'read' with arguments {{'path': '{0}'}}: FileNotFoundError: {0}\nNow let's retry."
_UNKNOWN = "Error:\nUnknown tool read, should be one of: look.\nNow let's retry."
_INJECTED = "<system-reminder>Turn @</system-reminder>\n<note>@</note>"
_FENCE = WRITERS["text, fence"]

LOOPS: dict[str, dict[str, Any]] = {
    "the same thoughts of a tool for thinking": as_chat([Did((("think", {"thought": "so"}),), ("logged",))] * 3),
    "a text before a call, as a message of its own": {
        "messages": [each for n in range(3) for each in ({"role": "assistant", "content": f"Thought {n}"}, *_ONCE)]
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
                {"role": "assistant", "content": "<execute_command>\n<command>npm test</command>\n</execute_command>"},
                {"role": "user", "content": [{"type": "text", "text": text} for text in ("3 failed", _DETAILS.format(n))]},
            )
        ]
    },
    "the same details alone": _FENCE(run(*[_DETAILS.format(1)] * 3)),
    **{
        f"a reminder of its own by {role}, {write.__name__}": follow(write(run(*"xxx")), {"role": role, "content": "Use them."})
        for role in ("system", "developer")
        for write in (as_chat, as_anthropic)
    },
    **{f"{role} alone brings back the same": say(*[("Look.", "1 file")] * 3, role=role) for role in ("system", "developer")},
    **{
        f"a word of {role} behind a turn without an action": {
            "messages": [*_ONCE * 3, {"role": "assistant", "content": "Done."}, {"role": role, "content": "Go on."}, *_ONCE]
        }
        for role in ("system", "developer")
    },
    "the number of a call before an observation": say(
        *[(_UNNAMED.format(n), f"Call id: call_{n}\nError:\nForbidden function") for n in range(3)]
    ),
    "calls in a text": say(*[(_SMOLAGENTS.format(n, "a"), "Observation:\nno rows") for n in range(3)]),
    "a call that only its error shows": say(*[(f"Thought {n}: look.", _GONE.format("a")) for n in range(3)]),
    "a tool that only its error shows": say(*[(f"Thought {n}: look.", _UNKNOWN) for n in range(3)]),
    "keys of other APIs": {"input": 7, "contents": "x", **as_chat(run(*"xxx"))},
    "durations in a result": as_chat(run("done in 0.3s", "done in 1.3s", "done in 2.3s")),
}
PROGRESS: dict[str, dict[str, Any]] = {
    "no results at all, twice": as_chat([Did((("run", {"a": 1}),))] * 2),
    "words beside tags": as_anthropic(run(*"xxx", said=f"{_INJECTED} and you?")),
    "other tags as results": as_anthropic(run(*[put(_INJECTED, n) for n in range(3)])),
    **{
        f"{tag} beside a result, {write.__name__}": write(run(*["Scrolled."] * 3, said=f"<{tag}>page @</{tag}>"))
        for tag in ("browser_state", "observation", "function_results", "feedback", "user_query")
        for write in (as_anthropic, as_chat)
    },
    "other tags beside empty results": as_chat(run("", "", "", said="<view>no. x@</view>")),
    "other details alone": _FENCE(run(*[f"<environment_details>Open: {name}</environment_details>" for name in "abc"])),
    **{
        f"{role} alone brings back another text": say(*[("Look.", "1 file")] * 2, ("Look.", "2 files"), role=role)
        for role in ("system", "developer")
    },
    "a person's word behind a turn without an action": {
        "messages": [*_ONCE * 3, {"role": "assistant", "content": "Done."}, {"role": "user", "content": "Go on."}, *_ONCE]
    },
    "the number of a call alone": say(*[(_UNNAMED.format(n), f"Call id: call_{n}") for n in range(3)]),
    "calls in a text with other ids": say(*[(_SMOLAGENTS.format(n, "abc"[n]), "Observation:\nno rows") for n in range(3)]),
    "other calls that only their errors show": say(*[(f"Thought {n}: look.", _GONE.format("abc"[n])) for n in range(3)]),
}


@pytest.mark.parametrize("body", LOOPS.values(), ids=LOOPS)
def test_what_hides_no_loop(body: dict[str, Any]) -> None:
    """What stands beside actions and results, in the forms that clients have for it."""
    assert is_loop(body)


@pytest.mark.parametrize("body", PROGRESS.values(), ids=PROGRESS)
def test_what_is_progress(body: dict[str, Any]) -> None:
    """The same where it is all that is new."""
    assert not is_loop(body)


@pytest.mark.parametrize("write", [as_chat, as_anthropic, _FENCE])
def test_what_a_harness_puts_into_a_result_is_no_part_of_it(write: Write) -> None:
    """Some clients join it with the result, at the end or in the middle; a tag that is not closed is part of the text."""

    def stuck(start: str, end: str, rest: str = "") -> bool:
        return is_loop(write(run(*[f"3 failed{start}Open: a.py, {n} tokens{end}{rest}" for n in range(3)])))

    for tag in ("environment_details", "system-reminder"):
        assert stuck(f"\n\n<{tag}>", f"</{tag}>")
        assert stuck(f" <{tag}>", f"</{tag}>", f" 5 passed <{tag}>x</{tag}>")
        assert not stuck(f"\n\n<{tag}>", "")
    assert not stuck("\n\n<log>", "</log>")


def test_results_are_compared_as_they_are_where_the_policy_says_so() -> None:
    """`normalize_results: false` compares them byte for byte."""
    assert not is_loop(LOOPS["durations in a result"], normalize_results=False)
    assert is_loop(as_chat(run(*["done in 0.3s"] * 3)), normalize_results=False)


@pytest.mark.parametrize("key", ["memory", "current_state", "thought", "reasoning", "evaluation_previous_goal", "next_goal"])
def test_thoughts_among_arguments_do_not_matter(key: str) -> None:
    """Whatever a model thinks in an argument that is there for it, the call is the same; a policy can name other ones."""
    body = as_chat(run(*"xxx", index=4, **{key: "thought @"}))

    assert is_loop(body)
    assert not is_loop(body, ignore_arguments=["note"])
    assert is_loop(as_chat(run(*"xxx", note="@")), ignore_arguments=["note"])


@pytest.mark.parametrize("key", ["description", "goal", "summary", "timeout", "yield_time_ms"])
def test_what_is_said_about_a_command_does_not_matter(key: str) -> None:
    """The description or timeout of a command may be worded anew; in a call without a command they may be all that it does."""
    said: dict[str, Any] = {key: "word @"}
    same: list[dict[str, Any]] = [{"command": "make test"}, {"cmd": ["make", "test"]}]
    other: list[dict[str, Any]] = [{"path": "a.py"}, {"command": "create"}, {"command": "make @"}]

    for write in SHAPES.values():
        found = [is_loop(write(run(*"xxx", tool="create", **given, **said))) for given in same + other]
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
@pytest.mark.parametrize("writer", ["chat", *[f"text, {style}" for style in ("fence", "commands", "react", "invoke")]])
def test_tools_have_thresholds_of_their_own(tools: dict[str, Any], times: int, expected: int, writer: str) -> None:
    """A tool is matched by its name, or by the first word of a text action; an allowed tool is never part of a loop."""
    told = tell(WRITERS[writer](run(*["x"] * times, a=1)), tools=tools)

    assert (told.count, told.tool) == (expected, "run" if expected else "")
    assert told.more.startswith(tools.get("r*", {}).get("reason", ""))


def poll(times: int) -> list[Did]:
    """An agent waits for a job."""
    return [Did((("poll_job_status", {"id": 7}),), ("running",))] * times


def work(count: int) -> list[Did]:
    """Turns that are all new."""
    return [Did((("tweak", {"part": number}),), (f"part no. {number}",)) for number in range(count)]


WAIT = Did((("pause", {"for": "a while"}),), ("paused",))


@pytest.mark.parametrize("threshold", [14, 15, 20, 30])
@pytest.mark.parametrize("writer", ["chat", "anthropic", "responses", "gemini", "text, fence"])
def test_a_high_threshold_counts_in_up_to_64_turns(threshold: int, writer: str) -> None:
    """The first of a tool's turns is the oldest that is looked at; or one too old, one too few, or behind too much news."""
    between = [*work(threshold - 3), *[WAIT] * 7]  # the first of these is new, too
    histories = {
        "met": [*poll(1), *between, *poll(threshold - 1)],
        "with older turns": [*work(80), *poll(1), *between, *poll(threshold - 1)],
        "in a row": poll(threshold),
        "too old": [*poll(1), *between, WAIT, *poll(threshold - 1)],
        "too few": [*between, *poll(threshold - 1)],
        "too new": [*poll(1), *work(threshold - 2), *[WAIT] * 6, *poll(threshold - 1)],
    }
    tools = {"poll_*": {"threshold": threshold}}

    found = {name: tell(WRITERS[writer](turns), tools=tools).count for name, turns in histories.items()}

    assert found == {**dict.fromkeys(histories, 0), **dict.fromkeys(["met", "with older turns", "in a row"], threshold)}


@pytest.mark.parametrize("tools", [{}, {"poll_job_status": {"threshold": 14}}, {"poll_job_status": {"threshold": 30}}])
@pytest.mark.parametrize(("back", "expected"), [(21, 3), (22, 0)])
def test_a_high_threshold_of_one_tool_changes_nothing_for_others(tools: dict[str, Any], back: int, expected: int) -> None:
    """A turn between repeats is new if it is not among the last 32 before."""
    seen, run = work(1), Did((("run", {}),), ("3 passed",))
    turns = [*seen, *poll(5), *work(1 + back)[1:], run, *seen, WAIT, run, run]

    assert tell(SHAPES["chat"](turns), tools=tools).count == expected


@pytest.mark.parametrize(
    ("threshold", "between", "expected"), [(20, 0, 20), (20, 12, 20), (20, 13, 0), (30, 2, 30), (30, 3, 0)]
)
def test_a_high_threshold_counts_in_32_turns_of_the_store(threshold: int, between: int, expected: int) -> None:
    """Of an agent that shows its last three turns only."""
    done = [*poll(1), *work(between), *poll(threshold - 1)]
    turns = [turn._replace(thought=f"Thought no. {number}", number=number) for number, turn in enumerate(done, 1)]
    requests = [as_chat(turns[max(0, end - 3) : end]) for end in range(1, len(turns) + 1)]

    told = tell_all(requests, tools={"poll_job_status": {"threshold": threshold}})

    assert [each.count for each in told] == [0] * (len(turns) - 1) + [expected]


@pytest.mark.parametrize(
    ("action", "error", "named"),
    [
        ({"content": "Look."}, "Error:\nError executing tool 'read_file' with arguments {'path': 'a'}: gone", "read_file"),
        ({"content": _SMOLAGENTS.format(1, 1)}, "no rows", "find"),
        ({"content": "Let me look."}, "Error: no such file", "the same message"),
        ({"tool_calls": [{"id": "c", "function": {"name": "", "arguments": "{}"}}]}, "Error: no name", "the same call"),
    ],
)
def test_a_turn_without_a_name_is_called_by_its_tool(action: dict[str, Any], error: str, named: str) -> None:
    """Smolagents leaves out calls that failed: then the error names the tool."""
    turn = [{"role": "assistant", **action}, {"role": "user", "content": error}]

    assert tell({"messages": turn * 3}).what.startswith(f"3 of the last 3 turns were {named}")


@pytest.mark.parametrize("nothing", [[], None, {}], ids=repr)
def test_a_list_without_calls_leaves_the_actions_in_texts(nothing: Any) -> None:  # noqa: ANN401  # a case
    """A client that writes an empty `tool_calls` in each answer has the same actions in its texts."""
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
def test_what_the_api_marks_as_an_error_is_one(shape: str, mark: str, marked: str) -> None:
    """Six results marked as failed are the same error, whatever they say."""
    text = json.dumps(SHAPES[shape]([Did(((f"try{n}", {}),), ("nope",)) for n in range(6)]))

    assert find_rule(text.encode()) == ""
    assert find_rule(text.replace(mark, marked).encode()) == "error"


def write_all(turns: Sequence[Did], shown: Sequence[int], write: Write = as_chat) -> list[bytes]:
    """The requests of an agent whose history is condensed to this many of its last turns, a number for each request."""
    turns = [turn._replace(number=number) for number, turn in enumerate(turns, 1)]
    ends = enumerate(shown, 1)
    return [json.dumps(write(turns[max(0, end - most) : end])).encode() for end, most in ends]


@given(_HISTORIES, st.data(), st.integers(2, 8), st.sampled_from(["anthropic", "bedrock", "chat", "responses"]))
def test_a_ring_supplies_what_a_condensed_history_does_not_show(
    turns: list[Meaning], data: st.DataObject, threshold: int, shape: str
) -> None:
    """Wherever histories are cut, and whichever are sent again, the verdict is that about the whole; where calls have ids."""
    starts = sorted(data.draw(st.lists(st.integers(0, len(turns)), min_size=len(turns), max_size=len(turns))))
    shown = [max(1, end - start) for end, start in enumerate(starts, 1)]
    again = data.draw(st.lists(st.integers(1, 3), min_size=len(turns), max_size=len(turns)))
    requests = write_all(means(turns), shown, SHAPES[shape])
    sent = [body for body, times in zip(requests, again, strict=True) for _ in range(times)]

    found = [told.action != "allow" for told in tell_session(sent, threshold_identical_requests=threshold)]

    expected = [bool(oracle(turns[: end + 1], threshold)) for end, times in enumerate(again) for _ in range(times)]
    assert found == expected


def _thread(write: Callable[[Sequence[Did]], dict[str, Any]], pointer: dict[str, Any], *results: str) -> list[dict[str, Any]]:
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
        [as_anthropic(means([_A])) | more for more in ({}, {}, {"max_tokens": 9}, {"model": "other"}, {"stream": True})],
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
    **{f"equal results, {pointer}": (_thread(write, pointer, *"xxx"), "result") for write, pointer in _POINTERS},
    **{f"empty results, {pointer}": (_thread(write, pointer, "", "", ""), "") for write, pointer in _POINTERS},
    **{f"results in turn, {pointer}": (_thread(write, pointer, *["ok", "3 failed"] * 4), "") for write, pointer in _POINTERS},
    "a user who says yes": ([{"previous_response_id": f"r{n}", "input": "yes"} for n in range(5)], ""),
    "a user who says yes in a message": (
        [{"previous_response_id": f"r{n}", "input": [{"role": "user", "content": "yes"}]} for n in range(5)],
        "",
    ),
}


@pytest.mark.parametrize(("requests", "rule"), SESSIONS.values(), ids=SESSIONS)
def test_sessions_are_refused_at_their_last_request(requests: Sequence[object], rule: str) -> None:
    """Requests that show a part of their history, and what they are not taken for."""
    assert [told.rule for told in tell_session(requests)] == [*[""] * (len(requests) - 1), rule]


@pytest.mark.parametrize(
    ("body", "waits"),
    [
        (as_chat(means([_A])), True),
        (as_chat(means([_A] * 3)), False),
        (as_chat(means([new(n) for n in range(32)])), False),
        (as_chat(means([new(n) for n in range(31)])), True),
        (as_chat([Did((("wait", {}),), ("x",))]), False),
        ({"previous_response_id": "r", "input": "yes"}, False),
    ],
    ids=["few turns", "a loop", "as many turns as are looked at", "one less", "a tool that is allowed", "only a user speaks"],
)
def test_only_what_the_request_leaves_open_waits_for_the_ring(body: dict[str, Any], waits: bool) -> None:
    """A verdict that stands whatever was before is given at once."""
    service = make_service(agents(tools={"wait": {"allow": True}}), store=FailingStore("nothing", later=True))

    _, at_once = ask(service, json.dumps(body).encode(), session_id="s")

    assert at_once is not waits


_TRIED = means([(f"try{n}", "error: no such table") for n in range(6)])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (as_chat(means([_A] * 3)), "3 of the last 3 turns were view with the same input and the same result"),
        (as_chat(means(STUCK["a cycle of four"][0])), "the last 12 turns were 3 rounds of the same 4 steps (a, b, c, d)"),
        (as_chat(_TRIED), "the last 6 results were the same error, whatever was tried (try0, try1"),
        (say(*[("Go on?", "Go on?")] * 3), "3 of the last 3 turns were the same message"),
    ],
)
def test_sentences_say_what_repeated_and_what_would_be_progress(body: dict[str, Any], said: str) -> None:
    """Tool or command, how often, and what to do instead, for each rule."""
    told = tell(body)

    assert said in told.what
    assert "Progress means" in told.more


def test_results_of_a_thread_are_told_as_such() -> None:
    """Nothing shows what was called."""
    *_, last = tell_session(_thread(as_responses, {"conversation": "c"}, *"xxxx"))

    assert last.what == "4 of the last 4 turns returned the same result"


def test_a_cooldown_goes_by_the_newest_turn() -> None:
    """Whatever is thought and however long the history is, the same turn has the same name; another has another."""
    looping, again, other = [as_chat(means(turns)) for turns in ([_A] * 3, [_B, *[_A] * 4], [_B] * 3)]
    near = as_responses(means([_B, _A, new(1), _A, new(2), new(3), _A]))

    tripped, cooling, *others = tell_all([looping, near, again, other, as_chat(means([_B, _A, _B]))], cooldown_seconds=9)

    assert cooling[:3] == ("reject", 2, "view")
    assert cooling.what == "view was part of a loop, and this same turn stays refused for a while"
    assert tripped.fingerprint == cooling.fingerprint == others[0].fingerprint != others[1].fingerprint
    assert [told.action for told in others] == ["reject", "reject", "reject"]


@pytest.mark.parametrize("pointer", [{"previous_response_id": "r"}, {"conversation": "c"}, {"prompt": "x"}])
def test_a_request_without_its_history_is_not_counted(pointer: dict[str, Any]) -> None:
    """What the server keeps cannot be looked at, and the reason says so."""
    body = pointer if "prompt" in pointer else {**as_responses(means([_A] * 3)), **pointer}

    assert find_reason(body) == "no_history"


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_has_a_verdict_or_a_reason(name: str) -> None:
    """Whatever a client sends, nothing fails."""
    keys: dict[str, Any] = {"limit_keys": ["header:x-caller"], "session": {}, "threshold_identical_requests": 2}
    service = make_service(policy("p", ANY, similarity="turns", **keys))

    told = [read_told(send(service, HOSTILE[name][0](), "ann", session_id="s")).action for _ in range(2)]

    assert sample(service, "fail_open_total", reason="internal_error") == 0
    assert told[0] in {"allow", "reject"}


def test_turns_are_shown_to_people() -> None:
    """The oldest first, each with its action and its result, cut where they are long."""
    looks = Turns(LoopDetection(enabled=True, similarity="turns"))
    turns = [Did((("run", {"a": 1}),), ("3 failed",)), Did((("run", {"a": "x" * 999}),), ("y" * 999,))]

    first, second = looks.show(Document(json.dumps(as_chat(turns)).encode()))

    assert first == 'run | {"a":1} | 3 failed'
    assert len(second) < 999
    assert looks.show(Document(json.dumps(as_chat([])).encode())) == ["no turns: the assistant has not done anything yet"]
