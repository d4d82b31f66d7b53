"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from extproc.logs import escape_controls
from extproc.operator.after_notes import write_after

_WIDE = 200
"""Maximum width if the output is not a terminal."""

_COUNTS = ("requests", "loops", "refused", "landed", "throttled", "steered", "warned")


def print_report(document: dict[str, Any]) -> None:
    console = make_console()
    log, policies = document["log"], document["policies"]
    console.print(_write(f"{log['requests']:,} requests in {log['lines']:,} lines, {log['first']} to {log['last']}"))
    if log["unmatched"]:
        console.print(_write(f"{log['unmatched']:,} of them match no policy"))
    if log["killed"]:
        console.print(_write(f"{log['killed']:,} of them are stopped by a kill switch, before any policy"))
    rows: list[Sequence[object]] = []
    for policy in policies:
        about = "" if policy["tenants_exact"] else "~"
        tenants = [f"{about}{policy[name]:,}" for name in ("tenants", "tenants_touched")]
        rows.append((policy["policy"], policy["mode"], *[policy[name] for name in _COUNTS], *tenants))
    columns = ("policy", "mode", *[f"#{name}" for name in _COUNTS], "#tenants", "#touched")
    print_rows(console, "What each policy would have done", columns, rows)
    rows = [(policy["policy"], rule, count) for policy in policies for rule, count in policy["rules"].items()]
    print_rows(console, "Loops by rule", ("policy", "rule", "#requests"), rows)
    for policy in policies:
        for arm, counts in policy["after_notes"].items():
            console.print(_write(f"{policy['policy']} ({policy['mode']}): {write_after(counts, noted=arm == 'noted')}"))
    rows = []
    for policy in policies if any(policy["uncounted"] for policy in policies) else ():
        rows += [(policy["policy"], reason, count) for reason, count in policy["uncounted"].items()]
        if policy["refused_uncountable"]:
            rows.append((policy["policy"], "of these refused (`uncountable`)", policy["refused_uncountable"]))
    print_rows(console, "Not counted", ("policy", "reason", "#requests"), rows)
    columns = ("policy", "tenant", "fingerprint", "#requests", "#refused", "#highest count", "request", "first seen at")
    rows = []
    for item in document["worst"]:
        names = (item["policy"], item["tenant"], item["fingerprint"])
        request = f"{item['method']} {item['path']}"
        rows.append((*names, item["requests"], item["refused"], item["highest_count"], request, item["example"]))
    print_rows(console, "Worst offenders", columns, rows)


def print_rows(console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table with a title, unless it is empty."""
    table = make_table(*columns)
    for row in rows:
        add_row(table, *row)
    if table.row_count:
        print_table(console, title, table)


def make_console(*, stderr: bool = False) -> Console:
    """The console for tables and bars; a pipe gets wide tables."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=_WIDE)


def print_table(console: Console, title: str, table: Table) -> None:
    console.print()
    console.print(Text(title, style="bold"))
    console.print(table)


def make_table(*columns: str) -> Table:
    """An empty table; columns with `#` before their names contain numbers."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column.removeprefix("#"), justify="right" if column.startswith("#") else "left")
    return table


def add_row(table: Table, *cells: object) -> None:
    """Add a row; cells may contain any text."""
    table.add_row(*[_write(f"{cell:,}" if isinstance(cell, int) else str(cell)) for cell in cells])


def _write(text: str) -> Text:
    return Text(escape_controls(text))
