"""How strong a loop is, what that changes, and whose word starts anew."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from extproc.detectors.turns import Turns
from extproc.operator.admin.loop_report import describe_loops
from extproc.policy.bundle import LoopDetection
from extproc.request.document import Document
from extproc.sessions.rates import Prices
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.looping import encoded
from tests.support.service import make_service, sample
from tests.support.told import find_strength, is_loop, send, tell, tell_all
from tests.support.turn_writers import SHAPES, STYLES, Did, as_anthropic, as_chat, as_text
from tests.support.verdicts import Rules, Turn, judge, write

LONG_TEXT = "rows and rows of text " * 10


def act(turns: Sequence[Did], **loop: Any) -> str:  # noqa: ANN401  # of loop_detection
    """What is done about a chat."""
    return tell(as_chat(turns), **loop).action


def polls(result: str, times: int = 3, tool: str = "poll") -> list[Did]:
    """The same call with the same result."""
    return [Did(((tool, {}),), (result,), "", f"Thought no. {number}!") for number in range(times)]


def look_up(result: str, names: int = 6) -> list[Did]:
    """Six calls that bring back the same, of so many things."""
    return [Did((("get", {"id": n % names}),), (result,)) for n in range(6)]


_SAID = [Did((), (), LONG_TEXT + "fix the error", "Nothing to do.")] * 3
_OFFERS = {"tools": [{"type": "function", "function": {"name": "f"}}]}

STRENGTHS: dict[str, tuple[list[Did], dict[str, Any], str]] = {
    **{
        result[:40] or "nothing": (polls(result), {}, expected)
        for result, expected in {
            "ok": "weak",
            "": "weak",
            "x" * 199: "weak",
            "y" * 200: "strong",
            "error: boom": "strong",
            "Traceback (most recent call last):": "strong",
            "error: no such file": "strong",
            "curl: (7) Failed to connect: Connection refused": "weak",
            "error: 503 Service Unavailable": "weak",
            "the request failed: timed out": "weak",
            "error: rate limited": "weak",
            "error: 503 " + "x" * 200: "strong",
        }.items()
    },
    "many things that are not found": (look_up("error: not found"), {}, "weak"),
    "few things that are not found": (look_up("error: not found", 2), {}, "strong"),
    "many things that are denied": (look_up("error: denied"), {}, "strong"),
    "words that are not found": (
        [Did((), (), "error: no answer found", f"No. {n}!") for n in range(6)],
        {},
        "strong",
    ),
    "talk": (_SAID, {}, "strong"),
    "talk of an agent with tools": (_SAID, _OFFERS, "weak"),
}


@pytest.mark.parametrize(("turns", "more", "expected"), STRENGTHS.values(), ids=STRENGTHS)
def test_strength_of_loops(turns: list[Did], more: dict[str, Any], expected: str) -> None:
    """Errors and long results are strong; what may pass, what may not be there, and what a program says to an agent are not."""
    assert find_strength(as_chat(turns) | more) == expected


def test_long_results_are_told_apart() -> None:
    """How one failed is remembered, by all of it that says so."""
    results = ["all is well\n" * 60, "error: boom\n" + "x\n" * 300, "all is well\n" * 61]

    for _ in range(2):
        assert [is_loop(as_chat(look_up(result))) for result in results] == [False, True, False]


LADDERS: list[tuple[tuple[tuple[str, int], ...], dict[int, str]]] = [
    ((("reject", 3),), {2: "allow", 3: "warn", 13: "warn", 14: "reject"}),
    ((("throttle", 3),), {3: "warn", 14: "throttle"}),
    ((("steer", 3),), {3: "steer", 13: "steer", 14: "steer"}),
    ((("steer", 3), ("reject", 7)), {3: "steer", 13: "steer", 14: "reject"}),
    ((("steer", 3), ("land", 5), ("reject", 7)), {3: "steer", 13: "steer", 14: "land", 15: "land", 16: "reject"}),
    ((("steer", 3), ("throttle", 5), ("reject", 7)), {3: "steer", 13: "steer", 14: "throttle", 15: "throttle", 16: "reject"}),
    ((("throttle", 3), ("reject", 7)), {13: "throttle", 14: "reject"}),
]


@pytest.mark.parametrize(("ladder", "expected"), LADDERS)
def test_a_weak_loop_waits(ladder: tuple[tuple[str, int], ...], expected: dict[int, str]) -> None:
    """The mildest action, or a warning, until `weak_threshold`; then the next one, and two turns later the strictest."""
    (action, threshold), *later = ladder
    keys = {"action": action, "threshold_identical_requests": threshold, "escalate": dict(later), "max_delay_ms": 1}

    assert {times: act(polls("ok", times), weak_threshold=14, **keys) for times in expected} == expected
    for times in (3, 5, 7, 14):
        assert act(polls("error: boom", times), weak_threshold=14, **keys) == act(polls("ok", times), **keys)


def test_a_weak_cycle_waits_until_it_fills_what_is_looked_at() -> None:
    """One of three turns never stands fourteen times in 32: 30 full turns are enough for the next action, 32 for the last."""
    rules = Rules((("steer", 3), ("throttle", 5), ("reject", 7)))
    keys = {"action": "steer", "escalate": {"throttle": 5, "reject": 7}, "weak_threshold": 14, "max_delay_ms": 1}
    turns = [Turn("poll", argument, "ok") for argument in "abc"] * 11

    found = [tell(write(turns[:end], "chat", offers=True), **keys).action for end in (29, 30, 31, 32)]

    assert found == ["steer", "throttle", "throttle", "reject"]
    assert found == [judge(turns[:end], rules) for end in (29, 30, 31, 32)]


def test_a_tool_with_a_threshold_of_its_own_waits_as_well() -> None:
    """Its own threshold holds where it is higher."""
    keys = {"weak_threshold": 5, "action": "steer", "escalate": {"reject": 4}, "tools": {"poll": {"threshold": 8}}}

    assert [act(polls("ok", times), **keys) for times in (5, 7, 8, 9)] == ["allow", "allow", "steer", "reject"]


@pytest.mark.parametrize(("result", "expected"), [("ok", ["warn", "allow"]), ("error", ["reject", "reject"])])
def test_a_held_loop_trips_no_cooldown(result: str, expected: list[str]) -> None:
    """Only the strictest action does, in earnest."""
    bodies = [as_chat(polls(result, times)) for times in (3, 1)]

    assert [told.action for told in tell_all(bodies, weak_threshold=14, cooldown_seconds=60)] == expected


def test_strength_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """In the log, in `/loops`, in the metric by detector, and to people; not for requests that are counted."""
    service = make_service(policy("p", ANY, similarity="turns", action="steer", weak_threshold=14))
    looks, bodies = (
        Turns(LoopDetection(similarity="turns")),
        [encoded(as_chat(polls(result))) for result in ("ok", "error: boom")],
    )
    for body in bodies:
        send(service, body)

    labels = {"policy": "p", "detector": "default", "mode": "enforce", "action": "steer"}
    assert [sample(service, "detections_total", **labels, strength=each) for each in ("weak", "strong")] == [1, 1]
    assert [vars(record)["fields"]["strength"] for record in caplog.records] == ["weak", "strong"]
    loops = service.reporter.loops.list_loops()
    shown = describe_loops(loops, Prices(None), [], shows_callers=False, now=time.time())
    assert sorted(loop["strength"] for loop in shown) == ["strong", "weak"]
    described = [looks.describe(looks.compare(Document(body))[1]) for body in bodies]
    assert described == [f"poll: 3 of 3 turns (repeat, {strength})" for strength in ("weak", "strong")]


@pytest.mark.parametrize("shape", ["chat", "anthropic", "responses", "ollama"])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "steer"),
        (("Please try it once more.",), "allow"),
        (("Run 1: go on.", "Run 2: go on."), "reject"),
        (("<system-reminder>Go on.</system-reminder>",), "reject"),
    ],
)
def test_a_persons_word_starts_anew(words: tuple[str, ...], expected: str, shape: str) -> None:
    """The ladder starts at its first step; words that stand there twice, digits left out, are a program's."""
    said = [Did((), (), each, "It failed.") for each in words]
    turns = [*polls("error: boom", 3, "run"), *[t for each in said for t in (each, *polls("error: boom", 1, "run"))]]

    assert tell(SHAPES[shape](turns), action="steer", escalate={"reject": 4}).action == expected


def test_observations_of_text_agents_are_no_persons() -> None:
    """They follow an action, whatever they say."""
    turns = [*polls("error: boom", 3, "run"), Did((("look", {}),), ("a new sight",)), *polls("error: boom", 1, "run")]

    assert is_loop(as_text(turns, STYLES["fence"]))


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("write_turns", [as_chat, as_anthropic])
def test_notes_of_the_harness_are_part_of_no_result(write_turns: Any, role: str) -> None:  # noqa: ANN401  # a writer
    """Claude Code puts one into mid-conversation, with something new in it each time."""
    body = write_turns(polls("error: boom"))
    messages = []
    for number, message in enumerate(body["messages"]):
        messages.append(message)
        if message["role"] in {"tool", "user"} and number > 1:
            messages.append({"role": role, "content": f"{number} files are open, {number * 7} tokens are left."})

    assert len(messages) >= len(body["messages"]) + 2
    assert is_loop(body | {"messages": messages})


def declare(name: str, *, reads: bool) -> dict[str, Any]:
    """A tool with MCP's hint."""
    return {"name": name, "annotations": {"readOnlyHint": reads}}


def find_role(*names: str, **more: Any) -> str:  # noqa: ANN401  # of the body
    """What tools that are called at once do: a look that is repeated behind a change is none, nor is one behind these."""
    used = [Did(tuple((name, {}) for name in names), ("a.py",) * len(names))]
    look, change = polls("a.py", 1, "dir"), polls("done", 1, "mv")
    reads = not is_loop(as_chat([*used, *used, *change, *used]) | more)
    changes = not is_loop(as_chat([*look, *look, *used, *look]) | more)
    return {(True, False): "reads", (False, True): "changes"}.get((reads, changes), "")


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("read_file", "reads"),
        ("ls", "reads"),
        ("mcp__git__list_branches", "reads"),
        ("getIssue", "reads"),
        ("write_file", "changes"),
        ("cp", "changes"),
        ("mcp__git__create_branch", "changes"),
        ("deleteUser", "changes"),
        ("str_replace", "changes"),
        ("get_or_create_user", ""),
        ("TodoWrite", ""),
        ("bash", ""),
    ],
)
def test_names_of_tools_say_what_they_do(name: str, role: str) -> None:
    """The first verb does; two verbs may say nothing, and what an agent notes for itself changes nothing. Hints go before."""
    assert find_role(name) == role
    assert find_role(name, tools=[declare(name, reads=True)]) == "reads"
    assert find_role(name, tools=[declare(name, reads=False)]) == "changes"
    assert find_role(name, "cp") == "changes"
    assert find_role(name, "bash") in {"", "changes"}


@pytest.mark.parametrize("place", ["beside the function", "in the function"])
def test_hints_may_stand_in_functions_or_beside(place: str) -> None:
    """As clients pass them on."""
    hint = {"annotations": {"readOnlyHint": True}}
    function = {"name": "alpha"} | (hint if place == "in the function" else {})
    tool = {"type": "function", "function": function} | (hint if place == "beside the function" else {})

    assert find_role("alpha") == ""
    assert find_role("alpha", tools=[tool]) == "reads"


def test_a_change_that_failed_changes_nothing() -> None:
    """Nor does one before what is repeated."""
    look, change, failure = polls("a.py", 1, "ls"), polls("done", 1, "cp"), polls("error: boom", 1, "cp")

    assert act([*look, *look, *change, *look]) == "allow"
    assert act([*look, *look, *failure, *look]) == "reject"
    assert act([*change, *look, *look, *look]) == "reject"
