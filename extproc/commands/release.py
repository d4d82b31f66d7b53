"""`loopguard release`: forget what was counted about a caller, a session, a loop or a tool: it begins anew."""

from __future__ import annotations

import argparse

from extproc.commands.ordering import add_order_flags, give

HELP = "forget what was counted about a caller, a session, a loop or a tool: it begins anew"
EXAMPLES = """examples:
  loopguard release --caller x-user-id=ann
  loopguard release --fingerprint 5d2a1c0e --policy chat --reason 'false alarm'

What a conversation shows itself (tool_calls, turns) cannot be forgotten: allow its caller for a while instead."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `loopguard release`."""
    add_order_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Have the servers do it; returns the exit code.

    Raises:
        UsageError: a flag cannot be used.
        LoopguardError: a server does not answer, or refuses.
    """
    return give("release", options)
