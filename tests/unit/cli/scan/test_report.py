"""The report of `loopguard scan`, as text, JSON and a page, its limits, and its exit codes."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from extproc.cli.packed import FilePlace
from extproc.cli.scan.atif import Atif
from extproc.cli.scan.limits import Total, recommend_limits
from extproc.policy.presets import find_preset
from tests.support import ROOT
from tests.support.command import Run, find_misfits, find_missing
from tests.support.example_transcripts import list_examples
from tests.support.extent import deepen
from tests.support.pages import Outline
from tests.support.transcripts import (
    COPIES,
    FORMATS,
    AgentSession,
    write_atif,
    write_claude_code,
    write_lines,
    write_requests,
)
from tests.support.turn_writers import Did

WORKING = Did((("read", {"path": "a"}),), ("It works.",))
ANOTHER = Did((("build", {"part": "b"}),), ("Error: cannot be built. " + "It cannot. " * 30,))
EXAMPLES = ROOT / "examples" / "transcripts"
FAILING = Did(
    (("check", {"part": "secret-part"}),), ("Error: secret-part is broken. " + "It is. " * 30,)
)


def scan(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    run = Run(capsys, "scan", "--json", *map(str, arguments))
    assert run.code == 0
    document: dict[str, Any] = json.loads(run.out)
    return document


def test_examples_are_current() -> None:
    found = {
        str(file.relative_to(EXAMPLES)): file.read_text()
        for file in EXAMPLES.rglob("*")
        if file.is_file()
    }

    assert found == list_examples()
    assert sum(map(len, found.values())) < 200_000


def test_report_on_the_examples(capsys: pytest.CaptureFixture[str]) -> None:
    report = scan(capsys, EXAMPLES)

    assert (
        report
        | {
            "conversations": 12,
            "looped": 5,
            "only_noted": 1,
            "loops": 5,
            "formats": {"ATIF": 1, "Claude Code": 4, "Codex": 3, "OTLP": 2, "requests": 2},
            "problems": {},
        }
        == report
    )
    assert [loop["rule"] for loop in report["worst"]] == [
        "repeat",
        "repeat",
        "cycle",
        "repeat",
        "error",
        "repeat",
    ]
    assert [(row["name"], row["loops"]) for row in report["by"]["tool"] if row["loops"]] == [
        ("Edit", 1), ("Read", 1), ("exec_command", 1), ("search_orders", 1), ("bash", 1),
    ]  # fmt: skip
    assert {row["name"] for row in report["by"]["agent"] if row["looped"]} == {
        "claude-code", "claude-code general-purpose", "codex", "support", "terminus-2",
    }  # fmt: skip
    for group in ("day", "project", "agent", "tool"):
        assert sum(row["loops"] for row in report["by"][group]) == 5
        for after in ("after_note", "after_stop"):
            assert (
                sum(row[after]["tokens"] for row in report["by"][group]) == report[after]["tokens"]
            )
    assert report["after_note"]["dollars"] > report["after_stop"]["dollars"] > 0


def test_text_has_savings_then_the_worst_loop(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(capsys, "scan", "--show", "--top", "2", str(EXAMPLES))

    assert run.code == 0
    lines = run.out.splitlines()
    assert (
        find_misfits(
            lines,
            "5 of 12 conversations looped.",
            "Loopguard would have saved 45 calls, 2.02M tokens, $0.73 (36% of all tokens): …",
            "…its note at the third, it would have saved 71 calls, 2.73M tokens, $0.93 (49% of all "
            "tokens).",
        )
        == []
    )
    days = "By day (UTC): calls that went on after a note, and after a stop"
    worst = lines[lines.index("The worst loop") + 2 : lines.index(days) - 1]
    wanted = [
        " 1. Edit: the same input, the same result, 30 turns in 10m",
        "    claude-code in /home/ann/shop, Claude Code 5f0c7a52-7d0e-4b8e-9a55-2f3f2f6f1c01",
        '    > Edit | {"file_path":"src/cart.ts",…',
        "    call 10 of 40, 2026-11-02 09:03:00 UTC: the loop begins, …",
        (
            "    call 13: Loopguard adds a note for the model; the loop continues for 28 calls, "
            "1.66M tokens, $0.60"
        ),
        "    call 15: Loopguard asks for a final answer without tools",
        "    call 17: Loopguard refuses, which saves 24 calls, 1.44M tokens, $0.52",
        "    call 40: the loop ends",
    ]
    assert (find_misfits(worst, *wanted), len(worst)) == ([], len(wanted))
    assert (
        run.out.index("By tool")
        < run.out.index("The next worst loops")
        < run.out.index(" 2. Read: ")
    )
    assert " 3. " not in run.out


@pytest.mark.parametrize("folder", ["", ".claude/projects"])
def test_error_without_transcripts_suggests_the_examples(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("HOME", str(tmp_path))

    run = Run(capsys, "scan")

    (told,) = [line for line in run.err.splitlines() if line.startswith("loopguard: ")]
    assert ".claude/projects" in told
    assert told.endswith(
        "; name files or folders, or try `loopguard scan examples/transcripts` in a checkout"
    )


@pytest.mark.slow
def test_scan_imports_no_server() -> None:
    code = (
        "import sys; from extproc.cli.main import main; main(['scan', 'examples/transcripts']);"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout

    assert {"google", "grpc", "h2", "jinja2", "redis", "uvloop"} & set(
        told.splitlines()[-1].split()
    ) == set()


@pytest.mark.slow
def test_contents_need_the_flag_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "f.jsonl", write_claude_code(AgentSession([FAILING] * 8)))
    page = tmp_path / "page.html"

    outputs = [
        Run(capsys, "scan", *flags, "--html", str(page), str(tmp_path / "f.jsonl")).out
        for flags in ([], ["--json"])
    ]
    hidden = [*outputs, page.read_text()]
    shown = Run(capsys, "scan", "--show", "--html", str(page), str(tmp_path / "f.jsonl")).out

    assert not any("secret-part" in output for output in hidden)
    assert 'check | {"part":"secret-part"} | Error: secret-part is broken.' in shown
    assert "secret-part" in page.read_text()


@pytest.mark.parametrize("way", COPIES)
def test_copied_calls_count_once(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common, own, other = (
        [WORKING, *[FAILING] * 8],
        [FAILING] * 3,
        [WORKING, Did((("read", {"path": "b"}),), ("It works, too.",)), *[ANOTHER] * 7],
    )
    parent = AgentSession([*common, *own], name="parent")
    resumed = parent._replace(turns=[*parent.turns, FAILING], name="resumed")
    fork = parent._replace(turns=[*common, *other], name="fork", prompt=20_000)
    write_lines(tmp_path / "parent.jsonl", COPIES[way](parent, parent, 0))
    write_lines(tmp_path / "resumed.jsonl", COPIES[way](parent, resumed, 12))
    write_lines(tmp_path / "fork.jsonl", COPIES[way](parent, fork, 9))
    write_lines(tmp_path / "again.jsonl", COPIES[way](parent, parent._replace(name="again"), 12))

    report = scan(capsys, tmp_path)

    assert (
        report["spent"]
        | {
            "calls": 9 + 3 + 1 + 9,
            "tokens": parent.add_tokens(1, 12)
            + resumed.add_tokens(13, 13)
            + fork.add_tokens(10, 18),
        }
        == report["spent"]
    )
    assert (report["copies"], report["conversations"], report["looped"], report["loops"]) == (
        9 + 12 + 12,
        2,
        2,
        3,
    )
    assert report["after_note"]["calls"] == (10 - 4) + (18 - 14) + (13 - 9)
    assert report["after_stop"]["calls"] == (10 - 8) + (13 - 9)
    assert report["after_note"]["tokens"] == (
        parent.add_tokens(5, 9)
        + fork.add_tokens(10, 10)
        + fork.add_tokens(15, 18)
        + resumed.add_tokens(10, 13)
    )


UNPRICED = AgentSession([FAILING] * 8, model="nobody-knows")
UNANSWERED = [
    {**line, "response": None} for line in write_requests(AgentSession([FAILING] * 8), "chat")
]
FOLLOWED = "followed Loopguard's note at the third identical turn, it would have saved 2 calls"


@pytest.mark.parametrize(
    ("lines", "said", "unsaid"),
    [
        (write_claude_code(AgentSession([FAILING] * 5)), FOLLOWED, "refuses"),
        (write_claude_code(UNPRICED), "No price is known for", "$"),
        (UNANSWERED, "Some tokens are estimated", "No price"),
        ([write_atif(AgentSession([FAILING]))], "0 of 1 conversation looped.", "By tool"),
    ],
    ids=["no stop", "no price", "no usage", "no loop"],
)
def test_text_says_only_what_is_known(
    lines: list[Any], said: str, unsaid: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(tmp_path / "f.jsonl", lines)

    run = Run(capsys, "scan", str(tmp_path))

    assert (run.code, said in run.out, unsaid in run.out) == (0, True, False), run.out
    assert said != "0 of 1 conversation looped." or len(run.out.splitlines()) < 5


def test_tokens_without_price_have_no_dollars(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(tmp_path / "f.jsonl", write_claude_code(UNPRICED))

    report = scan(capsys, tmp_path)

    assert (report["after_note"]["dollars"], report["spent"]["unpriced_tokens"]) == (
        None,
        report["spent"]["tokens"],
    )


def test_since_ignores_older_files_and_conversations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    write_lines(old, write_claude_code(AgentSession([FAILING] * 8, name="old")))
    now = AgentSession([FAILING] * 8, name="new")._replace(
        begins=AgentSession([]).begins.fromtimestamp(time.time() - 600, tz=None).astimezone()
    )
    write_lines(
        new, [*write_claude_code(now), *write_claude_code(AgentSession([FAILING] * 8, name="old"))]
    )
    os.utime(old, (1_000_000, 1_000_000))

    report = scan(capsys, "--since", "2", tmp_path)

    assert (report["files"], [loop["session"] for loop in report["found"]]) == (1, ["new"])
    assert len(scan(capsys, tmp_path)["found"]) == 2


def test_problems_are_warnings_and_notes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "f.jsonl", write_claude_code(AgentSession([FAILING] * 8)))
    file.write_bytes(file.read_bytes() + b"{cut off\n" + b'{"type":"hologram","sessionId":"s1"}\n')
    (tmp_path / "picture").write_bytes(b"\x89PNG")

    run = Run(capsys, "scan", str(tmp_path))

    assert run.code == 0
    assert (
        find_missing(
            run.err,
            f"warning: 1 item: not JSON: damaged, or cut off ({file}:",
            "note: 1 item: of an unknown kind: ignored: Claude Code: hologram (1)",
            "note: 1 item: not a file of JSON",
        )
        == []
    )


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["{empty}"], 1, "loopguard: nothing to scan in {empty}: no file contains a conversation"),
        (
            ["{empty}/gone"],
            2,
            "loopguard: {empty}/gone does not exist: name a file or a folder of transcripts",
        ),
        (
            ["{empty}", "--html", "{empty}"],
            2,
            "loopguard: --html cannot be written to {empty}: give a file in a folder that exists",
        ),
        (
            ["{empty}", "--top", "0"],
            2,
            (
                "loopguard: argument --top: must be a positive integer, not '0'; see 'loopguard "
                "scan "
                "--help'"
            ),
        ),
    ],
)
def test_usage_error_says_what_would_be_right(
    arguments: list[str],
    code: int,
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Run(capsys, "scan", *[argument.format(empty=tmp_path) for argument in arguments])

    assert (run.code, run.err.splitlines()[-1]) == (code, complaint.format(empty=tmp_path))


def test_bug_in_reading_costs_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        write_lines(
            tmp_path / f"{name}.jsonl", [write_atif(AgentSession([FAILING] * 8, name=name))]
        )
    read = Atif.read

    def fail(self: Atif, data: bytes, place: FilePlace) -> bool:
        if place.file.endswith("a.jsonl"):
            raise AssertionError("oh")
        return read(self, data, place)

    monkeypatch.setattr(Atif, "read", fail)

    run = Run(capsys, "scan", str(tmp_path))

    assert "1 of 1 conversation looped." in run.out
    assert f"please report it: AssertionError (1) ({tmp_path}/a.jsonl:1)" in run.err


def test_files_below_home_are_shown_with_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_lines(
        tmp_path / ".claude/projects/p/s.jsonl", write_claude_code(AgentSession([FAILING] * 8))
    )

    assert "~/.claude/projects/p/s.jsonl:" in Run(capsys, "scan").out


# ---- The page of --html

ATTACKS = (
    "</title><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\"'><svg onload=alert(1)>",
    "</pre></style><style>*{background:url(//evil)}</style>",
    "javascript:alert(1)//",
    "{{ 7 * 7 }}{% include 'x' %}",
    "&lt;script&gt;<!--<script>",
    "\x00\x1b[31m\u202e<b>",
    "<a href='//evil'>x</a><iframe src=//evil>",
)


def make_session(attack: str) -> AgentSession:
    turn = Did(((attack, {attack: attack}),), (f"Error: {attack} " * 20,))
    return AgentSession([turn] * 8, name=attack, project=attack, agent=attack, model=attack)


@pytest.mark.slow
@pytest.mark.parametrize("name", deepen(FORMATS, "claude code", "responses", "otlp messages"))
def test_names_and_contents_are_escaped(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, outlines = tmp_path / "page.html", []
    for attacks in (ATTACKS, ["plain" * 5] * len(ATTACKS)):
        lines = [line for attack in attacks for line in FORMATS[name](make_session(attack))]
        file = write_lines(
            tmp_path / "f.jsonl",
            [*lines, *({"type": attack, "sessionId": "s"} for attack in attacks)],
        )
        run = Run(capsys, "scan", "--show", "--html", str(page), str(file))
        assert (run.code, "\x1b" in run.out) == (0, False)
        outlines.append(Outline(page.read_text()))

    hostile, plain = outlines
    assert (hostile.loads, hostile.handlers, set(hostile.elements)) == ([], [], set(plain.elements))
    assert {"script", "img"} & set(hostile.elements) == set()


def test_page_loads_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_lines(tmp_path / "f.jsonl", FORMATS["claude code"](make_session("sharpen")))
    page = tmp_path / "page.html"

    Run(capsys, "scan", "--html", str(page), str(file))

    text = page.read_text()
    assert (
        find_missing(
            text,
            "default-src 'none'; style-src 'unsafe-inline'",
            "1 of 1 conversation looped.",
            "1. sharpen: the same input, the same result, 7 turns",
        )
        == []
    )
    assert "http" not in text.replace("http-equiv", "")


# ---- The session limits of --limits

HUNDRED = [
    Total(steps=n, tokens=n, nanos=n * 10**9, agents=0, tools=Counter(read=n))
    for n in range(1, 101)
]


@pytest.mark.parametrize(
    ("totals", "limits", "stopped"),
    [
        ([], {}, 0),
        ([Total(looped=True, steps=90)], {}, 0),
        ([Total(steps=3, nanos=None)], {"max_steps": 3}, 0),
        ([Total(steps=3, nanos=1)], {"max_steps": 3, "max_cost_per_session": 0.01}, 0),
        (
            [Total(steps=3, agents=2), Total(steps=1, agents=0)],
            {"max_steps": 3, "max_agents": 2},
            0,
        ),
        ([Total(steps=3), Total(steps=1), Total(steps=2)], {"max_steps": 3}, 0),
        (
            [*HUNDRED, Total(looped=True, steps=900, nanos=10**12)],
            {
                "max_steps": 99,
                "max_tool_calls": 99,
                "max_calls_per_tool": {"read": 99},
                "max_cost_per_session": 99.0,
            },
            1,
        ),
    ],
)
def test_limits_stop_one_percent_without_loops(
    totals: list[Total], limits: dict[str, Any], stopped: int
) -> None:
    found = recommend_limits(totals)

    assert (found["session_limits"], found["stopped"]) == (limits, stopped)


@pytest.mark.slow
def test_printed_limits_are_valid_in_a_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(capsys, "scan", "--limits", str(EXAMPLES))
    limits = json.loads(run.out[run.out.rindex('{\n  "session_limits"') :])["session_limits"]
    assert limits.keys() >= {"max_steps", "max_tool_calls", "max_calls_per_tool"}
    policy = json.loads(Path(find_preset("sessions")).read_text())
    policy["spec"]["session_limits"] = limits | {"unknown_model": {"input": 15, "output": 75}}
    (tmp_path / "p.json").write_text(json.dumps(policy))

    assert Run(capsys, "validate", str(tmp_path / "p.json")).code == 0
