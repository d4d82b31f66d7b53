"""`loopguard canary`: compares shadow policies with the enforcing ones they may replace."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from extproc.errors import LoopguardError
from extproc.logs import escape_controls, write_json
from extproc.operator.admin.client import AdminClient, add_admin_flag, open_clients
from extproc.operator.admin.row_states import count
from extproc.operator.after_notes import write_after
from extproc.operator.canary.report import describe_canaries
from extproc.operator.canary.states import State, convert_state
from extproc.operator.canary.verdict import KEEP_WATCHING, SAFE, TOO_STRICT, Rules
from extproc.operator.coverage_rows import ENFORCES_ON_NONE
from extproc.options import add_flags as add_options, read_options

HELP = "compare shadow policies with the enforcing ones they may replace"
EXAMPLES = """examples:
  loopguard canary status
  loopguard canary status --admin http://10.0.0.5:9900 --admin http://10.0.0.6:9900
  loopguard canary status --policy strict --max-new-refusals 0.0005 && echo safe"""

_STATUS_EXAMPLES = """Replicas that share a Redis or Valkey know the counts of all: ask any of them.
For others, repeat --admin for each.

exit code: 0 safe, 3 keep watching, 4 too strict (with several canaries, the highest);
1 no answer or no canary, 2 usage"""

_CODES = {SAFE: 0, KEEP_WATCHING: 3, TOO_STRICT: 4}
_COLORS = {SAFE: "green", KEEP_WATCHING: "yellow", TOO_STRICT: "red"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    questions = parser.add_subparsers(dest="question", metavar="QUESTION")
    parser.set_defaults(show_help=parser.print_help)

    status = questions.add_parser(
        "status",
        help="print the verdict and the counts behind it",
        epilog=_STATUS_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_admin_flag(status)
    status.add_argument(
        "--policy", metavar="ID", help="only this shadow policy (default: all that are compared)"
    )
    add_options(status, Rules)
    status.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    if options.question is None:
        options.show_help()
        return 0
    clients = open_clients(options.admin)
    every = _collect_states(clients)
    states = [state for state in every if options.policy in (None, state.candidate)]
    canaries = describe_canaries(states, read_options(Rules, vars(options)))
    if not canaries:
        # Explain why there is no verdict: list what is compared, or how to compare a policy
        policy = options.policy
        compared = sorted({state.candidate for state in every})
        named = f"no shadow policy {policy}" if policy is not None else "no shadow policy"
        hint = (
            f"compared are: {', '.join(compared)}"
            if compared
            else "set canary_of, or give both the same selector"
        )
        raise LoopguardError(
            "; ".join(
                [f"{named} is compared with an enforcing one", hint, *_list_idle_shares(clients)]
            )
        )
    if options.json:
        print(write_json({"canaries": canaries}, indent=2))
    for canary in canaries if not options.json else ():
        _print_canary(canary)
    return max(_CODES[canary["verdict"]] for canary in canaries)


def _collect_states(clients: Sequence[AdminClient]) -> list[State]:
    """The newest counts of each replica; raises LoopguardError if a server's answer is invalid."""
    newest: dict[tuple[str, str, str], State] = {}
    for client in clients:
        for replica, states in _read_replicas(client.ask("/canary/states")).items():
            for state in map(convert_state, states):
                name = replica, state.candidate, state.identity
                if name not in newest or newest[name].until < state.until:
                    newest[name] = state
    return list(newest.values())


def _list_idle_shares(clients: Sequence[AdminClient]) -> list[str]:
    """Findings about policies with `enforce_percent` that cover no caller yet."""
    with suppress(LoopguardError):  # only a hint
        findings = [
            finding for client in clients for finding in client.ask("/coverage").get("findings", [])
        ]
        return list(
            dict.fromkeys([each["text"] for each in findings if each["reason"] == ENFORCES_ON_NONE])
        )
    return []


# A server may answer anything
def _read_replicas(answer: Any) -> dict[str, list[Any]]:  # noqa: ANN401
    replicas = answer.get("replicas") if isinstance(answer, dict) else None
    if not isinstance(replicas, dict) or not all(
        isinstance(states, list) for states in replicas.values()
    ):
        raise LoopguardError("the server did not return canary counts")
    return replicas


def _print_canary(canary: dict[str, Any]) -> None:
    # Takes 0.1 s to import; other commands do not need it
    from extproc.cli.tables import make_console, print_rows  # noqa: PLC0415

    console = make_console()
    verdict = canary["verdict"].replace("_", " ")
    about = (
        f"{canary['policy']}, canary of {canary['canary_of']}: "
        f"{canary['summary'].removesuffix(verdict)}"
    )
    console.print(escape_controls(about), end="", style="bold", soft_wrap=True)
    console.print(verdict, style=f"bold {_COLORS[canary['verdict']]}", soft_wrap=True)
    for reason in canary["reasons"]:
        console.print(escape_controls(f"  {reason}"))
    console.print(f"  compared since {canary['since']}, by {count(canary['replicas'], 'replica')}")
    if canary["acts_on"] is not None:
        console.print(f"  {canary['acts_on']['text']}")
    new = canary["new"]
    exactly = "" if new["exact"] else "about "
    tenants = f"{exactly}{new['tenants']} of {new['of_tenants']}"
    console.print(
        f"  new: loops {exactly}{new['loops']}, tenants {tenants}, sessions "
        f"{exactly}{new['sessions']}"
    )
    for who, arms in canary["after_notes"].items():
        for arm, counts in arms.items():
            console.print(escape_controls(f"  {who}: {write_after(counts, noted=arm == 'noted')}"))
    rows = [("compared", canary["requests"]["compared"], "", "")]
    for name, group, key, rate in _ROWS:
        bounds = canary["rates"].get(rate, {})
        share = f"{bounds['share']:.3%}" if bounds.get("share") is not None else ""
        between = f"{bounds['low']:.3%} and {bounds['high']:.3%}" if bounds else ""
        rows.append((name, canary[group][key], share, between))
    print_rows(console, "", ("requests", "#number", "#share", "between"), rows)
    disagreements = [
        (
            each["about"].replace("_", " "),
            f"{'<= ' if each['over'] else ''}{each['count']:,}",
            *[each[key] for key in _WHERE],
        )
        for each in canary["disagreements"]
    ]
    print_rows(console, "", ("disagreement", "#number", *_WHERE), disagreements)
    console.print()


_ROWS = (
    ("both act", "requests", "both", ""),
    ("only live acts", "requests", "only_live", ""),
    ("only the candidate acts", "requests", "only_candidate", ""),
    ("neither acts", "requests", "neither", ""),
    ("not compared", "requests", "uncompared", ""),
    ("refusals: new", "refusals", "new", "new_refusals"),
    ("refusals: made already", "refusals", "already", ""),
    ("refusals: missed", "refusals", "missed", "missed_refusals"),
)
_WHERE = ("method", "path", "tenant", "detector", "tool")
