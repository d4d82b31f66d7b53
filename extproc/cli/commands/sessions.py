"""`loopguard sessions`: shows what sessions have used, or the report of one session."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from extproc.cli.commands import write_caller
from extproc.cli.commands.overrides import write_order
from extproc.engine.orders import GRANT
from extproc.logs import escape_controls, write_json
from extproc.operator.admin.client import add_admin_flag, ask_all, open_clients, select_params
from extproc.operator.admin.row_states import count, read_time, write_money

HELP = "show what sessions have used, or the report of one session"
EXAMPLES = """examples:
  loopguard sessions
  loopguard sessions --sort cost --policy agents
  loopguard sessions 5a0c93e1bb7f2d64
  loopguard sessions --json | jq '.sessions[0].tool_call_counts'

Replicas that share a store know all sessions: ask any of them.
For replicas with separate stores, repeat --admin for each."""

_SORTS = ("last", "cost", "steps", "tool_calls", "blocks", "agents")
_TOKENS = ("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "session", nargs="?", default="", metavar="ID", help="hash of a session, as in the list"
    )
    add_admin_flag(parser)
    parser.add_argument("--json", action="store_true", help="print the JSON of /sessions")
    parser.add_argument(
        "--sort", choices=_SORTS, default="last", help="sort by this (default last)"
    )
    parser.add_argument(
        "--policy", default="", metavar="ID", help="only sessions under this policy"
    )
    parser.add_argument(
        "--caller", default="", metavar="HASH|[NAME=]VALUE", help="only sessions of this caller"
    )
    parser.add_argument(
        "--limit", type=int, default=50, metavar="N", help="maximum sessions to show (default 50)"
    )


def run(options: argparse.Namespace) -> int:
    path = f"/sessions/{quote(options.session, safe='')}" if options.session else "/sessions"
    names = () if options.session else ("sort", "policy", "caller", "limit")
    report = ask_all(open_clients(options.admin), path, select_params(options, *names))
    if options.json:
        print(write_json(report, indent=2))
        return 0
    for line in write_report(report):
        print(escape_controls(line))
    return 0


def write_report(report: Mapping[str, Any]) -> list[str]:
    """The sessions in lines, with the steps of each if the report has any."""
    # Missing for a single session
    lines = [server["line"] for server in report.get("coverage", ())]
    if report["problem"]:
        lines.append(f"other replicas' sessions are missing or old: {report['problem']}")
    if not report["sessions"]:
        known = report["known"]
        servers = report["coverage"]
        unlimited = servers and not any(each["limits_sessions"] for each in servers)
        none = f"no session in the last hour{': no policy has session_limits' if unlimited else ''}"
        lines.append(f"none of {count(known, 'session')} matches" if known else none)
    for session in report["sessions"]:
        lines.append(_write_session(session))
        lines += write_tree(session)
        if "steps" in session:
            lines += _write_run(session)
            lines += [
                f"  called {count(times, 'time')}: {tool}"
                for tool, times in session["tool_call_counts"].items()
            ]
            lines += [_write_step(step) for step in session["steps"]]
    return lines


def _write_session(session: Mapping[str, Any]) -> str:
    caller = write_caller(session)
    guessed, spent = (
        session[name] + session["reserved_cost"] for name in ("estimated_cost", "actual_cost")
    )
    estimated = f" ({write_money(guessed)} estimated)" if guessed else ""
    counts = (
        f"{count(session['total_step_count'], 'step')}, "
        f"{count(session['total_tool_calls'], 'tool call')}"
    )
    said = [
        (
            f"{session['session']}  {caller}  "
            f"{session['policy']}{' (shadow)' if session['mode'] == 'shadow' else ''}"
        ),
        f"{counts}, {write_money(spent)}{estimated}, {session['total_block_count']} refused",
        f"since {session['started']}, last {session['last_seen']}",
    ]
    if unnamed := session["unnamed_requests"]:
        said.insert(1, f"{count(unnamed, 'request')} for which nothing names a session")
    if session["started_by"]:
        said.insert(1, f"an agent of {session['started_by']}, judging by its first message")
    if session.get("growing"):  # older servers lack it
        said.append(f"input {session['input_growth']:g}x its first")
    if session["killed"]:
        said.append(f"killed: {session['killed']}")
    elif refused := session["refused"]:
        about = f" of {refused['tool']}" if refused["tool"] else ""
        refuses = "refused" if session["ended"] else "continues, although refused"
        grants = [
            read_time(order["since"]) for order in session["orders"] if order["kind"] == GRANT
        ]
        when = (
            "refused before the grant"
            if max(grants, default=0) >= read_time(refused["at"])
            else refuses
        )
        said.append(f"{when}: {refused['limit']}{about}, {refused['used']} of {refused['allowed']}")
    if session["granted"]:
        said.append(f"granted: {_write_amounts(session['granted'])}")
    said += [write_order(order) for order in session["orders"]]
    return "  ".join(said)


def write_tree(session: Mapping[str, Any]) -> list[str]:
    agents = session["agents"]
    if not (agents["tree"] or agents["refused_requests"]):
        return []
    refused = (
        f", {count(agents['refused_requests'], 'request')} refused"
        if agents["refused_requests"]
        else ""
    )
    lines = [f"  {count(agents['started'], 'agent')}, {agents['active']} active{refused}"]
    for agent in agents["tree"]:
        ending = f"  refused: {agent['refused']}" if agent["refused"] else ""
        said = (
            f"{count(agent['requests'], 'request')}  since {agent['started']}, last "
            f"{agent['last_seen']}{ending}"
        )
        lines.append(f"{'  ' * (agent['level'] + 1)}{agent['agent']}  {said}")
    return lines


def _write_amounts(amounts: Mapping[str, Any]) -> str:
    pairs = [
        (limit, amount if isinstance(amount, dict) else {"": amount})
        for limit, amount in amounts.items()
    ]
    return ", ".join(
        f"{limit}{' of ' * bool(tool)}{tool} {amount}"
        for limit, each in pairs
        for tool, amount in each.items()
    )


def _write_run(session: Mapping[str, Any]) -> list[str]:
    used = session["usage"]
    tokens = _write_tokens(used)
    times = (
        f"{used['total_seconds']} s, model {used['model_seconds']} s, tools "
        f"{used['tool_seconds']} s"
    )
    lines = [
        (
            f"  {session['ended'] or 'active'}: {times}; {tokens}; "
            f"{count(used['failed_answers'], 'failed answer')}"
        )
    ]
    if session["limits"]:
        lines.append(f"  limits: {_write_amounts(session['limits'])}")
    for event in session["events"]:
        if "granted" in event:
            lines.append(f"  {event['at']}  granted: {_write_amounts(event['granted'])}")
        else:
            about = f" of {event['tool']}" if event["tool"] else ""
            often = f", {event['times']} times" if event["times"] > 1 else ""
            # A kill has none
            used = (
                f", {event['used']} of {event['allowed']}"
                if event["used"] or event["allowed"]
                else ""
            )
            lines.append(f"  {event['at']}  refused: {event['refused']}{about}{used}{often}")
    if session["earlier_steps"]:
        lines.append(f"  {count(session['earlier_steps'], 'earlier step')} not shown")
    return lines


def _write_tokens(step: Mapping[str, Any]) -> str:
    known = [step[name] for name in _TOKENS]
    return (
        "tokens unknown"
        if known[0] is None
        else "{} in, {} out, {} from cache, {} into cache".format(*known)
    )


def _write_step(step: Mapping[str, Any]) -> str:
    status = (
        "refused"
        if step["refused"]
        else step["status"] or ("failed" if step["settled"] else "in progress")
    )
    times = [
        f"{who} {step[key]} s"
        for who, key in (("tools", "tool_seconds"), ("model", "model_seconds"))
        if step.get(key)
    ]
    failed = f" ({step['tool_errors']} failed)" if step.get("tool_errors") else ""
    said = [
        step["at"],
        step["model"] or "-",
        str(status),
        _write_tokens(step),
        *times,
        ", ".join(step["tools"]) + failed,
    ]
    return "  " + "  ".join(said).rstrip()
