"""`loopguard init`: prints a preset to start from."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from textwrap import fill

from extproc.policy.presets import DEFAULT_PRESET, PRESETS, find_preset


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

HELP = "print a policy to start from"
EXAMPLES = f"""presets:
{_PRESET_LINES}

examples:
  loopguard init > policies/agents.json
  loopguard init --preset canary > policies/canary.json && loopguard validate policies/

Replace the paths and limit keys with your own."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preset", choices=PRESETS, default=DEFAULT_PRESET, help=f"default {DEFAULT_PRESET}"
    )


def run(options: argparse.Namespace) -> int:
    print(read_preset(options.preset), end="")
    return 0
