"""A report as tables for people."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from extproc.logs import escape_controls
from extproc.operator.after_notes import write_after

_WIDE = 200
"""Columns if the output is not a terminal; tables take what they need."""

_COUNTS = ("requests", "loops", "refused", "landed", "throttled", "steered", "warned")


def print_report(document: dict[str, Any]) -> None:
    """Print a report to standard output."""
    console = make_console()
    log = document["log"]
    console.print(_write(f"{log['requests']:,} requests in {log['lines']:,} lines, {log['first']} to {log['last']}"))
    if log["unmatched"]:
        console.print(_write(f"{log['unmatched']:,} of them match no policy"))
    if log["killed"]:
        console.print(_write(f"{log['killed']:,} of them are stopped by a kill switch, before any policy"))
    print_table(console, "What each policy would have done", _tabulate_policies(document["policies"]))
    if any(policy["rules"] for policy in document["policies"]):
        print_table(console, "Loops by rule", _tabulate_rules(document["policies"]))
    for policy in document["policies"]:
        for arm, counts in policy["after_notes"].items():
            console.print(_write(f"{policy['policy']} ({policy['mode']}): {write_after(counts, noted=arm == 'noted')}"))
    if any(policy["uncounted"] for policy in document["policies"]):
        print_table(console, "Not counted", _tabulate_uncounted(document["policies"]))
    if document["worst"]:
        worst = document["worst"]
        table = make_table(
            "policy",
            "tenant",
            "fingerprint",
            "#requests",
            "#refused",
            "#highest count",
            "request",
            "first seen at",
        )
        for item in worst:
            request = f"{item['method']} {item['path']}"
            names = (item["policy"], item["tenant"], item["fingerprint"])
            add_row(table, *names, item["requests"], item["refused"], item["highest_count"], request, item["example"])
        print_table(console, "Worst offenders", table)


def make_console(*, stderr: bool = False) -> Console:
    """The console for tables and bars; a pipe gets tables in full."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=_WIDE)


def print_table(console: Console, title: str, table: Table) -> None:
    """Print a table below its title."""
    console.print()
    console.print(Text(title, style="bold"))
    console.print(table)


def make_table(*columns: str) -> Table:
    """An empty table; columns whose names begin with `#` contain numbers."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column.removeprefix("#"), justify="right" if column.startswith("#") else "left")
    return table


def add_row(table: Table, *cells: object) -> None:
    """Add a row; cells may contain anything from a log."""
    table.add_row(*[_write(f"{cell:,}" if isinstance(cell, int) else str(cell)) for cell in cells])


def _write(text: str) -> Text:
    return Text(escape_controls(text))


def _tabulate_policies(policies: list[dict[str, Any]]) -> Table:
    table = make_table("policy", "mode", *(f"#{name}" for name in _COUNTS), "#tenants", "#touched")
    for policy in policies:
        about = "" if policy["tenants_exact"] else "~"
        tenants = [f"{about}{policy[name]:,}" for name in ("tenants", "tenants_touched")]
        add_row(table, policy["policy"], policy["mode"], *(policy[name] for name in _COUNTS), *tenants)
    return table


def _tabulate_rules(policies: list[dict[str, Any]]) -> Table:
    table = make_table("policy", "rule", "#requests")
    for policy in policies:
        for rule, count in policy["rules"].items():
            add_row(table, policy["policy"], rule, count)
    return table


def _tabulate_uncounted(policies: list[dict[str, Any]]) -> Table:
    table = make_table("policy", "reason", "#requests")
    for policy in policies:
        for reason, count in policy["uncounted"].items():
            add_row(table, policy["policy"], reason, count)
        if policy["refused_uncountable"]:
            add_row(table, policy["policy"], "of these refused (`uncountable`)", policy["refused_uncountable"])
    return table
