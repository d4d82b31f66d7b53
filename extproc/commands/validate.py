"""`loopguard validate`: what is wrong with policy files, all of it at once."""

from __future__ import annotations

import argparse
import sys

from extproc.commands import load_policies
from extproc.errors import BundleErrors
from extproc.logs import escape_controls

HELP = "check policy files and report every error at once"
EXAMPLES = """examples:
  loopguard validate policies/ && git push

exit code: 0 good (warnings and notes on stderr), 1 errors (on stderr, as file: /json/pointer: message);
with --strict, parts of a bundle that serve refuses without --allow-unenforced are errors too"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `loopguard validate`."""
    parser.add_argument("--strict", action="store_true", help="treat parts that serve would refuse as errors")
    parser.add_argument("path", nargs="+", metavar="PATH", help="policy file or directory")


def run(options: argparse.Namespace) -> int:
    """Report warnings and notes, and how much is good; returns the exit code.

    Raises:
        UsageError: a path is empty.
        BundleErrors: with everything that is wrong in the files.
    """
    policies = load_policies(options.path)
    if policies.unenforced and options.strict:
        raise BundleErrors(policies.list_refusals())
    for warning in policies.warnings:
        print(escape_controls(f"warning: {warning}"), file=sys.stderr)
    for part in policies.unenforced:
        print(escape_controls(f"warning: {part}; serve would refuse this"), file=sys.stderr)
    for note in policies.notes:
        print(escape_controls(f"note: {note}"), file=sys.stderr)
    count = sum(len(source.policies) for source in policies.sources)
    print(f"good: {_pluralize(count, 'policy', 'policies')} in {_pluralize(len(policies.sources), 'file', 'files')}")
    return 0


def _pluralize(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
