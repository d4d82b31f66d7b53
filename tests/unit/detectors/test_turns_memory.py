"""What `turns` remembers of earlier requests saves time and changes nothing: no outcome depends on it, and it is bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extproc.apis import open_conversation
from extproc.detectors.actions import read_text_action
from extproc.detectors.results import MAX_NORMALIZED
from extproc.detectors.turn import MAX_ENTRY, decode_turn, get_failure_id
from extproc.detectors.turns import Turns
from extproc.policy.bundle import LoopDetection
from extproc.request.document import INSPECTION, STEP, UNITS, Document, NotCounted
from tests.support.looping import encoded
from tests.support.loops import WRITERS
from tests.support.memory import forget
from tests.support.model_requests import BODIES, REQUESTS
from tests.support.told import tell
from tests.support.turn_writers import SHAPES, Did, as_chat

_SETTINGS: list[dict[str, Any]] = [
    {},
    {"normalize_results": False, "cooldown_seconds": 9},
    {"ignore_arguments": ["path"], "threshold_identical_requests": 2, "cooldown_seconds": 9},
    {"ignore_arguments": [], "tools": {"view": {"threshold": 5, "reason": "why"}, "poll*": {"allow": True}}},
]
DETECTORS = [Turns(LoopDetection(enabled=True, similarity="turns", **keys)) for keys in _SETTINGS]

_SAID_BESIDE = ["", "", "go on", "<system-reminder>turn @</system-reminder>", "<feedback>no. @</feedback>"]
_RESULTS = [
    *("", "ok", "an error", "took @ ms", "2026-11-22T06:14:@Z line @: not found", '{"id": @, "v": 0.5}', "news no. @"),
    *("step @ of many\n" * 12, "see /tmp/x-@/y\\n" * 20, "le caf\u00e9 a pris @ \u00b5s", "@ exit status 1 " * 9),
]
_CALLS = st.tuples(
    st.sampled_from(["view", "run", "poll"]),
    st.sampled_from([{}, {"path": "a.py"}, {"path": "b.py", "thought": "x"}, {"n": 1}, {"n": [0.5, 7]}]),
)
_TURNS = st.tuples(st.lists(_CALLS, min_size=1, max_size=2), st.sampled_from(_RESULTS), st.sampled_from(_SAID_BESIDE))


def _write(writer: str, before: list[Any], again: list[Any], times: int, more: dict[str, Any]) -> bytes:
    """An agent's request, whose turns differ in what changes by itself."""
    turns = [
        Did(tuple(calls), (result.replace("@", str(number)),) * len(calls), user.replace("@", str(number)), f"I think {number}")
        for number, (calls, result, user) in enumerate([*before, *again * times], 10)
    ]
    return encoded({**WRITERS[writer](turns), **more})


_WRITTEN = st.builds(
    _write,
    st.sampled_from(sorted(WRITERS)),
    st.lists(_TURNS, max_size=4),
    st.lists(_TURNS, min_size=1, max_size=3),
    st.integers(1, 7),
    st.sampled_from([{}, {}, {}, {"previous_response_id": "r"}]),
)
_BODIES = _WRITTEN | REQUESTS.map(encoded) | st.sampled_from(sorted(BODIES)).map(BODIES.__getitem__)


def say(look: Callable[[], object]) -> str:
    """What comes of a look into a body, and what that took of the bounds."""
    try:
        found = repr(look())
    except NotCounted as why:
        found = why.reason
    return f"{found} {INSPECTION.left}"


def compare_in_session(detector: Turns, data: bytes) -> object:
    """All that a request of a session leaves, and what is recalled where the same was in the ring before."""
    spelled, found, memory = detector.compare_in_session(Document(data))
    if memory is None:
        return spelled, found
    return spelled, found, memory.entry, memory.identity, memory.waits, memory.recall([memory.entry] * 4)


def say_all(detector: Turns, data: bytes) -> list[str]:
    """Everything that a detector says about a body."""
    return [
        say(lambda: detector.compare(Document(data))),
        say(lambda: compare_in_session(detector, data)),
        say(lambda: detector.show(Document(data))),
    ]


_HALVES = _write("chat", [], [([("view", {}), ("view", {"n": [0.5, 7]})], "", ""), ([("view", {})], _RESULTS[-1], "")], 3, {})
"""The numbers of its actions are counted where a result is read before its action, too."""


@settings(deadline=None)
@example([_HALVES], DETECTORS)
@given(st.lists(_BODIES, min_size=1, max_size=4), st.permutations(DETECTORS))
def test_what_was_seen_recently_changes_nothing(bodies: list[bytes], detectors: list[Turns]) -> None:
    """Whatever other callers sent before, and whatever other policies compare, each body has the outcome that it has alone."""
    fresh = []
    for data in bodies:
        for detector in DETECTORS:
            forget()
            fresh.append(say_all(detector, data))
    forget()
    for detector in detectors:
        for data in reversed(bodies):
            say_all(detector, data)

    assert [say_all(detector, data) for data in bodies for detector in DETECTORS] == fresh


_DONE = [Did((("run", {"path": f"{number % 3}.py"}),), (_RESULTS[number % len(_RESULTS)],)) for number in range(12)]
_LONG = [turn._replace(results=(f"{turn.results[0]} {'x' * 600}",)) for turn in _DONE]
_CUT = [turn._replace(results=("[cleared]",)) for turn in _DONE]
_PLACES = st.integers(0, len(_DONE))


def _write_part(shape: str, head: str, done: list[Did], places: list[int]) -> bytes:
    """A body with some of the turns, the oldest of them cleared."""
    start, cut, end = sorted(places)
    return encoded({"user": head, **SHAPES[shape](_CUT[start:cut] + done[cut:end])})


_PARTS = st.builds(
    _write_part,
    st.sampled_from(["chat", "anthropic", "responses", "gemini"]),
    st.sampled_from(["", "x", "xx"]),
    st.sampled_from([_DONE, _LONG]),
    st.lists(_PLACES, min_size=3, max_size=3),
)


@settings(deadline=None)
@given(st.lists(_PARTS, min_size=2, max_size=6), st.permutations(DETECTORS[:3]))
def test_messages_that_are_known_from_elsewhere_change_nothing(bodies: list[bytes], detectors: list[Turns]) -> None:
    """The same messages behind other heads, moved, or with others before and behind them: of other callers, as a rule."""
    fresh = []
    for data in bodies:
        for detector in detectors:
            forget()
            fresh.append(say_all(detector, data))
    forget()

    for _ in range(2):
        assert [say_all(detector, data) for data in bodies for detector in detectors] == fresh


_STUCK, _FAILS = Did((("run", {"path": "a.py"}),), ("news",)), Did((("run", {}),), ("error: no such file",))
_PATHS = st.lists(st.lists(st.sampled_from([_STUCK, _FAILS, Did((("view", {}),), ("ok",))]), min_size=1), max_size=5)


@settings(deadline=None)
@given(_PATHS, st.integers(1, 4), st.booleans())
def test_earlier_loops_are_the_same_where_earlier_requests_were_not_seen(
    paths: list[list[Did]], again: int, talks: bool
) -> None:
    """A detector that follows a conversation, and one that sees a single request of it, say the same of its earlier loops."""
    done = [turn for path in paths for turn in path] * again
    turns = [turn._replace(thought=f"step {place}" if talks else "") for place, turn in enumerate(done, 1)]
    follows = Turns(_STEERING)

    for count in range(1, min(len(turns), 40) + 1):
        body = encoded(as_chat(turns[:count]))
        before = [_find_earlier(detector, body) for detector in (follows, Turns(_STEERING))]
        assert before[0] == before[1]


_STEERING = LoopDetection(enabled=True, similarity="turns", action="steer")


def _find_earlier(detector: Turns, body: bytes) -> tuple[object, object, object]:
    """Whether a request is in a loop, and those that it shows to have been in one."""
    _, found, _ = detector.compare_in_session(Document(body))
    before = found.before if found is not None else None
    return found is not None and found.looping, before and before.last, before and before.earlier


def test_the_bound_on_normalised_results_holds_for_those_that_are_known() -> None:
    """Six results of full length are compared without what changes by itself, however often they were; one more is not."""
    turns = [Did((("run", {}),), (f"took {number} ms\n{'x' * (MAX_NORMALIZED - 20)}",)) for number in range(7)]
    forget()

    for _ in range(2):
        told = [tell(as_chat(turns[:count]), threshold_identical_requests=count).action for count in (6, 7)]
        assert told == ["reject", "allow"]


def test_numbers_that_are_bounded_are_not_remembered() -> None:
    """An action in a text that holds fractions takes its part of their bound each time."""
    forget()
    body = encoded({"messages": [{"role": "assistant", "content": '{"action": [0.5, 1.5]}'}]})

    left = [say_all(DETECTORS[0], body) for _ in range(3)]

    assert left[0] == left[1] == left[2]
    assert left[0][2].endswith(f" {UNITS - 4 * STEP}")


def test_policies_that_take_other_arguments_for_thoughts_share_nothing() -> None:
    """What one policy has read in a text is not reused for another policy that reads it differently."""
    text = '{"command": "ls", "why": "to see", "plan": "then edit"}'

    for _ in range(2):
        assert read_text_action(text, frozenset({"why"}))[1].endswith(b'{"command":"ls","plan":"then edit"}')
        assert read_text_action(text, frozenset({"plan"}))[1].endswith(b'{"command":"ls","why":"to see"}')


@pytest.mark.parametrize(("names", "known"), [(["a"] * 9, True), (list("abcdefgh"), True), (list("abcdefghi"), False)])
def test_actions_of_many_tools_are_not_remembered(names: list[str], known: bool) -> None:
    """A message with many names cannot fill the memory."""
    document = Document(encoded(as_chat([Did(tuple([(name, {}) for name in names]), ("seen",) * len(names))])))

    DETECTORS[0].compare_in_session(document)

    conversation = open_conversation(document)
    (action,) = [facts.action for facts in conversation.list_facts(0, len(conversation)) if facts.speaker == "assistant"]
    assert (action is not None) == known


def _entry(result: str, tool: str = "", said: str = "") -> bytes:
    """The entry of a turn in which a tool is called, or a user says something."""
    did = Did(((tool, {"n": 1}),), (result,)) if tool else Did((), (), said, "I see.")
    *_, memory = DETECTORS[0].compare_in_session(Document(encoded(as_chat([did]))))
    assert memory is not None
    return memory.entry


@pytest.mark.parametrize("tool", ["run", "r" * 31 + "\u00f6" * 9, "r" * 32 + "\u00f6" * 9, "\u00f6" * 40, "n" * 99])
def test_failing_results_are_told_apart_in_entries(tool: str) -> None:
    """By a few bytes behind the name, which numbers do not change; an entry stays as long as it may be."""
    entries = [_entry(f"error: job {number} is {word}", tool) for number, word in ((1, "broken"), (22, "broken"), (1, "lost"))]
    one, same, other = [get_failure_id(entry) for entry in entries]

    assert one == same != other
    assert len(one) == 3
    assert all(len(entry) <= MAX_ENTRY for entry in entries)
    assert get_failure_id(_entry("ok", tool)) == b""


def test_entries_of_the_version_before_are_read() -> None:
    """They have no such bytes; and what reads them there finds names and words where it looks for them."""
    called, talked = _entry("error: no", "run"), _entry("", said="error: no")

    for entry in (called, talked):
        kept, old = decode_turn(entry), decode_turn(entry[:-4])
        assert kept.failure_id
        assert old == kept._replace(failure_id=b"")
    assert called[25:].decode("utf-8", "ignore") == "run"
    assert len(talked[25:]) == 15
