"""Rows of figures, as tables."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """A figure; `value` is None if there is none, `at_most` is the project's requirement."""

    name: str
    value: float | None
    unit: str = ""
    at_most: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the requirement holds; None without a requirement or a figure."""
        return None if self.at_most is None or self.value is None else self.value <= self.at_most


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    seconds: float
    rows: Sequence[Row]


def table(section: Section) -> str:
    lines = [_cells(row) for row in section.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    shown = [f"{section.title} ({section.seconds:.0f} s)"]
    for name, value, limit, verdict, note in lines:
        text = (
            f"  {name:{widths[0]}}  {value:>{widths[1]}}  {limit:{widths[2]}}  "
            f"{verdict:{widths[3]}}  {note}"
        )
        shown.append(text.rstrip())
    return "\n".join(shown)


def _cells(row: Row) -> tuple[str, str, str, str, str]:
    unit = f" {row.unit}" if row.unit else ""
    limit = "" if row.at_most is None else f"<= {_figure(row.at_most)}{unit}"
    if row.value is None:
        return row.name, "-", limit, "SKIPPED", row.note
    verdict = {True: "met", False: "MISSED", None: ""}[row.met]
    return row.name, f"{_figure(row.value)}{unit}", limit, verdict, row.note


def _figure(value: float) -> str:
    """Three digits are all that a noisy machine can vouch for."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def verdict(sections: Mapping[str, Section]) -> str:
    """A line for each requirement that is missed or has no figure, and the number of those met."""
    rows = [
        (name, row)
        for name, section in sections.items()
        for row in section.rows
        if row.at_most is not None
    ]
    missed = [
        f"MISSED {name}: {row.name} is {' '.join(_cells(row)[1:3])}"
        for name, row in rows
        if row.met is False
    ]
    skipped = [f"SKIPPED {name}: {row.name}: {row.note}" for name, row in rows if row.value is None]
    met = sum(row.met is True for _, row in rows)
    return "\n".join([*missed, *skipped, f"{met} of {len(rows)} requirements met"])


def progress(text: str, done: int, total: int) -> None:
    print(f"{done}/{total} {text}", file=sys.stderr, flush=True)
