"""`loopguard canary`: what a shadow policy would do in place of the enforcing one, and whether that is safe."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from extproc.cli.commands import count
from extproc.cli.commands.ordering import add_token_flag, make_headers
from extproc.errors import LoopguardError
from extproc.logs import escape_controls
from extproc.operator.admin.client import AdminClient, add_admin_flag, open_clients
from extproc.operator.after_notes import write_after
from extproc.operator.canary.report import describe_canaries
from extproc.operator.canary.review import ANSWERS, ReadAnswers, convert_answers, merge_answers
from extproc.operator.canary.states import State, convert_state
from extproc.operator.canary.verdict import KEEP_WATCHING, SAFE, TOO_STRICT, Rules
from extproc.operator.table import write_time
from extproc.options import add_flags as add_options
from extproc.options import read_options

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

HELP = "compare shadow policies with the enforcing ones they may replace"
EXAMPLES = """examples:
  loopguard canary status
  loopguard canary status --admin http://10.0.0.5:9900 --admin http://10.0.0.6:9900
  loopguard canary review --policy strict
  loopguard canary status --policy strict --max-new-refusals 0.0005 && loopguard validate policies/"""

_STATUS_EXAMPLES = """Replicas that share a Redis or Valkey know the counts of all: ask any of them.
For others, repeat --admin for each.

Answers of `canary review` decide once they are certain; until then, the share of new refusals does.

exit code: 0 safe, 3 keep watching, 4 too strict (with several canaries, the highest); 1 no answer or no canary, 2 usage"""

_REVIEW_EXAMPLES = """examples:
  loopguard canary review --admin unix:/run/loopguard/admin.sock
  loopguard canary review --policy strict --token-file token
  loopguard canary review --json

Asks one question per loop. `serve --shadow-samples N` keeps up to N loops of each canary; each replica keeps its own: repeat
--admin for each. Answers go to the store at once, with your name, and count in `canary status`. Several people may answer: the
last answer of each counts, and most people decide about a loop.

exit code: 0 shown, 1 no answer or no samples, 2 usage"""

_CODES = {SAFE: 0, KEEP_WATCHING: 3, TOO_STRICT: 4}
_COLORS = {SAFE: "green", KEEP_WATCHING: "yellow", TOO_STRICT: "red"}
_SKIP, _QUIT = "skip", "quit"
_PIPE_WIDTH = 160
"""Columns if the width of the output is unknown."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    questions = parser.add_subparsers(dest="question", metavar="QUESTION", required=True)

    def add_question(name: str, text: str, epilog: str, ask: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        question = questions.add_parser(
            name, help=text, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        add_admin_flag(question)
        question.add_argument("--policy", metavar="ID", help="only this shadow policy (default: all that are compared)")
        question.set_defaults(ask=ask)
        return question

    status = add_question("status", "print the verdict and the counts behind it", _STATUS_EXAMPLES, show_status)
    add_options(status, Rules)
    status.add_argument("--json", action="store_true", help="print JSON")
    text = "show each new loop of a canary, and ask whether it is right to refuse it"
    review = add_question("review", text, _REVIEW_EXAMPLES, review_loops)
    add_token_flag(review)
    review.add_argument("--all", action="store_true", help="also ask about loops that have an answer")
    review.add_argument("--json", action="store_true", help="print the loops and their answers as JSON, and ask nothing")


def run(options: argparse.Namespace) -> int:
    return int(options.ask(options))


def show_status(options: argparse.Namespace) -> int:
    """Print the verdict about each canary; returns the exit code. Raises LoopguardError if nothing is compared."""
    every, answers = _collect(open_clients(options.admin))
    states = [state for state in every if options.policy in (None, state.candidate)]
    canaries = describe_canaries(states, read_options(Rules, vars(options)), answers)
    if not canaries:
        raise LoopguardError(_explain_nothing(options.policy, sorted({state.candidate for state in every})))
    if options.json:
        print(json.dumps({"canaries": canaries}, indent=2))
    else:
        _print_canaries(canaries)
    return max(_CODES[canary["verdict"]] for canary in canaries)


def _explain_nothing(policy: str | None, compared: Sequence[str]) -> str:
    """Why there is no verdict: what is compared instead, or how to compare a policy."""
    named = f"no shadow policy {policy}" if policy is not None else "no shadow policy"
    hint = f"compared are: {', '.join(compared)}" if compared else "set canary_of, or give both the same selector"
    return f"{named} is compared with an enforcing one; {hint}"


def _collect(clients: Sequence[AdminClient]) -> tuple[list[State], dict[str, ReadAnswers] | None]:
    """The counts of all replicas, each once, and people's answers; None if a server cannot read them.

    Raises LoopguardError if a server gives no usable answer.
    """
    newest: dict[tuple[str, str, str], State] = {}
    several: list[dict[str, ReadAnswers]] | None = []
    for client in clients:
        answer = client.ask("/canary/states")
        for replica, states in _read_replicas(answer).items():
            for state in map(convert_state, states):
                name = replica, state.candidate, state.identity
                if name not in newest or newest[name].until < state.until:
                    newest[name] = state
        answers = answer.get("answers", {})
        several = None if several is None or answers is None else [*several, convert_answers(answers)]
    if several is None:
        return list(newest.values()), None
    canaries = {canary for answers in several for canary in answers}
    merged = {canary: merge_answers(answers.get(canary, {}) for answers in several) for canary in canaries}
    return list(newest.values()), merged


def _read_replicas(answer: Any) -> dict[str, list[Any]]:  # noqa: ANN401  # a server may answer anything
    replicas = answer.get("replicas") if isinstance(answer, dict) else None
    if not isinstance(replicas, dict) or not all(isinstance(states, list) for states in replicas.values()):
        raise LoopguardError("the server did not return canary counts")
    return replicas


class _Loop(NamedTuple):
    """A new loop, as all servers together know it, and the servers that have it in their sample."""

    row: dict[str, Any]
    clients: list[AdminClient]


def review_loops(options: argparse.Namespace) -> int:
    """Show loops one by one and send the answers; returns the exit code."""
    clients = open_clients(options.admin)
    loops = [loop for loop in _collect_loops(clients) if options.policy in (None, loop.row["policy"])]
    if options.json:
        print(json.dumps({"loops": [loop.row for loop in loops]}, indent=2))
        return 0
    headers = make_headers(options)
    asked = [loop for loop in loops if options.all or not loop.row["answers"]]
    unanswered = sum(not loop.row["answers"] for loop in loops)
    print(f"{count(len(loops), 'new loop')} to review, {unanswered} unanswered")
    for number, loop in enumerate(asked, 1):
        print(f"\n{number} of {len(asked)}")
        _print_loop(loop.row)
        answer = _ask_person()
        if answer == _QUIT:
            break
        if answer != _SKIP:
            _send_answer(loop, answer, headers)
    _print_verdicts(clients, {loop.row["policy"] for loop in loops})
    return 0


def _send_answer(loop: _Loop, answer: str, headers: Mapping[str, str]) -> None:
    """Send an answer to each server that has the loop; raises LoopguardError if one does not take it."""
    body = {"canary": loop.row["canary"], "loop": loop.row["id"], "answer": answer}
    for client in loop.clients:
        given = client.ask("/canary/answers", method="POST", body=body, headers=headers)
        loop.row["answers"][str(given["person"])] = answer


def _collect_loops(clients: Sequence[AdminClient]) -> list[_Loop]:
    """The sampled loops of all servers, each once, oldest first; raises LoopguardError if no server keeps any."""
    found: dict[tuple[str, str], _Loop] = {}
    kept = False
    for client in clients:
        answer = client.ask("/canary/samples")
        try:
            kept = kept or bool(answer["kept"])
            for row in answer["samples"]:
                row |= {"first": float(row["first"]), "last": float(row["last"])}
                name = str(row["canary"]), str(row["id"])
                known = found.get(name)
                found[name] = _Loop(row, [client]) if known is None else _Loop(_merge(known.row, row), [*known.clients, client])
        except (AttributeError, KeyError, TypeError, ValueError):
            raise LoopguardError(f"{client.url} did not return samples") from None
    if not kept:
        raise LoopguardError("no samples are kept; start the servers with --shadow-samples N")
    return sorted(found.values(), key=lambda loop: loop.row["first"])


def _merge(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two servers' rows of the same loop: as the first refusal shows it, with all of its requests."""
    first, later = sorted((one, other), key=lambda row: row["first"])
    return {
        **first,
        "requests": one["requests"] + other["requests"],
        "last": max(one["last"], other["last"]),
        "compared": first["compared"] or later["compared"],
        "answers": {**one["answers"], **other["answers"]},
    }


_LABELS = {"tenant": "caller", "tools": "tool", "first": "first refusal", "last": "last refusal", "requests": "refusals"}
"""Words for people, where a field's name is another."""

_NOT_SHOWN = ("id", "canary", "compared", "answers")
_TEXTS = """texts are not kept; start the servers with --shadow-sample-bodies to see them here, or give the body of a request to
`loopguard explain --policy FILE -d @BODY URL`"""


def _print_loop(row: dict[str, Any]) -> None:
    """Print what was compared, and whose it is."""
    for name, value in row.items():
        if name in _NOT_SHOWN or value in ("", [], None):
            continue
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        shown = write_time(value) if name in ("first", "last") else text
        print(f"  {escape_controls(_LABELS.get(name, name).replace('_', ' ')):13}  {escape_controls(shown)}")
    for person, answer in row["answers"].items():
        print(f"  {'answer':13}  {escape_controls(f'{answer} ({person})')}")
    for line in _list_compared(row):
        print(f"  | {escape_controls(line)}")


def _list_compared(row: dict[str, Any]) -> list[str]:
    """The lines of what was compared, or where they are."""
    if row["compared"]:
        return str(row["compared"]).splitlines()
    if row["compared"] is None:
        return _TEXTS.splitlines()
    return ["what its session used was compared with a limit" if row["limit"] else "checksums of requests were compared"]


def _ask_person() -> str:
    """Ask for one of the answers, skip or quit; the end of the input means quit."""
    while True:
        try:
            text = input("is it right to refuse this loop? right, wrong, unsure, skip, quit [r/w/u/s/q] ").strip().lower()
        except EOFError:
            print()
            return _QUIT
        found = [word for word in (*ANSWERS, _SKIP, _QUIT) if text and word.startswith(text)]
        if found:
            return found[0]


def _print_verdicts(clients: Sequence[AdminClient], policies: Collection[str]) -> None:
    """Print what the answers amount to, by the default rules."""
    states, answers = _collect(clients)
    for canary in describe_canaries(states, Rules(), answers):
        if canary["policy"] in policies:
            print(escape_controls(f"{canary['policy']}: {canary['summary']}{_name_people(canary)}"))


def _name_people(canary: dict[str, Any]) -> str:
    """Who has answered about a canary's loops."""
    people = canary["review"]["people"] if canary["review"] is not None else []
    return escape_controls(f" (answered by {', '.join(people)})") if people else ""


def _print_canaries(canaries: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console  # noqa: PLC0415  # takes 0.1 s to import; other commands do not need it

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
    console = Console(highlight=False, markup=False, emoji=False, width=width)
    for canary in canaries:
        _print_canary(console, canary)


def _print_canary(console: Console, canary: dict[str, Any]) -> None:
    word, summary = canary["verdict"], canary["summary"]
    shown = word.replace("_", " ")
    about = f"{canary['policy']}, canary of {canary['canary_of']}: {summary.removesuffix(shown)}"
    console.print(escape_controls(about), end="", style="bold", soft_wrap=True)
    console.print(shown, style=f"bold {_COLORS[word]}", soft_wrap=True)
    for reason in canary["reasons"]:
        console.print(f"  {reason}")
    console.print(f"  compared since {canary['since']}, by {count(canary['replicas'], 'replica')}")
    new = canary["new"]
    about = "" if new["exact"] else "about "
    tenants = f"{about}{new['tenants']} of {new['of_tenants']}"
    console.print(
        f"  new: loops {about}{new['loops']}, tenants {tenants}, sessions {about}{new['sessions']}{_name_people(canary)}"
    )
    for who, arms in canary["after_notes"].items():
        for arm, counts in arms.items():
            console.print(f"  {who}: {write_after(counts, noted=arm == 'noted')}")
    console.print(_make_counts(canary))
    if canary["disagreements"]:
        console.print(_make_disagreements(canary["disagreements"]))
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


def _make_counts(canary: dict[str, Any]) -> Table:
    table = _make_table("requests", "number", "share", "between")
    table.add_row("compared", f"{canary['requests']['compared']:,}", "", "")
    for name, group, key, rate in _ROWS:
        bounds = canary["rates"].get(rate, {})
        share = bounds.get("share")
        between = f"{bounds['low']:.3%} and {bounds['high']:.3%}" if bounds else ""
        table.add_row(name, f"{canary[group][key]:,}", "" if share is None else f"{share:.3%}", between)
    return table


def _make_disagreements(disagreements: Sequence[dict[str, Any]]) -> Table:
    table = _make_table("disagreement", "number", "method", "path", "tenant", "detector", "tool")
    for entry in disagreements:
        number = f"{entry['count']:,}" if not entry["over"] else f"<= {entry['count']:,}"
        words = [entry[key] for key in ("method", "path", "tenant", "detector", "tool")]
        table.add_row(entry["about"].replace("_", " "), number, *(escape_controls(word) for word in words))
    return table


def _make_table(*names: str) -> Table:
    from rich.box import SIMPLE  # noqa: PLC0415  # as above
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=SIMPLE)
    for name in names:
        table.add_column(name, justify="right" if name == "number" else "left", overflow="fold")
    return table
