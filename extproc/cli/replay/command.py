"""Flags, a progress bar and messages of commands that read logs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from extproc.cli.commands import add_key_flag, add_policy_flag, print_warnings
from extproc.cli.replay.logs import HARMLESS, PROBLEMS, LogEntry, Logs
from extproc.engine.engine import Engine
from extproc.errors import LoopguardError, UsageError
from extproc.logs import escape_controls
from extproc.operator.admin.row_states import count
from extproc.options import make_type, parse_integer, parse_seconds
from extproc.policy.loader import PolicySet

_STEP = 1_000
"""Requests between updates of the progress bar."""

COUNT = make_type(parse_integer(1))


def add_log_flags(parser: argparse.ArgumentParser) -> None:
    add_policy_flag(parser)
    parser.add_argument(
        "log",
        nargs="+",
        metavar="LOG",
        help="access log or file of records, plain, gzip or zstd; - for standard input",
    )
    parser.add_argument(
        "--reorder-seconds",
        type=make_type(parse_seconds(0, 86_400)),
        default=5.0,
        metavar="SECONDS",
        help="how late a line may be (default 5)",
    )
    parser.add_argument(
        "--max-entries",
        type=COUNT,
        default=1_000_000,
        metavar="N",
        help="maximum fingerprints in memory (default 1000000)",
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 if a line cannot be used"
    )
    add_key_flag(parser)


def compile_policies(policies: PolicySet, *, shadow: bool = False) -> Engine:
    """Make an engine and print warnings to stderr; raises UsageError if no policy acts."""
    print_warnings([*policies.warnings, *policies.unenforced])
    engine = Engine(policies, datetime.now(UTC), shadow=shadow)
    if not engine.plans:
        raise UsageError("no policy has loop_detection enabled")
    return engine


@contextmanager
def open_logs(options: argparse.Namespace) -> Iterator[tuple[Logs, Iterator[LogEntry]]]:
    """Open the logs; yields them and their requests in order of time.

    Raises LoopguardError if there are none.
    """
    with ExitStack() as stack:
        logs = Logs(options.log, options.reorder_seconds, stack)
        yield logs, _watch(logs, stack.enter_context(show_bar(logs.size)))
    if logs.first is None:
        raise LoopguardError(f"no request can be replayed: {_describe_nothing(logs)}")


def _watch(logs: Logs, advance: Callable[..., object]) -> Iterator[LogEntry]:
    """The requests in the logs; moves the progress bar."""
    told = 0
    for number, entry in enumerate(logs.read()):
        if not number % _STEP:
            read = logs.tell() if logs.size is not None else 0
            advance(read - told, f"{logs.lines:,} lines")
            told = read
        yield entry


@contextmanager
def show_bar(size: int | None) -> Iterator[Callable[..., object]]:
    """Show a progress bar if stderr is a terminal; yields the function that advances it."""
    from rich.progress import (  # noqa: PLC0415  # 0.1 s
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    from extproc.cli.tables import make_console  # noqa: PLC0415  # same

    console = make_console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("reading", total=size)

        def advance(count: int, told: str = "reading") -> None:
            bar.update(task, advance=count, description=told)

        yield advance


def write_file(path: str, text: str) -> None:
    """Write a file; raises LoopguardError."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise LoopguardError(f"cannot write {Path(path)}: {error.strerror}") from error


def _describe_nothing(logs: Logs) -> str:
    kinds = logs.problems.by_kind
    if not kinds:
        return "the log is empty"
    first = next(iter(kinds.values()))
    told = [f"{count(problem.count, 'line')}: {PROBLEMS[kind]}" for kind, problem in kinds.items()]
    return escape_controls(f"{'; '.join(told)} (first: {first.places[0]})")


def print_lines(logs: Logs, evictions: int) -> None:
    """Print problems with lines, and whether counts may be too low, to stderr."""
    for kind, problem in logs.problems.by_kind.items():
        severity = "note" if kind in HARMLESS else "warning"
        example = "".join([f": {name}" for name in problem.names][:1])
        places = ", ".join(map(str, problem.places))
        told = f"{severity}: {count(problem.count, 'line')}: {PROBLEMS[kind]}{example} ({places})"
        print(escape_controls(told), file=sys.stderr)
    if evictions:
        text = (
            f"warning: {evictions:,} live fingerprints were dropped for lack of room, so "
            "counts may be too low"
        )
        print(escape_controls(f"{text}; raise --max-entries"), file=sys.stderr)
