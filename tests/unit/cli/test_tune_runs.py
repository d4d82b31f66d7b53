"""`loopguard tune` for turns and for session limits: what it counts is what a replay says, and the advice follows from it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.apis import conversation
from extproc.cli.main import main
from extproc.cli.replay.advice import find_percentile, list_thresholds, recommend_limits, recommend_turns
from extproc.cli.replay.records import parse_line
from extproc.cli.replay.runs import THRESHOLDS, WEAK_THRESHOLDS, RecordedRun, RunCollector
from extproc.engine.settlements import Entry
from extproc.policy.loader import parse
from extproc.request.hash_key import HashKey
from extproc.sessions.rates import Usage
from tests.support.access_logs import USER, make_record, write_lines
from tests.support.documents import bundle, policy
from tests.support.engine import ANY
from tests.support.extent import deepen
from tests.support.recorded import SECRET, Recorder, make_cache
from tests.support.turn_writers import Did, as_chat

TURNS = policy("p", ANY, similarity="turns", threshold_identical_requests=3, **USER)
STUCK = Did((("run", {"cmd": "make"}),), ("make: *** [all] Error 2: no rule to make target\n" * 3,))
TALK = Did((), user="ok")


def work(number: int) -> Did:
    """A turn like no other."""
    return Did((("read", {"path": f"{number}.py"}),), (f"print({number})  # what is in this file",))


def converse(user: str, begin: float, turns: list[Did]) -> list[dict[str, Any]]:
    """The requests of a conversation, which is the only one of its caller; the first has no turn yet."""
    found = []
    for end in range(len(turns) + 1):
        document = as_chat(turns[:end])
        document["messages"][1]["content"] = f"Fix it for {user}."
        found.append(make_record(begin + end, user, body=document))
    return found


def make_traffic() -> list[dict[str, Any]]:
    """Forty runs that go on, of which three have repeated a turn; five that are stuck, one in talk."""
    runs = [[work(number) for number in range(2 + place % 11)] for place in range(37)]
    runs += [[*[STUCK] * times, work(1), work(2)] for times in (2, 3, 4)]
    runs += [[work(1), *[STUCK] * times] for times in (3, 4, 6, 9)]
    runs += [[work(1), *[TALK] * 9]]
    requests = [each for place, turns in enumerate(runs) for each in converse(f"user-{place}", place / 50, turns)]
    return sorted(requests, key=lambda record: record["time"])


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No conversation is known from another test."""
    monkeypatch.setattr(conversation, "_KNOWN", make_cache())


class Tuned:
    """One run of the command on the traffic."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], document: object, *flags: str) -> None:
        (folder / "policies.json").write_text(json.dumps(document))
        (folder / "records.ndjson").write_bytes(write_lines(make_traffic()))
        capsys.readouterr()
        self.code = main(["tune", "--policy", str(folder / "policies.json"), *flags, str(folder / "records.ndjson")])
        self.out, self.error = capsys.readouterr()


def describe(run: RecordedRun) -> tuple[Any, ...]:
    """All that is known of a run."""
    return *(int(getattr(run, name)) for name in RecordedRun.__slots__ if name != "tools"), tuple(sorted(run.tools.items()))


def replay(folder: Path, capsys: pytest.CaptureFixture[str], *policies: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a replay says of these policies, by id."""
    (folder / "others.json").write_text(json.dumps(bundle(*policies)))
    assert main(["replay", "--policy", str(folder / "others.json"), "--json", str(folder / "records.ndjson")]) == 0
    return {each["policy"]: each for each in json.loads(capsys.readouterr().out)["policies"]}


@pytest.mark.slow
def test_each_threshold_touches_what_a_replay_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs touched by a threshold, and by a weak threshold, are those of a replay with a policy that has it."""
    tuned = json.loads(Tuned(tmp_path, capsys, bundle(TURNS), "--json").out)
    plain = {f"t{number}": {"threshold_identical_requests": number} for number in THRESHOLDS}
    weak = {f"w{number}": {"threshold_identical_requests": 3, "weak_threshold": number} for number in WEAK_THRESHOLDS}
    policies = [
        {"id": name, "spec": TURNS["spec"] | {"loop_detection": TURNS["spec"]["loop_detection"] | keys}}
        for name, keys in (plain | weak).items()
    ]

    replayed = replay(tmp_path, capsys, *policies)

    rows = {row["threshold"]: row for row in tuned["thresholds"]}
    assert {f"t{number}": row["went_on"] + row["stuck"] for number, row in rows.items()} == {
        name: replayed[name]["tenants_touched"] for name in plain
    }
    strong = {number: row["went_on_strong"] + row["stuck_strong"] for number, row in rows.items()}
    for row in tuned["weak_thresholds"]:  # a strong loop is refused from its threshold on, and a weak one only then
        refused = replayed[f"w{row['weak_threshold']}"]["refused"]
        others = replayed["w14"]["refused"] if row["weak_threshold"] < 14 else refused
        assert (refused > others) == (row["went_on"] + row["stuck"] > 0)
    assert (tuned["runs"], tuned["stuck"], strong[3], rows[3]["went_on"]) == (45, 5, 6, 2)


@pytest.mark.slow
def test_the_advice_is_a_policy_that_validates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The ready policy has the ladder, keeps everything else, and touches in a replay what the reasons say."""
    made = json.loads(json.dumps(TURNS))
    made["spec"]["loop_detection"] |= {"tools": {"wait": {"allow": True}}, "reject_status": "auto"}
    tuned = Tuned(tmp_path, capsys, bundle(made), "--max-touched", "5", "--output", str(tmp_path / "tuned.json"))
    ready = json.loads((tmp_path / "tuned.json").read_text())

    assert tuned.code == 0
    assert ready["spec"]["loop_detection"] == made["spec"]["loop_detection"] | {
        "threshold_identical_requests": 3, "action": "steer", "escalate": {"land": 5, "reject": 7}, "weak_threshold": 8,
    }  # fmt: skip
    assert (
        "- steer at 3: it touches 2 of 40 runs that went on (at most 16.5%, with 95% confidence), and 5 of 5 stuck ones"
        in tuned.out
    )
    assert (
        "- reject at 7: it touches 0 of 40 runs that went on (at most 8.8%, with 95% confidence), and 1 of 5 stuck ones"
        in tuned.out
    )
    assert "this is little traffic" in tuned.out
    assert json.dumps(ready, indent=2) in tuned.out
    assert main(["validate", str(tmp_path / "tuned.json")]) == 0
    capsys.readouterr()
    assert replay(tmp_path, capsys, ready | {"id": "ready"})["ready"]["tenants_touched"] == 7


@pytest.mark.slow
def test_runs_are_the_same_without_their_bodies() -> None:
    """What `serve --record` keeps of turns is enough: each run is found, and has gone as far."""
    tuned = parse({"p": json.dumps(TURNS).encode()}, datetime.now(UTC)).sources[0].policies[0]
    bodies, digests = (RunCollector(tuned, "default", 1_000, HashKey(SECRET), sessions=False) for _ in range(2))
    recorder = Recorder(TURNS)

    for record in make_traffic():
        bodies.add(parse_line(json.dumps(record).encode()))
        recorder.send(record["body"], x_user_id=record["headers"]["X-User-Id"])
    for line in recorder.lines:
        digests.add(parse_line(line.encode()))
        assert digests.take_problems() == []

    with_bodies, without = (sorted(map(describe, each.list_all())) for each in (bodies, digests))
    assert without == with_bodies
    assert (len(without), digests.requests, digests.nameless) == (45, bodies.requests, bodies.nameless)


@pytest.mark.slow
@pytest.mark.parametrize("percentile", deepen(["50", "90", "99"], "90"))
def test_limits_are_percentiles_of_runs_that_went_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], percentile: str
) -> None:
    """As many sessions are beyond a limit as a replay with it refuses; the ready policy keeps other limits and validates."""
    spec: dict[str, Any] = {"selector": ANY, **USER, "session_limits": {"max_agents": 7, "max_steps": 2}}
    made = {"id": "p", "spec": spec}
    tuned = Tuned(
        tmp_path,
        capsys,
        bundle(made),
        "--limits",
        "--percentile",
        percentile,
        "--json",
        "--output",
        str(tmp_path / "tuned.json"),
    )
    found, ready = json.loads(tuned.out), json.loads((tmp_path / "tuned.json").read_text())

    limits = ready["spec"]["session_limits"]
    assert tuned.code == 0
    assert (limits.keys(), limits["max_agents"]) == (
        {"max_agents", "max_steps", "max_tool_calls", "max_calls_per_tool"},
        7,
    )
    assert main(["validate", str(tmp_path / "tuned.json")]) == 0
    capsys.readouterr()
    for row in found["limits"]:
        _, _, tool = row["limit"].partition("calls of ")
        limit = {"max_calls_per_tool": {tool: row["value"]}} if tool else {row["limit"]: row["value"]}
        alone = {"id": "alone", "spec": spec | {"session_limits": limit}}
        touched = replay(tmp_path, capsys, alone)["alone"]["tenants_touched"]
        assert touched == row["went_on_beyond"] + row["stuck_beyond"]
        assert row["percentiles"][percentile] == row["value"] - (row["limit"] == "max_tool_calls")


@pytest.mark.slow
@pytest.mark.parametrize("ends", [False, True], ids=["without tokens", "with tokens"])
def test_limits_of_calls_and_money_need_no_bodies(ends: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An access log is enough: as many sessions are beyond each limit as were in truth, and money is what was settled."""
    prices = {"unknown_model": {"input": 1_000, "output": 0}}
    made = policy("p", ANY, similarity="turns", action="warn", **USER)
    made["spec"]["session_limits"] = {"max_steps": 99, "max_calls_per_tool": {"read": 50}, "max_cost_per_session": 99, **prices}
    recorder = Recorder(made)
    for place in range(20):
        for record in converse(f"user-{place}", 0, [work(number) for number in range(2 + place)]):
            recorder.send(record["body"], x_user_id=f"user-{place}")
            named = tuple(json.loads(recorder.metadata["sessions"]))
            entry = Entry(named, 200, False, 0, 0, "", Usage(10, 0), estimated=False, refused=False)  # one cent
            recorder.service.settle_entry(entry)
    (tmp_path / "policies.json").write_text(json.dumps(bundle(made)))
    cost = 0.21 if ends else 0.2
    more = {"loop_usage": {"input": 10, "output": 0}, "status": 200} if ends else {}
    lines = [json.dumps({**json.loads(line), **more}) for line in recorder.lines]
    (tmp_path / "access.log").write_text("\n".join(lines) + "\n")
    flags = ("--limits", "--percentile", "90", "--json", "--output", str(tmp_path / "tuned.json"))

    code = main(["tune", "--policy", str(tmp_path / "policies.json"), *flags, str(tmp_path / "access.log")])
    found, ready = json.loads(capsys.readouterr().out), json.loads((tmp_path / "tuned.json").read_text())

    limits = ready["spec"]["session_limits"]
    assert code == 0
    assert found["problems"] == []
    assert {row["limit"]: (row["value"], row["went_on_beyond"]) for row in found["limits"]} == {
        "max_steps": (20, 2), "max_tool_calls": (20, 2), "calls of read": (19, 2), "max_cost_per_session": (cost, 2),
    }  # fmt: skip
    assert limits == {
        "max_steps": 20, "max_tool_calls": 20, "max_calls_per_tool": {"read": 19},
        "max_cost_per_session": cost, **prices,
    }  # fmt: skip
    assert "max_calls_per_tool read 19: 90% of 20 sessions that went on and call it need at most 19 calls" in found["reason"]
    assert ("had cost at most $0.2;" if ends else "had cost at most $0.19 before their last request;") in found["reason"]
    assert main(["validate", str(tmp_path / "tuned.json")]) == 0


def test_limits_need_no_detector(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """People read each limit with the reason, and the percentiles that it follows from."""
    made = {"id": "p", "spec": {"selector": ANY, **USER, "session_limits": {"max_steps": 2}}}

    out = Tuned(tmp_path, capsys, bundle(made), "--limits").out

    assert "40 runs went on, 5 end in a loop" in out
    assert "- max_steps 13: 99% of 40 sessions that went on take at most 13 requests; 0 take more, up to 13" in out


def test_records_without_bodies_are_not_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without bodies there are no runs, no advice, and the number of such requests."""
    (tmp_path / "policies.json").write_text(json.dumps(bundle(TURNS)))
    record = make_record(body_bytes=9, body_crc32="0" * 8, body_adler32="0" * 8)
    del record["body"]
    (tmp_path / "records.ndjson").write_bytes(write_lines([record]))

    code = main(["tune", "--policy", str(tmp_path / "policies.json"), "--json", str(tmp_path / "records.ndjson")])

    found = json.loads(capsys.readouterr().out)
    assert (code, found["uncounted"], found["runs"], found["ready"]) == (1, 1, 0, None)
    assert found["reason"] == "none of 0 runs ends in a loop of turns: these logs have nothing to stop"


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--percentile", "0"), "--percentile must be above 0 and at most 100"),
        (("--thresholds", "9"), "--thresholds must be up to 12 numbers between 2 and 8, such as 30,60, not '9'"),
        (("--detector", "none"), "--detector must name one of these detectors of p: default"),
    ],
)
def test_flags_that_make_no_sense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], complaint: str
) -> None:
    """One line says what would be right."""
    tuned = Tuned(tmp_path, capsys, bundle(TURNS), *flags)

    assert tuned.code == 2
    assert complaint in tuned.error


# --- Pure advice


def make_runs(went_on: dict[int, int], stuck: dict[int, int], weak: dict[int, int] | None = None) -> list[RecordedRun]:
    """Runs by how far their loops go, with how many there are of each; and runs that went on by their weak loops."""
    found = []
    for runs, ends in ((went_on, False), (stuck, True)):
        for height, number in runs.items():
            for _ in range(number):
                run = RecordedRun()
                run.found, run.strong, run.stuck, run.steps, run.tool_calls = height, height, ends, 10 * height, height
                found.append(run)
    for height, number in (weak or {}).items():
        for _ in range(number):
            run = RecordedRun()
            run.found, run.weak = min(height, 8), height
            found.append(run)
    return found


ADVICE: dict[str, tuple[list[RecordedRun], dict[str, Any], str]] = {
    "as the preset": (
        make_runs({0: 990, 3: 5, 4: 1}, {8: 9}),
        {"threshold_identical_requests": 3, "escalate": {"land": 5, "reject": 7}, "weak_threshold": 14},
        "weak_threshold 14: these logs have no weak loop",
    ),
    "runs that repeat themselves and go on": (
        make_runs({0: 900, 3: 60, 4: 40, 5: 1}, {8: 9}),
        {"threshold_identical_requests": 5, "escalate": {"land": 7, "reject": 8}, "weak_threshold": 14},
        "steer at 5: it touches 1 of 1,001 runs that went on",
    ),
    "one goes on after many": (
        make_runs({0: 990, 8: 1}, {8: 9}),
        {"threshold_identical_requests": 3, "escalate": {}, "weak_threshold": 14},
        "no reject: every higher threshold touches more than 0 of the runs that went on",
    ),
    "talk": (
        make_runs({0: 2_000}, {8: 9}, {6: 3}),
        {"threshold_identical_requests": 3, "escalate": {"land": 5, "reject": 7}, "weak_threshold": 8},
        "weak_threshold 8: no run that went on repeats talk or short results so often; 0 stuck ones do",
    ),
    "much talk": (
        make_runs({0: 2_000}, {8: 9}, {14: 3}),
        {"threshold_identical_requests": 3, "escalate": {"land": 5, "reject": 7}, "weak_threshold": 14},
        "even the highest touches 3 runs that went on",
    ),
    "nothing is stuck": (make_runs({0: 9, 8: 9}, {}), {}, "none of 18 runs ends in a loop of turns"),
    "all repeat themselves": (
        make_runs({8: 50}, {8: 9}),
        {},
        "each threshold touches more than 0 of 50 runs that went on (1%)",
    ),
}
"""Runs; the recommended keys without the action; a part of a reason."""


@pytest.mark.parametrize("case", ADVICE)
def test_the_ladder_touches_few_runs_that_went_on(case: str) -> None:
    """A note at the lowest threshold that touches few, a landing that touches a tenth of that, a refusal that touches none."""
    runs, keys, reason = ADVICE[case]

    advice = recommend_turns(runs, THRESHOLDS[1:], 1.0)

    assert advice.keys == ({"action": "steer", **keys} if keys else {})
    assert any(reason in each for each in advice.reasons)


@given(st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=60), st.floats(0, 100))
def test_a_recommended_ladder_is_in_order_and_refuses_no_run_that_went_on(runs: list[tuple[int, bool]], percent: float) -> None:
    """Whatever the traffic, actions get stricter with higher thresholds, and no run that went on would have been refused."""
    found = [run for height, stuck in runs for run in make_runs({} if stuck else {height: 1}, {height: 1} if stuck else {})]

    keys = recommend_turns(found, THRESHOLDS, percent).keys

    if keys:
        steps = [keys["threshold_identical_requests"], *keys["escalate"].values()]
        rows = {row.threshold: row for row in list_thresholds(found)}
        assert steps == sorted(set(steps))
        assert not keys["escalate"].get("reject") or not rows[keys["escalate"]["reject"]].went_on_strong


def test_limits_leave_out_stuck_runs() -> None:
    """What runs that are stuck take says nothing about what a good one needs."""
    advice, rows = recommend_limits(make_runs({1: 95, 3: 5}, {9: 50}), 95)

    assert advice.keys == {"max_steps": 10, "max_tool_calls": 2}
    assert (rows[0].percentiles, rows[0].went_on_beyond, rows[0].stuck_beyond) == (
        {50: 10, 90: 10, 95: 10, 99: 30, 100: 30}, 5, 50,
    )  # fmt: skip
    assert advice.reasons[0] == (
        "max_steps 10: 95% of 100 sessions that went on take at most 10 requests; 5 take more, up to 30, "
        "and so do 50 of 50 stuck ones"
    )


def test_no_limit_follows_from_nothing() -> None:
    """Without runs that went on there is no advice; a limit of what no run uses is not recommended."""
    assert recommend_limits(make_runs({}, {9: 5}), 99)[0].keys == {}
    idle = make_runs({1: 200}, {})
    for run in idle:
        run.tool_calls = 0

    advice, _ = recommend_limits(idle, 99)

    assert advice.keys == {"max_steps": 10}
    assert "no max_tool_calls: 99% of 200 sessions that went on have no tool calls" in advice.reasons


@given(st.lists(st.integers(0, 50), min_size=1), st.floats(0.1, 100))
def test_a_percentile_is_the_least_value_that_covers_it(values: list[int], percentile: float) -> None:
    """At least that share of the values does not exceed it, and less than that share is below it."""
    value = find_percentile(sorted(values), percentile)

    assert sum(each <= value for each in values) >= len(values) * percentile / 100 - 1e-9
    assert sum(each < value for each in values) < len(values) * percentile / 100 + 1e-9
