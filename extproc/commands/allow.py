"""`loopguard allow`: let a caller, a session, a loop or a tool do what it does, for a while."""

from __future__ import annotations

from functools import partial

from extproc.commands.ordering import add_order_flags, give

HELP = "let a caller, a session, a loop or a tool do what it does, for a while"
EXAMPLES = """examples:
  loopguard allow --caller x-user-id=ann --for 2h --reason 'waits for a build'
  loopguard allow --tool read_log --policy agents --for 1d

Its requests are counted all the same: when it ends, a loop that goes on is acted on."""

add_flags = partial(add_order_flags, lasts="30m")
run = partial(give, "allow")
