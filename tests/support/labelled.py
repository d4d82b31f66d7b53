"""A small labelled set for `make precision`: honest repetition and loops, made here.

It shows the effect of a rule or a setting, and nothing about real traffic.

`python -m tests.support.labelled` prints it.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

from tests.support.evasions import EVASIONS, TURNS
from tests.support.families import HONEST, LOOP_TURNS, LOOPS, PROGRESS, UNTELLABLE, call
from tests.support.scratchpads import FORMS, Step, in_chat
from tests.support.turn_writers import SHAPES, STYLES, Did, Writer, as_text

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


# Conversations of each kind: one in each format.
EACH = len(FORMATS)


def _write(number: int, turns: Sequence[Did]) -> dict[str, Any]:
    """A conversation in the next format; in a text, each turn has an action."""
    kinds = [kind for kind in FORMATS if kind != "text" or all(turn.calls for turn in turns)]
    kind = kinds[number % len(kinds)]
    return {**FORMATS[kind](turns), **({"tools": TOOLS} if kind not in ("text", "atif") else {})}


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


def make_set(each: int = EACH) -> Iterator[dict[str, Any]]:
    """Conversations of each kind: `each` loops, or others, or both."""
    for kind, family in {**HONEST, **PROGRESS, **UNTELLABLE}.items():
        for number, turns in enumerate(Random(kind).sample(family(), each)):
            label = {"loop": False, "success": True, "kind": kind}
            yield {"label": label, **_write(number, turns)}
    for kind, family in LOOPS.items():
        for number, turns in enumerate(Random(kind).sample(family(), each)):
            work = [_read(n) for n in range(1, 1 + number % 4)]
            yield {"label": _blame(kind, len(work) + 1), **_write(number, [*work, *turns])}
    for name, write in EVASIONS.items():
        turns = [write(n)._replace(number=n + 1) for n in range(TURNS)]
        for number in range(each):
            yield {"label": _blame(f"varies: {name}"), **_write(number, turns)}
    for kind, show in SHOWN.items():
        for number in range(each):
            error = f"error: permission denied for role {number}"
            stuck = [call("read_file", error, n, path="a.py") for n in range(1, LOOP_TURNS + 1)]
            work = [_read(n) for n in range(1, LOOP_TURNS + 1)]
            for label, turns in (
                (_blame(kind), stuck),
                ({"loop": False, "success": True, "kind": kind}, work),
            ):
                yield {
                    "label": label,
                    "requests": [show(turns[:end]) for end in range(len(turns) + 1)],
                }


def _blame(kind: str, begins: int = 1) -> dict[str, Any]:
    return {"loop": True, "begins": begins, "success": False, "kind": kind}


if __name__ == "__main__":
    for line in make_set():
        print(json.dumps(line))
