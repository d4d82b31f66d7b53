"""Agents that are stuck, whatever API they use and however they write their actions, against a slow and obvious oracle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from extproc.decision import Repeat
from extproc.detectors import make_similarity
from extproc.detectors.keys import SimilarityKeys, Tool
from extproc.detectors.loops import CYCLE, ERROR, MAX_TURNS, REPEAT, RESULT, TurnRule
from extproc.detectors.similar_turns import SIMILAR_ERROR
from extproc.detectors.tools import Limit, ToolLimits
from extproc.detectors.turn import MAX_ENTRY, encode_turn
from extproc.detectors.turns import Turns
from extproc.engine.plan import Detector
from extproc.policy.bundle import LoopDetection
from extproc.request.document import Document, NotCounted
from extproc.store.rules.ring import Push, Ring, push
from extproc.store.rules.windows import UNCOUNTED
from tests.support.loops import WRITERS, Write
from tests.support.model_requests import HOSTILE
from tests.support.turn_writers import SHAPES, STYLES, Did, as_anthropic, as_chat, as_responses, as_text

every_writer = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)

Meaning = tuple[str, str]
"""An action and a result, each in a word."""


def verdict(value: object, threshold: int = 3, tools: dict[str, Limit] | None = None, **more: Any) -> Repeat | None:  # noqa: ANN401
    """What the rule says about a body."""
    rule = TurnRule(ToolLimits(threshold, tools), notes=True, **more)
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return rule.find_loop(rule.read(Document(data)))


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
            found.add(REPEAT)
    for length in range(2, max_cycle + 1):
        rounds = threshold if length < 5 else max(2, threshold - 1)
        cycle = list(turns[-length:])
        if length * rounds <= 32 and list(turns[-length * rounds :]) == cycle * rounds and len(set(cycle)) == length:
            found.add(CYCLE)
    last = [result for _, result in turns[-2 * threshold :]]
    if len(last) == 2 * threshold and len(set(last)) == 1 and ("error" in last[0] or "failed" in last[0]):
        found.add(ERROR)
    often = max(6, threshold)
    newest = [result if "failed" in result else result.translate(_NO_DIGITS) for _, result in turns[-often - 4 :]]
    if newest.count(newest[-1]) >= often and ("error" in newest[-1] or "failed" in newest[-1]):
        found.add(SIMILAR_ERROR)
    return found


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


@given(_HISTORIES, st.integers(2, 8), st.integers(1, 10), st.sampled_from(sorted(WRITERS)))
@example([("tweak", "ok"), ("run", "3 failed")] * 3, 3, 10, "chat")
@example(
    [("view", "ok")] * 4 + [("view", "3 failed"), ("view", "ok")] + [("run", "3 failed")] * 4 + [("view", "3 failed")],
    3,
    1,
    "observed",
)
def test_every_conversation_gets_the_verdict_of_the_oracle(
    turns: list[Meaning], threshold: int, max_cycle: int, writer: str
) -> None:
    """In every API and in every style of action the verdict is that of the specification."""
    found = verdict(WRITERS[writer](means(turns)), threshold, max_cycle=max_cycle)

    expected = oracle(turns, threshold, max_cycle)
    assert (found is not None) == bool(expected)
    if found is not None:
        assert found.rule in expected
        assert found.looping


_A, _B = ("view", "ok"), ("run", "3 failed")


def new(number: int) -> Meaning:
    """A turn that no other equals."""
    return f"tweak{number}", "ok"


STUCK: list[tuple[str, list[Meaning], str | None]] = [
    ("at the threshold", [_A] * 3, REPEAT),
    ("below it", [_A] * 2, None),
    ("past it", [_A] * 9, REPEAT),
    ("empty results", [("view", "")] * 3, REPEAT),
    ("one new turn in between", [_A, new(1), _A, _A], REPEAT),
    ("two new turns in between", [_A, new(1), _A, new(2), _A], None),
    ("edit, run, edit, run", [turn for n in range(6) for turn in (new(n), _B)], None),
    ("edit, run, with the same edit", [new(0), _B] * 3, CYCLE),
    ("turns in between that were seen before", [new(1), new(2), _A, new(1), _A, new(2), _A], REPEAT),
    ("out of the window", [_A, *[new(1)] * 8, _A, new(1), _A], None),
    ("a cycle of four", [("a", "1"), ("b", "2"), ("c", "3"), ("d", "4")] * 3, CYCLE),
    ("a cycle of four, a round short", [("a", "1"), ("b", "2"), ("c", "3"), ("d", "4")] * 2, None),
    ("a cycle of five comes round twice", [(name, "ok") for name in "abcde"] * 2, CYCLE),
    ("a cycle of ten", [(name, "ok") for name in "abcdefghij"] * 2, CYCLE),
    ("a cycle of eleven", [(name, "ok") for name in "abcdefghijk"] * 2, None),
    ("a cycle whose results change", [(name, str(n)) for n, name in enumerate("abcde" * 2)], None),
    ("the same error, whatever is tried", [(f"try{n}", "error: no such table") for n in range(6)], ERROR),
    ("the same error, five times", [(f"try{n}", "error: no such table") for n in range(5)], None),
    ("an error with other numbers", [(f"try{n}", f"error: job no. {n} is broken") for n in range(6)], SIMILAR_ERROR),
    ("an error, and sometimes none", [(f"try{n}", "ok" if n % 3 == 1 else "error: no x") for n in range(10)], SIMILAR_ERROR),
    ("an error with other numbers, five times", [(f"try{n}", f"error: job no. {n} is broken") for n in range(5)], None),
    ("an error with numbers that count failures", [(f"try{n}", f"{20 - n} tests failed") for n in range(10)], None),
    ("the same success, whatever is done", [(f"tweak{n}", "done") for n in range(9)], None),
    ("paging", [(f"page{n}", f"rows {n}0 to {n}9") for n in range(9)], None),
    ("scrolling", [("scroll", f"rows {n}0 to {n}9") for n in range(9)], None),
    ("polling with another answer each time", [("status", f"{n}0 %") for n in range(9)], None),
    ("not the newest", [_A, _A, _A, new(1)], None),
]  # fmt: skip  # one case, one line


@pytest.mark.slow
@pytest.mark.parametrize(("turns", "rule"), [case[1:] for case in STUCK], ids=[case[0] for case in STUCK])
def test_what_is_a_loop(turns: list[Meaning], rule: str | None) -> None:
    """Each case is the same in every API and in every style of action, and what the oracle says."""
    found = {name: verdict(write(means(turns))) for name, write in WRITERS.items()}

    assert {name: one.rule if one is not None else None for name, one in found.items()} == dict.fromkeys(WRITERS, rule)
    assert oracle(turns) >= ({rule} if rule else set())
    assert bool(oracle(turns)) == bool(rule)


@pytest.mark.parametrize("shape", SHAPES)
def test_parallel_duplicates_are_one_round(shape: str) -> None:
    """The same call three times at once is one turn; twice at once in three turns is a loop of three."""
    once = Did((("f", {"a": 1}),) * 3, ("x",) * 3)
    mixed = [Did((("f", {"a": 1}),) * (n + 1), ("x",) * (n + 1)) for n in range(3)]

    assert verdict(SHAPES[shape]([Did((("g", {}),), ("y",)), once])) is None
    found = verdict(SHAPES[shape](mixed))
    assert found is not None
    assert (found.rule, found.count) == (REPEAT, 3)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_order_of_calls_made_at_once_does_not_matter(shape: str) -> None:
    """Results go with their calls: the same two in the other order are the same turn, exchanged results are not."""
    one = Did((("f", {"a": 1}), ("g", {})), ("x", "y"))
    other = Did((("g", {}), ("f", {"a": 1})), ("y", "x"))
    swapped = Did((("f", {"a": 1}), ("g", {})), ("y", "x"))

    assert verdict(SHAPES[shape]([one, other, one])) is not None
    assert verdict(SHAPES[shape]([one, swapped, one])) is None


@every_writer
def test_a_user_who_speaks_ends_a_loop(write: Write) -> None:
    """New words behind a result are new, and the request that brings them is let through."""
    turn = Did((("run", {"a": 1}),), ("3 failed",))
    turns = [turn._replace(thought=f"{n}.") for n in range(2)]

    assert verdict(write([*turns, turn])) is not None
    assert verdict(write([*turns, turn._replace(user="Try the other branch.")])) is None
    assert verdict(write([turns[0], turn._replace(user="Try the other branch."), turn])) is None


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

    def result() -> str:
        """The same again."""
        numbers = [form.format(data.draw(st.integers(0, 10**6))) for form in formats]
        return " and ".join(["3 failed", *[data.draw(kind) for kind in kinds], *numbers, "end"])

    turns = [Did((("run", {"a": 1}),), (result(),), thought=f"no. {n}") for n in range(3)]
    assert verdict(WRITERS[writer](turns)) is not None


@given(st.lists(st.sampled_from(["tests", "failed", "warnings", "of", "%", "rows"]), min_size=1, max_size=5), st.data())
def test_anything_else_in_a_result_matters(words: list[str], data: st.DataObject) -> None:
    """Another word, or another number that counts something, is progress."""
    numbers = data.draw(st.lists(st.integers(0, 10**5), min_size=3, max_size=3, unique=True))
    turns = [Did((("run", {"a": 1}),), (f"{number} {' '.join(words)}",)) for number in numbers]

    assert verdict(as_chat(turns)) is None
    assert verdict(as_chat([turn._replace(results=(f"found {words[0]} {n}x",)) for n, turn in enumerate(turns)])) is None


@pytest.mark.parametrize("normalize", [True, False])
def test_results_are_normalised_unless_the_policy_says_otherwise(normalize: bool) -> None:
    """`normalize_results: false` compares results byte for byte."""
    turns = [Did((("run", {}),), (f"done in {n}.3s",)) for n in range(3)]

    assert (verdict(as_chat(turns), normalize_results=normalize) is not None) is normalize
    assert verdict(as_chat(turns[:1] * 3), normalize_results=normalize) is not None


@pytest.mark.parametrize("key", ["memory", "current_state", "thought", "reasoning", "evaluation_previous_goal", "next_goal"])
def test_thoughts_among_arguments_do_not_matter(key: str) -> None:
    """Whatever a model thinks in an argument that is there for it, the call is the same; a policy can name other ones."""
    turns = [Did((("click", {"index": 4, key: f"thought {n}"}),), ("nothing happened",)) for n in range(3)]

    assert verdict(as_chat(turns)) is not None
    assert verdict(as_chat(turns), ignored=frozenset({"note"})) is None
    assert (
        verdict(as_chat([Did((("click", {"note": str(n)}),), ("x",)) for n in range(3)]), ignored=frozenset({"note"}))
        is not None
    )


@pytest.mark.parametrize("key", ["description", "goal", "summary", "timeout", "yield_time_ms"])
def test_what_is_said_about_a_command_does_not_matter(key: str) -> None:
    """The description or timeout of a command may be worded anew; in a call without a command they may be all that it does."""

    def call(**arguments: object) -> list[Did]:
        return [Did((("create", {**arguments, key: f"word {n}"}),), ("nothing",)) for n in range(3)]

    for write in SHAPES.values():
        assert verdict(write(call(command="make test"))) is not None
        assert verdict(write(call(cmd=["make", "test"]))) is not None
        assert verdict(write(call(path="a.py"))) is None
        assert verdict(write(call(command="create"))) is None
    assert verdict(as_chat([Did((("create", {"command": f"make {n}", key: "test"}),), ("nothing",)) for n in range(3)])) is None


def test_a_tool_for_thinking_is_called_for_its_thoughts() -> None:
    """Different thoughts of a `think` tool are different calls, equal ones are not."""
    turns = [Did((("think", {"thought": f"thought {n}"}),), ("logged",)) for n in range(3)]

    assert verdict(as_chat(turns)) is None
    assert verdict(as_chat(turns[:1] * 3)) is not None


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ({"run": Limit(3, allow=True)}, None),
        ({"r*": Limit(5)}, None),
        ({"r*": Limit(4, "Ask a human.")}, 4),
        ({"other": Limit(3, allow=True)}, 4),
        ({"run": Limit(14)}, None),
    ],
)
@pytest.mark.parametrize("writer", ["chat", *[f"text, {style}" for style in ("fence", "commands", "react", "invoke")]])
def test_tools_have_thresholds_of_their_own(tools: dict[str, Limit], expected: int | None, writer: str) -> None:
    """A tool is matched by its name, or by the first word of a text action; an allowed tool is never part of a loop."""
    found = verdict(WRITERS[writer]([Did((("run", {"a": 1}),), ("x",))] * 4), tools=tools)

    assert (found.count if found is not None else None) == expected
    if found is not None:
        assert found.tools == ("run",)
        assert found.reason == next((limit.reason for limit in tools.values()), "")


def test_a_threshold_of_fourteen_still_fits() -> None:
    """Fourteen equal turns are seen, and so are fourteen errors in a row, twice."""
    turn = Did((("poll", {}),), ("x",))

    assert verdict(as_chat([turn] * 13), tools={"poll": Limit(14)}) is None
    assert verdict(as_chat([turn] * 14), tools={"poll": Limit(14)}) is not None


def test_a_text_before_a_call_is_its_thought() -> None:
    """Some clients send what the model says and what it calls as two messages."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Fix it."}]
    for number in range(3):
        body = as_chat([Did((("run", {}),), ("x",))])["messages"][2:]
        messages += [{"role": "assistant", "content": f"Thought {number}"}, *body]

    found = verdict({"messages": messages})

    assert found is not None
    assert (found.count, found.calls) == (3, 3)


def test_calls_without_any_results_are_turns() -> None:
    """Results that are missing altogether do not hide a loop."""
    assert verdict(as_chat([Did((("run", {"a": 1}),))] * 3)) is not None
    assert verdict(as_chat([Did((("run", {"a": 1}),))] * 2)) is None


def test_what_the_assistant_is_to_go_on_with_is_no_turn() -> None:
    """A loop is seen although the request ends with the beginning of the next answer."""
    body = as_anthropic([Did((("run", {}),), ("x",))] * 3)
    body["messages"].append({"role": "assistant", "content": "{"})

    assert verdict(body) is not None


def test_what_a_harness_injects_is_no_part_of_a_result() -> None:
    """Text beside a result that is wholly wrapped in tags is not the user speaking; in a result it is one."""
    reminders = [f"<system-reminder>Turn {n}</system-reminder>\n<note>{n}</note>" for n in range(3)]
    beside = [Did((("run", {}),), ("x",), user=text) for text in reminders]

    assert verdict(as_anthropic(beside)) is not None
    assert verdict(as_chat(beside)) is not None
    assert verdict(as_anthropic([turn._replace(user=turn.user + " and you?") for turn in beside])) is None
    assert verdict(as_anthropic([turn._replace(user="", results=(turn.user,)) for turn in beside])) is None


@pytest.mark.parametrize("tag", ["browser_state", "observation", "function_results", "feedback", "user_query"])
def test_what_came_back_in_tags_is_a_result(tag: str) -> None:
    """Text beside a result is new where its tag says that something came back, or names a speaker."""
    turns = [Did((("scroll", {}),), ("Scrolled.",), user=f"<{tag}>page {n}</{tag}>") for n in range(3)]

    assert verdict(as_anthropic(turns)) is None
    assert verdict(as_chat(turns)) is None
    assert verdict(as_chat(turns[:1] * 3)) is not None


def test_beside_empty_results_any_text_is_what_came_back() -> None:
    """Where tools bring back nothing, the text in tags is all that there is to see."""
    turns = [Did((("scroll", {}),), ("",), user=f"<view>{word}</view>") for word in ("one", "two", "three")]

    assert verdict(as_chat(turns)) is None
    assert verdict(as_chat(turns[:1] * 3)) is not None


def test_environment_details_are_no_part_of_a_text_result() -> None:
    """Where results are texts, what is known to be injected is left out if something else is said."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Fix it."}]
    for number in range(3):
        details = f"<environment_details>\nContext: {number} tokens\n</environment_details>"
        said = [{"type": "text", "text": text} for text in ("[execute_command] Result: 3 failed", details)]
        call = "<execute_command>\n<command>npm test</command>\n</execute_command>"
        messages += [{"role": "assistant", "content": call}, {"role": "user", "content": said}]

    assert verdict({"messages": messages}) is not None


@pytest.mark.parametrize("write", [as_chat, as_anthropic, WRITERS["text, fence"]])
def test_what_a_harness_puts_into_a_result_is_no_part_of_it(write: Write) -> None:
    """Some clients join it with the result, at the end or in the middle; a tag that is not closed is part of the text."""

    def stuck(start: str, end: str, rest: str = "") -> Repeat | None:
        texts = [f"3 failed{start}Open: a.py, {n} tokens{end}{rest}" for n in range(3)]
        return verdict(write([Did((("run", {}),), (text,)) for text in texts]))

    for tag in ("environment_details", "system-reminder"):
        assert stuck(f"\n\n<{tag}>", f"</{tag}>") is not None
        assert stuck(f" <{tag}>", f"</{tag}>", f" 5 passed <{tag}>x</{tag}>") is not None
        assert stuck(f"\n\n<{tag}>", "") is None
    assert stuck("\n\n<log>", "</log>") is None


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("write", [as_chat, as_anthropic])
def test_a_reminder_of_the_harness_in_a_message_of_its_own_is_no_part_of_a_result(write: Write, role: str) -> None:
    """As Claude Code sends them; where nothing else came back, it is what came back."""
    body = write([Did((("run", {}),), ("x",))] * 3)
    body["messages"].append({"role": role, "content": "The task tools have not been used recently."})
    silent = [{"role": "assistant", "content": "Look."}, {"role": role, "content": "1 file"}]

    assert verdict(body) is not None
    assert verdict({"messages": [*silent * 2, silent[0], {"role": role, "content": "2 files"}]}) is None
    assert verdict({"messages": silent * 3}) is not None


@pytest.mark.parametrize(("role", "anew"), [("system", False), ("developer", False), ("user", True)])
def test_a_reminder_of_the_harness_is_no_persons_word(role: str, anew: bool) -> None:
    """Only a person's word behind a turn without an action starts anew."""
    turn = as_chat([Did((("run", {}),), ("x",))])["messages"][2:]
    said = [{"role": "assistant", "content": "Done."}, {"role": role, "content": "Try the other file."}]

    found = verdict({"messages": [{"role": "user", "content": "go"}, *turn * 3, *said, *turn]})

    assert (found is None) == anew


def test_the_number_of_a_call_before_an_observation_is_no_part_of_it() -> None:
    """As smolagents writes it; alone it is what came back."""
    code = "Thought: look.\n<code>\nprint(1)\n</code>\nCalling tools:\n[{'id': 'call_%d', 'function': {'name': 'python'}}]"

    def stuck(result: str) -> Repeat | None:
        steps = [(code % n, f"Call id: call_{n}{result}") for n in range(3)]
        said = [({"role": "assistant", "content": text}, {"role": "user", "content": back}) for text, back in steps]
        return verdict({"messages": [message for step in said for message in step]})

    assert stuck("\nError:\nForbidden function") is not None
    assert stuck("") is None


def test_calls_that_smolagents_writes_into_a_text_are_calls() -> None:
    """Their ids change; an id among the arguments is content."""
    given = "'function': {'name': 'find', 'arguments': {'id': '%s'}}"
    calls = f"Look %d.\nCalling tools:\n[{{'id': 'call_%d', 'type': 'function', {given}}}]"

    def stuck(*ids: str) -> Repeat | None:
        steps = [(calls % (number, number, each), "Observation:\nno rows") for number, each in enumerate(ids)]
        said = [({"role": "assistant", "content": text}, {"role": "user", "content": back}) for text, back in steps]
        return verdict({"messages": [message for step in said for message in step]})

    found = stuck("a", "a", "a")

    assert found is not None
    assert found.tools == ("find",)
    assert stuck("a", "b", "c") is None


@pytest.mark.parametrize(
    ("action", "error", "named"),
    [
        (
            {"content": "Let me look."},
            "Error:\nError executing tool 'read_file' with arguments {'path': 'a'}: gone",
            "read_file",
        ),
        ({"content": "Let me look."}, "Error: no such file", "the same message"),
        ({"tool_calls": [{"id": "c", "function": {"name": "", "arguments": "{}"}}]}, "Error: no name", "the same call"),
    ],
)
def test_a_turn_without_a_name_is_called_by_its_tool(action: dict[str, Any], error: str, named: str) -> None:
    """Smolagents leaves out calls that failed: then the error names the tool."""
    turn = [{"role": "assistant", **action}, {"role": "user", "content": error}]
    found = verdict({"messages": [{"role": "user", "content": "go"}, *turn * 3]})

    assert found is not None
    assert Turns(SimilarityKeys(similarity="turns")).describe(found).startswith(f"{named}: 3 of 3 turns")


@pytest.mark.parametrize(
    "failed",
    [
        "Error executing tool 'read' with arguments {'path': '%s'}: FileNotFoundError: %s",
        "Unknown tool read, should be one of: look.",
    ],
)
def test_a_call_that_only_its_error_shows_is_the_action(failed: str) -> None:
    """Smolagents leaves calls that failed out of the history: what stands there is a thought, new in each turn."""

    def stuck(*paths: str) -> Repeat | None:
        said = [
            (f"Thought {n}: look.", f"Error:\n{failed.replace('%s', path)}\nNow let's retry.") for n, path in enumerate(paths)
        ]
        turns = [({"role": "assistant", "content": text}, {"role": "user", "content": back}) for text, back in said]
        return verdict({"messages": [message for turn in turns for message in turn]})

    assert stuck("a", "a", "a") is not None
    if "%s" in failed:
        assert stuck("a", "b", "c") is None


def test_what_a_harness_says_is_a_result_where_nothing_else_is_said() -> None:
    """What changes there alone may be all that the action has done."""
    said = [f"<environment_details>Open: {name}</environment_details>" for name in ("a.py", "b.py", "c.py")]
    write = WRITERS["text, fence"]

    assert verdict(write([Did((("open", {}),), (text,)) for text in said])) is None
    assert verdict(write([Did((("open", {}),), (text,)) for text in said[:1] * 3])) is not None


@pytest.mark.parametrize("shape", ["anthropic", "bedrock", "gemini"])
def test_what_the_api_marks_as_an_error_is_one(shape: str) -> None:
    """Six results marked as failed are the same error, whatever they say."""
    body = SHAPES[shape]([Did(((f"try{n}", {}),), ("nope",)) for n in range(6)])
    text = json.dumps(body)
    marks = {
        "anthropic": ('"type": "tool_result"', '"type": "tool_result", "is_error": true'),
        "bedrock": ('"status": "success"', '"status": "error"'),
        "gemini": ('"output":', '"error":'),
    }

    assert verdict(text.encode()) is None
    found = verdict(text.replace(*marks[shape]).encode())
    assert found is not None
    assert found.rule == ERROR


def _requests(turns: Sequence[Did], shown: Sequence[int], write: Write) -> list[bytes]:
    """The requests of an agent whose history is condensed to this many of its last turns, a number for each request."""
    turns = [turn._replace(number=number) for number, turn in enumerate(turns, 1)]
    ends = enumerate(shown, 1)
    return [json.dumps(write(turns[max(0, end - most) : end])).encode() for end, most in ends]


def _in_session(requests: Sequence[bytes], **keys: Any) -> list[Repeat | None]:  # noqa: ANN401  # of LoopDetection
    """What a detector says about each request of a session, whose ring is that of every store."""
    turns = Turns(LoopDetection(enabled=True, similarity="turns", **keys))
    ring: Ring | None = None
    found = []
    for data in requests:
        _, repeat, memory = turns.compare_in_session(Document(data))
        if memory is not None:
            ring, entries = push(ring, Push("ring", memory.entry, memory.identity, MAX_TURNS, 1_000), 0)
            assert all(len(entry) <= MAX_ENTRY for entry in entries)
            repeat = memory.recall(entries) if memory.waits else repeat
        found.append(repeat)
    return found


@given(_HISTORIES, st.data(), st.integers(2, 8), st.sampled_from(sorted(SHAPES)))
def test_a_ring_supplies_what_a_condensed_history_does_not_show(
    turns: list[Meaning], data: st.DataObject, threshold: int, shape: str
) -> None:
    """Wherever each request's history is cut, and whichever are sent again, the verdict is that about the whole history."""
    shown = data.draw(st.lists(st.integers(1, 40), min_size=len(turns), max_size=len(turns)))
    again = data.draw(st.lists(st.integers(1, 3), min_size=len(turns), max_size=len(turns)))
    requests = _requests(means(turns), shown, SHAPES[shape])

    found = _in_session([body for body, times in zip(requests, again, strict=True) for _ in range(times)], **_set(threshold))

    expected = [bool(oracle(turns[: end + 1], threshold)) for end, times in enumerate(again) for _ in range(times)]
    assert [one is not None for one in found] == expected


def _set(threshold: int) -> dict[str, Any]:
    return {"threshold_identical_requests": threshold}


def test_a_request_that_is_sent_again_is_no_turn() -> None:
    """A retry, a count of its tokens and a try of another model show the turn that was shown before."""
    turn = means([_A])
    bodies = [as_anthropic(turn) | more for more in ({}, {}, {"max_tokens": 9}, {"model": "other"}, {"stream": True})]

    assert _in_session([json.dumps(body).encode() for body in bodies]) == [None] * 5
    assert _in_session(_requests(means([_A] * 3), [1, 1, 1], as_anthropic))[2] is not None


def test_a_text_that_is_sent_again_is_no_turn() -> None:
    """Where no call has an id, a request that shows the very same messages is the same request."""
    requests = _requests(means([_A] * 3), [1, 1, 1], lambda turns: as_text(turns, STYLES["react"]))

    assert _in_session([requests[0]] * 5) == [None] * 5
    assert _in_session(requests)[2] is not None


def test_what_the_assistant_is_to_go_on_with_is_kept_from_the_ring() -> None:
    """The same beginning of an answer at the end of each request is no turn that comes again."""
    prefilled = []
    for turns in (means([new(n) for n in range(end)]) for end in range(1, 8)):
        body = as_anthropic(turns[-2:])
        body["messages"].append({"role": "assistant", "content": "{"})
        prefilled.append(json.dumps(body).encode())

    assert _in_session(prefilled) == [None] * 7


def test_a_long_name_stands_for_itself_alone() -> None:
    """A name that does not fit into an entry as a whole does not make a turn two."""
    turns = [Did((("very_long_name_" * 9, {"n": 1}),), ("same",)) for _ in range(3)]

    found = _in_session(_requests(turns, [1, 1, 1], as_chat))

    assert [one is not None for one in found] == [False, False, True]


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
    turns = Turns(LoopDetection(enabled=True, similarity="turns", tools={"wait": Tool(allow=True)}))

    _, _, memory = turns.compare_in_session(Document(json.dumps(body).encode()))

    assert memory is not None
    assert memory.waits is waits


def test_another_conversation_in_the_same_session_is_not_taken_for_the_past() -> None:
    """Where a request shows another turn before its newest than the ring has, the ring is not its own."""
    others = _requests(means([_A] * 2), [1, 2], as_chat)
    own = json.dumps(as_chat(means([_B, _A]))).encode()
    alone = _requests(means([_A] * 3), [1, 1, 1], as_chat)[2]

    assert _in_session([*others, own]) == [None] * 3
    assert _in_session([*others, alone])[2] is not None


def _thread(write: Write, turn: Did, pointer: dict[str, Any]) -> bytes:
    """A request with only the newest results of a conversation that the server keeps."""
    body = write([turn])
    key = "messages" if "messages" in body else "input"
    body[key] = [item for item in body[key][-1:]]  # noqa: C416  # only the results
    return json.dumps({**body, **pointer}).encode()


@pytest.mark.parametrize(
    ("write", "pointer"),
    [
        (as_responses, {"previous_response_id": "r"}),
        (as_responses, {"conversation": {"id": "c"}}),
        (as_anthropic, {"thread": {"type": "continue", "previous_message_id": "m"}}),
    ],
)
def test_results_whose_calls_the_server_keeps_are_compared_alone(write: Write, pointer: dict[str, Any]) -> None:
    """Equal results in a row are a loop, empty ones are not, nor those that alternate with others."""

    def said(*results: str) -> list[str | None]:
        """The rules that the requests with these results break."""
        turns = [Did((("f", {}),), (result,), number=number) for number, result in enumerate(results, 1)]
        requests = [_thread(write, turn, pointer) for turn in turns]
        return [one.rule if one is not None else None for one in _in_session(requests)]

    assert said("x", "x", "x") == [None, None, RESULT]
    assert said("", "", "") == [None] * 3
    assert said(*["ok", "3 failed"] * 4) == [None] * 8


def test_a_user_who_repeats_a_message_in_a_thread_is_no_loop() -> None:
    """A request that shows only the user's words does not show what was done."""
    requests = [json.dumps({"previous_response_id": f"r{n}", "input": "yes"}).encode() for n in range(5)]
    asked = [
        json.dumps({"previous_response_id": f"r{n}", "input": [{"role": "user", "content": "yes"}]}).encode() for n in range(5)
    ]

    assert _in_session(requests) == [None] * 5
    assert _in_session(asked) == [None] * 5


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("threshold", [2, 3])
def test_a_hostile_body_has_a_verdict_or_a_reason(name: str, threshold: int) -> None:
    """Whatever a client sends, nothing but NotCounted is raised, and what is recalled of it fits into a ring."""
    rule = TurnRule(ToolLimits(threshold))
    try:
        history = rule.read(Document(HOSTILE[name][0]()))
        rule.find_loop(history)
        kept = history.keep(named=True)
        entries = [encode_turn(turn) for turn in history.newest(32)]
        recalled = kept.extend(entries) if kept is not None else None
        if recalled is not None:
            rule.find_loop(recalled)
    except NotCounted as why:
        assert why.reason in {"not_json", "inspect_limit", "no_messages"}  # noqa: PT017  # either is right
    else:
        assert all(len(entry) <= MAX_ENTRY for entry in entries)


@pytest.mark.parametrize("nothing", [None, []])
def test_no_calls_beside_a_text_hide_no_action(nothing: object) -> None:
    """A client that writes an empty `tool_calls` in each answer has the same actions in its texts."""
    value = as_text([Did((("cat", {"path": "notes"}),), ("error: no such file",))] * 4, STYLES["fence"])
    for message in value["messages"]:
        if message["role"] == "assistant":
            message["tool_calls"] = nothing

    found = verdict(value, 4)

    assert found is not None
    assert (found.rule, found.count) == (REPEAT, 4)


def test_a_key_of_another_api_does_not_matter() -> None:
    """A chat that carries something else under the key of another API is a chat."""
    assert verdict({"input": 7, "contents": "x", **as_chat([Did((("run", {}),), ("x",))] * 3)}) is not None


def told(repeat: Repeat | None) -> str:
    """The sentence that the refused party reads."""
    loop = LoopDetection(enabled=True, similarity="turns")
    detector = Detector("p", "turns", loop, make_similarity(loop), shadow=False, namespace="")
    outcome = detector.judge("0" * 8, "0" * 16, UNCOUNTED, detector.similarity, repeat)
    return outcome.subject.write_message(outcome, "POST", "/v1/messages")


def test_each_sentence_says_what_repeated_and_what_would_be_progress() -> None:
    """Tool or command, how often, and what to do instead, for each rule; the operator's words come with it."""
    repeat = told(verdict(as_chat(means([_A] * 3)), tools={"view": Limit(3, "Ask a human.")}))
    cycle = told(verdict(as_chat(means([("a", "1"), ("b", "2"), ("c", "3"), ("d", "4")] * 3))))
    error = told(verdict(as_chat(means([(f"try{n}", "error: no such table") for n in range(6)]))))
    result = told(Repeat((), 3, 10, 3, results=True, rule=RESULT))
    message = told(verdict({"messages": [{"role": role, "content": "Go on?"} for role in ("assistant", "user")] * 3}))
    cooling = told(Repeat(("view",), 1, 10, 3, results=True, rule=REPEAT))

    assert "3 of the last 3 turns were view with the same input and the same result" in repeat
    assert "Ask a human." in repeat
    assert "the last 12 turns were 3 rounds of the same 4 steps (a, b, c, d)" in cycle
    assert "the last 6 results were the same error, whatever was tried (try0, try1" in error
    assert "3 of the last 10 turns returned the same result" in result
    assert "3 of the last 3 turns were the same message" in message
    assert "view was part of a loop, and this same turn stays refused for a while" in cooling
    for sentence in (repeat, cycle, error, result, message, cooling):
        assert "Progress means" in sentence


def compare(value: object, **keys: Any) -> tuple[bytes, Repeat | None]:  # noqa: ANN401  # of LoopDetection
    """What a detector makes of a body."""
    looks = Turns(LoopDetection(enabled=True, similarity="turns", **keys))
    return looks.compare(Document(json.dumps(value).encode()))


def test_a_cooldown_goes_by_the_newest_turn() -> None:
    """Whatever is thought and however long the history is, the same turn has the same name; another has another."""
    looping, again, other = [means(turns) for turns in ([_A] * 3, [_B, *[_A] * 4], [_B] * 3)]

    assert compare(as_chat(looping))[0] == compare(as_chat(again))[0] != compare(as_chat(other))[0]
    assert compare(as_chat(looping))[0] == compare(as_responses(means([_B, _A])), cooldown_seconds=9)[0]
    assert compare(as_chat(means([_B, _A]))) == (b"", None)
    _, found = compare(as_chat(means([_B, _A, new(1), _A, new(2), new(3), _A])), cooldown_seconds=9)
    assert found is not None
    assert (found.count, found.threshold, found.looping) == (2, 3, False)


@pytest.mark.parametrize("pointer", [{"previous_response_id": "r"}, {"conversation": "c"}, {"prompt": "x"}])
def test_a_request_without_its_history_is_not_counted(pointer: dict[str, Any]) -> None:
    """What the server keeps cannot be looked at, and the reason says so."""
    body = pointer if "prompt" in pointer else {**as_responses(means([_A] * 3)), **pointer}

    with pytest.raises(NotCounted) as raised:
        compare(body)

    assert raised.value.reason == "no_history"


def test_turns_are_shown_to_people() -> None:
    """The oldest first, each with its action and its result, cut where they are long."""
    looks = Turns(LoopDetection(enabled=True, similarity="turns"))
    turns = [Did((("run", {"a": 1}),), ("3 failed",)), Did((("run", {"a": "x" * 999}),), ("y" * 999,))]

    first, second = looks.show(Document(json.dumps(as_chat(turns)).encode()))

    assert first == 'run | {"a":1} | 3 failed'
    assert len(second) < 999
    assert looks.show(Document(json.dumps(as_chat([])).encode())) == ["no turns: the assistant has not done anything yet"]
