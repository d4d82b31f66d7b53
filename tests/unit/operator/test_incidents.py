"""A tool that fails for many is one incident: its agents wait, and no caller can make one alone."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from extproc.operator.incident_table import LONGEST_SECONDS, REST_SECONDS
from extproc.operator.loop_rows import INCIDENT_SECONDS
from extproc.operator.row_events import IncidentEvents
from tests.support.command import find_missing
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.messages import body, headers
from tests.support.operated import Ahead, Operated
from tests.support.service import CHAT, decoded, exchange, metadata_of
from tests.support.steering import TURNS, steered
from tests.support.turn_writers import Did, as_anthropic, as_chat, as_responses

DOWN = "error: the database is on fire"
STEER: dict[str, Any] = {**TURNS, "limit_keys": ["header:x-user-id"]}
PATHS = {as_responses: "/v1/responses", as_anthropic: "/v1/messages"}


class Fleet(Operated):
    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *policies: dict[str, Any],
        replicas: int = 1,
        **loop: Any,  # noqa: ANN401  # keys of loop_detection
    ) -> None:
        self.clock = Ahead(monkeypatch)
        super().__init__(*(policies or (policy("p", ANY, **{**STEER, **loop}),)), replicas=replicas)

    def send(
        self,
        caller: str,
        task: str,
        times: int = 5,
        *,
        tool: str = "search",
        error: str = DOWN,
        write: Any = as_chat,  # noqa: ANN401  # one of `turn_writers`
        replica: int = 0,
    ) -> Any:  # noqa: ANN401  # a reply
        """The reply to a conversation about a task in which a tool has failed so often."""
        self.clock.seconds += 1
        done = [
            Did(((tool, {"about": task}),), (error,), "", f"{task}: thought {n}", n)
            for n in range(1, times + 1)
        ]
        sent = headers(PATHS.get(write, CHAT), x_user_id=caller)
        return exchange(self.services[replica], sent, body(json.dumps(write(done)).encode()))[-1]

    def act(self, *sent: Any, **more: Any) -> str:  # noqa: ANN401  # as `send`
        return str(metadata_of(decoded(self.send(*sent, **more))).get("action", "allow"))

    def fail(self, callers: str = "ab", tasks: str = "123", *more: Any, **loop: Any) -> list[str]:  # noqa: ANN401  # as `send`
        return [self.act(caller, task, *more, **loop) for task in tasks for caller in callers]

    def list_incidents(self) -> list[dict[str, Any]]:
        incidents: list[dict[str, Any]] = self.ask("/loops")["incidents"]
        return incidents


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    return Fleet(monkeypatch)


@pytest.mark.parametrize(("times", "early"), [(3, "steer"), (5, "reject")])
def test_fifth_failing_session_begins_an_incident(fleet: Fleet, times: int, early: str) -> None:
    assert fleet.fail("ab", "123", times) == [early] * 4 + ["steer"] * 2
    note = json.dumps(steered(decoded(fleet.send("c", "9", times))))
    assert (
        find_missing(
            note,
            "Tool failing: ",
            "fails in the same way for other agents",
            "Wait before you try it again.",
        )
        == []
    )
    assert "requests will be refused" not in note
    assert fleet.act("a", "2", 2) == "allow"


@pytest.mark.parametrize("write", [as_chat, as_responses, as_anthropic])
@pytest.mark.parametrize(
    "error", [DOWN, "500 Internal Server Error: exception", "error: 503 Service Unavailable"]
)
def test_server_errors_are_incidents_in_every_api(fleet: Fleet, error: str, write: Any) -> None:  # noqa: ANN401
    assert fleet.fail(error=error, write=write)[-1] == "steer"


@pytest.mark.parametrize(
    "error",
    [
        "all is well " * 20,
        "error: no such file",
        "404 Not Found",
        "error: missing required argument query",
        "MCP error -32602: Invalid arguments for tool search",
        "Error: Unknown tool: search",
        "1 validation error for search: query: field required",
    ],
)
def test_client_errors_are_no_incident(fleet: Fleet, error: str) -> None:
    assert set(fleet.fail(error=error)) == {"reject"}


@pytest.mark.parametrize(
    ("callers", "tasks"), [("a", "123456789"), ("ab", "12"), ("abcdabcdabcd", "1")]
)
def test_few_callers_or_sessions_make_no_incident(fleet: Fleet, callers: str, tasks: str) -> None:
    assert set(fleet.fail(callers, tasks)) == {"reject"}


def test_growing_session_counts_once(fleet: Fleet) -> None:
    assert [fleet.act(caller, "1", times) for times in range(5, 10) for caller in "abcd"] == [
        "reject"
    ] * 20


def test_other_tools_and_errors_are_not_spared(fleet: Fleet) -> None:
    fleet.fail()

    assert fleet.act("a", "1", tool="read") == "reject"
    assert fleet.act("a", "1", error="error: another one") == "reject"
    assert fleet.act("a", "1") == "steer"


def test_incident_ends_when_few_sessions_are_left(fleet: Fleet) -> None:
    told: list[tuple[str, str, Mapping[str, object]]] = []
    events = IncidentEvents(lambda *event: told.append(event), lambda: False)

    def look(callers: str, tasks: str) -> list[str]:
        actions = fleet.fail(callers, tasks)
        events.look(fleet.service.reporter.incidents.list_incidents())
        return actions

    assert (look("ab", "12"), told) == (["reject"] * 4, [])
    for _ in range(3):
        look("ab", "123")
    assert [(kind, subject) for kind, subject, _ in told] == [("tool_failing", "p")]
    assert [told[0][2][name] for name in ("gen_ai.tool.name", "callers", "sessions")] == [
        "search",
        2,
        6,
    ]
    (first,) = fleet.list_incidents()
    fleet.clock.seconds += INCIDENT_SECONDS + 1
    assert look("ab", "123") == ["reject"] * 4 + ["steer"] * 2
    (second,) = fleet.list_incidents()
    assert second["first_seen"] > first["first_seen"]
    assert len(told) == 2


@pytest.mark.slow
def test_incident_spares_loops_for_half_an_hour(fleet: Fleet) -> None:
    while fleet.clock.seconds < LONGEST_SECONDS - 110:
        assert fleet.fail()[-1] == "steer"
        fleet.clock.seconds += 100
    for wait, last in ((110, "reject"), (INCIDENT_SECONDS + 1, "reject"), (REST_SECONDS, "steer")):
        fleet.clock.seconds += wait
        assert fleet.fail()[-1] == last


@pytest.mark.parametrize(
    ("loop", "action", "delay"),
    [
        ({"action": "reject", "escalate": {}}, "warn", 0),
        ({"action": "throttle", "escalate": {"reject": 5}}, "throttle", 500),
        ({"action": "steer", "escalate": {"throttle": 4, "reject": 5}}, "throttle", 500),
        ({"action": "warn", "escalate": {"reject": 5}}, "warn", 0),
        ({"action": "steer", "escalate": {"land": 4, "reject": 5}}, "steer", 0),
        ({"action": "steer", "escalate": {"land": 5, "reject": 7}}, "steer", 0),
        ({"action": "land"}, "warn", 0),
        ({"incidents": False}, "reject", 0),
    ],
)
def test_incident_gets_the_strictest_action_below_refusal(
    monkeypatch: pytest.MonkeyPatch, loop: Mapping[str, Any], action: str, delay: int
) -> None:
    fleet = Fleet(monkeypatch, **{"threshold_identical_requests": 3, **loop})
    fleet.fail()

    reply = fleet.send("a", "1")

    assert (metadata_of(decoded(reply))["action"], reply.hold_ms) == (action, delay)


def test_incident_of_a_shadow_policy_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    live = policy("live", ANY, **{**STEER, "incidents": False})
    fleet = Fleet(monkeypatch, live, policy("p", ANY, mode="shadow", **STEER))

    assert fleet.fail() == ["reject"] * 6

    assert fleet.service.metrics.decisions == {
        ("live", "enforce", "reject"): 6, ("p", "shadow", "reject"): 4, ("p", "shadow", "steer"): 2,
    }  # fmt: skip
    assert [row["policies"] for row in fleet.list_incidents()] == [["p"]]


@pytest.mark.slow
def test_caller_pushes_out_only_its_own_failures(fleet: Fleet) -> None:
    fleet.fail("ab", "12")
    for number in range(200):
        fleet.send("eve", "1", error=f"error: made up {'x' * number}")

    assert fleet.fail("c", "1") == ["steer"]
    assert len(fleet.service.reporter.incidents.copy()) == 41


@pytest.mark.slow
def test_incident_row_is_bounded(fleet: Fleet) -> None:
    for number in range(300):
        fleet.send(f"caller {number % 100}", f"task {number}")

    (row,) = fleet.list_incidents()
    assert 70 < row["callers"] < 140
    assert 210 < row["sessions"] < 420


def test_incident_rows_of_replicas_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(monkeypatch, replicas=2)
    fleet.clock.seconds = -4_000
    fleet.fail(tasks="789", tool="read")
    for replica, callers in enumerate(("abc", "bcd")):
        fleet.clock.seconds = 0
        fleet.fail(callers, replica=replica)

    (row,) = fleet.list_incidents()

    assert [row[name] for name in ("tool", "callers", "sessions", "requests")] == [
        "search",
        4,
        12,
        18,
    ]
