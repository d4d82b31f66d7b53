"""`loopguard replay`: logs in, decisions out, and nothing wrong in silence."""

from __future__ import annotations

import gzip
import io
import json
import random
import tracemalloc
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.main import main
from extproc.cli.replay import logs
from extproc.cli.replay.counts import Top
from extproc.request.fingerprint import NO_BODY, write_crc32
from tests.support.access_logs import START, USER, make_record, write_lines
from tests.support.documents import bundle, policy
from tests.support.engine import ANY
from tests.support.messages import body, headers
from tests.support.replaying import Replayed
from tests.support.service import decoded, exchange, make_service, metadata_of
from tests.support.turn_writers import Did, as_chat

pytestmark = pytest.mark.compiled  # logs are judged by what is compiled


def make_sums(text: str) -> dict[str, object]:
    """What is recorded of a body in an access log."""
    found = NO_BODY.plus(text.encode())
    sums = {"body_crc32": write_crc32(found.crc32), "body_adler32": write_crc32(found.adler32)}
    return {"body_bytes": found.length, **sums}


def test_a_log_with_bodies_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Loops of one caller are refused from the threshold on, another caller's and other bodies are not."""
    lines = [make_record(number) for number in range(5)] + [make_record(9, "bob"), make_record(9, text="other")]

    found = Replayed(tmp_path, capsys, write_lines(lines))

    assert (found.code, found.error) == (0, "")
    counts = {name: found.find()[name] for name in ("requests", "loops", "refused", "tenants", "tenants_touched")}
    assert counts == {"requests": 7, "loops": 3, "refused": 3, "tenants": 2, "tenants_touched": 1}
    (worst,) = found.document["worst"]
    assert (worst["requests"], worst["highest_count"], worst["path"]) == (3, 5, "/v1/chat")
    assert worst["example"].endswith("access.log:3")
    assert found.document["log"]["first"] == "2025-11-22T11:52:25.000Z"


def test_the_clock_is_the_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A window that has passed in the log has passed, however fast the log is read."""
    lines = [make_record(number * 61) for number in range(6)]

    assert Replayed(tmp_path, capsys, write_lines(lines)).find()["loops"] == 0


def test_every_action_is_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused, throttled, steered and warned are counted for themselves, and so is the time that requests would be held."""
    actions = {"reject": "refused", "throttle": "throttled", "steer": "steered", "warn": "warned"}
    document = bundle(*(policy(name, ANY, action=name, **USER) for name in actions))

    found = Replayed(tmp_path, capsys, write_lines(make_record() for _ in range(4)), policies=document)

    words = list(actions.values())
    assert {name: [found.find(name)[word] for word in words] for name in actions} == {
        name: [2 if own == word else 0 for own in words] for name, word in actions.items()
    }
    assert found.find("throttle")["held_seconds"] == 0.7


def test_lines_may_be_unordered_within_the_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log whose lines come up to five seconds late gives what the ordered one gives."""
    ordered = [make_record(number * 0.7, user=f"u{number % 7}", text=f"t{number % 3}") for number in range(800)]
    late = sorted(ordered, key=lambda line: line["time"] + random.Random(line["time"]).random() * 4.9)
    assert late != ordered

    found = [Replayed(tmp_path, capsys, write_lines(lines)) for lines in (ordered, late)]

    assert found[0].find()["loops"] > 100
    assert found[0].find() == found[1].find()
    assert found[1].list_problems() == {}


def test_several_logs_are_read_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Logs of two Envoys, one of them packed, give what one log of both gives, whatever order they are named in."""
    lines = [make_record(number, user=f"u{number % 3}") for number in range(100)]

    whole = Replayed(tmp_path, capsys, write_lines(lines))
    apart = Replayed(tmp_path, capsys, {"b.log.gz": gzip.compress(write_lines(lines[1::2])), "a.log": write_lines(lines[::2])})
    rotated = Replayed(tmp_path, capsys, {"1.log": write_lines(lines[60:]), "2.log": write_lines(lines[:60])})

    assert whole.find()["loops"] > 0
    assert whole.find() == apart.find() == rotated.find()
    assert apart.list_problems() == rotated.list_problems() == {}


def test_a_log_may_come_by_standard_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`-` is standard input, packed or not."""
    packed = io.BufferedReader(io.BytesIO(gzip.compress(write_lines(make_record() for _ in range(4)))))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(packed))

    assert Replayed(tmp_path, capsys, {}, "-").find()["loops"] == 2


def test_what_is_wrong_with_lines_is_counted_and_said_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each kind of unusable line is reported with its number, and the others are replayed."""
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
        make_record(1) | {"body": None, "body_bytes": 4, "body_crc32": "123456789", "body_adler32": "00000000"},
        make_record(1) | {"body": None, "body_base64": "?"},
        "[" * 100_000,
        '{"record": 1, "body": "\\ud800"}',
        "",
        make_record(2),
        make_record(3),
    ]

    found = Replayed(tmp_path, capsys, write_lines(lines) + b'{"record": 1, "ti')

    assert found.find()["refused"] == 1
    assert found.list_problems() == {"no_record": 2, "not_json": 3, "truncated": 1, "version": 1, "invalid": 6}
    assert (
        "warning: 3 lines: not JSON: another format, or damaged (access.log:2, access.log:12, access.log:13)\n" in found.error
    )
    assert "note: 2 lines: no record" in found.error
    assert "(access.log:17)" in found.error
    assert found.code == 0


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (b"", "the log is empty"),
        (b"GET / 200\nGET / 200\n", "2 lines: not JSON: another format, or damaged (first: access.log:1)"),
        (b'{"status": 200}\n', "1 line: no record: no policy matched the request, or Loopguard ran without --record"),
        (gzip.compress(b'{"status": 200}\n')[:-9], "1 line: cut off"),
        (b"\x1f\x8b nonsense", "the log cannot be decompressed from here on"),
    ],
    ids=["empty", "foreign", "unrecorded", "packing cut off", "packing damaged"],
)
def test_a_log_without_any_request_fails(log: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing can be replayed the exit code is 1, no report is printed, and it is said why."""
    found = Replayed(tmp_path, capsys, log)

    assert (found.code, found.document) == (1, {})
    assert found.error.startswith("loopguard: no request can be replayed: ")
    assert said in found.error


def test_a_packed_log_that_is_cut_off_is_replayed_up_to_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was read counts, and the missing end is a warning, or with --strict the exit code."""
    packed = gzip.compress(
        write_lines(make_record(number, text=blake2b(b"%d" % number).hexdigest()) for number in range(2_000))
    )

    found = [Replayed(tmp_path, capsys, packed[: len(packed) // 2], *flags) for flags in ((), ("--strict",))]

    assert 500 < found[0].find()["requests"] < 1_500
    assert found[0].list_problems() == {"truncated": 1} | {kind: 1 for kind in found[0].list_problems() if kind == "not_json"}
    assert [one.code for one in found] == [0, 1]


@pytest.mark.slow
def test_a_line_of_50_mb_takes_no_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is passed over, with its number, and what follows has the right one; little more than the bound is ever held."""
    giant = write_lines([make_record(1, text="x" * 50_000_000)])
    log = write_lines([make_record(0)]) + giant + write_lines([make_record(2), "nonsense", make_record(3)])
    (tmp_path / "access.log").write_bytes(log)
    del giant, log
    tracemalloc.start()

    found = Replayed(tmp_path, capsys, {}, str(tmp_path / "access.log"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 3 * logs.MAX_LINE
    assert found.find()["refused"] == 1
    assert found.list_problems() == {"too_long": 1, "not_json": 1}
    assert "32 MiB (" in found.error
    assert "access.log:4" in found.error


def test_a_clock_that_is_set_back_is_followed_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first line after each jump is named; before and after it loops are found, and lines are put in order."""
    before = [make_record(10_000 + number * 4, "ann") for number in range(4)]
    after = [make_record(number, "bob") for number in (1, 0, 3, 2)]

    found = Replayed(tmp_path, capsys, write_lines([*before, *after]))

    assert found.find()["refused"] == 4
    problems = found.document["log"]["problems"]
    assert {kind: (problem["lines"], problem["harmless"]) for kind, problem in problems.items()} == {
        "out_of_order": (1, False),
        "clock_forward": (1, True),
    }


def test_one_line_of_another_century_spoils_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A time that cannot be right moves the clock for no other line."""
    lines = [make_record(number) for number in range(6)]
    stray = make_record(8_000_000_000, "mallory")

    found = Replayed(tmp_path, capsys, write_lines([*lines[:2], stray, *lines[2:]]))

    assert found.find()["refused"] == 4
    assert found.list_problems() == {"clock_forward": 1}


def test_a_body_that_was_not_recorded_is_not_made_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With checksums alone an exact detector counts and others do not (`no_body`); without checksums no detector counts."""
    document = bundle(
        policy("exact", ANY, **USER),
        policy("turns", ANY, similarity="turns", **USER),
        policy("key", ANY, limit_keys=["body:/user"]),
        policy("bodiless", ANY, body="ignore", **USER),
    )
    bare = make_record()
    del bare["body"]

    sums = Replayed(tmp_path, capsys, write_lines(bare | make_sums("again") for _ in range(3)), policies=document)
    nothing = Replayed(tmp_path, capsys, write_lines(bare for _ in range(3)), policies=document)
    grpc = Replayed(tmp_path, capsys, write_lines(bare | {"unknown": "grpc"} for _ in range(3)), policies=document)

    def outcomes(found: Replayed) -> dict[str, Any]:
        return {item["policy"]: item["uncounted"] or item["refused"] for item in found.document["policies"]}

    assert outcomes(sums) == {"exact": 1, "turns": {"no_body": 3}, "key": {"no_body": 3}, "bodiless": 1}
    assert outcomes(nothing) == {"exact": {"no_body": 3}, "turns": {"no_body": 3}, "key": {"no_body": 3}, "bodiless": 1}
    assert outcomes(grpc)["exact"] == {"grpc": 3}


def test_bodies_have_three_spellings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A text, the JSON value itself and Base64 of the same bytes are one body."""
    data = '{"a":1}'
    spellings: list[dict[str, Any]] = [{"body": data}, {"body": {"a": 1}}, {"body": None, "body_base64": "eyJhIjoxfQ=="}]
    lines = [json.dumps(make_record() | spelling, separators=(",", ":")) for spelling in spellings]

    assert Replayed(tmp_path, capsys, write_lines(lines)).find()["refused"] == 1


def test_detectors_look_into_recorded_bodies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With bodies every detector decides; this one finds that an agent calls the same tool again and gets the same back."""
    call = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "ls", "arguments": "{}"}}]}
    turns = [call, {"role": "tool", "tool_call_id": "c", "content": "nothing"}]
    lines = [make_record(n, body={"messages": [{"role": "user", "content": "x"}, *turns * n]}) for n in range(6)]

    found = Replayed(tmp_path, capsys, write_lines(lines), policies=bundle(policy("p", ANY, similarity="turns", **USER)))

    assert found.find()["refused"] == 3


def test_what_was_not_recorded_is_not_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If the log lacks what a policy reads, that policy counts nothing and says so; what the request lacked is missing."""
    document = bundle(
        policy("recorded", ANY, **USER),
        policy("other-header", ANY, limit_keys=["header:x-team"]),
        policy("claim", ANY, limit_keys=["jwt:org"]),
        policy("absent", ANY, limit_keys=["header:x-none"]),
    )
    record = make_record(headers={"x-user-id": "0011223344556677", "x-none": None}) | make_sums("again")
    del record["body"]

    found = Replayed(tmp_path, capsys, write_lines({"loop_record": record} for _ in range(3)), policies=document)

    assert {item["policy"]: item["uncounted"] or item["refused"] for item in found.document["policies"]} == {
        "recorded": 1,
        "other-header": {"not_recorded": 3},
        "claim": {"not_recorded": 3},
        "absent": {"missing_descriptor": 3},
    }


def test_what_serve_records_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Requests of every kind, including hostile ones, are counted or not as they were live."""
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
    recorded = [metadata_of(decoded(exchange(service, *messages)[-1]))["record"] for messages in requests]

    found = Replayed(tmp_path, capsys, write_lines({"loop_record": record} for record in recorded), policies=bundle(*document))

    def sample(name: str, **labels: str) -> float:
        return service.metrics.registry.get_sample_value(f"loopguard_{name}", labels) or 0

    for name in ("p", "bypassing"):
        assert found.find(name)["refused"] == sample("requests_total", policy=name, mode="enforce", action="reject") == 1
        uncounted = found.find(name)["uncounted"]
        assert uncounted == {reason: sample("uncounted_total", policy=name, reason=reason) for reason in uncounted}
        assert found.find(name)["requests"] + sum(uncounted.values()) == len(requests)
    assert found.find("bypassing")["uncounted"].keys() == {
        "bypass", "missing_descriptor", "target_too_long", "descriptor_too_long", "grpc", "no_body_phase",
    }  # fmt: skip


def test_a_policy_that_lets_nothing_pass_uncounted_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Requests that `uncountable: reject` would refuse are told apart from loops."""
    document = bundle(policy("p", ANY, **USER))
    document["policies"][0]["spec"]["uncountable"] = "reject"

    found = Replayed(tmp_path, capsys, write_lines([make_record(headers={}), make_record(0)]), policies=document)

    assert (found.find()["refused_uncountable"], found.find()["refused"]) == (1, 0)


def test_evictions_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A store that is too small for the log says that counts may be too low."""
    lines = [make_record(number / 1000, text=str(number)) for number in range(300)]

    found = Replayed(tmp_path, capsys, write_lines(lines), "--max-entries", "100")

    assert found.document["evicted"] == 200
    assert "200 live fingerprints were dropped" in found.error


def test_nothing_in_a_log_breaks_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters and markup of rich in names are shown as what they are."""
    (tmp_path / "p.json").write_text(json.dumps(bundle(policy("p", ANY, **USER))))
    (tmp_path / "[red]access.log").write_bytes(write_lines(make_record(path="/[bold]\x1b[31m\n|x") for _ in range(3)))

    code = main(["replay", "--policy", str(tmp_path / "p.json"), str(tmp_path / "[red]access.log")])
    shown = capsys.readouterr().out

    assert code == 0
    assert "/[bold]\\x1b[31m\\n%7C" in shown or "/[bold]\\x1b[31m\\n|x" in shown
    assert "[red]access.log:3" in shown
    assert "What each policy would have done" in shown


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["access.log"], 2, "--policy"),
        (["--policy", "policies.json"], 2, "LOG"),
        (["--policy", "policies.json", "nowhere.log"], 1, "cannot read nowhere.log: No such file or directory"),
        (["--policy", "policies.json", "."], 1, "cannot read .: Is a directory"),
        (["--policy", "nowhere.json", "access.log"], 1, "nowhere.json"),
        (["--policy", "policies.json", "--top", "0", "access.log"], 2, "must be a positive integer"),
        (["--policy", "policies.json", "--reorder-seconds", "-1", "access.log"], 2, "must be a number of seconds"),
        (["--policy", "idle.json", "access.log"], 2, "no policy has loop_detection enabled"),
    ],
)
def test_usage_errors_are_one_line(  # a table
    flags: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What cannot be read or makes no sense is said in one line; 2 for the command line, 1 for files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policies.json").write_text(json.dumps(bundle(policy("p", ANY, **USER))))
    idle = {"id": "idle", "spec": {"selector": ANY, "loop_detection": {"enabled": False}}}
    (tmp_path / "idle.json").write_text(json.dumps(idle))
    (tmp_path / "access.log").write_bytes(write_lines([make_record()]))

    assert main(["replay", *flags]) == code
    assert said in capsys.readouterr().err


class Tally:
    """Something that is counted."""

    def __init__(self) -> None:
        self.count = 0


def test_the_top_is_kept_and_says_what_it_may_have_missed() -> None:
    """What counts most stays whatever comes by, and no count is too low by more than is told."""
    top: Top[int, Tally] = Top(10, Tally)
    true: dict[int, int] = {}
    for number in range(3_000):
        key = number % 3 if number % 2 else number
        top.get_or_add(key).count += 1
        true[key] = true.get(key, 0) + 1

    first = top.list_first(3)

    assert {key for key, _ in first} == {0, 1, 2}
    assert all(true[key] - top.dropped <= item.count <= true[key] for key, item in first)


def test_what_left_the_top_is_told() -> None:
    """The highest count that was forgotten is reported, and a caller that comes back starts from zero."""
    top: Top[str, Tally] = Top(4, Tally)
    for key, count in {"a": 3, "b": 5, "c": 6, "d": 7, "e": 1}.items():
        top.get_or_add(key).count += count

    assert (top.dropped, top.get_or_add("a").count, top.get_or_add("d").count) == (5, 0, 7)


def test_times_may_be_written_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """RFC 3339 with any offset is the same as seconds; a time without an offset is refused."""
    whole = datetime.fromtimestamp(START, UTC)
    times = [START, whole.isoformat(), whole.isoformat().replace("+00:00", "Z"), whole.replace(tzinfo=None).isoformat()]

    found = Replayed(tmp_path, capsys, write_lines(make_record() | {"time": time} for time in times))

    assert (found.find()["refused"], found.list_problems()) == (1, {"invalid": 1})
    assert "its time has no offset from UTC" in found.error


def test_bodies_show_what_came_after_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two agents that would have been steered, one went another way and one landed, which is how its loop is counted."""
    stuck, other = Did((("read", {"path": "a"}),), ("error: no such file",)), Did((("list", {}),), ("a.txt",))
    ladder: dict[str, Any] = {"similarity": "turns", "action": "steer", "escalate": {"land": 5, "reject": 6}}
    policies = bundle(policy("p", ANY, limit_keys=["header:x-user-id"], **ladder))
    lines: list[object] = []
    for user, turns in (("ann", [*[stuck] * 3, other]), ("bob", [stuck] * 6)):
        for count in range(1, len(turns) + 1):
            shown = [turn._replace(thought=f"{user} {number}", number=number) for number, turn in enumerate(turns[:count], 1)]
            path = "/v1/chat/completions"
            lines.append(make_record(len(lines), user, json.dumps(as_chat(shown)), path=path))

    found = Replayed(tmp_path, capsys, write_lines(lines), policies=policies)
    code = main(["replay", "--policy", str(tmp_path / "policies.json"), str(tmp_path / "access.log")])

    counts = found.document["policies"][0]["after_notes"]["noted"]
    assert {key: count for key, count in counts.items() if count} == {"begun": 2, "went_on": 1, "turned_round": 1, "landed": 1}
    assert (code, found.code) == (0, 0)
    assert "p (enforce): steered 2: 1 turned round, 1 landed\n" in capsys.readouterr().out
