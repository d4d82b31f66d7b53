"""`loopguard allow`: let a caller, a session, a loop or a tool do what it does, for a while."""

from __future__ import annotations

import argparse

from extproc.commands.ordering import add_duration_flag, add_order_flags, give

HELP = "let a caller, a session, a loop or a tool do what it does, for a while"
EXAMPLES = """examples:
  loopguard allow --caller x-user-id=ann --for 2h --reason 'waits for a build'
  loopguard allow --tool read_log --policy agents --for 1d

Its requests are counted all the same: when it ends, a loop that goes on is acted on."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `loopguard allow`."""
    add_order_flags(parser)
    add_duration_flag(parser)


def run(options: argparse.Namespace) -> int:
    """Have the servers do it; returns the exit code.

    Raises:
        UsageError: a flag cannot be used.
        LoopguardError: a server does not answer, or refuses.
    """
    return give("allow", options)
