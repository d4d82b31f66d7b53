"""`loopguard grant`: raises a session's limits, or gives a caller more of a budget."""

from __future__ import annotations

import argparse
import secrets

from extproc.cli.commands.ordering import add_order_flags, give
from extproc.errors import UsageError

HELP = (
    "give a session more steps, tool calls, dollars or agents, approve calls of a tool, or "
    "give a caller more of a budget"
)
EXAMPLES = """examples:
  loopguard grant --session header:x-session-id=abc --caller x-team=red --steps 10 --cost 5
  loopguard grant --session 9f2c51a07be3d418 --tool-calls 20 --for 2h --reason 'nearly done'
  loopguard grant --session 9f2c51a07be3d418 --tool refund=1 --reason 'ticket 4711'
  loopguard grant --session 9f2c51a07be3d418 --agents 5 --depth 1
  loopguard grant --caller x-team=red --budget dollars --amount 20 --reason 'release day'
  loopguard grant --caller x-team=red --budget dollars --amount 20 --for 1d

Grants add up. Without --session, a grant is for each session of a caller.
A budget gets the amount once, up to its limit, or with --for a higher limit for that time."""

_LASTS = "1d"

_AMOUNTS = (
    "steps",
    "tool_calls",
    "cost",
    "agents",
    "depth",
    "concurrent_agents",
    "spawns_per_minute",
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_order_flags(parser, lasts=_LASTS, sessions=True)
    parser.set_defaults(duration=None)
    parser.add_argument("--steps", type=int, metavar="N", help="additional requests")
    parser.add_argument("--tool-calls", type=int, metavar="N", help="additional tool calls")
    parser.add_argument("--cost", type=float, metavar="USD", help="additional dollars")
    parser.add_argument("--agents", type=int, metavar="N", help="additional agents that may start")
    parser.add_argument("--depth", type=int, metavar="N", help="additional levels of agents")
    parser.add_argument(
        "--concurrent-agents",
        type=int,
        metavar="N",
        help="additional agents that may be active at a time",
    )
    parser.add_argument(
        "--spawns-per-minute",
        type=int,
        metavar="N",
        help="additional agents that may start within a minute",
    )
    text = "additional calls of a tool in max_calls_per_tool, repeatable"
    parser.add_argument(
        "--tool",
        action="append",
        default=[],
        metavar="NAME=N",
        dest="tools",
        type=_read_tool,
        help=text,
    )
    text = "name of a rule: give the caller more of its budget, once, or with --for a higher limit"
    parser.add_argument("--budget", metavar="RULE", help=text)
    parser.add_argument(
        "--amount", type=float, metavar="N", help="how much more, in the rule's own unit"
    )


def run(options: argparse.Namespace) -> int:
    if options.budget is not None or options.amount is not None:
        return _give_budget(options)
    amounts = {name: getattr(options, name) for name in _AMOUNTS}
    if all(amount is None for amount in amounts.values()) and not options.tools:
        flags = ", ".join(f"--{name}".replace("_", "-") for name in _AMOUNTS)
        raise UsageError(f"give at least one of {flags} and --tool, or --budget and --amount")
    options.duration = options.duration or _LASTS
    key = secrets.token_hex(8)  # servers that share a store apply it only once
    return give("grant", options, **amounts, tools=dict(options.tools) or None, key=key)


def _give_budget(options: argparse.Namespace) -> int:
    if options.budget is None or options.amount is None:
        raise UsageError("--budget and --amount belong together")
    given = [name for name in (*_AMOUNTS, "session") if getattr(options, name) is not None]
    given += ["tool"] * bool(options.tools)
    if given:
        flag = given[0].replace("_", "-")
        raise UsageError(f"--{flag} does not go with --budget, which has an amount of its own")
    return give(
        "grant", options, budget=options.budget, amount=options.amount, key=secrets.token_hex(8)
    )


def _read_tool(text: str) -> tuple[str, int]:
    """Parse `NAME=N`; the name may contain `=`."""
    name, equals, calls = text.rpartition("=")
    if not (name and equals and calls.isascii() and calls.isdigit()):
        raise argparse.ArgumentTypeError(f"must be NAME=N, such as refund=1, not {text!r}")
    return name, int(calls)
