"""`loopguard release`: forget what was counted about a caller, a session, a loop or a tool: it begins anew."""

from __future__ import annotations

from functools import partial

from extproc.commands.ordering import add_order_flags, give

HELP = "forget what was counted about a caller, a session, a loop or a tool: it begins anew"
EXAMPLES = """examples:
  loopguard release --caller x-user-id=ann
  loopguard release --fingerprint 5d2a1c0e --policy chat --reason 'false alarm'

What a conversation shows itself (tool_calls, turns) cannot be forgotten: allow its caller for a while instead."""

add_flags = add_order_flags
run = partial(give, "release")
