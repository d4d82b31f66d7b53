"""`loopguard top`: the active loops, from the admin port of a running server."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from extproc.cli.commands import count, write_caller, write_coverage
from extproc.cli.commands.sessions import write_report
from extproc.errors import UsageError
from extproc.logs import escape_controls
from extproc.operator.admin.client import AdminClient, add_admin_flag, ask_all, open_clients

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

HELP = "show active loops, how long they have run, and what they cost"
EXAMPLES = """examples:
  loopguard top
  loopguard top --admin http://10.0.0.7:9900 --policy chat --sort requests
  loopguard top --once --json | jq '.loops[0]'
  loopguard top --price 2.50
  loopguard top --tree

Replicas that share a store know all loops: ask any of them. For replicas with separate stores, repeat --admin for each. If the
output is not a terminal, it is printed once."""

_SORTS = ("cost", "requests", "count", "last", "first")
_RIGHT = ("count", "requests", "not forwarded", "tokens", "cost")
_MINUTE, _HOUR = 60, 3_600


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_admin_flag(parser)
    parser.add_argument("--tree", action="store_true", help="show sessions and their agents instead of loops")
    parser.add_argument("--once", action="store_true", help="print once and exit")
    parser.add_argument("--json", action="store_true", help="print the JSON of /loops, or with --tree of /sessions, once")
    parser.add_argument("--sort", choices=_SORTS, default="cost", help="sort by this (default cost)")
    parser.add_argument("--policy", default="", metavar="ID", help="only loops under this policy")
    parser.add_argument("--caller", default="", metavar="HASH|[NAME=]VALUE", help="only loops of this caller")
    parser.add_argument("--tool", default="", metavar="NAME", help="only loops with this tool")
    parser.add_argument("--limit", type=int, default=50, metavar="N", help="maximum loops to show (default 50)")
    parser.add_argument(
        "--price", default="", metavar="USD", help="US dollars per million input tokens (default: as the server is set)"
    )
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="refresh interval (default 2)")


def run(options: argparse.Namespace) -> int:
    """Show the loops until Ctrl-C, or once; returns the exit code."""
    from rich.console import Console  # noqa: PLC0415  # only this command needs it
    from rich.live import Live  # noqa: PLC0415  # as above

    if not options.interval > 0:
        raise UsageError(f"--interval must be a positive number of seconds, not {options.interval:g}")
    clients = open_clients(options.admin)
    if options.json:
        print(json.dumps(_ask(clients, options), indent=2))
        return 0
    console = Console()
    report = _ask(clients, options)
    if options.once or not sys.stdout.isatty():
        console.print(_show(report, options), soft_wrap=False)
        return 0
    with Live(_show(report, options), console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(options.interval)
            live.update(_show(_ask(clients, options), options), refresh=True)


def _ask(clients: Sequence[AdminClient], options: argparse.Namespace) -> dict[str, Any]:
    names = ("policy", "caller", "limit") if options.tree else ("sort", "policy", "caller", "tool", "limit", "price")
    params = {name: value for name in names if (value := str(getattr(options, name)))}
    return ask_all(clients, "/sessions" if options.tree else "/loops", params)


def _show(report: dict[str, Any], options: argparse.Namespace) -> Table | Text:
    return make_forest(report) if options.tree else make_table(report)


def make_forest(report: dict[str, Any]) -> Text:
    """The sessions with their agents for a terminal; those that seem to be agents stand below the ones that started them."""
    from rich.text import Text  # noqa: PLC0415  # as above

    return Text("\n".join([escape_controls(line) for line in write_report({**report, "sessions": order_sessions(report)})]))


def order_sessions(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The sessions, each behind the one that seems to have started it."""
    sessions = report["sessions"]
    known = {_name(session, session["session"]) for session in sessions}
    ordered: list[dict[str, Any]] = []
    waiting = [each for each in reversed(sessions) if _name(each, each["started_by"]) not in known]
    while waiting:
        session = waiting.pop()
        ordered.append(session)
        name = _name(session, session["session"])
        waiting += [each for each in reversed(sessions) if each["started_by"] and _name(each, each["started_by"]) == name]
    return ordered


def _name(session: dict[str, Any], name: str | None) -> tuple[str | None, ...]:
    return session["caller"], session["policy"], session["mode"], name


def make_table(report: dict[str, Any]) -> Table:
    """The loops as a table for a terminal."""
    from rich.table import Table  # noqa: PLC0415  # as above
    from rich.text import Text  # noqa: PLC0415  # as above

    now = _read_time(report["at"])
    incidents = [escape_controls(_write_incident(row, now)) for row in report.get("incidents", ()) if row["active"]]
    title = Text("\n".join([*write_coverage(report), *incidents, _count_loops(report)]))
    caption = Text("; ".join(filter(None, [report["problem"], report["estimate"]])))
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=None)
    for name in _COLUMNS:
        table.add_column(name, justify="right" if name in _RIGHT else "left", overflow="fold")
    for loop in report["loops"]:
        style = "" if loop["looping"] else "dim"
        # Text objects, because clients' values must not be interpreted as markup.
        table.add_row(*(Text(escape_controls(cell), style) for cell in (write(loop, now) for write in _COLUMNS.values())))
    return table


def _count_loops(report: dict[str, Any]) -> str:
    total, known = report["total"], report["known"]
    if not known:
        return f"no loop in the last hour; {count(len(report['replicas']), 'replica')}"
    if known and not total["loops"]:
        return f"none of {count(known, 'loop')} matches"
    callers, requests = count(total["callers"], "caller"), count(total["requests"], "request")
    told = f"{total['looping']} of {total['loops']} loops active, {callers}, {requests}"
    return f"{told}, {total['requests_not_sent_on']} not forwarded; {count(len(report['replicas']), 'replica')}"


def _write_incident(row: dict[str, Any], now: float) -> str:
    """A tool that fails for many, in a line."""
    whom = f"{count(row['sessions'], 'session')} of {count(row['callers'], 'caller')}"
    return f"{row['tool']} fails for {whom} since {_write_age(now - _read_time(row['first_seen']))} ({row['policy']})"


def _write_requests(loop: dict[str, Any]) -> str:
    if loop["shadow"] is not None:
        return " ".join(f"{number} would {action}" for action, number in loop["shadow"].items())
    words = ("refused", "landed", "throttled", "steered", "warned")
    return " ".join(f"{loop[word]} {word}" for word in words if loop[word])


def _read_time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _write_age(seconds: float) -> str:
    if seconds < _MINUTE:
        return f"{max(0, seconds):.0f}s"
    if seconds < _HOUR:
        return f"{seconds // _MINUTE:.0f}m"
    return f"{seconds // _HOUR:.0f}h{seconds % _HOUR // _MINUTE:02.0f}m"


_COLUMNS: dict[str, Callable[[dict[str, Any], float], str]] = {
    "caller": lambda loop, _: write_caller(loop),
    "session": lambda loop, _: loop["session"] or "",
    "policy": lambda loop, _: loop["policy"] + ("" if loop["detector"] == "default" else f"/{loop['detector']}"),
    "tool, path": lambda loop, _: " ".join([*loop["tools"], loop["path"]]),
    "since": lambda loop, now: _write_age(now - _read_time(loop["first_seen"])),
    "last": lambda loop, now: _write_age(now - _read_time(loop["last_seen"])),
    "count": lambda loop, _: str(loop["count"]),
    "requests": lambda loop, _: _write_requests(loop),
    "not forwarded": lambda loop, _: str(loop["requests_not_sent_on"]),
    "tokens": lambda loop, _: f"~{loop['input_tokens']}",
    "cost": lambda loop, _: "" if loop["cost_usd"] is None else f"${loop['cost_usd']:.2f}",
}
