"""`make test-clients`: run real clients, write docs/clients.md, and report broken promises."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from tests.clients.catalog import CLIENTS, PROMISES, Client
from tests.clients.model import FULL_AFTER
from tests.clients.running import NotInstalled, Run, install, opened, run
from tests.support import ROOT

PAGE: Final = ROOT / "docs" / "clients.md"
MOST_SECONDS: Final = 10
SCRIPTS: Final = ("loop", "obey", "work", "sub-agents", "agents", "nested", "compaction")
# Session limits, each of which a main agent with two others reaches.
AGENT_LIMITS: Final = {
    "max_agents": {"max_agents": 1},
    "max_depth": {"max_depth": 0},
    "max_concurrent_agents": {"max_concurrent_agents": 1},
    "max_spawns_per_minute": {"max_spawns_per_minute": 1},
    "max_steps": {"max_steps": 3},
}

# Limits of depth for an agent that starts one, which starts another.
DEPTHS: Final = (1, 2)

NOTED_AT: Final = 3

_TEXT: Final = """# Clients

`make test-clients` runs these clients through Envoy and Loopguard with the preset `agents`, against
a model that repeats one call. The columns `noted`, `landed` and `refused` say at which identical
turn that happened. Each client also runs against a model that does what the note says, at
`/gateway/...`, and against one that takes 20 different steps, at `/teams/a/llm/...`. For
`compaction`, the model reports a full context after two steps, and the client asks for a summary.
If it then shows no older turns, counting starts again. `-` stands for what was not played: most
have no sub-agents, or do not compact their history within a task. Clients that name their
sub-agents also start two where `max_agents`, `max_depth`, `max_concurrent_agents` or
`max_spawns_per_minute` allow only one, or none: the limits hold if the others are refused, and the
main agent reads the reason and finishes. Claude Code and opencode also start an agent that starts
another, with `max_depth` 1 and 2.
Generated on {date}.

{table}
{notes}"""

_HEAD: Final = (
    "client",
    "version",
    "noted",
    "landed",
    "refused",
    "retries",
    "seconds to its end",
    "message shown",
    "exit code",
    "finishes when noted",
    "20 steps",
    "sub-agents",
    "limits of agents",
    "compaction",
)
_NONE: Final = "-"


class Visit(NamedTuple):
    """The runs of a client in all scripts, or why it did not run."""

    client: Client
    runs: Mapping[str, Run]
    skipped: str = ""

    def find_broken(self) -> list[str]:
        """Broken promises, each with what happened instead."""
        broken = {name: said for name, judge in _JUDGES.items() if (said := judge(self))}
        return [
            f"{name}: {said}" for name, said in broken.items() if name not in self.client.allowed
        ]

    def count_turns(self, steps: int) -> int:
        return -(-steps // len(self.client.loop))


def _judge_noted(visit: Visit) -> str:
    seen = {
        f"{script}{f' ({task})' if task else ''}": visit.count_turns(given.noted)
        for script, done in visit.runs.items()
        if script in {"loop", "obey", "sub-agents"}
        for task, given in done.given.items()
        if not (script == "sub-agents" and not task)
    }
    late = [f"{where}: turn {turn or 'none'}" for where, turn in seen.items() if turn != NOTED_AT]
    compacted = visit.runs.get("compaction")
    turn = visit.count_turns(compacted.given[""].noted) if compacted else NOTED_AT
    if not NOTED_AT <= turn <= NOTED_AT + FULL_AFTER:
        late.append(f"compaction: turn {turn or 'none'}")
    return ", ".join(late)


def _judge_refused(visit: Visit) -> str:
    return ", ".join(
        [
            f"never in {name}"
            for name in ("loop", "compaction")
            if name in visit.runs and not visit.runs[name].refused
        ]
    )


def _judge_ends(visit: Visit) -> str:
    loop = visit.runs.get("loop")
    late = loop and (loop.killed or (loop.refused and loop.seconds > MOST_SECONDS))
    return f"after {loop.seconds:.0f} s{', killed' if loop.killed else ''}" if loop and late else ""


def _judge_message(visit: Visit) -> str:
    loop = visit.runs.get("loop")
    return "not on its screen" if loop and loop.refused and not loop.shown else ""


def _judge_finishes(visit: Visit) -> str:
    unfinished = [
        name
        for name in ("obey", "sub-agents")
        if (done := visit.runs.get(name)) and not done.finished
    ]
    return f"not with {', '.join(unfinished)}" if unfinished else ""


def _judge_agents(visit: Visit) -> str:
    """Two agents may not both start; the main agent reads why and finishes.

    `max_steps` counts for all together.
    """
    wrong = []
    for name in AGENT_LIMITS:
        run = visit.runs.get(f"agents {name}")
        if run is None:
            continue
        if name == "max_steps":
            wrong += (
                [f"{name}: {run.turns} passed"] if run.turns != AGENT_LIMITS[name][name] else []
            )
            continue
        begun = len([task for task in run.given if task])
        if begun != int(name != "max_depth") or not run.told or not run.finished:
            wrong.append(
                f"{name}: {begun} began, {'' if run.told else 'not '}told, "
                f"{'' if run.finished else 'not '}finished"
            )
    for depth in DEPTHS:
        run = visit.runs.get(f"nested {depth}")
        begun = len([task for task in run.given if task]) if run is not None else 0
        if run is not None and (begun != depth or run.told != (depth == 1) or not run.finished):
            wrong.append(
                f"nested, max_depth {depth}: {begun} began, "
                f"{'' if run.finished else 'not '}finished"
            )
    return ", ".join(wrong)


def _judge_healthy(visit: Visit) -> str:
    work = visit.runs.get("work")
    if not work:
        return ""
    return (
        f"{work.acted} requests acted on" if work.acted else "" if work.finished else "not finished"
    )


_JUDGES: Final[Mapping[str, Callable[[Visit], str]]] = dict(
    zip(
        PROMISES,
        (
            _judge_noted,
            _judge_refused,
            _judge_ends,
            _judge_message,
            _judge_finishes,
            _judge_agents,
            _judge_healthy,
        ),
        strict=True,
    )
)


def visit_client(client: Client, scripts: Sequence[str], record: Path | None) -> Visit:
    try:
        commands = install(client)
    except NotInstalled as reason:
        return Visit(client, {}, str(reason))
    runs: dict[str, Run] = {}
    with opened(client, commands) as zoo:
        for script in scripts:
            if (script == "sub-agents" and client.spawn is None) or (
                script == "compaction" and not client.compacts
            ):
                continue
            if script in {"agents", "nested"}:
                continue
            runs[script] = done = run(zoo, script)
            _tell(client, _describe(done))
            _keep(record, client, script, done)
            if not done.requests:
                last = [line for line in done.screen.splitlines() if line.strip()][-1:] or [
                    f"exit code {done.code}"
                ]
                return Visit(client, {}, f"it sends no request: {last[0].strip()[:200]}")
    for name, limits in AGENT_LIMITS.items() if "agents" in scripts and client.names_agents else ():
        with opened(client, commands, limits) as zoo:
            runs[f"agents {name}"] = done = run(zoo, "agents")
            _tell(client, f"{name}: {_describe(done)}")
            _keep(record, client, f"agents-{name}", done)
    for depth in DEPTHS if "nested" in scripts and client.nests else ():
        with opened(client, commands, {"max_depth": depth}) as zoo:
            runs[f"nested {depth}"] = done = run(zoo, "nested")
            _tell(client, f"nested, max_depth {depth}: {_describe(done)}")
            _keep(record, client, f"nested-{depth}", done)
    return Visit(client, runs)


def _keep(record: Path | None, client: Client, name: str, done: Run) -> None:
    if record:
        record.mkdir(parents=True, exist_ok=True)
        (record / f"{client.name.replace('/', '-')}-{name}.txt").write_text(done.screen)


def _describe(done: Run) -> str:
    noted = "/".join(
        [
            str(given.noted)
            for task, given in done.given.items()
            if task or done.script != "sub-agents"
        ]
    )
    refused = f", refused after {done.refused}, {done.retries} retries" if done.refused else ""
    marks = (
        ("finished", done.finished),
        ("told", done.told),
        ("message shown", done.shown),
        ("killed", done.killed),
    )
    ending = "".join([f", {name}" for name, holds in marks if holds])
    return (
        f"{done.script}: {done.requests} requests, noted after {noted or 0} steps{refused}, "
        f"{done.seconds:.1f} s, "
        f"exit code {done.code}{ending}"
    )


def _tell(client: Client, text: str) -> None:
    print(f"{client.name} {client.version}  {text}", flush=True)


def _row(visit: Visit) -> tuple[str, ...]:
    runs = visit.runs
    # Two words
    yes: Callable[[bool], str] = lambda is_true: "yes" if is_true else "no"  # noqa: E731
    loop, (given, *_) = runs["loop"], runs["loop"].given.values()
    refused = bool(loop.refused)
    subs = (
        [visit.count_turns(one.noted) for task, one in runs["sub-agents"].given.items() if task]
        if "sub-agents" in runs
        else []
    )
    return (
        visit.client.name,
        visit.client.version,
        str(visit.count_turns(given.noted) or _NONE),
        str(visit.count_turns(given.landed) or _NONE),
        str(visit.count_turns(loop.refused) or _NONE),
        str(loop.retries) if refused else _NONE,
        ("over " if loop.killed else "") + f"{loop.seconds:.0f}" if refused else _NONE,
        yes(loop.shown) if refused else _NONE,
        _NONE if loop.killed else str(loop.code),
        yes(runs["obey"].finished),
        "untouched" if not runs["work"].acted and runs["work"].finished else "**touched**",
        f"noted at {', '.join(map(str, subs))}" if subs else _NONE,
        ("hold" if not _judge_agents(visit) else "**broken**")
        if visit.client.names_agents
        else _NONE,
        _describe_compaction(visit),
    )


def _describe_compaction(visit: Visit) -> str:
    done = visit.runs.get("compaction")
    if done is None or not done.compacted:
        return _NONE
    return (
        f"noted at {visit.count_turns(done.given[''].noted)}, refused at "
        f"{visit.count_turns(done.refused)}"
    )


def write_page(visits: Sequence[Visit]) -> str:
    lines = [
        "|".join(("", *row, ""))
        for row in (_HEAD, ["---"] * len(_HEAD), *[_row(visit) for visit in visits if visit.runs])
    ]
    notes = [
        f"- {visit.client.name} {reason}."
        for visit in visits
        if visit.runs
        for reason in visit.client.allowed.values()
    ]
    notes += [
        f"- {visit.client.name} {visit.client.remark}."
        for visit in visits
        if visit.runs and visit.client.remark
    ]
    notes += [
        f"- {visit.client.name} {visit.client.version} was skipped: {visit.skipped}."
        for visit in visits
        if visit.skipped
    ]
    return _TEXT.format(
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        table="\n".join(lines),
        notes="\n" + "\n".join(notes) + "\n" if notes else "",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    chosen = [
        client
        for client in CLIENTS
        if not options.only or client.name in options.only or client.folder in options.only
    ]
    scripts = [script for script in SCRIPTS if not options.script or script in options.script]
    # Two configurations of one client share a folder: the first is installed before the second
    # begins.
    with ThreadPoolExecutor(options.jobs) as pool:
        by_folder: dict[str, list[Client]] = {}
        for client in chosen:
            by_folder.setdefault(client.folder, []).append(client)
        groups = pool.map(
            lambda group: [visit_client(client, scripts, options.record) for client in group],
            by_folder.values(),
        )
        visits = [visit for group in groups for visit in group]
    broken = 0
    for visit in visits:
        if visit.skipped:
            _tell(visit.client, f"!!! SKIPPED: {visit.skipped}")
        for problem in visit.find_broken() if visit.runs else ():
            broken += 1
            _tell(visit.client, f"!!! BROKEN: {problem}")
        for name, reason in visit.client.allowed.items():
            _tell(visit.client, f"known exception to {name!r}: it {reason}")
    if not options.only and not options.script:
        PAGE.write_text(write_page(visits))
        print(f"wrote {PAGE.relative_to(ROOT)}")
    skipped = sum([bool(visit.skipped) for visit in visits])
    print(f"{len(visits) - skipped} clients ran, {skipped} skipped, {broken} promises broken")
    return 1 if broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make test-clients", description="Real clients, through Envoy and Loopguard."
    )
    names = sorted({name for client in CLIENTS for name in (client.name, client.folder)})
    parser.add_argument(
        "--only",
        action="append",
        choices=names,
        metavar="CLIENT",
        help=f"repeatable; one of {', '.join(names)}",
    )
    parser.add_argument(
        "--script", action="append", choices=SCRIPTS, help="repeatable; what the model does"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=2,
        metavar="N",
        help="clients at the same time (default %(default)s)",
    )
    parser.add_argument(
        "--record", type=Path, metavar="FOLDER", help="keep what clients print there"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
