"""What `turns` remembers of requests, here and in the store.

`test_known_messages` proves that verdicts ignore it.
"""

import pytest
from hypothesis import given, settings, strategies as st

from extproc.apis import open_conversation
from extproc.detectors.actions import read_text_action
from extproc.detectors.results import MAX_NORMALIZED
from extproc.detectors.turn import MAX_ENTRY, decode_turn, get_failure_id
from extproc.detectors.turns import Turns
from extproc.policy.bundle import LoopDetection
from extproc.request.document import INSPECTION, STEP, UNITS, Document
from tests.support.memory import forget
from tests.support.messages import encoded
from tests.support.told import tell
from tests.support.turn_writers import Did, as_chat

DETECTOR = Turns(LoopDetection(enabled=True, similarity="turns"))
_STEERING = LoopDetection(enabled=True, similarity="turns", action="steer")
_STUCK, _FAILS = (
    Did((("run", {"path": "a.py"}),), ("news",)),
    Did((("run", {}),), ("error: no such file",)),
)
_PATHS = st.lists(
    st.lists(st.sampled_from([_STUCK, _FAILS, Did((("view", {}),), ("ok",))]), min_size=1),
    max_size=5,
)


@pytest.mark.slow
@settings(deadline=None)
@given(_PATHS, st.integers(1, 4), st.booleans())
def test_earlier_loops_are_found_without_earlier_requests(
    paths: list[list[Did]], again: int, talks: bool
) -> None:
    done = [turn for path in paths for turn in path] * again
    turns = [
        turn._replace(thought=f"step {place}" if talks else "")
        for place, turn in enumerate(done, 1)
    ]
    follows = Turns(_STEERING)

    for count in range(1, min(len(turns), 40) + 1):
        body = encoded(as_chat(turns[:count]))
        _, followed, _ = follows.compare_in_session(Document(body))
        _, alone, _ = Turns(_STEERING).compare_in_session(Document(body))
        assert (followed and (followed.looping, followed.before)) == (
            alone and (alone.looping, alone.before)
        )


def test_known_results_count_towards_the_normalising_bound() -> None:
    turns = [
        Did((("run", {}),), (f"took {number} ms\n{'x' * (MAX_NORMALIZED - 20)}",))
        for number in range(7)
    ]
    forget()

    for _ in range(2):
        told = [
            tell(as_chat(turns[:count]), threshold_identical_requests=count).action
            for count in (6, 7)
        ]
        assert told == ["reject", "allow"]


def test_known_text_action_is_charged_each_time() -> None:
    forget()
    body = encoded({"messages": [{"role": "assistant", "content": '{"action": [0.5, 1.5]}'}]})

    left = []
    for _ in range(3):
        DETECTOR.show(Document(body))
        left.append(INSPECTION.left)

    assert left == [UNITS - 4 * STEP] * 3


def test_text_action_is_remembered_per_ignored_arguments() -> None:
    text = '{"command": "ls", "why": "to see", "plan": "then edit"}'

    for _ in range(2):
        assert read_text_action(text, frozenset({"why"}))[1].endswith(
            b'{"command":"ls","plan":"then edit"}'
        )
        assert read_text_action(text, frozenset({"plan"}))[1].endswith(
            b'{"command":"ls","why":"to see"}'
        )


@pytest.mark.parametrize(
    ("names", "known"), [(["a"] * 9, True), (list("abcdefgh"), True), (list("abcdefghi"), False)]
)
def test_actions_of_many_tools_are_not_remembered(names: list[str], known: bool) -> None:
    document = Document(
        encoded(as_chat([Did(tuple([(name, {}) for name in names]), ("seen",) * len(names))]))
    )

    DETECTOR.compare_in_session(document)

    conversation = open_conversation(document)
    (action,) = [
        facts.action
        for facts in conversation.list_facts(0, len(conversation))
        if facts.speaker == "assistant"
    ]
    assert (action is not None) == known


def _entry(result: str, tool: str = "", said: str = "") -> bytes:
    did = Did(((tool, {"n": 1}),), (result,)) if tool else Did((), (), said, "I see.")
    *_, memory = DETECTOR.compare_in_session(Document(encoded(as_chat([did]))))
    assert memory is not None
    return memory.entry


@pytest.mark.parametrize(
    "tool", ["run", "r" * 31 + "\u00f6" * 9, "r" * 32 + "\u00f6" * 9, "\u00f6" * 40, "n" * 99]
)
def test_entries_tell_failures_apart(tool: str) -> None:
    """By a few bytes behind the name, which do not depend on numbers."""
    entries = [
        _entry(f"error: job {number} is {word}", tool)
        for number, word in ((1, "broken"), (22, "broken"), (1, "lost"))
    ]
    one, same, other = [get_failure_id(entry) for entry in entries]

    assert one == same != other
    assert len(one) == 3
    assert all(len(entry) <= MAX_ENTRY for entry in entries)
    assert get_failure_id(_entry("ok", tool)) == b""


def test_entries_of_previous_version_are_read() -> None:
    """They lack these bytes, and that version finds names and words in its places."""
    called, talked = _entry("error: no", "run"), _entry("", said="error: no")

    for entry in (called, talked):
        kept, old = decode_turn(entry), decode_turn(entry[:-4])
        assert kept.failure_id
        assert old == kept._replace(failure_id=b"")
    assert called[25:].decode("utf-8", "ignore") == "run"
    assert len(talked[25:]) == 15


def test_equal_words_after_another_turn_are_no_retry() -> None:
    """However long the history is."""
    spoken = Did((), user="Continue.", thought="I am done.")
    identities = [
        memory.identity
        for count in (40, 40, 41)
        if (body := encoded(as_chat([*[_STUCK] * count, spoken])))
        and (memory := DETECTOR.compare_in_session(Document(body))[2])
    ]

    assert identities[0] == identities[1] != identities[2]
