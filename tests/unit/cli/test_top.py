"""The screen of `loopguard top` on terminals of any width."""

from __future__ import annotations

import io
from itertools import pairwise
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from extproc.cli.loop_screen import COLUMNS, LoopScreen, list_commands, write_number
from extproc.operator.admin.row_states import write_age

AT = "2026-11-02T03:14:00Z"
CALLER, SESSION = "9f2c51a07be3d418", "5a0c93e1bb7f2d64"


def make_row(**changes: Any) -> dict[str, Any]:  # noqa: ANN401  # fields of a row
    """A looping conversation."""
    row = {
        "caller": CALLER, "session": SESSION, "alias": None, "labels": None, "descriptors": None, "agent": None,
        "tools": ["search_the_web"], "cause": "same_arguments", "method": "POST", "path": "/v1/chat/completions",
        "policies": ["agents", "agents-canary"], "count": 12, "first_seen": "2026-11-02T01:02:00Z", "last_seen": AT,
        "looping": True, "action": "steer", "shadow": "reject", "orders": [], "loops": [],
        "requests": 14, "requests_sent_on": 12, "requests_not_sent_on": 2, "input_tokens_sent_on": 1_234_567,
        "input_tokens_not_sent_on": 205_000, "input_tokens_per_minute": 20_500, "cost_sent_on_usd": 1_234.5,
        "cost_not_sent_on_usd": 0.004, "cost_per_minute_usd": 20.5,
        "commands": {"stop": f"loopguard block --caller {CALLER} --session {SESSION} --for 30m"},
    }  # fmt: skip
    return {**row, **changes}


ORDER = {"override": "o", "kind": "allow", "who": "eve@laptop", "ends": "2026-11-03T03:14:00Z"}
INCIDENT = {
    **make_row(), "tool": "crm.find_customer_by_name_or_number", "callers": 120, "sessions": 4_321, "active": True,
}  # fmt: skip
ROWS = [
    make_row(),
    make_row(descriptors={"x-user-id": "somebody.with.a.long.name@department.example"}, session=None, orders=[ORDER]),
    make_row(tools=[], path="/" + "long" * 40, cost_per_minute_usd=None, cost_sent_on_usd=None, action="allow"),
    make_row(tools=["日本語のツール" * 5], alias="\x1b[2J\nteam", looping=False, shadow=None, action="reject"),
]


def make_report(*rows: dict[str, Any], incidents: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    """The JSON of `/loops` about these rows."""
    total = {**make_row(), "conversations": len(rows), "looping": 1, "callers": 2}
    return {
        "at": AT, "replicas": ["a", "b"], "problem": None, "known": len(rows), "total": total, "conversations": list(rows),
        "incidents": list(incidents), "coverage": [], "estimate": "input tokens are estimated: one per 4 bytes of a body",
    }  # fmt: skip


def show(report: dict[str, Any], width: int, *commands: str) -> list[str]:
    """The lines on a terminal of this width."""
    console = Console(width=width, file=io.StringIO(), force_terminal=False, color_system=None)
    console.print(LoopScreen(report, commands), end="", crop=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 81, 99, 100, 120, 140, 160, 200, 250])
def test_no_row_wraps_or_is_wider_than_the_terminal(width: int) -> None:
    """Each conversation and each failing tool is one line, and so is the head of the table."""
    lines = show(make_report(*ROWS, incidents=(INCIDENT,)), width)

    assert all(cell_len(line) <= width for line in lines)
    head = next(place for place, line in enumerate(lines) if line.startswith("what repeats"))
    assert len(lines) == head + 1 + 5 + 2


def test_eighty_columns_have_what_matters() -> None:
    """What repeats, what it costs now, since when, what is done, and who: whole, unless clients' names are longer."""
    lines = show(make_report(*ROWS, incidents=(INCIDENT,)), 80)

    head, failing, first, second, third, fourth = lines[2:8]
    assert head.split() == ["what", "repeats", "per", "min", "since", "now", "caller"]
    assert failing.split()[-5:] == ["wait", "4321", "in", "120", "callers"]
    assert first.split() == ["search_the_web", "$20.50", "2h12m", "steer", CALLER]
    assert "allowed 1d00h" in second
    assert second.rstrip().endswith("x-user-id=somebody…")
    assert "~20k tok" in third or "~21k tok" in third
    assert "(would reject)" in third
    assert "reject" in fourth
    assert "\x1b" not in fourth


def make_budget(**changes: Any) -> dict[str, Any]:  # noqa: ANN401  # fields of a row
    """A caller's budget."""
    row = {
        "caller": CALLER, "alias": None, "labels": None, "descriptors": None, "policy": "team", "mode": "enforce",
        "rule": "dollars", "limit": 50, "left": 4.5, "unit": "dollars", "used_percent": 91.0, "open": False,
        "reset_seconds": 7_200, "refused": 3, "commands": {"free": "loopguard grant --amount 5"},
    }  # fmt: skip
    return {**row, **changes}


@pytest.mark.parametrize("width", [80, 200])
def test_the_tightest_budgets_stand_below_the_loops(width: int) -> None:
    """In a line each that never wraps; a line says that no caller has used any; without budgets, there is nothing."""
    total = {"callers": 2, "used_up": 0, "open_breakers": 1, "refused": 3}
    rows = [make_budget(), make_budget(rule="circuit_breaker", open=True, reset_seconds=None, unit=None, mode="shadow")]
    budgets = {"known": 2, "exist": True, "note": None, "total": total, "budgets": rows}
    report = make_report(*ROWS)

    lines = show({**report, "budgets": budgets}, width)
    place = lines.index("budgets of 2 callers: 0 used up, 3 refused, 1 open breaker")

    assert lines[place + 1].startswith("  open  team/circuit_breaker (shadow)")
    assert lines[place + 2].startswith("  91 %  team/dollars  4.5 of 50 dollars left, whole in 2h00m  3 refused")
    assert all(cell_len(line) <= width for line in lines)
    assert "budgets: nothing yet" in show(
        {**report, "budgets": {**budgets, "known": 0, "budgets": [], "note": "nothing yet"}}, 80
    )
    unused = {**budgets, "known": 0, "exist": False, "budgets": []}
    assert show({**report, "budgets": unused}, width) == show(report, width)
    assert "loopguard grant --amount 5 --admin x" in list_commands({**report, "budgets": budgets}, " --admin x")


def test_wider_terminals_say_more() -> None:
    """Columns are added, none goes, and cells get the room that is left."""
    heads = [next(line for line in show(make_report(*ROWS), width) if "what repeats" in line) for width in (80, 120, 160, 250)]

    names = [[column.name for column in COLUMNS if column.name in head] for head in heads]
    assert [len(each) for each in names] == [5, 8, 10, 12]
    assert all(more[: len(less)] == less for less, more in pairwise(names))
    wide = "\n".join(show(make_report(*ROWS), 160))
    assert "x-user-id=somebody.with.a." in wide
    assert SESSION in wide
    assert "allow by eve@laptop until 03:14" in "\n".join(show(make_report(*ROWS), 250))


def test_columns_fit_the_narrowest_terminal_that_has_them() -> None:
    """Otherwise they would be narrowed, whatever is in them."""
    for width in sorted({max(80, column.least) for column in COLUMNS}):
        shown = [column for column in COLUMNS if width >= column.least]
        assert sum(column.width + 1 for column in shown) - 1 <= width, width


def test_commands_are_whole_lines_below_what_they_are_about() -> None:
    """They can be copied, also where the terminal is narrow, with the servers that `top` asks."""
    report = make_report(*ROWS)

    lines = show(report, 60, *list_commands(report, " --admin unix:/run/guard.sock"))

    place = lines.index(f"# search_the_web  {CALLER}")
    assert lines[place + 1] == f"{ROWS[0]['commands']['stop']} --admin unix:/run/guard.sock"
    assert [line for line in lines if line.startswith("#")][-1].endswith("  \\x1b[2J team")


def test_a_failing_tool_and_standing_orders_have_their_commands() -> None:
    """A tool's are about all its callers; who gave an order, until when and why stands below what it is about."""
    stop = {"stop": "loopguard block --tool crm.find --for 30m"}
    order = {**ORDER, "reason": "incident 7\nloopguard kill --caller x"}
    report = make_report(make_row(orders=[order]), incidents=({**INCIDENT, "commands": stop},))

    lines = list_commands(report, "")

    assert lines[:4] == ["", f"# {INCIDENT['tool']} fails for 4321 sessions of 120 callers", stop["stop"], ""]
    assert lines[4:6] == [
        f"# search_the_web  {CALLER}",
        "# order: allow by eve@laptop until 2026-11-03T03:14:00Z: incident 7 loopguard kill --caller x",
    ]


def test_a_block_holds_whatever_a_newer_order_allows() -> None:
    """That is what is shown as done now."""
    block = {**ORDER, "kind": "block", "ends": "2026-11-02T03:35:00Z"}

    lines = show(make_report(make_row(orders=[ORDER, block])), 80)

    assert "blocked 21m" in next(line for line in lines if line.startswith("search_the_web"))


def test_nothing_to_show() -> None:
    """No table, and words that say which nothing it is."""
    none = make_report()
    other = {**make_report(), "known": 1}

    assert show(none, 80)[0] == "no loop in the last hour; 2 replicas"
    assert show(other, 80)[0] == "none of 1 loop matches"
    assert not any("what repeats" in line for line in show(none, 80))


@pytest.mark.parametrize(
    ("number", "written"),
    [(0, "0"), (999, "999"), (999.6, "1.0k"), (1_234, "1.2k"), (12_345, "12k"), (999_600, "1.0M"), (4e6, "4.0M"), (5e12, "5T")],
)
def test_numbers_are_short(number: float, written: str) -> None:
    """At most five characters."""
    assert write_number(number) == written


def test_ages_are_short() -> None:
    """At most six characters, for a month."""
    assert [write_age(seconds) for seconds in (-1, 59, 60, 3_599, 3_600, 86_399, 86_400, 30 * 86_400)] == [
        "0s", "59s", "1m", "59m", "1h00m", "23h59m", "1d00h", "30d00h",
    ]  # fmt: skip
