"""When a loop will be refused, and the result that it repeats, on the page and in JSON."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from extproc.errors import UsageError
from extproc.operator.admin.row_states import write_duration, write_refusal
from extproc.settings import MAX_SHOWN, read_settings
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.operated import Operated, send
from tests.support.turn_writers import Did, as_chat

USER: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}
AGENTS: dict[str, Any] = {
    "similarity": "turns",
    "action": "steer",
    "escalate": {"land": 5, "reject": 7},
    "weak_threshold": 14,
    **USER,
}
LIVE = policy("live", ANY, **AGENTS)
CALLS = policy(
    "live", ANY, similarity="tool_calls", action="warn", escalate={"reject": 6},
    threshold_identical_requests=3, window_calls=20, **USER,
)  # fmt: skip
SECONDS = 5

Write = Callable[[int], Did]


class Clock:
    """The time of all requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.time()
        monkeypatch.setattr("extproc.operator.loop_table.time", lambda: self.now)
        monkeypatch.setattr("extproc.operator.admin.loop_report.time", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def make_turn(tool: str, result: str, query: object = 1) -> Did:
    return Did(((tool, {"q": query}),), (result,))


def fail(_: int) -> Did:
    return make_turn("crm", "error: it is down")


def poll(_: int) -> Did:
    return make_turn("job_status", "pending")


def alternate(number: int) -> Did:
    return make_turn("read_file", f"the file has line {number % 2}, " * 10, number % 2)


def circle(number: int) -> Did:
    return make_turn(f"tool_{number % 5}", f"the file has line {number % 5}, " * 10)


def fail_again(number: int) -> Did:
    return make_turn("crm", "error: it is down", number)


def return_same(number: int) -> Did:
    return make_turn("crm", "error: it is down", number // 3)


def talk(_: int) -> Did:
    return Did((), (), "Please go on with all of the work that is left to do now.")


SHAPES: list[tuple[dict[str, Any], Write]] = [
    (LIVE, fail),
    (LIVE, poll),
    (LIVE, alternate),
    (LIVE, circle),
    (LIVE, fail_again),
    (LIVE, talk),
    (policy("live", ANY, **{**AGENTS, "tools": {"crm": {"threshold": 4}}}), fail),
    (policy("live", ANY, **{**AGENTS, "escalate": {"reject": 4}}), poll),
    (CALLS, fail),
]


def read_row(made: Operated, **about: Any) -> dict[str, Any]:  # noqa: ANN401  # of `ask`
    (row,) = made.ask("/loops", **about)["conversations"]
    return dict(row)


def run_until_refused(made: Operated, write: Write, clock: Clock) -> list[dict[str, Any]]:
    """The forecasts before each turn that is not refused, by number of turns."""
    found: list[dict[str, Any]] = []
    for turns in range(1, 60):
        clock.now += SECONDS
        data = json.dumps(as_chat([write(number) for number in range(turns)])).encode()
        if send(made.service, 1, data) == [400]:
            return found
        rows = made.ask("/loops")["conversations"]
        ahead = rows[0]["next_refusal"] if rows else None
        found += [{**ahead, "turn": turns}] if ahead else []
    raise AssertionError("it is not refused")


@pytest.mark.parametrize(("document", "write"), SHAPES)
def test_forecast_is_what_happens(document: dict[str, Any], write: Write, clock: Clock) -> None:
    document["spec"]["loop_detection"]["reject_status"] = 400

    found = run_until_refused(Operated(document), write, clock)

    end = found[-1]["turn"] + 1
    assert [each["left"] for each in found] == [end - each["turn"] for each in found]
    assert len({each["at"] for each in found}) == 1
    for each in found[1:]:
        assert each["in_seconds"] == pytest.approx(each["left"] * SECONDS, abs=0.1)


def test_no_refusal_is_foreseen_without_one_in_the_policy(clock: Clock) -> None:
    made = Operated(policy("live", ANY, **{**AGENTS, "escalate": {"land": 5}}))
    with pytest.raises(AssertionError, match="not refused"):
        run_until_refused(made, fail, clock)

    assert read_row(made)["next_refusal"] is None


WINDOWS: list[tuple[dict[str, Any], float, str]] = [
    ({"window_type": "sliding_log"}, 5, "refused at request 10, in about 20 s"),
    ({"window_type": "sliding_log"}, 9, "refused at request 10 within 60 s, not at this pace"),
    ({"window_type": "sliding_ttl"}, 9, "refused at request 10, in about 36 s"),
    ({"mode": "shadow"}, 5, "would be refused at request 10, in about 20 s"),
]


@pytest.mark.parametrize(("keys", "seconds", "text"), WINDOWS)
def test_requests_have_the_pace_of_their_window(
    keys: dict[str, Any], seconds: float, text: str, clock: Clock
) -> None:
    made = Operated(
        policy(
            "p", ANY, action="warn", escalate={"reject": 10}, threshold_identical_requests=3,
            window_seconds=60, **{**USER, **keys},
        )
    )  # fmt: skip
    for _ in range(6):  # the store counts them all, because its own clock does not move
        clock.now += seconds
        send(made.service)

    assert write_refusal(read_row(made)) == text
    assert f'<div class="soft">{text}</div>' in made.read()


def make_stuck(clock: Clock, replicas: int = 1, **settings: Any) -> Operated:  # noqa: ANN401  # of `Operated`
    made = Operated(LIVE, replicas=replicas, **settings)
    for turns in range(1, 5):
        data = json.dumps(as_chat([fail(0)] * turns)).encode()
        clock.now += SECONDS
        send(made.services[turns % replicas], 1, data)
    return made


def test_replicas_agree_on_the_next_refusal(clock: Clock) -> None:
    made = make_stuck(clock, replicas=2)

    assert {read_row(made, replica=place)["next_refusal"]["left"] for place in (0, 1)} == {3}


def test_order_in_force_hides_the_next_refusal(clock: Clock) -> None:
    made = make_stuck(clock)
    before = write_refusal(read_row(made))
    made.give(kind="allow", caller={"x-user-id": "ann"}, seconds=60)

    assert before == "refused at turn 7, in about 15 s"
    assert write_refusal(read_row(made)) == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "1 s"), (119, "119 s"), (120, "2 min"), (7_200, "2h00m")]
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert write_duration(seconds) == text


# ---- Results


EVIL = "\x1b]0;owned\x07 <b>\u202eread\nme</b>"


def loop_result(made: Operated, result: str) -> None:
    did = [make_turn("read_file", result)] * 4
    send(made.service, 1, json.dumps(as_chat(did)).encode())


def test_results_are_private_by_default() -> None:
    made = Operated(LIVE)
    loop_result(made, "a secret, " * 30)

    assert read_row(made)["result"] is None
    assert "a secret" not in made.read() + repr(made.service.reporter.loops.copy())


@pytest.mark.parametrize("document", [LIVE, CALLS])
def test_first_characters_of_results_are_shown_on_demand(document: dict[str, Any]) -> None:
    made = Operated(document, show_results=20)
    loop_result(made, f"{EVIL}{'x' * 300}")

    assert read_row(made)["result"] == "\x1b]0;owned\x07 <b>\u202eread "
    assert "returned <code>\\x1b]0;owned\\x07 &lt;b&gt;\\u202eread </code>" in made.read()
    assert read_row(made, host="evil.example")["result"] is None


@pytest.mark.parametrize("text", ["-1", "201", "x", "1.5", "9" * 5_000])
def test_number_of_shown_characters_is_bounded(text: str) -> None:
    with pytest.raises(UsageError, match=f"at most {MAX_SHOWN}"):
        read_settings({"show_results": text}, {})
