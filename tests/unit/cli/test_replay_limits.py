"""Digests of tool calls: session limits decide in a log without bodies as live ones did."""

from __future__ import annotations

import json
from base64 import b64encode
from random import Random
from typing import Any
from zlib import crc32

import pytest

from extproc.apis import conversation
from extproc.detectors.chain import digest_tool
from extproc.engine.settlements import Entry
from extproc.ext_proc.answers.metadata import SESSIONS
from extproc.metrics import Metrics
from extproc.request.document import Document
from extproc.sessions.history import RECORD, read_tool_calls
from extproc.sessions.rates import Usage
from extproc.store.memory import MemoryStore
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.extent import deepen
from tests.support.random_agents import PATHS, Agent
from tests.support.recorded import Recorder, Replay, compare, make_cache, unpack
from tests.support.turn_writers import Did, as_chat

PRICES: dict[str, Any] = {"unknown_model": {"input": 1, "output": 2}}
RUNS: dict[str, Any] = {"keys": ["header:x-run"]}
BY_USER: dict[str, Any] = {"similarity": "turns", "limit_keys": ["header:x-user-id"]}


def limited(
    name: str,
    session: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
    **limits: Any,  # noqa: ANN401  # JSON
) -> dict[str, Any]:
    """A policy with session limits; `more` goes to its detector."""
    made = policy(name, ANY, **(BY_USER | (more or {})))
    if session is not None:
        made["spec"]["session"] = session
    made["spec"]["session_limits"] = {**PRICES, **limits}
    return made


RECENT = {"window": 6, "threshold": 3}
POLICIES = [
    limited("steps", max_steps=9, loop_detection=RECENT, more={"action": "warn"}),
    limited("money", max_cost_per_session=0.05, circuit_breaker={"consecutive_errors": 2}, more={"action": "warn"}),
    limited(
        "named",
        RUNS,
        max_tool_calls=12,
        max_calls_per_tool={"bash": 5, "read_file": 3},
        circuit_breaker={"consecutive_blocks": 3},
    ),
    limited("canary", max_tool_calls=8, max_tool_calls_mode="finish", more={"mode": "shadow"}),
]
ONE = limited("one", max_steps=6, max_cost_per_session=5)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No conversation is known from another test."""
    monkeypatch.setattr(conversation, "_KNOWN", make_cache())


class Clock:
    """The time of service and store, which differ by less than a millisecond in a log."""

    def __init__(self) -> None:
        self.now = 1_763_812_345_000


@pytest.mark.slow
@pytest.mark.parametrize("seed", deepen(range(24), *range(6)))
def test_a_replay_limits_sessions_as_live(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents of every API, with names and without, on two replicas; requests that cost, fail and are settled late."""
    random, clock = Random(seed), Clock()
    monkeypatch.setattr("extproc.ext_proc.transaction.time", lambda: clock.now / 1000)
    store = MemoryStore(Metrics(), clock=lambda: clock.now)
    replicas = [(Recorder(*POLICIES, store=store), make_cache()) for _ in range(2)]
    agents = [Agent(random, f"{seed}-{number}") for number in range(random.choice([1, 3, 6]))]
    lines, live = [], []
    waiting: list[tuple[Recorder, Entry]] = []
    for _ in range(random.choice([30, 90])):
        agent = random.choice(agents)
        request = agent.write()
        while True:  # some are sent again
            clock.now += random.choice([1, 50, 3_000, 20_000])
            replica, known = replicas[random.random() < 0.3]
            monkeypatch.setattr(conversation, "_KNOWN", known)
            replica.send(request, PATHS[agent.shape], **agent.sent)
            lines.append(replica.lines[-1])
            live.append(replica.judged[-1])
            if SESSIONS in replica.metadata:
                waiting.append((replica, finish(replica.metadata[SESSIONS], random)))
            while waiting and random.random() < 0.8:
                sent_by, entry = waiting.pop(random.randrange(len(waiting)))
                sent_by.service.settle_entry(entry)
            if random.random() < 0.85:
                break
        agent.step()

    replay = Replay(*POLICIES)

    assert compare(live, replay.add(lines)) == []
    assert replay.problems == []
    refused = {verdict.policy for judged in live for verdict in judged.verdicts if verdict.action == "reject"}
    assert refused


def finish(sessions: str, random: Random) -> Entry:
    """How a request ended, by what its access log entry repeats."""
    named = tuple(json.loads(sessions))
    status = random.choice([200, 200, 200, 503])
    usage = Usage(random.choice([500, 5_000]), random.choice([10, 900])) if status == 200 else Usage(0, 0)
    return Entry(named, status, status >= 500, 0, 0, "", usage, estimated=False, refused=False)


def run(times: int, tool: str = "bash", most: int = 10**9) -> list[Did]:
    """A run that makes progress."""
    return [Did(((tool, {"cmd": f"cat {number}"}),), (f"line {number}",)) for number in range(times)][-most:]


def test_other_limits_are_decided_as_they_would_be_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that were never in force are replayed as a service with them decides."""
    tools: dict[str, Any] = {"max_calls_per_tool": {"bash": 3, "write_file": 1}, "max_tool_calls": 7}
    other = limited("one", **tools)
    recorder, wanted = Recorder(limited("one", max_steps=99)), Recorder(other)
    for each in (recorder, wanted):
        monkeypatch.setattr(conversation, "_KNOWN", make_cache())
        for times in range(9):
            each.send(as_chat(run(times, "bash" if times < 6 else "read_file")), x_user_id="ann")

    found = Replay(other).add(recorder.lines)

    assert compare(wanted.judged, found) == []
    assert "reject" in {verdict.action for judged in wanted.judged for verdict in judged.verdicts}


def test_other_prices_are_decided_as_they_would_be_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the log has tokens, money and failures are added up anew, also at prices, and with breakers, never in force."""
    clock = Clock()
    monkeypatch.setattr("extproc.ext_proc.transaction.time", lambda: clock.now / 1000)
    other = limited(
        "one", {"idle_seconds": 600}, unknown_model={"input": 7, "output": 3}, prices={"big-*": {"input": 90, "output": 90}},
        max_cost_per_session=0.2, circuit_breaker={"consecutive_errors": 3},
    )  # fmt: skip
    recorder, wanted = [
        Recorder(each, store=MemoryStore(Metrics(), clock=lambda: clock.now))
        for each in (limited("one", {}, max_steps=99), other)
    ]
    caches = [make_cache(), make_cache()]
    random = Random(5)
    lines, open_calls = [], list[tuple[int, Recorder, Entry]]()
    for times in range(60):
        clock.now += 5_000
        for ended, each, entry in [call for call in open_calls if call[0] <= clock.now]:
            now, clock.now = clock.now, ended
            each.service.settle_entry(entry)
            clock.now = now
        open_calls = [call for call in open_calls if call[0] > clock.now]
        user, failed = f"u{times % 4}", times % 4 == 3 and times > 20
        usage = Usage(random.choice([500, 5_000]), random.choice([10, 900]), 200)
        end = 503 if failed else 200, random.choice(["big-1", "small"]), Usage(0, 0) if failed else usage
        for each, known in zip((recorder, wanted), caches, strict=True):
            monkeypatch.setattr(conversation, "_KNOWN", known)
            each.send({**as_chat(run(times // 4)), "user": user}, x_user_id=user)
        seconds = random.choice([1, 7, 12])
        if SESSIONS in wanted.metadata:
            named = tuple(json.loads(wanted.metadata[SESSIONS]))
            entry = Entry(named, end[0], failed, 0, 0, end[1], end[2], estimated=False, refused=False)
            open_calls.append((clock.now + seconds * 1000, wanted, entry))
        told = {"input": usage.input + 200, "cached": 200, "output": usage.output, "model": end[1]}
        line = {"loop_usage": {"model": end[1]} if failed else told, "status": end[0], "duration_ms": seconds * 1000}
        lines.append(json.dumps({**json.loads(recorder.lines[-1]), **line}))

    replay = Replay(other)
    found = replay.add(lines)

    assert compare(wanted.judged, found) == []
    assert replay.problems == []
    assert "reject" in {verdict.action for judged in wanted.judged for verdict in judged.verdicts}


def test_a_log_with_odd_tokens_is_read() -> None:
    """What a model or a client may have written counts as missing, and tokens are estimated."""
    recorder = Recorder(limited("one", max_steps=99))
    recorder.send(as_chat(run(3)), x_user_id="ann")
    odd: list[dict[str, Any]] = [
        {"loop_usage": 7, "status": "x", "duration_ms": -1, "flags": 5},
        {"loop_usage": {"input": "many", "output": 1e300, "model": 5}, "status": 1e99, "bytes_sent": None},
        {"status": 200},
    ]
    priced = limited("one", unknown_model={"input": 7, "output": 3}, max_cost_per_session=0.2)
    replay = Replay(priced)

    found = replay.add([json.dumps({**json.loads(recorder.lines[0]), **each}) for each in odd])

    assert [judged is not None and judged.left_out for judged in found] == [()] * 3
    assert set(replay.problems) == {("estimated_tokens", "")}


def test_a_new_call_takes_few_bytes() -> None:
    """Turns and calls of a long run together take about 200 bytes for each request."""
    recorder = Recorder(ONE)
    sizes = []
    for times in range(80):
        record = recorder.send(as_chat(run(times)), x_user_id="ann")
        sizes.append(len(record["limits"]))

    assert sorted(sizes)[len(sizes) // 2] <= 100
    assert sum(sizes) / len(sizes) <= 140
    assert max(sizes) <= 1_600


def test_no_argument_or_id_of_a_call_is_recorded() -> None:
    """Hashes of calls change with the key; a tool is written by its name, or as a hash if the name is odd."""
    recorder, other = Recorder(ONE), Recorder(ONE)
    other.service.key.secret = bytes(32)
    request = as_chat([*run(1), *run(1, "odd tool!")])

    first = unpack(recorder.send(request, x_user_id="ann")["limits"])
    second = unpack(other.send(request, x_user_id="ann")["limits"])

    assert b"bash" in first
    assert b"odd" not in first
    assert first != second
    records = read_tool_calls(Document(json.dumps(request).encode())).records
    parts = [records[at + start : at + end] for at in (0, RECORD) for start, end in ((0, 6), (10, 14))]
    assert [part for part in [*parts, digest_tool("odd tool!")] if part in first] == []


def test_damaged_digests_of_calls_are_named() -> None:
    """Cut, changed, made up: each is a problem of its line and limits nothing; no error is raised."""
    recorder = Recorder(ONE)
    for times in range(4):
        text = recorder.send(as_chat(run(times)), x_user_id="ann")["limits"]
    record = json.loads(recorder.lines[-1])["loop_record"]
    random = Random(3)
    forged = ["!", "A", text[:-4], text + "AAAA", "AWAA", "é", "A" * 9_000]
    for _ in range(400):
        place = random.randrange(len(text))
        forged.append(text[:place] + random.choice("ABCDwxyz0189+/") + text[place + 1 :])
        data = bytearray(unpack(text)[:-4])
        data[random.randrange(len(data))] = random.randrange(256)
        forged.append(b64encode(bytes(data) + crc32(data).to_bytes(4, "big")).decode())
    replay = Replay(ONE)
    replay.add(recorder.lines[:-1])

    for made in forged:
        replay.add([json.dumps({"loop_record": record | {"limits": made}})])

    kinds = {kind for kind, _ in replay.problems}
    assert kinds <= {"damaged_calls", "earlier_calls", "unrecorded_calls", "other_settings"}
    assert [kind for kind, _ in replay.problems[:7]] == ["damaged_calls"] * 7


def test_a_log_that_begins_in_the_middle_names_what_it_cannot_limit() -> None:
    """Requests whose earlier calls are in another log are not limited; a list that is written whole ends that."""
    recorder = Recorder(ONE)
    for times in range(80):
        recorder.send(as_chat(run(times)), x_user_id="ann")
    replay = Replay(ONE)

    found = replay.add(recorder.lines[5:])

    unknown = [judged for judged in found if judged is not None and ("one", "session", "not_recorded") in judged.left_out]
    assert ("earlier_calls", "") in replay.problems
    assert 0 < len(unknown) <= 40
    assert all(judged is not None and not judged.left_out for judged in found[-5:])


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"session": {"keys": ["header:x-session-id"]}}, "session.keys"),
        ({"unknown_model": {"input": 3, "output": 2}}, "session, prices and unknown_model"),
    ],
)
def test_other_settings_of_sessions_are_named(more: dict[str, Any], key: str) -> None:
    """A policy that would have seen other sessions, or other money, is not decided; the keys that differ are named."""
    recorder = Recorder(limited("one", {}, max_cost_per_session=5))
    recorder.send(as_chat(run(3)), x_user_id="ann", x_session_id="a")
    session = more.pop("session", {})
    replay = Replay(limited("one", session, max_cost_per_session=5, **more))

    (found,) = replay.add(recorder.lines)

    assert ("other_settings", f"one: set its {key} to what it was in the policy of serve --record") in replay.problems
    assert found is not None
    assert ("one", "session", "not_recorded") in found.left_out


def test_a_history_of_too_many_calls_is_said_to_be_unrecorded() -> None:
    """A digest stays within its bound, and the line is named."""
    calls = tuple(("bash", {"a": number}) for number in range(30))
    recorder = Recorder(limited("one", max_steps=9))
    record = recorder.send(as_chat([Did(calls, ("x",) * 30)] * 20), x_user_id="ann")
    replay = Replay(limited("one", max_steps=9))

    replay.add(recorder.lines)

    assert len(record["limits"]) < 60
    assert replay.problems == [("unrecorded_calls", "")]
