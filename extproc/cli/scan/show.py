"""Prints the report: a summary, the worst loop, tables by group, then the next worst loops."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.text import Text

from extproc.cli.commands import write_number
from extproc.cli.scan.limits import PERCENTS
from extproc.cli.scan.report import GROUPS
from extproc.cli.tables import make_console, print_rows
from extproc.logs import escape_controls, write_json
from extproc.operator.admin.row_states import count, write_age, write_money

_ROWS = 10
_WIDTH = 30
_TITLES = {
    "day": "By day (UTC): calls that went on after a note, and after a stop",
    "project": "By project",
    "agent": "By agent",
    "tool": "By tool",
}
_STEPS = (
    ("noted", "Loopguard adds a note for the model; the loop continues for {after_note}"),
    ("landed", "Loopguard asks for a final answer without tools"),
    ("stopped", "Loopguard refuses, which saves {after_stop}"),
    ("ends", "the loop ends"),
)
"""What Loopguard would have done in a loop, by the report's key."""

_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def print_limits(limits: Mapping[str, Any]) -> None:
    columns = ("of", *(f"{percent}%" for percent in PERCENTS))
    rows = []
    for name, row in limits["took"].items():
        write = write_money if name == "dollars" else write_number
        rows.append(
            (name.replace("_", " "), row["of"], *[write(row[column]) for column in columns[1:]])
        )
    title = "What this share of the sessions took at most, with their sub-agents"
    print_rows(make_console(), title, ("", *[f"#{column}" for column in columns]), rows)
    if limits["session_limits"]:
        told = f"{limits['stopped']:,} of {count(limits['without_loop'], 'session')} without a loop"
        print(f"\nThese limits would have stopped {told}; each alone, at most 1%:\n")
        print(write_json({"session_limits": limits["session_limits"]}, indent=2))


def print_scan(document: Mapping[str, Any]) -> None:
    console = make_console()
    for line in summarize(document):
        console.print(Text(escape_controls(line)), soft_wrap=True)
    if not document["loops"]:
        return
    worst, *others = [
        describe_loop(loop, number) for number, loop in enumerate(document["worst"], 1)
    ]
    _print_loops("The worst loop", [worst])
    for group in GROUPS:
        rows = list_rows(document, group, _ROWS)
        if len(rows) > 1 or group in {"agent", "tool"}:
            _print_group(group, rows)
    if others:
        _print_loops("The next worst loops", others)
    print("\n--show prints what is repeated, and --html FILE writes a page.")


def list_rows(document: Mapping[str, Any], group: str, most: int) -> list[Mapping[str, Any]]:
    """The last days, or the other groups that looped most."""
    rows: list[Mapping[str, Any]] = document["by"][group]
    return rows[-most:] if group == "day" else [row for row in rows if row["looped"]][:most]


def summarize(document: Mapping[str, Any]) -> list[str]:
    calls, size = document["spent"]["calls"], write_size(document["bytes"])
    told = count(document["conversations"], "conversation")
    lines = [
        f"{document['looped']:,} of {told} looped."
        if document["conversations"]
        else "No conversation was understood."
    ]
    for kind, noun, what in (
        ("unread", "call", "cannot be judged"),
        ("unknown", "value", "not understood"),
    ):
        unread = document["problems"].get(kind)
        if unread is not None:
            were = "" if kind == "unread" else "was " if unread["count"] == 1 else "were "
            lines.append(
                f"{count(unread['count'], noun)} {were}{what}: {', '.join(unread['names'])}."
            )
    if document["loops"]:
        whole = document["spent"]["tokens"]
        parts = [
            (write_spent(document[after]), document[after]["tokens"])
            for after in ("after_stop", "after_note")
        ]
        saved, noted = [
            f"{told} ({part / whole:.0%} of all tokens)" if part and whole else told
            for told, part in parts
        ]
        note = "Loopguard's note at the third identical turn"
        if document["after_stop"]["calls"]:
            lines.append(
                f"Loopguard would have saved {saved}: it refuses from the seventh identical turn "
                "on."
            )
            note = "its note at the third"
        lines.append(f"If the agents had followed {note}, it would have saved {noted}.")
    if document["only_noted"]:
        noted = count(document["only_noted"], "conversation")
        lines.append(
            f"In {noted}, short or slightly changing results without an error were repeated: "
            "these would get a note, and no stop."
        )
    read = f"Read {size} in {count(document['files'], 'file')}: {count(calls, 'model call')}"
    formats = ", ".join(f"{name} {number:,}" for name, number in document["formats"].items())
    span = f", {document['first'][:10]} to {document['last'][:10]}" if document["first"] else ""
    lines.append(f"{read}{f' ({formats})' if formats else ''}{span}.")
    if document["copies"]:
        lines.append(
            f"{count(document['copies'], 'call')} in continued or forked sessions are copies, and "
            "count once."
        )
    if document["estimated"]:
        lines.append("Some tokens are estimated from bytes, because a log does not have them.")
    unpriced = document["spent"]["unpriced_tokens"]
    if unpriced:
        lines.append(f"No price is known for {write_number(unpriced)} tokens.")
    return lines


def describe_loop(loop: Mapping[str, Any], number: int) -> list[str]:
    tools = ", ".join(loop["tools"]) or "no tool"
    began, ended = [
        datetime.fromisoformat(loop[name]) if loop[name] else None for name in ("began", "ended")
    ]
    span = f" in {write_age((ended - began).total_seconds())}" if began and ended else ""
    lines = [
        (
            f"{number:>2}. {tools}: {loop['words']}, {loop['turns']} "
            f"turns{span}{'' if loop['loop'] else ' (a note at most)'}"
        ),
        (
            f"    {loop['agent']} in {write_path(loop['project'])}, "
            f"{loop['kind']} {loop['session']}"
        ).rstrip(),
    ]
    for turn in loop["repeated"]:
        if turn["text"]:
            lines.append(f"    > {turn['text']}")
        elif turn["action_bytes"] or turn["result_bytes"]:
            sizes = (
                f"{turn['action_bytes']:,} bytes, result {turn['result']} of "
                f"{turn['result_bytes']:,} bytes"
            )
            lines.append(f"    > action {turn['action']} of {sizes}")
    return [*lines, *[f"    {line}" for line in list_steps(loop)]]


def list_steps(loop: Mapping[str, Any]) -> list[str]:
    """The steps of a loop: where it begins, what Loopguard would have done, and where it ends."""
    began = f", {loop['began'].replace('T', ' ').removesuffix('Z')} UTC" if loop["began"] else ""
    spent = {after: write_spent(loop[after]) for after in ("after_note", "after_stop")}
    steps = [f"call {loop[key]:,}: {words.format(**spent)}" for key, words in _STEPS if loop[key]]
    return [
        (
            f"call {loop['begins']:,} of {loop['calls']:,}{began}: the loop begins, "
            f"{write_path(loop['place'])}"
        ),
        *steps,
    ]


def list_problems(problems: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The problems as warnings and notes."""
    lines = []
    for found in problems.values():
        severity = "note" if found["harmless"] else "warning"
        names = ", ".join(
            f"{name} ({number:,})" for name, number in list(found["names"].items())[:_ROWS]
        )
        told = (
            f"{severity}: {count(found['count'], 'item')}: "
            f"{found['what']}{f': {names}' if names else ''}"
        )
        lines.append(f"{told} ({', '.join(found['first'])})")
    return lines


def write_spent(spent: Mapping[str, Any]) -> str:
    dollars = "" if not spent["dollars"] else f", {write_money(spent['dollars'])}"
    return f"{count(spent['calls'], 'call')}, {write_number(spent['tokens'])} tokens{dollars}"


def write_path(path: str) -> str:
    home = str(Path.home())
    return f"~{path[len(home) :]}" if home != os.sep and path.startswith(home + os.sep) else path


def write_size(size: int) -> str:
    return next(
        (f"{size / unit:.1f} {letter.upper()}B" for unit, letter in _UNITS if size >= unit),
        f"{size} bytes",
    )


def _print_loops(title: str, loops: Sequence[Sequence[str]]) -> None:
    print()
    make_console().print(Text(title, style="bold"))
    for lines in loops:
        print()
        for line in lines:
            print(escape_controls(line))


def _print_group(group: str, rows: Sequence[Mapping[str, Any]]) -> None:
    head = "#loops" if group == "tool" else "#looped"
    table: list[list[object]] = []
    for row in rows:
        name = write_path(row["name"])
        name = name if len(name) <= _WIDTH else f"…{name[1 - _WIDTH :]}"
        looped = (
            row["loops"] if group == "tool" else f"{row['looped']:,} of {row['conversations']:,}"
        )
        cells = [name, looped]
        for spent in (row["after_note"], row["after_stop"]):
            cost = write_money(spent["dollars"]) or f"{write_number(spent['tokens'])} tokens"
            cells += [spent["calls"], cost if spent["tokens"] else ""]
        table.append(cells)
    print_rows(
        make_console(),
        _TITLES[group],
        (group, head, "#after note", "#cost", "#after stop", "#cost"),
        table,
    )
