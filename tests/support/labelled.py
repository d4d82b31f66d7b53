"""A small labelled set for `make precision`: honest repetition and loops, made here.

It shows the effect of a rule or a setting, and nothing about real traffic.

`python -m tests.support.labelled` prints it.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from random import Random
from typing import Any

from tests.support.evasions import EVASIONS, TURNS
from tests.support.families import HONEST, LOOP_TURNS, LOOPS, PROGRESS, UNTELLABLE
from tests.support.scratchpads import FORMS, Step, in_chat
from tests.support.turn_writers import SHAPES, STYLES, Did, Writer, as_text

# Variants of each family.
EACH = 5

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
_AGENT = {"name": "a", "version": "1", "tool_definitions": TOOLS}


def as_atif(turns: Sequence[Did]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"step_id": 1, "source": "user", "message": "Fix it."}]
    for number, turn in enumerate(turns, 2):
        calls = [
            {"tool_call_id": f"c{number}-{place}", "function_name": name, "arguments": given}
            for place, (name, given) in enumerate(turn.calls)
        ]
        step: dict[str, Any] = {
            "step_id": len(steps) + 1,
            "source": "agent",
            "message": turn.thought,
            "tool_calls": calls,
        }
        results = [
            {"source_call_id": f"c{number}-{place}", "content": result}
            for place, result in enumerate(turn.results)
        ]
        steps.append(step | {"observation": {"results": results}})
        if turn.user:
            steps.append({"step_id": len(steps) + 1, "source": "user", "message": turn.user})
    return {"schema_version": "ATIF-v1.7", "session_id": "s", "agent": _AGENT, "steps": steps}


def _as_react(turns: Sequence[Did]) -> dict[str, Any]:
    return as_text(turns, STYLES["react"])


FORMATS: dict[str, Writer] = {**SHAPES, "atif": as_atif, "text": _as_react}


def _write(place: int, turns: Sequence[Did], label: dict[str, Any], name: str) -> dict[str, Any]:
    """A conversation in the next format; in a text, each turn has an action."""
    kinds = [kind for kind in FORMATS if kind != "text" or all(turn.calls for turn in turns)]
    kind = kinds[place % len(kinds)]
    tools = {"tools": TOOLS} if kind not in ("text", "atif") else {}
    return {"id": name, "label": label, **FORMATS[kind](turns), **tools}


def _read(number: int) -> Did:
    result = f"{number} lines: {'abcdefghijklmnopqrstuvwxyz'[number]}"
    return Did((("read_file", {"path": f"a{number}.py"}),), (result,), "", f"No. {number}.", number)


def _show_window(size: int, done: Sequence[Did]) -> dict[str, Any]:
    body = FORMATS["chat"](done)
    head, tail = body["messages"][:2], body["messages"][2:]
    return body | {"messages": [*head, *tail[-size:]], "tools": TOOLS}


def _show_newest_results(done: Sequence[Did]) -> dict[str, Any]:
    return FORMATS["anthropic"](
        [*[turn._replace(results=("[cleared]",)) for turn in done[:-2]], *done[-2:]]
    )


def _keep_on_server(done: Sequence[Did]) -> dict[str, Any]:
    body = FORMATS["responses"](done[-1:])
    new = [item for item in body["input"] if item.get("type") == "function_call_output"]
    after = {"previous_response_id": f"r{len(done)}"} if done else {}
    return body | {"input": new or body["input"]} | after


def _summarize(done: Sequence[Did]) -> dict[str, Any]:
    """Every six turns, a summary by the user replaces the history."""
    first = len(done) - (len(done) % 6 or min(len(done), 6))
    body = FORMATS["chat"](done[first:])
    if first:
        told = f"Fix it. Summary of what you have done: {first} steps, without success."
        body["messages"][1] = {"role": "user", "content": told}
    return body | {"tools": TOOLS}


def _write_prompt(done: Sequence[Did]) -> dict[str, Any]:
    """The whole history in one prompt, of a form of its own."""
    steps = [
        f"You ran:\n{turn.calls[0][0]} {turn.calls[0][1]}\nThe computer said:\n{turn.results[0]}\n"
        for turn in done
    ]
    return in_chat("Fix it.\n" + "\n".join(steps) + "\nWhat do you run next?")


def _rebuild_prompt(done: Sequence[Did]) -> dict[str, Any]:
    """Only the newest step, as agents for web pages do."""
    newest = f"{done[-1].calls[0]}: {done[-1].results[0]}" if done else "none"
    return in_chat(f"Fix it.\nStep {len(done) + 1} of 30\nLast action and page: {newest}")


def _repeat_prompt(done: Sequence[Did]) -> dict[str, Any]:
    """A program without a history; its prompts are about the newest step."""
    path = done[-1].calls[0][1] if done else {}
    return in_chat(f"Name the colours of {path}, as a list (attempt {len(done)}).")


def _nest_prompt(done: Sequence[Did]) -> dict[str, Any]:
    """A parser that puts its complaint before the prompt."""
    complaints = [turn.results[0] + "! Please answer again.\n" for turn in done]
    return in_chat("".join(complaints) + "Name the colours of a lamp.")


def _write_steps(write: Callable[[Sequence[Step]], Any], done: Sequence[Did]) -> dict[str, Any]:
    body: dict[str, Any] = write(
        [Step(turn.calls[0][0], turn.calls[0][1]["path"], turn.results[0]) for turn in done]
    )
    return body


# How requests show what was done.
SHOWN: dict[str, Writer] = {
    "shown as: the last four messages": partial(_show_window, 4),
    "shown as: the last six messages": partial(_show_window, 6),
    "shown as: only the two newest results": _show_newest_results,
    "shown as: a history on the server": _keep_on_server,
    "shown as: a summary every six turns": _summarize,
    "shown as: one prompt with all steps": _write_prompt,
    "shown as: a prompt with the last step": _rebuild_prompt,
    "shown as: a prompt without a history": _repeat_prompt,
    "shown as: a prompt that nests itself": _nest_prompt,
    **{f"in one message: {name}": partial(_write_steps, write) for name, write in FORMS.items()},
}


def make_set(seed: int = 1, each: int = EACH) -> Iterator[dict[str, Any]]:
    """Conversations of each kind: `each` loops, or others, or both."""
    random = Random(seed)
    place = 0
    for name, family in {**HONEST, **PROGRESS, **UNTELLABLE}.items():
        for turns in random.sample(family(), each):
            place += 1
            honest = {"loop": False, "success": True, "kind": name}
            yield _write(place, turns, honest, f"{name} {place}")
    for name, family in LOOPS.items():
        for turns in random.sample(family(), each):
            place += 1
            begins = 1 + place % 4
            work = [_read(number) for number in range(1, begins)]
            label = {"loop": True, "begins": begins, "success": False, "kind": name}
            yield _write(place, [*work, *turns], label, f"{name} {place}")
    for name, write in EVASIONS.items():
        turns = [write(number)._replace(number=number + 1) for number in range(TURNS)]
        for _ in range(each):
            place += 1
            label = {"loop": True, "begins": 1, "success": False, "kind": f"varies: {name}"}
            yield _write(place, turns, label, f"{name} {place}")
    for name, show in SHOWN.items():
        for loop, number in product((True, False), range(each)):
            error = f"error: permission denied for role {'abcdefghij'[number]}"
            turns = [
                Did((("read_file", {"path": "a.py"}),), (error,), "", f"No. {n}.", n)
                if loop
                else _read(n)
                for n in range(1, LOOP_TURNS + 1)
            ]
            place += 1
            label = {"loop": loop, "success": not loop, "kind": name}
            yield {
                "id": f"{name} {place}",
                "label": label | ({"begins": 1} if loop else {}),
                "requests": [show(turns[:end]) for end in range(len(turns) + 1)],
            }


if __name__ == "__main__":
    for line in make_set():
        print(json.dumps(line))
