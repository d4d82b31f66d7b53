"""Events for other programs: their contents, their delivery, and that no request waits for them."""

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Sequence
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest
from cloudevents.core.formats.json import JSONFormat

from extproc.errors import LoopguardError
from extproc.metrics import Metrics
from extproc.operator import events as events_module
from extproc.operator.events import MAX_QUEUED, TYPES, Events, UnreachableError, open_events
from extproc.operator.row_events import LoopEvents, SessionEvents
from extproc.operator.session_table import SessionTable
from extproc.settings import Settings
from extproc.store.rules.session import LIMITS, Standing
from tests.support.documents import policy
from tests.support.harness import eventually
from tests.support.messages import headers
from tests.support.receivers import CA, receiving
from tests.support.service import make_service, repeat
from tests.support.session_runs import note

ANY = {"pathPrefix": "/"}


def count(metrics: Metrics, result: str) -> float:
    return metrics.registry.get_sample_value("loopguard_events_total", {"result": result}) or 0.0


def start(metrics: Metrics, **settings: str) -> Events:
    # Texts, as it happens
    made = open_events(Settings(**settings), "loopguard/test", metrics)  # type: ignore[arg-type]
    assert made is not None
    return made


@pytest.fixture
def authorities(tmp_path: Path) -> str:
    file = tmp_path / "ca.pem"
    CA.cert_pem.write_to_path(str(file))
    return str(file)


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "GATHER_SECONDS", 0.01)
    monkeypatch.setattr(events_module, "FIRST_WAIT_SECONDS", 0.01)


def test_file_has_one_cloud_event_per_line(tmp_path: Path) -> None:
    metrics, file = Metrics(), tmp_path / "events.jsonl"
    events = start(metrics, events=str(file))
    for kind in TYPES:
        events.emit(kind, "p", {"policy": "p", "session": None})
    events.close()

    found = [JSONFormat().read(None, line) for line in file.read_bytes().splitlines()]
    assert [event.get_type() for event in found] == list(TYPES.values())
    named = {(event.get_specversion(), event.get_source(), event.get_subject()) for event in found}
    assert named == {("1.0", "loopguard/test", "p")}
    assert len({event.get_id() for event in found}) == len(TYPES)
    assert found[0].get_data() == {"policy": "p"}
    said = found[0].get_time()
    assert said is not None
    assert abs(said.astimezone(UTC).timestamp() - time.time()) < 60
    assert count(metrics, "sent") == len(TYPES)


def test_webhook_gets_signed_batches(tmp_path: Path, authorities: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("whsec_" + base64.b64encode(b"key").decode() + "\n")
    metrics = Metrics()
    with receiving(204) as receiver:
        events = start(
            metrics, events=receiver.url, events_ca=authorities, events_secret_file=str(secret)
        )
        for _ in range(3):
            events.emit("loop_began", "p", {"policy": "p"})
        eventually(lambda: count(metrics, "sent") == 3, "the batch")
        events.close()

    sent, body = receiver.batches[0]
    signed = f"{sent['webhook-id']}.{sent['webhook-timestamp']}.".encode() + body
    assert (
        sent["webhook-signature"]
        == f"v1,{base64.b64encode(hmac.new(b'key', signed, hashlib.sha256).digest()).decode()}"
    )
    assert sent["content-type"] == "application/cloudevents-batch+json; charset=utf-8"
    told = [event for _, batch in receiver.batches for event in json.loads(batch)]
    assert [event["type"] for event in told] == [TYPES["loop_began"]] * 3


def test_events_are_sent_again_until_accepted_or_refused(authorities: str) -> None:
    metrics = Metrics()
    with receiving(503, 429, 200, 410, 200) as receiver:
        events = start(metrics, events=receiver.url, events_ca=authorities)
        for result, number in (("sent", 1), ("dropped", 1), ("sent", 2)):
            events.emit("loop_began", "p", {})
            eventually(
                lambda result=result, number=number: count(metrics, result) == number,  # type: ignore[misc]
                "an answer",
            )
        events.close()

    bodies = [body for _, body in receiver.batches]
    assert bodies[0] == bodies[1] == bodies[2]
    assert (len(bodies), len({*bodies})) == (5, 3)


def test_receiver_without_trusted_certificate_gets_no_events() -> None:
    metrics = Metrics()
    with receiving(200) as receiver:
        events = start(metrics, events=receiver.url)
        events.emit("loop_began", "p", {})
        events.close()

    assert receiver.batches == []
    assert (count(metrics, "sent"), count(metrics, "dropped")) == (0, 1)


class Stuck:
    """A sink that takes nothing, and fails when it is told."""

    def __init__(self) -> None:
        self.free, self.closed = threading.Event(), threading.Event()

    def send(self, events: Sequence[bytes]) -> None:  # noqa: ARG002  # it takes nothing
        self.free.wait()
        raise UnreachableError("dead")

    def close(self) -> None:
        self.closed.set()


def test_unreachable_receiver_costs_a_bounded_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "LAST_SECONDS", 0.01)
    metrics, sink = Metrics(), Stuck()
    events = Events(sink, "test", metrics)
    for _ in range(MAX_QUEUED + 1_000):
        events.emit("loop_began", "p", {})
    too_many = count(metrics, "dropped")
    events.close()
    at_the_end = count(metrics, "dropped")
    sink.free.set()
    eventually(
        sink.closed.is_set, "the end of the thread, which may be slower than that of the process"
    )

    assert 1_000 - 100 <= too_many <= 1_000
    assert MAX_QUEUED < at_the_end <= MAX_QUEUED + 1_000
    assert count(metrics, "dropped") == MAX_QUEUED + 1_000


def test_loop_events_are_began_escalated_and_ended() -> None:
    told: list[Any] = []
    watcher = LoopEvents(lambda *event: told.append(event), lambda: False)
    service = make_service(
        policy("p", ANY, action="warn", escalate={"reject": 5}, limit_keys=["header:x-user-id"])
    )
    table, now = service.reporter.loops, time.time()
    for times in (3, 1, 1, 1):
        repeat(service, headers(end=True, x_user_id="secret"), times=times)
        watcher.look(table.list_loops(), now)
    watcher.look(table.list_loops(), now + 120)
    watcher.look(table.list_loops(), now + 121)

    assert [event[:2] for event in told] == [
        ("loop_began", "p"),
        ("loop_escalated", "p"),
        ("loop_ended", "p"),
    ]
    began, _, ended = (data for _, _, data in told)
    assert (began["count"], began["requests"], ended["requests"]) == (
        3,
        {"warn": 1},
        {"warn": 2, "reject": 2},
    )
    assert began["loopguard.caller"] == table.list_loops()[0].tenant
    assert "secret" not in str(told)


def test_session_limit_and_kill_are_one_event_each() -> None:
    told: list[Any] = []
    watcher = SessionEvents(lambda *event: told.append(event), lambda: False)
    table, cost = SessionTable(), LIMITS.index("max_cost_per_session")
    standings = [
        Standing(steps=1),
        *[
            Standing(cost, 2 * 10**9, 10**9, steps=1, blocks=blocks, cost=2 * 10**9, age_ms=9_000)
            for blocks in (1, 2, 3)
        ],
        *[Standing(1, steps=1, blocks=blocks, killed=1, age_ms=9_000) for blocks in (4, 5)],
        Standing(steps=1),
        *[Standing(LIMITS.index("max_steps"), 1, 1, steps=1, blocks=blocks) for blocks in (1, 2)],
        *[Standing(1) for _ in range(2)],
    ]
    for now, standing in enumerate(standings):
        note(table, standing, now, now=1_000.0 + now, caller=[("user", "secret")])
        watcher.look(table.copy())

    assert [(kind, subject, data["limit"], data["killed"]) for kind, subject, data in told] == [
        ("session_limited", "p", "max_cost_per_session", None),
        ("session_killed", "p", "killed", "consecutive_blocks"),
        ("session_limited", "p", "max_steps", None),
        ("session_killed", "p", "killed", "operator"),
    ]
    first = told[0][2]
    assert [first[name] for name in ("used", "allowed", "actual_cost", "total_step_count")] == [
        2,
        1,
        2,
        1,
    ]
    assert "secret" not in str(told)


MISSING = "/nowhere/no/such"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"events": "http://h.example/hook"},
            "--events must be a file, - or https://..., not 'http://h.example/hook'",
        ),
        ({"events": "ftp://x"}, "--events must be a file, - or https://..., not 'ftp://x'"),
        ({"events": MISSING}, "--events"),
        ({"events": "https://h/", "events_secret_file": MISSING}, "--events-secret-file"),
        ({"events": "https://h/", "events_ca": MISSING}, "--events-ca"),
    ],
)
def test_unusable_event_target_is_an_error(settings: dict[str, str], message: str) -> None:
    with pytest.raises(LoopguardError) as failure:
        start(Metrics(), **settings)

    assert message in str(failure.value)


@pytest.mark.parametrize(
    ("sent", "keys", "shown"),
    [
        ({"x_claude_code_agent_id": "a1b2", "thread_id": "t"}, "header:x-user-id", "a1b2"),
        ({"thread_id": "t"}, "header:x-user-id", "t"),
        ({}, "header:x-user-id", None),
        ({"thread_id": "t"}, "header:thread-id", None),
    ],
)
def test_agent_id_is_shown_unless_it_identifies_the_caller(
    sent: dict[str, Any], keys: str, shown: str | None
) -> None:
    told: list[Any] = []
    service = make_service(policy("p", ANY, action="warn", limit_keys=[keys]))

    repeat(service, headers(end=True, x_user_id="ann", **sent), times=3)
    LoopEvents(lambda *event: told.append(event), lambda: False).look(
        service.reporter.loops.list_loops(), time.time()
    )

    assert [data["gen_ai.agent.id"] for _, _, data in told] == [shown]
