"""`loopguard block`: refuses a caller, a session, a loop or a tool for a while."""

from __future__ import annotations

from functools import partial

from extproc.cli.commands.ordering import add_order_flags, give

HELP = "refuse a caller, a session, a loop or a tool for a while"
EXAMPLES = """examples:
  loopguard block --caller 9f2c51a07be3d418 --for 30m --reason 'runaway, incident 7'
  loopguard block --caller x-user-id=ann --tool deploy --for 1h"""

add_flags = partial(add_order_flags, lasts="30m")
run = partial(give, "block")
