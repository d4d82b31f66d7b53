"""`loopguard validate`: reports every error in policy files."""

from __future__ import annotations

import argparse
import os
import sys
from datetime import UTC, datetime

from extproc.cli.commands import add_namespace_flag, check_paths, print_warnings
from extproc.logs import escape_controls
from extproc.operator.admin.row_states import count
from extproc.policy.files import find_unread, read_all
from extproc.policy.namespaces import read_namespaces
from extproc.policy.overlaps import find_overlaps, find_uncompared
from extproc.settings import ENV_PREFIX, read_settings

HELP = "check policy files and report every error at once"
EXAMPLES = """examples:
  loopguard validate policies/ && git push
  loopguard validate --namespace-of policies/shop=host:shop.example.com,id:shop- policies/

exit code: 0 serve accepts these files (warnings and notes on stderr), 1 it does not:
every error is on stderr as file: /json/pointer: message"""

_VARIABLE = f"{ENV_PREFIX}ALLOW_UNENFORCED"


def add_flags(parser: argparse.ArgumentParser) -> None:
    chosen = parser.add_mutually_exclusive_group()
    text = (
        "only warn about parts of a bundle that are not enforced, as serve does with this "
        f"flag [{_VARIABLE}]"
    )
    chosen.add_argument("--allow-unenforced", action="store_true", help=text)
    text = (
        "treat them as errors, which is the default, and files in a directory that are not "
        "read; also report policies of "
    )
    text += "different files that apply to the same requests"
    chosen.add_argument("--strict", action="store_true", help=text)
    add_namespace_flag(parser)
    parser.add_argument("path", nargs="+", metavar="PATH", help="policy file or directory")


def run(options: argparse.Namespace) -> int:
    # Includes the engine, which takes long to import
    from extproc.reload import build  # noqa: PLC0415

    namespaces = read_namespaces(options.namespace_of, check_paths(options.path))
    files, unreadable = read_all(options.path)
    unread = find_unread(options.path)
    if options.strict:
        unreadable += unread
    else:
        print_warnings(unread)
    allows = options.allow_unenforced
    if not (options.strict or allows):
        environ = {name: value for name, value in os.environ.items() if name == _VARIABLE}
        allows = read_settings({}, environ).allow_unenforced
    policies, engine = build(
        files,
        datetime.now(UTC),
        allow_unenforced=allows,
        unreadable=unreadable,
        namespaces=namespaces,
    )
    overlaps = find_overlaps(policies.sources) if options.strict else []
    print_warnings([*policies.warnings, *policies.unenforced, *overlaps])
    uncompared = find_uncompared(
        policies.sources, {pairing.candidate for pairing in engine.pairings}
    )
    for note in [*policies.notes, *uncompared]:
        print(escape_controls(f"note: {note}"), file=sys.stderr)
    number = sum(len(source.policies) for source in policies.sources)
    print(
        f"good: {number} {'policy' if number == 1 else 'policies'} in "
        f"{count(len(policies.sources), 'file')}"
    )
    return 0
