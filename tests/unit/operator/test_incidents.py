"""A tool that fails for many is one incident: its agents wait, and nobody can make one alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from extproc.decision import Decision
from extproc.ext_proc.service import Service
from extproc.metrics import Metrics
from extproc.operator.board import unpack_all
from extproc.operator.events import IncidentEvents
from extproc.operator.incident_rows import WINDOW_SECONDS, IncidentDocument
from extproc.operator.incident_table import LONGEST_SECONDS, REST_SECONDS, IncidentTable
from extproc.store.memory import MemoryStore
from tests.support.documents import policy
from tests.support.engine import ANY, make_engine
from tests.support.looping import looked_into, post
from tests.support.messages import body, headers
from tests.support.service import decoded, exchange, make_service
from tests.support.steering import steered
from tests.support.turn_writers import Did, as_anthropic, as_chat, as_responses

DOWN = "error: the database is on fire"
TURNS: dict[str, Any] = {"similarity": "turns", "action": "steer", "escalate": {"reject": 5}, "limit_keys": ["header:x-user"]}


def write_loop(times: int = 5, *, tool: str = "search", error: str = DOWN, task: str = "a", write: Any = as_chat) -> bytes:  # noqa: ANN401
    """A conversation about a task in which a tool has failed so often."""
    turns = [
        Did(((tool, {"about": task}),), (error,), "", f"{task}: thought {number}", number) for number in range(1, times + 1)
    ]
    return json.dumps(write(turns)).encode()


class Fleet:
    """Agents of several callers behind one policy, and a clock of the test's own."""

    def __init__(self, **loop: Any) -> None:  # noqa: ANN401  # keys of loop_detection
        self.table = IncidentTable()
        self.now = 1_000_000.0
        self.engine = make_engine(policy("p", ANY, **{**TURNS, **loop}))
        self._store = MemoryStore(Metrics())

    def send(self, caller: str, task: str, **loop: Any) -> Decision:  # noqa: ANN401  # as of `write_loop`
        """What is made of one request."""
        self.now += 1
        evaluation = looked_into(self.engine, write_loop(task=task, **loop), post(x_user=caller))
        counts = [self._store.hit(group.list_hits()) for group in evaluation.groups]
        return self.table.weigh(evaluation, evaluation.decide(*counts), self.now)

    def fail(self, callers: str = "ab", tasks: str = "123", **loop: Any) -> list[str]:  # noqa: ANN401
        """The actions for a session of each caller about each task."""
        return [self.send(caller, task, **loop).action.value for task in tasks for caller in callers]


def test_the_fifth_session_is_an_incident_and_none_is_refused_from_then_on() -> None:
    """Whatever they ask the tool for; each is told to wait, and no longer that refusals follow."""
    fleet = Fleet()

    assert fleet.fail() == ["reject"] * 4 + ["steer"] * 2
    lead = fleet.send("c", "9").lead
    assert lead is not None
    advice = lead.subject.advise(lead, "POST", "/")
    assert advice.about == "Tool failing"
    assert "fails in the same way for other agents" in advice.what
    assert advice.instead.startswith("Wait before you try it again.")


def test_loops_that_are_not_refused_yet_count_as_well_and_are_told_the_same() -> None:
    """Three turns are a loop."""
    fleet = Fleet()

    assert fleet.fail(times=3) == ["steer"] * 6
    lead = fleet.send("a", "1", times=3).lead
    assert lead is not None
    assert lead.subject.advise(lead, "POST", "/").about == "Tool failing"
    assert fleet.send("a", "2", times=2).lead is None


@pytest.mark.parametrize("write", [as_chat, as_responses, as_anthropic])
def test_each_api_is_read(write: Any) -> None:  # noqa: ANN401
    """As `turns` reads them."""
    assert Fleet().fail(write=write)[-1] == "steer"


def test_one_caller_alone_cannot_spare_itself() -> None:
    """However many sessions it has; nor can four sessions of two."""
    fleet = Fleet()

    assert fleet.fail("a", "123456789") == ["reject"] * 9
    assert fleet.fail("a", "12") == ["reject"] * 2
    assert Fleet().fail("ab", "12") == ["reject"] * 4


def test_one_session_is_one_however_often_it_asks() -> None:
    """Its conversation grows, and begins as it did."""
    fleet = Fleet()

    actions = [fleet.send(caller, "1", times=times).action.value for times in range(5, 10) for caller in "abcd"]

    assert actions == ["reject"] * 20


def test_other_tools_other_errors_and_other_policies_are_not_spared() -> None:
    """An incident is of one tool that fails in one way."""
    fleet = Fleet()
    fleet.fail()

    assert fleet.send("a", "1", tool="read").action.value == "reject"
    assert fleet.send("a", "1", error="error: another one").action.value == "reject"
    assert fleet.send("a", "1").action.value == "steer"


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
def test_what_no_server_can_mend_is_no_incident(error: str) -> None:
    """Results that are no errors, things that are not there, and calls that are wrong: agents of one kind are alike there."""
    assert set(Fleet().fail(error=error)) == {"reject"}


@pytest.mark.parametrize("error", [DOWN, "500 Internal Server Error: exception", "error: 503 Service Unavailable"])
def test_what_servers_say_when_they_are_down_is_one(error: str) -> None:
    """In passing or not."""
    assert Fleet().fail(error=error)[-1] == "steer"


def test_an_incident_ends_when_few_sessions_are_left() -> None:
    """Each counts for some minutes; a new one is begun by five again."""
    fleet = Fleet()
    fleet.fail()
    first = fleet.table.list_incidents()[0].began
    fleet.now += WINDOW_SECONDS + 1

    assert fleet.fail() == ["reject"] * 4 + ["steer"] * 2
    (row,) = fleet.table.list_incidents()
    assert row.began > first + WINDOW_SECONDS


def test_no_incident_spares_its_loops_for_ever() -> None:
    """After half an hour they are refused, and for an hour no new incident of that kind spares any."""
    fleet = Fleet()
    began = fleet.now
    while fleet.now < began + LONGEST_SECONDS - 110:
        assert fleet.fail()[-1] == "steer"
        fleet.now += 100
    fleet.now += 110

    assert set(fleet.fail()) == {"reject"}
    fleet.now += WINDOW_SECONDS + 1
    assert set(fleet.fail()) == {"reject"}
    fleet.now += REST_SECONDS
    assert fleet.fail()[-1] == "steer"


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
def test_the_strictest_action_that_ends_no_run_is_taken(loop: Mapping[str, Any], action: str, delay: int) -> None:
    """Of those that the policy names, else a warning; the policy can have its refusals all the same."""
    fleet = Fleet(**{"threshold_identical_requests": 3, **loop})
    fleet.fail()

    lead = fleet.send("a", "1").lead

    assert lead is not None
    assert (lead.action.value, lead.delay_ms) == (action, delay)


def test_a_shadow_policy_has_incidents_that_change_nothing() -> None:
    """What it would have done is known, and the enforcing policy's verdict is its own."""
    live = policy("live", ANY, **{**TURNS, "incidents": False})
    fleet = Fleet()
    fleet.engine = make_engine(live, policy("p", ANY, mode="shadow", **TURNS))

    decisions = [fleet.send(caller, task) for task in "123" for caller in "ab"]

    assert [decision.action.value for decision in decisions] == ["reject"] * 6
    assert [decision.shadow.action.value for decision in decisions if decision.shadow] == ["reject"] * 4 + ["steer"] * 2
    assert [row.policy for row in fleet.table.list_incidents()] == ["p"]


def test_a_caller_pushes_out_its_own_failures_only() -> None:
    """It makes up as many as it likes; what others have begun stands."""
    fleet = Fleet()
    fleet.fail("ab", "12")
    for number in range(200):
        fleet.send("eve", "1", error=f"error: made up {'x' * number}")

    assert fleet.fail("c", "1") == ["steer"]
    assert len(fleet.table.copy()) == len(fleet.table._keys) == 41


def test_what_is_kept_of_an_incident_is_bounded() -> None:
    """Its size is that of a few sessions, and the number of all is an estimate."""
    fleet = Fleet()
    for number in range(300):
        fleet.send(f"caller {number % 100}", f"task {number}")

    (failing,) = fleet.table.copy()
    (row,) = fleet.table.list_incidents()
    assert sum(len(own) for own in failing._recent.values()) <= 64
    assert (len(row.callers), len(row.sessions)) == (64, 64)
    assert 70 < row.count_callers() < 140
    assert 210 < row.count_sessions() < 420


def test_rows_of_replicas_are_joined() -> None:
    """Callers and sessions that both know are one, requests are added; what was long ago is left out."""
    one, other = Fleet(), Fleet()
    one.fail("abc")
    other.fail("bcd")
    documents = [fleet.table.make_document(shows_callers=False) for fleet in (one, other)]
    packed = unpack_all({str(n): document.pack() for n, document in enumerate(documents)}, IncidentDocument)

    (row,) = IncidentDocument.merge(packed.values(), one.now).rows

    assert (row.tool, row.count_callers(), row.count_sessions(), row.requests) == ("search", 4, 12, 18)
    assert IncidentDocument.merge(packed.values(), one.now + 4_000).rows == []


def test_there_is_one_event_for_each_incident() -> None:
    """Not one for each request, session or look."""
    told: list[tuple[str, str, Mapping[str, object]]] = []
    events = IncidentEvents(lambda *event: told.append(event))
    fleet = Fleet()
    fleet.fail("ab", "12")
    events.look(fleet.table.list_incidents())
    assert told == []

    for _ in range(3):
        fleet.fail()
        events.look(fleet.table.list_incidents())
    assert [(kind, subject) for kind, subject, _ in told] == [("tool_failing", "p")]
    data = told[0][2]
    assert (data["gen_ai.tool.name"], data["callers"], data["sessions"]) == ("search", 2, 6)

    fleet.now += WINDOW_SECONDS + 1
    fleet.fail()
    events.look(fleet.table.list_incidents())
    assert len(told) == 2


def fail(service: Service, callers: str = "abc", tasks: str = "12") -> list[Any]:
    """The answers to a session of each caller about each task."""
    return [
        decoded(exchange(service, headers("/v1/chat/completions", x_user=caller), body(write_loop(task=task)))[-1])
        for task in tasks
        for caller in callers
    ]


def test_agents_get_a_note_that_tells_them_to_wait() -> None:
    """Through ext_proc: a request that would have been refused goes on, with the note behind its newest result."""
    service = make_service(policy("p", ANY, **TURNS))

    answers = fail(service)

    assert [answer.WhichOneof("response") for answer in answers] == ["immediate_response"] * 4 + ["request_body"] * 2
    note = json.dumps(steered(answers[-1]))
    assert "Tool failing: " in note
    assert "Wait before you try it again." in note
    assert "requests will be refused" not in note
