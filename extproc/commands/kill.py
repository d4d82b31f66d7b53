"""`loopguard kill`: refuse a session, or all of a caller's, until it is released."""

from __future__ import annotations

import argparse

from extproc.commands.ordering import add_duration_flag, add_session_flags, give

HELP = "refuse a session that has limits, or all of a caller's, until it is released"
EXAMPLES = """examples:
  loopguard kill --session header:x-session-id=abc --caller x-team=red --reason 'runaway, incident 7'
  loopguard kill --session 9f2c51a07be3d418 --for 7d
  loopguard release --session 9f2c51a07be3d418"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `loopguard kill`."""
    add_session_flags(parser)
    add_duration_flag(parser, "1d")


def run(options: argparse.Namespace) -> int:
    """Have the servers do it; returns the exit code.

    Raises:
        UsageError: a flag cannot be used.
        LoopguardError: a server does not answer, or refuses.
    """
    return give("kill", options)
