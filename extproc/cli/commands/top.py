"""`loopguard top`: shows the active loops of a running server."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from extproc.cli.commands.sessions import write_report
from extproc.cli.keyboard import QUIT, Keyboard
from extproc.cli.loop_screen import LoopScreen, list_commands
from extproc.errors import LoopguardError, UsageError
from extproc.logs import escape_controls, write_json
from extproc.operator.admin.client import (
    AdminClient,
    add_admin_flag,
    ask_all,
    open_clients,
    select_params,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

HELP = "show active loops, how long they have run, and what they cost"
EXAMPLES = """examples:
  loopguard top
  loopguard top --admin http://10.0.0.7:9900 --policy chat --sort requests
  loopguard top --once --json | jq '.conversations[0]'
  loopguard top --commands --once
  loopguard top --price 2.50
  loopguard top --tree

Replicas that share a store know all loops: ask any of them.
For replicas with separate stores, repeat --admin for each.
If the output is not a terminal, it is printed once. NO_COLOR=1 turns colors off.

keys:
  q quit   s next sort order   p pause   f freeze the order of the rows
  c quit, and print the commands that stop or free each row"""

_SORTS = ("now", "cost", "spared", "requests", "count", "last", "first")
_PAUSE, _FREEZE, _SORT, _COMMANDS = "pfsc"
_BUDGETS = 100
"""Number of budgets to fetch, tightest first: more than are shown, to count the healthy ones."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_admin_flag(parser)
    parser.add_argument(
        "--tree", action="store_true", help="show sessions and their agents instead of loops"
    )
    parser.add_argument(
        "--commands",
        action="store_true",
        help="also print the commands that stop or free each conversation",
    )
    parser.add_argument("--once", action="store_true", help="print once and exit")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the JSON of /loops, or with --tree of /sessions, once",
    )
    parser.add_argument(
        "--sort", choices=_SORTS, default="", help="sort by this (default: now, money per minute)"
    )
    parser.add_argument("--policy", default="", metavar="ID", help="only loops under this policy")
    parser.add_argument(
        "--caller", default="", metavar="HASH|[NAME=]VALUE", help="only loops of this caller"
    )
    parser.add_argument("--tool", default="", metavar="NAME", help="only loops with this tool")
    parser.add_argument(
        "--limit", type=int, default=50, metavar="N", help="maximum loops to show (default 50)"
    )
    parser.add_argument(
        "--price",
        default="",
        metavar="USD",
        help="US dollars per million input tokens (default: as the server is set)",
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="refresh interval (default 2)",
    )


def run(options: argparse.Namespace) -> int:
    from rich.console import Console  # noqa: PLC0415  # only this command needs it

    if not options.interval > 0:
        raise UsageError(
            f"--interval must be a positive number of seconds, not {options.interval:g}"
        )
    clients = open_clients(options.admin)
    if options.json:
        print(write_json(_ask(clients, options), indent=2))
        return 0
    console = Console()
    report = _read(clients, options)
    if options.once or not sys.stdout.isatty():
        # Commands must stay whole to be copied
        console.print(_show(report, options), end="", crop=False)
        return 0
    return _watch(clients, options, console, report)


class View:
    """How the screen shows reports, as the keys say.

    Attributes:
        sort: the order that the server is asked for.
        paused: the report stays as it is.
        frozen: rows keep their places.
    """

    def __init__(self, sort: str) -> None:
        self.sort = sort or _SORTS[0]
        self.paused = self.frozen = False
        self._places: dict[tuple[str, str], int] = {}

    def press(self, key: str) -> None:
        """Apply a key; unknown ones do nothing."""
        if key == _SORT:
            self.sort = _SORTS[(_SORTS.index(self.sort) + 1) % len(_SORTS)]
            self.frozen = False
        elif key == _PAUSE:
            self.paused = not self.paused
        elif key == _FREEZE:
            self.frozen = not self.frozen

    def arrange(self, report: dict[str, Any]) -> dict[str, Any]:
        """The report with its rows in the frozen order, new ones last."""
        rows = report.get("conversations", [])
        if self.frozen:
            last = len(self._places)
            rows = sorted(rows, key=lambda row: self._places.get(_name_row(row), last))
        self._places = {_name_row(row): place for place, row in enumerate(rows)}
        return {**report, "conversations": rows}

    def write_footer(self) -> str:
        """The keys and their state."""
        pause = "PAUSED: p resumes" if self.paused else "p pause"
        freeze = "FROZEN: f thaws" if self.frozen else "f freeze"
        return f"q quit  s sort: {self.sort}  {pause}  {freeze}  c commands"


def _name_row(row: dict[str, Any]) -> tuple[str, str]:
    return row["caller"], row["conversation"]


def _watch(
    clients: Sequence[AdminClient],
    options: argparse.Namespace,
    console: Console,
    report: dict[str, Any],
) -> int:
    """Refresh the screen until a key ends it. If no server answers, the last report stays."""
    from rich.live import Live  # noqa: PLC0415  # only this command needs it

    view = View(options.sort)
    report = view.arrange(report)
    with (
        Keyboard(sys.stdin) as keyboard,
        Live(
            _show(report, options, view), console=console, auto_refresh=False, screen=True
        ) as live,
    ):
        while True:
            keys = keyboard.wait(options.interval)
            if QUIT in keys:
                return 0
            if _COMMANDS in keys:
                break
            for key in keys:
                view.press(key)
            if _SORT in keys or not (keys or view.paused):
                options.sort = view.sort
                try:
                    report = view.arrange(_read(clients, options))
                except LoopguardError as error:
                    report = {**report, "lost": str(error)}
            live.update(_show(report, options, view), refresh=True)
    options.commands = True
    console.print(_show(report, options), end="", crop=False)
    return 0


def _read(clients: Sequence[AdminClient], options: argparse.Namespace) -> dict[str, Any]:
    return {**_ask(clients, options), "budgets": _ask_budgets(clients, options)}


def _ask_budgets(
    clients: Sequence[AdminClient], options: argparse.Namespace
) -> dict[str, Any] | None:
    """The tightest budgets; None with --tree."""
    if options.tree:
        return None
    return ask_all(
        clients, "/budgets", {**select_params(options, "policy", "caller"), "limit": str(_BUDGETS)}
    )


def _ask(clients: Sequence[AdminClient], options: argparse.Namespace) -> dict[str, Any]:
    names = (
        ("policy", "caller", "limit")
        if options.tree
        else ("sort", "policy", "caller", "tool", "limit", "price")
    )
    return ask_all(
        clients, "/sessions" if options.tree else "/loops", select_params(options, *names)
    )


def _show(
    report: dict[str, Any], options: argparse.Namespace, view: View | None = None
) -> LoopScreen | Text:
    if options.tree:
        return make_tree(report)
    if view is not None and not options.commands:
        return LoopScreen(report, (), view.write_footer())
    admin = "".join([f" --admin {shlex.quote(url)}" for url in options.admin or ()])
    return LoopScreen(report, list_commands(report, admin) if options.commands else ())


def make_tree(report: dict[str, Any]) -> Text:
    """The sessions and their agents; a session that seems to be an agent follows its parent."""
    from rich.text import Text  # noqa: PLC0415  # only this command needs it

    return Text(
        "\n".join(
            [
                escape_controls(line)
                for line in write_report({**report, "sessions": order_sessions(report)})
            ]
        )
    )


def order_sessions(report: dict[str, Any]) -> list[dict[str, Any]]:
    sessions = report["sessions"]
    known = {_name(session, session["session"]) for session in sessions}
    ordered: list[dict[str, Any]] = []
    waiting = [each for each in reversed(sessions) if _name(each, each["started_by"]) not in known]
    while waiting:
        session = waiting.pop()
        ordered.append(session)
        name = _name(session, session["session"])
        waiting += [
            each
            for each in reversed(sessions)
            if each["started_by"] and _name(each, each["started_by"]) == name
        ]
    return ordered


def _name(session: dict[str, Any], name: str | None) -> tuple[str | None, ...]:
    return session["caller"], session["policy"], session["mode"], name
