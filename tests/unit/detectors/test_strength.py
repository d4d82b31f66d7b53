"""How strong a loop is, and which words and changes end a repetition."""

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
from tests.support.messages import encoded
from tests.support.service import make_service, sample
from tests.support.told import find_strength, is_loop, send, tell, tell_all
from tests.support.turn_writers import SHAPES, Did, as_chat

LONG_TEXT = "rows and rows of text " * 10


def act(turns: Sequence[Did], **loop: Any) -> str:  # noqa: ANN401  # of loop_detection
    return tell(as_chat(turns), **loop).action


def polls(result: str, times: int = 3, tool: str = "poll") -> list[Did]:
    return [Did(((tool, {}),), (result,), "", f"Thought no. {number}!") for number in range(times)]


def watch(result: str) -> list[Did]:
    """Polls whose result contains the seconds that have passed."""
    return [poll for n in range(3) for poll in polls(result.format(f"{n + 7} seconds"), 1)]


def look_up(result: str, names: int = 6) -> list[Did]:
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
    "a long result in which time moves": (watch("Up {}\n" + LONG_TEXT), {}, "weak"),
    "a long error in which time moves": (watch("error: boom, {}\n" + LONG_TEXT), {}, "strong"),
    "a long temporary error": (watch("error: 503 {}\n" + LONG_TEXT), {}, "strong"),
    "a cycle in which time moves": (
        [turn for poll in watch("Up {}\n" + LONG_TEXT) for turn in (poll, *polls("ok", 1, "nap"))],
        {},
        "weak",
    ),
    "a cycle with a long result that stays": (
        [turn for poll in watch("Up {}") for turn in (poll, *polls(LONG_TEXT, 1, "view"))],
        {},
        "strong",
    ),
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
def test_loop_is_strong_or_weak(turns: list[Did], more: dict[str, Any], expected: str) -> None:
    """Errors and long results that do not change are strong.

    Transient errors, missing things and talk to an agent with tools are weak.
    """
    assert find_strength(as_chat(turns) | more) == expected


def test_failure_of_long_result_is_remembered_by_its_text() -> None:
    results = ["all is well\n" * 60, "error: boom\n" + "x\n" * 300, "all is well\n" * 61]

    for _ in range(2):
        assert [is_loop(as_chat(look_up(result))) for result in results] == [False, True, False]


LADDERS: list[tuple[tuple[tuple[str, int], ...], dict[int, str]]] = [
    ((("reject", 3),), {2: "allow", 3: "warn", 13: "warn", 14: "reject"}),
    ((("throttle", 3),), {3: "warn", 14: "throttle"}),
    ((("steer", 3),), {3: "steer", 14: "steer"}),
    ((("steer", 3), ("reject", 7)), {3: "steer", 13: "steer", 14: "reject"}),
    (
        (("steer", 3), ("land", 5), ("reject", 7)),
        {3: "steer", 13: "steer", 14: "land", 15: "land", 16: "reject"},
    ),
    ((("throttle", 3), ("reject", 7)), {13: "throttle", 14: "reject"}),
]


@pytest.mark.parametrize(("ladder", "expected"), LADDERS)
def test_weak_loop_waits_for_weak_threshold(
    ladder: tuple[tuple[str, int], ...], expected: dict[int, str]
) -> None:
    (action, threshold), *later = ladder
    keys = {
        "action": action,
        "threshold_identical_requests": threshold,
        "escalate": dict(later),
        "max_delay_ms": 1,
    }

    assert {
        times: act(polls("ok", times), weak_threshold=14, **keys) for times in expected
    } == expected


def test_weak_cycle_waits_until_it_fills_32_turns() -> None:
    """A cycle of three never repeats fourteen times in 32: 30 turns allow the next action."""
    keys = {
        "action": "steer",
        "escalate": {"throttle": 5, "reject": 7},
        "weak_threshold": 14,
        "max_delay_ms": 1,
    }
    turns = [polls("ok", 1, tool)[0] for tool in "abc"] * 11

    assert [act(turns[:end], **keys) for end in (29, 30, 31, 32)] == [
        "steer",
        "throttle",
        "throttle",
        "reject",
    ]


@pytest.mark.parametrize(
    ("result", "expected"), [("ok", ["warn", "allow"]), ("error", ["reject", "reject"])]
)
def test_weak_loop_starts_no_cooldown(result: str, expected: list[str]) -> None:
    bodies = [as_chat(polls(result, times)) for times in (3, 1)]

    assert [
        told.action for told in tell_all(bodies, weak_threshold=14, cooldown_seconds=60)
    ] == expected


def test_strength_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    service = make_service(policy("p", ANY, similarity="turns", action="steer", weak_threshold=14))
    looks, bodies = (
        Turns(LoopDetection(similarity="turns")),
        [encoded(as_chat(polls(result))) for result in ("ok", "error: boom")],
    )
    for body in bodies:
        send(service, body)

    labels = {"policy": "p", "detector": "default", "mode": "enforce", "action": "steer"}
    assert [
        sample(service, "detections_total", **labels, strength=each) for each in ("weak", "strong")
    ] == [1, 1]
    assert [vars(record)["fields"]["strength"] for record in caplog.records] == ["weak", "strong"]
    loops = service.reporter.loops.list_loops()
    shown = describe_loops(loops, Prices(None), [], shows_callers=False, now=time.time())
    assert sorted(loop["strength"] for loop in shown) == ["strong", "weak"]
    described = [looks.describe(looks.compare(Document(body))[1]) for body in bodies]
    assert described == [
        f"poll: 3 of 3 turns (repeat, {strength})" for strength in ("weak", "strong")
    ]


@pytest.mark.parametrize("shape", ["chat", "anthropic"])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "steer"),
        (("Please try it once more.",), "allow"),
        (("Run 1: go on.", "Run 2: go on."), "reject"),
        (("<system-reminder>Go on.</system-reminder>",), "reject"),
    ],
)
def test_word_of_a_person_starts_anew(words: tuple[str, ...], expected: str, shape: str) -> None:
    """Words that occur twice, digits left out, are those of a program."""
    said = [Did((), (), each, "It failed.") for each in words]
    turns = [
        *polls("error: boom", 3, "run"),
        *[t for each in said for t in (each, *polls("error: boom", 1, "run"))],
    ]

    assert tell(SHAPES[shape](turns), action="steer", escalate={"reject": 4}).action == expected


def declare(name: str, *, reads: bool) -> dict[str, Any]:
    return {"name": name, "annotations": {"readOnlyHint": reads}}


def find_role(*names: str, **more: Any) -> str:  # noqa: ANN401  # of the body
    """What tools do: a read after a change is no repetition, nor is one after these tools."""
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
def test_tool_names_tell_reads_from_changes(name: str, role: str) -> None:
    """The first verb decides; notes an agent writes for itself change nothing.

    Hints go before names.
    """
    assert find_role(name) == role
    assert find_role(name, tools=[declare(name, reads=True)]) == "reads"
    assert find_role(name, tools=[declare(name, reads=False)]) == "changes"
    assert find_role(name, "cp") == "changes"
    assert find_role(name, "bash") in {"", "changes"}


@pytest.mark.parametrize("place", ["beside the function", "in the function"])
def test_read_only_hint_may_be_in_or_beside_function(place: str) -> None:
    hint = {"annotations": {"readOnlyHint": True}}
    function = {"name": "alpha"} | (hint if place == "in the function" else {})
    tool = {"type": "function", "function": function} | (
        hint if place == "beside the function" else {}
    )

    assert find_role("alpha") == ""
    assert find_role("alpha", tools=[tool]) == "reads"


def test_only_successful_change_ends_a_repeated_read() -> None:
    look, change, failure = (
        polls("a.py", 1, "ls"),
        polls("done", 1, "cp"),
        polls("error: boom", 1, "cp"),
    )

    assert act([*look, *look, *change, *look]) == "allow"
    assert act([*look, *look, *failure, *look]) == "reject"
    assert act([*change, *look, *look, *look]) == "reject"
