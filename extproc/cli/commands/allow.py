"""`loopguard allow`: exempts a caller, a session, a loop or a tool for a while."""

from __future__ import annotations

from functools import partial

from extproc.cli.commands.ordering import add_order_flags, give

HELP = "exempt a caller, a session, a loop or a tool for a while"
EXAMPLES = """examples:
  loopguard allow --caller x-user-id=ann --for 2h --reason 'waits for a build'
  loopguard allow --tool read_log --policy agents --for 1d

Requests are still counted: a loop that continues is acted on when the exemption ends."""

add_flags = partial(add_order_flags, lasts="30m")
run = partial(give, "allow")
