"""The subcommands of `loopguard`, one file each.

Each has `HELP`, a line for `loopguard --help`; `EXAMPLES`, the end of its own --help; `add_flags`,
which declares its flags; and `run`, which returns the exit code. Slow imports that only `run` needs
are in `run`. It raises UsageError for an invalid flag, BundleErrors with all errors in the
policies, and another LoopguardError if a server, a log or a file fails. `main` prints these.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from extproc.errors import UsageError
from extproc.logs import escape_controls

if TYPE_CHECKING:
    from extproc.policy.loader import PolicySet

COMMANDS = (
    "serve",
    "init",
    "validate",
    "explain",
    "scan",
    "replay",
    "canary",
    "schema",
    "envoy-config",
    "check-envoy",
    "dashboards",
    "doctor",
    "top",
    "sessions",
    "release",
    "allow",
    "block",
    "kill",
    "grant",
    "overrides",
    "healthcheck",
    "completion",
)
"""In the order of `loopguard --help`.

File names have underscores for dashes, as in `envoy_config.py`.
"""


def add_policy_flag(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add --policy; unless `required`, the preset is the default."""
    text = (
        f"policy file or directory; repeatable{'' if required else ' (default: the preset agents)'}"
    )
    parser.add_argument("--policy", action="append", required=required, metavar="PATH", help=text)


def add_namespace_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--namespace-of",
        action="append",
        default=[],
        metavar="PATH=host:NAME,path:/PREFIX,route:NAME,id:PREFIX",
        help="as serve --namespace-of: policies below PATH may only select these; repeatable",
    )


def add_key_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hash-key-file",
        default="",
        metavar="PATH",
        help=(
            "as serve --hash-key-file: recognise the notes of these servers, and hash API keys "
            "as they do"
        ),
    )


def check_paths(paths: Sequence[str]) -> Sequence[str]:
    """Return the policy paths of a command line; raises UsageError if one is empty."""
    if not all(paths):  # such as an unset shell variable
        raise UsageError("a policy path is empty; give a policy file or a directory of them")
    return paths


def write_number(number: float) -> str:
    """A number with three digits and a unit, such as `1.23M`."""
    for unit in ("", "k", "M", "G"):
        if number < 999.5:  # noqa: PLR2004  # rounds to three digits
            return f"{number:.3g}{unit}" if unit else f"{number:.0f}"
        number /= 1_000
    return f"{number:.0f}T"


def read_headers(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Parse the values of -H, `NAME: VALUE`; names become lower-case. Raises UsageError."""
    found = []
    for text in texts:
        name, colon, value = text.partition(":")
        if not (colon and name.strip()) or any(char < " " for char in text):
            raise UsageError(f"-H must be 'NAME: VALUE', not {text!r}")
        found.append((name.strip().lower(), value.strip()))
    return found


def write_caller(row: Mapping[str, Any]) -> str:
    """The caller in a row of the admin port: its alias, descriptors or hash, and its labels.

    A hash without any of them follows the agent's self-reported id.
    """
    told = ", ".join(f"{name}={value}" for name, value in (row["descriptors"] or {}).items())
    labels = ", ".join(f"{name}: {value}" for name, value in (row["labels"] or {}).items())
    name = str(row["alias"] or told)
    if not (name or labels) and row.get("agent"):
        labels = f"agent {row['agent']}"
    first, *more = [text for text in (name, labels, "" if name else str(row["caller"])) if text]
    return f"{first} ({more[0]})" if more else first


def load_policies(paths: Sequence[str]) -> PolicySet:
    """Load the policies of a command line; raises UsageError or BundleErrors."""
    from extproc.policy.files import find_unread  # noqa: PLC0415  # as below
    from extproc.policy.loader import load  # noqa: PLC0415  # takes 0.2 s

    print_warnings(find_unread(check_paths(paths)))
    return load(paths, datetime.now(UTC))


def print_warnings(warnings: Iterable[object]) -> None:
    for warning in warnings:
        print(escape_controls(f"warning: {warning}"), file=sys.stderr)
