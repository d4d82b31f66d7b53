"""The screen of `loopguard top` on terminals of any width."""

import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from io import StringIO
from select import select
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from extproc.cli.commands import write_caller
from extproc.cli.commands.top import View
from extproc.cli.loop_screen import LoopScreen
from extproc.operator.admin.row_states import read_time, write_left, write_reset
from tests.support.answering import answering, reply
from tests.support.command import Run
from tests.support.harness import PATIENCE

AT = "2026-11-02T03:14:00Z"
CALLER, SESSION = "9f2c51a07be3d418", "5a0c93e1bb7f2d64"


def make_row(**changes: Any) -> dict[str, Any]:  # noqa: ANN401  # fields of a row
    row = {
        "caller": CALLER,
        "session": SESSION,
        "alias": None,
        "labels": None,
        "descriptors": None,
        "agent": None,
        "tools": ["search_the_web"],
        "cause": "same_arguments",
        "method": "POST",
        "path": "/v1/chat/completions",
        "policies": ["agents", "agents-canary"],
        "count": 12,
        "first_seen": "2026-11-02T01:02:00Z",
        "last_seen": AT,
        "looping": True,
        "action": "steer",
        "shadow": "reject",
        "orders": [],
        "loops": [],
        "requests": 14,
        "requests_sent_on": 12,
        "requests_not_sent_on": 2,
        "input_tokens_sent_on": 1_234_567,
        "input_tokens_not_sent_on": 205_000,
        "input_tokens_per_minute": 20_500,
        "cost_sent_on_usd": 1_234.5,
        "cost_not_sent_on_usd": 0.004,
        "cost_per_minute_usd": 20.5,
        "commands": {"stop": f"loopguard block --caller {CALLER} --session {SESSION} --for 30m"},
    }
    return {**row, **changes}


ORDER = {"override": "o", "kind": "allow", "who": "eve@laptop", "ends": "2026-11-03T03:14:00Z"}
INCIDENT = {
    **make_row(),
    "tool": "crm.find_customer_by_name_or_number",
    "callers": 120,
    "sessions": 4_321,
    "active": True,
}
ROWS = [
    make_row(),
    make_row(
        descriptors={"x-user-id": "somebody.with.a.long.name@department.example"},
        session=None,
        orders=[ORDER],
    ),
    make_row(
        tools=[],
        path="/" + "long" * 40,
        cost_per_minute_usd=None,
        cost_sent_on_usd=None,
        action="allow",
    ),
    make_row(
        tools=["日本語のツール" * 5],
        alias="\x1b[2J\nteam",
        looping=False,
        shadow=None,
        action="reject",
    ),
]


def make_report(
    *rows: dict[str, Any], incidents: tuple[dict[str, Any], ...] = ()
) -> dict[str, Any]:
    total = {**make_row(), "conversations": len(rows), "looping": 1, "callers": 2}
    return {
        "at": AT,
        "replica": "a",
        "replicas": ["a", "b"],
        "problem": None,
        "known": len(rows),
        "total": total,
        "conversations": list(rows),
        "incidents": list(incidents),
        "coverage": [],
        "estimate": ("input tokens are estimated: one per 4 bytes of a body"),
    }


Show = Callable[..., list[str]]
NO_BUDGETS: dict[str, Any] = {
    "replica": "a", "replicas": ["a", "b"], "problem": None,
    "known": 0, "exist": False, "note": None, "total": {}, "budgets": [],
}  # fmt: skip


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Show:
    def run(
        report: object, width: int, *flags: str, budgets: Mapping[str, Any] = NO_BUDGETS
    ) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        with answering(
            {"/loops": reply(report), "/budgets": reply({**NO_BUDGETS, **budgets})}
        ) as url:
            found = Run(capsys, "top", "--once", "--admin", url, *flags)
        assert found.code == 0, found.err
        return found.out.replace(url, "URL").splitlines()

    return run


COLUMNS = [
    "what repeats",
    "per min",
    "since",
    "now",
    "caller",
    "spent",
    "spared",
    "last",
    "session",
    "cause",
    "policies",
    "orders",
]
WIDTHS = {80: 5, 99: 5, 100: 6, 120: 8, 190: 11, 249: 11, 250: 12}  # width and number of columns
WHOLE = [
    "$20.50",
    "2h12m",
    "steer",
    CALLER,
    "$1,234",
    "<$0.01",
    "0s",
    SESSION,
    "same arguments",
    "agents, agents-canary",
]


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_fit_the_width_of_the_terminal(width: int, show: Show) -> None:
    lines = show(make_report(*ROWS, incidents=(INCIDENT,)), width)

    assert all(cell_len(line) <= width for line in lines)
    assert len(lines) == 2 + 1 + 5 + 2
    assert lines[2].split() == " ".join(COLUMNS[: WIDTHS[width]]).split()
    assert [word for word in WHOLE[: WIDTHS[width] - 1] if word not in lines[4]] == []


def test_eighty_columns_show_the_essentials(show: Show) -> None:
    failing, first, second, third, fourth = show(make_report(*ROWS, incidents=(INCIDENT,)), 80)[3:8]

    assert failing.split()[-5:] == ["wait", "4321", "in", "120", "callers"]
    assert first.split() == ["search_the_web", "$20.50", "2h12m", "steer", CALLER]
    assert "allowed 1d00h" in second
    assert second.rstrip().endswith("x-user-id=somebody…")
    assert re.search(r"~2[01].?\d?k tok .*\(would reject\)", third)
    assert ("reject" in fourth, "\x1b" in fourth) == (True, False)
    assert "x-user-id=somebody.with.a." in "\n".join(show(make_report(*ROWS), 160))
    assert "allow by eve@laptop until 03:14" in "\n".join(show(make_report(*ROWS), 250))


def make_budget(**changes: Any) -> dict[str, Any]:  # noqa: ANN401  # fields of a row
    row = {
        "caller": CALLER,
        "alias": None,
        "labels": None,
        "descriptors": None,
        "policy": "team",
        "mode": "enforce",
        "rule": "dollars",
        "limit": 50,
        "left": 4.5,
        "unit": "dollars",
        "used_percent": 91.0,
        "estimated": 0,
        "open": False,
        "used_up": False,
        "reset_seconds": 7_200,
        "refused": 3,
        "commands": {"free": "loopguard grant --amount 5"},
    }
    return {**row, **changes}


@pytest.mark.parametrize("width", [80, 200])
def test_tightest_budgets_are_listed_below_the_loops(width: int, show: Show) -> None:
    total = {"callers": 2, "used_up": 0, "open_breakers": 1, "refused": 3}
    rows = [
        make_budget(),
        make_budget(
            rule="circuit_breaker", open=True, reset_seconds=None, unit=None, mode="shadow"
        ),
    ]
    budgets = {"known": 2, "exist": True, "total": total, "budgets": rows}

    lines = show(make_report(*ROWS), width, budgets=budgets)

    place = lines.index("budgets of 2 callers: 0 used up, 3 refused, 1 open breaker")
    assert lines[place + 1].startswith(f"  open  {CALLER}  4.5 of 50 left, open until released")
    assert lines[place + 2].startswith(
        f"  91 %  {CALLER}  $4.50 of $50.00 left, resets 05:14 UTC  3 refused"
    )
    assert all(cell_len(line) <= width for line in lines)
    assert "loopguard grant --amount 5 --admin URL" in show(
        make_report(*ROWS), 80, "--commands", budgets=budgets
    )


MONEY: list[tuple[dict[str, Any], str, str]] = [
    ({}, "$4.50 of $50.00 left", "resets 05:14 UTC"),
    ({"left": -0.04, "reset_seconds": 74_760}, "$0.04 over", "resets 00:00 UTC"),
    (
        {"left": 1_234.5, "limit": 20_000, "unit": "tokens"},
        "1,234.5 of 20,000 tokens left",
        "resets 05:14 UTC",
    ),
    ({"unit": None, "left": 0, "estimated": None}, "0 of 50 left", "full 05:14 UTC"),
    ({"estimated": None, "reset_seconds": 40}, "$4.50 of $50.00 left", "full in 40 s"),
    ({"open": True, "estimated": None}, "$4.50 of $50.00 left", "closes 05:14 UTC"),
    ({"open": True, "reset_seconds": None}, "$4.50 of $50.00 left", "open until released"),
    ({"reset_seconds": 86_400 * 29}, "$4.50 of $50.00 left", "resets 2026-12-01 03:14 UTC"),
    ({"reset_seconds": 0}, "$4.50 of $50.00 left", ""),
]


@pytest.mark.parametrize(("changes", "left", "reset"), MONEY)
def test_budget_has_dollars_and_a_clock(changes: dict[str, Any], left: str, reset: str) -> None:
    row = make_budget(**changes)

    assert (write_left(row), write_reset(row, read_time(AT))) == (left, reset)


def test_unused_budgets_are_one_line(show: Show) -> None:
    assert "budgets: nothing yet" in show(
        make_report(*ROWS), 80, budgets={"exist": True, "note": "nothing yet"}
    )
    assert not [line for line in show(make_report(*ROWS), 80) if "budget" in line]


def test_commands_are_whole_lines_below_their_loop(show: Show) -> None:
    lines = show(make_report(*ROWS), 60, "--commands")

    place = lines.index(f"# search_the_web  {CALLER}")
    assert lines[place + 1] == f"{ROWS[0]['commands']['stop']} --admin URL"
    assert [line for line in lines if line.startswith("#")][-1].endswith("  \\x1b[2J team")


def test_failing_tool_and_orders_have_their_commands(show: Show) -> None:
    stop = {"stop": "loopguard block --tool crm.find --for 30m"}
    order = {**ORDER, "reason": "incident 7\nloopguard kill --caller x"}
    report = make_report(make_row(orders=[order]), incidents=({**INCIDENT, "commands": stop},))

    lines = show(report, 200, "--commands")

    place = lines.index(f"# {INCIDENT['tool']} fails for 4,321 sessions of 120 callers")
    assert lines[place - 1 : place + 5] == [
        "",
        f"# {INCIDENT['tool']} fails for 4,321 sessions of 120 callers",
        f"{stop['stop']} --admin URL",
        "",
        f"# search_the_web  {CALLER}",
        (
            "# order: allow by eve@laptop until 2026-11-03T03:14:00Z: incident 7 loopguard kill "
            "--caller x"
        ),
    ]


def test_block_is_shown_despite_a_newer_allow(show: Show) -> None:
    block = {**ORDER, "kind": "block", "ends": "2026-11-02T03:35:00Z"}

    lines = show(make_report(make_row(orders=[ORDER, block])), 80)

    assert "blocked 21m" in next(line for line in lines if line.startswith("search_the_web"))


@pytest.mark.parametrize(
    ("known", "told"),
    [(0, "no loop in the last hour; 2 replicas"), (1, "none of 1 loop matches")],
    ids=["none", "none of one"],
)
def test_nothing_to_show_is_one_line(known: int, told: str, show: Show) -> None:
    lines = show({**make_report(), "known": known}, 80)

    assert (lines[0], len(lines)) == (told, 2)


SHORT = [  # tokens and seconds, each with its short form
    (1, "1", -1, "0s"),
    (999, "999", 59, "59s"),
    (999.6, "1k", 60, "1m"),
    (1_234, "1.23k", 3_599, "59m"),
    (12_345, "12.3k", 3_600, "1h00m"),
    (999_600, "1M", 86_399, "23h59m"),
    (4e6, "4M", 86_400, "1d00h"),
    (5e12, "5T", 30 * 86_400, "30d00h"),
]


def test_numbers_and_ages_are_short(show: Show) -> None:
    at = datetime.fromisoformat(AT)
    rows = [
        make_row(
            cost_per_minute_usd=None,
            input_tokens_per_minute=tokens,
            first_seen=(at - timedelta(seconds=age)).isoformat(),
        )
        for tokens, _, age, _ in SHORT
    ]

    lines = [
        line.split()[1:4]
        for line in show(make_report(*rows), 80)
        if line.startswith("search_the_web")
    ]

    assert lines == [[f"~{number}", "tok", age] for _, number, _, age in SHORT]


# ---- In a terminal


def draw(
    report: dict[str, Any],
    *,
    height: int = 24,
    footer: str | None = "keys",
    **settings: Any,  # noqa: ANN401  # of a console
) -> str:
    console = Console(
        file=StringIO(), width=80, height=height, force_terminal=True, color_system="standard",
        **settings,
    )  # fmt: skip
    console.print(LoopScreen(report, (), footer), end="")
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


EXPLOSION = {
    **make_row(), "agents": {"active": 8, "refused_requests": 240}, "policies": ["p"],
    "action": "reject",
}  # fmt: skip
COLORS = {"reject": "31", "land": "35", "throttle": "33", "warn": "33", "steer": "36"}


@pytest.mark.parametrize("action", COLORS)
def test_actions_have_colors(action: str) -> None:
    row = make_row(action=action, shadow=None)

    assert f"\x1b[{COLORS[action]}m{action}" in draw(make_report(row))
    assert "\x1b[32mallowed" in draw(make_report({**row, "orders": [ORDER]}))


def test_alarms_stand_out() -> None:
    report = {**make_report(incidents=(INCIDENT,)), "explosions": [EXPLOSION]}
    budgets = {"known": 1, "exist": True, "budgets": [make_budget(used_up=True, left=-0.04)]}
    total = {"callers": 1, "used_up": 1, "open_breakers": 0, "refused": 3}
    text = draw({**report, "problem": "the store is away", "budgets": {**budgets, "total": total}})

    for shown in ("the store is away", "crm.find_customer", "8 agents, 240 refused"):
        assert f"\x1b[1;31m{shown}" in text
    assert f"\x1b[31m  91 %  {CALLER}  $0.04 over" in text


def test_no_color_means_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    assert not re.findall(r"\x1b\[(?:\d+;)*(?:3|4|9)\d", draw(make_report(*ROWS)))


@pytest.mark.parametrize(("height", "rows"), [(24, 10), (10, 4), (4, 0)])
def test_keys_stay_on_a_small_screen(height: int, rows: int) -> None:
    lines = draw(make_report(*ROWS[:1] * 10), height=height).splitlines()

    assert len(lines) <= max(height, 6)
    assert "keys" in lines[-1]
    assert "\n".join(lines).count("search_the_web") == rows
    assert ("more row" in "\n".join(lines)) == (rows < 10)


def test_details_follow_their_row(show: Show) -> None:
    ahead = {"mode": "enforce", "counts": "turns", "at": 16, "left": 9, "in_seconds": 40.0}
    row = make_row(next_refusal=ahead, result="still \x1b[2J building")

    lines = show(make_report(row, *ROWS), 80)

    assert lines[4].rstrip() == (
        "  refused at turn 16, in about 40 s; returned: still \\x1b[2J building"
    )
    assert lines[5].startswith("search_the_web")


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        ({"agent": "planner"}, "agent planner (9f2c51a07be3d418)"),
        ({"agent": "planner", "labels": {"team": "search"}}, "team: search (9f2c51a07be3d418)"),
        ({"agent": "planner", "alias": "team-a"}, "team-a"),
    ],
)
def test_names_come_before_hashes(names: dict[str, Any], shown: str) -> None:
    assert write_caller(make_row(**names)) == shown


def test_frozen_rows_keep_their_places() -> None:
    one, two, new = [make_row(conversation=name) for name in ("one", "two", "new")]
    view = View("")
    view.arrange(make_report(one, two))
    view.press("f")

    frozen = view.arrange(make_report(new, two, one))["conversations"]
    view.press("f")

    assert frozen == [one, two, new]
    assert view.arrange(make_report(two, one))["conversations"] == [two, one]


def test_keys_are_told_with_their_state() -> None:
    view = View("cost")
    before = view.write_footer()
    for key in "spfx":
        view.press(key)

    assert before == "q quit  s sort: cost  p pause  f freeze  c commands"
    assert view.write_footer() == (
        "q quit  s sort: spared  PAUSED: p resumes  FROZEN: f thaws  c commands"
    )


LOOPGUARD = "import sys; from extproc.cli.main import main; sys.exit(main())"


@dataclass
class Terminal:
    """A running `loopguard top` on a pseudo terminal."""

    fd: int
    process: subprocess.Popen[bytes]
    seen: str = ""

    def expect(self, text: str) -> None:
        while text not in self.seen:
            assert select([self.fd], [], [], PATIENCE)[0], f"no {text!r} in {self.seen!r}"
            self.seen += os.read(self.fd, 1 << 16).decode()
        self.seen = self.seen.partition(text)[2]

    def press(self, key: str, *expected: str) -> None:
        os.write(self.fd, key.encode())
        for text in expected:
            self.expect(text)


@contextmanager
def running(url: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    flags = ["top", "--interval", "3600", "--admin", url]
    process = subprocess.Popen(
        [sys.executable, "-c", LOOPGUARD, *flags], stdin=theirs, stdout=theirs, stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
    )  # fmt: skip
    os.close(theirs)
    try:
        yield Terminal(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_keys_act_at_once_in_a_terminal() -> None:
    report = make_report(make_row(conversation="one"))
    with (
        answering({"/loops": reply(report), "/budgets": reply(NO_BUDGETS)}) as url,
        running(url) as terminal,
    ):
        terminal.expect("q quit  s sort: now")
        terminal.press("s", "s sort: cost")
        terminal.press("p", "PAUSED")
        terminal.press("\x1b[A")  # an arrow, which is no key
        terminal.press("f", "FROZEN")
        terminal.press("c", "# search_the_web", f"--for 30m --admin {url}")

        assert terminal.process.wait(PATIENCE) == 0


def test_lost_server_leaves_the_last_report() -> None:
    report = make_report(make_row(conversation="one"))
    with running_after(report) as terminal:
        terminal.press("s", "this was shown at 03:14:00 UTC", "search_the_web")
        terminal.press("q")

        assert terminal.process.wait(PATIENCE) == 0


@contextmanager
def running_after(report: dict[str, Any]) -> Iterator[Terminal]:
    """The screen after its server has ended."""
    with ExitStack() as stack:
        with answering({"/loops": reply(report), "/budgets": reply(NO_BUDGETS)}) as url:
            terminal = stack.enter_context(running(url))
            terminal.expect("q quit")
        yield terminal
