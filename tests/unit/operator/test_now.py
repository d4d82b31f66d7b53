"""What is done now about a row, in the same words on the page and in `loopguard top`."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console
from starlette.requests import Request

from extproc.cli.loop_screen import LoopScreen
from extproc.metrics import Metrics
from extproc.operator.admin.html import send_html
from extproc.operator.admin.pages import make_app
from extproc.operator.admin.row_states import read_time, write_now

AT = "2026-11-02T03:14:00Z"
BEFORE, AFTER, LATER = "2026-11-02T03:00:00+00:00", "2026-11-02T03:13:30+00:00", "2026-11-02T03:44:00+00:00"


def order(kind: str, since: str = BEFORE) -> dict[str, Any]:
    """An order in force."""
    return {"override": "o", "kind": kind, "since": since, "ends": LATER, "who": "eve"}


def make_row(**changes: Any) -> dict[str, Any]:  # noqa: ANN401  # fields of a row
    """A looping conversation."""
    counts = dict.fromkeys(("requests", "requests_sent_on", "requests_not_sent_on"), 3)
    tokens = dict.fromkeys(("input_tokens_sent_on", "input_tokens_not_sent_on", "input_tokens_per_minute"), 100)
    money = dict.fromkeys(("cost_sent_on_usd", "cost_not_sent_on_usd", "cost_per_minute_usd"), 1.0)
    row: dict[str, Any] = {
        "caller": "9f2c51a07be3d418", "conversation": "c", "session": None, "alias": None, "labels": None, "descriptors": None,
        "agent": None, "tools": ["search"], "cause": None, "method": "POST", "path": "/", "route": None, "model": None,
        "policies": ["p"], "count": 3, "first_seen": BEFORE, "last_seen": "2026-11-02T03:13:00Z", "looping": True,
        "action": "steer", "shadow": None, "would_be_refused_by": [], "orders": [], "loops": [], "commands": {},
    }  # fmt: skip
    return {**row, **counts, **tokens, **money, **changes}


def make_incident(**changes: Any) -> dict[str, Any]:  # noqa: ANN401  # fields of a row
    """A failing tool."""
    row = make_row(tool="crm", callers=2, sessions=5, active=True, not_refused=0, conversations=[], **changes)
    del row["looping"]
    return row


CASES = [
    ({}, "steer"),
    ({"shadow": "reject"}, "steer"),
    ({"action": "allow", "shadow": "reject"}, "(would reject)"),
    ({"action": "allow"}, ""),
    ({"orders": [order("allow"), order("block")]}, "blocked 30m"),
    ({"orders": [order("block"), order("kill")]}, "killed 30m"),
    ({"orders": [order("grant"), order("allow")]}, "allowed 30m"),
    ({"orders": [order("grant")]}, "steer"),
    ({"orders": [order("release", AFTER)]}, "released 30m"),
]


@pytest.mark.parametrize(("changes", "expected"), CASES)
def test_page_and_top_agree_about_now(changes: dict[str, Any], expected: str) -> None:
    """Orders come first, but a grant or a release only until the next request."""
    row = make_row(**changes)

    assert (write_now(row, read_time(AT)), read_page(row), read_top(row)) == (expected, expected, expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"looping": False}, "over (steer)"), ({"looping": False, "action": "allow", "shadow": "land"}, "over")],
)
def test_quiet_loop_is_over(changes: dict[str, Any], expected: str) -> None:
    """What was last done is in brackets."""
    row = make_row(**changes)

    assert (read_page(row), read_top(row)) == (expected, expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "wait"),
        ({"action": "allow"}, "shadow: wait"),
        ({"orders": [order("block")]}, "blocked 30m"),
    ],
)
def test_page_and_top_agree_about_failing_tools(changes: dict[str, Any], expected: str) -> None:
    """Their agents are told to wait."""
    row = make_incident(**changes)

    assert (read_page(incident=row), read_top(incident=row)) == (expected, expected)


def make_report(row: dict[str, Any] | None, incident: dict[str, Any] | None) -> dict[str, Any]:
    """The JSON of `/loops`."""
    rows = [row] if row else []
    total = {**make_row(), "conversations": len(rows), "looping": len(rows), "callers": 1}
    return {
        "at": AT, "replicas": ["a"], "problem": None, "known": len(rows), "left_out": 0, "total": total, "conversations": rows,
        "incidents": [incident] if incident else [], "coverage": [], "estimate": "", "after_notes": [],
    }  # fmt: skip


def read_top(row: dict[str, Any] | None = None, incident: dict[str, Any] | None = None) -> str:
    """What is in the column `now`."""
    console = Console(width=80, file=io.StringIO(), force_terminal=False, color_system=None)
    console.print(LoopScreen(make_report(row, incident)), end="")
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    head = next(place for place, line in enumerate(lines) if line.startswith("what repeats"))
    start, end = lines[head].index("now"), lines[head].index("caller")
    return lines[head + 1][start:end].strip()


def read_page(row: dict[str, Any] | None = None, incident: dict[str, Any] | None = None) -> str:
    """The same on the page."""
    runs = {"sessions": [], "total": {"sessions": 0}}
    selection = {"policy": "", "caller": "", "tool": "", "sort": "now"}
    burning: dict[str, Any] = {"active": 0, "headline": "", "exploding": [], "tight": [], "healthy": [], "left_out": 0}
    shown = {**burning, "standing": [], "more_orders": 0, "runs": runs, "budgets": None, "charts": [], "more_charts": 0}
    request = Request({"type": "http", "app": make_app(Metrics(), []), "headers": []})
    answer = send_html(
        request,
        "loops.html",
        AT,
        report=make_report(row, incident),
        selection=selection,
        sorts=["now"],
        actions={},
        after=(),
        **shown,
    )
    found = re.search(r'data-name="now"><div><span[^>]*>([^<]*)<', bytes(answer.body).decode())
    assert found is not None
    return found[1]
