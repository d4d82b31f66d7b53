"""`loopguard init`: prints policies to start from."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill, indent
from typing import Any

from extproc.cli.commands.scan import check_scanned, scan_paths
from extproc.errors import UsageError
from extproc.logs import write_json
from extproc.policy.presets import DEFAULT_PRESET, PRESETS, find_preset

_SESSIONS = "sessions"


def read_preset(name: str) -> str:
    return Path(find_preset(name)).read_text(encoding="utf-8")


_PRESET_LINES = "\n".join(
    [
        fill(
            json.loads(read_preset(name))["description"],
            100,
            initial_indent=f"  {name:<13}",
            subsequent_indent=" " * 15,
        )
        for name in PRESETS
    ]
)

HELP = "print policies to start from"
EXAMPLES = f"""presets:
{_PRESET_LINES}

examples:
  loopguard init > policies/agents.json
  loopguard init --from-scan > policies/agents.json
  loopguard init --preset canary > policies/canary.json && loopguard validate policies/

Without --preset, it prints `agents`, and the limits of `sessions` in shadow mode: they only report
until you have checked them. `loopguard canary status` says whether they are safe.
With --from-scan, these limits are what at most 1% of your own sessions without a loop exceeded."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", choices=PRESETS, help="only this preset, as it is")
    parser.add_argument(
        "--from-scan",
        nargs="*",
        metavar="PATH",
        help=(
            "take the session limits from transcripts, in files or folders (default: where agents "
            "write, as `scan`)"
        ),
    )


def run(options: argparse.Namespace) -> int:
    if options.preset is None:
        limits = {} if options.from_scan is None else _scan_limits(options.from_scan)
        sessions = write_json(_make_sessions(limits), indent=2)
        both = f"{read_preset(DEFAULT_PRESET).strip()},\n{sessions}"
        print(f"[\n{indent(both, '  ')}\n]")
        return 0
    if options.from_scan is not None:
        raise UsageError("--from-scan does not go with --preset")
    print(read_preset(options.preset), end="")
    return 0


def _make_sessions(limits: Mapping[str, Any]) -> dict[str, Any]:
    """The limits of the preset in shadow mode, without a tool that no client may have.

    `limits` replaces those that it names.
    """
    preset = json.loads(read_preset(_SESSIONS))
    spec = preset["spec"]
    del spec["loop_detection"], spec["session_limits"]["max_calls_per_tool"]
    spec["session_limits"] |= limits
    spec["mode"] = "shadow"
    preset["description"] = (
        "In shadow mode: reports the sessions that these limits would end, and never acts. To "
        'enforce them, set "mode" to "enforce".'
    )
    return {**preset, "spec": spec}


def _scan_limits(paths: list[str]) -> dict[str, Any]:
    document = scan_paths(paths)
    check_scanned(document, paths)
    found = document["limits"]
    limits: dict[str, Any] = found["session_limits"]
    said = f"limits from {found['without_loop']:,} of {found['sessions']:,} sessions"
    print(
        f"{said}, those without a loop; together they would have stopped {found['stopped']:,}",
        file=sys.stderr,
    )
    return limits
