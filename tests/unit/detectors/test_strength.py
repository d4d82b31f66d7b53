"""How strong a loop is, what that changes, and whose word starts anew."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest

from extproc.detectors import make_similarity
from extproc.detectors.tools import CHANGES, READS, Limit, ToolLimits, find_role
from extproc.detectors.turns import Turns
from extproc.engine.plan import Detector
from extproc.operator.admin.loop_report import describe_loops
from extproc.operator.loop_rows import LoopDocument
from extproc.policy.bundle import LoopDetection
from extproc.request.document import Document
from extproc.sessions.prices import Prices
from extproc.store.rules.windows import UNCOUNTED
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.looping import encoded
from tests.support.service import make_service, sample
from tests.support.steering import ask
from tests.support.turn_writers import SHAPES, STYLES, Did, as_anthropic, as_chat, as_text
from tests.support.verdicts import Rules, Turn, judge, write

LONG_TEXT = "rows and rows of text " * 10


def detect(**loop: Any) -> Detector:  # noqa: ANN401  # keys of loop_detection
    """The detector of an entry."""
    made = LoopDetection.model_validate({"enabled": True, "similarity": "turns", **loop})
    return Detector("p", "turns", made, make_similarity(made), shadow=False, namespace="")


def act(detector: Detector, body: object) -> str:
    """What is done about a request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = detector.similarity.compare(Document(data))[1]
    return detector.judge("0" * 8, "0" * 16, UNCOUNTED, detector.similarity, found).action.value


def strength(turns: Sequence[Did], **more: Any) -> str:  # noqa: ANN401  # of the body
    """How strong the loop at the end of a chat is; empty where there is none."""
    detector = detect()
    found = detector.similarity.compare(Document(json.dumps(as_chat(turns) | more).encode()))[1]
    return found.strength if found is not None else ""


def polls(result: str, times: int = 3, tool: str = "poll") -> list[Did]:
    """The same call with the same result."""
    return [Did(((tool, {}),), (result,), "", f"Thought no. {number}!") for number in range(times)]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ("ok", "weak"),
        ("", "weak"),
        ("x" * 199, "weak"),
        ("x" * 200, "strong"),
        ("error: boom", "strong"),
        ("Traceback (most recent call last):", "strong"),
        ("error: no such file", "strong"),
        ("curl: (7) Failed to connect: Connection refused", "weak"),
        ("error: 503 Service Unavailable", "weak"),
        ("the request failed: timed out", "weak"),
        ("error: rate limited", "weak"),
        ("error: 503 " + "x" * 200, "strong"),
    ],
)
def test_errors_and_long_results_are_strong(result: str, expected: str) -> None:
    """But for errors that pass by themselves."""
    assert strength(polls(result)) == expected


def test_many_look_ups_are_weak_and_one_that_is_repeated_is_strong() -> None:
    """What is not there was looked for under another name each time, or under the same again."""
    many = [Did((("get", {"id": n}),), ("error: not found",)) for n in range(6)]
    few = [Did((("get", {"id": n % 2}),), ("error: not found",)) for n in range(6)]
    other = [Did((("get", {"id": n}),), ("error: denied",)) for n in range(6)]

    said = [Did((), (), "error: your answer was not found", f"Prose no. {n}!") for n in range(6)]

    assert [strength(many), strength(few), strength(other), strength(said)] == ["weak", "strong", "strong", "strong"]


def test_talk_of_an_agent_with_tools_is_weak() -> None:
    """What a program says to it may be long or about errors; where there are no tools, it may be what came of an action."""
    said = [Did((), (), LONG_TEXT + "fix the error", "Nothing to do.")] * 3
    offers = {"tools": [{"type": "function", "function": {"name": "f"}}]}

    assert strength(said) == "strong"
    assert strength(said, **offers) == "weak"


def test_long_results_are_told_apart() -> None:
    """How one failed is remembered, by all of it that says so."""
    turns = Turns(LoopDetection(enabled=True, similarity="turns"))
    results = ["all is well\n" * 60, "error: boom\n" + "x\n" * 300, "all is well\n" * 61]
    body = as_chat([Did((("do", {"at": place}),), (result,)) for place, result in enumerate(results)])

    for _ in range(2):
        history = turns.rule.read(Document(json.dumps(body).encode()))
        assert [turn.failed for turn in history.newest(3)] == [False, True, False]


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
    keys: dict[str, Any] = {"action": action, "threshold_identical_requests": threshold, "escalate": dict(later)}
    patient, plain = detect(weak_threshold=14, **keys), detect(**keys)

    assert {times: act(patient, as_chat(polls("ok", times))) for times in expected} == expected
    for times in (3, 5, 7, 14):
        assert act(patient, as_chat(polls("error: boom", times))) == act(plain, as_chat(polls("ok", times)))


def test_a_weak_cycle_waits_until_it_fills_what_is_looked_at() -> None:
    """One of three turns never stands fourteen times in 32: 30 full turns are enough for the next action, 32 for the last."""
    rules = Rules((("steer", 3), ("throttle", 5), ("reject", 7)))
    detector = detect(action="steer", escalate={"throttle": 5, "reject": 7}, weak_threshold=14)
    turns = [Turn("poll", argument, "ok") for argument in "abc"] * 11

    found = [act(detector, write(turns[:end], "chat", offers=True)) for end in (29, 30, 31, 32)]

    assert found == ["steer", "throttle", "throttle", "reject"]
    assert found == [judge(turns[:end], rules) for end in (29, 30, 31, 32)]


def test_a_tool_with_a_threshold_of_its_own_waits_as_well() -> None:
    """Its own threshold holds where it is higher."""
    detector = detect(weak_threshold=5, action="steer", escalate={"reject": 4}, tools={"poll": {"threshold": 8}})

    assert [act(detector, as_chat(polls("ok", times))) for times in (5, 7, 8, 9)] == ["allow", "allow", "steer", "reject"]


def test_a_held_loop_trips_no_cooldown() -> None:
    """Only the strictest action does, in earnest."""
    detector = detect(weak_threshold=14, cooldown_seconds=60)
    weak, strong = [
        detector.similarity.compare(Document(json.dumps(as_chat(polls(result))).encode()))[1] for result in ("ok", "error")
    ]

    thresholds = [
        hit.threshold for found in (weak, strong) if (hit := detector.make_hit("", "0", "0", detector.similarity, found))
    ]
    assert thresholds[0] > 1
    assert thresholds[1] == 1


def test_people_are_told_the_strength() -> None:
    """In a few words, as `explain` shows them."""
    similarity = detect().similarity
    weak, strong = [similarity.compare(Document(json.dumps(as_chat(polls(result))).encode()))[1] for result in ("ok", "error")]

    assert similarity.describe(weak) == "poll: 3 of 3 turns (repeat, weak)"
    assert similarity.describe(strong) == "poll: 3 of 3 turns (repeat, strong)"


def test_strength_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """In the log, in `/loops`, in the metric by detector, and in events; not for requests that are counted."""
    service = make_service(policy("p", ANY, similarity="turns", action="steer", weak_threshold=14))
    for result in ("ok", "error: boom"):
        ask(service, encoded(as_chat(polls(result))))

    loops = service.reporter.loops.copy()
    labels = {"policy": "p", "detector": "default", "mode": "enforce", "action": "steer"}
    assert sorted(loop.strength for loop in loops) == ["strong", "weak"]
    assert [sample(service, "detections_total", **labels, strength=each) for each in ("weak", "strong")] == [1, 1]
    assert [vars(record)["fields"]["strength"] for record in caplog.records] == ["weak", "strong"]
    shown = describe_loops(LoopDocument(loops, []), Prices(None), [], shows_callers=False, now=time.time())
    assert sorted(loop["strength"] for loop in shown) == ["strong", "weak"]


@pytest.mark.parametrize("shape", ["chat", "anthropic", "responses", "ollama"])
def test_a_persons_word_starts_anew(shape: str) -> None:
    """The ladder starts at its first step; words that stand there twice, digits left out, are a program's."""
    detector = detect(action="steer", escalate={"reject": 4})

    def asked(*words: str) -> str:
        said = [Did((), (), each, "It failed.") for each in words]
        turns = [*polls("error: boom", 3, "run"), *[t for each in said for t in (each, *polls("error: boom", 1, "run"))]]
        return act(detector, SHAPES[shape](turns))

    assert asked() == "steer"
    assert asked("Please try it once more.") == "allow"
    assert asked("Run 1: go on.", "Run 2: go on.") == "reject"
    assert asked("<system-reminder>Go on.</system-reminder>") == "reject"


def test_observations_of_text_agents_are_no_persons() -> None:
    """They follow an action, whatever they say."""
    turns = [*polls("error: boom", 3, "run"), Did((("look", {}),), ("a new sight",)), *polls("error: boom", 1, "run")]

    assert act(detect(), as_text(turns, STYLES["fence"])) == "reject"


@pytest.mark.parametrize("role", ["system", "developer"])
def test_notes_of_the_harness_are_part_of_no_result(role: str) -> None:
    """Claude Code puts one into mid-conversation, with something new in it each time."""
    for write_turns in (as_chat, as_anthropic):
        body = write_turns(polls("error: boom"))
        messages = []
        for number, message in enumerate(body["messages"]):
            messages.append(message)
            if message["role"] in {"tool", "user"} and number > 1:
                messages.append({"role": role, "content": f"{number} files are open, {number * 7} tokens are left."})
        assert len(messages) >= len(body["messages"]) + 2
        assert act(detect(), body | {"messages": messages}) == "reject"


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("read_file", READS),
        ("ls", READS),
        ("mcp__git__list_branches", READS),
        ("getIssue", READS),
        ("write_file", CHANGES),
        ("cp", CHANGES),
        ("mcp__git__create_branch", CHANGES),
        ("deleteUser", CHANGES),
        ("str_replace", CHANGES),
        ("get_or_create_user", 0),
        ("TodoWrite", 0),
        ("bash", 0),
        ("", 0),
    ],
)
def test_names_of_tools_say_what_they_do(name: str, role: int) -> None:
    """The first verb does; two verbs may say nothing, and what an agent notes for itself changes nothing."""
    assert find_role((name,), {}) == role
    assert find_role((name,), {name: True}) == READS
    assert find_role((name,), {name: False}) == CHANGES
    assert find_role((name, "cp"), {}) == CHANGES
    assert find_role((name, "bash"), {}) in {0, CHANGES}


@pytest.mark.parametrize(
    "tools",
    [
        [
            {"name": "alpha", "annotations": {"readOnlyHint": True}},
            {"name": "beta", "annotations": {"readOnlyHint": False}},
        ],
        [
            {"type": "function", "function": {"name": "alpha"}, "annotations": {"readOnlyHint": True}},
            {"type": "function", "function": {"name": "beta", "annotations": {"readOnlyHint": False}}},
        ],
    ],
    ids=["flat", "nested"],
)
def test_hints_say_what_tools_do_whose_names_do_not(tools: list[dict[str, Any]]) -> None:
    """MCP's `readOnlyHint`, where a client passes it on: a look behind a change starts anew."""
    look, change = polls(LONG_TEXT, 1, "alpha"), polls("done", 1, "beta")
    turns = [*look, *look, *change, *look]

    assert act(detect(), as_chat(turns)) == "reject"
    assert act(detect(), as_chat(turns) | {"tools": tools}) == "allow"
    assert act(detect(), as_chat([*look * 3]) | {"tools": tools}) == "reject"


def test_a_change_that_failed_changes_nothing() -> None:
    """Nor does one before what is repeated."""
    look, change, failure = polls("a.py", 1, "ls"), polls("done", 1, "cp"), polls("error: boom", 1, "cp")

    assert act(detect(), as_chat([*look, *look, *change, *look])) == "allow"
    assert act(detect(), as_chat([*look, *look, *failure, *look])) == "reject"
    assert act(detect(), as_chat([*change, *look, *look, *look])) == "reject"


def test_thresholds_that_are_omitted_are_those_of_all_loops() -> None:
    """A policy without `weak_threshold` acts as ever."""
    similarity = detect(escalate={}, tools={"x": {"threshold": 5}}).similarity

    assert isinstance(similarity, Turns)
    assert similarity.rule.find_loop(similarity.rule.read(Document(json.dumps(as_chat(polls("ok"))).encode()))) is not None
    assert ToolLimits(3, {"x": Limit(5)}).of(("x",)).threshold == 5
    assert act(detect(), as_chat(polls("ok"))) == "reject"
