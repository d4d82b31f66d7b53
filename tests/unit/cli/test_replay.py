"""`loopguard replay` judges logs, and reports all that it could not use."""

import gzip
import io
import json
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.replay.report import Top
from extproc.request.fingerprint import NO_BODY, write_crc32
from tests.support.access_logs import START, USER, make_record, write_lines
from tests.support.budget_policies import bucket, limited
from tests.support.command import Run, find_missing, written
from tests.support.documents import bundle, policy
from tests.support.engine import ANY
from tests.support.messages import body, headers
from tests.support.replaying import Replayed
from tests.support.service import decoded, exchange, make_service, metadata_of, status
from tests.support.turn_writers import Did, as_chat

pytestmark = pytest.mark.compiled  # logs are judged by what is compiled

CHAT = "/v1/chat/completions"


@pytest.fixture
def replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Replayed]:
    return partial(Replayed, tmp_path, capsys)


def test_log_with_bodies_is_judged(replay: Callable[..., Replayed]) -> None:
    lines = [make_record(number) for number in range(5)] + [
        make_record(9, "bob"),
        make_record(9, text="other"),
    ]

    found = replay(write_lines(lines))

    (worst,) = found.document["worst"]
    expected = {"requests": 7, "loops": 3, "refused": 3, "tenants": 2, "tenants_touched": 1}
    assert (found.code, found.error, found.find() | expected) == (0, "", found.find())
    assert (worst["requests"], worst["highest_count"], worst["path"]) == (3, 5, "/v1/chat")
    assert worst["example"].endswith("access.log:3")
    assert found.document["log"]["first"] == "2025-11-22T11:52:25.000Z"


def test_actions_are_counted_separately(replay: Callable[..., Replayed]) -> None:
    actions = {"reject": "refused", "throttle": "throttled", "steer": "steered", "warn": "warned"}
    document = bundle(*(policy(name, ANY, action=name, **USER) for name in actions))

    found = replay(write_lines(make_record() for _ in range(4)), policies=document)

    for name, word in actions.items():
        assert {
            each: found.find(name)[each] for each in actions.values() if found.find(name)[each]
        } == {word: 2}
    assert found.find("throttle")["held_seconds"] == 0.7


SUMS = NO_BODY.plus(b"again")
BARE = {name: value for name, value in make_record().items() if name != "body"}
SUMMED = BARE | {
    "body_bytes": SUMS.length,
    "body_crc32": write_crc32(SUMS.crc32),
    "body_adler32": write_crc32(SUMS.adler32),
}
CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "c", "function": {"name": "ls", "arguments": "{}"}}],
}
TURNS = [CALL, {"role": "tool", "tool_call_id": "c", "content": "nothing"}]
SPELLINGS: list[dict[str, Any]] = [
    {"body": '{"a":1}'},
    {"body": {"a": 1}},
    {"body": None, "body_base64": "eyJhIjoxfQ=="},
]
BY_BODY = bundle(
    policy("exact", ANY, **USER),
    policy("turns", ANY, similarity="turns", **USER),
    policy("key", ANY, limit_keys=["body:/user"]),
    policy("bodiless", ANY, body="ignore", **USER),
)
BY_KEYS = bundle(
    policy("recorded", ANY, **USER),
    policy("other-header", ANY, limit_keys=["header:x-team"]),
    policy("claim", ANY, limit_keys=["jwt:org"]),
    policy("absent", ANY, limit_keys=["header:x-none"]),
)
RECORDED = SUMMED | {"headers": {"x-user-id": "0011223344556677", "x-none": None}}
NO_BODIES = {"turns": {"no_body": 3}, "key": {"no_body": 3}, "bodiless": 1}
WHOLE = datetime.fromtimestamp(START, UTC)
TIMES = [
    START,
    WHOLE.isoformat(),
    WHOLE.isoformat().replace("+00:00", "Z"),
    WHOLE.replace(tzinfo=None).isoformat(),
]
BACK = [make_record(10_000 + number * 4, "ann") for number in range(4)] + [
    make_record(number, "bob") for number in (1, 0, 3, 2)
]
STRAY = [
    make_record(0),
    make_record(1),
    make_record(8_000_000_000, "mallory"),
    *(make_record(number) for number in range(2, 6)),
]
LIMITED = {
    "id": "p",
    "spec": {
        "selector": ANY,
        **USER,
        "session_limits": {"max_steps": 9},
        "unnamed_limits": {"max_steps": 2},
    },
}
LOGS: dict[str, tuple[list[Any], Any, dict[str, Any], dict[str, int], int]] = {
    # lines, policies, what each policy leaves uncounted or else refuses, problems, and the exit
    # code with --strict
    "the clock is the log's": (
        [make_record(number * 61) for number in range(6)],
        None,
        {"p": 0},
        {},
        0,
    ),
    "a clock that is set back": (BACK, None, {"p": 4}, {"out_of_order": 1, "clock_forward": 1}, 1),
    "a line of another century": (STRAY, None, {"p": 4}, {"clock_forward": 1}, 0),
    "times in full": (
        [make_record() | {"time": time} for time in TIMES],
        None,
        {"p": 1},
        {"invalid": 1},
        1,
    ),
    "three spellings of a body": (
        [json.dumps(make_record() | spelling, separators=(",", ":")) for spelling in SPELLINGS],
        None,
        {"p": 1},
        {},
        0,
    ),
    "bodies that show a loop": (
        [
            make_record(n, body={"messages": [{"role": "user", "content": "x"}, *TURNS * n]})
            for n in range(6)
        ],
        bundle(policy("p", ANY, similarity="turns", **USER)),
        {"p": 3},
        {},
        0,
    ),
    "checksums of bodies": ([SUMMED] * 3, BY_BODY, {"exact": 1, **NO_BODIES}, {}, 0),
    "session limits without bodies": (
        [SUMMED | {"path": CHAT}] * 3,
        bundle(LIMITED),
        {"p": {"no_body": 3}},
        {},
        0,
    ),
    "neither bodies nor checksums": (
        [BARE] * 3,
        BY_BODY,
        {"exact": {"no_body": 3}, **NO_BODIES},
        {},
        0,
    ),
    "gRPC": (
        [BARE | {"unknown": "grpc"}] * 3,
        bundle(policy("exact", ANY, **USER)),
        {"exact": {"grpc": 3}},
        {},
        0,
    ),
    "callers that were not recorded": (
        [{"loop_record": RECORDED}] * 3,
        BY_KEYS,
        {
            "recorded": 1,
            "other-header": {"not_recorded": 3},
            "claim": {"not_recorded": 3},
            "absent": {"missing_descriptor": 3},
        },
        {},
        0,
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_records_are_judged_by_what_they_hold(name: str, replay: Callable[..., Replayed]) -> None:
    lines, policies, outcomes, problems, code = LOGS[name]

    found = replay(write_lines(lines), "--strict", policies=policies)

    assert {
        item["policy"]: item["uncounted"] or item["refused"] for item in found.document["policies"]
    } == outcomes
    assert (found.list_problems(), found.code) == (problems, code)
    assert name != "times in full" or "its time has no offset from UTC" in found.error


def test_unordered_lines_within_the_bound_are_sorted(replay: Callable[..., Replayed]) -> None:
    ordered = [
        make_record(number * 0.7, user=f"u{number % 7}", text=f"t{number % 3}")
        for number in range(800)
    ]
    late = sorted(
        ordered, key=lambda line: line["time"] + random.Random(line["time"]).random() * 4.9
    )
    assert late != ordered

    found = [replay(write_lines(lines)) for lines in (ordered, late)]

    assert found[0].find()["loops"] > 100
    assert (found[1].find(), found[1].list_problems()) == (found[0].find(), {})


def test_several_logs_are_merged_by_time(replay: Callable[..., Replayed]) -> None:
    lines = [make_record(number, user=f"u{number % 3}") for number in range(100)]

    whole = replay(write_lines(lines))
    apart = replay(
        {"b.log.gz": gzip.compress(write_lines(lines[1::2])), "a.log": write_lines(lines[::2])}
    )
    rotated = replay({"1.log": write_lines(lines[60:]), "2.log": write_lines(lines[:60])})

    assert whole.find()["loops"] > 0
    assert whole.find() == apart.find() == rotated.find()
    assert apart.list_problems() == rotated.list_problems() == {}


def test_dash_reads_standard_input(
    replay: Callable[..., Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = io.BufferedReader(
        io.BytesIO(gzip.compress(write_lines(make_record() for _ in range(4))))
    )
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(packed))

    assert replay({}, "-").find()["loops"] == 2


def test_unusable_lines_are_counted_with_their_numbers(replay: Callable[..., Replayed]) -> None:
    lines = [
        make_record(0),
        "203.0.113.7 - - [22/Nov/2026] POST /v1/chat 200",
        {"method": "GET", "path": "/", "status": 200},
        {"loop_record": None, "path": "/healthz"},
        make_record(1) | {"record": 2, "path": None},
        make_record(1) | {"time": "yesterday"},
        make_record(1) | {"time": (START + 1) * 1000},
        make_record(1) | {"headers": []},
        make_record(1) | {"unknown": "Of course!"},
        make_record(1)
        | {"body": None, "body_bytes": 4, "body_crc32": "123456789", "body_adler32": "00000000"},
        make_record(1) | {"body": None, "body_base64": "?"},
        "[" * 100_000,
        '{"record": 1, "body": "\\ud800"}',
        "",
        make_record(2),
        make_record(3),
    ]

    found = replay(write_lines(lines) + b'{"record": 1, "ti')

    assert found.find()["refused"] == 1
    assert found.list_problems() == {
        "no_record": 2,
        "not_json": 3,
        "truncated": 1,
        "version": 1,
        "invalid": 6,
    }
    assert (
        find_missing(
            found.error,
            "warning: 3 lines: not JSON: another format, or damaged (access.log:2, access.log:12, "
            "access.log:13)\n",
            "note: 2 lines: no record",
            "(access.log:17)",
        )
        == []
    )
    assert found.code == 0


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (b"", "the log is empty"),
        (
            b"GET / 200\nGET / 200\n",
            "2 lines: not JSON: another format, or damaged (first: access.log:1)",
        ),
        (
            b'{"status": 200}\n',
            "1 line: no record: no policy matched the request, or Loopguard ran without --record",
        ),
        (gzip.compress(b'{"status": 200}\n')[:-9], "1 line: cut off"),
        (b"\x1f\x8b nonsense", "the log cannot be decompressed from here on"),
    ],
    ids=["empty", "foreign", "unrecorded", "packing cut off", "packing damaged"],
)
def test_log_without_requests_fails(log: bytes, said: str, replay: Callable[..., Replayed]) -> None:
    found = replay(log)

    assert (found.code, found.document) == (1, {})
    assert found.error.startswith("loopguard: no request can be replayed: ")
    assert said in found.error


@pytest.mark.slow
def test_truncated_gzip_is_replayed_up_to_the_cut(replay: Callable[..., Replayed]) -> None:
    packed = gzip.compress(
        write_lines(
            make_record(number, text=blake2b(b"%d" % number).hexdigest()) for number in range(2_000)
        )
    )

    found = [replay(packed[: len(packed) // 2], *flags) for flags in ((), ("--strict",))]

    assert 500 < found[0].find()["requests"] < 1_500
    assert found[0].list_problems() == {"truncated": 1} | {
        kind: 1 for kind in found[0].list_problems() if kind == "not_json"
    }
    assert [one.code for one in found] == [0, 1]


@pytest.mark.slow
def test_line_of_50_mb_takes_no_memory(replay: Callable[..., Replayed], tmp_path: Path) -> None:
    giant = write_lines([make_record(1, text="x" * 50_000_000)])
    log = (
        write_lines([make_record(0)])
        + giant
        + write_lines([make_record(2), "nonsense", make_record(3)])
    )
    (tmp_path / "access.log").write_bytes(log)
    del giant, log
    tracemalloc.start()

    found = replay({}, str(tmp_path / "access.log"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 3 * 32 * 2**20
    assert (found.find()["refused"], found.list_problems()) == (1, {"too_long": 1, "not_json": 1})
    assert all(told in found.error for told in ("32 MiB (", "access.log:4"))


def test_records_of_serve_replay_with_equal_counts(replay: Callable[..., Replayed]) -> None:
    keys = ["header:x-a", "query:user"]
    document = [
        policy("p", ANY, limit_keys=keys),
        policy("bypassing", ANY, limit_keys=keys),
    ]
    document[1]["spec"]["bypass"] = [{"header": "x-skip"}]
    service = make_service(*document, record=True)
    requests = [
        (headers("/a?user=1&x=%00%ff", x_a="1"), body(b"x")),
        (headers("/a?user=1&x=%00%ff", x_a="1"), body(b"x")),
        (headers("/a?x=%00%ff&user=1", x_a="1"), body(b"x")),
        (headers("/a?user=1&x=%00%fe", x_a="1"), body(b"x")),
        (headers("/\udce9/%7Euser", end=True, x_a="\udcff"),),
        (headers("/~user", end=True, x_skip="yes"),),
        (headers("/a", end=True),),
        (headers(f"/a?{'&' * 20_000}", end=True, x_a="1"),),
        (headers(f"/a?{'&'.join(f'n{n}={n}' for n in range(200))}&user=1", end=True, x_a="1"),),
        (headers("/a", end=True, x_a="x" * 9_000),),
        (headers("/grpc", x_a="1", content_type="application/grpc", te="trailers"),),
        (headers("/a", mode="NONE", x_a="1"),),
    ]
    recorded = [
        metadata_of(decoded(exchange(service, *messages)[-1]))["record"] for messages in requests
    ]

    found = replay(
        write_lines({"loop_record": record} for record in recorded), policies=bundle(*document)
    )

    def sample(name: str, **labels: str) -> float:
        return service.metrics.registry.get_sample_value(f"loopguard_{name}", labels) or 0

    for name in ("p", "bypassing"):
        assert (
            found.find(name)["refused"]
            == sample("requests_total", policy=name, mode="enforce", action="reject")
            == 1
        )
        uncounted = found.find(name)["uncounted"]
        assert uncounted == {
            reason: sample("uncounted_total", policy=name, reason=reason) for reason in uncounted
        }
        assert found.find(name)["requests"] + sum(uncounted.values()) == len(requests)
    assert found.find("bypassing")["uncounted"].keys() == {
        "bypass",
        "missing_descriptor",
        "target_too_long",
        "descriptor_too_long",
        "grpc",
        "no_body_phase",
    }


def test_uncountable_refusals_are_counted_separately(replay: Callable[..., Replayed]) -> None:
    document = bundle(policy("p", ANY, **USER))
    document["policies"][0]["spec"]["uncountable"] = "reject"

    found = replay(write_lines([make_record(headers={}), make_record(0)]), policies=document)

    assert (found.find()["refused_uncountable"], found.find()["refused"]) == (1, 0)


def test_evictions_are_reported(replay: Callable[..., Replayed]) -> None:
    found = replay(
        write_lines(make_record(n / 1000, text=str(n)) for n in range(300)), "--max-entries", "100"
    )

    assert (found.document["evicted"], "200 live fingerprints were dropped" in found.error) == (
        200,
        True,
    )


def test_names_in_a_log_cannot_break_the_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path / "p.json", bundle(policy("p", ANY, **USER)))
    evil = "[bold]\x1b]0;owned\x07\x9b2J\x7f\r\u202e\n|x"
    lines = [make_record(path=f"/{evil}") for _ in range(3)] + [make_record() | {"headers": {}}]
    monkeypatch.chdir(tmp_path)
    Path("[red]access.log").write_bytes(write_lines(lines))

    run = Run(capsys, "replay", "--policy", file, "[red]access.log")

    assert run.code == 0
    assert all(line.isprintable() for line in run.out.splitlines())
    assert all(
        told in run.out
        for told in (
            "/[bold]\\x1b]0;owned",
            "[red]access.log:3",
            "What each policy would have done",
        )
    )


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["access.log"], 2, "--policy"),
        (["--policy", "policies.json"], 2, "LOG"),
        (
            ["--policy", "policies.json", "nowhere.log"],
            1,
            "cannot read nowhere.log: No such file or directory",
        ),
        (["--policy", "policies.json", "."], 1, "cannot read .: Is a directory"),
        (["--policy", "nowhere.json", "access.log"], 1, "nowhere.json"),
        (
            ["--policy", "policies.json", "--top", "0", "access.log"],
            2,
            "must be a positive integer",
        ),
        (
            ["--policy", "policies.json", "--reorder-seconds", "-1", "access.log"],
            2,
            "must be a number of seconds",
        ),
        (["--policy", "idle.json", "access.log"], 2, "no policy has loop_detection enabled"),
    ],
)
def test_usage_error_is_one_line(
    flags: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    written(Path("policies.json"), bundle(policy("p", ANY, **USER)))
    written(
        Path("idle.json"),
        {"id": "idle", "spec": {"selector": ANY, "loop_detection": {"enabled": False}}},
    )
    written(Path("access.log"), write_lines([make_record()]))

    run = Run(capsys, "replay", *flags)

    assert (run.code, said in run.err) == (code, True), run.err


@dataclass
class Tally:
    count: int = 0


def test_top_keeps_heavy_hitters_and_bounds_its_error() -> None:
    top: Top[int, Tally] = Top(10, Tally)
    true: dict[int, int] = {}
    for number in range(3_000):
        key = number % 3 if number % 2 else number
        top.get_or_add(key).count += 1
        true[key] = true.get(key, 0) + 1

    first = top.list_first(3)

    assert {key for key, _ in first} == {0, 1, 2}
    assert all(true[key] - top.dropped <= item.count <= true[key] for key, item in first)


def test_top_remembers_the_highest_dropped_count() -> None:
    top: Top[str, Tally] = Top(4, Tally)
    for key, count in {"a": 3, "b": 5, "c": 6, "d": 7, "e": 1}.items():
        top.get_or_add(key).count += count

    assert (top.dropped, top.get_or_add("a").count, top.get_or_add("d").count) == (5, 0, 7)


GUARDS: dict[str, Any] = {
    "turns": policy("p", ANY, similarity="turns", **USER),
    "tool_calls": policy("p", ANY, similarity="tool_calls", **USER),
    "session_limits": {
        "id": "p",
        "spec": {
            "selector": ANY,
            **USER,
            "session": {"keys": ["header:x-run"]},
            "session_limits": {"max_tool_calls": 3},
        },
    },
    "budgets": limited(bucket(0.001, 3, keys=["header:x-user-id"])),
}


@pytest.mark.parametrize("kind", GUARDS)
def test_every_guard_judges_records_with_bodies(kind: str, replay: Callable[..., Replayed]) -> None:
    bodies = [
        as_chat(
            [
                Did((("search", {"q": "a"}),), ("error: no such index",))._replace(number=number)
                for number in range(count)
            ]
        )
        for count in range(1, 5)
    ]
    sent = {"path": CHAT, "headers": {"x-user-id": "ann", "x-run": "r"}}

    found = replay(
        write_lines(make_record(at) | sent | {"body": shown} for at, shown in enumerate(bodies)),
        policies=bundle(GUARDS[kind]),
    ).find()

    assert (found["requests"], found["uncounted"]) == (4, {})
    assert found["refused"] >= 1


def write(text: str, turns: int = 0) -> str:
    messages = [{"role": "user", "content": text}]
    for number in range(turns):
        messages += [
            {"role": "assistant", "content": f"step {number}"},
            {"role": "user", "content": "go on"},
        ]
    return json.dumps({"model": "m", "messages": messages})


def test_starts_are_replayed_as_live(replay: Callable[..., Replayed]) -> None:
    traffic = [write(f"Task {number}", turns) for number in range(4) for turns in range(3)] + [
        write(text) for text in "abcd"
    ]
    service = make_service(LIMITED)

    replayed = replay(
        write_lines(
            make_record(at) | {"path": CHAT, "body": sent} for at, sent in enumerate(traffic)
        ),
        policies=bundle(LIMITED),
    ).find()
    answers = [
        exchange(service, headers(CHAT, x_user_id="ann"), body(each.encode()))[-1]
        for each in traffic
    ]

    assert [status(decoded(answer)) for answer in answers] == [200] * 14 + [429] * 2
    assert (replayed["requests"], replayed["refused"]) == (16, 2)


@pytest.mark.parametrize("turns", [0, 1])
def test_explain_shows_both_limits_of_a_start(
    turns: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "p.json", LIMITED)

    run = Run(
        capsys,
        "explain",
        "--policy",
        file,
        "-H",
        "x-user-id: ann",
        "-d",
        write("Hi", turns),
        f"http://h{CHAT}",
    )

    assert (run.code, "up to 9 steps, then reject" in run.out) == (0, True)
    assert ("unnamed" in run.out) == ("up to 2 steps, then reject" in run.out) == (turns == 0)


def test_replay_reports_what_followed_a_note(
    replay: Callable[..., Replayed], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stuck, other = (
        Did((("read", {"path": "a"}),), ("error: no such file",)),
        Did((("list", {}),), ("a.txt",)),
    )
    ladder: dict[str, Any] = {
        "similarity": "turns",
        "action": "steer",
        "escalate": {"land": 5, "reject": 6},
    }
    policies = bundle(policy("p", ANY, limit_keys=["header:x-user-id"], **ladder))
    lines: list[object] = []
    for user, turns in (("ann", [*[stuck] * 3, other]), ("bob", [stuck] * 6)):
        for count in range(1, len(turns) + 1):
            shown = [
                turn._replace(thought=f"{user} {number}", number=number)
                for number, turn in enumerate(turns[:count], 1)
            ]
            lines.append(make_record(len(lines), user, json.dumps(as_chat(shown)), path=CHAT))

    found = replay(write_lines(lines), policies=policies)
    run = Run(
        capsys, "replay", "--policy", str(tmp_path / "policies.json"), str(tmp_path / "access.log")
    )

    counts = found.document["policies"][0]["after_notes"]["noted"]
    assert {key: count for key, count in counts.items() if count} == {
        "begun": 2,
        "went_on": 1,
        "turned_round": 1,
        "landed": 1,
    }
    assert "p (enforce): steered 2: 1 turned round, 1 landed\n" in run.out
