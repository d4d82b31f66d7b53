"""Prints the report as tables and sentences, or makes it JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from extproc.cli.envoy_check.findings import Finding
from extproc.cli.envoy_check.inspect import CheckReport, RouteReport
from extproc.cli.envoy_check.paths import describe_match
from extproc.logs import escape_controls


def make_json(report: CheckReport, source: str) -> dict[str, Any]:
    return {
        "source": source,
        "good": report.is_good,
        "routes": [
            {
                "listener": item.listener,
                "route": item.route.name,
                "match": describe_match(item.route.match),
                "guarded": bool(item.modes),
                "body_modes": list(item.modes),
                "pointer": item.route.place.pointer,
            }
            for item in report.routes
        ],
        "findings": [_make_finding(finding) for finding in report.findings if finding.hurts],
        "notes": [_make_finding(finding) for finding in report.findings if not finding.hurts],
    }


def _make_finding(finding: Finding) -> dict[str, Any]:
    return {
        "code": finding.code,
        "pointer": finding.place.pointer,
        "line": finding.place.line,
        "problem": finding.problem,
        "right": finding.right,
        "routes": list(finding.routes),
    }


def print_report(report: CheckReport, source: str, console: Console) -> None:
    """Print the tables of routes, then the findings."""
    for listener in dict.fromkeys(item.listener for item in report.routes):
        console.print(
            _make_route_table(
                listener, [item for item in report.routes if item.listener == listener]
            )
        )
    for finding in sorted(report.findings, key=lambda finding: not finding.hurts):
        for line in _write_finding(finding, source):
            console.print(line, soft_wrap=True)
    hurting = sum(finding.hurts for finding in report.findings)
    unknown = sum(finding.code == "not-judged" for finding in report.findings)
    guarded = sum(bool(item.modes) for item in report.routes)
    told = f"{guarded} of {len(report.routes)} routes guarded; findings: {hurting}"
    told += f" in what could be judged; not judged: {unknown}" if unknown else ""
    console.print(f"{told}; notes: {len(report.findings) - hurting - unknown}", soft_wrap=True)


def make_table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(_write(column), overflow="fold")
    return table


def _make_route_table(listener: str, routes: Sequence[RouteReport]) -> Table:
    table = make_table(f"routes of {listener}", "match", "guarded")
    for item in routes:
        guarded = Text(", ".join(item.modes), "green") if item.modes else Text("no")
        table.add_row(_write(item.route.name), _write(describe_match(item.route.match)), guarded)
    return table


def _write_finding(finding: Finding, source: str) -> Iterator[Text]:
    line = finding.place.line
    where = f"{source}{f':{line}' if line else ''}: {finding.place.pointer or '/'}"
    yield Text.assemble(
        "\n",
        (finding.code, "bold red" if finding.hurts else "bold yellow"),
        "" if finding.hurts else " (note)",
        escape_controls(f"  {where}"),
    )
    told = f" (routes: {', '.join(finding.routes)})" if finding.routes else ""
    yield _write(f"  {finding.problem}{told}")
    if finding.right:
        yield _write(f"  right: {finding.right}")


def _write(text: str) -> Text:
    return Text(escape_controls(text))  # a configuration must not control the terminal
