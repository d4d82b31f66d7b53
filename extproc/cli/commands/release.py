"""`loopguard release`: resets the counts of a caller, a session, a loop or a tool."""

from __future__ import annotations

from functools import partial

from extproc.cli.commands.ordering import add_order_flags, give

HELP = "reset the counts of a caller, a session, a loop or a tool"
EXAMPLES = """examples:
  loopguard release --caller x-user-id=ann
  loopguard release --fingerprint 5d2a1c0e --policy chat --reason 'false alarm'

Loops that a request itself shows (tool_calls, turns) cannot be reset:
use `loopguard allow` for the caller instead."""

add_flags = add_order_flags
run = partial(give, "release")
