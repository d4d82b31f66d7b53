"""`make demo-agent`: agents on real SDKs, through Envoy and Loopguard, against a looping model.

Each scene declares its expected ending. Exit code: 0 if all scenes end as expected, else 1; 130
after Ctrl-C.
"""  # noqa: INP001  # a script beside its data, not a package

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TextIO

from demo import HERE, PORTS, Child, DemoError, free_ports, guarded, until_told
from fake_model import Call, FakeModel, Script, fake_model, find_note
from tool_agents import (
    Agent,
    Job,
    Refusal,
    Step,
    Tools,
    Turn,
    chat_agent,
    list_refusals,
    message_of,
    messages_agent,
    responses_agent,
    stored_agent,
)

from extproc.errors import LoopguardError

_POLICY = Path(__file__).parent / "agent_policy.json"
_MORE = 5
"""Maximum number of turns after the expected end."""

_CALL_WIDTH, _RESULT_WIDTH, _TEXT_WIDTH = 36, 48, 96
_BOLD, _DIM, _RED, _GREEN, _YELLOW = "1", "2", "31", "32", "33"

_EXAMPLES = """\
examples:
  make demo-agent                                     every scene
  make demo-agent ARGS='--scene cycle'                one of them
  make demo-agent ARGS='--policy my-policies.json'    with another policy
"""


@dataclass(frozen=True)
class Scene:
    """An agent, the model's answers, and the expected ending.

    Attributes:
        name: the name for `--scene`.
        agent: the agent's loop, from `tool_agents`.
        script: the model's answers.
        turns: expected number of answers.
        refused: whether the next request is refused; otherwise the agent finishes.
        path: the path before the API's `/v1`.
        detour: the model's answers after a note from the gateway; None for a model that ignores
            notes.
        landing: the final answer when a note requests one; empty for a model that gives none.
    """

    name: str
    title: str
    agent: Agent
    tasks: Sequence[str]
    tools: Tools
    script: Script
    turns: int
    refused: bool = True
    path: str = ""
    detour: Script | None = None
    landing: str = ""


@dataclass(frozen=True)
class Ending:
    """How a scene ended: turns, refusal, and the numbers of requests sent and forwarded."""

    turns: int
    refusal: Refusal | None
    sent: int
    asked: int

    def __str__(self) -> str:
        """A short description."""
        how = "refused" if self.refusal else "not refused"
        return (
            f"{how} after {self.turns} turns; {self.sent} requests sent, {self.asked} reached "
            "the model"
        )


def _describe_expected(scene: Scene) -> str:
    """The expected description. The SDKs do not retry a refused request, so it is sent once."""
    how = "refused" if scene.refused else "not refused"
    return (
        f"{how} after {scene.turns} turns; {scene.turns + scene.refused} requests sent, "
        f"{scene.turns} reached the model"
    )


def _scenes() -> list[Scene]:
    check, deploy = Call("check_build", {"build": 4711}), Call("deploy", {"build": 4711})
    search = Call("search_docs", {"query": "refunds"})
    read = Call("read_file", {"path": "/etc/app.yml"})
    pages = [Call("read_log", {"build": 4711, "page": page}) for page in (1, 2, 3)]
    ticket = {"id": 7}
    restored: list[Sequence[Call] | str] = [
        [Call("ask_operator")],
        "The operator has restored the file: all is well.",
    ]
    rounds = [Call("list_tickets"), Call("open_ticket", ticket), Call("find_user", {"name": "ann"})]
    rounds += [Call("assign_ticket", {"id": 7, "to": "ann"}), Call("add_note", ticket)]
    progress: list[Call | str] = [
        check,
        check,
        check,
        check,
        "Build 4711 has failed.",
        *pages,
        "No warnings on three pages.",
    ]
    for line in (12, 40, 51):
        progress += [Call("edit_file", {"line": line}), Call("run_tests")]
    progress.append("I tried three things; the same tests fail.")
    return [
        Scene(
            "steered",
            (
                "An agent that repeats a failing call: the model reads the note, and finishes "
                "(openai "
                "SDK, chat completions)"
            ),
            chat_agent,
            ["Why does the app not start?"],
            {
                "read_file": _make_tool("error: no such file"),
                "ask_operator": _make_tool("restored from the backup"),
            },
            lambda _: [read],
            turns=5,
            refused=False,
            path="/steered",
            detour=lambda number: restored[number],
        ),
        Scene(
            "chat",
            "A stuck agent that words each thought differently (openai SDK, chat)",
            chat_agent,
            ["Deploy build 4711."],
            {"deploy": _make_tool("error: build 4711 is not signed")},
            lambda _: [deploy],
            turns=3,
        ),
        Scene(
            "progress",
            (
                "An agent that makes progress: new results, new arguments, edits between identical "
                "test runs (openai SDK, chat)"
            ),
            chat_agent,
            ["Tell me when build 4711 is done.", "Any warnings in its log?", "Then fix the tests."],
            {
                "check_build": _make_tool(
                    "running, 25 %", "running, 50 %", "running, 75 %", "failed"
                ),
                "read_log": _make_tool("no warnings"),
                "edit_file": _make_tool("ok"),
                "run_tests": _make_tool("3 failed"),
            },
            lambda number: item if isinstance(item := progress[number], str) else [item],
            turns=len(progress),
            refused=False,
        ),
        Scene(
            "responses",
            "An agent that repeats a search without results (openai SDK, responses)",
            responses_agent,
            ["What is our refund policy?"],
            {"search_docs": _make_tool("no results")},
            lambda _: [search],
            turns=3,
        ),
        Scene(
            "anthropic",
            "An agent that repeats a call that fails (anthropic SDK, messages)",
            messages_agent,
            ["Why does the app not start?"],
            {"read_file": _make_tool("error: permission denied")},
            lambda _: [read],
            turns=3,
        ),
        Scene(
            "stored",
            (
                "A stuck agent whose history is on the server, recognized by its session (openai "
                "SDK, "
                "responses)"
            ),
            stored_agent,
            ["What is our refund policy?"],
            {"search_docs": _make_tool("no results")},
            lambda _: [search],
            turns=3,
        ),
        Scene(
            "cycle",
            "An agent in a cycle of five tools (anthropic SDK, messages)",
            messages_agent,
            ["Work on the open tickets."],
            {
                "list_tickets": _make_tool("#7 is unassigned"),
                "open_ticket": _make_tool("#7: printer on fire"),
                "find_user": _make_tool("ann"),
                "assign_ticket": _make_tool("error: ann is away"),
                "add_note": _make_tool("ok"),
            },
            lambda number: [rounds[number % 5]],
            turns=10,
        ),
        Scene(
            "landed",
            (
                "The first agent with a model that ignores notes: in the end, it has to answer "
                "without tools (openai SDK, chat)"
            ),
            chat_agent,
            ["Why does the app not start?"],
            {"read_file": _make_tool("error: no such file")},
            lambda _: [read],
            turns=6,
            refused=False,
            path="/steered",
            landing="The app does not start because a file is missing. I could not restore it.",
        ),
    ]


def _make_tool(*results: str) -> Callable[..., str]:
    """Make a tool that returns these results one by one, then repeats the last."""
    left = list(results)
    return lambda **_: left.pop(0) if len(left) > 1 else left[0]


class Screen:
    """Prints the timelines."""

    def __init__(self, stream: TextIO) -> None:
        """Use colors on a terminal, unless NO_COLOR is set."""
        self._stream = stream
        self._colours = stream.isatty() and not os.environ.get("NO_COLOR")

    def write(self, text: str = "", colour: str = "") -> None:
        """Print a line."""
        painted = f"\x1b[{colour}m{text}\x1b[0m" if colour and self._colours else text
        self._stream.write(painted + "\n")
        self._stream.flush()

    def turn(self, number: int, turn: Turn) -> None:
        """Print a turn: its calls and their results, or the final answer."""
        for place, step in enumerate(turn.steps):
            self.write(
                _row("" if place else str(number), _call(step), _short(step.result, _RESULT_WIDTH))
            )
        if not turn.steps:
            self.write(_row(str(number), "(answers)", _short(turn.text, _RESULT_WIDTH)))

    def note(self, note: str) -> None:
        """Print the gateway's note, which follows the newest result."""
        for line in textwrap.wrap(note, _TEXT_WIDTH):
            self.write(_row("", line, ""), _YELLOW)

    def refusal(self, number: int, refusal: Refusal) -> None:
        """Print the SDK's exception and the message for the model."""
        raised = (
            f"{type(refusal).__module__.partition('.')[0]}.{type(refusal).__name__}, status "
            f"{refusal.status_code}"
        )
        self.write(_row(str(number), "REFUSED", raised), _RED)
        for line in textwrap.wrap(message_of(refusal), _TEXT_WIDTH):
            self.write(_row("", line, ""), _RED)


def _row(turn: str, call: str, result: str) -> str:
    return f"  {turn:>4}  {call:<{_CALL_WIDTH}}  {result}".rstrip()


def _call(step: Step) -> str:
    said = ", ".join(f"{name}={json.dumps(value)}" for name, value in step.arguments.items())
    return _short(f"{step.tool}({said})", _CALL_WIDTH)


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scenes; returns the exit code."""
    scenes = _scenes()
    options = _parser([scene.name for scene in scenes]).parse_args(arguments)
    chosen = [scene for scene in scenes if options.scene in (None, scene.name)]
    try:
        good = asyncio.run(until_told(_show(options.policy, chosen, Screen(sys.stdout))))
    except LoopguardError as error:
        sys.stderr.write(f"demo-agent: {error}\n")
        return 1
    except BrokenPipeError:  # `make demo-agent | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 130 if good is None else int(not good)


def _parser(names: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(
            "Agents on the real SDKs, through the real Envoy and Loopguard, against a "
            "model that loops."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--policy",
        default=os.path.relpath(_POLICY),
        metavar="PATH",
        help="policy file or directory (default %(default)s)",
    )
    parser.add_argument("--scene", choices=names, help="run only this scene")
    return parser


async def _show(policy: str, scenes: Sequence[Scene], screen: Screen) -> bool:
    """Start all servers, run the scenes, stop all; returns whether all ended as expected."""
    with fake_model() as model:
        ports = {**free_ports(dict.fromkeys(PORTS, 0)), "upstream_port": model.port}
        async with guarded(policy, ports, quiet=True) as children:
            running = ", ".join(f"{child.name} (pid {child.process.pid})" for child in children)
            screen.write(f"Agent -> Envoy -> fake model. Running: {running}. Policy: {policy}.")
            endings = [
                await _play(scene, number, model, ports, children, screen)
                for number, scene in enumerate(scenes, 1)
            ]
    return _summary(scenes, endings, screen)


async def _play(  # noqa: PLR0913  # the scene and everything it uses
    scene: Scene,
    number: int,
    model: FakeModel,
    ports: Mapping[str, int],
    children: Sequence[Child],
    screen: Screen,
) -> Ending:
    """Run a scene and print each turn; raises DemoError if it fails."""
    import anthropic
    import openai

    screen.write(f"\n{number}. {scene.title}\n", _BOLD)
    screen.write(_row("turn", "the model asks for", "the tool says"), _DIM)
    user = f"{scene.name}-agent"
    model.scripts[user] = scene.script
    if scene.detour is not None:
        model.detours[user] = scene.detour
    if scene.landing:
        model.landings[user] = scene.landing
    before = _count_requests(ports)
    tasks = iter(scene.tasks)
    turns, refusal, answered = 0, None, True
    url = f"http://{HERE}:{ports['port']}{scene.path}"
    playing = islice(scene.agent(Job(url, user, scene.tasks, scene.tools)), scene.turns + _MORE)
    try:
        while True:
            if answered and (task := next(tasks, None)) is not None:
                screen.write(_row("", f"user: {task}", ""), _DIM)
            turn = await asyncio.to_thread(next, playing, None)
            if turn is None:
                break
            turns += 1
            if note := find_note(model.bodies[user]):
                screen.note(note)
            screen.turn(turns, turn)
            answered = not turn.steps
    except list_refusals() as error:
        refusal = error
        screen.refusal(turns + 1, error)
    except (openai.OpenAIError, anthropic.AnthropicError) as error:
        for child in children:
            child.check()
        raise DemoError(f"scene {scene.name}: {type(error).__name__}: {error}") from error
    ending = Ending(turns, refusal, _count_requests(ports) - before, model.asked[user])
    _verdict(scene, ending, screen)
    return ending


def _count_requests(ports: Mapping[str, int]) -> int:
    """The number of requests that Envoy has received."""
    connection = http.client.HTTPConnection(HERE, ports["envoy_admin_port"], timeout=60)
    try:
        connection.request("GET", "/stats?filter=^http.ingress.downstream_rq_total$")
        return int(connection.getresponse().read().rpartition(b":")[2])
    finally:
        connection.close()


def _verdict(scene: Scene, ending: Ending, screen: Screen) -> None:
    screen.write()
    if str(ending) == _describe_expected(scene):
        screen.write(f"  as expected: {ending}", _GREEN)
    else:
        screen.write(f"  NOT as expected: {ending}", _RED)
        screen.write(f"  expected:        {_describe_expected(scene)}", _RED)


def _summary(scenes: Sequence[Scene], endings: Sequence[Ending], screen: Screen) -> bool:
    screen.write("\nSummary\n", _BOLD)
    good = 0
    for scene, ending in zip(scenes, endings, strict=True):
        well = str(ending) == _describe_expected(scene)
        good += well
        screen.write(
            f"  {'ok ' if well else 'BAD'}  {scene.name:<10}  {ending}", _GREEN if well else _RED
        )
    screen.write(
        f"\n{good} of {len(scenes)} scenes ended as expected.",
        _GREEN if good == len(scenes) else _RED,
    )
    return good == len(scenes)


if __name__ == "__main__":
    sys.exit(main())
