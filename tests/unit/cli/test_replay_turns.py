"""Digests of turns: what a log without bodies shows of agents is what live policies saw."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from extproc.apis import conversation
from extproc.cli.main import main
from extproc.detectors import digests
from extproc.detectors.digests import DamagedDigestError, DigestReader, seal_digest
from extproc.metrics import Metrics
from extproc.store.memory import MemoryStore
from tests.support.documents import bundle, policy
from tests.support.engine import ANY
from tests.support.extent import deepen
from tests.support.messages import body, headers
from tests.support.random_agents import PATHS, Agent
from tests.support.recorded import Recorder, Replay, compare, make_cache, unpack
from tests.support.service import decoded, exchange, make_service, metadata_of
from tests.support.turn_writers import Did, as_anthropic, as_chat

BY_USER: dict[str, Any] = {"similarity": "turns", "limit_keys": ["header:x-user-id"]}
POLICIES = [
    policy("ladder", ANY, **BY_USER, action="steer", escalate={"land": 4, "reject": 5}, weak_threshold=6),
    policy("warned", ANY, **BY_USER, threshold_identical_requests=2, action="warn", cooldown_seconds=60),
    policy("raw", ANY, **BY_USER, normalize_results=False, tools={"read_file": {"allow": True}, "ba*": {"threshold": 4}}),
    policy("canary", ANY, **BY_USER, mode="shadow", threshold_identical_requests=4, ignore_arguments=["why"], max_cycle=6),
    policy("named", ANY, **BY_USER, session={"keys": ["header:x-run"]}),
]
ONE = policy("one", ANY, **BY_USER)


def loop(times: int, tool: str = "bash", result: str = "error: no such file") -> list[Did]:
    """The same turn, again and again."""
    return [Did(((tool, {"cmd": "cat a"}),), (result,), thought=f"try {number}") for number in range(times)]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No conversation is known from another test."""
    monkeypatch.setattr(conversation, "_KNOWN", make_cache())


@pytest.mark.slow
@pytest.mark.parametrize("seed", deepen(range(24), *range(6)))
def test_a_replay_decides_as_live(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents of every API, on two replicas: each verdict, loop and tenant is the live one, with nothing to complain about."""
    random = Random(seed)
    store = MemoryStore(Metrics())
    replicas = [(Recorder(*POLICIES, store=store), make_cache()) for _ in range(2)]
    agents = [Agent(random, f"{seed}-{number}") for number in range(random.choice([1, 3, 6]))]
    lines, live = [], []
    for _ in range(random.choice([30, 90])):
        agent = random.choice(agents)
        request = agent.write()
        while True:  # some are sent again
            replica, known = replicas[random.random() < 0.3]
            monkeypatch.setattr(conversation, "_KNOWN", known)
            replica.send(request, PATHS[agent.shape], **agent.sent)
            lines.append(replica.lines[-1])
            live.append(replica.judged[-1])
            if random.random() < 0.9:
                break
        agent.step()

    replay = Replay(*POLICIES)

    assert compare(live, replay.add(lines)) == []
    assert replay.problems == []
    assert any(verdict.loop for judged in live for verdict in judged.verdicts)


def test_other_thresholds_are_decided_as_they_would_be_live() -> None:
    """A ladder that was never in force is replayed as a service with it decides."""
    other = policy("one", ANY, **BY_USER, threshold_identical_requests=2, action="warn", escalate={"reject": 6})
    recorder, wanted = Recorder(ONE), Recorder(other)
    for times in range(9):
        for each in (recorder, wanted):
            each.send(as_chat(loop(times)), x_user_id="ann")

    found = Replay(other).add(recorder.lines)

    assert compare(wanted.judged, found) == []
    assert [judged.verdicts[0].action for judged in wanted.judged] == ["allow"] * 2 + ["warn"] * 4 + ["reject"] * 3


def test_no_text_of_a_request_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what people, models and tools say nor names that are no plain words; hashes change with the key."""
    words = [f"{number:x}Secret{number}" for number in range(987_654_321, 987_654_329)]
    system, user, thought, argument, result, said, tool, command = words
    turns = [
        Did((("bash", {"cmd": argument}),), (result,), said, thought),
        Did(((f"{tool} {tool}", {"a": argument}),), (f"error: {result}",), "", thought),
        Did((), (), said, f"```\n{command} --now\n```"),
    ]
    request = as_chat(turns)
    request["messages"][0]["content"] = system
    request["messages"][1]["content"] = user
    recorder, same, other = Recorder(ONE), Recorder(ONE), Recorder(ONE)
    other.service.key.secret = bytes(32)

    record = recorder.send(request, x_user_id="ann")

    assert [word for word in words if word in decode(record)] == []
    assert '"bash"' not in json.dumps(record)
    assert b"bash" in unpack(record["turns"])
    monkeypatch.setattr(conversation, "_KNOWN", make_cache())
    again = same.send(request, x_user_id="ann")
    assert list_hashes(again) == list_hashes(record)
    found = other.send(request, x_user_id="ann")
    assert [one for one in list_hashes(found) if one in list_hashes(record)] == []
    assert found["tenants"] == record["tenants"]


def test_callers_of_one_head_are_recorded_each() -> None:
    """They differ in the body only, so the rest of their records is written once."""
    recorder = Recorder(policy("p", ANY, limit_keys=["body:/user"]))

    records = [recorder.send({"user": user, "messages": []}) for user in ("ann", "bob", "ann")]

    callers = [record["tenants"] for record in records]
    assert callers[0] == callers[2] != callers[1]


def list_hashes(record: dict[str, Any]) -> list[bytes]:
    """The hashes in a record's digest of turns."""
    turns = DigestReader(1).read(record["turns"]).turns
    hashes = [
        (turn.action_hash, turn.raw, turn.normalized, turn.words, turn.failure_id) for turn, _ in turns if turn is not None
    ]
    return [value for each in hashes for value in each if value]


def decode(record: dict[str, Any]) -> str:
    """A record with its digests unpacked."""
    return json.dumps(record) + unpack(record["turns"]).decode("latin-1")


@pytest.mark.parametrize("write", [as_chat, as_anthropic])
def test_a_new_turn_takes_few_bytes(write: Any) -> None:  # noqa: ANN401  # a writer
    """A long run takes about 200 bytes for each request, with its callers and session; from time to time a list is whole."""
    recorder = Recorder(ONE)
    sizes, added = [], []
    for times in range(80):
        record = recorder.send(write(loop(times)), x_user_id="ann")
        sizes.append(len(record["turns"]))
        added.append(len(json.dumps({key: record[key] for key in ("turns", "tenants", "sessions")}, separators=(",", ":"))))

    assert sorted(sizes)[len(sizes) * 9 // 10] <= 110
    assert sorted(added)[len(added) // 2] <= 190
    assert max(sizes) < 2_000
    assert sum(sizes) / len(sizes) <= 140


def test_a_hostile_body_cannot_make_a_record_large() -> None:
    """Many calls with long names, at once and in many turns: the digest stays within its bound, and is read again."""
    calls = tuple((f"tool_{number}_" + "y" * 50, {"a": "\U0001f600" * 50}) for number in range(40))
    request = as_chat([Did(calls, ("é" * 500,) * 40, "words " * 99, "t" * 999)] * 60)
    recorder = Recorder(ONE)

    record = recorder.send(request, x_user_id="ann")

    assert len(record["turns"]) <= digests.LONGEST
    assert compare(recorder.judged, Replay(ONE).add(recorder.lines)) == []


def test_a_log_that_begins_in_the_middle_names_what_it_cannot_decide() -> None:
    """Requests whose earlier turns are in another log are not counted; a list that is written whole ends that."""
    recorder = Recorder(ONE)
    for times in range(80):
        recorder.send(as_chat(loop(times)), x_user_id="ann")
    replay = Replay(ONE)

    found = replay.add(recorder.lines[5:])

    unknown = [judged for judged in found if judged is not None and judged.left_out]
    assert {judged.left_out for judged in unknown} == {(("one", "default", "not_recorded"),)}
    assert replay.problems == [("earlier_turns", "")] * len(unknown)
    assert 0 < len(unknown) <= 32
    assert compare(recorder.judged[5 + len(unknown) :], found[len(unknown) :]) == []


def test_logs_of_two_replicas_may_be_read_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one replica has recorded is never taken for what another has: their digests have different numbers."""
    one, other = Recorder(ONE), Recorder(ONE)
    for each, tool in ((one, "bash"), (other, "shell")):
        monkeypatch.setattr(conversation, "_KNOWN", make_cache())
        for times in range(6):
            each.send(as_chat(loop(times, tool)), x_user_id="ann")
    replay = Replay(ONE)

    found = replay.add([line for pair in zip(other.lines, one.lines, strict=True) for line in pair])

    assert replay.problems == []
    assert compare(other.judged, found[::2]) == []
    assert compare(one.judged, found[1::2]) == []


def follow_nothing(text: str) -> str:
    """A digest of a whole list, of which the flags say that its place follows that of an earlier one."""
    data = bytearray(unpack(text)[:-4])
    data[1] |= 128
    return seal_digest(bytes(data))


def test_damaged_digests_are_named() -> None:
    """Cut, changed, made up: each is a problem of its line and counts nothing; no error is raised."""
    recorder = Recorder(ONE)
    texts = [recorder.send(as_chat(loop(times)), x_user_id="ann")["turns"] for times in range(3)]
    text = texts[-1]
    record = json.loads(recorder.lines[-1])["loop_record"]
    random = Random(3)
    forged = ["!", "A", text[:-4], text + "AAAA", "AWAA", "é", "A" * 9_000, "A" * 40]
    for _ in range(300):
        place = random.randrange(len(text))
        forged.append(text[:place] + random.choice("ABCDwxyz0189+/") + text[place + 1 :])
        data = bytearray(unpack(text)[:-4])
        data[random.randrange(len(data))] = random.randrange(256)
        forged.append(seal_digest(bytes(data)))
    replay = Replay(ONE)
    replay.add(recorder.lines[:-1])

    for made in forged:
        replay.add([json.dumps({"loop_record": record | {"turns": made}})])

    kinds = {kind for kind, _ in replay.problems}
    assert kinds <= {"damaged_turns", "earlier_turns", "unrecorded_turns", "other_settings"}
    assert [kind for kind, _ in replay.problems[:8]] == ["damaged_turns"] * 8
    with pytest.raises(DamagedDigestError):
        DigestReader(1).read(follow_nothing(texts[0]))


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"ignore_arguments": ["why"]}, "ignore_arguments"),
        ({"max_inspect_bytes": 300}, "max_inspect_bytes"),
        ({"session": {"keys": ["header:x-session-id"]}}, "session.keys"),
    ],
)
def test_other_settings_are_named_with_the_key_to_change(more: dict[str, Any], key: str) -> None:
    """A policy that would have seen other turns is not decided; the key that differs is named."""
    usual: dict[str, Any] = {"session": {}}
    recorder = Recorder(policy("one", ANY, **BY_USER, **usual))
    recorder.send(as_chat(loop(3)), x_user_id="ann", x_session_id="a")
    replay = Replay(policy("one", ANY, **BY_USER, **(usual | more)))

    (found,) = replay.add(recorder.lines)

    assert found is not None
    assert found.left_out == (("one", "default", "not_recorded"),)
    assert replay.problems == [("other_settings", f"one: set its {key} to what it was in the policy of serve --record")]


def test_names_that_are_hidden_stop_rules_by_name() -> None:
    """A name that is not recorded decides nothing: policies with rules by tool are not decided, others are."""
    recorder = Recorder(ONE)
    recorder.send(as_chat(loop(3, "odd tool!")), x_user_id="ann")

    (plain,) = Replay(ONE).add(recorder.lines)
    (by_name,) = Replay(policy("one", ANY, **BY_USER, tools={"odd*": {"allow": True}})).add(recorder.lines)

    assert plain is not None
    assert plain.verdicts[0].action == "reject"
    assert by_name is not None
    assert by_name.left_out == (("one", "default", "not_recorded"),)


def test_the_command_reports_turns_of_an_access_log(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: ANN401  # a folder
    """`replay` counts requests by their digests, shows live tenants, and names lines that it cannot decide."""
    recorder = Recorder(ONE)
    for times in range(6):
        recorder.send(as_chat(loop(times)), x_user_id="ann")
    log, policies = tmp_path / "access.log", tmp_path / "policies.json"
    policies.write_text(json.dumps(bundle(ONE)))
    log.write_text("\n".join([*recorder.lines, recorder.lines[3].replace('turns": "', 'turns": "A')]) + "\n")

    code = main(["replay", "--policy", str(policies), "--json", str(log)])
    printed = capsys.readouterr()
    document = json.loads(printed.out)

    assert code == 0
    found = document["policies"][0]
    assert (found["requests"], found["refused"], found["uncounted"]) == (6, 3, {"not_recorded": 1})
    assert document["worst"][0]["tenant"] == recorder.judged[0].verdicts[0].tenant
    assert f"warning: 1 line: its digest of turns is damaged ({log}:7)" in printed.err


def test_nothing_is_kept_without_record() -> None:
    """Without --record, no digest is written, and conversations keep none."""
    service = make_service(ONE)
    sent = headers("/v1/chat/completions", x_user_id="ann"), body(json.dumps(as_chat(loop(2))).encode())
    replies = exchange(service, *sent)
    known = conversation._KNOWN

    assert metadata_of(decoded(replies[-1])) == {}
    assert [each.digests for each in [*known._young.values()]] == [None]


def test_conversations_that_branch_have_digests_of_their_own() -> None:
    """Several requests go on from the same one, in turns: each list goes on from its own branch."""
    other = policy("one", ANY, **BY_USER, action="warn")
    recorder = Recorder(other)
    start = [Did((("bash", {"cmd": f"ls {number}"}),), (f"line {number} " * 30,)) for number in range(4)]
    branches = [[*start], [*start], [*start]]
    recorder.send(as_chat(start), x_user_id="ann")
    for step in range(5):
        for place, branch in enumerate(branches):
            branch.append(Did((("bash", {"cmd": f"cat {place if place < 2 else step}"}),), (f"found {place} " * 30,)))
            recorder.send(as_chat(branch), x_user_id="ann")
    replay = Replay(other)

    found = replay.add(recorder.lines)

    assert replay.problems == []
    assert compare(recorder.judged, found) == []
    assert {judged.verdicts[0].action for judged in recorder.judged} == {"allow", "warn"}


def test_a_branch_in_the_middle_of_what_was_written_goes_on_from_there() -> None:
    """A shorter history, or one with other newest turns, is written as what differs; the longer one can still go on."""
    other = policy("other", ANY, **BY_USER, action="warn")
    recorder = Recorder(other)
    turns = [Did((("bash", {"cmd": f"ls {number % 5}"}),), (f"line {number % 5} of many " * 30,)) for number in range(12)]
    another = Did((("bash", {"cmd": "cat b"}),), ("something else " * 30,))
    sent = [turns[:9], turns[:4], turns[:10], [*turns[:6], another], [*turns[:6], another, another], turns[:11], turns]
    sizes = [len(recorder.send(as_chat(each), x_user_id="ann")["turns"]) for each in sent]
    replay = Replay(other)

    assert compare(recorder.judged, replay.add(recorder.lines)) == []
    assert replay.problems == []
    assert max(sizes[1:]) < sizes[0]  # none is whole


def test_old_messages_that_change_cost_no_digest_of_those_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that clears an old result with each request: entries of unchanged turns are used again, and decide as live."""
    packed: list[object] = []
    write = digests._write_entry

    def note(kept: Any, hider: digests.Hider, *, calls: bool) -> bytes:  # noqa: ANN401  # any turn
        packed.append(kept)
        return write(kept, hider, calls=calls)

    monkeypatch.setattr(digests, "_write_entry", note)
    recorder = Recorder(ONE)
    turns = [Did((("bash", {"cmd": f"cat {number % 7}"}),), (f"line {number % 7} of many " * 40,)) for number in range(30)]
    counts = []
    for times in range(30):
        cleared = [turn._replace(results=("[cleared]",)) for turn in turns[: max(0, times - 10)]]
        before = len(packed)
        recorder.send(as_chat([*cleared, *turns[len(cleared) : times]]), x_user_id="ann")
        counts.append(len(packed) - before)
    replay = Replay(ONE)

    assert compare(recorder.judged, replay.add(recorder.lines)) == []
    assert replay.problems == []
    assert max(counts[12:]) <= 4
