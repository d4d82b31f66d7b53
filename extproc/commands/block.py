"""`loopguard block`: refuse a caller, a session, a loop or a tool, for a while."""

from __future__ import annotations

import argparse

from extproc.commands.ordering import add_duration_flag, add_order_flags, give

HELP = "refuse a caller, a session, a loop or a tool, for a while"
EXAMPLES = """examples:
  loopguard block --caller 9f2c51a07be3d418 --for 30m --reason 'runaway, incident 7'
  loopguard block --caller x-user-id=ann --tool deploy --for 1h"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `loopguard block`."""
    add_order_flags(parser)
    add_duration_flag(parser)


def run(options: argparse.Namespace) -> int:
    """Have the servers do it; returns the exit code.

    Raises:
        UsageError: a flag cannot be used.
        LoopguardError: a server does not answer, or refuses.
    """
    return give("block", options)
