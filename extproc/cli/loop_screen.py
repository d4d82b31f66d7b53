"""The screen of `loopguard top`: the most important columns that fit the terminal.

Rows do not wrap. rich leaves out colors if NO_COLOR is set or the output is not a terminal.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from extproc.cli.commands import write_caller, write_number
from extproc.cli.commands.overrides import write_order
from extproc.logs import escape_controls
from extproc.operator.admin.row_states import (
    count,
    is_healthy,
    list_burning,
    read_time,
    write_age,
    write_left,
    write_money,
    write_now,
    write_refusal,
    write_reset,
)

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

_BUDGETS_SHOWN = 5
_CALLER_SHOWN = 24

_STYLES = {
    "reject": "red",
    "land": "magenta",
    "throttle": "yellow",
    "warn": "yellow",
    "steer": "cyan",
}


class Column(NamedTuple):
    """One column.

    Attributes:
        write: makes the cell from a row and the time in seconds since 1970.
        width: maximum number of characters; longer cells end with an ellipsis.
        least: minimum width of the terminal for this column.
        right: whether to align to the right.
        grows: whether it gets a share of the remaining width.
        find_style: the style of a row's cell; None for the usual one.
    """

    name: str
    write: Callable[[Mapping[str, Any], float], str]
    width: int
    least: int = 0
    right: bool = False
    grows: bool = False
    find_style: Callable[[Mapping[str, Any]], str] | None = None


class LoopScreen:
    """A report of `/loops` for a rich console of any width."""

    def __init__(
        self, report: Mapping[str, Any], commands: Sequence[str] = (), footer: str | None = None
    ) -> None:
        """Store the report and the `commands` to print below it, unwrapped.

        With a `footer`, rows that do not fit the height of the terminal are left out.
        """
        self._report = report
        self._commands = commands
        self._footer = footer

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        from rich.text import Text  # noqa: PLC0415  # only this command needs it

        report, width = self._report, options.max_width
        now = read_time(report["at"])
        rows = [*_list_burning(report), *report["conversations"]]
        hint = (
            "commands that stop or free each: loopguard top --commands"
            if rows and not self._commands and self._footer is None
            else ""
        )
        head = [
            *_write_alarms(report),
            *[Text(escape_controls(server["line"])) for server in report["coverage"]],
            *[Text(escape_controls(line), "bold") for line in _sum_up(report)],
        ]
        tail = [
            *[
                Text(line, style)
                for line, style in write_budgets(report.get("budgets"), now, width)
            ],
            *[
                Text(escape_controls(line), "dim")
                for line in (report["estimate"], hint, self._footer)
                if line
            ],
        ]
        table = _draw_table(rows, now, width)
        if self._footer is not None:
            taken = sum([len(line.wrap(console, width)) for line in [*head, *tail]])
            table = _crop(table, options.max_height - taken)
        yield from [*head, *[line for lines in table for line in lines], *tail]
        for line in self._commands:
            yield Text(escape_controls(line), no_wrap=True, overflow="ignore")


def _write_alarms(report: Mapping[str, Any]) -> list[Text]:
    from rich.text import Text  # noqa: PLC0415  # only this command needs it

    lost = report.get("lost") and f"{report['lost']}; this was shown at {report['at'][11:19]} UTC"
    old = report["problem"] and f"{report['problem']}; other replicas' rows are missing or old"
    return [Text(escape_controls(line), "bold red") for line in (lost, old) if line]


def _crop(table: list[list[Text]], room: int) -> list[list[Text]]:
    """The rows that fit into this number of lines, and how many do not."""
    from rich.text import Text  # noqa: PLC0415  # only this command needs it

    ends = list(accumulate(map(len, table)))
    if not ends or ends[-1] <= room:
        return table
    fits = max(1, bisect_right(ends, room - 1))  # at least the header
    return [*table[:fits], [Text(f"… {count(len(table) - fits, 'more row')}", "dim")]]


def _draw_table(rows: Sequence[Mapping[str, Any]], now: float, width: int) -> list[list[Text]]:
    """The lines of the header and of each row; empty without rows."""
    from rich.text import Text  # noqa: PLC0415  # only this command needs it

    if not rows:
        return []
    columns = [column for column in COLUMNS if width >= column.least]
    spare = (width + 1 - sum([column.width + 1 for column in columns])) // sum(
        [column.grows for column in columns]
    )
    # Text objects, because clients' values must not be interpreted as markup.
    drawn = [[Text(column.name, "bold underline") for column in columns]]
    for row in rows:
        style = "" if row.get("looping", True) else "dim"
        drawn.append(
            [
                Text(
                    escape_controls(column.write(row, now)),
                    f"{style} {column.find_style(row) if column.find_style else ''}".strip(),
                )
                for column in columns
            ]
        )
    for place, column in enumerate(columns):
        most = column.width + max(0, spare) * column.grows
        size = min(most, max([line[place].cell_len for line in drawn]))
        for line in drawn:
            line[place].truncate(size, overflow="ellipsis")
            line[place].align("right" if column.right else "left", size)
    lines = [[Text(" ").join(line)] for line in drawn]
    for row, own in zip(rows, lines[1:], strict=True):
        if about := write_details(row):
            own.append(Text(f"  {escape_controls(about)}", "italic", no_wrap=True))
            own[-1].truncate(width, overflow="ellipsis")
    return lines


def write_details(row: Mapping[str, Any]) -> str:
    """When a loop will be refused, and the start of the result that it repeats."""
    result = row.get("result")
    return "; ".join(filter(None, [write_refusal(row), f"returned: {result}" if result else ""]))


def write_budgets(
    report: Mapping[str, Any] | None, now: float, width: int
) -> list[tuple[str, str]]:
    """Lines with their styles: all budgets, and each of the tightest; empty without budgets."""
    if report is None or not (report["known"] or report["exist"]):
        return []
    total = report["total"]
    if not report["budgets"]:
        return [(f"budgets: {report['note']}", "dim")]
    told = (
        f"budgets of {count(total['callers'], 'caller')}: {total['used_up']} used up, "
        f"{total['refused']} refused"
    )
    broken = total["open_breakers"]
    lines = [(f"{told}, {count(broken, 'open breaker')}" if broken else told, "bold")]
    tight = [row for row in report["budgets"] if not is_healthy(row)]
    for row in sorted(tight, key=lambda row: (not row["open"], -row["used_percent"]))[
        :_BUDGETS_SHOWN
    ]:
        used = (
            "open"
            if row["open"]
            else f"{'~' if row.get('estimated') else ''}{row['used_percent']:.0f} %"
        )
        shadow = " (shadow)" if row["mode"] == "shadow" else ""
        said = [
            f"{used:>6}  {_cut(write_caller(row), _CALLER_SHOWN)}",
            ", ".join(filter(None, [write_left(row), write_reset(row, now)])),
            f"{row['refused']:,} refused",
            f"{row['policy']}/{row['rule']}{shadow}",
        ]
        style = "red" if row["open"] or row["used_up"] else "yellow"
        lines.append((_cut(escape_controls("  ".join(said)), width), style))
    # The report begins with the tight ones, so budgets left out are like its last.
    left_out = total.get("budgets", 0) - len(report["budgets"])
    healthy = len(report["budgets"]) - len(tight)
    more = len(tight) - _BUDGETS_SHOWN
    healthy, more = (healthy + left_out, more) if healthy else (0, more + left_out)
    rest = [
        f"{more:,} more in /budgets" if more > 0 else "",
        f"{count(healthy, 'healthy budget')}" if healthy > 0 else "",
    ]
    return [*lines, *[(f"        {text}", "dim") for text in rest if text]]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def list_commands(report: Mapping[str, Any], more: str) -> list[str]:
    """The commands that stop or free each row, with `more` flags, below comments about the row."""
    lines = []
    for row in [*_list_burning(report), *report["conversations"]]:
        if "sessions" in row:
            whom = f"for {count(row['sessions'], 'session')} of {count(row['callers'], 'caller')}"
        else:
            whom = f" {write_caller(row)}"
        said = [f"{_write_what(row)} {whom}", *[write_order(order) for order in row["orders"]]]
        lines += ["", *[f"# {' '.join(text.splitlines())}" for text in said]]
        lines += [f"{command}{more}" for command in row["commands"].values()]
    for row in (report.get("budgets") or {"budgets": []})["budgets"]:
        if row["commands"]:
            about = f"budget {row['rule']} of {write_caller(row)}"
            lines += ["", f"# {' '.join(about.splitlines())}"]
            lines += [f"{command}{more}" for command in row["commands"].values()]
    return lines


def write_cost(row: Mapping[str, Any], cost: str, tokens: str) -> str:
    """Dollars if known, else tokens; empty for zero."""
    if row[cost] is None:
        return f"~{write_number(row[tokens])} tok" if row[tokens] else ""
    return write_money(row[cost]) if row[cost] else ""


def write_spent(row: Mapping[str, Any]) -> str:
    """The cost of requests that reached the model; `~` marks an estimate."""
    spent = write_cost(row, "cost_sent_on_usd", "input_tokens_sent_on")
    return f"~{spent}" if row.get("estimated_cost_usd") and spent.startswith("$") else spent


def _sum_up(report: Mapping[str, Any]) -> list[str]:
    total, known, replicas = (
        report["total"],
        report["known"],
        count(len(report["replicas"]), "replica"),
    )
    budgets = report.get("budgets") or {"budgets": []}
    failing = sum(row["active"] for row in report["incidents"])
    explosions, growing = (len(report.get(name, ())) for name in ("explosions", "growing"))
    also = "".join(
        [
            f", {what}"
            for what in list_burning(
                failing, explosions, growing, budgets["total"] if budgets["budgets"] else None
            )
        ]
    )
    if not total["conversations"] and not report["incidents"]:
        none = f"none of {count(known, 'loop')} matches" if known else "no loop in the last hour"
        return [none if known and not also else f"{none}{also}; {replicas}"]
    loops, callers = count(total["conversations"], "loop"), count(total["callers"], "caller")
    now = write_cost(total, "cost_per_minute_usd", "input_tokens_per_minute") or "nothing"
    spent = write_spent(total) or "nothing"
    spared = write_cost(total, "cost_not_sent_on_usd", "input_tokens_not_sent_on") or "nothing"
    forwarded, refused = total["requests_sent_on"], total["requests_not_sent_on"]
    return [
        f"{total['looping']} of {loops} active{also}, {callers}; {replicas}",
        (
            f"now {now}/min; spent {spent} on {count(forwarded, 'request')}; spared {spared}, "
            f"{refused} not forwarded"
        ),
    ]


def _list_burning(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    failing = [row for row in report["incidents"] if row["active"]]
    return [*failing, *report.get("explosions", ()), *report.get("growing", ())]


def _write_what(row: Mapping[str, Any]) -> str:
    if "sessions" in row:
        return f"{row['tool']} fails"
    if row.get("runaway") == "growing":
        return f"input {row['input_growth']:g}x its first"
    if "agents" in row:
        return f"{row['agents']['active']} agents, {row['agents']['refused_requests']} refused"
    return ", ".join(row["tools"]) or f"{row['method'] or ''} {row['path']}".strip()


def _find_alarm(row: Mapping[str, Any]) -> str:
    return "bold red" if "sessions" in row or "agents" in row else ""


def _find_now_style(row: Mapping[str, Any]) -> str:
    """The color of the newest action; orders are green."""
    if row["orders"]:
        return "green"
    shadow = row.get("shadow")
    return _STYLES.get(row["action"] if row["action"] != "allow" else shadow or "", "")


def _write_whom(row: Mapping[str, Any], _: float) -> str:
    if "sessions" in row:
        return f"{row['sessions']} in {count(row['callers'], 'caller')}"
    return write_caller(row)


def _write_orders(row: Mapping[str, Any], _: float) -> str:
    return ", ".join(
        f"{each['kind']} by {each.get('who', 'unknown')} until {each['ends'][11:16]}"
        for each in row["orders"]
    )


COLUMNS = (
    Column("what repeats", lambda row, _: _write_what(row), 25, grows=True, find_style=_find_alarm),
    Column(
        "per min",
        lambda row, _: write_cost(row, "cost_per_minute_usd", "input_tokens_per_minute"),
        10,
        right=True,
    ),
    Column("since", lambda row, now: write_age(now - read_time(row["first_seen"])), 6, right=True),
    Column("now", write_now, 16, find_style=_find_now_style),
    Column("caller", _write_whom, 19, grows=True),
    Column("spent", lambda row, _: write_spent(row), 10, 100, right=True),
    Column(
        "spared",
        lambda row, _: write_cost(row, "cost_not_sent_on_usd", "input_tokens_not_sent_on"),
        10,
        110,
        right=True,
    ),
    Column(
        "last", lambda row, now: write_age(now - read_time(row["last_seen"])), 6, 120, right=True
    ),
    Column("session", lambda row, _: row.get("session") or "", 16, 140),
    Column("cause", lambda row, _: (row.get("cause") or "").replace("_", " "), 16, 160),
    Column("policies", lambda row, _: ", ".join(row["policies"]), 30, 190),
    Column("orders", _write_orders, 60, 250),
)
"""The columns of a row, which is a conversation or a failing tool."""
