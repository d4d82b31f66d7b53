"""`loopguard grant`: lets a session continue beyond its limits."""

from __future__ import annotations

import argparse
import secrets

from extproc.cli.commands.ordering import add_order_flags, give
from extproc.errors import UsageError

HELP = "give a session, or each session of a caller, more steps, tool calls, dollars or agents, or approve calls of a tool"
EXAMPLES = """examples:
  loopguard grant --session header:x-session-id=abc --caller x-team=red --steps 10 --cost 5
  loopguard grant --session 9f2c51a07be3d418 --tool-calls 20 --for 2h --reason 'nearly done'
  loopguard grant --session 9f2c51a07be3d418 --tool refund=1 --reason 'ticket 4711'
  loopguard grant --session 9f2c51a07be3d418 --agents 5 --depth 1

Grants add up."""

_AMOUNTS = ("steps", "tool_calls", "cost", "agents", "depth", "concurrent_agents", "spawns_per_minute")


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_order_flags(parser, lasts="1d", sessions=True)
    parser.add_argument("--steps", type=int, metavar="N", help="additional requests")
    parser.add_argument("--tool-calls", type=int, metavar="N", help="additional tool calls")
    parser.add_argument("--cost", type=float, metavar="USD", help="additional dollars")
    parser.add_argument("--agents", type=int, metavar="N", help="additional agents that may start")
    parser.add_argument("--depth", type=int, metavar="N", help="additional levels of agents")
    parser.add_argument("--concurrent-agents", type=int, metavar="N", help="additional agents that may be active at a time")
    parser.add_argument("--spawns-per-minute", type=int, metavar="N", help="additional agents that may start within a minute")
    text = "additional calls of a tool that has a limit of its own, repeatable"
    parser.add_argument("--tool", action="append", default=[], metavar="NAME=N", dest="tools", type=_read_tool, help=text)


def run(options: argparse.Namespace) -> int:
    amounts = {name: getattr(options, name) for name in _AMOUNTS}
    if all(amount is None for amount in amounts.values()) and not options.tools:
        flags = ", ".join(f"--{name}".replace("_", "-") for name in _AMOUNTS)
        raise UsageError(f"give at least one of {flags} and --tool")
    key = secrets.token_hex(8)  # servers that share a store grant it only once
    return give("grant", options, **amounts, tools=dict(options.tools) or None, key=key)


def _read_tool(text: str) -> tuple[str, int]:
    """A tool and a number of calls; a name may contain `=`."""
    name, equals, calls = text.rpartition("=")
    if not (name and equals and calls.isascii() and calls.isdigit()):
        raise argparse.ArgumentTypeError(f"must be NAME=N, such as refund=1, not {text!r}")
    return name, int(calls)
