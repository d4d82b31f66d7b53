"""`loopguard overrides`: lists and revokes operators' orders."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from extproc.cli.commands.ordering import add_asking_flags, make_headers
from extproc.logs import escape_controls, write_json
from extproc.operator.admin.client import open_clients

HELP = "list or revoke the overrides of release, allow, block, kill and grant"
EXAMPLES = """examples:
  loopguard overrides
  loopguard overrides --revoke 3f9c0ab81d22"""

_ABOUT = ("caller", "session", "fingerprint", "tool")
_GRANTED = {
    "steps": "steps",
    "tool_calls": "tool calls",
    "cost": "dollars",
    "agents": "agents",
    "depth": "levels of agents",
    "concurrent_agents": "active agents",
    "spawns_per_minute": "agents in a minute",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--revoke", metavar="NAME", help="end this override now")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_asking_flags(parser)


def run(options: argparse.Namespace) -> int:
    for client in open_clients(options.admin):
        if options.revoke:
            client.ask(
                f"/overrides/{options.revoke}",
                method="DELETE",
                headers=make_headers(options, client),
            )
            print(escape_controls(f"revoked {options.revoke}"))
            continue
        standing = client.ask("/overrides")["overrides"]
        if options.json:
            print(write_json(standing, indent=2))
        elif not standing:
            print("no overrides")
        for override in standing if not options.json else ():
            print(escape_controls(describe(override)))
    return 0


def describe(override: Mapping[str, Any]) -> str:
    about = [f"{name} {_join(override[name])}" for name in _ABOUT if override.get(name)]
    about += list_amounts(override)
    policy = f"in {override['policy']}" if override.get("policy") else "in all policies"
    policy += (
        f" (met {', '.join(override['meets'])})"
        if override.get("meets") and not override.get("policy")
        else ""
    )
    said = [f"by {override['who']}" if override.get("who") else "", override.get("reason", "")]
    words = ": ".join(word for word in said if word)
    return (
        f"{override['override']}  {override['kind']:<7}  {', '.join(about)}  {policy}  until "
        f"{override['ends']}  {words}"
    )


def write_order(order: Mapping[str, Any]) -> str:
    """An order in force, in a few words, to print beside its target."""
    amounts = ", ".join(list_amounts(order))
    given = f" {amounts}" if amounts else ""
    who = f" by {order['who']}" if order.get("who") else ""
    reason = f": {order['reason']}" if order.get("reason") else ""
    return f"order: {order['kind']}{given}{who} until {order['ends']}{reason}"


def list_amounts(override: Mapping[str, Any]) -> list[str]:
    amounts = [
        f"+{override[name]:.10g} {words}" for name, words in _GRANTED.items() if override.get(name)
    ]
    if rule := override.get("budget"):
        amounts.append(
            f"+{override['amount']:.9g} {'to the limit of' if override.get('raises') else 'of'} "
            f"{rule}"
        )
    calls = override.get("tools", {})
    return amounts + [
        f"+{number} {'call' if number == 1 else 'calls'} of {tool}"
        for tool, number in calls.items()
    ]


def _join(value: str | Mapping[str, str]) -> str:
    return (
        value
        if isinstance(value, str)
        else " ".join(f"{name}={text}" for name, text in value.items())
    )
