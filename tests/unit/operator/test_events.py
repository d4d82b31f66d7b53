"""Events for other programs: their contents, their delivery, and that no request waits for them."""

from __future__ import annotations

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

from extproc.errors import LoopguardError, UsageError
from extproc.metrics import Metrics
from extproc.operator import events as events_module
from extproc.operator.events import MAX_QUEUED, TYPES, Events, LoopEvents, SessionEvents, UnreachableError, open_events
from extproc.operator.session_table import RunName, SessionTable
from extproc.settings import Settings
from extproc.store.rules.session import LIMITS, Standing
from tests.support.documents import policy
from tests.support.harness import eventually
from tests.support.messages import headers
from tests.support.receivers import CA, receiving
from tests.support.service import make_service, repeat


def count(metrics: Metrics, result: str) -> float:
    """Events so far with that result."""
    return metrics.registry.get_sample_value("loopguard_events_total", {"result": result}) or 0.0


def start(metrics: Metrics, **settings: str) -> Events:
    """Events as `serve` opens them."""
    made = open_events(Settings(**settings), "loopguard/test", metrics)  # type: ignore[arg-type]  # texts, as it happens
    assert made is not None
    return made


@pytest.fixture
def authorities(tmp_path: Path) -> str:
    """The file for `--events-ca`."""
    file = tmp_path / "ca.pem"
    CA.cert_pem.write_to_path(str(file))
    return str(file)


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are short."""
    monkeypatch.setattr(events_module, "_GATHER_SECONDS", 0.01)
    monkeypatch.setattr(events_module, "_FIRST_WAIT_SECONDS", 0.01)


def test_a_file_has_a_cloud_event_on_each_line(tmp_path: Path) -> None:
    """Each line is a CloudEvent of version 1.0, with type, source, subject, time and data; what is None is left out."""
    metrics, file = Metrics(), tmp_path / "events.jsonl"
    events = start(metrics, events=str(file))
    for kind in TYPES:
        events.emit(kind, "p", {"policy": "p", "session": None})
    events.close()

    found = [JSONFormat().read(None, line) for line in file.read_bytes().splitlines()]
    assert [event.get_type() for event in found] == list(TYPES.values())
    assert {(event.get_specversion(), event.get_source(), event.get_subject()) for event in found} == {
        ("1.0", "loopguard/test", "p")
    }
    assert len({event.get_id() for event in found}) == len(TYPES)
    assert found[0].get_data() == {"policy": "p"}
    said = found[0].get_time()
    assert said is not None
    assert abs(said.astimezone(UTC).timestamp() - time.time()) < 60
    assert count(metrics, "sent") == len(TYPES)


def test_a_webhook_gets_signed_batches(tmp_path: Path, authorities: str) -> None:
    """What happens together comes together, and the secret proves who sent it."""
    secret = tmp_path / "secret"
    secret.write_text("whsec_" + base64.b64encode(b"key").decode() + "\n")
    metrics = Metrics()
    with receiving(204) as receiver:
        events = start(metrics, events=receiver.url, events_ca=authorities, events_secret_file=str(secret))
        for _ in range(3):
            events.emit("loop_began", "p", {"policy": "p"})
        eventually(lambda: count(metrics, "sent") == 3, "the batch")
        events.close()

    sent, body = receiver.batches[0]
    signed = f"{sent['webhook-id']}.{sent['webhook-timestamp']}.".encode() + body
    assert sent["webhook-signature"] == f"v1,{base64.b64encode(hmac.new(b'key', signed, hashlib.sha256).digest()).decode()}"
    assert sent["content-type"] == "application/cloudevents-batch+json; charset=utf-8"
    told = [event for _, batch in receiver.batches for event in json.loads(batch)]
    assert [event["type"] for event in told] == [TYPES["loop_began"]] * 3


def test_a_receiver_that_fails_is_asked_again(authorities: str) -> None:
    """The same events come again until they are taken."""
    metrics = Metrics()
    with receiving(503, 429, 200) as receiver:
        events = start(metrics, events=receiver.url, events_ca=authorities)
        events.emit("loop_began", "p", {})
        eventually(lambda: count(metrics, "sent") == 1, "an answer")
        events.close()

    assert len(receiver.batches) == 3
    assert len({body for _, body in receiver.batches}) == 1


def test_a_receiver_that_refuses_is_not_asked_again(authorities: str) -> None:
    """What is refused for good is dropped and counted, and the next events are sent."""
    metrics = Metrics()
    with receiving(410, 200) as receiver:
        events = start(metrics, events=receiver.url, events_ca=authorities)
        events.emit("loop_began", "p", {})
        eventually(lambda: count(metrics, "dropped") == 1, "the refusal")
        events.emit("loop_ended", "p", {})
        eventually(lambda: count(metrics, "sent") == 1, "the next one")
        events.close()


def test_nothing_is_sent_to_a_receiver_without_a_trusted_certificate() -> None:
    """The receiver's certificate is verified: without its authority it gets nothing, and what was to be sent is counted."""
    metrics = Metrics()
    with receiving(200) as receiver:
        events = start(metrics, events=receiver.url)
        events.emit("loop_began", "p", {})
        events.close()

    assert receiver.batches == []
    assert (count(metrics, "sent"), count(metrics, "dropped")) == (0, 1)


class Stuck:
    """A sink that takes nothing until it is told."""

    def __init__(self) -> None:
        self.free = threading.Event()

    def send(self, events: Sequence[bytes]) -> None:  # noqa: ARG002  # it takes nothing
        """Wait, and fail."""
        self.free.wait()
        raise UnreachableError("dead")

    def close(self) -> None:
        """Nothing to let go of."""


def test_a_dead_receiver_costs_a_bounded_queue() -> None:
    """While nothing gets through, only this many events wait; the others are dropped and counted, and no caller waits."""
    metrics, sink = Metrics(), Stuck()
    events = Events(sink, "test", metrics)
    for _ in range(MAX_QUEUED + 1_000):
        events.emit("loop_began", "p", {})
    dropped = count(metrics, "dropped")
    sink.free.set()
    events.close()

    assert 1_000 - 100 <= dropped <= 1_000
    eventually(lambda: count(metrics, "dropped") == MAX_QUEUED + 1_000, "an end of the batch that was on its way")


def test_what_is_left_at_the_end_is_dropped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread may be slower than the end of the process: it finds nothing in the queue any more."""
    monkeypatch.setattr(events_module, "_LAST_SECONDS", 0.01)
    metrics, sink = Metrics(), Stuck()
    events = Events(sink, "test", metrics)
    for _ in range(1_000):
        events.emit("loop_began", "p", {})
    events.close()
    left = count(metrics, "dropped")
    sink.free.set()
    eventually(lambda: not events._thread.is_alive(), "the end of the thread")

    assert 0 < left <= 1_000
    assert count(metrics, "dropped") == 1_000


def test_loops_are_told_when_they_begin_escalate_and_end() -> None:
    """Each once, in OpenTelemetry's names for agent and tool; callers by their values only where they are shown."""
    told: list[tuple[str, str, dict[str, Any]]] = []
    watcher = LoopEvents(lambda kind, subject, data: told.append((kind, subject, dict(data))), lambda: False)
    keys: dict[str, Any] = {"limit_keys": ["header:x-user-id"]}
    service = make_service(policy("p", {"pathPrefix": "/"}, action="warn", escalate={"reject": 5}, **keys))
    table, now = service.reporter.loops, time.time()
    for times in (3, 1, 1, 1):
        repeat(service, headers(end=True, x_user_id="secret"), times=times)
        watcher.look(table.copy(), now)
    watcher.look(table.copy(), now + 120)
    watcher.look(table.copy(), now + 121)

    assert [(kind, subject) for kind, subject, _ in told] == [("loop_began", "p"), ("loop_escalated", "p"), ("loop_ended", "p")]
    began, _, ended = (data for _, _, data in told)
    assert (began["count"], began["requests"], ended["requests"]) == (3, {"warn": 1}, {"warn": 2, "reject": 2})
    assert began["loopguard.caller"] == table.copy()[0].tenant
    assert "secret" not in str(told)


def test_a_session_meets_a_limit_and_is_killed_once() -> None:
    """However many of its requests are refused; after it has begun anew it is told again. Its caller stays a hash."""
    told: list[tuple[str, str, dict[str, Any]]] = []
    watcher = SessionEvents(lambda kind, subject, data: told.append((kind, subject, dict(data))), lambda: False)
    table, cost = SessionTable(), LIMITS.index("max_cost_per_session")
    for now, standing in enumerate(
        [
            Standing(steps=1),
            *[Standing(cost, 2 * 10**9, 10**9, steps=1, blocks=blocks, cost=2 * 10**9, age_ms=9_000) for blocks in (1, 2, 3)],
            *[Standing(1, steps=1, blocks=blocks, killed=1, age_ms=9_000) for blocks in (4, 5)],
            Standing(steps=1),
            *[Standing(LIMITS.index("max_steps"), 1, 1, steps=1, blocks=blocks) for blocks in (1, 2)],
            *[Standing(1) for _ in range(2)],
        ]
    ):
        name = RunName("a" * 16, "p", "enforce", "5" * 16)
        table.note(name, [("user", "secret")], standing, "m", "", bytes([now]), 1_000.0 + now)
        watcher.look(table.copy())

    assert [(kind, subject, data["limit"], data["killed"]) for kind, subject, data in told] == [
        ("session_limited", "p", "max_cost_per_session", None),
        ("session_killed", "p", "killed", "consecutive_blocks"),
        ("session_limited", "p", "max_steps", None),
        ("session_killed", "p", "killed", "operator"),
    ]
    assert [told[0][2][name] for name in ("used", "allowed", "actual_cost", "total_step_count")] == [2, 1, 2, 1]
    assert "secret" not in str(told)


@pytest.mark.parametrize("place", ["http://receiver.example/hook", "ftp://x"])
def test_a_place_that_is_none_is_a_usage_error(place: str) -> None:
    """What goes over a network goes over TLS."""
    with pytest.raises(UsageError) as failure:
        open_events(Settings(events=place), "test", Metrics())

    assert str(failure.value) == f"--events must be a file, - or https://..., not {place!r}"


def test_files_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    """A file for events, a secret and authorities that are not there are clear errors at the start."""
    missing = f"{tmp_path}/no/such"
    for settings, named in [
        (Settings(events=missing), "--events"),
        (Settings(events="https://h/", events_secret_file=missing), "--events-secret-file"),
        (Settings(events="https://h/", events_ca=missing), "--events-ca"),
    ]:
        with pytest.raises(LoopguardError) as failure:
            open_events(settings, "test", Metrics())
        assert named in str(failure.value)


@pytest.mark.parametrize(
    ("sent", "keys", "shown"),
    [
        ({"x_claude_code_agent_id": "a1b2", "thread_id": "t"}, "header:x-user-id", "a1b2"),
        ({"thread_id": "t"}, "header:x-user-id", "t"),
        ({}, "header:x-user-id", None),
        ({"thread_id": "t"}, "header:thread-id", None),
    ],
)
def test_an_agent_is_told_by_its_own_id(sent: dict[str, Any], keys: str, shown: str | None) -> None:
    """As it names itself in its requests; an id that tells callers apart is shown as their hash alone."""
    told: list[dict[str, Any]] = []
    watcher = LoopEvents(lambda _kind, _subject, data: told.append(dict(data)), lambda: False)
    service = make_service(policy("p", {"pathPrefix": "/"}, action="warn", limit_keys=[keys]))

    repeat(service, headers(end=True, x_user_id="ann", **sent), times=3)
    watcher.look(service.reporter.loops.copy(), time.time())

    assert [data["gen_ai.agent.id"] for data in told] == [shown]
    assert told[0]["loopguard.caller"] == service.reporter.loops.copy()[0].tenant
