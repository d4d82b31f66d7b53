"""`loopguard schema`: prints the JSON Schema of policy files."""

from __future__ import annotations

import argparse
import json

from extproc.policy.bundle import make_schema

HELP = "print the JSON Schema of policy files, for editors"
EXAMPLES = """examples:
  loopguard schema > loopguard.schema.json"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add no flags."""


def run(_: argparse.Namespace) -> int:
    print(json.dumps(make_schema(), indent=2))
    return 0
