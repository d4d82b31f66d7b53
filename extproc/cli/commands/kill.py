"""`loopguard kill`: refuses a session with its agents, or all limited sessions of a caller."""

from __future__ import annotations

from functools import partial

from extproc.cli.commands.ordering import add_order_flags, give

HELP = (
    "refuse a session with its agents, or all sessions of a caller that have limits, until released"
)
EXAMPLES = """examples:
  loopguard kill --session header:x-session-id=abc --caller x-team=red --reason 'incident 7'
  loopguard kill --session 9f2c51a07be3d418 --for 7d
  loopguard release --session 9f2c51a07be3d418"""

add_flags = partial(add_order_flags, lasts="1d", sessions=True)
run = partial(give, "kill")
