"""`make prompt-cache`: the part of each prompt that its provider can read from its cache.

Each client loops until it is refused, then again with a limit of three calls for its tool. What is
measured is what the provider received. A request before the first note is as the client sent it.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from fake_model import Call

from extproc.ext_proc.changes.steer import LANDING
from extproc.request.notes import OPENING
from tests.clients.catalog import CLIENTS, Client
from tests.clients.running import NotInstalled, install, opened, run

_ORDER: Final = (
    ("tools",),
    ("system", "instructions", "systemInstruction"),
    ("messages", "input", "contents"),
)
_MARK: Final = re.compile(r', "cache_control": \{[^{}]*\}')
_CALLS: Final = 3
_HEAD: Final = ("client", "prompt", "unchanged", "note", "next note", "landing", "tool removed")


class Prompt(NamedTuple):
    """A request as the provider reads it.

    Attributes:
        text: tools, system prompt and messages, in this order.
        marks: ends of what the client asks to cache; without any, the provider decides.
        tools: length of the tools.
        fixed: length of tools and system prompt.
        choice: what restricts the choice among tools.
    """

    text: str
    marks: Sequence[int]
    tools: int
    fixed: int
    choice: object


def read_prompt(body: Mapping[str, Any]) -> Prompt:
    parts = [json.dumps([body[name] for name in names if name in body]) for names in _ORDER]
    pieces = _MARK.split("".join(parts))
    ends = [len("".join(pieces[:number])) for number in range(1, len(pieces))]
    fixed = len(_MARK.sub("", parts[0] + parts[1]))
    # Only Anthropic's messages are cached apart for each choice.
    choice = body.get("tool_choice") if "system" in body else None
    return Prompt("".join(pieces), ends, len(parts[0]), fixed, choice)


def count_cached(prompt: Prompt, earlier: Sequence[Prompt]) -> int:
    """The longest beginning of a prompt that an earlier one has put into the cache."""
    found = 0
    for other in earlier:
        pairs = enumerate(zip(prompt.text, other.text, strict=False))
        shorter = min(len(prompt.text), len(other.text))
        length = next((number for number, (one, two) in pairs if one != two), shorter)
        if prompt.choice != other.choice:
            length = min(length, prompt.fixed)
        if other.marks:
            length = max([mark for mark in other.marks if mark <= length], default=0)
        found = max(found, length)
    return found


def list_costs(bodies: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, int, int]]:
    """By the action on a request, the length of its prompt and the cached part of it."""
    bodies = [body for body in bodies if body.get("tools")] or bodies  # titles have no tools
    prompts = [read_prompt(body) for body in bodies]
    for number, prompt in enumerate(prompts[2:], 2):
        before = prompts[number - 1].text
        action = "unchanged"
        if LANDING in prompt.text:
            action = "landing"
        elif OPENING in prompt.text:
            action = "next note" if OPENING in before else "note"
        elif prompt.tools < prompts[number - 1].tools:
            action = "tool removed"
        yield action, len(prompt.text), count_cached(prompt, prompts[:number])


def measure(client: Client) -> dict[str, tuple[int, int]]:
    commands = install(client)
    tool = [client.step.tool] if isinstance(client.step, Call) else []
    found: dict[str, tuple[int, int]] = {}
    for limits in (None, *({"max_calls_per_tool": {name: _CALLS}} for name in tool)):
        with opened(client, commands, limits) as zoo:
            run(zoo, "loop")
            for action, length, cached in list_costs(zoo.model.bodies):
                found.setdefault(action, (length, cached))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make prompt-cache", description=__doc__)
    names = [client.name for client in CLIENTS]
    parser.add_argument("--only", action="append", choices=names, help="repeatable")
    options = parser.parse_args(arguments)
    print(*("|".join(("", *row, "")) for row in (_HEAD, ["---"] * len(_HEAD))), sep="\n")
    for client in CLIENTS:
        if options.only and client.name not in options.only:
            continue
        try:
            found = measure(client)
        except NotInstalled as reason:
            print(f"{client.name} is not measured: {reason}", file=sys.stderr)
            continue
        length = found["unchanged"][0]
        cells = [
            f"{found[name][0] - found[name][1]:,} ({found[name][1] / found[name][0]:.1%})"
            if name in found
            else "-"
            for name in _HEAD[2:]
        ]
        print("|".join(("", client.name, f"{length:,}", *cells, "")), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
