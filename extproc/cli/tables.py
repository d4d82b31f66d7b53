"""Tables for the terminal; a pipe gets them in full width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from extproc.logs import escape_controls

_WIDE = 200
"""Maximum width if the output is not a terminal."""


def make_console(*, stderr: bool = False) -> Console:
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    return (
        console
        if console.is_terminal
        else Console(stderr=stderr, highlight=False, markup=False, emoji=False, width=_WIDE)
    )


def print_rows(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]
) -> None:
    """Print a table, unless it has no rows.

    A `#` before a column's name aligns it to the right; cells may contain any text.
    """
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(
            column.removeprefix("#"),
            justify="right" if column.startswith("#") else "left",
            overflow="fold",
        )
    for row in rows:
        table.add_row(
            *[
                Text(escape_controls(f"{cell:,}" if isinstance(cell, int) else str(cell)))
                for cell in row
            ]
        )
    if table.row_count:
        console.print()
        if title:
            console.print(title, style="bold")
        console.print(table)
